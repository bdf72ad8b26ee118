// The elementwise operations. A functor is a template over M, one of the kinds of arithmetic in arithmetic.h. Its
// members are the operation's scalar parameters; a kernel reads them from device memory once per thread and constructs
// the functor from them.
//
//     template <class M> struct Name     { M::C operator()(C x, ...) const }         the operation
//     template <class M> struct NameGrad { ... operator()(C x, ..., C g) const }     its derivative
//
// The derivative takes the operands that its row in jaxkern/_ops/elementwise/table.py lists, then the cotangent g. It
// returns the product with g, or Values if there are several. At a corner of a function, its derivative is the one that
// JAX computes for the row's expression.
//
// `Pair`, which some functors have, computes two 16-bit elements at once. Activations are in activations.h.
#pragma once

#include "activations.h"

namespace jaxkern {

// --- One operand

template <class M> struct Abs {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Abs(x); }
};
template <class M> struct AbsGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return x >= 0 ? g : -g; }
};

template <class M> struct Negative {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return -x; }
};

template <class M> struct Reciprocal {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Divide(C(1), x); }
};
template <class M> struct ReciprocalGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const {
    const C y = M::Divide(C(1), x);
    return -g * (y * y);
  }
};

template <class M> struct Square {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return x * x; }
};
template <class M> struct SquareGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return 2 * x * g; }
};

template <class M> struct Sqrt {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Sqrt(x); }
};
template <class M> struct SqrtGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * (C(0.5) * M::Rsqrt(x)); }
};

template <class M> struct Rsqrt {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Rsqrt(x); }
};
template <class M> struct RsqrtGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return C(-0.5) * M::Divide(g * M::Rsqrt(x), x); }
};

template <class M> struct Exp {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Exp(x); }
};
template <class M> struct ExpGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * M::Exp(x); }
};

template <class M> struct Expm1 {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Expm1(x); }
};
template <class M> struct Expm1Grad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * M::Exp(x); }
};

template <class M> struct Log {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Log(x); }
};
template <class M> struct LogGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return M::Divide(g, x); }
};

template <class M> struct Log1p {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Log1p(x); }
};
template <class M> struct Log1pGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return M::Divide(g, 1 + x); }
};

template <class M> struct Sin {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Sin(x); }
};
template <class M> struct SinGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * M::Cos(x); }
};

template <class M> struct Cos {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Cos(x); }
};
template <class M> struct CosGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return -g * M::Sin(x); }
};

template <class M> struct Erf {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Erf(x); }
};
template <class M> struct ErfGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * (M::kTwoInverseSqrtPi * M::Exp(-x * x)); }
};

template <class M> struct Erfc {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Erfc(x); }
};
template <class M> struct ErfcGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return -g * (M::kTwoInverseSqrtPi * M::Exp(-x * x)); }
};

template <class M> struct Sign {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Sign(x); }
};
template <class M> struct Floor {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Floor(x); }
};
template <class M> struct Ceil {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Ceil(x); }
};
template <class M> struct Round {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Round(x); }
};

template <class M> struct IsNan {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x) const { return M::IsNan(x); }
};
template <class M> struct IsInf {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x) const { return M::IsInf(x); }
};
template <class M> struct IsFinite {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x) const { return !M::IsNan(x) && !M::IsInf(x); }
};
template <class M> struct LogicalNot {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x) const { return x == 0; }
};

template <class M> struct Scale {
  using C = typename M::C;
  C alpha;
  JAXKERN_FN C operator()(C x) const { return x * alpha; }
};
template <class M> struct ScaleGrad {
  using C = typename M::C;
  C alpha;
  JAXKERN_FN C operator()(C, C g) const { return g * alpha; }
};

// The kernel converts operands and results.
template <class M> struct Cast {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return x; }
};

// --- Two operands

template <class M> struct Add {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return x + y; }
  template <class P> static JAXKERN_FN P Pair(P x, P y) { return __hadd2_rn(x, y); }
};

template <class M> struct Subtract {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return x - y; }
  template <class P> static JAXKERN_FN P Pair(P x, P y) { return __hsub2_rn(x, y); }
};

template <class M> struct Multiply {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return x * y; }
  template <class P> static JAXKERN_FN P Pair(P x, P y) { return __hmul2_rn(x, y); }
};
template <class M> struct MultiplyGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C y, C g) const { return {{g * y, g * x}}; }
};

template <class M> struct Divide {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return M::Divide(x, y); }
};
template <class M> struct DivideGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C y, C g) const {
    const C d = M::Divide(g, y);
    return {{d, -d * M::Divide(x, y)}};
  }
};

// Equal operands share the cotangent.
template <class M> struct Maximum {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return M::Max(x, y); }
  template <class P> static JAXKERN_FN P Pair(P x, P y) { return __hmax2_nan(x, y); }
};
template <class M> struct MaximumGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C y, C g) const {
    return {{x > y ? g : x == y ? C(0.5) * g : C(0), y > x ? g : x == y ? C(0.5) * g : C(0)}};
  }
};

template <class M> struct Minimum {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return M::Min(x, y); }
  template <class P> static JAXKERN_FN P Pair(P x, P y) { return __hmin2_nan(x, y); }
};
template <class M> struct MinimumGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C y, C g) const { return MaximumGrad<M>()(-x, -y, g); }
};

template <class M> struct Power {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return M::Power(x, y); }
};
template <class M> struct PowerGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C y, C g) const {
    const C lower = M::Power(x, y - 1);
    return {{y == 0 ? C(0) : g * y * lower, x == 0 ? C(0) : g * (x * lower) * M::Log(x)}};
  }
};

template <class M> struct Fmod {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return M::Fmod(x, y); }
};
template <class M> struct FmodGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C y, C g) const { return {{g, -g * M::Trunc(x / y)}}; }
};

template <class M> struct Equal {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return x == y; }
};
template <class M> struct NotEqual {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return x != y; }
};
template <class M> struct Less {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return x < y; }
};
template <class M> struct LessEqual {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return x <= y; }
};
template <class M> struct Greater {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return x > y; }
};
template <class M> struct GreaterEqual {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return x >= y; }
};

template <class M> struct LogicalAnd {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return (x != 0) & (y != 0); }
};
template <class M> struct LogicalOr {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return (x != 0) | (y != 0); }
};
template <class M> struct LogicalXor {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return (x != 0) != (y != 0); }
};

// --- Three operands

template <class M> struct Fma {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y, C z) const { return M::Fma(x, y, z); }
  template <class P> static JAXKERN_FN P Pair(P x, P y, P z) { return __hfma2(x, y, z); }
};
template <class M> struct FmaGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C y, C g) const { return {{g * y, g * x}}; }
};

template <class M> struct Where {
  using C = typename M::C;
  JAXKERN_FN C operator()(C condition, C x, C y) const { return condition != 0 ? x : y; }
};
template <class M> struct WhereGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C condition, C g) const {
    return {{condition != 0 ? g : C(0), condition != 0 ? C(0) : g}};
  }
};

template <class M> struct Add3 {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y, C z) const { return x + y + z; }
};

template <class M> struct Lerp {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y, C weight) const { return x + weight * (y - x); }
};
template <class M> struct LerpGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 3> operator()(C x, C y, C weight, C g) const {
    return {{g - g * weight, g * weight, g * (y - x)}};
  }
};

template <class M> struct Clamp {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C min, C max) const { return M::Min(M::Max(x, min), max); }
};
template <class M> struct ClampGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C min, C max, C g) const {
    const C low = x > min ? g : x == min ? C(0.5) * g : C(0), y = M::Max(x, min);
    return y < max ? low : y == max ? C(0.5) * low : C(0);
  }
};

}  // namespace jaxkern
