// The tile registers of AMX, and their emulation in plain code (PS_AMX_EMULATION) for tests on
// processors that have none. Tile numbers are literals, which the compilers' macros ask for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifndef PS_AMX_EMULATION
#include <immintrin.h>
#endif

namespace polysilicon::PS_LEVEL {
namespace {

// As ldtilecfg reads it.
struct TileShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  void set(int tile, int row_count, int bytes) {
    rows[tile] = static_cast<std::uint8_t>(row_count);
    row_bytes[tile] = static_cast<std::uint16_t>(bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

#ifdef PS_AMX_EMULATION

struct Tile {
  int rows, row_bytes;
  std::uint8_t data[16][64];
};

thread_local Tile tiles[8];

void set_tiles(const TileShapes& shapes) {
  for (int i = 0; i < 8; ++i) tiles[i] = {shapes.rows[i], shapes.row_bytes[i], {}};
}

void release_tiles() { set_tiles({}); }

void zero_tile(int tile) { std::memset(tiles[tile].data, 0, sizeof tiles[tile].data); }

void load_tile(int tile, const void* from, std::ptrdiff_t stride) {
  zero_tile(tile);
  for (int row = 0; row < tiles[tile].rows; ++row) {
    std::memcpy(tiles[tile].data[row], static_cast<const std::uint8_t*>(from) + row * stride,
                static_cast<std::size_t>(tiles[tile].row_bytes));
  }
}

void store_tile(int tile, void* to, std::ptrdiff_t stride) {
  for (int row = 0; row < tiles[tile].rows; ++row) {
    std::memcpy(static_cast<std::uint8_t*>(to) + row * stride, tiles[tile].data[row],
                static_cast<std::size_t>(tiles[tile].row_bytes));
  }
}

float without_subnormal(float x) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
  return (bits & 0x7f800000u) ? x : __builtin_bit_cast(float, bits & 0x80000000u);
}

float bfloat16_of_tile(const Tile& tile, int row, int index) {
  std::uint16_t bits;
  std::memcpy(&bits, tile.data[row] + index * 2, sizeof bits);
  return without_subnormal(__builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16));
}

// TDPBF16PS of Intel's manual: the products of the pairs' lower and upper halves are added apart,
// fused, and their sums to the result. Subnormal numbers are 0 everywhere.
void multiply_tiles(int sum, int left, int right) {
  const Tile &a = tiles[left], &b = tiles[right];
  Tile& c = tiles[sum];
  // Shapes for which the processor raises an exception.
  if (a.rows != c.rows || b.row_bytes != c.row_bytes || a.row_bytes != 4 * b.rows) __builtin_trap();
  for (int m = 0; m < c.rows; ++m) {
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      float halves[2] = {};
      for (int k = 0; k < a.row_bytes / 4; ++k) {
        for (int half = 0; half < 2; ++half) {
          halves[half] = without_subnormal(__builtin_fmaf(
              bfloat16_of_tile(a, m, 2 * k + half), bfloat16_of_tile(b, k, 2 * n + half),
              halves[half]));
        }
      }
      float value;
      std::memcpy(&value, c.data[m] + n * 4, sizeof value);
      value = without_subnormal(without_subnormal(value) +
                                without_subnormal(halves[0] + halves[1]));
      std::memcpy(c.data[m] + n * 4, &value, sizeof value);
    }
  }
}

#define PS_SET_TILES(shapes) set_tiles(shapes)
#define PS_RELEASE_TILES() release_tiles()
#define PS_ZERO_TILE(tile) zero_tile(tile)
#define PS_LOAD_TILE(tile, from, stride) load_tile(tile, from, stride)
#define PS_STORE_TILE(tile, to, stride) store_tile(tile, to, stride)
#define PS_MULTIPLY_TILES(sum, left, right) multiply_tiles(sum, left, right)

#else

// The compilers' intrinsics do not say that they read memory: without a barrier, what was written
// for them can come later or never.
#define PS_TILE_BARRIER() asm volatile("" ::: "memory")
#define PS_SET_TILES(shapes)                    \
  do {                                          \
    asm volatile("" ::"r"(&(shapes)) : "memory"); \
    _tile_loadconfig(&(shapes));                \
  } while (false)
#define PS_RELEASE_TILES() _tile_release()
#define PS_ZERO_TILE(tile) _tile_zero(tile)
#define PS_LOAD_TILE(tile, from, stride) \
  do {                                   \
    PS_TILE_BARRIER();                   \
    _tile_loadd(tile, from, stride);     \
  } while (false)
#define PS_STORE_TILE(tile, to, stride) \
  do {                                  \
    _tile_stored(tile, to, stride);     \
    PS_TILE_BARRIER();                  \
  } while (false)
#define PS_MULTIPLY_TILES(sum, left, right) _tile_dpbf16ps(sum, left, right)

#endif

}  // namespace
}  // namespace polysilicon::PS_LEVEL
