#include "adapters.h"

#include <cstring>
#include <utility>

namespace polysilicon {

AdapterPool::AdapterPool(std::vector<AdapterTarget> targets, int slots, int max_rank)
    : targets_(std::move(targets)), slots_(slots), max_rank_(max_rank) {
  for (const AdapterTarget& target : targets_) {
    const std::size_t count = static_cast<std::size_t>(slots) * target.outputs.size();
    parts_.emplace_back(count, AdapterPart{nullptr, nullptr, 0});
    memory_.emplace_back(count);
  }
}

std::size_t AdapterPool::place(int slot, int target, int part) const {
  return static_cast<std::size_t>(slot) * this->target(target).outputs.size() +
         static_cast<std::size_t>(part);
}

void AdapterPool::write(int slot, int target, int part, int rank, const float* down,
                        const float* up) {
  const AdapterTarget& shape = this->target(target);
  const std::size_t ranks = static_cast<std::size_t>(rank);
  const std::size_t inputs = static_cast<std::size_t>(shape.inputs);
  const std::size_t outputs =
      static_cast<std::size_t>(shape.outputs[static_cast<std::size_t>(part)]);
  Buffer made(ranks * (inputs + outputs) * sizeof(float));
  float* first = made.as<float>();
  std::memcpy(first, down, ranks * inputs * sizeof(float));
  std::memcpy(first + ranks * inputs, up, ranks * outputs * sizeof(float));
  const std::size_t index = place(slot, target, part);
  Buffer& memory = memory_[static_cast<std::size_t>(target)][index];
  bytes_ += made.size();
  bytes_ -= memory.size();
  memory = std::move(made);
  parts_[static_cast<std::size_t>(target)][index] = {first, first + ranks * inputs, rank};
}

void AdapterPool::clear(int slot) {
  for (std::size_t target = 0; target < targets_.size(); ++target) {
    for (std::size_t part = 0; part < targets_[target].outputs.size(); ++part) {
      const std::size_t index = place(slot, static_cast<int>(target), static_cast<int>(part));
      bytes_ -= memory_[target][index].size();
      memory_[target][index] = Buffer();
      parts_[target][index] = {nullptr, nullptr, 0};
    }
  }
}

}  // namespace polysilicon
