// Linear layers: products of rows of inputs and packed weights.
//
// Weights are packed in strips of STRIP outputs, each in the order in which it is read. WEIGHTS selects their format at
// compile time:
// - 32: float32.
// - 16: bfloat16. With -DFLOAT32 they are widened to float32: the exact product in half the bytes.
// - 8: integers of 8 or 4 bits, with a scale and a minimum for each group of GROUP or GROUP / 2 inputs. The rows of
//   inputs are quantized to 8 bits, with a scale for each GROUP.
// The order of summation does not depend on the number of rows, so the result of a row does not depend on other rows.

#pragma once

#include "activation.h"
#include "element.h"

#ifndef WEIGHTS
#define WEIGHTS 32
#endif

#define GROUP 32
#define STRIP_VECTORS 2                // lines of a strip: MAX_ROWS x STRIP_VECTORS sums stay in registers
#define STRIP (STRIP_VECTORS * LANES)  // outputs
#if WEIGHTS == 8
typedef int8_t Input;
#define INPUTS_PER_WORD 4              // adjacent inputs of one output
#define LINE (LANES * INPUTS_PER_WORD) // bytes of a line: LANES outputs
#if LANES == 8 && !defined(DOT)
#define MAX_ROWS 3                     // temporaries of the products need some of the 16 registers, too
#else
#define MAX_ROWS (LANES == 16 ? 8 : 6)
#endif
#else
typedef Element Input;
#define INPUTS_PER_WORD (32 / WEIGHTS)
#define LINE (4 * LANES)
#define MAX_ROWS (LANES == 16 ? 12 : 6)
#endif
#define WIDENED (WEIGHTS == 16 && PER_WORD == 1)  // bfloat16 weights for float32 inputs
#define STATS 4               // of GROUP inputs of a row: scale, sum, sum of the first half, sum of the second half
#define PREFETCH_BYTES 16384  // prefetch distance if all rows are one block

typedef struct {
    // Floats: (outputs / STRIP, inputs / INPUTS_PER_WORD, STRIP_VECTORS, LANES, INPUTS_PER_WORD), outputs padded.
    // Integers: (outputs / STRIP, inputs / group) groups, each of lines as above, then float16 scales and minimums
    // (STRIP_VECTORS, 2, LANES) in multiples of `unit`. If `zero_point` is not 0, only scales (STRIP_VECTORS, LANES).
    // With 4 bits one line holds two: the first in the lower half of each byte, the second in the upper half.
    const uint8_t *strips;
    const float *bias;  // (outputs,) or NULL
    int64_t inputs, outputs, bits, group;
    double unit, zero_point;  // products are multiplied by `unit`
} Matrix;

#if WEIGHTS == 8
// Bytes of the scales, and minimums if stored, of one group of LANES outputs.
static inline int64_t scale_bytes(const Matrix *matrix) { return (matrix->zero_point != 0 ? 2 : 4) * LANES; }

static inline int64_t strip_bytes(const Matrix *matrix) {
    const int64_t lines = matrix->inputs / INPUTS_PER_WORD * LINE * matrix->bits / 8;
    return STRIP_VECTORS * (lines + matrix->inputs / matrix->group * scale_bytes(matrix));
}

typedef Words Sum;
static inline Words add_line(int bits, Words sum, Words inputs, Words weights) {
    return bits == 4 ? dot_nibbles(sum, weights, inputs) : dot_bytes(sum, weights, inputs);
}
#else
static inline int64_t strip_bytes(const Matrix *matrix) {
    return matrix->inputs / INPUTS_PER_WORD * STRIP_VECTORS * LINE;
}

typedef Floats Sum;
#define add_line(bits, sum, inputs, weights) multiply_add(sum, inputs, weights)
#endif

// Add the product of word `word` of each row and the lines of a strip.
static inline __attribute__((always_inline)) void accumulate_word(int rows, int bits, const Input *input,
                                                                  int64_t inputs, int64_t word, const Words *lines,
                                                                  Sum (*sums)[STRIP_VECTORS]) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        const Words broadcast = splat_word(((const int32_t *)(input + r * inputs))[word]);
#pragma GCC unroll 2
        for (int p = 0; p < STRIP_VECTORS; p++) sums[r][p] = add_line(bits, sums[r][p], broadcast, lines[p]);
    }
}

// Multiply `rows` rows by the strip that begins at `line`, and prefetch `prefetch` bytes ahead. `bits` and `group` are
// the matrix's; input is (rows, inputs); out_stride counts floats.
static inline __attribute__((always_inline)) void multiply_block(int rows, int bits, int group, const Matrix *matrix,
                                                                 const uint8_t *line, int64_t strip, int64_t prefetch,
                                                                 const Input *input, const float *input_stats,
                                                                 Epilogue epilogue, float *out, int64_t out_stride) {
    const int64_t inputs = matrix->inputs;
    Floats sums[MAX_ROWS][STRIP_VECTORS];
    Words lines[STRIP_VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < STRIP_VECTORS; p++) sums[r][p] = (Floats){0};
#if WEIGHTS == 8
    const int64_t groups = inputs / GROUP, scale_size = scale_bytes(matrix);
    const int parts = GROUP / group, words = group / INPUTS_PER_WORD;
    const float zero = -(float)matrix->zero_point;  // the weight that integer 0 represents, in scales
    for (int64_t g = 0; g < groups * parts; g++) {
        Words int_sums[MAX_ROWS][STRIP_VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int p = 0; p < STRIP_VECTORS; p++) int_sums[r][p] = (Words){0};
#pragma GCC unroll 4
        for (int64_t word = g * words; word < (g + 1) * words; word += 8 / bits, line += STRIP_VECTORS * LINE) {
#pragma GCC unroll 2
            for (int p = 0; p < STRIP_VECTORS; p++) {
                lines[p] = load_words(line + p * LINE);
                if (p * LINE % 64 == 0) __builtin_prefetch(line + p * LINE + prefetch, 0, 2);
            }
            if (bits == 4) {
                Words lower[STRIP_VECTORS];
#pragma GCC unroll 2
                for (int p = 0; p < STRIP_VECTORS; p++) {
                    lower[p] = lines[p] & 0x0f0f0f0f;
                    lines[p] = (lines[p] >> 4) & 0x0f0f0f0f;
                }
                accumulate_word(rows, bits, input, inputs, word, lower, int_sums);
                accumulate_word(rows, bits, input, inputs, word + 1, lines, int_sums);
            } else
                accumulate_word(rows, bits, input, inputs, word, lines, int_sums);
        }
        for (int at = 0; at < STRIP_VECTORS * scale_size; at += 64) __builtin_prefetch(line + at + prefetch, 0, 2);
        const int sum_index = parts == 1 ? 1 : 2 + (int)(g % 2);
#define STATS_OF(r) (input_stats + STATS * ((r) * groups + g / parts))
#define INT_SUMS(r, p) __builtin_convertvector(bits == 4 ? widen_nibble_sums(int_sums[r][p]) : int_sums[r][p], Floats)
        if (zero != 0) {
            const Floats scale[STRIP_VECTORS] = {load_float16(line), load_float16(line + scale_size)};
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const Floats input_scale = splat(STATS_OF(r)[0]), offset = splat(zero * STATS_OF(r)[sum_index]);
#pragma GCC unroll 2
                for (int p = 0; p < STRIP_VECTORS; p++)
                    sums[r][p] = add_product(sums[r][p], scale[p], add_product(offset, INT_SUMS(r, p), input_scale));
            }
        } else {
#pragma GCC unroll 2
            for (int p = 0; p < STRIP_VECTORS; p++) {
                const Floats scale = load_float16(line + p * scale_size);
                const Floats min = load_float16(line + p * scale_size + 2 * LANES);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) {
                    sums[r][p] = add_product(sums[r][p], min, splat(STATS_OF(r)[sum_index]));
                    sums[r][p] = add_product(sums[r][p], scale, INT_SUMS(r, p) * STATS_OF(r)[0]);
                }
            }
        }
        line += STRIP_VECTORS * scale_size;
    }
#else
    for (int64_t word = 0; word < inputs / INPUTS_PER_WORD; word++, line += STRIP_VECTORS * LINE) {
#pragma GCC unroll 2
        for (int p = 0; p < STRIP_VECTORS; p++) {
            lines[p] = load_words(line + p * LINE);
            if (p * LINE % 64 == 0) __builtin_prefetch(line + p * LINE + prefetch, 0, 2);
        }
#if WIDENED
        // The first of two bfloat16 is the lower half of a word. Its bits are the upper half of a float32.
        Words halves[STRIP_VECTORS];
#pragma GCC unroll 2
        for (int p = 0; p < STRIP_VECTORS; p++) halves[p] = lines[p] << 16;
        accumulate_word(rows, 0, input, inputs, 2 * word, halves, sums);
#pragma GCC unroll 2
        for (int p = 0; p < STRIP_VECTORS; p++) halves[p] = lines[p] & (int32_t)0xffff0000;
        accumulate_word(rows, 0, input, inputs, 2 * word + 1, halves, sums);
#else
        accumulate_word(rows, 0, input, inputs, word, lines, sums);
#endif
    }
#endif
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < STRIP_VECTORS; p++) sums[r][p] *= (float)matrix->unit;
#pragma GCC unroll 2
    for (int p = 0; p < STRIP_VECTORS; p++) {
        const int64_t column = STRIP * strip + LANES * p, left = matrix->outputs - column;
        if (left <= 0) break;
        if (matrix->bias) {
            const Floats bias = load_partial(matrix->bias + column, left);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) sums[r][p] += bias;
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            float *target = out + r * out_stride + column;
            if (epilogue == ADD)
                store_partial(target, load_partial(target, left) + sums[r][p], left);
            else if (epilogue == STORE)
                store_partial(target, sums[r][p], left);
            else if (p % 2)
                store(out + r * out_stride + LANES * strip, gated(epilogue, sums[r][p - 1], sums[r][p]));
        }
    }
}

static inline __attribute__((always_inline)) void multiply_strips(int bits, int group, const Matrix *matrix,
                                                                  const Input *input, const float *input_stats,
                                                                  int64_t rows, Epilogue epilogue, float *out,
                                                                  int64_t out_stride, int64_t first, int64_t last) {
    if (rows == 0) return;
    const int64_t blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const int64_t max = (rows + blocks - 1) / blocks;
    const int64_t prefetch = blocks > 1 ? strip_bytes(matrix) : PREFETCH_BYTES;
    for (int64_t strip = first; strip < last; strip++) {
        const uint8_t *line = matrix->strips + strip * strip_bytes(matrix);
        for (int64_t row = 0; row < rows; row += max) {
            const int64_t count = rows - row < max ? rows - row : max;
            const Input *from = input + row * matrix->inputs;
            const float *stats = input_stats + row * STATS * (matrix->inputs / GROUP);
            float *to = out + row * out_stride;
            // `count` is a constant in each case, so that the loops are unrolled.
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        multiply_block(n, bits, group, matrix, line, strip, prefetch, from, stats, epilogue, to, out_stride);          \
        break;
            switch (count) {
                CASE(1)
                CASE(2)
                CASE(3)
#if MAX_ROWS > 3
                CASE(4)
                CASE(5)
                CASE(6)
#endif
#if MAX_ROWS > 6
                CASE(7)
                CASE(8)
#endif
#if MAX_ROWS > 8
                CASE(9)
                CASE(10)
                CASE(11)
                CASE(12)
#endif
            }
        }
    }
}

static inline int64_t strips_of(const Matrix *matrix) { return (matrix->outputs + STRIP - 1) / STRIP; }

// Compute the strips [first, last) of the outputs of (rows, inputs) x (inputs, outputs).
static void multiply(const Matrix *matrix, const Input *input, const float *input_stats, int64_t rows,
                     Epilogue epilogue, float *out, int64_t out_stride, int64_t first, int64_t last) {
    // `bits` and `group` are constants in each call, so that each compiles without the others' code.
#define MULTIPLY_STRIPS(bits, group)                                                                                   \
    multiply_strips(bits, group, matrix, input, input_stats, rows, epilogue, out, out_stride, first, last)
#if WEIGHTS == 8
    if (matrix->bits == 4)
        MULTIPLY_STRIPS(4, GROUP);
    else if (matrix->group == GROUP / 2)
        MULTIPLY_STRIPS(8, GROUP / 2);
    else
#endif
        MULTIPLY_STRIPS(8, GROUP);
}

// Convert one row to inputs of a product; for integer inputs also write the STATS of each GROUP to `stats`. Do nothing
// if the row itself is the input.
static void convert_inputs(const float *numbers, int64_t count, Input *inputs, float *stats) {
#if WEIGHTS == 8
    typedef Input Bytes __attribute__((vector_size(sizeof(Input) * LANES)));
    const float limit = 127.0f;
    for (int64_t g = 0; g < count / GROUP; g++) {
        const float *group = numbers + g * GROUP;
        Floats sizes = {0}, nan_guard = {0};  // NaN if an input is: the maximum can skip NaN
        for (int i = 0; i < GROUP; i += LANES) {
            sizes = vector_max(sizes, vector_abs(load(group + i)));
            nan_guard += load(group + i) - load(group + i);
        }
        const float max = reduce_max(sizes) + reduce_add(nan_guard);
        const float factor = max > 0 ? limit / max : 0.0f;
        float *group_stats = stats + STATS * g;
        group_stats[0] = max / limit;
        for (int half = 0; half < 2; half++) {
            Words sum = {0};
            for (int i = half * GROUP / 2; i < (half + 1) * GROUP / 2; i += LANES) {
                const Words integers = round_to_int(load(group + i) * factor);
                const Bytes bytes = __builtin_convertvector(integers, Bytes);
                memcpy(inputs + g * GROUP + i, &bytes, sizeof bytes);
                sum += integers;
            }
            group_stats[2 + half] = group_stats[0] * reduce_add(__builtin_convertvector(sum, Floats));
        }
        group_stats[1] = group_stats[2] + group_stats[3];
    }
#else
    if ((const void *)inputs != numbers)
        for (int64_t i = 0; i < count; i += LANES) store_elements(inputs + i, load(numbers + i));
#endif
}

#if WEIGHTS == 8
// Dequantize the weights of one output: one lane in every line of its strip.
static void dequantize(const Matrix *matrix, int64_t output, float *out) {
    const int64_t lane = output % LANES, p = output / LANES % STRIP_VECTORS, bits = matrix->bits;
    const int64_t words = matrix->group / INPUTS_PER_WORD, lines = words * bits / 8 * STRIP_VECTORS * LINE;
    const uint8_t *group = matrix->strips + output / STRIP * strip_bytes(matrix);
    for (int64_t g = 0; g < matrix->inputs / matrix->group; g++, group += lines + STRIP_VECTORS * scale_bytes(matrix)) {
        const uint8_t *scales = group + lines + p * scale_bytes(matrix);
        const float scale = load_float16(scales)[lane];
        const float min = matrix->zero_point != 0 ? scale * -(float)matrix->zero_point
                                                  : load_float16(scales + 2 * LANES)[lane];
        for (int64_t word = 0; word < words; word++)
            for (int64_t i = 0; i < INPUTS_PER_WORD; i++) {
                const int byte = group[(word * bits / 8 * STRIP_VECTORS + p) * LINE + lane * INPUTS_PER_WORD + i];
                const int number = bits == 8 ? byte : word % 2 ? byte >> 4 : byte & 15;
                *out++ = (float)matrix->unit * (min + scale * (float)number);
            }
    }
}
#endif
