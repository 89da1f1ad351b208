// Vectors of floats as wide as a level's registers, through the compilers' vector extension. Only
// for files in levels/. Products that are added use `fma` by name, so that no compiler's choice of
// contraction lets two copies of a loop round differently.
#pragma once

#include "levels/loops.h"

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && !defined(PS_PORTABLE)
#define PS_NEON
#include <arm_neon.h>
#endif

namespace polysilicon::PS_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef std::int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef std::uint32_t Words __attribute__((vector_size(kWidth * 4)));

template <class Vector>
[[maybe_unused]] inline Vector load_as(const void* from) {
  Vector x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

[[maybe_unused]] inline Floats load(const float* from) { return load_as<Floats>(from); }

[[maybe_unused]] inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }

[[maybe_unused]] inline Floats splat(float x) { return x - Floats{}; }

[[maybe_unused]] inline Ints splat(std::int32_t x) { return x - Ints{}; }

[[maybe_unused]] inline Words splat(std::uint32_t x) { return x - Words{}; }

[[maybe_unused]] inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(PS_NEON)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The larger of each pair; b where a is NaN.
[[maybe_unused]] inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

[[maybe_unused]] inline float sum_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
#endif
}

[[maybe_unused]] inline float largest_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  }
  return x[0];
#endif
}

// 2^x for x up to 127, within 2 units in the last place; 0 below -126.
[[maybe_unused]] inline Floats exp2_of(Floats x) {
  // Minimax over [-0.5, 0.5]: a relative error of 2e-9.
  const auto polynomial = [](Floats r) {
    Floats p = splat(0.0001535336144f);
    p = fma(p, r, splat(0.001339887457f));
    p = fma(p, r, splat(0.009618437361f));
    p = fma(p, r, splat(0.05550332471f));
    p = fma(p, r, splat(0.2402264791f));
    p = fma(p, r, splat(0.6931472029f));
    return fma(p, r, splat(1.0f));
  };
#if defined(__AVX512F__)
  x = larger(x, splat(-200.0f));  // 2^-200 is rounded to 0
  const Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  return (Floats)_mm512_scalef_ps((__m512)polynomial(x - whole), (__m512)whole);
#else
  const Ints gone = x < splat(-126.0f);
  x = larger(x, splat(-126.0f));
  // Adding 1.5 * 2^23 leaves the nearest whole number in the lowest bits.
  const Floats shifted = x + splat(12582912.0f);
  const Ints power = ((Ints)shifted << 23) + splat(0x3f800000);
  const Floats value = polynomial(x - (shifted - splat(12582912.0f))) * (Floats)power;
  return (Floats)((Ints)value & ~gone);
#endif
}

// 2^x for x up to 127, within 1 part in 10,000: for what is rounded to bf16.
#if defined(__AVX512F__)
[[maybe_unused]] inline Floats coarse_exp2_of(Floats x) {
  x = larger(x, splat(-200.0f));
  const Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  const Floats r = x - whole;
  // Minimax over [-0.5, 0.5].
  Floats p = fma(splat(0.05517141776f), r, splat(0.2426111704f));
  p = fma(p, r, splat(0.6932610559f));
  p = fma(p, r, splat(0.9999280729f));
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)whole);
}
#endif

// 1 / (1 + e^-x), within 1e-7 (1 + |x|) of itself.
[[maybe_unused]] inline Floats sigmoid_of(Floats x) {
  const Floats power = x * splat(-1.44269504088896341f);
  const Floats sum = splat(1.0f) + exp2_of(power < splat(126.0f) ? power : splat(126.0f));
#if defined(__AVX512F__)
  const Floats inverse = (Floats)_mm512_rcp14_ps((__m512)sum);
  return fma(inverse, fma(-sum, inverse, splat(1.0f)), inverse);
#else
  return splat(1.0f) / sum;
#endif
}

// bf16 halves of 32-bit words as floats.
[[maybe_unused]] inline Floats low_bf16(Words pairs) { return (Floats)(pairs << 16); }

[[maybe_unused]] inline Floats high_bf16(Words pairs) {
  return (Floats)(pairs & splat(0xffff0000u));
}

[[maybe_unused]] inline Floats load_f16(const std::uint16_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(PS_NEON)
  return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
  Words bits;
  for (int i = 0; i < kWidth; ++i) bits[i] = from[i];
  const Words magnitude = (bits & splat(0x7fffu)) << 13;
  // The product puts the exponent right and subnormal values too.
  const Floats scaled = (Floats)magnitude * splat(0x1p112f);
  const Words special = (Words)((Ints)magnitude >= splat(0x0f800000));  // infinities, NaN
  return (Floats)((Words)scaled | (special & splat(0x7f800000u)) | (bits & splat(0x8000u)) << 16);
#endif
}

[[maybe_unused]] inline Floats load_i8(const std::int8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  Floats x;
  for (int i = 0; i < kWidth; ++i) x[i] = from[i];
  return x;
#endif
}

[[maybe_unused]] inline Ints load_u8(const std::uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  Ints x;
  for (int i = 0; i < kWidth; ++i) x[i] = from[i];
  return x;
#endif
}

// e4m3fn; its NaN, which is never stored, is read as 480.
[[maybe_unused]] inline Floats load_f8(const std::uint8_t* from) {
  const Words codes = (Words)load_u8(from);
  // The product puts the exponent right and subnormal values too.
  const Floats sizes = (Floats)((codes & 0x7f) << 20) * splat(0x1p120f);
  return (Floats)((Words)sizes | (codes & 0x80) << 24);
}

[[maybe_unused]] inline Floats load_bf16(const std::uint16_t* from) {
#if defined(__AVX512F__)
  const Words bits = (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  const Words bits = (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  Words bits;
  for (int i = 0; i < kWidth; ++i) bits[i] = from[i];
#endif
  return (Floats)(bits << 16);
}

[[maybe_unused]] inline std::uint16_t to_bf16(float x) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// e4m3fn of a number of up to 448, rounded to nearest even.
[[maybe_unused]] inline std::uint8_t to_f8(float x) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t size = bits & 0x7fffffff;
  std::uint32_t code;
  if (size < 0x3c800000) {  // below 2^-6: adding 1.5 * 2^14 leaves the multiple of 2^-9 below
    code = __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, size) + 24576.0f) & 0xf;
  } else {
    code = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - ((127 - 7) << 3);
  }
  return static_cast<std::uint8_t>(bits >> 24 & 0x80) | static_cast<std::uint8_t>(code);
}

[[maybe_unused]] inline std::uint16_t to_f16(float x) {
#if defined(__F16C__)
  return static_cast<std::uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t sign = bits >> 16 & 0x8000;
  const std::uint32_t size = bits & 0x7fffffff;
  if (size > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00 | (size >> 13 & 0x3ff));
  if (size >= 0x477ff000) return static_cast<std::uint16_t>(sign | 0x7c00);  // rounds to infinity
  if (size < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 below
    const float shifted = __builtin_bit_cast(float, size) + 0.5f;
    return static_cast<std::uint16_t>(sign | (__builtin_bit_cast(std::uint32_t, shifted) -
                                              0x3f000000));
  }
  const std::uint32_t rounded = size + 0xfff + (size >> 13 & 1);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000) >> 13));
#endif
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
