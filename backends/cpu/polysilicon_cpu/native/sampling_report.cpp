// Log-probabilities as the model gave them.

#include "sampler.h"

namespace polysilicon::sampling {

void Sampler::report(int row, Entry* entries) const {
  const int i = index(row);
  if (view_.logprobs != nullptr) view_.logprobs[i] = logprob(row, view_.tokens[i]);
  if (view_.target_logprobs != nullptr) {
    const std::int32_t target = view_.targets[i];
    view_.target_logprobs[i] = target < 0 ? 0 : logprob(row, target);
  }
  if (view_.top_count > 0) report_top(row, entries);
}

float Sampler::logprob(int row, std::int32_t id) const {
  const float x = logits(row)[id];
  if (!(x > kNothing)) return kNothing;
  const double finite = std::min(x, std::numeric_limits<float>::max());
  return static_cast<float>((finite - rows_[row].raw_peak) - rows_[row].log_total);
}

// The most likely ids by the model, and their log-probabilities.
void Sampler::report_top(int row, Entry* entries) const {
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

}  // namespace polysilicon::sampling
