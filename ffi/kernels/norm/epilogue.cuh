// RMSNorm and LayerNorm with a user function before the store: y = f(normalised, operands).
//
//     NormForward<..., NormEpilogue<F, kSplat, types of the operands...>>, NormStream<..., the same>
//
// F is made of a Python function (jaxkern/_core/functor.py): its operator() takes the normalised element in the computing
// type, before it is rounded, then an element of each operand, and returns the result by reference. Bits of kSplat are set
// for operands that have one element per row. Operands are read once per row, in place.
#pragma once

#include "../common/broadcast.h"
#include "../common/functions.h"
#include "forward.cuh"
#include "stream.cuh"

namespace jaxkern {

template <int kArgs> struct NormEpilogueParams : NormParams {
  const void* arg[kArgs ? kArgs : 1];
  IndexMap arg_map[kArgs ? kArgs : 1];  // row -> offset of the operand's row
};
static_assert(sizeof(NormEpilogueParams<2>) == 96 + 2 * (8 + 88), "plan.py lays it out");

// A pack of operand k.
template <size_t k, class A, bool kSplat, int N> struct NormOperand {
  Compute<A> value[N];

  template <class Params> __device__ __forceinline__ void Load(const Params& p, int64_t row, int64_t column) {
    const int64_t at = p.arg_map[k](row);
    if constexpr (kSplat) {
      const Compute<A> x = ToCompute(static_cast<const A*>(p.arg[k])[at]);
#pragma unroll
      for (int j = 0; j < N; ++j) value[j] = x;
    } else {
      LoadParameters<A, N>(p.arg[k], at + column, value);
    }
  }
};

template <int N, uint32_t kSplat, class Indices, class... A> struct NormOperands;
template <int N, uint32_t kSplat, size_t... k, class... A>
struct NormOperands<N, kSplat, std::index_sequence<k...>, A...> : NormOperand<k, A, (kSplat >> k & 1) != 0, N>... {
  template <class Params> __device__ __forceinline__ void Load(const Params& p, int64_t row, int64_t column) {
    (NormOperand<k, A, (kSplat >> k & 1) != 0, N>::Load(p, row, column), ...);
  }
  template <class F, class C> __device__ __forceinline__ C Apply(const F& f, C x, int j) const {
    C y;
    f(x, NormOperand<k, A, (kSplat >> k & 1) != 0, N>::value[j]..., y);
    return y;
  }
};

template <class F, uint32_t kSplat, class... A> struct NormEpilogue {
  using Params = NormEpilogueParams<sizeof...(A)>;
  static constexpr bool kQuantizes = false;
  static constexpr int Held(int) { return 0; }

  template <int N, class C>
  static __device__ __forceinline__ void Apply(const Params& p, int64_t row, int64_t column, C (&v)[N]) {
    NormOperands<N, kSplat, std::make_index_sequence<sizeof...(A)>, A...> operands;
    operands.Load(p, row, column);
    const F f;
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = operands.Apply(f, v[j], j);
  }
};

}  // namespace jaxkern
