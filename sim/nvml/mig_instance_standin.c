/* MIG: where the driver places GPU instances, and their life. */
#include "mig_standin.h"

#include <string.h>

typedef struct {
    nvmlDevice_t device;
    unsigned id, profileId;
    nvmlPlacement_t placement;
} nvmlGpuInstanceInfo_t;

_Static_assert(sizeof(nvmlGpuInstanceInfo_t) == 24, "as in pynvml");

/* ---- placement ---- */

static bool overlap(uint64_t start, uint64_t size, uint64_t other_start, uint64_t other_size) {
    return start < other_start + other_size && other_start < start + size;
}

static bool is_free(const struct gpu *gpu, uint64_t start, uint64_t size) {
    for (size_t id = 0; id < MAX_INSTANCES; id++) {
        const struct gpu_instance *instance = &gpu->instances[id];
        if (instance->exists && overlap(start, size, instance->start, instance->size))
            return false;
    }
    return true;
}

/* How many placements of larger profiles, possible until now, a placement would take away. */
static unsigned spoiled(const struct gpu *gpu, const struct profile *profile, uint64_t start) {
    unsigned count = 0;
    for (size_t i = 0; i < gpu->profiles_count; i++) {
        const struct profile *other = &gpu->profiles[i];
        if (other->size <= profile->size && other->slices <= profile->slices)
            continue;
        for (size_t n = 0; n < other->starts_count; n++)
            count += is_free(gpu, other->starts[n], other->size) &&
                     overlap(start, profile->size, other->starts[n], other->size);
    }
    return count;
}

/* The driver's choice, as far as public transcripts show it: the free place that spoils the fewest places of larger profiles,
 * of several the lowest. Returns ABSENT where there is none. */
static uint64_t choose_start(const struct gpu *gpu, const struct profile *profile) {
    uint64_t best = ABSENT;
    unsigned least = 0;
    for (size_t i = 0; i < profile->starts_count; i++) {
        uint64_t start = profile->starts[i];
        if (!is_free(gpu, start, profile->size))
            continue;
        unsigned cost = spoiled(gpu, profile, start);
        if (best == ABSENT || cost < least || (cost == least && start < best)) {
            best = start;
            least = cost;
        }
    }
    return best;
}

/* Ids count places as a heap does: one whole, two halves, four quarters ...; mirrored boards begin with the upper half. Where
 * slots are divided as on no card that is known, two places may come to one id: then it is the lowest that is free. */
static size_t instance_id(const struct gpu *gpu, const struct profile *profile, uint64_t start) {
    uint64_t places = gpu->mig_slots / profile->size;
    uint64_t place = start / profile->size;
    if (gpu->mig_mirrored == 1 && places > 1)
        place = (place + places / 2) % places;
    size_t id = (size_t)(places - 1 + place);
    if (id < MAX_INSTANCES && !gpu->instances[id].exists)
        return id;
    for (id = 0; gpu->instances[id].exists;)
        id++; /* there are fewer slots than ids */
    return id;
}

static unsigned existing(const struct gpu *gpu, const struct profile *profile) {
    unsigned count = 0;
    for (size_t id = 0; id < MAX_INSTANCES; id++)
        count += gpu->instances[id].exists && gpu->instances[id].profile == profile->enumeration;
    return count;
}

/* A GPU whose mode is off has room for none: nvidia-smi lists such a GPU with 0/7 (public transcripts). */
EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned id, unsigned *count) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS && gpu->mig_current == ABSENT)
        result = NVML_ERROR_NOT_SUPPORTED;
    if (result != NVML_SUCCESS)
        return end(result);
    const struct profile *profile = profile_by_id(gpu, id);
    if (profile == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    if (gpu->mig_current == 0)
        return end(give_number(0, count));
    uint64_t room = profile->maximum - existing(gpu, profile), found = 0, beyond = 0;
    for (size_t i = 0; i < profile->starts_count && found < room; i++)
        if (profile->starts[i] >= beyond && is_free(gpu, profile->starts[i], profile->size)) {
            beyond = profile->starts[i] + profile->size;
            found++;
        }
    return end(give_number(found, count));
}

/* ---- the life of a GPU instance ---- */

static struct gpu_instance_handle handles[MAX_GPUS][MAX_INSTANCES];

nvmlGpuInstance_t handle_of_gpu_instance(size_t gpu, size_t id) {
    handles[gpu][id] = (struct gpu_instance_handle){gpu, id, current.gpus[gpu].instances[id].serial};
    return &handles[gpu][id];
}

nvmlReturn_t check_gpu_instance(nvmlGpuInstance_t handle, struct gpu **gpu, struct gpu_instance **instance) {
    const char *place = (const char *)handle;
    if (place < (char *)handles || place >= (char *)(handles + MAX_GPUS) ||
        (size_t)(place - (char *)handles) % sizeof(*handle) != 0 || handle->gpu >= current.gpus_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *gpu = &current.gpus[handle->gpu];
    *instance = &(*gpu)->instances[handle->id];
    if ((*gpu)->lost == 1)
        return NVML_ERROR_GPU_IS_LOST;
    return (*instance)->exists && (*instance)->serial == handle->serial ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

/* Who draws on a screen or holds the whole GPU keeps instances from being made. */
static bool is_held(const struct gpu *gpu) {
    const struct process *found[MAX_PROCESSES];
    return gpu->held_by_module[0] != '\0' || live_processes(gpu, 'g', found) > 0;
}

static nvmlReturn_t create(nvmlDevice_t device, unsigned id, const nvmlPlacement_t *wanted, nvmlGpuInstance_t *made) {
    struct state *written;
    struct gpu *gpu;
    nvmlReturn_t result = change_begin_gpu(device, &written, &gpu);
    if (result != NVML_SUCCESS)
        return change_end(result);
    if (gpu->mig_current != 1)
        return change_end(NVML_ERROR_NOT_SUPPORTED);
    const struct profile *profile = profile_by_id(gpu, id);
    if (profile == NULL || made == NULL)
        return change_end(NVML_ERROR_INVALID_ARGUMENT);
    if (is_held(gpu))
        return change_end(NVML_ERROR_IN_USE);
    uint64_t start = wanted == NULL ? choose_start(gpu, profile) : wanted->start;
    bool legal = false;
    for (size_t i = 0; i < profile->starts_count; i++)
        legal = legal || profile->starts[i] == start;
    if (wanted != NULL && (!legal || wanted->size != profile->size))
        return change_end(NVML_ERROR_INVALID_ARGUMENT);
    if (start == ABSENT || !is_free(gpu, start, profile->size) || existing(gpu, profile) >= profile->maximum)
        return change_end(NVML_ERROR_INSUFFICIENT_RESOURCES);
    struct gpu_instance instance = {
        .exists = true, .profile = profile->enumeration, .start = start, .size = profile->size, .serial = ++written->serial};
    size_t number = instance_id(gpu, profile, start);
    written->gpus[device->gpu].instances[number] = instance;
    gpu->instances[number] = instance;
    *made = handle_of_gpu_instance(device->gpu, number);
    return change_end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *made) {
    return create(device, id, NULL, made);
}

EXPORT nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(
    nvmlDevice_t device, unsigned id, const nvmlPlacement_t *placement, nvmlGpuInstance_t *made) {
    static const nvmlPlacement_t nowhere = {UINT32_MAX, 0};
    return create(device, id, placement == NULL ? &nowhere : placement, made);
}

EXPORT nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t handle) {
    struct state *written;
    struct gpu *gpu;
    struct gpu_instance *instance;
    nvmlReturn_t result = change_begin(&written);
    if (result == NVML_SUCCESS)
        result = check_gpu_instance(handle, &gpu, &instance);
    if (result != NVML_SUCCESS)
        return change_end(result);
    for (size_t i = 0; i < MAX_COMPUTE; i++)
        if (instance->compute[i].exists)
            return change_end(NVML_ERROR_IN_USE);
    memset(&written->gpus[handle->gpu].instances[handle->id], 0, sizeof(*instance));
    return change_end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instances, unsigned *count) {
    struct gpu *gpu;
    const struct profile *profile;
    nvmlReturn_t result = begin_profile(device, id, &gpu, &profile);
    if (result != NVML_SUCCESS)
        return end(result);
    if (instances == NULL || count == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    *count = 0;
    for (size_t n = 0; n < MAX_INSTANCES; n++)
        if (gpu->instances[n].exists && gpu->instances[n].profile == profile->enumeration)
            instances[(*count)++] = handle_of_gpu_instance(device->gpu, n);
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    if (gpu->mig_current != 1)
        return end(NVML_ERROR_NOT_SUPPORTED);
    if (instance == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    if (id >= MAX_INSTANCES || !gpu->instances[id].exists)
        return end(NVML_ERROR_NOT_FOUND);
    *instance = handle_of_gpu_instance(device->gpu, id);
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t handle, nvmlGpuInstanceInfo_t *info) {
    struct gpu *gpu;
    struct gpu_instance *instance;
    nvmlReturn_t result = begin();
    if (result == NVML_SUCCESS)
        result = check_gpu_instance(handle, &gpu, &instance);
    if (result != NVML_SUCCESS)
        return end(result);
    if (info == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    *info = (nvmlGpuInstanceInfo_t){
        .device = handle_of_gpu(handle->gpu),
        .id = (unsigned)handle->id,
        .profileId = (unsigned)state_find_profile(gpu, instance->profile)->id,
        .placement = {(unsigned)instance->start, (unsigned)instance->size},
    };
    return end(NVML_SUCCESS);
}
