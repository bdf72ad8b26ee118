// Softmax of score(x, indices, operands): a user's scalar function (jaxkern/_core/functor.py) is applied to each
// element before the softmax, and its derivative to each element of the gradient.
//
//     SoftmaxRegisters<FusedForward<T, log>, ScoreRow<..., ScoreCall<Score, ScoreGradient, ...>>, lanes, 4, 1>
//     SoftmaxStreaming<FusedBackward<T, log>, ...>
//
// ScoreRow replaces FusedRow in the kernels of the warp, block and streaming algorithms. FusedRow provides masks,
// partial vectors and the order of rows; its scale, bias, causal limit and dropout are not used. The gradient is
// computed from x and the cotangent: each thread computes the score of an element again, together with the derivative
// of the function by x, which it holds until ds of the softmax is known. If the gradients of other operands need ds, it
// is written as a second result. Memory traffic: x, the cotangent, the operands and the results once each; streaming
// reads the inputs twice.
//
// An element with a score of -inf counts as masked: its result is 0 (log_softmax: -inf), and its gradient is 0. Where
// the indices and operands that are smaller than x decide that (ScoreMask, from
// jaxkern/_core/lowest.py), a pack of such elements is neither read nor computed.
//
// A functor takes an element of x, the indices, then an element of each operand, by value in their computing types. The
// functor of the gradient takes a cotangent as well, here 1. The result is returned by reference. Indices refer to the
// whole array; `origin` is where this part of it begins.
#pragma once

#include "common/functions.h"
#include "softmax/fused.cuh"

namespace jaxkern {

// kArgs: number of operands. kIndices: number of indices that the function takes.
template <int kArgs, int kIndices> struct ScoreParams : FusedParams {
  static constexpr int kArgSlots = kArgs ? kArgs : 1, kIndexSlots = kIndices ? kIndices : 1;
  const void* arg[kArgSlots];
  IndexMap arg_map[kArgSlots];     // from a row to the offset of its row in the operand
  FastDivmod below[kIndexSlots];   // divides by the rows per step along the index's dimension
  FastDivmod extent[kIndexSlots];  // divides by the size of that dimension
  const int32_t* origin;           // start of this part of the array, per index; null: zeros
  void* ds;                        // output of the gradient by the scores, or null
};
static_assert(sizeof(ScoreParams<2, 3>) == 688 + 2 * (8 + 88) + 3 * 24 + 16, "plan.py lays it out");

// Converts the bits of an element to the type that a functor takes.
template <class T> __device__ __forceinline__ auto WidenBits(uint64_t bits) {
  if constexpr (std::is_same_v<T, bool>) return (bits & 0xff) != 0;
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  else if constexpr (std::is_same_v<T, __half>) return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  else if constexpr (std::is_same_v<T, float>) return __uint_as_float(static_cast<uint32_t>(bits));
  else if constexpr (std::is_same_v<T, double>) return __longlong_as_double(static_cast<int64_t>(bits));
  else return static_cast<T>(bits);
}

// Loads the bits of an element from read-only memory.
template <class T> __device__ __forceinline__ uint64_t LoadBits(const T* p) {
  if constexpr (sizeof(T) == 1) return __ldg(reinterpret_cast<const unsigned char*>(p));
  else if constexpr (sizeof(T) == 2) return __ldg(reinterpret_cast<const unsigned short*>(p));
  else if constexpr (sizeof(T) == 4) return __ldg(reinterpret_cast<const unsigned int*>(p));
  else return __ldg(reinterpret_cast<const unsigned long long*>(p));
}

// Element j of a pack of elements of kSize bytes, given as words.
template <int kSize> __device__ __forceinline__ uint64_t BitsAt(const uint32_t* word, int j) {
  if constexpr (kSize == 8) return static_cast<uint64_t>(word[2 * j + 1]) << 32 | word[2 * j];
  else if constexpr (kSize == 4) return word[j];
  else return word[j * kSize / 4] >> j * kSize % 4 * 8 & ((1u << 8 * kSize) - 1);
}
template <int kSize> __device__ __forceinline__ void SetBitsAt(uint32_t* word, int j, uint64_t bits) {
  if constexpr (kSize == 8) {
    word[2 * j] = static_cast<uint32_t>(bits);
    word[2 * j + 1] = static_cast<uint32_t>(bits >> 32);
  } else if constexpr (kSize == 4) {
    word[j] = static_cast<uint32_t>(bits);
  } else {
    word[j * kSize / 4] |= static_cast<uint32_t>(bits) << j * kSize % 4 * 8;  // requires zeros in the words
  }
}

template <int i, class First, class... Rest> struct ArgAt : ArgAt<i - 1, Rest...> {};
template <class First, class... Rest> struct ArgAt<0, First, Rest...> {
  using type = First;
};

// Types of a call of the function.
//
//     Score_     functor of the score
//     Gradient_  functor of its derivative; void if the output is ds or there is no gradient
//     Mask_      functor of the indices and of all operands that says whether the score is -inf, whatever x is; void: it
//                never is
//     kAfter_    the Mask depends on operands that are not constant along a row
//     kIndices_  number of indices
//     kColumn_   which index is the column; -1: none
//     kSplat_    bit k: operand k is constant along a row
//     Args       element types of the operands
template <class Score_, class Gradient_, class Mask_, bool kAfter_, int kIndices_, int kColumn_, uint32_t kSplat_,
          class... Args>
struct ScoreCall {
  using Score = Score_;
  using Gradient = Gradient_;
  using Mask = Mask_;
  static constexpr bool kAfter = kAfter_;
  static constexpr int kIndices = kIndices_, kColumn = kColumn_, kArgs = sizeof...(Args);
  using Params = ScoreParams<kArgs, kIndices>;
  template <int k> using Arg = typename ArgAt<k, Args..., void>::type;
  static constexpr bool IsSplat(int k) { return kSplat_ >> k & 1; }
  // Words before operand k in the packs of N elements of all operands that are not constant.
  template <int N> static constexpr int Offset(int k) {
    constexpr int sizes[] = {static_cast<int>(sizeof(Args))..., 0};
    int sum = 0;
    for (int i = 0; i < k; ++i) sum += IsSplat(i) ? 0 : (N * sizes[i] + 3) / 4;
    return sum;
  }
};

// One row of scores. Op, N, kHas (at most the mask), Index, kRagged: as for FusedRow.
//
//     kFull  every pack that a thread holds has elements of the row, except rows beyond the end, which are not stored
//     Call   the ScoreCall
template <class Op, int N, uint32_t kHas, class Index, bool kRagged, bool kFull, class Call> struct ScoreRow
    : FusedRow<Op, N, kHas, Index, kRagged> {
  static_assert((kHas & ~kHasMask) == 0 && Op::kFromInput, "");
  using Base = FusedRow<Op, N, kHas, Index, kRagged>;
  using T = typename Op::T;
  using C = typename Op::C;
  using Params = typename Call::Params;
  using Base::span;
  static constexpr bool kManyRegisters = true;
  static constexpr bool kChains = !std::is_same_v<typename Call::Gradient, void>;
  static constexpr bool kSkips = !std::is_same_v<typename Call::Mask, void>;
  static constexpr int kArgWords = Call::template Offset<N>(Call::kArgs);
  // Estimate of a thread's registers in the warp algorithm: the packs as loaded, or the values held for them, and
  // others.
  static constexpr int kLoaded = Op::kInputs * Pack<T, N>::kWords + kArgWords + (Base::kLifts ? Base::kLiftWords : 0);
  static constexpr int kHeld =
      N * (sizeof(C) / 4) * (1 + kChains) + (Op::kInputs - 1) * static_cast<int>(Pack<T, N>::kWords);
  static constexpr int kOthers = 32 + 3 * Call::kArgs + 2 * Call::kIndices + (kRagged ? 8 : 0);
  static constexpr int GroupBlocks(int packs) {
    const int registers = packs * (kLoaded > kHeld ? kLoaded : kHeld) + kOthers;
    return registers <= 68 ? 8 : registers >= 256 ? 2 : 512 / registers;
  }
  using IndexSequence = std::make_index_sequence<Call::kIndices>;
  using ArgSequence = std::make_index_sequence<Call::kArgs>;

  struct Raw : Base::Raw {
    uint32_t arg[kArgWords ? kArgWords : 1];
    C slope[kChains ? N : 1];  // derivatives of the scores by x
    bool skipped;              // if kSkips
  };

  const Params& q;
  int64_t arg_row[Params::kArgSlots];  // offset of this row, per operand
  int32_t index[Params::kIndexSlots];  // value of each index for this row; for the column index, its origin

  __device__ __forceinline__ ScoreRow(const Params& params, int64_t at)
      : ScoreRow(params, at, at < params.rows ? params.RowAt(static_cast<uint32_t>(at)) : 0) {}

  __device__ __forceinline__ ScoreRow(const Params& params, int64_t at, uint32_t row)
      : Base(params, at, row), q(params) {
#pragma unroll
    for (int k = 0; k < Call::kArgs; ++k) arg_row[k] = q.arg_map[k].Below32Bits(row);
#pragma unroll
    for (int k = 0; k < Call::kIndices; ++k) {
      index[k] = q.origin ? __ldg(q.origin + k) : 0;
      if (k == Call::kColumn) continue;
      const uint32_t step = q.below[k].Div(row), turn = q.extent[k].Div(step);
      index[k] += static_cast<int32_t>(step - turn * q.extent[k].divisor);
    }
  }

  template <int k> __device__ __forceinline__ const typename Call::template Arg<k>* ArgRow() const {
    return static_cast<const typename Call::template Arg<k>*>(q.arg[k]) + arg_row[k];
  }

  // Loads the elements of operand k that belong to a pack of x. If kRagged is false, the packs of the operands are
  // aligned.
  template <int k> __device__ __forceinline__ void LoadArg(Index column, uint32_t* all) const {
    if constexpr (!Call::IsSplat(k)) {
      using A = typename Call::template Arg<k>;
      constexpr int kBytes = N * sizeof(A) < 16 ? N * sizeof(A) : 16, kWords = (N * sizeof(A) + 3) / 4;
      uint32_t* const words = all + Call::template Offset<N>(k);
      const A* const at = ArgRow<k>() + column;
      if (!kRagged || (this->Inside(column) && reinterpret_cast<uintptr_t>(at) % kBytes == 0)) {
        if constexpr (kBytes == 16) {
#pragma unroll
          for (int w = 0; w < kWords; w += 4) {
            const uint4 v = __ldg(reinterpret_cast<const uint4*>(at) + w / 4);
            words[w] = v.x, words[w + 1] = v.y, words[w + 2] = v.z, words[w + 3] = v.w;
          }
        } else if constexpr (kBytes == 8) {
          const uint2 v = __ldg(reinterpret_cast<const uint2*>(at));
          words[0] = v.x, words[1] = v.y;
        } else if constexpr (kBytes == 4) {
          words[0] = __ldg(reinterpret_cast<const unsigned int*>(at));
        } else if constexpr (kBytes == 2) {
          words[0] = __ldg(reinterpret_cast<const unsigned short*>(at));
        } else {
          words[0] = __ldg(reinterpret_cast<const unsigned char*>(at));
        }
      } else {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (span.Has(column + j)) SetBitsAt<sizeof(A)>(words, j, LoadBits(at + j));
        }
      }
    }
  }
  template <size_t... A>
  __device__ __forceinline__ void LoadArgs(Index i, Raw& raw, bool skipped, std::index_sequence<A...>) const {
#pragma unroll
    for (int w = 0; w < kArgWords; ++w) raw.arg[w] = 0;
    if (!skipped) (LoadArg<A>(span.Column(i), raw.arg), ...);
  }

  template <int kPacks> __device__ __forceinline__ void LoadAll(Raw (&raw)[kPacks], Index first, Index step) const {
    if constexpr (!kSkips) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
        LoadArgs(first + i * step, raw[i], this->Beyond(first + i * step), ArgSequence());
      Base::LoadAll(raw, first, step);
    } else {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const Index at = first + i * step;
        raw[i].skipped = this->Beyond(at);
        if constexpr (!Call::kAfter)
          raw[i].skipped = raw[i].skipped || Masks(raw[i], at, IndexSequence(), ArgSequence());
        LoadArgs(at, raw[i], raw[i].skipped, ArgSequence());
      }
      if constexpr (Call::kAfter) {
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          raw[i].skipped = raw[i].skipped || Masks(raw[i], first + i * step, IndexSequence(), ArgSequence());
        }
      }
      Base::LoadAll(raw, first, step, [&](int i) { return raw[i].skipped; });
    }
  }
  __device__ __forceinline__ Raw Load(Index pack) const {
    Raw raw[1];
    LoadAll(raw, pack, Index(1) << 30);
    return raw[0];
  }

  template <int k> __device__ __forceinline__ int32_t IndexOf(Index column) const {
    return k == Call::kColumn ? index[k] + static_cast<int32_t>(column) : index[k];
  }
  template <int k> __device__ __forceinline__ auto ArgOf(const Raw& raw, int j) const {
    using A = typename Call::template Arg<k>;
    if constexpr (Call::IsSplat(k)) return WidenBits<A>(LoadBits(ArgRow<k>()));
    else return WidenBits<A>(BitsAt<sizeof(A)>(raw.arg + Call::template Offset<N>(k), j));
  }

  // Whether the Mask excludes all elements of a pack that lie in the row.
  template <size_t... I, size_t... A> __device__ __forceinline__ bool Masks(const Raw& raw, Index i,
                                                                            std::index_sequence<I...>,
                                                                            std::index_sequence<A...>) const {
    const typename Call::Mask mask{};
    const Index column = span.Column(i);
    bool all = true;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      bool masked;
      mask(IndexOf<I>(column + j)..., ArgOf<A>(raw, j)..., masked);
      all &= masked | (kRagged && !span.Has(column + j));
    }
    return all;
  }
  __device__ __forceinline__ bool Skips(const Raw& raw, Index) const { return raw.skipped; }
  __device__ __forceinline__ Pack<T, N> ResultOfSkipped(Index i) const {
    if constexpr (kChains) {
      if (q.ds) span.Store(static_cast<T*>(q.ds), i, Pack<T, N>{});
    }
    return Base::ResultOfSkipped(i);
  }

  template <size_t... I, size_t... A> __device__ __forceinline__ void Apply(const Raw& raw, Index i, C (&s)[N],
                                                                            std::index_sequence<I...>,
                                                                            std::index_sequence<A...>) const {
    const typename Call::Score score{};
    const Index column = span.Column(i);
    C x[N];
    Unpack(raw.data[0], x);
#pragma unroll
    for (int j = 0; j < N; ++j) score(x[j], IndexOf<I>(column + j)..., ArgOf<A>(raw, j)..., s[j]);
  }
  template <size_t... I, size_t... A> __device__ __forceinline__ void Differentiate(const Raw& raw, Index i, C (&d)[N],
                                                                                    std::index_sequence<I...>,
                                                                                    std::index_sequence<A...>) const {
    const typename Call::Gradient gradient{};
    const Index column = span.Column(i);
    C x[N];
    Unpack(raw.data[0], x);
#pragma unroll
    for (int j = 0; j < N; ++j) gradient(x[j], IndexOf<I>(column + j)..., ArgOf<A>(raw, j)..., C(1), d[j]);
  }

  // Computes the scores of a pack: -inf for elements that are masked or outside of the row.
  __device__ __forceinline__ void Scores(const Raw& raw, Index i, C (&s)[N]) const {
    Apply(raw, i, s, IndexSequence(), ArgSequence());
    if constexpr (Base::kLifts) {
      Pack<T, N> words;
#pragma unroll
      for (int w = 0; w < Pack<T, N>::kWords; ++w) words.word[w] = raw.lift[w];
      C lift[N];
      Unpack(words, lift);
#pragma unroll
      for (int j = 0; j < N; ++j) s[j] = lift[j] != C(0) ? -Infinity<C>() : s[j];
    } else if constexpr (!kFull) {
#pragma unroll
      for (int j = 0; j < N; ++j) s[j] = raw.lift[0] ? -Infinity<C>() : s[j];
    }
  }

  // Also clears the cotangents and the derivatives in `raw` of elements that take no part. Packs with such elements are
  // few or adjacent, so the branch is cheap.
  __device__ __forceinline__ void Values(Raw& raw, C (&v)[Op::kInputs][N], Index i) const {
    Scores(raw, i, v[0]);
    if constexpr (Op::kInputs == 2) {
      if constexpr (kChains) Differentiate(raw, i, raw.slope, IndexSequence(), ArgSequence());
      const C least = Fold(v[0], [](C a, C b) {
        if constexpr (sizeof(C) == 4) return fminf(a, b);
        else return fmin(a, b);
      });
      if (least == -Infinity<C>()) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (v[0][j] == -Infinity<C>()) {
            SetElement(raw.data[1], j, T(0));
            if constexpr (kChains) raw.slope[j] = 0;
          }
        }
      }
      Unpack(raw.data[1], v[1]);
    }
  }

  // Rows with NaN or infinity, or without participants, are rare: their scores are computed from memory again instead
  // of being held in registers.
  __device__ __forceinline__ Pack<T, N> Result(C (&v)[N], const typename Op::Final& final, const Raw& raw,
                                               Index i) const {
    if (!Op::Regular(final)) {
      C s[N];
      Scores(Load(i), i, s);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = s[j] == -Infinity<C>() ? Op::Masked() : v[j];
    }
    if constexpr (kChains) {
      if (q.ds) span.Store(static_cast<T*>(q.ds), i, Repack<T, N>(v));
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] *= raw.slope[j];
    }
    return Repack<T, N>(v);
  }
  __device__ __forceinline__ void Store(T* out, Index i, C (&v)[N], const typename Op::Final& final,
                                        const Raw& raw) const {
    span.Store(out, i, Result(v, final, raw, i));
  }
};

}  // namespace jaxkern
