/* What the two MIG files share. */
#ifndef GPUREADY_MIG_STANDIN_H
#define GPUREADY_MIG_STANDIN_H

#include "nvml_standin.h"

/* A handle of a GPU instance; it goes stale when the instance is destroyed. */
struct gpu_instance_handle {
    size_t gpu, id;
    uint64_t serial;
};
typedef struct gpu_instance_handle *nvmlGpuInstance_t;

typedef struct {
    unsigned start, size;
} nvmlPlacement_t; /* nvmlGpuInstancePlacement_t and nvmlComputeInstancePlacement_t */

_Static_assert(sizeof(nvmlPlacement_t) == 8, "as in pynvml");

/* The profile that the hardware calls by this id; NULL when the GPU has none. */
const struct profile *profile_by_id(const struct gpu *gpu, unsigned id);

/* Begins a call that needs MIG switched on, and finds the profile by the hardware's id. */
nvmlReturn_t begin_profile(nvmlDevice_t device, unsigned id, struct gpu **gpu, const struct profile **profile);

nvmlGpuInstance_t handle_of_gpu_instance(size_t gpu, size_t id);

/* Finds what a handle stands for in `current`; INVALID_ARGUMENT where it is stale. */
nvmlReturn_t check_gpu_instance(nvmlGpuInstance_t handle, struct gpu **gpu, struct gpu_instance **instance);

/* Fills a list in NVML's way: INSUFFICIENT_SIZE with the count where there is no room. */
nvmlReturn_t give_placements(const nvmlPlacement_t *found, unsigned length, nvmlPlacement_t *target, unsigned *count);

#endif
