/* Times calls of libnvidia-ml.so.1 as a C program makes them: one line `what nanoseconds` for each, the least of its rounds, which
 * take turns, so that what else the machine does counts little.
 *
 *     nvml_calls STATE_FILE
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 15, CALLS = 2000, FIELDS = 10, FIELD_BYTES = 40 };

static void *library;
static const char *state_file;
static void *gpu;

static int (*function(const char *name))() {
    int (*found)();
    *(void **)&found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "nvml_calls: %s is not in the library\n", name);
        exit(1);
    }
    return found;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static char buffer[8192];
static unsigned number;
static int (*called)();

/* ---- what is timed: each is one call ---- */

static void nothing(void) {}
static void one_stat(void) {
    struct stat status;
    stat(state_file, &status);
}
static void of_number(void) { called(gpu, &number); }
static void of_two(void) { called(gpu, 0, &number); }
static void of_text(void) { called(gpu, buffer, 96); }
static void of_count(void) { called(&number); }
static void of_index(void) { called(0, buffer); }
static void of_struct(void) { called(gpu, buffer); }
static void of_memory(void) {
    unsigned version = 0x2000028;
    memcpy(buffer, &version, sizeof(version));
    called(gpu, buffer);
}
static void of_processes(void) {
    number = 64;
    called(gpu, &number, buffer);
}
static void of_fields(void) {
    static const unsigned ids[FIELDS] = {1, 3, 82, 91, 142, 164, 185, 187, 193, 230};
    for (unsigned i = 0; i < FIELDS; i++)
        memcpy(buffer + i * FIELD_BYTES, &ids[i], sizeof(ids[i]));
    called(gpu, FIELDS, buffer);
}
static void after_a_change(void) {
    if (utimensat(AT_FDCWD, state_file, NULL, 0) != 0)
        exit(1);
    called(gpu, 0, &number);
}
static void only_the_change(void) {
    if (utimensat(AT_FDCWD, state_file, NULL, 0) != 0)
        exit(1);
}

static const struct {
    const char *what, *name;
    void (*call)(void);
    int calls;
} timed[] = {
    {"an empty function (the bench itself)", NULL, nothing, CALLS},
    {"stat of the state file (the floor)", NULL, one_stat, CALLS},
    {"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount_v2", of_count, CALLS},
    {"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex_v2", of_index, CALLS},
    {"nvmlDeviceGetName", "nvmlDeviceGetName", of_text, CALLS},
    {"nvmlDeviceGetUUID", "nvmlDeviceGetUUID", of_text, CALLS},
    {"nvmlDeviceGetTemperature", "nvmlDeviceGetTemperature", of_two, CALLS},
    {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetPowerUsage", of_number, CALLS},
    {"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetUtilizationRates", of_struct, CALLS},
    {"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v3", of_struct, CALLS},
    {"nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkState", of_two, CALLS},
    {"nvmlDeviceGetFieldValues, 10 fields", "nvmlDeviceGetFieldValues", of_fields, CALLS},
    {"nvmlDeviceGetMemoryInfo_v2, 2 processes", "nvmlDeviceGetMemoryInfo_v2", of_memory, CALLS},
    {"nvmlDeviceGetComputeRunningProcesses_v3, 2", "nvmlDeviceGetComputeRunningProcesses_v3", of_processes, CALLS},
    {"a touch of the state file", NULL, only_the_change, 50},
    {"the same, and nvmlDeviceGetTemperature", "nvmlDeviceGetTemperature", after_a_change, 50},
};

enum { KINDS = sizeof(timed) / sizeof(timed[0]) };

static double cost(size_t one) {
    if (timed[one].name != NULL)
        called = function(timed[one].name);
    double start = now();
    for (int i = 0; i < timed[one].calls; i++)
        timed[one].call();
    return (now() - start) / timed[one].calls;
}

int main(int argc, char **argv) {
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (argc != 2 || library == NULL) {
        fprintf(stderr, "nvml_calls: %s\n", argc != 2 ? "STATE_FILE is missing" : dlerror());
        return 1;
    }
    state_file = argv[1];
    if (function("nvmlInit_v2")() != 0 || function("nvmlDeviceGetHandleByIndex_v2")(0, &gpu) != 0)
        return 1;
    double least[KINDS] = {0};
    for (int round = 0; round < ROUNDS; round++)
        for (size_t i = 0; i < KINDS; i++) {
            double found = cost(i);
            least[i] = round == 0 || found < least[i] ? found : least[i];
        }
    for (size_t i = 0; i < KINDS; i++)
        printf("%.0f\t%s\n", least[i], timed[i].what);
    return 0;
}
