// Weights and adapters.

#include "adapters.h"
#include "api.h"
#include "products.h"

using namespace polysilicon;

PS_API Weight* ps_weight_create(Device* device, const PartDescription* parts, int count,
                                int activations, ErrorText* error) {
  return guarded<Weight*>(error, nullptr, [&] {
    Weight* weight = nullptr;
    device->run([&] {
      weight = weight_create(device->context, parts, count,
                             static_cast<Activations>(activations));
    });
    return weight;
  });
}

// Nothing that was submitted may still use it.
PS_API void ps_weight_destroy(Weight* weight) { weight_destroy(weight); }

PS_API std::size_t ps_weight_bytes(const Weight* weight) { return weight_bytes(*weight); }

// Rows of a matrix by number: out [count, inputs].
PS_API bool ps_weight_rows(Device* device, const Weight* weight, const std::int32_t* rows,
                           int count, float* out, ErrorText* error) {
  return guarded(error, false, [&] {
    device->run([&] { embed(device->context, *weight, rows, count, out); });
    return true;
  });
}

// inputs [targets]; parts [targets]: how many; outputs: of all parts of all targets.
PS_API AdapterPool* ps_adapters_create(int targets, const int* inputs, const int* parts,
                                       const int* outputs, int slots, int max_rank,
                                       ErrorText* error) {
  return guarded<AdapterPool*>(error, nullptr, [&] {
    std::vector<AdapterTarget> shapes;
    for (int i = 0; i < targets; ++i) {
      shapes.push_back({inputs[i], std::vector<int>(outputs, outputs + parts[i])});
      outputs += parts[i];
    }
    return new AdapterPool(std::move(shapes), slots, max_rank);
  });
}

PS_API void ps_adapters_destroy(AdapterPool* pool) { delete pool; }

PS_API std::size_t ps_adapters_bytes(const AdapterPool* pool) { return pool->bytes(); }

// A part of an adapter, arrays as AdapterPool::write takes them.
struct AdapterFactors {
  int target, part, rank;
  const float* down;
  const float* up;
};

// Replaces what the slot holds. The arrays must stay until the call has ended.
PS_API Queue::Ticket ps_adapters_write(Device* device, AdapterPool* pool, int slot,
                                       const AdapterFactors* factors, int count) {
  std::vector<AdapterFactors> kept(factors, factors + count);
  return device->queue.submit([pool, slot, kept = std::move(kept)] {
    pool->clear(slot);
    for (const AdapterFactors& part : kept) {
      pool->write(slot, part.target, part.part, part.rank, part.down, part.up);
    }
  });
}
