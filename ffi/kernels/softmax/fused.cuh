// Softmax with scale, bias, mask, causal limit and dropout fused into the read of a row, and its gradients.
//
// Entry points are the kernels of registers.cuh and stream.cuh, instantiated with
//
//     FusedRow           in place of SoftmaxRow (fused_row.cuh)
//     FusedForward       Op of the result
//     FusedBackward      Op of the gradient from x and the cotangent
//     FusedFromOutput    Op of the gradient of softmax from its result and the cotangent
//
// They read the inputs of the Op, the bias and the mask, and write the output; see those files for the memory traffic.
#pragma once

#include "softmax/fused_row.cuh"
#include "softmax/registers.cuh"
#include "softmax/stream.cuh"

namespace jaxkern {

// Op of the forward pass. T_: element type. kLog: log_softmax. Out_: of the result.
template <class T_, bool kLog, class Out_ = T_> struct FusedForward : Forward<T_, kLog, false, kLog> {
  using Base = Forward<T_, kLog, false, kLog>;
  using Out = Out_;
  using C = typename Base::C;
  using Final = typename Base::Final;
  static constexpr bool kFromInput = true;

  // The elements differ from the packs as loaded because they are scaled (kAsRead is false).
  template <int kPacks, int N, bool kSkips> using Tile = typename Base::template Tile<kPacks, N, kSkips, false>;

  static __device__ __forceinline__ C Neutral(int) { return 0; }  // -inf is added to excluded elements
  static __device__ __forceinline__ void Scale(Final& f, C factor) {
    f.inverse *= factor;
    f.inverse_low *= factor;
  }
  static __device__ __forceinline__ bool Empty(const Final&) { return false; }
};

// Op of the gradient from s = scale * x + bias and h, the cotangent with dropout applied:
//
//     softmax      ds = p * (h - sum(p * h))     p = e^(s - max) / sum(e^(s - max))
//     log_softmax  ds = h - p * sum(h)
//
// T_: element type. kLog: log_softmax.
template <class T_, bool kLog> struct FusedBackward {
  using T = T_;
  using Powers = Forward<T, kLog, false, kLog>;
  using C = typename Powers::C;
  using S = typename Powers::S;
  static constexpr int kInputs = 2;
  static constexpr bool kFromInput = true;

  struct Stat {
    C max;
    S powers;  // sum of e^(s - max)
    S dot;     // sum of e^(s - max) * h; log: sum of h
  };
  struct Final {
    C max;
    C factor;     // scale / powers; log: scale * sum(h) / powers
    C dot, rest;  // sum(p * h), and for float its rounding error
    C scale;      // log: factor of h
    bool empty;   // every s is -inf
  };

  static __device__ __forceinline__ Stat Identity() { return {-Infinity<C>(), S(0), S(0)}; }
  static __device__ __forceinline__ C Neutral(int) { return 0; }
  static __device__ __forceinline__ C Masked() { return 0; }
  template <int kLanes> static __device__ __forceinline__ Stat MergeLanes(Stat stat) {
    const C max = ReduceLanes<kLanes>(stat.max, MaxOf());
    const C factor = Powers::Factor(stat.max, Base(max));
    return {max, ReduceLanes<kLanes>(stat.powers * factor, SumOf()),
            ReduceLanes<kLanes>(kLog ? stat.dot : stat.dot * factor, SumOf())};
  }
  static __device__ __forceinline__ Final Finish(Stat stat) {
    Final f;
    f.max = Base(stat.max);
    f.empty = stat.powers == S(0);
    const S powers = f.empty ? S(1) : stat.powers, dot = kLog ? S(0) : stat.dot / powers;
    f.factor = static_cast<C>((kLog ? stat.dot : S(1)) / powers);
    f.dot = static_cast<C>(dot);
    f.rest = f.dot - f.dot == C(0) ? static_cast<C>(dot - f.dot) : C(0);
    f.scale = 1;
    return f;
  }
  static __device__ __forceinline__ void Scale(Final& f, C factor) {
    f.factor *= factor;
    f.scale *= factor;
  }

  template <int N> static __device__ __forceinline__ void Accumulate(Stat& stat, const C (&v)[2][N]) {
    const C max = Max(stat.max, Fold(v[0], MaxOf())), base = Base(max);
    C e[N], d[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      e[j] = Powers::Exp(v[0][j], base);
      d[j] = kLog ? v[1][j] : e[j] * v[1][j];
    }
    const C factor = Powers::Factor(stat.max, base);
    stat = {max, stat.powers * factor + Fold(e, SumOf()), (kLog ? stat.dot : stat.dot * factor) + Fold(d, SumOf())};
  }

  static __device__ __forceinline__ C One(C power, C h, const Final& f) {
    if constexpr (kLog) return fma(-power, f.factor, h * f.scale);
    else if constexpr (sizeof(T) == 4) return power * f.factor * ((h - f.dot) - f.rest);
    else return power * f.factor * (h - f.dot);
  }
  template <int N> static __device__ __forceinline__ void Map(const C (&v)[2][N], const Final& f, C (&out)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = One(Powers::Exp(v[0][j], f.max), v[1][j], f);
  }
  static __device__ __forceinline__ bool Regular(const Final& f) {
    return f.factor - f.factor == C(0) && f.dot - f.dot == C(0) && !f.empty;
  }
  // The gradient of a row without participants is 0 even if the cotangent is NaN or infinite.
  static __device__ __forceinline__ bool Empty(const Final& f) { return f.empty; }

  // Holds e^(s - max of the warp) in C, because 16 bits are not accurate enough, and h as loaded.
  template <int kPacks, int N, bool kSkips = false> struct Tile {
    C held[kPacks][N];
    Pack<T, N> cotangent[kPacks];
    C local_max;
    bool skipped[kPacks] = {};

    __device__ __forceinline__ void Skip(int i) { skipped[i] = true; }
    __device__ __forceinline__ void Set(int i, const C (&v)[2][N], const Pack<T, N>* raw) {
#pragma unroll
      for (int j = 0; j < N; ++j) held[i][j] = v[0][j];
      cotangent[i] = raw[1];
      Forget(cotangent[i]);
    }
    template <int kLanes, class Widen> __device__ __forceinline__ Stat Reduce(Widen widen) {
      C of_pack[kPacks], dot_of_pack[kPacks];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) of_pack[i] = kSkips && skipped[i] ? -Infinity<C>() : Fold(held[i], MaxOf());
      local_max = widen(ReduceLanes<kLanes>(Fold(of_pack, MaxOf()), MaxOf()));
      const C base = Base(local_max);
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        of_pack[i] = dot_of_pack[i] = 0;
        if (kSkips && skipped[i]) continue;
        C h[N];
        Unpack(cotangent[i], h);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          held[i][j] = Powers::Exp(held[i][j], base);
          if constexpr (!kLog) h[j] *= held[i][j];
        }
        of_pack[i] = Fold(held[i], SumOf());
        dot_of_pack[i] = Fold(h, SumOf());
      }
      return {local_max, ReduceLanes<kLanes>(static_cast<S>(Fold(of_pack, SumOf())), SumOf()),
              ReduceLanes<kLanes>(static_cast<S>(Fold(dot_of_pack, SumOf())), SumOf())};
    }
    __device__ __forceinline__ Final Localize(Final f) const {
      f.factor *= local_max == -Infinity<C>() ? C(0) : Powers::Factor(local_max, f.max);
      return f;
    }
    __device__ __forceinline__ void Get(int i, const Final& f, C (&out)[N]) const {
      C h[N];
      Unpack(cotangent[i], h);
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = One(held[i][j], h[j], f);
    }
  };
};

// Op of the gradient from y, the result of softmax without dropout: dx = scale * y * (g - sum(y * g)). It does not
// depend on the bias. FusedRow clears g where y is 0, including masked elements, so empty rows need no special case.
// T_: element type.
template <class T_> struct FusedFromOutput {
  using T = T_;
  using C = Compute<T>;
  using S = Sum<T>;
  static constexpr int kInputs = 2;
  static constexpr bool kFromInput = false;

  struct Stat {
    S sum;
  };
  struct Final {
    C scale;
    C sum, rest;  // float: rounding error of sum
    C product;    // scale * sum
  };
  static __device__ __forceinline__ Stat Identity() { return {S(0)}; }
  static __device__ __forceinline__ C Neutral(int) { return 0; }
  static __device__ __forceinline__ C Masked() { return 0; }
  template <int kLanes> static __device__ __forceinline__ Stat MergeLanes(Stat stat) {
    return {ReduceLanes<kLanes>(stat.sum, SumOf())};
  }
  static __device__ __forceinline__ Final Finish(Stat stat) {
    const C sum = static_cast<C>(stat.sum);
    return {C(1), sum, sum - sum == C(0) ? static_cast<C>(stat.sum - sum) : C(0), sum};
  }
  static __device__ __forceinline__ void Scale(Final& f, C factor) {
    f.scale = factor;
    f.product = f.sum * factor;
  }
  template <int N> static __device__ __forceinline__ void Accumulate(Stat& stat, const C (&v)[2][N]) {
    C term[N];
#pragma unroll
    for (int j = 0; j < N; ++j) term[j] = v[0][j] * v[1][j];
    stat.sum += Fold(term, SumOf());
  }
  template <int N> static __device__ __forceinline__ void Map(const C (&v)[2][N], const Final& f, C (&out)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (sizeof(T) == 4) out[j] = v[0][j] * f.scale * ((v[1][j] - f.sum) - f.rest);
      else out[j] = v[0][j] * fma(v[1][j], f.scale, -f.product);
    }
    if (!(f.product - f.product == C(0))) {  // avoids 0 * NaN and 0 * inf
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (v[0][j] == C(0)) out[j] = 0;
      }
    }
  }
  static __device__ __forceinline__ bool Regular(const Final&) { return true; }
  static __device__ __forceinline__ bool Empty(const Final&) { return false; }

  template <int kPacks, int N, bool = false> using Tile = PacksAsRead<FusedFromOutput, kPacks, N>;
};

}  // namespace jaxkern
