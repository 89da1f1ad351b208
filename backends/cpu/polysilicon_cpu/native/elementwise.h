// Norms, activations and the other ops on rows, spread over the threads.
#pragma once

#include "context.h"
#include "levels/elementwise.h"
#include "rope.h"
#include "view.h"

namespace polysilicon {

// hidden = x + residual, out = its norm. residual and hidden may have no data: hidden is then x.
void rms_norm(Context& context, const View& x, const View& residual, const float* weight, float eps,
              const View& hidden, const View& out);
void layer_norm(Context& context, const View& x, const View& residual, const float* weight,
                const float* bias, float eps, const View& hidden, const View& out);
void add(Context& context, const View& a, const View& b, const View& out);
void scale(Context& context, const View& x, float factor, const View& out);
void softcap(Context& context, const View& x, float cap, const View& out);
void gated_act(Context& context, Activation kind, const View& gate, const View& up,
               const View& out);
void rotate(Context& context, const View& x, const RopeTable& rope, int heads, const View& out);
void copy(Context& context, const View& x, const View& out);
void select(Context& context, const View& x, const std::int32_t* rows, const View& out);

}  // namespace polysilicon
