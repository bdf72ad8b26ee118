// Row functions: functions in jnp that are elementwise along all dimensions but one, and reduce along that one.
//
//     RowsKernel<F, N, kLanes, kPacks, kThreads, kMinBlocks, kEnds, kStays, kStreams, kShared, kRuns>
//     SumOverBlocks<T, Result>                   (sums.cuh)
//
// F is generated from a jaxpr (jaxkern/_engines/rows/generate.py) and computes one element at a time; the kernel owns memory,
// threads and barriers. A row is read in packs of N elements (packs.cuh); kEnds says how rows end. kLanes selects the threads that
// hold a row: lanes of a warp, a block of kThreads threads, or a cluster of blocks (exchange.cuh). Thread t of the n threads of a
// row holds packs t, t + n, and so on, kPacks of them. All loads are issued before the first use.
//
// F works in stages. Each stage reduces values that F computes from the elements of the row, its columns and its numbers, and
// then computes more numbers from the results. A stage is one pass over the packs of a thread, or two: a maximum, and sums with
// exponentials relative to it (Pivoted). Nothing but packs as they were read and numbers lives from one stage to the
// next: values of elements are computed again, except for those that F keeps. Columns are read again in each stage; they lie
// in L1.
//
// Memory traffic: each row is read once and each result is written once. With kStreams a row is longer than the packs of its
// threads; each stage reads it again, mostly from L2.
//
// With kStays, blocks or clusters stay for many rows, a multiple of their number apart, and add up sums over rows: of elements,
// which give one number for each column, and of numbers. While clusters compute a row, the next one is on its way to L2. Each block or
// cluster writes its sums, and SumOverBlocks adds them in their order, so results have the same bits in every run on one GPU. Sums of
// elements are in registers, or, with kShared, in shared memory (sums.cuh).
#pragma once

#include "engine.cuh"

namespace jaxkern {

// Rows that are each owned by the threads of `Owners<kLanes, kThreads>`.
template <class F, int N, int kLanes, int kPacks, int kThreads, int kEnds, bool kStays, bool kStreams, bool kShared,
          bool kRuns>
struct OwnedRows {
  using Engine = RowEngine<F>;
  using Stages = typename Engine::Stages;
  using Args = typename Engine::Args;
  using Numbers = typename Engine::Numbers;
  using RowIndex = typename Engine::RowIndex;
  using ColumnIndex = typename Engine::ColumnIndex;
  using Own = Owners<kLanes, kThreads>;
  static constexpr int kRows = Engine::kRows, kResults = Engine::kResults, kColumnSums = Engine::kColumnSums;
  static constexpr int kGroup = Own::kGroup, kGroups = Own::kGroups, kTile = kGroup * kPacks * N;
  static constexpr int kEdge = kEdges<N, kGroup, kEnds>;
  using Packs = typename Engine::template Held<N, kPacks>;
  using Edges = typename Engine::template Held<1, kEdge>;
  using Sums = typename Engine::template Sums<N, kPacks, kThreads, kShared>;
  using EdgeSums = typename Engine::template SumsOf<1, kEdge>;

  // Lanes that hold whole packs of more than 4 elements search the row for the elements that F picks, instead of loading them
  // [smoothed loss, bfloat16 2^20 x 128: 104 us, 116 with a load; float32: 227 and 184; H100].
  static constexpr bool kSearches = kLanes > 0 && N > 4 && kEnds == kWhole;

  template <class Do> static __device__ __forceinline__ void EachPack(const Body& body, int lane, int begin, Do f) {
    Engine::template EachPack<N, kGroup, kPacks, kEnds, kStreams>(body, lane, begin, f);
  }

  // Calls f(i, column, has) for each pack that this thread holds. Where the last one is absent, `column` is that of the first: loads
  // and reductions have no branch, because the compiler would load the pack there, after it waited for those before. Functions of
  // several rows that keep values, or sum over rows, have a branch: they have no registers left [gradient of soft cap, bfloat16
  // 10872 x 12345: 378 us, 432 without; layer scale, residual and norm, gradient, float32: 960 and 985; H100].
  template <class Do> static __device__ __forceinline__ void EachHeld(const Body& body, int lane, Do f) {
    constexpr bool kSums = kColumnSums + Engine::kTotals > 0, kKeeps = !__is_empty(typename F::Kept);
    constexpr bool kAlways = kPacks > 1 && !kSums && !OfSectors(kEnds) && (kRows == 1 || !kKeeps);
    constexpr int kEvery = kAlways ? kWhole : kEnds;
    Engine::template EachPack<N, kGroup, kPacks, kEvery, false>(body, lane, body.first, [&](int i, int column) {
      const bool has = kEvery == kEnds || i < kPacks - 1 || column < body.end;
      f(i, has ? column : body.first + lane * N, has);
    });
  }

  // Runs the stages from s on.
  template <int s, class Room>
  static __device__ __forceinline__ void RunStages(const Args& a, const int64_t (&at)[kRows + 1], int lane,
                                                   const Body& body, Numbers& n, Packs& packs, Edges& edges,
                                                   const typename Engine::Picked& picked, ReadPolicy policy,
                                                   uint32_t turn, Room& cluster) {
    if constexpr (s < F::kStages) {
      const auto each = [&](int tile, auto pass, auto f) {
        const auto of_pack = [&](int i, int column, bool has) {
          if constexpr (decltype(pass)::value > 0 && Engine::template kForgets<N, kPacks>)
            Engine::ForgetAll(packs.x[i], RowIndex());
          f(column, packs.x[i], packs.kept[i], has);
        };
        if constexpr (kStreams) {
          EachPack(body, lane, tile, [&](int i, int column) { of_pack(i, column, true); });
        } else {
          EachHeld(body, lane, of_pack);
        }
        if (!kStreams || tile == body.first) {
          Engine::template EachEdge<kEdge, kGroup>(a, body, lane,
                                                   [&](int k, int column) { f(column, edges.x[k], edges.kept[k]); });
        }
      };
      if constexpr (kLanes > 0) {  // lanes exchange numbers at no cost
        const auto reduce = [&](auto pass) {
          constexpr int p = decltype(pass)::value;
          typename Engine::template Reduced<p> sum = F::Identity(pass, n);
          Engine::template ReduceAll<p, kEnds, kSearches>(a, n, sum,
                                                          [&](auto pass, auto f) { each(body.first, pass, f); });
          sum = JoinLanes<kLanes>(sum, typename Stages::template CombineReduced<p>());
          if constexpr (p == 0 && Stages::kPicks > 0 && !kSearches)
            Engine::AddPicked(a, n, picked, sum, RowIndex(), ColumnIndex());
          F::After(pass, n, sum);
        };
        reduce(Pass<F::FirstPass(s)>());
        if constexpr (F::Pivots(s)) reduce(Pass<F::LastPass(s)>());
      } else {
        using Partial = typename Engine::template Partial<s>;
        Partial sum = Stages::template Identity<s>(n);
        const auto reduce = [&](int tile, Partial& sum) {
          Engine::template ReduceStage<s, kEnds>(a, n, sum, [&](auto pass, auto f) { each(tile, pass, f); });
        };
        if constexpr (kStreams) {
          TileRuns<F, s> runs(n);
          for (int tile = body.first; tile < body.TilesEnd(); tile += kTile) {
            EachPack(body, lane, tile, [&](int i, int column) {
              Engine::template Load<N>(a, n, at, column, packs.x[i], policy, RowIndex());
            });
            reduce(tile, runs.run);
            runs.EndTile();
          }
          sum = runs.Total();
        } else {
          reduce(body.first, sum);
        }
        const Partial own = sum;
        Stages::template Join<s, kLanes, kThreads>(sum, turn, cluster);
        Engine::template AddPicks<s>(a, n, picked, sum);
        Stages::template After<s>(n, sum);
        if constexpr (F::Pivots(s) && !kStreams) {
          Stages::template RescaleKept<s>(own.most.v0, n, [&](auto f) {
            Engine::EachKept(packs, f);
            Engine::EachKept(edges, f);
          });
        }
      }
      RunStages<s + 1>(a, at, lane, body, n, packs, edges, picked, policy, turn, cluster);
    }
  }

  // Writes the sums of column sum L of a block or cluster. Of a cluster, each block writes its own columns. Where rows belong to
  // lanes, the block adds up the sums of all its rows first.
  // body: of all rows of this block or cluster.
  template <size_t L> static __device__ __forceinline__ void WriteColumnSums(const Args& a, Sums& sums,
                                                                             EdgeSums& edge_sums, const Body& body) {
    using Sum = typename Engine::template SumType<L>;
    const int lane = Own::Lane();
    if constexpr (kGroups == 1) {
      Engine::template EachPack<N, kGroup, kPacks, kEnds, false>(body, lane, body.first, [&](int i, int column) {
        Engine::template WriteSums<L, N>(a, sums, i, column, Own::Walker());
      });
      Engine::template EachEdge<kEdge, kGroup>(a, body, lane, [&](int k, int column) {
        Engine::template WriteSums<L, 1>(a, edge_sums, k, column, Own::Walker());
      });
      ClearMissing(static_cast<Sum*>(a.sum[L]), a.width, a.walkers, Own());
    } else {
      __shared__ Sum room[kGroups * kTile];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        Sum own[N];
        sums.template Read<L>(i, own);
#pragma unroll
        for (int j = 0; j < N; ++j) room[Own::Group() * kTile + (lane + i * kGroup) * N + j] = own[j];
      }
      __syncthreads();
      for (int c = threadIdx.x; c < a.width; c += kThreads) {
        Sum sum = 0;
        for (int g = 0; g < kGroups; ++g) sum += room[g * kTile + c];
        static_cast<Sum*>(a.sum[L])[Own::Walker() * a.width + c] = sum;
      }
      __syncthreads();
    }
  }

  template <size_t I>
  static __device__ __forceinline__ void WriteTotals(const Args& a, const typename Engine::TotalSlots& totals) {
    if constexpr (Own::kBlocks > 1) {  // the first thread of a cluster has the totals
      auto* const out = static_cast<typename Engine::template TotalType<I>*>(a.sum[kColumnSums + I]);
      if (Own::Lane() == 0) out[Own::Walker()] = At<I>(totals);
      ClearMissing(out, 1, a.walkers, Own());
    } else {
      Engine::template WriteTotal<I, kThreads>(a, At<I>(totals), Own::Walker());
    }
  }

  // Starts to read the part of a row that the block will load next.
  template <size_t... I> static __device__ __forceinline__ void Prefetch(const Args& a, int64_t row, int lane,
                                                                         ReadPolicy policy, std::index_sequence<I...>) {
    const int first = (lane - static_cast<int>(threadIdx.x) + static_cast<int>(threadIdx.x) * kGroup) * N;
    if (threadIdx.x >= kPacks) return;
    const int elements = min(kThreads * N, static_cast<int>(a.width) - first);
    if (elements <= 0) return;
    (PrefetchL2(static_cast<const typename Engine::template RowType<I>*>(a.row[I]) +
                    MapRow<F::RowRank(I)>(a.row_map[I], row) + first,
                elements * static_cast<int>(sizeof(typename Engine::template RowType<I>)), policy),
     ...);
  }

  template <class Room, size_t... I, size_t... K, size_t... L, size_t... T_>
  static __device__ __forceinline__ void Run(const Args& a, Room& cluster, std::index_sequence<I...>,
                                             std::index_sequence<K...>, std::index_sequence<L...>,
                                             std::index_sequence<T_...>) {
    const int lane = Own::Lane(), group = Own::Group();
    cluster.Init();
    const ReadPolicy policy = MakeReadPolicy(a.exceeds_l2);
    constexpr int kMost = kStreams ? 1 << 30 : kGroup * kPacks;
    Sums sums;
    EdgeSums edge_sums;
    sums.Clear();
    edge_sums.Clear();
    typename Engine::TotalSlots totals;
    ((At<T_>(totals) = 0), ...);
    uint32_t turn = 0;
    using RowWalk = typename Engine::template Walk<N, kEnds>;
    const RowWalk walk(Own::Walker(), Own::Walkers());
    for (int64_t first = walk.first * kGroups; first < a.rows; first += walk.step * kGroups, ++turn) {
      const bool live = first + group < a.rows;
      const int64_t row = a.template Row<kRuns>(live ? first + group : a.rows - 1);
      const int64_t at[kRows + 1] = {MapRow<F::RowRank(I)>(a.row_map[I], row)..., 0},
                               to[kResults + 1] = {MapRow<F::ResultRank(K)>(a.result_map[K], row)..., 0};
      const Body body = Engine::template BodyOfRow<N, kEnds>(a, row, kMost);
      Packs packs;
      Edges edges;
      Numbers n;
      if constexpr (Engine::AnyGuarded())
        n = Engine::Begin(a, row, typename Engine::NumberIndex(), std::make_index_sequence<F::kIndices>());
      Engine::template EachEdge<kEdge, kGroup>(a, body, lane, [&](int k, int column) {
        Engine::template Load<1>(a, n, at, column, edges.x[k], policy, RowIndex());
      });
      if constexpr (!kStreams) {
        EachHeld(body, lane, [&](int i, int column, bool) {
          Engine::template Load<N>(a, n, at, column, packs.x[i], policy, RowIndex());
        });
        if constexpr (kStays && kLanes < 0) {
          const int64_t next = first + walk.step;
          if (next < a.rows) Prefetch(a, a.template Row<kRuns>(next), lane, policy, RowIndex());
        }
      }
      if (turn == 0) cluster.Ready();
      if constexpr (!Engine::AnyGuarded())
        n = Engine::Begin(a, row, typename Engine::NumberIndex(), std::make_index_sequence<F::kIndices>());
      typename Engine::Picked picked;
      if constexpr (!kSearches) {
        Engine::EachPick(a, n, [&](int k, int column) {
          Engine::template Load<1>(a, n, at, column, picked[k], policy, RowIndex());
        });
      }
      RunStages<0>(a, at, lane, body, n, packs, edges, picked, policy, turn, cluster);
      if constexpr (kResults + kColumnSums > 0) {
        for (int tile = body.first; tile < (kStreams ? body.TilesEnd() : body.first + 1); tile += kTile) {
          if constexpr (kStreams) {
            EachPack(body, lane, tile, [&](int i, int column) {
              Engine::template Load<N>(a, n, at, column, packs.x[i], policy, RowIndex());
            });
          }
          EachPack(body, lane, tile, [&](int i, int column) {
            if constexpr (F::kStages > 0 && Engine::template kForgets<N, kPacks>)
              Engine::ForgetAll(packs.x[i], RowIndex());
            Engine::template StorePackOf<N, kEnds>(a, n, live, i, column, to, packs.x[i], packs.kept[i], sums,
                                                   RowIndex(), ColumnIndex(), std::index_sequence<K...>(),
                                                   std::index_sequence<L...>());
          });
        }
        Engine::template EachEdge<kEdge, kGroup>(a, body, lane, [&](int k, int column) {
          Engine::template StorePackOf<1, kEnds>(a, n, live, k, column, to, edges.x[k], edges.kept[k], edge_sums,
                                                 RowIndex(), ColumnIndex(), std::index_sequence<K...>(),
                                                 std::index_sequence<L...>());
        });
      }
      if (live && lane == 0) {
        if constexpr (Engine::kNumberResults > 0) Engine::StoreNumbers(a, row, n, typename Engine::NumberResultIndex());
        if constexpr (Engine::kTotals > 0) Engine::AddTotals(n, totals, typename Engine::TotalIndex());
      }
      if constexpr (!kStays) break;
    }
    const Body body = Engine::template BodyOfRow<N, kEnds>(a, walk.first, kMost);
    (WriteColumnSums<L>(a, sums, edge_sums, body), ...);
    (WriteTotals<T_>(a, totals), ...);
  }
};

template <class F, int N, int kLanes, int kPacks, int kThreads, int kMinBlocks, int kEnds, bool kStays, bool kStreams,
          bool kShared, bool kRuns>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    RowsKernel(const __grid_constant__ typename RowEngine<F>::Args a) {
  using Engine = RowEngine<F>;
  const auto run = [&](auto& room) {
    OwnedRows<F, N, kLanes, kPacks, kThreads, kEnds, kStays, kStreams, kShared, kRuns>::Run(
        a, room, typename Engine::RowIndex(), typename Engine::ResultIndex(), typename Engine::ColumnSumIndex(),
        typename Engine::TotalIndex());
  };
  constexpr int kBytes = Engine::Stages::template LargestPartial<0>();
  if constexpr (kLanes < 0 && kBytes > 0) {
    using Room = ClusterRoom<-kLanes, kThreads / kWarp, kBytes>;
    JAXKERN_SHARED(Room, room);
    run(room);
  } else {
    NoRoom room;
    run(room);
  }
}

}  // namespace jaxkern
