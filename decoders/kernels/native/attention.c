// Attention only, for models whose forward pass runs in torch.

#include "attention.h"
#include "threads.h"

// Python compares these with the sizes of its own structures.
const int64_t attention_sizes[] = {sizeof(Piece), sizeof(Tiles), sizeof(Attention)};

typedef struct {
    const Attention *attention;
    const Tiles *tiles;
    Units units;
    Step step;
    int64_t threads;
} Job;

static void attend_units(void *argument, int thread) {
    Job *job = argument;
    Worker worker = worker_of(&job->step, thread, (int)job->threads, NULL);
    EACH_UNIT(&worker, 0, job->tiles->count * job->attention->kv_heads * job->units.parts, unit)
        attend_unit(unit, job->attention, job->tiles, &job->units);
}

void attend(const Attention *a, const Tiles *tiles, int64_t threads) {
    const int64_t size = units_size(tiles, a->kv_heads, a->groups);
    void *memory = size ? aligned_alloc(64, size) : NULL;
    Job job = {.attention = a, .tiles = tiles, .units = units_in(memory, tiles, a->kv_heads), .threads = threads};
    run_parallel(attend_units, &job, (int)threads);
    free(memory);
}
