// The pages of one KV group in the order that attention reads them.
//
// A unit is 16 consecutive slots of one key head of one layer. Its keys stand dimension by
// dimension, so that 16 scores are computed side by side, and its values slot by slot:
//
//   keys, bf16    [dim / 2][16][2], pairs of dimensions for dot products of two
//   keys, else    [dim][16]
//   values, bf16  [8][width][2], pairs of slots
//   values, else  [16][width]
//
// with `dim` rounded up to an even number and `width` to a multiple of 16. Behind codes stand
// the scales of their slots, float [16]; int8 ones are turned (`AttentionKernels::turn`).
// Both of a unit stand together, a page's units of one head in a row:
// [layer][page][head][unit]{keys, values}. Pages of fewer than 16 slots have a unit each that is
// filled in part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "context.h"
#include "fresh_memory.h"
#include "levels/attention.h"

namespace polysilicon {

struct KVPlane {
  int dim;
  Storage storage;
};

struct KVLayout {
  int group;      // index of BatchView::groups
  int layers;
  int heads;
  int page_size;  // a multiple of 16, or below 16
  int window;     // tokens that a query sees, its own included; 0 for all
  KVPlane key, value;
};

class KVPool {
 public:
  // Throws Error where a layout makes no sense, OutOfMemory.
  KVPool(const KVLayout& layout, int pages);

  const KVLayout& layout() const { return layout_; }
  int pages() const { return pages_; }
  std::size_t bytes() const { return memory_->buffer().size(); }

  int units_per_page() const { return units_per_page_; }
  std::size_t unit_bytes() const { return key_bytes_ + value_bytes_; }
  std::size_t key_bytes() const { return key_bytes_; }
  std::size_t value_bytes() const { return value_bytes_; }

  // The first unit of a page; its keys, with the values key_bytes() behind.
  std::uint8_t* page(int layer, int page, int head) const {
    const std::size_t index =
        (static_cast<std::size_t>(layer) * pages_ + page) * layout_.heads + head;
    return memory_->buffer().as<std::uint8_t>() + index * units_per_page_ * unit_bytes();
  }
  // The unit of a slot; the slot's place in it goes to `offset`.
  std::uint8_t* unit(int layer, std::int32_t slot, int head, int* offset) const {
    const int within = slot % layout_.page_size;
    *offset = within % kUnit;
    return page(layer, slot / layout_.page_size, head) + within / kUnit * unit_bytes();
  }

  // The pool's memory, which a queue may provide ahead of use, and that these slots are used.
  std::weak_ptr<FreshMemory> memory() const { return memory_; }
  void use(const std::int32_t* slots, int count);

  // Copies a page of fewer slots than a unit's into a unit's slots from `slot` on.
  void gather(int layer, int page, int head, int slot, std::uint8_t* unit) const;

  // Copies slots, all layers and planes. Throws Error for a slot that the pool has not.
  void copy(Context& context, const std::int32_t* source, const std::int32_t* target, int count);

  // A page's data without headers, [block][layer][plane][head][slot][dim], where blocks are 16
  // slots or a whole page of fewer, and the planes keys, values and the scales of codes;
  // `stride` bytes lie between blocks.
  void read(Context& context, int page, std::uint8_t* into, std::size_t stride) const;
  void write(Context& context, int page, const std::uint8_t* from, std::size_t stride);

  AttentionPlan plan;  // of the op that runs; kept for its memory

 private:
  // A part of a unit: what it holds of each slot.
  struct Field {
    enum class Order { kDimensions, kDimensionPairs, kSlots, kSlotPairs };

    Order order;
    bool scale;
    std::size_t start;  // in the unit
    int dim;            // elements of a slot
    int bytes;          // of an element
    int width;

    std::size_t place(int offset, int d) const;  // in the unit
  };

  void add_fields(const KVPlane& plane, bool key);

  template <bool kReading, class Bytes>
  void transfer(Context& context, int page, Bytes* bytes, std::size_t stride) const;

  void move_slot(const std::uint8_t* from, int from_offset, std::uint8_t* to, int to_offset) const;

  KVLayout layout_;
  int pages_;
  int units_per_page_;
  std::size_t key_bytes_, value_bytes_;
  std::vector<Field> fields_;  // in the order of the canonical planes
  std::shared_ptr<FreshMemory> memory_;  // slabs are layers
};

}  // namespace polysilicon
