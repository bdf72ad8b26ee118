// Row functions of rows that no cluster holds, or of few long rows: a row is cut into parts of kThreads * kPacks * N elements, and
// each stage is a launch of its own.
//
//     SplitRowsKernel<F, N, kPacks, kThreads, kMinBlocks, kStage, kEnds>
//
// F is as in rows.cuh. A block has the same part of many rows. The launch with kStage = s < F::kStages reduces stage s of each part
// and leaves the result in scratch; all later launches read the results of all parts of a row, combine them in order and compute the
// numbers of the row. The launch with kStage = F::kStages computes the results of F.
//
// Memory traffic: each launch reads each row once, from L2 if the rows fit there, and each result is written once.
//
// Sums over rows: the blocks of a part add up their columns, and SumOverBlocks (sums.cuh) adds the sums of all blocks in order.
// The grid has `parts` blocks for each of gridDim.x / parts sets of rows.
#pragma once

#include "rows.cuh"

namespace jaxkern {

template <class F> struct SplitRowArgs {
  typename RowEngine<F>::Args rows;
  void* partial[F::kStages + 1];  // of each stage: Partial<s>[rows][parts]
  int64_t parts;
};

template <class F, int N, int kPacks, int kThreads, int kStage, int kEnds> struct SplitRows {
  using Engine = RowEngine<F>;
  using Numbers = typename Engine::Numbers;
  static constexpr int kRows = Engine::kRows, kResults = Engine::kResults;
  static constexpr int kTile = kThreads * kPacks * N;
  template <int s> using Partial = typename Engine::template Partial<s>;

  // The numbers after the stages from s to kStage, from what the launches before left in scratch.
  template <int s>
  static __device__ __forceinline__ void Known(const SplitRowArgs<F>& a, int64_t row, uint32_t turn, Numbers& n) {
    if constexpr (s < kStage) {
      const auto* const parts = static_cast<const Partial<s>*>(a.partial[s]) + row * a.parts;
      Partial<s> sum = F::Identity(Stage<s>(), n);
      for (int64_t p = threadIdx.x; p < a.parts; p += kThreads) sum = F::Combine(Stage<s>(), sum, parts[p]);
      NoRoom room;
      Engine::template Join<s, 0, kThreads>(sum, turn, room);
      F::After(Stage<s>(), n, sum);
      Known<s + 1>(a, row, turn, n);
    }
  }

  template <size_t... I, size_t... K, size_t... L, size_t... T_>
  static __device__ __forceinline__ void Run(const SplitRowArgs<F>& args, std::index_sequence<I...>,
                                             std::index_sequence<K...>, std::index_sequence<L...>,
                                             std::index_sequence<T_...>) {
    constexpr bool kLast = kStage == F::kStages;
    const typename Engine::Args& a = args.rows;
    // What the launch before has read last may still be in L2: every other launch begins at the end.
    const int64_t block = kStage % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int64_t part = block % args.parts, walker = block / args.parts, walkers = gridDim.x / args.parts;
    const int lane = threadIdx.x;
    const ReadPolicy policy = MakeReadPolicy(a.exceeds_l2);
    typename Engine::template SumsOf<N, kPacks> sums;
    typename Engine::TotalSlots totals;
    sums.Clear();
    ((At<T_>(totals) = 0), ...);
    uint32_t turn = 0;
    using RowWalk = typename Engine::template Walk<N, kEnds>;
    const RowWalk walk(walker, walkers);
    for (int64_t row = walk.first; row < a.rows; row += walk.step, ++turn) {
      const int64_t at[kRows + 1] = {MapRow<F::RowRank(I)>(a.row_map[I], row)..., 0},
                               to[kResults + 1] = {MapRow<F::ResultRank(K)>(a.result_map[K], row)..., 0};
      const int begin = static_cast<int>(part) * kTile + RowWalk::Begin(row, a.width);
      typename Engine::template RowPacks<N> x[kPacks];
      typename F::Kept kept[kPacks][N];
      const auto each = [&](auto f) { Engine::template EachPack<N, kThreads, kPacks, kEnds, true>(a, lane, begin, f); };
      each([&](int i, int column, bool) {
        Engine::template Load<N, kEnds>(a, at, column, x[i], policy, typename Engine::RowIndex());
      });
      Numbers n = Engine::Begin(a, row, typename Engine::NumberIndex(), std::make_index_sequence<F::kIndices>());
      Known<0>(args, row, turn, n);
      if constexpr (!kLast) {
        Partial<kStage> sum = F::Identity(Stage<kStage>(), n);
        each([&](int i, int column, bool partial) {
          Engine::template ReducePack<kStage, N, kEnds>(a, n, column, partial, x[i], kept[i], sum,
                                                        typename Engine::RowIndex(), typename Engine::ColumnIndex());
        });
        NoRoom room;
        Engine::template Join<kStage, 0, kThreads>(sum, turn, room);
        if (lane == 0) static_cast<Partial<kStage>*>(args.partial[kStage])[row * args.parts + part] = sum;
      } else {
        each([&](int i, int column, bool partial) {
          Engine::template StorePackOf<N, kEnds>(a, n, true, i, column, partial, to, x[i], kept[i], sums,
                                                 typename Engine::RowIndex(), typename Engine::ColumnIndex(),
                                                 typename Engine::ResultIndex(), typename Engine::ColumnSumIndex());
        });
        if (part == 0 && lane == 0) {
          if constexpr (Engine::kNumberResults > 0)
            Engine::StoreNumbers(a, row, n, typename Engine::NumberResultIndex());
          if constexpr (Engine::kTotals > 0) Engine::AddTotals(n, totals, typename Engine::TotalIndex());
        }
      }
    }
    if constexpr (kLast) {
      const int64_t first = part * kTile + RowWalk::Begin(walk.first, a.width) + lane * N;
      (Engine::template WriteOwnColumns<L, N, kThreads, kPacks>(a, sums, first, walker), ...);
      if (part == 0) (Engine::template WriteTotal<T_, kThreads>(a, At<T_>(totals), walker), ...);
    }
  }
};

template <class F, int N, int kPacks, int kThreads, int kMinBlocks, int kStage, int kEnds>
__global__ void __launch_bounds__(kThreads, kMinBlocks) SplitRowsKernel(const __grid_constant__ SplitRowArgs<F> a) {
  using Engine = RowEngine<F>;
  SplitRows<F, N, kPacks, kThreads, kStage, kEnds>::Run(a, typename Engine::RowIndex(), typename Engine::ResultIndex(),
                                                        typename Engine::ColumnSumIndex(),
                                                        typename Engine::TotalIndex());
}

}  // namespace jaxkern
