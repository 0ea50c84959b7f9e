// Attention alone, for models whose forward runs in torch.

#include "attention.h"

const int64_t attention_sizes[] = {sizeof(Piece), sizeof(Tiles), sizeof(Attention)};

void attend(const Attention *a, const Tiles *tiles, int64_t threads) {
    const int64_t size = units_size(tiles, a->kv_heads, a->groups);
    void *place = size ? aligned_alloc(64, size) : NULL;
    const Units units = units_in(place, tiles, a->kv_heads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t number = 0; number < tiles->count * a->kv_heads * units.parts; number++)
        unit(number, a, tiles, &units);
    free(place);
}
