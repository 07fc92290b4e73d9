/* How GPUs reach each other: NVLink, the PCIe bus, and the fabric that NVSwitches make. */
#include "nvml_standin.h"

#include <stdio.h>
#include <string.h>

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

_Static_assert(sizeof(nvmlPciInfo_t) == 68, "as in pynvml");

enum { LINKS_OF_NVML = 18 }; /* NVML_NVLINK_MAX_LINKS of drivers 450 to 580 */

bool link_is_active(const struct gpu *gpu, size_t link) {
    /* On Ampere MIG switches the links to NVSwitches off; later GPUs keep them, and do not use them (Fabric Manager guide). */
    bool trained_off = gpu->mig_current == 1 && gpu->architecture == ARCHITECTURE_AMPERE && gpu->nvlinks[link].to_switch;
    return gpu->nvlinks[link].exists && !gpu->nvlinks[link].down && !trained_off;
}

uint64_t link_version(const struct gpu *gpu) {
    static const uint64_t versions[] = {ABSENT, 1, 2, 4, 6, 7, 8}; /* NVML_NVLINK_VERSION_*, by generation */
    return gpu->nvlink_version < sizeof(versions) / sizeof(versions[0]) ? versions[gpu->nvlink_version] : ABSENT;
}

/* Begins a call about one link. One that NVML knows and this GPU has not is NOT_SUPPORTED: anything else makes nvidia-smi topo -m
 * give up on a GPU with fewer. */
static nvmlReturn_t begin_link(nvmlDevice_t device, unsigned link, struct gpu **gpu) {
    nvmlReturn_t result = begin_gpu(device, gpu);
    if (result != NVML_SUCCESS)
        return result;
    if ((*gpu)->nvlinks_count == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    if (link < (*gpu)->nvlinks_count)
        return NVML_SUCCESS;
    return link < LINKS_OF_NVML ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT;
}

/* ---- NVLink ---- */

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *active) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_link(device, link, &gpu);
    return end(result == NVML_SUCCESS ? give_number(link_is_active(gpu, link), active) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned link, unsigned *version) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_link(device, link, &gpu);
    return end(result == NVML_SUCCESS ? give_number(link_version(gpu), version) : result);
}

/* Links of datacenter GPUs can do all of it. */
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned link, unsigned capability, unsigned *able) {
    enum { CAPABILITIES = 6 }; /* NVML_NVLINK_CAP_COUNT */
    struct gpu *gpu;
    nvmlReturn_t result = begin_link(device, link, &gpu);
    if (result == NVML_SUCCESS && capability >= CAPABILITIES)
        result = NVML_ERROR_INVALID_ARGUMENT;
    return end(result == NVML_SUCCESS ? give_number(1, able) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, unsigned *type) {
    enum { REMOTE_GPU = 0, REMOTE_SWITCH = 2 }; /* NVML_NVLINK_DEVICE_TYPE_* */
    struct gpu *gpu;
    nvmlReturn_t result = begin_link(device, link, &gpu);
    return end(result == NVML_SUCCESS ? give_number(gpu->nvlinks[link].to_switch ? REMOTE_SWITCH : REMOTE_GPU, type) : result);
}

/* What is at the other end of a link that is down is not known to the driver. */
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, nvmlPciInfo_t *pci) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_link(device, link, &gpu);
    if (result == NVML_SUCCESS && pci == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && !link_is_active(gpu, link))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (result != NVML_SUCCESS)
        return end(result);
    *pci = (nvmlPciInfo_t){0};
    state_parse_address(gpu->nvlinks[link].address, &pci->domain, &pci->bus, &pci->device);
    snprintf(
        pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
        pci->device & 0x1f);
    snprintf(pci->busId, sizeof(pci->busId), "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    for (size_t i = 0; i < current.gpus_count; i++) {
        const struct gpu *other = &current.gpus[i];
        if (other->domain == pci->domain && other->bus == pci->bus && other->device == pci->device)
            pci->pciDeviceId = (unsigned)other->pci_device_id;
    }
    return end(NVML_SUCCESS);
}
SAME_AS(nvmlDeviceGetNvLinkRemotePciInfo_v2)
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned link, nvmlPciInfo_t *pci);

/* The state counts errors of a GPU; they are those of the first link that is down, else of the first link. */
static size_t bad_link(const struct gpu *gpu) {
    for (size_t i = 0; i < gpu->nvlinks_count; i++)
        if (gpu->nvlinks[i].down)
            return i;
    return 0;
}

uint64_t link_errors(const struct gpu *gpu, size_t link, enum link_error error) {
    uint64_t count = error == LINK_REPLAYS      ? gpu->nvlink_replay_errors
                     : error == LINK_RECOVERIES ? gpu->nvlink_recovery_errors
                                                : gpu->nvlink_crc_errors;
    return count == ABSENT || link == bad_link(gpu) ? count : 0;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(
    nvmlDevice_t device, unsigned link, unsigned counter, unsigned long long *count) {
    static const enum link_error errors[] = {LINK_REPLAYS, LINK_RECOVERIES, LINK_CRC}; /* NVML_NVLINK_ERROR_DL_* */
    enum { ERROR_COUNTERS = 5 };
    struct gpu *gpu;
    nvmlReturn_t result = begin_link(device, link, &gpu);
    if (result == NVML_SUCCESS && counter >= ERROR_COUNTERS)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS)
        return end(result);
    bool known = counter < sizeof(errors) / sizeof(errors[0]);
    return end(give_long(known ? link_errors(gpu, link, errors[counter]) : ABSENT, count));
}

/* ---- who reaches whom ---- */

unsigned links_to_switches(const struct gpu *gpu) {
    unsigned count = 0;
    for (size_t i = 0; i < gpu->nvlinks_count; i++)
        count += gpu->nvlinks[i].to_switch && link_is_active(gpu, i);
    return count;
}

unsigned links_to_gpu(const struct gpu *gpu, const struct gpu *other) {
    unsigned count = 0;
    for (size_t i = 0; i < gpu->nvlinks_count; i++) {
        unsigned domain = 0, bus = 0, device = 0;
        if (gpu->nvlinks[i].to_switch || !link_is_active(gpu, i))
            continue;
        state_parse_address(gpu->nvlinks[i].address, &domain, &bus, &device);
        count += domain == other->domain && bus == other->bus && device == other->device;
    }
    return count;
}

/* GPUs of an NVSwitch board that the fabric does not join have no peers: they do not fall back to PCIe (Fabric Manager guide). */
static bool has_switch(const struct gpu *gpu) {
    for (size_t i = 0; i < gpu->nvlinks_count; i++)
        if (gpu->nvlinks[i].to_switch)
            return true;
    return false;
}

/* A fabric carries nothing before a GPU has been registered with it. */
static bool fabric_is_ready(const struct gpu *gpu) {
    enum { NOT_SUPPORTED = 0, COMPLETED = 3 }; /* NVML_GPU_FABRIC_STATE_* */
    return gpu->fabric_state == ABSENT || gpu->fabric_state == NOT_SUPPORTED || gpu->fabric_state == COMPLETED;
}

bool joined_by_nvlink(const struct gpu *gpu, const struct gpu *other) {
    if (gpu->mig_current == 1 || other->mig_current == 1)
        return false;
    if (links_to_gpu(gpu, other) > 0 && links_to_gpu(other, gpu) > 0)
        return true;
    return links_to_switches(gpu) > 0 && links_to_switches(other) > 0 && fabric_is_ready(gpu) && fabric_is_ready(other);
}

EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device, nvmlDevice_t other, unsigned capability, unsigned *status) {
    enum { READ, WRITE, NVLINK, ATOMICS, PCI, CAPABILITIES }; /* NVML_P2P_CAPS_INDEX_* */
    enum { OK = 0, NOT_SUPPORTED = 5 };                       /* NVML_P2P_STATUS_* */
    struct gpu *gpu, *other_gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS)
        result = check_gpu(other, &other_gpu);
    if (result == NVML_SUCCESS && (gpu == other_gpu || capability >= CAPABILITIES))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS)
        return end(result);
    bool nvlink = joined_by_nvlink(gpu, other_gpu);
    bool divided = gpu->mig_current == 1 || other_gpu->mig_current == 1;
    bool pcie = gpu->pcie_peer_to_peer == 1 && other_gpu->pcie_peer_to_peer == 1 && !divided;
    bool able = capability == PCI ? pcie : nvlink;
    if (capability == READ || capability == WRITE)
        able = nvlink || (pcie && !(has_switch(gpu) && has_switch(other_gpu)));
    return end(give_number(able ? OK : NOT_SUPPORTED, status));
}

/* ---- the PCIe bus ---- */

enum { TOPOLOGY_INTERNAL = 0, TOPOLOGY_SINGLE = 10, TOPOLOGY_HOST_BRIDGE = 30, TOPOLOGY_NODE = 40, TOPOLOGY_SYSTEM = 50 };

unsigned common_ancestor(const struct gpu *gpu, const struct gpu *other) {
    if (gpu == other)
        return TOPOLOGY_INTERNAL;
    if (gpu->pcie_switch != ABSENT && gpu->pcie_switch == other->pcie_switch)
        return TOPOLOGY_SINGLE;
    if (gpu->pcie_root != ABSENT && gpu->pcie_root == other->pcie_root)
        return TOPOLOGY_HOST_BRIDGE;
    return gpu->numa_node == other->numa_node ? TOPOLOGY_NODE : TOPOLOGY_SYSTEM;
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device, nvmlDevice_t other, unsigned *level) {
    struct gpu *gpu, *other_gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS)
        result = check_gpu(other, &other_gpu);
    return end(result == NVML_SUCCESS ? give_number(common_ancestor(gpu, other_gpu), level) : result);
}

/* The other GPUs that are at least as near as a level. */
EXPORT nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(
    nvmlDevice_t device, unsigned level, unsigned *count, nvmlDevice_t *nearest) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS && (count == NULL || level > TOPOLOGY_SYSTEM || level % 10 != 0))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS)
        return end(result);
    unsigned room = nearest == NULL ? 0 : *count, found = 0;
    for (size_t i = 0; i < current.gpus_count; i++)
        if (i != device->gpu && common_ancestor(gpu, &current.gpus[i]) <= level) {
            if (found < room)
                nearest[found] = handle_of_gpu(i);
            found++;
        }
    *count = nearest != NULL && room < found ? room : found;
    return end(NVML_SUCCESS);
}
