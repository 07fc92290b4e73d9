/* Writes the state file of the simulated hardware, and what happens to all of it at once: a reset, a boot. */
#include "state_internal_standin.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

const struct profile *state_find_profile(const struct gpu *gpu, uint64_t enumeration) {
    for (size_t i = 0; i < gpu->profiles_count; i++)
        if (gpu->profiles[i].enumeration == enumeration)
            return &gpu->profiles[i];
    return NULL;
}

uint64_t state_compute_slices(uint64_t enumeration) {
    static const uint64_t slices[] = {1, 2, 3, 4, 7, 8, 6, 1, 7};
    return enumeration < COUNT(slices) ? slices[enumeration] : 0;
}

uint64_t process_bytes(const struct process *process, uint64_t now) {
    if (process->bytes_per_minute == 0 || now <= process->since)
        return process->used_bytes;
    uint64_t each_second = process->bytes_per_minute / 60, seconds = now - process->since;
    uint64_t room = ABSENT - process->used_bytes;
    return each_second != 0 && seconds > room / each_second ? ABSENT : process->used_bytes + each_second * seconds;
}

/* ---- writing ---- */

static void write_fields(FILE *file, const struct field *fields, size_t count, const void *source) {
    for (size_t i = 0; i < count; i++) {
        const char *place = (const char *)source + fields[i].offset;
        if (fields[i].kind == FIELD_TEXT) {
            if (place[0] != '\0')
                fprintf(file, "%s = %s\n", fields[i].key, place);
            continue;
        }
        uint64_t number;
        memcpy(&number, place, sizeof(number));
        if (number != ABSENT)
            fprintf(file, "%s = %" PRIu64 "\n", fields[i].key, number);
    }
}

static void write_optional(FILE *file, uint64_t number) {
    if (number == ABSENT)
        fputs(" -", file);
    else
        fprintf(file, " %" PRIu64, number);
}

static void write_profile(FILE *file, const struct profile *profile) {
    const uint64_t numbers[] = {
        profile->enumeration, profile->id, profile->slices, profile->maximum, profile->multiprocessors,
        profile->copy_engines, profile->decoders, profile->encoders, profile->jpegs, profile->ofas,
        profile->memory_mb, profile->size,
    };
    fputs("profile =", file);
    for (size_t i = 0; i < COUNT(numbers); i++)
        fprintf(file, " %" PRIu64, numbers[i]);
    for (size_t i = 0; i < profile->starts_count; i++)
        fprintf(file, "%s%" PRIu64, i == 0 ? " " : ",", profile->starts[i]);
    fprintf(file, " %s\n", profile->name);
}

static void write_instances(FILE *file, const struct gpu *gpu) {
    for (size_t id = 0; id < MAX_INSTANCES; id++) {
        const struct gpu_instance *instance = &gpu->instances[id];
        if (!instance->exists)
            continue;
        fprintf(
            file, "gpu_instance = %zu %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", id, instance->profile, instance->start,
            instance->serial);
        for (size_t i = 0; i < MAX_COMPUTE; i++)
            if (instance->compute[i].exists)
                fprintf(
                    file, "compute_instance = %zu %zu %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", id, i,
                    instance->compute[i].profile, instance->compute[i].start, instance->compute[i].serial);
    }
}

static void write_gpu(FILE *file, const struct gpu *gpu, size_t index) {
    fprintf(file, "\n[gpu %zu]\n", index);
    write_fields(file, gpu_fields, gpu_fields_count, gpu);
    for (size_t i = 0; i < gpu->nvlinks_count; i++)
        fprintf(file, "nvlink = %zu %s %s\n", i, gpu->nvlinks[i].to_switch ? "switch" : "gpu", gpu->nvlinks[i].address);
    for (size_t i = 0; i < gpu->nvlinks_count; i++)
        if (gpu->nvlinks[i].down)
            fprintf(file, "nvlink_down = %zu\n", i);
    for (size_t i = 0; i < gpu->profiles_count; i++)
        write_profile(file, &gpu->profiles[i]);
    write_instances(file, gpu);
    for (size_t i = 0; i < gpu->processes_count; i++) {
        const struct process *process = &gpu->processes[i];
        const char *type = process->type == 'c' ? "compute" : process->type == 'g' ? "graphics" : "mps";
        fprintf(file, "process = %" PRIu64 " %" PRIu64 " %s", process->pid, process->used_bytes, type);
        write_optional(file, process->gpu_instance);
        write_optional(file, process->compute_instance);
        if (process->bytes_per_minute != 0)
            fprintf(file, " %" PRIu64 " %" PRIu64, process->bytes_per_minute, process->since);
        fputc('\n', file);
    }
}

static void write_state(FILE *file, const struct state *state) {
    fputs(STATE_FORMAT "\n# Simulated hardware. What each key means: state_standin.h, docs/simulator.md.\n\n[system]\n", file);
    write_fields(file, system_fields, system_fields_count, state);
    for (size_t i = 0; i < state->events_count; i++) {
        const struct event *event = &state->events[i];
        fprintf(
            file, "event = %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64, event->number, event->gpu, event->type, event->data);
        write_optional(file, event->gpu_instance);
        write_optional(file, event->compute_instance);
        fprintf(file, " %" PRIu64 "\n", event->time);
    }
    for (size_t i = 0; i < state->gpus_count; i++)
        write_gpu(file, &state->gpus[i], i);
    for (size_t i = 0; i < state->faults_count; i++) {
        const struct fault *fault = &state->faults[i];
        fprintf(file, "\n[fault %s ", fault->name);
        if (fault->gpu == ABSENT)
            fputs("system]\n", file);
        else
            fprintf(file, "%" PRIu64 "]\n", fault->gpu);
        fprintf(file, "until = %s\n", fault->until);
        for (size_t n = 0; n < fault->lines_count; n++)
            fprintf(file, "%s\n", fault->lines[n]);
    }
}

const char *state_write(const char *path, const struct state *written) {
    char scratch[4096];
    if (snprintf(scratch, sizeof(scratch), "%s.new", path) >= (int)sizeof(scratch))
        return state_wrong("its path is too long");
    FILE *file = fopen(scratch, "wbe");
    if (file == NULL)
        return state_wrong("%s cannot be written: %s", scratch, strerror(errno));
    write_state(file, written);
    int failed = fflush(file) | ferror(file);
    failed |= fchmod(fileno(file), 0644);
    /* The kernel's own time stamps are too coarse to tell two changes of one millisecond apart. */
    struct timespec times[2];
    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[1] = times[0];
    failed |= futimens(fileno(file), times);
    failed |= fclose(file);
    if (failed != 0 || rename(scratch, path) != 0) {
        unlink(scratch);
        return state_wrong("it cannot be replaced: %s", strerror(errno));
    }
    return NULL;
}

int state_lock(const char *path) {
    char name[4096];
    if (snprintf(name, sizeof(name), "%s.lock", path) >= (int)sizeof(name))
        return -1;
    int lock = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (lock < 0)
        return -1;
    while (flock(lock, LOCK_EX) != 0)
        if (errno != EINTR) {
            close(lock);
            return -1;
        }
    return lock;
}

void state_unlock(int lock) { close(lock); }

/* ---- what happens to all of it ---- */

void state_add_event(struct state *state, uint64_t gpu, uint64_t type, uint64_t data) {
    if (state->events_count == MAX_EVENTS)
        memmove(&state->events[0], &state->events[1], sizeof(state->events[0]) * --state->events_count);
    state->events[state->events_count++] = (struct event){
        .number = ++state->events_made,
        .gpu = gpu,
        .type = type,
        .data = data,
        .gpu_instance = ABSENT,
        .compute_instance = ABSENT,
        .time = (uint64_t)time(NULL),
    };
}

/* Whether a line of a fault takes down a link that leads to that GPU: such a link trains anew when the GPU is reset. */
static bool is_link_to(const struct state *state, const struct fault *fault, const char *line, size_t gpu) {
    uint64_t link = 0;
    if (fault->gpu == ABSENT || fault->gpu == gpu || sscanf(line, "nvlink_down = %" SCNu64, &link) != 1)
        return false;
    const struct gpu *here = &state->gpus[fault->gpu], *there = &state->gpus[gpu];
    unsigned domain = 0, bus = 0, device = 0;
    if (link >= here->nvlinks_count || state_parse_address(here->nvlinks[link].address, &domain, &bus, &device) != 0)
        return false;
    return domain == there->domain && bus == there->bus && device == there->device;
}

static void remove_links_to(struct state *state, struct fault *fault, size_t gpu) {
    size_t kept = 0;
    for (size_t i = 0; i < fault->lines_count; i++)
        if (!is_link_to(state, fault, fault->lines[i], gpu))
            memmove(fault->lines[kept++], fault->lines[i], sizeof(fault->lines[0]));
    fault->lines_count = kept;
}

static void remove_faults(struct state *state, uint64_t gpu, bool boot) {
    size_t kept = 0;
    for (size_t i = 0; i < state->faults_count; i++) {
        struct fault *fault = &state->faults[i];
        bool reset = strcmp(fault->until, "reset") == 0;
        bool reboot = strcmp(fault->until, "reboot") == 0;
        size_t lines = fault->lines_count;
        if (!boot && reset)
            remove_links_to(state, fault, gpu);
        bool emptied = lines > 0 && fault->lines_count == 0;
        if (!(boot ? reset || reboot : (reset && fault->gpu == gpu) || emptied))
            state->faults[kept++] = *fault;
    }
    state->faults_count = kept;
}

void state_forget_fault_lines(struct state *written, uint64_t gpu, const char *key) {
    size_t faults = 0, length = strlen(key);
    for (size_t i = 0; i < written->faults_count; i++) {
        struct fault *fault = &written->faults[i];
        size_t kept = 0, lines = fault->lines_count;
        for (size_t n = 0; n < lines; n++)
            if (fault->gpu != gpu || strncmp(fault->lines[n], key, length) != 0 || fault->lines[n][length] != ' ')
                memmove(fault->lines[kept++], fault->lines[n], sizeof(fault->lines[0]));
        fault->lines_count = kept;
        if (lines == 0 || kept > 0)
            written->faults[faults++] = *fault;
    }
    written->faults_count = faults;
}

static void forget_instances(struct gpu *gpu) { memset(gpu->instances, 0, sizeof(gpu->instances)); }

/* What both a reset and a new load of the driver do. Rows that wait for their remapping are remapped, and the counters that
 * live as long as the driver start again. */
static void start_again(struct gpu *gpu) {
    forget_instances(gpu);
    if (gpu->mig_current != ABSENT)
        gpu->mig_current = gpu->mig_pending;
    if (gpu->ecc_current != ABSENT)
        gpu->ecc_current = gpu->ecc_pending;
    uint64_t *const counters[] = {
        &gpu->ecc_volatile_corrected,        &gpu->ecc_volatile_uncorrected, &gpu->violation_power_nanoseconds,
        &gpu->violation_thermal_nanoseconds, &gpu->energy_millijoules,       &gpu->pcie_replays,
        &gpu->nvlink_replay_errors,          &gpu->nvlink_recovery_errors,   &gpu->nvlink_crc_errors,
    };
    for (size_t i = 0; i < COUNT(counters); i++)
        if (*counters[i] != ABSENT)
            *counters[i] = 0;
    if (gpu->remap_pending != ABSENT)
        gpu->remap_pending = 0;
    if (gpu->retirement_pending != ABSENT)
        gpu->retirement_pending = 0;
    if (gpu->recovery_action != ABSENT)
        gpu->recovery_action = 0;
}

void state_after_reset(struct state *written, size_t gpu) {
    remove_faults(written, gpu, false);
    start_again(&written->gpus[gpu]);
}

void state_after_boot(struct state *written) {
    remove_faults(written, ABSENT, true);
    written->events_count = 0;
    for (size_t i = 0; i < written->gpus_count; i++) {
        struct gpu *gpu = &written->gpus[i];
        if (gpu->mig_current != ABSENT && gpu->mig_mode_persists != 1)
            gpu->mig_pending = 0;
        start_again(gpu);
        gpu->processes_count = 0;
        if (gpu->power_limit_default_milliwatts != ABSENT)
            gpu->power_limit_milliwatts = gpu->power_limit_default_milliwatts;
        if (gpu->compute_mode != ABSENT)
            gpu->compute_mode = 0;
    }
}
