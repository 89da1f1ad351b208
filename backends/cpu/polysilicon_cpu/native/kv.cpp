#include "kv.h"

#include <cstring>
#include <string>

namespace polysilicon {
namespace {

int element_bytes(Storage storage) { return storage == Storage::kF32 ? 4 : 2; }

int even(int dim) { return (dim + 1) / 2 * 2; }

int whole_vectors(int dim) { return (dim + 15) / 16 * 16; }

std::size_t whole_lines(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

// Elements of a unit's keys or values, by their number within it.
int key_element(const KVPlane& plane, int offset, int d) {
  if (plane.storage != Storage::kBF16) return d * kUnit + offset;
  return (d / 2 * kUnit + offset) * 2 + d % 2;
}

int value_element(const KVPlane& plane, int offset, int d) {
  const int width = whole_vectors(plane.dim);
  if (plane.storage != Storage::kBF16) return offset * width + d;
  return (offset / 2 * width + d) * 2 + offset % 2;
}

// Calls body(element of the unit, d) for a slot's elements.
template <class Body>
void each_element(const KVPlane& plane, bool key, int offset, const Body& body) {
  for (int d = 0; d < plane.dim; ++d) {
    body(key ? key_element(plane, offset, d) : value_element(plane, offset, d), d);
  }
}

void move_element(void* to, int to_index, const void* from, int from_index, int bytes) {
  std::memcpy(static_cast<std::uint8_t*>(to) + static_cast<std::size_t>(to_index) * bytes,
              static_cast<const std::uint8_t*>(from) + static_cast<std::size_t>(from_index) * bytes,
              static_cast<std::size_t>(bytes));
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
  if (layout.key.dim > 1024 || layout.value.dim > 1024) {
    throw Error("KV heads have at most 1024 dimensions");
  }
}

}  // namespace

KVPool::KVPool(const KVLayout& layout, int pages) : layout_(layout), pages_(pages) {
  check_layout(layout, pages);
  units_per_page_ = layout.page_size < kUnit ? 1 : layout.page_size / kUnit;
  key_bytes_ = whole_lines(static_cast<std::size_t>(even(layout.key.dim)) * kUnit *
                           element_bytes(layout.key.storage));
  value_bytes_ = whole_lines(static_cast<std::size_t>(whole_vectors(layout.value.dim)) * kUnit *
                             element_bytes(layout.value.storage));
  memory_ = Buffer(static_cast<std::size_t>(layout.layers) * pages * layout.heads *
                   units_per_page_ * unit_bytes());
}

void KVPool::gather(int layer, int page, int head, int slot, std::uint8_t* unit) const {
  const std::uint8_t* from = this->page(layer, page, head);
  for (int i = 0; i < layout_.page_size; ++i) move_slot(from, i, unit, slot + i);
}

// Copies one slot's elements between units.
void KVPool::move_slot(const std::uint8_t* from, int from_offset, std::uint8_t* to,
                       int to_offset) const {
  for (const bool key : {true, false}) {
    const KVPlane& plane = key ? layout_.key : layout_.value;
    const int bytes = element_bytes(plane.storage);
    const std::size_t start = key ? 0 : key_bytes_;
    each_element(plane, key, from_offset, [&](int element, int d) {
      const int other = key ? key_element(plane, to_offset, d) : value_element(plane, to_offset, d);
      move_element(to + start, other, from + start, element, bytes);
    });
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

std::size_t KVPool::block_bytes() const {
  const int block = layout_.page_size < kUnit ? layout_.page_size : kUnit;
  const std::size_t token =
      static_cast<std::size_t>(layout_.key.dim) * element_bytes(layout_.key.storage) +
      static_cast<std::size_t>(layout_.value.dim) * element_bytes(layout_.value.storage);
  return token * layout_.heads * block * layout_.layers;
}

template <bool kReading, class Bytes>
void KVPool::transfer(Context& context, int page, Bytes* bytes, std::size_t stride) const {
  if (page < 0 || page >= pages_) {
    throw Error("KV pages must lie in 0.." + std::to_string(pages_ - 1));
  }
  const int block = layout_.page_size < kUnit ? layout_.page_size : kUnit;
  const auto plane_bytes = [&](const KVPlane& plane) {
    return static_cast<std::size_t>(layout_.heads) * block * plane.dim *
           element_bytes(plane.storage);
  };
  const std::size_t layer_bytes = plane_bytes(layout_.key) + plane_bytes(layout_.value);
  context.parallel(layout_.layers, [&](int layer, int) {
    for (int head = 0; head < layout_.heads; ++head) {
      for (int index = 0; index < units_per_page_; ++index) {
        std::uint8_t* unit = this->page(layer, page, head) + index * unit_bytes();
        for (const bool key : {true, false}) {
          const KVPlane& plane = key ? layout_.key : layout_.value;
          const int size = element_bytes(plane.storage);
          std::uint8_t* own = unit + (key ? 0 : key_bytes_);
          Bytes* canonical = bytes + index * stride + layer * layer_bytes +
                             (key ? 0 : plane_bytes(layout_.key));
          for (int slot = 0; slot < block; ++slot) {
            const int row = (head * block + slot) * plane.dim;
            each_element(plane, key, slot, [&](int element, int d) {
              if constexpr (kReading) {
                move_element(canonical, row + d, own, element, size);
              } else {
                move_element(own, element, canonical, row + d, size);
              }
            });
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
