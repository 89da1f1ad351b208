// Paged attention, as `polysilicon.ops.Ops.attention` specifies.
#pragma once

#include "context.h"
#include "kv.h"
#include "rope.h"
#include "view.h"

namespace polysilicon {

struct AttentionParameters {
  int heads;
  float scale;
  const RopeTable* rope = nullptr;  // prepared for this step, or null
  const float* q_norm = nullptr;    // weights [Dh], or null
  const float* k_norm = nullptr;
  float q_eps = 0;
  float k_eps = 0;
  float softcap = 0;                // 0 for none
  const float* sinks = nullptr;     // [heads], or null
  bool causal = true;
  // Products of float32 even where pairs of bf16 would be faster: results are then bitwise the same
  // in every batch.
  bool exact = false;
  const float* key_scales = nullptr;    // calibrated, of fp8 planes: [Hk], or null
  const float* value_scales = nullptr;
};

// Throws Error where a step's page tables, slots or lengths do not fit the pool. Once a step.
void check_batch(const KVPool& pool, const BatchView& batch);

// q [T, heads * Dh]; k [T, Hk * Dh] and v [T, Hk * Dv], or both without data; out [T, heads * Dv].
// layer: index of the pool's layers.
void attention(Context& context, KVPool& pool, int layer, const View& q, const View& k,
               const View& v, const BatchView& batch, const AttentionParameters& parameters,
               float* out);

}  // namespace polysilicon
