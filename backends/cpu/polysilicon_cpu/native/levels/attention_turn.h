// The Walsh-Hadamard transform of `polysilicon.backend.KV_DTYPES`.
#pragma once

#include "levels/vectors.h"

namespace polysilicon::PS_LEVEL {
namespace {

// Lanes that differ in bit `size` change places.
template <int size>
Floats swapped(Floats x) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(x, x, 0 ^ size, 1 ^ size, 2 ^ size, 3 ^ size, 4 ^ size, 5 ^ size,
                                 6 ^ size, 7 ^ size, 8 ^ size, 9 ^ size, 10 ^ size, 11 ^ size,
                                 12 ^ size, 13 ^ size, 14 ^ size, 15 ^ size);
#elif defined(__AVX2__)
  return __builtin_shufflevector(x, x, 0 ^ size, 1 ^ size, 2 ^ size, 3 ^ size, 4 ^ size, 5 ^ size,
                                 6 ^ size, 7 ^ size);
#else
  return __builtin_shufflevector(x, x, 0 ^ size, 1 ^ size, 2 ^ size, 3 ^ size);
#endif
}

// Sums of lanes that differ in bit `size` where it is clear, their differences where it is set.
template <int size>
Floats crossed(Floats x) {
  Floats sign;
  for (int i = 0; i < kWidth; ++i) sign[i] = i & size ? -1.0f : 1.0f;
  return fma(x, sign, swapped<size>(x));
}

void turn(const float* x, int dim, float* out) {
  const int block = dim & -dim;
  const float factor = 1.0f / __builtin_sqrtf(static_cast<float>(block));
  if (block < kWidth) {
    for (int i = 0; i < dim; ++i) out[i] = x[i];
    for (int size = 1; size < block; size *= 2) {
      for (int i = 0; i < dim; ++i) {
        if (i & size) continue;
        const float first = out[i], second = out[i + size];
        out[i] = first + second;
        out[i + size] = first - second;
      }
    }
    for (int i = 0; i < dim; ++i) out[i] *= factor;
    return;
  }
  for (int i = 0; i < dim; i += kWidth) {
    Floats values = crossed<2>(crossed<1>(load(x + i)));
#if defined(__AVX2__)
    values = crossed<4>(values);
#endif
#if defined(__AVX512F__)
    values = crossed<8>(values);
#endif
    store(out + i, values * splat(factor));
  }
  for (int size = kWidth; size < block; size *= 2) {
    for (int start = 0; start < dim; start += 2 * size) {
      for (int i = start; i < start + size; i += kWidth) {
        const Floats first = load(out + i), second = load(out + i + size);
        store(out + i, first + second);
        store(out + i + size, first - second);
      }
    }
  }
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
