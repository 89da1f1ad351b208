// The softmax of a tile against a part, and what becomes of the results of several parts.
#pragma once

#include <cstdint>

#include "levels/attention.h"
#include "levels/vectors.h"

namespace polysilicon::PS_LEVEL {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kNothing = -__builtin_inff();

// Cephes' tanhf: a polynomial near 0, else by 2^x.
Floats tanh_of(Floats x) {
  const Words sign = (Words)x & splat(0x80000000u);
  const Floats size = (Floats)((Words)x ^ sign);
  const Floats z = x * x;
  Floats p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  const Floats near = fma(p * z, size, size);
  const Floats bounded = size < splat(20.0f) ? size : splat(20.0f);
  const Floats far =
      splat(1.0f) - splat(2.0f) / (exp2_of(bounded * splat(2.0f * kLog2E)) + splat(1.0f));
  return (Floats)((Words)(size < splat(0.625f) ? near : far) | sign);
}

// Scores of row r become -inf where the row does not see them.
void hide(const TilePart& part, int r, int begin, int end) {
  float* row = part.scores + r * kPart;
  const int low = part.low[r], high = part.high[r];
  Ints lane;
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  for (int i = begin; i < end; i += kWidth) {
    if (i >= low && i + kWidth <= high) {
      i = high / kWidth * kWidth - kWidth;  // whole vectors inside need no mask
      continue;
    }
    const Ints index = splat(i) + lane;
    const Ints seen = (index >= splat(low)) & (index < splat(high));
    store(row + i, seen ? load(row + i) : splat(kNothing));
  }
  for (int i = begin; part.visible != nullptr && i < end; ++i) {
    if (!part.visible[r * kPart + i]) row[i] = kNothing;
  }
}

// Scores times their keys' scales.
void scale_scores(const TilePart& part) {
  for (int unit = part.first / kUnit; unit * kUnit < part.last; ++unit) {
    const float* scales = reinterpret_cast<const float*>(part.keys[unit] + part.key_scales);
    for (int i = 0; i < kUnit; i += kWidth) {
      const Floats scale = load(scales + i);
      float* column = part.scores + unit * kUnit + i;
      for (int r = 0; r < part.rows; ++r) {
        store(column + r * kPart, load(column + r * kPart) * scale);
      }
    }
  }
}

// Weights from key i on, times their values' scales. What stands behind the last slot may be anything,
// NaN too, and a unit behind it not be there.
Floats scaled_weights(const TilePart& part, int i, Floats weights) {
  if (i >= part.last || i < part.first / kUnit * kUnit) return Floats{};
  const float* scales = reinterpret_cast<const float*>(part.values[i / kUnit] + part.value_scales);
  const Floats scaled = weights * load(scales + i % kUnit);
  return weights == splat(0.0f) ? weights : scaled;
}

// The keys of a part whose scores and weights are computed: two units at a time.
int begin_of(const TilePart& part) { return part.first / (2 * kUnit) * (2 * kUnit); }

int end_of(const TilePart& part) { return (part.last + 2 * kUnit - 1) / (2 * kUnit) * (2 * kUnit); }

// Caps and hides the scores of row r; what is to be taken from them so that the largest becomes 0.
Floats settle(const TilePart& part, int r) {
  const int begin = begin_of(part), end = end_of(part);
  float* row = part.scores + r * kPart;
  if (part.softcap != 0) {
    const Floats cap = splat(part.softcap * kLog2E);
    for (int i = begin; i < end; i += kWidth) store(row + i, cap * tanh_of(load(row + i)));
  }
  const bool whole = part.visible == nullptr && part.softcap == 0;
  if (!whole || part.low[r] > begin || part.high[r] < end) hide(part, r, begin, end);
  Floats largest[2] = {splat(kNothing), splat(kNothing)};
  for (int i = begin; i < end; i += 2 * kWidth) {
    largest[0] = larger(load(row + i), largest[0]);
    largest[1] = larger(load(row + i + kWidth), largest[1]);
  }
  part.largest[r] = largest_of(larger(largest[0], largest[1]));
  return splat(part.largest[r] == kNothing ? 0.0f : part.largest[r]);
}

void soften(const TilePart& part) {
  const int end = end_of(part);
  if (part.key_scales != 0) scale_scores(part);
  for (int r = 0; r < part.rows; ++r) {
    float* row = part.scores + r * kPart;
    const Floats zero = settle(part, r);
    // Two chains of sums, by the place in the part: they are the same wherever a tile begins.
    Floats total[2] = {};
    for (int i = begin_of(part); i < end; i += 2 * kWidth) {
      const Floats first = exp2_of(load(row + i) - zero);
      const Floats second = exp2_of(load(row + i + kWidth) - zero);
      total[0] += first;
      total[1] += second;
      const bool scales = part.value_scales != 0;
      store(row + i, scales ? scaled_weights(part, i, first) : first);
      store(row + i + kWidth, scales ? scaled_weights(part, i + kWidth, second) : second);
    }
    part.total[r] = sum_of(total[0] + total[1]);
  }
}

void fold(float part_largest, float part_total, const float* part_mixed, int width,
          float* largest, float* total, float* mixed) {
  if (part_largest == kNothing) return;
  const float highest = part_largest > *largest ? part_largest : *largest;
  const Floats before = exp2_of(splat(*largest - highest));
  const Floats now = exp2_of(splat(part_largest - highest));
  for (int i = 0; i < width; i += kWidth) {
    store(mixed + i, fma(load(part_mixed + i), now, load(mixed + i) * before));
  }
  *total = fma(splat(part_total), now, splat(*total) * before)[0];
  *largest = highest;
}

void finish(float largest, float total, const float* mixed, float sink, int dim, float* out) {
  if (largest == kNothing) {
    for (int d = 0; d < dim; ++d) out[d] = 0.0f;
    return;
  }
  float factor = 1.0f;
  if (sink != kNothing) {
    const float highest = sink > largest ? sink : largest;
    factor = exp2_of(splat(largest - highest))[0];
    total = total * factor + exp2_of(splat(sink - highest))[0];
  }
  factor /= total;
PS_IVDEP
  for (int d = 0; d < dim; ++d) out[d] = mixed[d] * factor;
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
