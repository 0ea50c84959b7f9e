// Products of many rows of 8-bit inputs and a strip of packed integers with AMX. They equal the products of integers.h
// bit for bit.

#pragma once

#include "amx.h"
#include "integers.h"

#if (defined(EMULATED_TILES) || defined(__AMX_INT8__)) && WEIGHTS == 8 && LANES == 16
#define TILES
// Numbers of tiles, which are parts of the names of registers.
#define INPUTS_TILE 0
#define FIRST_WEIGHTS 1  // of the first line of a strip
#define SECOND_WEIGHTS 2
#define FIRST_SUMS 3
#define SECOND_SUMS 4

LOOP void multiply_tiled(int rows, Source source, const Matrix *matrix, const uint8_t *line, int64_t prefetch,
                         const Input *input, const float *input_stats, Floats (*out)[STRIP_VECTORS]) {
    const int64_t inputs = matrix->inputs, groups = inputs / GROUP, group = matrix->group;
    const int parts = (int)(GROUP / group), words = (int)(group / INPUTS_PER_WORD);
    const Words codebook = codebook_of(matrix);
    const float zero = -(float)matrix->zero_point;
    TileShapes shapes = {.palette = 1};
    const int tiles[][3] = {{INPUTS_TILE, rows, (int)group}, {FIRST_WEIGHTS, words, 64}, {SECOND_WEIGHTS, words, 64},
                            {FIRST_SUMS, rows, 64}, {SECOND_SUMS, rows, 64}};
    for (int i = 0; i < 5; i++) {
        shapes.rows[tiles[i][0]] = (uint8_t)tiles[i][1];
        shapes.row_bytes[tiles[i][0]] = (uint16_t)tiles[i][2];
    }
    load_tile_shapes(&shapes);
    memset(out, 0, rows * sizeof *out);
    for (int64_t g = 0; g < groups * parts; g++) {
        Words weights[GROUP / INPUTS_PER_WORD][STRIP_VECTORS], products[STRIP_VECTORS][TILE_ROWS];
        Floats scales[2][STRIP_VECTORS];
        for (int word = 0; word < words; word += 2)
            line = load_pair(source, 0, codebook, line, prefetch, weights + word);
        line = load_scales(matrix, 0, line, prefetch, scales);
        load_tile(INPUTS_TILE, input + g * group, inputs);
        load_tile(FIRST_WEIGHTS, &weights[0][0], sizeof *weights);
        load_tile(SECOND_WEIGHTS, &weights[0][1], sizeof *weights);
        zero_tile(FIRST_SUMS);
        zero_tile(SECOND_SUMS);
        multiply_tiles(FIRST_SUMS, INPUTS_TILE, FIRST_WEIGHTS);
        multiply_tiles(SECOND_SUMS, INPUTS_TILE, SECOND_WEIGHTS);
        store_tile(FIRST_SUMS, products[0], sizeof(Words));
        store_tile(SECOND_SUMS, products[1], sizeof(Words));
        const float *stats = input_stats + STATS * (g / parts);
        const int sum_index = parts == 1 ? 1 : 2 + (int)(g % 2);
        for (int r = 0; r < rows; r++, stats += STATS * groups)
            for (int p = 0; p < STRIP_VECTORS; p++)
                out[r][p] = add_group(out[r][p], products[p][r], scales[0][p], scales[1][p], matrix->zero_point == 0,
                                       zero, stats[0], stats[sum_index]);
    }
    release_tiles();
}

// Compute the products of 1 to TILE_ROWS rows as multiply_integers does.
static void multiply_with_tiles(int rows, const Matrix *matrix, const uint8_t *line, int64_t prefetch,
                                const Input *input, const float *input_stats, Floats (*out)[STRIP_VECTORS]) {
    switch (source_of(matrix)) {
#define CASE(source)                                                                                                   \
    case source:                                                                                                       \
        return multiply_tiled(rows, source, matrix, line, prefetch, input, input_stats, out);
        CASE(NIBBLES)
        CASE(CODED_NIBBLES)
        CASE(BYTES)
#undef CASE
    }
}
#endif
