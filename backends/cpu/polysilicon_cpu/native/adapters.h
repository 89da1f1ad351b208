// LoRA adapters by slot (arXiv 2106.09685).
#pragma once

#include <vector>

#include "buffer.h"
#include "products.h"

namespace polysilicon {

struct AdapterTarget {
  int inputs;
  std::vector<int> outputs;  // of each part
};

class AdapterPool {
 public:
  AdapterPool(std::vector<AdapterTarget> targets, int slots, int max_rank);

  int slots() const { return slots_; }
  int max_rank() const { return max_rank_; }
  std::size_t bytes() const { return bytes_; }
  const AdapterTarget& target(int index) const { return targets_[static_cast<std::size_t>(index)]; }

  // [slots, parts] of a target, as `lora` reads them.
  const AdapterPart* parts(int target) const {
    return parts_[static_cast<std::size_t>(target)].data();
  }

  // Copies A [rank, inputs] and B [outputs, rank].
  void write(int slot, int target, int part, int rank, const float* down, const float* up);
  void clear(int slot);

 private:
  std::size_t place(int slot, int target, int part) const;

  std::vector<AdapterTarget> targets_;
  int slots_;
  int max_rank_;
  std::size_t bytes_ = 0;
  std::vector<std::vector<AdapterPart>> parts_;
  std::vector<std::vector<Buffer>> memory_;  // of each part: A, then B
};

}  // namespace polysilicon
