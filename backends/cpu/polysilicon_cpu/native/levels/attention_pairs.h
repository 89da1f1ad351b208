// Products of pairs of bf16, summed in float32: queries [dim / 2][R] with keys, then weights
// [R][256 / 2] with values.
#pragma once

#include "levels/attention_softmax.h"
#include "levels/attention_tiles.h"

namespace polysilicon::PS_LEVEL {
namespace {

template <int R, int U>
void score_pairs(const TilePart& part, int unit) {
  const std::uint32_t* q = static_cast<const std::uint32_t*>(part.queries);
  const std::uint8_t* keys[U];
PS_UNROLL
  for (int u = 0; u < U; ++u) keys[u] = part.keys[unit + u];
  Ahead ahead[U];
  for (int u = 0; u < U; ++u) ahead[u] = ahead_of_keys(part, unit + u, U, part.dim / 2);
  __m512 sums[R][U];
PS_UNROLL
  for (int r = 0; r < R; ++r) {
PS_UNROLL
    for (int u = 0; u < U; ++u) sums[r][u] = _mm512_setzero_ps();
  }
  for (int pair = 0; pair < part.dim / 2; ++pair, q += R) {
PS_UNROLL
    for (int u = 0; u < U; ++u) ahead[u].fetch(pair);
    __m512bh k[U];
PS_UNROLL
    for (int u = 0; u < U; ++u) k[u] = (__m512bh)_mm512_loadu_si512(keys[u] + pair * 64);
PS_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512bh factor = (__m512bh)_mm512_set1_epi32(static_cast<int>(q[r]));
PS_UNROLL
      for (int u = 0; u < U; ++u) sums[r][u] = _mm512_dpbf16_ps(sums[r][u], k[u], factor);
    }
  }
PS_UNROLL
  for (int r = 0; r < R; ++r) {
PS_UNROLL
    for (int u = 0; u < U; ++u) {
      _mm512_storeu_ps(part.scores + r * kPart + (unit + u) * kUnit, sums[r][u]);
    }
  }
}

template <int R, int C>
void mix_pair_columns(const TilePart& part, int column) {
  __m512 sums[R][C];
PS_UNROLL
  for (int r = 0; r < R; ++r) {
PS_UNROLL
    for (int c = 0; c < C; ++c) sums[r][c] = _mm512_setzero_ps();
  }
  const std::uint32_t* weights = reinterpret_cast<const std::uint32_t*>(part.scores);
  const auto add = [&](const std::uint8_t* values, int pair, int within, __mmask32 halves) {
    __m512bh v[C];
PS_UNROLL
    for (int c = 0; c < C; ++c) {
      v[c] = (__m512bh)_mm512_maskz_loadu_epi16(
          halves, values + (static_cast<std::size_t>(within) * part.width + column + c * 16) * 4);
    }
PS_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512bh weight = (__m512bh)_mm512_set1_epi32(
          static_cast<int>(weights[r * kPart + pair]));
PS_UNROLL
      for (int c = 0; c < C; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], v[c], weight);
    }
  };
  for (int unit = part.first / kUnit; unit * kUnit < part.last; ++unit) {
    const Ahead ahead = column == 0 ? ahead_of_values(part, unit, kUnit / 2) : Ahead();
    const int pairs = part.last / 2 - unit * 8 < 8 ? part.last / 2 - unit * 8 : 8;
    for (int pair = 0; pair < pairs; ++pair) {
      ahead.fetch(pair);
      add(part.values[unit], unit * 8 + pair, pair, ~__mmask32{0});
    }
  }
  if (part.last % 2) {
    const int pair = part.last / 2;
    add(part.values[pair / 8], pair, pair % 8, 0x55555555u);
  }
PS_UNROLL
  for (int r = 0; r < R; ++r) {
PS_UNROLL
    for (int c = 0; c < C; ++c) {
      _mm512_storeu_ps(part.mixed + r * part.width + column + c * 16, sums[r][c]);
    }
  }
}

// Scores become weights, pairs of bf16 at the start of each row.
void soften_pairs(const TilePart& part) {
  const int end = end_of(part);
  if (part.key_scales != 0) scale_scores(part);
  for (int r = 0; r < part.rows; ++r) {
    float* row = part.scores + r * kPart;
    const Floats zero = settle(part, r);
    Floats total[2] = {};
    const auto store_pairs = [&](int i, Floats first, Floats second) {
      _mm512_storeu_si512(row + i / 2,
                          (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    };
    for (int i = begin_of(part); i < end; i += 2 * kUnit) {
      const Floats first = coarse_exp2_of(load(row + i) - zero);
      const Floats second = coarse_exp2_of(load(row + i + kUnit) - zero);
      total[0] += first;
      total[1] += second;
      if (part.value_scales == 0) {
        store_pairs(i, first, second);
      } else {
        store_pairs(i, scaled_weights(part, i, first), scaled_weights(part, i + kUnit, second));
      }
    }
    part.total[r] = sum_of(total[0] + total[1]);
  }
}

template <int R>
void attend_pairs(const TilePart& part) {
  constexpr int kBesideKeys = units_beside(R);
  constexpr int kBeside = columns_beside(R);
  const int end = (part.last + kUnit - 1) / kUnit;
  int unit = part.first / kUnit;
  for (; unit + kBesideKeys <= end; unit += kBesideKeys) score_pairs<R, kBesideKeys>(part, unit);
  for (; unit < end; ++unit) score_pairs<R, 1>(part, unit);
  soften_pairs(part);
  int column = 0;
  for (; column + kBeside * 16 <= part.width; column += kBeside * 16) {
    mix_pair_columns<R, kBeside>(part, column);
  }
  for (; column < part.width; column += 16) mix_pair_columns<R, 1>(part, column);
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
