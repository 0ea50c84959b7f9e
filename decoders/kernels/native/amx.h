// Tiles of AMX: products of up to 16 rows of 32 bfloat16 inputs and 16 outputs in one instruction. Tests emulate them:
// -DEMULATED_TILES='"file"' includes another implementation.

#pragma once

#include <stdint.h>

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
