/* The fabric of NVSwitches, and where a GPU stands in it. Hopper and later register with it themselves. */
#include "nvml_standin.h"

#include <string.h>

typedef struct {
    unsigned char clusterUuid[16];
    unsigned status, cliqueId, state;
} nvmlGpuFabricInfo_t;

/* Versions 2 and 3 are one beginning: version 3 has the summary beyond it. */
typedef struct {
    unsigned version;
    unsigned char clusterUuid[16];
    unsigned status, cliqueId, state, healthMask;
} nvmlGpuFabricInfo_v2_t;

typedef struct {
    unsigned version;
    unsigned char clusterUuid[16];
    unsigned status, cliqueId, state, healthMask;
    unsigned char healthSummary;
} nvmlGpuFabricInfo_v3_t;

_Static_assert(sizeof(nvmlGpuFabricInfo_t) == 28, "as in pynvml");
_Static_assert(sizeof(nvmlGpuFabricInfo_v2_t) == 36, "as in pynvml");
_Static_assert(sizeof(nvmlGpuFabricInfo_v3_t) == 40, "as in pynvml");

static unsigned hexadecimal(char c) {
    return c >= '0' && c <= '9' ? (unsigned)(c - '0') : c >= 'a' && c <= 'f' ? (unsigned)(c - 'a') + 10 : 16;
}

static void read_uuid(const char *text, unsigned char bytes[16]) {
    memset(bytes, 0, 16);
    for (size_t digits = 0; *text != '\0' && digits < 32; text++)
        if (hexadecimal(*text) < 16) {
            bytes[digits / 2] = (unsigned char)(bytes[digits / 2] << 4 | hexadecimal(*text));
            digits++;
        }
}

static nvmlReturn_t begin_fabric(nvmlDevice_t device, struct gpu **gpu) {
    nvmlReturn_t result = begin_gpu(device, gpu);
    bool told = result == NVML_SUCCESS && (*gpu)->fabric_state != ABSENT && (*gpu)->architecture != ABSENT &&
                (*gpu)->architecture >= ARCHITECTURE_HOPPER;
    return result == NVML_SUCCESS && !told ? NVML_ERROR_NOT_SUPPORTED : result;
}

static unsigned number_or_zero(uint64_t number) { return number == ABSENT ? 0 : (unsigned)number; }

/* Whether any part of the mask says "true" of something bad: its first four pairs of bits, and a reason beyond them. */
static unsigned char summary_of(uint64_t mask) {
    enum { NOT_SUPPORTED = 0, HEALTHY = 1, UNHEALTHY = 2 }; /* NVML_GPU_FABRIC_HEALTH_SUMMARY_* */
    if (mask == ABSENT || mask == 0)
        return NOT_SUPPORTED;
    for (unsigned shift = 0; shift < 8; shift += 2)
        if ((mask >> shift & 3) == 1)
            return UNHEALTHY;
    return (mask >> 8 & 0xf) > 1 ? UNHEALTHY : HEALTHY;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_fabric(device, &gpu);
    if (result == NVML_SUCCESS && info == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS)
        return end(result);
    *info = (nvmlGpuFabricInfo_t){
        .status = number_or_zero(gpu->fabric_status),
        .cliqueId = number_or_zero(gpu->fabric_clique),
        .state = (unsigned)gpu->fabric_state,
    };
    read_uuid(gpu->fabric_cluster, info->clusterUuid);
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v3_t *info) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_fabric(device, &gpu);
    if (result == NVML_SUCCESS && info == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS)
        return end(result);
    nvmlGpuFabricInfo_v3_t found = {
        .version = info->version,
        .status = number_or_zero(gpu->fabric_status),
        .cliqueId = number_or_zero(gpu->fabric_clique),
        .state = (unsigned)gpu->fabric_state,
        .healthMask = number_or_zero(gpu->fabric_health),
        .healthSummary = summary_of(gpu->fabric_health),
    };
    read_uuid(gpu->fabric_cluster, found.clusterUuid);
    if (info->version == VERSION_OF(nvmlGpuFabricInfo_v2_t, 2))
        memcpy(info, &found, sizeof(nvmlGpuFabricInfo_v2_t));
    else if (info->version == VERSION_OF(nvmlGpuFabricInfo_v3_t, 3))
        *info = found;
    else
        return end(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    return end(NVML_SUCCESS);
}
