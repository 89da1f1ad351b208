// Ops on single rows of floats, compiled once per level. No pointer needs an alignment.
#pragma once

#include <cstdint>

namespace polysilicon {

enum class Activation : int { kSilu, kGelu, kGeluTanh, kRelu, kSwigluOai };

struct ElementwiseKernels {
  // hidden = x + residual (x where it is null); out = hidden / sqrt(mean(hidden^2) + eps) * weight.
  // hidden may be x or residual; it may be null where there is no residual.
  void (*rms_norm)(const float* x, const float* residual, const float* weight, float eps, int width,
                   float* hidden, float* out);
  // The same with the mean taken off; bias may be null.
  void (*layer_norm)(const float* x, const float* residual, const float* weight, const float* bias,
                     float eps, int width, float* hidden, float* out);
  void (*add)(const float* a, const float* b, int count, float* out);
  void (*scale)(const float* x, float factor, int count, float* out);
  void (*softcap)(const float* x, float cap, int count, float* out);
  void (*gated_act)(Activation kind, const float* gate, const float* up, int count, float* out);
  // Rotates `heads` heads of `width` by cosines and sines [dim / 2].
  void (*rope)(const float* x, const float* cosine, const float* sine, int heads, int width, int dim,
               bool interleaved, float* out);
};

}  // namespace polysilicon
