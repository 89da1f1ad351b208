// Products of float32: queries [dim][R] with keys, then weights [R][256] with values.
#pragma once

#include "levels/attention_tiles.h"

namespace polysilicon::PS_LEVEL {
namespace {

template <class Keys, int R, int U>
void score_units(const TilePart& part, int unit) {
  const float* q = static_cast<const float*>(part.queries);
  const std::uint8_t* keys[U];
PS_UNROLL
  for (int u = 0; u < U; ++u) keys[u] = part.keys[unit + u];
  Ahead ahead[U];
  for (int u = 0; u < U; ++u) ahead[u] = ahead_of_keys(part, unit + u, U, part.dim / 2);
  Floats sums[R][U * kVectors] = {};
  for (int d = 0; d < part.dim; d += 2, q += 2 * R) {
PS_UNROLL
    for (int u = 0; u < U; ++u) ahead[u].fetch(d / 2);
PS_UNROLL
    for (int half = 0; half < 2; ++half) {
      Floats k[U * kVectors];
PS_UNROLL
      for (int u = 0; u < U; ++u) {
PS_UNROLL
        for (int i = 0; i < kVectors; ++i) k[u * kVectors + i] = Keys::key(keys[u], d + half, i);
      }
PS_UNROLL
      for (int r = 0; r < R; ++r) {
        const Floats factor = splat(q[half * R + r]);
PS_UNROLL
        for (int i = 0; i < U * kVectors; ++i) sums[r][i] = fma(factor, k[i], sums[r][i]);
      }
    }
  }
PS_UNROLL
  for (int r = 0; r < R; ++r) {
PS_UNROLL
    for (int i = 0; i < U * kVectors; ++i) {
      store(part.scores + r * kPart + unit * kUnit + i * kWidth, sums[r][i]);
    }
  }
}

template <class Keys, int R>
void score(const TilePart& part) {
  constexpr int kBeside = units_beside(R);
  const int end = (part.last + kUnit - 1) / kUnit;
  int unit = part.first / kUnit;
  for (; unit + kBeside <= end; unit += kBeside) score_units<Keys, R, kBeside>(part, unit);
  for (; unit < end; ++unit) score_units<Keys, R, 1>(part, unit);
}

template <class Values, int R, int C>
void mix_columns(const TilePart& part, int column) {
  Floats sums[R][C] = {};
  for (int unit = part.first / kUnit; unit * kUnit < part.last; ++unit) {
    const std::uint8_t* values = part.values[unit];
    const Ahead ahead = column == 0 ? ahead_of_values(part, unit, kUnit / 2) : Ahead();
    const float* weights = part.scores + unit * kUnit;
    const int count = part.last - unit * kUnit < kUnit ? part.last - unit * kUnit : kUnit;
    const auto add = [&](int slot) {
      Floats v[C];
PS_UNROLL
      for (int c = 0; c < C; ++c) {
        v[c] = Values::value(values, part.width, slot, column + c * kWidth);
      }
PS_UNROLL
      for (int r = 0; r < R; ++r) {
        const Floats weight = splat(weights[r * kPart + slot]);
PS_UNROLL
        for (int c = 0; c < C; ++c) sums[r][c] = fma(weight, v[c], sums[r][c]);
      }
    };
    int slot = 0;
    for (; slot + 2 <= count; slot += 2) {
      ahead.fetch(slot / 2);
      add(slot);
      add(slot + 1);
    }
    // What stands behind the last slot may be anything, NaN too.
    if (slot < count) add(slot);
  }
PS_UNROLL
  for (int r = 0; r < R; ++r) {
PS_UNROLL
    for (int c = 0; c < C; ++c) {
      store(part.mixed + r * part.width + column + c * kWidth, sums[r][c]);
    }
  }
}

template <class Values, int R>
void mix(const TilePart& part) {
  constexpr int kBeside = columns_beside(R);
  int column = 0;
  for (; column + kBeside * kWidth <= part.width; column += kBeside * kWidth) {
    mix_columns<Values, R, kBeside>(part, column);
  }
  for (; column < part.width; column += kWidth) mix_columns<Values, R, 1>(part, column);
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
