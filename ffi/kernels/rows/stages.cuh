// The stages of a row function F (rows.cuh), between which the threads of a row exchange what they have reduced.
//
// F reduces in passes over the packs of a thread, in which Reduce computes the values of an element and Combine adds them up. A stage
// is one pass, or two, where one exchange is enough for both: a maximum, and sums with exponentials relative to it.
#pragma once

#include "../common/functions.h"
#include "exchange.cuh"

namespace jaxkern {

template <int p> using Pass = std::integral_constant<int, p>;

// A maximum, and sums of products with exponentials relative to PivotOf(maximum). Both take one exchange between warps: each thread
// takes exponentials relative to the largest of its own elements.
template <class M, class S> struct Pivoted {
  M most;
  S sum;
};
// Finite, so that elements that are -inf add 0, though there may be no others.
__device__ __forceinline__ float PivotOf(float most) { return lax::is_finite(most) ? most : 0.0f; }

// A sum of products with exponentials, made relative to another number. Where the factor is 0, the products are, though their sum may
// have overflowed: terms like x exp(x - max(x)) of elements that are masked by the lowest finite number.
template <class T> __device__ __forceinline__ T Rescaled(T sum, float factor) {
  return factor == 0 && sum == sum ? T(0) : sum * factor;
}

// What a pass reduces of an element: what threads add up, or, where F has Neutral, something narrower.
template <class F, int p, class = void> struct ValueOf {
  using Type = decltype(F::Identity(Pass<p>(), std::declval<const typename F::Numbers&>()));
};
template <class F, int p> struct ValueOf<F, p, decltype(void(F::Neutral(Pass<p>())))> {
  using Type = decltype(F::Neutral(Pass<p>()));
};

// The factor that makes sums of exponentials relative to another number. F may have its own.
template <class F, class = void> struct FactorOf {
  static __device__ __forceinline__ float Of(float difference) { return lax::exp(difference); }
};
template <class F> struct FactorOf<F, decltype(void(F::Factor(0.0f)))> {
  static __device__ __forceinline__ float Of(float difference) { return F::Factor(difference); }
};

// How many elements of a row F picks.
template <class F, class = void> struct PicksOf : std::integral_constant<int, 0> {};
template <class F> struct PicksOf<F, decltype(void(F::kPicks))> : std::integral_constant<int, F::kPicks> {};

template <class F> struct RowStages {
  static constexpr int kPicks = PicksOf<F>::value;
  using Numbers = typename F::Numbers;

  // What a pass reduces of an element or a pack, what a thread has reduced in a pass, and in a stage.
  template <int p> using Value = typename ValueOf<F, p>::Type;
  template <int p> using Reduced = decltype(F::Identity(Pass<p>(), std::declval<const Numbers&>()));
  template <int s> using Partial =
      std::conditional_t<F::Pivots(s), Pivoted<Reduced<F::FirstPass(s)>, Reduced<F::LastPass(s)>>,
                         Reduced<F::FirstPass(s)>>;

  // Bytes of the largest partial result of the stages from s on.
  template <int s> static constexpr int LargestPartial() {
    if constexpr (s < F::kStages) {
      constexpr int own = sizeof(Partial<s>), rest = LargestPartial<s + 1>();
      return own > rest ? own : rest;
    } else {
      return 0;
    }
  }

  template <int s> static __device__ __forceinline__ Partial<s> Identity(const Numbers& n) {
    if constexpr (F::Pivots(s))
      return {F::Identity(Pass<F::FirstPass(s)>(), n), F::Identity(Pass<F::LastPass(s)>(), n)};
    else return F::Identity(Pass<F::FirstPass(s)>(), n);
  }
  static __device__ __forceinline__ float Factor(float difference) { return FactorOf<F>::Of(difference); }

  // Adds the value of an element or a pack to what a thread has reduced.
  template <int p> static __device__ __forceinline__ void Add(Reduced<p>& sum, const Value<p>& value) {
    if constexpr (std::is_same_v<Reduced<p>, Value<p>>) sum = F::Combine(Pass<p>(), sum, value);
    else sum = F::Combine(Pass<p>(), sum, F::Widened(Pass<p>(), value));
  }
  template <int p> struct CombineReduced {
    template <class P> __device__ __forceinline__ P operator()(const P& x, const P& y) const {
      return F::Combine(Pass<p>(), x, y);
    }
    template <int kLanes, int kStep = 1> __device__ __forceinline__ Reduced<p> Lanes(const Reduced<p>& mine) const {
      return JoinLanes<kLanes, kStep>(mine, *this);
    }
    // Combines `count` values that lie `stride` apart.
    __device__ __forceinline__ Reduced<p> All(const Reduced<p>* at, int64_t stride, int count) const {
      Reduced<p> all = *at;
#pragma unroll 4
      for (int k = 1; k < count; ++k) all = (*this)(all, at[k * stride]);
      return all;
    }
  };
  template <int s> struct CombinePivoted {
    static constexpr int kFirst = F::FirstPass(s), kLast = F::LastPass(s);
    __device__ __forceinline__ Partial<s> operator()(const Partial<s>& x, const Partial<s>& y) const {
      Partial<s> both;
      both.most = F::Combine(Pass<kFirst>(), x.most, y.most);
      const float pivot = PivotOf(both.most.v0);
      Reduced<kLast> other = y.sum;
      both.sum = x.sum;
      F::Rescale(Pass<s>(), both.sum, Factor(x.most.v0 - pivot));
      F::Rescale(Pass<s>(), other, Factor(y.most.v0 - pivot));
      both.sum = F::Combine(Pass<kLast>(), both.sum, other);
      return both;
    }
    // The maximum first, so that each lane has one exponential to compute.
    template <int kLanes, int kStep = 1> __device__ __forceinline__ Partial<s> Lanes(Partial<s> mine) const {
      if constexpr (kLanes == kStep) return mine;
      const float own = mine.most.v0;
      mine.most = JoinLanes<kLanes, kStep>(mine.most, CombineReduced<kFirst>());
      F::Rescale(Pass<s>(), mine.sum, Factor(own - PivotOf(mine.most.v0)));
      mine.sum = JoinLanes<kLanes, kStep>(mine.sum, CombineReduced<kLast>());
      return mine;
    }
    __device__ __forceinline__ Partial<s> All(const Partial<s>* at, int64_t stride, int count) const {
      Partial<s> all = *at;
#pragma unroll 4
      for (int k = 1; k < count; ++k) all.most = F::Combine(Pass<kFirst>(), all.most, at[k * stride].most);
      const float pivot = PivotOf(all.most.v0);
      F::Rescale(Pass<s>(), all.sum, Factor(at->most.v0 - pivot));
#pragma unroll 4
      for (int k = 1; k < count; ++k) {
        Reduced<kLast> other = at[k * stride].sum;
        F::Rescale(Pass<s>(), other, Factor(at[k * stride].most.v0 - pivot));
        all.sum = F::Combine(Pass<kLast>(), all.sum, other);
      }
      return all;
    }
  };
  template <int s> using Combine = std::conditional_t<F::Pivots(s), CombinePivoted<s>, CombineReduced<F::FirstPass(s)>>;

  // The numbers after a stage.
  template <int s> static __device__ __forceinline__ void After(Numbers& n, Partial<s> sum) {
    if constexpr (F::Pivots(s)) {
      F::After(Pass<F::FirstPass(s)>(), n, sum.most);
      // If the maximum is inf, so are sums that are not NaN.
      const float most = sum.most.v0 > 0 ? sum.most.v0 : PivotOf(sum.most.v0);
      F::Rescale(Pass<s>(), sum.sum, lax::exp(most - F::Pivot(Pass<s>(), n)));
      F::After(Pass<F::LastPass(s)>(), n, sum.sum);
    } else {
      F::After(Pass<F::FirstPass(s)>(), n, sum);
    }
  }

  // Makes what a thread kept in a stage of two passes relative to the number that later exponents are relative to. most: the largest
  // of its own elements. each(f): calls f for what it kept of each element.
  template <int s, class Each> static __device__ __forceinline__ void RescaleKept(float most, Numbers& n, Each each) {
    const auto rescale = [&](float scale) { each([&](auto& kept) { F::Rescale(Pass<s>(), kept, scale); }); };
    float by = (most < 0 ? most : PivotOf(most)) - F::Pivot(Pass<s>(), n);
    if (by > 0) rescale(lax::exp(by /= 2));  // the factor may overflow, though products with it do not
    rescale(lax::exp(by));
  }

  // Combines over the threads of a block or a cluster that holds a row. turn: the number of earlier rows of this block.
  template <int s, int kLanes, int kThreads, class Room>
  static __device__ __forceinline__ void Join(Partial<s>& sum, uint32_t turn, Room& cluster) {
    sum = Combine<s>().template Lanes<kWarp>(sum);
    if constexpr (kLanes < 0) {
      sum = cluster.Join(sum, turn * F::kStages + s, Combine<s>());
    } else if constexpr (kThreads > kWarp) {
      __shared__ Partial<s> room[2][kThreads / kWarp];
      if (threadIdx.x % kWarp == 0) room[turn % 2][threadIdx.x / kWarp] = sum;
      __syncthreads();
      sum = JoinRoom<kThreads / kWarp>(room[turn % 2], Combine<s>());
    }
  }
};

// What a thread reduces in stage s of tile after tile. The rounding error of a sum grows with the number of its terms, so a run of
// tiles is reduced for itself before it is combined with those before it.
template <class F, int s> struct TileRuns {
  static constexpr int kRun = 16;
  using Stages = RowStages<F>;
  using Partial = typename Stages::template Partial<s>;

  const typename F::Numbers& n;
  Partial all = Stages::template Identity<s>(n), run = Stages::template Identity<s>(n);
  int tiles = 0;

  __device__ __forceinline__ explicit TileRuns(const typename F::Numbers& n) : n(n) {}
  __device__ __forceinline__ void EndTile() {
    if (++tiles % kRun == 0) {
      all = Total();
      run = Stages::template Identity<s>(n);
    }
  }
  __device__ __forceinline__ Partial Total() const { return typename Stages::template Combine<s>()(all, run); }
};

}  // namespace jaxkern
