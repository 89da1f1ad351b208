// The functions that are compiled once per instruction-set level.
//
// Every file in levels/ is compiled for each level with that level's -m flags and PS_LEVEL defined
// as the level's name, a namespace:
//
//   namespace polysilicon::PS_LEVEL {
//   namespace { ...all code... }
//   extern const ProductKernels product_kernels;
//   const ProductKernels product_kernels = {...};
//   }
//
// A level whose products alone differ compiles only those and takes the rest from another level.
//
// Code tells levels apart by the compiler's own macros (__AVX512F__, __AVX512VNNI__, __AVX2__) and
// PS_NEON (levels/vectors.h). It must leave no weak symbol behind, since the linker would let one
// level's copy of an inline function serve all: no standard containers or algorithms, no inline
// functions outside anonymous namespaces, no templates outside them. `build.py --check` looks.
#pragma once

namespace polysilicon {

struct ElementwiseKernels;  // levels/elementwise.h
struct ProductKernels;      // levels/products.h
struct AttentionKernels;    // levels/attention.h
struct SamplingKernels;     // levels/sampling.h

struct Kernels {
  const char* name;
  const ElementwiseKernels* elementwise;
  const ProductKernels* products;
  const AttentionKernels* attention;
  const SamplingKernels* sampling;
};

}  // namespace polysilicon
