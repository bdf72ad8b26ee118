// What the functions of functions.h compute with: types and their limits, constants, complex numbers and conversions.
//
// The kinds of arithmetic Single and Double come from arithmetic.h on the GPU. Compiled for the host, where tests run what the
// translator writes, they come from the C library.
#pragma once

#include "std.h"

#if defined(__CUDACC__)

#include "../elementwise/arithmetic.h"
#include "half.h"

#else

#include <math.h>

#include <cmath>

#define JAXKERN_FN inline

namespace jaxkern {

template <class To, class From> JAXKERN_FN To BitsAs(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <class T> struct Library {
  using C = T;
  static C Exp(C x) { return std::exp(x); }
  static C Expm1(C x) { return std::expm1(x); }
  static C Log(C x) { return std::log(x); }
  static C Log1p(C x) { return std::log1p(x); }
  static C Tanh(C x) { return std::tanh(x); }
  static C Sin(C x) { return std::sin(x); }
  static C Cos(C x) { return std::cos(x); }
  static C Tan(C x) { return std::tan(x); }
  static C Erf(C x) { return std::erf(x); }
  static C Erfc(C x) { return std::erfc(x); }
  static C Sqrt(C x) { return std::sqrt(x); }
  static C Rsqrt(C x) { return 1 / std::sqrt(x); }
  static C Power(C x, C y) { return std::pow(x, y); }
  static C Fmod(C x, C y) { return std::fmod(x, y); }
  static C Share(C a, C e) { return a / (1 + e); }
};
using Single = Library<float>;
using Double = Library<double>;

}  // namespace jaxkern

#endif

namespace jaxkern {

// A complex number as it lies in memory. Functors compute with its parts.
template <class T> struct alignas(2 * sizeof(T)) Complex {
  T re, im;
  Complex() = default;
  JAXKERN_FN Complex(T real, T imag = 0) : re(real), im(imag) {}
};

namespace lax {

template <class T> constexpr bool kReal = std::is_floating_point_v<T>;
template <class T> using Arithmetic = std::conditional_t<std::is_same_v<T, double>, Double, Single>;

template <int bytes> struct BitsOf {
  using type = uint32_t;
};
template <> struct BitsOf<1> {
  using type = uint8_t;
};
template <> struct BitsOf<2> {
  using type = uint16_t;
};
template <> struct BitsOf<8> {
  using type = uint64_t;
};
template <class T> using Bits = typename BitsOf<sizeof(T)>::type;
template <class T> constexpr int kBits = 8 * static_cast<int>(sizeof(T));
// Integers wrap in this type: unsigned, and not promoted to int.
template <class T> using Wrapping = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T> constexpr T kLowest = std::is_signed_v<T> ? T(Bits<T>(1) << (kBits<T> - 1)) : T(0);
template <class T> constexpr T kHighest = T(~Bits<T>(kLowest<T>));

// --- Constants -----------------------------------------------------------------------------------------------------

template <class T> JAXKERN_FN T nan() {
  if constexpr (sizeof(T) == 8) return BitsAs<T>(uint64_t{0x7ff8000000000000});
  else return BitsAs<T>(uint32_t{0x7fc00000});
}
template <class T> JAXKERN_FN T infinity() {
  if constexpr (sizeof(T) == 8) return BitsAs<T>(uint64_t{0x7ff0000000000000});
  else return BitsAs<T>(uint32_t{0x7f800000});
}

template <class T> JAXKERN_FN T real(Complex<T> x) { return x.re; }
template <class T> JAXKERN_FN T imag(Complex<T> x) { return x.im; }
template <class T> JAXKERN_FN Complex<T> complex(T re, T im) { return {re, im}; }

// --- Conversions ---------------------------------------------------------------------------------------------------

template <class To, class From> JAXKERN_FN To convert(From x) {
  if constexpr (std::is_same_v<To, bool>) {
    return x != From(0);
#ifdef __CUDA_ARCH__
  } else if constexpr (std::is_same_v<From, float> && std::is_same_v<To, uint32_t>) {
    return __float2uint_rz(x);  // which saturates, and makes 0 of NaN
  } else if constexpr (std::is_same_v<From, float> && !kReal<To> && sizeof(To) <= 4) {
    const int32_t whole = __float2int_rz(x);
    constexpr int32_t low = kLowest<To>, high = kHighest<To>;
    return static_cast<To>(whole > high ? high : whole < low ? low : whole);
#endif
  } else if constexpr (kReal<From> && !kReal<To>) {
    // The bounds are powers of two, or 0: exact in either type.
    constexpr From low = static_cast<From>(kLowest<To>);
    constexpr From high = From(2) * static_cast<From>(Bits<To>(1) << (kBits<To> - 1 - std::is_signed_v<To>));
    return x >= high ? kHighest<To> : x > low ? static_cast<To>(x) : x == x ? kLowest<To> : To(0);
  } else {
    return static_cast<To>(x);
  }
}

// A number rounded to a 16-bit type, as a float; and the bits of one.
template <class T> JAXKERN_FN uint16_t bfloat16_bits(T x) {
#if defined(__CUDACC__)
  if constexpr (std::is_same_v<T, double>) return BitsAs<uint16_t>(__double2bfloat16(x));
  else return BitsAs<uint16_t>(__float2bfloat16_rn(static_cast<float>(x)));
#else
  const uint32_t bits = BitsAs<uint32_t>(static_cast<float>(x));
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}
JAXKERN_FN float from_bfloat16_bits(uint16_t bits) { return BitsAs<float>(uint32_t{bits} << 16); }
template <class T> JAXKERN_FN float round_bfloat16(T x) {
#if defined(__CUDACC__)
  // One fast instruction converts two numbers. Converted alone, x would take a slow one.
  if constexpr (!std::is_same_v<T, double>) {
    return BitsAs<float>(BitsAs<uint32_t>(__floats2bfloat162_rn(0, static_cast<float>(x))));
  }
#endif
  return from_bfloat16_bits(bfloat16_bits(x));
}

template <class T> JAXKERN_FN uint16_t float16_bits(T x) {
#if defined(__CUDACC__)
  if constexpr (std::is_same_v<T, double>) return BitsAs<uint16_t>(__double2half(x));
  else return BitsAs<uint16_t>(__float2half_rn(static_cast<float>(x)));
#else
  return BitsAs<uint16_t>(static_cast<_Float16>(x));
#endif
}
JAXKERN_FN float from_float16_bits(uint16_t bits) {
#if defined(__CUDACC__)
  return __half2float(BitsAs<__half>(bits));
#else
  return static_cast<float>(BitsAs<_Float16>(bits));
#endif
}
template <class T> JAXKERN_FN float round_float16(T x) { return from_float16_bits(float16_bits(x)); }

template <class To, class From> JAXKERN_FN To bitcast_convert_type(From x) { return BitsAs<To>(x); }

// Rounds to this many bits of exponent and mantissa; what is too large becomes infinite, what is subnormal 0. With all bits of its
// type, x is a product, say, that is rounded before something is added to it: the addition of -0 keeps the compiler from one fma.
template <int kExponent, int kMantissa, class T> JAXKERN_FN T reduce_precision(T x) {
  using B = Bits<T>;
  constexpr int kOwnMantissa = sizeof(T) == 8 ? 52 : 23, kOwnExponent = kBits<T> - 1 - kOwnMantissa;
#ifdef __CUDA_ARCH__
  if constexpr (kMantissa >= kOwnMantissa && sizeof(T) == 8) return __dadd_rn(x, -0.0);
  else if constexpr (kMantissa >= kOwnMantissa && sizeof(T) == 4) x = __fadd_rn(x, -0.0f);
#endif
  constexpr B kSign = B(1) << (kBits<T> - 1), kField = (B(1) << (kBits<T> - 1)) - (B(1) << kOwnMantissa);
  B bits = BitsAs<B>(x);
  if constexpr (kMantissa < kOwnMantissa) {
    constexpr B kLast = B(1) << (kOwnMantissa - kMantissa);
    bits = static_cast<B>((bits + (kLast / 2 - 1) + ((bits & kLast) != 0)) & ~(kLast - 1));
  }
  if constexpr (kExponent < kOwnExponent) {
    constexpr B kBias = (B(1) << (kOwnExponent - 1)) - 1, kNewBias = (B(1) << (kExponent - 1)) - 1;
    const B field = bits & kField;
    if (field > (kBias + kNewBias) << kOwnMantissa) bits = (bits & kSign) | kField;
    else if (field <= (kBias - kNewBias) << kOwnMantissa) bits &= kSign;
  }
  return x != x ? x : BitsAs<T>(bits);
}

}  // namespace lax
}  // namespace jaxkern
