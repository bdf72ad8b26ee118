// Division by a fixed number; without a divide instruction if dividend and divisor are below 2^32.
#pragma once

#include "broadcast.h"

namespace jaxkern {

struct Divider {
  int64_t divisor;
  FastDivmod fast;
  bool wide;  // the divisor needs more than 31 bits

  __device__ __forceinline__ int64_t Div(int64_t n) const {
    if (wide || n >> 32) return n / divisor;
    return fast.Div(static_cast<uint32_t>(n));
  }
  __device__ __forceinline__ uint32_t Div(uint32_t n) const { return wide ? 0 : fast.Div(n); }
};
static_assert(sizeof(Divider) == 24);

}  // namespace jaxkern
