/* MIG devices: what CUDA is given, one for each compute instance. */
#include "nvml_standin.h"

#include <stdio.h>
#include <string.h>

typedef struct {
    unsigned multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount,
        gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

_Static_assert(sizeof(nvmlDeviceAttributes_t) == 40, "as in pynvml");

/* They are counted in the order of their GPU instance's id, then of their own. */
EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    if (mig == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    if (gpu->mig_current == ABSENT)
        return end(NVML_ERROR_NOT_SUPPORTED);
    if (gpu->mig_current == 1 && index >= gpu->mig_max_devices)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    unsigned number = 0;
    for (size_t id = 0; id < MAX_INSTANCES; id++)
        for (size_t part = 0; part < MAX_COMPUTE; part++)
            if (gpu->instances[id].exists && gpu->instances[id].compute[part].exists && number++ == index) {
                *mig = handle_of_mig(device->gpu, id, part);
                return end(NVML_SUCCESS);
            }
    return end(NVML_ERROR_NOT_FOUND);
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_mig) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    return end(result == NVML_SUCCESS ? give_number(is_mig_device(device), is_mig) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    return end(result == NVML_SUCCESS ? give_number(device->gpu_instance, id) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    return end(result == NVML_SUCCESS ? give_number(device->compute_instance, id) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *parent) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    if (parent == NULL || !is_mig_device(device))
        return end(NVML_ERROR_INVALID_ARGUMENT);
    *parent = handle_of_gpu(device->gpu);
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    if (attributes == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    if (!is_mig_device(device))
        return end(NVML_ERROR_NOT_SUPPORTED);
    const struct gpu_instance *instance = &gpu->instances[device->gpu_instance];
    const struct profile *profile = state_find_profile(gpu, instance->profile);
    uint64_t slices = instance->compute[device->compute_instance].size;
    *attributes = (nvmlDeviceAttributes_t){
        .multiprocessorCount = (unsigned)(profile->multiprocessors * slices / profile->slices),
        .sharedCopyEngineCount = (unsigned)profile->copy_engines,
        .sharedDecoderCount = (unsigned)profile->decoders,
        .sharedEncoderCount = (unsigned)profile->encoders,
        .sharedJpegCount = (unsigned)profile->jpegs,
        .sharedOfaCount = (unsigned)profile->ofas,
        .gpuInstanceSliceCount = (unsigned)profile->slices,
        .computeInstanceSliceCount = (unsigned)slices,
        .memorySizeMB = profile->memory_mb,
    };
    return end(NVML_SUCCESS);
}
SAME_AS(nvmlDeviceGetAttributes_v2) nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes);

static uint64_t mix(uint64_t hash, uint64_t value) {
    for (int i = 0; i < 8; i++, value >>= 8)
        hash = (hash ^ (value & 0xff)) * 0x100000001b3; /* FNV-1a */
    return hash ^ hash >> 29;
}

void write_mig_uuid(const struct device *device, char text[48]) {
    const struct gpu *gpu = &current.gpus[device->gpu];
    const struct gpu_instance *instance = &gpu->instances[device->gpu_instance];
    uint64_t halves[2] = {0xcbf29ce484222325, 0x9e3779b97f4a7c15};
    for (size_t i = 0; i < 2; i++) {
        for (const char *c = gpu->uuid; *c != '\0'; c++)
            halves[i] = mix(halves[i], (unsigned char)*c);
        halves[i] = mix(halves[i], device->gpu_instance);
        halves[i] = mix(halves[i], instance->profile);
        halves[i] = mix(halves[i], device->compute_instance);
        halves[i] = mix(halves[i], instance->compute[device->compute_instance].profile);
    }
    snprintf(
        text, 48, "MIG-%08x-%04x-5%03x-%04x-%012llx", (unsigned)(halves[0] >> 32), (unsigned)(halves[0] >> 16 & 0xffff),
        (unsigned)(halves[0] & 0xfff), (unsigned)(0x8000 | (halves[1] >> 48 & 0x3fff)),
        (unsigned long long)(halves[1] & 0xffffffffffff));
}
