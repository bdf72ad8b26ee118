// Row functions of rows that are not contiguous: the row is not the last dimension of its arrays.
//
//     StridedRowsKernel<F, N, kParts, kHeld>
//
// F is as in rows.cuh. Adjacent rows lie next to each other in memory, so a thread takes N adjacent rows at a time and a warp
// takes 32 * N: a block of kParts warps computes as many rows, each warp every kParts-th element of all of them. The warps join
// what they reduced through shared memory. A thread holds its elements in registers if it has kHeld of each row at most; with
// kHeld = 0 each pass reads the rows again.
//
// Memory traffic: each row is read once, with kHeld = 0 once for each pass and mostly from L2, and each result is written once.
//
// Sums over rows: each block writes the sums of its own rows, one for each element of a row. SumOverBlocks adds
// them in order.
// On entry: rows start on N elements in every array, and the number of rows is a multiple of N.
#pragma once

#include "rows.cuh"

namespace jaxkern {

// `row_stride` and `result_stride`: between the elements of a row.
template <class F> struct StridedRowArgs {
  using Engine = RowEngine<F>;
  typename Engine::Args rows;
  int64_t row_stride[Engine::kRows + 1], result_stride[Engine::kResults + 1];
};

template <class F, int N, int kParts, int kHeld> struct StridedRows {
  using Engine = RowEngine<F>;
  using Numbers = typename Engine::Numbers;
  using Packs = typename Engine::template RowPacks<N>;
  template <int p> using Reduced = typename Engine::template Reduced<p>;
  static constexpr int kRows = Engine::kRows, kResults = Engine::kResults;
  static constexpr int kCopies = kHeld ? kHeld : 1;

  const StridedRowArgs<F>& a;
  int64_t at[kRows + 1], to[kResults + 1];
  bool live;
  ReadPolicy policy;
  Numbers n[N];
  Packs x[kCopies];
  typename F::Kept kept[kCopies][N];

  template <class... R, size_t... I>
  __device__ __forceinline__ void Load(Packs& pack, int element, Types<R...>, std::index_sequence<I...>) {
    ((At<I>(pack) =
          live ? LoadRowPack<R, N>(static_cast<const R*>(a.rows.row[I]) + at[I] + element * a.row_stride[I], policy)
               : ZeroPack<R, N>()),
     ...);
  }

  // Calls f(k, element) for each element of the rows that this thread has; k numbers those that it holds.
  template <class Do> __device__ __forceinline__ void Each(Do f) {
    const int part = threadIdx.x / kWarp, width = static_cast<int>(a.rows.width);
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        if (part + k * kParts < width) f(k, part + k * kParts);
      }
    } else {
#pragma unroll 4
      for (int element = part; element < width; element += kParts) {
        Load(x[0], element, typename F::Rows(), typename Engine::RowIndex());
        f(0, element);
      }
    }
  }

  template <int p, class... R, class... C, size_t... I, size_t... J>
  __device__ __forceinline__ void Reduce(int k, int element, Reduced<p> (&sum)[N], Types<R...>, Types<C...>,
                                         std::index_sequence<I...>, std::index_sequence<J...>) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      Reduced<p> value;
      F::Reduce(Pass<p>(), n[i], element, kept[k][i], value, WideElement(At<I>(x[k]), i)...,
                Wide<C>(static_cast<const C*>(a.rows.column[J])[element])...);
      sum[i] = F::Combine(Pass<p>(), sum[i], value);
    }
  }

  template <int p> __device__ __forceinline__ void Passes() {
    if constexpr (p < F::kPasses) {
      Reduced<p> sum[N];
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] = F::Identity(Pass<p>(), n[i]);
      Each([&](int k, int element) {
        Reduce<p>(k, element, sum, typename F::Rows(), typename F::Columns(), typename Engine::RowIndex(),
                  typename Engine::ColumnIndex());
      });
      if constexpr (kParts > 1) {
        __shared__ Reduced<p> room[kParts][N][kWarp];
        const int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int i = 0; i < N; ++i) room[threadIdx.x / kWarp][i][lane] = sum[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; ++i) {
          sum[i] = room[0][i][lane];
          for (int k = 1; k < kParts; ++k) sum[i] = F::Combine(Pass<p>(), sum[i], room[k][i][lane]);
        }
      }
#pragma unroll
      for (int i = 0; i < N; ++i) F::After(Pass<p>(), n[i], sum[i]);
      Passes<p + 1>();
    }
  }

  template <class... R, class... C, class... Y, class... S, size_t... I, size_t... J, size_t... K, size_t... L>
  __device__ __forceinline__ void Store(int k, int element, Types<R...>, Types<C...>, Types<Y...>, Types<S...>,
                                        std::index_sequence<I...>, std::index_sequence<J...>, std::index_sequence<K...>,
                                        std::index_sequence<L...>) {
    Slots<std::index_sequence<K...>, Pack<Y, N>...> y;
    Slots<std::index_sequence<L...>, S...> sum;
    ((At<K>(y) = ZeroPack<Y, N>()), ...);
    ((At<L>(sum) = 0), ...);
    Slots<std::index_sequence<K...>, Own<Y>[N]...> value;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      Slots<std::index_sequence<L...>, S...> term;
      F::Result(n[i], element, kept[k][i], WideElement(At<I>(x[k]), i)...,
                Wide<C>(static_cast<const C*>(a.rows.column[J])[element])..., At<K>(value)[i]..., At<L>(term)...);
      (StoreElement(At<K>(y), i, At<K>(value)), ...);
      ((At<L>(sum) += live ? At<L>(term) : S(0)), ...);
    }
    if (live) (StoreRowPack(static_cast<Y*>(a.rows.result[K]) + to[K] + element * a.result_stride[K], At<K>(y)), ...);
    (WriteColumnSum<L, S>(element, At<L>(sum)), ...);
  }

  // All lanes of the warp have the same element.
  template <size_t L, class S> __device__ __forceinline__ void WriteColumnSum(int element, S sum) {
    sum = ReduceLanes<kWarp>(sum, [](S p, S q) { return p + q; });
    if (threadIdx.x % kWarp == 0)
      static_cast<S*>(a.rows.sum[L])[static_cast<int64_t>(blockIdx.x) * a.rows.width + element] = sum;
  }

  template <class... T, size_t... I>
  __device__ __forceinline__ void WriteTotals(Types<T...>, std::index_sequence<I...>) {
    Slots<std::index_sequence<I...>, T...> totals;
    ((At<I>(totals) = 0), ...);
    if (live && threadIdx.x < kWarp) {
#pragma unroll
      for (int i = 0; i < N; ++i) Engine::AddTotals(n[i], totals, typename Engine::TotalIndex());
    }
    (Engine::template WriteTotal<I, kParts * kWarp>(a.rows, At<I>(totals), blockIdx.x), ...);
  }

  template <size_t... I, size_t... K>
  __device__ __forceinline__ void Run(std::index_sequence<I...>, std::index_sequence<K...>) {
    policy = MakeReadPolicy(a.rows.exceeds_l2);
    const int64_t own = (static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x % kWarp) * N;
    live = own < a.rows.rows;
    const int64_t row = live ? own : 0;
    ((at[I] = MapRow<F::RowRank(I)>(a.rows.row_map[I], row)), ...);
    ((to[K] = MapRow<F::ResultRank(K)>(a.rows.result_map[K], row)), ...);
    if constexpr (kHeld > 0) {
      Each([&](int k, int element) { Load(x[k], element, typename F::Rows(), typename Engine::RowIndex()); });
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      n[i] = Engine::Begin(a.rows, row + i, typename Engine::NumberIndex(), std::make_index_sequence<F::kIndices>());
    }
    Passes<0>();
    if constexpr (kResults + Engine::kColumnSums > 0) {
      Each([&](int k, int element) {
        Store(k, element, typename F::Rows(), typename F::Columns(), typename F::Results(), typename F::ColumnSums(),
              typename Engine::RowIndex(), typename Engine::ColumnIndex(), typename Engine::ResultIndex(),
              typename Engine::ColumnSumIndex());
      });
    }
    if constexpr (Engine::kNumberResults > 0) {
      if (live && threadIdx.x < kWarp) {
#pragma unroll
        for (int i = 0; i < N; ++i) Engine::StoreNumbers(a.rows, row + i, n[i], typename Engine::NumberResultIndex());
      }
    }
    if constexpr (Engine::kTotals > 0) WriteTotals(typename F::Totals(), typename Engine::TotalIndex());
  }
};

template <class F, int N, int kParts, int kHeld> __global__ void __launch_bounds__(kParts* kWarp)
    StridedRowsKernel(const __grid_constant__ StridedRowArgs<F> a) {
  StridedRows<F, N, kParts, kHeld> rows{a};
  rows.Run(typename RowEngine<F>::RowIndex(), typename RowEngine<F>::ResultIndex());
}

}  // namespace jaxkern
