// Passes over a row of logits, compiled once per level. No pointer needs an alignment.
//
// Every pass takes NaN as -inf and +inf as the largest finite float.
#pragma once

#include <cstdint>

namespace polysilicon {

constexpr int kBlock = 64;  // logits whose largest is kept

// Scores whose mass a pass adds up, beside the whole.
constexpr float kMassFloors[] = {-0.5f, -1.0f, -2.0f, -3.5f, -5.5f, -8.0f, -12.0f, -18.0f};
constexpr int kMassFloorCount = 8;

// The noise of a row's draw, as `polysilicon.sampling.philox` specifies it.
struct NoiseKey {
  std::uint64_t seed;
  std::uint32_t choice, position;
};

struct SamplingKernels {
  // Copies x; ids whose mask bit is 0 become -inf. mask: words from bit 0 on, or null.
  void (*clean)(const float* x, const std::uint32_t* mask, int count, float* out);
  // The largest of every block of 64, the last one perhaps smaller.
  void (*block_maxima)(const float* x, int count, float* maxima);
  // The first index where x equals `value`, which is above -inf; count where there is none.
  int (*find)(const float* x, int count, float value);
  // The sum of e^((x - peak) / temperature), and over the scores at or above each floor where
  // by_floor is not null.
  double (*mass)(const float* x, int count, float peak, float temperature, double* by_floor);
  // Ids (from `first_id` on) and scores (x - peak) / temperature of those with score >= floor, in
  // their order; the number of them.
  int (*gather)(const float* x, const float* maxima, int count, float peak, float temperature,
                float floor, std::int32_t first_id, std::int32_t* ids, float* scores);
  // e^score of each.
  void (*weigh)(const float* scores, int count, float* weights);
  // The id with the largest score + noise of those with score >= floor, and that sum, -inf where
  // there is none; scores as `gather` has them.
  float (*race_all)(const float* x, const float* maxima, int count, float peak, float temperature,
                    float floor, std::int32_t first_id, const NoiseKey& key, std::int32_t* winner);
  // The id with the largest score + noise and that sum; the lowest id among equals.
  float (*race)(const std::int32_t* ids, const float* scores, int count, const NoiseKey& key,
                std::int32_t* winner);
};

}  // namespace polysilicon
