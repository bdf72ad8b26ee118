// FusedRow: the row of softmax with scale, bias, mask, causal limit and dropout, in place of SoftmaxRow. It reads a row, applies the
// extras and writes the row. fused.cuh has its Ops.
//
// An operand that broadcasts is read once per row that uses it, mostly from L2.
//
// An element that takes no part (masked, above the causal limit or outside of the row) has x = 0, a cotangent of 0 and
// -inf added to it, so that all elements of a row follow the same code. These values are written into the packs as
// loaded, two 16-bit elements at a time.
//
// The extras of a call are a template constant (kHas). The scale is not: every kernel applies one.
#pragma once

#include "common/philox.h"
#include "softmax/row.cuh"

namespace jaxkern {

// Bits of kHas, the extras of a call besides the scale. A wide bias has the computing type instead of the type of x.
constexpr uint32_t kHasBias = 1, kHasWideBias = 2, kHasMask = 4, kHasCausal = 8, kHasDropout = 16;

// Requires the softmax axis to be the last dimension (inner is 1) and fewer than 2^31 rows.
struct FusedParams : SoftmaxParams {
  const void* bias;
  const void* scale;            // in the computing type, constant along a row; null: 1
  const uint32_t *key0, *key1;  // a word each
  BroadcastView bias_view, scale_view;
  double kept_inverse;  // 1 / (fraction of elements that dropout keeps)
  uint32_t threshold;   // drop threshold, out of 2^16: see philox.h
  FastDivmod matrix;    // divides by the size of the dimension before the last
  FastDivmod turn;      // by_runs: divides by kRun * the number of matrices
  bool unscaled;        // the gradient is not multiplied by the scale
  bool by_runs;         // rows are taken in the order of RowAt, not in memory order

  // Returns the causal limit of `row`: columns below it take part. The last row of a matrix takes all columns, each row
  // before it one fewer.
  __device__ __forceinline__ int64_t Limit(uint32_t row) const {
    const uint32_t in_matrix = row - matrix.Div(row) * matrix.divisor;
    const int64_t limit = int64_t{in_matrix} + 1 + width - matrix.divisor;
    return limit < 0 ? 0 : limit;
  }

  // Returns the row to process as the i-th. With by_runs these are rows [0, kRun) of every matrix, then rows [kRun, 2
  // kRun) of every matrix, and so on: an operand that broadcasts over matrices is then read from memory once and from
  // L2 afterwards.
  static constexpr int kRun = 32;
  __device__ __forceinline__ uint32_t RowAt(uint32_t i) const {
    if (!by_runs) return i;
    const uint32_t round = turn.Div(i), rest = i - round * turn.divisor;
    return rest / kRun * matrix.divisor + round * kRun + rest % kRun;
  }
};
static_assert(sizeof(FusedParams) == 688, "plan.py lays it out");

// Replicates sign bits over bytes. Each hexadecimal digit of `which` selects the source of one byte of the result:
// digit 8 + b is the sign bit of byte b of `word`, replicated eight times.
__device__ __forceinline__ uint32_t SpreadSigns(uint32_t word, int which) {
  uint32_t spread;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(spread) : "r"(word), "r"(which));
  return spread;
}

// Expands byte flags to an element mask: the bits of an element in word `w` of a pack of S are all ones if the
// element's byte in `bytes` has its sign bit set, else zeros.
template <class S, int kWords> __device__ __forceinline__ uint32_t ElementMask(const uint32_t (&bytes)[kWords], int w) {
  const int byte = w * 4 / static_cast<int>(sizeof(S)), low = byte % 4 + 8, high = sizeof(S) == 2 ? low + 1 : low;
  return SpreadSigns(bytes[byte / 4], low * 0x11 + high * 0x1100);
}

// Reads and writes one row with the extras of kHas. Packs beyond the causal limit are not read. An Op states with
// kFromInput that it takes x, to which scale, bias and mask are applied; otherwise it takes the result.
//
//     Op       FusedForward, FusedBackward, FusedFromOutput, or an Op derived from them
//     N        elements of a pack, at most 8
//     kHas     bits of the extras
//     Index    integer type of pack numbers and columns
//     kRagged  rows may begin or end within a pack
template <class Op, int N, uint32_t kHas, class Index, bool kRagged = true> struct FusedRow
    : SoftmaxRow<Op, N, Index, kRagged> {
  using Base = SoftmaxRow<Op, N, Index, kRagged>;
  using T = typename Op::T;
  using typename Base::O;
  using C = typename Op::C;
  using Params = FusedParams;
  using Base::span;
  static constexpr bool kBiased = (kHas & (kHasBias | kHasWideBias)) != 0, kMasked = (kHas & kHasMask) != 0;
  static constexpr bool kCausal = (kHas & kHasCausal) != 0;
  // Dropout applies to the result in the forward pass and to the cotangent in the gradient.
  static constexpr bool kDrops = (kHas & kHasDropout) != 0;
  static constexpr bool kWide = (kHas & kHasWideBias) != 0;
  // A value is added per element of a pack (else, one value for the whole pack).
  static constexpr bool kLifts = Op::kFromInput && (kBiased || kMasked || kRagged);
  using Lift = std::conditional_t<kWide, C, T>;
  static constexpr int kLiftWords = kLifts ? Pack<Lift, N>::kWords : 1;
  static constexpr int kByteWords = (N + 3) / 4;
  static constexpr bool kSkips = kCausal;
  // Calls with at most one extra that is not a mask need few registers.
  static constexpr bool kLight = !kRagged && !kMasked && !kWide && (kHas & (kHas - 1)) == 0;
  static constexpr bool kManyRegisters = !kLight || Op::kInputs == 2;
  static constexpr int kStreamUnroll = 1, kStreamBlocks = 1;
  static constexpr int GroupBlocks(int) { return Op::kInputs == 1 ? (kLight ? 8 : 6) : kRagged ? 4 : 5; }

  struct Bytes {  // one byte per element; the sign bit is set if the element takes part
    uint32_t word[kByteWords];
  };
  struct Raw {
    Pack<T, N> data[Op::kInputs];
    uint32_t lift[kLiftWords];  // addend of scale * x: the bias pack as loaded, or one C
  };

  const FusedParams& p;
  const uint8_t* mask_row;
  const Lift* bias_row;
  C scale;
  Index limit;
  uint32_t key[2], number;

  // `at` is the row's place in the order of RowAt. A row at or beyond the end has no elements; its other operands are
  // read as for the first row.
  __device__ __forceinline__ FusedRow(const FusedParams& params, int64_t at)
      : FusedRow(params, at, at < params.rows ? Ordered(params, static_cast<uint32_t>(at)) : 0) {}

  __device__ __forceinline__ FusedRow(const FusedParams& params, int64_t at, uint32_t row)
      : Base(params, at < params.rows ? row : at), p(params) {
    limit = at < p.rows ? static_cast<Index>(kCausal ? p.Limit(row) : p.width) : Index(0);
    if constexpr (kMasked) mask_row = p.mask + p.mask_view.outer_map.Below32Bits(row);
    if constexpr (kBiased) bias_row = static_cast<const Lift*>(p.bias) + p.bias_view.outer_map.Below32Bits(row);
    scale = 1;
    if (p.scale) scale = __ldg(static_cast<const C*>(p.scale) + p.scale_view.outer_map.Below32Bits(row));
    if constexpr (kDrops) {
      key[0] = __ldg(p.key0), key[1] = __ldg(p.key1);
      number = row;
    }
  }
  static __device__ __forceinline__ uint32_t Ordered(const FusedParams& params, uint32_t at) {
    return kBiased || kMasked ? params.RowAt(at) : at;
  }

  // Sets the dropped elements of the pack at `column` to zero.
  template <class E> __device__ __forceinline__ void Drop(Pack<E, N>& pack, Index column) const {
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
    // Computes min(1, draw - last) per draw, where `last` is the largest draw that drops: 1 keeps the element. Two
    // instructions handle two draws.
    const uint32_t last = p.threshold - 1, lasts = last * 0x10001u, minus = (-last & 0xffffu) * 0x10001u;
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      const uint32_t keep = __viaddmin_u16x2(__vmaxu2(w[j / 2], lasts), minus, 0x10001u);
      if constexpr (sizeof(E) == 2) {
        pack.word[j / 2] &= keep * 0xffff;
      } else {
#pragma unroll
        for (int i = 0; i < 2 && j + i < N; ++i) {
          if (!(keep >> 16 * i & 1)) SetElement(pack, j + i, E(0));
        }
      }
    }
  }
  // Whether no element of pack `i` takes part.
  __device__ __forceinline__ bool Beyond(Index i) const {
    const Index column = span.Column(i);
    return column >= limit || (kRagged && column <= -N);
  }
  // Whether the computation can leave out pack `i`, which was loaded as `raw`. Called only if kSkips.
  __device__ __forceinline__ bool Skips(const Raw&, Index i) const { return Beyond(i); }
  // The result of such a pack.
  __device__ __forceinline__ Pack<O, N> ResultOfSkipped(Index) const {
    return Filled<O, N>(FromCompute<O>(Op::Masked()));
  }

  // Flags the elements of the pack at `column` that lie in the row and below its causal limit.
  __device__ __forceinline__ Bytes Below(Index column) const {
    Bytes bytes;
#pragma unroll
    for (int i = 0; i < kByteWords; ++i) bytes.word[i] = 0x80808080u;
    if (column + N > limit || (kRagged && column < 0)) {
      const int end = static_cast<int>(max(Index(0), min(Index(N), limit - column)));
      const int begin = kRagged ? static_cast<int>(max(Index(0), min(Index(N), -column))) : 0;
#pragma unroll
      for (int i = 0; i < kByteWords; ++i) {
        const int from = 8 * max(begin - 4 * i, 0), to = 8 * max(4 * i + 4 - end, 0);
        bytes.word[i] &= from < 32 ? ~0u << from : 0;
        bytes.word[i] &= to < 32 ? ~0u >> to : 0;
      }
    }
    return bytes;
  }

  // Whether all of the pack at `column` lies in the row.
  __device__ __forceinline__ bool Inside(Index column) const {
    return !kRagged || (column >= 0 && column + N <= span.width);
  }

  // Clears the flags of masked elements. If kRagged is false, the packs of the mask are aligned.
  __device__ __forceinline__ Bytes Unmasked(Index column, Bytes below) const {
    if (p.mask_view.axis_stride == 0) {
      if (__ldg(mask_row)) return below;
      return {};
    }
    const bool vector = (reinterpret_cast<uintptr_t>(mask_row) - span.shift) % N == 0;
    if (N >= 4 && (!kRagged || (vector && Inside(column)))) {
      uint32_t word[kByteWords];
      if constexpr (N == 8) *reinterpret_cast<uint2*>(word) = __ldg(reinterpret_cast<const uint2*>(mask_row + column));
      else word[0] = __ldg(reinterpret_cast<const uint32_t*>(mask_row + column));
#pragma unroll
      for (int i = 0; i < kByteWords; ++i) below.word[i] &= word[i] << 7;  // mask bytes are 0 or 1
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const uint32_t sign = 0x80u << 8 * (j % 4);
        if ((below.word[j / 4] & sign) && !__ldg(mask_row + column + j)) below.word[j / 4] &= ~sign;
      }
    }
    return below;
  }

  __device__ __forceinline__ Bytes Part(Index i) const {
    const Index column = span.Column(i);
    const Bytes below = Below(column);
    if constexpr (kMasked) {
      if (!Beyond(i)) return Unmasked(column, below);
    }
    return below;
  }

  // Loads the bias of a pack that has elements in the row; not converted.
  __device__ __forceinline__ void LoadBias(Index column, uint32_t (&words)[kLiftWords]) const {
    using B = Lift;
    constexpr int kWords = Pack<B, N>::kWords, kBytes = N * sizeof(B) < 16 ? N * sizeof(B) : 16;
    const B* const row = bias_row;
    Pack<B, N> pack = {};
    if (p.bias_view.axis_stride == 0) {
      pack = Filled<B, N>(*row);
    } else if (kBytes >= 8 &&
               (!kRagged || (Inside(column) && reinterpret_cast<uintptr_t>(row + column) % kBytes == 0))) {
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
        if (span.Has(column + j) && column + j < limit) SetElement(pack, j, row[column + j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = pack.word[i];
  }

  // Replaces the elements of a pack of S (given as words) that take no part by `otherwise`.
  template <class S, int kWords>
  static __device__ __forceinline__ void Confine(uint32_t (&words)[kWords], const Bytes& part, C otherwise) {
    const Pack<S, N> fill = Filled<S, N>(FromCompute<S>(otherwise));
#pragma unroll
    for (int i = 0; i < Pack<S, N>::kWords; ++i) {
      const uint32_t mask = ElementMask<S>(part.word, i);
      words[i] = (words[i] & mask) | (fill.word[i] & ~mask);
    }
  }

  // Clears the elements of g where y is 0.
  static __device__ __forceinline__ void ZeroLike(const Pack<T, N>& y, Pack<T, N>& g) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < Pack<T, N>::kWords; ++i) {
        g.word[i] &= SpreadSigns((y.word[i] & 0x7fff7fffu) + 0x7fff7fffu, 0xbb99);  // sign bit: y is not 0
      }
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (Element(y, j) == T(0)) SetElement(g, j, T(0));
      }
    }
  }

  // Issues all loads first; the random draws need no memory and overlap with them. AnyRaw: Raw or a class derived from
  // it. The i-th pack is not loaded if skips(i).
  template <class AnyRaw, int kPacks, class Skips = Never>
  __device__ __forceinline__ void LoadAll(AnyRaw (&raw)[kPacks], Index first, Index step, Skips skips = {}) const {
    Base::LoadAll(raw, first, step, (limit + span.shift + N - 1) / N, skips);
    if constexpr (Op::kFromInput) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const bool live = !Beyond(first + i * step);
        if constexpr (!kLifts) {
          raw[i].lift[0] = live ? 0 : __float_as_uint(-Infinity<float>());
        } else {
#pragma unroll
          for (int w = 0; w < kLiftWords; ++w) raw[i].lift[w] = 0;
          if (!live) {
            if constexpr (!kMasked && !kCausal) Confine<Lift>(raw[i].lift, Bytes{}, -Infinity<C>());
          } else if constexpr (kBiased) {
            LoadBias(span.Column(first + i * step), raw[i].lift);
          }
        }
      }
    }
    [[maybe_unused]] Bytes part[kPacks];
    const auto idle = [&](int i) { return (kSkips && !kRagged && Beyond(first + i * step)) || skips(i); };
    if constexpr (!Op::kFromInput) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (!idle(i)) ZeroLike(raw[i].data[0], raw[i].data[1]);
      }
      return;
    }
    if constexpr (kMasked || kRagged) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (!idle(i)) part[i] = Part(first + i * step);
      }
    }
    if constexpr (kDrops && Op::kInputs == 2) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (!idle(i)) Drop(raw[i].data[1], span.Column(first + i * step));
      }
    }
    if constexpr (kMasked || kRagged) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (idle(i)) continue;
        if constexpr (kLifts) {
          Confine<T>(raw[i].data[0].word, part[i], C(0));
          Confine<Lift>(raw[i].lift, part[i], -Infinity<C>());
        }
        if constexpr (Op::kInputs == 2) Confine<T>(raw[i].data[1].word, part[i], C(0));
      }
    } else if constexpr (kCausal) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const Index column = span.Column(first + i * step);
        if (column < limit && column + N > limit) {
          const Bytes below = Below(column);
          if constexpr (kLifts) {
            Confine<T>(raw[i].data[0].word, below, C(0));
            Confine<Lift>(raw[i].lift, below, -Infinity<C>());
          }
          if constexpr (Op::kInputs == 2) Confine<T>(raw[i].data[1].word, below, C(0));
        }
      }
    }
  }

  __device__ __forceinline__ Raw Load(Index pack) const {
    Raw raw[1];
    LoadAll(raw, pack, Index(1) << 30);
    return raw[0];
  }

  __device__ __forceinline__ void Values(const Raw& raw, C (&v)[Op::kInputs][N], Index i) const {
    Unpack(raw.data[0], v[0]);
    if constexpr (Op::kInputs == 2) Unpack(raw.data[1], v[1]);
    if constexpr (Op::kFromInput && kLifts) {
      C lift[N];
      Pack<Lift, N> words;
#pragma unroll
      for (int w = 0; w < kLiftWords; ++w) words.word[w] = raw.lift[w];
      Unpack(words, lift);
#pragma unroll
      for (int j = 0; j < N; ++j) v[0][j] = fma(v[0][j], scale, lift[j]);
    } else if constexpr (Op::kFromInput) {
      const C lift = __uint_as_float(raw.lift[0]);
#pragma unroll
      for (int j = 0; j < N; ++j) v[0][j] = fma(v[0][j], scale, lift);
      if constexpr (kCausal) {
        const Index below = limit - span.Column(i);
        if (below < N) {
#pragma unroll
          for (int j = 0; j < N; ++j) {
            if (j >= below) v[0][j] = -Infinity<C>();
          }
        }
      }
    }
  }

  // Multiplies the Final by the factors that all elements of the row share.
  __device__ __forceinline__ void Scale(typename Op::Final& final) const {
    if constexpr (kDrops) Op::Scale(final, static_cast<C>(p.kept_inverse));
    if (Op::kInputs == 2 && !p.unscaled) Op::Scale(final, scale);
  }

  __device__ __forceinline__ Pack<O, N> Result(C (&v)[N], const typename Op::Final& final, const Raw&, Index i) const {
    Pack<O, N> result = Repack<O, N>(v);
    if constexpr (kDrops && Op::kInputs == 1) Drop(result, span.Column(i));
    if (!Op::Regular(final)) {
      if constexpr (kMasked || kCausal || kRagged) Confine<O>(result.word, Part(i), Op::Masked());
      if (Op::Empty(final)) result = Filled<O, N>(FromCompute<O>(C(0)));
    }
    return result;
  }
  __device__ __forceinline__ void Store(O* out, Index i, C (&v)[N], const typename Op::Final& final,
                                        const Raw& raw) const {
    Base::Put(out, i, Result(v, final, raw, i));
  }
};

}  // namespace jaxkern
