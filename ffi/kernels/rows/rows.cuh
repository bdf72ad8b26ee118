// Row functions: functions in jnp that are elementwise along all dimensions but one, and reduce along that one.
//
//     RowsKernel<F, N, kLanes, kPacks, kThreads, kMinBlocks, kEnds, kStays, kStreams, kShared, kRuns>
//     SumOverBlocks<T, Result>
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

#include "../common/slots.h"
#include "packs.cuh"
#include "stages.cuh"
#include "sums.cuh"

namespace jaxkern {

template <class F, class Rows = typename F::Rows, class Columns = typename F::Columns,
          class Numbers = typename F::NumberOperands, class Results = typename F::Results,
          class NumberResults = typename F::NumberResults, class ColumnSums = typename F::ColumnSums,
          class Totals = typename F::Totals>
struct RowEngine;

template <class F, class... R, class... C, class... M, class... Y, class... Z, class... S, class... T>
struct RowEngine<F, Types<R...>, Types<C...>, Types<M...>, Types<Y...>, Types<Z...>, Types<S...>, Types<T...>> {
  static constexpr int kRows = sizeof...(R), kColumns = sizeof...(C), kNumbers = sizeof...(M), kResults = sizeof...(Y),
                       kNumberResults = sizeof...(Z), kColumnSums = sizeof...(S), kTotals = sizeof...(T);
  using RowIndex = std::make_index_sequence<kRows>;
  using ColumnIndex = std::make_index_sequence<kColumns>;
  using NumberIndex = std::make_index_sequence<kNumbers>;
  using ResultIndex = std::make_index_sequence<kResults>;
  using NumberResultIndex = std::make_index_sequence<kNumberResults>;
  using ColumnSumIndex = std::make_index_sequence<kColumnSums>;
  using TotalIndex = std::make_index_sequence<kTotals>;
  using Numbers = typename F::Numbers;
  using Stages = RowStages<F>;

  // row_map and so on: from the index of a row to the offset of its first element, or of its number. index_map: to its
  // place along another dimension.
  struct Args {
    const void* row[kRows + 1];
    const void* column[kColumns + 1];
    const void* number[kNumbers + 1];
    void* result[kResults + 1];
    void* number_result[kNumberResults + 1];
    void* sum[kColumnSums + kTotals + 1];  // [blocks][width] each, then [blocks] each
    IndexMap row_map[kRows + 1], number_map[kNumbers + 1], result_map[kResults + 1],
        number_result_map[kNumberResults + 1], index_map[F::kIndices + 1];
    int64_t rows, width;
    int64_t walkers;  // blocks or clusters that write sums over rows
    FastDivmod matrix_rows, run_rows;
    bool exceeds_l2;

    // The n-th row that is computed. With kRuns, kRun rows of each matrix take turns: what broadcasts over matrices is still in L2 then.
    template <bool kRuns> __device__ __forceinline__ int64_t Row(int64_t n) const {
      constexpr uint32_t kRun = 32;
      if constexpr (!kRuns) return n;
      const uint32_t i = static_cast<uint32_t>(n), run = run_rows.Div(i), in_run = i - run * run_rows.divisor;
      return static_cast<int64_t>(in_run / kRun) * matrix_rows.divisor + run * kRun + in_run % kRun;
    }
  };

  template <int N> using RowPacks = Slots<RowIndex, Pack<R, N>...>;
  template <int N> using ColumnPacks = Slots<ColumnIndex, Pack<C, N>...>;
  // N elements of each result: packs to be stored, and values before rounding. SumTerms: N values for each sum over rows.
  template <int N> using ResultPacks = Slots<ResultIndex, Pack<Y, N>...>;
  template <int N> using ResultValues = Slots<ResultIndex, Own<Y>[N]...>;
  template <int N> using SumTerms = Slots<ColumnSumIndex, S[N]...>;

  // What a thread holds of a row: packs of N elements as they were read, and the values of them that F keeps.
  template <int N, int kCount> struct Held {
    RowPacks<N> x[kCount > 0 ? kCount : 1];
    typename F::Kept kept[kCount > 0 ? kCount : 1][N];
  };

  template <int N, int kCount, class Do> static __device__ __forceinline__ void EachKept(Held<N, kCount>& held, Do f) {
#pragma unroll
    for (int e = 0; e < kCount * N; ++e) f(held.kept[e / N][e % N]);
  }

  // Whether the numbers of a row decide what of it is read. Otherwise they are computed while it is.
  static constexpr bool AnyGuarded() {
    for (int k = 0; k < kRows; ++k) {
      if (F::Guarded(k)) return true;
    }
    return false;
  }
  // Whether an element of a pack counts.
  template <int k, int N> static __device__ __forceinline__ bool Counts(const Numbers& n, int column) {
    bool any = !F::Guarded(k);
    if constexpr (F::Guarded(k)) {
#pragma unroll
      for (int i = 0; i < N; ++i) any |= F::Counts(Pass<k>(), n, column + i);
    }
    return any;
  }

  template <int N, size_t... I> static __device__ __forceinline__ void Load(const Args& a, const Numbers& n,
                                                                            const int64_t (&at)[kRows + 1], int column,
                                                                            RowPacks<N>& x, ReadPolicy policy,
                                                                            std::index_sequence<I...>) {
    ((At<I>(x) = Counts<I, N>(n, column) ? LoadRowPack<R, N>(static_cast<const R*>(a.row[I]) + at[I] + column, policy)
                                         : ZeroPack<R, N>()),
     ...);
  }
  template <int N, int kEnds, size_t... I>
  static __device__ __forceinline__ void LoadColumns(const Args& a, int column, ColumnPacks<N>& c,
                                                     std::index_sequence<I...>) {
    const int width = static_cast<int>(a.width);
    ((At<I>(c) = LoadColumnPack<C, N, kEnds>(static_cast<const C*>(a.column[I]), column, width)), ...);
  }

  // A thread that holds many elements has no registers for what it computed of them in an earlier stage.
  template <int N, int kPacks> static constexpr bool kForgets = N * kPacks * kRows > 32;
  template <class Packs, size_t... I>
  static __device__ __forceinline__ void ForgetAll(Packs& x, std::index_sequence<I...>) {
    (Forget(At<I>(x)), ...);
  }

  template <int p> using Reduced = typename Stages::template Reduced<p>;
  template <int s> using Partial = typename Stages::template Partial<s>;

  // Reduces a pack into `sum`, if `has`.
  template <int p, int kEnds, bool kSearch, int N, size_t... I, size_t... J>
  static __device__ __forceinline__ void ReducePack(const Args& a, const Numbers& n, int column, const RowPacks<N>& x,
                                                    typename F::Kept (&kept)[N], Reduced<p>& sum, bool has,
                                                    std::index_sequence<I...>, std::index_sequence<J...> columns) {
    ColumnPacks<N> c;
    LoadColumns<N, kEnds>(a, column, c, columns);
    typename Stages::template Value<p> value[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      F::Reduce(Pass<p>(), n, column + i, column, kept[i], value[i], WideElement(At<I>(x), i)...,
                WideElement(At<J>(c), i)...);
      if constexpr (kSearch && p == 0 && Stages::kPicks > 0)
        F::Pick(n, column + i, column, value[i], WideElement(At<I>(x), i)..., WideElement(At<J>(c), i)...);
    }
    Reduced<p> all = sum;
    Stages::template Add<p>(all, Fold(value, typename Stages::template CombineReduced<p>()));
    sum = has ? all : sum;
  }

  // Elements at places that are known when a row begins. All threads of a row read them, so they need not be exchanged. Lanes that hold
  // whole packs of more than 4 elements search the row instead [smoothed loss, bfloat16 2^20 x 128: 104 us, 116 with a load; float32: 227
  // and 184; H100].
  template <int N, int kLanes, int kEnds> static constexpr bool kSearches = kLanes > 0 && N > 4 && kEnds == kWhole;
  using Picked = RowPacks<1>[Stages::kPicks > 0 ? Stages::kPicks : 1];
  template <class Do> static __device__ __forceinline__ void EachPick(const Args& a, const Numbers& n, Do f) {
    if constexpr (Stages::kPicks > 0) {
#pragma unroll
      for (int k = 0; k < Stages::kPicks; ++k) {
        const int column = F::Place(n, k);
        if (column >= 0 && column < static_cast<int>(a.width)) f(k, column);
      }
    }
  }
  template <size_t... I, size_t... J>
  static __device__ __forceinline__ void AddPicked(const Args& a, const Numbers& n, const Picked& picked,
                                                   Reduced<0>& sum, std::index_sequence<I...>,
                                                   std::index_sequence<J...> columns) {
    EachPick(a, n, [&](int k, int column) {
      ColumnPacks<1> c;
      LoadColumns<1, kRagged>(a, column, c, columns);
      F::Pick(n, column, column, sum, WideElement(At<I>(picked[k]), 0)..., WideElement(At<J>(c), 0)...);
    });
  }
  // Adds them to what the threads of a row have reduced in stage s.
  template <int s> static __device__ __forceinline__ void AddPicks(const Args& a, const Numbers& n,
                                                                   const Picked& picked, Partial<s>& sum) {
    if constexpr (s == 0 && Stages::kPicks > 0) {
      if constexpr (F::Pivots(s)) AddPicked(a, n, picked, sum.most, RowIndex(), ColumnIndex());
      else AddPicked(a, n, picked, sum, RowIndex(), ColumnIndex());
    }
  }

  // Reduces the packs of a thread into `sum` in a pass. each(pass, f): calls f(column, pack, kept values) for all of them.
  template <int p, int kEnds, bool kSearch = false, class Each>
  static __device__ __forceinline__ void ReduceAll(const Args& a, const Numbers& n, Reduced<p>& sum, Each each) {
    const auto reduce = [&](int column, const auto& x, auto& kept, bool has = true) {
      ReducePack<p, kEnds, kSearch>(a, n, column, x, kept, sum, has, RowIndex(), ColumnIndex());
    };
    each(Pass<p>(), reduce);
  }
  // The same in a stage. Exponents are relative to the largest element of this thread.
  template <int s, int kEnds, class Each>
  static __device__ __forceinline__ void ReduceStage(const Args& a, const Numbers& n, Partial<s>& sum, Each each) {
    constexpr int kFirst = F::FirstPass(s), kLast = F::LastPass(s);
    if constexpr (F::Pivots(s)) {
      Partial<s> own = Stages::template Identity<s>(n);
      ReduceAll<kFirst, kEnds>(a, n, own.most, each);
      Numbers near = n;
      F::Pivot(Pass<s>(), near) = PivotOf(own.most.v0);
      // Always true. Without a branch the compiler keeps what it unpacked in the first pass, and spills.
      if (a.width > 0) ReduceAll<kLast, kEnds>(a, near, own.sum, each);
      sum = typename Stages::template Combine<s>()(sum, own);
    } else {
      ReduceAll<kFirst, kEnds>(a, n, sum, each);
    }
  }

  // Packs of a sector, where threads count from one; else 1.
  template <int N, int kEnds> static constexpr int SectorPacks() {
    if (!OfSectors(kEnds)) return 1;
    int least = 8;
    for (const int bytes : {8, static_cast<int>(sizeof(R))..., static_cast<int>(sizeof(Y))...}) {
      if (bytes < least) least = bytes;
    }
    return kSectorBytes / (N * least);
  }
  template <int N, int kEnds> static __device__ __forceinline__ Body BodyOfRow(const Args& a, int64_t row, int most) {
    return BodyOf<N, kEnds, SectorPacks<N, kEnds>()>(row, a.width, most);
  }

  // Calls f(i, column) for each pack of this thread in a tile of the row, which begins at `begin`. Only the first pack of the row's
  // first threads and the last pack of a thread may be absent, unless the row is cut into tiles.
  template <int N, int kGroup, int kPacks, int kEnds, bool kTiles, class Do>
  static __device__ __forceinline__ void EachPack(const Body& body, int lane, int begin, Do f) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int column = begin + (lane + i * kGroup) * N;
      const bool begun = SectorPacks<N, kEnds>() == 1 || i > 0 || column >= body.begin;
      if (begun && (kEnds == kWhole || (!kTiles && i < kPacks - 1) || column < body.end)) f(i, column);
    }
  }

  // Calls f(i, column, has) for each pack that this thread holds. Where the last one is absent, `column` is that of the first: loads
  // and reductions have no branch, because the compiler would load the pack there, after it waited for those before. Functions of
  // several rows that keep values, or sum over rows, have a branch: they have no registers left [gradient of soft cap, bfloat16
  // 10872 x 12345: 378 us, 432 without; layer scale, residual and norm, gradient, float32: 960 and 985; H100].
  template <int N, int kGroup, int kPacks, int kEnds, class Do>
  static __device__ __forceinline__ void EachHeld(const Body& body, int lane, Do f) {
    constexpr bool kStays = kColumnSums + kTotals > 0, kKeeps = !__is_empty(typename F::Kept);
    constexpr bool kAlways = kPacks > 1 && !kStays && !OfSectors(kEnds) && (kRows == 1 || !kKeeps);
    constexpr int kEvery = kAlways ? kWhole : kEnds;
    EachPack<N, kGroup, kPacks, kEvery, false>(body, lane, body.first, [&](int i, int column) {
      const bool has = kEvery == kEnds || i < kPacks - 1 || column < body.end;
      f(i, has ? column : body.first + lane * N, has);
    });
  }

  // Calls f(k, column) for each element of the edges that this thread has.
  template <int kCount, int kGroup, class Do>
  static __device__ __forceinline__ void EachEdge(const Args& a, const Body& body, int lane, Do f) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int column = body.Edge(lane + k * kGroup);
      if (column < static_cast<int>(a.width)) f(k, column);
    }
  }

  template <int s, int N, int kLanes, int kPacks, int kThreads, int kEnds, bool kStreams, int kEdge, class Room>
  static __device__ __forceinline__ void RunStages(const Args& a, const int64_t (&at)[kRows + 1], int lane,
                                                   const Body& body, Numbers& n, Held<N, kPacks>& packs,
                                                   Held<1, kEdge>& edges, const Picked& picked, ReadPolicy policy,
                                                   uint32_t turn, Room& cluster) {
    if constexpr (s < F::kStages) {
      constexpr int kGroup = Owners<kLanes, kThreads>::kGroup;
      const auto each = [&](int tile, auto pass, auto f) {
        const auto of_pack = [&](int i, int column, bool has) {
          if constexpr (decltype(pass)::value > 0 && kForgets<N, kPacks>) ForgetAll(packs.x[i], RowIndex());
          f(column, packs.x[i], packs.kept[i], has);
        };
        if constexpr (kStreams) {
          EachPack<N, kGroup, kPacks, kEnds, true>(body, lane, tile,
                                                   [&](int i, int column) { of_pack(i, column, true); });
        } else {
          EachHeld<N, kGroup, kPacks, kEnds>(body, lane, of_pack);
        }
        if (!kStreams || tile == body.first) {
          EachEdge<kEdge, kGroup>(a, body, lane, [&](int k, int column) { f(column, edges.x[k], edges.kept[k]); });
        }
      };
      if constexpr (kLanes > 0) {  // lanes exchange numbers at no cost
        const auto reduce = [&](auto pass) {
          constexpr int p = decltype(pass)::value;
          constexpr bool kSearch = kSearches<N, kLanes, kEnds>;
          Reduced<p> sum = F::Identity(pass, n);
          ReduceAll<p, kEnds, kSearch>(a, n, sum, [&](auto pass, auto f) { each(body.first, pass, f); });
          sum = JoinLanes<kLanes>(sum, typename Stages::template CombineReduced<p>());
          if constexpr (p == 0 && Stages::kPicks > 0 && !kSearch)
            AddPicked(a, n, picked, sum, RowIndex(), ColumnIndex());
          F::After(pass, n, sum);
        };
        reduce(Pass<F::FirstPass(s)>());
        if constexpr (F::Pivots(s)) reduce(Pass<F::LastPass(s)>());
      } else {
        Partial<s> sum = Stages::template Identity<s>(n);
        const auto reduce = [&](int tile, Partial<s>& sum) {
          ReduceStage<s, kEnds>(a, n, sum, [&](auto pass, auto f) { each(tile, pass, f); });
        };
        if constexpr (kStreams) {
          TileRuns<F, s> runs(n);
          for (int tile = body.first; tile < body.TilesEnd(); tile += kGroup * kPacks * N) {
            EachPack<N, kGroup, kPacks, kEnds, kStreams>(body, lane, tile, [&](int i, int column) {
              Load<N>(a, n, at, column, packs.x[i], policy, RowIndex());
            });
            reduce(tile, runs.run);
            runs.EndTile();
          }
          sum = runs.Total();
        } else {
          reduce(body.first, sum);
        }
        const Partial<s> own = sum;
        Stages::template Join<s, kLanes, kThreads>(sum, turn, cluster);
        AddPicks<s>(a, n, picked, sum);
        Stages::template After<s>(n, sum);
        if constexpr (F::Pivots(s) && !kStreams) {
          Stages::template RescaleKept<s>(own.most.v0, n, [&](auto f) {
            EachKept(packs, f);
            EachKept(edges, f);
          });
        }
      }
      RunStages<s + 1, N, kLanes, kPacks, kThreads, kEnds, kStreams>(a, at, lane, body, n, packs, edges, picked, policy,
                                                                     turn, cluster);
    }
  }

  template <int N, int kPacks, int kThreads, bool kShared> using Sums =
      std::conditional_t<kShared, SharedSums<N, kPacks, kThreads, S...>, RegisterSums<N, kPacks, S...>>;
  template <int N, int kCount> using SumsOf = RegisterSums<N, (kCount > 0 ? kCount : 1), S...>;
  using TotalSlots = Slots<TotalIndex, T...>;
  template <size_t I> using RowType = typename TypeAt<I, R..., void>::type;
  template <size_t K> using ResultType = typename TypeAt<K, Y..., void>::type;
  template <size_t L> using SumType = typename TypeAt<L, S..., void>::type;
  template <size_t I> using TotalType = typename TypeAt<I, T..., void>::type;

  // Computes the results of a pack, stores those that are rows and adds the others to `sums`.
  template <int N, int kEnds, class AnySums, size_t... I, size_t... J, size_t... K, size_t... L>
  static __device__ __forceinline__ void StorePackOf(const Args& a, const Numbers& n, bool live, int number, int column,
                                                     const int64_t (&to)[kResults + 1], const RowPacks<N>& x,
                                                     const typename F::Kept (&kept)[N], AnySums& sums,
                                                     std::index_sequence<I...>, std::index_sequence<J...> columns,
                                                     std::index_sequence<K...>, std::index_sequence<L...>) {
    ColumnPacks<N> c;
    LoadColumns<N, kEnds>(a, column, c, columns);
    ResultPacks<N> y;
    ((At<K>(y) = ZeroPack<Y, N>()), ...);
    SumTerms<N> term;
    ResultValues<N> value;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      F::Result(n, column + i, column, kept[i], WideElement(At<I>(x), i)..., WideElement(At<J>(c), i)...,
                At<K>(value)[i]..., At<L>(term)[i]...);
      (StoreElement(At<K>(y), i, At<K>(value)), ...);
    }
    if (!live) return;
    (sums.template Add<L>(number, At<L>(term)), ...);
    (StoreRowPack(static_cast<Y*>(a.result[K]) + to[K] + column, At<K>(y)), ...);
  }

  template <size_t... I, size_t... J> static __device__ __forceinline__ Numbers Begin(const Args& a, int64_t row,
                                                                                      std::index_sequence<I...>,
                                                                                      std::index_sequence<J...>) {
    Numbers n;
    F::Begin(n, static_cast<int32_t>(MapRow<F::IndexRank(J)>(a.index_map[J], row))...,
             Wide<M>(static_cast<const M*>(a.number[I])[MapRow<F::NumberRank(I)>(a.number_map[I], row)])...);
    return n;
  }

  template <size_t... I> static __device__ __forceinline__ void StoreNumbers(const Args& a, int64_t row,
                                                                             const Numbers& n,
                                                                             std::index_sequence<I...>) {
    Slots<NumberResultIndex, Own<Z>...> value;
    F::NumberResult(n, At<I>(value)...);
    ((static_cast<Z*>(a.number_result[I])[MapRow<F::NumberResultRank(I)>(a.number_result_map[I], row)] =
          Stored<Z>(At<I>(value))),
     ...);
  }

  template <size_t... I> static __device__ __forceinline__ void AddTotals(const Numbers& n,
                                                                          Slots<TotalIndex, T...>& totals,
                                                                          std::index_sequence<I...>) {
    Slots<TotalIndex, T...> value;
    F::Total(n, At<I>(value)...);
    ((At<I>(totals) += At<I>(value)), ...);
  }

  // The rows of a walker: `first`, then every step-th. Where rows begin in the middle of packs and columns are summed, the rows of
  // a walker all begin at the same place of a pack, so that a thread always has the same columns: those that are a multiple of N
  // apart. There are N walkers or more then, or a walker for each row.
  template <int N, int kEnds> struct Walk {
    int64_t first, step;
    __device__ __forceinline__ Walk(int64_t walker, int64_t walkers) : first(walker), step(walkers) {
      if constexpr (IsRagged(kEnds) && kColumnSums > 0) {
        step = N * ((walkers - walker % N + N - 1) / N);
      }
    }
  };

  // Writes the sums L of N columns of a block or cluster. They are the sums of the thread's pack i.
  template <size_t L, int N, class AnySums>
  static __device__ __forceinline__ void WriteSums(const Args& a, AnySums& sums, int i, int column, int64_t walker) {
    SumType<L> own[N];
    sums.template Read<L>(i, own);
#pragma unroll
    for (int j = 0; j < N; ++j) static_cast<SumType<L>*>(a.sum[L])[walker * a.width + column + j] = own[j];
  }

  // Writes the sums of column sum L of a block or cluster. Of a cluster, each block writes its own columns. Where rows belong to
  // lanes, the block adds up the sums of all its rows first.
  // body: of all rows of this block or cluster.
  template <size_t L, int N, int kLanes, int kPacks, int kThreads, int kEnds, int kEdge, class AnySums>
  static __device__ __forceinline__ void WriteColumnSums(const Args& a, AnySums& sums, SumsOf<1, kEdge>& edge_sums,
                                                         const Body& body) {
    using Own = Owners<kLanes, kThreads>;
    const int lane = Own::Lane();
    if constexpr (Own::kGroups == 1) {
      EachPack<N, Own::kGroup, kPacks, kEnds, false>(
          body, lane, body.first, [&](int i, int column) { WriteSums<L, N>(a, sums, i, column, Own::Walker()); });
      EachEdge<kEdge, Own::kGroup>(a, body, lane,
                                   [&](int k, int column) { WriteSums<L, 1>(a, edge_sums, k, column, Own::Walker()); });
      ClearMissing(static_cast<SumType<L>*>(a.sum[L]), a.width, a.walkers, Own());
    } else {
      constexpr int kRow = Own::kGroup * kPacks * N;
      __shared__ SumType<L> room[Own::kGroups * kRow];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        SumType<L> own[N];
        sums.template Read<L>(i, own);
#pragma unroll
        for (int j = 0; j < N; ++j) room[Own::Group() * kRow + (lane + i * Own::kGroup) * N + j] = own[j];
      }
      __syncthreads();
      for (int c = threadIdx.x; c < a.width; c += kThreads) {
        SumType<L> sum = 0;
        for (int g = 0; g < Own::kGroups; ++g) sum += room[g * kRow + c];
        static_cast<SumType<L>*>(a.sum[L])[Own::Walker() * a.width + c] = sum;
      }
      __syncthreads();
    }
  }

  // Writes total I of a block or cluster: `mine` of all threads of a block.
  template <size_t I, int kThreads>
  static __device__ __forceinline__ void WriteTotal(const Args& a, TotalType<I> mine, int64_t walker) {
    mine = SumOverThreads<kThreads>(mine);
    if (threadIdx.x == 0) static_cast<TotalType<I>*>(a.sum[kColumnSums + I])[walker] = mine;
  }
  template <size_t I, int kThreads, class Own>
  static __device__ __forceinline__ void WriteTotals(const Args& a, const TotalSlots& totals) {
    if constexpr (Own::kBlocks > 1) {  // the first thread of a cluster has the totals
      TotalType<I>* const out = static_cast<TotalType<I>*>(a.sum[kColumnSums + I]);
      if (Own::Lane() == 0) out[Own::Walker()] = At<I>(totals);
      ClearMissing(out, 1, a.walkers, Own());
    } else {
      WriteTotal<I, kThreads>(a, At<I>(totals), Own::Walker());
    }
  }

  // Starts to read the part of a row that the block will load next.
  template <int N, int kGroup, int kPacks, int kThreads, size_t... I>
  static __device__ __forceinline__ void Prefetch(const Args& a, int64_t row, int lane, ReadPolicy policy,
                                                  std::index_sequence<I...>) {
    const int first = (lane - static_cast<int>(threadIdx.x) + static_cast<int>(threadIdx.x) * kGroup) * N;
    if (threadIdx.x >= kPacks) return;
    const int elements = min(kThreads * N, static_cast<int>(a.width) - first);
    if (elements <= 0) return;
    (PrefetchL2(static_cast<const R*>(a.row[I]) + MapRow<F::RowRank(I)>(a.row_map[I], row) + first,
                elements * static_cast<int>(sizeof(R)), policy),
     ...);
  }

  template <int N, int kLanes, int kPacks, int kThreads, int kEnds, bool kStays, bool kStreams, bool kShared,
            bool kRuns, class Room, size_t... I, size_t... K, size_t... L, size_t... T_>
  static __device__ __forceinline__ void Run(const Args& a, Room& cluster, std::index_sequence<I...>,
                                             std::index_sequence<K...>, std::index_sequence<L...>,
                                             std::index_sequence<T_...>) {
    using Own = Owners<kLanes, kThreads>;
    constexpr int kGroup = Own::kGroup, kGroups = Own::kGroups;
    const int lane = Own::Lane(), group = Own::Group();
    cluster.Init();
    const ReadPolicy policy = MakeReadPolicy(a.exceeds_l2);
    constexpr int kEdge = kEdges<N, kGroup, kEnds>, kMost = kStreams ? 1 << 30 : kGroup * kPacks;
    Sums<N, kPacks, kThreads, kShared> sums;
    SumsOf<1, kEdge> edge_sums;
    sums.Clear();
    edge_sums.Clear();
    TotalSlots totals;
    ((At<T_>(totals) = 0), ...);
    uint32_t turn = 0;
    using RowWalk = Walk<N, kEnds>;
    const RowWalk walk(Own::Walker(), Own::Walkers());
    for (int64_t first = walk.first * kGroups; first < a.rows; first += walk.step * kGroups, ++turn) {
      const bool live = first + group < a.rows;
      const int64_t row = a.template Row<kRuns>(live ? first + group : a.rows - 1);
      const int64_t at[kRows + 1] = {MapRow<F::RowRank(I)>(a.row_map[I], row)..., 0},
                               to[kResults + 1] = {MapRow<F::ResultRank(K)>(a.result_map[K], row)..., 0};
      const Body body = BodyOfRow<N, kEnds>(a, row, kMost);
      Held<N, kPacks> packs;
      Held<1, kEdge> edges;
      Numbers n;
      if constexpr (AnyGuarded()) n = Begin(a, row, NumberIndex(), std::make_index_sequence<F::kIndices>());
      EachEdge<kEdge, kGroup>(a, body, lane,
                              [&](int k, int column) { Load<1>(a, n, at, column, edges.x[k], policy, RowIndex()); });
      if constexpr (!kStreams) {
        EachHeld<N, kGroup, kPacks, kEnds>(
            body, lane, [&](int i, int column, bool) { Load<N>(a, n, at, column, packs.x[i], policy, RowIndex()); });
        if constexpr (kStays && kLanes < 0) {
          const int64_t next = first + walk.step;
          if (next < a.rows)
            Prefetch<N, kGroup, kPacks, kThreads>(a, a.template Row<kRuns>(next), lane, policy, RowIndex());
        }
      }
      if (turn == 0) cluster.Ready();
      if constexpr (!AnyGuarded()) n = Begin(a, row, NumberIndex(), std::make_index_sequence<F::kIndices>());
      Picked picked;
      if constexpr (!kSearches<N, kLanes, kEnds>)
        EachPick(a, n, [&](int k, int column) { Load<1>(a, n, at, column, picked[k], policy, RowIndex()); });
      RunStages<0, N, kLanes, kPacks, kThreads, kEnds, kStreams>(a, at, lane, body, n, packs, edges, picked, policy,
                                                                 turn, cluster);
      if constexpr (kResults + kColumnSums > 0) {
        for (int tile = body.first; tile < (kStreams ? body.TilesEnd() : body.first + 1); tile += kGroup * kPacks * N) {
          if constexpr (kStreams) {
            EachPack<N, kGroup, kPacks, kEnds, kStreams>(body, lane, tile, [&](int i, int column) {
              Load<N>(a, n, at, column, packs.x[i], policy, RowIndex());
            });
          }
          EachPack<N, kGroup, kPacks, kEnds, kStreams>(body, lane, tile, [&](int i, int column) {
            if constexpr (F::kStages > 0 && kForgets<N, kPacks>) ForgetAll(packs.x[i], RowIndex());
            StorePackOf<N, kEnds>(a, n, live, i, column, to, packs.x[i], packs.kept[i], sums, RowIndex(), ColumnIndex(),
                                  ResultIndex(), ColumnSumIndex());
          });
        }
        EachEdge<kEdge, kGroup>(a, body, lane, [&](int k, int column) {
          StorePackOf<1, kEnds>(a, n, live, k, column, to, edges.x[k], edges.kept[k], edge_sums, RowIndex(),
                                ColumnIndex(), ResultIndex(), ColumnSumIndex());
        });
      }
      if (live && lane == 0) {
        if constexpr (kNumberResults > 0) StoreNumbers(a, row, n, NumberResultIndex());
        if constexpr (kTotals > 0) AddTotals(n, totals, TotalIndex());
      }
      if constexpr (!kStays) break;
    }
    const Body body = BodyOfRow<N, kEnds>(a, walk.first, kMost);
    (WriteColumnSums<L, N, kLanes, kPacks, kThreads, kEnds, kEdge>(a, sums, edge_sums, body), ...);
    (WriteTotals<T_, kThreads, Own>(a, totals), ...);
  }
};

template <class F, int N, int kLanes, int kPacks, int kThreads, int kMinBlocks, int kEnds, bool kStays, bool kStreams,
          bool kShared, bool kRuns>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    RowsKernel(const __grid_constant__ typename RowEngine<F>::Args a) {
  using Engine = RowEngine<F>;
  const auto run = [&](auto& room) {
    Engine::template Run<N, kLanes, kPacks, kThreads, kEnds, kStays, kStreams, kShared, kRuns>(
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
