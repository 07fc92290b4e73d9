/* ECC, and the memory that was taken out of use. */
#include "nvml_standin.h"

#include <string.h>

typedef struct {
    unsigned version;
    unsigned long long aggregateUncParity, aggregateUncSecDed, aggregateCor, volatileUncParity, volatileUncSecDed, volatileCor,
        aggregateUncBucketL2, aggregateUncBucketSm, aggregateUncBucketPcie, aggregateUncBucketMcu, aggregateUncBucketOther;
    unsigned bThresholdExceeded;
} nvmlEccSramErrorStatus_t;

typedef struct {
    unsigned max, high, partial, low, none;
} nvmlRowRemapperHistogramValues_t;

typedef struct {
    unsigned long long l1Cache, l2Cache, deviceMemory, registerFile;
} nvmlEccErrorCounts_t;

_Static_assert(sizeof(nvmlEccSramErrorStatus_t) == 104, "as in pynvml");
_Static_assert(sizeof(nvmlRowRemapperHistogramValues_t) == 20, "as in pynvml");
_Static_assert(sizeof(nvmlEccErrorCounts_t) == 32, "as in pynvml");

enum { CORRECTED, UNCORRECTED, ERROR_TYPES };                      /* NVML_MEMORY_ERROR_TYPE_* */
enum { SINCE_DRIVER_LOAD, SINCE_EVER, COUNTERS };                  /* NVML_VOLATILE_ECC, NVML_AGGREGATE_ECC */
enum { LOCATION_MEMORY = 2, LOCATION_SRAM = 7, LOCATIONS = 8 };    /* NVML_MEMORY_LOCATION_* */

/* ---- ECC ---- */

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned *mode, unsigned *pending) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    return end(result == NVML_SUCCESS ? give_pair(gpu->ecc_current, gpu->ecc_pending, mode, pending) : result);
}

/* All cards that are simulated come with ECC switched on, where they have it. */
EXPORT nvmlReturn_t nvmlDeviceGetDefaultEccMode(nvmlDevice_t device, unsigned *mode) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    return end(result == NVML_SUCCESS ? give_number(gpu->ecc_current == ABSENT ? ABSENT : 1, mode) : result);
}

/* The mode changes at the next reset or boot. */
EXPORT nvmlReturn_t nvmlDeviceSetEccMode(nvmlDevice_t device, unsigned mode) {
    struct state *written;
    struct gpu *gpu;
    nvmlReturn_t result = change_begin_gpu(device, &written, &gpu);
    if (result != NVML_SUCCESS)
        return change_end(result);
    if (gpu->ecc_current == ABSENT)
        return change_end(NVML_ERROR_NOT_SUPPORTED);
    if (mode > 1)
        return change_end(NVML_ERROR_INVALID_ARGUMENT);
    written->gpus[device->gpu].ecc_pending = mode;
    return change_end(NVML_SUCCESS);
}

static uint64_t *ecc_counter(struct gpu *gpu, unsigned type, unsigned counter) {
    if (counter == SINCE_DRIVER_LOAD)
        return type == CORRECTED ? &gpu->ecc_volatile_corrected : &gpu->ecc_volatile_uncorrected;
    return type == CORRECTED ? &gpu->ecc_aggregate_corrected : &gpu->ecc_aggregate_uncorrected;
}

static nvmlReturn_t check_ecc(const struct gpu *gpu, unsigned type, unsigned counter) {
    if (type >= ERROR_TYPES || counter >= COUNTERS)
        return NVML_ERROR_INVALID_ARGUMENT;
    return gpu->ecc_current == 1 ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t begin_ecc(nvmlDevice_t device, unsigned type, unsigned counter, struct gpu **gpu) {
    nvmlReturn_t result = begin_gpu(device, gpu);
    return result == NVML_SUCCESS ? check_ecc(*gpu, type, counter) : result;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(
    nvmlDevice_t device, unsigned type, unsigned counter, unsigned long long *count) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_ecc(device, type, counter, &gpu);
    return end(result == NVML_SUCCESS ? give_long(*ecc_counter(gpu, type, counter), count) : result);
}

/* Errors are simulated in the memory of the device alone. Ampere and later tell its SRAM apart, as one place. Of a MIG device only
 * the uncorrected errors since the driver was loaded, and not those of the memory, are told (NVML API Reference Guide). */
EXPORT nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(
    nvmlDevice_t device, unsigned type, unsigned counter, unsigned location, unsigned long long *count) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_device(device, &gpu);
    if (result == NVML_SUCCESS)
        result = location >= LOCATIONS ? NVML_ERROR_INVALID_ARGUMENT : check_ecc(gpu, type, counter);
    if (result == NVML_SUCCESS && is_mig_device(device) &&
        (type == CORRECTED || counter != SINCE_DRIVER_LOAD || location == LOCATION_MEMORY))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (result != NVML_SUCCESS)
        return end(result);
    bool has_sram = gpu->architecture != ABSENT && gpu->architecture >= ARCHITECTURE_AMPERE;
    uint64_t found = *ecc_counter(gpu, type, counter);
    if (location != LOCATION_MEMORY && found != ABSENT)
        found = (location == LOCATION_SRAM) == has_sram ? 0 : ABSENT;
    return end(give_long(found, count));
}

/* Older than the function above, and without a place for SRAM. */
EXPORT nvmlReturn_t nvmlDeviceGetDetailedEccErrors(
    nvmlDevice_t device, unsigned type, unsigned counter, nvmlEccErrorCounts_t *counts) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_ecc(device, type, counter, &gpu);
    if (result == NVML_SUCCESS && counts == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS)
        return end(result);
    uint64_t found = *ecc_counter(gpu, type, counter);
    if (found == ABSENT)
        return end(NVML_ERROR_NOT_SUPPORTED);
    *counts = (nvmlEccErrorCounts_t){.deviceMemory = found};
    return end(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, nvmlEccSramErrorStatus_t *status) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_ecc(device, CORRECTED, SINCE_EVER, &gpu);
    if (result == NVML_SUCCESS && (gpu->architecture == ABSENT || gpu->architecture < ARCHITECTURE_AMPERE))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (result == NVML_SUCCESS && status == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && status->version != VERSION_OF(nvmlEccSramErrorStatus_t, 1))
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (result == NVML_SUCCESS)
        *status = (nvmlEccSramErrorStatus_t){.version = status->version};
    return end(result);
}

EXPORT nvmlReturn_t nvmlDeviceClearEccErrorCounts(nvmlDevice_t device, unsigned counter) {
    struct state *written;
    struct gpu *gpu;
    nvmlReturn_t result = change_begin_gpu(device, &written, &gpu);
    if (result != NVML_SUCCESS)
        return change_end(result);
    if (gpu->ecc_current != 1)
        return change_end(NVML_ERROR_NOT_SUPPORTED);
    if (counter >= COUNTERS)
        return change_end(NVML_ERROR_INVALID_ARGUMENT);
    static const char *const keys[COUNTERS][ERROR_TYPES] = {
        {"ecc_volatile_corrected", "ecc_volatile_uncorrected"},
        {"ecc_aggregate_corrected", "ecc_aggregate_uncorrected"},
    };
    for (unsigned type = 0; type < ERROR_TYPES; type++) {
        uint64_t *found = ecc_counter(&written->gpus[device->gpu], type, counter);
        if (*found != ABSENT)
            *found = 0;
        state_forget_fault_lines(written, device->gpu, keys[counter][type]);
    }
    return change_end(NVML_SUCCESS);
}

/* ---- rows that were remapped: Ampere and later ---- */

/* Not told while MIG instances exist (API reference). */
static nvmlReturn_t begin_rows(nvmlDevice_t device, struct gpu **gpu) {
    nvmlReturn_t result = begin_gpu(device, gpu);
    bool told = result == NVML_SUCCESS && (*gpu)->remapped_correctable != ABSENT && (*gpu)->remapped_uncorrectable != ABSENT &&
                !has_instances(*gpu);
    return result == NVML_SUCCESS && !told ? NVML_ERROR_NOT_SUPPORTED : result;
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(
    nvmlDevice_t device, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failure) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_rows(device, &gpu);
    if (result == NVML_SUCCESS)
        result = give_pair(gpu->remapped_correctable, gpu->remapped_uncorrectable, correctable, uncorrectable);
    if (result == NVML_SUCCESS)
        result = give_pair(gpu->remap_pending, gpu->remap_failure, pending, failure);
    return end(result);
}

/* Each remapped row has taken a spare row of another bank; a failure means a bank that has none left. */
EXPORT nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogramValues_t *values) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_rows(device, &gpu);
    if (result == NVML_SUCCESS && values == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS)
        return end(result);
    if (gpu->remapper_banks == ABSENT)
        return end(NVML_ERROR_NOT_SUPPORTED);
    unsigned banks = (unsigned)gpu->remapper_banks, rows = (unsigned)(gpu->remapped_correctable + gpu->remapped_uncorrectable);
    unsigned empty = gpu->remap_failure == 1 && banks > 0;
    unsigned touched = rows < banks - empty ? rows : banks - empty;
    *values = (nvmlRowRemapperHistogramValues_t){.max = banks - empty - touched, .high = touched, .none = empty};
    return end(NVML_SUCCESS);
}

/* ---- pages that were retired: before Ampere ---- */

enum { CAUSE_SINGLE_BIT, CAUSE_DOUBLE_BIT, CAUSES }; /* NVML_PAGE_RETIREMENT_CAUSE_* */

/* The state counts pages; their addresses are made up, one after the other, and when they were retired is not known. */
static nvmlReturn_t list_pages(nvmlDevice_t device, unsigned cause, unsigned *count, unsigned long long *addresses) {
    struct gpu *gpu;
    nvmlReturn_t result = begin_gpu(device, &gpu);
    if (result != NVML_SUCCESS)
        return result;
    if (count == NULL || cause >= CAUSES)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint64_t pages = cause == CAUSE_SINGLE_BIT ? gpu->retired_single_bit : gpu->retired_double_bit;
    if (pages == ABSENT)
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned room = *count;
    *count = (unsigned)pages;
    if (room < pages)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (pages > 0 && addresses == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned i = 0; i < pages; i++)
        addresses[i] = (cause == CAUSE_SINGLE_BIT ? 0x10000ull : 0x20000ull) + i;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages(
    nvmlDevice_t device, unsigned cause, unsigned *count, unsigned long long *addresses) {
    return end(list_pages(device, cause, count, addresses));
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages_v2(
    nvmlDevice_t device, unsigned cause, unsigned *count, unsigned long long *addresses, unsigned long long *times) {
    nvmlReturn_t result = list_pages(device, cause, count, addresses);
    /* pynvml asks for the count with one argument less, so that `times` is only good where there was room. */
    if (result == NVML_SUCCESS && *count > 0 && times != NULL)
        memset(times, 0, *count * sizeof(*times));
    return end(result);
}

GIVES_NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, retirement_pending)
