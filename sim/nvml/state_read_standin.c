/* Reads the state file of the simulated hardware. */
#include "state_internal_standin.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_LIMIT (1u << 20)

static char sentence[512];

const char *state_wrong(const char *format, ...) {
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
const char *state_parse_number(const char *text, int base, uint64_t *number) {
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
        text = state_parse_number(text, 16, &parts[i]);
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

/* ---- keys and sections ---- */

static const char *set_field(
    const struct field *fields, size_t count, void *target, const char *key, const char *value, int line) {
    for (size_t i = 0; i < count; i++) {
        if (strcmp(fields[i].key, key) != 0)
            continue;
        char *place = (char *)target + fields[i].offset;
        if (fields[i].kind == FIELD_TEXT) {
            if (strlen(value) >= fields[i].size)
                return state_wrong("line %d: %s is longer than %zu characters", line, key, fields[i].size - 1);
            memcpy(place, value, strlen(value) + 1);
        } else {
            uint64_t number = ABSENT;
            bool absent = strcmp(value, "-") == 0;
            const char *rest = absent ? value + 1 : state_parse_number(value, 10, &number);
            if (rest == NULL || *rest != '\0' || (number == ABSENT && !absent))
                return state_wrong("line %d: %s = %.40s is not a number", line, key, value);
            memcpy(place, &number, sizeof(number));
        }
        return NULL;
    }
    return state_wrong("line %d: unknown key %.40s", line, key);
}

static const char *set_of_system(struct state *state, const char *key, const char *value, int line) {
    const char *problem = NULL;
    if (state_set_list_of_system(state, key, value, line, &problem))
        return problem;
    return set_field(system_fields, system_fields_count, state, key, value, line);
}

static const char *set_of_gpu(struct gpu *gpu, const char *key, const char *value, int line) {
    const char *problem = NULL;
    if (state_set_list_of_gpu(gpu, key, value, line, &problem))
        return problem;
    return set_field(gpu_fields, gpu_fields_count, gpu, key, value, line);
}

static const char *split(char *text, char **key, char **value, int line) {
    char *equals = strchr(text, '=');
    *key = *value = text;
    if (equals == NULL)
        return state_wrong("line %d: neither a section nor `key = value`", line);
    *equals = '\0';
    *key = trim(text);
    *value = trim(equals + 1);
    return NULL;
}

static const char *add_to_fault(struct fault *fault, const char *text, int line) {
    if (strncmp(text, "until = ", 8) == 0) {
        const char *until = text + 8;
        if (strcmp(until, "clear") != 0 && strcmp(until, "reset") != 0 && strcmp(until, "reboot") != 0)
            return state_wrong("line %d: until is clear, reset or reboot", line);
        memcpy(fault->until, until, strlen(until) + 1);
        return NULL;
    }
    if (fault->lines_count == MAX_FAULT_LINES || strlen(text) >= sizeof(fault->lines[0]))
        return state_wrong(
            "line %d: a fault has at most %d lines of %zu characters", line, MAX_FAULT_LINES, sizeof(fault->lines[0]) - 1);
    memcpy(fault->lines[fault->lines_count++], text, strlen(text) + 1);
    return NULL;
}

static void start_gpu(struct gpu *gpu) {
    memset(gpu, 0, sizeof(*gpu));
    for (size_t i = 0; i < gpu_fields_count; i++)
        if (gpu_fields[i].kind == FIELD_NUMBER)
            memset((char *)gpu + gpu_fields[i].offset, 0xff, sizeof(uint64_t)); /* ABSENT */
    gpu->memory_used_bytes = 0;
    gpu->lost = 0;
    gpu->reset_stuck = 0;
}

static const char *start_fault(char *name, struct state *state, int line) {
    char *space = strchr(name, ' ');
    char *end = name + strlen(name) - 1;
    struct fault fault = {.gpu = ABSENT, .until = "clear"};
    if (space == NULL || *end != ']' || (size_t)(space - name) >= sizeof(fault.name))
        return state_wrong("line %d: a fault begins with [fault NAME GPU] or [fault NAME system]", line);
    *space = *end = '\0';
    if (strcmp(space + 1, "system") != 0) {
        const char *rest = state_parse_number(space + 1, 10, &fault.gpu);
        if (rest == NULL || *rest != '\0' || fault.gpu >= state->gpus_count)
            return state_wrong("line %d: fault %.40s is of GPU %.20s, there are %zu", line, name, space + 1, state->gpus_count);
    }
    if (state->faults_count == MAX_FAULTS)
        return state_wrong("line %d: more than %d faults", line, MAX_FAULTS);
    memcpy(fault.name, name, strlen(name) + 1);
    state->faults[state->faults_count++] = fault;
    return NULL;
}

/* Where in the file the reader is: in [system] when both are NULL. */
struct place {
    struct gpu *gpu;
    struct fault *fault;
};

static const char *start_section(char *text, int line, struct state *state, struct place *place) {
    place->gpu = NULL;
    place->fault = NULL;
    if (strcmp(text, "[system]") == 0)
        return NULL;
    if (strncmp(text, "[fault ", 7) == 0) {
        const char *problem = start_fault(text + 7, state, line);
        if (problem == NULL)
            place->fault = &state->faults[state->faults_count - 1];
        return problem;
    }
    uint64_t index;
    const char *rest = strncmp(text, "[gpu ", 5) == 0 ? state_parse_number(text + 5, 10, &index) : NULL;
    if (rest == NULL || strcmp(rest, "]") != 0 || index != state->gpus_count || state->faults_count > 0)
        return state_wrong("line %d: the next GPU is [gpu %zu], before all faults", line, state->gpus_count);
    if (index >= MAX_GPUS)
        return state_wrong("line %d: more than %d GPUs", line, MAX_GPUS);
    place->gpu = &state->gpus[state->gpus_count++];
    start_gpu(place->gpu);
    return NULL;
}

static const char *parse_line(char *text, int line, struct state *state, struct place *place) {
    text = trim(text);
    if (*text == '\0' || *text == '#')
        return NULL;
    if (*text == '[')
        return start_section(text, line, state, place);
    if (place->fault != NULL)
        return add_to_fault(place->fault, text, line);
    char *key, *value;
    const char *problem = split(text, &key, &value, line);
    if (problem != NULL)
        return problem;
    return place->gpu == NULL ? set_of_system(state, key, value, line) : set_of_gpu(place->gpu, key, value, line);
}

static uint64_t *number_of(struct gpu *gpu, const char *key) {
    for (size_t i = 0; i < gpu_fields_count; i++)
        if (strcmp(gpu_fields[i].key, key) == 0 && gpu_fields[i].kind == FIELD_NUMBER)
            return (uint64_t *)(void *)((char *)gpu + gpu_fields[i].offset);
    return NULL;
}

/* The bits that all faults of a GPU set by `key = |N`. */
static uint64_t bits_of_faults(const struct state *state, uint64_t gpu, const char *key) {
    uint64_t bits = 0, more;
    for (size_t i = 0; i < state->faults_count; i++)
        for (size_t n = 0; state->faults[i].gpu == gpu && n < state->faults[i].lines_count; n++) {
            char text[sizeof(state->faults[i].lines[0])], *name, *value;
            memcpy(text, state->faults[i].lines[n], sizeof(text));
            if (split(text, &name, &value, 0) == NULL && strcmp(name, key) == 0 && *value == '|' &&
                state_parse_number(value + 1, 10, &more) != NULL)
                bits |= more;
        }
    return bits;
}

/* `key = +N` and `key = |N`: a sum, or bits together, in whatever order faults come and go. */
static const char *join_with_gpu(struct state *state, const struct fault *fault, const char *key, const char *value) {
    uint64_t more = 0, *number = number_of(&state->gpus[fault->gpu], key);
    const char *rest = state_parse_number(value + 1, 10, &more);
    if (number == NULL || rest == NULL || *rest != '\0')
        return state_wrong("%.40s = %.40s is not a number that %s", key, value, *value == '+' ? "counts" : "has bits");
    if (*value == '|') {
        *number = bits_of_faults(state, fault->gpu, key);
        return NULL;
    }
    uint64_t sum = *number == ABSENT ? 0 : *number;
    *number = more < ABSENT - sum ? sum + more : ABSENT - 1;
    return NULL;
}

static const char *lay_line(struct state *state, const struct fault *fault, const char *key, const char *value) {
    if (fault->gpu == ABSENT)
        return set_of_system(state, key, value, 0);
    bool joins = *value == '+' || *value == '|';
    return joins ? join_with_gpu(state, fault, key, value) : set_of_gpu(&state->gpus[fault->gpu], key, value, 0);
}

/* Lays the faults over what the file says without them. */
static const char *lay_over(struct state *state) {
    for (size_t i = 0; i < state->faults_count; i++) {
        const struct fault *fault = &state->faults[i];
        for (size_t n = 0; n < fault->lines_count; n++) {
            char text[sizeof(fault->lines[0])], *key, *value;
            memcpy(text, fault->lines[n], sizeof(text));
            const char *problem = split(text, &key, &value, 0);
            if (problem == NULL)
                problem = lay_line(state, fault, key, value);
            if (problem != NULL) {
                char reason[256];
                snprintf(reason, sizeof(reason), "%s", strncmp(problem, "line 0: ", 8) == 0 ? problem + 8 : problem);
                return state_wrong("fault %s: %s", fault->name, reason);
            }
        }
    }
    return state_check(state);
}

static const char *parse(char *text, struct state *state) {
    struct place place = {NULL, NULL};
    int line = 1;
    for (char *next; text != NULL; text = next, line++) {
        next = strchr(text, '\n');
        if (next != NULL)
            *next++ = '\0';
        const char *problem = NULL;
        if (line > 1)
            problem = parse_line(text, line, state, &place);
        else if (strcmp(trim(text), STATE_FORMAT) != 0)
            problem = state_wrong("line 1: not `" STATE_FORMAT "`");
        if (problem != NULL)
            return problem;
    }
    return state_check(state);
}

/* Who asks for a name decodes it, and Python's readers end lines at more than '\n'. */
static const char *check_characters(const char *text, size_t length) {
    int line = 1;
    for (size_t i = 0; i < length; i++) {
        bool ends = text[i] == '\n' || (text[i] == '\r' && i + 1 < length && text[i + 1] == '\n');
        if (!ends && text[i] != '\t' && (text[i] < ' ' || text[i] > '~'))
            return state_wrong("line %d: not printable ASCII", line);
        line += text[i] == '\n';
    }
    return NULL;
}

static const char *read_text(const char *path, char *text, size_t *length) {
    /* What is no regular file may never end, or keep who opens it waiting. */
    struct stat about;
    int handle = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (handle < 0)
        return state_wrong("cannot be opened: %s", strerror(errno));
    FILE *file = fstat(handle, &about) == 0 && S_ISREG(about.st_mode) ? fdopen(handle, "rb") : NULL;
    if (file == NULL) {
        close(handle);
        return state_wrong("is no regular file");
    }
    *length = fread(text, 1, FILE_LIMIT + 1, file);
    const char *problem = ferror(file) ? state_wrong("cannot be read") : NULL;
    fclose(file);
    if (problem == NULL && *length > FILE_LIMIT)
        problem = state_wrong("is larger than 1 MiB");
    if (problem == NULL && memchr(text, '\0', *length) != NULL)
        problem = state_wrong("holds a NUL byte");
    if (problem == NULL)
        problem = check_characters(text, *length);
    return problem;
}

const char *state_read(const char *path, struct state *written, struct state *effective) {
    char *text = malloc(FILE_LIMIT + 1);
    struct state *state = written != NULL ? written : malloc(sizeof(*state));
    size_t length = 0;
    const char *problem = text == NULL || state == NULL ? state_wrong("no memory to read it") : read_text(path, text, &length);
    if (problem == NULL) {
        text[length] = '\0';
        memset(state, 0, sizeof(*state));
        state->cuda_driver_version = ABSENT;
        state->root_only = 1;
        problem = parse(text, state);
    }
    if (problem == NULL && effective != NULL) {
        memcpy(effective, state, sizeof(*state));
        problem = lay_over(effective);
    }
    free(text);
    if (written == NULL)
        free(state);
    return problem;
}
