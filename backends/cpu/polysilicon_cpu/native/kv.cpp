#include "kv.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace polysilicon {
namespace {

int element_bytes(Storage storage) {
  return storage == Storage::kF32 ? 4 : has_scale(storage) ? 1 : 2;
}

int even(int dim) { return (dim + 1) / 2 * 2; }

int whole_vectors(int dim) { return (dim + 15) / 16 * 16; }

// Bytes of a unit's keys or values, scales included.
std::size_t field_bytes(const KVPlane& plane, int columns) {
  std::size_t bytes = static_cast<std::size_t>(columns) * kUnit * element_bytes(plane.storage);
  if (has_scale(plane.storage)) bytes += sizeof(float) * kUnit;
  return (bytes + 63) / 64 * 64;
}

void check_layout(const KVLayout& layout, int pages) {
  const bool fits = layout.group >= 0 && layout.layers > 0 && layout.heads > 0 && pages > 0 &&
                    layout.window >= 0 && layout.key.dim > 0 && layout.value.dim > 0;
  if (!fits) throw Error("a KV pool needs pages, layers, heads and dimensions");
  if (layout.page_size < 1 || (layout.page_size > kUnit && layout.page_size % kUnit != 0) ||
      (layout.page_size < kUnit && kUnit % layout.page_size != 0)) {
    throw Error("a KV page has 1, 2, 4, 8 or a multiple of 16 slots, not " +
                std::to_string(layout.page_size));
  }
  if (layout.key.dim > kMaxDim || layout.value.dim > kMaxDim) {
    throw Error("KV heads have at most " + std::to_string(kMaxDim) + " dimensions");
  }
}

}  // namespace

KVPool::KVPool(const KVLayout& layout, int pages) : layout_(layout), pages_(pages) {
  check_layout(layout, pages);
  units_per_page_ = layout.page_size < kUnit ? 1 : layout.page_size / kUnit;
  key_bytes_ = field_bytes(layout.key, even(layout.key.dim));
  value_bytes_ = field_bytes(layout.value, whole_vectors(layout.value.dim));
  add_fields(layout.key, true);
  add_fields(layout.value, false);
  std::stable_partition(fields_.begin(), fields_.end(),
                        [](const Field& field) { return !field.scale; });
  const std::size_t slab =
      static_cast<std::size_t>(pages) * layout.heads * units_per_page_ * unit_bytes();
  memory_ = std::make_shared<FreshMemory>(static_cast<std::size_t>(layout.layers), slab);
}

void KVPool::use(const std::int32_t* slots, int count) {
  if (count == 0) return;
  const int last = *std::max_element(slots, slots + count) / layout_.page_size;
  memory_->use(static_cast<std::size_t>(page(0, last + 1, 0) - page(0, 0, 0)));
}

void KVPool::add_fields(const KVPlane& plane, bool key) {
  const bool pairs = plane.storage == Storage::kBF16;
  const std::size_t start = key ? 0 : key_bytes_;
  if (key) {
    const auto order = pairs ? Field::Order::kDimensionPairs : Field::Order::kDimensions;
    fields_.push_back({order, false, start, plane.dim, element_bytes(plane.storage), 0});
  } else {
    const auto order = pairs ? Field::Order::kSlotPairs : Field::Order::kSlots;
    fields_.push_back({order, false, start, plane.dim, element_bytes(plane.storage),
                       whole_vectors(plane.dim)});
  }
  if (has_scale(plane.storage)) {
    const int columns = key ? even(plane.dim) : whole_vectors(plane.dim);
    fields_.push_back({Field::Order::kDimensions, true,
                       start + static_cast<std::size_t>(scales_start(columns)), 1, sizeof(float),
                       0});
  }
}

std::size_t KVPool::Field::place(int offset, int d) const {
  int element = 0;
  switch (order) {
    case Order::kDimensions: element = d * kUnit + offset; break;
    case Order::kDimensionPairs: element = (d / 2 * kUnit + offset) * 2 + d % 2; break;
    case Order::kSlots: element = offset * width + d; break;
    case Order::kSlotPairs: element = (offset / 2 * width + d) * 2 + offset % 2; break;
  }
  return start + static_cast<std::size_t>(element) * bytes;
}

void KVPool::gather(int layer, int page, int head, int slot, std::uint8_t* unit) const {
  const std::uint8_t* from = this->page(layer, page, head);
  for (int i = 0; i < layout_.page_size; ++i) move_slot(from, i, unit, slot + i);
}

// Copies one slot's elements between units.
void KVPool::move_slot(const std::uint8_t* from, int from_offset, std::uint8_t* to,
                       int to_offset) const {
  for (const Field& field : fields_) {
    for (int d = 0; d < field.dim; ++d) {
      std::memcpy(to + field.place(to_offset, d), from + field.place(from_offset, d),
                  static_cast<std::size_t>(field.bytes));
    }
  }
}

void KVPool::copy(Context& context, const std::int32_t* source, const std::int32_t* target,
                  int count) {
  const std::int64_t slots = static_cast<std::int64_t>(pages_) * layout_.page_size;
  for (int i = 0; i < count; ++i) {
    if (source[i] < 0 || source[i] >= slots || target[i] < 0 || target[i] >= slots) {
      throw Error("KV slots to copy must lie in 0.." + std::to_string(slots - 1));
    }
  }
  context.parallel(layout_.layers * layout_.heads, [&](int task, int) {
    const int layer = task / layout_.heads, head = task % layout_.heads;
    for (int i = 0; i < count; ++i) {
      int from_offset, to_offset;
      const std::uint8_t* from = unit(layer, source[i], head, &from_offset);
      std::uint8_t* to = unit(layer, target[i], head, &to_offset);
      move_slot(from, from_offset, to, to_offset);
    }
  });
}

template <bool kReading, class Bytes>
void KVPool::transfer(Context& context, int page, Bytes* bytes, std::size_t stride) const {
  if (page < 0 || page >= pages_) {
    throw Error("KV pages must lie in 0.." + std::to_string(pages_ - 1));
  }
  const int block = layout_.page_size < kUnit ? layout_.page_size : kUnit;
  std::size_t layer_bytes = 0;
  for (const Field& field : fields_) {
    layer_bytes += static_cast<std::size_t>(layout_.heads) * block * field.dim * field.bytes;
  }
  context.parallel(layout_.layers, [&](int layer, int) {
    for (int index = 0; index < units_per_page_; ++index) {
      Bytes* canonical = bytes + index * stride + layer * layer_bytes;
      for (const Field& field : fields_) {
        for (int head = 0; head < layout_.heads; ++head) {
          std::uint8_t* unit = this->page(layer, page, head) + index * unit_bytes();
          for (int slot = 0; slot < block; ++slot) {
            for (int d = 0; d < field.dim; ++d, canonical += field.bytes) {
              std::uint8_t* own = unit + field.place(slot, d);
              const std::size_t size = static_cast<std::size_t>(field.bytes);
              if constexpr (kReading) {
                std::memcpy(canonical, own, size);
              } else {
                std::memcpy(own, canonical, size);
              }
            }
          }
        }
      }
    }
  });
}

void KVPool::read(Context& context, int page, std::uint8_t* into, std::size_t stride) const {
  transfer<true>(context, page, into, stride);
}

void KVPool::write(Context& context, int page, const std::uint8_t* from, std::size_t stride) {
  transfer<false>(context, page, from, stride);
}

}  // namespace polysilicon
