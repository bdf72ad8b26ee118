// The elementwise primitives of jax.lax as overloads in namespace jaxkern::lax, under the names that they have there:
// what functors made of Python functions (jaxkern/_core/functor.py) call.
//
// Operands are float (which also holds values of 16-bit types), double, bool, and integers of 8 to 64 bits. Results
// equal XLA's: integers wrap, division by zero gives -1 and the remainder the dividend, shifts by the width or more
// give 0 or the sign, max and min return NaN if either operand is, and floating-point numbers convert to integers
// towards zero, saturating, NaN to 0.
//
// On the GPU, functions come from arithmetic.h where it has them, else from the CUDA math library. Compiled for the
// host, they come from the C library (numbers.h).
#pragma once

#include "numbers.h"

namespace jaxkern {
namespace lax {

// --- Arithmetic ----------------------------------------------------------------------------------------------------

template <class T> JAXKERN_FN T add(T x, T y) {
  if constexpr (kReal<T>) return x + y;
  else return static_cast<T>(static_cast<Wrapping<T>>(x) + static_cast<Wrapping<T>>(y));
}
template <class T> JAXKERN_FN T sub(T x, T y) {
  if constexpr (kReal<T>) return x - y;
  else return static_cast<T>(static_cast<Wrapping<T>>(x) - static_cast<Wrapping<T>>(y));
}
template <class T> JAXKERN_FN T mul(T x, T y) {
  if constexpr (kReal<T>) return x * y;
  else return static_cast<T>(static_cast<Wrapping<T>>(x) * static_cast<Wrapping<T>>(y));
}
template <class T> JAXKERN_FN T neg(T x) {
  if constexpr (kReal<T>) return -x;
  else return sub(T(0), x);
}
template <class T> JAXKERN_FN T div(T x, T y) {
  if constexpr (kReal<T>) {
    return x / y;
  } else {
    if (y == 0) return T(-1);
    if constexpr (std::is_signed_v<T>) {
      if (y == -1) return neg(x);
    }
    return static_cast<T>(x / y);
  }
}
// x / y for a y that divides many x. scale: scale_of_divisor(y); inverse: 1 / (y * scale). The quotient is corrected once; where
// that is NaN, because x or y is 0, infinite or NaN or the quotient overflows, it is right as it is. There are no branches.
JAXKERN_FN float quotient(float x, float y, float inverse, float scale) {
  const float xs = x * scale, q = xs * inverse, z = fmaf(fmaf(-q, y * scale, xs), inverse, q);
  return z == z ? z : q;
}
// A power of two that keeps y and its inverse from the ends of the range.
JAXKERN_FN float scale_of_divisor(float y) {
  const float size = ::fabsf(y);
  return size < 0x1p-100f ? 0x1p64f : size > 0x1p100f ? 0x1p-64f : 1.0f;
}
template <class T> JAXKERN_FN T rem(T x, T y) {
  if constexpr (kReal<T>) {
    return Arithmetic<T>::Fmod(x, y);
  } else {
    if (y == 0) return x;
    if constexpr (std::is_signed_v<T>) {
      if (y == -1) return 0;
    }
    return static_cast<T>(x % y);
  }
}
template <class T> JAXKERN_FN T abs(T x) {
  if constexpr (std::is_same_v<T, float>) return ::fabsf(x);
  else if constexpr (std::is_same_v<T, double>) return ::fabs(x);
  else if constexpr (std::is_signed_v<T>) return x < 0 ? neg(x) : x;
  else return x;
}
template <class T> JAXKERN_FN T sign(T x) {
  if constexpr (kReal<T>) return x > 0 ? T(1) : x < 0 ? T(-1) : x;  // keeps -0 and NaN
  else if constexpr (std::is_signed_v<T>) return T((x > 0) - (x < 0));
  else return T(x > 0);
}
template <class T> JAXKERN_FN T square(T x) { return mul(x, x); }
template <class T> JAXKERN_FN T one_minus_square(T x) { return mul(add(T(1), x), sub(T(1), x)); }

// NaN if either operand is; +0 is larger than -0.
template <class T> JAXKERN_FN T max(T x, T y) {
  if constexpr (!kReal<T>) {
    return x > y ? x : y;
  } else {
#if defined(__CUDACC__)
    if constexpr (std::is_same_v<T, float>) return Single::Max(x, y);
#endif
    return x > y ? x : y > x ? y : x == y ? BitsAs<T>(Bits<T>(BitsAs<Bits<T>>(x) & BitsAs<Bits<T>>(y))) : x + y;
  }
}
template <class T> JAXKERN_FN T min(T x, T y) {
  if constexpr (!kReal<T>) {
    return x < y ? x : y;
  } else {
#if defined(__CUDACC__)
    if constexpr (std::is_same_v<T, float>) return Single::Min(x, y);
#endif
    return x < y ? x : y < x ? y : x == y ? BitsAs<T>(Bits<T>(BitsAs<Bits<T>>(x) | BitsAs<Bits<T>>(y))) : x + y;
  }
}
template <class T> JAXKERN_FN T clamp(T low, T x, T high) { return min(max(x, low), high); }

// x^y by squaring, in the order in which XLA multiplies.
template <int y, class T> JAXKERN_FN T integer_pow(T x) {
  if constexpr (y < 0) {
    return div(T(1), integer_pow<-y>(x));
  } else {
    T power = 1;
    bool first = true;
#pragma unroll
    for (int rest = y; rest > 0; rest >>= 1) {
      if (rest & 1) power = first ? x : mul(power, x), first = false;
      if (rest > 1) x = mul(x, x);
    }
    return power;
  }
}
template <class T, class Y> JAXKERN_FN T pow(T x, Y y) {
  if constexpr (kReal<T>) {
    return Arithmetic<T>::Power(x, static_cast<T>(y));
  } else {
    if constexpr (std::is_signed_v<Y>) {
      if (y < 0) return x == T(1) ? T(1) : x == T(-1) ? T(y & 1 ? -1 : 1) : T(0);
    }
    T power = 1;
    for (Bits<Y> rest = static_cast<Bits<Y>>(y); rest; rest >>= 1) {
      if (rest & 1) power = mul(power, x);
      x = mul(x, x);
    }
    return power;
  }
}

// --- Comparisons, bits ---------------------------------------------------------------------------------------------

template <class T> JAXKERN_FN bool eq(T x, T y) { return x == y; }
template <class T> JAXKERN_FN bool ne(T x, T y) { return x != y; }
template <class T> JAXKERN_FN bool lt(T x, T y) { return x < y; }
template <class T> JAXKERN_FN bool le(T x, T y) { return x <= y; }
template <class T> JAXKERN_FN bool gt(T x, T y) { return x > y; }
template <class T> JAXKERN_FN bool ge(T x, T y) { return x >= y; }
template <class T> JAXKERN_FN bool is_finite(T x) { return abs(x) < infinity<T>(); }

template <class T> JAXKERN_FN T and_(T x, T y) { return static_cast<T>(x & y); }
template <class T> JAXKERN_FN T or_(T x, T y) { return static_cast<T>(x | y); }
template <class T> JAXKERN_FN T xor_(T x, T y) { return static_cast<T>(x ^ y); }
template <class T> JAXKERN_FN T not_(T x) {
  if constexpr (std::is_same_v<T, bool>) return !x;
  else return static_cast<T>(~x);
}
template <class T> JAXKERN_FN bool IsShiftWithin(T y) { return static_cast<Bits<T>>(y) < unsigned(kBits<T>); }
template <class T> JAXKERN_FN T shift_left(T x, T y) {
  return IsShiftWithin(y) ? static_cast<T>(static_cast<Wrapping<T>>(x) << static_cast<int>(y)) : T(0);
}
template <class T> JAXKERN_FN T shift_right_logical(T x, T y) {
  return IsShiftWithin(y) ? static_cast<T>(static_cast<Bits<T>>(x) >> static_cast<int>(y)) : T(0);
}
template <class T> JAXKERN_FN T shift_right_arithmetic(T x, T y) {
  // Of unsigned operands too, the highest bit is the sign.
  using S = std::conditional_t<
      sizeof(T) == 8, int64_t,
      std::conditional_t<sizeof(T) == 4, int32_t, std::conditional_t<sizeof(T) == 2, int16_t, int8_t>>>;
  return static_cast<T>(static_cast<S>(x) >> (IsShiftWithin(y) ? static_cast<int>(y) : kBits<T> - 1));
}
template <class T> JAXKERN_FN T population_count(T x) {
#if defined(__CUDACC__)
  if constexpr (sizeof(T) == 8) return static_cast<T>(__popcll(static_cast<uint64_t>(x)));
  else return static_cast<T>(__popc(static_cast<Bits<T>>(x)));
#else
  return static_cast<T>(__builtin_popcountll(static_cast<Bits<T>>(x)));
#endif
}
template <class T> JAXKERN_FN T clz(T x) {
#if defined(__CUDACC__)
  if constexpr (sizeof(T) == 8) return static_cast<T>(__clzll(static_cast<long long>(x)));
  else return static_cast<T>(__clz(static_cast<int>(static_cast<Bits<T>>(x))) - (32 - kBits<T>));
#else
  const uint64_t bits = static_cast<Bits<T>>(x);
  return static_cast<T>((bits ? __builtin_clzll(bits) : 64) - (64 - kBits<T>));
#endif
}

// --- Functions -----------------------------------------------------------------------------------------------------

#define JAXKERN_ARITHMETIC(name, Member) \
  template <class T> JAXKERN_FN T name(T x) { return Arithmetic<T>::Member(x); }
JAXKERN_ARITHMETIC(exp, Exp)
JAXKERN_ARITHMETIC(expm1, Expm1)
JAXKERN_ARITHMETIC(log, Log)
JAXKERN_ARITHMETIC(log1p, Log1p)
JAXKERN_ARITHMETIC(tanh, Tanh)
JAXKERN_ARITHMETIC(sin, Sin)
JAXKERN_ARITHMETIC(cos, Cos)
JAXKERN_ARITHMETIC(tan, Tan)
JAXKERN_ARITHMETIC(erf, Erf)
JAXKERN_ARITHMETIC(erfc, Erfc)
JAXKERN_ARITHMETIC(sqrt, Sqrt)
JAXKERN_ARITHMETIC(rsqrt, Rsqrt)
#undef JAXKERN_ARITHMETIC

#define JAXKERN_LIBRARY(name, function)                       \
  JAXKERN_FN float name(float x) { return ::function##f(x); } \
  JAXKERN_FN double name(double x) { return ::function(x); }
JAXKERN_LIBRARY(exp2, exp2)
JAXKERN_LIBRARY(log2, log2)
JAXKERN_LIBRARY(cbrt, cbrt)
JAXKERN_LIBRARY(asin, asin)
JAXKERN_LIBRARY(acos, acos)
JAXKERN_LIBRARY(atan, atan)
JAXKERN_LIBRARY(sinh, sinh)
JAXKERN_LIBRARY(cosh, cosh)
JAXKERN_LIBRARY(asinh, asinh)
JAXKERN_LIBRARY(acosh, acosh)
JAXKERN_LIBRARY(atanh, atanh)
JAXKERN_LIBRARY(lgamma, lgamma)
JAXKERN_LIBRARY(floor, floor)
JAXKERN_LIBRARY(ceil, ceil)
JAXKERN_LIBRARY(round_away_from_zero, round)
JAXKERN_LIBRARY(round_to_even, rint)
#undef JAXKERN_LIBRARY
JAXKERN_FN float atan2(float y, float x) { return ::atan2f(y, x); }
JAXKERN_FN double atan2(double y, double x) { return ::atan2(y, x); }
JAXKERN_FN float nextafter(float x, float y) { return ::nextafterf(x, y); }
JAXKERN_FN double nextafter(double x, double y) { return ::nextafter(x, y); }
// The 16-bit number next to x in the direction of y; x and y are 16-bit numbers in float.
#define JAXKERN_NEXTAFTER(type)                                                       \
  JAXKERN_FN float nextafter_##type(float x, float y) {                               \
    if (x != x || y != y) return nan<float>();                                        \
    if (x == y) return y;                                                             \
    if (x == 0) return from_##type##_bits(static_cast<uint16_t>(y > 0 ? 1 : 0x8001)); \
    const int away = (x < y) == (x > 0) ? 1 : -1;                                     \
    return from_##type##_bits(static_cast<uint16_t>(type##_bits(x) + away));          \
  }
JAXKERN_NEXTAFTER(bfloat16)
JAXKERN_NEXTAFTER(float16)
#undef JAXKERN_NEXTAFTER

// 1 / (1 + exp(-x)); NaN stays.
template <class T> JAXKERN_FN T logistic(T x) { return 1 / (1 + exp(-x)); }
#if defined(__CUDACC__)
JAXKERN_FN float logistic(float x) { return Single::Logistic(x); }
#endif

#if defined(__CUDACC__)
JAXKERN_FN float erf_inv(float x) { return ::erfinvf(x); }
JAXKERN_FN double erf_inv(double x) { return ::erfinv(x); }
#else
// Halley's method, from Winitzki's approximation.
template <class T> JAXKERN_FN T erf_inv(T x) {
  if (abs(x) >= 1) return abs(x) == 1 ? x * infinity<T>() : nan<T>();
  if (abs(x) < T(1e-10)) return x * T(0.88622692545275801);
  const double a = 0.147, l = std::log1p(-double(x) * x), b = 2 / (3.14159265358979323846 * a) + l / 2;
  double y = std::copysign(std::sqrt(std::sqrt(b * b - l / a) - b), double(x));
  for (int i = 0; i < 4; ++i) {
    const double error = std::fabs(y) < 0.5 ? std::erf(y) - double(x)
                         : y > 0            ? (1 - double(x)) - std::erfc(y)
                                            : std::erfc(-y) - (1 + double(x));
    const double step = error / (1.12837916709551257390 * std::exp(-y * y));
    y -= step / (1 + y * step);
  }
  return static_cast<T>(y);
}
#endif

// The logarithmic derivative of the gamma function: by its recurrence to x >= 8, then its asymptotic series (Bernardo,
// "Algorithm AS 103: Psi (Digamma) Function", 1976).
template <class T> JAXKERN_FN T digamma(T x) {
  if (x <= 0 && floor(x) == x) return nan<T>();
  T sum = 0;
  if (x < 0) {
    constexpr T pi = T(3.14159265358979323846);
    sum = -pi / tan(pi * (x - round_to_even(x)));
    x = 1 - x;
  }
  while (x < 8) sum -= 1 / x, x += 1;
  if (x == infinity<T>()) return x;
  const T inverse = 1 / x, p = inverse * inverse;
  const T series =
      p *
      (T(1.0 / 12) -
       p * (T(1.0 / 120) -
            p * (T(1.0 / 252) - p * (T(1.0 / 240) - p * (T(1.0 / 132) - p * (T(691.0 / 32760) - p * T(1.0 / 12)))))));
  return sum + (log(x) - inverse / 2 - series);
}

// e^-|x| I_n(x), n = 0 or 1. Large |x|: Abramowitz and Stegun, 9.7.1.
template <int n, class T> JAXKERN_FN T ScaledBessel(T x) {
  const T a = abs(x);
  T y;
  if (a < (sizeof(T) == 8 ? 500 : 60)) {
#if defined(__CUDACC__)
    if constexpr (sizeof(T) == 8) y = n ? ::cyl_bessel_i1(a) : ::cyl_bessel_i0(a);
    else y = n ? ::cyl_bessel_i1f(a) : ::cyl_bessel_i0f(a);
#else
    y = std::cyl_bessel_i(T(n), a);
#endif
    y *= exp(-a);
  } else {
    const T z = T(0.125) / a;
    T term = 1;
    y = 1;
#pragma unroll
    for (int k = 1; k <= 7; ++k) {
      term *= T((2 * k - 1) * (2 * k - 1) - 4 * n) / T(k) * z;
      y += term;
    }
    y *= T(0.39894228040143267794) * rsqrt(a);
  }
  return n && x < 0 ? -y : y;
}
template <class T> JAXKERN_FN T bessel_i0e(T x) { return x == x ? ScaledBessel<0>(x) : x; }
template <class T> JAXKERN_FN T bessel_i1e(T x) { return x == x ? ScaledBessel<1>(x) : x; }

}  // namespace lax

// Functions of values that are rounded to 16 bits in the end: relative errors of 2^-13, and what is below 2^-126 may be 0.
namespace coarse {

#if defined(__CUDACC__)
#define JAXKERN_COARSE(name, Member) \
  JAXKERN_FN float name(float x) { return Coarse::Member(x); }
JAXKERN_COARSE(cos, Cos)
JAXKERN_COARSE(erf, Erf)
JAXKERN_COARSE(erfc, Erfc)
JAXKERN_COARSE(exp, Exp)
JAXKERN_COARSE(exp2, Power2)
JAXKERN_COARSE(expm1, Expm1)
JAXKERN_COARSE(log, Log)
JAXKERN_COARSE(log1p, Log1p)
JAXKERN_COARSE(logistic, Logistic)
JAXKERN_COARSE(sin, Sin)
JAXKERN_COARSE(sqrt, Sqrt)
JAXKERN_COARSE(tanh, Tanh)
#undef JAXKERN_COARSE
JAXKERN_FN float div(float x, float y) { return Coarse::Divide(x, y); }
JAXKERN_FN float pow(float x, float y) { return Coarse::Power(x, y); }
template <class Y> JAXKERN_FN float pow(float x, Y y) { return lax::pow(x, y); }
#else
using namespace lax;
#endif

}  // namespace coarse

namespace lax {

// exp(x) for an x that is not above 0. The error relative to the result is about 2^-22 and |x| 2^-23.
JAXKERN_FN float exp_below(float x) { return coarse::exp(x); }

}  // namespace lax

// float32 by one instruction of the GPU and a multiplication. Relative errors are 2^-22; the logarithm of a number between 0.5
// and 2 has an absolute error of 2^-22. What is below 2^-126 may be 0.
namespace approximate {

#if defined(__CUDACC__)
JAXKERN_FN float exp2(float x) { return Coarse::Power2(x); }
JAXKERN_FN float log(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return Coarse::kLn2 * y;
}
#else
using namespace lax;
#endif

}  // namespace approximate
}  // namespace jaxkern
