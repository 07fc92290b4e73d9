/* The keys of the state file that hold several values. */
#include "state_internal_standin.h"

#include <string.h>

/* What is left of a line's value; a part that is missing or no number sets `failed`, so that one question at the end does. */
struct words {
    char text[256];
    char *rest;
    bool failed;
};

static bool words_start(struct words *words, const char *value) {
    words->failed = strlen(value) >= sizeof(words->text);
    words->rest = words->text;
    words->text[0] = '\0';
    if (!words->failed)
        memcpy(words->text, value, strlen(value) + 1);
    return !words->failed;
}

static const char *next_word(struct words *words) {
    char *word = words->rest;
    while (*word == ' ')
        word++;
    char *end = word;
    while (*end != '\0' && *end != ' ')
        end++;
    words->rest = *end == '\0' ? end : end + 1;
    *end = '\0';
    if (*word == '\0')
        words->failed = true;
    return word;
}

/* A number below `limit`, or ABSENT for a dash where that is allowed. */
static uint64_t next_number(struct words *words, uint64_t limit, bool dash) {
    const char *word = next_word(words);
    if (dash && strcmp(word, "-") == 0)
        return ABSENT;
    uint64_t number = 0;
    const char *rest = state_parse_number(word, 10, &number);
    if (rest == NULL || *rest != '\0' || number >= limit)
        words->failed = true;
    return number;
}

static bool is_end(struct words *words) {
    return !words->failed && words->rest[strspn(words->rest, " ")] == '\0';
}

static const char *set_process(struct gpu *gpu, const char *value, int line) {
    static const char *form = "line %d: a process is `process = PID BYTES compute|graphics|mps GI CI [BYTES_PER_MINUTE SINCE]`";
    struct words words;
    struct process process = {0};
    words_start(&words, value);
    process.pid = next_number(&words, UINT32_MAX, false);
    process.used_bytes = next_number(&words, ABSENT, false);
    const char *type = next_word(&words);
    process.type = type[0];
    if (strcmp(type, "compute") != 0 && strcmp(type, "graphics") != 0 && strcmp(type, "mps") != 0)
        words.failed = true;
    process.gpu_instance = next_number(&words, MAX_INSTANCES, true);
    process.compute_instance = next_number(&words, MAX_COMPUTE, true);
    if (!is_end(&words)) {
        process.bytes_per_minute = next_number(&words, (uint64_t)1 << 50, false);
        process.since = next_number(&words, (uint64_t)1 << 40, false);
    }
    if (!is_end(&words))
        return state_wrong(form, line);
    if (gpu->processes_count == MAX_PROCESSES)
        return state_wrong("line %d: more than %d processes on one GPU", line, MAX_PROCESSES);
    gpu->processes[gpu->processes_count++] = process;
    return NULL;
}

static void parse_starts(struct words *words, struct profile *profile) {
    const char *text = next_word(words);
    while (!words->failed) {
        if (profile->starts_count == MAX_STARTS ||
            (text = state_parse_number(text, 10, &profile->starts[profile->starts_count])) == NULL ||
            profile->starts[profile->starts_count++] > 64 || (*text != '\0' && *text != ','))
            words->failed = true;
        else if (*text++ == '\0')
            return;
    }
}

static const char *set_profile(struct gpu *gpu, const char *value, int line) {
    struct words words;
    struct profile profile = {0};
    words_start(&words, value);
    uint64_t *numbers[] = {
        &profile.enumeration, &profile.id, &profile.slices, &profile.maximum, &profile.multiprocessors,
        &profile.copy_engines, &profile.decoders, &profile.encoders, &profile.jpegs, &profile.ofas,
        &profile.memory_mb, &profile.size,
    };
    for (size_t i = 0; i < COUNT(numbers); i++)
        *numbers[i] = next_number(&words, UINT32_MAX, false);
    parse_starts(&words, &profile);
    const char *name = next_word(&words);
    if (!is_end(&words) || strlen(name) >= sizeof(profile.name) || profile.slices == 0 || profile.size == 0)
        return state_wrong(
            "line %d: a MIG profile is `profile = ENUM ID SLICES MAX SMS CE DEC ENC JPEG OFA MEMORY_MB SIZE STARTS NAME`", line);
    memcpy(profile.name, name, strlen(name) + 1);
    if (gpu->profiles_count == MAX_PROFILES)
        return state_wrong("line %d: more than %d MIG profiles", line, MAX_PROFILES);
    gpu->profiles[gpu->profiles_count++] = profile;
    return NULL;
}

static const char *set_gpu_instance(struct gpu *gpu, const char *value, int line) {
    struct words words;
    words_start(&words, value);
    uint64_t id = next_number(&words, MAX_INSTANCES, false);
    struct gpu_instance instance = {.exists = true};
    instance.profile = next_number(&words, 64, false);
    instance.start = next_number(&words, 64, false);
    instance.serial = next_number(&words, ABSENT, false);
    if (!is_end(&words) || gpu->instances[id].exists)
        return state_wrong("line %d: a GPU instance is `gpu_instance = ID PROFILE START SERIAL`, each ID once", line);
    gpu->instances[id] = instance;
    return NULL;
}

static const char *set_compute_instance(struct gpu *gpu, const char *value, int line) {
    struct words words;
    words_start(&words, value);
    uint64_t parent = next_number(&words, MAX_INSTANCES, false);
    uint64_t id = next_number(&words, MAX_COMPUTE, false);
    struct compute_instance instance = {.exists = true};
    instance.profile = next_number(&words, 16, false);
    instance.start = next_number(&words, 16, false);
    instance.serial = next_number(&words, ABSENT, false);
    if (!is_end(&words) || !gpu->instances[parent].exists || gpu->instances[parent].compute[id].exists)
        return state_wrong(
            "line %d: a compute instance is `compute_instance = GI ID PROFILE START SERIAL` after its GPU instance", line);
    gpu->instances[parent].compute[id] = instance;
    return NULL;
}

static const char *set_nvlink(struct gpu *gpu, const char *value, int line) {
    struct words words;
    words_start(&words, value);
    uint64_t number = next_number(&words, MAX_LINKS, false);
    const char *remote = next_word(&words);
    const char *address = next_word(&words);
    struct nvlink link = {.exists = true, .to_switch = strcmp(remote, "switch") == 0};
    unsigned domain, bus, device;
    if (!is_end(&words) || number != gpu->nvlinks_count || (!link.to_switch && strcmp(remote, "gpu") != 0) ||
        strlen(address) >= sizeof(link.address) || state_parse_address(address, &domain, &bus, &device) != 0)
        return state_wrong("line %d: the next link is `nvlink = %zu gpu|switch PCI_ADDRESS`", line, gpu->nvlinks_count);
    memcpy(link.address, address, strlen(address) + 1);
    gpu->nvlinks[gpu->nvlinks_count++] = link;
    return NULL;
}

static const char *set_nvlink_down(struct gpu *gpu, const char *value, int line) {
    struct words words;
    words_start(&words, value);
    uint64_t number = next_number(&words, MAX_LINKS, false);
    if (!is_end(&words) || number >= gpu->nvlinks_count)
        return state_wrong("line %d: nvlink_down = %.20s, this GPU has %zu links", line, value, gpu->nvlinks_count);
    gpu->nvlinks[number].down = true;
    return NULL;
}

static const char *set_event(struct state *state, const char *value, int line) {
    struct words words;
    words_start(&words, value);
    struct event event = {0};
    event.number = next_number(&words, ABSENT, false);
    event.gpu = next_number(&words, MAX_GPUS, false);
    event.type = next_number(&words, ABSENT, false);
    event.data = next_number(&words, ABSENT, false);
    event.gpu_instance = next_number(&words, MAX_INSTANCES, true);
    event.compute_instance = next_number(&words, MAX_COMPUTE, true);
    event.time = next_number(&words, (uint64_t)1 << 40, false); /* within what a calendar can show */
    if (!is_end(&words) || state->events_count == MAX_EVENTS)
        return state_wrong("line %d: an event is `event = NUMBER GPU TYPE DATA GI CI TIME`, %d at most", line, MAX_EVENTS);
    state->events[state->events_count++] = event;
    return NULL;
}

bool state_set_list_of_system(struct state *state, const char *key, const char *value, int line, const char **problem) {
    if (strcmp(key, "event") != 0)
        return false;
    *problem = set_event(state, value, line);
    return true;
}

bool state_set_list_of_gpu(struct gpu *gpu, const char *key, const char *value, int line, const char **problem) {
    static const struct {
        const char *key;
        const char *(*set)(struct gpu *, const char *, int);
    } lists[] = {
        {"process", set_process},           {"profile", set_profile},
        {"gpu_instance", set_gpu_instance}, {"compute_instance", set_compute_instance},
        {"nvlink", set_nvlink},             {"nvlink_down", set_nvlink_down},
    };
    for (size_t i = 0; i < COUNT(lists); i++)
        if (strcmp(lists[i].key, key) == 0) {
            *problem = lists[i].set(gpu, value, line);
            return true;
        }
    return false;
}
