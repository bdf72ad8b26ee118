// Row functions: functions in jnp that are elementwise along all dimensions but one, and reduce along that one.
//
//     RowsKernel<F, N, kLanes, kPacks, kThreads, kMinBlocks, kEnds, kStays, kStreams>
//     SumOverBlocks<T, Result>
//
// F is generated from a jaxpr (jaxkern/_engines/rows/generate.py) and computes one element at a time; the kernel owns memory,
// threads and barriers. A row is read in packs of N elements. kLanes selects the threads that hold a row: 1 to 32 lanes of a
// warp, or, if 0, a block of kThreads threads. Thread t of the n threads of a row holds packs t, t + n, and so on, kPacks of them.
// All loads are issued before the first use.
//
// F works in stages. Each stage reduces values that F computes from the elements of the row, its columns and its numbers, and
// then computes more numbers from the results. Nothing but packs as they were read and numbers lives from one stage to the
// next: values of elements are computed again, but for those that F keeps. Columns are read again in each stage; they lie
// in L1.
//
// Memory traffic: each row is read once and each result is written once. With kStreams a row is longer than the packs of its
// threads; each stage reads it again, mostly from L2.
//
// kEnds says how rows end: kWhole, the packs of all threads fill a row exactly; kPart, some packs are absent; kRagged, rows
// start and end in the middle of 16-byte vectors: packs are aligned in memory, and the first and the last of a row are read and
// written element by element.
//
// With kStays, blocks stay for many rows, a multiple of the grid's apart, and add up sums over rows: of elements, which give
// one number for each column, and of numbers. Each block writes its sums, and SumOverBlocks adds them in the order of the blocks,
// so results have the same bits in every run on one GPU.
#pragma once

#include "../common/broadcast.h"
#include "../common/functions.h"
#include "../common/pack.cuh"
#include "../common/reduce.cuh"
#include "../common/slots.h"

namespace jaxkern {

// The offset of a row. kRank: the number of groups of dimensions of the map.
template <int kRank> __device__ __forceinline__ int64_t MapRow(const IndexMap& map, int64_t row) {
  if constexpr (kRank == 0) return 0;
  else if constexpr (kRank == 1) return row * map.stride[0];
  else return map(row);
}

template <int s> using Stage = std::integral_constant<int, s>;

enum RowEnds { kWhole, kPart, kRagged };

// --- Packs of any type

template <class T> constexpr int kPieces = 16 / static_cast<int>(sizeof(T));

template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadRowPack(const T* p, ReadPolicy policy) {
  if constexpr (N * sizeof(T) > 16) {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N / kPieces<T>; ++i) {
      const Pack<T, kPieces<T>> piece = LoadVector<T, kPieces<T>>(p + i * kPieces<T>, policy);
#pragma unroll
      for (int w = 0; w < 4; ++w) pack.word[4 * i + w] = piece.word[w];
    }
    return pack;
  } else {
    return LoadVector<T, N>(p, policy);
  }
}

// Columns: through L1.
template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadColumnPack(const T* p) {
  if constexpr (N * sizeof(T) > 16) {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N / kPieces<T>; ++i) {
      const Pack<T, kPieces<T>> piece = LoadVector<T, kPieces<T>>(p + i * kPieces<T>);
#pragma unroll
      for (int w = 0; w < 4; ++w) pack.word[4 * i + w] = piece.word[w];
    }
    return pack;
  } else {
    return LoadVector<T, N>(p);
  }
}

template <class T, int N> __device__ __forceinline__ void StoreRowPack(T* p, const Pack<T, N>& pack) {
  if constexpr (N * sizeof(T) > 16) {
#pragma unroll
    for (int i = 0; i < N / kPieces<T>; ++i) {
      Pack<T, kPieces<T>> piece;
#pragma unroll
      for (int w = 0; w < 4; ++w) piece.word[w] = pack.word[4 * i + w];
      StoreVector<T, kPieces<T>>(p + i * kPieces<T>, piece);
    }
  } else {
    StoreVector<T, N>(p, pack);
  }
}

// Exchanges the words of a struct between lanes.
template <class P> __device__ __forceinline__ P FromLane(const P& mine, int distance) {
  static_assert(sizeof(P) % 4 == 0, "");
  constexpr int kWords = sizeof(P) / 4;
  uint32_t words[kWords];
  memcpy(words, &mine, sizeof mine);
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = __shfl_xor_sync(0xffffffffu, words[w], distance);
  P other;
  memcpy(&other, words, sizeof other);
  return other;
}

// --- The kernel

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
    bool exceeds_l2;
  };

  template <int N> using RowPacks = Slots<RowIndex, Pack<R, N>...>;
  template <int N> using ColumnPacks = Slots<ColumnIndex, Pack<C, N>...>;

  // The packs of a row at `column`. `first`, `size`: of the elements in the row. kEnds: see above.
  template <int N, int kEnds, size_t... I>
  static __device__ __forceinline__ void Load(const Args& a, const int64_t (&at)[kRows + 1], int64_t column,
                                              RowPacks<N>& x, ReadPolicy policy, std::index_sequence<I...>) {
    const bool inside = kEnds != kRagged || (column >= 0 && column + N <= a.width);
    if (inside) {
      ((At<I>(x) = LoadRowPack<R, N>(static_cast<const R*>(a.row[I]) + at[I] + column, policy)), ...);
    } else {
      ((At<I>(x) = Elements<R, N>(static_cast<const R*>(a.row[I]) + at[I], column, a.width)), ...);
    }
  }
  template <class E, int N>
  static __device__ __forceinline__ Pack<E, N> Elements(const E* p, int64_t column, int64_t width) {
    Pack<E, N> pack = ZeroPack<E, N>();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (column + i >= 0 && column + i < width) SetElement(pack, i, p[column + i]);
    }
    return pack;
  }
  template <int N, int kEnds, size_t... I>
  static __device__ __forceinline__ void LoadColumns(const Args& a, int64_t column, ColumnPacks<N>& c,
                                                     std::index_sequence<I...>) {
    if constexpr (kEnds == kRagged) {
      ((At<I>(c) = Elements<C, N>(static_cast<const C*>(a.column[I]), column, a.width)), ...);
    } else {
      ((At<I>(c) = LoadColumnPack<C, N>(static_cast<const C*>(a.column[I]) + column)), ...);
    }
  }

  // A thread that holds many elements has no registers for what it computed of them in an earlier stage.
  template <int N, int kPacks> static constexpr bool kForgets = N * kPacks * kRows > 32;
  template <class Packs, size_t... I>
  static __device__ __forceinline__ void ForgetAll(Packs& x, std::index_sequence<I...>) {
    (Forget(At<I>(x)), ...);
  }

  template <int s> using Partial = decltype(F::Identity(Stage<s>(), std::declval<const Numbers&>()));

  // Reduces a pack into `sum`.
  template <int s, int N, int kEnds, size_t... I, size_t... J>
  static __device__ __forceinline__ void ReducePack(const Args& a, const Numbers& n, int64_t column,
                                                    const RowPacks<N>& x, typename F::Kept (&kept)[N], Partial<s>& sum,
                                                    std::index_sequence<I...>, std::index_sequence<J...> columns) {
    ColumnPacks<N> c;
    LoadColumns<N, kEnds>(a, column, c, columns);
    const auto combine = [](const Partial<s>& p, const Partial<s>& q) { return F::Combine(Stage<s>(), p, q); };
    Partial<s> value[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      F::Reduce(Stage<s>(), n, static_cast<int32_t>(column) + i, kept[i], value[i], Wide<R>(Element(At<I>(x), i))...,
                Wide<C>(Element(At<J>(c), i))...);
      if (kEnds == kRagged && !(column + i >= 0 && column + i < a.width)) value[i] = F::Identity(Stage<s>(), n);
    }
    sum = combine(sum, Fold(value, combine));
  }

  // Combines over the threads of a row.
  template <int s, int kLanes, int kThreads> static __device__ __forceinline__ void Join(Partial<s>& sum, int turn) {
    constexpr int kGroup = kLanes ? kLanes : kWarp, kWarps = kThreads / kWarp;
#pragma unroll
    for (int d = kGroup / 2; d > 0; d /= 2) sum = F::Combine(Stage<s>(), sum, FromLane(sum, d));
    if constexpr (!kLanes && kWarps > 1) {
      __shared__ Partial<s> room[2][kWarps];
      if (threadIdx.x % kWarp == 0) room[turn][threadIdx.x / kWarp] = sum;
      __syncthreads();
      sum = room[turn][threadIdx.x % kWarps];
#pragma unroll
      for (int d = kWarps / 2; d > 0; d /= 2) sum = F::Combine(Stage<s>(), sum, FromLane(sum, d));
    }
  }

  // Calls f(i, column) for each pack of this thread in a tile of the row.
  template <int N, int kGroup, int kPacks, int kEnds, class Do>
  static __device__ __forceinline__ void EachPack(const Args& a, int lane, int64_t begin, Do f) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int64_t column = begin + static_cast<int64_t>(lane + i * kGroup) * N;
      if (kEnds == kWhole || column < a.width) f(i, column);
    }
  }

  template <int s, int N, int kLanes, int kPacks, int kThreads, int kEnds, bool kStreams>
  static __device__ __forceinline__ void Stages(const Args& a, const int64_t (&at)[kRows + 1], int lane, int64_t begin,
                                                Numbers& n, RowPacks<N> (&x)[kPacks],
                                                typename F::Kept (&kept)[kPacks][N], ReadPolicy policy, int turn) {
    if constexpr (s < F::kStages) {
      constexpr int kGroup = kLanes ? kLanes : kThreads;
      Partial<s> sum = F::Identity(Stage<s>(), n);
      for (int64_t tile = begin; tile < (kStreams ? a.width : begin + 1); tile += kGroup * kPacks * N) {
        if constexpr (kStreams) {
          EachPack<N, kGroup, kPacks, kEnds>(
              a, lane, tile, [&](int i, int64_t column) { Load<N, kEnds>(a, at, column, x[i], policy, RowIndex()); });
        }
        EachPack<N, kGroup, kPacks, kEnds>(a, lane, tile, [&](int i, int64_t column) {
          if constexpr (s > 0 && kForgets<N, kPacks>) ForgetAll(x[i], RowIndex());
          ReducePack<s, N, kEnds>(a, n, column, x[i], kept[i], sum, RowIndex(), ColumnIndex());
        });
      }
      Join<s, kLanes, kThreads>(sum, turn);
      F::After(Stage<s>(), n, sum);
      Stages<s + 1, N, kLanes, kPacks, kThreads, kEnds, kStreams>(a, at, lane, begin, n, x, kept, policy, turn);
    }
  }

  template <int N> struct Sums {
    Slots<ColumnSumIndex, S[N]...> of_columns;
  };

  // Computes the results of a pack, stores those that are rows and adds the others to `sums`.
  template <int N, int kEnds, size_t... I, size_t... J, size_t... K, size_t... L>
  static __device__ __forceinline__ void StorePackOf(const Args& a, const Numbers& n, bool live, int64_t column,
                                                     const int64_t (&to)[kResults + 1], const RowPacks<N>& x,
                                                     const typename F::Kept (&kept)[N], Sums<N>& sums,
                                                     std::index_sequence<I...>, std::index_sequence<J...> columns,
                                                     std::index_sequence<K...>, std::index_sequence<L...>) {
    ColumnPacks<N> c;
    LoadColumns<N, kEnds>(a, column, c, columns);
    Slots<ResultIndex, Pack<Y, N>...> y;
    ((At<K>(y) = ZeroPack<Y, N>()), ...);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      Slots<ResultIndex, Own<Y>...> value;
      Slots<ColumnSumIndex, S...> term;
      F::Result(n, static_cast<int32_t>(column) + i, kept[i], Wide<R>(Element(At<I>(x), i))...,
                Wide<C>(Element(At<J>(c), i))..., At<K>(value)..., At<L>(term)...);
      (SetElement(At<K>(y), i, Stored<Y>(At<K>(value))), ...);
      ((At<L>(sums.of_columns)[i] += live ? At<L>(term) : S(0)), ...);
    }
    if (!live) return;
    if (kEnds != kRagged || (column >= 0 && column + N <= a.width)) {
      (StoreRowPack<Y, N>(static_cast<Y*>(a.result[K]) + to[K] + column, At<K>(y)), ...);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (column + i >= 0 && column + i < a.width)
          ((static_cast<Y*>(a.result[K])[to[K] + column + i] = Element(At<K>(y), i)), ...);
      }
    }
  }

  template <size_t... I, size_t... J> static __device__ __forceinline__ Numbers Begin(const Args& a, int64_t row,
                                                                                      std::index_sequence<I...>,
                                                                                      std::index_sequence<J...>) {
    Numbers n;
    F::Begin(n, static_cast<int32_t>(a.index_map[J](row))...,
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

  // Writes the block's sums of column sum L. kThreads * kPacks * N numbers of shared memory.
  template <size_t L, class E, int N, int kLanes, int kPacks, int kThreads>
  static __device__ __forceinline__ void WriteColumnSums(const Args& a, int lane, int group, Sums<N> (&sums)[kPacks]) {
    constexpr int kGroup = kLanes ? kLanes : kThreads, kGroups = kThreads / kGroup;
    E* const out = static_cast<E*>(a.sum[L]) + static_cast<int64_t>(blockIdx.x) * a.width;
    if constexpr (kGroups == 1) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const int64_t column = static_cast<int64_t>(lane + i * kGroup) * N + j;
          if (column < a.width) out[column] = At<L>(sums[i].of_columns)[j];
        }
      }
    } else {
      __shared__ E room[kThreads * kPacks * N];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
#pragma unroll
        for (int j = 0; j < N; ++j)
          room[group * (kGroup * kPacks * N) + (lane + i * kGroup) * N + j] = At<L>(sums[i].of_columns)[j];
      }
      __syncthreads();
      for (int c = threadIdx.x; c < a.width; c += kThreads) {
        E sum = 0;
        for (int g = 0; g < kGroups; ++g) sum += room[g * (kGroup * kPacks * N) + c];
        out[c] = sum;
      }
      __syncthreads();
    }
  }

  template <size_t I, class E, int kThreads> static __device__ __forceinline__ void WriteTotal(const Args& a, E mine) {
    __shared__ E room[kThreads];
    room[threadIdx.x] = mine;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
      if (threadIdx.x < half) room[threadIdx.x] += room[threadIdx.x + half];
      __syncthreads();
    }
    if (threadIdx.x == 0) static_cast<E*>(a.sum[kColumnSums + I])[blockIdx.x] = room[0];
    __syncthreads();
  }

  template <int N, int kLanes, int kPacks, int kThreads, int kEnds, bool kStays, bool kStreams, size_t... I,
            size_t... K, size_t... L, size_t... T_>
  static __device__ __forceinline__ void Run(const Args& a, std::index_sequence<I...>, std::index_sequence<K...>,
                                             std::index_sequence<L...>, std::index_sequence<T_...>) {
    constexpr int kGroup = kLanes ? kLanes : kThreads, kGroups = kThreads / kGroup;
    const int lane = kLanes ? threadIdx.x % kGroup : threadIdx.x, group = threadIdx.x / kGroup;
    const ReadPolicy policy = MakeReadPolicy(a.exceeds_l2);
    Sums<N> sums[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) ((At<L>(sums[i].of_columns)[j] = 0), ...);
    }
    Slots<TotalIndex, T...> totals;
    ((At<T_>(totals) = 0), ...);
    int turn = 0;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * kGroups; first < a.rows;
         first += static_cast<int64_t>(gridDim.x) * kGroups, turn ^= 1) {
      const bool live = first + group < a.rows;
      const int64_t row = live ? first + group : a.rows - 1;
      const int64_t at[kRows + 1] = {MapRow<F::RowRank(I)>(a.row_map[I], row)..., 0},
                               to[kResults + 1] = {MapRow<F::ResultRank(K)>(a.result_map[K], row)..., 0};
      // The first element of the row that is aligned for packs, 0 or less.
      const int64_t begin = kEnds == kRagged ? -static_cast<int64_t>(static_cast<uint64_t>(row * a.width) % N) : 0;
      RowPacks<N> x[kPacks];
      typename F::Kept kept[kPacks][N];
      if constexpr (!kStreams) {
        EachPack<N, kGroup, kPacks, kEnds>(
            a, lane, begin, [&](int i, int64_t column) { Load<N, kEnds>(a, at, column, x[i], policy, RowIndex()); });
      }
      Numbers n = Begin(a, row, NumberIndex(), std::make_index_sequence<F::kIndices>());
      Stages<0, N, kLanes, kPacks, kThreads, kEnds, kStreams>(a, at, lane, begin, n, x, kept, policy, turn);
      if constexpr (kResults + kColumnSums > 0) {
        for (int64_t tile = begin; tile < (kStreams ? a.width : begin + 1); tile += kGroup * kPacks * N) {
          if constexpr (kStreams) {
            EachPack<N, kGroup, kPacks, kEnds>(
                a, lane, tile, [&](int i, int64_t column) { Load<N, kEnds>(a, at, column, x[i], policy, RowIndex()); });
          }
          EachPack<N, kGroup, kPacks, kEnds>(a, lane, tile, [&](int i, int64_t column) {
            if constexpr (F::kStages > 0 && kForgets<N, kPacks>) ForgetAll(x[i], RowIndex());
            StorePackOf<N, kEnds>(a, n, live, column, to, x[i], kept[i], sums[i], RowIndex(), ColumnIndex(),
                                  ResultIndex(), ColumnSumIndex());
          });
        }
      }
      if (live && lane == 0) {
        if constexpr (kNumberResults > 0) StoreNumbers(a, row, n, NumberResultIndex());
        if constexpr (kTotals > 0) AddTotals(n, totals, TotalIndex());
      }
      if constexpr (!kStays) break;
    }
    (WriteColumnSums<L, S, N, kLanes, kPacks, kThreads>(a, lane, group, sums), ...);
    (WriteTotal<T_, T, kThreads>(a, At<T_>(totals)), ...);
  }
};

template <class F, int N, int kLanes, int kPacks, int kThreads, int kMinBlocks, int kEnds, bool kStays, bool kStreams>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    RowsKernel(const __grid_constant__ typename RowEngine<F>::Args a) {
  using Engine = RowEngine<F>;
  Engine::template Run<N, kLanes, kPacks, kThreads, kEnds, kStays, kStreams>(
      a, typename Engine::RowIndex(), typename Engine::ResultIndex(), typename Engine::ColumnSumIndex(),
      typename Engine::TotalIndex());
}

struct SumOverBlocksArgs {
  const void* partial;  // [blocks][count]
  void* out;            // [count]
  int64_t blocks, count;
};

constexpr int kSumThreads = 512;

// out[c] = the sum of partial[b][c] over b. A block takes 32 columns; its 16 warps take every 16th b.
template <class E, class Result> __global__ void __launch_bounds__(kSumThreads)
    SumOverBlocks(const __grid_constant__ SumOverBlocksArgs a) {
  __shared__ E room[kSumThreads / kWarp][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  E sum = 0;
  if (column < a.count) {
    const E* const from = static_cast<const E*>(a.partial) + column;
#pragma unroll 8
    for (int64_t b = warp; b < a.blocks; b += kSumThreads / kWarp) sum += from[b * a.count];
  }
  room[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && column < a.count) {
    for (int w = 1; w < kSumThreads / kWarp; ++w) sum += room[w][lane];
    static_cast<Result*>(a.out)[column] = Stored<Result>(sum);
  }
}

}  // namespace jaxkern
