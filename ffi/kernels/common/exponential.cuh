// Exponentials of differences, and sums of them that are relative to a common base: the arithmetic that softmax,
// cross-entropy, logsumexp and segment_softmax share. float and double to the accuracy of a division; 16-bit types with
// as few instructions as their output allows.
#pragma once

#include "extremes.h"
#include "pack.cuh"
#include "std.h"

namespace jaxkern {

template <class C> __device__ __forceinline__ C Infinity() {
  if constexpr (sizeof(C) == 4) return __uint_as_float(0x7f800000u);
  else return __hiloint2double(0x7ff00000, 0);
}
__device__ __forceinline__ float Max(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double Max(double a, double b) { return fmax(a, b); }

struct MaxOf {
  template <class C> __device__ __forceinline__ C operator()(C a, C b) const { return Max(a, b); }
};
struct SumOf {
  template <class C> __device__ __forceinline__ C operator()(C a, C b) const { return a + b; }
};

__device__ __forceinline__ float Exp2Approx(float x) {
#ifdef JAXKERN_EMULATED
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.693147180559945309417f;

// 16 bit: the factor of x and base before the subtraction: log2(e), or 1 if base is so large that any smaller bfloat16 has
// an exponential of almost 0 with either factor. float16 is never that large.
template <class T> __device__ __forceinline__ float PowerScale(float base) {
  return fabsf(base) < 0x1p29f ? kLog2E : 1.0f;
}

// 16 bit: log2 of the common factor that rounding base * log2(e) introduces into every term of a sum; see below.
template <class T> __device__ __forceinline__ float LogOfExcess(float base) {
  const float scale = PowerScale<T>(base);
  return fmaf(base, scale, -__fmul_rn(base, scale));
}

// e^(x - base) for x <= base, to the accuracy that T's output can show.
//
// 16 bit: 2^(x * log2(e) - round(base * log2(e))), one instruction less than from the difference. Rounding the second
// product scales all terms of a row by a common factor of at most 2^32. It cancels in softmax; other sums are divided by it
// (WithoutExcess).
// float: the rounding error of d * log2(e) is restored as e^high * (1 + low), which leaves only the error of ex2.approx
// (2 ulp).
//
// kDifference: compute 16 bit from the difference, too. For callers with a base per element of a pack, who lack registers
// for as many scales, and for callers whose x are floats of any size.
template <class T, bool kDifference = false>
__device__ __forceinline__ Compute<T> ExpDifference(Compute<T> x, Compute<T> base) {
  if constexpr (sizeof(T) == 8) {
    return exp(x - base);
  } else if constexpr (sizeof(T) == 4) {
    const float d = LargerOrNan(x - base, -104.0f);  // -inf would make the low part NaN; NaN itself passes
    const float high = __fmul_rn(d, kLog2E);
    const float low = fmaf(high, -kLn2, d);
    const float power = Exp2Approx(high);
    return fmaf(power, low, power);
  } else if constexpr (kDifference) {
    return Exp2Approx((x - base) * kLog2E);
  } else {
    const float scale = PowerScale<T>(base);
    return Exp2Approx(fmaf(x, scale, -__fmul_rn(base, scale)));
  }
}

// The factor that converts a sum relative to `from` to one relative to `to`.
template <class T, bool kDifference = false>
__device__ __forceinline__ Compute<T> Rescale(Compute<T> from, Compute<T> to) {
  if constexpr (sizeof(T) == 2 && !kDifference) {
    const float scale = PowerScale<T>(to);
    if (PowerScale<T>(from) != scale) return 0;
    return Exp2Approx(__fmul_rn(from, scale) - __fmul_rn(to, scale));
  } else {
    return ExpDifference<T, kDifference>(from, to);
  }
}

// The maximum of an empty row is -inf. Using 0 instead avoids -inf - -inf.
template <class C> __device__ __forceinline__ C Base(C max) { return max == -Infinity<C>() ? C(0) : max; }

// The sum without the common factor of its terms, for 16-bit T. The term of the maximum is subtracted as it was added,
// so that it counts as exactly 1: the logarithm of a row with nothing else in it is exactly 0.
template <class T> __device__ __forceinline__ float WithoutExcess(float sum, float max) {
  const float excess = LogOfExcess<T>(max);
  return fmaf(sum - Exp2Approx(excess), Exp2Approx(-excess), 1.0f);
}

// The type in which the sums of threads are merged: double for float, because each of the ten or so additions to a sum
// near 1 would cost half a unit in the last place.
template <class T> using Sum = std::conditional_t<sizeof(T) == 4, double, Compute<T>>;

}  // namespace jaxkern
