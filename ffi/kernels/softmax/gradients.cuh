// The gradients of the softmax family as Ops; ops.cuh says what an Op is.
#pragma once

#include "softmax/ops.cuh"

namespace jaxkern {

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
