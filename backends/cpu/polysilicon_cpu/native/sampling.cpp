#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "levels/sampling.h"

namespace polysilicon {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
// An id whose score lies this far below the best one's cannot win, whatever the noise (from -2.82
// to 22.88); the half is room for rounding.
constexpr float kHopeless = -2.82f - 22.88f - 0.5f;
constexpr int kChunk = 16384;          // logits of one task, a multiple of kBlock
constexpr int kLogitsAtOnce = 1 << 22;  // bounds the working memory

// A candidate; in the order of keys the better one comes first.
struct Entry {
  std::uint64_t key;
  float score;
  float weight;
};

// Puts a larger score first, and of equal ones the lower id.
std::uint64_t key_of(float score, std::int32_t id) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, score);
  const std::uint32_t rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return std::uint64_t{~rising} << 32 | static_cast<std::uint32_t>(id);
}

std::int32_t id_of(const Entry& entry) { return static_cast<std::int32_t>(entry.key); }

bool better(const Entry& a, const Entry& b) { return a.key < b.key; }

// Reorders entries so that the shortest prefix in the order of keys that weighs at least `mass`
// stands first; its length, at least 1.
int shortest_prefix(Entry* entries, int count, double mass) {
  int begin = 0, end = count;
  while (end - begin > 64) {  // quickselect: halve the entries among which the prefix ends
    const int middle = begin + (end - begin) / 2;
    std::nth_element(entries + begin, entries + middle, entries + end, better);
    double below = 0;
    for (int i = begin; i < middle; ++i) below += entries[i].weight;
    if (below >= mass) {
      end = middle;
    } else {
      mass -= below;
      begin = middle;
    }
  }
  std::sort(entries + begin, entries + end, better);
  double reached = 0;
  for (int i = begin; i < end; ++i) {
    reached += entries[i].weight;
    if (reached >= mass) return i + 1;
  }
  return end;
}

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
  void finish(int row, int thread);
  void report_top(int row, Entry* entries);
  int collect(int row, Entry* entries) const;
  int cut(int row, Entry* entries, int count) const;
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

Sampler::Sampler(Context& context, const SamplingView& view, int rows_at_once)
    : context_(context), view_(view), kernels_(*context.kernels->sampling) {
  reports_ = view.logprobs != nullptr || view.target_logprobs != nullptr ||
             view.top_logprobs != nullptr;
  const std::size_t vocabulary = static_cast<std::size_t>(view.vocabulary);
  blocks_ = (view.vocabulary + kBlock - 1) / kBlock;
  // The same whatever the number of rows: sums of a row then have one order.
  chunk_size_ = kChunk;
  chunks_ = (view.vocabulary + chunk_size_ - 1) / chunk_size_;
  std::size_t used = 0;
  const auto place = [&](std::size_t bytes) {
    const std::size_t at = used;
    used += (bytes + 63) / 64 * 64;
    return at;
  };
  const std::size_t rows = static_cast<std::size_t>(rows_at_once);
  const std::size_t row_place = place(rows * sizeof(Row));
  const std::size_t chunk_place = place(rows * chunks_ * sizeof(Chunk));
  const std::size_t maxima_place = place(rows * 2 * blocks_ * sizeof(float));
  const std::size_t copy_place = place(rows * vocabulary * sizeof(float));
  const std::size_t id_place = place(rows * vocabulary * sizeof(std::int32_t));
  const std::size_t score_place = place(rows * vocabulary * sizeof(float));
  std::uint8_t* memory =
      static_cast<std::uint8_t*>(context.workspace(Workspace::kSampling, used));
  rows_ = reinterpret_cast<Row*>(memory + row_place);
  chunk_results_ = reinterpret_cast<Chunk*>(memory + chunk_place);
  copies_ = reinterpret_cast<float*>(memory + copy_place);
  ids_ = reinterpret_cast<std::int32_t*>(memory + id_place);
  scores_ = reinterpret_cast<float*>(memory + score_place);
  for (int row = 0; row < rows_at_once; ++row) {
    rows_[row].maxima = reinterpret_cast<float*>(memory + maxima_place) +
                        static_cast<std::size_t>(row) * 2 * blocks_;
    rows_[row].raw_maxima = rows_[row].maxima + blocks_;
  }
  context.reserve(vocabulary * (sizeof(Entry) + 2 * sizeof(float)));
}

void Sampler::run(int first, int count) {
  first_ = first;
  count_ = count;
  each_chunk([&](int row, int chunk) { scan(row, chunk); });
  bool cuts_by_mass = false, draws = false;
  for (int row = 0; row < count_; ++row) {
    settle(row);
    const Row& state = rows_[row];
    const int i = index(row);
    draws = draws || state.draw == Draw::kRace || state.draw == Draw::kCut;
    cuts_by_mass = cuts_by_mass || (state.draw == Draw::kCut && state.all);
    view_.tokens[i] = view_.draw[i] ? view_.tokens[i] : 0;
  }
  if (cuts_by_mass) {
    each_chunk([&](int row, int chunk) { weigh(row, chunk); });
    for (int row = 0; row < count_; ++row) choose_floor(row);
  }
  if (draws) each_chunk([&](int row, int chunk) { choose(row, chunk); });
  if (draws || reports_) {
    context_.parallel(count_, [&](int row, int thread) { finish(row, thread); });
  }
}

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

void Sampler::weigh(int row, int chunk) {
  const Row& state = rows_[row];
  if (!state.all || state.draw != Draw::kCut) return;
  const int begin = chunk * chunk_size_;
  Chunk& result = chunk_of(row, chunk);
  result.mass = kernels_.mass(state.adjusted + begin, chunk_end(chunk) - begin, state.peak,
                              view_.temperature[index(row)], result.by_floor);
}

// A floor above which the mass that top_p keeps lies, so that few are gathered.
void Sampler::choose_floor(int row) {
  Row& state = rows_[row];
  const int i = index(row);
  if (!state.all || state.draw != Draw::kCut || view_.typical_p[i] < 1) return;
  double total = 0;
  double by_floor[kMassFloorCount] = {};
  for (int chunk = 0; chunk < chunks_; ++chunk) {
    const Chunk& result = chunk_of(row, chunk);
    total += result.mass;
    for (int f = 0; f < kMassFloorCount; ++f) by_floor[f] += result.by_floor[f];
  }
  chunk_of(row, 0).mass = total;
  for (int f = 0; f < kMassFloorCount; ++f) {
    if (by_floor[f] > view_.top_p[i] * total * (1 + 1e-5)) {
      state.floor = kMassFloors[f];
      return;
    }
  }
}

// Races what cannot be cut, gathers what can.
void Sampler::choose(int row, int chunk) {
  const Row& state = rows_[row];
  const int i = index(row);
  if (state.draw != Draw::kRace && state.draw != Draw::kCut) return;
  const int begin = chunk * chunk_size_;
  const std::size_t place = static_cast<std::size_t>(row) * view_.vocabulary + begin;
  Chunk& result = chunk_of(row, chunk);
  const float* x = state.adjusted + begin;
  const float* maxima = state.maxima + begin / kBlock;
  const int count = chunk_end(chunk) - begin;
  if (state.draw == Draw::kRace) {
    const NoiseKey key{view_.seed[i], view_.choice[i], view_.position[i]};
    result.best = kernels_.race_all(x, maxima, count, state.peak, view_.temperature[i],
                                    state.floor, begin, key, &result.winner);
  } else {
    result.gathered = kernels_.gather(x, maxima, count, state.peak, view_.temperature[i],
                                      state.floor, begin, ids_ + place, scores_ + place);
  }
}

void Sampler::finish(int row, int thread) {
  Row& state = rows_[row];
  const int i = index(row);
  Entry* entries = context_.scratch<Entry>(thread);
  if (state.draw == Draw::kRace) {
    float best = kNothing;
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      const Chunk& result = chunk_of(row, chunk);
      if (result.best <= best) continue;
      best = result.best;
      view_.tokens[i] = result.winner;
    }
  } else if (state.draw == Draw::kCut) {
    const int count = cut(row, entries, collect(row, entries));
    float* scores = reinterpret_cast<float*>(entries + view_.vocabulary);
    std::int32_t* ids = reinterpret_cast<std::int32_t*>(scores + view_.vocabulary);
    float peak = kNothing;
    for (int entry = 0; entry < count; ++entry) peak = std::max(peak, entries[entry].score);
    float floor = peak + kHopeless;
    if (view_.min_p[i] > 0) floor = std::max(floor, peak + std::log(view_.min_p[i]));
    int kept = 0;
    for (int entry = 0; entry < count; ++entry) {
      if (entries[entry].score < floor) continue;
      scores[kept] = entries[entry].score;
      ids[kept++] = id_of(entries[entry]);
    }
    const NoiseKey key{view_.seed[i], view_.choice[i], view_.position[i]};
    kernels_.race(ids, scores, kept, key, &view_.tokens[i]);
  }
  if (view_.logprobs != nullptr) view_.logprobs[i] = logprob(row, view_.tokens[i]);
  if (view_.target_logprobs != nullptr) {
    const std::int32_t target = view_.targets[i];
    view_.target_logprobs[i] = target < 0 ? 0 : logprob(row, target);
  }
  if (view_.top_count > 0) report_top(row, entries);
}

// What was gathered of a row, as entries.
int Sampler::collect(int row, Entry* entries) const {
  int count = 0;
  for (int chunk = 0; chunk < chunks_; ++chunk) {
    const std::size_t place =
        static_cast<std::size_t>(row) * view_.vocabulary + chunk * chunk_size_;
    const int gathered = chunk_of(row, chunk).gathered;
    for (int i = 0; i < gathered; ++i) {
      const float score = scores_[place + i];
      entries[count++] = {key_of(score, ids_[place + i]), score, 0};
    }
  }
  return count;
}

// Top-k, typical and top-p: the number of entries that are left, which then stand first.
int Sampler::cut(int row, Entry* entries, int count) const {
  const int i = index(row);
  const int top_k = view_.top_k[i];
  if (top_k > 0 && top_k < count) {
    std::nth_element(entries, entries + top_k, entries + count, better);
    count = top_k;
  }
  float* scores = reinterpret_cast<float*>(entries + view_.vocabulary);
  float* weights = scores + view_.vocabulary;
  // Weights relative to the best score; their sum.
  const auto weigh = [&] {
    float peak = kNothing;
    for (int entry = 0; entry < count; ++entry) peak = std::max(peak, entries[entry].score);
    for (int entry = 0; entry < count; ++entry) scores[entry] = entries[entry].score - peak;
    kernels_.weigh(scores, count, weights);
    double total = 0;
    for (int entry = 0; entry < count; ++entry) {
      entries[entry].weight = weights[entry];
      total += weights[entry];
    }
    return total;
  };
  if (view_.typical_p[i] < 1) {
    const double total = weigh();
    double mean = 0;
    for (int entry = 0; entry < count; ++entry) {
      // A weight of 0 has a score that may be -inf beyond the peak; it adds nothing.
      if (weights[entry] > 0) mean += static_cast<double>(weights[entry]) * scores[entry];
    }
    const float expected = static_cast<float>(mean / total);
    // |-log p - entropy|: the logarithm of the total is in both and falls out.
    for (int entry = 0; entry < count; ++entry) {
      const float surprise = std::abs(scores[entry] - expected);
      entries[entry].key = key_of(-surprise, id_of(entries[entry]));
    }
    count = shortest_prefix(entries, count, view_.typical_p[i] * total);
    for (int entry = 0; entry < count; ++entry) {
      entries[entry].key = key_of(entries[entry].score, id_of(entries[entry]));
    }
  }
  if (view_.top_p[i] < 1) {
    double total = weigh();
    // Where only the likely ones were gathered, the whole is known from an earlier pass.
    const Row& state = rows_[row];
    if (state.all && state.floor > kLowest) total = chunk_of(row, 0).mass;
    count = shortest_prefix(entries, count, view_.top_p[i] * total);
  }
  return count;
}

float Sampler::logprob(int row, std::int32_t id) const {
  const float x = logits(row)[id];
  if (!(x > kNothing)) return kNothing;
  const double finite = std::min(x, std::numeric_limits<float>::max());
  return static_cast<float>((finite - rows_[row].raw_peak) - rows_[row].log_total);
}

// The most likely ids by the model, and their log-probabilities.
void Sampler::report_top(int row, Entry* entries) {
  const Row& state = rows_[row];
  const int wanted = view_.top_count;
  float* scores = reinterpret_cast<float*>(entries + view_.vocabulary);
  std::int32_t* ids = reinterpret_cast<std::int32_t*>(scores + view_.vocabulary);
  float floor = kNothing;
  if (wanted <= blocks_) {
    std::copy(state.raw_maxima, state.raw_maxima + blocks_, scores);
    std::nth_element(scores, scores + wanted - 1, scores + blocks_, std::greater<float>());
    floor = scores[wanted - 1];
  }
  const int count = kernels_.gather(logits(row), state.raw_maxima, view_.vocabulary, 0, 1, floor, 0,
                                    ids, scores);
  for (int entry = 0; entry < count; ++entry) {
    entries[entry] = {key_of(scores[entry], ids[entry]), scores[entry], 0};
  }
  std::partial_sort(entries, entries + wanted, entries + count, better);
  const std::size_t place = static_cast<std::size_t>(index(row)) * wanted;
  for (int entry = 0; entry < wanted; ++entry) {
    view_.top_ids[place + entry] = id_of(entries[entry]);
    view_.top_logprobs[place + entry] = logprob(row, id_of(entries[entry]));
  }
}

void check_ids(const SparseView& sparse, int rows, int vocabulary, const char* what) {
  if (sparse.start == nullptr) return;
  for (int entry = sparse.start[0]; entry < sparse.start[rows]; ++entry) {
    if (sparse.ids[entry] < 0 || sparse.ids[entry] >= vocabulary) {
      throw Error(std::string(what) + " names id " + std::to_string(sparse.ids[entry]) +
                  " of a vocabulary of " + std::to_string(vocabulary));
    }
  }
}

}  // namespace

void sample(Context& context, const SamplingView& view) {
  if (view.rows == 0) return;
  if (view.vocabulary < 1) throw Error("sampling needs a vocabulary");
  if (view.top_count > view.vocabulary) throw Error("top_logprobs is above the vocabulary");
  check_ids(view.bias, view.rows, view.vocabulary, "bias");
  check_ids(view.counts, view.rows, view.vocabulary, "counts");
  for (int row = 0; row < view.rows && view.targets != nullptr; ++row) {
    if (view.targets[row] >= view.vocabulary) throw Error("a target is beyond the vocabulary");
  }
  const int at_once = std::clamp(kLogitsAtOnce / view.vocabulary, 1, view.rows);
  Sampler sampler(context, view, at_once);
  for (int first = 0; first < view.rows; first += at_once) {
    sampler.run(first, std::min(at_once, view.rows - first));
  }
}

}  // namespace polysilicon
