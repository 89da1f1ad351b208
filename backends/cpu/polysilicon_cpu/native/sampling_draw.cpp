// Drawing with noise: a race among all ids, or among those that top-k, typical and top-p leave.

#include <cmath>

#include "sampler.h"

namespace polysilicon::sampling {

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

// Decides a row that is drawn with noise.
void Sampler::draw(int row, Entry* entries) {
  const Row& state = rows_[row];
  const int i = index(row);
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

}  // namespace polysilicon::sampling
