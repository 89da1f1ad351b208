// Cosines and sines of rotary embedding, once a step for all layers that rotate alike.
#pragma once

#include <cstdint>
#include <vector>

#include "context.h"

namespace polysilicon {

// `polysilicon.ops.Rope`. prepare() comes before the ops of a step that read the table.
struct RopeTable {
  // Every op of a device whose frequencies, scale and order are equal can share one table.
  RopeTable(const double* frequencies, int pairs, float scale, bool interleaved);

  void prepare(Context& context, const std::int32_t* positions, int tokens);

  int pairs() const { return static_cast<int>(frequencies_.size()); }  // dim / 2
  bool interleaved() const { return interleaved_; }
  // Of a token, [pairs] each, times `scale`.
  const float* cosine(int token) const { return angles_.as<float>() + row(token); }
  const float* sine(int token) const { return cosine(token) + frequencies_.size(); }

 private:
  std::size_t row(int token) const {
    return static_cast<std::size_t>(token) * 2 * frequencies_.size();
  }

  std::vector<double> frequencies_;
  float scale_;
  bool interleaved_;
  Buffer angles_;
};

}  // namespace polysilicon
