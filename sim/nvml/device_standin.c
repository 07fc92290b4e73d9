/* Which devices there are, and what each of them is. */
#include "nvml_standin.h"

#include <stdio.h>
#include <string.h>

typedef struct {
    char busId[16];
    unsigned domain, bus, device, pciDeviceId;
} nvmlPciInfo_v1_t;

typedef struct {
    char busId[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId, reserved[4];
} nvmlPciInfo_v2_t;

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned version, domain, bus, device, pciDeviceId, pciSubSystemId, baseClass, subClass;
    char busId[32];
} nvmlPciInfoExt_v1_t;

typedef struct {
    unsigned version, type;
    union {
        char text[41];
        unsigned char bytes[16];
    } value;
} nvmlUUID_t;

_Static_assert(sizeof(nvmlPciInfo_v2_t) == 52, "as in pynvml");
_Static_assert(sizeof(nvmlPciInfo_t) == 68, "as in pynvml");
_Static_assert(sizeof(nvmlPciInfoExt_v1_t) == 64, "as in pynvml");
_Static_assert(sizeof(nvmlUUID_t) == 52, "as in pynvml");

enum { UUID_TEXT = 1, UUID_BYTES = 2 }; /* NVML_UUID_TYPE_* */

/* ---- handles ---- */

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    nvmlReturn_t result = begin();
    return end(result == NVML_SUCCESS ? give_number(current.gpus_count, count) : result);
}
SAME_AS(nvmlDeviceGetCount_v2) nvmlReturn_t nvmlDeviceGetCount(unsigned *count);

static nvmlReturn_t give_handle(size_t gpu, nvmlDevice_t *device) {
    if (current.gpus[gpu].lost == 1)
        return NVML_ERROR_GPU_IS_LOST;
    *device = handle_of_gpu(gpu);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    nvmlReturn_t result = begin();
    if (result == NVML_SUCCESS && (device == NULL || index >= current.gpus_count))
        result = NVML_ERROR_INVALID_ARGUMENT;
    return end(result == NVML_SUCCESS ? give_handle(index, device) : result);
}
SAME_AS(nvmlDeviceGetHandleByIndex_v2) nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device);

/* Finds a MIG device that exists; NOT_FOUND where there is none of that UUID. */
static nvmlReturn_t find_mig(size_t gpu, const char *uuid, nvmlDevice_t *device) {
    for (size_t id = 0; id < MAX_INSTANCES; id++)
        for (size_t part = 0; part < MAX_COMPUTE; part++) {
            const struct gpu_instance *instance = &current.gpus[gpu].instances[id];
            if (!instance->exists || !instance->compute[part].exists)
                continue;
            struct device wanted = {gpu, id, part, 0};
            char text[48];
            write_mig_uuid(&wanted, text);
            if (strcmp(text, uuid) == 0) {
                *device = handle_of_mig(gpu, id, part);
                return NVML_SUCCESS;
            }
        }
    return NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t find_uuid(const char *uuid, nvmlDevice_t *device) {
    for (size_t i = 0; i < current.gpus_count; i++)
        if (strcmp(uuid, current.gpus[i].uuid) == 0)
            return give_handle(i, device);
    for (size_t i = 0; i < current.gpus_count && strncmp(uuid, "MIG-", 4) == 0; i++)
        if (current.gpus[i].lost != 1 && find_mig(i, uuid, device) == NVML_SUCCESS)
            return NVML_SUCCESS;
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    nvmlReturn_t result = begin();
    if (result == NVML_SUCCESS && (uuid == NULL || device == NULL))
        result = NVML_ERROR_INVALID_ARGUMENT;
    return end(result == NVML_SUCCESS ? find_uuid(uuid, device) : result);
}

static void write_uuid(const unsigned char bytes[16], const char *kind, char text[48]) {
    static const char *const dash[16] = {[4] = "-", [6] = "-", [8] = "-", [10] = "-"};
    size_t length = (size_t)snprintf(text, 48, "%s", kind);
    for (size_t i = 0; i < 16; i++)
        length += (size_t)snprintf(text + length, 48 - length, "%s%02x", dash[i] == NULL ? "" : dash[i], bytes[i]);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device) {
    nvmlReturn_t result = begin();
    if (result == NVML_SUCCESS && (uuid == NULL || device == NULL))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && uuid->version != VERSION_OF(nvmlUUID_t, 1))
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (result != NVML_SUCCESS)
        return end(result);
    char text[48] = "";
    if (uuid->type == UUID_TEXT) {
        memcpy(text, uuid->value.text, sizeof(uuid->value.text));
        return end(find_uuid(text, device));
    }
    if (uuid->type != UUID_BYTES)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    write_uuid(uuid->value.bytes, "GPU-", text);
    result = find_uuid(text, device);
    if (result == NVML_ERROR_NOT_FOUND) {
        write_uuid(uuid->value.bytes, "MIG-", text);
        result = find_uuid(text, device);
    }
    return end(result);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) {
    nvmlReturn_t result = begin();
    if (result != NVML_SUCCESS)
        return end(result);
    if (serial == NULL || device == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    for (size_t i = 0; i < current.gpus_count; i++)
        if (current.gpus[i].serial[0] != '\0' && strcmp(serial, current.gpus[i].serial) == 0)
            return end(give_handle(i, device));
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
        const struct gpu *gpu = &current.gpus[i];
        if (gpu->domain == domain && gpu->bus == bus && gpu->device == slot)
            return end(give_handle(i, device));
    }
    return end(NVML_ERROR_NOT_FOUND);
}
SAME_AS(nvmlDeviceGetHandleByPciBusId_v2) nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *address, nvmlDevice_t *device);

/* ---- what a MIG device has as well ---- */

/* A MIG device is named after its GPU and its profile, with the compute slices where it does not have all of them. */
static void write_name(const struct gpu *gpu, nvmlDevice_t device, char name[160]) {
    if (!is_mig_device(device)) {
        snprintf(name, 160, "%s", gpu->name);
        return;
    }
    const struct gpu_instance *instance = &gpu->instances[device->gpu_instance];
    const struct profile *profile = state_find_profile(gpu, instance->profile);
    unsigned slices = (unsigned)instance->compute[device->compute_instance].size;
    char part[16] = "";
    if (slices != profile->slices)
        snprintf(part, sizeof(part), "%uc.", slices);
    snprintf(name, 160, "%s MIG %s%s", gpu->name, part, profile->name);
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    char text[160];
    write_name(gpu, device, text);
    return end(give_text(text, name, length));
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    if (!is_mig_device(device))
        return end(give_text(gpu->uuid, uuid, length));
    char text[48];
    write_mig_uuid(device, text);
    return end(give_text(text, uuid, length));
}

/* Of a MIG device: the number that nvmlDeviceGetMigDeviceHandleByIndex knows it by. */
EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    if (!is_mig_device(device))
        return end(give_number(device->gpu, index));
    unsigned before = 0;
    for (size_t id = 0; id <= device->gpu_instance; id++)
        for (size_t part = 0; part < MAX_COMPUTE && (id < device->gpu_instance || part < device->compute_instance); part++)
            before += gpu->instances[id].exists && gpu->instances[id].compute[part].exists;
    return end(give_number(before, index));
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    return end(give_pair(gpu->compute_capability_major, gpu->compute_capability_minor, (unsigned *)major, (unsigned *)minor));
}

EXPORT nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned *architecture) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    return end(result == NVML_SUCCESS ? give_number(gpu->architecture, architecture) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, unsigned *brand) {
    enum { BRAND_UNKNOWN = 0 }; /* of NVML, which has a number for it; nvidia-smi topo -m gives up on an error */
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    return end(result == NVML_SUCCESS ? give_number(gpu->brand == ABSENT ? BRAND_UNKNOWN : gpu->brand, brand) : result);
}

/* ---- what a GPU is ---- */

GIVES_TEXT(nvmlDeviceGetSerial, serial)
GIVES_TEXT(nvmlDeviceGetVbiosVersion, vbios_version)
GIVES_TEXT(nvmlDeviceGetBoardPartNumber, board_part_number)
GIVES_NUMBER(nvmlDeviceGetMinorNumber, minor)
GIVES_NUMBER(nvmlDeviceGetModuleId, module_id)
GIVES_NUMBER(nvmlDeviceGetNumGpuCores, cores)
GIVES_NUMBER(nvmlDeviceGetMemoryBusWidth, memory_bus_bits)

/* One GPU to a board, so its address numbers the board. */
EXPORT nvmlReturn_t nvmlDeviceGetBoardId(nvmlDevice_t device, unsigned *board) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    return end(result == NVML_SUCCESS ? give_number(gpu->domain << 16 | gpu->bus << 8 | gpu->device, board) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetMultiGpuBoard(nvmlDevice_t device, unsigned *several) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    return end(result == NVML_SUCCESS ? give_number(0, several) : result);
}

EXPORT nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t device, nvmlDevice_t other, int *same) {
    struct gpu *gpu, *other_gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS)
        result = check_gpu(other, &other_gpu);
    return end(result == NVML_SUCCESS ? give_number(gpu == other_gpu, (unsigned *)same) : result);
}

/* ---- PCI ---- */

static void write_address(const struct gpu *gpu, char *text, size_t size) {
    const char *form = size == 16 ? "%04X:%02X:%02X.0" : "%08X:%02X:%02X.0";
    unsigned domain = size == 16 ? gpu->domain & 0xffff : gpu->domain;
    char address[32] = ""; /* the rest of the buffer is not left to chance */
    snprintf(address, sizeof(address), form, domain, gpu->bus & 0xff, gpu->device & 0x1f);
    memcpy(text, address, size == 16 ? 16 : 32);
}

static unsigned subsystem_of(const struct gpu *gpu) {
    return gpu->pci_subsystem_id == ABSENT ? 0 : (unsigned)gpu->pci_subsystem_id;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    if (pci == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    *pci = (nvmlPciInfo_t){
        .domain = gpu->domain,
        .bus = gpu->bus,
        .device = gpu->device,
        .pciDeviceId = (unsigned)gpu->pci_device_id,
        .pciSubSystemId = subsystem_of(gpu),
    };
    write_address(gpu, pci->busIdLegacy, sizeof(pci->busIdLegacy));
    write_address(gpu, pci->busId, sizeof(pci->busId));
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_v2_t *pci) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    if (pci == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    *pci = (nvmlPciInfo_v2_t){
        .domain = gpu->domain,
        .bus = gpu->bus,
        .device = gpu->device,
        .pciDeviceId = (unsigned)gpu->pci_device_id,
        .pciSubSystemId = subsystem_of(gpu),
    };
    write_address(gpu, pci->busId, sizeof(pci->busId));
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_v1_t *pci) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    if (pci == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    *pci = (nvmlPciInfo_v1_t){
        .domain = gpu->domain, .bus = gpu->bus, .device = gpu->device, .pciDeviceId = (unsigned)gpu->pci_device_id};
    write_address(gpu, pci->busId, sizeof(pci->busId));
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_v1_t *pci) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS && pci == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && pci->version != VERSION_OF(nvmlPciInfoExt_v1_t, 1))
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (result != NVML_SUCCESS)
        return end(result);
    *pci = (nvmlPciInfoExt_v1_t){
        .version = pci->version,
        .domain = gpu->domain,
        .bus = gpu->bus,
        .device = gpu->device,
        .pciDeviceId = (unsigned)gpu->pci_device_id,
        .pciSubSystemId = subsystem_of(gpu),
        .baseClass = 3, /* a 3D controller */
        .subClass = 2,
    };
    write_address(gpu, pci->busId, sizeof(pci->busId));
    return end(NVML_SUCCESS);
}
