// What loops ask of the compiler.
#pragma once

// PS_UNROLL, before loops over registers: an array of sums stays in them only if its loops are gone
// early. PS_IVDEP: the loop's iterations do not depend on each other.
#if defined(__clang__)
#define PS_UNROLL _Pragma("unroll")
#define PS_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define PS_UNROLL _Pragma("GCC unroll 16")
#define PS_IVDEP _Pragma("GCC ivdep")
#endif
