/* The state of this process: the file that was read last, the lock around it, the handles that were given out. */
#include "nvml_standin.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct state current;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct state incoming;
static struct stat seen; /* the file that was read last */
static bool damaged;     /* it could not be understood; that was said once */
static struct state *changed;
static int change_lock = -1;
unsigned initialized;

static bool same_file(const struct stat *a, const struct stat *b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static nvmlReturn_t tell(const char *path, const char *problem) {
    fprintf(stderr, "libnvidia-ml-standin: %s: %s.\n", path, problem);
    return NVML_ERROR_UNKNOWN;
}

/* Brings `current` up to date. */
static nvmlReturn_t refresh(void) {
    struct stat now;
    const char *path = state_path();
    if (stat(path, &now) != 0)
        return NVML_ERROR_DRIVER_NOT_LOADED; /* as the real library without a driver */
    if (same_file(&now, &seen))
        return damaged ? NVML_ERROR_UNKNOWN : NVML_SUCCESS;
    const char *problem = state_read(path, NULL, &incoming);
    seen = now;
    damaged = problem != NULL;
    if (damaged)
        return tell(path, problem);
    memcpy(&current, &incoming, sizeof(current));
    return NVML_SUCCESS;
}

nvmlReturn_t begin_system(void) {
    pthread_mutex_lock(&lock);
    return refresh();
}

nvmlReturn_t begin(void) {
    pthread_mutex_lock(&lock);
    return initialized == 0 ? NVML_ERROR_UNINITIALIZED : refresh();
}

nvmlReturn_t end(nvmlReturn_t result) {
    pthread_mutex_unlock(&lock);
    return result;
}

/* A child of fork() gets the lock free and the state whole, whatever other threads of its parent were doing. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(before_fork, after_fork, after_fork); }

/* ---- handles ---- */

static struct device whole[MAX_GPUS];
static struct device parts[MAX_GPUS][MAX_INSTANCES][MAX_COMPUTE];

nvmlDevice_t handle_of_gpu(size_t gpu) {
    whole[gpu] = (struct device){gpu, ABSENT, ABSENT, 0};
    return &whole[gpu];
}

nvmlDevice_t handle_of_mig(size_t gpu, size_t gpu_instance, size_t compute_instance) {
    struct device *device = &parts[gpu][gpu_instance][compute_instance];
    uint64_t serial = current.gpus[gpu].instances[gpu_instance].compute[compute_instance].serial;
    *device = (struct device){gpu, gpu_instance, compute_instance, serial};
    return device;
}

static bool is_handle(const struct device *device) {
    const char *place = (const char *)device;
    bool of_gpu = place >= (char *)whole && place < (char *)(whole + MAX_GPUS) &&
                  (size_t)(place - (char *)whole) % sizeof(struct device) == 0;
    bool of_part = place >= (char *)parts && place < (char *)(parts + MAX_GPUS) &&
                   (size_t)(place - (char *)parts) % sizeof(struct device) == 0;
    return (of_gpu && device->gpu_instance == ABSENT) || (of_part && device->serial != 0);
}

static nvmlReturn_t check_device(nvmlDevice_t device, struct gpu **gpu) {
    if (!is_handle(device) || device->gpu >= current.gpus_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *gpu = &current.gpus[device->gpu];
    if ((*gpu)->lost == 1)
        return NVML_ERROR_GPU_IS_LOST;
    if (!is_mig_device(device))
        return NVML_SUCCESS;
    const struct gpu_instance *instance = &(*gpu)->instances[device->gpu_instance];
    const struct compute_instance *compute = &instance->compute[device->compute_instance];
    return instance->exists && compute->exists && compute->serial == device->serial ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t check_gpu(nvmlDevice_t device, struct gpu **gpu) {
    nvmlReturn_t result = check_device(device, gpu);
    return result == NVML_SUCCESS && is_mig_device(device) ? NVML_ERROR_INVALID_ARGUMENT : result;
}

nvmlReturn_t begin_device(nvmlDevice_t device, struct gpu **gpu) {
    nvmlReturn_t result = begin();
    return result == NVML_SUCCESS ? check_device(device, gpu) : result;
}

nvmlReturn_t begin_gpu(nvmlDevice_t device, struct gpu **gpu) {
    nvmlReturn_t result = begin_device(device, gpu);
    /* What is asked of a MIG device and has an answer for whole GPUs alone is NOT_SUPPORTED. */
    return result == NVML_SUCCESS && is_mig_device(device) ? NVML_ERROR_NOT_SUPPORTED : result;
}

/* ---- changes ---- */

nvmlReturn_t change_begin(struct state **written) {
    nvmlReturn_t result = begin();
    if (result == NVML_SUCCESS && current.root_only == 1 && geteuid() != 0)
        result = NVML_ERROR_NO_PERMISSION;
    if (result != NVML_SUCCESS)
        return result;
    const char *path = state_path();
    change_lock = state_lock(path);
    changed = malloc(sizeof(*changed));
    if (change_lock < 0 || changed == NULL)
        return tell(path, "it cannot be locked");
    const char *problem = state_read(path, changed, &incoming);
    if (problem != NULL)
        return tell(path, problem);
    memcpy(&current, &incoming, sizeof(current));
    memset(&seen, 0, sizeof(seen));
    *written = changed;
    return NVML_SUCCESS;
}

nvmlReturn_t change_begin_gpu(nvmlDevice_t device, struct state **written, struct gpu **gpu) {
    nvmlReturn_t result = change_begin(written);
    return result == NVML_SUCCESS ? check_gpu(device, gpu) : result;
}

nvmlReturn_t change_end(nvmlReturn_t result) {
    if (result == NVML_SUCCESS && changed != NULL) {
        const char *problem = state_write(state_path(), changed);
        if (problem != NULL)
            result = tell(state_path(), problem);
    }
    free(changed);
    changed = NULL;
    if (change_lock >= 0)
        state_unlock(change_lock);
    change_lock = -1;
    return end(result);
}

/* ---- answers ---- */

nvmlReturn_t give_text(const char *text, char *buffer, unsigned length) {
    if (buffer == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (text[0] == '\0')
        return NVML_ERROR_NOT_SUPPORTED;
    if (strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(buffer, text, strlen(text) + 1);
    return NVML_SUCCESS;
}

nvmlReturn_t give_number(uint64_t number, unsigned *target) {
    if (target == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (number == ABSENT)
        return NVML_ERROR_NOT_SUPPORTED;
    *target = (unsigned)number;
    return NVML_SUCCESS;
}

nvmlReturn_t give_long(uint64_t number, unsigned long long *target) {
    if (target == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (number == ABSENT)
        return NVML_ERROR_NOT_SUPPORTED;
    *target = number;
    return NVML_SUCCESS;
}

nvmlReturn_t give_pair(uint64_t first, uint64_t second, unsigned *first_target, unsigned *second_target) {
    if (first_target == NULL || second_target == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = give_number(first, first_target);
    return result == NVML_SUCCESS ? give_number(second, second_target) : result;
}
