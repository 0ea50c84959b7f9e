// Products of rows and one packed matrix of integers, for ctypes.

#include "linear.h"

static void *allocated(int64_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }

void products(const Matrix *matrix, const float *rows, int64_t count, float *out) {
    const int64_t inputs = matrix->inputs, stats = STATS * (inputs / GROUP);
    const int tiled = are_tiled(count);
    Input *converted = allocated((count + 16) * inputs * sizeof(uint16_t));  // tiles read up to 15 rows more
    float *scales = allocated(count * stats * sizeof(float));
    void *workspace = tiled ? allocated(workspace_bytes(count)) : NULL;
    for (int64_t r = 0; r < count; r++)
        convert_inputs(tiled, rows + r * inputs, inputs, input_at(converted, r * inputs, tiled), scales + r * stats);
    multiply(matrix, converted, scales, count, STORE, out, matrix->outputs, 0, strips_of(matrix), workspace);
    free(converted);
    free(scales);
    free(workspace);
}
