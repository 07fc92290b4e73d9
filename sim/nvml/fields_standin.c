/* nvmlDeviceGetFieldValues: many numbers with one call, each with its type and its own error. */
#include "nvml_standin.h"

#include <string.h>
#include <time.h>

typedef union {
    double dVal;
    unsigned uiVal;
    unsigned long ulVal;
    unsigned long long ullVal;
    long long sllVal;
    int siVal;
    unsigned short usVal;
} nvmlValue_t;

typedef struct {
    unsigned fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned valueType;
    nvmlReturn_t nvmlReturn;
    nvmlValue_t value;
} nvmlFieldValue_t;

_Static_assert(sizeof(nvmlFieldValue_t) == 40, "as in pynvml");

enum { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3, SIGNED_INT = 5 }; /* NVML_VALUE_TYPE_* */
enum { POWER_SCOPE_GPU = 0 };                                      /* NVML_POWER_SCOPE_* */
enum { RECOVERY_BY_RESET = 1, RECOVERY_BY_DRAIN_AND_RESET = 4 };   /* NVML_GPU_RECOVERY_ACTION_* */

/* NVML_FI_DEV_*, by the names that pynvml gives them. */
enum {
    ECC_CURRENT = 1,
    ECC_PENDING = 2,
    ECC_SBE_VOL_TOTAL = 3,
    ECC_DBE_VOL_TOTAL = 4,
    ECC_SBE_AGG_TOTAL = 5,
    ECC_DBE_AGG_TOTAL = 6,
    ECC_SBE_VOL_DEV = 11,
    ECC_DBE_VOL_DEV = 12,
    ECC_SBE_AGG_DEV = 22,
    ECC_DBE_AGG_DEV = 23,
    RETIRED_SBE = 29,
    RETIRED_DBE = 30,
    RETIRED_PENDING = 31,
    NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL = 38,
    NVLINK_REPLAY_ERROR_COUNT_TOTAL = 52,
    NVLINK_RECOVERY_ERROR_COUNT_TOTAL = 59,
    PERF_POLICY_POWER = 74,
    PERF_POLICY_THERMAL = 75,
    MEMORY_TEMP = 82,
    TOTAL_ENERGY_CONSUMPTION = 83,
    NVLINK_SPEED_MBPS_L0 = 84,
    NVLINK_SPEED_MBPS_L5 = 89,
    NVLINK_SPEED_MBPS_COMMON = 90,
    NVLINK_LINK_COUNT = 91,
    PCIE_REPLAY_COUNTER = 94,
    NVLINK_SPEED_MBPS_L6 = 132,
    NVLINK_SPEED_MBPS_L11 = 137,
    REMAPPED_COR = 142,
    REMAPPED_UNC = 143,
    REMAPPED_PENDING = 144,
    REMAPPED_FAILURE = 145,
    NVSWITCH_CONNECTED_LINK_COUNT = 147,
    NVLINK_ERROR_DL_REPLAY = 161,
    NVLINK_ERROR_DL_RECOVERY = 162,
    NVLINK_ERROR_DL_CRC = 163,
    NVLINK_GET_SPEED = 164,
    NVLINK_GET_STATE = 165,
    NVLINK_GET_VERSION = 166,
    IS_RESETLESS_MIG_SUPPORTED = 184,
    POWER_AVERAGE = 185,
    POWER_INSTANT = 186,
    POWER_MIN_LIMIT = 187,
    POWER_MAX_LIMIT = 188,
    POWER_DEFAULT_LIMIT = 189,
    POWER_CURRENT_LIMIT = 190,
    ENERGY = 191,
    POWER_REQUESTED_LIMIT = 192,
    TEMPERATURE_SHUTDOWN_TLIMIT = 193,
    TEMPERATURE_SLOWDOWN_TLIMIT = 194,
    TEMPERATURE_MEM_MAX_TLIMIT = 195,
    TEMPERATURE_GPU_MAX_TLIMIT = 196,
    RESET_STATUS = 226,
    DRAIN_AND_RESET_STATUS = 227,
    GET_GPU_RECOVERY_ACTION = 230,
};

/* The fields that are one key of the state. */
static const struct {
    unsigned id, type;
    size_t place;
} keys[] = {
    {ECC_CURRENT, UNSIGNED_INT, offsetof(struct gpu, ecc_current)},
    {ECC_PENDING, UNSIGNED_INT, offsetof(struct gpu, ecc_pending)},
    {ECC_SBE_VOL_TOTAL, UNSIGNED_LONG_LONG, offsetof(struct gpu, ecc_volatile_corrected)},
    {ECC_DBE_VOL_TOTAL, UNSIGNED_LONG_LONG, offsetof(struct gpu, ecc_volatile_uncorrected)},
    {ECC_SBE_AGG_TOTAL, UNSIGNED_LONG_LONG, offsetof(struct gpu, ecc_aggregate_corrected)},
    {ECC_DBE_AGG_TOTAL, UNSIGNED_LONG_LONG, offsetof(struct gpu, ecc_aggregate_uncorrected)},
    {ECC_SBE_VOL_DEV, UNSIGNED_LONG_LONG, offsetof(struct gpu, ecc_volatile_corrected)},
    {ECC_DBE_VOL_DEV, UNSIGNED_LONG_LONG, offsetof(struct gpu, ecc_volatile_uncorrected)},
    {ECC_SBE_AGG_DEV, UNSIGNED_LONG_LONG, offsetof(struct gpu, ecc_aggregate_corrected)},
    {ECC_DBE_AGG_DEV, UNSIGNED_LONG_LONG, offsetof(struct gpu, ecc_aggregate_uncorrected)},
    {RETIRED_SBE, UNSIGNED_INT, offsetof(struct gpu, retired_single_bit)},
    {RETIRED_DBE, UNSIGNED_INT, offsetof(struct gpu, retired_double_bit)},
    {RETIRED_PENDING, UNSIGNED_INT, offsetof(struct gpu, retirement_pending)},
    {NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, UNSIGNED_LONG_LONG, offsetof(struct gpu, nvlink_crc_errors)},
    {NVLINK_REPLAY_ERROR_COUNT_TOTAL, UNSIGNED_LONG_LONG, offsetof(struct gpu, nvlink_replay_errors)},
    {NVLINK_RECOVERY_ERROR_COUNT_TOTAL, UNSIGNED_LONG_LONG, offsetof(struct gpu, nvlink_recovery_errors)},
    {PERF_POLICY_POWER, UNSIGNED_LONG_LONG, offsetof(struct gpu, violation_power_nanoseconds)},
    {PERF_POLICY_THERMAL, UNSIGNED_LONG_LONG, offsetof(struct gpu, violation_thermal_nanoseconds)},
    {MEMORY_TEMP, UNSIGNED_INT, offsetof(struct gpu, temperature_memory_celsius)},
    {TOTAL_ENERGY_CONSUMPTION, UNSIGNED_LONG_LONG, offsetof(struct gpu, energy_millijoules)},
    {NVLINK_SPEED_MBPS_COMMON, UNSIGNED_INT, offsetof(struct gpu, nvlink_mbps)},
    {PCIE_REPLAY_COUNTER, UNSIGNED_INT, offsetof(struct gpu, pcie_replays)},
    {POWER_AVERAGE, UNSIGNED_INT, offsetof(struct gpu, power_milliwatts)},
    {POWER_INSTANT, UNSIGNED_INT, offsetof(struct gpu, power_milliwatts)},
    {POWER_MIN_LIMIT, UNSIGNED_INT, offsetof(struct gpu, power_limit_min_milliwatts)},
    {POWER_MAX_LIMIT, UNSIGNED_INT, offsetof(struct gpu, power_limit_max_milliwatts)},
    {POWER_DEFAULT_LIMIT, UNSIGNED_INT, offsetof(struct gpu, power_limit_default_milliwatts)},
    {POWER_CURRENT_LIMIT, UNSIGNED_INT, offsetof(struct gpu, power_limit_milliwatts)},
    {ENERGY, UNSIGNED_LONG_LONG, offsetof(struct gpu, energy_millijoules)},
    {POWER_REQUESTED_LIMIT, UNSIGNED_INT, offsetof(struct gpu, power_limit_milliwatts)},
    {GET_GPU_RECOVERY_ACTION, UNSIGNED_INT, offsetof(struct gpu, recovery_action)},
};

struct answer {
    unsigned type;
    uint64_t number; /* ABSENT: not supported */
};

/* How far below the highest operating temperature a threshold lies; negative above it. Ada and later say it so. */
static struct answer limit(const struct gpu *gpu, uint64_t highest, uint64_t threshold) {
    bool told = gpu->architecture != ABSENT && gpu->architecture >= ARCHITECTURE_ADA && highest != ABSENT && threshold != ABSENT;
    return (struct answer){SIGNED_INT, told ? (uint64_t)(unsigned)(highest - threshold) : ABSENT};
}

static struct answer temperature(const struct gpu *gpu, unsigned id) {
    switch (id) {
    case TEMPERATURE_SHUTDOWN_TLIMIT: return limit(gpu, gpu->temperature_max_celsius, gpu->temperature_shutdown_celsius);
    case TEMPERATURE_SLOWDOWN_TLIMIT: return limit(gpu, gpu->temperature_max_celsius, gpu->temperature_slowdown_celsius);
    case TEMPERATURE_MEM_MAX_TLIMIT: return limit(gpu, gpu->temperature_memory_max_celsius, gpu->temperature_memory_max_celsius);
    default: return limit(gpu, gpu->temperature_max_celsius, gpu->temperature_max_celsius);
    }
}

/* What is told of one link, whose number is the scope. */
static struct answer of_link(const struct gpu *gpu, unsigned id, unsigned link) {
    if (link >= gpu->nvlinks_count)
        return (struct answer){UNSIGNED_INT, ABSENT};
    switch (id) {
    case NVLINK_ERROR_DL_REPLAY: return (struct answer){UNSIGNED_LONG_LONG, link_errors(gpu, link, LINK_REPLAYS)};
    case NVLINK_ERROR_DL_RECOVERY: return (struct answer){UNSIGNED_LONG_LONG, link_errors(gpu, link, LINK_RECOVERIES)};
    case NVLINK_ERROR_DL_CRC: return (struct answer){UNSIGNED_LONG_LONG, link_errors(gpu, link, LINK_CRC)};
    case NVLINK_GET_STATE: return (struct answer){UNSIGNED_INT, link_is_active(gpu, link)};
    case NVLINK_GET_VERSION: return (struct answer){UNSIGNED_INT, link_version(gpu)};
    default: return (struct answer){UNSIGNED_INT, link_is_active(gpu, link) ? gpu->nvlink_mbps : 0};
    }
}

static struct answer rows(const struct gpu *gpu, unsigned id) {
    const uint64_t numbers[] = {gpu->remapped_correctable, gpu->remapped_uncorrectable, gpu->remap_pending, gpu->remap_failure};
    return (struct answer){UNSIGNED_INT, has_instances(gpu) ? ABSENT : numbers[id - REMAPPED_COR]};
}

static struct answer key(const struct gpu *gpu, unsigned id) {
    struct answer answer = {UNSIGNED_INT, ABSENT};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
        if (keys[i].id == id) {
            answer.type = keys[i].type;
            memcpy(&answer.number, (const char *)gpu + keys[i].place, sizeof(answer.number));
        }
    return answer;
}

static struct answer answer_of(const struct gpu *gpu, unsigned id, unsigned scope) {
    if (id >= NVLINK_SPEED_MBPS_L0 && id <= NVLINK_SPEED_MBPS_L5)
        return of_link(gpu, NVLINK_GET_SPEED, id - NVLINK_SPEED_MBPS_L0);
    if (id >= NVLINK_SPEED_MBPS_L6 && id <= NVLINK_SPEED_MBPS_L11)
        return of_link(gpu, NVLINK_GET_SPEED, id - NVLINK_SPEED_MBPS_L6 + 6);
    if (id >= NVLINK_ERROR_DL_REPLAY && id <= NVLINK_GET_VERSION)
        return of_link(gpu, id, scope);
    if (id >= REMAPPED_COR && id <= REMAPPED_FAILURE)
        return rows(gpu, id);
    if (id >= TEMPERATURE_SHUTDOWN_TLIMIT && id <= TEMPERATURE_GPU_MAX_TLIMIT)
        return temperature(gpu, id);
    if (id >= POWER_AVERAGE && id <= POWER_REQUESTED_LIMIT && scope != POWER_SCOPE_GPU)
        return (struct answer){UNSIGNED_INT, ABSENT}; /* no module, no memory has a reading of its own */
    if (id == RESET_STATUS || id == DRAIN_AND_RESET_STATUS) {
        uint64_t action = id == RESET_STATUS ? RECOVERY_BY_RESET : RECOVERY_BY_DRAIN_AND_RESET;
        return (struct answer){UNSIGNED_INT, gpu->recovery_action == ABSENT ? ABSENT : gpu->recovery_action == action};
    }
    if (id == NVLINK_LINK_COUNT)
        return (struct answer){UNSIGNED_INT, gpu->nvlinks_count == 0 ? ABSENT : gpu->nvlinks_count};
    if (id == NVSWITCH_CONNECTED_LINK_COUNT)
        return (struct answer){UNSIGNED_INT, gpu->nvlinks_count == 0 ? ABSENT : links_to_switches(gpu)};
    if (id == IS_RESETLESS_MIG_SUPPORTED)
        return (struct answer){UNSIGNED_INT, gpu->mig_current == ABSENT ? ABSENT : gpu->mig_needs_reset != 1};
    return key(gpu, id);
}

static void give_field(const struct gpu *gpu, nvmlFieldValue_t *field, long long now) {
    struct answer answer = answer_of(gpu, field->fieldId, field->scopeId);
    field->timestamp = now;
    field->latencyUsec = 0;
    field->valueType = answer.type;
    field->nvmlReturn = answer.number == ABSENT ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
    field->value.ullVal = 0;
    if (answer.number == ABSENT)
        return;
    if (answer.type == UNSIGNED_LONG_LONG)
        field->value.ullVal = answer.number;
    else
        field->value.uiVal = (unsigned)answer.number; /* a signed number has the same bits */
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS && (count <= 0 || values == NULL))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS)
        return end(result);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < count; i++)
        give_field(gpu, &values[i], (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000);
    return end(NVML_SUCCESS);
}
