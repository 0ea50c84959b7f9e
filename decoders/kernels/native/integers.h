// Products of rows of 8-bit inputs and a strip of packed integers.
//
// Integers are summed exactly within a group, and groups in order.

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

// How the weights of a strip are stored: a constant in the functions below.
typedef enum { NIBBLES, CODED_NIBBLES, BYTES } Source;

static inline Source source_of(const Matrix *matrix) {
    return matrix->bits == 8 ? BYTES : has_codebook(matrix) ? CODED_NIBBLES : NIBBLES;
}

#ifdef DOT
#define NIBBLE_RANGE 8
#else
#define NIBBLE_RANGE 4
#endif

// Bits of the integers that products must support: fewer are faster without DOT.
static inline int range_of(const Matrix *matrix) {
#ifdef DOT
    return 8;
#else
    return matrix->bits == 4 && !has_codebook(matrix) ? NIBBLE_RANGE : matrix->largest < 64 ? 6 : 8;
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
            if (p * LINE % 64 == 0) __builtin_prefetch(line + prefetch, 0, 2);
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
            if (shift) pair[i][p] ^= (int32_t)0x80808080;
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
    Words all = {0};
#pragma GCC unroll 4
    for (int i = 0; i < LANES / 4; i++) memcpy((char *)&all + 16 * i, matrix->codebook, 16);
    return all;
}

// Add the products of a row and a group, whose integers give `product`. Without minimums, `zero` is the weight that
// integer 0 represents, in scales.
LOOP Floats add_group(Floats sum, Words product, Floats scale, Floats min, int has_minimums, float zero,
                       float input_scale, float input_sum) {
    const Floats floats = __builtin_convertvector(product, Floats);
    if (!has_minimums) return add_product(sum, scale, add_product(splat(zero * input_sum), floats, splat(input_scale)));
    return add_product(add_product(sum, min, splat(input_sum)), scale, floats * splat(input_scale));
}

// Compute the products of `rows` rows and a strip. `rows`, `source`, `range` and `group` are constants.
LOOP void add_groups(int rows, Source source, int range, int group, const Matrix *matrix, const uint8_t *line,
                     int64_t prefetch, const Input *input, const float *input_stats, Floats (*out)[STRIP_VECTORS]) {
    const int64_t inputs = matrix->inputs, groups = inputs / GROUP;
    const int parts = GROUP / group, words = group / INPUTS_PER_WORD, shift = shift_of(range);
    const float zero = (float)(shift - matrix->zero_point);  // the weight that integer `shift` represents, in scales
    const Words codebook = source == CODED_NIBBLES ? codebook_of(matrix) : (Words){0};
    Floats sums[MAX_ROWS][STRIP_VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < STRIP_VECTORS; p++) sums[r][p] = (Floats){0};
    for (int64_t g = 0; g < groups * parts; g++) {
        Words int_sums[MAX_ROWS][STRIP_VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int p = 0; p < STRIP_VECTORS; p++) int_sums[r][p] = (Words){0};
#pragma GCC unroll 4
        for (int word = 0; word < words; word += 2) {
            Words pair[2][STRIP_VECTORS];
            line = load_pair(source, shift, codebook, line, prefetch, pair);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const Input *row = input + r * inputs + g * group + word * INPUTS_PER_WORD;
                const Words first = splat_word_at(row), second = splat_word_at(row + INPUTS_PER_WORD);
#pragma GCC unroll 2
                for (int p = 0; p < STRIP_VECTORS; p++)
                    int_sums[r][p] = dot_pair(range, int_sums[r][p], pair[0][p], first, pair[1][p], second);
            }
        }
        Floats scales[2][STRIP_VECTORS];
        line = load_scales(matrix, shift, line, prefetch, scales);
        const float *stats = input_stats + STATS * (g / parts);
        const int sum_index = parts == 1 ? 1 : 2 + (int)(g % 2);
#define ADD_GROUP(has_minimums)                                                                                       \
    _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++, stats += STATS * groups)                                   \
        _Pragma("GCC unroll 2") for (int p = 0; p < STRIP_VECTORS; p++)                                                \
            sums[r][p] = add_group(sums[r][p], widen_sums(range, int_sums[r][p]), scales[0][p], scales[1][p],         \
                                    has_minimums, zero, stats[0], stats[sum_index]);
        if (matrix->zero_point == 0) {
            ADD_GROUP(1)
        } else {
            ADD_GROUP(0)
        }
#undef ADD_GROUP
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < STRIP_VECTORS; p++) out[r][p] = sums[r][p];
}

// Compute the products of 1 to MAX_ROWS rows and the strip at `line`, and prefetch `prefetch` bytes ahead.
static void multiply_integers(int rows, const Matrix *matrix, const uint8_t *line, int64_t prefetch, const Input *input,
                              const float *input_stats, Floats (*out)[STRIP_VECTORS]) {
    const int range = range_of(matrix), half = matrix->group < GROUP;
    const Source source = source_of(matrix);
    // The parameters are constants in each case, so that loops are unrolled and the others' code is left out.
#define CASE(count, source_, range_, group_)                                                                           \
    if (count <= MAX_ROWS && rows == count)                                                                            \
        return add_groups(count, source_, range_, group_, matrix, line, prefetch, input, input_stats, out);
#define CASES(source_, range_, group_)                                                                                 \
    if (source == source_ && range == range_ && half == (group_ < GROUP)) {                                            \
        CASE(1, source_, range_, group_) CASE(2, source_, range_, group_) CASE(3, source_, range_, group_)             \
        CASE(4, source_, range_, group_) CASE(5, source_, range_, group_) CASE(6, source_, range_, group_)             \
        CASE(7, source_, range_, group_) CASE(8, source_, range_, group_)                                              \
    }
    CASES(NIBBLES, NIBBLE_RANGE, GROUP)
    CASES(NIBBLES, NIBBLE_RANGE, GROUP / 2)
    CASES(BYTES, 8, GROUP)
    CASES(BYTES, 8, GROUP / 2)
    CASES(CODED_NIBBLES, 8, GROUP)
#ifndef DOT
    CASES(BYTES, 6, GROUP)
    CASES(BYTES, 6, GROUP / 2)
    CASES(CODED_NIBBLES, 6, GROUP)
#endif
#undef CASES
#undef CASE
}
#endif
