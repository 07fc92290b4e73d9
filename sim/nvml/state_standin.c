/* Reads the state file of the simulated hardware: lines `key = value` under [system] and [gpu N]. */
#include "state_standin.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FILE_LIMIT (1u << 20)

enum kind { TEXT, NUMBER };

struct field {
    const char *key;
    enum kind kind;
    size_t offset;
    size_t size;
};

#define TEXT_OF(type, member) {#member, TEXT, offsetof(struct type, member), sizeof(((struct type *)0)->member)}
#define NUMBER_OF(type, member) {#member, NUMBER, offsetof(struct type, member), sizeof(uint64_t)}

static const struct field system_fields[] = {
    TEXT_OF(state, driver_version),
    TEXT_OF(state, nvml_version),
    NUMBER_OF(state, cuda_driver_version),
    NUMBER_OF(state, init_error),
};

static const struct field gpu_fields[] = {
    TEXT_OF(gpu, name),
    TEXT_OF(gpu, uuid),
    TEXT_OF(gpu, serial),
    TEXT_OF(gpu, pci_address),
    NUMBER_OF(gpu, minor),
    NUMBER_OF(gpu, pci_device_id),
    NUMBER_OF(gpu, pci_subsystem_id),
    NUMBER_OF(gpu, memory_total_bytes),
    NUMBER_OF(gpu, memory_reserved_bytes),
    NUMBER_OF(gpu, memory_used_bytes),
    NUMBER_OF(gpu, compute_capability_major),
    NUMBER_OF(gpu, compute_capability_minor),
    NUMBER_OF(gpu, brand),
    NUMBER_OF(gpu, architecture),
    NUMBER_OF(gpu, mig_current),
    NUMBER_OF(gpu, mig_pending),
    NUMBER_OF(gpu, mig_max_devices),
    NUMBER_OF(gpu, persistence_mode),
    NUMBER_OF(gpu, ecc_current),
    NUMBER_OF(gpu, ecc_pending),
    NUMBER_OF(gpu, temperature_celsius),
    NUMBER_OF(gpu, power_milliwatts),
    NUMBER_OF(gpu, power_limit_milliwatts),
    NUMBER_OF(gpu, utilization_gpu_percent),
    NUMBER_OF(gpu, utilization_memory_percent),
    NUMBER_OF(gpu, nvlink_links),
    NUMBER_OF(gpu, nvlink_active),
    NUMBER_OF(gpu, lost),
};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static char sentence[512];

__attribute__((format(printf, 1, 2))) static const char *wrong(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof(sentence), format, arguments);
    va_end(arguments);
    for (char *c = sentence; *c != '\0'; c++)
        if (*c < ' ' || *c > '~')
            *c = '?'; /* what a damaged file may hold has no place on a terminal */
    return sentence;
}

const char *state_path(void) {
    const char *path = getenv(STATE_PATH_VARIABLE);
    return path != NULL && path[0] != '\0' ? path : STATE_PATH;
}

static int digit(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return 16;
}

/* Decimal, or hexadecimal after 0x. Returns what follows the number, or NULL if there is none or it is too big. */
static const char *parse_number(const char *text, int base, uint64_t *number) {
    if (text[0] == '0' && text[1] == 'x') {
        base = 16;
        text += 2;
    }
    uint64_t value = 0;
    const char *start = text;
    for (; digit(*text) < base; text++) {
        uint64_t next = (uint64_t)digit(*text);
        if (value > (UINT64_MAX - next) / (uint64_t)base)
            return NULL;
        value = value * (uint64_t)base + next;
    }
    *number = value;
    return text == start ? NULL : text;
}

int state_parse_address(const char *text, unsigned *domain, unsigned *bus, unsigned *device) {
    static const uint64_t limits[] = {0xffffffff, 0xff, 0x1f};
    uint64_t parts[3] = {0, 0, 0};
    size_t colons = 0;
    for (const char *c = text; *c != '\0'; c++)
        colons += *c == ':';
    if (colons < 1 || colons > 2)
        return -1;
    for (size_t i = 2 - colons; i < 3; i++) {
        text = parse_number(text, 16, &parts[i]);
        if (text == NULL || parts[i] > limits[i] || (i < 2 && *text++ != ':'))
            return -1;
    }
    if (*text != '\0' && (text[0] != '.' || digit(text[1]) > 7 || text[2] != '\0'))
        return -1;
    *domain = (unsigned)parts[0];
    *bus = (unsigned)parts[1];
    *device = (unsigned)parts[2];
    return 0;
}

static char *trim(char *text) {
    while (*text == ' ' || *text == '\t')
        text++;
    size_t length = strlen(text);
    while (length > 0 && strchr(" \t\r", text[length - 1]) != NULL)
        text[--length] = '\0';
    return text;
}

static void start_gpu(struct gpu *gpu) {
    memset(gpu, 0, sizeof(*gpu));
    for (size_t i = 0; i < COUNT(gpu_fields); i++)
        if (gpu_fields[i].kind == NUMBER)
            memset((char *)gpu + gpu_fields[i].offset, 0xff, sizeof(uint64_t)); /* ABSENT */
    gpu->memory_used_bytes = 0;
    gpu->lost = 0;
}

static const char *set_process(struct gpu *gpu, const char *value, int line) {
    struct process process;
    const char *rest = parse_number(value, 10, &process.pid);
    if (rest == NULL || *rest != ' ' || process.pid > UINT32_MAX)
        return wrong("line %d: a process is `process = PID BYTES`", line);
    rest = parse_number(rest + 1, 10, &process.used_bytes);
    if (rest == NULL || *rest != '\0')
        return wrong("line %d: a process is `process = PID BYTES`", line);
    if (gpu->processes_count == MAX_PROCESSES)
        return wrong("line %d: more than %d processes on one GPU", line, MAX_PROCESSES);
    gpu->processes[gpu->processes_count++] = process;
    return NULL;
}

static const char *set_field(
    const struct field *fields, size_t count, void *target, const char *key, const char *value, int line) {
    for (size_t i = 0; i < count; i++) {
        if (strcmp(fields[i].key, key) != 0)
            continue;
        char *place = (char *)target + fields[i].offset;
        if (fields[i].kind == TEXT) {
            if (strlen(value) >= fields[i].size)
                return wrong("line %d: %s is longer than %zu characters", line, key, fields[i].size - 1);
            memcpy(place, value, strlen(value) + 1);
        } else {
            uint64_t number;
            const char *rest = parse_number(value, 10, &number);
            if (rest == NULL || *rest != '\0')
                return wrong("line %d: %s = %.40s is not a number", line, key, value);
            memcpy(place, &number, sizeof(number));
        }
        return NULL;
    }
    return wrong("line %d: unknown key %.40s", line, key);
}

static const char *check_gpu(struct gpu *gpu, size_t index) {
    if (gpu->name[0] == '\0' || gpu->uuid[0] == '\0' || gpu->memory_total_bytes == ABSENT ||
        gpu->pci_device_id == ABSENT)
        return wrong("gpu %zu: name, uuid, pci_device_id and memory_total_bytes are needed", index);
    if (state_parse_address(gpu->pci_address, &gpu->domain, &gpu->bus, &gpu->device) != 0)
        return wrong("gpu %zu: pci_address = %s is no PCI address", index, gpu->pci_address);
    uint64_t left = gpu->memory_total_bytes;
    uint64_t reserved = gpu->memory_reserved_bytes == ABSENT ? 0 : gpu->memory_reserved_bytes;
    if (reserved > left || gpu->memory_used_bytes > left - reserved)
        return wrong("gpu %zu: more memory is reserved and used than there is", index);
    left -= reserved + gpu->memory_used_bytes;
    for (size_t i = 0; i < gpu->processes_count; i++) {
        if (gpu->processes[i].used_bytes > left)
            return wrong("gpu %zu: its processes use more memory than there is", index);
        left -= gpu->processes[i].used_bytes;
    }
    if (gpu->nvlink_links != ABSENT && gpu->nvlink_links > 36) /* NVML_NVLINK_MAX_LINKS of pynvml 13 */
        return wrong("gpu %zu: nvlink_links is at most 36", index);
    return NULL;
}

static const char *parse_line(char *text, int line, struct state *state, struct gpu **gpu) {
    text = trim(text);
    if (*text == '\0' || *text == '#')
        return NULL;
    if (strcmp(text, "[system]") == 0) {
        *gpu = NULL;
        return NULL;
    }
    if (strncmp(text, "[gpu ", 5) == 0) {
        uint64_t index;
        const char *rest = parse_number(text + 5, 10, &index);
        if (rest == NULL || strcmp(rest, "]") != 0 || index != state->gpus_count)
            return wrong("line %d: the next GPU is [gpu %zu]", line, state->gpus_count);
        if (index >= MAX_GPUS)
            return wrong("line %d: more than %d GPUs", line, MAX_GPUS);
        *gpu = &state->gpus[state->gpus_count++];
        start_gpu(*gpu);
        return NULL;
    }
    char *equals = strchr(text, '=');
    if (equals == NULL)
        return wrong("line %d: neither a section nor `key = value`", line);
    *equals = '\0';
    char *key = trim(text);
    char *value = trim(equals + 1);
    if (*gpu == NULL)
        return set_field(system_fields, COUNT(system_fields), state, key, value, line);
    if (strcmp(key, "process") == 0)
        return set_process(*gpu, value, line);
    return set_field(gpu_fields, COUNT(gpu_fields), *gpu, key, value, line);
}

static const char *parse(char *text, struct state *state) {
    struct gpu *gpu = NULL;
    int line = 1;
    for (char *next; text != NULL; text = next, line++) {
        next = strchr(text, '\n');
        if (next != NULL)
            *next++ = '\0';
        const char *problem = NULL;
        if (line > 1)
            problem = parse_line(text, line, state, &gpu);
        else if (strcmp(trim(text), STATE_FORMAT) != 0)
            problem = wrong("line 1: not `" STATE_FORMAT "`");
        if (problem != NULL)
            return problem;
    }
    if (state->driver_version[0] == '\0' || state->nvml_version[0] == '\0' || state->cuda_driver_version == ABSENT)
        return wrong("[system] needs driver_version, nvml_version and cuda_driver_version");
    for (size_t i = 0; i < state->gpus_count; i++) {
        const char *problem = check_gpu(&state->gpus[i], i);
        if (problem != NULL)
            return problem;
    }
    return NULL;
}

const char *state_read(const char *path, struct state *state) {
    memset(state, 0, sizeof(*state));
    state->cuda_driver_version = ABSENT;
    FILE *file = fopen(path, "rbe");
    if (file == NULL)
        return wrong("cannot be opened");
    char *text = malloc(FILE_LIMIT + 1);
    if (text == NULL) {
        fclose(file);
        return wrong("no memory to read it");
    }
    size_t length = fread(text, 1, FILE_LIMIT + 1, file);
    const char *problem = ferror(file) ? wrong("cannot be read") : NULL;
    fclose(file);
    if (problem == NULL && length > FILE_LIMIT)
        problem = wrong("is larger than 1 MiB");
    if (problem == NULL && memchr(text, '\0', length) != NULL)
        problem = wrong("holds a NUL byte");
    if (problem == NULL) {
        text[length] = '\0';
        problem = parse(text, state);
    }
    free(text);
    return problem;
}
