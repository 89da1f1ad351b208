// What the random checks share. Each runs one case at one level and throws Wrong where a result is
// outside of its bound.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "context.h"

namespace polysilicon::checks {

struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  int integer(int low, int high) {  // both included
    return std::uniform_int_distribution<int>(low, high)(engine_);
  }
  bool coin() { return integer(0, 1) == 1; }
  template <class Value>
  Value of(std::initializer_list<Value> values) {
    return values.begin()[integer(0, static_cast<int>(values.size()) - 1)];
  }
  std::vector<float> normal(int count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    std::normal_distribution<float> draw;
    for (float& value : values) value = draw(engine_);
    return values;
  }

 private:
  std::mt19937_64 engine_;
};

inline void expect_near(double actual, double expected, double allowed, const std::string& what) {
  if (std::fabs(actual - expected) <= allowed) return;
  throw Wrong(what + ": " + std::to_string(actual) + " for " + std::to_string(expected) +
              ", allowed is " + std::to_string(allowed));
}

void check_product(Context& context, Random& random);
void check_attention(Context& context, Random& random);
void check_rows(Context& context, Random& random);      // norms and activations
void check_sampling(Context& context, Random& random);

}  // namespace polysilicon::checks
