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

PS_INLINE void put_tile_int8(const RecordLayout& layout, int tile, const Inputs& inputs,
                             std::uint8_t* record) {
  const RecordPart& part = layout.int8;
  const float largest = _mm512_reduce_max_ps(
      _mm512_max_ps(_mm512_abs_ps(inputs.low), _mm512_abs_ps(inputs.high)));
  // Below this the inverse overflows; such inputs count as 0.
  const bool visible = largest > 1e-30f;
  const float scale = visible ? largest / 127.0f : 0.0f;
  const __m512 inverse = _mm512_set1_ps(visible ? 127.0f / largest : 0.0f);
  const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(inputs.low, inverse));
  const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(inputs.high, inverse));
  std::uint8_t* values = record + part.values_at + tile * kTile;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(values), _mm512_cvtsepi32_epi8(low));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(values + 16), _mm512_cvtsepi32_epi8(high));
  const int first = _mm512_reduce_add_epi32(low), second = _mm512_reduce_add_epi32(high);
  put_float(record + part.scale_at + tile * 4, scale);
  const auto put_sum = [&](int sum_at, int correction_at, int units, int unit, int sum) PS_LAMBDA {
    put_float(record + sum_at + unit * 4, scale * static_cast<float>(sum));
    for (int i = 0; i < part.correction_count; ++i) {
      put_int(record + correction_at + (i * units + unit) * 4,
              static_cast<int>(part.corrections[i]) * sum);
    }
  };
  if (part.whole) put_sum(part.sum_at, part.correction_at, layout.tiles, tile, first + second);
  if (part.halves) {
    put_sum(part.half_sum_at, part.half_correction_at, layout.tiles * 2, tile * 2, first);
    put_sum(part.half_sum_at, part.half_correction_at, layout.tiles * 2, tile * 2 + 1, second);
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
  if (layout.int8.used || layout.bfloat16.used) {
    for (int tile = 0; tile < layout.tiles; ++tile) {
      const Inputs inputs = inputs_of(layout, x, order, tile);
      if (layout.int8.used) put_tile_int8(layout, tile, inputs, record);
      if (layout.bfloat16.used) put_tile_bfloat16(layout, tile, inputs, record);
    }
  }
  if (layout.float32.used) prepare_float32(layout, x, order, record);
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
