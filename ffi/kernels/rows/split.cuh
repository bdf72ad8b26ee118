// Row functions of rows that no cluster holds, or of few long rows: a row is cut into tiles of kThreads * kPacks * N elements, which
// blocks share, and each stage is a launch of its own.
//
//     SplitRowsKernel<F, N, kPacks, kThreads, kMinBlocks, kStage, kEnds>
//
// F is as in rows.cuh. A block has the same part of many rows: tile p of part p, and every parts-th after it; where columns are summed,
// this one alone. The launch with kStage = s < F::kStages reduces stage s of each part
// and leaves the result in scratch; all later launches read the results of all parts of a row, combine them in order and compute the
// numbers of the row. The launch with kStage = F::kStages computes the results of F.
//
// Memory traffic: each launch reads each row once, from L2 if the rows fit there, and each result is written once.
//
// Sums over rows: the blocks of a part add up their columns, and SumOverBlocks (sums.cuh) adds the sums of all blocks in order.
// The grid has `parts` blocks for each of gridDim.x / parts sets of rows, or one for each set where only numbers are left.
#pragma once

#include "engine.cuh"

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
      Partial<s> sum = Engine::Stages::template Identity<s>(n);
      for (int64_t p = threadIdx.x; p < a.parts; p += kThreads)
        sum = typename Engine::Stages::template Combine<s>()(sum, parts[p]);
      NoRoom room;
      Engine::Stages::template Join<s, 0, kThreads>(sum, turn, room);
      Engine::Stages::template After<s>(n, sum);
      Known<s + 1>(a, row, turn, n);
    }
  }

  template <size_t... I, size_t... K, size_t... L, size_t... T_>
  static __device__ __forceinline__ void Run(const SplitRowArgs<F>& args, std::index_sequence<I...>,
                                             std::index_sequence<K...>, std::index_sequence<L...>,
                                             std::index_sequence<T_...>) {
    constexpr bool kLast = kStage == F::kStages, kAlone = kLast && kResults + Engine::kColumnSums == 0;
    const typename Engine::Args& a = args.rows;
    // What the launch before has read last may still be in L2: every other launch begins at the end.
    const int64_t block = kStage % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int64_t parts = kAlone ? 1 : args.parts;
    const int64_t part = block % parts, walker = block / parts, walkers = gridDim.x / parts;
    const int lane = threadIdx.x;
    const ReadPolicy policy = MakeReadPolicy(a.exceeds_l2);
    constexpr int kEdge = kEdges<N, kThreads, kEnds>;
    typename Engine::template SumsOf<N, kPacks> sums;
    typename Engine::template SumsOf<1, kEdge> edge_sums;
    typename Engine::TotalSlots totals;
    sums.Clear();
    edge_sums.Clear();
    ((At<T_>(totals) = 0), ...);
    uint32_t turn = 0;
    using RowWalk = typename Engine::template Walk<N, kEnds>;
    const RowWalk walk(walker, walkers);
    for (int64_t row = walk.first; row < a.rows; row += walk.step, ++turn) {
      const int64_t at[kRows + 1] = {MapRow<F::RowRank(I)>(a.row_map[I], row)..., 0},
                               to[kResults + 1] = {MapRow<F::ResultRank(K)>(a.result_map[K], row)..., 0};
      const Body body = Engine::template BodyOfRow<N, kEnds>(a, row, 1 << 30);
      typename Engine::template Held<N, kPacks> packs;
      typename Engine::template Held<1, kEdge> edges;
      const auto begin = [&] {
        return Engine::Begin(a, row, typename Engine::NumberIndex(), std::make_index_sequence<F::kIndices>());
      };
      Numbers n;
      if constexpr (Engine::AnyGuarded()) n = begin();
      const int64_t first = body.first + part * kTile;
      const auto each_pack = [&](int64_t tile, auto f) {
        Engine::template EachPack<N, kThreads, kPacks, kEnds, true>(body, lane, static_cast<int>(tile), f);
      };
      const auto each_edge = [&](int64_t tile, auto f) {  // beside the first tile of the row
        if (part == 0 && tile == first) Engine::template EachEdge<kEdge, kThreads>(a, body, lane, f);
      };
      const auto load = [&](int64_t tile) {
        each_pack(tile, [&](int i, int column) {
          Engine::template Load<N>(a, n, at, column, packs.x[i], policy, typename Engine::RowIndex());
        });
        each_edge(tile, [&](int k, int column) {
          Engine::template Load<1>(a, n, at, column, edges.x[k], policy, typename Engine::RowIndex());
        });
      };
      if constexpr (!kAlone) load(first);
      // Calls f(tile) for the tiles of this block, which are in registers then.
      const auto each_tile = [&](auto f) {
        f(first);
        if constexpr (Engine::kColumnSums == 0) {
          for (int64_t tile = first + parts * kTile; tile < body.end; tile += parts * kTile) {
            load(tile);
            f(tile);
          }
        }
      };
      if constexpr (!Engine::AnyGuarded()) n = begin();
      typename Engine::Picked picked;
      if constexpr (kStage == 0) {
        Engine::EachPick(a, n, [&](int k, int column) {
          Engine::template Load<1>(a, n, at, column, picked[k], policy, typename Engine::RowIndex());
        });
      }
      Known<0>(args, row, turn, n);
      if constexpr (!kLast) {
        TileRuns<F, kStage> runs(n);
        each_tile([&](int64_t tile) {
          Engine::template ReduceStage<kStage, kEnds>(a, n, runs.run, [&](auto, auto f) {
            each_pack(tile, [&](int i, int column) { f(column, packs.x[i], packs.kept[i]); });
            each_edge(tile, [&](int k, int column) { f(column, edges.x[k], edges.kept[k]); });
          });
          runs.EndTile();
        });
        Partial<kStage> sum = runs.Total();
        NoRoom room;
        Engine::Stages::template Join<kStage, 0, kThreads>(sum, turn, room);
        Engine::template AddPicks<kStage>(a, n, picked, sum);
        if (lane == 0) static_cast<Partial<kStage>*>(args.partial[kStage])[row * args.parts + part] = sum;
      } else {
        if constexpr (!kAlone) {
          each_tile([&](int64_t tile) {
            each_pack(tile, [&](int i, int column) {
              Engine::template StorePackOf<N, kEnds>(a, n, true, i, column, to, packs.x[i], packs.kept[i], sums,
                                                     typename Engine::RowIndex(), typename Engine::ColumnIndex(),
                                                     typename Engine::ResultIndex(), typename Engine::ColumnSumIndex());
            });
            each_edge(tile, [&](int k, int column) {
              Engine::template StorePackOf<1, kEnds>(a, n, true, k, column, to, edges.x[k], edges.kept[k], edge_sums,
                                                     typename Engine::RowIndex(), typename Engine::ColumnIndex(),
                                                     typename Engine::ResultIndex(), typename Engine::ColumnSumIndex());
            });
          });
        }
        if (part == 0 && lane == 0) {
          if constexpr (Engine::kNumberResults > 0)
            Engine::StoreNumbers(a, row, n, typename Engine::NumberResultIndex());
          if constexpr (Engine::kTotals > 0) Engine::AddTotals(n, totals, typename Engine::TotalIndex());
        }
      }
    }
    if constexpr (kLast) {
      const Body body = Engine::template BodyOfRow<N, kEnds>(a, walk.first, 1 << 30);
      Engine::template EachPack<N, kThreads, kPacks, kEnds, true>(
          body, lane, body.first + static_cast<int>(part) * kTile,
          [&](int i, int column) { (Engine::template WriteSums<L, N>(a, sums, i, column, walker), ...); });
      if (part == 0) {
        Engine::template EachEdge<kEdge, kThreads>(a, body, lane, [&](int k, int column) {
          (Engine::template WriteSums<L, 1>(a, edge_sums, k, column, walker), ...);
        });
      }
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
