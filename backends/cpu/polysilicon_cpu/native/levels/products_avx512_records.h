// Rounding of activations: the records that int8 and bfloat16 products read.
#pragma once

#include "levels/products_avx512_codes.h"
#include "levels/products_int8_step.h"

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

PS_INLINE void put_tile_int8(const RecordLayout& layout, int tile, const Inputs& inputs,
                             __m512 inverse_step, std::uint8_t* record) {
  const RecordPart& part = layout.int8;
  // The low byte is what is left of a whole number; with it, the high byte is the nearest.
  const auto high_of = [](__m512i whole) PS_LAMBDA {
    return _mm512_cvtsepi32_epi8(
        _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8));
  };
  const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(inputs.low, inverse_step));
  const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(inputs.high, inverse_step));
  const __m256i high = _mm256_set_m128i(high_of(second), high_of(first));
  const __m256i values =
      _mm256_set_m128i(_mm512_cvtepi32_epi8(second), _mm512_cvtepi32_epi8(first));
  const auto put = [record, tile](int at, __m256i bytes) PS_LAMBDA {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(record + at + tile * kTile), bytes);
  };
  put(part.values_at, values);
  put(part.high_at, high);
  record[part.high_runs_at + tile] = _mm256_test_epi32_mask(high, high);
}

// Sums of the whole numbers of each half of up to 8 tiles: of half h of tile t in lane 2 t + h.
PS_INLINE __m512i half_sums(const std::uint8_t* values, const std::uint8_t* high, int tiles) {
  const __m512i ones = _mm512_set1_epi8(1), zero = _mm512_setzero_si512();
  // Of each 4 inputs of two tiles.
  const auto fours = [&](int pair) PS_LAMBDA {
    const int bytes = (tiles - 2 * pair) * kTile;
    const __mmask64 mask = bytes >= 64 ? ~__mmask64{0} : bytes > 0 ? 0xffffffff : 0;
    const __m512i low = _mm512_maskz_loadu_epi8(mask, values + pair * 64);
    const __m512i upper = _mm512_maskz_loadu_epi8(mask, high + pair * 64);
    return _mm512_add_epi32(_mm512_dpbusd_epi32(zero, ones, low),
                            _mm512_slli_epi32(_mm512_dpbusd_epi32(zero, ones, upper), 8));
  };
  const auto twos = [&](int pair) PS_LAMBDA {
    const __m512i a = fours(pair), b = fours(pair + 1);
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  const __m512i first = twos(0), second = twos(2);
  // In 128 bits, one half of each of four tiles.
  const __m512i sums = _mm512_add_epi32(_mm512_unpacklo_epi64(first, second),
                                        _mm512_unpackhi_epi64(first, second));
  alignas(64) static constexpr std::int32_t kOrder[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                          2, 6, 10, 14, 3, 7, 11, 15};
  return _mm512_permutexvar_epi32(load(kOrder), sums);
}

// Sums of all tiles, and their products with the corrections, behind the values.
PS_INLINE void put_sums_int8(const RecordLayout& layout, std::uint8_t* record) {
  const RecordPart& part = layout.int8;
  const auto put = [&](int sum_at, int correction_at, int units, int unit, int most,
                       __m512i sums) PS_LAMBDA {
    const int count = units - unit < most ? units - unit : most;
    const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
    _mm512_mask_storeu_ps(record + sum_at + unit * 4, mask, _mm512_cvtepi32_ps(sums));
    for (int i = 0; i < part.correction_count; ++i) {
      const __m512i factor = _mm512_set1_epi32(static_cast<int>(part.corrections[i]));
      _mm512_mask_storeu_epi32(record + correction_at + (i * units + unit) * 4, mask,
                               _mm512_mullo_epi32(sums, factor));
    }
  };
  for (int tile = 0; tile < layout.tiles; tile += 8) {
    const __m512i halves = half_sums(record + part.values_at + tile * kTile,
                                     record + part.high_at + tile * kTile, layout.tiles - tile);
    if (part.halves) {
      put(part.half_sum_at, part.half_correction_at, layout.tiles * 2, tile * 2, 16, halves);
    }
    if (part.whole) {
      const __m512i both = _mm512_add_epi32(halves, _mm512_srli_epi64(halves, 32));
      put(part.sum_at, part.correction_at, layout.tiles, tile, 8,
          _mm512_castsi256_si512(_mm512_cvtepi64_epi32(both)));
    }
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

void prepare(const RecordLayout& layout, const float* x, const std::int32_t* order,
             std::uint8_t* record) {
  const RecordPart& int8 = layout.int8;
  if (int8.used || layout.bfloat16.used) {
    __m512 inverse_step{};
    if (int8.used) {
      const float step = int8_step(x, layout.inputs, int8.large);
      put_float(record + int8.step_at, step);
      inverse_step = _mm512_set1_ps(step > 0.0f ? 1.0f / step : 0.0f);
    }
    for (int tile = 0; tile < layout.tiles; ++tile) {
      const Inputs inputs = inputs_of(layout, x, order, tile);
      if (int8.used) put_tile_int8(layout, tile, inputs, inverse_step, record);
      if (layout.bfloat16.used) put_tile_bfloat16(layout, tile, inputs, record);
    }
    if (int8.used) put_sums_int8(layout, record);
  }
  if (layout.float32.used) prepare_float32(layout, x, order, record);
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
