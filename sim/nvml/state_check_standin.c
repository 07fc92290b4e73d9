/* What must hold between the values of a state file. */
#include "state_internal_standin.h"

static const char *check_memory(const struct gpu *gpu, size_t index) {
    uint64_t left = gpu->memory_total_bytes;
    uint64_t reserved = gpu->memory_reserved_bytes == ABSENT ? 0 : gpu->memory_reserved_bytes;
    if (reserved > left || gpu->memory_used_bytes > left - reserved)
        return state_wrong("gpu %zu: more memory is reserved and used than there is", index);
    left -= reserved + gpu->memory_used_bytes;
    for (size_t i = 0; i < gpu->processes_count; i++) {
        if (gpu->processes[i].used_bytes > left)
            return state_wrong("gpu %zu: its processes use more memory than there is", index);
        left -= gpu->processes[i].used_bytes;
    }
    return NULL;
}

/* Whether the instance stands where its profile may, and on nothing that another holds. */
static bool stands_well(const struct gpu *gpu, size_t id, const struct profile *profile) {
    const struct gpu_instance *instance = &gpu->instances[id];
    bool legal = false;
    for (size_t i = 0; i < profile->starts_count; i++)
        legal = legal || profile->starts[i] == instance->start;
    for (size_t other = 0; other < id; other++) {
        const struct gpu_instance *that = &gpu->instances[other];
        if (that->exists && instance->start < that->start + that->size && that->start < instance->start + profile->size)
            return false;
    }
    return legal;
}

static const char *check_profiles(const struct gpu *gpu, size_t index) {
    for (size_t i = 0; i < gpu->profiles_count; i++) {
        const struct profile *profile = &gpu->profiles[i];
        if (profile->slices > MAX_COMPUTE)
            return state_wrong("gpu %zu: profile %s has more than %d slices", index, profile->name, MAX_COMPUTE);
        for (size_t n = 0; n < profile->starts_count; n++)
            if (profile->starts[n] + profile->size > gpu->mig_slots)
                return state_wrong("gpu %zu: profile %s goes beyond the slots, mig_slots", index, profile->name);
    }
    return NULL;
}

/* Whether a compute instance lies within its GPU instance, and on nothing that another holds. */
static bool fits(const struct gpu_instance *instance, size_t part, uint64_t slices) {
    const struct compute_instance *compute = &instance->compute[part];
    for (size_t other = 0; other < part; other++) {
        const struct compute_instance *that = &instance->compute[other];
        if (that->exists && compute->start < that->start + that->size && that->start < compute->start + compute->size)
            return false;
    }
    return compute->size > 0 && compute->start + compute->size <= slices;
}

static const char *check_mig(struct gpu *gpu, size_t index) {
    bool told = gpu->mig_current <= 1 && gpu->mig_pending <= 1 && gpu->mig_slots >= 1 && gpu->mig_slots <= MAX_STARTS;
    if (gpu->profiles_count > 0 && !told)
        return state_wrong("gpu %zu: a GPU with MIG profiles needs mig_current, mig_pending and mig_slots", index);
    const char *problem = check_profiles(gpu, index);
    for (size_t id = 0; id < MAX_INSTANCES && problem == NULL; id++) {
        struct gpu_instance *instance = &gpu->instances[id];
        if (!instance->exists)
            continue;
        const struct profile *profile = state_find_profile(gpu, instance->profile);
        if (gpu->mig_current != 1 || profile == NULL || !stands_well(gpu, id, profile))
            return state_wrong("gpu %zu: GPU instance %zu cannot be where the file says", index, id);
        instance->size = profile->size;
        for (size_t i = 0; i < MAX_COMPUTE; i++) {
            struct compute_instance *compute = &instance->compute[i];
            compute->size = compute->exists ? state_compute_slices(compute->profile) : 0;
            if (compute->exists && !fits(instance, i, profile->slices))
                return state_wrong("gpu %zu: compute instance %zu of GPU instance %zu does not fit", index, i, id);
        }
    }
    return problem;
}

/* 0, 1 or not there, and there alone where there are profiles. */
static const char *check_mode(const struct gpu *gpu, size_t index) {
    const uint64_t modes[] = {gpu->mig_current, gpu->mig_pending};
    for (size_t i = 0; i < COUNT(modes); i++)
        if (modes[i] != ABSENT && (modes[i] > 1 || gpu->profiles_count == 0))
            return state_wrong("gpu %zu: mig_current and mig_pending are 0 or 1, on a GPU with MIG profiles", index);
    return NULL;
}

static const char *check_link(const struct gpu *gpu, size_t index) {
    static const char *const names[] = {"width", "generation"};
    const uint64_t now[] = {gpu->pcie_width, gpu->pcie_generation};
    const uint64_t most[] = {gpu->pcie_width_max, gpu->pcie_generation_max};
    for (size_t i = 0; i < COUNT(now); i++)
        if (now[i] == 0 || (now[i] != ABSENT && most[i] != ABSENT && now[i] > most[i]))
            return state_wrong("gpu %zu: pcie_%s is from 1 to pcie_%s_max", index, names[i], names[i]);
    return NULL;
}

static const char *check_gpu(struct gpu *gpu, size_t index) {
    if (gpu->name[0] == '\0' || gpu->uuid[0] == '\0' || gpu->memory_total_bytes == ABSENT || gpu->pci_device_id == ABSENT)
        return state_wrong("gpu %zu: name, uuid, pci_device_id and memory_total_bytes are needed", index);
    if (state_parse_address(gpu->pci_address, &gpu->domain, &gpu->bus, &gpu->device) != 0)
        return state_wrong("gpu %zu: pci_address = %s is no PCI address", index, gpu->pci_address);
    const char *problem = check_memory(gpu, index);
    if (problem == NULL)
        problem = check_link(gpu, index);
    if (problem == NULL)
        problem = check_mode(gpu, index);
    return problem == NULL ? check_mig(gpu, index) : problem;
}

const char *state_check(struct state *state) {
    if (state->driver_version[0] == '\0' || state->nvml_version[0] == '\0' || state->cuda_driver_version == ABSENT)
        return state_wrong("[system] needs driver_version, nvml_version and cuda_driver_version");
    if (state->serial == ABSENT || state->events_made == ABSENT || state->init_error == ABSENT || state->root_only == ABSENT)
        return state_wrong("[system] serial, events_made, init_error and root_only are numbers, never -");
    for (size_t i = 0; i < state->gpus_count; i++) {
        const char *problem = check_gpu(&state->gpus[i], i);
        if (problem != NULL)
            return problem;
    }
    return NULL;
}
