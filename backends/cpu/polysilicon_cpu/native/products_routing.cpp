#include "products_routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace polysilicon {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void softmax(float* values, int count) {
  const float largest = *std::max_element(values, values + count);
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += values[i] = std::exp(values[i] - largest);
  for (int i = 0; i < count; ++i) values[i] /= sum;
}

// The largest that is not taken yet, the first of equals.
int best(const float* merit, const bool* taken, int count) {
  int found = -1;
  for (int i = 0; i < count; ++i) {
    if (!taken[i] && (found < 0 || merit[i] > merit[found])) found = i;
  }
  return found;
}

// -inf for the experts outside the best groups.
void keep_best_groups(const Routing& routing, int experts, float* merit, float* totals,
                      bool* taken) {
  const int size = experts / routing.groups;
  for (int group = 0; group < routing.groups; ++group) {
    const float* own = merit + group * size;
    float first = kNever, second = kNever;
    for (int i = 0; i < size; ++i) {
      if (own[i] > first) {
        second = first;
        first = own[i];
      } else if (own[i] > second) {
        second = own[i];
      }
    }
    totals[group] = routing.correction == nullptr || size < 2 ? first : first + second;
  }
  std::fill_n(taken, routing.groups, false);
  for (int i = 0; i < routing.top_groups; ++i) taken[best(totals, taken, routing.groups)] = true;
  for (int group = 0; group < routing.groups; ++group) {
    if (!taken[group]) std::fill_n(merit + group * size, size, kNever);
  }
}

}  // namespace

int route_scratch(int experts) { return 4 * experts; }

void route(const float* logits, int experts, const Routing& routing, float* scratch,
           std::int32_t* chosen, float* weights) {
  float* scores = scratch;
  float* merit = scores + experts;
  float* totals = merit + experts;
  bool* taken = reinterpret_cast<bool*>(totals + experts);
  std::copy_n(logits, experts, scores);
  if (routing.scoring == Scoring::kSoftmax) softmax(scores, experts);
  if (routing.scoring == Scoring::kSigmoid) {
    for (int i = 0; i < experts; ++i) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
  }
  for (int i = 0; i < experts; ++i) {
    merit[i] = scores[i] + (routing.correction == nullptr ? 0.0f : routing.correction[i]);
  }
  if (routing.groups > 1) keep_best_groups(routing, experts, merit, totals, taken);
  std::fill_n(taken, experts, false);
  for (int i = 0; i < routing.top_k; ++i) {
    chosen[i] = best(merit, taken, experts);
    taken[chosen[i]] = true;
    weights[i] = scores[chosen[i]];
  }
  if (routing.scoring == Scoring::kSoftmaxTopK) softmax(weights, routing.top_k);
  float sum = 0;
  for (int i = 0; i < routing.top_k; ++i) sum += weights[i];
  // The smallest normal number keeps a row of vanished sigmoids from dividing zero by zero.
  const float divisor =
      routing.renormalize ? std::max(sum, std::numeric_limits<float>::min()) : 1.0f;
  for (int i = 0; i < routing.top_k; ++i) weights[i] = weights[i] / divisor * routing.scale;
}

}  // namespace polysilicon
