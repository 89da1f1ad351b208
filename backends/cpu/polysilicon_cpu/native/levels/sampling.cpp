#include "levels/sampling.h"

#include "levels/vectors.h"

namespace polysilicon::PS_LEVEL {
namespace {

constexpr float kNothing = -__builtin_inff();
constexpr float kLargest = 3.40282347e+38f;
constexpr float kLog2E = 1.44269504088896341f;

float clean(float x) {
  x = x > kNothing ? x : kNothing;  // NaN compares false
  return x < kLargest ? x : kLargest;
}

Floats clean(Floats x) {
  x = larger(x, splat(kNothing));
  return x < splat(kLargest) ? x : splat(kLargest);
}

void clean_row(const float* x, const std::uint32_t* mask, int count, float* out) {
  if (mask == nullptr) {
    for (int i = 0; i < count; ++i) out[i] = clean(x[i]);
    return;
  }
  for (int start = 0; start < count; start += 32) {
    const std::uint32_t word = mask[start / 32];
    const int end = count - start < 32 ? count - start : 32;
    for (int i = 0; i < end; ++i) out[start + i] = word >> i & 1 ? clean(x[start + i]) : kNothing;
  }
}

void block_maxima(const float* x, int count, float* maxima) {
  int start = 0;
  for (; start + kBlock <= count; start += kBlock) {
    Floats largest[2] = {splat(kNothing), splat(kNothing)};
    for (int i = 0; i < kBlock; i += 2 * kWidth) {
      largest[0] = larger(load(x + start + i), largest[0]);
      largest[1] = larger(load(x + start + i + kWidth), largest[1]);
    }
    maxima[start / kBlock] = clean(largest_of(larger(largest[0], largest[1])));
  }
  if (start == count) return;
  float largest = kNothing;
  for (int i = start; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  maxima[start / kBlock] = clean(largest);
}

int find(const float* x, int count, float value) {
  for (int i = 0; i < count; ++i) {
    if (clean(x[i]) == value) return i;
  }
  return count;
}

// Up to kWidth values, -inf behind the end.
Floats load_some(const float* x, int count) {
  if (count >= kWidth) return load(x);
  Floats part = splat(kNothing);
  std::memcpy(&part, x, sizeof(float) * count);
  return part;
}

// As the host does it: one subtraction and one division, each rounded. Zeros are positive.
Floats scores_of(Floats x, float peak, float temperature) {
  return (clean(x) - splat(peak)) / splat(temperature) + splat(0.0f);
}

template <bool kByFloor>
double mass_of(const float* x, int count, float peak, float temperature, double* by_floor) {
  constexpr int kRun = 4096;  // added up in float
  double total = 0;
  for (int start = 0; start < count; start += kRun) {
    const int end = count - start < kRun ? count : start + kRun;
    Floats sum = {};
    Floats sums[kMassFloorCount] = {};
    for (int i = start; i < end; i += kWidth) {
      const Floats score = scores_of(load_some(x + i, end - i), peak, temperature);
      const Floats weight = exp2_of(score * splat(kLog2E));
      sum += weight;
      if constexpr (kByFloor) {
        PS_UNROLL
        for (int f = 0; f < kMassFloorCount; ++f) {
          sums[f] += score >= splat(kMassFloors[f]) ? weight : Floats{};
        }
      }
    }
    total += sum_of(sum);
    for (int f = 0; kByFloor && f < kMassFloorCount; ++f) by_floor[f] += sum_of(sums[f]);
  }
  return total;
}

double mass(const float* x, int count, float peak, float temperature, double* by_floor) {
  if (by_floor == nullptr) return mass_of<false>(x, count, peak, temperature, by_floor);
  for (int f = 0; f < kMassFloorCount; ++f) by_floor[f] = 0;
  return mass_of<true>(x, count, peak, temperature, by_floor);
}

int gather(const float* x, const float* maxima, int count, float peak, float temperature,
           float floor, std::int32_t first_id, std::int32_t* ids, float* scores) {
  int found = 0;
  for (int start = 0; start < count; start += kBlock) {
    // Rounding keeps the order: where the block's largest scores below the floor, all do.
    if ((maxima[start / kBlock] - peak) / temperature < floor) continue;
    const int end = count - start < kBlock ? count : start + kBlock;
    for (int i = start; i < end; i += kWidth) {
      const Floats score = scores_of(load_some(x + i, end - i), peak, temperature);
#if defined(__AVX512F__)
      __mmask16 kept = _mm512_cmp_ps_mask((__m512)score, _mm512_set1_ps(floor), _CMP_GE_OQ);
      const bool whole = end - i >= kWidth;
      if (!whole) kept &= static_cast<__mmask16>((1u << (end - i)) - 1);
      if (kept == 0) continue;
      const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      const __m512i id = _mm512_add_epi32(_mm512_set1_epi32(first_id + i), lane);
      if (whole) {  // much faster, and what it writes too much is within the chunk
        _mm512_storeu_ps(scores + found, _mm512_maskz_compress_ps(kept, (__m512)score));
        _mm512_storeu_si512(ids + found, _mm512_maskz_compress_epi32(kept, id));
      } else {
        _mm512_mask_compressstoreu_ps(scores + found, kept, (__m512)score);
        _mm512_mask_compressstoreu_epi32(ids + found, kept, id);
      }
      found += __builtin_popcount(kept);
#else
      const int lanes = end - i < kWidth ? end - i : kWidth;
      for (int lane = 0; lane < lanes; ++lane) {
        scores[found] = score[lane];
        ids[found] = first_id + i + lane;
        found += score[lane] >= floor;
      }
#endif
    }
  }
  return found;
}

void weigh(const float* scores, int count, float* weights) {
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    store(weights + i, exp2_of(load(scores + i) * splat(kLog2E)));
  }
  if (i < count) {
    const Floats last = exp2_of(load_some(scores + i, count - i) * splat(kLog2E));
    std::memcpy(weights + i, &last, sizeof(float) * (count - i));
  }
}

// Natural logarithm of normal positive numbers, within 2 units in the last place: the polynomial of
// Cephes' logf around 1.
Floats log_of(Floats x) {
  const Words bits = (Words)x;
  // Mantissas from sqrt(1/2) to sqrt(2).
  const Words shifted = bits - splat(0x3f3504f3u);
  const Ints exponent = (Ints)shifted >> 23;
  const Floats mantissa = (Floats)((shifted & splat(0x007fffffu)) + splat(0x3f3504f3u));
  const Floats f = mantissa - splat(1.0f);
  const Floats z = f * f;
  Floats p = splat(7.0376836292e-2f);
  p = fma(p, f, splat(-1.1514610310e-1f));
  p = fma(p, f, splat(1.1676998740e-1f));
  p = fma(p, f, splat(-1.2420140846e-1f));
  p = fma(p, f, splat(1.4249322787e-1f));
  p = fma(p, f, splat(-1.6668057665e-1f));
  p = fma(p, f, splat(2.0000714765e-1f));
  p = fma(p, f, splat(-2.4999993993e-1f));
  p = fma(p, f, splat(3.3333331174e-1f));
  const Floats e = __builtin_convertvector(exponent, Floats);
  Floats y = f * z * p;
  y = fma(e, splat(-2.12194440e-4f), y);
  y = fma(splat(-0.5f), z, y);
  return fma(e, splat(0.693359375f), f + y);
}

// Words of the 64-bit products of x and `factor`.
void multiply(Words x, std::uint32_t factor, Words* high, Words* low) {
  typedef std::uint64_t Longs __attribute__((vector_size(kWidth * 4)));
  const Longs mask = Longs{} + 0xffffffffu;
  const Longs odd_words = (Longs)x >> 32;
#if defined(__AVX512F__)
  const Longs even = (Longs)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
  const Longs odd = (Longs)_mm512_mul_epu32((__m512i)odd_words, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  const Longs even = (Longs)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
  const Longs odd = (Longs)_mm256_mul_epu32((__m256i)odd_words, _mm256_set1_epi64x(factor));
#else
  const Longs even = ((Longs)x & mask) * std::uint64_t{factor};
  const Longs odd = odd_words * std::uint64_t{factor};
#endif
  *low = (Words)((even & mask) | odd << 32);
  *high = (Words)(even >> 32 | (odd & ~mask));
}

// Philox4x32-10 of the counters (c[0], choice, position, 0), in place.
void philox(Words (&c)[4], const NoiseKey& key) {
  c[1] = splat(key.choice);
  c[2] = splat(key.position);
  c[3] = Words{};
  std::uint32_t k0 = static_cast<std::uint32_t>(key.seed);
  std::uint32_t k1 = static_cast<std::uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    Words high0, low0, high1, low1;
    multiply(c[0], 0xD2511F53u, &high0, &low0);
    multiply(c[2], 0xCD9E8D57u, &high1, &low1);
    c[0] = high1 ^ c[1] ^ splat(k0);
    c[2] = high0 ^ c[3] ^ splat(k1);
    c[1] = low1;
    c[3] = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

Floats to_gumbel(Words x) {
  const Floats half_steps = __builtin_convertvector(x, Floats) + splat(0.5f);
  Floats u = half_steps * splat(0x1p-32f);
  u = u < splat(1.0f - 0x1p-24f) ? u : splat(1.0f - 0x1p-24f);
  // log1p(-u) from the logarithm of the rounded 1 - u, scaled by what rounding did to u.
  const Floats rest = splat(1.0f) - u;
  const Floats rounded = splat(1.0f) - rest;
  const Ints small = rounded == Floats{};
  const Floats scaled = -log_of(rest) * (u / (small ? splat(1.0f) : rounded));
  return -log_of(small ? u : scaled);
}

// The best sum and id so far of each lane.
struct Winner {
  Floats sum = splat(kNothing);
  Ints id = splat(std::int32_t{0x7fffffff});

  void meet(Floats other, Ints other_id) {
    const Ints taken = (other > sum) | ((other == sum) & (other_id < id));
    sum = taken ? other : sum;
    id = taken ? other_id : id;
  }

  float decide(std::int32_t* winner) const {
    float best = kNothing;
    *winner = 0x7fffffff;
    for (int lane = 0; lane < kWidth; ++lane) {
      if (sum[lane] > best || (sum[lane] == best && id[lane] < *winner)) {
        best = sum[lane];
        *winner = id[lane];
      }
    }
    return best;
  }
};

// Words of kWidth counters that were laid out by `counter_order`, in the order of their ids.
void transpose(Words (&w)[4]) {
#if defined(__AVX512F__)
  const __m512i a = _mm512_unpacklo_epi32((__m512i)w[0], (__m512i)w[1]);
  const __m512i b = _mm512_unpackhi_epi32((__m512i)w[0], (__m512i)w[1]);
  const __m512i c = _mm512_unpacklo_epi32((__m512i)w[2], (__m512i)w[3]);
  const __m512i d = _mm512_unpackhi_epi32((__m512i)w[2], (__m512i)w[3]);
  w[0] = (Words)_mm512_unpacklo_epi64(a, c);
  w[1] = (Words)_mm512_unpackhi_epi64(a, c);
  w[2] = (Words)_mm512_unpacklo_epi64(b, d);
  w[3] = (Words)_mm512_unpackhi_epi64(b, d);
#elif defined(__AVX2__)
  const __m256i a = _mm256_unpacklo_epi32((__m256i)w[0], (__m256i)w[1]);
  const __m256i b = _mm256_unpackhi_epi32((__m256i)w[0], (__m256i)w[1]);
  const __m256i c = _mm256_unpacklo_epi32((__m256i)w[2], (__m256i)w[3]);
  const __m256i d = _mm256_unpackhi_epi32((__m256i)w[2], (__m256i)w[3]);
  w[0] = (Words)_mm256_unpacklo_epi64(a, c);
  w[1] = (Words)_mm256_unpackhi_epi64(a, c);
  w[2] = (Words)_mm256_unpacklo_epi64(b, d);
  w[3] = (Words)_mm256_unpackhi_epi64(b, d);
#else
  static_assert(kWidth == 4);
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < i; ++j) {
      const std::uint32_t kept = w[i][j];
      w[i][j] = w[j][i];
      w[j][i] = kept;
    }
  }
#endif
}

Words counter_order() {
  Words order;
  for (int lane = 0; lane < kWidth; ++lane) order[lane] = lane % 4 * (kWidth / 4) + lane / 4;
  return order;
}

float race_all(const float* x, const float* maxima, int count, float peak, float temperature,
               float floor, std::int32_t first_id, const NoiseKey& key, std::int32_t* winner) {
  constexpr int kIds = 4 * kWidth;  // of one vector of counters
  constexpr float kLargestNoise = 22.88f;
  const Words order = counter_order();
  Ints lane;
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  Winner best;
  float best_sum = kNothing;
  for (int start = 0; start < count; start += kIds) {
    const float highest = (maxima[start / kBlock] - peak) / temperature;
    if (highest < floor || highest + kLargestNoise < best_sum) continue;
    Words words[4] = {splat(static_cast<std::uint32_t>(first_id + start) / 4) + order};
    philox(words, key);
    // The noise is below -log(u): none wins where the least u is too large for that.
    Words least = words[0];
    for (int i = 1; i < 4; ++i) least = words[i] < least ? words[i] : least;
    std::uint32_t least_word = least[0];
    for (int i = 1; i < kWidth; ++i) least_word = least[i] < least_word ? least[i] : least_word;
    if (best_sum > kNothing) {
      const float needed = exp2_of(splat((highest - best_sum) * kLog2E))[0];
      if (static_cast<float>(least_word) * 0x1p-32f > needed * 1.001f) continue;
    }
    transpose(words);
    for (int i = 0; i < 4; ++i) {
      const int at = start + i * kWidth;
      if (at >= count) break;
      const Floats score = scores_of(load_some(x + at, count - at), peak, temperature);
      const Floats sum = score + to_gumbel(words[i]);
      best.meet(score >= splat(floor) ? sum : splat(kNothing), splat(first_id + at) + lane);
    }
    const float now = largest_of(best.sum);
    best_sum = now > best_sum ? now : best_sum;
  }
  return best.decide(winner);
}

float race(const std::int32_t* ids, const float* scores, int count, const NoiseKey& key,
           std::int32_t* winner) {
  Winner best;
  for (int i = 0; i < count; i += kWidth) {
    const int lanes = count - i < kWidth ? count - i : kWidth;
    Words id = {};
    std::memcpy(&id, ids + i, sizeof(std::int32_t) * lanes);
    Words words[4] = {id >> 2};
    philox(words, key);
    const Words place = id & splat(3u);
    Words word = place == splat(1u) ? words[1] : words[0];
    word = place == splat(2u) ? words[2] : word;
    word = place == splat(3u) ? words[3] : word;
    best.meet(load_some(scores + i, lanes) + to_gumbel(word), (Ints)id);
  }
  return best.decide(winner);
}

}  // namespace

extern const SamplingKernels sampling_kernels;
const SamplingKernels sampling_kernels = {
    clean_row, block_maxima, find, mass, gather, weigh, race_all, race,
};

}  // namespace polysilicon::PS_LEVEL
