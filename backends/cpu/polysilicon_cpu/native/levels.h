// Which instruction-set levels this library has and this processor runs.
#pragma once

#include <string_view>

#include "kernels.h"

namespace polysilicon {

struct Level {
  const Kernels* kernels;
  bool (*supported)();  // by the processor and the operating system
};

// All levels of this build, the best first.
extern const Level kLevels[];
extern const int kLevelCount;

// The kernels of a level by name, or null.
const Kernels* find_level(std::string_view name);

}  // namespace polysilicon
