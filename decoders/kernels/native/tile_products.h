// Products of rows of bfloat16 and strips with AMX. Packed integers are first unpacked to bfloat16, once for all rows:
// then no group of inputs needs a scale, and sums stay in the tiles. Unpacking pays for many rows only. Weights packed as
// bfloat16 are tiles already, and are used for any number of rows.

#pragma once

#include "integers.h"

// Tiles of AMX: products of up to 16 rows of 32 bfloat16 inputs and 16 outputs in one instruction. Tests emulate them:
// -DEMULATED_TILES='"file"' includes another implementation.
#define TILE_ROWS 16

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

#ifdef EMULATED_TILES
#include EMULATED_TILES
#elif defined(__AMX_BF16__)
#include <immintrin.h>
// Set the shapes of all tiles.
#define load_tile_shapes(shapes) _tile_loadconfig(shapes)
#define release_tiles() _tile_release()
#define zero_tile(tile) _tile_zero(tile)
#define load_tile(tile, address, stride) _tile_loadd(tile, address, stride)
#define store_tile(tile, address, stride) _tile_stored(tile, address, stride)
// Add the products of bfloat16 to the float32 numbers of a tile.
#define multiply_tiles(sums, inputs, weights) _tile_dpbf16ps(sums, inputs, weights)
#endif

#if (defined(EMULATED_TILES) || defined(__AMX_BF16__)) && !defined(FLOAT32) && WEIGHTS != 32
#define TILES
#define BLOCK_ROWS (2 * TILE_ROWS)
#define TILED_GROUP_BYTES (STRIP_VECTORS * TILE_ROWS * 64)  // of GROUP inputs of a strip: STRIP_VECTORS tiles

// Set the shapes for products of `rows` rows. Of more than TILE_ROWS, tiles also read rows after the last.
static inline void begin_tiles(int64_t rows) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        const int is_weights = i == 2 || i == 3;
        shapes.rows[i] = rows < TILE_ROWS && !is_weights ? (uint8_t)rows : TILE_ROWS;
        shapes.row_bytes[i] = 64;
    }
    load_tile_shapes(&shapes);
}

#if WEIGHTS == 16
// The lines of a strip take turns: each is a row of a tile.
#define MIN_TILED_ROWS 0
#define PANEL_STRIPS 8
#define workspace_bytes(rows) 64
#define TILE_BYTES LINE  // from a tile to the next
#define TILE_STRIDE (STRIP_VECTORS * LINE)
#else
#define MIN_TILED_ROWS 64  // with fewer, vectors were sometimes faster
#define TILE_BYTES (TILE_ROWS * 64)
#define TILE_STRIDE 64
// Strips and groups that a thread unpacks at once, at most: half a megabyte, which stays in its L2 cache.
#define PANEL_STRIPS 8
#define PANEL_GROUPS 32

// The memory of a thread for products with tiles.
typedef struct {
    Words panel[PANEL_STRIPS][PANEL_GROUPS][STRIP_VECTORS][TILE_ROWS];
    Floats sums[][PANEL_STRIPS][BLOCK_ROWS][STRIP_VECTORS];  // by block of rows
} Workspace;

static int64_t workspace_bytes(int64_t rows) {
    const int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    return sizeof(Workspace) + blocks * sizeof(Floats[PANEL_STRIPS][BLOCK_ROWS][STRIP_VECTORS]);
}

// Round to bfloat16: each word has an even input and the odd one after it.
static inline Words bfloat16_pairs(Floats even, Floats odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Words)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}

// Unpack `count` groups, each to (STRIP_VECTORS, TILE_ROWS) lines of bfloat16. `source` and `group` are constants.
LOOP void unpack_groups(Source source, int group, const Matrix *matrix, const uint8_t *line, int64_t count,
                        Words (*panel)[STRIP_VECTORS][TILE_ROWS]) {
    const Words codebook = source == CODED_NIBBLES ? codebook_of(matrix) : (Words){0};
    const int words = group / INPUTS_PER_WORD, parts = GROUP / group;
    for (int64_t g = 0; g < count * parts; g++) {
        Words weights[GROUP / INPUTS_PER_WORD][STRIP_VECTORS];
        Floats scales[2][STRIP_VECTORS];
#pragma GCC unroll 4
        for (int word = 0; word < words; word += 2)
            line = load_pair(source, 0, codebook, line, PREFETCH_BYTES, weights + word);
        line = load_scales(matrix, 0, line, PREFETCH_BYTES, scales);
#pragma GCC unroll 2
        for (int p = 0; p < STRIP_VECTORS; p++) {
            Words *lines = panel[g / parts][p] + g % parts * (TILE_ROWS / 2);
            if (matrix->zero_point != 0) scales[1][p] = scales[0][p] * -(float)matrix->zero_point;
#pragma GCC unroll 8
            for (int word = 0; word < words; word++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    Floats numbers[2];
#pragma GCC unroll 2
                    for (int i = 0; i < 2; i++) {
                        const Words integers = weights[word][p] >> (16 * half + 8 * i) & 255;
                        numbers[i] = add_product(scales[1][p], scales[0][p], __builtin_convertvector(integers, Floats));
                    }
                    lines[2 * word + half] = bfloat16_pairs(numbers[0], numbers[1]);
                }
        }
    }
}

// Unpack the groups [from, to) of a strip.
static void unpack_strip(const Matrix *matrix, int64_t strip, int64_t from, int64_t to,
                         Words (*panel)[STRIP_VECTORS][TILE_ROWS]) {
    const uint8_t *line =
        matrix->strips + strip * strip_bytes(matrix) + from * (GROUP / matrix->group) * group_bytes(matrix);
    const Source source = source_of(matrix);
    const int half = matrix->group < GROUP;
#define CASE(source_, group_)                                                                                          \
    if (source == source_ && half == (group_ < GROUP))                                                                 \
        return unpack_groups(source_, group_, matrix, line, to - from, panel);
    CASE(NIBBLES, GROUP)
    CASE(NIBBLES, GROUP / 2)
    CASE(BYTES, GROUP)
    CASE(BYTES, GROUP / 2)
    CASE(CODED_NIBBLES, GROUP)
#undef CASE
}

#endif

// Compute the products of `tiles` (1 or 2, a constant) times TILE_ROWS rows and the groups of a strip, whose tiles begin
// at `weights`. Add them to `sums` unless these are the first groups. Prefetch `prefetch` bytes ahead.
LOOP void multiply_tiles_of_rows(int tiles, int is_first, const uint16_t *input, int64_t inputs, int64_t groups,
                                 const uint8_t *weights, int64_t prefetch, Floats (*sums)[STRIP_VECTORS]) {
    const int64_t stride = inputs * (int64_t)sizeof *input;
    // Tiles: 0 and 1 are inputs, 2 and 3 weights, 4 to 7 sums.
#define EACH_SUM(operation)                                                                                            \
    operation(4, &sums[0][0], sizeof *sums);                                                                           \
    operation(5, &sums[0][1], sizeof *sums);                                                                           \
    if (tiles == 2) {                                                                                                  \
        operation(6, &sums[TILE_ROWS][0], sizeof *sums);                                                               \
        operation(7, &sums[TILE_ROWS][1], sizeof *sums);                                                               \
    }
#define CLEAR(tile, address, stride) zero_tile(tile)
    if (is_first) {
        EACH_SUM(CLEAR)
    } else {
        EACH_SUM(load_tile)
    }
    // All loads come before the products, which is faster than loads between them.
    for (int64_t g = 0; g < groups; g++, weights += TILED_GROUP_BYTES) {
        load_tile(0, input + GROUP * g, stride);
        load_tile(2, weights, TILE_STRIDE);
        load_tile(3, weights + TILE_BYTES, TILE_STRIDE);
        if (tiles == 2) load_tile(1, input + TILE_ROWS * inputs + GROUP * g, stride);
#pragma GCC unroll 32
        for (int line = 0; line < TILED_GROUP_BYTES; line += 64) __builtin_prefetch(weights + prefetch + line);
        multiply_tiles(4, 0, 2);
        multiply_tiles(5, 0, 3);
        if (tiles == 2) {
            multiply_tiles(6, 1, 2);
            multiply_tiles(7, 1, 3);
        }
    }
    EACH_SUM(store_tile)
#undef CLEAR
#undef EACH_SUM
}
#else
#define MIN_TILED_ROWS INT64_MAX
#define PANEL_STRIPS 1
#define workspace_bytes(rows) 0
#endif
