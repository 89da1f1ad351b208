// The first passes over a row: what is done to its logits, and what is known of it after that.

#include <cmath>

#include "sampler.h"

namespace polysilicon::sampling {

// The first pass: adjusted copies, blocks' maxima, and what log-probabilities need.
void Sampler::scan(int row, int chunk) {
  Row& state = rows_[row];
  const int begin = chunk * chunk_size_, end = chunk_end(chunk);
  const bool adjusted = is_adjusted(row);
  const float* x = logits(row);
  if (adjusted) {
    float* copy = copies_ + static_cast<std::size_t>(row) * view_.vocabulary;
    adjust(row, begin, end, copy);
    kernels_.block_maxima(copy + begin, end - begin, state.maxima + begin / kBlock);
  }
  if (!adjusted || reports_) {
    float* maxima = adjusted ? state.raw_maxima : state.maxima;
    kernels_.block_maxima(x + begin, end - begin, maxima + begin / kBlock);
    if (!reports_) return;
    Chunk& result = chunk_of(row, chunk);
    const int blocks = (end - begin + kBlock - 1) / kBlock;
    result.raw_peak = *std::max_element(maxima + begin / kBlock, maxima + begin / kBlock + blocks);
    result.raw_mass = result.raw_peak == kNothing
                          ? 0
                          : kernels_.mass(x + begin, end - begin, result.raw_peak, 1, nullptr);
  }
}

// Bias, mask and penalties of the ids from begin to end. The mask comes first here: nothing that is
// added to -inf changes it.
void Sampler::adjust(int row, int begin, int end, float* out) const {
  const auto cleaned = [](float x) {
    return !(x > kNothing) ? kNothing : std::min(x, std::numeric_limits<float>::max());
  };
  const int i = index(row);
  const std::size_t words = (static_cast<std::size_t>(view_.vocabulary) + 31) / 32;
  const std::uint32_t* mask =
      view_.mask == nullptr ? nullptr : view_.mask + i * words + begin / 32;
  kernels_.clean(logits(row) + begin, mask, end - begin, out + begin);
  const auto each = [&](const SparseView& sparse, const auto& body) {
    if (sparse.start == nullptr) return;
    for (int entry = sparse.start[i]; entry < sparse.start[i + 1]; ++entry) {
      const int id = sparse.ids[entry];
      if (id >= begin && id < end) out[id] = cleaned(body(out[id], entry));
    }
  };
  each(view_.bias, [&](float x, int entry) {
    return x + static_cast<const float*>(view_.bias.values)[entry];
  });
  each(view_.counts, [&](float x, int entry) {
    const std::int32_t count = static_cast<const std::int32_t*>(view_.counts.values)[entry];
    x = x > 0 ? x / view_.repetition[i] : x * view_.repetition[i];
    x -= view_.frequency[i] * static_cast<float>(count);
    return x - view_.presence[i] * static_cast<float>(count > 0);
  });
}

// Puts the chunks' first findings together, decides greedy rows, and says how others go on.
void Sampler::settle(int row) {
  Row& state = rows_[row];
  const int i = index(row);
  const bool adjusted = is_adjusted(row);
  state.adjusted =
      adjusted ? copies_ + static_cast<std::size_t>(row) * view_.vocabulary : logits(row);
  state.draw = Draw::kNone;
  state.all = false;
  if (reports_) {
    if (!adjusted) std::copy(state.maxima, state.maxima + blocks_, state.raw_maxima);
    float peak = kNothing;
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      peak = std::max(peak, chunk_of(row, chunk).raw_peak);
    }
    double total = 0;
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      const Chunk& result = chunk_of(row, chunk);
      if (result.raw_mass > 0) {
        total += result.raw_mass * std::exp(static_cast<double>(result.raw_peak) - peak);
      }
    }
    state.raw_peak = peak == kNothing ? 0 : peak;
    state.log_total = peak == kNothing ? 0 : std::log(total);
  }
  if (!view_.draw[i]) return;
  const float* highest = std::max_element(state.maxima, state.maxima + blocks_);
  state.peak = *highest;
  if (state.peak == kNothing) {
    const std::size_t words = (static_cast<std::size_t>(view_.vocabulary) + 31) / 32;
    int id = 0;
    if (view_.mask != nullptr) {
      const std::uint32_t* mask = view_.mask + i * words;
      while (id < view_.vocabulary && !(mask[id / 32] >> id % 32 & 1)) ++id;
    }
    view_.tokens[i] = id < view_.vocabulary ? id : 0;
    return;
  }
  if (view_.temperature[i] == 0) {
    state.draw = Draw::kGreedy;
    const int begin = static_cast<int>(highest - state.maxima) * kBlock;
    view_.tokens[i] = begin + kernels_.find(state.adjusted + begin,
                                            std::min(kBlock, view_.vocabulary - begin), state.peak);
    return;
  }
  const int top_k = view_.top_k[i];
  if (top_k > 0 && top_k < view_.vocabulary) {
    state.draw = Draw::kCut;
    state.floor = kLowest;
    if (top_k <= blocks_) {
      // As many blocks have a logit that is at least so large.
      float* sorted = scores_ + static_cast<std::size_t>(row) * view_.vocabulary;
      std::copy(state.maxima, state.maxima + blocks_, sorted);
      std::nth_element(sorted, sorted + top_k - 1, sorted + blocks_, std::greater<float>());
      const float bound = (sorted[top_k - 1] - state.peak) / view_.temperature[i];
      state.floor = std::max(bound, kLowest);
    }
  } else if (view_.top_p[i] < 1 || view_.typical_p[i] < 1) {
    state.draw = Draw::kCut;
    state.floor = kLowest;
    state.all = true;
  } else {
    state.draw = Draw::kRace;
    state.floor = kHopeless;
    if (view_.min_p[i] > 0) state.floor = std::max(state.floor, std::log(view_.min_p[i]));
  }
}

}  // namespace polysilicon::sampling
