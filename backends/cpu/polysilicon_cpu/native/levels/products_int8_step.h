// The step of a row's integer inputs.
#pragma once

#include <cmath>

#include "levels/vectors.h"

namespace polysilicon::PS_LEVEL {
namespace {

// of(sizes) added up over the sizes of a row's inputs; of(0) is 0.
template <class Of>
inline float sum_over_sizes(const float* x, int count, const Of& of) {
  constexpr int kChains = 4;
  const auto size_of = [](Floats value) { return (Floats)((Words)value & splat(0x7fffffffu)); };
  Floats sums[kChains] = {};
  int k = 0;
  for (; k + kChains * kWidth <= count; k += kChains * kWidth) {
PS_UNROLL
    for (int i = 0; i < kChains; ++i) sums[i] += of(size_of(load(x + k + i * kWidth)));
  }
  for (; k < count; k += kWidth) {
    float rest[kWidth] = {};
    std::memcpy(rest, x + k, sizeof(float) * (count - k < kWidth ? count - k : kWidth));
    sums[0] += of(size_of(load(rest)));
  }
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// A row's step: by its largest input, or by `large` times their root mean square where that is
// smaller, but such that the largest fits into 16 bits. In that mean an input counts as at most 16
// times their usual size (the mean of sizes up to 4 times the mean), so that a few huge ones do not
// hide the others. 0 where inputs are so small that its inverse overflows.
inline float int8_step(const float* x, int count, float large) {
  Floats most = {};
  const float mean = sum_over_sizes(x, count, [&](Floats sizes) {
    most = larger(sizes, most);
    return sizes;
  }) / static_cast<float>(count);
  const float largest = largest_of(most);
  if (largest <= 1e-30f) return 0.0f;
  const auto up_to = [](Floats sizes, float bound) {
    return sizes < splat(bound) ? sizes : splat(bound);
  };
  const float usual = sum_over_sizes(x, count, [&](Floats sizes) {
    return up_to(sizes, 4.0f * mean);
  }) / static_cast<float>(count);
  const float square = sum_over_sizes(x, count, [&](Floats sizes) {
    const Floats bounded = up_to(sizes, 16.0f * usual);
    return bounded * bounded;
  }) / static_cast<float>(count);
  const float limit = large * std::sqrt(square);
  const float step = (largest < limit ? largest : limit) / 127.0f;
  const float least = largest / 32512.0f;
  return step < least ? least : step;
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
