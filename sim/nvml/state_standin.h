/* The state of the simulated hardware: one text file that every process on the machine reads, and its one form in memory.
 *
 * Under [system] and [gpu N] stand lines `key = value`. Under [fault NAME N] (or [fault NAME system]) stand lines that hold
 * instead of those of GPU N for as long as the section is there: taking a fault away is taking its section away. A line
 * `key = +N` under a fault of a GPU adds to the number that is there. `key = |N` puts the bits of all such lines of its
 * faults together, instead of the number that is there.
 */
#ifndef GPUREADY_STATE_STANDIN_H
#define GPUREADY_STATE_STANDIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define STATE_FORMAT "gpuready-standin 2" /* first line of the file; another number is another format */
#define STATE_PATH "/var/lib/gpuready-standin/gpus.conf"
#define STATE_PATH_VARIABLE "GPUREADY_STANDIN_STATE"

#define MAX_GPUS 16
#define MAX_PROCESSES 64 /* on one GPU */
#define MAX_PROFILES 20
#define MAX_STARTS 12
#define MAX_INSTANCES 16 /* GPU instances of one GPU; ids are below it */
#define MAX_COMPUTE 8    /* compute instances of one GPU instance; ids are below it */
#define MAX_LINKS 36     /* NVML_NVLINK_MAX_LINKS of pynvml 13 */
#define MAX_EVENTS 64    /* the newest that are kept */
#define MAX_FAULTS 64
#define MAX_FAULT_LINES 12
#define ABSENT UINT64_MAX /* the file does not say; the call answers NVML_ERROR_NOT_SUPPORTED */

/* `process = PID BYTES TYPE GI CI [BYTES_PER_MINUTE SINCE]`; TYPE is compute, graphics or mps; GI and CI are `-` outside MIG.
 * With the last two it grows from the Unix time SINCE on. One whose PID is no longer alive is not there. */
struct process {
    uint64_t pid;
    uint64_t used_bytes;
    char type; /* 'c', 'g', 'm' */
    uint64_t gpu_instance, compute_instance; /* ABSENT outside MIG */
    uint64_t bytes_per_minute, since;
};

/* `profile = ENUM ID SLICES MAX SMS CE DEC ENC JPEG OFA MEMORY_MB SIZE STARTS NAME`; STARTS as 0,2,4. What NVML calls a GPU
 * instance profile: ENUM is what nvmlDeviceGetGpuInstanceProfileInfo is asked with, ID what the hardware calls it. */
struct profile {
    uint64_t enumeration, id, slices, maximum, multiprocessors;
    uint64_t copy_engines, decoders, encoders, jpegs, ofas;
    uint64_t memory_mb, size;
    uint64_t starts[MAX_STARTS];
    size_t starts_count;
    char name[32];
};

/* `compute_instance = GI ID PROFILE START SERIAL` */
struct compute_instance {
    bool exists;
    uint64_t profile; /* enumeration of NVML_COMPUTE_INSTANCE_PROFILE_* */
    uint64_t start, size, serial;
};

/* `gpu_instance = ID PROFILE START SERIAL`; PROFILE is a profile's ENUM, SERIAL the number of the creation. */
struct gpu_instance {
    bool exists;
    uint64_t profile; /* enumeration */
    uint64_t start, size, serial;
    struct compute_instance compute[MAX_COMPUTE];
};

/* `nvlink = N REMOTE ADDRESS`; REMOTE is gpu or switch, ADDRESS a PCI address. */
struct nvlink {
    bool exists, down; /* down by `nvlink_down = N` */
    bool to_switch;
    char address[16];
};

struct gpu {
    /* identity */
    char name[96];
    char uuid[80];
    char serial[30];
    char pci_address[16]; /* domain:bus:device.function, e.g. 0000:1b:00.0 */
    char vbios_version[32];
    char board_part_number[32];
    unsigned domain, bus, device;
    uint64_t minor, module_id;
    uint64_t pci_device_id;    /* device and vendor as NVML packs them, e.g. 0x233010de */
    uint64_t pci_subsystem_id; /* likewise, e.g. 0x16c110de */
    uint64_t compute_capability_major, compute_capability_minor;
    uint64_t brand, architecture; /* NVML_BRAND_*, NVML_DEVICE_ARCH_* */
    uint64_t cores, memory_bus_bits;
    /* memory */
    uint64_t memory_total_bytes, memory_reserved_bytes;
    uint64_t memory_used_bytes; /* used, but by no listed process */
    uint64_t bar1_total_bytes, bar1_used_bytes;
    size_t processes_count;
    struct process processes[MAX_PROCESSES];
    /* modes */
    uint64_t compute_mode, persistence_mode;
    char held_by_module[32]; /* a kernel module that keeps the GPU from being reset, e.g. nvidia_drm */
    uint64_t lost;           /* 1: the GPU has fallen off the bus */
    uint64_t reset_stuck;    /* 1: a reset fails */
    /* clocks in MHz, power in mW, energy in mJ, temperatures in degrees Celsius */
    uint64_t clock_graphics, clock_sm, clock_memory, clock_video;
    uint64_t clock_graphics_max, clock_sm_max, clock_memory_max, clock_video_max;
    uint64_t performance_state, throttle_reasons;
    uint64_t violation_power_nanoseconds, violation_thermal_nanoseconds; /* how long clocks were held down */
    uint64_t power_milliwatts, power_limit_milliwatts, power_limit_default_milliwatts;
    uint64_t power_limit_min_milliwatts, power_limit_max_milliwatts, energy_millijoules;
    uint64_t temperature_celsius, temperature_memory_celsius;
    uint64_t temperature_slowdown_celsius, temperature_shutdown_celsius, temperature_max_celsius;
    uint64_t temperature_memory_max_celsius;
    uint64_t fan_percent;
    uint64_t utilization_gpu_percent, utilization_memory_percent;
    uint64_t utilization_encoder_percent, utilization_decoder_percent;
    /* health */
    uint64_t ecc_current, ecc_pending;
    uint64_t ecc_volatile_corrected, ecc_volatile_uncorrected, ecc_aggregate_corrected, ecc_aggregate_uncorrected;
    uint64_t remapped_correctable, remapped_uncorrectable, remap_pending, remap_failure; /* Ampere and later */
    uint64_t remapper_banks;                                                             /* memory banks that have spare rows */
    uint64_t retired_single_bit, retired_double_bit, retirement_pending;                /* before Ampere */
    uint64_t recovery_action; /* NVML_GPU_RECOVERY_ACTION_* */
    /* PCI and topology */
    uint64_t pcie_generation, pcie_generation_max, pcie_width, pcie_width_max, pcie_replays;
    uint64_t numa_node;
    char cpu_affinity[64];        /* as in sysfs, e.g. 0-55,112-167 */
    uint64_t pcie_root;           /* GPUs of one number share a host bridge */
    uint64_t pcie_switch;         /* GPUs of one number share a PCIe switch */
    uint64_t pcie_peer_to_peer;   /* 1: two GPUs that are joined by PCIe alone reach each other's memory */
    /* NVLink and fabric */
    uint64_t nvlink_version, nvlink_mbps; /* the generation, 1 to 6; of one link */
    uint64_t nvlink_replay_errors, nvlink_recovery_errors, nvlink_crc_errors;
    struct nvlink nvlinks[MAX_LINKS];
    size_t nvlinks_count;
    uint64_t fabric_state, fabric_status, fabric_clique, fabric_health; /* NVML_GPU_FABRIC_STATE_* */
    char fabric_cluster[40];                                            /* a UUID */
    /* MIG */
    uint64_t mig_current, mig_pending; /* ABSENT: this GPU has no MIG */
    uint64_t mig_needs_reset;          /* 1: a change of the mode waits for a reset (Ampere) */
    uint64_t mig_mode_persists;        /* 1: the mode outlives a reboot (Ampere: it is kept in the InfoROM) */
    uint64_t mig_slots;                /* memory slots that placements count in */
    uint64_t mig_mirrored;             /* 1: the ids of the two halves are exchanged, as seen on some boards */
    uint64_t mig_max_devices;
    size_t profiles_count;
    struct profile profiles[MAX_PROFILES];
    struct gpu_instance instances[MAX_INSTANCES]; /* by id */
};

/* `event = NUMBER GPU TYPE DATA GI CI TIME`, under [system]; TYPE is one of nvmlEventType*, DATA an XID, TIME Unix time. */
struct event {
    uint64_t number, gpu, type, data, gpu_instance, compute_instance, time;
};

/* `[fault NAME GPU]`, then `until = clear|reset|reboot`: who takes it away beside the operator. */
struct fault {
    char name[40];
    uint64_t gpu; /* ABSENT: system */
    char until[8];
    size_t lines_count;
    char lines[MAX_FAULT_LINES][128];
};

struct state {
    char driver_version[80];
    char nvml_version[80];
    uint64_t cuda_driver_version; /* 1000 * major + 10 * minor, e.g. 12040 */
    uint64_t init_error;          /* what nvmlInit returns instead of success, e.g. 18 */
    uint64_t root_only;           /* 0: changes need no root, as in `gpusim run` */
    uint64_t serial;              /* of the last instance that was made */
    uint64_t events_made;         /* number of the last event */
    size_t events_count;
    struct event events[MAX_EVENTS];
    size_t gpus_count;
    struct gpu gpus[MAX_GPUS];
    size_t faults_count;
    struct fault faults[MAX_FAULTS];
};

/* The path of the state file: the environment's, else the default one. */
const char *state_path(void);

/* Reads the file at `path`: into `written` what its own lines say, into `effective` that with the faults laid over it. Either may
 * be NULL. Returns NULL, or one sentence that says what is wrong with the file; it is valid until the next call. */
const char *state_read(const char *path, struct state *written, struct state *effective);

/* Replaces the file at `path` as a whole; a reader sees the old or the new. Returns NULL or a sentence. Hold the lock. */
const char *state_write(const char *path, const struct state *written);

/* Takes the lock that every process holds while it changes the file at `path`. Returns a descriptor for state_unlock, or -1. */
int state_lock(const char *path);
void state_unlock(int lock);

/* Adds an event, and forgets the oldest when there are too many. */
void state_add_event(struct state *state, uint64_t gpu, uint64_t type, uint64_t data);

/* Takes the lines of a key out of the faults of a GPU: whoever sets the key has undone that part of them. */
void state_forget_fault_lines(struct state *written, uint64_t gpu, const char *key);

/* What a reset of one GPU does, and what a boot does to all of them. */
void state_after_reset(struct state *written, size_t gpu);
void state_after_boot(struct state *written);

/* The bytes that a process uses now. */
uint64_t process_bytes(const struct process *process, uint64_t now);

/* The profile of that NVML_GPU_INSTANCE_PROFILE_*; NULL when the GPU has none. */
const struct profile *state_find_profile(const struct gpu *gpu, uint64_t enumeration);

/* The slices of that NVML_COMPUTE_INSTANCE_PROFILE_*; 0 when there is none. */
uint64_t state_compute_slices(uint64_t enumeration);

/* Parses domain:bus:device[.function] (hexadecimal; domain may be left out). Returns 0, or -1 if it is no address. */
int state_parse_address(const char *text, unsigned *domain, unsigned *bus, unsigned *device);

#endif
