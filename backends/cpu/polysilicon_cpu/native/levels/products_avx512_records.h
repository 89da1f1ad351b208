// Rounding of activations: the records that int8 and bfloat16 products read.
#pragma once

#include "levels/products_avx512_codes.h"

namespace polysilicon::PS_LEVEL {
namespace {

PS_INLINE void put_float(std::uint8_t* at, float value) { std::memcpy(at, &value, sizeof value); }
PS_INLINE void put_int(std::uint8_t* at, int value) { std::memcpy(at, &value, sizeof value); }

// The 32 inputs of a tile.
struct Inputs {
  __m512 low, high;
};

PS_INLINE Inputs inputs_of(const RecordLayout& layout, const float* x, const std::int32_t* order,
                           int tile) {
  const int begin = tile * kTile;
  const int count = layout.inputs - begin < kTile ? layout.inputs - begin : kTile;
  const __mmask32 mask = static_cast<__mmask32>(count == kTile ? ~0u : (1u << count) - 1);
  const __mmask16 low = static_cast<__mmask16>(mask), high = static_cast<__mmask16>(mask >> 16);
  if (order == nullptr) {
    return {_mm512_maskz_loadu_ps(low, x + begin), _mm512_maskz_loadu_ps(high, x + begin + 16)};
  }
  const __m512i first = _mm512_maskz_loadu_epi32(low, order + begin);
  const __m512i second = _mm512_maskz_loadu_epi32(high, order + begin + 16);
  const __m512 zero = _mm512_setzero_ps();
  return {_mm512_mask_i32gather_ps(zero, low, first, x, 4),
          _mm512_mask_i32gather_ps(zero, high, second, x, 4)};
}

// Sums of each 16 of 64 signed bytes.
struct ByteSums {
  alignas(64) std::int32_t lanes[16];

  explicit PS_INLINE ByteSums(__m512i bytes) {
    __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
    sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
    sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_CDAB));
    _mm512_store_si512(lanes, sums);
  }
  PS_INLINE int operator[](int run) const { return lanes[run * 4]; }
};

PS_INLINE void put_tile_int8(const RecordLayout& layout, int tile, const Inputs& inputs,
                             __m512 inverse_step, std::uint8_t* record) {
  const RecordPart& part = layout.int8;
  const auto bytes_of = [](__m512i low, __m512i high) PS_LAMBDA {
    return _mm256_set_m128i(_mm512_cvtsepi32_epi8(high), _mm512_cvtsepi32_epi8(low));
  };
  const auto high_of = [](__m512i whole) PS_LAMBDA {
    return _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
  };
  const auto low_of = [](__m512i whole, __m512i high) PS_LAMBDA {
    return _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
  };
  const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(inputs.low, inverse_step));
  const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(inputs.high, inverse_step));
  const __m512i first_high = high_of(first), second_high = high_of(second);
  const __m256i high = bytes_of(first_high, second_high);
  const __m256i values = bytes_of(low_of(first, first_high), low_of(second, second_high));
  const auto put = [record, tile](int at, __m256i bytes) PS_LAMBDA {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(record + at + tile * kTile), bytes);
  };
  put(part.values_at, values);
  put(part.high_at, high);
  record[part.high_runs_at + tile] = _mm256_test_epi32_mask(high, high);
  const ByteSums sums(_mm512_inserti64x4(_mm512_castsi256_si512(values), high, 1));
  const auto put_sum = [&](int sum_at, int correction_at, int units, int unit,
                           int sum) PS_LAMBDA {
    put_float(record + sum_at + unit * 4, static_cast<float>(sum));
    for (int i = 0; i < part.correction_count; ++i) {
      const int factor = static_cast<int>(part.corrections[i]);
      put_int(record + correction_at + (i * units + unit) * 4, factor * sum);
    }
  };
  if (part.whole) {
    put_sum(part.sum_at, part.correction_at, layout.tiles, tile,
            sums[0] + sums[1] + 256 * (sums[2] + sums[3]));
  }
  for (int half = 0; part.halves && half < 2; ++half) {
    put_sum(part.half_sum_at, part.half_correction_at, layout.tiles * 2, tile * 2 + half,
            sums[half] + 256 * sums[2 + half]);
  }
}

PS_INLINE void put_tile_bfloat16(const RecordLayout& layout, int tile, const Inputs& inputs,
                                 std::uint8_t* record) {
  const RecordPart& part = layout.bfloat16;
  const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(inputs.high, inputs.low);
  _mm512_storeu_si512(record + part.values_at + tile * kTile * 2, rounded);
  const auto sum_of = [](__m256i half) PS_LAMBDA {
    const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
    return _mm512_reduce_add_ps(_mm512_castsi512_ps(wide));
  };
  const float first = sum_of(_mm512_castsi512_si256(rounded));
  const float second = sum_of(_mm512_extracti64x4_epi64(rounded, 1));
  const auto put_sum = [&](int sum_at, int correction_at, int units, int unit,
                           float sum) PS_LAMBDA {
    put_float(record + sum_at + unit * 4, sum);
    for (int i = 0; i < part.correction_count; ++i) {
      put_float(record + correction_at + (i * units + unit) * 4, part.corrections[i] * sum);
    }
  };
  if (part.whole) put_sum(part.sum_at, part.correction_at, layout.tiles, tile, first + second);
  if (part.halves) {
    put_sum(part.half_sum_at, part.half_correction_at, layout.tiles * 2, tile * 2, first);
    put_sum(part.half_sum_at, part.half_correction_at, layout.tiles * 2, tile * 2 + 1, second);
  }
}

Sizes sizes_of(const float* x, int count, float most) {
  __m512 sum = _mm512_setzero_ps(), largest = _mm512_setzero_ps();
  for (int k = 0; k < count; k += 16) {
    const int rest = count - k;
    const __mmask16 mask = static_cast<__mmask16>(rest < 16 ? (1u << rest) - 1 : 0xffff);
    const __m512 size = _mm512_abs_ps(_mm512_maskz_loadu_ps(mask, x + k));
    largest = _mm512_max_ps(largest, size);
    sum = _mm512_add_ps(sum, _mm512_min_ps(_mm512_set1_ps(most), size));
  }
  return {_mm512_reduce_add_ps(sum) / static_cast<float>(count), _mm512_reduce_max_ps(largest)};
}

void prepare(const RecordLayout& layout, const float* x, const std::int32_t* order,
             std::uint8_t* record) {
  const RecordPart& int8 = layout.int8;
  if (int8.used || layout.bfloat16.used) {
    __m512 inverse_step{};
    if (int8.used) {
      const float step = int8_step(x, layout.inputs, int8.large, sizes_of);
      put_float(record + int8.step_at, step);
      inverse_step = _mm512_set1_ps(step > 0.0f ? 1.0f / step : 0.0f);
    }
    for (int tile = 0; tile < layout.tiles; ++tile) {
      const Inputs inputs = inputs_of(layout, x, order, tile);
      if (int8.used) put_tile_int8(layout, tile, inputs, inverse_step, record);
      if (layout.bfloat16.used) put_tile_bfloat16(layout, tile, inputs, record);
    }
  }
  if (layout.float32.used) prepare_float32(layout, x, order, record);
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
