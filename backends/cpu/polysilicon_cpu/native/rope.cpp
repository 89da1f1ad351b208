#include "rope.h"

#include "levels/attention.h"

namespace polysilicon {

RopeTable::RopeTable(const double* frequencies, int pairs, float scale, bool interleaved)
    : frequencies_(frequencies, frequencies + pairs), scale_(scale), interleaved_(interleaved) {}

void RopeTable::prepare(Context& context, const std::int32_t* positions, int tokens) {
  angles_.grow(row(tokens) * sizeof(float));
  constexpr int kTokens = 16;  // of one task
  context.parallel((tokens + kTokens - 1) / kTokens, [&](int task, int) {
    const int end = task * kTokens + kTokens < tokens ? task * kTokens + kTokens : tokens;
    for (int token = task * kTokens; token < end; ++token) {
      float* out = angles_.as<float>() + row(token);
      context.kernels->attention->angles(frequencies_.data(), pairs(), scale_, positions[token],
                                         out, out + pairs());
    }
  });
}

}  // namespace polysilicon
