/* Calls the stand-in as a careless program would; compiled with sanitizers by test_nvml_standin.py.
 *
 *     nvml_standin_calls errors          prints one line `what code` per call, codes as in pynvml
 *     nvml_standin_calls files FILE...   starts the library with each state file and reads all it can; prints init's code
 *     nvml_standin_calls threads FILE    reads in several threads while another writes and one forks
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct nvmlDevice *device_t;

struct process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

int nvmlInit_v2(void);
int nvmlShutdown(void);
const char *nvmlErrorString(int);
int nvmlSystemGetDriverVersion(char *, unsigned);
int nvmlSystemGetNVMLVersion(char *, unsigned);
int nvmlSystemGetCudaDriverVersion(int *);
int nvmlDeviceGetCount_v2(unsigned *);
int nvmlDeviceGetHandleByIndex_v2(unsigned, device_t *);
int nvmlDeviceGetHandleByUUID(const char *, device_t *);
int nvmlDeviceGetHandleBySerial(const char *, device_t *);
int nvmlDeviceGetHandleByPciBusId_v2(const char *, device_t *);
int nvmlDeviceGetName(device_t, char *, unsigned);
int nvmlDeviceGetUUID(device_t, char *, unsigned);
int nvmlDeviceGetPciInfo_v3(device_t, void *);
int nvmlDeviceGetCudaComputeCapability(device_t, int *, int *);
int nvmlDeviceGetMemoryInfo(device_t, void *);
int nvmlDeviceGetMigMode(device_t, unsigned *, unsigned *);
int nvmlDeviceGetMigDeviceHandleByIndex(device_t, unsigned, device_t *);
int nvmlDeviceGetComputeRunningProcesses_v3(device_t, unsigned *, struct process *);
int nvmlDeviceGetTemperature(device_t, unsigned, unsigned *);
int nvmlDeviceGetNvLinkState(device_t, unsigned, unsigned *);
int nvmlDeviceSetPersistenceMode(device_t, unsigned);

#define SAY(what, call) printf("%s %d\n", what, call)

/* ---- errors ---- */

static void before_init(void) {
    char text[96];
    unsigned number;
    int version;
    device_t gpu;
    SAY("before-init-count", nvmlDeviceGetCount_v2(&number));
    SAY("before-init-driver", nvmlSystemGetDriverVersion(text, sizeof(text)));
    SAY("before-init-handle", nvmlDeviceGetHandleByIndex_v2(0, &gpu));
    SAY("before-init-name", nvmlDeviceGetName(NULL, text, sizeof(text)));
    SAY("before-init-shutdown", nvmlShutdown());
    SAY("before-init-cuda", nvmlSystemGetCudaDriverVersion(&version));
    SAY("before-init-nvml", nvmlSystemGetNVMLVersion(text, sizeof(text)));
}

static void wrong_handles(device_t gpu) {
    char text[96];
    unsigned number = 0;
    device_t none;
    SAY("index-beyond", nvmlDeviceGetHandleByIndex_v2(8, &none));
    SAY("index-null", nvmlDeviceGetHandleByIndex_v2(0, NULL));
    SAY("index-lost", nvmlDeviceGetHandleByIndex_v2(1, &none));
    SAY("uuid-unknown", nvmlDeviceGetHandleByUUID("GPU-0", &none));
    SAY("uuid-null", nvmlDeviceGetHandleByUUID(NULL, &none));
    SAY("serial-unknown", nvmlDeviceGetHandleBySerial("", &none));
    SAY("pci-unknown", nvmlDeviceGetHandleByPciBusId_v2("0000:02:00.0", &none));
    SAY("pci-nonsense", nvmlDeviceGetHandleByPciBusId_v2("1b", &none));
    SAY("pci-too-long", nvmlDeviceGetHandleByPciBusId_v2("0000:1b:00.0.0", &none));
    SAY("pci-overflow", nvmlDeviceGetHandleByPciBusId_v2("10000000000000000:1b:00.0", &none));
    SAY("pci-null", nvmlDeviceGetHandleByPciBusId_v2(NULL, &none));
    SAY("handle-null", nvmlDeviceGetName(NULL, text, sizeof(text)));
    SAY("handle-nonsense", nvmlDeviceGetName((device_t)(void *)text, text, sizeof(text)));
    SAY("handle-inside", nvmlDeviceGetName((device_t)(void *)((char *)gpu + 8), text, sizeof(text)));
    SAY("handle-wild", nvmlDeviceGetName((device_t)(void *)~0ul, text, sizeof(text)));
    SAY("handle-set", nvmlDeviceSetPersistenceMode((device_t)(void *)text, 1));
    SAY("mig-beyond", nvmlDeviceGetMigDeviceHandleByIndex(gpu, 7, &none));
    SAY("mig-none", nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0, &none));
    SAY("link-beyond", nvmlDeviceGetNvLinkState(gpu, 0xffffffff, &number));
}

/* Buffers exactly as large as pynvml's, on the heap, so that one byte too many is seen. */
static void wrong_targets(device_t gpu) {
    char *small = malloc(4), *exact = malloc(22);
    void *pci = malloc(68), *memory = malloc(24);
    int version;
    unsigned number = 0;
    SAY("count-null", nvmlDeviceGetCount_v2(NULL));
    SAY("cuda-null", nvmlSystemGetCudaDriverVersion(NULL));
    SAY("name-small", nvmlDeviceGetName(gpu, small, 4));
    SAY("name-one-short", nvmlDeviceGetName(gpu, exact, 21));
    SAY("name-exact", nvmlDeviceGetName(gpu, exact, 22));
    SAY("name-zero", nvmlDeviceGetName(gpu, small, 0));
    SAY("name-null", nvmlDeviceGetName(gpu, NULL, 96));
    SAY("uuid-small", nvmlDeviceGetUUID(gpu, small, 4));
    SAY("driver-small", nvmlSystemGetDriverVersion(small, 4));
    SAY("pci", nvmlDeviceGetPciInfo_v3(gpu, pci));
    SAY("pci-out-null", nvmlDeviceGetPciInfo_v3(gpu, NULL));
    SAY("capability-null", nvmlDeviceGetCudaComputeCapability(gpu, &version, NULL));
    SAY("memory", nvmlDeviceGetMemoryInfo(gpu, memory));
    SAY("memory-null", nvmlDeviceGetMemoryInfo(gpu, NULL));
    SAY("mig-null", nvmlDeviceGetMigMode(gpu, &number, NULL));
    free(small);
    free(exact);
    free(pci);
    free(memory);
}

static void errors(void) {
    device_t gpu = NULL;
    unsigned number;
    char text[96];
    before_init();
    SAY("init", nvmlInit_v2());
    SAY("init-again", nvmlInit_v2());
    SAY("shutdown-once", nvmlShutdown());
    SAY("count", nvmlDeviceGetCount_v2(&number));
    SAY("index", nvmlDeviceGetHandleByIndex_v2(0, &gpu));
    wrong_handles(gpu);
    wrong_targets(gpu);
    SAY("shutdown", nvmlShutdown());
    SAY("after-shutdown", nvmlDeviceGetName(gpu, text, sizeof(text)));
}

/* ---- every function, with every struct as small as its version says ---- */

/* A call of (device, [number,] struct) with a block on the heap of exactly that size; zero is the version's place. */
static const struct {
    const char *name;
    unsigned size, version; /* version 0: the struct carries none */
} structs[] = {
    {"nvmlDeviceGetPciInfo", 32, 0},
    {"nvmlDeviceGetPciInfo_v2", 52, 0},
    {"nvmlDeviceGetPciInfo_v3", 68, 0},
    {"nvmlDeviceGetPciInfoExt", 64, 0x1000040},
    {"nvmlDeviceGetMemoryInfo", 24, 0},
    {"nvmlDeviceGetMemoryInfo_v2", 40, 0x2000028},
    {"nvmlDeviceGetBAR1MemoryInfo", 24, 0},
    {"nvmlDeviceGetUtilizationRates", 8, 0},
    {"nvmlDeviceGetTemperatureV", 12, 0x100000c},
    {"nvmlDeviceGetMarginTemperature", 8, 0x1000008},
    {"nvmlDeviceGetGpuFabricInfo", 28, 0},
    {"nvmlDeviceGetGpuFabricInfoV", 36, 0x2000024},
    {"nvmlDeviceGetGpuFabricInfoV", 40, 0x3000028},
    {"nvmlDeviceGetSramEccErrorStatus", 104, 0x1000068},
    {"nvmlDeviceGetRowRemapperHistogram", 20, 0},
    {"nvmlDeviceGetRunningProcessDetailList", 24, 0x1000018},
    {"nvmlDeviceGetAttributes_v2", 40, 0},
};

/* A call of (device, number...) that writes one or two numbers. */
static const char *const numbers[] = {
    "nvmlDeviceGetIndex", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetModuleId", "nvmlDeviceGetNumGpuCores",
    "nvmlDeviceGetMemoryBusWidth", "nvmlDeviceGetBoardId", "nvmlDeviceGetMultiGpuBoard", "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetBrand", "nvmlDeviceGetBusType", "nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetPcieReplayCounter", "nvmlDeviceGetPcieSpeed",
    "nvmlDeviceGetPcieLinkMaxSpeed", "nvmlDeviceGetPersistenceMode", "nvmlDeviceGetComputeMode", "nvmlDeviceGetDisplayMode",
    "nvmlDeviceGetPerformanceState", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetPowerManagementMode",
    "nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetFanSpeed", "nvmlDeviceGetNumFans",
    "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceIsMigDeviceHandle", "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetRetiredPagesPendingStatus", "nvmlDeviceGetDefaultEccMode",
};

/* Finds a function in the program itself, which is linked with the library's sources. */
static int (*function(const char *name))() {
    int (*found)();
    *(void **)&found = dlsym(RTLD_DEFAULT, name);
    if (found == NULL) {
        printf("%s is not there\n", name);
        exit(1);
    }
    return found;
}

static void read_structs(device_t device) {
    for (size_t i = 0; i < sizeof(structs) / sizeof(structs[0]); i++) {
        unsigned *block = calloc(1, structs[i].size);
        if (structs[i].version != 0)
            block[0] = structs[i].version;
        function(structs[i].name)(device, block);
        if (structs[i].version != 0) {
            block[0] ^= 0x7000000;
            function(structs[i].name)(device, block);
        }
        function(structs[i].name)(device, NULL);
        free(block);
    }
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        unsigned *number = malloc(sizeof(*number));
        function(numbers[i])(device, number);
        function(numbers[i])(device, NULL);
        free(number);
    }
}

static void read_lists(device_t device) {
    static const char *const lists[] = {
        "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3"};
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        unsigned count = 0;
        function(lists[i])(device, &count, NULL);
        struct process *processes = calloc(count + 1, sizeof(*processes));
        function(lists[i])(device, &count, processes);
        free(processes);
    }
    for (unsigned cause = 0; cause < 3; cause++) {
        unsigned count = 0;
        function("nvmlDeviceGetRetiredPages_v2")(device, cause, &count, NULL, NULL);
        unsigned long long *pages = calloc(count + 1, sizeof(*pages)), *times = calloc(count + 1, sizeof(*times));
        function("nvmlDeviceGetRetiredPages_v2")(device, cause, &count, pages, times);
        free(pages);
        free(times);
    }
    for (unsigned size = 1; size <= 4; size++) {
        unsigned long *set = malloc(size * sizeof(*set));
        function("nvmlDeviceGetCpuAffinity")(device, size, set);
        function("nvmlDeviceGetMemoryAffinity")(device, size, set, 0);
        free(set);
    }
}

static void read_fields(device_t device) {
    enum { FIELDS = 320, FIELD_BYTES = 40 };
    char *fields = calloc(FIELDS, FIELD_BYTES);
    for (unsigned i = 0; i < FIELDS; i++) {
        memcpy(fields + (size_t)i * FIELD_BYTES, &i, sizeof(i));
        memcpy(fields + (size_t)i * FIELD_BYTES + 4, &i, sizeof(i));
    }
    function("nvmlDeviceGetFieldValues")(device, FIELDS, fields);
    free(fields);
}

static void read_links(device_t device) {
    for (unsigned link = 0; link < 40; link++) {
        unsigned *number = malloc(sizeof(*number));
        unsigned long long *count = malloc(sizeof(*count));
        void *pci = malloc(68);
        nvmlDeviceGetNvLinkState(device, link, number);
        function("nvmlDeviceGetNvLinkVersion")(device, link, number);
        function("nvmlDeviceGetNvLinkRemoteDeviceType")(device, link, number);
        function("nvmlDeviceGetNvLinkRemotePciInfo_v2")(device, link, pci);
        for (unsigned kind = 0; kind < 8; kind++) {
            function("nvmlDeviceGetNvLinkCapability")(device, link, kind, number);
            function("nvmlDeviceGetNvLinkErrorCounter")(device, link, kind, count);
            function("nvmlDeviceGetViolationStatus")(device, kind, NULL);
            function("nvmlDeviceGetTemperatureThreshold")(device, kind, number);
            function("nvmlDeviceGetClockInfo")(device, kind, number);
            function("nvmlDeviceGetTotalEccErrors")(device, kind & 1, kind >> 1, count);
            function("nvmlDeviceGetMemoryErrorCounter")(device, 0, 0, kind, count);
        }
        free(number);
        free(count);
        free(pci);
    }
}

static void read_pairs(device_t device, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        device_t other;
        unsigned number;
        if (nvmlDeviceGetHandleByIndex_v2(i, &other) != 0)
            continue;
        for (unsigned kind = 0; kind < 6; kind++)
            function("nvmlDeviceGetP2PStatus")(device, other, kind, &number);
        function("nvmlDeviceGetTopologyCommonAncestor")(device, other, &number);
    }
    for (unsigned level = 0; level <= 50; level += 10) {
        unsigned found = 0;
        function("nvmlDeviceGetTopologyNearestGpus")(device, level, &found, NULL);
        device_t *nearest = calloc(found + 1, sizeof(*nearest));
        function("nvmlDeviceGetTopologyNearestGpus")(device, level, &found, nearest);
        free(nearest);
    }
}

static void read_device(device_t device, unsigned count) {
    char text[96];
    nvmlDeviceGetName(device, text, sizeof(text));
    nvmlDeviceGetUUID(device, text, sizeof(text));
    read_structs(device);
    read_lists(device);
    read_fields(device);
    read_links(device);
    read_pairs(device, count);
}

static void read_all(void) {
    unsigned count = 0;
    nvmlDeviceGetCount_v2(&count);
    for (unsigned i = 0; i < count; i++) {
        device_t gpu, part;
        if (nvmlDeviceGetHandleByIndex_v2(i, &gpu) != 0)
            continue;
        read_device(gpu, count);
        for (unsigned n = 0; n < 8; n++)
            if (nvmlDeviceGetMigDeviceHandleByIndex(gpu, n, &part) == 0)
                read_device(part, count);
    }
}

/* ---- threads ---- */

enum { ROUNDS = 200, READERS = 4 };

static void *read_often(void *result) {
    device_t gpu;
    unsigned number;
    for (int i = 0; i < ROUNDS; i++)
        if (nvmlDeviceGetHandleByIndex_v2(0, &gpu) != 0 || nvmlDeviceGetTemperature(gpu, 0, &number) != 0)
            *(int *)result = 1;
    return NULL;
}

static void *write_often(void *result) {
    device_t gpu;
    for (unsigned i = 0; i < ROUNDS; i++)
        if (nvmlDeviceGetHandleByIndex_v2(0, &gpu) != 0 || nvmlDeviceSetPersistenceMode(gpu, i & 1) != 0)
            *(int *)result = 1;
    return NULL;
}

/* A child begins in the middle of what the other threads do, and asks again. */
static void *fork_often(void *result) {
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (child == 0) {
            int failed = 0;
            alarm(60); /* one that waits for a lock which nobody holds is ended */
            read_often(&failed);
            _exit(failed);
        }
        int status = 1;
        waitpid(child, &status, 0);
        if (status != 0)
            *(int *)result = 1;
    }
    return NULL;
}

static int threads(void) {
    pthread_t running[READERS + 2];
    int failed[READERS + 2] = {0};
    if (nvmlInit_v2() != 0)
        return 1;
    for (int i = 0; i < READERS + 2; i++)
        pthread_create(&running[i], NULL, i == 0 ? write_often : i == 1 ? fork_often : read_often, &failed[i]);
    int all = 0;
    for (int i = 0; i < READERS + 2; i++) {
        pthread_join(running[i], NULL);
        all |= failed[i];
    }
    printf("%d\n", all);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "errors") == 0) {
        errors();
        return 0;
    }
    if (argc == 2 && strcmp(argv[1], "threads") == 0)
        return threads();
    for (int i = 2; i < argc; i++) {
        if (setenv("GPUREADY_STANDIN_STATE", argv[i], 1) != 0)
            return 1;
        int result = nvmlInit_v2();
        printf("%d\n", result);
        if (result == 0) {
            read_all();
            nvmlShutdown();
        }
    }
    return 0;
}
