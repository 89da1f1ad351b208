// int8 and bfloat16 products for AVX512 with VNNI and BF16.
//
// Codes enter the dot products as whole numbers, exactly; a group's scale multiplies the float32
// sum of its products. Every path adds in the same order (inputs upwards, one sum a tile or half,
// then scale, then bias), so that a row's result does not depend on the number of rows.
#pragma once

#include "levels/products_avx512_codes.h"
#include "levels/products_avx512_records.h"

namespace polysilicon::PS_LEVEL {
namespace {

constexpr bool kInt8 = true, kBfloat16 = true;

// How far ahead of the codes that are being multiplied memory is asked for, in bytes.
constexpr int kPrefetch = 8192;

// Rows from which on the codes are unpacked once for all rows.
constexpr int kPanelRows = 17;

// The most rows that are multiplied with unpacked codes at once: as many as registers hold.
constexpr int kPanelStep = 6;

// Where the rows' records hold what a product needs.
template <class Product>
struct Rows {
  const std::uint8_t* values;
  const std::uint8_t* steps;
  const std::uint8_t* sums;
  const std::uint8_t* corrections;
  const std::uint8_t* high;
  const std::uint8_t* high_runs;
  std::ptrdiff_t stride;

  Rows(const Segment& segment, const RecordLayout& layout, const std::uint8_t* records) {
    const RecordPart& part = Product::part(layout);
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

// Which runs of 4 inputs have high bytes in any of the rows: a bit each, asked tile by tile.
template <class Product, int rows>
class HighRuns {
 public:
  explicit PS_INLINE HighRuns(const Rows<Product>& at) : at_(at) {}

  PS_INLINE unsigned next(int tile) {
    if constexpr (!Product::high) return 0;
    if (tile % 8 == 0) {
      bits_ = 0;
      for (int m = 0; m < rows; ++m) {
        std::uint64_t own;
        std::memcpy(&own, at_.high_runs + m * at_.stride + tile, sizeof own);
        bits_ |= own;
      }
    }
    const unsigned runs = bits_ & 255;
    bits_ >>= 8;
    return runs;
  }

 private:
  const Rows<Product>& at_;
  std::uint64_t bits_ = 0;
};

template <class Product, int rows>
PS_INLINE void add_scaled(const Rows<Product>& at, const typename Product::Sum* sums, int unit,
                          __m512 scale, const float* bias, __m512* totals) {
  unroll<rows>([&](auto m) PS_LAMBDA {
    const __m512 value = Product::value(sums[m], at.corrections + m * at.stride + unit * 4);
    totals[m] = _mm512_fmadd_ps(value, scale, totals[m]);
  });
  if (bias == nullptr) return;
  const __m512 lanes = _mm512_loadu_ps(bias + unit * kLanes);
  unroll<rows>([&](auto m) PS_LAMBDA {
    const float sum = load_float(at.sums + m * at.stride + unit * 4);
    totals[m] = _mm512_fmadd_ps(lanes, _mm512_set1_ps(sum), totals[m]);
  });
}

// A block's products with a few rows, the codes unpacked in registers.
template <class Product, int bits, bool halves, int rows>
void direct(const std::uint8_t* codes, const Scales& scales, const Rows<Product>& at, int tiles,
            __m512* out) {
  constexpr int kValueBytes = Product::vectors * 4;
  constexpr int kTileBytes = bits * 64;
  __m512 totals[rows];
  unroll<rows>([&](auto m) PS_LAMBDA { totals[m] = _mm512_setzero_ps(); });
  HighRuns<Product, rows> high_runs(at);
  for (int tile = 0; tile < tiles; ++tile, codes += kTileBytes) {
    __m512i planes[bits];
    unroll<bits>([&](auto i) PS_LAMBDA {
      _mm_prefetch(reinterpret_cast<const char*>(codes) + kPrefetch + i * 64, _MM_HINT_T0);
      planes[i] = load(codes + i * 64);
    });
    const unsigned high = high_runs.next(tile);
    constexpr int kUnits = halves ? 2 : 1;
    unroll<kUnits>([&](auto part) PS_LAMBDA {
      const int unit = tile * kUnits + part;
      typename Product::Sum sums[rows];
      const auto add = [&](auto r, __m512i vector, const std::uint8_t* values) PS_LAMBDA {
        unroll<rows>([&](auto m) PS_LAMBDA {
          sums[m] = Product::step(sums[m], vector, values + m * at.stride + r * 4);
        });
      };
      unroll<rows>([&](auto m) PS_LAMBDA { sums[m] = typename Product::Sum{}; });
      if constexpr (Product::high) {
        if (const unsigned own = halves ? high >> part * 4 & 15 : high) {
          unroll<8 / kUnits>([&](auto index) PS_LAMBDA {
            if (own >> index & 1) {
              constexpr int r = part * (8 / kUnits) + index;
              add(std::integral_constant<int, r>{}, codes_of<bits, r>(planes),
                  at.high + tile * kValueBytes);
            }
          });
          unroll<rows>([&](auto m) PS_LAMBDA { sums[m] = _mm512_slli_epi32(sums[m], 8); });
        }
      }
      unroll<2 / kUnits>([&](auto index) PS_LAMBDA {
        constexpr int half = part + index;
        half_vectors<Product, bits, half>(planes, [&](auto r, __m512i vector) PS_LAMBDA {
          add(r, vector, at.values + tile * kValueBytes);
        });
      });
      const __m512 scale = _mm512_loadu_ps(scales.scale + unit * kLanes);
      add_scaled<Product, rows>(at, sums, unit, scale, scales.bias, totals);
    });
  }
  unroll<rows>([&](auto m) PS_LAMBDA {
    out[m] = Product::finish(totals[m], at.steps + m * at.stride);
  });
}

// Memory to ask for while something else is multiplied: `lines` cache lines a tile.
struct Prefetch {
  const std::uint8_t* from;
  int lines;

  PS_INLINE void tile() {
    for (int i = 0; i < lines; ++i, from += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T1);
    }
  }
};

// Products of one or two blocks' unpacked vectors [tiles, blocks, vectors] with some rows.
template <class Product, bool halves, int blocks, int rows>
void panel_product(const __m512i* panel, const Scales* scales, const Rows<Product>& at, int tiles,
                   Prefetch prefetch, __m512 (*out)[2]) {
  constexpr int kValueBytes = Product::vectors * 4;
  __m512 totals[blocks][rows];
  unroll<blocks * rows>([&](auto i) PS_LAMBDA {
    totals[i / rows][i % rows] = _mm512_setzero_ps();
  });
  HighRuns<Product, rows> high_runs(at);
  for (int tile = 0; tile < tiles; ++tile, panel += blocks * Product::vectors) {
    prefetch.tile();
    const unsigned high = high_runs.next(tile);
    constexpr int kUnits = halves ? 2 : 1;
    constexpr int kSteps = Product::vectors / kUnits;
    unroll<kUnits>([&](auto half) PS_LAMBDA {
      const int unit = tile * kUnits + half;
      typename Product::Sum sums[blocks][rows];
      unroll<blocks * rows>([&](auto i) PS_LAMBDA { sums[i / rows][i % rows] = typename Product::Sum{}; });
      const auto add = [&](int index, const std::uint8_t* values) PS_LAMBDA {
        __m512i vectors[blocks];
        unroll<blocks>([&](auto b) PS_LAMBDA {
          vectors[b] = load(panel + b * Product::vectors + index);
        });
        unroll<rows>([&](auto m) PS_LAMBDA {
          const std::uint8_t* value = values + m * at.stride + index * 4;
          unroll<blocks>([&](auto b) PS_LAMBDA {
            sums[b][m] = Product::step(sums[b][m], vectors[b], value);
          });
        });
      };
      if constexpr (Product::high) {
        if (unsigned own = halves ? high >> half * 4 & 15 : high) {
          for (; own != 0; own &= own - 1) {
            add(half * kSteps + __builtin_ctz(own), at.high + tile * kValueBytes);
          }
          unroll<blocks * rows>([&](auto i) PS_LAMBDA {
            sums[i / rows][i % rows] = _mm512_slli_epi32(sums[i / rows][i % rows], 8);
          });
        }
      }
      unroll<kSteps>([&](auto step) PS_LAMBDA {
        add(half * kSteps + step, at.values + tile * kValueBytes);
      });
      unroll<blocks>([&](auto b) PS_LAMBDA {
        const __m512 scale = _mm512_loadu_ps(scales[b].scale + unit * kLanes);
        add_scaled<Product, rows>(at, sums[b], unit, scale, scales[b].bias, totals[b]);
      });
    });
  }
  unroll<blocks * rows>([&](auto i) PS_LAMBDA {
    constexpr int b = i / rows, m = i % rows;
    out[m][b] = Product::finish(totals[b][m], at.steps + m * at.stride);
  });
}

PS_INLINE void finish(__m512 lanes, const Segment& segment, int block, const float* bias,
                      float* out) {
  const int begin = block * kLanes;
  const int count = segment.rows - begin < kLanes ? segment.rows - begin : kLanes;
  const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
  if (bias != nullptr) lanes = _mm512_add_ps(lanes, _mm512_maskz_loadu_ps(mask, bias + begin));
  _mm512_mask_storeu_ps(out + begin, mask, lanes);
}

// What a call of multiply works on.
template <class Product>
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

  float* scale_scratch(int block) const {
    return reinterpret_cast<float*>(scratch + block * segment.tiles * 2 * kScaleBytes);
  }
};

template <class Product, int bits, bool halves, int rows>
int direct_rows(const Work<Product>& work, const std::uint8_t* codes, const Scales& scales,
                int block, int row) {
  for (; work.rows - row >= rows; row += rows) {
    const Rows<Product> at(work.segment, work.layout, work.records + row * work.layout.bytes);
    __m512 lanes[rows];
    direct<Product, bits, halves, rows>(codes, scales, at, work.segment.tiles, lanes);
    for (int m = 0; m < rows; ++m) {
      finish(lanes[m], work.segment, block, work.bias, work.out + (row + m) * work.stride);
    }
  }
  return row;
}

template <class Product, int bits, bool halves>
void direct_blocks(const Work<Product>& work, int first, int last) {
  for (int block = first; block < last; ++block) {
    const std::uint8_t* bytes = work.data + block * work.segment.block_bytes;
    const Scales scales = scales_of(work.segment, bytes, work.scale_scratch(0));
    const std::uint8_t* codes = bytes + work.segment.codes_at;
    int row = direct_rows<Product, bits, halves, 8>(work, codes, scales, block, 0);
    row = direct_rows<Product, bits, halves, 4>(work, codes, scales, block, row);
    row = direct_rows<Product, bits, halves, 2>(work, codes, scales, block, row);
    direct_rows<Product, bits, halves, 1>(work, codes, scales, block, row);
  }
}

template <class Product, bool halves, int blocks, int rows>
void panel_rows(const Work<Product>& work, const __m512i* panel, const Scales* scales, int block,
                int row, Prefetch prefetch) {
  const Rows<Product> at(work.segment, work.layout, work.records + row * work.layout.bytes);
  // Rows of outputs are far apart, often in one set of the caches: they are fetched meanwhile.
  for (int m = 0; m < rows; ++m) {
    const float* out = work.out + (row + m) * work.stride + block * kLanes;
    for (int b = 0; b < blocks; ++b) __builtin_prefetch(out + b * kLanes, 1);
  }
  __m512 lanes[rows][2];
  panel_product<Product, halves, blocks, rows>(panel, scales, at, work.segment.tiles, prefetch,
                                               lanes);
  for (int m = 0; m < rows; ++m) {
    for (int b = 0; b < blocks; ++b) {
      finish(lanes[m][b], work.segment, block + b, work.bias, work.out + (row + m) * work.stride);
    }
  }
}

template <class Product, int bits, bool halves, int blocks>
void panel_step(const Work<Product>& work, int block) {
  const Segment& segment = work.segment;
  __m512i* panel = reinterpret_cast<__m512i*>(work.scale_scratch(2));
  Scales scales[blocks];
  for (int b = 0; b < blocks; ++b) {
    const std::uint8_t* bytes = work.data + (block + b) * segment.block_bytes;
    scales[b] = scales_of(segment, bytes, work.scale_scratch(b));
    unpack_block<Product, bits>(segment, bytes + segment.codes_at, blocks * Product::vectors,
                                panel + b * Product::vectors);
  }
  // Rows in about equal numbers, so that no short rest waits for the latency of its sums.
  const int steps = (work.rows + kPanelStep - 1) / kPanelStep;
  // What is unpacked next comes in meanwhile.
  const int lines = static_cast<int>(blocks * segment.block_bytes / 64);
  const int iterations = segment.tiles * steps;
  Prefetch next{work.data + (block + blocks) * segment.block_bytes,
                (lines + iterations - 1) / iterations};
  for (int step = 0; step < steps; ++step) {
    const int row = work.rows * step / steps;
    const int count = work.rows * (step + 1) / steps - row;
    const auto multiply = [&](auto rows) PS_LAMBDA {
      panel_rows<Product, halves, blocks, rows>(work, panel, scales, block, row, next);
    };
    switch (count) {
      case 6: multiply(std::integral_constant<int, 6>{}); break;
      case 5: multiply(std::integral_constant<int, 5>{}); break;
      case 4: multiply(std::integral_constant<int, 4>{}); break;
      case 3: multiply(std::integral_constant<int, 3>{}); break;
      case 2: multiply(std::integral_constant<int, 2>{}); break;
      default: multiply(std::integral_constant<int, 1>{}); break;
    }
    next.from += next.lines * segment.tiles * 64;
  }
}

template <class Product, int bits, bool halves>
void blocks_product(const Work<Product>& work, int first, int last) {
  if constexpr (bits > 0) {
    if (work.rows < kPanelRows) {
      direct_blocks<Product, bits, halves>(work, first, last);
      return;
    }
  }
  int block = first;
  for (; block + 2 <= last; block += 2) panel_step<Product, bits, halves, 2>(work, block);
  if (block < last) panel_step<Product, bits, halves, 1>(work, block);
}

template <class Product, int bits>
void by_halves(const Work<Product>& work, int first, int last) {
  if (work.segment.halves) {
    blocks_product<Product, bits, true>(work, first, last);
  } else {
    blocks_product<Product, bits, false>(work, first, last);
  }
}

template <class Product>
void by_codes(const Work<Product>& work, int first, int last) {
  if (work.segment.codes != Codes::kAffine) {
    if constexpr (Product::vectors == 16) by_halves<Product, 0>(work, first, last);
    return;
  }
  switch (work.segment.bits) {
    case 2: by_halves<Product, 2>(work, first, last); break;
    case 3: by_halves<Product, 3>(work, first, last); break;
    case 4: by_halves<Product, 4>(work, first, last); break;
    case 5: by_halves<Product, 5>(work, first, last); break;
    case 6: by_halves<Product, 6>(work, first, last); break;
    case 7: by_halves<Product, 7>(work, first, last); break;
    default: by_halves<Product, 8>(work, first, last); break;
  }
}

void multiply(const Segment& segment, const std::uint8_t* data, const RecordLayout& layout,
              const std::uint8_t* records, int rows, int first, int last, float* out,
              std::ptrdiff_t stride, const float* bias, std::uint8_t* scratch) {
  if (segment.product == Product::kInt8) {
    by_codes(Work<Int8Product>{segment, data, layout, records, rows, out, stride, bias, scratch},
             first, last);
  } else if (segment.product == Product::kBfloat16) {
    by_codes(
        Work<Bfloat16Product>{segment, data, layout, records, rows, out, stride, bias, scratch},
        first, last);
  } else {
    multiply_float32(segment, data, layout, records, rows, first, last, out, stride, bias, scratch);
  }
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
