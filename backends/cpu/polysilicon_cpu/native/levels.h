// Which instruction-set levels this library has and this processor runs.
#pragma once

#include <string_view>

#include "kernels.h"

namespace polysilicon {

struct Level {
  const Kernels* kernels;
  // Whether the processor and the operating system have what it needs; asks the latter for it.
  bool (*supported)();
};

// All levels of this build, the best first.
extern const Level kLevels[];
extern const int kLevelCount;

// The kernels of a level by name, or null where there is none or it is not supported.
const Kernels* find_level(std::string_view name);

}  // namespace polysilicon
