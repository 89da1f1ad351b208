// Attention by itself, for tests and benchmarks: programs record it on a tape.

#include "api.h"
#include "attention.h"

using namespace polysilicon;

PS_API RopeTable* ps_rope_create(const double* frequencies, int pairs, float scale,
                                 bool interleaved) {
  return new RopeTable(frequencies, pairs, scale, interleaved);
}

PS_API void ps_rope_destroy(RopeTable* rope) { delete rope; }

// Runs one attention `repeats` times and waits for it. rope: null, or what parameters->rope is.
PS_API bool ps_attention(Device* device, KVPool* pool, int layer, const float* q, const float* k,
                         const float* v, const BatchView* batch, RopeTable* rope,
                         const AttentionParameters* parameters, int repeats, float* out,
                         ErrorText* error) {
  return guarded(error, false, [&] {
    device->run([&] {
      Context& context = device->context;
      check_batch(*pool, *batch);
      const KVLayout& layout = pool->layout();
      const auto view = [&](const float* data, int width) {
        return View(data, batch->token_count, width, width);
      };
      const View queries = view(q, parameters->heads * layout.key.dim);
      const View keys = view(k, layout.heads * layout.key.dim);
      const View values = view(v, layout.heads * layout.value.dim);
      for (int i = 0; i < repeats; ++i) {
        if (rope != nullptr) rope->prepare(context, batch->positions, batch->token_count);
        attention(context, *pool, layer, queries, keys, values, *batch, *parameters, out);
      }
    });
    return true;
  });
}
