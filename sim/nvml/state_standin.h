/* The state of the simulated hardware, as the stand-in of NVML reads it from its state file. */
#ifndef GPUREADY_STATE_STANDIN_H
#define GPUREADY_STATE_STANDIN_H

#include <stddef.h>
#include <stdint.h>

#define STATE_FORMAT "gpuready-standin 1" /* first line of the file; another number is another format */
#define STATE_PATH "/var/lib/gpuready-standin/gpus.conf"
#define STATE_PATH_VARIABLE "GPUREADY_STANDIN_STATE"

#define MAX_GPUS 16
#define MAX_PROCESSES 64
#define ABSENT UINT64_MAX /* the file does not say; the call answers NVML_ERROR_NOT_SUPPORTED */

struct process {
    uint64_t pid;
    uint64_t used_bytes;
};

struct gpu {
    char name[96];
    char uuid[80];
    char serial[30];
    char pci_address[16]; /* domain:bus:device.function, e.g. 0000:1b:00.0 */
    unsigned domain, bus, device;
    uint64_t minor;
    uint64_t pci_device_id;    /* device and vendor as NVML packs them, e.g. 0x233010de */
    uint64_t pci_subsystem_id; /* likewise, e.g. 0x16c110de */
    uint64_t memory_total_bytes;
    uint64_t memory_reserved_bytes;
    uint64_t memory_used_bytes; /* used, but by no listed process */
    uint64_t compute_capability_major, compute_capability_minor;
    uint64_t brand, architecture; /* NVML_BRAND_*, NVML_DEVICE_ARCH_* */
    uint64_t mig_current, mig_pending, mig_max_devices;
    uint64_t persistence_mode;
    uint64_t ecc_current, ecc_pending;
    uint64_t temperature_celsius;
    uint64_t power_milliwatts, power_limit_milliwatts;
    uint64_t utilization_gpu_percent, utilization_memory_percent;
    uint64_t nvlink_links;
    uint64_t nvlink_active; /* bit n: link n is up */
    uint64_t lost;          /* 1: the GPU has fallen off the bus */
    size_t processes_count;
    struct process processes[MAX_PROCESSES];
};

struct state {
    char driver_version[80];
    char nvml_version[80];
    uint64_t cuda_driver_version; /* 1000 * major + 10 * minor, e.g. 12040 */
    uint64_t init_error;          /* what nvmlInit returns instead of success, e.g. 18 */
    size_t gpus_count;
    struct gpu gpus[MAX_GPUS];
};

/* The path of the state file: the environment's, else the default one. */
const char *state_path(void);

/* Reads the file at `path` into `state`. Returns NULL, or one sentence that says what is wrong with the file;
 * the sentence is valid until the next call. `state` is only complete when NULL was returned. */
const char *state_read(const char *path, struct state *state);

/* Parses domain:bus:device[.function] (hexadecimal; domain may be left out). Returns 0, or -1 if it is no address. */
int state_parse_address(const char *text, unsigned *domain, unsigned *bus, unsigned *device);

#endif
