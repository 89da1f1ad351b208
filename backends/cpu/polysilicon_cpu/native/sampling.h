// Sampling, as `polysilicon.batch.SamplingBatch` specifies.
#pragma once

#include <cstdint>

#include "context.h"

namespace polysilicon {

// `SparseRows`; start null where there are none. values: float for bias, int32 for counts.
struct SparseView {
  const std::int32_t* start;  // [rows + 1]
  const std::int32_t* ids;
  const void* values;
};

// Arrays [rows] unless said otherwise.
struct SamplingView {
  int rows;
  int vocabulary;
  const float* logits;  // [rows, vocabulary]
  const std::uint8_t* draw;
  const float* temperature;
  const std::int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* typical_p;
  const float* repetition;
  const float* presence;
  const float* frequency;
  const std::uint64_t* seed;
  const std::uint32_t* choice;
  const std::uint32_t* position;
  SparseView bias;
  SparseView counts;
  const std::uint32_t* mask;    // [rows, ceil(vocabulary / 32)], or null
  const std::int32_t* targets;  // or null
  int top_count;                // of `top_ids`
  // Results. All but the tokens may be null where they are not wanted.
  std::int32_t* tokens;
  float* logprobs;
  float* target_logprobs;
  std::int32_t* top_ids;  // [rows, top_count]
  float* top_logprobs;
};

// Throws Error for ids beyond the vocabulary, OutOfMemory.
void sample(Context& context, const SamplingView& view);

}  // namespace polysilicon
