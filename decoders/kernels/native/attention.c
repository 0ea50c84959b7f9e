// Attention only, for models whose forward pass runs in torch.

#include "attention.h"

// Python compares these with the sizes of its own structures.
const int64_t attention_sizes[] = {sizeof(Piece), sizeof(Tiles), sizeof(Attention)};

void attend(const Attention *a, const Tiles *tiles, int64_t threads) {
    const int64_t size = units_size(tiles, a->kv_heads, a->groups);
    void *memory = size ? aligned_alloc(64, size) : NULL;
    const Units units = units_in(memory, tiles, a->kv_heads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t number = 0; number < tiles->count * a->kv_heads * units.parts; number++)
        attend_unit(number, a, tiles, &units);
    free(memory);
}
