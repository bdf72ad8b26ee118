// Activations and gated linear units: functors as described in functors.h, and what they share. M: kind of arithmetic
// (arithmetic.h). No memory is accessed.
#pragma once

#include "arithmetic.h"

namespace jaxkern {

// The results of a functor with several results.
template <class C, int n> struct Values {
  C v[n];
};

// 1 / (1 + e^-x) without overflow for either sign.
template <class M> struct Logistic {
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

template <class M> struct Relu {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Max(x, C(0)); }
  template <class P> static JAXKERN_FN P Pair(P x) { return __hmax2_nan(x, P()); }
};
template <class M> struct ReluGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return x > 0 ? g : C(0); }
};

template <class M> struct LeakyRelu {
  using C = typename M::C;
  C slope;
  JAXKERN_FN C operator()(C x) const { return x >= 0 ? x : slope * x; }
};
template <class M> struct LeakyReluGrad {
  using C = typename M::C;
  C slope;
  JAXKERN_FN C operator()(C x, C g) const { return x >= 0 ? g : slope * g; }
};

template <class M> struct Elu {
  using C = typename M::C;
  C alpha;
  JAXKERN_FN C operator()(C x) const { return x > 0 ? x : alpha * M::Expm1(x); }
};
template <class M> struct EluGrad {
  using C = typename M::C;
  C alpha;
  JAXKERN_FN C operator()(C x, C g) const { return x > 0 ? g : alpha * M::Exp(x) * g; }
};

template <class M> struct Celu {
  using C = typename M::C;
  C alpha, inverse;  // one division per thread
  JAXKERN_FN explicit Celu(C alpha) : alpha(alpha), inverse(M::Divide(C(1), alpha)) {}
  JAXKERN_FN C operator()(C x) const { return x > 0 ? x : alpha * M::Expm1(x * inverse); }
};
template <class M> struct CeluGrad {
  using C = typename M::C;
  C inverse;
  JAXKERN_FN explicit CeluGrad(C alpha) : inverse(M::Divide(C(1), alpha)) {}
  JAXKERN_FN C operator()(C x, C g) const { return x > 0 ? g : M::Exp(x * inverse) * g; }
};

// Klambauer et al., "Self-Normalizing Neural Networks", 2017.
template <class M> struct Selu {
  using C = typename M::C;
  static constexpr C kScale = C(1.0507009873554804934193349852946), kAlpha = C(1.6732632423543772848170429916717);
  JAXKERN_FN C operator()(C x) const { return kScale * (x > 0 ? x : kAlpha * M::Expm1(x)); }
};
template <class M> struct SeluGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return Selu<M>::kScale * (x > 0 ? g : Selu<M>::kAlpha * M::Exp(x) * g); }
};

// Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
template <class M> struct GeluErf {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return x * M::NormalCdf(x); }
  static JAXKERN_FN C Slope(C x) { return M::NormalCdf(x) + x * (M::kInverseSqrt2Pi * M::Exp(C(-0.5) * x * x)); }
};
template <class M> struct GeluErfGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * GeluErf<M>::Slope(x); }
};

// 0.5 (1 + tanh(u)) is 1 / (1 + e^-2u), which does not cancel where u is negative.
template <class M> struct GeluTanh {
  using C = typename M::C;
  static JAXKERN_FN Logistic<M> Gate(C x) { return Logistic<M>(x, M::ExpOfGeluArgument(M::Abs(x))); }
  JAXKERN_FN C operator()(C x) const { return x * Gate(x).Value(); }
  static JAXKERN_FN C Slope(C x) {
    const Logistic<M> s = Gate(x);
    return s.Value() + x * s.Derivative() * (C(1.5957691216057308) + C(0.21406444881780074) * (x * x));
  }
};
template <class M> struct GeluTanhGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * GeluTanh<M>::Slope(x); }
};

template <class M> struct QuickGelu {
  using C = typename M::C;
  static JAXKERN_FN Logistic<M> Gate(C x) { return Logistic<M>(x, M::ExpOfProduct(M::Abs(x), -1.702)); }
  JAXKERN_FN C operator()(C x) const { return x * Gate(x).Value(); }
};
template <class M> struct QuickGeluGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const {
    const Logistic<M> s = QuickGelu<M>::Gate(x);
    return g * (s.Value() + C(1.702) * x * s.Derivative());
  }
};

template <class M> struct Silu {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return x * Logistic<M>(x).Value(); }
  static JAXKERN_FN C Slope(C x) {
    const Logistic<M> s(x);
    return s.Value() + x * s.Derivative();
  }
};
template <class M> struct SiluGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * Silu<M>::Slope(x); }
};

// Misra, "Mish", 2019. tanh(log(1 + e)) = n / (n + 2) with n = e (e + 2).
template <class M> struct Mish {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const {
    const C e = M::Exp(M::Min(x, C(20))), n = M::Fma(e, e, 2 * e);
    return x * M::Quotient(n, n + 2);
  }
};
template <class M> struct MishGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const {
    const C e = M::Exp(M::Min(x, C(20))), n = M::Fma(e, e, 2 * e), inverse = M::Quotient(C(1), n + 2);
    return g * (n * inverse + x * (4 * (e * inverse) * ((e + 1) * inverse)));
  }
};

template <class M> struct Sigmoid {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return Logistic<M>(x).Value(); }
};
template <class M> struct SigmoidGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * Logistic<M>(x).Derivative(); }
};

template <class M> struct Softplus {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Max(x, C(0)) + M::Log1pUnit(M::Exp(-M::Abs(x))); }
};
template <class M> struct SoftplusGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * Logistic<M>(x).Value(); }
};

template <class M> struct LogSigmoid {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return -Softplus<M>()(-x); }
};
template <class M> struct LogSigmoidGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * Logistic<M>(x).Complement(); }
};

template <class M> struct SoftSign {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Divide(x, 1 + M::Abs(x)); }
};
template <class M> struct SoftSignGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const {
    const C inverse = M::Divide(C(1), 1 + M::Abs(x));
    return g * (inverse * inverse);
  }
};

template <class M> struct HardSigmoid {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Min(M::Max(x + 3, C(0)), C(6)) * C(1.0 / 6); }
  static JAXKERN_FN C Slope(C x) { return x > -3 && x < 3 ? C(1.0 / 6) : C(0); }
};
template <class M> struct HardSigmoidGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * HardSigmoid<M>::Slope(x); }
};

template <class M> struct HardSwish {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return x * HardSigmoid<M>()(x); }
};
template <class M> struct HardSwishGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return g * (HardSigmoid<M>()(x) + x * HardSigmoid<M>::Slope(x)); }
};

template <class M> struct HardTanh {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Min(M::Max(x, C(-1)), C(1)); }
};
template <class M> struct HardTanhGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return x > 1 || x < -1 ? C(0) : g; }
};

template <class M> struct HardShrink {
  using C = typename M::C;
  C lambda;
  JAXKERN_FN C operator()(C x) const { return M::Abs(x) <= lambda ? C(0) : x; }
};
template <class M> struct HardShrinkGrad {
  using C = typename M::C;
  C lambda;
  JAXKERN_FN C operator()(C x, C g) const { return M::Abs(x) <= lambda ? C(0) : g; }
};

template <class M> struct SoftShrink {
  using C = typename M::C;
  C lambda;
  JAXKERN_FN C operator()(C x) const { return x > lambda ? x - lambda : x < -lambda ? x + lambda : 0 * x; }
};
template <class M> struct SoftShrinkGrad {
  using C = typename M::C;
  C lambda;
  JAXKERN_FN C operator()(C x, C g) const { return x > lambda || x < -lambda ? g : C(0); }
};

template <class M> struct Threshold {
  using C = typename M::C;
  C threshold, value;
  JAXKERN_FN C operator()(C x) const { return x <= threshold ? value : x; }
};
template <class M> struct ThresholdGrad {
  using C = typename M::C;
  C threshold, value;
  JAXKERN_FN C operator()(C x, C g) const { return x <= threshold ? C(0) : g; }
};

template <class M> struct Tanh {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const { return M::Tanh(x); }
};
template <class M> struct TanhGrad {
  using C = typename M::C;  // 1 - tanh^2 is 4 e / (1 + e)^2 with e = e^-2|x|
  JAXKERN_FN C operator()(C x, C g) const { return g * 4 * Logistic<M>(2 * x).Derivative(); }
};

template <class M> struct SquareRelu {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x) const {
    const C y = M::Max(x, C(0));
    return y * y;
  }
};
template <class M> struct SquareReluGrad {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C g) const { return 2 * M::Max(x, C(0)) * g; }
};

// Shazeer, "GLU Variants Improve Transformer", 2020.
template <class M> struct Glu {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C gate) const { return x * Logistic<M>(gate).Value(); }
};
template <class M> struct GluGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C gate, C g) const {
    const Logistic<M> s(gate);
    return {{g * s.Value(), g * x * s.Derivative()}};
  }
};

template <class M> struct Swiglu {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C gate) const { return x * Silu<M>()(gate); }
};
template <class M> struct SwigluGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C gate, C g) const {
    const Logistic<M> s(gate);
    const C value = s.Value();
    return {{g * (gate * value), g * x * (value + gate * s.Derivative())}};
  }
};

template <class M> struct GegluErf {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C gate) const { return M::Product(x, gate, M::NormalCdf(gate)); }
};
template <class M> struct GegluErfGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C gate, C g) const {
    return {{g * GeluErf<M>()(gate), g * x * GeluErf<M>::Slope(gate)}};
  }
};

template <class M> struct GegluTanh {
  using C = typename M::C;
  JAXKERN_FN C operator()(C x, C gate) const { return M::Product(x, gate, GeluTanh<M>::Gate(gate).Value()); }
};
template <class M> struct GegluTanhGrad {
  using C = typename M::C;
  JAXKERN_FN Values<C, 2> operator()(C x, C gate, C g) const {
    return {{g * GeluTanh<M>()(gate), g * x * GeluTanh<M>::Slope(gate)}};
  }
};

}  // namespace jaxkern
