/* What the files of the library share: NVML's types, the state that is current, and how a call begins and ends.
 *
 * Struct layouts and constants are facts taken from pynvml (nvidia-ml-py, BSD-3-Clause, see NOTICE). Which error a function
 * gives when is NVIDIA's public "NVML API Reference Guide" (docs.nvidia.com/deploy/nvml-api).
 */
#ifndef GPUREADY_NVML_STANDIN_H
#define GPUREADY_NVML_STANDIN_H

#include "state_standin.h"

#define EXPORT __attribute__((visibility("default")))
#define SAME_AS(name) __attribute__((visibility("default"), alias(#name)))
#define VERSION_OF(type, number) ((unsigned)sizeof(type) | ((unsigned)(number) << 24))

typedef int nvmlReturn_t;

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_RESET_REQUIRED = 16,
    NVML_ERROR_IN_USE = 19,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_INSUFFICIENT_RESOURCES = 23,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
};

/* A handle is the address of one of these and stays good across changes of the state. */
struct device {
    uint64_t gpu;
    uint64_t gpu_instance, compute_instance; /* of a MIG device; ABSENT on a whole GPU */
    uint64_t serial;                         /* of the compute instance when the handle was given out */
};
typedef struct device *nvmlDevice_t;

/* The state with its faults, as the last call found it. Only valid between begin and end. */
extern struct state current;

extern unsigned initialized; /* as often as nvmlInit was called and nvmlShutdown was not */

/* Every function begins with one of these, which take the lock of this process and bring `current` up to date, and ends with
 * end(), also where they fail. */
nvmlReturn_t begin(void);
nvmlReturn_t begin_system(void);                                   /* works without nvmlInit */
nvmlReturn_t begin_gpu(nvmlDevice_t device, struct gpu **gpu);     /* a whole GPU; a MIG device is refused as the driver does */
nvmlReturn_t begin_device(nvmlDevice_t device, struct gpu **gpu);  /* a GPU, or a MIG device whose instance still exists */
nvmlReturn_t end(nvmlReturn_t result);

/* A change of the state. change_begin takes the lock of the machine beside that of the process, and gives what the file itself
 * says (no faults in it); judge by `current`, write into `written`, then change_end(NVML_SUCCESS) puts the file in its place, and
 * any other result leaves it as it was. It refuses who is not root. Replaces begin() and end(). */
nvmlReturn_t change_begin(struct state **written);
nvmlReturn_t change_begin_gpu(nvmlDevice_t device, struct state **written, struct gpu **gpu); /* and finds a whole GPU */
nvmlReturn_t change_end(nvmlReturn_t result);

/* The GPU or MIG device of a handle inside a change; NVML_SUCCESS or the error of begin_gpu. */
nvmlReturn_t check_gpu(nvmlDevice_t device, struct gpu **gpu);

static inline bool is_mig_device(nvmlDevice_t device) { return device->gpu_instance != ABSENT; }

/* Handles of whole GPUs, and of MIG devices that exist. */
nvmlDevice_t handle_of_gpu(size_t gpu);
nvmlDevice_t handle_of_mig(size_t gpu, size_t gpu_instance, size_t compute_instance);

/* Answers of one kind: refuse a missing target, NOT_SUPPORTED for what the state does not say. */
nvmlReturn_t give_text(const char *text, char *buffer, unsigned length);
nvmlReturn_t give_number(uint64_t number, unsigned *target);
nvmlReturn_t give_long(uint64_t number, unsigned long long *target);
nvmlReturn_t give_pair(uint64_t first, uint64_t second, unsigned *first_target, unsigned *second_target);

/* The functions that answer with one key of a whole GPU's state. */
#define GIVES_TEXT(function, member)                                                                                             \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, char *text, unsigned length) {                                             \
        struct gpu *gpu;                                                                                                         \
        nvmlReturn_t result = begin_gpu(device, &gpu);                                                                           \
        return end(result == NVML_SUCCESS ? give_text(gpu->member, text, length) : result);                                      \
    }
#define GIVES_NUMBER(function, member)                                                                                           \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *number) {                                                        \
        struct gpu *gpu;                                                                                                         \
        nvmlReturn_t result = begin_gpu(device, &gpu);                                                                           \
        return end(result == NVML_SUCCESS ? give_number(gpu->member, number) : result);                                          \
    }
#define GIVES_LONG(function, member)                                                                                             \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned long long *number) {                                              \
        struct gpu *gpu;                                                                                                         \
        nvmlReturn_t result = begin_gpu(device, &gpu);                                                                           \
        return end(result == NVML_SUCCESS ? give_long(gpu->member, number) : result);                                            \
    }

/* The NVML_DEVICE_ARCH_* from which something works differently. */
enum { ARCHITECTURE_AMPERE = 7, ARCHITECTURE_ADA = 8, ARCHITECTURE_HOPPER = 9 };

bool has_instances(const struct gpu *gpu); /* GPU instances of MIG */

/* Writes the UUID of a MIG device, as on hardware a name-based one: same GPU, same place, same UUID. */
void write_mig_uuid(const struct device *device, char text[48]);

/* The processes on a device that are alive now, of one type; NULL for `type` 0 means all. Returns how many were written. */
size_t live_processes(const struct gpu *gpu, char type, const struct process **found);

/* A live process and what it uses now: it grows into what is free on its GPU, or in its GPU instance, and no further. */
struct process_now {
    const struct process *process;
    uint64_t bytes;
};
size_t processes_now(const struct gpu *gpu, struct process_now found[MAX_PROCESSES]);

/* Those of one type that show on a GPU or MIG device, or the error that NVML gives who may not see them. */
nvmlReturn_t list_processes(
    nvmlDevice_t device, const struct gpu *gpu, char type, struct process_now found[MAX_PROCESSES], unsigned *count);

bool is_busy(const struct gpu *gpu); /* something holds the GPU: a live process or a kernel module */

/* All that a reset has to take along, because NVLink joins it to what is chosen; what is chosen included. */
void reset_group(const bool chosen[MAX_GPUS], bool group[MAX_GPUS]);

/* Resets GPUs as nvidia-smi --gpu-reset does: all that are chosen or none. Call inside a change. Where it refuses, `results` says for
 * each GPU whether it is the reason, and `why` is one sentence about the first of them. */
enum { RESET_WHY = 256 };
nvmlReturn_t reset_gpus(struct state *written, const bool chosen[MAX_GPUS], nvmlReturn_t results[MAX_GPUS], char why[RESET_WHY]);

/* Whether a link carries data, how many do, and whether two GPUs reach each other's memory over links that do. */
bool link_is_active(const struct gpu *gpu, size_t link);
unsigned links_to_switches(const struct gpu *gpu);
unsigned links_to_gpu(const struct gpu *gpu, const struct gpu *other);
bool joined_by_nvlink(const struct gpu *gpu, const struct gpu *other);

/* Which NVML_NVLINK_VERSION_* the links of a GPU are; ABSENT where the state does not say. */
uint64_t link_version(const struct gpu *gpu);

/* How often a link erred; ABSENT where the state does not say. */
enum link_error { LINK_REPLAYS, LINK_RECOVERIES, LINK_CRC };
uint64_t link_errors(const struct gpu *gpu, size_t link, enum link_error error);

/* How near two GPUs are on the PCIe bus, one of NVML_TOPOLOGY_*. */
unsigned common_ancestor(const struct gpu *gpu, const struct gpu *other);

/* Makes every event set invalid; called when the library is shut down. */
void forget_event_sets(void);

#endif
