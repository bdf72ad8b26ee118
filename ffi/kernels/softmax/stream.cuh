// Softmax of rows of any width: the algorithm streaming. A block has a row: one pass computes the row's Stat, a second one reads the row
// again and writes. Packs of one element (N = 1) serve unaligned arrays.
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

}  // namespace jaxkern
