// Dot products of codes with int8 inputs, four to a lane, for NEON.
#pragma once

#include "levels/products_generic.h"

namespace polysilicon::PS_LEVEL {
namespace {

#if defined(__ARM_FEATURE_MATMUL_INT8)

// The least width of codes whose sums are taken in the same way.
constexpr int least_bits(int) { return 7; }

template <int bits, int steps>
class Sum {
 public:
  static PS_INLINE Bytes operand(Bytes codes) { return codes; }

  PS_INLINE void add(int, Bytes codes, Ints inputs) {
    sum_ = (Ints)vusdotq_s32((int32x4_t)sum_, (uint8x16_t)codes, (int8x16_t)inputs);
  }

  PS_INLINE Ints total() const { return sum_; }

 private:
  Ints sum_{};
};

#else

#if defined(__ARM_FEATURE_DOTPROD)

constexpr int least_bits(int) { return 7; }

template <int bits, int steps>
class Sum {
  static_assert(bits < 8);

 public:
  static PS_INLINE Bytes operand(Bytes codes) { return codes; }

  PS_INLINE void add(int, Bytes codes, Ints inputs) {
    sum_ = (Ints)vdotq_s32((int32x4_t)sum_, (int8x16_t)codes, (int8x16_t)inputs);
  }

  PS_INLINE Ints total() const { return sum_; }

 private:
  Ints sum_{};
};

#else

// Codes of up to 7 bits: two products with inputs of at least -128 fit into 16 bits, and so do the
// products of `kSteps` steps.
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
    const int8x16_t a = (int8x16_t)codes, b = (int8x16_t)inputs;
    if (step % kSteps == 0) {
      low_ = vmull_s8(vget_low_s8(a), vget_low_s8(b));
      high_ = vmull_high_s8(a, b);
    } else {
      low_ = vmlal_s8(low_, vget_low_s8(a), vget_low_s8(b));
      high_ = vmlal_high_s8(high_, a, b);
    }
    if (step % kSteps == kSteps - 1) {
      sum_ = (Ints)vpadalq_s16((int32x4_t)sum_, vpaddq_s16(low_, high_));
    }
  }

  PS_INLINE Ints total() const { return sum_; }

 private:
  static constexpr int kSteps = steps_in_16_bits(bits) < steps ? steps_in_16_bits(bits) : steps;

  int16x8_t low_, high_;
  Ints sum_{};
};

#endif

// Codes of 8 bits: the lower seven and the highest apart.
struct SplitCodes {
  Bytes low, high;
};

template <int steps>
class Sum<8, steps> {
 public:
  static PS_INLINE SplitCodes operand(Bytes codes) { return {codes & 127, codes >> 7}; }

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
