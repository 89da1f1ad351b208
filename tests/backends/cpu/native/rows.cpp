// Norms, activations, softcap and sampling of random rows against float64.

#include <algorithm>

#include "checks.h"
#include "elementwise.h"
#include "sampling.h"

namespace polysilicon::checks {
namespace {

double activated(Activation kind, double x) {
  if (kind == Activation::kSilu) return x / (1 + std::exp(-x));
  if (kind == Activation::kGelu) return x * 0.5 * (1 + std::erf(x / std::sqrt(2.0)));
  if (kind == Activation::kRelu) return std::max(x, 0.0);
  return x * 0.5 * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

}  // namespace

void check_rows(Context& context, Random& random) {
  const int rows = random.integer(1, 5), width = random.integer(1, 300), count = rows * width;
  const auto size = static_cast<std::size_t>(count);
  const std::vector<float> x = random.normal(count), other = random.normal(count),
                           weight = random.normal(width);
  std::vector<float> hidden(size), out(size);
  const auto view = [&](const std::vector<float>& values) {
    return View(values.data(), rows, width, width);
  };
  rms_norm(context, view(x), view(other), weight.data(), 1e-5f, view(hidden), view(out));
  for (int row = 0; row < rows; ++row) {
    double squares = 0;
    for (int i = 0; i < width; ++i) {
      const auto at = static_cast<std::size_t>(row * width + i);
      squares += std::pow(static_cast<double>(x[at]) + other[at], 2);
    }
    const double factor = 1 / std::sqrt(squares / width + 1e-5);
    for (int i = 0; i < width; ++i) {
      const auto at = static_cast<std::size_t>(row * width + i);
      const double sum = static_cast<double>(x[at]) + other[at];
      expect_near(hidden[at], sum, 1e-6 * (1 + std::fabs(sum)), "residual");
      const double expected = sum * factor * weight[static_cast<std::size_t>(i)];
      expect_near(out[at], expected, 1e-5 * (1 + std::fabs(expected)), "rms_norm");
    }
  }
  const Activation kind = random.of(
      {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu});
  gated_act(context, kind, view(x), view(other), view(out));
  for (std::size_t i = 0; i < size; ++i) {
    expect_near(out[i], activated(kind, x[i]) * other[i], 2e-6 * (1 + std::fabs(other[i]) * 4),
                "gated_act");
  }
  softcap(context, view(x), 3.0f, view(out));
  for (std::size_t i = 0; i < size; ++i) {
    expect_near(out[i], 3 * std::tanh(x[i] / 3.0), 5e-6, "softcap");
  }
}

// Greedy rows against the largest logit; drawn ones stay within top_k, and the log-probability of
// each token is that of the softmax.
void check_sampling(Context& context, Random& random) {
  const int rows = random.integer(1, 4), vocabulary = random.integer(1, 1500);
  const auto count = static_cast<std::size_t>(rows);
  const std::vector<float> logits = random.normal(rows * vocabulary);
  const std::vector<std::uint8_t> draw(count, 1);
  const bool greedy = random.coin();
  const std::vector<float> temperature(count, greedy ? 0.0f : 0.7f), one(count, 1.0f),
      zero(count, 0.0f);
  const std::vector<std::int32_t> top_k(count, random.integer(1, 20));
  std::vector<std::uint64_t> seed(count);
  for (std::uint64_t& value : seed) value = static_cast<std::uint64_t>(random.integer(0, 1 << 30));
  const std::vector<std::uint32_t> choice(count, 0), position(count, 5);
  std::vector<std::int32_t> tokens(count);
  std::vector<float> logprobs(count);
  SamplingView view{};
  view.rows = rows;
  view.vocabulary = vocabulary;
  view.logits = logits.data();
  view.draw = draw.data();
  view.temperature = temperature.data();
  view.top_k = top_k.data();
  view.top_p = one.data();
  view.min_p = zero.data();
  view.typical_p = one.data();
  view.repetition = one.data();
  view.presence = view.frequency = zero.data();
  view.seed = seed.data();
  view.choice = choice.data();
  view.position = position.data();
  view.tokens = tokens.data();
  view.logprobs = logprobs.data();
  sample(context, view);
  for (std::size_t row = 0; row < count; ++row) {
    const float* values = logits.data() + row * static_cast<std::size_t>(vocabulary);
    const int token = tokens[row];
    if (token < 0 || token >= vocabulary) throw Wrong("a token beyond the vocabulary");
    const auto above = std::count_if(values, values + vocabulary,
                                     [&](float value) { return value > values[token]; });
    if (above >= (greedy ? 1 : top_k[row])) throw Wrong("a token that is not among the best");
    double total = 0;
    for (int i = 0; i < vocabulary; ++i) total += std::exp(static_cast<double>(values[i]));
    expect_near(logprobs[row], values[token] - std::log(total), 1e-4, "log-probability");
  }
}

}  // namespace polysilicon::checks
