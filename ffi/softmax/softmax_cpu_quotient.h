// What the forward passes on the CPU end with, from a sum that is known to more digits than its type has.
#pragma once

#include "common/simd.h"

namespace jaxkern {
namespace JAXKERN_ISA {

// e * (q + r), where q + r is the inverse of the sum.
template <class V>
JAXKERN_INLINE V Quotient(const Exponential<V>& e, V q, V r) {
  const V scale = e.scale * q, rest = e.scale * r;
  return scale + Fma(scale, e.fraction, Fma(rest, e.fraction, rest));
}

// x - p - (q + r), where q + r is the logarithm of the sum.
template <class V>
JAXKERN_INLINE V LogQuotient(V x, V p, V q, V r) {
  const V y = x - p, u = y - x;
  V rest = (x - (y - u)) + (-p - u);  // TwoSum: y + rest is x - p exactly
  rest = y == V{} - __builtin_inff() ? V{} : rest;
  return y + ((rest - r) - q);
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
