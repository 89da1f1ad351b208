// Decoding of blocks and float32 products, in code that compilers vectorise for any level.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "levels/products.h"
#include "levels/vectors.h"

#define PS_INLINE __attribute__((always_inline)) inline

namespace polysilicon::PS_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 8;
#elif defined(__AVX2__) || defined(PS_NEON)
constexpr int kRowsAtOnce = 4;
#else
constexpr int kRowsAtOnce = 2;
#endif
constexpr int kVectorBytes = kWidth * 4;
constexpr int kVectors = kLanes / kWidth;
// Read and written at any address.
typedef float LooseFloats __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef std::int32_t LooseInts __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
typedef std::uint8_t Bytes __attribute__((vector_size(kVectorBytes)));
typedef std::uint16_t Shorts __attribute__((vector_size(kVectorBytes)));
typedef std::uint16_t LooseShorts
    __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));

constexpr int kMaxRowsAtOnce = 8;

// Scratch of multiply: scales and biases of two blocks, then two blocks of 16-bit vectors, or one
// of float32.
constexpr std::size_t kScaleBytes = 2 * kLanes * sizeof(float);
constexpr std::size_t kPanelBytes = kTile * kLanes * sizeof(float);

std::size_t scratch_bytes(int tiles) {
  return static_cast<std::size_t>(tiles) * (4 * kScaleBytes + kPanelBytes);
}

// The numbers of a block's outputs.
struct Lanes {
  Floats vectors[kVectors];
};

PS_INLINE Lanes numbers_of(Form form, const std::uint8_t* from) {
  Lanes lanes;
PS_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    const auto* halves = reinterpret_cast<const std::uint16_t*>(from) + v * kWidth;
    switch (form) {
      case Form::kFloat32: lanes.vectors[v] = load_as<Floats>(from + v * kVectorBytes); break;
      case Form::kFloat16: lanes.vectors[v] = load_f16(halves); break;
      default: lanes.vectors[v] = load_bf16(halves); break;
    }
  }
  return lanes;
}

PS_INLINE void put(const Lanes& lanes, float* out) {
PS_UNROLL
  for (int v = 0; v < kVectors; ++v) store(out + v * kWidth, lanes.vectors[v]);
}

// All scales of a block by tile, or by half of a tile: [tiles (* 2), 16]; 0 past the last group.
template <Form form, bool coded>
void spread_scales(const ScaleLayout& layout, int period, int units, const std::uint8_t* block,
                   float* out) {
  constexpr int kNumber = kLanes * (form == Form::kFloat32 ? 4 : 2);
  int unit = 0;
  Lanes super{};
  int super_end = 0, super_index = 0;
  for (int entry = 0; entry < layout.count && unit < units; ++entry) {
    Lanes lanes;
    if constexpr (coded) {
      if (entry == super_end) {
        super = numbers_of(form, block + layout.super_at + super_index * kNumber);
        ++super_index;
        super_end += layout.super_period;
      }
      const std::uint8_t* codes = block + layout.at + entry * kLanes;
PS_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const Ints own = load_u8(codes + v * kWidth) - splat(layout.offset);
        lanes.vectors[v] = super.vectors[v] * __builtin_convertvector(own, Floats);
      }
    } else {
      lanes = numbers_of(form, block + layout.at + entry * kNumber);
    }
    const int end = units - unit < period ? units : unit + period;
    for (; unit < end; ++unit) put(lanes, out + unit * kLanes);
  }
  for (; unit < units; ++unit) put(Lanes{}, out + unit * kLanes);
}

void spread_scales(const ScaleLayout& layout, bool halves, int tiles, const std::uint8_t* block,
                   float* out) {
  const int units = halves ? 2 * tiles : tiles;
  const int period = halves ? layout.period : layout.period / 2;
  const auto spread = [&](auto form) {
    if (layout.coded) {
      spread_scales<form(), true>(layout, period, units, block, out);
    } else {
      spread_scales<form(), false>(layout, period, units, block, out);
    }
  };
  switch (layout.form) {
    case Form::kFloat32: spread(std::integral_constant<Form, Form::kFloat32>{}); break;
    case Form::kFloat16: spread(std::integral_constant<Form, Form::kFloat16>{}); break;
    default: spread(std::integral_constant<Form, Form::kBfloat16>{}); break;
  }
}

// Scales, and biases or null, of a block; scratch [2, tiles * 2, 16].
struct Scales {
  const float* scale;
  const float* bias;
};

Scales scales_of(const Segment& segment, const std::uint8_t* block, float* scratch) {
  float* bias = scratch + segment.tiles * 2 * kLanes;
  if (segment.scale.form == Form::kNone) {
    for (int i = 0; i < segment.tiles * 2 * kLanes; ++i) scratch[i] = 1.0f;
  } else {
    spread_scales(segment.scale, segment.halves, segment.tiles, block, scratch);
  }
  if (segment.bias.form == Form::kNone) return {scratch, nullptr};
  spread_scales(segment.bias, segment.halves, segment.tiles, block, bias);
  return {scratch, bias};
}

// Codes of inputs 4 r .. 4 r + 3 of a tile, a byte each: [8][64].
void code_bytes(const std::uint8_t* tile, int bits, std::uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, tile, 512);
    return;
  }
  int low = 0;
  for (int width = 4; width; width >>= 1) {
    if (!(bits & width)) continue;
    // Shifts of 16 bits bring in bits of the neighbouring byte, which the mask takes out again.
    const std::uint16_t mask = static_cast<std::uint16_t>(((1u << width) - 1) * 0x0101u);
    for (int r = 0; r < 8; ++r) {
      const std::uint8_t* plane = tile + r % width * 64;
      const int shift = r / width * width;
      std::uint8_t* bytes = out + r * 64;
      for (int i = 0; i < 64; i += kVectorBytes) {
        const Shorts stored = *reinterpret_cast<const LooseShorts*>(plane + i);
        Shorts codes = (stored >> shift & mask) << low;
        if (low > 0) codes |= *reinterpret_cast<const LooseShorts*>(bytes + i);
        *reinterpret_cast<LooseShorts*>(bytes + i) = codes;
      }
    }
    tile += width * 64;
    low += width;
  }
}

// The values of a tile as float32: [32][16].
void tile_values(const Segment& segment, const std::uint8_t* tile, const float* scale,
                 const float* bias, float* out) {
  if (segment.codes == Codes::kFloat32) {
    std::memcpy(out, tile, kTile * kLanes * sizeof(float));
    return;
  }
  if (segment.codes == Codes::kFloat16 || segment.codes == Codes::kBfloat16) {
    const Form form = segment.codes == Codes::kFloat16 ? Form::kFloat16 : Form::kBfloat16;
    alignas(64) std::uint16_t pairs[2][kLanes];
    for (int pair = 0; pair < kTile / 2; ++pair) {
      for (int n = 0; n < kLanes; ++n) {
        std::memcpy(&pairs[0][n], tile + pair * 64 + n * 4, 2);
        std::memcpy(&pairs[1][n], tile + pair * 64 + n * 4 + 2, 2);
      }
      for (int i = 0; i < 2; ++i) {
        put(numbers_of(form, reinterpret_cast<const std::uint8_t*>(pairs[i])),
            out + (2 * pair + i) * kLanes);
      }
    }
    return;
  }
  alignas(64) std::uint8_t codes[8 * 64];
  code_bytes(tile, segment.bits, codes);
  if (segment.codes == Codes::kTable) {
    const float* table = segment.table;
    for (int k = 0; k < kTile; ++k) {
      const float* factors = scale + (segment.halves ? k / 16 * kLanes : 0);
      const std::uint8_t* lanes = codes + k / 4 * 64 + k % 4;
      for (int n = 0; n < kLanes; ++n) out[k * kLanes + n] = factors[n] * table[lanes[n * 4]];
    }
    return;
  }
  const int offset = segment.offset;
  for (int half = 0; half < 2; ++half) {
    for (int v = 0; v < kVectors; ++v) {
      const int at = (segment.halves ? half * kLanes : 0) + v * kWidth;
      const Floats factor = *reinterpret_cast<const LooseFloats*>(scale + at);
      const Floats added =
          bias == nullptr ? Floats{} : *reinterpret_cast<const LooseFloats*>(bias + at);
      for (int r = half * 4; r < half * 4 + 4; ++r) {
        const Ints words = *reinterpret_cast<const LooseInts*>(codes + r * 64 + v * kVectorBytes);
        float* lanes = out + r * 4 * kLanes + v * kWidth;
        for (int b = 0; b < 4; ++b) {
          const Ints code = (words >> b * 8 & 255) - offset;
          *reinterpret_cast<LooseFloats*>(lanes + b * kLanes) =
              __builtin_convertvector(code, Floats) * factor + added;
        }
      }
    }
  }
}

[[maybe_unused]] void prepare_float32(const RecordLayout& layout, const float* x,
                                      const std::int32_t* order, std::uint8_t* record) {
  float* values = reinterpret_cast<float*>(record + layout.float32.values_at);
  if (order == nullptr) {
    std::memcpy(values, x, static_cast<std::size_t>(layout.inputs) * sizeof(float));
  } else {
    for (int k = 0; k < layout.inputs; ++k) values[k] = x[order[k]];
  }
  for (int k = layout.inputs; k < layout.tiles * kTile; ++k) values[k] = 0.0f;
}

// Adds the outputs' bias and writes those that the segment has.
void finish(const float* lanes, const Segment& segment, int block, const float* bias, float* out) {
  const int begin = block * kLanes;
  const int count = segment.rows - begin < kLanes ? segment.rows - begin : kLanes;
  for (int n = 0; n < count; ++n) {
    out[begin + n] = bias == nullptr ? lanes[n] : lanes[n] + bias[begin + n];
  }
}

// Sums of one row after the other stand in registers: as many rows as the level has room for.
template <int rows>
void panel_float32(const float* panel, int inputs, const float* x, std::ptrdiff_t stride,
                   float (*lanes)[kLanes]) {
  Floats sums[rows][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[m][v] = Floats{};
  }
  for (int k = 0; k < inputs; ++k) {
    const LooseFloats* values = reinterpret_cast<const LooseFloats*>(panel + k * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < rows; ++m) {
      const float factor = x[m * stride + k];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[m][v] += values[v] * factor;
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      reinterpret_cast<LooseFloats*>(lanes[m])[v] = sums[m][v];
    }
  }
}

[[maybe_unused]] void multiply_float32(const Segment& segment, const std::uint8_t* data,
                                       const RecordLayout& layout, const std::uint8_t* records,
                                       int rows, int first, int last, float* out,
                                       std::ptrdiff_t stride, const float* bias,
                                       std::uint8_t* scratch) {
  float* scale_scratch = reinterpret_cast<float*>(scratch);
  float* panel = reinterpret_cast<float*>(scratch + segment.tiles * 2 * kScaleBytes);
  const int scale_step = segment.halves ? 2 * kLanes : kLanes;
  const std::ptrdiff_t record_floats = layout.bytes / static_cast<std::ptrdiff_t>(sizeof(float));
  alignas(64) float lanes[kMaxRowsAtOnce][kLanes];
  for (int block = first; block < last; ++block) {
    const std::uint8_t* bytes = data + block * segment.block_bytes;
    const Scales scales = scales_of(segment, bytes, scale_scratch);
    for (int tile = 0; tile < segment.tiles; ++tile) {
      tile_values(segment, bytes + segment.codes_at + tile * segment.tile_bytes,
                  scales.scale + tile * scale_step,
                  scales.bias == nullptr ? nullptr : scales.bias + tile * scale_step,
                  panel + tile * kTile * kLanes);
    }
    for (int row = 0; row < rows;) {
      const float* x = reinterpret_cast<const float*>(records + row * layout.bytes +
                                                      layout.float32.values_at);
      int count = 1;
      if (rows - row >= kRowsAtOnce) {
        count = kRowsAtOnce;
        panel_float32<kRowsAtOnce>(panel, layout.inputs, x, record_floats, lanes);
      } else {
        panel_float32<1>(panel, layout.inputs, x, record_floats, lanes);
      }
      for (int m = 0; m < count; ++m) {
        finish(lanes[m], segment, block, bias, out + (row + m) * stride);
      }
      row += count;
    }
  }
}

void dots(const float* a, const float* x, int rows, int width, float* sums) {
  for (int row = 0; row < rows; ++row, a += width) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int k = 0; k < width; ++k) sum += a[k] * x[k];
    sums[row] = sum;
  }
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
