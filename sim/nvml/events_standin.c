/* Events: XIDs, ECC errors, changes of the MIG configuration. A set gets those that happened after it registered, each once. */
#include "nvml_standin.h"

#include <string.h>
#include <time.h>

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

_Static_assert(sizeof(nvmlEventData_t) == 32, "as in pynvml");

enum { SINGLE_BIT_ECC = 0x1, DOUBLE_BIT_ECC = 0x2, XID = 0x8, MIG_CONFIG = 0x100 }; /* nvmlEventType* */
enum { TYPES = 9, MAX_SETS = 64, POLL_MILLISECONDS = 50 };

struct event_set {
    bool exists;
    uint64_t last;                      /* number of the event that was given out last */
    uint64_t types[MAX_GPUS];           /* registered */
    uint64_t after[MAX_GPUS][TYPES];    /* by the bit of a type: the last event before it was registered */
};
typedef struct event_set *nvmlEventSet_t;

static struct event_set sets[MAX_SETS];

void forget_event_sets(void) { memset(sets, 0, sizeof(sets)); }

static nvmlReturn_t check_set(nvmlEventSet_t set) {
    const char *place = (const char *)set;
    bool inside = place >= (char *)sets && place < (char *)(sets + MAX_SETS);
    bool at_start = inside && (size_t)(place - (char *)sets) % sizeof(*set) == 0;
    return at_start && set->exists ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    nvmlReturn_t result = begin();
    if (result != NVML_SUCCESS)
        return end(result);
    if (set == NULL)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    for (size_t i = 0; i < MAX_SETS; i++)
        if (!sets[i].exists) {
            memset(&sets[i], 0, sizeof(sets[i]));
            sets[i].exists = true;
            *set = &sets[i];
            return end(NVML_SUCCESS);
        }
    return end(NVML_ERROR_MEMORY);
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    nvmlReturn_t result = begin();
    if (result == NVML_SUCCESS)
        result = check_set(set);
    if (result == NVML_SUCCESS)
        set->exists = false;
    return end(result);
}

/* ---- registration ---- */

static uint64_t supported_types(const struct gpu *gpu) {
    uint64_t types = XID;
    types |= gpu->ecc_current == ABSENT ? 0 : SINGLE_BIT_ECC | DOUBLE_BIT_ECC;
    types |= gpu->mig_current == ABSENT ? 0 : MIG_CONFIG;
    return types;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    return end(result == NVML_SUCCESS ? give_long(supported_types(gpu), types) : result);
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS)
        result = check_set(set);
    if (result == NVML_SUCCESS && (types & ~supported_types(gpu)) != 0)
        result = NVML_ERROR_NOT_SUPPORTED;
    if (result != NVML_SUCCESS)
        return end(result);
    for (unsigned bit = 0; bit < TYPES; bit++)
        if ((types & ~set->types[device->gpu]) >> bit & 1)
            set->after[device->gpu][bit] = current.events_made == ABSENT ? 0 : current.events_made;
    set->types[device->gpu] |= types;
    return end(NVML_SUCCESS);
}

/* ---- waiting ---- */

static bool is_wanted(const struct event_set *set, const struct event *event) {
    if (event->number <= set->last || event->gpu >= MAX_GPUS || (event->type & set->types[event->gpu]) == 0)
        return false;
    for (unsigned bit = 0; bit < TYPES; bit++)
        if (event->type >> bit & 1)
            return event->number > set->after[event->gpu][bit];
    return false;
}

/* Who registered a GPU that is lost hears of it once no event is left. */
static bool has_lost_gpu(const struct event_set *set) {
    for (size_t i = 0; i < current.gpus_count; i++)
        if (set->types[i] != 0 && current.gpus[i].lost == 1)
            return true;
    return false;
}

/* The next event of a set; TIMEOUT where there is none yet. */
static nvmlReturn_t take_event(nvmlEventSet_t set, nvmlEventData_t *data) {
    for (size_t i = 0; i < current.events_count; i++) {
        const struct event *event = &current.events[i];
        if (!is_wanted(set, event))
            continue;
        set->last = event->number;
        *data = (nvmlEventData_t){
            .device = handle_of_gpu(event->gpu),
            .eventType = event->type,
            .eventData = event->data,
            .gpuInstanceId = (unsigned)event->gpu_instance,
            .computeInstanceId = (unsigned)event->compute_instance,
        };
        return NVML_SUCCESS;
    }
    return has_lost_gpu(set) ? NVML_ERROR_GPU_IS_LOST : NVML_ERROR_TIMEOUT;
}

static uint64_t milliseconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Looks for news several times a second, without the lock in between. */
static nvmlReturn_t wait_for(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout) {
    uint64_t until = milliseconds_now() + timeout;
    for (;;) {
        nvmlReturn_t result = begin();
        if (result == NVML_SUCCESS)
            result = check_set(set);
        if (result == NVML_SUCCESS)
            result = take_event(set, data);
        end(result);
        uint64_t now = milliseconds_now();
        if (result != NVML_ERROR_TIMEOUT || now >= until)
            return result;
        uint64_t pause = until - now < POLL_MILLISECONDS ? until - now : POLL_MILLISECONDS;
        nanosleep(&(struct timespec){0, (long)pause * 1000000}, NULL);
    }
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout) {
    nvmlEventData_t found;
    nvmlReturn_t result = end(begin());
    if (result == NVML_SUCCESS && data == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        result = wait_for(set, &found, timeout);
    if (result == NVML_SUCCESS)
        *data = found;
    return result;
}

/* Version 1 knows nothing of MIG: its struct ends before the ids of the instances. */
EXPORT nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout) {
    nvmlEventData_t found;
    nvmlReturn_t result = data == NULL ? nvmlEventSetWait_v2(set, NULL, 0) : nvmlEventSetWait_v2(set, &found, timeout);
    if (result == NVML_SUCCESS)
        memcpy(data, &found, offsetof(nvmlEventData_t, gpuInstanceId));
    return result;
}
