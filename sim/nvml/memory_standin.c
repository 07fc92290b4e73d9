/* Memory, and the processes that use it. */
#include "nvml_standin.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlBAR1Memory_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
    unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_v1_t;

typedef struct {
    unsigned version, mode, numProcArrayEntries;
    nvmlProcessDetail_v1_t *procArray;
} nvmlProcessDetailList_t;

_Static_assert(sizeof(nvmlMemory_t) == 24, "as in pynvml");
_Static_assert(sizeof(nvmlMemory_v2_t) == 40, "as in pynvml");
_Static_assert(sizeof(nvmlBAR1Memory_t) == 24, "as in pynvml");
_Static_assert(sizeof(nvmlProcessInfo_t) == 24, "as in pynvml");
_Static_assert(sizeof(nvmlProcessDetail_v1_t) == 32, "as in pynvml");
_Static_assert(sizeof(nvmlProcessDetailList_t) == 24, "as in pynvml");

#define MIB (1024ull * 1024)

static uint64_t reserved_bytes(const struct gpu *gpu) {
    return gpu->memory_reserved_bytes == ABSENT ? 0 : gpu->memory_reserved_bytes;
}

/* ---- what processes use now ---- */

/* What the processes of one GPU instance, or those of no instance, may use together. */
static uint64_t room_of(const struct gpu *gpu, uint64_t instance) {
    if (instance == ABSENT)
        return gpu->memory_total_bytes - reserved_bytes(gpu) - gpu->memory_used_bytes;
    const struct profile *profile =
        gpu->instances[instance].exists ? state_find_profile(gpu, gpu->instances[instance].profile) : NULL;
    return profile == NULL ? 0 : profile->memory_mb * MIB;
}

size_t processes_now(const struct gpu *gpu, struct process_now found[MAX_PROCESSES]) {
    const struct process *alive[MAX_PROCESSES];
    size_t count = live_processes(gpu, 0, alive);
    uint64_t now = count == 0 ? 0 : (uint64_t)time(NULL);
    for (size_t i = 0; i < count; i++) {
        uint64_t others = 0, room = room_of(gpu, alive[i]->gpu_instance), wanted = process_bytes(alive[i], now);
        for (size_t n = 0; n < count; n++)
            if (n != i && alive[n]->gpu_instance == alive[i]->gpu_instance)
                others += n < i ? found[n].bytes : alive[n]->used_bytes;
        uint64_t left = others < room ? room - others : 0;
        found[i] = (struct process_now){alive[i], wanted < left ? wanted : left};
    }
    return count;
}

/* Whether a process shows on a device: on its own MIG device, and all of them on the whole GPU. */
static bool is_on(const struct process *process, nvmlDevice_t device) {
    return !is_mig_device(device) ||
           (process->gpu_instance == device->gpu_instance && process->compute_instance == device->compute_instance);
}

/* ---- memory ---- */

struct memory {
    uint64_t total, reserved, used;
};

/* The memory of a MIG device is that of its GPU instance, which its compute instances share. */
static struct memory memory_of(const struct gpu *gpu, nvmlDevice_t device) {
    struct memory memory = {gpu->memory_total_bytes, reserved_bytes(gpu), gpu->memory_used_bytes};
    if (is_mig_device(device))
        memory = (struct memory){room_of(gpu, device->gpu_instance), 0, 0};
    struct process_now found[MAX_PROCESSES];
    size_t count = processes_now(gpu, found);
    for (size_t i = 0; i < count; i++)
        if (!is_mig_device(device) || found[i].process->gpu_instance == device->gpu_instance)
            memory.used += found[i].bytes;
    uint64_t most = memory.total - memory.reserved;
    memory.used = memory.used < most ? memory.used : most;
    return memory;
}

/* Version 1 folds what the driver reserves into `used`; version 2 tells it apart: total = reserved + used + free. */
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *info) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    if (info == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    struct memory memory = memory_of(gpu, device);
    info->total = memory.total;
    info->used = memory.reserved + memory.used;
    info->free = info->total - info->used;
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *info) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    if (result == NVML_SUCCESS && info == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && info->version != VERSION_OF(nvmlMemory_v2_t, 2))
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (result != NVML_SUCCESS)
        return end(result);
    struct memory memory = memory_of(gpu, device);
    info->total = memory.total;
    info->reserved = memory.reserved;
    info->used = memory.used;
    info->free = info->total - info->reserved - info->used;
    return end(NVML_SUCCESS);
}

/* A MIG device has its slots' share of the window, less the MiB that public nvidia-smi tables show to be missing. */
EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *info) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    if (info == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    if (gpu->bar1_total_bytes == ABSENT)
        return end(NVML_ERROR_NOT_SUPPORTED);
    uint64_t used = gpu->bar1_used_bytes == ABSENT ? 0 : gpu->bar1_used_bytes;
    info->total = gpu->bar1_total_bytes;
    if (is_mig_device(device)) {
        info->total = info->total / gpu->mig_slots * gpu->instances[device->gpu_instance].size;
        info->total -= info->total > MIB ? MIB : 0;
        used = 0;
    }
    info->used = used < info->total ? used : info->total;
    info->free = info->total - info->used;
    return end(NVML_SUCCESS);
}

/* ---- processes ---- */

/* The processes of one type that show on a device. Who is not root sees none of a GPU in MIG mode, as the API reference says of
 * "appropriate privileges"; those of a MIG device are seen by all. */
nvmlReturn_t list_processes(
    nvmlDevice_t device, const struct gpu *gpu, char type, struct process_now found[MAX_PROCESSES], unsigned *count) {
    if (!is_mig_device(device) && gpu->mig_current == 1 && current.root_only == 1 && geteuid() != 0)
        return NVML_ERROR_NO_PERMISSION;
    struct process_now all[MAX_PROCESSES];
    size_t all_count = processes_now(gpu, all);
    *count = 0;
    for (size_t i = 0; i < all_count; i++)
        if (all[i].process->type == type && is_on(all[i].process, device))
            found[(*count)++] = all[i];
    return NVML_SUCCESS;
}

/* In NVML's way: INSUFFICIENT_SIZE with the count where there is no room, SUCCESS where there is nothing to list. */
static nvmlReturn_t make_list(
    nvmlDevice_t device, const struct gpu *gpu, char type, unsigned *count, const void *target,
    struct process_now found[MAX_PROCESSES]) {
    unsigned there = 0;
    nvmlReturn_t result = count == NULL ? NVML_ERROR_INVALID_ARGUMENT : list_processes(device, gpu, type, found, &there);
    if (result != NVML_SUCCESS)
        return result;
    unsigned room = *count;
    *count = there;
    if (room < there)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    return there > 0 && target == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}

static nvmlReturn_t give_v1(nvmlDevice_t device, char type, unsigned *count, nvmlProcessInfo_v1_t *target) {
    struct gpu *gpu;
    struct process_now found[MAX_PROCESSES];
    nvmlReturn_t result = begin_device(device, &gpu);
    if (result == NVML_SUCCESS)
        result = make_list(device, gpu, type, count, target, found);
    for (unsigned i = 0; result == NVML_SUCCESS && i < *count; i++)
        target[i] = (nvmlProcessInfo_v1_t){(unsigned)found[i].process->pid, found[i].bytes};
    return end(result);
}

static nvmlReturn_t give(nvmlDevice_t device, char type, unsigned *count, nvmlProcessInfo_t *target) {
    struct gpu *gpu;
    struct process_now found[MAX_PROCESSES];
    nvmlReturn_t result = begin_device(device, &gpu);
    if (result == NVML_SUCCESS)
        result = make_list(device, gpu, type, count, target, found);
    for (unsigned i = 0; result == NVML_SUCCESS && i < *count; i++) {
        const struct process *process = found[i].process;
        /* Outside MIG both ids are ABSENT, whose lower half is NVML's 0xFFFFFFFF. */
        target[i] = (nvmlProcessInfo_t){
            (unsigned)process->pid, found[i].bytes, (unsigned)process->gpu_instance, (unsigned)process->compute_instance};
    }
    return end(result);
}

#define LISTS_PROCESSES(name, type)                                                                                              \
    EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *target) {                               \
        return give_v1(device, type, count, target);                                                                             \
    }                                                                                                                            \
    EXPORT nvmlReturn_t name##_v2(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *target) {                             \
        return give(device, type, count, target);                                                                                \
    }                                                                                                                            \
    EXPORT nvmlReturn_t name##_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *target) {                             \
        return give(device, type, count, target);                                                                                \
    }

LISTS_PROCESSES(nvmlDeviceGetComputeRunningProcesses, 'c')
LISTS_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, 'g')
LISTS_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, 'm')

EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *list) {
    static const char types[] = {'c', 'g', 'm'}; /* by `mode` */
    struct gpu *gpu;
    struct process_now found[MAX_PROCESSES];
    nvmlReturn_t result = begin_device(device, &gpu);
    if (result == NVML_SUCCESS && list == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && list->version != VERSION_OF(nvmlProcessDetailList_t, 1))
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (result == NVML_SUCCESS && list->mode >= sizeof(types))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        result = make_list(device, gpu, types[list->mode], &list->numProcArrayEntries, list->procArray, found);
    for (unsigned i = 0; result == NVML_SUCCESS && i < list->numProcArrayEntries; i++) {
        const struct process *process = found[i].process;
        list->procArray[i] = (nvmlProcessDetail_v1_t){
            .pid = (unsigned)process->pid,
            .usedGpuMemory = found[i].bytes,
            .gpuInstanceId = (unsigned)process->gpu_instance,
            .computeInstanceId = (unsigned)process->compute_instance,
            .usedGpuCcProtectedMemory = 0, /* nothing is confidential here */
        };
    }
    return end(result);
}
