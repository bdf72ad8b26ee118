// What all kernels of row functions share (rows.cuh, thread.cuh, split.cuh, strided.cuh): the arguments of a kernel, and how a thread
// reads its packs of a row, reduces them, and stores results and sums over rows.
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
      for (int i = 0; i < N; ++i) any |= F::Counts(Pass<k>(), n, column + i, column);
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

  // Elements at places that are known when a row begins. All threads of a row read them, so they need not be exchanged.
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

  // Calls f(k, column) for each element of the edges that this thread has.
  template <int kCount, int kGroup, class Do>
  static __device__ __forceinline__ void EachEdge(const Args& a, const Body& body, int lane, Do f) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int column = body.Edge(lane + k * kGroup);
      if (column < static_cast<int>(a.width)) f(k, column);
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

  // Writes total I of a block or cluster: `mine` of all threads of a block.
  template <size_t I, int kThreads>
  static __device__ __forceinline__ void WriteTotal(const Args& a, TotalType<I> mine, int64_t walker) {
    mine = SumOverThreads<kThreads>(mine);
    if (threadIdx.x == 0) static_cast<TotalType<I>*>(a.sum[kColumnSums + I])[walker] = mine;
  }
};

}  // namespace jaxkern
