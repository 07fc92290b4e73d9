/* Who uses a GPU, and its reset, which whoever uses it prevents. */
#include "nvml_standin.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { FABRIC_COMPLETED = 3 }; /* NVML_GPU_FABRIC_STATE_* */

/* The same as whether /proc/PID is there, and cheaper: every question about memory asks it of every process. */
static bool is_alive(uint64_t pid) {
    return pid > 0 && pid <= INT32_MAX && (kill((pid_t)pid, 0) == 0 || errno == EPERM);
}

size_t live_processes(const struct gpu *gpu, char type, const struct process **found) {
    size_t count = 0;
    for (size_t i = 0; i < gpu->processes_count; i++)
        if ((type == 0 || gpu->processes[i].type == type) && is_alive(gpu->processes[i].pid))
            found[count++] = &gpu->processes[i];
    return count;
}

bool is_busy(const struct gpu *gpu) {
    const struct process *found[MAX_PROCESSES];
    return gpu->held_by_module[0] != '\0' || live_processes(gpu, 0, found) > 0;
}

/* ---- reset ---- */

static bool are_joined(const struct gpu *gpu, const struct gpu *other) {
    return links_to_gpu(gpu, other) > 0 || (links_to_switches(gpu) > 0 && links_to_switches(other) > 0);
}

/* What the manual of nvidia-smi 550 says under --gpu-reset: before Ampere, all that NVLink joins is reset by one command; from Ampere
 * on each GPU alone, but on an Ampere NVSwitch only with the fabric manager. A server that says nothing of a fabric has it running. */
static bool resets_alone(const struct gpu *gpu) {
    if (gpu->architecture == ABSENT || gpu->architecture > ARCHITECTURE_AMPERE)
        return true;
    bool fabric_runs = gpu->fabric_state == ABSENT || gpu->fabric_state == FABRIC_COMPLETED;
    return gpu->architecture == ARCHITECTURE_AMPERE && (links_to_switches(gpu) == 0 || fabric_runs);
}

void reset_group(const bool chosen[MAX_GPUS], bool group[MAX_GPUS]) {
    bool spreads[MAX_GPUS] = {false}; /* whom its neighbours have to follow */
    for (size_t i = 0; i < current.gpus_count; i++) {
        group[i] = chosen[i];
        spreads[i] = chosen[i] && !resets_alone(&current.gpus[i]);
    }
    for (bool grown = true; grown;) {
        grown = false;
        for (size_t i = 0; i < current.gpus_count; i++)
            for (size_t other = 0; other < current.gpus_count && spreads[i]; other++)
                if (!spreads[other] && are_joined(&current.gpus[i], &current.gpus[other]))
                    group[other] = spreads[other] = grown = true;
    }
}

/* Refuses where GPUs are missing that have to be reset as well. */
static nvmlReturn_t check_company(const bool chosen[MAX_GPUS], char why[RESET_WHY]) {
    bool group[MAX_GPUS];
    char missing[MAX_GPUS * 4] = "";
    reset_group(chosen, group);
    for (size_t i = 0; i < current.gpus_count; i++)
        if (group[i] && !chosen[i])
            snprintf(missing + strlen(missing), sizeof(missing) - strlen(missing), "%s%zu", missing[0] == '\0' ? "" : ",", i);
    if (missing[0] == '\0')
        return NVML_SUCCESS;
    snprintf(why, RESET_WHY, "GPUs that NVLink joins are reset by one command here: add %s to it", missing);
    return NVML_ERROR_INVALID_ARGUMENT;
}

__attribute__((format(printf, 3, 4))) static nvmlReturn_t refuse(
    nvmlReturn_t result, char why[RESET_WHY], const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (why[0] == '\0')
        vsnprintf(why, RESET_WHY, format, arguments);
    va_end(arguments);
    return result;
}

static nvmlReturn_t check_use(size_t index, char why[RESET_WHY]) {
    const struct gpu *gpu = &current.gpus[index];
    const char *address = gpu->pci_address;
    const struct process *found[MAX_PROCESSES];
    if (gpu->lost == 1)
        return refuse(
            NVML_ERROR_GPU_IS_LOST, why, "GPU %zu (%s) has fallen off the bus: only a reboot or a power cycle brings it back", index,
            address);
    if (live_processes(gpu, 0, found) > 0)
        return refuse(
            NVML_ERROR_IN_USE, why, "GPU %zu (%s) is in use by process %u: end it first", index, address, (unsigned)found[0]->pid);
    if (gpu->held_by_module[0] != '\0')
        return refuse(
            NVML_ERROR_IN_USE, why, "GPU %zu (%s) is held by the kernel module %s: unload it first", index, address,
            gpu->held_by_module);
    if (gpu->reset_stuck == 1)
        return refuse(
            NVML_ERROR_UNKNOWN, why, "GPU %zu (%s) does not come back from its reset: only a reboot helps", index, address);
    return NVML_SUCCESS;
}

nvmlReturn_t reset_gpus(struct state *written, const bool chosen[MAX_GPUS], nvmlReturn_t results[MAX_GPUS], char why[RESET_WHY]) {
    why[0] = '\0';
    nvmlReturn_t first = check_company(chosen, why);
    for (size_t i = 0; i < current.gpus_count; i++) {
        results[i] = chosen[i] ? check_use(i, why) : NVML_SUCCESS;
        if (first == NVML_SUCCESS)
            first = results[i];
    }
    for (size_t i = 0; i < current.gpus_count && first == NVML_SUCCESS; i++)
        if (chosen[i])
            state_after_reset(written, i);
    return first;
}
