// Row statistics of score(x, ...) as in score.cuh: the largest score of each row, and log(sum(e^(score - largest))).
// The cross-entropy of scores takes them.
//
//     SoftmaxRegisters<FusedForward<T, true>, ScoreSumsRow<...>, lanes, 4, 1>
//     ScoreSumsStreaming<FusedForward<T, true>, ScoreSumsRow<...>>
//
// ScoreSumsRow replaces ScoreRow in the kernels of the warp and block algorithms, which hold a row in registers; it
// stores the statistics of the row instead of its elements. ScoreSumsStreaming takes rows of any width, one block per
// row.
//
// Memory traffic: x and the operands once, two numbers per row written. params.out and params.ds: [rows] in the
// computing type, the largest scores and the logarithms. For a row without participants these are 0 and -inf.
#pragma once

#include "softmax/score.cuh"

namespace jaxkern {

// Template parameters: as for ScoreRow.
template <class Op, int N, uint32_t kHas, class Index, bool kRagged, bool kFull, class Call> struct ScoreSumsRow
    : ScoreRow<Op, N, kHas, Index, kRagged, kFull, Call> {
  using Base = ScoreRow<Op, N, kHas, Index, kRagged, kFull, Call>;
  using T = typename Op::T;
  using C = typename Op::C;
  using Raw = typename Base::Raw;
  using Params = typename Base::Params;
  static constexpr int kStreamUnroll = 2;
  static_assert(Op::kInputs == 1, "");

  int64_t number;  // of the row; -1: beyond the end

  __device__ __forceinline__ ScoreSumsRow(const Params& params, int64_t at)
      : Base(params, at), number(at < params.rows ? int64_t{params.RowAt(static_cast<uint32_t>(at))} : -1) {}

  __device__ __forceinline__ Pack<T, N> Result(C (&)[N], const typename Op::Final&, const Raw&, Index) const {
    return {};
  }
  template <int kPacks> __device__ __forceinline__ void StoreAll(T*, const Pack<T, N> (&)[kPacks], Index, Index) const {
  }

  // Every thread of the row calls this with the Stat of the whole row; lane 0 stores.
  template <int kLanes, class AnyRaw>
  __device__ __forceinline__ void Close(const AnyRaw&, const typename Op::Stat& stat, int lane) const {
    if (lane != 0 || number < 0) return;
    const typename Op::Final final = Op::Finish(stat);
    const bool empty = stat.sum == typename Op::S(0);
    static_cast<C*>(this->q.out)[number] = final.max;
    static_cast<C*>(this->q.ds)[number] = empty ? -Infinity<C>() : final.norm;
  }
};

// One block per row. Op: FusedForward. RowOf: ScoreSumsRow.
template <class Op, class RowOf> __global__ void __launch_bounds__(kStreamThreads, RowOf::kStreamBlocks)
    ScoreSumsStreaming(const __grid_constant__ typename RowOf::Params p) {
  const RowOf row(p, blockIdx.x + int64_t{blockIdx.y} * gridDim.x);
  const typename Op::Stat stat = RangeStat<Op>(row, 0, row.span.Count());
  row.template Close<kBlockLanes>(0, stat, static_cast<int>(threadIdx.x));
}

}  // namespace jaxkern
