// Gathers the tables of one level.

#include "kernels.h"

namespace polysilicon::PS_LEVEL {

extern const ElementwiseKernels elementwise_kernels;
extern const ProductKernels product_kernels;
extern const AttentionKernels attention_kernels;
extern const SamplingKernels sampling_kernels;
#define PS_STRING(name) #name
#define PS_NAME(name) PS_STRING(name)

extern const Kernels kernels;
const Kernels kernels = {
    PS_NAME(PS_LEVEL),  &elementwise_kernels, &product_kernels,
    &attention_kernels, &sampling_kernels,
};

}  // namespace polysilicon::PS_LEVEL
