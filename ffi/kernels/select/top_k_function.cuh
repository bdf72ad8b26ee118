// top_k of a user function of the elements, which the kernels of top_k.cuh apply to each element that they load.
#pragma once

#include "common/functions.h"
#include "top_k.cuh"

namespace jaxkern {

// The results R of a functor of elements T, by their bits.
template <class T, class R, class F> struct Applied {
  using Source = T;
  using Bits = std::conditional_t<sizeof(R) == 4, uint32_t, std::conditional_t<sizeof(R) == 2, uint16_t, uint8_t>>;
  static __device__ __forceinline__ Bits Of(Source x) {
    Own<R> y;
    F()(Wide<T>(x), y);
    const R stored = Stored<R>(y);
    return *reinterpret_cast<const Bits*>(&stored);
  }
};

}  // namespace jaxkern
