/* MIG: the mode of a GPU, and the profiles of its GPU instances. */
#include "mig_standin.h"

#include <stdio.h>
#include <string.h>

typedef struct {
    unsigned id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount, decoderCount, encoderCount,
        jpegCount, ofaCount;
    unsigned long long memorySizeMB;
} nvmlGpuInstanceProfileInfo_t;

typedef struct {
    unsigned version, id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount, decoderCount,
        encoderCount, jpegCount, ofaCount;
    unsigned long long memorySizeMB;
    char name[96];
} nvmlGpuInstanceProfileInfo_v2_t;

_Static_assert(sizeof(nvmlGpuInstanceProfileInfo_t) == 48, "as in pynvml");
_Static_assert(sizeof(nvmlGpuInstanceProfileInfo_v2_t) == 152, "as in pynvml");

enum { PROFILE_COUNT = 18 }; /* NVML_GPU_INSTANCE_PROFILE_COUNT */

/* ---- the mode ---- */

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *mode, unsigned *pending) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    return end(result == NVML_SUCCESS ? give_pair(gpu->mig_current, gpu->mig_pending, mode, pending) : result);
}

bool has_instances(const struct gpu *gpu) {
    for (size_t id = 0; id < MAX_INSTANCES; id++)
        if (gpu->instances[id].exists)
            return true;
    return false;
}

/* The call itself succeeds also where the mode could not be activated: `activation` says why not. */
EXPORT nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned mode, nvmlReturn_t *activation) {
    struct state *written;
    struct gpu *gpu;
    nvmlReturn_t result = change_begin_gpu(device, &written, &gpu);
    if (result != NVML_SUCCESS)
        return change_end(result);
    if (gpu->mig_current == ABSENT)
        return change_end(NVML_ERROR_NOT_SUPPORTED);
    if (mode > 1 || activation == NULL)
        return change_end(NVML_ERROR_INVALID_ARGUMENT);
    struct gpu *changed = &written->gpus[device->gpu];
    changed->mig_pending = mode;
    *activation = NVML_SUCCESS;
    if (gpu->mig_current == mode)
        return change_end(NVML_SUCCESS);
    if (is_busy(gpu))
        *activation = NVML_ERROR_IN_USE;
    else if (gpu->mig_needs_reset == 1)
        *activation = NVML_ERROR_RESET_REQUIRED;
    else if (has_instances(gpu))
        *activation = NVML_ERROR_IN_USE;
    else
        changed->mig_current = mode;
    return change_end(NVML_SUCCESS);
}

/* "Returns zero if MIG is not supported or enabled" (NVML API Reference Guide). */
EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    bool possible = gpu->mig_current == 1 && gpu->mig_max_devices != ABSENT;
    return end(give_number(possible ? gpu->mig_max_devices : 0, count));
}

/* ---- profiles ---- */

const struct profile *profile_by_id(const struct gpu *gpu, unsigned id) {
    for (size_t i = 0; i < gpu->profiles_count; i++)
        if (gpu->profiles[i].id == id)
            return &gpu->profiles[i];
    return NULL;
}

static nvmlReturn_t find_profile(const struct gpu *gpu, unsigned enumeration, const struct profile **profile) {
    if (enumeration >= PROFILE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    *profile = state_find_profile(gpu, enumeration);
    return *profile == NULL ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

/* What both versions say of a profile; the second has it at other places. */
#define FIELDS_OF(profile) \
    .id = (unsigned)profile->id, \
    .sliceCount = (unsigned)profile->slices, \
    .instanceCount = (unsigned)profile->maximum, \
    .multiprocessorCount = (unsigned)profile->multiprocessors, \
    .copyEngineCount = (unsigned)profile->copy_engines, \
    .decoderCount = (unsigned)profile->decoders, \
    .encoderCount = (unsigned)profile->encoders, \
    .jpegCount = (unsigned)profile->jpegs, \
    .ofaCount = (unsigned)profile->ofas, \
    .memorySizeMB = profile->memory_mb

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(
    nvmlDevice_t device, unsigned enumeration, nvmlGpuInstanceProfileInfo_t *info) {
    struct gpu *gpu;
    const struct profile *profile;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS)
        result = info == NULL ? NVML_ERROR_INVALID_ARGUMENT : find_profile(gpu, enumeration, &profile);
    if (result != NVML_SUCCESS)
        return end(result);
    *info = (nvmlGpuInstanceProfileInfo_t){FIELDS_OF(profile)};
    return end(NVML_SUCCESS);
}

static nvmlReturn_t describe(const struct profile *profile, nvmlGpuInstanceProfileInfo_v2_t *info) {
    if (info->version != VERSION_OF(nvmlGpuInstanceProfileInfo_v2_t, 2))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    *info = (nvmlGpuInstanceProfileInfo_v2_t){.version = info->version, FIELDS_OF(profile)};
    snprintf(info->name, sizeof(info->name), "MIG %s", profile->name);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(
    nvmlDevice_t device, unsigned enumeration, nvmlGpuInstanceProfileInfo_v2_t *info) {
    struct gpu *gpu;
    const struct profile *profile;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS)
        result = info == NULL ? NVML_ERROR_INVALID_ARGUMENT : find_profile(gpu, enumeration, &profile);
    return end(result == NVML_SUCCESS ? describe(profile, info) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(
    nvmlDevice_t device, unsigned id, nvmlGpuInstanceProfileInfo_v2_t *info) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    const struct profile *profile = profile_by_id(gpu, id);
    if (info == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    return end(profile == NULL ? NVML_ERROR_NOT_SUPPORTED : describe(profile, info));
}

nvmlReturn_t begin_profile(nvmlDevice_t device, unsigned id, struct gpu **gpu, const struct profile **profile) {
    nvmlReturn_t result = begin_gpu(device, gpu);
    if (result != NVML_SUCCESS)
        return result;
    if ((*gpu)->mig_current != 1)
        return NVML_ERROR_NOT_SUPPORTED;
    *profile = profile_by_id(*gpu, id);
    return *profile == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}

nvmlReturn_t give_placements(const nvmlPlacement_t *found, unsigned length, nvmlPlacement_t *target, unsigned *count) {
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    unsigned room = *count;
    *count = length;
    if (target == NULL)
        return NVML_SUCCESS;
    if (room < length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(target, found, length * sizeof(*found));
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(
    nvmlDevice_t device, unsigned id, nvmlPlacement_t *placements, unsigned *count) {
    struct gpu *gpu;
    const struct profile *profile;
    nvmlReturn_t result = begin_profile(device, id, &gpu, &profile);
    if (result != NVML_SUCCESS)
        return end(result);
    nvmlPlacement_t found[MAX_STARTS];
    for (size_t i = 0; i < profile->starts_count; i++)
        found[i] = (nvmlPlacement_t){(unsigned)profile->starts[i], (unsigned)profile->size};
    return end(give_placements(found, (unsigned)profile->starts_count, placements, count));
}
SAME_AS(nvmlDeviceGetGpuInstancePossiblePlacements_v2)
nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(
    nvmlDevice_t device, unsigned id, nvmlPlacement_t *placements, unsigned *count);
