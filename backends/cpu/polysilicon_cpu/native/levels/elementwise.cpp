#include "levels/elementwise.h"

#include <cmath>

#include "levels/loops.h"
#include "levels/math.h"
#include "levels/vectors.h"

namespace polysilicon::PS_LEVEL {
namespace {

void add_residual(const float* x, const float* residual, int width, float* hidden) {
  if (residual == nullptr) {
PS_IVDEP
    for (int i = 0; i < width; ++i) hidden[i] = x[i];
  } else {
PS_IVDEP
    for (int i = 0; i < width; ++i) hidden[i] = x[i] + residual[i];
  }
}

void rms_norm(const float* x, const float* residual, const float* weight, float eps, int width,
              float* hidden, float* out) {
  const float* row = x;
  if (hidden != nullptr) {
    add_residual(x, residual, width, hidden);
    row = hidden;
  }
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < width; ++i) sum += row[i] * row[i];
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
PS_IVDEP
  for (int i = 0; i < width; ++i) out[i] = row[i] * factor * weight[i];
}

void layer_norm(const float* x, const float* residual, const float* weight, const float* bias,
                float eps, int width, float* hidden, float* out) {
  const float* row = x;
  if (hidden != nullptr) {
    add_residual(x, residual, width, hidden);
    row = hidden;
  }
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < width; ++i) sum += row[i];
  const float mean = sum / static_cast<float>(width);
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int i = 0; i < width; ++i) squares += (row[i] - mean) * (row[i] - mean);
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
PS_IVDEP
  for (int i = 0; i < width; ++i) out[i] = (row[i] - mean) * factor * weight[i];
  if (bias == nullptr) return;
PS_IVDEP
  for (int i = 0; i < width; ++i) out[i] += bias[i];
}

void add(const float* a, const float* b, int count, float* out) {
PS_IVDEP
  for (int i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

void scale(const float* x, float factor, int count, float* out) {
PS_IVDEP
  for (int i = 0; i < count; ++i) out[i] = x[i] * factor;
}

void softcap(const float* x, float cap, int count, float* out) {
PS_IVDEP
  for (int i = 0; i < count; ++i) out[i] = cap * tanh_of(x[i] / cap);
}

float smaller(float a, float b) { return a < b ? a : b; }

float larger(float a, float b) { return a > b ? a : b; }

// out = act(gate) * up
template <class Act>
void gate_by(const float* gate, const float* up, int count, float* out, const Act& act) {
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) store(out + i, act(load(gate + i)) * load(up + i));
  if (i == count) return;
  float rest[2][kWidth] = {};
  std::memcpy(rest[0], gate + i, sizeof(float) * (count - i));
  std::memcpy(rest[1], up + i, sizeof(float) * (count - i));
  store(rest[0], act(load(rest[0])) * load(rest[1]));
  std::memcpy(out + i, rest[0], sizeof(float) * (count - i));
}

void gated_act(Activation kind, const float* gate, const float* up, int count, float* out) {
  switch (kind) {
    case Activation::kSilu:
      return gate_by(gate, up, count, out, [](Floats g) { return g * sigmoid_of(g); });
    case Activation::kGelu:
PS_IVDEP
      for (int i = 0; i < count; ++i) {
        out[i] = 0.5f * gate[i] * (1.0f + erf_of(gate[i] * 0.70710678118654752f)) * up[i];
      }
      return;
    case Activation::kGeluTanh:
      return gate_by(gate, up, count, out, [](Floats g) {
        // (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        const Floats twice = g * splat(1.59576912160573072f);
        return g * sigmoid_of(fma(twice * splat(0.044715f), g * g, twice));
      });
    case Activation::kRelu:
PS_IVDEP
      for (int i = 0; i < count; ++i) out[i] = larger(gate[i], 0.0f) * up[i];
      return;
    case Activation::kSwigluOai:
PS_IVDEP
      for (int i = 0; i < count; ++i) {
        const float g = smaller(gate[i], 7.0f);
        const float u = smaller(larger(up[i], -7.0f), 7.0f);
        out[i] = (u + 1.0f) * g * sigmoid_of(1.702f * g);
      }
      return;
  }
}

void rope(const float* x, const float* cosine, const float* sine, int heads, int width, int dim,
          bool interleaved, float* out) {
  const int half = dim / 2;
  for (int head = 0; head < heads; ++head, x += width, out += width) {
    if (interleaved) {
      for (int i = 0; i < half; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        out[2 * i] = a * cosine[i] - b * sine[i];
        out[2 * i + 1] = b * cosine[i] + a * sine[i];
      }
    } else {
PS_IVDEP
      for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        out[i] = a * cosine[i] - b * sine[i];
        out[half + i] = b * cosine[i] + a * sine[i];
      }
    }
    for (int i = dim; i < width; ++i) out[i] = x[i];
  }
}

}  // namespace

extern const ElementwiseKernels elementwise_kernels;
const ElementwiseKernels elementwise_kernels = {
    rms_norm, layer_norm, add, scale, softcap, gated_act, rope,
};

}  // namespace polysilicon::PS_LEVEL
