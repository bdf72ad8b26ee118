// The CPU's side of a functor: a loop over arrays of its computing type, which the compiler makes vectors of.
// Included by generated files, which are compiled once an instruction set.
#pragma once

#include <cstdint>
#include <type_traits>

#include "elementwise/elementwise_cpu.h"
#include "elementwise/functors.h"

namespace jaxkern {
namespace JAXKERN_ISA {

template <class F, int kParameters>
JAXKERN_FN F Make(const void* const* parameter) {
  using C = typename F::C;
  if constexpr (kParameters == 0) return F{};
  else if constexpr (kParameters == 1) return F{*static_cast<const C*>(parameter[0])};
  else return F{*static_cast<const C*>(parameter[0]), *static_cast<const C*>(parameter[1])};
}

// kIn operands to kOut results, n elements each.
template <class F, int kIn, int kOut, int kParameters>
void Loop(const void* const* in, void* const* out, const void* const* parameter, int64_t n) {
  using C = typename F::C;
  const F f = Make<F, kParameters>(parameter);
  const C* __restrict x0 = static_cast<const C*>(in[0]);
  const C* __restrict x1 = static_cast<const C*>(in[kIn > 1 ? 1 : 0]);
  const C* __restrict x2 = static_cast<const C*>(in[kIn > 2 ? 2 : 0]);
  const C* __restrict x3 = static_cast<const C*>(in[kIn > 3 ? 3 : 0]);
  C* __restrict y0 = static_cast<C*>(out[0]);
  C* __restrict y1 = static_cast<C*>(out[kOut > 1 ? 1 : 0]);
  C* __restrict y2 = static_cast<C*>(out[kOut > 2 ? 2 : 0]);
  const auto apply = [&](int64_t i) {
    if constexpr (kIn == 1) return f(x0[i]);
    else if constexpr (kIn == 2) return f(x0[i], x1[i]);
    else if constexpr (kIn == 3) return f(x0[i], x1[i], x2[i]);
    else return f(x0[i], x1[i], x2[i], x3[i]);
  };
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep  // results are arrays of their own
#endif
  for (int64_t i = 0; i < n; ++i) {
    const auto y = apply(i);
    if constexpr (std::is_same_v<decltype(y), const bool>) y0[i] = y ? C(1) : C(0);
    else if constexpr (kOut == 1) y0[i] = y;
    else y0[i] = y.v[0], y1[i] = y.v[1];
    if constexpr (kOut == 3) y2[i] = y.v[2];
  }
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
