// A value of a step.
#pragma once

#include <cstddef>

namespace polysilicon {

// Rows of `width` floats that begin `stride` floats apart.
struct View {
  float* data = nullptr;
  int rows = 0;
  int width = 0;
  int stride = 0;

  View() = default;
  View(const float* data, int rows, int width, int stride)
      : data(const_cast<float*>(data)), rows(rows), width(width), stride(stride) {}

  bool contiguous() const { return stride == width || rows <= 1; }
  float* row(int index) const { return data + static_cast<std::ptrdiff_t>(index) * stride; }
};

}  // namespace polysilicon
