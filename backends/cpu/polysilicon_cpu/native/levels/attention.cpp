#include "levels/attention.h"

#include "levels/vectors.h"

namespace polysilicon::PS_LEVEL {
namespace {

constexpr int kVectors = kUnit / kWidth;  // of a unit's slots
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kNothing = -__builtin_inff();

#if defined(__AVX512F__)
constexpr int kRows = 12;
#elif defined(__AVX2__)
constexpr int kRows = 6;
#elif defined(__ARM_NEON)
constexpr int kRows = 4;
#else
constexpr int kRows = 2;
#endif
static_assert(kRows <= kTileRows);

// Units of keys and vectors of values side by side that `rows` rows leave registers for.
constexpr int units_beside(int rows) {
  if (kWidth == 16) return rows <= 4 ? 4 : 2;
  return kWidth == 8 && rows <= 2 ? 2 : 1;
}

constexpr int columns_beside(int rows) { return rows * 4 <= 2 * kRows ? 4 : 2; }

int padded_rows(int rows) {
  if (rows <= 4) return rows;
  return rows <= 6 ? 6 : rows <= 8 ? 8 : 12;
}

// How each storage gives two dimensions of a unit's keys, and two slots of its values.
template <Storage storage>
struct Stored;

template <>
struct Stored<Storage::kF32> {
  static Floats key(const std::uint8_t* unit, int d, int vector) {
    return load(reinterpret_cast<const float*>(unit) + d * kUnit + vector * kWidth);
  }
  static Floats value(const std::uint8_t* unit, int width, int slot, int column) {
    return load(reinterpret_cast<const float*>(unit) + slot * width + column);
  }
};

template <>
struct Stored<Storage::kF16> {
  static Floats key(const std::uint8_t* unit, int d, int vector) {
    return load_f16(reinterpret_cast<const std::uint16_t*>(unit) + d * kUnit + vector * kWidth);
  }
  static Floats value(const std::uint8_t* unit, int width, int slot, int column) {
    return load_f16(reinterpret_cast<const std::uint16_t*>(unit) + slot * width + column);
  }
};

template <>
struct Stored<Storage::kBF16> {
  static Floats half(const std::uint8_t* words, int index) {
    const Words pairs = load_as<Words>(words);
    return index % 2 ? high_bf16(pairs) : low_bf16(pairs);
  }
  static Floats key(const std::uint8_t* unit, int d, int vector) {
    return half(unit + (d / 2 * kUnit + vector * kWidth) * 4, d);
  }
  static Floats value(const std::uint8_t* unit, int width, int slot, int column) {
    return half(unit + (static_cast<std::size_t>(slot / 2) * width + column) * 4, slot);
  }
};

// What is read some way ahead of a unit's keys or values: they are read in the order keys, values,
// and then the next part's keys. Each of `steps` steps fetches `lines` of its lines.
struct Ahead {
  const std::uint8_t* from = nullptr;
  int lines = 0;

  Ahead() = default;
  Ahead(const std::uint8_t* from, int bytes, int steps)
      : from(from), lines((bytes + 64 * steps - 1) / (64 * steps)) {}

  void fetch(int step) const {
    for (int i = step * lines; i < (step + 1) * lines; ++i) __builtin_prefetch(from + i * 64, 0, 3);
  }
};

// By experiment: with more the first cache overflows, with less memory is too slow.
constexpr int kAheadBytes = 16384;

int units_ahead(int bytes) { return bytes >= kAheadBytes ? 1 : kAheadBytes / bytes; }

// beside: units that are read at once.
Ahead ahead_of_keys(const TilePart& part, int unit, int beside, int steps) {
  if (part.key_bytes == 0) return {};
  const int end = (part.last + kUnit - 1) / kUnit;
  const int least = units_ahead(part.key_bytes);
  const int other = unit + (least < beside ? beside : least);
  if (other < end) return {part.keys[other], part.key_bytes, steps};
  const int value = part.first / kUnit + other - end;
  if (value < end) return {part.values[value], part.value_bytes, steps};
  return {};
}

Ahead ahead_of_values(const TilePart& part, int unit, int steps) {
  if (part.key_bytes == 0) return {};
  const int end = (part.last + kUnit - 1) / kUnit;
  const int other = unit + units_ahead(part.value_bytes);
  if (other < end) return {part.values[other], part.value_bytes, steps};
  const int key = other - end;
  if (part.next != nullptr && key < part.next_units) return {part.next[key], part.key_bytes, steps};
  return {};
}

// ---- scores: queries [dim][R] with keys

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

#if defined(__AVX512BF16__)
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
#endif

template <class Keys, int R>
void score(const TilePart& part) {
  constexpr int kBeside = units_beside(R);
  const int end = (part.last + kUnit - 1) / kUnit;
  int unit = part.first / kUnit;
  for (; unit + kBeside <= end; unit += kBeside) score_units<Keys, R, kBeside>(part, unit);
  for (; unit < end; ++unit) score_units<Keys, R, 1>(part, unit);
}

// ---- the mix: weights [R][256] with values

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

#if defined(__AVX512BF16__)
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

template <int R>
void attend_pairs(const TilePart& part, void (*soften)(const TilePart&)) {
  constexpr int kBesideKeys = units_beside(R);
  constexpr int kBeside = columns_beside(R);
  const int end = (part.last + kUnit - 1) / kUnit;
  int unit = part.first / kUnit;
  for (; unit + kBesideKeys <= end; unit += kBesideKeys) score_pairs<R, kBesideKeys>(part, unit);
  for (; unit < end; ++unit) score_pairs<R, 1>(part, unit);
  soften(part);
  // Each row's weights become pairs of bf16 at the row's start.
PS_UNROLL
  for (int r = 0; r < R; ++r) {
    float* row = part.scores + r * kPart;
    for (int i = part.first / (2 * kUnit) * 2 * kUnit; i < part.last; i += 2 * kUnit) {
      _mm512_storeu_si512(row + i / 2,
                          (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + i + kUnit),
                                                       _mm512_loadu_ps(row + i)));
    }
  }
  int column = 0;
  for (; column + kBeside * 16 <= part.width; column += kBeside * 16) {
    mix_pair_columns<R, kBeside>(part, column);
  }
  for (; column < part.width; column += 16) mix_pair_columns<R, 1>(part, column);
}
#endif

// ---- the softmax between them

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

void soften(const TilePart& part) {
  // Two chains of sums, by the place in the part: they are the same wherever a tile begins.
  constexpr int kStep = 2 * kWidth;
  const int begin = part.first / (2 * kUnit) * (2 * kUnit);
  const int end = (part.last + 2 * kUnit - 1) / (2 * kUnit) * (2 * kUnit);
  const bool whole = part.visible == nullptr && part.softcap == 0;
  for (int r = 0; r < part.rows; ++r) {
    float* row = part.scores + r * kPart;
    if (part.softcap != 0) {
      const Floats cap = splat(part.softcap * kLog2E);
      for (int i = begin; i < end; i += kWidth) store(row + i, cap * tanh_of(load(row + i)));
    }
    if (!whole || part.low[r] > begin || part.high[r] < end) hide(part, r, begin, end);
    Floats largest[2] = {splat(kNothing), splat(kNothing)};
    for (int i = begin; i < end; i += kStep) {
      largest[0] = larger(load(row + i), largest[0]);
      largest[1] = larger(load(row + i + kWidth), largest[1]);
    }
    part.largest[r] = largest_of(larger(largest[0], largest[1]));
    const Floats zero = splat(part.largest[r] == kNothing ? 0.0f : part.largest[r]);
    Floats total[2] = {};
    for (int i = begin; i < end; i += kStep) {
      const Floats first = exp2_of(load(row + i) - zero);
      const Floats second = exp2_of(load(row + i + kWidth) - zero);
      total[0] += first;
      total[1] += second;
      store(row + i, first);
      store(row + i + kWidth, second);
    }
    part.total[r] = sum_of(total[0] + total[1]);
  }
}

template <int R>
void attend_rows(const TilePart& part) {
#if defined(__AVX512BF16__)
  if (part.pairs) return attend_pairs<R>(part, soften);
#endif
  switch (part.key_storage) {
    case Storage::kF32: score<Stored<Storage::kF32>, R>(part); break;
    case Storage::kF16: score<Stored<Storage::kF16>, R>(part); break;
    case Storage::kBF16: score<Stored<Storage::kBF16>, R>(part); break;
  }
  soften(part);
  switch (part.value_storage) {
    case Storage::kF32: mix<Stored<Storage::kF32>, R>(part); break;
    case Storage::kF16: mix<Stored<Storage::kF16>, R>(part); break;
    case Storage::kBF16: mix<Stored<Storage::kBF16>, R>(part); break;
  }
}

void attend(const TilePart& part) {
  switch (padded_rows(part.rows)) {
    case 1: return attend_rows<1>(part);
    case 2: return attend_rows<2>(part);
#if defined(__AVX2__) || defined(__ARM_NEON)
    case 3: return attend_rows<3>(part);
    case 4: return attend_rows<4>(part);
#endif
#if defined(__AVX2__)
    case 6: return attend_rows<6>(part);
#endif
#if defined(__AVX512F__)
    case 8: return attend_rows<8>(part);
    case 12: return attend_rows<12>(part);
#endif
  }
}

// ---- queries, keys and values of a step

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

void store_key(Storage storage, const float* key, int dim, int offset, void* unit) {
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
  }
}

void store_value(Storage storage, const float* value, int dim, int width, int offset,
                 void* unit) {
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
#pragma GCC ivdep
  for (int d = 0; d < dim; ++d) out[d] = mixed[d] * factor;
}

void angles(const double* frequencies, int pairs, float scale, int position, float* cosine,
            float* sine) {
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52: leaves whole numbers in the low bits
  constexpr double kQuarter = 1.5707963267341256;  // pi / 2 in 33 bits: products with n are exact
  constexpr double kRest = 6.077100506506192e-11;
#pragma GCC ivdep
  for (int i = 0; i < pairs; ++i) {
    const double angle = position * frequencies[i];
    const double shifted = angle * 0.63661977236758134308 + kShift;
    const std::int64_t quarters = __builtin_bit_cast(std::int64_t, shifted);
    const double n = shifted - kShift;
    const double r = (angle - n * kQuarter) - n * kRest;
    const double z = r * r;
    // Taylor's series: for |r| <= pi / 4 their rest is far below what a float32 shows.
    double s = 1.0 / 362880 - z / 39916800;
    s = -1.0 / 5040 + z * s;
    s = 1.0 / 120 + z * s;
    s = r + r * z * (-1.0 / 6 + z * s);
    double c = 1.0 / 40320 - z / 3628800;
    c = -1.0 / 720 + z * c;
    c = 1.0 / 24 + z * c;
    c = 1.0 + z * (-1.0 / 2 + z * c);
    const bool swapped = quarters & 1;
    const double y = swapped ? c : s;
    const double x = swapped ? s : c;
    sine[i] = static_cast<float>((quarters & 2 ? -y : y) * scale);
    cosine[i] = static_cast<float>(((quarters + 1) & 2 ? -x : x) * scale);
  }
}

#if defined(__AVX512BF16__)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {
    kRows,     kPairs,      padded_rows, pack_query, attend,
    fold,      finish,      store_key,   store_value, angles,
};

}  // namespace polysilicon::PS_LEVEL
