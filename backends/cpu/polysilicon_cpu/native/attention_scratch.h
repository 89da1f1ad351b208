// The scratch memory of one thread's attention.
#pragma once

#include <cstddef>
#include <cstdint>

#include "levels/attention.h"

namespace polysilicon {

// A thread's scratch memory, cut up.
class Cutter {
 public:
  explicit Cutter(std::uint8_t* memory) : memory_(memory) {}

  template <class T>
  T* take(std::size_t count) {
    T* part = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return part;
  }
  std::size_t used() const { return used_; }

 private:
  std::uint8_t* memory_;
  std::size_t used_ = 0;
};

struct Scratch {
  float* query;             // [Dh]
  std::uint8_t* queries;    // packed tiles
  float* scores;            // [kTileRows][kPart]
  float* part_mixed;        // [kTileRows][width]
  float* mixed;             // [rows][width]
  float* largest;           // [rows]
  float* total;             // [rows]
  std::uint8_t* visible;    // [kTileRows][kPart]
  std::uint8_t* gathered;   // a part's units, of pages below a unit
  std::uint8_t* widened;    // a part's units in the order for products of pairs
  const std::uint8_t** pointers;  // keys, values, and the keys of the next part

  Scratch(Cutter& cutter, int rows, int dim, int width, std::size_t gathered_bytes,
          std::size_t widened_bytes)
      : query(cutter.take<float>(dim)),
        queries(cutter.take<std::uint8_t>(static_cast<std::size_t>(rows + kTileRows) * dim *
                                          sizeof(float))),
        scores(cutter.take<float>(kTileRows * kPart)),
        part_mixed(cutter.take<float>(static_cast<std::size_t>(kTileRows) * width)),
        mixed(cutter.take<float>(static_cast<std::size_t>(rows) * width)),
        largest(cutter.take<float>(rows)),
        total(cutter.take<float>(rows)),
        visible(cutter.take<std::uint8_t>(kTileRows * kPart)),
        gathered(cutter.take<std::uint8_t>(gathered_bytes)),
        widened(cutter.take<std::uint8_t>(widened_bytes)),
        pointers(cutter.take<const std::uint8_t*>(3 * kPartUnits)) {}
};

}  // namespace polysilicon
