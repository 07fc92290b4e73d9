/* The library itself, and what is one for the whole machine. */
#include "nvml_standin.h"

#include <stdio.h>
#include <string.h>

enum { INIT_FLAG_NO_GPUS = 1 };

static nvmlReturn_t initialize(unsigned flags) {
    nvmlReturn_t result = begin_system();
    if (result == NVML_SUCCESS && current.init_error != ABSENT && current.init_error != 0)
        result = (nvmlReturn_t)current.init_error;
    if (result == NVML_SUCCESS && current.gpus_count == 0 && (flags & INIT_FLAG_NO_GPUS) == 0)
        result = NVML_ERROR_NOT_FOUND;
    if (result == NVML_SUCCESS)
        initialized++;
    return end(result);
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) { return initialize(flags); }
EXPORT nvmlReturn_t nvmlInit_v2(void) { return initialize(0); }
SAME_AS(nvmlInit_v2) nvmlReturn_t nvmlInit(void);

EXPORT nvmlReturn_t nvmlShutdown(void) {
    begin_system(); /* a library can be shut down whatever became of its state file */
    if (initialized == 0)
        return end(NVML_ERROR_UNINITIALIZED);
    if (--initialized == 0)
        forget_event_sets();
    return end(NVML_SUCCESS);
}

EXPORT const char *nvmlErrorString(nvmlReturn_t result) {
    static const char *const strings[] = {
        "Success",
        "Uninitialized",
        "Invalid Argument",
        "Not Supported",
        "Insufficient Permissions",
        "Already Initialized",
        "Not Found",
        "Insufficient Size",
        "Insufficient External Power",
        "Driver Not Loaded",
        "Timeout",
        "Interrupt Request Issue",
        "NVML Shared Library Not Found",
        "Function Not Found",
        "Corrupted infoROM",
        "GPU is lost",
        "GPU requires restart",
        "The operating system has blocked the request.",
        "RM has detected an NVML/RM version mismatch.",
        "In use by another client",
        "Insufficient Memory",
        "No data",
        "The requested vGPU operation is not available because ECC is enabled",
        "Insufficient Resources",
        "Frequency not supported",
        "Argument version mismatch",
        "Deprecated",
        "Not Ready",
        "GPU not found",
        "Invalid state",
        "Reset type not supported",
    };
    return result >= 0 && (size_t)result < sizeof(strings) / sizeof(strings[0]) ? strings[result] : "Unknown Error";
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    nvmlReturn_t result = begin();
    return end(result == NVML_SUCCESS ? give_text(current.driver_version, version, length) : result);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    nvmlReturn_t result = begin_system();
    return end(result == NVML_SUCCESS ? give_text(current.nvml_version, version, length) : result);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    nvmlReturn_t result = begin_system();
    return end(result == NVML_SUCCESS ? give_number(current.cuda_driver_version, (unsigned *)version) : result);
}
SAME_AS(nvmlSystemGetCudaDriverVersion_v2) nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version);

/* What the process calls itself, cropped to the room that there is. A kernel thread has no command line and so no name. */
EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    nvmlReturn_t result = begin();
    if (result != NVML_SUCCESS)
        return end(result);
    if (name == NULL || length == 0)
        return end(NVML_ERROR_INVALID_ARGUMENT);
    char path[32];
    snprintf(path, sizeof(path), "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return end(NVML_ERROR_NOT_FOUND);
    size_t read = fread(name, 1, length - 1, file);
    fclose(file);
    name[read] = '\0';
    return end(read == 0 ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS);
}
