/* Clocks, power, temperatures and load. */
#include "nvml_standin.h"

#include <time.h>

typedef struct {
    unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned version, sensorType;
    int temperature;
} nvmlTemperature_t;

typedef struct {
    unsigned version;
    int marginTemperature;
} nvmlMarginTemperature_t;

typedef struct {
    unsigned version;
    unsigned char powerScope; /* pynvml passes four bytes, nvidia-smi sets only the first of them */
    unsigned powerValueMw;
} nvmlPowerValue_v2_t;

typedef struct {
    unsigned version, fan, speed;
} nvmlFanSpeedInfo_t;

typedef struct {
    unsigned long long referenceTime, violationTime;
} nvmlViolationTime_t;

_Static_assert(sizeof(nvmlUtilization_t) == 8, "as in pynvml");
_Static_assert(sizeof(nvmlTemperature_t) == 12, "as in pynvml");
_Static_assert(sizeof(nvmlMarginTemperature_t) == 8, "as in pynvml");
_Static_assert(sizeof(nvmlPowerValue_v2_t) == 12, "as in pynvml");
_Static_assert(sizeof(nvmlViolationTime_t) == 16, "as in pynvml");

/* ---- clocks ---- */

enum { CLOCK_GRAPHICS, CLOCK_SM, CLOCK_MEMORY, CLOCK_VIDEO, CLOCKS };

static uint64_t clock_of(const struct gpu *gpu, unsigned type, bool most) {
    switch (type) {
    case CLOCK_GRAPHICS: return most ? gpu->clock_graphics_max : gpu->clock_graphics;
    case CLOCK_SM: return most ? gpu->clock_sm_max : gpu->clock_sm;
    case CLOCK_MEMORY: return most ? gpu->clock_memory_max : gpu->clock_memory;
    default: return most ? gpu->clock_video_max : gpu->clock_video;
    }
}

static nvmlReturn_t give_clock(nvmlDevice_t device, unsigned type, bool most, unsigned *megahertz) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS && type >= CLOCKS)
        result = NVML_ERROR_INVALID_ARGUMENT;
    return end(result == NVML_SUCCESS ? give_number(clock_of(gpu, type, most), megahertz) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned type, unsigned *megahertz) {
    return give_clock(device, type, false, megahertz);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned type, unsigned *megahertz) {
    return give_clock(device, type, true, megahertz);
}
SAME_AS(nvmlDeviceGetMaxClockInfo)
nvmlReturn_t nvmlDeviceGetMaxCustomerBoostClock(nvmlDevice_t device, unsigned type, unsigned *megahertz);

/* Applications clocks are not simulated. */
EXPORT nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, unsigned type, unsigned id, unsigned *megahertz) {
    enum { ID_CURRENT, ID_APPLICATION, ID_APPLICATION_DEFAULT, ID_BOOST_MAX };
    if (id == ID_CURRENT || id == ID_BOOST_MAX)
        return give_clock(device, type, id == ID_BOOST_MAX, megahertz);
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS)
        result = type >= CLOCKS || id > ID_BOOST_MAX ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
    return end(result);
}

GIVES_NUMBER(nvmlDeviceGetPerformanceState, performance_state)
SAME_AS(nvmlDeviceGetPerformanceState) nvmlReturn_t nvmlDeviceGetPowerState(nvmlDevice_t device, unsigned *state);

/* ---- why clocks are held down ---- */

GIVES_LONG(nvmlDeviceGetCurrentClocksEventReasons, throttle_reasons)
SAME_AS(nvmlDeviceGetCurrentClocksEventReasons)
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons);

EXPORT nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) {
    enum { ALL_REASONS = 0x1ff }; /* nvmlClocksEventReasonAll */
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    return end(give_long(gpu->throttle_reasons == ABSENT ? ABSENT : ALL_REASONS, reasons));
}
SAME_AS(nvmlDeviceGetSupportedClocksEventReasons)
nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons);

EXPORT nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, unsigned policy, nvmlViolationTime_t *violation) {
    enum { POLICY_POWER = 0, POLICY_THERMAL = 1, POLICIES = 12 }; /* NVML_PERF_POLICY_* */
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    if (violation == NULL || policy >= POLICIES)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    uint64_t time = policy == POLICY_POWER     ? gpu->violation_power_nanoseconds
                    : policy == POLICY_THERMAL ? gpu->violation_thermal_nanoseconds
                                               : ABSENT;
    if (time == ABSENT)
        return end(NVML_ERROR_NOT_SUPPORTED);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    violation->referenceTime = (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
    violation->violationTime = time;
    return end(NVML_SUCCESS);
}

/* ---- power ---- */

GIVES_NUMBER(nvmlDeviceGetPowerUsage, power_milliwatts)
GIVES_NUMBER(nvmlDeviceGetPowerManagementLimit, power_limit_milliwatts)
GIVES_NUMBER(nvmlDeviceGetEnforcedPowerLimit, power_limit_milliwatts)
GIVES_NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, power_limit_default_milliwatts)
GIVES_LONG(nvmlDeviceGetTotalEnergyConsumption, energy_millijoules)

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementMode(nvmlDevice_t device, unsigned *mode) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    return end(result == NVML_SUCCESS ? give_number(gpu->power_limit_milliwatts != ABSENT, mode) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned *least, unsigned *most) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    return end(give_pair(gpu->power_limit_min_milliwatts, gpu->power_limit_max_milliwatts, least, most));
}

EXPORT nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned milliwatts) {
    struct state *written;
    struct gpu *gpu;
    nvmlReturn_t result = change_begin_gpu(device, &written, &gpu);
    if (result != NVML_SUCCESS)
        return change_end(result);
    if (gpu->power_limit_min_milliwatts == ABSENT || gpu->power_limit_max_milliwatts == ABSENT)
        return change_end(NVML_ERROR_NOT_SUPPORTED);
    if (milliwatts < gpu->power_limit_min_milliwatts || milliwatts > gpu->power_limit_max_milliwatts)
        return change_end(NVML_ERROR_INVALID_ARGUMENT);
    written->gpus[device->gpu].power_limit_milliwatts = milliwatts;
    return change_end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceSetPowerManagementLimit_v2(nvmlDevice_t device, const nvmlPowerValue_v2_t *value) {
    enum { SCOPE_GPU = 0, SCOPES = 4 }; /* NVML_POWER_SCOPE_* */
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS && value == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && value->version != VERSION_OF(nvmlPowerValue_v2_t, 2))
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (result == NVML_SUCCESS && value->powerScope != SCOPE_GPU)
        result = value->powerScope < SCOPES ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT;
    end(result);
    return result == NVML_SUCCESS ? nvmlDeviceSetPowerManagementLimit(device, value->powerValueMw) : result;
}

/* ---- temperatures and fans ---- */

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *celsius) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS && sensor != 0)
        result = NVML_ERROR_INVALID_ARGUMENT;
    return end(result == NVML_SUCCESS ? give_number(gpu->temperature_celsius, celsius) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS && temperature == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && temperature->version != VERSION_OF(nvmlTemperature_t, 1))
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (result == NVML_SUCCESS && temperature->sensorType != 0)
        result = NVML_ERROR_INVALID_ARGUMENT;
    return end(result == NVML_SUCCESS ? give_number(gpu->temperature_celsius, (unsigned *)&temperature->temperature) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned threshold, unsigned *celsius) {
    enum { THRESHOLDS = 8 }; /* NVML_TEMPERATURE_THRESHOLD_COUNT */
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    const uint64_t known[] = {
        gpu->temperature_shutdown_celsius, gpu->temperature_slowdown_celsius, gpu->temperature_memory_max_celsius,
        gpu->temperature_max_celsius};
    if (threshold >= THRESHOLDS)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    return end(give_number(threshold < sizeof(known) / sizeof(known[0]) ? known[threshold] : ABSENT, celsius));
}

/* How far the GPU is from the temperature at which it slows down; Ada and later tell it. */
EXPORT nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_t *margin) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS && margin == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && margin->version != VERSION_OF(nvmlMarginTemperature_t, 1))
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (result != NVML_SUCCESS)
        return end(result);
    bool known = gpu->architecture != ABSENT && gpu->architecture >= ARCHITECTURE_ADA && gpu->temperature_max_celsius != ABSENT &&
                 gpu->temperature_celsius != ABSENT;
    if (known)
        margin->marginTemperature = (int)(unsigned)(gpu->temperature_max_celsius - gpu->temperature_celsius);
    return end(known ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED);
}

GIVES_NUMBER(nvmlDeviceGetFanSpeed, fan_percent)

EXPORT nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned fan, unsigned *percent) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result == NVML_SUCCESS && gpu->fan_percent != ABSENT && fan != 0)
        result = NVML_ERROR_INVALID_ARGUMENT;
    return end(result == NVML_SUCCESS ? give_number(gpu->fan_percent, percent) : result);
}

/* A card that is cooled by its server has none of its own. */
EXPORT nvmlReturn_t nvmlDeviceGetNumFans(nvmlDevice_t device, unsigned *fans) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    return end(result == NVML_SUCCESS ? give_number(gpu->fan_percent == ABSENT ? 0 : 1, fans) : result);
}

/* ---- load; not told while MIG is on ---- */

static nvmlReturn_t begin_load(nvmlDevice_t device, struct gpu **gpu) {
    nvmlReturn_t result = begin_gpu(device, gpu);
    return result == NVML_SUCCESS && (*gpu)->mig_current == 1 ? NVML_ERROR_NOT_SUPPORTED : result;
}

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *load) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_load(device, &gpu);
    if (result == NVML_SUCCESS && load == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS)
        return end(result);
    return end(give_pair(gpu->utilization_gpu_percent, gpu->utilization_memory_percent, &load->gpu, &load->memory));
}

enum { SAMPLING_MICROSECONDS = 167000 }; /* the longest of the API reference: a sixth of a second */

EXPORT nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned *percent, unsigned *microseconds) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_load(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    return end(give_pair(gpu->utilization_encoder_percent, SAMPLING_MICROSECONDS, percent, microseconds));
}

EXPORT nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned *percent, unsigned *microseconds) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_load(device, &gpu);
    if (result != NVML_SUCCESS)
        return end(result);
    return end(give_pair(gpu->utilization_decoder_percent, SAMPLING_MICROSECONDS, percent, microseconds));
}
