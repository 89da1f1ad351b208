// Functions of one float that compilers vectorise in loops. Only for files in levels/.
#pragma once

#include <cstdint>

namespace polysilicon::PS_LEVEL {
namespace {

// e^x, within 2 units in the last place; x is taken as at least -87 and at most 88.
[[maybe_unused]] inline float exp_of(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  // Adding 1.5 * 2^23 leaves the nearest whole number in the lowest bits.
  const float shifted = x * 1.44269504088896341f + 12582912.0f;
  const float whole = shifted - 12582912.0f;
  float r = x - whole * 0.693359375f;
  r = r - whole * -2.12194440e-4f;
  // Minimax polynomial of Cephes' expf.
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const std::int32_t power = (__builtin_bit_cast(std::int32_t, shifted) << 23) + 0x3f800000;
  return p * __builtin_bit_cast(float, power);
}

[[maybe_unused]] inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

// tanh, within 3 units in the last place (Cephes' tanhf: a polynomial near 0, else by e^x).
[[maybe_unused]] inline float tanh_of(float x) {
  const float size = x < 0.0f ? -x : x;
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float near = p * z * x + x;
  const float far = 1.0f - 2.0f / (exp_of(2.0f * size) + 1.0f);
  const float outside = x < 0.0f ? -far : far;
  return size < 0.625f ? near : outside;
}

// The error function, within 2e-7 (Abramowitz and Stegun 7.1.26).
[[maybe_unused]] inline float erf_of(float x) {
  const float size = x < 0.0f ? -x : x;
  const float t = 1.0f / (1.0f + 0.3275911f * size);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float value = 1.0f - p * t * exp_of(-size * size);
  return x < 0.0f ? -value : value;
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
