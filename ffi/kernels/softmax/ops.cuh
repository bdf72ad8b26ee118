// The arithmetic of the softmax family: what an Op is, and the Op of the forward pass. The Ops of gradients are in gradients.cuh.
// Device functions only; these files have no kernels and access no global memory.
//
//     forward    softmax       y  = exp(x - max) / sum(exp(x - max))
//                log_softmax   y  = x - max - log(sum(exp(x - max)))
//     gradient   softmax       dx = y * (g - sum(y * g))
//                log_softmax   dx = g - softmax(x) * sum(g), in 16 bit g - exp(y) * sum(g)
//
// over the middle dimension of [outer, width, inner]. A masked element has the output 0 (log_softmax: -inf) and the
// gradient 0. All elements of a row without participants, or whose elements are all -inf, get the same values, never
// NaN. NaN and +inf propagate.
//
// An Op works on packs of its kInputs operands (forward: x; gradient: y or x, and g), converted to the computing type:
//     Accumulate   folds a pack into a Stat, a thread's share of a row
//     First        returns the Stat of a first pack
//     Merge        combines two Stats
//     Exchange     returns the Stat of another lane
//     MergeLanes   merges the Stats of aligned groups of lanes
//     Finish       turns the Stat of the whole row into the Final that Map needs
//     Map          turns a pack and the Final into the output pack
//     Tile         holds a thread's packs of one row in registers: Set stores a pack, Reduce returns the Stat,
//                  Localize adapts the row's Final to the warp, Get returns an output pack
// A masked element enters as Neutral(). Ops of rows with extras (fused_row.cuh) have two more functions: Masked, the result of such an
// element, and Regular, whether Map returns it.
#pragma once

#include "common/exponential.cuh"
#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace jaxkern {

// Two 16-bit elements. Maxima ignore NaN, for floats too; the exponentials propagate it.
template <class T> using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
struct MaxOfTwo {
  template <class V> __device__ __forceinline__ V operator()(V a, V b) const { return __hmax2(a, b); }
};
template <class T> __device__ __forceinline__ Compute<T> Largest(Two<T> two) {
  return Max(ToCompute(two.x), ToCompute(two.y));
}
template <class T, int N> __device__ __forceinline__ Two<T> LargestTwo(const Pack<T, N>& pack) {
  Two<T> all[N / 2];
#pragma unroll
  for (int w = 0; w < N / 2; ++w) all[w] = *reinterpret_cast<const Two<T>*>(&pack.word[w]);
  return Fold(all, MaxOfTwo());
}

// The element type of an Op's result: Op::Out, or T for an Op without Out.
template <class Op, class = void> struct ResultOf {
  using Type = typename Op::T;
};
template <class Op> struct ResultOf<Op, std::void_t<typename Op::Out>> {
  using Type = typename Op::Out;
};

// Op of the forward pass.
//
//     T_           element type
//     kLog         log_softmax
//     kColumns     for the column kernels, whose threads have many Stats and merge them over few lanes: sums have the
//                  type Compute<T>, not Sum<T>
//     kDifference  see ExpDifference
template <class T_, bool kLog, bool kColumns = false, bool kDifference = kColumns && sizeof(T_) == 2> struct Forward {
  using T = T_;
  using C = Compute<T>;
  using S = std::conditional_t<kColumns, C, Sum<T>>;
  using ForColumns = Forward<T, kLog, true>;
  static constexpr int kInputs = 1;

  struct Stat {
    C max;
    S sum;  // of e^(x - max)
  };
  static __device__ __forceinline__ C Exp(C x, C base) { return ExpDifference<T, kDifference>(x, base); }
  static __device__ __forceinline__ C Factor(C from, C to) { return Rescale<T, kDifference>(from, to); }

  struct Final {
    C max;
    C norm;         // log: logarithm of the sum
    C inverse;      // 1 / sum
    C inverse_low;  // float, double: rounding error of inverse
  };

  static __device__ __forceinline__ Stat Identity() { return {-Infinity<C>(), S(0)}; }
  static __device__ __forceinline__ C Neutral(int) { return -Infinity<C>(); }
  static __device__ __forceinline__ C Masked() { return kLog ? -Infinity<C>() : C(0); }

  // Base() handles the case that both maxima are -inf because neither side has a participant.
  static __device__ __forceinline__ Stat Merge(Stat a, Stat b) {
    const C max = Max(a.max, b.max), base = Base(max);
    return {max, a.sum * Factor(a.max, base) + b.sum * Factor(b.max, base)};
  }

  // Returns the Stat of the lane whose number differs in the bit `lane`.
  static __device__ __forceinline__ Stat Exchange(Stat stat, int lane) {
    return {__shfl_xor_sync(0xffffffffu, stat.max, lane), __shfl_xor_sync(0xffffffffu, stat.sum, lane)};
  }

  // Merges over aligned groups of kLanes lanes, with fewer exponentials than repeated Merge.
  template <int kLanes> static __device__ __forceinline__ Stat MergeLanes(Stat stat) {
    const C max = ReduceLanes<kLanes>(stat.max, MaxOf());
    return {max, ReduceLanes<kLanes>(stat.sum * Factor(stat.max, Base(max)), SumOf())};
  }

  template <int N> static __device__ __forceinline__ void Accumulate(Stat& stat, const C (&v)[1][N]) {
    const C max = Max(stat.max, Fold(v[0], MaxOf()));
    const C base = Base(max);
    C e[N];
#pragma unroll
    for (int j = 0; j < N; ++j) e[j] = Exp(v[0][j], base);
    stat = {max, stat.sum * Factor(stat.max, base) + Fold(e, SumOf())};
  }

  // Returns the Stat of a first pack.
  template <int N> static __device__ __forceinline__ Stat First(const C (&v)[1][N]) {
    const C max = Fold(v[0], MaxOf()), base = Base(max);
    C e[N];
#pragma unroll
    for (int j = 0; j < N; ++j) e[j] = Exp(v[0][j], base);
    return {max, static_cast<S>(Fold(e, SumOf()))};
  }

  static __device__ __forceinline__ Final Finish(Stat stat) {
    Final f;
    f.max = Base(stat.max);
    const bool empty = stat.sum == S(0);
    const C sum = static_cast<C>(stat.sum), rest = static_cast<C>(stat.sum - sum);  // rest: 0 unless T is float
    f.inverse = empty ? C(0) : Reciprocal(sum);
    f.inverse_low = 0;
    if constexpr (kLog) {
      // log: in 16 bit `rest` is 0, but without its term ptxas interleaves a thread's rows and needs twice the
      // registers.
      if constexpr (sizeof(T) == 8) f.norm = log(sum);
      else if constexpr (sizeof(T) == 4 || kDifference) f.norm = logf(sum) + rest * f.inverse;
      else f.norm = logf(WithoutExcess<T>(sum, f.max)) + rest * f.inverse;
      if (empty) f.norm = 0;
    } else {
      f.norm = 0;
      if constexpr (sizeof(T) > 2) f.inverse_low = f.inverse * (fma(-sum, f.inverse, C(1)) - rest * f.inverse);
    }
    return f;
  }

  static __device__ __forceinline__ C Reciprocal(C sum) {
    if constexpr (sizeof(T) == 8) return 1.0 / sum;
    else return __frcp_rn(sum);
  }

  // exp / sum; for float and double as accurate as a division.
  static __device__ __forceinline__ C Divide(C e, const Final& f) {
    if constexpr (sizeof(T) == 2) return e * f.inverse;
    else return fma(e, f.inverse, e * f.inverse_low);
  }

  template <int N> static __device__ __forceinline__ void Map(const C (&v)[1][N], const Final& f, C (&out)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (kLog) out[j] = (v[0][j] - f.max) - f.norm;
      else out[j] = Divide(Exp(v[0][j], f.max), f);
    }
  }

  // Whether the row has neither NaN nor +inf.
  static __device__ __forceinline__ bool Regular(const Final& f) {
    return f.max < Infinity<C>() && (kLog ? f.norm == f.norm : f.inverse == f.inverse);
  }

  // Holds e^(x - max of the warp) (log: x), so that each exponential is computed once.
  //
  //     kPacks, N  packs of a thread, and elements of a pack
  //     kSkips     some packs are skipped instead of Set
  //     kAsRead    a pack that is Set consists of the elements as loaded
  template <int kPacks, int N, bool kSkips = false, bool kAsRead = true> struct Tile {
    // Find the largest element of a pack before conversion, two 16-bit elements at a time.
    static constexpr bool kByTwo = kAsRead && sizeof(T) == 2 && N % 2 == 0;
    C held[kPacks][N];
    C local_max;
    Two<T> largest[kByTwo ? kPacks : 1];
    bool skipped[kPacks] = {};

    __device__ __forceinline__ void Skip(int i) { skipped[i] = true; }
    __device__ __forceinline__ void Set(int i, const C (&v)[1][N], const Pack<T, N>* raw) {
#pragma unroll
      for (int j = 0; j < N; ++j) held[i][j] = v[0][j];
      if constexpr (kByTwo) largest[i] = LargestTwo<T, N>(raw[0]);
    }
    // Reduces over aligned groups of kLanes lanes. `widen` may replace their maximum by the maximum of a larger group.
    template <int kLanes, class Widen> __device__ __forceinline__ Stat Reduce(Widen widen) {
      C of_pack[kPacks];
      C max = -Infinity<C>();
      if constexpr (kByTwo) {
        max = Largest<T>(Fold(largest, MaxOfTwo()));
      } else {
#pragma unroll
        for (int i = 0; i < kPacks; ++i) of_pack[i] = kSkips && skipped[i] ? -Infinity<C>() : Fold(held[i], MaxOf());
        max = Fold(of_pack, MaxOf());
      }
      local_max = widen(ReduceLanes<kLanes>(max, MaxOf()));
      const C base = Base(local_max);
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        of_pack[i] = 0;
        if (kSkips && skipped[i]) continue;
        C e[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
          e[j] = Exp(held[i][j], base);
          if constexpr (!kLog) held[i][j] = e[j];
        }
        of_pack[i] = Fold(e, SumOf());
      }
      return {local_max, ReduceLanes<kLanes>(static_cast<S>(Fold(of_pack, SumOf())), SumOf())};
    }
    // Adapts the Final of a row that several warps share: the held values are relative to this warp's own maximum.
    __device__ __forceinline__ Final Localize(Final f) const {
      // If all elements of the warp are -inf, it holds zeros; a factor of NaN would turn them into NaN.
      const C rescale = local_max == -Infinity<C>() ? C(0) : Factor(local_max, f.max);
      f.inverse *= rescale;
      f.inverse_low *= rescale;
      return f;
    }
    __device__ __forceinline__ void Get(int i, const Final& f, C (&out)[N]) const {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if constexpr (kLog) out[j] = (held[i][j] - f.max) - f.norm;
        else out[j] = Divide(held[i][j], f);
      }
    }
  };
};

// Merges one Stat per warp (equal in all lanes of the warp) over the block, with one barrier. Every thread gets the
// result. `room`: 16 Stats in shared memory.
template <class Op>
__device__ __forceinline__ typename Op::Stat ReduceBlock(typename Op::Stat stat, typename Op::Stat* room) {
  constexpr int kMaxWarps = 16;
  return ReduceWarps<kMaxWarps>(
      stat, room, blockDim.x / kWarp, Op::Identity(), [] { __syncthreads(); },
      [](typename Op::Stat s) { return Op::template MergeLanes<kMaxWarps>(s); });
}

}  // namespace jaxkern
