// The arithmetic of the segment softmax: one Op for the forward pass (SegmentForward) and one for the gradient
// (SegmentBackward). Device functions only, on registers and shared memory.
//
//     Stat      of a run or a part of one; can be merged in any grouping (MergeAll: many at once)
//     Reduce    reduces a span: computes `kept`, which Write needs for each element, and the Stats of the runs at
//               its two ends (head: up to the first end in it; tail: from the last one on; both cover the whole span
//               if no run ends in it)
//     Write     writes the results of a span, given the totals of the runs at its two ends
//     Map       returns the result of an element, given the Final of its run
//     Term      returns the summand of an element for a Stat whose maximum is known (kMaxima)
//
// `v` holds the inputs in shared memory, elements `step` apart; results replace the first input. T_: element type. kQ:
// places of a span.
#pragma once

#include "common/exponential.cuh"
#include "common/extremes.h"
#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace jaxkern {

template <class C> __device__ __forceinline__ C Reciprocal(C x) {
  if constexpr (sizeof(C) == 4) return __fdividef(1.0f, x);
  else return C(1) / x;
}

// e^(x - base) for x <= base, for float to 0.9 ulp; for sums the 2 ulp of ex2.approx are accurate enough.
template <class T> __device__ __forceinline__ Compute<T> Power(Compute<T> x, Compute<T> base) {
  if constexpr (sizeof(T) == 4) {
    const float d = LargerOrNan(x - base, -88.0f);  // e^-88 becomes 0; NaN propagates
    constexpr float kShift = 0x1.8p23f;             // leaves the integer nearest to d / ln(2) in the low bits
    const float shifted = fmaf(d, kLog2E, kShift), n = shifted - kShift;
    float r = fmaf(n, -0.693145752f, d);  // ln(2) in two parts; few bits in the first
    r = fmaf(n, -1.4286068e-6f, r);
    float power = fmaf(r, 1.3814605e-3f, 8.368714e-3f);  // minimax polynomial for |r| <= ln(2) / 2
    power = fmaf(power, r, 4.166839e-2f);
    power = fmaf(power, r, 0.16666521f);
    power = fmaf(power, r, 0.49999994f);
    power = fmaf(power, r, 1.0f);
    power = fmaf(power, r, 1.0f);
    return power * __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);  // 2^n, n >= -127
  } else {
    return ExpDifference<T, true>(x, base);
  }
}

template <class C, int n> __device__ __forceinline__ C TreeSum(C (&term)[n]) {
#pragma unroll
  for (int step = 1; step < n; step *= 2) {
#pragma unroll
    for (int u = 0; u + step < n; u += 2 * step) term[u] += term[u + step];
  }
  return term[0];
}

__device__ __forceinline__ bool EndsAt(uint32_t ends, int i) { return ends >> i & 1; }
// Start of the run that continues after the span.
__device__ __forceinline__ int TailOf(uint32_t ends) { return ends ? 32 - __clz(ends) : 0; }

template <class T_> struct SegmentForward {
  using T = T_;
  using C = Compute<T>;
  static constexpr int kInputs = 1;
  static constexpr bool kMaxima = true;

  struct Stat {
    C max, sum;  // sum: of e^(x - max)
  };
  // Factor of the exponentials: the reciprocal of their sum, and its rounding error.
  struct Factor {
    C high, low;
  };
  struct Final {
    C base;
    Factor factor;
  };

  static __device__ __forceinline__ C Exp(C x, C base) { return ExpDifference<T, true>(x, base); }
  static __device__ __forceinline__ Stat Identity() { return {-Infinity<C>(), C(0)}; }
  static __device__ __forceinline__ Stat Merge(Stat a, Stat b) {
    const C max = Max(a.max, b.max), base = Base(max);
    return {max, a.sum * Power<T>(a.max, base) + b.sum * Power<T>(b.max, base)};
  }
  static __device__ __forceinline__ Stat ShuffleUp(Stat s, int step) {
    return {__shfl_up_sync(~0u, s.max, step), __shfl_up_sync(~0u, s.sum, step)};
  }
  template <int n> static __device__ __forceinline__ void MergeAll(Stat* total, const Stat (&part)[n]) {
    C max = total->max, term[n];
#pragma unroll
    for (int u = 0; u < n; ++u) max = Max(max, part[u].max);
    const C base = Base(max);
#pragma unroll
    for (int u = 0; u < n; ++u) term[u] = part[u].sum * Power<T>(part[u].max, base);
    *total = {max, total->sum * Power<T>(total->max, base) + TreeSum(term)};
  }

  static __device__ __forceinline__ Factor Inverse(C sum) {
    const C high = sum == C(0) ? C(0) : Reciprocal(sum);
    return {high, sizeof(T) >= 4 ? fma(-sum, high, C(1)) * high : C(0)};
  }
  // Returns the factor for exponentials of x - max if the run's total has a larger maximum.
  static __device__ __forceinline__ Factor Scaled(Stat total, C max) {
    const Factor f = Inverse(total.sum);
    const C scale = Power<T>(max, Base(total.max)), high = scale * f.high;
    return {high, sizeof(T) >= 4 ? fma(scale, f.high, -high) + scale * f.low : C(0)};
  }
  static __device__ __forceinline__ C Times(C e, Factor f) {
    if constexpr (sizeof(T) >= 4) return fma(e, f.high, e * f.low);
    else return e * f.high;
  }

  template <int kQ> static __device__ __forceinline__ void Reduce(C* const (&v)[1], int step, uint32_t ends,
                                                                  uint32_t drops, C (&kept)[kQ], Stat* head,
                                                                  Stat* tail) {
    for (uint32_t left = drops; left; left &= left - 1) v[0][(__ffs(left) - 1) * step] = -Infinity<C>();
    C largest = -Infinity<C>();
#pragma unroll
    for (int i = 0; i < kQ; ++i) {
      largest = Max(largest, v[0][i * step]);  // ignores NaN, which its exponential propagates
      kept[i] = largest;
      if (EndsAt(ends, i)) largest = -Infinity<C>();
    }
    tail->max = largest;
    // Backwards, so that the maximum of a run is known before its elements; its sum is complete where it begins.
    C base = Base(largest), sum = C(0);
#pragma unroll
    for (int i = kQ - 1; i >= 0; --i) {
      if (EndsAt(ends, i)) {
        largest = kept[i];
        base = Base(largest);
        sum = C(0);
      }
      kept[i] = Exp(v[0][i * step], base);
      sum += kept[i];
      v[0][i * step] = sum;
    }
    *head = {largest, sum};
    const int begin = TailOf(ends);
    tail->sum = begin < kQ ? v[0][begin * step] : C(0);
  }

  template <int kQ> static __device__ __forceinline__ void Write(C* const (&v)[1], int step, uint32_t ends,
                                                                 const C (&kept)[kQ], Stat head, Stat head_total,
                                                                 Stat tail, Stat tail_total) {
    Factor f = Scaled(head_total, head.max);
    const Factor last = Scaled(tail_total, tail.max);
    const int begin = TailOf(ends);
#pragma unroll
    for (int i = 0; i < kQ; ++i) {
      if (i > 0 && EndsAt(ends, i - 1)) f = i == begin ? last : Inverse(v[0][i * step]);
      v[0][i * step] = Times(kept[i], f);
    }
  }

  static __device__ __forceinline__ Final Finish(Stat total) { return {Base(total.max), Inverse(total.sum)}; }
  static __device__ __forceinline__ C Map(const C (&x)[1], const Final& f) {
    return Times(Power<T>(x[0], f.base), f.factor);
  }
  static __device__ __forceinline__ C Term(const C (&x)[1], Stat total) {
    const C base = Base(total.max);
    if constexpr (sizeof(T) == 8) return exp(x[0] - base);
    else return Exp2Approx((x[0] - base) * kLog2E);
  }
};

template <class T_> struct SegmentBackward {
  using T = T_;
  using C = Compute<T>;
  static constexpr int kInputs = 2;  // y, g
  static constexpr bool kMaxima = false;

  struct Stat {
    C sum;  // of y * g
  };
  using Final = Stat;

  static __device__ __forceinline__ Stat Identity() { return {C(0)}; }
  static __device__ __forceinline__ Stat Merge(Stat a, Stat b) { return {a.sum + b.sum}; }
  static __device__ __forceinline__ Stat ShuffleUp(Stat s, int step) { return {__shfl_up_sync(~0u, s.sum, step)}; }
  template <int n> static __device__ __forceinline__ void MergeAll(Stat* total, const Stat (&part)[n]) {
    C term[n];
#pragma unroll
    for (int u = 0; u < n; ++u) term[u] = part[u].sum;
    total->sum += TreeSum(term);
  }

  template <int kQ> static __device__ __forceinline__ void Reduce(C* const (&v)[2], int step, uint32_t ends,
                                                                  uint32_t drops, C (&kept)[kQ], Stat* head,
                                                                  Stat* tail) {
    for (uint32_t left = drops; left; left &= left - 1) v[0][(__ffs(left) - 1) * step] = C(0);
    const int begin = TailOf(ends);
    C sum = C(0);
    tail->sum = C(0);
#pragma unroll
    for (int i = kQ - 1; i >= 0; --i) {
      if (EndsAt(ends, i)) sum = C(0);
      const C y = v[0][i * step];
      if (y != C(0)) sum += y * v[1][i * step];  // g may be NaN or infinite where y is 0
      kept[i] = sum;
      if (i == begin) tail->sum = sum;
    }
    head->sum = sum;
  }

  template <int kQ> static __device__ __forceinline__ void Write(C* const (&v)[2], int step, uint32_t ends,
                                                                 const C (&kept)[kQ], Stat, Stat head_total, Stat,
                                                                 Stat tail_total) {
    Stat total = head_total;
    const int begin = TailOf(ends);
#pragma unroll
    for (int i = 0; i < kQ; ++i) {
      if (i > 0 && EndsAt(ends, i - 1)) total.sum = i == begin ? tail_total.sum : kept[i];
      v[0][i * step] = Map({v[0][i * step], v[1][i * step]}, total);
    }
  }

  static __device__ __forceinline__ Final Finish(Stat total) { return total; }
  static __device__ __forceinline__ C Map(const C (&x)[2], const Final& f) {
    return x[0] == C(0) ? C(0) : x[0] * (x[1] - f.sum);
  }
  static __device__ __forceinline__ C Term(const C (&x)[2], Stat) { return x[0] != C(0) ? x[0] * x[1] : C(0); }
};

}  // namespace jaxkern
