// Attention of packed rows over the slots they see, for CPUs with AVX-512.
//
// Compiled for one HEAD_DIM, a multiple of 32, and with -DFLOAT32 for float32 (a multiple of 16), else for bfloat16 and
// its products. Rows stand in tiles of up to TILE; a tile has pieces, each a list of slots that some consecutive rows of it
// see. Softmax is taken as it goes (Milakov and Gimelshein, 2018), so pieces need no merging. Scores, weights' sums and
// outputs are float32; products of bfloat16 are exact in it.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifdef FLOAT32
typedef float Element;
#define STEP 1                     // elements that one product adds up
#else
typedef uint16_t Element;
#define STEP 2
#endif
#define TILE 16                    // rows, at most
#define MAX_GROUPS 16              // query heads a key-value head
#define CHUNK 32                   // keys at a time
#define WORDS (HEAD_DIM / STEP)    // of 32 bits, in one key
#define VECTORS (HEAD_DIM / 16)    // of float32, in one row of the output
#define BESIDE (HEAD_DIM <= 64 ? 4 : 2)  // queries at a time, so that their accumulators stay in registers

typedef struct {
    int32_t first, last;   // rows, from the tile's first one
    int32_t slots;         // where its slots begin in the list
    int32_t seen, step;    // row `first` sees so many of them, each further row `step` more
} Piece;

// Adds products of words: of a pair of bfloat16 each, or of a float32.
static inline __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
#ifdef FLOAT32
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
#else
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
}

// Rounds 16 numbers to elements.
static inline void put(Element *place, __m512 numbers) {
#ifdef FLOAT32
    _mm512_storeu_ps(place, numbers);
#else
    _mm256_storeu_si256((__m256i *)place, (__m256i)_mm512_cvtneps_pbh(numbers));
#endif
}

static inline __m512 get(const Element *place) {
#ifdef FLOAT32
    return _mm512_loadu_ps(place);
#else
    const __m256i half = _mm256_loadu_si256((const __m256i *)place);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#endif
}

// e^x as 2^(x / ln 2) for x <= 0: the fraction by a polynomial, to 5e-7.
static inline __m512 exponential(__m512 x) {
    const __m512 scaled = _mm512_max_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _mm512_set1_ps(-200.0f));
    const __m512 whole = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(scaled, whole);
    __m512 sum = _mm512_set1_ps(1.3333558e-3f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.6181291e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.5504109e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.4022651e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.9314718e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

// 16 rows of 16 32-bit words become columns.
static inline void transpose(__m512i *r) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        t[8 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[4 + j], 0x88);
        r[8 + j] = _mm512_shuffle_i32x4(t[j], t[4 + j], 0xdd);
        r[4 + j] = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0x88);
        r[12 + j] = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0xdd);
    }
}

static inline __m512i words_at(const Element *element, int part) {
    return _mm512_loadu_si512((const int32_t *)element + 16 * part);
}

// Keys of a chunk as (word, key), values as (STEP keys together, dimension); what is not there is zero.
static inline void gather(const Element *keys, const Element *values, int64_t slot_stride, const int32_t *slots,
                          int count, __m512i (*by_word)[CHUNK / 16], __m512i (*by_key)[VECTORS]) {
    const __m512i zero = _mm512_setzero_si512();
    for (int half = 0; half < CHUNK / 16; half++) {
        for (int part = 0; part < WORDS / 16; part++) {
            __m512i words[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                const int key = 16 * half + i;
                words[i] = key < count ? words_at(keys + slots[key] * slot_stride, part) : zero;
            }
            transpose(words);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) by_word[16 * part + i][half] = words[i];
        }
    }
#ifdef FLOAT32
    for (int key = 0; key < CHUNK; key++)
#pragma GCC unroll 16
        for (int part = 0; part < VECTORS; part++)
            by_key[key][part] = key < count ? words_at(values + slots[key] * slot_stride, part) : zero;
#else
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int pair = 0; pair < CHUNK / 2; pair++) {
#pragma GCC unroll 8
        for (int part = 0; part < WORDS / 16; part++) {
            const int key = 2 * pair;
            const __m512i a = key < count ? words_at(values + slots[key] * slot_stride, part) : zero;
            const __m512i b = key + 1 < count ? words_at(values + slots[key + 1] * slot_stride, part) : zero;
            by_key[pair][2 * part] = _mm512_permutex2var_epi16(a, low, b);
            by_key[pair][2 * part + 1] = _mm512_permutex2var_epi16(a, high, b);
        }
    }
#endif
}

// `rows` queries against one chunk: their maxima, sums and outputs go on.
static inline void meet(int rows, const int32_t *const *queries, const int *visible, float scale,
                        __m512i (*by_word)[CHUNK / 16], __m512i (*by_key)[VECTORS], float **maximum, float **sum,
                        __m512 **output) {
    __m512 scores[BESIDE][CHUNK / 16];
#pragma GCC unroll 4
    for (int q = 0; q < rows; q++)
        for (int half = 0; half < CHUNK / 16; half++) scores[q][half] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int word = 0; word < WORDS; word++)
#pragma GCC unroll 4
        for (int q = 0; q < rows; q++) {
            const __m512i both = _mm512_set1_epi32(queries[q][word]);
#pragma GCC unroll 2
            for (int half = 0; half < CHUNK / 16; half++)
                scores[q][half] = multiply_add(scores[q][half], both, by_word[word][half]);
        }
    union {
        Element elements[CHUNK];
        int32_t words[CHUNK / STEP];
    } weights[BESIDE];
    const __m512 none = _mm512_set1_ps(-INFINITY), factor = _mm512_set1_ps(scale);
#pragma GCC unroll 4
    for (int q = 0; q < rows; q++) {
        const uint32_t seen = visible[q] >= CHUNK ? 0xffffffffu : (1u << (visible[q] > 0 ? visible[q] : 0)) - 1u;
        const __m512 first = _mm512_mask_mul_ps(none, (__mmask16)seen, scores[q][0], factor);
        const __m512 second = _mm512_mask_mul_ps(none, (__mmask16)(seen >> 16), scores[q][1], factor);
        const float highest = _mm512_reduce_max_ps(_mm512_max_ps(first, second));
        if (highest > *maximum[q]) {
            const __m512 shrink = exponential(_mm512_set1_ps(*maximum[q] - highest));
            *maximum[q] = highest;
            *sum[q] *= _mm512_cvtss_f32(shrink);
#pragma GCC unroll 8
            for (int part = 0; part < VECTORS; part++) output[q][part] = _mm512_mul_ps(output[q][part], shrink);
        }
        const __m512 top = _mm512_set1_ps(*maximum[q]);
        const __m512 one = _mm512_maskz_mov_ps((__mmask16)seen, exponential(_mm512_sub_ps(first, top)));
        const __m512 two = _mm512_maskz_mov_ps((__mmask16)(seen >> 16), exponential(_mm512_sub_ps(second, top)));
        *sum[q] += _mm512_reduce_add_ps(_mm512_add_ps(one, two));
        put(weights[q].elements, one);
        put(weights[q].elements + 16, two);
    }
    __m512 adding[BESIDE][VECTORS];
#pragma GCC unroll 4
    for (int q = 0; q < rows; q++)
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; part++) adding[q][part] = output[q][part];
#pragma GCC unroll 2
    for (int step = 0; step < CHUNK / STEP; step++)
#pragma GCC unroll 4
        for (int q = 0; q < rows; q++) {
            const __m512i both = _mm512_set1_epi32(weights[q].words[step]);
#pragma GCC unroll 8
            for (int part = 0; part < VECTORS; part++)
                adding[q][part] = multiply_add(adding[q][part], both, by_key[step][part]);
        }
#pragma GCC unroll 4
    for (int q = 0; q < rows; q++)
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; part++) output[q][part] = adding[q][part];
}

// One key-value head of one tile.
static void tile(const Element *query, int64_t head_stride, int64_t row_stride, int rows, int groups,
                 const Element *keys, const Element *values, int64_t slot_stride, const int32_t *slots,
                 const Piece *pieces, int count, float scale, Element *out, int64_t out_row_stride) {
    __m512 output[TILE * MAX_GROUPS][VECTORS];
    float maximum[TILE * MAX_GROUPS], sum[TILE * MAX_GROUPS];
    __m512i by_word[WORDS][CHUNK / 16], by_key[CHUNK / STEP][VECTORS];
    for (int q = 0; q < rows * groups; q++) {
        maximum[q] = -INFINITY;
        sum[q] = 0;
        for (int part = 0; part < VECTORS; part++) output[q][part] = _mm512_setzero_ps();
    }
    for (const Piece *piece = pieces; piece < pieces + count; piece++) {
        const int all = piece->seen + piece->step * (piece->last - piece->first - 1);
        for (int from = 0; from < all; from += CHUNK) {
            const int here = all - from < CHUNK ? all - from : CHUNK;
            gather(keys, values, slot_stride, slots + piece->slots + from, here, by_word, by_key);
            const int first = piece->first * groups, last = piece->last * groups;
            for (int q = first; q < last;) {
                const int32_t *queries[BESIDE];
                int visible[BESIDE], beside = 0;
                float *maxima[BESIDE], *sums[BESIDE];
                __m512 *outputs[BESIDE];
                for (; beside < BESIDE && q < last; q++) {
                    const int row = q / groups;
                    const int seen = piece->seen + piece->step * (row - piece->first) - from;
                    if (seen <= 0) continue;
                    queries[beside] = (const int32_t *)(query + (q % groups) * head_stride + row * row_stride);
                    visible[beside] = seen;
                    maxima[beside] = maximum + q;
                    sums[beside] = sum + q;
                    outputs[beside++] = output[q];
                }
                // The number is a constant in each, so that what is inlined has its loops unrolled.
                if (beside == BESIDE)
                    meet(BESIDE, queries, visible, scale, by_word, by_key, maxima, sums, outputs);
                else if (beside == 3)
                    meet(3, queries, visible, scale, by_word, by_key, maxima, sums, outputs);
                else if (beside == 2)
                    meet(2, queries, visible, scale, by_word, by_key, maxima, sums, outputs);
                else if (beside == 1)
                    meet(1, queries, visible, scale, by_word, by_key, maxima, sums, outputs);
            }
        }
    }
    for (int q = 0; q < rows * groups; q++) {
        const __m512 share = _mm512_set1_ps(1.0f / sum[q]);
        Element *place = out + (q / groups) * out_row_stride + (q % groups) * HEAD_DIM;
        for (int part = 0; part < VECTORS; part++) put(place + 16 * part, _mm512_mul_ps(output[q][part], share));
    }
}

typedef struct {
    const int32_t *slots;   // of all pieces
    const Piece *pieces;
    const int32_t *starts;  // (count + 1,) the first piece of each tile
    int64_t count, rows;    // tiles, and rows in each but the last
} Tiles;

// Tile by tile and head by head. query (heads, rows, HEAD_DIM) by its strides; keys and values (kv_heads, slots,
// HEAD_DIM); out (rows, heads, HEAD_DIM).
static inline void unit(int64_t number, const Element *query, int64_t head_stride, int64_t row_stride,
                        const Element *keys, const Element *values, int64_t kv_head_stride, int64_t slot_stride,
                        Element *out, const Tiles *tiles, int64_t rows, int64_t kv_heads, int64_t groups, float scale) {
    const int64_t t = number / kv_heads, head = number % kv_heads, row = t * tiles->rows;
    const int64_t left = rows - row;
    tile(query + head * groups * head_stride + row * row_stride, head_stride, row_stride,
         (int)(left < tiles->rows ? left : tiles->rows), (int)groups, keys + head * kv_head_stride,
         values + head * kv_head_stride, slot_stride, tiles->slots, tiles->pieces + tiles->starts[t],
         tiles->starts[t + 1] - tiles->starts[t], scale, out + (row * kv_heads + head) * groups * HEAD_DIM,
         kv_heads * groups * HEAD_DIM);
}

void attend(const Element *query, int64_t head_stride, int64_t row_stride, const Element *keys, const Element *values,
            int64_t kv_head_stride, int64_t slot_stride, Element *out, const Tiles *tiles, int64_t rows,
            int64_t kv_heads, int64_t groups, float scale, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t number = 0; number < tiles->count * kv_heads; number++)
        unit(number, query, head_stride, row_stride, keys, values, kv_head_stride, slot_stride, out, tiles, rows,
             kv_heads, groups, scale);
}
