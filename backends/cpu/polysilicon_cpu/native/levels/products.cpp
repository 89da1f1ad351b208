#include "levels/products.h"

#include <cstring>

#include "levels/products_generic.h"
#if defined(__AVX512BF16__)
#include "levels/products_avx512.h"
#elif defined(__AVX2__) || defined(PS_NEON)
#include "levels/products_int8.h"
#endif

namespace polysilicon::PS_LEVEL {
namespace {

#if !defined(__AVX2__) && !defined(PS_NEON)

constexpr bool kInt8 = false, kBfloat16 = false;

int bfloat16_raise(Codes, int) { return 0; }

void prepare(const RecordLayout& layout, const float* x, const std::int32_t* order,
             std::uint8_t* record) {
  prepare_float32(layout, x, order, record);
}

void multiply(const Segment& segment, const std::uint8_t* data, const RecordLayout& layout,
              const std::uint8_t* records, int rows, int first, int last, float* out,
              std::ptrdiff_t stride, const float* bias, std::uint8_t* scratch) {
  multiply_float32(segment, data, layout, records, rows, first, last, out, stride, bias, scratch);
}

#endif

}  // namespace

extern const ProductKernels product_kernels;
const ProductKernels product_kernels = {
    kInt8, kBfloat16, false, bfloat16_raise, prepare, scratch_bytes, multiply, dots,
};

}  // namespace polysilicon::PS_LEVEL
