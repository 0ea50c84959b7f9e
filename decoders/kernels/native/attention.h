// Attention of packed rows over the slots visible to them.
//
// Compiled for one HEAD_DIM: a multiple of 16 with -DFLOAT32 (float32), otherwise of 32 (bfloat16 products, AVX-512
// BF16). Rows are grouped in tiles of up to TILE. A tile has pieces: lists of slots, each visible to some consecutive
// rows. Softmax is computed online (Milakov and Gimelshein, 2018). Long lists are split into parts for several threads,
// then merged. Scores, sums of weights and outputs are float32, in which products of bfloat16 are exact.

#pragma once

#include "element.h"

#define TILE 16                      // maximum rows of a tile
#define MAX_GROUPS 16                // query heads per key-value head
#define CHUNK (32 * PER_WORD)        // keys at a time
#define WORDS (HEAD_DIM / PER_WORD)  // 32-bit words of a key
#define VECTORS (HEAD_DIM / LANES)   // float32 vectors of an output row
#define CHUNK_VECTORS (CHUNK / LANES)
#define MIN_UNITS 6                  // of a layer, for long texts; more cost more than they save
#define MIN_PART_CHUNKS 8            // minimum chunks of a part
// Queries, and output vectors of each, at a time: their sums stay in registers.
#define QUERY_BATCH (LANES == 16 ? 6 : 3)
#define VECTOR_BATCH (VECTORS % 4 == 0 ? 4 : VECTORS % 3 == 0 ? 3 : VECTORS % 2 == 0 ? 2 : 1)

typedef struct {
    int32_t first, last;    // rows [first, last) of the tile
    int32_t slots;          // index of its first slot in the list
    int32_t visible, step;  // row `first` sees the first `visible` slots, each later row `step` more
    int32_t hidden;         // except the first `hidden`; each later row `step` more; negative if none
} Piece;

// Load a chunk: keys as (word, key), values as (PER_WORD keys together, dimension), in vectors. Missing keys are 0.
static inline void gather(const Stored *keys, const Stored *values, int64_t slot_stride, const int32_t *slots,
                          int count, Words (*by_word)[CHUNK_VECTORS], Words (*by_key)[VECTORS]) {
    const Words zero = {0};
    for (int square = 0; LANES * square < count; square++) {
        for (int part = 0; part < WORDS / LANES; part++) {
            Words words[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const int key = LANES * square + i;
                words[i] = key < count ? load_stored(keys + slots[key] * slot_stride, part) : zero;
            }
            transpose(words);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) by_word[LANES * part + i][square] = words[i];
        }
    }
#ifdef FLOAT32
    for (int key = 0; key < count; key++)
#pragma GCC unroll 32
        for (int part = 0; part < VECTORS; part++) by_key[key][part] = load_stored(values + slots[key] * slot_stride, part);
#else
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int key = 0; key < count; key += 2) {
#pragma GCC unroll 8
        for (int part = 0; part < WORDS / 16; part++) {
            const __m512i a = (__m512i)load_stored(values + slots[key] * slot_stride, part);
            const __m512i b = (__m512i)(key + 1 < count ? load_stored(values + slots[key + 1] * slot_stride, part) : zero);
            by_key[key / 2][2 * part] = (Words)_mm512_permutex2var_epi16(a, low, b);
            by_key[key / 2][2 * part + 1] = (Words)_mm512_permutex2var_epi16(a, high, b);
        }
    }
#endif
}

// The online softmax of one query.
typedef struct {
    float maximum, sum;
    Floats output[VECTORS];
} SoftmaxState;

// cap * tanh(x / cap) (Gemma 2, section 2).
static inline Floats soft_cap(Floats x, float cap) {
    const Floats decay = exponential(vector_abs(x) * (-2.0f / cap)), size = cap * (1.0f - decay) / (1.0f + decay);
    return (Floats)((Words)size | ((Words)x & (int32_t)0x80000000));
}

// Attend from `rows` queries (rows, WORDS) to `key_vectors` vectors of keys. Query q sees the keys
// [hidden[q], visible[q]).
static inline __attribute__((always_inline)) void attend_chunk(int rows, int key_vectors, const int32_t *queries,
                                                               const int *visible, const int *hidden, int count,
                                                               float scale, float cap, Words (*by_word)[CHUNK_VECTORS],
                                                               Words (*by_key)[VECTORS], SoftmaxState *states) {
    Floats scores[QUERY_BATCH][CHUNK_VECTORS];
#pragma GCC unroll 6
    for (int q = 0; q < rows; q++)
#pragma GCC unroll 4
        for (int i = 0; i < key_vectors; i++) scores[q][i] = (Floats){0};
#pragma GCC unroll 2
    for (int word = 0; word < WORDS; word++)
#pragma GCC unroll 6
        for (int q = 0; q < rows; q++) {
            const Words broadcast = splat_word(queries[q * WORDS + word]);
#pragma GCC unroll 4
            for (int i = 0; i < key_vectors; i++)
                scores[q][i] = multiply_add(scores[q][i], broadcast, by_word[word][i]);
        }
    union {
        Element elements[CHUNK];
        int32_t words[CHUNK / PER_WORD];
    } weights[QUERY_BATCH];
    const Words lane = iota();
#pragma GCC unroll 6
    for (int q = 0; q < rows; q++) {
        Floats max = splat(-INFINITY);
        Words masks[CHUNK_VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < key_vectors; i++) {
            const Words mask = (lane < splat_word(visible[q] - LANES * i)) &
                               (lane >= splat_word(hidden[q] - LANES * i));
            masks[i] = mask;
            scores[q][i] *= scale;
            if (cap > 0) scores[q][i] = soft_cap(scores[q][i], cap);
            max = vector_max(max, (Floats)(((Words)scores[q][i] & mask) | ((Words)splat(-INFINITY) & ~mask)));
        }
        const float highest = reduce_max(max);
        if (highest > states[q].maximum) {
            const Floats correction = exponential(splat(states[q].maximum - highest));
            states[q].maximum = highest;
            states[q].sum *= correction[0];
            for (int part = 0; part < VECTORS; part++) states[q].output[part] *= correction;
        }
        const Floats top = splat(states[q].maximum);
        Floats sum = {0};
#pragma GCC unroll 4
        for (int i = 0; i < key_vectors; i++) {
            const Floats weight = (Floats)((Words)exponential(scores[q][i] - top) & masks[i]);
            sum += weight;
            store_elements(weights[q].elements + LANES * i, weight);
        }
        states[q].sum += reduce_add(sum);
    }
    for (int part = 0; part < VECTORS; part += VECTOR_BATCH) {
        Floats accumulators[QUERY_BATCH][VECTOR_BATCH];
#pragma GCC unroll 6
        for (int q = 0; q < rows; q++)
#pragma GCC unroll 4
            for (int i = 0; i < VECTOR_BATCH; i++) accumulators[q][i] = states[q].output[part + i];
        for (int step = 0; step < (count + PER_WORD - 1) / PER_WORD; step++)
#pragma GCC unroll 6
            for (int q = 0; q < rows; q++) {
                const Words broadcast = splat_word(weights[q].words[step]);
#pragma GCC unroll 4
                for (int i = 0; i < VECTOR_BATCH; i++)
                    accumulators[q][i] = multiply_add(accumulators[q][i], broadcast, by_key[step][part + i]);
            }
#pragma GCC unroll 6
        for (int q = 0; q < rows; q++)
#pragma GCC unroll 4
            for (int i = 0; i < VECTOR_BATCH; i++) states[q].output[part + i] = accumulators[q][i];
    }
}

static inline int min_int(int a, int b) { return a < b ? a : b; }

static inline int keys_of(const Piece *piece) {
    return piece->visible + piece->step * (piece->last - piece->first - 1);
}

static inline void prefetch_slot(const Stored *key, const Stored *value) {
    for (int i = 0; i < HEAD_DIM; i += 64 / (int)sizeof(Stored)) {
        __builtin_prefetch(key + i);
        __builtin_prefetch(value + i);
    }
}

typedef struct {
    const int32_t *slots;   // of all pieces
    const Piece *pieces;
    const int32_t *starts;  // (count + 1,): the first piece of each tile
    int64_t count, rows;    // number of tiles; rows of each tile but the last
} Tiles;

// The queries, keys, values and outputs of a layer: query (heads, rows, HEAD_DIM), with strides; keys and values
// (kv_heads, slots, HEAD_DIM); out (rows, heads, HEAD_DIM).
typedef struct {
    const Element *query;
    const Stored *keys, *values;
    Element *out;
    int64_t head_stride, row_stride, kv_head_stride, slot_stride, rows, kv_heads, groups;
    const float *sinks;  // (heads,): a score of each head that has no value; or NULL
    float scale, cap;    // scores are scaled, then soft-capped unless cap is 0
} Attention;

// Cost of a chunk of a piece, in rows. Unpacking the chunk costs as much as two rows.
static inline int64_t chunk_cost(const Piece *piece) { return piece->last - piece->first + 2; }

static inline int chunks_of(const Piece *piece) { return (keys_of(piece) + CHUNK - 1) / CHUNK; }

// Compute one key-value head of one tile: the queries (rows, groups) against part `part` of `parts` of its chunks.
static void attend_tile(const Attention *a, int64_t head, int64_t first_row, int rows, const int32_t *slots,
                        const Piece *pieces, int count, int64_t part, int64_t parts, SoftmaxState *states) {
    int32_t queries[TILE * MAX_GROUPS][WORDS];
    Words by_word[WORDS][CHUNK_VECTORS], by_key[CHUNK / PER_WORD][VECTORS];
    const int groups = (int)a->groups;
    const Element *query = a->query + head * groups * a->head_stride + first_row * a->row_stride;
    const Stored *keys = a->keys + head * a->kv_head_stride, *values = a->values + head * a->kv_head_stride;
    for (int q = 0; q < rows * groups; q++) {
        memcpy(queries[q], query + (q % groups) * a->head_stride + (q / groups) * a->row_stride, sizeof queries[q]);
        states[q] = (SoftmaxState){.maximum = -INFINITY};
    }
    const Piece *end = pieces + count;
    int64_t total = 0, before = 0;
    for (const Piece *piece = pieces; piece < end; piece++) total += chunks_of(piece) * chunk_cost(piece);
    const int64_t begins = total * part / parts, ends = total * (part + 1) / parts;
    for (const Piece *piece = pieces; piece < end; piece++) {
        const int all = keys_of(piece);
        for (int from = 0; from < all; from += CHUNK, before += chunk_cost(piece)) {
            if (before < begins) continue;
            if (before >= ends) return;
            const int key_count = min_int(all - from, CHUNK), last = piece->last * groups;
            gather(keys, values, a->slot_stride, slots + piece->slots + from, key_count, by_word, by_key);
            int row = piece->first;
            while (piece->visible + piece->step * (row - piece->first) <= from) row++;  // skip rows that see no key
            // Prefetch the next chunk, a share of it with each batch of queries.
            const int continues = from + CHUNK < all;
            const int next_count = continues         ? min_int(all - from - CHUNK, CHUNK)
                                   : piece + 1 < end ? min_int(keys_of(piece + 1), CHUNK)
                                                     : 0;
            const int32_t *next = slots + (continues ? piece->slots + from + CHUNK : next_count ? piece[1].slots : 0);
            int prefetched = 0;
            for (int q = row * groups; q < last;) {
                const int left = last - q, batch = left >= QUERY_BATCH ? QUERY_BATCH : left >= 3 ? 3 : left;
                int visible[QUERY_BATCH], hidden[QUERY_BATCH];
                for (int i = 0; i < batch; i++) {
                    const int further = piece->step * ((q + i) / groups - piece->first) - from;
                    visible[i] = piece->visible + further;
                    hidden[i] = piece->hidden + further;
                }
                for (; prefetched < next_count * (q + batch - row * groups) / (last - row * groups); prefetched++)
                    prefetch_slot(keys + next[prefetched] * a->slot_stride, values + next[prefetched] * a->slot_stride);
                // The batch is a constant in each case, so that the loops are unrolled.
#define ATTEND_CHUNK(n, vectors)                                                                                       \
    attend_chunk(n, vectors, queries[q], visible, hidden, key_count, a->scale, a->cap, by_word, by_key, states + q)
#define ATTEND_CASE(n)                                                                                                 \
    case n:                                                                                                            \
        if (2 * key_count > CHUNK)                                                                                     \
            ATTEND_CHUNK(n, CHUNK_VECTORS);                                                                            \
        else                                                                                                           \
            ATTEND_CHUNK(n, CHUNK_VECTORS / 2);                                                                        \
        break;
                switch (batch) {
                    ATTEND_CASE(1)
                    ATTEND_CASE(2)
                    ATTEND_CASE(3)
#if LANES == 16
                    ATTEND_CASE(6)
#endif
                }
                q += batch;
            }
        }
    }
}

// Merge the parts of one query, which are `stride` apart, into the first.
static inline void merge_parts(SoftmaxState *states, int64_t parts, int64_t stride) {
    float maximum = -INFINITY;
    for (int64_t i = 0; i < parts; i++) maximum = fmaxf(maximum, states[i * stride].maximum);
    SoftmaxState all = {.maximum = maximum};
    for (int64_t i = 0; i < parts; i++) {
        const SoftmaxState *partial = states + i * stride;
        const Floats share = exponential(splat(partial->maximum - maximum));  // 0 for a part without visible keys
        all.sum += partial->sum * share[0];
        for (int v = 0; v < VECTORS; v++) all.output[v] = add_product(all.output[v], partial->output[v], share);
    }
    *states = all;
}

// The attention of a layer is split into units: each tile and head, which are split into parts if they are few. The
// thread that finishes a head's last part merges them. The split, and so the result, does not depend on the number of
// threads.
typedef struct {
    int64_t parts;
    SoftmaxState *states;  // (tiles, kv_heads, parts, TILE * groups), if there are several parts
    atomic_int *done;      // (tiles, kv_heads): finished parts
} Units;

static int64_t parts_of(const Tiles *tiles, int64_t kv_heads) {
    const int64_t heads = tiles->count * kv_heads, max = heads ? (MIN_UNITS + heads - 1) / heads : 1;
    int64_t longest = 0;
    for (int64_t t = 0; max > 1 && t < tiles->count; t++) {
        int64_t chunks = 0;
        for (int32_t p = tiles->starts[t]; p < tiles->starts[t + 1]; p++) chunks += chunks_of(tiles->pieces + p);
        longest = chunks > longest ? chunks : longest;
    }
    const int64_t parts = longest / MIN_PART_CHUNKS;
    return parts < 1 ? 1 : parts < max ? parts : max;
}

// Bytes of `done`, which precedes `states` in memory.
static int64_t counts_size(int64_t heads) { return (heads * (int64_t)sizeof(atomic_int) + 63) / 64 * 64; }

static int64_t units_size(const Tiles *tiles, int64_t kv_heads, int64_t groups) {
    const int64_t heads = tiles->count * kv_heads, parts = parts_of(tiles, kv_heads);
    return parts > 1 ? counts_size(heads) + heads * parts * TILE * groups * (int64_t)sizeof(SoftmaxState) : 0;
}

// `target` is aligned to 64 bytes. If it is NULL there is one part.
static Units units_in(void *target, const Tiles *tiles, int64_t kv_heads) {
    if (target == NULL) return (Units){.parts = 1};
    const int64_t counts = counts_size(tiles->count * kv_heads);
    memset(target, 0, counts);
    return (Units){parts_of(tiles, kv_heads), (SoftmaxState *)((char *)target + counts), target};
}

// The sum of the weights of a query, relative to its highest score. A sink's score of any height keeps it finite.
static inline float sum_with_sink(const SoftmaxState *state, const float *sink) {
    return state->sum + (sink ? expf(*sink - state->maximum) : 0.0f);
}

static inline int64_t unit_count(const Tiles *tiles, const Attention *a, const Units *units) {
    return tiles->count * a->kv_heads * units->parts;
}

static inline void attend_unit(int64_t number, const Attention *a, const Tiles *tiles, const Units *units) {
    const int64_t parts = units->parts, whole = number / parts, t = whole / a->kv_heads, head = whole % a->kv_heads;
    const int64_t row = t * tiles->rows, left = a->rows - row, max = TILE * a->groups;
    const int rows = (int)(left < tiles->rows ? left : tiles->rows);
    SoftmaxState own[TILE * MAX_GROUPS], *states = parts > 1 ? units->states + whole * parts * max : own;
    attend_tile(a, head, row, rows, tiles->slots, tiles->pieces + tiles->starts[t],
                tiles->starts[t + 1] - tiles->starts[t], number % parts, parts, states + number % parts * max);
    if (parts > 1) {
        if (atomic_fetch_add(units->done + whole, 1) < parts - 1) return;
        atomic_store(units->done + whole, 0);  // for the next layer
    }
    for (int q = 0; q < rows * a->groups; q++) {
        if (parts > 1) merge_parts(states + q, parts, max);
        const int64_t query = head * a->groups + q % a->groups;
        const Floats share = splat(1.0f / sum_with_sink(states + q, a->sinks ? a->sinks + query : NULL));
        Element *target = a->out + ((row + q / a->groups) * a->kv_heads * a->groups + query) * HEAD_DIM;
        for (int v = 0; v < VECTORS; v++) store_elements(target + LANES * v, states[q].output[v] * share);
    }
}
