/* MIG: compute instances, and the MIG devices that they make up. */
#include "mig_standin.h"

#include <stdio.h>
#include <string.h>

typedef struct {
    unsigned id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount,
        sharedJpegCount, sharedOfaCount;
} nvmlComputeInstanceProfileInfo_t;

typedef struct {
    unsigned version, id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount,
        sharedEncoderCount, sharedJpegCount, sharedOfaCount;
    char name[96];
} nvmlComputeInstanceProfileInfo_v2_t;

typedef struct {
    nvmlDevice_t device;
    nvmlGpuInstance_t gpuInstance;
    unsigned id, profileId;
    nvmlPlacement_t placement;
} nvmlComputeInstanceInfo_t;

_Static_assert(sizeof(nvmlComputeInstanceProfileInfo_t) == 36, "as in pynvml");
_Static_assert(sizeof(nvmlComputeInstanceProfileInfo_v2_t) == 136, "as in pynvml");
_Static_assert(sizeof(nvmlComputeInstanceInfo_t) == 32, "as in pynvml");

enum { PROFILE_COUNT = 9, ENGINE_SHARED = 0 }; /* NVML_COMPUTE_INSTANCE_PROFILE_COUNT, ..._ENGINE_PROFILE_SHARED */

/* A handle of a compute instance; it goes stale when the instance is destroyed. */
struct compute_handle {
    size_t gpu, parent, id;
    uint64_t serial;
};
typedef struct compute_handle *nvmlComputeInstance_t;

static struct compute_handle handles[MAX_GPUS][MAX_INSTANCES][MAX_COMPUTE];

static nvmlComputeInstance_t handle_of_compute(size_t gpu, size_t parent, size_t id) {
    uint64_t serial = current.gpus[gpu].instances[parent].compute[id].serial;
    handles[gpu][parent][id] = (struct compute_handle){gpu, parent, id, serial};
    return &handles[gpu][parent][id];
}

static nvmlReturn_t check_compute(
    nvmlComputeInstance_t handle, struct gpu **gpu, struct gpu_instance **parent, struct compute_instance **compute) {
    const char *place = (const char *)handle;
    if (place < (char *)handles || place >= (char *)(handles + MAX_GPUS) ||
        (size_t)(place - (char *)handles) % sizeof(*handle) != 0 || handle->gpu >= current.gpus_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *gpu = &current.gpus[handle->gpu];
    *parent = &(*gpu)->instances[handle->parent];
    *compute = &(*parent)->compute[handle->id];
    if ((*gpu)->lost == 1)
        return NVML_ERROR_GPU_IS_LOST;
    bool alive = (*parent)->exists && (*compute)->exists && (*compute)->serial == handle->serial;
    return alive ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static nvmlReturn_t begin_parent(nvmlGpuInstance_t handle, struct gpu **gpu, struct gpu_instance **parent) {
    nvmlReturn_t result = begin();
    return result == NVML_SUCCESS ? check_gpu_instance(handle, gpu, parent) : result;
}

/* ---- profiles: which parts a GPU instance of so many slices is divided into ---- */

/* Compute instances begin at multiples of this many slices, so that 7 slices hold 3 of two and 2 of three. */
static uint64_t step_of(uint64_t slices) { return slices == 3 ? 4 : slices; }

static bool divides(uint64_t parent, uint64_t slices) {
    bool part = slices <= 4 && slices < parent && !(parent == 4 && slices == 3);
    return part || slices == parent;
}

static uint64_t parts_of(uint64_t parent, uint64_t slices) {
    uint64_t count = 0;
    for (uint64_t start = 0; start + slices <= parent; start += step_of(slices))
        count++;
    return count;
}

/* The parts of a whole profile; only the plain numbering, not the variants with media engines. */
static nvmlReturn_t find_slices(const struct profile *parent, unsigned profile, unsigned engine, uint64_t *slices) {
    if (profile >= PROFILE_COUNT || engine != ENGINE_SHARED)
        return NVML_ERROR_INVALID_ARGUMENT;
    *slices = state_compute_slices(profile);
    return profile < 7 && divides(parent->slices, *slices) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlComputeInstanceProfileInfo_v2_t describe(const struct profile *parent, unsigned profile, uint64_t slices) {
    nvmlComputeInstanceProfileInfo_v2_t info = {
        .id = profile,
        .sliceCount = (unsigned)slices,
        .instanceCount = (unsigned)parts_of(parent->slices, slices),
        .multiprocessorCount = (unsigned)(parent->multiprocessors * slices / parent->slices),
        .sharedCopyEngineCount = (unsigned)parent->copy_engines,
        .sharedDecoderCount = (unsigned)parent->decoders,
        .sharedEncoderCount = (unsigned)parent->encoders,
        .sharedJpegCount = (unsigned)parent->jpegs,
        .sharedOfaCount = (unsigned)parent->ofas,
    };
    if (slices == parent->slices)
        snprintf(info.name, sizeof(info.name), "MIG %s", parent->name);
    else
        snprintf(info.name, sizeof(info.name), "MIG %uc.%s", (unsigned)slices, parent->name);
    return info;
}

/* Begins a call about the parts of one kind that a GPU instance can be divided into. */
static nvmlReturn_t begin_part(
    nvmlGpuInstance_t handle, unsigned profile, unsigned engine, struct gpu_instance **parent, const struct profile **of_parent,
    uint64_t *slices) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_parent(handle, &gpu, parent);
    if (result != NVML_SUCCESS)
        return result;
    *of_parent = state_find_profile(gpu, (*parent)->profile);
    return find_slices(*of_parent, profile, engine, slices);
}

static nvmlReturn_t profile_info(
    nvmlGpuInstance_t handle, unsigned profile, unsigned engine, nvmlComputeInstanceProfileInfo_v2_t *info) {
    struct gpu_instance *parent;
    const struct profile *of_parent;
    uint64_t slices;
    nvmlReturn_t result = begin_part(handle, profile, engine, &parent, &of_parent, &slices);
    if (result == NVML_SUCCESS)
        *info = describe(of_parent, profile, slices);
    return result;
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(
    nvmlGpuInstance_t handle, unsigned profile, unsigned engine, nvmlComputeInstanceProfileInfo_t *info) {
    nvmlComputeInstanceProfileInfo_v2_t found;
    nvmlReturn_t result = profile_info(handle, profile, engine, &found);
    if (result == NVML_SUCCESS && info == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        memcpy(info, &found.id, sizeof(*info)); /* version 2 is version 1 between a version and a name */
    return end(result);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(
    nvmlGpuInstance_t handle, unsigned profile, unsigned engine, nvmlComputeInstanceProfileInfo_v2_t *info) {
    nvmlComputeInstanceProfileInfo_v2_t found;
    nvmlReturn_t result = profile_info(handle, profile, engine, &found);
    if (result == NVML_SUCCESS && info == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && info->version != VERSION_OF(nvmlComputeInstanceProfileInfo_v2_t, 2))
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (result == NVML_SUCCESS) {
        found.version = info->version;
        *info = found;
    }
    return end(result);
}

/* ---- placement ---- */

static bool is_free(const struct gpu_instance *parent, uint64_t start, uint64_t size) {
    for (size_t i = 0; i < MAX_COMPUTE; i++) {
        const struct compute_instance *compute = &parent->compute[i];
        if (compute->exists && start < compute->start + compute->size && compute->start < start + size)
            return false;
    }
    return true;
}

static unsigned list_starts(
    const struct profile *profile, const struct gpu_instance *parent, uint64_t slices, nvmlPlacement_t *found) {
    unsigned count = 0;
    for (uint64_t start = 0; start + slices <= profile->slices; start += step_of(slices))
        if (parent == NULL || is_free(parent, start, slices))
            found[count++] = (nvmlPlacement_t){(unsigned)start, (unsigned)slices};
    return count;
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(
    nvmlGpuInstance_t handle, unsigned profile, nvmlPlacement_t *placements, unsigned *count) {
    struct gpu_instance *parent;
    const struct profile *of_parent;
    uint64_t slices;
    nvmlPlacement_t found[MAX_COMPUTE];
    nvmlReturn_t result = begin_part(handle, profile, ENGINE_SHARED, &parent, &of_parent, &slices);
    if (result != NVML_SUCCESS)
        return end(result);
    return end(give_placements(found, list_starts(of_parent, NULL, slices, found), placements, count));
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(
    nvmlGpuInstance_t handle, unsigned profile, unsigned *count) {
    struct gpu_instance *parent;
    const struct profile *of_parent;
    uint64_t slices;
    nvmlPlacement_t found[MAX_COMPUTE];
    nvmlReturn_t result = begin_part(handle, profile, ENGINE_SHARED, &parent, &of_parent, &slices);
    if (result != NVML_SUCCESS)
        return end(result);
    return end(give_number(list_starts(of_parent, parent, slices, found), count));
}

/* ---- the life of a compute instance ---- */

static nvmlReturn_t choose_start(
    const struct profile *of_parent, const struct gpu_instance *parent, uint64_t slices, const nvmlPlacement_t *wanted,
    uint64_t *start) {
    nvmlPlacement_t found[MAX_COMPUTE];
    unsigned all = list_starts(of_parent, NULL, slices, found);
    bool legal = wanted == NULL;
    for (unsigned i = 0; i < all; i++)
        legal = legal || (found[i].start == wanted->start && found[i].size == wanted->size);
    if (!legal)
        return NVML_ERROR_INVALID_ARGUMENT;
    unsigned left = list_starts(of_parent, parent, slices, found);
    for (unsigned i = 0; i < left; i++)
        if (wanted == NULL || found[i].start == wanted->start) {
            *start = found[i].start;
            return NVML_SUCCESS;
        }
    return NVML_ERROR_INSUFFICIENT_RESOURCES;
}

static nvmlReturn_t create(
    nvmlGpuInstance_t handle, unsigned profile, const nvmlPlacement_t *wanted, nvmlComputeInstance_t *made) {
    struct state *written;
    struct gpu *gpu;
    struct gpu_instance *parent;
    uint64_t slices, start;
    nvmlReturn_t result = change_begin(&written);
    if (result == NVML_SUCCESS)
        result = made == NULL ? NVML_ERROR_INVALID_ARGUMENT : check_gpu_instance(handle, &gpu, &parent);
    const struct profile *of_parent = result == NVML_SUCCESS ? state_find_profile(gpu, parent->profile) : NULL;
    if (result == NVML_SUCCESS)
        result = find_slices(of_parent, profile, ENGINE_SHARED, &slices);
    if (result == NVML_SUCCESS)
        result = choose_start(of_parent, parent, slices, wanted, &start);
    if (result != NVML_SUCCESS)
        return change_end(result);
    size_t id = 0;
    while (parent->compute[id].exists)
        id++;
    struct compute_instance compute = {
        .exists = true, .profile = profile, .start = start, .size = slices, .serial = ++written->serial};
    written->gpus[handle->gpu].instances[handle->id].compute[id] = compute;
    parent->compute[id] = compute;
    *made = handle_of_compute(handle->gpu, handle->id, id);
    return change_end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(
    nvmlGpuInstance_t handle, unsigned profile, nvmlComputeInstance_t *made) {
    return create(handle, profile, NULL, made);
}

EXPORT nvmlReturn_t nvmlGpuInstanceCreateComputeInstanceWithPlacement(
    nvmlGpuInstance_t handle, unsigned profile, const nvmlPlacement_t *placement, nvmlComputeInstance_t *made) {
    static const nvmlPlacement_t nowhere = {UINT32_MAX, 0};
    return create(handle, profile, placement == NULL ? &nowhere : placement, made);
}

EXPORT nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t handle) {
    struct state *written;
    struct gpu *gpu;
    struct gpu_instance *parent;
    struct compute_instance *compute;
    nvmlReturn_t result = change_begin(&written);
    if (result == NVML_SUCCESS)
        result = check_compute(handle, &gpu, &parent, &compute);
    if (result != NVML_SUCCESS)
        return change_end(result);
    const struct process *found[MAX_PROCESSES];
    size_t count = live_processes(gpu, 0, found);
    for (size_t i = 0; i < count; i++)
        if (found[i]->gpu_instance == handle->parent && found[i]->compute_instance == handle->id)
            return change_end(NVML_ERROR_IN_USE);
    memset(&written->gpus[handle->gpu].instances[handle->parent].compute[handle->id], 0, sizeof(*compute));
    return change_end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstances(
    nvmlGpuInstance_t handle, unsigned profile, nvmlComputeInstance_t *instances, unsigned *count) {
    struct gpu *gpu;
    struct gpu_instance *parent;
    nvmlReturn_t result = begin_parent(handle, &gpu, &parent);
    if (result != NVML_SUCCESS)
        return end(result);
    if (instances == NULL || count == NULL || profile >= PROFILE_COUNT)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    *count = 0;
    for (size_t i = 0; i < MAX_COMPUTE; i++)
        if (parent->compute[i].exists && parent->compute[i].profile == profile)
            instances[(*count)++] = handle_of_compute(handle->gpu, handle->id, i);
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(
    nvmlGpuInstance_t handle, unsigned id, nvmlComputeInstance_t *instance) {
    struct gpu *gpu;
    struct gpu_instance *parent;
    nvmlReturn_t result = begin_parent(handle, &gpu, &parent);
    if (result != NVML_SUCCESS)
        return end(result);
    if (instance == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    if (id >= MAX_COMPUTE || !parent->compute[id].exists)
        return end(NVML_ERROR_NOT_FOUND);
    *instance = handle_of_compute(handle->gpu, handle->id, id);
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t handle, nvmlComputeInstanceInfo_t *info) {
    struct gpu *gpu;
    struct gpu_instance *parent;
    struct compute_instance *compute;
    nvmlReturn_t result = begin();
    if (result == NVML_SUCCESS)
        result = info == NULL ? NVML_ERROR_INVALID_ARGUMENT : check_compute(handle, &gpu, &parent, &compute);
    if (result != NVML_SUCCESS)
        return end(result);
    *info = (nvmlComputeInstanceInfo_t){
        .device = handle_of_gpu(handle->gpu),
        .gpuInstance = handle_of_gpu_instance(handle->gpu, handle->parent),
        .id = (unsigned)handle->id,
        .profileId = (unsigned)compute->profile,
        .placement = {(unsigned)compute->start, (unsigned)compute->size},
    };
    return end(NVML_SUCCESS);
}
SAME_AS(nvmlComputeInstanceGetInfo_v2)
nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t handle, nvmlComputeInstanceInfo_t *info);
