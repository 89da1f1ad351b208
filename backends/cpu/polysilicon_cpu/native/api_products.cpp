// Single products, for tests and benchmarks.

#include <chrono>

#include "api.h"
#include "products.h"

using namespace polysilicon;

// x [rows, inputs], out [rows, outputs]; seconds: of each of `repeats` calls, or null.
PS_API bool ps_linear(Device* device, const Weight* weight, const float* x, int rows, float* out,
                      const float* bias, int repeats, double* seconds, ErrorText* error) {
  return guarded(error, false, [&] {
    device->run([&] {
      for (int i = 0; i < repeats; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        linear(device->context, *weight, x, weight_inputs(*weight), rows, out,
               weight_outputs(*weight), bias);
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
        if (seconds != nullptr) seconds[i] = passed.count();
      }
    });
    return true;
  });
}

// Products of a model's layers one after the other, `rows` rows each, `repeats` times over.
// x: rows of inputs, wide enough for any of the weights; out: wide enough for any of them.
PS_API bool ps_linear_chain(Device* device, const Weight* const* weights, int count, const float* x,
                            int rows, float* out, int repeats, double* seconds, ErrorText* error) {
  return guarded(error, false, [&] {
    device->run([&] {
      for (int i = 0; i < repeats; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        for (int w = 0; w < count; ++w) {
          linear(device->context, *weights[w], x, weight_inputs(*weights[w]), rows, out,
                 weight_outputs(*weights[w]), nullptr);
        }
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
        seconds[i] = passed.count();
      }
    });
    return true;
  });
}
