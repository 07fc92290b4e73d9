/* A stand-in of NVIDIA's libnvidia-ml.so.1 for machines without a GPU. Never installed on a real server.
 *
 * What it answers comes from one state file that every process on the machine reads, so that all see the same hardware; a
 * changed file is seen at the next call. A function that is not here is absent from the library, so pynvml says
 * "Function Not Found" instead of being lied to.
 *
 * Struct layouts, constants and error strings are facts taken from pynvml (nvidia-ml-py, BSD-3-Clause, see NOTICE). Which
 * error a function gives when is NVIDIA's public "NVML API Reference Guide" (docs.nvidia.com/deploy/nvml-api).
 */
#include "state_standin.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define EXPORT __attribute__((visibility("default")))
#define SAME_AS(name) __attribute__((visibility("default"), alias(#name)))

typedef int nvmlReturn_t;
typedef struct gpu *nvmlDevice_t;

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
};

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

typedef struct {
    unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned version, sensorType;
    int temperature;
} nvmlTemperature_t;

_Static_assert(sizeof(nvmlPciInfo_t) == 68, "as in pynvml");
_Static_assert(sizeof(nvmlMemory_t) == 24, "as in pynvml");
_Static_assert(sizeof(nvmlMemory_v2_t) == 40, "as in pynvml");
_Static_assert(sizeof(nvmlProcessInfo_t) == 24, "as in pynvml");
_Static_assert(sizeof(nvmlTemperature_t) == 12, "as in pynvml");
_Static_assert(sizeof(nvmlUtilization_t) == 8, "as in pynvml");

#define VERSION_OF(type, number) ((unsigned)sizeof(type) | ((unsigned)(number) << 24))

/* ---- the state, and the lock around it ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned initialized; /* as often as nvmlInit was called and nvmlShutdown was not */
static struct state current, incoming;
static struct stat seen; /* the file that `current` was read from */

static bool same_file(const struct stat *a, const struct stat *b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

/* Brings `current` up to date. A handle is the address of a GPU in `current`, so it stays good across changes. */
static nvmlReturn_t refresh(void) {
    struct stat now;
    const char *path = state_path();
    if (stat(path, &now) != 0)
        return NVML_ERROR_DRIVER_NOT_LOADED; /* as the real library without a driver */
    if (same_file(&now, &seen))
        return NVML_SUCCESS;
    const char *problem = state_read(path, &incoming);
    if (problem != NULL) {
        fprintf(stderr, "libnvidia-ml-standin: %s: %s.\n", path, problem);
        return NVML_ERROR_UNKNOWN;
    }
    current = incoming;
    seen = now;
    return NVML_SUCCESS;
}

/* Every function below begins with one of these three, which take the lock, and ends with end(), which gives it back. */
static nvmlReturn_t begin_system(void) {
    pthread_mutex_lock(&lock);
    return refresh();
}

static nvmlReturn_t begin(void) {
    pthread_mutex_lock(&lock);
    return initialized == 0 ? NVML_ERROR_UNINITIALIZED : refresh();
}

static nvmlReturn_t begin_device(nvmlDevice_t device) {
    nvmlReturn_t result = begin();
    if (result != NVML_SUCCESS)
        return result;
    for (size_t i = 0; i < current.gpus_count; i++)
        if (device == &current.gpus[i])
            return device->lost == 1 ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
    return NVML_ERROR_INVALID_ARGUMENT;
}

static nvmlReturn_t end(nvmlReturn_t result) {
    pthread_mutex_unlock(&lock);
    return result;
}

static nvmlReturn_t give_text(const char *text, char *buffer, unsigned length) {
    if (buffer == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (text[0] == '\0')
        return NVML_ERROR_NOT_SUPPORTED;
    if (strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(buffer, text, strlen(text) + 1);
    return NVML_SUCCESS;
}

static nvmlReturn_t give_number(uint64_t number, unsigned *target) {
    if (target == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (number == ABSENT)
        return NVML_ERROR_NOT_SUPPORTED;
    *target = (unsigned)number;
    return NVML_SUCCESS;
}

static nvmlReturn_t give_pair(uint64_t first, uint64_t second, unsigned *first_target, unsigned *second_target) {
    if (first_target == NULL || second_target == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = give_number(first, first_target);
    return result == NVML_SUCCESS ? give_number(second, second_target) : result;
}

/* ---- the library ---- */

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    nvmlReturn_t result = begin_system();
    if (result == NVML_SUCCESS && current.init_error != 0)
        result = (nvmlReturn_t)current.init_error;
    if (result == NVML_SUCCESS)
        initialized++;
    return end(result);
}

EXPORT nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
SAME_AS(nvmlInit_v2) nvmlReturn_t nvmlInit(void);

EXPORT nvmlReturn_t nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    if (initialized == 0)
        return end(NVML_ERROR_UNINITIALIZED);
    initialized--;
    return end(NVML_SUCCESS);
}

EXPORT const char *nvmlErrorString(nvmlReturn_t result) {
    switch (result) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 5: return "Already Initialized";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case 8: return "Insufficient External Power";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 11: return "Interrupt Request Issue";
    case 12: return "NVML Shared Library Not Found";
    case 13: return "Function Not Found";
    case 14: return "Corrupted infoROM";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case 16: return "GPU requires restart";
    case 17: return "The operating system has blocked the request.";
    case 18: return "RM has detected an NVML/RM version mismatch.";
    case 20: return "Insufficient Memory";
    default: return "Unknown Error";
    }
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    nvmlReturn_t result = begin();
    return end(result == NVML_SUCCESS ? give_text(current.driver_version, version, length) : result);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    nvmlReturn_t result = begin_system();
    return end(result == NVML_SUCCESS ? give_text(current.nvml_version, version, length) : result);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    nvmlReturn_t result = begin_system();
    return end(result == NVML_SUCCESS ? give_number(current.cuda_driver_version, (unsigned *)version) : result);
}
SAME_AS(nvmlSystemGetCudaDriverVersion_v2) nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version);

/* ---- handles ---- */

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    nvmlReturn_t result = begin();
    return end(result == NVML_SUCCESS ? give_number(current.gpus_count, count) : result);
}
SAME_AS(nvmlDeviceGetCount_v2) nvmlReturn_t nvmlDeviceGetCount(unsigned *count);

static nvmlReturn_t give_handle(struct gpu *gpu, nvmlDevice_t *device) {
    if (gpu->lost == 1)
        return NVML_ERROR_GPU_IS_LOST;
    *device = gpu;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    nvmlReturn_t result = begin();
    if (result != NVML_SUCCESS)
        return end(result);
    if (device == NULL || index >= current.gpus_count)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    return end(give_handle(&current.gpus[index], device));
}
SAME_AS(nvmlDeviceGetHandleByIndex_v2) nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device);

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    nvmlReturn_t result = begin();
    if (result != NVML_SUCCESS)
        return end(result);
    if (uuid == NULL || device == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    for (size_t i = 0; i < current.gpus_count; i++)
        if (strcmp(uuid, current.gpus[i].uuid) == 0)
            return end(give_handle(&current.gpus[i], device));
    return end(NVML_ERROR_NOT_FOUND);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) {
    nvmlReturn_t result = begin();
    if (result != NVML_SUCCESS)
        return end(result);
    if (serial == NULL || device == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    for (size_t i = 0; i < current.gpus_count; i++)
        if (current.gpus[i].serial[0] != '\0' && strcmp(serial, current.gpus[i].serial) == 0)
            return end(give_handle(&current.gpus[i], device));
    return end(NVML_ERROR_NOT_FOUND);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *device) {
    nvmlReturn_t result = begin();
    if (result != NVML_SUCCESS)
        return end(result);
    unsigned domain, bus, slot;
    if (address == NULL || device == NULL || state_parse_address(address, &domain, &bus, &slot) != 0)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    for (size_t i = 0; i < current.gpus_count; i++) {
        struct gpu *gpu = &current.gpus[i];
        if (gpu->domain == domain && gpu->bus == bus && gpu->device == slot)
            return end(give_handle(gpu, device));
    }
    return end(NVML_ERROR_NOT_FOUND);
}
SAME_AS(nvmlDeviceGetHandleByPciBusId_v2)
nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *address, nvmlDevice_t *device);

/* ---- what a device is ---- */

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    nvmlReturn_t result = begin_device(device);
    return end(result == NVML_SUCCESS ? give_text(device->name, name, length) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    nvmlReturn_t result = begin_device(device);
    return end(result == NVML_SUCCESS ? give_text(device->uuid, uuid, length) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned length) {
    nvmlReturn_t result = begin_device(device);
    return end(result == NVML_SUCCESS ? give_text(device->serial, serial, length) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
    nvmlReturn_t result = begin_device(device);
    return end(result == NVML_SUCCESS ? give_number((uint64_t)(device - current.gpus), index) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor) {
    nvmlReturn_t result = begin_device(device);
    return end(result == NVML_SUCCESS ? give_number(device->minor, minor) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    nvmlReturn_t result = begin_device(device);
    if (result != NVML_SUCCESS)
        return end(result);
    if (pci == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    memset(pci, 0, sizeof(*pci));
    pci->domain = device->domain;
    pci->bus = device->bus;
    pci->device = device->device;
    pci->pciDeviceId = (unsigned)device->pci_device_id;
    pci->pciSubSystemId = device->pci_subsystem_id == ABSENT ? 0 : (unsigned)device->pci_subsystem_id;
    snprintf(
        pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
        pci->device & 0x1f);
    snprintf(pci->busId, sizeof(pci->busId), "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    nvmlReturn_t result = begin_device(device);
    if (result != NVML_SUCCESS)
        return end(result);
    return end(give_pair(
        device->compute_capability_major, device->compute_capability_minor, (unsigned *)major, (unsigned *)minor));
}

EXPORT nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, unsigned *brand) {
    nvmlReturn_t result = begin_device(device);
    return end(result == NVML_SUCCESS ? give_number(device->brand, brand) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned *architecture) {
    nvmlReturn_t result = begin_device(device);
    return end(result == NVML_SUCCESS ? give_number(device->architecture, architecture) : result);
}

/* ---- memory and processes ---- */

static uint64_t reserved_bytes(const struct gpu *gpu) {
    return gpu->memory_reserved_bytes == ABSENT ? 0 : gpu->memory_reserved_bytes;
}

static uint64_t used_bytes(const struct gpu *gpu) {
    uint64_t used = gpu->memory_used_bytes;
    for (size_t i = 0; i < gpu->processes_count; i++)
        used += gpu->processes[i].used_bytes;
    return used;
}

/* Version 1 folds what the driver reserves into `used`; version 2 tells it apart: total = reserved + used + free. */
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlReturn_t result = begin_device(device);
    if (result != NVML_SUCCESS)
        return end(result);
    if (memory == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    memory->total = device->memory_total_bytes;
    memory->used = reserved_bytes(device) + used_bytes(device);
    memory->free = memory->total - memory->used;
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    nvmlReturn_t result = begin_device(device);
    if (result != NVML_SUCCESS)
        return end(result);
    if (memory == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    if (memory->version != VERSION_OF(nvmlMemory_v2_t, 2))
        return end(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    memory->total = device->memory_total_bytes;
    memory->reserved = reserved_bytes(device);
    memory->used = used_bytes(device);
    memory->free = memory->total - memory->reserved - memory->used;
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(
    nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *processes) {
    nvmlReturn_t result = begin_device(device);
    if (result != NVML_SUCCESS)
        return end(result);
    if (count == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    unsigned room = *count;
    *count = (unsigned)device->processes_count;
    if (device->processes_count == 0)
        return end(NVML_SUCCESS);
    if (room < device->processes_count)
        return end(NVML_ERROR_INSUFFICIENT_SIZE);
    if (processes == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    for (size_t i = 0; i < device->processes_count; i++) {
        processes[i].pid = (unsigned)device->processes[i].pid;
        processes[i].usedGpuMemory = device->processes[i].used_bytes;
        processes[i].gpuInstanceId = UINT32_MAX; /* not a MIG instance */
        processes[i].computeInstanceId = UINT32_MAX;
    }
    return end(NVML_SUCCESS);
}

/* Graphics and MPS clients are not simulated: there are none. */
EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(
    nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *processes) {
    (void)processes;
    nvmlReturn_t result = begin_device(device);
    return end(result == NVML_SUCCESS ? give_number(0, count) : result);
}
SAME_AS(nvmlDeviceGetGraphicsRunningProcesses_v3)
nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(
    nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *processes);

/* ---- MIG ---- */

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *mode, unsigned *pending) {
    nvmlReturn_t result = begin_device(device);
    return end(result == NVML_SUCCESS ? give_pair(device->mig_current, device->mig_pending, mode, pending) : result);
}

/* "Returns zero if MIG is not supported or enabled" (NVML API Reference Guide). */
EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    nvmlReturn_t result = begin_device(device);
    if (result != NVML_SUCCESS)
        return end(result);
    bool possible = device->mig_current == 1 && device->mig_max_devices != ABSENT;
    return end(give_number(possible ? device->mig_max_devices : 0, count));
}

/* ---- health and load ---- */

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization) {
    nvmlReturn_t result = begin_device(device);
    if (result != NVML_SUCCESS)
        return end(result);
    if (utilization == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    if (device->mig_current == 1) /* not available while MIG is on (nvidia-smi prints N/A) */
        return end(NVML_ERROR_NOT_SUPPORTED);
    return end(give_pair(
        device->utilization_gpu_percent, device->utilization_memory_percent, &utilization->gpu, &utilization->memory));
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *celsius) {
    nvmlReturn_t result = begin_device(device);
    if (result != NVML_SUCCESS)
        return end(result);
    return end(sensor == 0 ? give_number(device->temperature_celsius, celsius) : NVML_ERROR_INVALID_ARGUMENT);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature) {
    nvmlReturn_t result = begin_device(device);
    if (result != NVML_SUCCESS)
        return end(result);
    if (temperature == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    if (temperature->version != VERSION_OF(nvmlTemperature_t, 1))
        return end(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    if (temperature->sensorType != 0)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    return end(give_number(device->temperature_celsius, (unsigned *)&temperature->temperature));
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts) {
    nvmlReturn_t result = begin_device(device);
    return end(result == NVML_SUCCESS ? give_number(device->power_milliwatts, milliwatts) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *milliwatts) {
    nvmlReturn_t result = begin_device(device);
    return end(result == NVML_SUCCESS ? give_number(device->power_limit_milliwatts, milliwatts) : result);
}
SAME_AS(nvmlDeviceGetEnforcedPowerLimit)
nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned *milliwatts);

EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned *mode) {
    nvmlReturn_t result = begin_device(device);
    return end(result == NVML_SUCCESS ? give_number(device->persistence_mode, mode) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned *mode, unsigned *pending) {
    nvmlReturn_t result = begin_device(device);
    return end(result == NVML_SUCCESS ? give_pair(device->ecc_current, device->ecc_pending, mode, pending) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *active) {
    nvmlReturn_t result = begin_device(device);
    if (result != NVML_SUCCESS)
        return end(result);
    if (device->nvlink_links == ABSENT || device->nvlink_links == 0)
        return end(NVML_ERROR_NOT_SUPPORTED);
    if (link >= device->nvlink_links)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    return end(give_number(device->nvlink_active == ABSENT ? ABSENT : device->nvlink_active >> link & 1, active));
}
