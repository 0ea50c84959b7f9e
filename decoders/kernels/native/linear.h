// Linear layers: products of rows of inputs and weights packed in strips.
//
// Weights are packed in strips of 32 outputs, each in the order in which it is read. What they are is compiled in:
// WEIGHTS 32: float32. 16: bfloat16, multiplied as float32 with -DFLOAT32 (exactly what float32 weights that are bfloat16
// numbers give, for half the bytes), else by bfloat16 products. 8: whole numbers in groups of inputs, times a step, plus a
// least; a matrix has them in eight bits or in four, in groups of GROUP or of half as many. Inputs are rounded to eight
// bits by a step for each GROUP of each row. The order of sums is the same however many rows there are: what a row gives
// does not depend on the others.

#pragma once

#include "element.h"

#ifndef WEIGHTS
#define WEIGHTS 32
#endif

#define GROUP 32
#define WIDE 2                  // lines beside each other: MOST_ROWS rows by so many are sums that stay in registers
#define STRIP (WIDE * LANES)    // outputs
#if WEIGHTS == 8
typedef int8_t Input;
#define JOINED 4                // inputs of one output beside each other
#define LINE (LANES * JOINED)   // bytes of a line: LANES outputs
#if LANES == 8 && !defined(DOT)
#define MOST_ROWS 3             // what products pass through takes registers, too, and there are 16
#else
#define MOST_ROWS (LANES == 16 ? 8 : 6)
#endif
#else
typedef Element Input;
#define JOINED (32 / WEIGHTS)
#define LINE (4 * LANES)
#define MOST_ROWS (LANES == 16 ? 12 : 6)
#endif
#define WIDENED (WEIGHTS == 16 && STEP == 1)  // bfloat16 weights for float32 inputs
#define TOLD 4        // numbers told of GROUP inputs of a row: their step, the sum of all, and that of either half
#define AHEAD 16384   // bytes from what is multiplied to what is fetched, where rows are one block

typedef struct {
    // (outputs / STRIP, inputs / JOINED, WIDE, LANES, JOINED), outputs padded; of whole numbers (outputs / STRIP, inputs /
    // group) groups of lines as above, then (WIDE, 2, LANES) halves: their steps and least weights, in `unit`s; or
    // (WIDE, LANES), steps alone, where a number is a weight of 0: `middle`, if it is not 0. Of four bits two lines are
    // one: the first in the lower half of its bytes, the second in the upper.
    const uint8_t *strips;
    const float *bias;  // (outputs,) or none
    int64_t inputs, outputs, bits, group;
    double unit, middle;
} Matrix;

// What becomes of a product: stored, added to what stands there, or silu(gate) * up, whose lines are beside each other.
typedef enum { STORE, ADD, GATE } Then;

static inline Floats silu(Floats x) {
    const Floats power = exponential(-absolute(x)), share = 1.0f / (1.0f + power);  // sigmoid(|x|)
    const Words negative = x < 0.0f;
    return x * (Floats)(((Words)(1.0f - share) & negative) | ((Words)share & ~negative));
}

#if WEIGHTS == 8
// Bytes of a group's steps, and least weights if there are any, of LANES outputs.
static inline int64_t scale_bytes(const Matrix *matrix) { return (matrix->middle != 0 ? 2 : 4) * LANES; }

static inline int64_t strip_bytes(const Matrix *matrix) {
    const int64_t lines = matrix->inputs / JOINED * LINE * matrix->bits / 8;
    return WIDE * (lines + matrix->inputs / matrix->group * scale_bytes(matrix));
}

typedef Words Sum;
static inline Words add_line(int bits, Words sum, Words inputs, Words weights) {
    return bits == 4 ? add_nibbles(sum, weights, inputs) : add_bytes(sum, weights, inputs);
}
#else
static inline int64_t strip_bytes(const Matrix *matrix) { return matrix->inputs / JOINED * WIDE * LINE; }

typedef Floats Sum;
#define add_line(bits, sum, inputs, weights) multiply_add(sum, inputs, weights)
#endif

// Adds word number `word` of each row times the lines of a strip.
static inline __attribute__((always_inline)) void add_word(int rows, int bits, const Input *input, int64_t inputs,
                                                           int64_t word, const Words *lines, Sum (*sums)[WIDE]) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        const Words both = each_word(((const int32_t *)(input + r * inputs))[word]);
#pragma GCC unroll 2
        for (int p = 0; p < WIDE; p++) sums[r][p] = add_line(bits, sums[r][p], both, lines[p]);
    }
}

// `rows` rows against one strip, which begins at `line`, while what stands `ahead` bytes from it is fetched. `bits` and
// `group` as the matrix has them; input (rows, inputs); out by its stride in numbers.
static inline __attribute__((always_inline)) void block(int rows, int bits, int group, const Matrix *matrix,
                                                        const uint8_t *line, int64_t strip, int64_t ahead,
                                                        const Input *input, const float *input_steps, Then then,
                                                        float *out, int64_t out_stride) {
    const int64_t inputs = matrix->inputs;
    Floats sums[MOST_ROWS][WIDE];
    Words lines[WIDE];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < WIDE; p++) sums[r][p] = (Floats){0};
#if WEIGHTS == 8
    const int64_t groups = inputs / GROUP, scales = scale_bytes(matrix);
    const int parts = GROUP / group, words = group / JOINED;
    const float zero = -(float)matrix->middle;  // what the number 0 stands for, in steps
    for (int64_t g = 0; g < groups * parts; g++) {
        Words whole[MOST_ROWS][WIDE];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int p = 0; p < WIDE; p++) whole[r][p] = (Words){0};
#pragma GCC unroll 4
        for (int64_t word = g * words; word < (g + 1) * words; word += 8 / bits, line += WIDE * LINE) {
#pragma GCC unroll 2
            for (int p = 0; p < WIDE; p++) {
                lines[p] = load_words(line + p * LINE);
                if (p * LINE % 64 == 0) __builtin_prefetch(line + p * LINE + ahead, 0, 2);
            }
            if (bits == 4) {
                Words lower[WIDE];
#pragma GCC unroll 2
                for (int p = 0; p < WIDE; p++) {
                    lower[p] = lines[p] & 0x0f0f0f0f;
                    lines[p] = (lines[p] >> 4) & 0x0f0f0f0f;
                }
                add_word(rows, bits, input, inputs, word, lower, whole);
                add_word(rows, bits, input, inputs, word + 1, lines, whole);
            } else
                add_word(rows, bits, input, inputs, word, lines, whole);
        }
        for (int at = 0; at < WIDE * scales; at += 64) __builtin_prefetch(line + at + ahead, 0, 2);
        const int of_sum = parts == 1 ? 1 : 2 + (int)(g % 2);
#define TOLD_OF(r) (input_steps + TOLD * ((r) * groups + g / parts))
#define WHOLE(r, p) __builtin_convertvector(bits == 4 ? of_nibbles(whole[r][p]) : whole[r][p], Floats)
        if (zero != 0) {
            const Floats step[WIDE] = {load_halves(line), load_halves(line + scales)};
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const Floats times = each(TOLD_OF(r)[0]), more = each(zero * TOLD_OF(r)[of_sum]);
#pragma GCC unroll 2
                for (int p = 0; p < WIDE; p++)
                    sums[r][p] = add_product(sums[r][p], step[p], add_product(more, WHOLE(r, p), times));
            }
        } else {
#pragma GCC unroll 2
            for (int p = 0; p < WIDE; p++) {
                const Floats step = load_halves(line + p * scales), least = load_halves(line + p * scales + 2 * LANES);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) {
                    sums[r][p] = add_product(sums[r][p], least, each(TOLD_OF(r)[of_sum]));
                    sums[r][p] = add_product(sums[r][p], step, WHOLE(r, p) * TOLD_OF(r)[0]);
                }
            }
        }
        line += WIDE * scales;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < WIDE; p++) sums[r][p] *= (float)matrix->unit;
#else
    for (int64_t word = 0; word < inputs / JOINED; word++, line += WIDE * LINE) {
#pragma GCC unroll 2
        for (int p = 0; p < WIDE; p++) {
            lines[p] = load_words(line + p * LINE);
            if (p * LINE % 64 == 0) __builtin_prefetch(line + p * LINE + ahead, 0, 2);
        }
#if WIDENED
        // The first of two bfloat16 is the lower half of a word: its bits are a float32's upper ones.
        Words halves[WIDE];
#pragma GCC unroll 2
        for (int p = 0; p < WIDE; p++) halves[p] = lines[p] << 16;
        add_word(rows, 0, input, inputs, 2 * word, halves, sums);
#pragma GCC unroll 2
        for (int p = 0; p < WIDE; p++) halves[p] = lines[p] & (int32_t)0xffff0000;
        add_word(rows, 0, input, inputs, 2 * word + 1, halves, sums);
#else
        add_word(rows, 0, input, inputs, word, lines, sums);
#endif
    }
#endif
#pragma GCC unroll 2
    for (int p = 0; p < WIDE; p++) {
        const int64_t column = STRIP * strip + LANES * p, left = matrix->outputs - column;
        if (left <= 0) break;
        if (matrix->bias) {
            const Floats bias = load_some(matrix->bias + column, left);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) sums[r][p] += bias;
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            float *place = out + r * out_stride + column;
            if (then == ADD)
                store_some(place, load_some(place, left) + sums[r][p], left);
            else if (then == STORE)
                store_some(place, sums[r][p], left);
            else if (p % 2)
                store(out + r * out_stride + LANES * strip, silu(sums[r][p - 1]) * sums[r][p]);
        }
    }
}

static inline __attribute__((always_inline)) void blocks_of(int bits, int group, const Matrix *matrix,
                                                            const Input *input, const float *input_steps, int64_t rows,
                                                            Then then, float *out, int64_t out_stride, int thread,
                                                            int threads) {
    if (rows == 0) return;
    const int64_t strips = (matrix->outputs + STRIP - 1) / STRIP, blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t most = (rows + blocks - 1) / blocks;
    const int64_t ahead = blocks > 1 ? strip_bytes(matrix) : AHEAD;
    for (int64_t strip = strips * thread / threads; strip < strips * (thread + 1) / threads; strip++) {
        const uint8_t *line = matrix->strips + strip * strip_bytes(matrix);
        for (int64_t row = 0; row < rows; row += most) {
            const int64_t count = rows - row < most ? rows - row : most;
            const Input *from = input + row * matrix->inputs;
            const float *steps = input_steps + row * TOLD * (matrix->inputs / GROUP);
            float *to = out + row * out_stride;
            // The number is a constant in each, so that loops are unrolled.
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        block(n, bits, group, matrix, line, strip, ahead, from, steps, then, to, out_stride);                                \
        break;
            switch (count) {
                CASE(1)
                CASE(2)
                CASE(3)
#if MOST_ROWS > 3
                CASE(4)
                CASE(5)
                CASE(6)
#endif
#if MOST_ROWS > 6
                CASE(7)
                CASE(8)
#endif
#if MOST_ROWS > 8
                CASE(9)
                CASE(10)
                CASE(11)
                CASE(12)
#endif
            }
        }
    }
}

// One thread's share of the outputs: (rows, inputs) by (inputs, outputs).
static void multiply(const Matrix *matrix, const Input *input, const float *input_steps, int64_t rows, Then then,
                     float *out, int64_t out_stride, int thread, int threads) {
    // These are constants in each, so that what only some need is left out of the others.
#define BLOCKS_OF(bits, group)                                                                                         \
    blocks_of(bits, group, matrix, input, input_steps, rows, then, out, out_stride, thread, threads)
#if WEIGHTS == 8
    if (matrix->bits == 4)
        BLOCKS_OF(4, GROUP);
    else if (matrix->group == GROUP / 2)
        BLOCKS_OF(8, GROUP / 2);
    else
#endif
        BLOCKS_OF(8, GROUP);
}

// Numbers of one row as inputs of a product; `steps` are for whole numbers only, TOLD for each GROUP of them. Where inputs
// are such numbers, that is all.
static void prepare(const float *numbers, int64_t count, Input *inputs, float *steps) {
#if WEIGHTS == 8
    typedef Input Rounded __attribute__((vector_size(sizeof(Input) * LANES)));
    const float top = 127.0f;
    for (int64_t g = 0; g < count / GROUP; g++) {
        const float *group = numbers + g * GROUP;
        Floats sizes = {0}, damage = {0};  // NaN where one of them is: the largest may pass it over
        for (int i = 0; i < GROUP; i += LANES) {
            sizes = larger_of(sizes, absolute(load(group + i)));
            damage += load(group + i) - load(group + i);
        }
        const float most = largest_of(sizes) + sum_of(damage);
        const float factor = most > 0 ? top / most : 0.0f;
        float *told = steps + TOLD * g;
        told[0] = most / top;
        for (int half = 0; half < 2; half++) {
            Words sum = {0};
            for (int i = half * GROUP / 2; i < (half + 1) * GROUP / 2; i += LANES) {
                const Words whole = nearest(load(group + i) * factor);
                const Rounded rounded = __builtin_convertvector(whole, Rounded);
                memcpy(inputs + g * GROUP + i, &rounded, sizeof rounded);
                sum += whole;
            }
            told[2 + half] = told[0] * sum_of(__builtin_convertvector(sum, Floats));
        }
        told[1] = told[2] + told[3];
    }
#else
    if ((const void *)inputs != numbers)
        for (int64_t i = 0; i < count; i += LANES) put(inputs + i, load(numbers + i));
#endif
}
#if WEIGHTS == 8
// The weights of one output: of its strip one lane in every line.
static void unpack(const Matrix *matrix, int64_t output, float *out) {
    const int64_t lane = output % LANES, p = output / LANES % WIDE, bits = matrix->bits;
    const int64_t words = matrix->group / JOINED, lines = words * bits / 8 * WIDE * LINE;
    const uint8_t *group = matrix->strips + output / STRIP * strip_bytes(matrix);
    for (int64_t g = 0; g < matrix->inputs / matrix->group; g++, group += lines + WIDE * scale_bytes(matrix)) {
        const uint8_t *scales = group + lines + p * scale_bytes(matrix);
        const float step = load_halves(scales)[lane];
        const float least = matrix->middle != 0 ? step * -(float)matrix->middle : load_halves(scales + 2 * LANES)[lane];
        for (int64_t word = 0; word < words; word++)
            for (int64_t i = 0; i < JOINED; i++) {
                const int byte = group[(word * bits / 8 * WIDE + p) * LINE + lane * JOINED + i];
                const int number = bits == 8 ? byte : word % 2 ? byte >> 4 : byte & 15;
                *out++ = (float)matrix->unit * (least + step * (float)number);
            }
    }
}
#endif
