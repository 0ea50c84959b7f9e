// Products of rows and one packed matrix of integers, for ctypes.

#include "linear.h"

const int64_t matrix_size = sizeof(Matrix), lanes = LANES;

void products(const Matrix *matrix, const float *rows, int64_t count, float *out) {
    const int64_t inputs = matrix->inputs, stats = STATS * (inputs / GROUP);
    Input *converted = aligned_alloc(64, (count * inputs + 63) / 64 * 64);
    float *scales = aligned_alloc(64, (count * stats * sizeof(float) + 63) / 64 * 64);
    for (int64_t r = 0; r < count; r++)
        convert_inputs(rows + r * inputs, inputs, converted + r * inputs, scales + r * stats);
    multiply(matrix, converted, scales, count, STORE, out, matrix->outputs, 0, strips_of(matrix));
    free(converted);
    free(scales);
}
