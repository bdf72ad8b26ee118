// The arithmetic of functors. No memory is accessed. A functor is a template over one of
//
//     Single    float; results within 4 units in the last place
//     Double    double
//     Integer   int32_t, which wraps
//     Coarse    float, for 16-bit results: relative errors of 2^-13 in a few instructions
//
// Each has a member type C and the functions other than + - * / and comparisons.
//
// Sources. Normal distribution: exp(-a^2/2) times a polynomial in 1 / (1 + k a), after Hastings, "Approximations for
// Digital Computers", 1955, or a ratio of polynomials, after Cody, "Rational Chebyshev Approximations for the Error
// Function", 1969. The coefficients come from weighted least squares (Lawson, 1961).
#pragma once

#include "../common/extremes.h"
#include "../common/std.h"

#define JAXKERN_FN __device__ __forceinline__

namespace jaxkern {

template <class To, class From> JAXKERN_FN To BitsAs(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// c[0] + c[1] x + c[2] x^2 + ...
template <class C, int n> JAXKERN_FN C Polynomial(C x, const C (&c)[n]) {
  C sum = c[n - 1];
#pragma unroll
  for (int i = n - 2; i >= 0; --i) {
    sum = sum * x + c[i];  // one instruction
  }
  return sum;
}

// --- Shared by all

template <class T> struct Basic {
  using C = T;
  static JAXKERN_FN C Abs(C x) { return x < 0 ? C(-x) : x; }
  static JAXKERN_FN C Max(C a, C b) { return LargerOrNan(a, b); }
  static JAXKERN_FN C Min(C a, C b) { return SmallerOrNan(a, b); }
  static JAXKERN_FN bool IsNan(C x) { return x != x; }
  static JAXKERN_FN C Fma(C a, C b, C c) { return a * b + c; }
  static JAXKERN_FN C Product(C a, C b) { return a * b; }  // rounded: never fused into a multiply-add
  static JAXKERN_FN C Product(C a, C b, C c) { return a * (b * c); }
  static JAXKERN_FN C Sign(C x) { return C(x > 0) - C(x < 0); }
};

struct Integer : Basic<int32_t> {
  static JAXKERN_FN C Abs(C x) { return x < 0 ? C(0u - uint32_t(x)) : x; }
  static JAXKERN_FN C Fma(C a, C b, C c) { return C(uint32_t(a) * uint32_t(b) + uint32_t(c)); }
};

template <class T> struct Real : Basic<T> {
  using C = T;
  static JAXKERN_FN C Divide(C a, C b) { return a / b; }
  static JAXKERN_FN C Sign(C x) { return x > 0 ? C(1) : x < 0 ? C(-1) : x; }  // keeps -0 and NaN
  static constexpr C kInfinity = C(__builtin_bit_cast(double, 0x7ff0000000000000ull));
  static constexpr C kInverseSqrt2Pi = C(0.39894228040143267794);
  static constexpr C kTwoInverseSqrtPi = C(1.12837916709551257390);
  static JAXKERN_FN bool IsInf(C x) { return x == kInfinity || x == -kInfinity; }
  static JAXKERN_FN C Share(C a, C e) { return a / (1 + e); }  // 0 <= e <= 1
};

struct Double : Real<double> {
  static JAXKERN_FN C Abs(C x) { return fabs(x); }
  static JAXKERN_FN C Fma(C a, C b, C c) { return fma(a, b, c); }
  static JAXKERN_FN C Quotient(C a, C b) { return a / b; }
  static JAXKERN_FN C Floor(C x) { return floor(x); }
  static JAXKERN_FN C Ceil(C x) { return ceil(x); }
  static JAXKERN_FN C Trunc(C x) { return trunc(x); }
  static JAXKERN_FN C Round(C x) { return rint(x); }
  static JAXKERN_FN C Sqrt(C x) { return sqrt(x); }
  static JAXKERN_FN C Rsqrt(C x) { return rsqrt(x); }
  static JAXKERN_FN C Exp(C x) { return exp(x); }
  static JAXKERN_FN C Expm1(C x) { return expm1(x); }
  static JAXKERN_FN C Log(C x) { return log(x); }
  static JAXKERN_FN C Log1p(C x) { return log1p(x); }
  static JAXKERN_FN C Log1pUnit(C x) { return log1p(x); }
  static JAXKERN_FN C Tanh(C x) { return tanh(x); }
  static JAXKERN_FN C Sin(C x) { return sin(x); }
  static JAXKERN_FN C Cos(C x) { return cos(x); }
  static JAXKERN_FN C Tan(C x) { return tan(x); }
  static JAXKERN_FN C Erf(C x) { return erf(x); }
  static JAXKERN_FN C Erfc(C x) { return erfc(x); }
  static JAXKERN_FN C Power(C x, C y) { return pow(x, y); }
  static JAXKERN_FN C Fmod(C x, C y) { return fmod(x, y); }
  static JAXKERN_FN C NormalCdf(C x) { return normcdf(x); }
  static JAXKERN_FN C ExpOfProduct(C x, double c) { return exp(c * x); }
  static JAXKERN_FN C ExpOfGeluArgument(C x) { return exp(-1.5957691216057308 * x * (1 + 0.044715 * (x * x))); }
};

// Functions of float that the hardware provides or the CUDA library computes accurately enough.
struct Float : Real<float> {
  static JAXKERN_FN C Abs(C x) { return fabsf(x); }
  static JAXKERN_FN C Fma(C a, C b, C c) { return fmaf(a, b, c); }
  static JAXKERN_FN C Product(C a, C b) { return __fmul_rn(a, b); }
  static JAXKERN_FN C Product(C a, C b, C c) { return a * (b * c); }
  // Requires b between 2^-126 and 2^126, for which __fdividef would spend an instruction on a test.
  static JAXKERN_FN C Inverse(C b) {
    C y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
    return y;
  }
  static JAXKERN_FN C Power2(C x) {
    C y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static JAXKERN_FN C FastQuotient(C a, C b) { return a * Inverse(b); }
  static JAXKERN_FN C Quotient(C a, C b) {  // nearly correctly rounded, for finite numbers
    const C inverse = Inverse(b), q = a * inverse;
    return fmaf(inverse, fmaf(-b, q, a), q);
  }
  static JAXKERN_FN C Floor(C x) { return floorf(x); }
  static JAXKERN_FN C Ceil(C x) { return ceilf(x); }
  static JAXKERN_FN C Trunc(C x) { return truncf(x); }
  static JAXKERN_FN C Round(C x) { return rintf(x); }
  static JAXKERN_FN C Sqrt(C x) { return sqrtf(x); }
  static JAXKERN_FN C Rsqrt(C x) { return rsqrtf(x); }
  static JAXKERN_FN C Log(C x) { return logf(x); }
  static JAXKERN_FN C Log1p(C x) { return log1pf(x); }
  static JAXKERN_FN C Erf(C x) { return erff(x); }
  static JAXKERN_FN C Erfc(C x) { return erfcf(x); }
  static JAXKERN_FN C Power(C x, C y) { return powf(x, y); }
  static JAXKERN_FN C Fmod(C x, C y) { return fmodf(x, y); }
};

struct Single : Float {
  using Float::Product;
  static JAXKERN_FN C Product(C a, C b, C c) {  // rounded once unless it overflows
    const C p = Product(b, c), y = Product(a, p), low = fmaf(b, c, -p);
    return fabsf(y) < kInfinity ? fmaf(a, p, a * low) : y;
  }
  static JAXKERN_FN C Exp(C x) { return expf(x); }
  static JAXKERN_FN C Expm1(C x) { return expm1f(x); }
  static JAXKERN_FN C Share(C a, C e) {  // a is e or 1; a - q is exact, so 1 + e is only needed for the first guess
    const C inverse = Inverse(1 + e), q = a * inverse;
    return fmaf(inverse, fmaf(-q, e, a - q), q);
  }
  static JAXKERN_FN C Log1pUnit(C x) {  // 0 <= x <= 1: twice the area tangent of x / (2 + x)
    const C z = Quotient(x, 2 + x), square = z * z;
    const C series =
        Polynomial(square, {0.33333319425582886f, 0.20003780722618103f, 0.14118309319019318f, 0.1342574954032898f});
    return fmaf(2 * z * square, series, 2 * z);
  }
  // e^-x as 2^t (1 + r), where t is -x log2(e) rounded and r its rounding error. Limits on x and t keep r finite where
  // 2^t is 0 or infinite; the factor 2^-32 keeps the inverse out of the subnormal numbers.
  static JAXKERN_FN C Logistic(C x) {
    const C a = Min(x, 100.0f), t = fminf(a * C(-kLog2e), 0x1.fffffep6f);
    const C e = Power2(t), y = fmaf(e, fmaf(t, -kLn2Low, fmaf(t, -kLn2, -a)), e);
    return Inverse(fmaf(y, 0x1p-32f, 0x1p-32f)) * 0x1p-32f;
  }
  // Like tanhf, without its special case for large |x|, where the inverse is 0.
  static JAXKERN_FN C Tanh(C x) {
    const C a = fabsf(x), p = x * x;
    const C far = copysignf(fmaf(-2, Inverse(1 + Power2(a * C(2 * kLog2e))), 1), x);
    const C near = fmaf(x, p * Polynomial(p, {-0.333327681f, 0.133152977f, -0.0523039624f, 0.0157396831f}), x);
    return a < 0.6f ? near : far;
  }
  static JAXKERN_FN C Sin(C x) { return SineOf<false>(x); }
  static JAXKERN_FN C Cos(C x) { return SineOf<true>(x); }
  static JAXKERN_FN C Tan(C x) {
    const C shifted = fmaf(x, 0x1.45f306p-1f, kMagic), k = shifted - kMagic;
    const C r = fmaf(k, -0x1.84698ap-48f, fmaf(k, -0x1.4442dp-24f, fmaf(k, -0x1.921fb4p+0f, x))), p = r * r;
    const C series =
        Polynomial(p, {0.3333323f, 0.13337791f, 0.0534667969f, 0.0242919922f, 0.00326538086f, 0.00933837891f});
    C y = fmaf(series, p * r, r);
    if (__float_as_int(shifted) & 1) y = Inverse(-y);
    if (__builtin_expect(IsFar(x), 0)) y = FarTangent(x);
    return y;
  }
  static JAXKERN_FN C NormalCdf(C x) {
    constexpr double k = 0.5 * kLog2e;
    const C a = Min(fabsf(x), 20.0f), cdf = Tail(a, 1, C(k), C(k - C(k)), 2.50662827463f, TailDivisor(a));
    return x < 0 ? cdf : 1 - cdf;
  }
  static JAXKERN_FN C Erfc(C x) {
    constexpr double k = kLog2e;
    const C a = Min(fabsf(x), 14.0f), divisor = TailDivisor(a * 1.41421356f);
    const C tail = Tail(a, 2, C(k), C(k - C(k)), 3.54490770f, divisor);
    return x < 0 ? 2 - tail : tail;
  }
  // The exponent is computed in two parts, because an exponential amplifies the error of its exponent by up to 100.
  static JAXKERN_FN C ExpOfProduct(C x, double c) {
    const C high = C(c), low = C(c - high), p = Product(x, high), rest = fmaf(x, high, -p) + x * low;
    const C e = Exp(p);
    return fabsf(p) < 200 ? fmaf(e, rest, e) : e;
  }
  // exp(-2 sqrt(2 / pi) (x + 0.044715 x^3)) for x >= 0. Both terms of the base-2 exponent are rounded to multiples of
  // 2^-14, whose sum is exact; the last line corrects the rounding errors.
  static JAXKERN_FN C ExpOfGeluArgument(C x) {
    constexpr double k1 = -1.5957691216057308 * kLog2e, k3 = 0.044715 * k1;
    constexpr C c1 = C(k1), c1_low = C(k1 - c1), c3 = C(k3), c3_low = C(k3 - c3);
    const C a = Min(x, 12.5f), square = Product(a, a), cube = Product(a, square);
    const C cube_low = fmaf(a, square, -cube) + a * fmaf(a, a, -square);
    const C shifted1 = fmaf(c1, a, 768.0f), shifted = fmaf(c3, cube, shifted1), u1 = shifted1 - 768.0f,
            u3 = shifted - shifted1;
    const C low = fmaf(c1, a, -u1) + (fmaf(c3, cube, -u3) + fmaf(c1_low, a, fmaf(c3_low, cube, c3 * cube_low)));
    const C e = Power2(shifted - 736.0f);
    return fmaf(e * low, kLn2, e) * 0x1p-32f;  // must be accurate when subnormal: the result is multiplied by up to 10
  }

 private:
  // Sine, cosine and tangent subtract the multiple k of pi (tangent: of pi / 2) that is next to the angle, in three parts; of the
  // cosine, k is odd in halves. k is rounded by the addition of kMagic, whose low bits are k's. Then they evaluate a
  // polynomial, whose last digits are such that cos(0) is 1 and nothing is larger. Angles that need more digits of pi are far. They
  // call CUDA's functions: inlined, the 60 instructions and the loop of each of these were most of what a kernel took to compile.
  static constexpr C kMagic = 12582912.0f;
  static JAXKERN_FN bool IsFar(C x) { return fabsf(x) >= 105615; }  // false for NaN
  template <bool kCosine> static __device__ __noinline__ C FarSine(C x) { return kCosine ? cosf(x) : sinf(x); }
  static __device__ __noinline__ C FarTangent(C x) { return tanf(x); }
  template <bool kCosine> static JAXKERN_FN C SineOf(C x) {
    const C turns = fmaf(x, 0.318309886f, kCosine ? -0.5f : kMagic), shifted = kCosine ? turns + kMagic : turns;
    const C n = shifted - kMagic, k = kCosine ? n + 0.5f : n;
    const C r = fmaf(k, -1.07806050e-14f, fmaf(k, -1.50995790e-7f, fmaf(k, -3.1415925f, x))), p = r * r;
    const C series = Polynomial(p, {-0x1.55555p-3f, 0x1.110f1cp-7f, -0x1.9f736p-13f, 0x1.5d97fcp-19f});
    C y = fmaf(series, fmaf(p, r, 0.0f), r);  // the sum with 0 keeps the sign of a zero
    const uint32_t odd = static_cast<uint32_t>(__float_as_int(shifted)) << 31;
    y = __int_as_float(__float_as_int(y) ^ static_cast<int>(kCosine ? ~odd & 0x80000000u : odd));
    if (__builtin_expect(IsFar(x), 0)) y = FarSine<kCosine>(x);
    return y;
  }

  static constexpr double kLog2e = 1.4426950408889634;
  static constexpr C kLn2 = 0.693147181f, kLn2Low = -1.90465421e-9f;
  // The tail of the normal distribution beyond a is exp(-a^2/2) / (2 + a (sqrt(2 pi) + h(a))). h, a ratio of
  // polynomials, is the smallest term, so its error hardly matters. Returns 2 + a h(a); a may be rounded.
  static JAXKERN_FN C TailDivisor(C a) {
    const C h = FastQuotient(Polynomial(a, {-0.910859227180481f, -0.695903480052948f, -0.25419881939888f,
                                            -0.04974844306707382f, -0.004505206365138292f}),
                             Polynomial(a, {1.0f, 1.0639886856079102f, 0.5456064343452454f, 0.1617821604013443f,
                                            0.02769853174686432f, 0.0022525868844240904f}));
    return fmaf(a, h, 2.0f);
  }
  // scale e^(-c a^2) / (divisor + a slope), where c log2(e) = high + low. One correction covers the rounding errors of
  // the exponent, the sum and the quotient.
  static JAXKERN_FN C Tail(C a, C scale, C high, C low, C slope, C divisor) {
    const C square = Product(a, a), u = Product(square, -high);
    const C rest = fmaf(square, -low, fmaf(fmaf(a, a, -square), -high, fmaf(square, -high, -u)));
    const C sum = fmaf(a, slope, divisor), lost = fmaf(a, slope, divisor - sum);
    const C e = scale * Power2(u), inverse = Inverse(sum), q = e * inverse;
    return fmaf(inverse, fmaf(e * rest, kLn2, fmaf(-q, lost, fmaf(-sum, q, e))), q);
  }
};

struct Coarse : Float {
  static constexpr C kLog2e = 1.44269504f, kLn2 = 0.693147181f;
  static JAXKERN_FN C Quotient(C a, C b) { return FastQuotient(a, b); }
  static JAXKERN_FN C Share(C a, C e) { return FastQuotient(a, 1 + e); }
  static JAXKERN_FN C Exp(C x) { return Power2(x * kLog2e); }
  static JAXKERN_FN C Expm1(C x) {
    const C near =
        x *
        fmaf(x, Polynomial(x, {0.499974747722195f, 0.16667396983678887f, 0.042092714478751445f, 0.008342257019566366f}),
             1.0f);  // -0 stays -0
    return fabsf(x) < 0.5f ? near : Exp(x) - 1;
  }
  static JAXKERN_FN C Divide(C a, C b) {
    C y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }
  static JAXKERN_FN C Sqrt(C x) {
    C y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static JAXKERN_FN C
  Log2(C x, C d) {  // log2(x), x = 1 + d, to a relative 2^-17; lg2.approx is within 2^-22, too coarse near 1
    C far;
    asm("lg2.approx.f32 %0, %1;" : "=f"(far) : "f"(x));
    return fabsf(d) < 0x1p-5f ? d * Polynomial(d, {1.4426950216293335f, -0.7216171622276306f, 0.4811677634716034f})
                              : far;
  }
  static JAXKERN_FN C Log(C x) { return kLn2 * Log2(x, x - 1); }
  static JAXKERN_FN C Log1p(C x) { return kLn2 * Log2(1 + x, x); }
  // 2^(y log2 |x|): finite results have |y log2 |x|| < 150, for which the logarithm is accurate enough. Signs and NaN
  // as in C.
  static JAXKERN_FN C Power(C x, C y) {
    const C a = fabsf(x), exponent = y == 0 || a == 1 ? C(0) : y * Log2(a, a - 1);
    C power;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    const C half = 0.5f * y;
    const bool whole = truncf(y) == y, odd = truncf(half) != half;
    if (whole && odd) power = copysignf(power, x);
    return x < 0 && a < kInfinity && !whole ? C(NAN) : power;
  }
  static JAXKERN_FN C Erf(C x) {  // 1 where it is within 2^-14 of that, so that x (1 - erf(x)) ends
    const C p = x * x;
    const C near = x * Polynomial(p, {1.128332257270813f, 0.17995741963386536f, 0.02960597351193428f}) *
                   Inverse(Polynomial(p, {1.0f, 0.4921444058418274f, 0.09203017503023148f, 0.0035081887617707253f}));
    return fabsf(x) >= 2.9f ? copysignf(1, x) : near;
  }
  static JAXKERN_FN C Erfc(C x) {
    const C tail = 2 * NormalTail(fabsf(x) * 1.41421356f);
    return x < 0 ? 2 - tail : tail;
  }
  // The sine (kCosine: the cosine) of |x| < 2^16: subtracts multiples of pi (for the cosine, odd multiples of pi / 2),
  // then evaluates a polynomial, whose last digits are such that cos(0) is 1, and nothing is larger.
  template <bool kCosine> static JAXKERN_FN C Turned(C x) {
    const C turns = x * 0.318309886f, shifted = (kCosine ? turns - 0.5f : turns) + 12582912.0f,
            n = shifted - 12582912.0f;
    const C k = kCosine ? n + 0.5f : n;
    const C r = fmaf(k, -1.07806050e-14f, fmaf(k, -1.50995790e-7f, fmaf(k, -3.1415925f, x))), p = r * r;
    const C cube = kCosine ? r * p : fmaf(p, r, 0.0f);  // the sum with 0 keeps the sign of a zero
    const C y = r + cube * Polynomial(p, {-0.166658416390419f, 0.008314205333590508f, -0.00018536664720159024f});
    const uint32_t odd = static_cast<uint32_t>(__float_as_int(shifted)) << 31;
    return __int_as_float(__float_as_int(y) ^ static_cast<int>(kCosine ? ~odd & 0x80000000u : odd));
  }
  static JAXKERN_FN C Sin(C x) { return SineOf<false>(x); }
  static JAXKERN_FN C Cos(C x) { return SineOf<true>(x); }
  template <bool kCosine> static JAXKERN_FN C SineOf(C x) {
    C y = Turned<kCosine>(x);
    if (__builtin_expect(IsFar(x), 0)) y = FarSine(x, kCosine);  // IsFar is false for NaN
    return y;
  }
  static JAXKERN_FN bool IsFar(C x) { return fabsf(x) >= 65536; }
  static __device__ __noinline__ C FarSine(C x, bool cosine) { return cosine ? cosf(x) : sinf(x); }
  static JAXKERN_FN C Log1pUnit(C x) {  // 0 <= x <= 1
    return x * Polynomial(x, {0.9999432849988102f, -0.4969777385491167f, 0.3063005783822492f, -0.15742679072715737f,
                              0.04134716969250328f});
  }
  static JAXKERN_FN C Logistic(C x) { return Inverse(1 + Exp(-x)); }
  static JAXKERN_FN C Tanh(C x) {
    const C y = 1 - 2 * Inverse(1 + Power2(x * (2 * kLog2e)));
    return fabsf(x) < 0x1p-8f ? x : y;
  }
  static JAXKERN_FN C NormalTail(C a) {  // tail of the normal distribution beyond a >= 0; 0.5 at 0
    const C t = Inverse(fmaf(0.25f, a, 1.0f));
    return t *
           Polynomial(t, {0.10115983337163925f, 0.08204630762338638f, 0.17608729004859924f, -0.09883411228656769f,
                          0.23954066634178162f}) *
           Power2(a * a * (-0.5f * kLog2e));
  }
  static JAXKERN_FN C NormalCdf(C x) {
    const C cdf = NormalTail(fabsf(x));
    return x < 0 ? cdf : 1 - cdf;
  }
  static JAXKERN_FN C ExpOfProduct(C x, double c) { return Power2(x * C(c * 1.4426950408889634)); }
  static JAXKERN_FN C ExpOfGeluArgument(C x) {
    return Power2(x * fmaf(x * x, -0.0713548163f * kLog2e, -1.59576912f * kLog2e));
  }
};

// For packs in which no angle is far.
struct CoarseNear : Coarse {
  static JAXKERN_FN C Sin(C x) { return Turned<false>(x); }
  static JAXKERN_FN C Cos(C x) { return Turned<true>(x); }
};

}  // namespace jaxkern
