// Softmax with scale, bias, mask, causal limit and dropout fused: how a row is read and written then, in
// place of SoftmaxRow, and the gradient that starts from x. The kernels are those of the warp, block and
// streaming tiers.
//
// Which of the extras a call has is known at run time only, the same for all threads: as template arguments
// they would be 32 times the kernels.
#pragma once

#include "../common/philox.h"
#include "softmax_ops.cuh"
#include "softmax.h"

namespace jaxkern {

// The order in which rows are taken. Operands that broadcast over matrices are read once from memory, and
// then from L2, if the same few rows of all matrices come one after the other: rows [0, kRun) of every
// matrix, then rows [kRun, 2 kRun) of every matrix, and so on.
struct RowOrder {
  static constexpr int kRun = 32;
  bool by_runs = false;   // else as they lie in memory
  uint32_t matrix_rows = 0;
  FastDivmod turn;        // kRun rows of every matrix

  JAXKERN_HD uint32_t operator()(uint32_t i) const {
    if (!by_runs) return i;
    const uint32_t round = turn.Div(i), rest = i - round * turn.divisor;
    return rest / kRun * matrix_rows + round * kRun + rest % kRun;
  }
};

struct FusedParams : SoftmaxParams {
  SoftmaxExtras extras;
  RowOrder order;
};

// x beyond the row's causal limit is not read. Bits of elements are kept in a word a pack: N is at most 8.
template <class Op, int N, class Index, bool kRagged = true>
struct FusedRow : SoftmaxRow<Op, N, false, Index, kRagged> {
  using Base = SoftmaxRow<Op, N, false, Index, kRagged>;
  using T = typename Op::T;
  using C = typename Op::C;
  using Params = FusedParams;
  using Base::span;
  static constexpr bool kChanges = true;
  static constexpr int kStreamUnroll = 1, kStreamBlocks = 1, kGroupBlocks = sizeof(T) == 2 && Op::kInputs == 1 ? 5 : 4;
  static constexpr uint32_t kAll = (1u << N) - 1;
  static constexpr int kBiasWords = N * sizeof(C) / 4;

  struct Bits {
    uint32_t part;  // elements that take part
    uint32_t keep;  // that are not dropped
  };
  struct Raw {
    Pack<T, N> data[Op::kInputs];
    uint32_t bias[kBiasWords];
    Bits mask;
  };

  const FusedParams& p;
  const uint8_t* mask_row;
  const void* bias_row;
  C scale, post;  // post: what the result is multiplied by
  Index limit;
  uint32_t key[2], number;

  // Row `at` in the order in which they are taken. One at or beyond the end has no elements; what else is read
  // for it is that of the first.
  __device__ __forceinline__ FusedRow(const FusedParams& params, int64_t at)
      : FusedRow(params, at, at < params.rows ? params.order(static_cast<uint32_t>(at)) : 0) {}

  __device__ __forceinline__ FusedRow(const FusedParams& params, int64_t at, uint32_t row)
      : Base(params, at < params.rows ? row : at), p(params) {
    const SoftmaxExtras& e = p.extras;
    limit = at < p.rows ? static_cast<Index>(e.Limit(row, p.width)) : Index(0);
    if (p.mask) mask_row = p.mask + p.mask_view.outer_map.Below32Bits(row);
    if (e.bias) {
      const int64_t size = e.bias_wide ? sizeof(C) : sizeof(T);
      const int64_t offset = e.bias_view.outer_map.Below32Bits(row) * size;
      bias_row = static_cast<const char*>(e.bias) + offset;
    }
    scale = post = 1;
    if (e.scale) scale = __ldg(static_cast<const C*>(e.scale) + e.scale_view.outer_map.Below32Bits(row));
    if (Op::kInputs == 2 && !e.unscaled) post = scale;
    if constexpr (!Op::kOfLog) {
      if (e.key) {
        const uint32_t* const words = e.key + (e.key_per_row ? 4 * int64_t{row} : 0);
        key[0] = __ldg(words), key[1] = __ldg(words + 1);
        number = e.key_per_row ? __ldg(words + 2) : row;
        post *= static_cast<C>(e.kept_inverse);
      }
    }
  }

  // Which elements of a pack the draws of these columns keep.
  __device__ __forceinline__ uint32_t Keep(Index column) const {
    const uint32_t block = static_cast<uint32_t>(column >> 3);
    PhiloxBlock draw = Philox(block, number, key[0], key[1]);
    uint32_t w[8] = {draw.word[0], draw.word[1], draw.word[2], draw.word[3]};
    if constexpr (kRagged || N < 4) {
      if ((column & 7) + N > 8) {
        draw = Philox(block + 1, number, key[0], key[1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) w[4 + i] = draw.word[i];
      }
    }
    if constexpr (N < 8 || kRagged) {
      if (column & 4) {
#pragma unroll
        for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
      }
    }
    if constexpr (N < 4 || kRagged) {
      if (column & 2) {
#pragma unroll
        for (int i = 0; i < 6; ++i) w[i] = w[i + 1];
      }
      if (column & 1) {
#pragma unroll
        for (int i = 0; i < 6; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], 16);
      }
    }
    const uint32_t threshold = p.extras.threshold << 16;
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      // 16 bits in the upper half; the lower one does not matter.
      if ((j % 2 ? w[j / 2] : w[j / 2] << 16) >= threshold) bits |= 1u << j;
    }
    return bits;
  }

  // The elements of the pack at `column` that lie in the row below its limit.
  __device__ __forceinline__ uint32_t Below(Index column) const {
    const int end = static_cast<int>(max(Index(0), min(Index(N), limit - column)));
    uint32_t bits = (1u << end) - 1;
    if (kRagged && column < 0) bits &= kAll << static_cast<int>(min(-column, Index(N)));
    return bits;
  }

  // All of the pack at `column` lies in the row.
  __device__ __forceinline__ bool Inside(Index column) const {
    return !kRagged || (column >= 0 && column + N <= span.width);
  }

  // Those of the elements in `part` that the mask lets take part. Without ragged packs the mask's are aligned.
  __device__ __forceinline__ uint32_t MaskBits(Index column, uint32_t part, bool vector) const {
    if (part == 0) return 0;
    if (p.mask_view.axis_stride == 0) return __ldg(mask_row) ? part : 0;
    uint32_t bits = 0;
    if (N >= 4 && (!kRagged || (vector && Inside(column)))) {
      uint32_t word[(N + 3) / 4];
      if constexpr (N == 8) *reinterpret_cast<uint2*>(word) = __ldg(reinterpret_cast<const uint2*>(mask_row + column));
      else word[0] = __ldg(reinterpret_cast<const uint32_t*>(mask_row + column));
#pragma unroll
      for (int i = 0; i < N / 4; ++i) bits |= ((word[i] & 0x01010101u) * 0x01020408u >> 24) << 4 * i;
      bits &= part;
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (part >> j & 1 && __ldg(mask_row + column + j)) bits |= 1u << j;
      }
    }
    return bits;
  }

  // The bias of a pack of which some elements take part, of type B, as it lies in memory.
  template <class B>
  __device__ __forceinline__ void LoadBias(Index column, uint32_t part, uint32_t (&words)[kBiasWords]) const {
    constexpr int kWords = Pack<B, N>::kWords, kBytes = N * sizeof(B) < 16 ? N * sizeof(B) : 16;
    const B* const row = static_cast<const B*>(bias_row);
    Pack<B, N> pack = {};
    if (p.extras.bias_view.axis_stride == 0) {
      pack = Filled<B, N>(*row);
    } else if (kBytes >= 8 && (!kRagged || (Inside(column) && reinterpret_cast<uintptr_t>(row + column) % kBytes == 0))) {
#pragma unroll
      for (int i = 0; i < kWords; i += kBytes / 4) {
        const void* const at = reinterpret_cast<const uint32_t*>(row + column) + i;
        if constexpr (kBytes == 16) {
          const uint4 v = __ldg(static_cast<const uint4*>(at));
          pack.word[i] = v.x, pack.word[i + 1] = v.y, pack.word[i + 2] = v.z, pack.word[i + 3] = v.w;
        } else if constexpr (kBytes == 8) {
          const uint2 v = __ldg(static_cast<const uint2*>(at));
          pack.word[i] = v.x, pack.word[i + 1] = v.y;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (part >> j & 1) SetElement(pack, j, row[column + j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = pack.word[i];
  }

  // First what comes from memory, then the draws, which need nothing from there.
  template <int kPacks> __device__ __forceinline__ void LoadAll(Raw (&raw)[kPacks], Index first, Index step) const {
    Base::LoadAll(raw, first, step, (limit + span.shift + N - 1) / N);
    const SoftmaxExtras& e = p.extras;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) raw[i].mask = {Below(span.Column(first + i * step)), kAll};
    if (e.bias) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (raw[i].mask.part == 0) continue;
        const Index column = span.Column(first + i * step);
        if (e.bias_wide) LoadBias<C>(column, raw[i].mask.part, raw[i].bias);
        else LoadBias<T>(column, raw[i].mask.part, raw[i].bias);
      }
    }
    if constexpr (!Op::kOfLog) {
      if (e.key) {
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          if (raw[i].mask.part != 0) raw[i].mask.keep = Keep(span.Column(first + i * step));
        }
      }
    }
    if (p.mask) {
      const bool vector = (reinterpret_cast<uintptr_t>(mask_row) - span.shift) % N == 0;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        raw[i].mask.part = MaskBits(span.Column(first + i * step), raw[i].mask.part, vector);
      }
    }
  }

  __device__ __forceinline__ Raw Load(Index pack) const {
    Raw raw[1];
    LoadAll(raw, pack, Index(1) << 30);
    return raw[0];
  }

  __device__ __forceinline__ void Values(const Raw& raw, C (&v)[Op::kInputs][N]) const {
    const SoftmaxExtras& e = p.extras;
    Unpack(raw.data[0], v[0]);
    if (e.bias) {
      C bias[N];
      if (e.bias_wide) {
        Pack<C, N> pack;
#pragma unroll
        for (int i = 0; i < kBiasWords; ++i) pack.word[i] = raw.bias[i];
        Unpack(pack, bias);
      } else {
        Pack<T, N> pack;
#pragma unroll
        for (int i = 0; i < Pack<T, N>::kWords; ++i) pack.word[i] = raw.bias[i];
        Unpack(pack, bias);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) v[0][j] = fma(v[0][j], scale, bias[j]);
    } else if (e.scale) {
#pragma unroll
      for (int j = 0; j < N; ++j) v[0][j] *= scale;
    }
    if (raw.mask.part != kAll) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (!(raw.mask.part >> j & 1)) v[0][j] = Op::Neutral(0);
      }
    }
    if constexpr (Op::kInputs == 2) {
      Unpack(raw.data[1], v[1]);
      const uint32_t bits = raw.mask.part & raw.mask.keep;
      if (bits != kAll) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (!(bits >> j & 1)) v[1][j] = 0;
        }
      }
    }
  }

  __device__ __forceinline__ Pack<T, N> Result(C (&v)[N], const typename Op::Final& final, const Bits& bits) const {
    if (post != C(1)) {
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] *= post;
    }
    if (Op::kInputs == 1 && !Op::kOfLog && bits.keep != kAll) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (!(bits.keep >> j & 1)) v[j] = 0;
      }
    }
    if (!Op::Regular(final) || !(post - post == C(0))) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (!(bits.part >> j & 1)) v[j] = Op::Masked();
      }
    }
    return Repack<T, N>(v);
  }
  __device__ __forceinline__ void Store(T* out, Index pack, C (&v)[N], const typename Op::Final& final,
                                        const Bits& bits) const {
    span.Store(out, pack, Result(v, final, bits));
  }
};

template <class T, bool kLog> struct FusedForward : Forward<T, kLog, false, true> {
  static constexpr bool kOfLog = kLog;
};

// From s = scale * x + bias and h, the cotangent of what was kept: ds = p * (h - sum(p * h)) of softmax,
// ds = h - p * sum(h) of log_softmax, with p = e^(s - max) / sum(e^(s - max)).
template <class T_, bool kLog> struct FusedBackward {
  using T = T_;
  using Powers = Forward<T, kLog, false, true>;
  using C = typename Powers::C;
  using S = typename Powers::S;
  static constexpr int kInputs = 2;
  static constexpr bool kOfLog = kLog;

  struct Stat {
    C max;
    S powers;  // sum of e^(s - max)
    S dot;     // of e^(s - max) * h; log: of h
  };
  struct Final {
    C max;
    C factor;     // 1 / powers; log: sum(h) / powers
    C dot, rest;  // sum(p * h); float: what that lacks
    bool empty;   // no s but -inf
  };

  static __device__ __forceinline__ Stat Identity() { return {-Infinity<C>(), S(0), S(0)}; }
  static __device__ __forceinline__ C Neutral(int k) { return k == 0 ? -Infinity<C>() : C(0); }
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
    return f;
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

  // A row without a participant has no gradient, whatever the cotangent holds.
  static __device__ __forceinline__ C One(C power, C h, const Final& f) {
    C out;
    if constexpr (kLog) out = fma(-power, f.factor, h);
    else if constexpr (sizeof(T) == 4) out = power * f.factor * ((h - f.dot) - f.rest);
    else out = power * f.factor * (h - f.dot);
    return f.empty ? C(0) : out;
  }
  template <int N>
  static __device__ __forceinline__ void Map(const C (&v)[2][N], const Final& f, C (&out)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = One(Powers::Exp(v[0][j], f.max), v[1][j], f);
  }
  static __device__ __forceinline__ bool Regular(const Final& f) {
    return f.factor - f.factor == C(0) && f.dot - f.dot == C(0);
  }

  // Holds e^(s - max of the warp), which no type of 16 bits can, and h, which was read in T.
  template <int kPacks, int N> struct Tile {
    C held[kPacks][N];
    Pack<T, N> cotangent[kPacks];
    C local_max;

    __device__ __forceinline__ void Set(int i, const C (&v)[2][N], const Pack<T, N>*, bool) {
#pragma unroll
      for (int j = 0; j < N; ++j) held[i][j] = v[0][j];
      cotangent[i] = Repack<T, N>(v[1]);
      Forget(cotangent[i]);
    }
    template <int kLanes, class Widen> __device__ __forceinline__ Stat Reduce(Widen widen) {
      C of_pack[kPacks], dot_of_pack[kPacks];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) of_pack[i] = Fold(held[i], MaxOf());
      local_max = widen(ReduceLanes<kLanes>(Fold(of_pack, MaxOf()), MaxOf()));
      const C base = Base(local_max);
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
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

}  // namespace jaxkern
