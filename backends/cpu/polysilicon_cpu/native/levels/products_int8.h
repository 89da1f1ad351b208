// int8 products of levels whose vectors hold less than a block's outputs: AVX2, AVX-VNNI, NEON.
//
// Codes enter the dot products as whole numbers, exactly; a group's scale multiplies the float32
// sum of its products. Sums of integers are exact and those of floats have one order (inputs
// upwards, scale, then bias), so that a row's result does not depend on the number of rows.
#pragma once

#include "levels/products_generic.h"
#include "levels/products_int8_step.h"
#ifdef PS_NEON
#include "levels/products_int8_neon.h"
#else
#include "levels/products_int8_avx2.h"
#endif

namespace polysilicon::PS_LEVEL {
namespace {

constexpr bool kInt8 = true, kBfloat16 = false;

// How far ahead of the codes that are being multiplied memory is asked for, in bytes.
constexpr int kPrefetch = 4096;

// From so many rows on, codes are unpacked once for all of them.
constexpr int kPanelRows = 5;

int bfloat16_raise(Codes, int) { return 0; }

template <class Value>
PS_INLINE Value read(const std::uint8_t* from) {
  Value value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class Value>
PS_INLINE void write(std::uint8_t* to, Value value) {
  std::memcpy(to, &value, sizeof value);
}

// ---- rounding of inputs

// The inputs of a tile, zeros behind the last.
PS_INLINE void inputs_of(const RecordLayout& layout, const float* x, const std::int32_t* order,
                         int tile, float* out) {
  const int begin = tile * kTile;
  const int count = layout.inputs - begin < kTile ? layout.inputs - begin : kTile;
  for (int k = 0; k < count; ++k) out[k] = x[order == nullptr ? begin + k : order[begin + k]];
  for (int k = count; k < kTile; ++k) out[k] = 0.0f;
}

PS_INLINE void put_sum(const RecordPart& part, int sum_at, int correction_at,
                       int units, int unit, int sum, std::uint8_t* record) {
  write(record + sum_at + unit * 4, static_cast<float>(sum));
  for (int i = 0; i < part.correction_count; ++i) {
    const auto factor = static_cast<std::int32_t>(part.corrections[i]);
    write(record + correction_at + (i * units + unit) * 4, factor * sum);
  }
}

void prepare_int8(const RecordLayout& layout, const float* x, const std::int32_t* order,
                  std::uint8_t* record) {
  constexpr int kCount = kTile / kWidth;
  const RecordPart& part = layout.int8;
  const float step = int8_step(x, layout.inputs, part.large);
  write(record + part.step_at, step);
  const Floats inverse = splat(step > 0.0f ? 1.0f / step : 0.0f);
  for (int tile = 0; tile < layout.tiles; ++tile) {
    float inputs[kTile];
    inputs_of(layout, x, order, tile, inputs);
    std::int32_t low[kTile], high[kTile];
    int sums[2] = {};
PS_UNROLL
    for (int half = 0; half < 2; ++half) {
      Ints sum{};
PS_UNROLL
      for (int i = half * kCount / 2; i < (half + 1) * kCount / 2; ++i) {
        // Adding 1.5 * 2^23 leaves the nearest whole number in the lowest bits.
        const Floats shifted = load(inputs + i * kWidth) * inverse + splat(12582912.0f);
        const Ints whole = (Ints)((Words)shifted << 16) >> 16;
        const Ints upper = (whole + 128) >> 8;
        const Ints lower = whole - (upper << 8);
        std::memcpy(high + i * kWidth, &upper, sizeof whole);
        std::memcpy(low + i * kWidth, &lower, sizeof whole);
        sum += whole;
      }
      for (int i = 0; i < kWidth; ++i) sums[half] += sum[i];
    }
    std::uint8_t* values = record + part.values_at + tile * kTile;
    std::uint8_t* high_values = record + part.high_at + tile * kTile;
    for (int k = 0; k < kTile; ++k) values[k] = static_cast<std::uint8_t>(low[k]);
    for (int k = 0; k < kTile; ++k) high_values[k] = static_cast<std::uint8_t>(high[k]);
    unsigned runs = 0;
    for (int k = 0; k < kTile; ++k) runs |= (high[k] != 0 ? 1u : 0u) << k / 4;
    record[part.high_runs_at + tile] = static_cast<std::uint8_t>(runs);
    if (part.whole) {
      put_sum(part, part.sum_at, part.correction_at, layout.tiles, tile, sums[0] + sums[1],
              record);
    }
    for (int half = 0; part.halves && half < 2; ++half) {
      put_sum(part, part.half_sum_at, part.half_correction_at, layout.tiles * 2, tile * 2 + half,
              sums[half], record);
    }
  }
}

void prepare(const RecordLayout& layout, const float* x, const std::int32_t* order,
             std::uint8_t* record) {
  if (layout.int8.used) prepare_int8(layout, x, order, record);
  if (layout.float32.used) prepare_float32(layout, x, order, record);
}

// ---- products

// Shifts of 16 bits, which bring in bits of the neighbouring byte: a mask takes them out again.
PS_INLINE Bytes shift_right(Bytes bytes, int by) {
  return (Bytes)(by >= 0 ? (Shorts)bytes >> by : (Shorts)bytes << -by);
}

// The codes of inputs 4 r .. 4 r + 3 of a vector's outputs, from planes that begin at its first.
template <int bits>
PS_INLINE Bytes codes_of(const std::uint8_t* planes, int r) {
  const auto plane = [planes](int index) { return load_as<Bytes>(planes + index * 64); };
  if constexpr (bits == 8) {
    return plane(r);
  } else {
    constexpr int kTwoAt = bits & 4 ? 4 : 0, kOneAt = bits - 1;
    constexpr std::uint8_t kTwoMask = 3 << kTwoAt, kOneMask = 1 << kOneAt;
    Bytes codes{};
    if constexpr (bits & 4) codes = shift_right(plane(r % 4), r / 4 * 4) & 15;
    if constexpr (bits & 2) {
      codes |= shift_right(plane(kTwoAt + r % 2), r / 2 * 2 - kTwoAt) & kTwoMask;
    }
    if constexpr (bits & 1) codes |= shift_right(plane(kOneAt), r - kOneAt) & kOneMask;
    return codes;
  }
}

// Where the rows' records hold what a product needs.
struct Rows {
  const std::uint8_t* values;
  const std::uint8_t* steps;
  const std::uint8_t* sums;
  const std::uint8_t* corrections;
  const std::uint8_t* high;
  const std::uint8_t* high_runs;
  std::ptrdiff_t stride;

  Rows(const Segment& segment, const RecordLayout& layout, const std::uint8_t* records) {
    const RecordPart& part = layout.int8;
    const int units = segment.halves ? 2 * layout.tiles : layout.tiles;
    values = records + part.values_at;
    steps = records + part.step_at;
    sums = records + (segment.halves ? part.half_sum_at : part.sum_at);
    corrections = records + (segment.halves ? part.half_correction_at : part.correction_at) +
                  segment.correction * units * 4;
    high = records + part.high_at;
    high_runs = records + part.high_runs_at;
    stride = layout.bytes;
  }
};

// Sums of a unit's products with some rows: `steps` steps from the `first` of the tile.
template <int bits, int stored, int steps, int rows>
PS_INLINE void sums_of(const std::uint8_t* codes, int first, const std::uint8_t* values,
                       std::ptrdiff_t stride, Ints (*out)[kVectors]) {
  Sum<bits, steps> sums[rows][kVectors];
PS_UNROLL
  for (int step = 0; step < steps; ++step) {
    const int r = first + step;
    decltype(Sum<bits, steps>::operand(Bytes{})) operands[kVectors];
PS_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      operands[v] = Sum<bits, steps>::operand(codes_of<stored>(codes + v * kVectorBytes, r));
    }
PS_UNROLL
    for (int m = 0; m < rows; ++m) {
      const Ints inputs = splat(read<std::int32_t>(values + m * stride + r * 4));
PS_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[m][v].add(step, operands[v], inputs);
    }
  }
PS_UNROLL
  for (int m = 0; m < rows; ++m) {
PS_UNROLL
    for (int v = 0; v < kVectors; ++v) out[m][v] = sums[m][v].total();
  }
}

// A block's products with some rows: lanes [rows][16]. stored: the width of a code in memory, 8
// where it was unpacked.
template <int bits, int stored, bool halves, int rows>
void block_product(const std::uint8_t* codes, const Scales& scales, const Rows& at, int tiles,
                   float (*lanes)[kLanes]) {
  constexpr int kUnits = halves ? 2 : 1, kSteps = 8 / kUnits;
  Floats totals[rows][kVectors] = {};
  for (int tile = 0; tile < tiles; ++tile, codes += stored * 64) {
    if constexpr (stored == bits) {
      for (int i = 0; i < bits; ++i) __builtin_prefetch(codes + kPrefetch + i * 64);
    }
    unsigned high = 0;
    for (int m = 0; m < rows; ++m) high |= at.high_runs[m * at.stride + tile];
PS_UNROLL
    for (int half = 0; half < kUnits; ++half) {
      const int unit = tile * kUnits + half;
      Ints sums[rows][kVectors];
      sums_of<bits, stored, kSteps, rows>(codes, half * kSteps, at.values + tile * kTile,
                                          at.stride, sums);
      if (high != 0) {
        Ints more[rows][kVectors];
        sums_of<bits, stored, kSteps, rows>(codes, half * kSteps, at.high + tile * kTile,
                                            at.stride, more);
PS_UNROLL
        for (int m = 0; m < rows; ++m) {
PS_UNROLL
          for (int v = 0; v < kVectors; ++v) sums[m][v] += more[m][v] << 8;
        }
      }
PS_UNROLL
      for (int m = 0; m < rows; ++m) {
        const std::ptrdiff_t row = m * at.stride;
        const Ints correction = splat(read<std::int32_t>(at.corrections + row + unit * 4));
PS_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          const Floats value = __builtin_convertvector(sums[m][v] + correction, Floats);
          totals[m][v] = fma(value, load(scales.scale + unit * kLanes + v * kWidth), totals[m][v]);
        }
        if (scales.bias == nullptr) continue;
        const Floats input_sum = splat(read<float>(at.sums + row + unit * 4));
PS_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          totals[m][v] = fma(load(scales.bias + unit * kLanes + v * kWidth), input_sum,
                             totals[m][v]);
        }
      }
    }
  }
PS_UNROLL
  for (int m = 0; m < rows; ++m) {
    const Floats step = splat(read<float>(at.steps + m * at.stride));
PS_UNROLL
    for (int v = 0; v < kVectors; ++v) store(lanes[m] + v * kWidth, totals[m][v] * step);
  }
}

// What a call of multiply works on.
struct Work {
  const Segment& segment;
  const std::uint8_t* data;
  const RecordLayout& layout;
  const std::uint8_t* records;
  int rows;
  float* out;
  std::ptrdiff_t stride;
  const float* bias;
  std::uint8_t* scratch;
};

template <int bits, int stored, bool halves, int rows>
int block_rows(const Work& work, const std::uint8_t* codes, const Scales& scales, int block,
               int row) {
  for (; work.rows - row >= rows; row += rows) {
    const Rows at(work.segment, work.layout, work.records + row * work.layout.bytes);
    // Rows of outputs are far apart, often in one set of the caches: they are fetched meanwhile.
    for (int m = 0; m < rows; ++m) {
      __builtin_prefetch(work.out + (row + m) * work.stride + block * kLanes, 1);
    }
    alignas(64) float lanes[rows][kLanes];
    block_product<bits, stored, halves, rows>(codes, scales, at, work.segment.tiles, lanes);
    for (int m = 0; m < rows; ++m) {
      finish(lanes[m], work.segment, block, work.bias, work.out + (row + m) * work.stride);
    }
  }
  return row;
}

template <int bits, int stored, bool halves>
void all_rows(const Work& work, const std::uint8_t* codes, const Scales& scales, int block) {
  int row = block_rows<bits, stored, halves, 4>(work, codes, scales, block, 0);
  row = block_rows<bits, stored, halves, 2>(work, codes, scales, block, row);
  block_rows<bits, stored, halves, 1>(work, codes, scales, block, row);
}

template <int bits, bool halves>
void blocks_product(const Work& work, int first, int last) {
  const Segment& segment = work.segment;
  float* scale_scratch = reinterpret_cast<float*>(work.scratch);
  std::uint8_t* panel = work.scratch + segment.tiles * 2 * kScaleBytes;
  for (int block = first; block < last; ++block) {
    const std::uint8_t* bytes = work.data + block * segment.block_bytes;
    const Scales scales = scales_of(segment, bytes, scale_scratch);
    const std::uint8_t* codes = bytes + segment.codes_at;
    if (bits < 8 && work.rows >= kPanelRows) {
      for (int tile = 0; tile < segment.tiles; ++tile) {
        code_bytes(codes + tile * segment.tile_bytes, bits, panel + tile * 8 * 64);
      }
      all_rows<least_bits(bits), 8, halves>(work, panel, scales, block);
    } else {
      all_rows<bits, bits, halves>(work, codes, scales, block);
    }
  }
}

template <int bits>
void by_halves(const Work& work, int first, int last) {
  if (work.segment.halves) {
    blocks_product<bits, true>(work, first, last);
  } else {
    blocks_product<bits, false>(work, first, last);
  }
}

void multiply_int8(const Work& work, int first, int last) {
  switch (work.segment.bits) {
    case 2: by_halves<2>(work, first, last); break;
    case 3: by_halves<3>(work, first, last); break;
    case 4: by_halves<4>(work, first, last); break;
    case 5: by_halves<5>(work, first, last); break;
    case 6: by_halves<6>(work, first, last); break;
    case 7: by_halves<7>(work, first, last); break;
    default: by_halves<8>(work, first, last); break;
  }
}

void multiply(const Segment& segment, const std::uint8_t* data, const RecordLayout& layout,
              const std::uint8_t* records, int rows, int first, int last, float* out,
              std::ptrdiff_t stride, const float* bias, std::uint8_t* scratch) {
  if (segment.product == Product::kInt8) {
    multiply_int8(Work{segment, data, layout, records, rows, out, stride, bias, scratch}, first,
                  last);
  } else {
    multiply_float32(segment, data, layout, records, rows, first, last, out, stride, bias, scratch);
  }
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
