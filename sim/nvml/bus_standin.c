/* What a GPU says of its place in the machine: the PCIe link, the processors near it, and its modes. */
#include "nvml_standin.h"

#include <string.h>

/* ---- PCIe ---- */

GIVES_NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, pcie_generation)
GIVES_NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, pcie_generation_max)
GIVES_NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, pcie_generation_max)
GIVES_NUMBER(nvmlDeviceGetCurrPcieLinkWidth, pcie_width)
GIVES_NUMBER(nvmlDeviceGetMaxPcieLinkWidth, pcie_width_max)
GIVES_NUMBER(nvmlDeviceGetPcieReplayCounter, pcie_replays)

EXPORT nvmlReturn_t nvmlDeviceGetBusType(nvmlDevice_t device, unsigned *type) {
    enum { BUS_PCIE = 2 };
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    return end(result == NVML_SUCCESS ? give_number(BUS_PCIE, type) : result);
}

/* Megatransfers a second of one lane. */
EXPORT nvmlReturn_t nvmlDeviceGetPcieSpeed(nvmlDevice_t device, unsigned *speed) {
    static const uint64_t speeds[] = {ABSENT, 2500, 5000, 8000, 16000, 32000, 64000};
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    bool known = gpu->pcie_generation < sizeof(speeds) / sizeof(speeds[0]);
    return end(give_number(known ? speeds[gpu->pcie_generation] : ABSENT, speed));
}

/* The number NVML_PCIE_LINK_MAX_SPEED_*, which is the generation. */
EXPORT nvmlReturn_t nvmlDeviceGetPcieLinkMaxSpeed(nvmlDevice_t device, unsigned *speed) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    return end(result == NVML_SUCCESS ? give_number(gpu->pcie_generation_max, speed) : result);
}

/* ---- affinity ---- */

enum { SCOPES = 2, WORD = 8 * sizeof(unsigned long) }; /* NVML_AFFINITY_SCOPE_NODE, ..._SOCKET */

static void set_bit(unsigned long *set, unsigned size, uint64_t bit) {
    if (bit / WORD < size)
        set[bit / WORD] |= 1ul << bit % WORD;
}

static uint64_t next_number(const char **text) {
    uint64_t number = 0;
    for (; **text >= '0' && **text <= '9' && number < 1u << 20; (*text)++)
        number = number * 10 + (uint64_t)(**text - '0');
    return number;
}

/* A list as in sysfs, e.g. 0-55,112-167. */
static void set_processors(const char *list, unsigned size, unsigned long *set) {
    while (*list != '\0') {
        uint64_t first = next_number(&list), last = first;
        if (*list == '-') {
            list++;
            last = next_number(&list);
        }
        for (uint64_t bit = first; bit <= last && bit / WORD < size; bit++)
            set_bit(set, size, bit);
        if (*list != '\0')
            list++;
    }
}

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned size, unsigned long *set, unsigned scope) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    if (set == NULL || size == 0 || scope >= SCOPES)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    if (gpu->cpu_affinity[0] == '\0')
        return end(NVML_ERROR_NOT_SUPPORTED);
    memset(set, 0, size * sizeof(*set));
    set_processors(gpu->cpu_affinity, size, set);
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned size, unsigned long *set) {
    return nvmlDeviceGetCpuAffinityWithinScope(device, size, set, 0);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned size, unsigned long *set, unsigned scope) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    if (set == NULL || size == 0 || scope >= SCOPES)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    if (gpu->numa_node == ABSENT)
        return end(NVML_ERROR_NOT_SUPPORTED);
    memset(set, 0, size * sizeof(*set));
    set_bit(set, size, gpu->numa_node);
    return end(NVML_SUCCESS);
}

/* ---- modes ---- */

GIVES_NUMBER(nvmlDeviceGetPersistenceMode, persistence_mode)
GIVES_NUMBER(nvmlDeviceGetComputeMode, compute_mode)

/* Changes a number of a GPU which the state must hold already. */
static nvmlReturn_t set_mode(nvmlDevice_t device, size_t place, bool allowed, unsigned mode) {
    struct state *written;
    struct gpu *gpu;
    nvmlReturn_t result = change_begin_gpu(device, &written, &gpu);
    if (result != NVML_SUCCESS)
        return change_end(result);
    uint64_t *number = (uint64_t *)(void *)((char *)&written->gpus[device->gpu] + place);
    if (*number == ABSENT)
        return change_end(NVML_ERROR_NOT_SUPPORTED);
    if (!allowed)
        return change_end(NVML_ERROR_INVALID_ARGUMENT);
    *number = mode;
    return change_end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, unsigned mode) {
    return set_mode(device, offsetof(struct gpu, persistence_mode), mode <= 1, mode);
}

/* NVML_COMPUTEMODE_EXCLUSIVE_THREAD, 1, is gone from the driver. */
EXPORT nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, unsigned mode) {
    return set_mode(device, offsetof(struct gpu, compute_mode), mode <= 3 && mode != 1, mode);
}

/* No screen is simulated. */
EXPORT nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t device, unsigned *mode) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    return end(result == NVML_SUCCESS ? give_number(0, mode) : result);
}
SAME_AS(nvmlDeviceGetDisplayMode) nvmlReturn_t nvmlDeviceGetDisplayActive(nvmlDevice_t device, unsigned *active);

/* The machine is no guest of a hypervisor: NVML_GPU_VIRTUALIZATION_MODE_NONE. */
SAME_AS(nvmlDeviceGetDisplayMode) nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, unsigned *mode);
