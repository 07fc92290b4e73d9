/* Calls the stand-in as a careless program would; compiled with sanitizers by test_nvml_standin.py.
 *
 *     nvml_standin_calls errors          prints one line `what code` per call, codes as in pynvml
 *     nvml_standin_calls files FILE...   starts the library with each state file and reads all it can; prints init's code
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct nvmlDevice *device_t;

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};
struct temperature {
    unsigned version, sensor;
    int celsius;
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
int nvmlDeviceGetMemoryInfo(device_t, void *);
int nvmlDeviceGetMemoryInfo_v2(device_t, struct memory_v2 *);
int nvmlDeviceGetCudaComputeCapability(device_t, int *, int *);
int nvmlDeviceGetMigMode(device_t, unsigned *, unsigned *);
int nvmlDeviceGetMaxMigDeviceCount(device_t, unsigned *);
int nvmlDeviceGetComputeRunningProcesses_v3(device_t, unsigned *, struct process *);
int nvmlDeviceGetUtilizationRates(device_t, void *);
int nvmlDeviceGetTemperature(device_t, unsigned, unsigned *);
int nvmlDeviceGetTemperatureV(device_t, struct temperature *);
int nvmlDeviceGetNvLinkState(device_t, unsigned, unsigned *);

#define SAY(what, call) printf("%s %d\n", what, call)

static void errors(void) {
    char small[4], exact[22], text[96];
    unsigned number, other;
    int version;
    device_t gpu = NULL, none = NULL;
    /* Exactly as large as pynvml's, on the heap, so that one byte too many is seen. */
    void *pci = malloc(68), *memory = malloc(24), *load = malloc(8);
    struct memory_v2 *memory_v2 = malloc(40);
    struct temperature *temperature = malloc(12);

    SAY("before-init-count", nvmlDeviceGetCount_v2(&number));
    SAY("before-init-driver", nvmlSystemGetDriverVersion(text, sizeof(text)));
    SAY("before-init-handle", nvmlDeviceGetHandleByIndex_v2(0, &gpu));
    SAY("before-init-name", nvmlDeviceGetName(NULL, text, sizeof(text)));
    SAY("before-init-shutdown", nvmlShutdown());
    SAY("before-init-cuda", nvmlSystemGetCudaDriverVersion(&version));
    SAY("before-init-nvml", nvmlSystemGetNVMLVersion(text, sizeof(text)));
    SAY("init", nvmlInit_v2());
    SAY("init-again", nvmlInit_v2());
    SAY("shutdown-once", nvmlShutdown());
    SAY("count", nvmlDeviceGetCount_v2(&number));
    SAY("count-null", nvmlDeviceGetCount_v2(NULL));
    SAY("cuda-null", nvmlSystemGetCudaDriverVersion(NULL));

    SAY("index-beyond", nvmlDeviceGetHandleByIndex_v2(number, &gpu));
    SAY("index-null", nvmlDeviceGetHandleByIndex_v2(0, NULL));
    SAY("uuid-unknown", nvmlDeviceGetHandleByUUID("GPU-0", &gpu));
    SAY("uuid-null", nvmlDeviceGetHandleByUUID(NULL, &gpu));
    SAY("serial-unknown", nvmlDeviceGetHandleBySerial("", &gpu));
    SAY("pci-unknown", nvmlDeviceGetHandleByPciBusId_v2("0000:02:00.0", &gpu));
    SAY("pci-nonsense", nvmlDeviceGetHandleByPciBusId_v2("1b", &gpu));
    SAY("pci-too-long", nvmlDeviceGetHandleByPciBusId_v2("0000:1b:00.0.0", &gpu));
    SAY("pci-overflow", nvmlDeviceGetHandleByPciBusId_v2("10000000000000000:1b:00.0", &gpu));
    SAY("pci-null", nvmlDeviceGetHandleByPciBusId_v2(NULL, &gpu));
    SAY("index-lost", nvmlDeviceGetHandleByIndex_v2(1, &none));
    SAY("index", nvmlDeviceGetHandleByIndex_v2(0, &gpu));

    SAY("handle-null", nvmlDeviceGetName(NULL, text, sizeof(text)));
    SAY("handle-nonsense", nvmlDeviceGetName((device_t)(void *)text, text, sizeof(text)));
    SAY("handle-inside", nvmlDeviceGetName((device_t)(void *)((char *)gpu + 8), text, sizeof(text)));
    SAY("name-small", nvmlDeviceGetName(gpu, small, sizeof(small)));
    SAY("name-one-short", nvmlDeviceGetName(gpu, exact, 21));
    SAY("name-exact", nvmlDeviceGetName(gpu, exact, 22));
    SAY("name-zero", nvmlDeviceGetName(gpu, small, 0));
    SAY("name-null", nvmlDeviceGetName(gpu, NULL, 96));
    SAY("uuid-small", nvmlDeviceGetUUID(gpu, small, sizeof(small)));
    SAY("driver-small", nvmlSystemGetDriverVersion(small, sizeof(small)));
    SAY("pci", nvmlDeviceGetPciInfo_v3(gpu, pci));
    SAY("pci-out-null", nvmlDeviceGetPciInfo_v3(gpu, NULL));
    SAY("capability-null", nvmlDeviceGetCudaComputeCapability(gpu, &version, NULL));
    SAY("memory", nvmlDeviceGetMemoryInfo(gpu, memory));
    SAY("memory-null", nvmlDeviceGetMemoryInfo(gpu, NULL));
    memory_v2->version = 0x2000028;
    SAY("memory2", nvmlDeviceGetMemoryInfo_v2(gpu, memory_v2));
    memory_v2->version = 0x1000028;
    SAY("memory2-version", nvmlDeviceGetMemoryInfo_v2(gpu, memory_v2));
    SAY("memory2-null", nvmlDeviceGetMemoryInfo_v2(gpu, NULL));
    SAY("mig-null", nvmlDeviceGetMigMode(gpu, &number, NULL));
    SAY("load", nvmlDeviceGetUtilizationRates(gpu, load));
    SAY("temperature-sensor", nvmlDeviceGetTemperature(gpu, 1, &number));
    temperature->version = 0x100000c;
    temperature->sensor = 0;
    SAY("temperature2", nvmlDeviceGetTemperatureV(gpu, temperature));
    temperature->version = 0x200000c;
    SAY("temperature2-version", nvmlDeviceGetTemperatureV(gpu, temperature));
    SAY("link-17", nvmlDeviceGetNvLinkState(gpu, 17, &number));
    SAY("link-18", nvmlDeviceGetNvLinkState(gpu, 18, &number));
    SAY("link-overflow", nvmlDeviceGetNvLinkState(gpu, 0xffffffff, &number));

    number = 0;
    SAY("processes-ask", nvmlDeviceGetComputeRunningProcesses_v3(gpu, &number, NULL));
    printf("processes-there %u\n", number);
    struct process *processes = malloc(number * sizeof(*processes));
    other = number - 1;
    SAY("processes-one-short", nvmlDeviceGetComputeRunningProcesses_v3(gpu, &other, processes));
    SAY("processes", nvmlDeviceGetComputeRunningProcesses_v3(gpu, &number, processes));
    printf("processes-first-pid %u\n", processes[0].pid);
    SAY("processes-null", nvmlDeviceGetComputeRunningProcesses_v3(gpu, NULL, processes));
    SAY("shutdown", nvmlShutdown());
    SAY("after-shutdown", nvmlDeviceGetName(gpu, text, sizeof(text)));

    free(processes);
    free(pci);
    free(memory);
    free(load);
    free(memory_v2);
    free(temperature);
}

static void read_all(void) {
    unsigned count = 0, number, other;
    int major, minor;
    char text[96], pci[68];
    nvmlDeviceGetCount_v2(&count);
    for (unsigned i = 0; i < count; i++) {
        device_t gpu;
        if (nvmlDeviceGetHandleByIndex_v2(i, &gpu) != 0)
            continue;
        struct memory_v2 memory = {.version = 0x2000028};
        nvmlDeviceGetMemoryInfo_v2(gpu, &memory);
        nvmlDeviceGetName(gpu, text, sizeof(text));
        nvmlDeviceGetPciInfo_v3(gpu, pci);
        nvmlDeviceGetCudaComputeCapability(gpu, &major, &minor);
        nvmlDeviceGetMigMode(gpu, &number, &other);
        nvmlDeviceGetMaxMigDeviceCount(gpu, &number);
        for (unsigned link = 0; link < 40; link++)
            nvmlDeviceGetNvLinkState(gpu, link, &number);
        struct process processes[64];
        number = 64;
        nvmlDeviceGetComputeRunningProcesses_v3(gpu, &number, processes);
    }
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "errors") == 0) {
        errors();
        return 0;
    }
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
