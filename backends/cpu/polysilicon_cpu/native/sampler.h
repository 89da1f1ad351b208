// The passes that sample from rows of logits, shared out among threads by chunks of a row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "levels/sampling.h"
#include "sampling.h"
#include "sampling_candidates.h"

namespace polysilicon::sampling {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
// An id whose score lies this far below the best one's cannot win, whatever the noise (from -2.82
// to 22.88); the half is room for rounding.
constexpr float kHopeless = -2.82f - 22.88f - 0.5f;

enum class Draw { kNone, kGreedy, kRace, kCut };

// What is known of a row.
struct Row {
  const float* adjusted;  // with bias, mask and penalties; the logits themselves where it has none
  float* maxima;          // of the adjusted row's blocks
  float* raw_maxima;      // of the logits' blocks
  Draw draw;
  float peak;             // of the adjusted row
  float raw_peak;
  double log_total;       // of e^(logit - raw_peak)
  float floor;            // scores to gather from
  bool all;               // no score above -inf is below the floor
};

// What a task found in its chunk of a row.
struct Chunk {
  float raw_peak;
  double raw_mass;  // of e^(logit - raw_peak)
  double mass;
  double by_floor[kMassFloorCount];
  int gathered;
  float best;  // of the race
  std::int32_t winner;
};

class Sampler {
 public:
  Sampler(Context& context, const SamplingView& view, int rows_at_once);

  void run(int first, int count);

 private:
  void scan(int row, int chunk);
  void adjust(int row, int begin, int end, float* out) const;
  void settle(int row);
  void weigh(int row, int chunk);
  void choose_floor(int row);
  void choose(int row, int chunk);
  void draw(int row, Entry* entries);
  int collect(int row, Entry* entries) const;
  int cut(int row, Entry* entries, int count) const;
  void report(int row, Entry* entries) const;
  void report_top(int row, Entry* entries) const;
  float logprob(int row, std::int32_t id) const;

  int index(int row) const { return first_ + row; }
  const float* logits(int row) const {
    return view_.logits + static_cast<std::size_t>(index(row)) * view_.vocabulary;
  }
  bool has_entries(const SparseView& sparse, int row) const {
    return sparse.start != nullptr && sparse.start[index(row)] < sparse.start[index(row) + 1];
  }
  bool is_adjusted(int row) const {
    return view_.draw[index(row)] && (view_.mask != nullptr || has_entries(view_.bias, row) ||
                                      has_entries(view_.counts, row));
  }
  Chunk& chunk_of(int row, int chunk) const {
    return chunk_results_[static_cast<std::size_t>(row) * chunks_ + chunk];
  }
  template <class Body>
  void each_chunk(const Body& body) {
    context_.parallel(count_ * chunks_,
                      [&](int task, int) { body(task / chunks_, task % chunks_); });
  }
  int chunk_end(int chunk) const { return std::min(view_.vocabulary, (chunk + 1) * chunk_size_); }

  Context& context_;
  const SamplingView& view_;
  const SamplingKernels& kernels_;
  bool reports_;
  int blocks_, chunk_size_, chunks_;
  int first_ = 0, count_ = 0;
  Row* rows_;
  Chunk* chunk_results_;
  float* copies_;         // [rows, vocabulary], adjusted
  std::int32_t* ids_;     // [rows, vocabulary], gathered
  float* scores_;
};

}  // namespace polysilicon::sampling
