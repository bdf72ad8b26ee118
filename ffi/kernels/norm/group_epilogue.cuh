// GroupNorm and BatchNorm with a user function before the store: y = f(normalised).
//
//     GroupApply<..., GroupEpilogue<F>>, GroupNormOnePass<..., GroupEpilogue<F>>
//
// F is made of a Python function (jaxkern/_core/functor.py): its operator() takes the normalised element in the computing
// type, before it is rounded, and returns the result by reference.
#pragma once

#include "../common/functions.h"
#include "group_one_pass.cuh"
#include "group_two_pass.cuh"

namespace jaxkern {

template <class F> struct GroupEpilogue {
  template <int N, class C> static __device__ __forceinline__ void Apply(C (&v)[N]) {
    const F f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      C y;
      f(v[j], y);
      v[j] = y;
    }
  }
};

}  // namespace jaxkern
