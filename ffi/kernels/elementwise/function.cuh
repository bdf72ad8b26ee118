// Functors generated from Python functions (jaxkern/_core/functor.py): elementwise, with sums over the dimensions along
// which operands broadcast.
//
//     SummedKernel<Summed<Functor, Types<results...>, Types<operands...>, kPacks, kLanes, kKinds, kSplat, kShared>>
//     SumPartials<T, Result, kLanes>
//
// FlatKernel and StridedKernel of elementwise.cuh take such functors without sums. The kernels here compute the
// gradients of operands that broadcast: SummedKernel reads operands, applies a functor to a matrix, and writes each
// result whole or summed; SumPartials reads partial sums and writes their totals. Memory traffic: every operand is read
// once, and whole results are written once.
//
// Operands are matrices x rows x columns, or lack some of the dimensions. A block takes kLanes packs (single elements
// without kPacks) of columns, of `chunk` rows of a matrix (blockIdx.z). kLanes threads take adjacent columns of a row,
// and 256 / kLanes rows are processed at a time. Sums over rows and over everything stay in registers until the end of
// the chunk, and are then added up in shared memory. Sums over columns are added up by shuffles, row by row. If several
// blocks have parts of a sum, each writes its part in the computing type, and SumPartials adds them in the order of the
// blocks. Results are bitwise reproducible on a GPU.
#pragma once

#include "../common/functions.h"
#include "../common/reduce.cuh"
#include "elementwise.cuh"

namespace jaxkern {

// How a result is written: 4 bits of kKinds each.
enum Kind {
  kWhole = 0,      // one value per element
  kColumns = 1,    // summed over rows: one value per column
  kRows = 2,       // summed over columns: one value per row
  kScalar = 3,     // summed over both
  kPartial = 4,    // flag of a sum: out is [parts, numbers] in the computing type
  kPerMatrix = 8,  // flag of a sum: one set of values per matrix; otherwise sums are over matrices, too
};

// Strides of operands are in elements, and 0 along dimensions that they lack. Whole results are contiguous.
template <int kIn, int kOut> struct SummedArgs {
  const void* in[kIn];
  void* out[kOut];
  int64_t in_stride[kIn], in_matrix[kIn];  // between rows, between matrices
  int64_t rows, columns;
  int64_t last_columns;  // length of the last row, which may be shorter
  int64_t chunk;         // rows of a block
  bool exceeds_l2;
};

// Types and layout of a SummedKernel.
//
//     Functor    the function
//     Outs, Ins  Types of the results and operands
//     kPacks     columns are processed as whole packs
//     kLanes     threads across a row
//     kKinds     Kind of each result
//     kSplat     bits of operands that are constant along a row
//     kShared    bits of operands that all rows share
template <class Functor, class Outs, class Ins, bool kPacks, int kLanes, uint64_t kKinds, uint32_t kSplat,
          uint32_t kShared>
struct Summed;

template <class Functor, class... Out, class... In, bool kPacks, int kLanes, uint64_t kKinds, uint32_t kSplat,
          uint32_t kShared>
struct Summed<Functor, Types<Out...>, Types<In...>, kPacks, kLanes, kKinds, kSplat, kShared> {
  using Whole = Elementwise<Functor, 0, Types<Out...>, Types<In...>>;
  static constexpr int kIn = sizeof...(In), kOut = sizeof...(Out);
  static constexpr int N = kPacks ? Whole::N : 1;
  static constexpr int kGroups = kThreads / kLanes;  // rows at a time
  static constexpr int kMinBlocks = kIn + kOut <= 8 ? 4 : 2;
  using InIndex = std::make_index_sequence<kIn>;
  using OutIndex = std::make_index_sequence<kOut>;
  using Args = SummedArgs<kIn, kOut>;

  static constexpr int KindOf(int j) { return kKinds >> (4 * j) & 3; }
  static constexpr bool IsPartial(int j) { return kKinds >> (4 * j + 2) & 1; }
  static constexpr bool IsPerMatrix(int j) { return kKinds >> (4 * j + 3) & 1; }

  // A thread's sums: one per column, or a single one.
  template <class T> struct Sums {
    T v[N];
  };

  template <size_t i, class T> static JAXKERN_FN void LoadOperand(Words& words, const T* p, ReadPolicy policy) {
    if constexpr (kSplat >> i & 1) {
      const T x = *p;
#pragma unroll
      for (int k = 0; k < N; ++k) Put(words, k, x);
    } else if constexpr (!kPacks) {
      Put(words, 0, *p);
    } else if constexpr (kShared >> i & 1) {
      LoadCached<N * sizeof(T)>(words, p);
    } else {
      Load<N * sizeof(T)>(words, p, policy);
    }
  }

  // Stores sum `i` of `count` per matrix, from part `part` of `parts` per matrix.
  template <size_t j, class T>
  static JAXKERN_FN void StoreSum(const Args& a, int64_t part, int64_t parts, int64_t count, int64_t i, Own<T> sum) {
    const int64_t matrix = blockIdx.z;
    if constexpr (IsPerMatrix(j)) i += matrix * count, count *= gridDim.z;
    else part += matrix * parts;
    if constexpr (IsPartial(j)) static_cast<Own<T>*>(a.out[j])[part * count + i] = sum;
    else static_cast<T*>(a.out[j])[i] = Narrow<T>(sum);
  }

  // Adds a row to result j, or stores it. All lanes of a warp must call it; `here`: this thread has elements of the
  // row.
  template <size_t j, class T> static JAXKERN_FN void Take(const Args& a, const Own<T> (&y)[N], Sums<Own<T>>& sums,
                                                           int64_t row, int64_t column, bool here) {
    if constexpr (KindOf(j) == kWhole) {
      if (here) {
        Words words;
#pragma unroll
        for (int k = 0; k < N; ++k) Put(words, k, Narrow<T>(y[k]));
        T* const p = static_cast<T*>(a.out[j]) + (blockIdx.z * a.rows + row) * a.columns + column;
        if constexpr (kPacks) Store<N * sizeof(T)>(p, words);
        else *p = Get<T>(words, 0);
      }
    } else if constexpr (KindOf(j) == kColumns) {
#pragma unroll
      for (int k = 0; k < N; ++k) sums.v[k] += here ? y[k] : Own<T>(0);
    } else {
      const auto add = [](Own<T> p, Own<T> q) { return p + q; };
      Own<T> sum = here ? Fold(y, add) : Own<T>(0);
      if constexpr (KindOf(j) == kScalar) {
        sums.v[0] += sum;
      } else {
        sum = ReduceLanes<kLanes>(sum, add);
        if (threadIdx.x % kLanes == 0 && row < a.rows) StoreSum<j, T>(a, blockIdx.x, gridDim.x, a.rows, row, sum);
      }
    }
  }

  // Adds up the sums of the threads of the block. Two barriers.
  template <size_t j, class T> static JAXKERN_FN void Finish(const Args& a, const Sums<Own<T>>& sums, void* shared) {
    Own<T>* const room = static_cast<Own<T>*>(shared);
    if constexpr (KindOf(j) == kColumns) {
      constexpr int kWidth = kLanes * N;
      const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
#pragma unroll
      for (int k = 0; k < N; ++k) room[group * kWidth + lane * N + k] = sums.v[k];
      __syncthreads();
      for (int c = threadIdx.x; c < kWidth; c += kThreads) {
        const int64_t column = int64_t{blockIdx.x} * kWidth + c;
        Own<T> sum = 0;
        for (int g = 0; g < kGroups; ++g) sum += room[g * kWidth + c];
        if (column < a.columns) StoreSum<j, T>(a, blockIdx.y, gridDim.y, a.columns, column, sum);
      }
      __syncthreads();
    } else if constexpr (KindOf(j) == kScalar) {
      const auto add = [](Own<T> p, Own<T> q) { return p + q; };
      const Own<T> warp = ReduceLanes<kWarp>(sums.v[0], add);
      if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = warp;
      __syncthreads();
      if (threadIdx.x == 0) {
        Own<T> sum = 0;
        for (int w = 0; w < kThreads / kWarp; ++w) sum += room[w];
        StoreSum<j, T>(a, int64_t{blockIdx.y} * gridDim.x + blockIdx.x, int64_t{gridDim.x} * gridDim.y, 1, 0, sum);
      }
      __syncthreads();
    }
  }

  template <size_t... I, size_t... J>
  static JAXKERN_FN void Run(const Args& a, std::index_sequence<I...>, std::index_sequence<J...>) {
    constexpr bool kDouble = (std::is_same_v<Own<Out>, double> || ...);
    __shared__ std::conditional_t<kDouble, double, float> shared[kThreads * N];
    const Functor f{};
    const ReadPolicy policy = MakeReadPolicy(a.exceeds_l2);
    const int64_t column = (int64_t{blockIdx.x} * kLanes + threadIdx.x % kLanes) * N;
    const int64_t first = blockIdx.y * a.chunk, end = min(first + a.chunk, a.rows);
    Words x[kIn];
    // Load the operands that all rows share. Only the last row may be shorter, and only in a matrix without such
    // operands.
    if (column < a.columns) {
      ((kShared >> I & 1
            ? LoadOperand<I>(
                  x[I], static_cast<const In*>(a.in[I]) + blockIdx.z * a.in_matrix[I] + (kSplat >> I & 1 ? 0 : column),
                  policy)
            : void()),
       ...);
    }
    Slots<OutIndex, Sums<Own<Out>>...> sums;
    const auto clear = [](auto& own) {
#pragma unroll
      for (int k = 0; k < N; ++k) own.v[k] = 0;
    };
    (clear(At<J>(sums)), ...);
    for (int64_t base = first; base < end; base += kGroups) {  // uniform bounds, since the threads shuffle
      const int64_t row = base + threadIdx.x / kLanes;
      const bool here = row < end && column < (row + 1 == a.rows ? a.last_columns : a.columns);
      Slots<OutIndex, Own<Out>[N]...> y;
      if (here) {
        ((kShared >> I & 1 ? void()
                           : LoadOperand<I>(x[I],
                                            static_cast<const In*>(a.in[I]) + blockIdx.z * a.in_matrix[I] +
                                                row * a.in_stride[I] + (kSplat >> I & 1 ? 0 : column),
                                            policy)),
         ...);
#pragma unroll
        for (int k = 0; k < N; ++k) f(Widen<Own<In>>(Get<In>(x[I], k))..., At<J>(y)[k]...);
      }
      (Take<J, Out>(a, At<J>(y), At<J>(sums), row < end ? row : a.rows, column, here), ...);
    }
    (Finish<J, Out>(a, At<J>(sums), shared), ...);
  }
};

// S: a Summed.
template <class S> __global__ void __launch_bounds__(kThreads, S::kMinBlocks)
    SummedKernel(const __grid_constant__ typename S::Args a) {
  S::Run(a, typename S::InIndex(), typename S::OutIndex());
}

// out[i] = the sum of partial[k * count + i] over k < parts. kLanes adjacent threads take one number each, and 256 /
// kLanes threads share the parts of a number. T: computing type. Result: element type of out.
template <class T, class Result, int kLanes> __global__ void __launch_bounds__(kThreads)
    SumPartials(const T* partial, Result* out, int64_t parts, int64_t count) {
  constexpr int kGroups = kThreads / kLanes;
  __shared__ T room[kThreads];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int64_t i = int64_t{blockIdx.x} * kLanes + lane;
  T sum = 0;
  if (i < count) {
#pragma unroll 4
    for (int64_t k = group; k < parts; k += kGroups) sum += partial[k * count + i];
  }
  room[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kGroups / 2; half > 0; half /= 2) {
    if (group < half) room[threadIdx.x] += room[threadIdx.x + half * kLanes];
    __syncthreads();
  }
  if (group == 0 && i < count) out[i] = Narrow<Result>(room[lane]);
}

// jaxkern/_ops/function/plan.py writes this layout.
static_assert(sizeof(SummedArgs<2, 1>) == 96);

}  // namespace jaxkern
