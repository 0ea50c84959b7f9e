// Attention of packed rows over the slots they see.
//
// Compiled for one HEAD_DIM, a multiple of 32, and with -DFLOAT32 for float32 (a multiple of 16), else for bfloat16 and
// its products (AVX-512 BF16). Rows stand in tiles of up to TILE; a tile has pieces, each a list of slots that some
// consecutive rows of it see. Softmax is taken as it goes (Milakov and Gimelshein, 2018); long lists are cut for several
// threads, and joined. Scores, weights' sums and outputs are float32; products of bfloat16 are exact in it.

#pragma once

#include <omp.h>

#include "element.h"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#define TILE 16                    // rows, at most
#define MAX_GROUPS 16              // query heads a key-value head
#define CHUNK (32 * STEP)          // keys at a time
#define WORDS (HEAD_DIM / STEP)    // of 32 bits, in one key
#define VECTORS (HEAD_DIM / LANES) // of float32, in one row of the output
#define WIDTH (CHUNK / LANES)      // vectors of keys in a chunk
#define UNITS 6                    // of a layer's, at least, where texts are long enough: more cost more than they save
#define PART 8                     // chunks of one of them, at least
#define BESIDE (LANES == 16 ? 6 : 3)  // queries at a time, whose sums stay in registers, for so many output vectors:
#define ABREAST (VECTORS % 4 == 0 ? 4 : VECTORS % 3 == 0 ? 3 : VECTORS % 2 == 0 ? 2 : 1)

typedef struct {
    int32_t first, last;   // rows, from the tile's first one
    int32_t slots;         // where its slots begin in the list
    int32_t seen, step;    // row `first` sees so many of them, each further row `step` more
    int32_t hidden;        // but not so many of the first ones, and each further row `step` more; negative for none
} Piece;


static inline Words words_at(const Element *element, int part) {
    return load_words((const int32_t *)element + LANES * part);
}

// Keys of a chunk as (word, key), values as (STEP keys together, dimension), in vectors; what is not there is zero.
static inline void gather(const Element *keys, const Element *values, int64_t slot_stride, const int32_t *slots,
                          int count, Words (*by_word)[WIDTH], Words (*by_key)[VECTORS]) {
    const Words zero = {0};
    for (int square = 0; LANES * square < count; square++) {
        for (int part = 0; part < WORDS / LANES; part++) {
            Words words[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const int key = LANES * square + i;
                words[i] = key < count ? words_at(keys + slots[key] * slot_stride, part) : zero;
            }
            transpose(words);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) by_word[LANES * part + i][square] = words[i];
        }
    }
#ifdef FLOAT32
    for (int key = 0; key < count; key++)
#pragma GCC unroll 32
        for (int part = 0; part < VECTORS; part++) by_key[key][part] = words_at(values + slots[key] * slot_stride, part);
#else
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int key = 0; key < count; key += 2) {
#pragma GCC unroll 8
        for (int part = 0; part < WORDS / 16; part++) {
            const __m512i a = (__m512i)words_at(values + slots[key] * slot_stride, part);
            const __m512i b = (__m512i)(key + 1 < count ? words_at(values + slots[key + 1] * slot_stride, part) : zero);
            by_key[key / 2][2 * part] = (Words)_mm512_permutex2var_epi16(a, low, b);
            by_key[key / 2][2 * part + 1] = (Words)_mm512_permutex2var_epi16(a, high, b);
        }
    }
#endif
}

// What a query has seen so far.
typedef struct {
    float maximum, sum;
    Floats output[VECTORS];
} Seen;

// cap * tanh(x / cap) (Gemma 2, section 2).
static inline Floats capped(Floats x, float cap) {
    const Floats power = exponential(absolute(x) * (-2.0f / cap)), size = cap * (1.0f - power) / (1.0f + power);
    return (Floats)((Words)size | ((Words)x & (int32_t)0x80000000));
}

// `rows` queries (rows, WORDS) against `wide` vectors of keys, of which each sees the first `visible` but for the first
// `hidden`.
static inline __attribute__((always_inline)) void meet(int rows, int wide, const int32_t *queries, const int *visible,
                                                       const int *hidden, int count, float scale, float cap,
                                                       Words (*by_word)[WIDTH], Words (*by_key)[VECTORS], Seen *seen) {
    Floats scores[BESIDE][WIDTH];
#pragma GCC unroll 6
    for (int q = 0; q < rows; q++)
#pragma GCC unroll 4
        for (int i = 0; i < wide; i++) scores[q][i] = (Floats){0};
#pragma GCC unroll 2
    for (int word = 0; word < WORDS; word++)
#pragma GCC unroll 6
        for (int q = 0; q < rows; q++) {
            const Words both = each_word(queries[q * WORDS + word]);
#pragma GCC unroll 4
            for (int i = 0; i < wide; i++) scores[q][i] = multiply_add(scores[q][i], both, by_word[word][i]);
        }
    union {
        Element elements[CHUNK];
        int32_t words[CHUNK / STEP];
    } weights[BESIDE];
    const Words number = iota();
#pragma GCC unroll 6
    for (int q = 0; q < rows; q++) {
        Floats most = each(-INFINITY);
        Words seen_of[WIDTH];
#pragma GCC unroll 4
        for (int i = 0; i < wide; i++) {
            const Words there = (number < each_word(visible[q] - LANES * i)) & (number >= each_word(hidden[q] - LANES * i));
            seen_of[i] = there;
            scores[q][i] *= scale;
            if (cap > 0) scores[q][i] = capped(scores[q][i], cap);
            most = larger_of(most, (Floats)(((Words)scores[q][i] & there) | ((Words)each(-INFINITY) & ~there)));
        }
        const float highest = largest_of(most);
        if (highest > seen[q].maximum) {
            const Floats shrink = exponential(each(seen[q].maximum - highest));
            seen[q].maximum = highest;
            seen[q].sum *= shrink[0];
            for (int part = 0; part < VECTORS; part++) seen[q].output[part] *= shrink;
        }
        const Floats top = each(seen[q].maximum);
        Floats sum = {0};
#pragma GCC unroll 4
        for (int i = 0; i < wide; i++) {
            const Floats weight = (Floats)((Words)exponential(scores[q][i] - top) & seen_of[i]);
            sum += weight;
            put(weights[q].elements + LANES * i, weight);
        }
        seen[q].sum += sum_of(sum);
    }
    for (int part = 0; part < VECTORS; part += ABREAST) {
        Floats adding[BESIDE][ABREAST];
#pragma GCC unroll 6
        for (int q = 0; q < rows; q++)
#pragma GCC unroll 4
            for (int i = 0; i < ABREAST; i++) adding[q][i] = seen[q].output[part + i];
        for (int step = 0; step < (count + STEP - 1) / STEP; step++)
#pragma GCC unroll 6
            for (int q = 0; q < rows; q++) {
                const Words both = each_word(weights[q].words[step]);
#pragma GCC unroll 4
                for (int i = 0; i < ABREAST; i++)
                    adding[q][i] = multiply_add(adding[q][i], both, by_key[step][part + i]);
            }
#pragma GCC unroll 6
        for (int q = 0; q < rows; q++)
#pragma GCC unroll 4
            for (int i = 0; i < ABREAST; i++) seen[q].output[part + i] = adding[q][i];
    }
}

static inline int smaller(int a, int b) { return a < b ? a : b; }

static inline int keys_of(const Piece *piece) { return piece->seen + piece->step * (piece->last - piece->first - 1); }

static inline void fetch(const Element *key, const Element *value) {
    for (int i = 0; i < HEAD_DIM; i += 64 / (int)sizeof(Element)) {
        __builtin_prefetch(key + i);
        __builtin_prefetch(value + i);
    }
}

typedef struct {
    const int32_t *slots;   // of all pieces
    const Piece *pieces;
    const int32_t *starts;  // (count + 1,) the first piece of each tile
    int64_t count, rows;    // tiles, and rows in each but the last
} Tiles;

// Where a layer's queries, keys, values and outputs are. query (heads, rows, HEAD_DIM) by its strides; keys and values
// (kv_heads, slots, HEAD_DIM); out (rows, heads, HEAD_DIM).
typedef struct {
    const Element *query, *keys, *values;
    Element *out;
    int64_t head_stride, row_stride, kv_head_stride, slot_stride, rows, kv_heads, groups;
    float scale, cap;  // scores are scaled, then capped softly, where that is not 0
} Attention;

// Compared with those of Python's structures when the library is loaded.

// What a chunk of a piece takes, in rows: unpacking it is as much as two of them.
static inline int64_t weight_of(const Piece *piece) { return piece->last - piece->first + 2; }

static inline int chunks_of(const Piece *piece) { return (keys_of(piece) + CHUNK - 1) / CHUNK; }

// One key-value head of one tile: the queries (rows, groups) against its chunks, or part number `part` of `parts` of them.
static void tile(const Attention *a, int64_t head, int64_t first_row, int rows, const int32_t *slots,
                 const Piece *pieces, int count, int64_t part, int64_t parts, Seen *seen) {
    int32_t queries[TILE * MAX_GROUPS][WORDS];
    Words by_word[WORDS][WIDTH], by_key[CHUNK / STEP][VECTORS];
    const int groups = (int)a->groups;
    const Element *query = a->query + head * groups * a->head_stride + first_row * a->row_stride;
    const Element *keys = a->keys + head * a->kv_head_stride, *values = a->values + head * a->kv_head_stride;
    for (int q = 0; q < rows * groups; q++) {
        memcpy(queries[q], query + (q % groups) * a->head_stride + (q / groups) * a->row_stride, sizeof queries[q]);
        seen[q] = (Seen){.maximum = -INFINITY};
    }
    const Piece *end = pieces + count;
    int64_t total = 0, before = 0;
    for (const Piece *piece = pieces; piece < end; piece++) total += chunks_of(piece) * weight_of(piece);
    const int64_t begins = total * part / parts, ends = total * (part + 1) / parts;
    for (const Piece *piece = pieces; piece < end; piece++) {
        const int all = keys_of(piece);
        for (int from = 0; from < all; from += CHUNK, before += weight_of(piece)) {
            if (before < begins) continue;
            if (before >= ends) return;
            const int here = smaller(all - from, CHUNK), last = piece->last * groups;
            gather(keys, values, a->slot_stride, slots + piece->slots + from, here, by_word, by_key);
            int row = piece->first;
            while (piece->seen + piece->step * (row - piece->first) <= from) row++;  // sees nothing of this chunk
            // What comes next is fetched meanwhile, a share of it with each batch of queries.
            const int goes_on = from + CHUNK < all;
            const int coming = goes_on ? smaller(all - from - CHUNK, CHUNK)
                               : piece + 1 < end ? smaller(keys_of(piece + 1), CHUNK)
                                                 : 0;
            const int32_t *next = slots + (goes_on ? piece->slots + from + CHUNK : coming ? piece[1].slots : 0);
            int fetched = 0;
            for (int q = row * groups; q < last;) {
                const int left = last - q, beside = left >= BESIDE ? BESIDE : left >= 3 ? 3 : left;
                int visible[BESIDE], hidden[BESIDE];
                for (int i = 0; i < beside; i++) {
                    const int further = piece->step * ((q + i) / groups - piece->first) - from;
                    visible[i] = piece->seen + further;
                    hidden[i] = piece->hidden + further;
                }
                for (; fetched < coming * (q + beside - row * groups) / (last - row * groups); fetched++)
                    fetch(keys + next[fetched] * a->slot_stride, values + next[fetched] * a->slot_stride);
                // The numbers are constants in each, so that loops are unrolled.
#define MEET(n)                                                                                                        \
    case n:                                                                                                            \
        if (2 * here > CHUNK)                                                                                          \
            meet(n, WIDTH, queries[q], visible, hidden, here, a->scale, a->cap, by_word, by_key, seen + q);            \
        else                                                                                                           \
            meet(n, WIDTH / 2, queries[q], visible, hidden, here, a->scale, a->cap, by_word, by_key, seen + q);        \
        break;
                switch (beside) {
                    MEET(1)
                    MEET(2)
                    MEET(3)
#if LANES == 16
                    MEET(6)
#endif
                }
                q += beside;
            }
        }
    }
}

// One query's parts as one, in the first of them; they are `stride` apart.
static inline void join(Seen *seen, int64_t parts, int64_t stride) {
    float maximum = -INFINITY;
    for (int64_t i = 0; i < parts; i++) maximum = fmaxf(maximum, seen[i * stride].maximum);
    Seen all = {.maximum = maximum};
    for (int64_t i = 0; i < parts; i++) {
        const Seen *some = seen + i * stride;
        const Floats share = exponential(each(some->maximum - maximum));  // 0 of what has seen nothing
        all.sum += some->sum * share[0];
        for (int v = 0; v < VECTORS; v++) all.output[v] = add_product(all.output[v], some->output[v], share);
    }
    *seen = all;
}

// Attention of a layer is cut into units: tile by tile, head by head, and where these are few, each into parts. Whoever
// ends a head's last part joins them. How it is cut does not depend on how many threads there are, so no result does.
typedef struct {
    int64_t parts;
    Seen *seen;        // (tiles, kv_heads, parts, TILE * groups), where there are several parts
    atomic_int *done;  // (tiles, kv_heads), zeros
} Units;

static int64_t parts_of(const Tiles *tiles, int64_t kv_heads) {
    const int64_t heads = tiles->count * kv_heads, most = (UNITS + heads - 1) / heads;
    int64_t longest = 0;
    for (int64_t t = 0; most > 1 && t < tiles->count; t++) {
        int64_t chunks = 0;
        for (int32_t p = tiles->starts[t]; p < tiles->starts[t + 1]; p++) chunks += chunks_of(tiles->pieces + p);
        longest = chunks > longest ? chunks : longest;
    }
    const int64_t parts = longest / PART;
    return parts < 1 ? 1 : parts < most ? parts : most;
}

// Bytes of the counts, which stand before what is kept of parts.
static int64_t counts_size(int64_t heads) { return (heads * (int64_t)sizeof(atomic_int) + 63) / 64 * 64; }

static int64_t units_size(const Tiles *tiles, int64_t kv_heads, int64_t groups) {
    const int64_t heads = tiles->count * kv_heads, parts = parts_of(tiles, kv_heads);
    return parts > 1 ? counts_size(heads) + heads * parts * TILE * groups * (int64_t)sizeof(Seen) : 0;
}

// `place` is aligned to 64 bytes; without one there is one part.
static Units units_in(void *place, const Tiles *tiles, int64_t kv_heads) {
    if (place == NULL) return (Units){.parts = 1};
    const int64_t counts = counts_size(tiles->count * kv_heads);
    memset(place, 0, counts);
    return (Units){parts_of(tiles, kv_heads), (Seen *)((char *)place + counts), place};
}

static inline void unit(int64_t number, const Attention *a, const Tiles *tiles, const Units *units) {
    const int64_t parts = units->parts, whole = number / parts, t = whole / a->kv_heads, head = whole % a->kv_heads;
    const int64_t row = t * tiles->rows, left = a->rows - row, most = TILE * a->groups;
    const int rows = (int)(left < tiles->rows ? left : tiles->rows);
    Seen own[TILE * MAX_GROUPS], *seen = parts > 1 ? units->seen + whole * parts * most : own;
    tile(a, head, row, rows, tiles->slots, tiles->pieces + tiles->starts[t], tiles->starts[t + 1] - tiles->starts[t],
         number % parts, parts, seen + number % parts * most);
    if (parts > 1) {
        if (atomic_fetch_add(units->done + whole, 1) < parts - 1) return;
        atomic_store(units->done + whole, 0);  // for the next layer
    }
    for (int q = 0; q < rows * a->groups; q++) {
        if (parts > 1) join(seen + q, parts, most);
        const Floats share = each(1.0f / seen[q].sum);
        const int64_t query = head * a->groups + q % a->groups;
        Element *place = a->out + ((row + q / a->groups) * a->kv_heads * a->groups + query) * HEAD_DIM;
        for (int v = 0; v < VECTORS; v++) put(place + LANES * v, seen[q].output[v] * share);
    }
}
