// Products of rows of 8-bit inputs and a strip of packed integers.
//
// A few rows, one block, are multiplied with the packed strip itself. For more, a chunk of the strip is unpacked once
// into the first level of the cache, and all blocks of rows are multiplied with it. Integers are summed exactly within
// a group, and groups in order, so both give the same result.

#pragma once

#include "matrix.h"

#if WEIGHTS == 8
#if LANES == 16
#define MAX_ROWS 8
#elif defined(DOT)
#define MAX_ROWS 6
#else
#define MAX_ROWS 4  // temporaries of the products need some of the 16 registers, too
#endif
#define CHUNK 512           // inputs whose weights are unpacked at a time
#define UNPACKED_ROWS 64    // rows multiplied with an unpacked chunk: their sums stay in the first level of the cache
#define LOOP static inline __attribute__((always_inline))

// Where the weights of a strip are read from. Each is a constant in the functions below.
typedef enum { NIBBLES, CODED_NIBBLES, BYTES, UNPACKED } Source;

typedef struct {
    Words lines[CHUNK / INPUTS_PER_WORD][STRIP_VECTORS];
    Floats scales[CHUNK / (GROUP / 2)][2][STRIP_VECTORS];  // scales and minimums of each group
} Chunk;

// Bits of the integers that products must support: fewer are faster without DOT.
static inline int range_of(const Matrix *matrix) {
#ifdef DOT
    return 8;
#else
    return matrix->bits == 4 && !has_codebook(matrix) ? 4 : matrix->largest < 64 ? 6 : 8;
#endif
}

// What is subtracted from integers, so that products get signed ones.
static inline int shift_of(int range) {
#ifndef DOT
    if (range == 8) return 128;
#endif
    return 0;
}

// Load the weights of two words of a strip at `line`. Returns the address after them.
LOOP const uint8_t *load_pair(Source source, int shift, Words codebook, const uint8_t *line, int64_t prefetch,
                              Words (*pair)[STRIP_VECTORS]) {
    const int loaded = source == NIBBLES || source == CODED_NIBBLES ? 1 : 2;
#pragma GCC unroll 2
    for (int i = 0; i < loaded; i++)
#pragma GCC unroll 2
        for (int p = 0; p < STRIP_VECTORS; p++, line += LINE) {
            pair[i][p] = load_words(line);
            if (p * LINE % 64 == 0 && source != UNPACKED) __builtin_prefetch(line + prefetch, 0, 2);
        }
#pragma GCC unroll 2
    for (int p = 0; p < STRIP_VECTORS; p++) {
        if (loaded == 1) {
            pair[1][p] = (pair[0][p] >> 4) & 0x0f0f0f0f;
            pair[0][p] &= 0x0f0f0f0f;
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            if (source == CODED_NIBBLES) pair[i][p] = lookup_bytes(codebook, pair[i][p]);
            if (shift && source != UNPACKED) pair[i][p] ^= (int32_t)0x80808080;
        }
    }
    return line;
}

// Load the scales and minimums of a group at `line`, for integers minus `shift`. Returns the address after them.
LOOP const uint8_t *load_scales(const Matrix *matrix, int shift, const uint8_t *line, int64_t prefetch,
                                Floats (*scales)[STRIP_VECTORS]) {
    const int64_t size = scale_bytes(matrix);
    for (int at = 0; at < STRIP_VECTORS * size; at += 64) __builtin_prefetch(line + at + prefetch, 0, 2);
#pragma GCC unroll 2
    for (int p = 0; p < STRIP_VECTORS; p++) {
        scales[0][p] = load_float16(line + p * size);
        if (matrix->zero_point != 0) continue;
        scales[1][p] = load_float16(line + p * size + 2 * LANES);
        if (shift) scales[1][p] = add_product(scales[1][p], scales[0][p], splat((float)shift));
    }
    return line + STRIP_VECTORS * size;
}

static inline Words codebook_of(const Matrix *matrix) {
    Words all;
#pragma GCC unroll 4
    for (int i = 0; i < LANES / 4; i++) memcpy((char *)&all + 16 * i, matrix->codebook, 16);
    return all;
}

// Add the products of `rows` rows and the groups [from, to) of a strip to `out`. The weights are at `line`, or in
// `chunk` if the source is UNPACKED.
LOOP void add_groups(int rows, Source source, int range, int group, const Matrix *matrix, const uint8_t *line,
                     const Chunk *chunk, int64_t from, int64_t to, const Input *input, const float *input_stats,
                     Floats (*out)[STRIP_VECTORS]) {
    const int64_t inputs = matrix->inputs, groups = inputs / GROUP;
    const int parts = GROUP / group, words = group / INPUTS_PER_WORD, shift = shift_of(range);
    const float zero = (float)(shift - matrix->zero_point);  // the weight that integer `shift` represents, in scales
    const int has_minimums = matrix->zero_point == 0;
    const Words codebook = source == CODED_NIBBLES ? codebook_of(matrix) : (Words){0};
    Floats sums[MAX_ROWS][STRIP_VECTORS];  // a copy, in registers
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < STRIP_VECTORS; p++) sums[r][p] = out[r][p];
    if (source == UNPACKED) line = (const uint8_t *)chunk->lines;
    for (int64_t g = from; g < to; g++) {
        Words int_sums[MAX_ROWS][STRIP_VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int p = 0; p < STRIP_VECTORS; p++) int_sums[r][p] = (Words){0};
#pragma GCC unroll 4
        for (int64_t word = g * words; word < (g + 1) * words; word += 2) {
            Words pair[2][STRIP_VECTORS];
            line = load_pair(source, shift, codebook, line, PREFETCH_BYTES, pair);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const int32_t *row = (const int32_t *)(input + r * inputs) + word;
                const Words first = splat_word(row[0]), second = splat_word(row[1]);
#pragma GCC unroll 2
                for (int p = 0; p < STRIP_VECTORS; p++)
                    int_sums[r][p] = dot_pair(range, int_sums[r][p], pair[0][p], first, pair[1][p], second);
            }
        }
        Floats loaded[2][STRIP_VECTORS];
        if (source != UNPACKED) line = load_scales(matrix, shift, line, PREFETCH_BYTES, loaded);
        const Floats(*scales)[STRIP_VECTORS] = source == UNPACKED ? chunk->scales[g - from] : loaded;
        const float *stats = input_stats + STATS * (g / parts);
        const int sum_index = parts == 1 ? 1 : 2 + (int)(g % 2);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++, stats += STATS * groups) {
            const Floats input_scale = splat(stats[0]);
            if (has_minimums) {
                const Floats sum = splat(stats[sum_index]);
#pragma GCC unroll 2
                for (int p = 0; p < STRIP_VECTORS; p++) {
                    const Floats product = __builtin_convertvector(widen_sums(range, int_sums[r][p]), Floats);
                    sums[r][p] = add_product(sums[r][p], scales[1][p], sum);
                    sums[r][p] = add_product(sums[r][p], scales[0][p], product * input_scale);
                }
            } else {
                const Floats offset = splat(zero * stats[sum_index]);
#pragma GCC unroll 2
                for (int p = 0; p < STRIP_VECTORS; p++) {
                    const Floats product = __builtin_convertvector(widen_sums(range, int_sums[r][p]), Floats);
                    sums[r][p] = add_product(sums[r][p], scales[0][p], add_product(offset, product, input_scale));
                }
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < STRIP_VECTORS; p++) out[r][p] = sums[r][p];
}

// Unpack the groups [from, to) of a strip, which begin at `line`.
LOOP void unpack_groups(Source source, const Matrix *matrix, const uint8_t *line, int64_t from, int64_t to,
                        Chunk *chunk) {
    const int shift = shift_of(range_of(matrix));
    const int64_t words = matrix->group / INPUTS_PER_WORD, prefetch = (to - from) * group_bytes(matrix);
    const Words codebook = codebook_of(matrix);
    Words(*lines)[STRIP_VECTORS] = chunk->lines;
    for (int64_t g = 0; g < to - from; g++) {
        for (int64_t word = 0; word < words; word += 2, lines += 2)
            line = load_pair(source, shift, codebook, line, prefetch, lines);
        line = load_scales(matrix, shift, line, prefetch, chunk->scales[g]);
    }
}

static void unpack(const Matrix *matrix, const uint8_t *strip, int64_t from, int64_t to, Chunk *chunk) {
    const uint8_t *line = strip + from * group_bytes(matrix);
    if (matrix->bits == 8)
        unpack_groups(BYTES, matrix, line, from, to, chunk);
    else if (has_codebook(matrix))
        unpack_groups(CODED_NIBBLES, matrix, line, from, to, chunk);
    else
        unpack_groups(NIBBLES, matrix, line, from, to, chunk);
}

// Add the products of at most MAX_ROWS rows as add_groups does.
LOOP void add_block(int rows, Source source, int range, int group, const Matrix *matrix, const uint8_t *line,
                    const Chunk *chunk, int64_t from, int64_t to, const Input *input, const float *input_stats,
                    Floats (*sums)[STRIP_VECTORS]) {
    const int least = source == UNPACKED ? (MAX_ROWS + 1) / 2 : 1;  // of many rows, equal blocks
    // `count` is a constant in each case, so that the loops are unrolled.
#define CASE(count)                                                                                                    \
    if (rows == count && count >= least && count <= MAX_ROWS)                                                          \
        add_groups(count, source, range, group, matrix, line, chunk, from, to, input, input_stats, sums);
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
}

// Add the products of at most MAX_ROWS rows and the groups [from, to) of a strip; `chunk` is NULL if not unpacked.
static void add_products(int rows, const Matrix *matrix, const uint8_t *strip, const Chunk *chunk, int64_t from,
                         int64_t to, const Input *input, const float *input_stats, Floats (*sums)[STRIP_VECTORS]) {
    const int range = range_of(matrix), half = matrix->group < GROUP;
    const Source source = chunk ? UNPACKED : matrix->bits == 8 ? BYTES : has_codebook(matrix) ? CODED_NIBBLES : NIBBLES;
    // The source, range and group are constants in each case, so that each compiles without the others' code.
#define CASE(source_, range_, group_)                                                                                  \
    if (source == source_ && range == range_ && half == (group_ < GROUP))                                              \
        add_block(rows, source_, range_, group_, matrix, strip, chunk, from, to, input, input_stats, sums);
#define CASES(source, range) CASE(source, range, GROUP) CASE(source, range, GROUP / 2)
    CASES(BYTES, 8)
    CASES(UNPACKED, 8)
    CASE(CODED_NIBBLES, 8, GROUP)
#ifdef DOT
    CASES(NIBBLES, 8)
#else
    CASES(NIBBLES, 4)
    CASES(UNPACKED, 4)
    CASES(UNPACKED, 6)
    CASES(BYTES, 6)
    CASE(CODED_NIBBLES, 6, GROUP)
#endif
#undef CASES
#undef CASE
}
#endif
