// Dot products of codes with int8 inputs, four to a lane, for AVX2 and AVX-VNNI.
#pragma once

#include "levels/products_generic.h"

namespace polysilicon::PS_LEVEL {
namespace {

#if defined(__AVXVNNI__)

// The least width of codes whose sums are taken in the same way.
constexpr int least_bits(int) { return 7; }

template <int bits, int steps>
class Sum {
 public:
  static PS_INLINE Bytes operand(Bytes codes) { return codes; }

  PS_INLINE void add(int, Bytes codes, Ints inputs) {
    sum_ = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum_, (__m256i)codes, (__m256i)inputs);
  }

  PS_INLINE Ints total() const { return sum_; }

 private:
  Ints sum_{};
};

#else

// Codes of up to 7 bits: two products with inputs of at least -128 fit into the 16 bits in which
// vpmaddubsw adds them, and so do the products of `kSteps` steps.
constexpr int steps_in_16_bits(int bits) {
  return bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
}

constexpr int least_bits(int bits) { return bits < 4 ? 4 : bits; }

template <int bits, int steps>
class Sum {
  static_assert(bits < 8);

 public:
  static PS_INLINE Bytes operand(Bytes codes) { return codes; }

  PS_INLINE void add(int step, Bytes codes, Ints inputs) {
    const __m256i products = _mm256_maddubs_epi16((__m256i)codes, (__m256i)inputs);
    pairs_ = step % kSteps == 0 ? products : _mm256_add_epi16(pairs_, products);
    if (step % kSteps == kSteps - 1) {
      sum_ += (Ints)_mm256_madd_epi16(pairs_, _mm256_set1_epi16(1));
    }
  }

  PS_INLINE Ints total() const { return sum_; }

 private:
  static constexpr int kSteps = steps_in_16_bits(bits) < steps ? steps_in_16_bits(bits) : steps;

  __m256i pairs_;
  Ints sum_{};
};

// Codes of 8 bits: the lower seven and the highest apart.
struct SplitCodes {
  Bytes low, high;
};

template <int steps>
class Sum<8, steps> {
 public:
  static PS_INLINE SplitCodes operand(Bytes codes) {
    return {codes & 127, (Bytes)((Shorts)codes >> 7) & 1};
  }

  PS_INLINE void add(int step, const SplitCodes& codes, Ints inputs) {
    low_.add(step, codes.low, inputs);
    high_.add(step, codes.high, inputs);
  }

  PS_INLINE Ints total() const { return low_.total() + (high_.total() << 7); }

 private:
  Sum<7, steps> low_;
  Sum<1, steps> high_;
};

#endif

}  // namespace
}  // namespace polysilicon::PS_LEVEL
