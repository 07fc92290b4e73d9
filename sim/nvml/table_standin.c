/* What nvidia-smi asks beside the public NVML: a table of functions, which the library gives to whom names the table's id.
 *
 * What is known of it is what NVIDIA publishes in its own stand-in (github.com/NVIDIA/k8s-test-infra, pkg/gpu/mocknvml/bridge/
 * internal.go, Apache-2.0: the id, the places 20, 81, 197, 213 to 215 and 230, the form of a process's entry), and what was seen
 * when Debian's nvidia-smi 535 and 550 called into this library. Every other place says NOT_SUPPORTED and writes nothing.
 */
#include "nvml_standin.h"

#include <stdio.h>
#include <string.h>

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device);
nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length);

/* 6c3efec4-8fc9-4e6c-a327-ee696e12f7c4 as a GUID lies in memory */
static const unsigned char table_id[16] = {
    0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4,
};

enum { TABLE_BYTES = 0x1000, PLACES = TABLE_BYTES / sizeof(void *) };

enum { BUS_ID_BYTES = 32 }; /* of NVML */

typedef void (*function)(void); /* of whatever type; who calls it knows */

static nvmlReturn_t not_supported(void) { return NVML_ERROR_NOT_SUPPORTED; }
static nvmlReturn_t success(void) { return NVML_SUCCESS; }

static nvmlReturn_t handle_by_index(unsigned index, nvmlDevice_t *device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }

/* ---- processes ---- */

typedef struct {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
    unsigned long long protected_bytes;
    char name[4096];
} process_entry;

_Static_assert(sizeof(process_entry) == 4128, "as nvidia-smi counts them");

static nvmlReturn_t give_processes(nvmlDevice_t device, char type, unsigned *count, process_entry *entries) {
    struct gpu *gpu;
    struct process_now found[MAX_PROCESSES];
    unsigned room = count == NULL ? 0 : *count;
    nvmlReturn_t result = begin_device(device, &gpu);
    if (result == NVML_SUCCESS)
        result = count == NULL || entries == NULL ? NVML_ERROR_INVALID_ARGUMENT : list_processes(device, gpu, type, found, count);
    if (result == NVML_SUCCESS && room < *count)
        result = NVML_ERROR_INSUFFICIENT_SIZE;
    if (result != NVML_SUCCESS)
        return end(result);
    for (unsigned i = 0; i < *count; i++) {
        entries[i].pid = (unsigned)found[i].process->pid;
        entries[i].used_bytes = found[i].bytes;
        entries[i].gpu_instance = (unsigned)found[i].process->gpu_instance; /* ABSENT becomes 0xffffffff, which says none */
        entries[i].compute_instance = (unsigned)found[i].process->compute_instance;
        entries[i].protected_bytes = 0;
    }
    end(NVML_SUCCESS);
    for (unsigned i = 0; i < *count; i++)
        if (nvmlSystemGetProcessName(entries[i].pid, entries[i].name, sizeof(entries[i].name)) != NVML_SUCCESS)
            entries[i].name[0] = '\0';
    return NVML_SUCCESS;
}

static nvmlReturn_t compute_processes(nvmlDevice_t device, unsigned *count, process_entry *entries) {
    return give_processes(device, 'c', count, entries);
}

static nvmlReturn_t graphics_processes(nvmlDevice_t device, unsigned *count, process_entry *entries) {
    return give_processes(device, 'g', count, entries);
}

static nvmlReturn_t mps_processes(nvmlDevice_t device, unsigned *count, process_entry *entries) {
    return give_processes(device, 'm', count, entries);
}

/* ---- the bus ---- */

static nvmlReturn_t host_max_pcie_generation(nvmlDevice_t device, unsigned *generation) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    return end(result == NVML_SUCCESS ? give_number(gpu->pcie_generation_max, generation) : result);
}

static const struct gpu *gpu_at(const char *bus_id) {
    unsigned domain, bus, device;
    bool valid = bus_id != NULL && state_parse_address(bus_id, &domain, &bus, &device) == 0;
    for (size_t i = 0; i < current.gpus_count && valid; i++) {
        const struct gpu *gpu = &current.gpus[i];
        if (gpu->domain == domain && gpu->bus == bus && gpu->device == device)
            return gpu;
    }
    return NULL;
}

/* The way between two GPUs as topo -m writes it: 0 PIX, 1 PXB, 2 PHB, 3 NODE, 4 SYS, and 4 + n for n links of NVLink between them.
 * Links over an NVSwitch it counts by itself. */
static nvmlReturn_t way_between(const char *bus_id, const char *other_bus_id, unsigned *way) {
    nvmlReturn_t result = begin();
    const struct gpu *gpu = gpu_at(bus_id), *other = gpu_at(other_bus_id);
    if (result == NVML_SUCCESS && (gpu == NULL || other == NULL || gpu == other || way == NULL))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS)
        return end(result);
    unsigned links = links_to_gpu(gpu, other);
    *way = links > 0 ? 4 + links : common_ancestor(gpu, other) / 10 - 1; /* NVML_TOPOLOGY_SINGLE is 10, ..._SYSTEM 50 */
    return end(NVML_SUCCESS);
}

/* ---- reset ---- */

/* nvidia-smi --gpu-reset asks whether a GPU is the primary one and what state the fabric is in (20, 169, 32), makes a group of the GPUs
 * of its command (182), wants to know which the group has to hold (183), and resets them all by one call (168). */
static bool group[MAX_GPUS];

static nvmlReturn_t choose(unsigned count, const nvmlDevice_t *devices, bool chosen[MAX_GPUS]) {
    memset(chosen, 0, MAX_GPUS * sizeof(chosen[0]));
    nvmlReturn_t result = count == 0 || count > MAX_GPUS || devices == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
    for (unsigned i = 0; i < count && result == NVML_SUCCESS; i++) {
        struct gpu *gpu;
        result = check_gpu(devices[i], &gpu);
        if (result == NVML_SUCCESS || result == NVML_ERROR_GPU_IS_LOST) {
            chosen[devices[i]->gpu] = true;
            result = NVML_SUCCESS;
        }
    }
    return result;
}

static nvmlReturn_t make_reset_group(void **made, const nvmlDevice_t *devices, unsigned count) {
    bool chosen[MAX_GPUS];
    nvmlReturn_t result = begin();
    if (result == NVML_SUCCESS)
        result = made == NULL ? NVML_ERROR_INVALID_ARGUMENT : choose(count, devices, chosen);
    if (result != NVML_SUCCESS)
        return end(result);
    reset_group(chosen, group);
    *made = group;
    return end(NVML_SUCCESS);
}

static nvmlReturn_t list_reset_group(void *made, char **bus_ids, unsigned *count) {
    nvmlReturn_t result = begin();
    if (result == NVML_SUCCESS && (made != group || bus_ids == NULL || count == NULL))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS)
        return end(result);
    *count = 0;
    for (size_t i = 0; i < current.gpus_count; i++)
        if (group[i]) {
            const struct gpu *gpu = &current.gpus[i];
            snprintf(bus_ids[(*count)++], BUS_ID_BYTES, "%08X:%02X:%02X.0", gpu->domain, gpu->bus, gpu->device);
        }
    return end(NVML_SUCCESS);
}

static nvmlReturn_t reset(unsigned count, const nvmlDevice_t *devices, nvmlReturn_t *results) {
    struct state *written;
    bool chosen[MAX_GPUS];
    nvmlReturn_t by_gpu[MAX_GPUS];
    char why[RESET_WHY];
    nvmlReturn_t result = change_begin(&written);
    if (result == NVML_SUCCESS)
        result = results == NULL ? NVML_ERROR_INVALID_ARGUMENT : choose(count, devices, chosen);
    if (result != NVML_SUCCESS)
        return change_end(result);
    result = reset_gpus(written, chosen, by_gpu, why);
    for (unsigned i = 0; i < count; i++) {
        results[i] = by_gpu[devices[i]->gpu];
        if (results[i] != NVML_SUCCESS)
            result = NVML_ERROR_UNKNOWN; /* then nvidia-smi tells the result of each */
    }
    return change_end(result);
}

/* ---- the table ---- */

static union {
    size_t bytes;
    function place;
} table[PLACES];

/* Once, and before anybody can ask: a table that is out is read without a lock. */
__attribute__((constructor)) static void fill_table(void) {
    static const struct {
        size_t place;
        function function;
    } known[] = {
        {20, (function)success},
        {23, (function)way_between},
        {26, (function)success},
        {32, (function)success},
        {72, (function)success}, /* else dmon and pmon say "Not supported"; their figures come from NVML */
        {81, (function)handle_by_index},
        {168, (function)reset},
        {169, (function)success},
        {182, (function)make_reset_group},
        {183, (function)list_reset_group},
        {184, (function)success},
        {197, (function)success},
        {213, (function)compute_processes},
        {214, (function)graphics_processes},
        {215, (function)mps_processes},
        {230, (function)host_max_pcie_generation},
    };
    table[0].bytes = sizeof(table);
    for (size_t i = 1; i < PLACES; i++)
        table[i].place = (function)not_supported;
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        table[known[i].place].place = known[i].function;
}

EXPORT nvmlReturn_t nvmlInternalGetExportTable(const void **target, const void *id) {
    if (target == NULL || id == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (memcmp(id, table_id, sizeof(table_id)) != 0)
        return NVML_ERROR_NOT_SUPPORTED;
    *target = table;
    return NVML_SUCCESS;
}
