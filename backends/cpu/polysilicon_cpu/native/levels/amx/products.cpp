// Products of many rows through AMX's tiles: weights are dequantised into a bfloat16 panel, 32
// outputs at a time, and multiplied with the rows' bfloat16 records as these stand. Anything else
// goes the way of AVX512, also where a row's result must not depend on the number of rows: tiles
// add in another order.
#include "levels/amx/tiles.h"
#include "levels/products_avx512_codes.h"

namespace polysilicon::avx512 {
extern const ProductKernels product_kernels;
}

namespace polysilicon::PS_LEVEL {
namespace {

// From so many rows on, dequantising pays: after bfloat16 kernels, and after int8 ones.
constexpr int kBfloat16Rows = 8;
constexpr int kInt8Rows = 16;

constexpr int kTileOutputs = 16, kTileRows = 16;
constexpr int kPanelVectors = kTile / 2;  // of a block's tile: pairs of inputs

// Codes as bfloat16 pairs, raised, become values.
void scale_panel(const Segment& segment, const Scales& scales, int step, __m512i* panel) {
  const bool affine = segment.codes == Codes::kAffine;
  const int raised =
      affine ? segment.offset + bfloat16_raise(segment.codes, segment.bits) : 0;
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int tile = 0; tile < segment.tiles; ++tile) {
    for (int half = 0; half < 2; ++half) {
      const int unit = (segment.halves ? 2 * tile + half : tile) * kLanes;
      const __m512 scale = _mm512_loadu_ps(scales.scale + unit);
      const __m512 bias =
          scales.bias == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(scales.bias + unit);
      const __m512 shift =
          _mm512_fnmadd_ps(_mm512_set1_ps(static_cast<float>(raised)), scale, bias);
      __m512i* vectors = panel + tile * step + half * kPanelVectors / 2;
      for (int i = 0; i < kPanelVectors / 2; ++i) {
        const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(vectors[i], 16));
        const __m512 high = _mm512_castsi512_ps(_mm512_and_si512(vectors[i], upper));
        vectors[i] = bfloat16_pairs(_mm512_fmadd_ps(low, scale, shift),
                                    _mm512_fmadd_ps(high, scale, shift));
      }
    }
  }
}

void unpack(const Segment& segment, const std::uint8_t* codes, int step, __m512i* panel) {
  if (segment.codes != Codes::kAffine) {
    unpack_block<Bfloat16Product, 0>(segment, codes, step, panel);
    return;
  }
  switch (segment.bits) {
    case 2: unpack_block<Bfloat16Product, 2>(segment, codes, step, panel); break;
    case 3: unpack_block<Bfloat16Product, 3>(segment, codes, step, panel); break;
    case 4: unpack_block<Bfloat16Product, 4>(segment, codes, step, panel); break;
    case 5: unpack_block<Bfloat16Product, 5>(segment, codes, step, panel); break;
    case 6: unpack_block<Bfloat16Product, 6>(segment, codes, step, panel); break;
    case 7: unpack_block<Bfloat16Product, 7>(segment, codes, step, panel); break;
    default: unpack_block<Bfloat16Product, 8>(segment, codes, step, panel); break;
  }
}

// Tiles 0 to 3 are sums [rows][outputs], 4 and 5 rows, 6 and 7 outputs.
void shape_tiles(int first_rows, int second_rows) {
  TileShapes shapes;
  for (int i = 0; i < 2; ++i) {
    shapes.set(i, first_rows, 64);
    shapes.set(2 + i, second_rows > 0 ? second_rows : 1, 64);
    shapes.set(6 + i, kTileRows, 64);
  }
  shapes.set(4, first_rows, 64);
  shapes.set(5, second_rows > 0 ? second_rows : 1, 64);
  PS_SET_TILES(shapes);
}

// The products of up to 32 rows with two blocks' panel [tiles][2][16]: sums [32][2][16].
void tile_product(const __m512i* panel, const std::uint8_t* values, std::ptrdiff_t stride,
                  int tiles, bool second, float* sums) {
  constexpr int kRowBytes = 2 * kTileOutputs * 4;
  PS_ZERO_TILE(0);
  PS_ZERO_TILE(1);
  PS_ZERO_TILE(2);
  PS_ZERO_TILE(3);
  for (int tile = 0; tile < tiles; ++tile, panel += 2 * kPanelVectors, values += kTile * 2) {
    PS_LOAD_TILE(4, values, stride);
    PS_LOAD_TILE(6, panel, 64);
    PS_LOAD_TILE(7, panel + kPanelVectors, 64);
    PS_MULTIPLY_TILES(0, 4, 6);
    PS_MULTIPLY_TILES(1, 4, 7);
    if (second) {
      PS_LOAD_TILE(5, values + kTileRows * stride, stride);
      PS_MULTIPLY_TILES(2, 5, 6);
      PS_MULTIPLY_TILES(3, 5, 7);
    }
  }
  PS_STORE_TILE(0, sums, kRowBytes);
  PS_STORE_TILE(1, sums + kTileOutputs, kRowBytes);
  if (second) {
    PS_STORE_TILE(2, sums + kTileRows * 2 * kTileOutputs, kRowBytes);
    PS_STORE_TILE(3, sums + (kTileRows * 2 + 1) * kTileOutputs, kRowBytes);
  }
}

void multiply_tiled(const Segment& segment, const std::uint8_t* data, const RecordLayout& layout,
                    const std::uint8_t* records, int rows, int first, int last, float* out,
                    std::ptrdiff_t stride, const float* bias, std::uint8_t* scratch) {
  float* scale_scratch = reinterpret_cast<float*>(scratch);
  __m512i* panel = reinterpret_cast<__m512i*>(scratch + segment.tiles * 4 * kScaleBytes);
  const std::uint8_t* values = records + layout.bfloat16.values_at;
  alignas(64) float sums[2 * kTileRows][2][kTileOutputs];
  for (int block = first; block < last; block += 2) {
    const int blocks = last - block < 2 ? last - block : 2;
    for (int b = 0; b < 2; ++b) {
      // A lone last block is multiplied twice.
      const std::uint8_t* bytes = data + (block + (b < blocks ? b : 0)) * segment.block_bytes;
      __m512i* target = panel + b * kPanelVectors;
      unpack(segment, bytes + segment.codes_at, 2 * kPanelVectors, target);
      if (segment.codes == Codes::kAffine || segment.codes == Codes::kTable) {
        scale_panel(segment, scales_of(segment, bytes, scale_scratch), 2 * kPanelVectors, target);
      }
    }
    for (int row = 0; row < rows; row += 2 * kTileRows) {
      const int count = rows - row < 2 * kTileRows ? rows - row : 2 * kTileRows;
      const int first_rows = count < kTileRows ? count : kTileRows;
      shape_tiles(first_rows, count - first_rows);
      tile_product(panel, values + row * layout.bytes, layout.bytes, segment.tiles,
                   count > first_rows, sums[0][0]);
      for (int m = 0; m < count; ++m) {
        for (int b = 0; b < blocks; ++b) {
          finish(sums[m][b], segment, block + b, bias, out + (row + m) * stride);
        }
      }
    }
  }
  PS_RELEASE_TILES();
}

void prepare(const RecordLayout& layout, const float* x, const std::int32_t* order,
             std::uint8_t* record) {
  avx512::product_kernels.prepare(layout, x, order, record);
}

void multiply(const Segment& segment, const std::uint8_t* data, const RecordLayout& layout,
              const std::uint8_t* records, int rows, int first, int last, float* out,
              std::ptrdiff_t stride, const float* bias, std::uint8_t* scratch) {
  const int least = segment.product == Product::kInt8 ? kInt8Rows : kBfloat16Rows;
  if (segment.by_row_count && rows >= least) {
    multiply_tiled(segment, data, layout, records, rows, first, last, out, stride, bias, scratch);
  } else {
    avx512::product_kernels.multiply(segment, data, layout, records, rows, first, last, out,
                                     stride, bias, scratch);
  }
}

}  // namespace

extern const ProductKernels product_kernels;
const ProductKernels product_kernels = {
    true, true, true, bfloat16_raise, prepare, scratch_bytes, multiply, dots,
};

}  // namespace polysilicon::PS_LEVEL
