// The operations, element by element, for the GPU and the CPU. A functor is a template over M, one of the
// kinds of arithmetic of arithmetic.h; its members, if it has any, are the operation's scalar parameters,
// which a kernel reads from device memory once and builds the functor of.
//
//     template <class M> struct Name     { M::C operator()(C x, ...) const }         the operation
//     template <class M> struct NameGrad { ... operator()(C x, ..., C g) const }     its derivative
//
// The derivative takes the operands (or those of them that its row in jaxkern/_elementwise_table.py says it uses)
// and the cotangent g, and returns the product with g; several, for several operands, as Values. Where a function
// has a corner, the derivative there is that of the row's expression in JAX.
//
// `Pair`, where a functor has one, does two 16-bit elements at a time.
#pragma once

#include "arithmetic.h"

namespace jaxkern {
namespace JAXKERN_ARITHMETIC {

template <class C, int n>
struct Values {
  C v[n];
};

// 1 / (1 + e^-x) without overflow on either side.
template <class M>
struct Logistic {
  using C = typename M::C;
  C e;  // e^-|x|
  bool negative;
  JAXKERN_FN explicit Logistic(C x) : Logistic(x, M::Exp(-M::Abs(x))) {}
  JAXKERN_FN Logistic(C x, C e) : e(e), negative(x < 0) {}
  JAXKERN_FN C Value() const { return M::Share(negative ? e : C(1), e); }
  JAXKERN_FN C Complement() const { return M::Share(negative ? C(1) : e, e); }
  JAXKERN_FN C Derivative() const {
    const C inverse = M::Quotient(C(1), 1 + e);
    return e * inverse * inverse;
  }
};

// --- Activations -----------------------------------------------------------------------------------

template <class M>
struct Relu {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Max(x, C(0)); }
#if defined(__CUDACC__)
  template <class P> static JAXKERN_FN P Pair(P x) { return __hmax2_nan(x, P()); }
#endif
};
template <class M>
struct ReluGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return x > 0 ? g : C(0); }
};

template <class M>
struct LeakyRelu {
  using C = typename M::C;
  C slope;
  JAXKERN_FN C operator()(C x) const { return x >= 0 ? x : slope * x; }
};
template <class M>
struct LeakyReluGrad {
  using C = typename M::C;
  C slope;
  JAXKERN_FN C operator()(C x, C g) const { return x >= 0 ? g : slope * g; }
};

template <class M>
struct Elu {
  using C = typename M::C;
  C alpha;
  JAXKERN_FN C operator()(C x) const { return x > 0 ? x : alpha * M::Expm1(x); }
};
template <class M>
struct EluGrad {
  using C = typename M::C;
  C alpha;
  JAXKERN_FN C operator()(C x, C g) const { return x > 0 ? g : alpha * M::Exp(x) * g; }
};

template <class M>
struct Celu {
  using C = typename M::C;
  C alpha, inverse;  // one division a thread
  JAXKERN_FN explicit Celu(C alpha) : alpha(alpha), inverse(M::Divide(C(1), alpha)) {}
  JAXKERN_FN C operator()(C x) const { return x > 0 ? x : alpha * M::Expm1(x * inverse); }
};
template <class M>
struct CeluGrad {
  using C = typename M::C;
  C inverse;
  JAXKERN_FN explicit CeluGrad(C alpha) : inverse(M::Divide(C(1), alpha)) {}
  JAXKERN_FN C operator()(C x, C g) const { return x > 0 ? g : M::Exp(x * inverse) * g; }
};

// Klambauer et al., "Self-Normalizing Neural Networks", 2017.
template <class M>
struct Selu {
  using C = typename M::C;
  static constexpr C kScale = C(1.0507009873554804934193349852946), kAlpha = C(1.6732632423543772848170429916717);
  JAXKERN_FN C operator()(C x) const { return kScale * (x > 0 ? x : kAlpha * M::Expm1(x)); }
};
template <class M>
struct SeluGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return Selu<M>::kScale * (x > 0 ? g : Selu<M>::kAlpha * M::Exp(x) * g); }
};

// Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
template <class M>
struct GeluErf {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return x * M::NormalCdf(x); }
  static JAXKERN_FN C Slope(C x) { return M::NormalCdf(x) + x * (M::kInverseSqrt2Pi * M::Exp(C(-0.5) * x * x)); }
};
template <class M>
struct GeluErfGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * GeluErf<M>::Slope(x); }
};

// 0.5 (1 + tanh(u)) is 1 / (1 + e^-2u), which does not cancel where u is negative.
template <class M>
struct GeluTanh {
  using C = typename M::C;
  static JAXKERN_FN Logistic<M> Gate(C x) { return Logistic<M>(x, M::ExpOfGeluArgument(M::Abs(x))); }
  JAXKERN_FN C operator()(C x) const { return x * Gate(x).Value(); }
  static JAXKERN_FN C Slope(C x) {
    const Logistic<M> s = Gate(x);
    return s.Value() + x * s.Derivative() * (C(1.5957691216057308) + C(0.21406444881780074) * (x * x));
  }
};
template <class M>
struct GeluTanhGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * GeluTanh<M>::Slope(x); }
};

template <class M>
struct QuickGelu {
  using C = typename M::C;
  static JAXKERN_FN Logistic<M> Gate(C x) { return Logistic<M>(x, M::ExpOfProduct(M::Abs(x), -1.702)); }
  JAXKERN_FN C operator()(C x) const { return x * Gate(x).Value(); }
};
template <class M>
struct QuickGeluGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const {
    const Logistic<M> s = QuickGelu<M>::Gate(x);
    return g * (s.Value() + C(1.702) * x * s.Derivative());
  }
};

template <class M>
struct Silu {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return x * Logistic<M>(x).Value(); }
  static JAXKERN_FN C Slope(C x) {
    const Logistic<M> s(x);
    return s.Value() + x * s.Derivative();
  }
};
template <class M>
struct SiluGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * Silu<M>::Slope(x); }
};

// Misra, "Mish", 2019. tanh(log(1 + e)) = n / (n + 2) with n = e (e + 2).
template <class M>
struct Mish {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const {
    const C e = M::Exp(M::Min(x, C(20))), n = M::Fma(e, e, 2 * e);
    return x * M::Quotient(n, n + 2);
  }
};
template <class M>
struct MishGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const {
    const C e = M::Exp(M::Min(x, C(20))), n = M::Fma(e, e, 2 * e), inverse = M::Quotient(C(1), n + 2);
    return g * (n * inverse + x * (4 * (e * inverse) * ((e + 1) * inverse)));
  }
};

template <class M>
struct Sigmoid {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return Logistic<M>(x).Value(); }
};
template <class M>
struct SigmoidGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * Logistic<M>(x).Derivative(); }
};

template <class M>
struct Softplus {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Max(x, C(0)) + M::Log1pUnit(M::Exp(-M::Abs(x))); }
};
template <class M>
struct SoftplusGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * Logistic<M>(x).Value(); }
};

template <class M>
struct LogSigmoid {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return -Softplus<M>()(-x); }
};
template <class M>
struct LogSigmoidGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * Logistic<M>(x).Complement(); }
};

template <class M>
struct SoftSign {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Divide(x, 1 + M::Abs(x)); }
};
template <class M>
struct SoftSignGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const {
    const C inverse = M::Divide(C(1), 1 + M::Abs(x));
    return g * (inverse * inverse);
  }
};

template <class M>
struct HardSigmoid {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Min(M::Max(x + 3, C(0)), C(6)) * C(1.0 / 6); }
  static JAXKERN_FN C Slope(C x) { return x > -3 && x < 3 ? C(1.0 / 6) : C(0); }
};
template <class M>
struct HardSigmoidGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * HardSigmoid<M>::Slope(x); }
};

template <class M>
struct HardSwish {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return x * HardSigmoid<M>()(x); }
};
template <class M>
struct HardSwishGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * (HardSigmoid<M>()(x) + x * HardSigmoid<M>::Slope(x)); }
};

template <class M>
struct HardTanh {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Min(M::Max(x, C(-1)), C(1)); }
};
template <class M>
struct HardTanhGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return x > 1 || x < -1 ? C(0) : g; }
};

template <class M>
struct HardShrink {
  using C = typename M::C;
  C lambda;
  JAXKERN_FN C operator()(C x) const { return M::Abs(x) <= lambda ? C(0) : x; }
};
template <class M>
struct HardShrinkGrad {
  using C = typename M::C;
  C lambda;
  JAXKERN_FN C operator()(C x, C g) const { return M::Abs(x) <= lambda ? C(0) : g; }
};

template <class M>
struct SoftShrink {
  using C = typename M::C;
  C lambda;
  JAXKERN_FN C operator()(C x) const { return x > lambda ? x - lambda : x < -lambda ? x + lambda : 0 * x; }
};
template <class M>
struct SoftShrinkGrad {
  using C = typename M::C;
  C lambda;
  JAXKERN_FN C operator()(C x, C g) const { return x > lambda || x < -lambda ? g : C(0); }
};

template <class M>
struct Threshold {
  using C = typename M::C;
  C threshold, value;
  JAXKERN_FN C operator()(C x) const { return x <= threshold ? value : x; }
};
template <class M>
struct ThresholdGrad {
  using C = typename M::C;
  C threshold, value;
  JAXKERN_FN C operator()(C x, C g) const { return x <= threshold ? C(0) : g; }
};

template <class M>
struct Tanh {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Tanh(x); }
};
template <class M>
struct TanhGrad {
  using C = typename M::C;  // 1 - tanh^2 is 4 e / (1 + e)^2 with e = e^-2|x|
  JAXKERN_FN C operator()(C x, C g) const { return g * 4 * Logistic<M>(2 * x).Derivative(); }
};

template <class M>
struct SquareRelu {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const {
    const C y = M::Max(x, C(0));
    return y * y;
  }
};
template <class M>
struct SquareReluGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return 2 * M::Max(x, C(0)) * g; }
};

// Shazeer, "GLU Variants Improve Transformer", 2020.
template <class M>
struct Glu {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C gate) const { return x * Logistic<M>(gate).Value(); }
};
template <class M>
struct GluGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C gate, C g) const {
    const Logistic<M> s(gate);
    return {{g * s.Value(), g * x * s.Derivative()}};
  }
};

template <class M>
struct Swiglu {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C gate) const { return x * Silu<M>()(gate); }
};
template <class M>
struct SwigluGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C gate, C g) const {
    const Logistic<M> s(gate);
    const C value = s.Value();
    return {{g * (gate * value), g * x * (value + gate * s.Derivative())}};
  }
};

template <class M>
struct GegluErf {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C gate) const { return M::Product(x, gate, M::NormalCdf(gate)); }
};
template <class M>
struct GegluErfGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C gate, C g) const {
    return {{g * GeluErf<M>()(gate), g * x * GeluErf<M>::Slope(gate)}};
  }
};

template <class M>
struct GegluTanh {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C gate) const { return M::Product(x, gate, GeluTanh<M>::Gate(gate).Value()); }
};
template <class M>
struct GegluTanhGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C gate, C g) const {
    return {{g * GeluTanh<M>()(gate), g * x * GeluTanh<M>::Slope(gate)}};
  }
};

// --- One operand -----------------------------------------------------------------------------------

template <class M>
struct Abs {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Abs(x); }
};
template <class M>
struct AbsGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return x >= 0 ? g : -g; }
};

template <class M>
struct Negative {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return -x; }
};

template <class M>
struct Reciprocal {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Divide(C(1), x); }
};
template <class M>
struct ReciprocalGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const {
    const C y = M::Divide(C(1), x);
    return -g * (y * y);
  }
};

template <class M>
struct Square {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return x * x; }
};
template <class M>
struct SquareGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return 2 * x * g; }
};

template <class M>
struct Sqrt {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Sqrt(x); }
};
template <class M>
struct SqrtGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * (C(0.5) * M::Rsqrt(x)); }
};

template <class M>
struct Rsqrt {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Rsqrt(x); }
};
template <class M>
struct RsqrtGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return C(-0.5) * M::Divide(g * M::Rsqrt(x), x); }
};

template <class M>
struct Exp {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Exp(x); }
};
template <class M>
struct ExpGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * M::Exp(x); }
};

template <class M>
struct Expm1 {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Expm1(x); }
};
template <class M>
struct Expm1Grad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * M::Exp(x); }
};

template <class M>
struct Log {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Log(x); }
};
template <class M>
struct LogGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return M::Divide(g, x); }
};

template <class M>
struct Log1p {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Log1p(x); }
};
template <class M>
struct Log1pGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return M::Divide(g, 1 + x); }
};

template <class M>
struct Sin {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Sin(x); }
};
template <class M>
struct SinGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * M::Cos(x); }
};

template <class M>
struct Cos {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Cos(x); }
};
template <class M>
struct CosGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return -g * M::Sin(x); }
};

template <class M>
struct Erf {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Erf(x); }
};
template <class M>
struct ErfGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * (M::kTwoInverseSqrtPi * M::Exp(-x * x)); }
};

template <class M>
struct Erfc {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Erfc(x); }
};
template <class M>
struct ErfcGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return -g * (M::kTwoInverseSqrtPi * M::Exp(-x * x)); }
};

template <class M>
struct Sign {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Sign(x); }
};
template <class M>
struct Floor {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Floor(x); }
};
template <class M>
struct Ceil {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Ceil(x); }
};
template <class M>
struct Round {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Round(x); }
};

template <class M>
struct IsNan {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x) const { return M::IsNan(x); }
};
template <class M>
struct IsInf {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x) const { return M::IsInf(x); }
};
template <class M>
struct IsFinite {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x) const { return !M::IsNan(x) && !M::IsInf(x); }
};
template <class M>
struct LogicalNot {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x) const { return x == 0; }
};

template <class M>
struct Scale {
  using C = typename M::C;
  C alpha;
  JAXKERN_FN C operator()(C x) const { return x * alpha; }
};
template <class M>
struct ScaleGrad {
  using C = typename M::C;
  C alpha;
  JAXKERN_FN C operator()(C, C g) const { return g * alpha; }
};

// The types of its operand and result do the work.
template <class M>
struct Cast {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return x; }
};

// --- Two operands ----------------------------------------------------------------------------------

template <class M>
struct Add {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return x + y; }
#if defined(__CUDACC__)
  template <class P> static JAXKERN_FN P Pair(P x, P y) { return __hadd2_rn(x, y); }
#endif
};

template <class M>
struct Subtract {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return x - y; }
#if defined(__CUDACC__)
  template <class P> static JAXKERN_FN P Pair(P x, P y) { return __hsub2_rn(x, y); }
#endif
};

template <class M>
struct Multiply {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return x * y; }
#if defined(__CUDACC__)
  template <class P> static JAXKERN_FN P Pair(P x, P y) { return __hmul2_rn(x, y); }
#endif
};
template <class M>
struct MultiplyGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C y, C g) const { return {{g * y, g * x}}; }
};

template <class M>
struct Divide {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return M::Divide(x, y); }
};
template <class M>
struct DivideGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C y, C g) const {
    const C d = M::Divide(g, y);
    return {{d, -d * M::Divide(x, y)}};
  }
};

// Equal operands share the cotangent.
template <class M>
struct Maximum {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return M::Max(x, y); }
#if defined(__CUDACC__)
  template <class P> static JAXKERN_FN P Pair(P x, P y) { return __hmax2_nan(x, y); }
#endif
};
template <class M>
struct MaximumGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C y, C g) const {
    return {{x > y ? g : x == y ? C(0.5) * g : C(0), y > x ? g : x == y ? C(0.5) * g : C(0)}};
  }
};

template <class M>
struct Minimum {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return M::Min(x, y); }
#if defined(__CUDACC__)
  template <class P> static JAXKERN_FN P Pair(P x, P y) { return __hmin2_nan(x, y); }
#endif
};
template <class M>
struct MinimumGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C y, C g) const { return MaximumGrad<M>()(-x, -y, g); }
};

template <class M>
struct Power {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return M::Power(x, y); }
};
template <class M>
struct PowerGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C y, C g) const {
    const C lower = M::Power(x, y - 1);
    return {{y == 0 ? C(0) : g * y * lower, x == 0 ? C(0) : g * (x * lower) * M::Log(x)}};
  }
};

template <class M>
struct Fmod {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y) const { return M::Fmod(x, y); }
};
template <class M>
struct FmodGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C y, C g) const { return {{g, -g * M::Trunc(x / y)}}; }
};

template <class M>
struct Equal {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return x == y; }
};
template <class M>
struct NotEqual {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return x != y; }
};
template <class M>
struct Less {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return x < y; }
};
template <class M>
struct LessEqual {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return x <= y; }
};
template <class M>
struct Greater {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return x > y; }
};
template <class M>
struct GreaterEqual {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return x >= y; }
};

template <class M>
struct LogicalAnd {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return (x != 0) & (y != 0); }
};
template <class M>
struct LogicalOr {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return (x != 0) | (y != 0); }
};
template <class M>
struct LogicalXor {
  using C = typename M::C;
  JAXKERN_FN bool operator()(C x, C y) const { return (x != 0) != (y != 0); }
};

// --- Three operands --------------------------------------------------------------------------------

template <class M>
struct Fma {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y, C z) const { return M::Fma(x, y, z); }
#if defined(__CUDACC__)
  template <class P> static JAXKERN_FN P Pair(P x, P y, P z) { return __hfma2(x, y, z); }
#endif
};
template <class M>
struct FmaGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C y, C g) const { return {{g * y, g * x}}; }
};

template <class M>
struct Where {
  using C = typename M::C;
  JAXKERN_FN C operator()(C condition, C x, C y) const { return condition != 0 ? x : y; }
};
template <class M>
struct WhereGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C condition, C g) const {
    return {{condition != 0 ? g : C(0), condition != 0 ? C(0) : g}};
  }
};

template <class M>
struct Add3 {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y, C z) const { return x + y + z; }
};

template <class M>
struct Lerp {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C y, C weight) const { return x + weight * (y - x); }
};
template <class M>
struct LerpGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 3> operator()(C x, C y, C weight, C g) const { return {{g - g * weight, g * weight, g * (y - x)}}; }
};

template <class M>
struct Clamp {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C min, C max) const { return M::Min(M::Max(x, min), max); }
};
template <class M>
struct ClampGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C min, C max, C g) const {
    const C low = x > min ? g : x == min ? C(0.5) * g : C(0), y = M::Max(x, min);
    return y < max ? low : y == max ? C(0.5) * low : C(0);
  }
};

}  // namespace JAXKERN_ARITHMETIC
}  // namespace jaxkern
