// Repacked weights, as products.cpp and its neighbours read them.
#pragma once

#include <memory>
#include <vector>

#include "buffer.h"
#include "levels/products.h"
#include "products.h"

namespace polysilicon {

struct Weight {
  int inputs = 0;
  int outputs = 0;
  int experts = 1;
  std::vector<Segment> segments;  // one for each part
  std::vector<std::vector<std::int32_t>> orders;  // the first is empty: inputs as they come
  std::vector<std::unique_ptr<float[]>> tables;
  std::vector<float> int8_corrections, bfloat16_corrections;
  RecordLayout layout{};
  int blocks = 0;  // of all segments
  std::ptrdiff_t expert_bytes = 0;
  Buffer data;

  const std::uint8_t* expert(int index) const {
    return data.as<const std::uint8_t>() + index * expert_bytes;
  }
};

// Products of prepared rows with blocks [first, last) of an expert, counted over all segments.
// records [orders][rows]; the records of two orders begin `set_bytes` apart.
void multiply_blocks(const Kernels& kernels, const Weight& weight, int expert,
                     const std::uint8_t* records, std::ptrdiff_t set_bytes, int rows, int first,
                     int last, float* out, std::ptrdiff_t out_stride, const float* bias,
                     std::uint8_t* scratch);

// Prepares one row for every order: records begin `set_bytes` apart.
void prepare_row(const Kernels& kernels, const Weight& weight, const float* x, std::uint8_t* record,
                 std::ptrdiff_t set_bytes);

}  // namespace polysilicon
