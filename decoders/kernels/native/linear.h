// Linear layers: products of rows of inputs and packed weights.
//
// The order of summation does not depend on the number of rows, so the result of a row does not depend on other rows,
// except that with AMX many rows and packed integers are multiplied in bfloat16.

#pragma once

#include "integers.h"
#include "matrix.h"
#include "tile_products.h"

#if WEIGHTS != 8
#define MAX_ROWS (LANES == 16 ? 12 : 6)
#endif
#define WIDENED (WEIGHTS == 16 && PER_WORD == 1)  // bfloat16 weights for float32 inputs

// What to do with a product: store it, add it to the output, or store activation(gate) * up.
typedef enum { STORE, ADD, GATE_SILU, GATE_GELU, GATE_CLAMPED } Epilogue;

static inline Floats sigmoid(Floats x) {
    const Floats decay = exponential(-vector_abs(x)), positive = 1.0f / (1.0f + decay);  // sigmoid(|x|)
    const Words negative = x < 0.0f;
    return (Floats)(((Words)(1.0f - positive) & negative) | ((Words)positive & ~negative));
}

// 0.5 * x * (1 + tanh(y)) is x * sigmoid(2 * y) (GELU, section 2, the approximation with tanh).
static inline Floats gelu(Floats x) {
    return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
}

// min(max(x, -limit), limit); NaN stays NaN.
static inline Floats clamp(Floats x, float limit) { return -vector_max(splat(-limit), -vector_max(splat(-limit), x)); }

static inline Floats gated(Epilogue activation, Floats gate, Floats up) {
    if (activation == GATE_GELU) return gelu(gate) * up;
    if (activation == GATE_SILU) return gate * sigmoid(gate) * up;
    // gpt-oss: SwiGLU with clamped inputs and a linear part around 1.
    const Floats limited = -vector_max(splat(-7.0f), -gate);
    return limited * sigmoid(1.702f * limited) * (clamp(up, 7.0f) + 1.0f);
}

// Store the products of `rows` rows with a strip; out_stride counts floats.
static inline __attribute__((always_inline)) void store_products(int rows, const Matrix *matrix, int64_t strip,
                                                                 Floats (*sums)[STRIP_VECTORS], Epilogue epilogue,
                                                                 float *out, int64_t out_stride) {
#pragma GCC unroll 2
    for (int p = 0; p < STRIP_VECTORS; p++) {
        const int64_t column = STRIP * strip + LANES * p, left = matrix->outputs - column;
        if (left <= 0) break;
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) sums[r][p] *= (float)matrix->unit;
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

#if WEIGHTS != 8
// Multiply `rows` rows, a constant, by the strip that begins at `line`, and prefetch `prefetch` bytes ahead.
static inline __attribute__((always_inline)) void multiply_block(int rows, const Matrix *matrix, const uint8_t *line,
                                                                 int64_t strip, int64_t prefetch, const Input *input,
                                                                 Epilogue epilogue, float *out, int64_t out_stride) {
    const int64_t inputs = matrix->inputs;
    Floats sums[MAX_ROWS][STRIP_VECTORS];
    Words lines[STRIP_VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < STRIP_VECTORS; p++) sums[r][p] = (Floats){0};
    for (int64_t word = 0; word < inputs / INPUTS_PER_WORD; word++, line += STRIP_VECTORS * LINE) {
#pragma GCC unroll 2
        for (int p = 0; p < STRIP_VECTORS; p++) {
            lines[p] = load_words(line + p * LINE);
            if (p * LINE % 64 == 0) __builtin_prefetch(line + p * LINE + prefetch, 0, 2);
        }
        // The first of two bfloat16 is the lower half of a word. Its bits are the upper half of a float32.
#pragma GCC unroll 2
        for (int half = 0; half < (WIDENED ? 2 : 1); half++)
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const char *row = (const char *)(input + r * inputs);
                const Words broadcast = splat_word_at(row + 4 * (WIDENED ? 2 * word + half : word));
#pragma GCC unroll 2
                for (int p = 0; p < STRIP_VECTORS; p++) {
                    const Words weights = !WIDENED ? lines[p] : half ? lines[p] & (int32_t)0xffff0000 : lines[p] << 16;
                    sums[r][p] = multiply_add(sums[r][p], broadcast, weights);
                }
            }
    }
    store_products(rows, matrix, strip, sums, epilogue, out, out_stride);
}
#endif

// Multiply all rows by one strip.
static void multiply_strip(const Matrix *matrix, int64_t strip, const Input *input, const float *input_stats,
                           int64_t rows, Epilogue epilogue, float *out, int64_t out_stride) {
    const int64_t blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const int64_t prefetch = blocks > 1 ? strip_bytes(matrix) : PREFETCH_BYTES;
    const uint8_t *line = matrix->strips + strip * strip_bytes(matrix);
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t row = rows * b / blocks;
        const int count = (int)(rows * (b + 1) / blocks - row);
        const Input *from = input + row * matrix->inputs;
        float *to = out + row * out_stride;
#if WEIGHTS == 8
        Floats sums[MAX_ROWS][STRIP_VECTORS];
        const float *stats = input_stats + row * STATS * (matrix->inputs / GROUP);
        multiply_integers(count, matrix, line, prefetch, from, stats, sums);
        store_products(count, matrix, strip, sums, epilogue, to, out_stride);
#else
        (void)input_stats;
        // The number of rows is a constant in each case, so that the loops are unrolled.
#define CASE(n)                                                                                                        \
    if (n <= MAX_ROWS && count == n)                                                                                   \
        multiply_block(n, matrix, line, strip, prefetch, from, epilogue, to, out_stride);
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
#endif
    }
}

static inline int64_t strips_of(const Matrix *matrix) { return (matrix->outputs + STRIP - 1) / STRIP; }

// Whether this number of rows is multiplied with tiles. Their inputs are then bfloat16, without STATS.
static inline int are_tiled(int64_t rows) { return rows >= MIN_TILED_ROWS; }

// The input `index` of a product, with tiles or not.
static inline Input *input_at(const Input *inputs, int64_t index, int tiled) {
    return (Input *)((char *)inputs + index * (tiled ? (int64_t)sizeof(uint16_t) : (int64_t)sizeof(Input)));
}

#ifdef TILES
// Multiply the rows from `row` on, one or two tiles, by some groups of a strip.
static inline void multiply_rows(const uint16_t *input, int64_t inputs, int64_t row, int64_t rows, int is_first,
                                 int64_t from, int64_t to, const uint8_t *weights, int64_t prefetch,
                                 Floats (*sums)[STRIP_VECTORS]) {
    input += row * inputs + from * GROUP;
    if (rows - row > TILE_ROWS)
        multiply_tiles_of_rows(2, is_first, input, inputs, to - from, weights, prefetch, sums);
    else
        multiply_tiles_of_rows(1, is_first, input, inputs, to - from, weights, prefetch, sums);
}

#if WEIGHTS == 16
static void multiply_strip_of_tiles(const Matrix *matrix, const uint16_t *input, int64_t rows, Epilogue epilogue,
                                    float *out, int64_t out_stride, int64_t strip) {
    const uint8_t *weights = matrix->strips + strip * strip_bytes(matrix);
    for (int64_t row = 0; row < rows; row += BLOCK_ROWS) {
        const int64_t prefetch = row ? 0 : rows > BLOCK_ROWS ? strip_bytes(matrix) : PREFETCH_BYTES;
        Floats sums[BLOCK_ROWS][STRIP_VECTORS];
        multiply_rows(input, matrix->inputs, row, rows, 1, 0, matrix->inputs / GROUP, weights, prefetch, sums);
        store_products(rows - row < BLOCK_ROWS ? (int)(rows - row) : BLOCK_ROWS, matrix, strip, sums, epilogue,
                       out + row * out_stride, out_stride);
    }
}
#else
// Multiply all rows by up to PANEL_STRIPS strips, some groups after others.
static void multiply_panel(const Matrix *matrix, const uint16_t *input, int64_t rows, Epilogue epilogue, float *out,
                           int64_t out_stride, int64_t first, int64_t strips, Workspace *work) {
    const int64_t inputs = matrix->inputs, groups = inputs / GROUP, parts = (groups + PANEL_GROUPS - 1) / PANEL_GROUPS;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t from = groups * part / parts, to = groups * (part + 1) / parts;
        for (int64_t s = 0; s < strips; s++) unpack_strip(matrix, first + s, from, to, work->panel[s]);
        for (int64_t block = 0; BLOCK_ROWS * block < rows; block++)
            for (int64_t s = 0; s < strips; s++) {
                const int64_t row = BLOCK_ROWS * block, left = rows - row;
                Floats(*sums)[STRIP_VECTORS] = work->sums[parts > 1 ? block : 0][s];
                multiply_rows(input, inputs, row, rows, part == 0, from, to, (const uint8_t *)work->panel[s],
                              4 * TILED_GROUP_BYTES, sums);
                if (part == parts - 1)
                    store_products(left < BLOCK_ROWS ? (int)left : BLOCK_ROWS, matrix, first + s, sums, epilogue,
                                   out + row * out_stride, out_stride);
            }
    }
}
#endif
#endif

// Compute the strips [first, last) of the outputs of (rows, inputs) x (inputs, outputs): with tiles if there is a
// `workspace`. Tiles also read the rows after the last, up to a multiple of TILE_ROWS.
static void multiply(const Matrix *matrix, const Input *input, const float *input_stats, int64_t rows,
                     Epilogue epilogue, float *out, int64_t out_stride, int64_t first, int64_t last, void *workspace) {
#ifdef TILES
    if (workspace && rows > 0) {
        begin_tiles(rows);
#if WEIGHTS == 16
        for (int64_t strip = first; strip < last; strip++)
            multiply_strip_of_tiles(matrix, (const uint16_t *)input, rows, epilogue, out, out_stride, strip);
#else
        for (int64_t strip = first; strip < last; strip += PANEL_STRIPS)
            multiply_panel(matrix, (const uint16_t *)input, rows, epilogue, out, out_stride, strip,
                           last - strip < PANEL_STRIPS ? last - strip : PANEL_STRIPS, workspace);
#endif
        release_tiles();
        return;
    }
#endif
    for (int64_t strip = first; strip < last; strip++)
        multiply_strip(matrix, strip, input, input_stats, rows, epilogue, out, out_stride);
}

// Convert one row to inputs of a product; for integer inputs also write the STATS of each GROUP to `stats`. Do nothing
// if the row itself is the input.
static void convert_inputs(int tiled, const float *numbers, int64_t count, Input *inputs, float *stats) {
#ifdef TILES
    if (tiled) {
        for (int64_t i = 0; i < count; i += LANES) store_elements((Element *)inputs + i, load(numbers + i));
        return;
    }
#endif
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
