/* What the files that read and write the state share, and nobody else needs. */
#ifndef GPUREADY_STATE_INTERNAL_STANDIN_H
#define GPUREADY_STATE_INTERNAL_STANDIN_H

#include "state_standin.h"

/* The keys of the state file that are one text or one number, and where each lies in memory. */
enum field_kind { FIELD_TEXT, FIELD_NUMBER };

struct field {
    const char *key;
    enum field_kind kind;
    size_t offset, size;
};

#define FIELD_TEXT_OF(type, member) {#member, FIELD_TEXT, offsetof(struct type, member), sizeof(((struct type *)0)->member)}
#define FIELD_NUMBER_OF(type, member) {#member, FIELD_NUMBER, offsetof(struct type, member), sizeof(uint64_t)}
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

extern const struct field system_fields[];
extern const size_t system_fields_count;
extern const struct field gpu_fields[];
extern const size_t gpu_fields_count;

/* Makes the sentence that says what is wrong with a file; printable, and valid until the next call. */
__attribute__((format(printf, 1, 2))) const char *state_wrong(const char *format, ...);

/* Refuses what contradicts itself, and fills in what follows from other values (sizes of instances, numbers of an address). */
const char *state_check(struct state *state);

/* Decimal, or hexadecimal after 0x. Returns what follows the number, or NULL if there is none or it is too big. */
const char *state_parse_number(const char *text, int base, uint64_t *number);

/* Sets a key of a GPU or of the system that holds several values. Returns false where the key is none of these. */
bool state_set_list_of_gpu(struct gpu *gpu, const char *key, const char *value, int line, const char **problem);
bool state_set_list_of_system(struct state *state, const char *key, const char *value, int line, const char **problem);

#endif
