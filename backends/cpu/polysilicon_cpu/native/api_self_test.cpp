// A small computation with every family of a level's kernels, held against the portable ones.
//
// It runs in a process of its own, which an illegal instruction may end.

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "api.h"
#include "attention.h"
#include "elementwise.h"
#include "kv.h"
#include "levels.h"
#include "products.h"

namespace polysilicon {
namespace {

using Values = std::vector<float>;

constexpr int kRows = 37, kInputs = 256, kOutputs = 80;

// Numbers in [-1, 1) that are the same everywhere.
class Numbers {
 public:
  float next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<std::int32_t>(state_ >> 32)) * 0x1p-31f;
  }
  Values next(int count) {
    Values values(static_cast<std::size_t>(count));
    for (float& value : values) value = next();
    return values;
  }

 private:
  std::uint64_t state_ = 1;
};

View view(Values& values, int width) {
  return {values.data(), static_cast<int>(values.size()) / width, width, width};
}

void products(Context& context, const PartDescription& part, std::vector<Values>& results) {
  Numbers numbers;
  const Values x = numbers.next(kRows * kInputs);
  for (const Activations activations :
       {Activations::kFloat32, Activations::kBfloat16, Activations::kInt8, Activations::kAuto}) {
    const std::unique_ptr<Weight, void (*)(Weight*)> weight(
        weight_create(context, &part, 1, activations), weight_destroy);
    for (const int rows : {1, 5, kRows}) {
      Values out(static_cast<std::size_t>(rows * kOutputs));
      linear(context, *weight, x.data(), kInputs, rows, out.data(), kOutputs, nullptr);
      results.push_back(std::move(out));
    }
  }
}

void all_products(Context& context, std::vector<Values>& results) {
  Numbers numbers;
  const Values dense = numbers.next(kOutputs * kInputs);
  PartDescription part{};
  part.experts = 1;
  part.rows = part.row_end = kOutputs;
  part.columns = part.column_end = kInputs;
  part.numbers = dense.data();
  part.type = Number::kFloat32;
  products(context, part, results);
  for (int bits = 2; bits <= 8; ++bits) {
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(kOutputs * kInputs * bits / 8));
    for (std::uint8_t& code : codes) {
      code = static_cast<std::uint8_t>(numbers.next() * 127.0f + 128.0f);
    }
    Values scale = numbers.next(kOutputs * kInputs / 32);
    for (float& value : scale) value = 0.5f + 0.25f * value;
    part.encoding = Encoding::kAffine;
    part.bits = bits;
    part.group = 32;
    part.offset = 1 << (bits - 1);
    part.codes = codes.data();
    part.scale = {scale.data(), Number::kFloat32, nullptr, 0, 0, 0};
    products(context, part, results);
  }
}

void all_elementwise(Context& context, std::vector<Values>& results) {
  Numbers numbers;
  Values x = numbers.next(3 * 77), residual = numbers.next(3 * 77), weight = numbers.next(77);
  Values hidden(x.size()), out(x.size());
  rms_norm(context, view(x, 77), view(residual, 77), weight.data(), 1e-5f, view(hidden, 77),
           view(out, 77));
  results.push_back(out);
  results.push_back(hidden);
  for (const Activation kind : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh}) {
    gated_act(context, kind, view(x, 77), view(residual, 77), view(out, 77));
    results.push_back(out);
  }
}

void all_attention(Context& context, std::vector<Values>& results) {
  constexpr int kTokens = 21, kHeads = 4, kKeyHeads = 2, kDim = 32, kPages = 3;
  Numbers numbers;
  const Values q = numbers.next(kTokens * kHeads * kDim);
  const Values k = numbers.next(kTokens * kKeyHeads * kDim);
  const Values v = numbers.next(kTokens * kKeyHeads * kDim);
  std::vector<std::int32_t> places(kTokens), slots(kTokens);
  for (int i = 0; i < kTokens; ++i) {
    places[static_cast<std::size_t>(i)] = i;
    slots[static_cast<std::size_t>(i)] = 16 + i;
  }
  const std::int32_t query_start[] = {0, kTokens}, context_len[] = {kTokens}, zero[] = {0};
  const std::int32_t page_table[] = {1, 2};
  const GroupView group{page_table, 2, slots.data()};
  const BatchView batch{kTokens,         1,           0,           1,    places.data(),
                        places.data(),   query_start, context_len, zero, zero,
                        zero,            &group,      nullptr,     0};
  for (const Storage storage :
       {Storage::kF32, Storage::kF16, Storage::kBF16, Storage::kI8, Storage::kF8}) {
    KVPool pool({0, 1, kKeyHeads, 16, 0, {kDim, storage}, {kDim, storage}}, kPages);
    AttentionParameters parameters{};
    parameters.heads = kHeads;
    parameters.scale = 0.2f;
    parameters.causal = true;
    Values out(static_cast<std::size_t>(kTokens * kHeads * kDim));
    check_batch(pool, batch);
    const auto view = [](const Values& values) {
      const int width = static_cast<int>(values.size()) / kTokens;
      return View(values.data(), kTokens, width, width);
    };
    attention(context, pool, 0, view(q), view(k), view(v), batch, parameters, out.data());
    results.push_back(std::move(out));
  }
}

std::vector<Values> compute(const Kernels* kernels) {
  Context context(kernels, 1);
  context.deterministic = false;  // every kernel of the level
  std::vector<Values> results;
  all_elementwise(context, results);
  all_products(context, results);
  all_attention(context, results);
  return results;
}

// Coarse: it is to find broken instructions, not to judge rounding.
bool agree(const Values& ours, const Values& theirs) {
  float largest = 0.0f;
  for (const float value : theirs) largest = std::max(largest, std::fabs(value));
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (!(std::fabs(ours[i] - theirs[i]) <= 0.02f * largest)) return false;
  }
  return ours.size() == theirs.size();
}

}  // namespace
}  // namespace polysilicon

using namespace polysilicon;

// 0 where the level's kernels compute what the portable ones do.
PS_API int ps_self_test(const char* level) {
  ErrorText error;
  return guarded(&error, 2, [&] {
    const Kernels* kernels = find_level(level);
    if (kernels == nullptr) return 2;
    const std::vector<Values> ours = compute(kernels), theirs = compute(find_level("portable"));
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (!agree(ours[i], theirs[i])) return 1;
    }
    return 0;
  });
}
