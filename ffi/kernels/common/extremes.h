// The larger and the smaller of two numbers; NaN if either is NaN. Floats take one instruction.
#pragma once

#include "std.h"

namespace jaxkern {

template <class C> __device__ __forceinline__ C LargerOrNan(C a, C b) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<C, float>) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
  }
#endif
  return a != a || a > b ? a : b;
}

template <class C> __device__ __forceinline__ C SmallerOrNan(C a, C b) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<C, float>) {
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
    return smaller;
  }
#endif
  return a != a || a < b ? a : b;
}

}  // namespace jaxkern
