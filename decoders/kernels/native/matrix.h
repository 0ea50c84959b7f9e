// Packed weight matrices.
//
// Weights are packed in strips of STRIP outputs, each in the order in which it is read. WEIGHTS selects their format at
// compile time:
// - 32: float32.
// - 16: bfloat16. With -DFLOAT32 they are widened to float32: the exact product in half the bytes.
// - 8: integers of 8 or 4 bits, with a scale and a minimum for each group of GROUP or GROUP / 2 inputs. The rows of
//   inputs are quantized to 8 bits, with a scale for each GROUP.

#pragma once

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
#else
typedef Element Input;
#define INPUTS_PER_WORD (32 / WEIGHTS)
#define LINE (4 * LANES)
#endif
#define STATS 4               // of GROUP inputs of a row: scale, sum, sum of the first half, sum of the second half
#define LOOP static inline __attribute__((always_inline))
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
    int64_t largest;       // the largest integer
    uint8_t codebook[16];  // the integers that 4-bit numbers stand for; zeros if a number stands for itself
} Matrix;

#if WEIGHTS == 8
// Bytes of the scales, and minimums if stored, of one group of LANES outputs.
static inline int64_t scale_bytes(const Matrix *matrix) { return (matrix->zero_point != 0 ? 2 : 4) * LANES; }

// Bytes of the lines and scales of one group of a strip.
static inline int64_t group_bytes(const Matrix *matrix) {
    return STRIP_VECTORS * (matrix->group * LANES * matrix->bits / 8 + scale_bytes(matrix));
}

static inline int64_t strip_bytes(const Matrix *matrix) {
    return matrix->inputs / matrix->group * group_bytes(matrix);
}

static inline int has_codebook(const Matrix *matrix) {
    int any = 0;
    for (int i = 0; i < 16; i++) any |= matrix->codebook[i];
    return any;
}

// Dequantize the weights of one output: one lane in every line of its strip.
static void dequantize(const Matrix *matrix, int64_t output, float *out) {
    const int64_t lane = output % LANES, p = output / LANES % STRIP_VECTORS, bits = matrix->bits;
    const int64_t words = matrix->group / INPUTS_PER_WORD, lines = words * bits / 8 * STRIP_VECTORS * LINE;
    const uint8_t *group = matrix->strips + output / STRIP * strip_bytes(matrix);
    const int coded = has_codebook(matrix);
    for (int64_t g = 0; g < matrix->inputs / matrix->group; g++, group += group_bytes(matrix)) {
        const uint8_t *scales = group + lines + p * scale_bytes(matrix);
        const float scale = load_float16(scales)[lane];
        const float min = matrix->zero_point != 0 ? scale * -(float)matrix->zero_point
                                                  : load_float16(scales + 2 * LANES)[lane];
        for (int64_t word = 0; word < words; word++)
            for (int64_t i = 0; i < INPUTS_PER_WORD; i++) {
                const int byte = group[(word * bits / 8 * STRIP_VECTORS + p) * LINE + lane * INPUTS_PER_WORD + i];
                const int number = bits == 8 ? byte : word % 2 ? byte >> 4 : byte & 15;
                const int value = coded ? matrix->codebook[number] : number;
                *out++ = (float)matrix->unit * (min + scale * (float)value);
            }
    }
}
#else
static inline int64_t strip_bytes(const Matrix *matrix) {
    return matrix->inputs / INPUTS_PER_WORD * STRIP_VECTORS * LINE;
}
#endif
