// KV pools.

#include "api.h"
#include "kv.h"

using namespace polysilicon;

PS_API KVPool* ps_kv_create(Device* device, const KVLayout* layout, int pages, ErrorText* error) {
  return guarded<KVPool*>(error, nullptr, [&] {
    auto pool = std::make_unique<KVPool>(*layout, pages);
    device->queue.when_idle(pool->memory());
    return pool.release();
  });
}

// Nothing that was submitted may still use it.
PS_API void ps_kv_destroy(KVPool* pool) { delete pool; }

PS_API std::size_t ps_kv_bytes(const KVPool* pool) { return pool->bytes(); }

PS_API Queue::Ticket ps_kv_copy(Device* device, KVPool* pool, const std::int32_t* source,
                                const std::int32_t* target, int count) {
  std::vector<std::int32_t> slots(source, source + count);
  slots.insert(slots.end(), target, target + count);
  return device->queue.submit([device, pool, count, slots = std::move(slots)] {
    pool->copy(device->context, slots.data(), slots.data() + count, count);
  });
}

// Pages to `bytes` [count, blocks, stride], the data of each block behind `header` bytes that are
// left as they are; `write` the other way.
PS_API Queue::Ticket ps_kv_read(Device* device, const KVPool* pool, const std::int32_t* pages,
                                int count, std::uint8_t* bytes, std::size_t page_stride,
                                std::size_t stride, std::size_t header) {
  std::vector<std::int32_t> kept(pages, pages + count);
  return device->queue.submit([=, kept = std::move(kept)] {
    std::uint8_t* place = bytes + header;
    for (std::size_t i = 0; i < kept.size(); ++i, place += page_stride) {
      pool->read(device->context, kept[i], place, stride);
    }
  });
}

PS_API Queue::Ticket ps_kv_write(Device* device, KVPool* pool, const std::int32_t* pages,
                                 int count, const std::uint8_t* bytes, std::size_t page_stride,
                                 std::size_t stride, std::size_t header) {
  std::vector<std::int32_t> kept(pages, pages + count);
  return device->queue.submit([=, kept = std::move(kept)] {
    const std::uint8_t* place = bytes + header;
    for (std::size_t i = 0; i < kept.size(); ++i, place += page_stride) {
      pool->write(device->context, kept[i], place, stride);
    }
  });
}
