#include "sampling.h"

#include <algorithm>
#include <string>

#include "sampler.h"

namespace polysilicon {
namespace sampling {
namespace {

constexpr int kChunk = 16384;           // logits of one task, a multiple of kBlock
constexpr int kLogitsAtOnce = 1 << 22;  // bounds the working memory

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
    context_.parallel(count_, [&](int row, int thread) {
      Entry* entries = context_.scratch<Entry>(thread);
      draw(row, entries);
      if (reports_) report(row, entries);
    });
  }
}

}  // namespace sampling

void sample(Context& context, const SamplingView& view) {
  if (view.rows == 0) return;
  if (view.vocabulary < 1) throw Error("sampling needs a vocabulary");
  if (view.top_count > view.vocabulary) throw Error("top_logprobs is above the vocabulary");
  sampling::check_ids(view.bias, view.rows, view.vocabulary, "bias");
  sampling::check_ids(view.counts, view.rows, view.vocabulary, "counts");
  for (int row = 0; row < view.rows && view.targets != nullptr; ++row) {
    if (view.targets[row] >= view.vocabulary) throw Error("a target is beyond the vocabulary");
  }
  const int at_once = std::clamp(sampling::kLogitsAtOnce / view.vocabulary, 1, view.rows);
  sampling::Sampler sampler(context, view, at_once);
  for (int first = 0; first < view.rows; first += at_once) {
    sampler.run(first, std::min(at_once, view.rows - first));
  }
}

}  // namespace polysilicon
