// A step's queries, keys and values in the order that the products read.
#pragma once

#include <cstdint>
#include <cstring>

#include "levels/attention.h"
#include "levels/vectors.h"

namespace polysilicon::PS_LEVEL {
namespace {

// bf16, rounded to nearest even.
void to_bf16s(const float* x, int count, float scale, std::uint16_t* out) {
  int i = 0;
#if defined(__AVX512BF16__)
  for (; i + 32 <= count; i += 32) {
    const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(scale));
    const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(x + i + 16), _mm512_set1_ps(scale));
    _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
#endif
  for (; i < count; ++i) out[i] = to_bf16(x[i] * scale);
}

void pack_query(const float* query, float scale, int dim, int row, int padded, bool pairs,
                void* tile) {
  if (pairs) {
    constexpr int kSome = 64;
    std::uint32_t* words = static_cast<std::uint32_t*>(tile) + row;
    for (int start = 0; start < dim; start += kSome) {
      const int count = dim - start < kSome ? dim - start : kSome;
      std::uint16_t halves[kSome];
      if (count % 2 != 0) halves[count] = 0;
      to_bf16s(query + start, count, scale, halves);
      for (int d = 0; d < count; d += 2) {
        std::uint32_t pair;
        std::memcpy(&pair, halves + d, sizeof(pair));
        words[(start + d) / 2 * padded] = pair;
      }
    }
  } else {
    float* floats = static_cast<float*>(tile) + row;
    for (int d = 0; d < dim; ++d) floats[d * padded] = query[d] * scale;
  }
}

// Codes and scale of a vector, by the rule of `polysilicon.backend.KV_DTYPES`. calibrated: the scale
// to take instead, where it is not 0.
template <Storage storage>
float quantize(const float* x, int count, float calibrated, std::uint8_t* codes) {
  constexpr std::uint32_t kInfinity = 0x7f800000u;
  std::uint32_t largest = 0;
  for (int i = 0; i < count; ++i) {
    const std::uint32_t size = __builtin_bit_cast(std::uint32_t, x[i]) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  const float most = storage == Storage::kF8 ? 448.0f : 127.0f;
  float scale = __builtin_bit_cast(float, largest) / most;
  if (calibrated != 0.0f && largest < kInfinity) scale = calibrated;
  if (largest >= kInfinity || scale < 0x1p-126f) {
    std::memset(codes, 0, static_cast<std::size_t>(count));
    return largest >= kInfinity ? __builtin_nanf("") : 0.0f;
  }
  for (int i = 0; i < count; ++i) {
    const float quotient = x[i] / scale;
    if constexpr (storage == Storage::kF8) {
      codes[i] = to_f8(quotient < -most ? -most : quotient > most ? most : quotient);
    } else {
      // Adding 1.5 * 2^23 leaves the nearest whole number in the lowest bits.
      codes[i] = static_cast<std::uint8_t>(
          __builtin_bit_cast(std::uint32_t, quotient + 12582912.0f));
    }
  }
  return scale;
}

float quantize(Storage storage, const float* x, int count, float calibrated,
               std::uint8_t* codes) {
  if (storage == Storage::kF8) return quantize<Storage::kF8>(x, count, calibrated, codes);
  return quantize<Storage::kI8>(x, count, calibrated, codes);
}

void store_scale(float scale, int columns, int offset, void* unit) {
  std::memcpy(static_cast<std::uint8_t*>(unit) + scales_start(columns) + offset * sizeof(float),
              &scale, sizeof(scale));
}

void store_key(Storage storage, const float* key, int dim, float calibrated, int offset,
               void* unit) {
  switch (storage) {
    case Storage::kF32:
      for (int d = 0; d < dim; ++d) static_cast<float*>(unit)[d * kUnit + offset] = key[d];
      return;
    case Storage::kF16:
      for (int d = 0; d < dim; ++d) {
        static_cast<std::uint16_t*>(unit)[d * kUnit + offset] = to_f16(key[d]);
      }
      return;
    case Storage::kBF16: {
      std::uint32_t* pairs = static_cast<std::uint32_t*>(unit) + offset;
      int d = 0;
      for (; d + 2 <= dim; d += 2) {
        pairs[d / 2 * kUnit] = to_bf16(key[d]) | std::uint32_t{to_bf16(key[d + 1])} << 16;
      }
      if (d < dim) pairs[d / 2 * kUnit] = to_bf16(key[d]);
      return;
    }
    case Storage::kI8:
    case Storage::kF8: {
      std::uint8_t codes[kMaxDim];
      const float scale = quantize(storage, key, dim, calibrated, codes);
      std::uint8_t* column = static_cast<std::uint8_t*>(unit) + offset;
      for (int d = 0; d < dim; ++d) column[d * kUnit] = codes[d];
      store_scale(scale, dim + dim % 2, offset, unit);
      return;
    }
  }
}

void store_value(Storage storage, const float* value, int dim, int width, float calibrated,
                 int offset, void* unit) {
  switch (storage) {
    case Storage::kF32: {
      float* row = static_cast<float*>(unit) + static_cast<std::size_t>(offset) * width;
      for (int d = 0; d < dim; ++d) row[d] = value[d];
      return;
    }
    case Storage::kF16: {
      std::uint16_t* row =
          static_cast<std::uint16_t*>(unit) + static_cast<std::size_t>(offset) * width;
      for (int d = 0; d < dim; ++d) row[d] = to_f16(value[d]);
      return;
    }
    case Storage::kBF16: {
      // Half words, since another thread may be storing the pair's other slot.
      std::uint16_t* row = static_cast<std::uint16_t*>(unit) +
                           static_cast<std::size_t>(offset / 2) * width * 2 + offset % 2;
      for (int d = 0; d < dim; ++d) row[d * 2] = to_bf16(value[d]);
      return;
    }
    case Storage::kI8:
    case Storage::kF8: {
      std::uint8_t* row =
          static_cast<std::uint8_t*>(unit) + static_cast<std::size_t>(offset) * width;
      store_scale(quantize(storage, value, dim, calibrated, row), width, offset, unit);
      return;
    }
  }
}

#if defined(__AVX512BF16__)
// Whole numbers of up to 8 bits and e4m3fn are exact in bf16.
template <Storage storage>
void widen(const std::uint8_t* codes, int rows, int columns, void* pairs) {
  std::uint8_t* out = static_cast<std::uint8_t*>(pairs);
  const auto floats = [](const std::uint8_t* from) {
    if constexpr (storage == Storage::kF8) return (Words)load_f8(from);
    return (Words)load_i8(reinterpret_cast<const std::int8_t*>(from));
  };
  for (int row = 0; row < rows; row += 2) {
    const std::uint8_t* first = codes + static_cast<std::size_t>(row) * columns;
    for (int i = 0; i < columns; i += 16, out += 64) {
      const Words both = floats(first + i) >> 16 | floats(first + columns + i);
      std::memcpy(out, &both, sizeof(both));
    }
  }
}

void widen(Storage storage, const std::uint8_t* codes, int rows, int columns, void* pairs) {
  if (storage == Storage::kF8) return widen<Storage::kF8>(codes, rows, columns, pairs);
  widen<Storage::kI8>(codes, rows, columns, pairs);
}
#endif

}  // namespace
}  // namespace polysilicon::PS_LEVEL
