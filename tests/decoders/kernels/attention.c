// Attention alone, for ctypes.

#include "attention.h"
#include "threads.h"

typedef struct {
    const Attention *attention;
    const Tiles *tiles;
    const Units *units;
    Step step;
    int64_t threads;
} Job;

static void attend_units(void *argument, int thread) {
    Job *job = argument;
    Worker worker = worker_of(&job->step, thread, (int)job->threads);
    for (Span unit = {0}; next_span(&worker, unit_count(job->tiles, job->attention, job->units), 1, &unit);)
        attend_unit(unit.from, job->attention, job->tiles, job->units);
}

void attend(const Attention *a, const Tiles *tiles, int64_t threads) {
    const int64_t size = units_size(tiles, a->kv_heads, a->groups);
    void *memory = size ? aligned_alloc(64, size) : NULL;
    const Units units = units_in(memory, tiles, a->kv_heads);
    Job job = {.attention = a, .tiles = tiles, .units = &units, .threads = threads};
    tot_run_parallel(attend_units, &job, (int)threads);
    free(memory);
}
