// The arithmetic of the softmax family: one Op for the forward pass and one for the gradient, used by every kernel.
// Device functions only; this file has no kernels and accesses no global memory.
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
// A masked element enters as Neutral(). Map turns it into Masked() if the Final is Regular().
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

// Tile of an Op with two inputs and no exponential. It holds the packs as loaded, because two inputs in float would
// need too many registers. kPacks: packs of a thread. N: elements of a pack.
template <class Op, int kPacks, int N> struct PacksAsRead {
  using T = typename Op::T;
  using C = typename Op::C;
  Pack<T, N> held[kPacks][2];
  typename Op::Stat stat = Op::Identity();

  __device__ __forceinline__ void Skip(int) {}
  __device__ __forceinline__ void Set(int i, const C (&v)[2][N], const Pack<T, N>* raw) {
    held[i][0] = raw[0];
    held[i][1] = raw[1];
    Op::Accumulate(stat, v);
    Forget(held[i][0]);
    Forget(held[i][1]);
  }
  template <int kLanes, class Widen> __device__ __forceinline__ typename Op::Stat Reduce(Widen) {
    return Op::template MergeLanes<kLanes>(stat);
  }
  __device__ __forceinline__ typename Op::Final Localize(typename Op::Final f) const { return f; }
  __device__ __forceinline__ void Get(int i, const typename Op::Final& f, C (&out)[N]) const {
    C v[2][N];
    Unpack(held[i][0], v[0]);
    Unpack(held[i][1], v[1]);
    Op::Map(v, f, out);
  }
};

// Op of the gradient from the output:
//     softmax             dx = y * (g - sum(y * g))
//     log_softmax         dx = g - exp(y) * sum(g)
//
// T_: element type. kLog: log_softmax. kColumns: as for Forward; of softmax, where y is 0, dx is then 0 and g does not count, even if
// it is NaN or infinite. In rows this takes time [H200, bfloat16 49152 x 64: 6.5 us, 6.0 without].
template <class T_, bool kLog, bool kColumns = false> struct FromOutput {
  using T = T_;
  using C = Compute<T>;
  using S = std::conditional_t<kColumns, C, Sum<T>>;
  using ForColumns = FromOutput<T, kLog, true>;
  static constexpr int kInputs = 2;  // y, g
  static constexpr bool kExcludes = kColumns && !kLog;

  struct Stat {
    S sum;      // sum of y * g; log: sum of g
    int alive;  // nonzero if some y is not 0 (log: not -inf); kExcludes: not used
  };
  struct Final {
    C sum;
    C rest;  // float: rounding error of sum
    int alive;
  };

  // Nonzero if x is nonzero.
  static __device__ __forceinline__ int Bits(float x) { return __float_as_int(x); }
  static __device__ __forceinline__ int Bits(double x) { return __double2hiint(x) | __double2loint(x); }

  static __device__ __forceinline__ Stat Identity() { return {S(0), 0}; }
  static __device__ __forceinline__ C Neutral(int k) { return kLog && k == 0 ? -Infinity<C>() : C(0); }
  static __device__ __forceinline__ C Masked() { return 0; }
  static __device__ __forceinline__ Stat Merge(Stat a, Stat b) { return {a.sum + b.sum, a.alive | b.alive}; }
  static __device__ __forceinline__ Stat Exchange(Stat stat, int lane) {
    const S sum = __shfl_xor_sync(0xffffffffu, stat.sum, lane);
    return {sum, kExcludes ? 0 : __shfl_xor_sync(0xffffffffu, stat.alive, lane)};
  }
  static __device__ __forceinline__ Final Finish(Stat stat) {
    const C sum = static_cast<C>(stat.sum);
    const C rest = sum - sum == C(0) ? static_cast<C>(stat.sum - sum) : C(0);  // 0 for an infinite sum
    return {sum, rest, stat.alive};
  }
  template <int kLanes> static __device__ __forceinline__ Stat MergeLanes(Stat stat) {
    stat.sum = ReduceLanes<kLanes>(stat.sum, SumOf());
    if constexpr (!kExcludes) stat.alive = ReduceLanes<kLanes>(stat.alive, [](int a, int b) { return a | b; });
    return stat;
  }

  template <int N> static __device__ __forceinline__ void Accumulate(Stat& stat, const C (&v)[2][N]) {
    C term[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (kLog) {
        term[j] = v[1][j];
        stat.alive |= !(v[0][j] == -Infinity<C>());
      } else if constexpr (kExcludes) {
        term[j] = v[0][j] == C(0) ? C(0) : v[0][j] * v[1][j];
      } else {
        term[j] = v[0][j] * v[1][j];
        stat.alive |= Bits(v[0][j]);
      }
    }
    stat.sum += Fold(term, SumOf());
  }

  template <int N> static __device__ __forceinline__ Stat First(const C (&v)[2][N]) {
    Stat stat = Identity();
    Accumulate(stat, v);
    return stat;
  }

  template <int N> static __device__ __forceinline__ void Map(const C (&v)[2][N], const Final& f, C (&out)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      // The gradient of a row without participants is 0 even if the cotangent is NaN or infinite.
      if constexpr (kLog) out[j] = v[1][j] - ExpDifference<T>(v[0][j], C(0)) * f.sum;
      else if constexpr (sizeof(T) == 4) out[j] = v[0][j] * ((v[1][j] - f.sum) - f.rest);
      else out[j] = v[0][j] * (v[1][j] - f.sum);
      if (kExcludes ? v[0][j] == C(0) : !f.alive) out[j] = 0;
    }
  }

  static __device__ __forceinline__ bool Regular(const Final& f) { return f.sum - f.sum == C(0); }

  template <int kPacks, int N, bool = false> using Tile = PacksAsRead<FromOutput, kPacks, N>;
};

// Op of the gradient of log_softmax from the input: dx = g - exp(x - max) / sum(exp(x - max)) * sum(g). From the
// output, the rounding error of y would be amplified by |y|. This Op takes one more exponential and the same memory
// traffic. x may also be y, whose softmax is the same. T_, kColumns: as for Forward.
template <class T_, bool kColumns = false> struct FromInput {
  using T = T_;
  using Powers = Forward<T, true, kColumns>;
  using C = typename Powers::C;
  using S = typename Powers::S;
  using ForColumns = FromInput<T, true>;
  static constexpr int kInputs = 2;  // x, g

  struct alignas(8) Stat {  // aligned for StoreRemote
    typename Powers::Stat powers;
    S sum;  // of g
  };
  struct Final {
    C max;
    C factor;    // sum(g) / sum(exp(x - max))
    bool empty;  // every x is -inf
  };

  static __device__ __forceinline__ Stat Identity() { return {Powers::Identity(), S(0)}; }
  static __device__ __forceinline__ C Neutral(int k) { return k == 0 ? -Infinity<C>() : C(0); }
  static __device__ __forceinline__ C Masked() { return 0; }
  static __device__ __forceinline__ Stat Merge(Stat a, Stat b) {
    return {Powers::Merge(a.powers, b.powers), a.sum + b.sum};
  }
  static __device__ __forceinline__ Stat Exchange(Stat stat, int lane) {
    return {Powers::Exchange(stat.powers, lane), __shfl_xor_sync(0xffffffffu, stat.sum, lane)};
  }
  template <int kLanes> static __device__ __forceinline__ Stat MergeLanes(Stat stat) {
    return {Powers::template MergeLanes<kLanes>(stat.powers), ReduceLanes<kLanes>(stat.sum, SumOf())};
  }
  static __device__ __forceinline__ Final Finish(Stat stat) {
    const bool empty = stat.powers.sum == S(0);
    const C sum = static_cast<C>(stat.sum), powers = empty ? C(1) : static_cast<C>(stat.powers.sum);
    return {Base(stat.powers.max), sum / powers, empty};
  }

  template <int N> static __device__ __forceinline__ void Accumulate(Stat& stat, const C (&v)[2][N]) {
    C x[1][N];
#pragma unroll
    for (int j = 0; j < N; ++j) x[0][j] = v[0][j];
    Powers::Accumulate(stat.powers, x);
    stat.sum += Fold(v[1], SumOf());
  }

  template <int N> static __device__ __forceinline__ Stat First(const C (&v)[2][N]) {
    C x[1][N];
#pragma unroll
    for (int j = 0; j < N; ++j) x[0][j] = v[0][j];
    return {Powers::First(x), static_cast<S>(Fold(v[1], SumOf()))};
  }

  // The gradient of a row without participants is 0 even if the cotangent is NaN or infinite.
  static __device__ __forceinline__ C One(C power, C g, const Final& f) {
    return f.empty ? C(0) : fma(-power, f.factor, g);
  }

  template <int N> static __device__ __forceinline__ void Map(const C (&v)[2][N], const Final& f, C (&out)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = One(Powers::Exp(v[0][j], f.max), v[1][j], f);
  }

  static __device__ __forceinline__ bool Regular(const Final& f) { return f.factor - f.factor == C(0); }

  // Holds the packs as loaded; for float and double, e^(x - max of the warp) replaces x.
  template <int kPacks, int N, bool = false> struct Tile {
    static constexpr bool kKeeps = sizeof(T) > 2;
    Pack<T, N> held[kPacks][2];
    C local_max = -Infinity<C>();
    C sum = 0;

    __device__ __forceinline__ void Set(int i, const C (&v)[2][N], const Pack<T, N>* raw) {
      held[i][0] = raw[0];
      held[i][1] = raw[1];
      local_max = Max(local_max, Fold(v[0], MaxOf()));
      sum += Fold(v[1], SumOf());
      Forget(held[i][0]);
      Forget(held[i][1]);
    }
    template <int kLanes, class Widen> __device__ __forceinline__ Stat Reduce(Widen widen) {
      local_max = widen(ReduceLanes<kLanes>(local_max, MaxOf()));
      const C base = Base(local_max);
      C of_pack[kPacks];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        C x[N];
        Unpack(held[i][0], x);
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = Powers::Exp(x[j], base);
        if constexpr (kKeeps) held[i][0] = Repack<T, N>(x);
        else Forget(held[i][0]);
        of_pack[i] = Fold(x, SumOf());
      }
      const S powers = ReduceLanes<kLanes>(static_cast<S>(Fold(of_pack, SumOf())), SumOf());
      return {{local_max, powers}, ReduceLanes<kLanes>(static_cast<S>(sum), SumOf())};
    }
    __device__ __forceinline__ Final Localize(Final f) const {
      if constexpr (kKeeps) f.factor *= local_max == -Infinity<C>() ? C(0) : Powers::Factor(local_max, f.max);
      return f;
    }
    __device__ __forceinline__ void Get(int i, const Final& f, C (&out)[N]) const {
      C v[2][N];
      Unpack(held[i][0], v[0]);
      Unpack(held[i][1], v[1]);
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = One(kKeeps ? v[0][j] : Powers::Exp(v[0][j], f.max), v[1][j], f);
    }
  };
};

// Op of the gradient for rows. For 16-bit log_softmax it takes the output: the rounding error of y is below the
// resolution of the result (jax.nn's 16-bit arithmetic has a larger error), and the additional exponential of FromInput
// would limit the speed.
template <class T, bool kLog> using Backward =
    std::conditional_t<kLog && (sizeof(T) > 2), FromInput<T>, FromOutput<T, kLog>>;

// Merges one Stat per warp (equal in all lanes of the warp) over the block, with one barrier. Every thread gets the
// result. `room`: 16 Stats in shared memory.
template <class Op>
__device__ __forceinline__ typename Op::Stat ReduceBlock(typename Op::Stat stat, typename Op::Stat* room) {
  constexpr int kMaxWarps = 16;
  return ReduceWarps<kMaxWarps>(
      stat, room, blockDim.x / kWarp, Op::Identity(), [] { __syncthreads(); },
      [](typename Op::Stat s) { return Op::template MergeLanes<kMaxWarps>(s); });
}

// plan.py sizes shared memory and scratch by these Stats.
template <class T> constexpr bool kStatSizes =
    sizeof(typename Forward<T, true>::Stat) == (sizeof(T) == 2 ? 8 : 16) &&
    sizeof(typename Backward<T, false>::Stat) == (sizeof(T) == 2 ? 8 : 16) &&
    sizeof(typename Backward<T, true>::Stat) == (sizeof(T) == 2 ? 8 : 24) &&
    sizeof(typename Forward<T, true>::ForColumns::Stat) == (sizeof(T) == 8 ? 16 : 8) &&
    sizeof(typename Backward<T, false>::ForColumns::Stat) == (sizeof(T) == 8 ? 16 : 8) &&
    sizeof(typename Backward<T, true>::ForColumns::Stat) == (sizeof(T) == 2   ? 8
                                                             : sizeof(T) == 4 ? 16
                                                                              : 24);

}  // namespace jaxkern
