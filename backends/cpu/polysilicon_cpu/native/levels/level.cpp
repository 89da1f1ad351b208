// Gathers the tables of one level.

#include "kernels.h"

#ifndef PS_BASE
#define PS_BASE PS_LEVEL  // the level that has all but the products
#endif

namespace polysilicon::PS_BASE {
extern const ElementwiseKernels elementwise_kernels;
extern const AttentionKernels attention_kernels;
extern const SamplingKernels sampling_kernels;
}  // namespace polysilicon::PS_BASE

namespace polysilicon::PS_LEVEL {

extern const ProductKernels product_kernels;
#define PS_STRING(name) #name
#define PS_NAME(name) PS_STRING(name)

extern const Kernels kernels;
const Kernels kernels = {
    PS_NAME(PS_LEVEL),           &PS_BASE::elementwise_kernels, &product_kernels,
    &PS_BASE::attention_kernels, &PS_BASE::sampling_kernels,
};

}  // namespace polysilicon::PS_LEVEL
