// What the kernels of the softmax family compute, apart from how they read and write: one struct for the forward pass
// and one for the gradient, used by every kernel.
//
//     forward    softmax       y  = exp(x - max) / sum(exp(x - max))
//                log_softmax   y  = x - max - log(sum(exp(x - max)))
//     gradient   softmax       dx = y * (g - sum(y * g))
//                log_softmax   dx = g - softmax(x) * sum(g), in 16 bit g - exp(y) * sum(g)
//
// over the middle dimension of [outer, width, inner]. The output of a masked element is 0 (log_softmax: -inf), its
// gradient 0. A row without participants, or with nothing but -inf, consists of such elements: never NaN. NaN and +inf
// propagate.
//
// An Op works on packs of its kInputs operands (forward: x; gradient: y or x, and g), already converted to the compute
// type:
//     Accumulate   folds a pack into a Stat (a thread's share of a row)
//     Merge        combines two Stats
//     Finish       turns the Stat of the whole row into the Final that Map needs
//     Map          turns a pack and the Final into the output pack
//     Tile         holds a thread's packs of one row in registers: Set all (changed: by the mask), Reduce, Localize the
//                  row's Final, Get each
// A masked element enters as Neutral(); Map turns it into Masked() if the Final is Regular().
#pragma once

#include "common/exponential.cuh"
#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace jaxkern {

// Two 16-bit elements. Maxima ignore NaN, here and of floats; the exponentials propagate it.
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

// kColumns: for the column kernels, where a thread has many Stats and merges them over few lanes: sums are merged in
// Compute<T>, not Sum<T>. kDifference: see ExpDifference.
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
    C norm;         // log: the logarithm of the sum
    C inverse;      // 1 / sum
    C inverse_low;  // float, double: what inverse lacks
  };

  static __device__ __forceinline__ Stat Identity() { return {-Infinity<C>(), S(0)}; }
  static __device__ __forceinline__ C Neutral(int) { return -Infinity<C>(); }
  static __device__ __forceinline__ C Masked() { return kLog ? -Infinity<C>() : C(0); }

  // Both maxima are -inf if neither side has a participant.
  static __device__ __forceinline__ Stat Merge(Stat a, Stat b) {
    const C max = Max(a.max, b.max), base = Base(max);
    return {max, a.sum * Factor(a.max, base) + b.sum * Factor(b.max, base)};
  }

  // The Stat of the lane whose number differs in the bit `lane`.
  static __device__ __forceinline__ Stat Exchange(Stat stat, int lane) {
    return {__shfl_xor_sync(0xffffffffu, stat.max, lane), __shfl_xor_sync(0xffffffffu, stat.sum, lane)};
  }

  // Merge over aligned groups of kLanes lanes, with fewer exponentials.
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

  // Accumulate from nothing.
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
    const C sum = static_cast<C>(stat.sum), rest = static_cast<C>(stat.sum - sum);  // rest: 0 but for float
    f.inverse = empty ? C(0) : Reciprocal(sum);
    f.inverse_low = 0;
    if constexpr (kLog) {
      // Without the term that is 0 in 16 bit, ptxas interleaves the rows of a thread and takes twice the registers.
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

  // exp / sum, beyond 16 bit to the accuracy of a division.
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

  // 16-bit softmax: e^(x - max) / sum as the single power 2^(x * log2(e) - offset), for rows where taking
  // log2(sum) into the exponent costs no more than 2^-19. It saves a multiplication an element.
  static constexpr bool kOnePower = sizeof(T) == 2 && !kLog;
  static __device__ __forceinline__ bool OnePower(const Final& f, float* offset) {
    *offset = __fmul_rn(f.max, kLog2E) - __log2f(f.inverse);
    return fabsf(*offset) < 64;
  }
  template <int N> static __device__ __forceinline__ void MapOnePower(const C (&v)[1][N], float offset, C (&out)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = Exp2Approx(fmaf(v[0][j], kLog2E, -offset));
  }

  // Whether nothing in the row was NaN or +inf.
  static __device__ __forceinline__ bool Regular(const Final& f) {
    return f.max < Infinity<C>() && (kLog ? f.norm == f.norm : f.inverse == f.inverse);
  }

  // Holds e^(x - max of the warp) (log: x), so that each exponential is taken once. kSkips: some packs are not Set
  // but skipped. kAsRead: what is Set, if it is not changed, are the elements of the pack, as they are.
  template <int kPacks, int N, bool kSkips = false, bool kAsRead = true> struct Tile {
    // The largest of a pack as it was read, two 16-bit elements at a time.
    static constexpr bool kByTwo = kAsRead && sizeof(T) == 2 && N % 2 == 0;
    C held[kPacks][N];
    C local_max;
    Two<T> largest[kByTwo ? kPacks : 1];
    bool as_read = kByTwo;
    bool skipped[kPacks] = {};

    __device__ __forceinline__ void Skip(int i) { skipped[i] = true; }
    __device__ __forceinline__ void Set(int i, const C (&v)[1][N], const Pack<T, N>* raw, bool changed) {
#pragma unroll
      for (int j = 0; j < N; ++j) held[i][j] = v[0][j];
      if (changed) as_read = false;
      else if constexpr (kByTwo) largest[i] = LargestTwo<T, N>(raw[0]);
    }
    // Reduces over aligned groups of kLanes lanes. `widen` may replace their maximum by that of a
    // wider group.
    template <int kLanes, class Widen> __device__ __forceinline__ Stat Reduce(Widen widen) {
      C of_pack[kPacks];
      C max = -Infinity<C>();
      if (as_read) {
        if constexpr (kByTwo) max = Largest<T>(Fold(largest, MaxOfTwo()));
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
    // The Final for this warp of a row that other warps share: what is held is relative to this warp's own maximum.
    __device__ __forceinline__ Final Localize(Final f) const {
      // A warp of nothing but -inf holds zeros; its factor must not make them NaN.
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

// The Tile of an Op of two inputs that takes no exponential: its packs as they were read, since two inputs in float
// would be too many registers.
template <class Op, int kPacks, int N> struct PacksAsRead {
  using T = typename Op::T;
  using C = typename Op::C;
  Pack<T, N> held[kPacks][2];
  typename Op::Stat stat = Op::Identity();

  __device__ __forceinline__ void Skip(int) {}
  __device__ __forceinline__ void Set(int i, const C (&v)[2][N], const Pack<T, N>* raw, bool changed) {
    held[i][0] = changed ? Repack<T, N>(v[0]) : raw[0];
    held[i][1] = changed ? Repack<T, N>(v[1]) : raw[1];
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

// A gradient from the output:
//     softmax             dx = y * (g - sum(y * g))
//     log_softmax         dx = g - exp(y) * sum(g)
template <class T_, bool kLog, bool kColumns = false> struct FromOutput {
  using T = T_;
  using C = Compute<T>;
  using S = std::conditional_t<kColumns, C, Sum<T>>;
  using ForColumns = FromOutput<T, kLog, true>;
  static constexpr int kInputs = 2;  // y, g

  struct Stat {
    S sum;      // sum y * g; log: sum g
    int alive;  // not 0: some y is not 0; log: not -inf
  };
  struct Final {
    C sum;
    C rest;  // float: what sum lacks
    int alive;
  };

  // Not 0 if x is not.
  static __device__ __forceinline__ int Bits(float x) { return __float_as_int(x); }
  static __device__ __forceinline__ int Bits(double x) { return __double2hiint(x) | __double2loint(x); }

  static __device__ __forceinline__ Stat Identity() { return {S(0), 0}; }
  static __device__ __forceinline__ C Neutral(int k) { return kLog && k == 0 ? -Infinity<C>() : C(0); }
  static __device__ __forceinline__ C Masked() { return 0; }
  static __device__ __forceinline__ Stat Merge(Stat a, Stat b) { return {a.sum + b.sum, a.alive | b.alive}; }
  static __device__ __forceinline__ Stat Exchange(Stat stat, int lane) {
    return {__shfl_xor_sync(0xffffffffu, stat.sum, lane), __shfl_xor_sync(0xffffffffu, stat.alive, lane)};
  }
  static __device__ __forceinline__ Final Finish(Stat stat) {
    const C sum = static_cast<C>(stat.sum);
    const C rest = sum - sum == C(0) ? static_cast<C>(stat.sum - sum) : C(0);  // inf has none
    return {sum, rest, stat.alive};
  }
  template <int kLanes> static __device__ __forceinline__ Stat MergeLanes(Stat stat) {
    stat.sum = ReduceLanes<kLanes>(stat.sum, SumOf());
    stat.alive = ReduceLanes<kLanes>(stat.alive, [](int a, int b) { return a | b; });
    return stat;
  }

  template <int N> static __device__ __forceinline__ void Accumulate(Stat& stat, const C (&v)[2][N]) {
    C term[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (kLog) {
        term[j] = v[1][j];
        stat.alive |= !(v[0][j] == -Infinity<C>());
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
      // A row without a participant has no gradient, whatever the cotangent holds.
      if constexpr (kLog) out[j] = v[1][j] - ExpDifference<T>(v[0][j], C(0)) * f.sum;
      else if constexpr (sizeof(T) == 4) out[j] = v[0][j] * ((v[1][j] - f.sum) - f.rest);
      else out[j] = v[0][j] * (v[1][j] - f.sum);
      if (!f.alive) out[j] = 0;
    }
  }

  static constexpr bool kOnePower = false;
  static __device__ __forceinline__ bool Regular(const Final& f) { return f.sum - f.sum == C(0); }

  template <int kPacks, int N, bool = false> using Tile = PacksAsRead<FromOutput, kPacks, N>;
};

// The gradient of log_softmax from the input: dx = g - exp(x - max) / sum(exp(x - max)) * sum(g). The rounding of y
// would come back multiplied by |y|; this costs one more exponential and no more bytes. x may be y too, whose
// softmax is the same.
template <class T_, bool kColumns = false> struct FromInput {
  using T = T_;
  using Powers = Forward<T, true, kColumns>;
  using C = typename Powers::C;
  using S = typename Powers::S;
  using ForColumns = FromInput<T, true>;
  static constexpr int kInputs = 2;  // x, g

  struct alignas(8) Stat {  // see StoreRemote
    typename Powers::Stat powers;
    S sum;  // of g
  };
  struct Final {
    C max;
    C factor;    // sum(g) / sum(exp(x - max))
    bool empty;  // no x but -inf
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

  // A row without a participant has no gradient, whatever the cotangent holds.
  static __device__ __forceinline__ C One(C power, C g, const Final& f) {
    return f.empty ? C(0) : fma(-power, f.factor, g);
  }

  template <int N> static __device__ __forceinline__ void Map(const C (&v)[2][N], const Final& f, C (&out)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = One(Powers::Exp(v[0][j], f.max), v[1][j], f);
  }

  static constexpr bool kOnePower = false;
  static __device__ __forceinline__ bool Regular(const Final& f) { return f.factor - f.factor == C(0); }

  // Holds the packs as they were read; beyond 16 bit e^(x - max of the warp) takes the place of x.
  template <int kPacks, int N, bool = false> struct Tile {
    static constexpr bool kKeeps = sizeof(T) > 2;
    Pack<T, N> held[kPacks][2];
    C local_max = -Infinity<C>();
    C sum = 0;

    __device__ __forceinline__ void Set(int i, const C (&v)[2][N], const Pack<T, N>* raw, bool changed) {
      held[i][0] = changed ? Repack<T, N>(v[0]) : raw[0];
      held[i][1] = changed ? Repack<T, N>(v[1]) : raw[1];
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

// 16-bit results hide the rounding of y (jax.nn's gradient, in 16-bit arithmetic, errs more), and have no time for
// the exponential.
template <class T, bool kLog> using Backward =
    std::conditional_t<kLog && (sizeof(T) > 2), FromInput<T>, FromOutput<T, kLog>>;

// Merges one Stat per warp (the same in all its lanes) over the block; every thread gets the result. One barrier.
template <class Op>
__device__ __forceinline__ typename Op::Stat ReduceBlock(typename Op::Stat stat, typename Op::Stat* room) {
  constexpr int kMaxWarps = 16;
  return ReduceWarps<kMaxWarps>(
      stat, room, blockDim.x / kWarp, Op::Identity(), [] { __syncthreads(); },
      [](typename Op::Stat s) { return Op::template MergeLanes<kMaxWarps>(s); });
}

// plan.py sizes shared memory and scratch by these.
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
