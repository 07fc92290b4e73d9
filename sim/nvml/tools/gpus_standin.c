/* gpus-standin: what happens to the simulated GPUs of this machine beside the calls of NVML. A stand-in, as its name says.
 *
 *     gpus-standin boot                                 what a boot does to them
 *     gpus-standin reset [INDEX|UUID|BUS ID[,...] ...]  what nvidia-smi --gpu-reset does; without a name, to all
 *     gpus-standin list                                 the GPUs and their MIG devices
 *     gpus-standin check FILE                           whether FILE is a state file
 *
 * Exits 0 when done, 1 where it cannot, 2 where it is called wrongly; a refused reset exits as nvidia-smi does, with NVML's code.
 */
#include "../nvml_standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of NVML, which is in this program as well. */
nvmlReturn_t nvmlInit_v2(void);
const char *nvmlErrorString(nvmlReturn_t result);
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count);
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device);
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length);
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length);
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count);
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig);

static int fail(int code, const char *where, const char *problem) {
    fprintf(stderr, "gpus-standin: %s: %s.\n", where, problem);
    return code;
}

/* ---- boot and check ---- */

static int boot(void) {
    const char *path = state_path();
    int lock = state_lock(path);
    struct state *written = malloc(sizeof(*written));
    if (lock < 0 || written == NULL)
        return fail(1, path, "it cannot be locked; are you root, and is the folder there?");
    const char *problem = state_read(path, written, NULL);
    if (problem == NULL) {
        state_after_boot(written);
        problem = state_write(path, written);
    }
    free(written);
    state_unlock(lock);
    return problem == NULL ? 0 : fail(1, path, problem);
}

static int check(const char *path) {
    struct state *written = malloc(sizeof(*written)), *effective = malloc(sizeof(*effective));
    const char *problem = "no memory to read it";
    if (written != NULL && effective != NULL)
        problem = state_read(path, written, effective);
    free(written);
    free(effective);
    return problem == NULL ? 0 : fail(1, path, problem);
}

/* ---- reset ---- */

static bool is_called(const struct gpu *gpu, size_t index, const char *name) {
    char number[24];
    unsigned domain, bus, device;
    snprintf(number, sizeof(number), "%zu", index);
    if (strcmp(name, number) == 0 || strcmp(name, gpu->uuid) == 0)
        return true;
    return state_parse_address(name, &domain, &bus, &device) == 0 && domain == gpu->domain && bus == gpu->bus &&
           device == gpu->device;
}

/* Chooses the GPUs of names joined by commas. */
static nvmlReturn_t choose(const char *names, bool chosen[MAX_GPUS], char why[RESET_WHY]) {
    const char *rest = names;
    do {
        char name[80];
        size_t length = strcspn(rest, ",");
        bool known = false;
        snprintf(name, sizeof(name), "%.*s", (int)(length < sizeof(name) ? length : sizeof(name) - 1), rest);
        for (size_t i = 0; i < current.gpus_count && !known; i++)
            if (is_called(&current.gpus[i], i, name))
                chosen[i] = known = true;
        if (!known) {
            snprintf(
                why, RESET_WHY, "no GPU here is called `%s`; it is a number below %zu, a UUID or a PCI bus id", name,
                current.gpus_count);
            return NVML_ERROR_NOT_FOUND;
        }
        rest += length;
    } while (*rest++ == ',');
    return NVML_SUCCESS;
}

static int fail_as_nvml(const char *what, nvmlReturn_t result, const char *why) {
    if (result == NVML_ERROR_UNKNOWN && why[0] == '\0')
        return 1; /* the state file is damaged, which the library has said */
    return fail(result > 0 && result < 256 ? result : 255, what, why[0] != '\0' ? why : nvmlErrorString(result));
}

static int reset(char **names, int count) {
    struct state *written;
    bool chosen[MAX_GPUS] = {false};
    nvmlReturn_t results[MAX_GPUS];
    char why[RESET_WHY] = "", done[MAX_GPUS][sizeof(current.gpus[0].pci_address)] = {""};
    nvmlReturn_t result = nvmlInit_v2();
    if (result != NVML_SUCCESS)
        return fail_as_nvml("reset", result, why);
    result = change_begin(&written);
    if (result == NVML_ERROR_NO_PERMISSION)
        snprintf(why, sizeof(why), "only root may reset a GPU");
    for (int i = 0; i < count && result == NVML_SUCCESS; i++)
        result = choose(names[i], chosen, why);
    for (size_t i = 0; i < current.gpus_count && count == 0; i++)
        chosen[i] = true;
    if (result == NVML_SUCCESS)
        result = reset_gpus(written, chosen, results, why);
    for (size_t i = 0; i < current.gpus_count; i++)
        if (chosen[i])
            memcpy(done[i], current.gpus[i].pci_address, sizeof(done[i]));
    result = change_end(result);
    if (result != NVML_SUCCESS)
        return fail_as_nvml("reset", result, why);
    for (size_t i = 0; i < MAX_GPUS; i++)
        if (done[i][0] != '\0')
            printf("GPU %zu (%s) was reset.\n", i, done[i]);
    return 0;
}

/* ---- list ---- */

static void list_one(const char *start, nvmlDevice_t device) {
    char name[128], uuid[96];
    if (nvmlDeviceGetName(device, name, sizeof(name)) == NVML_SUCCESS &&
        nvmlDeviceGetUUID(device, uuid, sizeof(uuid)) == NVML_SUCCESS)
        printf("%s: %s (UUID: %s)\n", start, name, uuid);
}

static int list(void) {
    unsigned count = 0, parts = 0;
    nvmlReturn_t result = nvmlInit_v2();
    if (result == NVML_SUCCESS)
        result = nvmlDeviceGetCount_v2(&count);
    if (result != NVML_SUCCESS)
        return fail_as_nvml("list", result, "");
    for (unsigned i = 0; i < count; i++) {
        nvmlDevice_t device, part;
        char start[48];
        snprintf(start, sizeof(start), "GPU %u", i);
        result = nvmlDeviceGetHandleByIndex_v2(i, &device);
        if (result != NVML_SUCCESS) {
            printf("%s: %s\n", start, nvmlErrorString(result));
            continue;
        }
        list_one(start, device);
        if (nvmlDeviceGetMaxMigDeviceCount(device, &parts) != NVML_SUCCESS)
            continue;
        for (unsigned n = 0; n < parts && nvmlDeviceGetMigDeviceHandleByIndex(device, n, &part) == NVML_SUCCESS; n++) {
            snprintf(start, sizeof(start), "  MIG device %u", n);
            list_one(start, part);
        }
    }
    return 0;
}

int main(int count, char **arguments) {
    const char *verb = count > 1 ? arguments[1] : "";
    if (strcmp(verb, "boot") == 0 && count == 2)
        return boot();
    if (strcmp(verb, "reset") == 0)
        return reset(arguments + 2, count - 2);
    if (strcmp(verb, "list") == 0 && count == 2)
        return list();
    if (strcmp(verb, "check") == 0 && count == 3)
        return check(arguments[2]);
    fputs("gpus-standin: call it as: boot | reset [INDEX|UUID|BUS ID ...] | list | check FILE.\n", stderr);
    return 2;
}
