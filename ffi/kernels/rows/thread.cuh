// Row functions of short rows: a thread holds whole rows.
//
//     ThreadRowsKernel<F, kWidth, kEach, kThreads, kMinBlocks, kApart, kStays>
//
// F and its stages are as in rows.cuh. A row has kWidth elements, and a thread has kEach rows that lie side by side. So the rows of a block
// are one span of memory. The block copies it to shared memory in vectors of 16 bytes; each thread reads its rows there, computes them in
// registers without any exchange, and leaves its results in the same shared memory, from which the block writes them in vectors. An odd number
// of words of a thread's rows, or of vectors, has no bank conflicts. Rows of 16 bits and an odd width are read in words where kEach is even.
//
// Bit k of kApart: array k of rows, or result k - kRows, has rows that do not lie side by side in the order of the rows (an operand
// that broadcasts, or is transposed). Threads read and write its elements one by one.
//
// All arrays start on 16 bytes.
//
// Memory traffic: each row is read once and each result is written once.
//
// Sums over rows: with kStays, a block takes every gridDim.x-th span. It adds up in registers and writes its sums; SumOverBlocks then adds
// the sums of all blocks in a fixed order.
#pragma once

#include "engine.cuh"

namespace jaxkern {

// The first N elements of columns that start on 16 bytes.
template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadFront(const T* columns) {
  constexpr int kWhole = N / kPieces<T>;
  Pack<T, N> pack = ZeroPack<T, N>();
#pragma unroll
  for (int v = 0; v < kWhole; ++v) {
    const Pack<T, kPieces<T>> piece = LoadVector<T, kPieces<T>>(columns + v * kPieces<T>);
#pragma unroll
    for (int w = 0; w < 4; ++w) pack.word[4 * v + w] = piece.word[w];
  }
#pragma unroll
  for (int i = kWhole * kPieces<T>; i < N; ++i) SetElement(pack, i, columns[i]);
  return pack;
}

// Copies a pack from or to shared memory, in the largest vectors that begin at all multiples of its size.
template <class T, int N> struct InShared {
  static constexpr int kBytes = N * sizeof(T), kLow = kBytes & -kBytes, kUnit = kLow < 16 ? kLow : 16;

  template <class V> static __device__ __forceinline__ void LoadAs(Pack<T, N>& pack, const char* at) {
    static_assert(sizeof(V) >= 4, "");
#pragma unroll
    for (int k = 0; k < kBytes / static_cast<int>(sizeof(V)); ++k) {
      const V v = reinterpret_cast<const V*>(at)[k];
      memcpy(&pack.word[k * (sizeof(V) / 4)], &v, sizeof v);
    }
  }
  static __device__ __forceinline__ void Load(Pack<T, N>& pack, const char* at) {
    if constexpr (kUnit == 16) {
      LoadAs<uint4>(pack, at);
    } else if constexpr (kUnit == 8) {
      LoadAs<uint2>(pack, at);
    } else if constexpr (kUnit == 4) {
      LoadAs<uint32_t>(pack, at);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) SetElement(pack, i, reinterpret_cast<const T*>(at)[i]);
    }
  }
  template <class V> static __device__ __forceinline__ void StoreAs(char* at, const Pack<T, N>& pack) {
#pragma unroll
    for (int k = 0; k < kBytes / static_cast<int>(sizeof(V)); ++k) {
      V v;
      memcpy(&v, &pack.word[k * (sizeof(V) / 4)], sizeof v);
      reinterpret_cast<V*>(at)[k] = v;
    }
  }
  static __device__ __forceinline__ void Store(char* at, const Pack<T, N>& pack) {
    if constexpr (kUnit == 16) {
      StoreAs<uint4>(at, pack);
    } else if constexpr (kUnit == 8) {
      StoreAs<uint2>(at, pack);
    } else if constexpr (kUnit == 4) {
      StoreAs<uint32_t>(at, pack);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) reinterpret_cast<T*>(at)[i] = Element(pack, i);
    }
  }
};

template <class F, int kWidth, int kEach, int kThreads, uint32_t kApart> struct ThreadRows {
  using Engine = RowEngine<F>;
  using Stages = typename Engine::Stages;
  using Args = typename Engine::Args;
  using Numbers = typename Engine::Numbers;
  static constexpr int kRows = Engine::kRows, kHeld = kWidth * kEach, kTile = kThreads * kEach;
  using Packs = typename Engine::template RowPacks<kHeld>;
  using Columns = typename Engine::template ColumnPacks<kWidth>;
  using Values = typename Engine::template ResultValues<kHeld>;
  using Results = typename Engine::template ResultPacks<kHeld>;

  static constexpr bool Apart(int k) { return kApart >> k & 1; }

  // Bytes of shared memory before array k of those that lie side by side, of sizes `bytes`; kFirst: the bit of the first in kApart.
  template <int kFirst, int n> static constexpr int Before(const int (&bytes)[n], int k) {
    int sum = 0;
    for (int i = 0; i < k; ++i) sum += Apart(kFirst + i) ? 0 : bytes[i] * (kTile * kWidth);
    return sum;
  }
  template <class... T> static constexpr int RowBytes(int k, Types<T...>) {
    const int bytes[] = {static_cast<int>(sizeof(T))..., 0};
    return Before<0>(bytes, k);
  }
  template <class... T> static constexpr int ResultBytes(int k, Types<T...>) {
    const int bytes[] = {static_cast<int>(sizeof(T))..., 0};
    return Before<kRows>(bytes, k);
  }
  template <class... T> static constexpr int SumBytes(Types<T...>) {
    int most = 0;
    for (const int bytes : {0, static_cast<int>(sizeof(T))...}) most = bytes > most ? bytes : most;
    return most * kThreads * kWidth;
  }
  static constexpr int Larger(int x, int y) { return x > y ? x : y; }
  static constexpr int kRoom =
      Larger(Larger(RowBytes(kRows, typename F::Rows()), ResultBytes(Engine::kResults, typename F::Results())),
             Larger(SumBytes(typename F::ColumnSums()), 16));

  // The rows of a block.
  int64_t first;
  int count;

  // Starts to copy the rows of an array to shared memory.
  template <int k, class T> __device__ __forceinline__ void Fetch(const void* rows, char* room) const {
    if constexpr (!Apart(k)) {
      constexpr int kVectors = (kTile * kWidth * static_cast<int>(sizeof(T)) + 15) / 16;
      char* const to = room + RowBytes(k, typename F::Rows());
      const char* const from = static_cast<const char*>(rows) + first * static_cast<int>(kWidth * sizeof(T));
      const int bytes = count * static_cast<int>(kWidth * sizeof(T));
#pragma unroll
      for (int v = 0; v < kVectors; v += kThreads) {
        const int at = (v + static_cast<int>(threadIdx.x)) * 16;
        if (at < bytes) CopyAsyncFront(to + at, from + at, min(16, bytes - at));
      }
    }
  }
  // The elements of a thread's rows.
  template <int k, class T>
  __device__ __forceinline__ void Read(const Args& a, Pack<T, kHeld>& pack, const char* room) const {
    if constexpr (!Apart(k)) {
      constexpr int kBytes = kHeld * sizeof(T);
      InShared<T, kHeld>::Load(pack, room + RowBytes(k, typename F::Rows()) + threadIdx.x * kBytes);
    } else {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const T* const from = static_cast<const T*>(a.row[k]) + MapRow<F::RowRank(k)>(a.row_map[k], Row(j));
#pragma unroll
        for (int i = 0; i < kWidth; ++i) SetElement(pack, j * kWidth + i, from[i]);
      }
    }
  }
  // Leaves the results of a thread's rows in shared memory, or writes them.
  template <int k, class T> __device__ __forceinline__ void Leave(const Args& a, Pack<T, kHeld>& pack,
                                                                  const Own<T> (&value)[kHeld], char* room) const {
    pack = ZeroPack<T, kHeld>();
#pragma unroll
    for (int i = 0; i < kHeld; ++i) StoreElement(pack, i, value);
    if constexpr (!Apart(kRows + k)) {
      constexpr int kBytes = kHeld * sizeof(T);
      InShared<T, kHeld>::Store(room + ResultBytes(k, typename F::Results()) + threadIdx.x * kBytes, pack);
    } else {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        T* const to = static_cast<T*>(a.result[k]) + MapRow<F::ResultRank(k)>(a.result_map[k], Row(j));
        if (Has(j)) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) to[i] = Element(pack, j * kWidth + i);
        }
      }
    }
  }
  // Writes what all threads have left.
  template <int k, class T> __device__ __forceinline__ void Write(void* rows, const char* room) const {
    if constexpr (!Apart(kRows + k)) {
      constexpr int kVectors = (kTile * kWidth * static_cast<int>(sizeof(T)) + 15) / 16, kPer = kPieces<T>;
      const char* const from = room + ResultBytes(k, typename F::Results());
      T* const to = static_cast<T*>(rows) + first * kWidth;
      const int elements = count * kWidth;
#pragma unroll
      for (int v = 0; v < kVectors; v += kThreads) {
        const int at = (v + static_cast<int>(threadIdx.x)) * kPer;
        if (at + kPer <= elements) {
          Pack<T, kPer> piece;
          InShared<T, kPer>::Load(piece, from + at * sizeof(T));
          StoreVector<T, kPer>(to + at, piece);
        }
      }
      const int at = elements / kPer * kPer + threadIdx.x;
      if (at < elements) to[at] = reinterpret_cast<const T*>(from)[at];
    }
  }

  __device__ __forceinline__ bool Has(int j) const { return static_cast<int>(threadIdx.x) * kEach + j < count; }
  // The index of row j of this thread; of another row if there is none.
  __device__ __forceinline__ int64_t Row(int j) const {
    return first + min(static_cast<int>(threadIdx.x) * kEach + j, count - 1);
  }

  template <size_t... J>
  static __device__ __forceinline__ void LoadColumns(const Args& a, Columns& c, std::index_sequence<J...>) {
    const auto load = [](auto& pack, const void* from) { LoadFrontOf(pack, from); };
    (load(At<J>(c), a.column[J]), ...);
  }
  template <class T, int N> static __device__ __forceinline__ void LoadFrontOf(Pack<T, N>& pack, const void* from) {
    pack = LoadFront<T, N>(static_cast<const T*>(from));
  }

  // The place that random bits of an element count from: packs of 8 elements share them.
  static constexpr int PackOf(int i) { return i / 8 * 8; }

  // Adds the values of the elements from kFirst on, 8 at a time as other kernels add packs: sums may be wider than values.
  template <int p, int kFirst, class Sum, class Value>
  static __device__ __forceinline__ void AddFrom(Sum& sum, const Value (&value)[kWidth]) {
    if constexpr (kFirst < kWidth) {
      constexpr int kCount = kWidth - kFirst < 8 ? kWidth - kFirst : 8;
      Value part[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) part[i] = value[kFirst + i];
      Stages::template Add<p>(sum, Fold(part, typename Stages::template CombineReduced<p>()));
      AddFrom<p, kFirst + kCount>(sum, value);
    }
  }
  template <int p, size_t... I, size_t... J>
  static __device__ __forceinline__ void Reduce(const Args& a, Numbers& n, const Packs& x, int j,
                                                typename F::Kept (&kept)[kWidth], std::index_sequence<I...>,
                                                std::index_sequence<J...> columns) {
    Columns c;
    LoadColumns(a, c, columns);
    typename Stages::template Value<p> value[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      F::Reduce(Pass<p>(), n, i, PackOf(i), kept[i], value[i], WideElement(At<I>(x), j * kWidth + i)...,
                WideElement(At<J>(c), i)...);
      if constexpr (p == 0 && Stages::kPicks > 0)
        F::Pick(n, i, PackOf(i), value[i], WideElement(At<I>(x), j * kWidth + i)..., WideElement(At<J>(c), i)...);
    }
    typename Stages::template Reduced<p> sum = F::Identity(Pass<p>(), n);
    AddFrom<p, 0>(sum, value);
    F::After(Pass<p>(), n, sum);
  }
  template <int p> static __device__ __forceinline__ void ReduceAll(const Args& a, Numbers& n, const Packs& x, int j,
                                                                    typename F::Kept (&kept)[kWidth]) {
    if constexpr (p < F::kPasses) {
      Reduce<p>(a, n, x, j, kept, typename Engine::RowIndex(), typename Engine::ColumnIndex());
      ReduceAll<p + 1>(a, n, x, j, kept);
    }
  }

  template <class Sums, size_t... I, size_t... J, size_t... K, size_t... L>
  static __device__ __forceinline__ void Compute(const Args& a, const Numbers& n, const Packs& x, int j, bool live,
                                                 const typename F::Kept (&kept)[kWidth], Values& value, Sums& sums,
                                                 std::index_sequence<I...>, std::index_sequence<J...> columns,
                                                 std::index_sequence<K...>, std::index_sequence<L...>) {
    Columns c;
    LoadColumns(a, c, columns);
    typename Engine::template SumTerms<kWidth> term;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      F::Result(n, i, PackOf(i), kept[i], WideElement(At<I>(x), j * kWidth + i)..., WideElement(At<J>(c), i)...,
                At<K>(value)[j * kWidth + i]..., At<L>(term)[i]...);
    }
    if (live) (sums.template Add<L>(0, At<L>(term)), ...);
  }

  template <size_t L, class Sums>
  static __device__ __forceinline__ void WriteSums(const Args& a, Sums& sums, char* room) {
    using Sum = typename Engine::template SumType<L>;
    Sum own[kWidth];
    sums.template Read<L>(0, own);
    Sum* const all = reinterpret_cast<Sum*>(room);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWidth; ++i) all[threadIdx.x * kWidth + i] = own[i];
    __syncthreads();
    for (int c = threadIdx.x; c < kWidth; c += kThreads) {
      Sum sum = 0;
#pragma unroll 8
      for (int t = 0; t < kThreads; ++t) sum += all[t * kWidth + c];
      static_cast<Sum*>(a.sum[L])[blockIdx.x * static_cast<int64_t>(kWidth) + c] = sum;
    }
  }

  template <bool kStays, size_t... I, size_t... J, size_t... K, size_t... L, size_t... T_>
  static __device__ __forceinline__ void Run(const Args& a, char* room, std::index_sequence<I...> rows,
                                             std::index_sequence<J...> columns, std::index_sequence<K...> results,
                                             std::index_sequence<L...> summed, std::index_sequence<T_...> totaled) {
    typename Engine::template SumsOf<kWidth, 1> sums;
    sums.Clear();
    typename Engine::TotalSlots totals;
    ((At<T_>(totals) = 0), ...);
    for (int64_t tile = blockIdx.x; tile * kTile < a.rows; tile += gridDim.x) {
      const ThreadRows own = {tile * kTile, static_cast<int>(min(a.rows - tile * kTile, static_cast<int64_t>(kTile)))};
      if (kStays) __syncthreads();
      (own.Fetch<I, typename Engine::template RowType<I>>(a.row[I], room), ...);
      WaitForCopies();
      __syncthreads();
      Packs x;
      (own.Read<I>(a, At<I>(x), room), ...);
      if constexpr (sizeof...(K) > 0) __syncthreads();
      Values value;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int64_t row = own.Row(j);
        Numbers n = Engine::Begin(a, row, typename Engine::NumberIndex(), std::make_index_sequence<F::kIndices>());
        typename F::Kept kept[kWidth];
        ReduceAll<0>(a, n, x, j, kept);
        Compute(a, n, x, j, own.Has(j), kept, value, sums, rows, columns, results, summed);
        if (own.Has(j)) {
          if constexpr (Engine::kNumberResults > 0)
            Engine::StoreNumbers(a, row, n, typename Engine::NumberResultIndex());
          if constexpr (Engine::kTotals > 0) Engine::AddTotals(n, totals, typename Engine::TotalIndex());
        }
      }
      Results y;
      (own.Leave<K>(a, At<K>(y), At<K>(value), room), ...);
      __syncthreads();
      (own.Write<K, typename Engine::template ResultType<K>>(a.result[K], room), ...);
      if (!kStays) break;
    }
    (WriteSums<L>(a, sums, room), ...);
    (Engine::template WriteTotal<T_, kThreads>(a, At<T_>(totals), blockIdx.x), ...);
  }
};

template <class F, int kWidth, int kEach, int kThreads, int kMinBlocks, uint32_t kApart, bool kStays>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    ThreadRowsKernel(const __grid_constant__ typename RowEngine<F>::Args a) {
  using Engine = RowEngine<F>;
  using Own = ThreadRows<F, kWidth, kEach, kThreads, kApart>;
  __shared__ uint4 room[(Own::kRoom + 15) / 16];
  Own::template Run<kStays>(a, reinterpret_cast<char*>(room), typename Engine::RowIndex(),
                            typename Engine::ColumnIndex(), typename Engine::ResultIndex(),
                            typename Engine::ColumnSumIndex(), typename Engine::TotalIndex());
}

}  // namespace jaxkern
