// Paged attention of random sequences against float64.

#include "attention.h"

#include <algorithm>
#include <numeric>

#include "checks.h"
#include "numbers.h"

namespace polysilicon::checks {
namespace {

float rounded(Storage storage, float value) {
  if (storage == Storage::kF32) return value;
  if (storage == Storage::kF16) {  // drawn values are normal numbers of it
    const int exponent = std::ilogb(value);
    return std::ldexp(std::nearbyint(std::ldexp(value, 10 - exponent)), exponent - 10);
  }
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  return bfloat16_value(static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

}  // namespace

void check_attention(Context& context, Random& random) {
  constexpr int kPageSize = 16;
  const int key_heads = random.integer(1, 3), group = random.integer(1, 4);
  const int heads = key_heads * group, dim = 2 * random.integer(1, 40);
  const int sequences = random.integer(1, 3), window = random.coin() ? 0 : random.integer(1, 40);
  const Storage storage = random.of({Storage::kF32, Storage::kF16, Storage::kBF16});
  std::vector<std::int32_t> start{0}, lengths;
  for (int s = 0; s < sequences; ++s) {
    lengths.push_back(random.coin() ? random.integer(1, 40) : random.integer(200, 300));
    start.push_back(start.back() + lengths.back());
  }
  const int tokens = start.back();
  const int width = 20, pages = 1 + sequences * width;
  std::vector<std::int32_t> shuffled(static_cast<std::size_t>(pages - 1));
  std::iota(shuffled.begin(), shuffled.end(), 1);
  for (int i = pages - 2; i > 0; --i) {
    std::swap(shuffled[static_cast<std::size_t>(i)],
              shuffled[static_cast<std::size_t>(random.integer(0, i))]);
  }
  KVPool pool({0, 1, key_heads, kPageSize, window, {dim, storage}, {dim, storage}}, pages);
  const int inner = heads * dim, stored = key_heads * dim;
  const std::vector<float> q = random.normal(tokens * inner), k = random.normal(tokens * stored),
                           v = random.normal(tokens * stored), sinks = random.normal(heads);
  AttentionParameters parameters{};
  parameters.heads = heads;
  parameters.scale = 1.0f / std::sqrt(static_cast<float>(dim));
  parameters.softcap = random.integer(0, 3) == 0 ? 5.0f : 0.0f;
  parameters.sinks = random.integer(0, 3) == 0 ? sinks.data() : nullptr;
  parameters.exact = random.coin();
  std::vector<float> out(q.size());

  // In two steps: all but the last `late` tokens of each sequence, then these.
  const int least = *std::min_element(lengths.begin(), lengths.end());
  const int late = random.integer(0, std::min(least - 1, 5));
  for (int step = 0; step < (late > 0 ? 2 : 1); ++step) {
    std::vector<std::int32_t> positions, slots, query_start{0}, context_len, rows, zeros;
    std::vector<float> step_q, step_k, step_v;
    std::vector<int> which;
    for (int s = 0; s < sequences; ++s) {
      const int early = lengths[static_cast<std::size_t>(s)] - late;
      const int begin = step == 0 ? 0 : early;
      const int end = step == 0 ? early : lengths[static_cast<std::size_t>(s)];
      for (int position = begin; position < end; ++position) {
        const int token = start[static_cast<std::size_t>(s)] + position;
        which.push_back(token);
        positions.push_back(position);
        slots.push_back(shuffled[static_cast<std::size_t>(s * width + position / kPageSize)] *
                            kPageSize + position % kPageSize);
        step_q.insert(step_q.end(), q.begin() + token * inner, q.begin() + (token + 1) * inner);
        step_k.insert(step_k.end(), k.begin() + token * stored, k.begin() + (token + 1) * stored);
        step_v.insert(step_v.end(), v.begin() + token * stored, v.begin() + (token + 1) * stored);
      }
      query_start.push_back(static_cast<std::int32_t>(which.size()));
      context_len.push_back(end);
      rows.push_back(query_start.back() - 1);
      zeros.push_back(0);
    }
    const int count = static_cast<int>(which.size());
    const GroupView view_of_group{shuffled.data(), width, slots.data()};
    const BatchView batch{count, sequences, sequences, 1, positions.data(), positions.data(),
                          query_start.data(), context_len.data(), rows.data(), zeros.data(),
                          zeros.data(), &view_of_group, nullptr, 0};
    check_batch(pool, batch);
    std::vector<float> step_out(step_q.size());
    attention(context, pool, 0, View(step_q.data(), count, inner, inner),
              View(step_k.data(), count, stored, stored),
              View(step_v.data(), count, stored, stored), batch, parameters, step_out.data());
    for (int i = 0; i < count; ++i) {
      std::copy_n(step_out.begin() + i * inner, inner,
                  out.begin() + which[static_cast<std::size_t>(i)] * inner);
    }
  }

  const double allowed = storage == Storage::kBF16 && !parameters.exact ? 0.04 : 2e-4;
  for (int s = 0; s < sequences; ++s) {
    // The first, the last and some between.
    const int length = lengths[static_cast<std::size_t>(s)];
    for (int position = 0; position < length; position += random.integer(1, 1 + length / 4)) {
      const int token = start[static_cast<std::size_t>(s)] + position;
      const int first = window == 0 ? 0 : std::max(0, position - window + 1);
      for (int head = 0; head < heads; ++head) {
        std::vector<double> weights;
        double largest = parameters.sinks == nullptr ? -1e30 : static_cast<double>(sinks[
            static_cast<std::size_t>(head)]);
        for (int other = first; other <= position; ++other) {
          double score = 0;
          for (int d = 0; d < dim; ++d) {
            const int key = (start[static_cast<std::size_t>(s)] + other) * stored +
                            head / group * dim + d;
            score += static_cast<double>(q[static_cast<std::size_t>(token * inner + head * dim +
                                                                    d)]) *
                     rounded(storage, k[static_cast<std::size_t>(key)]);
          }
          score *= parameters.scale;
          const double cap = parameters.softcap;
          if (cap > 0) score = cap * std::tanh(score / cap);
          weights.push_back(score);
          largest = std::max(largest, score);
        }
        double total = parameters.sinks == nullptr
                           ? 0.0
                           : std::exp(sinks[static_cast<std::size_t>(head)] - largest);
        for (double& weight : weights) total += weight = std::exp(weight - largest);
        for (int d = 0; d < dim; ++d) {
          double mixed = 0;
          for (int other = first; other <= position; ++other) {
            const int value = (start[static_cast<std::size_t>(s)] + other) * stored +
                              head / group * dim + d;
            mixed += weights[static_cast<std::size_t>(other - first)] *
                     rounded(storage, v[static_cast<std::size_t>(value)]);
          }
          expect_near(out[static_cast<std::size_t>(token * inner + head * dim + d)], mixed / total,
                      allowed, "position " + std::to_string(position) + ", head " +
                                   std::to_string(head) + ", dim " + std::to_string(dim));
        }
      }
    }
  }
}

}  // namespace polysilicon::checks
