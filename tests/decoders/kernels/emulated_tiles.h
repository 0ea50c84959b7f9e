// Tiles of AMX in C, for tests on other processors.

#include <math.h>
#include <string.h>

// Intel's manual of the instruction set, volume 2: LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBF16PS.
static _Thread_local TileShapes tile_shapes;
static _Thread_local uint8_t tile_bytes[8][TILE_ROWS][64];

static inline void load_tile_shapes(const TileShapes *shapes) {
    tile_shapes = *shapes;
    memset(tile_bytes, 0, sizeof tile_bytes);
}

static inline void release_tiles(void) { memset(&tile_shapes, 0, sizeof tile_shapes); }

static inline void zero_tile(int tile) { memset(tile_bytes[tile], 0, sizeof tile_bytes[tile]); }

static inline void load_tile(int tile, const void *address, int64_t stride) {
    zero_tile(tile);
    for (int r = 0; r < tile_shapes.rows[tile]; r++)
        memcpy(tile_bytes[tile][r], (const char *)address + r * stride, tile_shapes.row_bytes[tile]);
}

static inline void store_tile(int tile, void *address, int64_t stride) {
    for (int r = 0; r < tile_shapes.rows[tile]; r++)
        memcpy((char *)address + r * stride, tile_bytes[tile][r], tile_shapes.row_bytes[tile]);
}

static inline float widened(const uint8_t *bfloat16) {
    uint32_t bits = (uint32_t)(bfloat16[0] | bfloat16[1] << 8) << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

// Inputs with even and odd numbers are summed apart.
static inline void multiply_tiles(int sums, int inputs, int weights) {
    for (int m = 0; m < tile_shapes.rows[sums]; m++)
        for (int n = 0; n < tile_shapes.row_bytes[sums] / 4; n++) {
            float sum, products[2] = {0};
            for (int k = 0; k < tile_shapes.row_bytes[inputs] / 4; k++)
                for (int i = 0; i < 2; i++)
                    products[i] = fmaf(widened(tile_bytes[inputs][m] + 4 * k + 2 * i),
                                       widened(tile_bytes[weights][k] + 4 * n + 2 * i), products[i]);
            memcpy(&sum, tile_bytes[sums][m] + 4 * n, 4);
            sum += products[0] + products[1];
            memcpy(tile_bytes[sums][m] + 4 * n, &sum, 4);
        }
}
