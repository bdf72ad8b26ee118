// Softmax of rows of any width: the algorithms streaming and split. Both read a row twice and write it once.
//
//     SoftmaxStreaming    a block per row: one pass computes the row's Stat, a second one reads the row again and
//                         writes
//     SoftmaxPartials,    gridDim.x blocks per row: SoftmaxPartials writes one Stat per block to scratch, SoftmaxApply
//     SoftmaxApply        merges them in a fixed order and writes. With few rows the second read comes from L2
//
// They read p.input and write p.out, rows of p.width elements. Packs of one element (N = 1) serve unaligned arrays.
#pragma once

#include "softmax/row.cuh"

namespace jaxkern {

constexpr int kStreamThreads = 512;

// Computes the Stat of packs [begin, end) of a row with the whole block. Every thread gets the result. RowOf: as in
// SoftmaxStreaming.
template <class Op, class RowOf>
__device__ __forceinline__ typename Op::Stat RangeStat(const RowOf& row, int64_t begin, int64_t end) {
  using C = typename Op::C;
  constexpr int N = RowOf::kPack, kUnroll = RowOf::kStreamUnroll;
  typename Op::Stat stat = Op::Identity();
  for (int64_t p = begin + threadIdx.x; p < end; p += kUnroll * kStreamThreads) {
    typename RowOf::Raw raw[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (p + i * kStreamThreads < end) raw[i] = row.Load(p + i * kStreamThreads);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (p + i * kStreamThreads < end) {
        if constexpr (RowOf::kSkips) {
          if (row.Skips(raw[i], p + i * kStreamThreads)) continue;
        }
        C v[Op::kInputs][N];
        row.Values(raw[i], v, p + i * kStreamThreads);
        Op::Accumulate(stat, v);
      }
    }
  }
  __shared__ typename Op::Stat room[kStreamThreads / kWarp];
  return ReduceBlock<Op>(Op::template MergeLanes<kWarp>(stat), room);
}

// Writes the results of packs [begin, end) of a row, from the row's Final.
template <class Op, class RowOf> __device__ __forceinline__ void MapRange(const RowOf& row, typename RowOf::O* out,
                                                                          const typename Op::Final& final,
                                                                          int64_t begin, int64_t end) {
  using C = typename Op::C;
  constexpr int N = RowOf::kPack, kUnroll = RowOf::kStreamUnroll;
  for (int64_t p = begin + threadIdx.x; p < end; p += kUnroll * kStreamThreads) {
    typename RowOf::Raw raw[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (p + i * kStreamThreads < end) raw[i] = row.Load(p + i * kStreamThreads);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (p + i * kStreamThreads < end) {
        if constexpr (RowOf::kSkips) {
          if (row.Skips(raw[i], p + i * kStreamThreads)) {
            row.Put(out, p + i * kStreamThreads, row.ResultOfSkipped(p + i * kStreamThreads));
            continue;
          }
        }
        C v[Op::kInputs][N], y[N];
        row.Values(raw[i], v, p + i * kStreamThreads);
        Op::Map(v, final, y);
        row.Store(out, p + i * kStreamThreads, y, final, raw[i]);
      }
    }
  }
}

// One block per row. Op: operation; see ops.cuh. RowOf: a SoftmaxRow or a class with its interface.
template <class Op, class RowOf> __global__ void __launch_bounds__(kStreamThreads, RowOf::kStreamBlocks)
    SoftmaxStreaming(const __grid_constant__ typename RowOf::Params p) {
  const RowOf row(p, blockIdx.x + int64_t{blockIdx.y} * gridDim.x);
  const int64_t packs = row.span.Count();
  auto final = Op::Finish(RangeStat<Op>(row, 0, packs));
  row.Scale(final);
  MapRange<Op>(row, static_cast<typename RowOf::O*>(p.out), final, 0, packs);
}

// Packs [begin, end) of row blockIdx.y that belong to this block.
template <class RowOf> __device__ __forceinline__ void SplitRange(const RowOf& row, int64_t* begin, int64_t* end) {
  const int64_t packs = row.span.Count();
  const int64_t each = (packs + gridDim.x - 1) / gridDim.x;
  *begin = min(packs, each * blockIdx.x);
  *end = min(packs, *begin + each);
}

// The two kernels of split. Op: operation. N: elements of a pack. kMasked: p.mask is applied. partials: [rows,
// gridDim.x].
template <class Op, int N, bool kMasked> __global__ void __launch_bounds__(kStreamThreads, 2)
    SoftmaxPartials(const __grid_constant__ SoftmaxParams p, typename Op::Stat* partials) {
  static_assert(kStatSizes<typename Op::T>, "plan.py");
  using RowOf = SoftmaxRow<Op, N, kMasked, int64_t>;
  const RowOf row(p, blockIdx.y);
  int64_t begin, end;
  SplitRange(row, &begin, &end);
  const auto stat = RangeStat<Op>(row, begin, end);
  if (threadIdx.x == 0) partials[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = stat;
}

template <class Op, int N, bool kMasked> __global__ void __launch_bounds__(kStreamThreads, 2)
    SoftmaxApply(const __grid_constant__ SoftmaxParams p, const typename Op::Stat* partials) {
  using RowOf = SoftmaxRow<Op, N, kMasked, int64_t>;
  const RowOf row(p, blockIdx.y);
  typename Op::Stat stat = Op::Identity();
  for (int i = threadIdx.x; i < gridDim.x; i += kStreamThreads) {
    stat = Op::Merge(stat, partials[static_cast<int64_t>(blockIdx.y) * gridDim.x + i]);
  }
  __shared__ typename Op::Stat room[kStreamThreads / kWarp];
  stat = ReduceBlock<Op>(Op::template MergeLanes<kWarp>(stat), room);
  int64_t begin, end;
  SplitRange(row, &begin, &end);
  MapRange<Op>(row, static_cast<typename RowOf::O*>(p.out), Op::Finish(stat), begin, end);
}

}  // namespace jaxkern
