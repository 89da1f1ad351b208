#include <algorithm>

#include "levels/products.h"
#include "products.h"

namespace polysilicon {

void lora(Context& context, const float* x, std::ptrdiff_t x_stride, int inputs,
          const AdapterPart* adapters, int slots, int parts, const int* outputs, int max_rank,
          const BatchView& batch, float* out, std::ptrdiff_t out_stride) {
  bool any = false;
  for (int s = 0; s < batch.sequence_count; ++s) {
    const int slot = batch.adapter_slot[s];
    any = any || (slot > 0 && slot < slots);
  }
  if (!any) return;
  const int widest = *std::max_element(outputs, outputs + parts);
  context.reserve(static_cast<std::size_t>(max_rank + widest) * sizeof(float));
  const ProductKernels& kernels = *context.kernels->products;
  const int begin = batch.query_start[0], end = batch.query_start[batch.sequence_count];
  const int tasks = std::min(end - begin, context.threads);
  context.parallel(tasks, [&](int task, int thread) {
    const auto border = [&](int index) {
      return begin + static_cast<int>(static_cast<std::int64_t>(end - begin) * index / tasks);
    };
    float* inner = context.scratch<float>(thread);
    float* sums = inner + max_rank;
    int sequence = 0;
    for (int token = border(task); token < border(task + 1); ++token) {
      while (batch.query_start[sequence + 1] <= token) ++sequence;
      const int slot = batch.adapter_slot[sequence];
      if (slot <= 0 || slot >= slots) continue;
      float* target = out + token * out_stride;
      for (int part = 0; part < parts; target += outputs[part], ++part) {
        const AdapterPart& adapter = adapters[slot * parts + part];
        if (adapter.down == nullptr) continue;
        kernels.dots(adapter.down, x + token * x_stride, adapter.rank, inputs, inner);
        kernels.dots(adapter.up, inner, outputs[part], adapter.rank, sums);
        for (int n = 0; n < outputs[part]; ++n) target[n] += sums[n];
      }
    }
  });
}

}  // namespace polysilicon
