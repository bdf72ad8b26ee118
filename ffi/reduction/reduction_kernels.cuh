// The kernels of the row reductions. All of them only read, so all that counts is to have enough loads
// in flight: a thread issues 64 to 128 bytes of them before it uses the first.
//
//     ReduceNarrow    a group of 4 to 32 lanes has four rows at a time
//     ReduceRows      a warp or a block a row, or a part of one; elements before the first and after the
//                     last whole 16-byte vector are read one by one
//     ReduceColumns   the axis is not the last one: a tile of columns a block, or a part of its rows; each
//                     thread walks down its own columns, and the block merges those of equal ones
//     ReduceMerge     joins the parts of each row or column, in their order
//
// With N = 1, elements are read one by one, and a mask may say which of them take part.
#pragma once

#include "reduction_ops.cuh"

namespace jaxkern {

constexpr int kNarrowThreads = 128, kNarrowRows = 4;
constexpr int kRowThreads = 512;   // a block, at most
constexpr int kWarpsOfRows = 4;    // a block of the warp tier
constexpr int kColumnsThreads = 256;
constexpr int kMergeThreads = 256;

// Packs that a thread has in flight.
template <class T, int N> constexpr int kInFlight = N == 1 ? 8 : sizeof(T) == 1 ? 2 : sizeof(T) == 4 ? 8 : 4;

template <class T, int N> __device__ __forceinline__ Pack<T, N> NeutralPack(const ReduceParams& p) {
  Pack<T, N> pack;
#pragma unroll
  for (int w = 0; w < Pack<T, N>::kWords; ++w) pack.word[w] = static_cast<uint32_t>(p.neutral >> (w % 2 * 32));
  return pack;
}

// A row's Stat, or that of a part of it.
template <class Op>
__device__ __forceinline__ void Deliver(const ReduceParams& p, int64_t at, int64_t part, const typename Op::Stat& stat) {
  if (p.parts > 1) static_cast<typename Op::Stat*>(p.out)[at * p.parts + part] = stat;
  else Op::Store(p, at, stat);
}

// Every thread of the block brings a Stat that its warp has merged; thread 0 gets that of the block.
template <class Op> __device__ __forceinline__ typename Op::Stat MergeWarps(typename Op::Stat stat) {
  __shared__ typename Op::Stat room[kRowThreads / kWarp];
  return ReduceWarps<kRowThreads / kWarp>(stat, room, blockDim.x / kWarp, Op::Identity(), [] { __syncthreads(); },
                                          [](typename Op::Stat s) { return Op::MergeLanes(s, kRowThreads / kWarp); });
}

// A row has `packs` packs of N elements, at most kPacks a lane.
template <class Op, int N, int kPacks>
__global__ void __launch_bounds__(kNarrowThreads)
ReduceNarrow(const __grid_constant__ ReduceParams p, int log_lanes, int packs) {
  using T = typename Op::T;
  using V = typename Op::V;
  const int lane = threadIdx.x & ((1 << log_lanes) - 1), groups = kNarrowThreads >> log_lanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (groups * kNarrowRows) + (threadIdx.x >> log_lanes);
  const T* const x = static_cast<const T*>(p.x);

  V v[kNarrowRows][kPacks * N];
  int count[kNarrowRows] = {};
  if constexpr (N == 1) {
    T raw[kNarrowRows][kPacks];
    bool in[kNarrowRows][kPacks];
#pragma unroll
    for (int u = 0; u < kNarrowRows; ++u) {
      const int64_t row = first + u * groups;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const int at = lane + (i << log_lanes);
        in[u][i] = row < p.rows && at < packs;
        if (in[u][i]) raw[u][i] = x[row * p.width + at];
      }
    }
#pragma unroll
    for (int u = 0; u < kNarrowRows; ++u) {
      const int64_t row = first + u * groups;
      if (p.mask && row < p.rows) {
        const uint8_t* const mask = p.mask + p.mask_view.outer_map(row);
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          if (in[u][i]) in[u][i] = mask[(lane + (i << log_lanes)) * p.mask_view.axis_stride];
        }
      }
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        v[u][i] = in[u][i] ? ValueOf<V>(raw[u][i]) : Op::Neutral(p);
        count[u] += in[u][i];
      }
    }
  } else {
    const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
    Pack<T, N> raw[kNarrowRows][kPacks];
#pragma unroll
    for (int u = 0; u < kNarrowRows; ++u)
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const int64_t row = first + u * groups;
        const int at = lane + (i << log_lanes);
        raw[u][i] = NeutralPack<T, N>(p);
        if (row < p.rows && at < packs) raw[u][i] = LoadVector<T, N>(x + row * p.width + at * N, policy);
      }
#pragma unroll
    for (int u = 0; u < kNarrowRows; ++u)
#pragma unroll
      for (int i = 0; i < kPacks; ++i) Values(raw[u][i], v[u] + i * N);
  }

  typename Op::Stat mine = Op::Identity();  // that of row `lane` of the four
#pragma unroll
  for (int u = 0; u < kNarrowRows; ++u) {
    typename Op::Stat stat = Op::Identity();
    Op::Accumulate(p, stat, v[u]);
    Op::Count(stat, count[u]);
    stat = Op::MergeLanes(stat, 1 << log_lanes);
    if (lane == u) mine = stat;
  }
  const int64_t row = first + lane * groups;
  if (lane < kNarrowRows && row < p.rows) Op::Store(p, row, mine);
}

// blockIdx.x: a row, or in the warp tier kWarpsOfRows of them; blockIdx.y: a part of it.
template <class Op, int N>
__global__ void __launch_bounds__(kRowThreads, sizeof(typename Op::T) == 8 ? 1 : 2)
ReduceRows(const __grid_constant__ ReduceParams p, bool warps) {
  using T = typename Op::T;
  using V = typename Op::V;
  constexpr int U = kInFlight<T, N>;
  const int lane = warps ? threadIdx.x % kWarp : threadIdx.x, lanes = warps ? kWarp : blockDim.x;
  const int64_t row = warps ? int64_t{blockIdx.x} * kWarpsOfRows + threadIdx.x / kWarp : blockIdx.x;
  if (row >= p.rows) return;

  constexpr int kGrain = 128 / sizeof(T);
  const int64_t each = (p.width + p.parts * kGrain - 1) / (p.parts * kGrain) * kGrain;
  const int64_t begin = min(p.width, each * blockIdx.y), width = min(p.width - begin, each);
  const T* const x = static_cast<const T*>(p.x) + row * p.width + begin;

  typename Op::Stat stat = Op::Identity();
  if constexpr (N == 1) {
    const uint8_t* const mask = p.mask + p.mask_view.outer_map(row) + begin * p.mask_view.axis_stride;
    for (int64_t at = lane; at < width; at += U * lanes) {
      const int left = static_cast<int>(min(width - at, int64_t{U} * lanes));
      T raw[U];
      bool in[U];
      V v[U];
      int count = 0;
#pragma unroll
      for (int i = 0; i < U; ++i) {
        in[i] = i * lanes < left;
        if (in[i]) {
          raw[i] = x[at + i * lanes];
          in[i] = mask[(at + i * lanes) * p.mask_view.axis_stride];
        }
      }
#pragma unroll
      for (int i = 0; i < U; ++i) {
        v[i] = in[i] ? ValueOf<V>(raw[i]) : Op::Neutral(p);
        count += in[i];
      }
      Op::Accumulate(p, stat, v);
      Op::Count(stat, count);
    }
  } else {
    // Elements before the first whole vector and after the last one: fewer than lanes.
    const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
    const int head = static_cast<int>(min(width, int64_t{offset ? N - offset : 0}));
    const int64_t packs = (width - head) / N;
    const int tail = static_cast<int>(width - head - packs * N);
    const T* const body = x + head;
    V ends[2] = {Op::Neutral(p), Op::Neutral(p)};
    if (head | tail) {
      if (lane < head) ends[0] = ValueOf<V>(x[lane]);
      if (lane < tail) ends[1] = ValueOf<V>(body[packs * N + lane]);
    }
    const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
    for (int64_t at = lane; at < packs; at += U * lanes) {
      const int left = static_cast<int>(min(packs - at, int64_t{U} * lanes));
      Pack<T, N> raw[U];
#pragma unroll
      for (int i = 0; i < U; ++i) {
        raw[i] = NeutralPack<T, N>(p);
        if (i * lanes < left) raw[i] = LoadVector<T, N>(body + (at + i * lanes) * N, policy);
      }
      V v[U * N];
#pragma unroll
      for (int i = 0; i < U; ++i) Values(raw[i], v + i * N);
      Op::Accumulate(p, stat, v);
    }
    if (head | tail) Op::Accumulate(p, stat, ends);
  }

  stat = Op::MergeLanes(stat, kWarp);
  if (!warps) stat = MergeWarps<Op>(stat);
  if (lane == 0) Deliver<Op>(p, row, blockIdx.y, stat);
}

// Tiles of 2^log_x threads across, each with N columns, and the other threads of the block down.
template <class Op, int N>
__global__ void __launch_bounds__(kColumnsThreads, 2)
ReduceColumns(const __grid_constant__ ReduceParams p, int log_x, int64_t tiles) {
  using T = typename Op::T;
  using V = typename Op::V;
  using Stat = typename Op::Stat;
  constexpr int U = N == 1 ? 8 : 32 / N > 8 ? 8 : 32 / N;
  __shared__ Stat room[kColumnsThreads * N];

  const int x = threadIdx.x & ((1 << log_x) - 1), y = threadIdx.x >> log_x, threads_y = kColumnsThreads >> log_x;
  const int64_t outer = blockIdx.x / tiles, first = (blockIdx.x % tiles << log_x) * N, column = first + x * N;
  const int64_t each = (p.width + p.parts - 1) / p.parts;
  const int64_t begin = min(p.width, each * blockIdx.y), end = column < p.inner ? min(p.width, begin + each) : 0;

  Stat stat[N];
#pragma unroll
  for (int j = 0; j < N; ++j) stat[j] = Op::Identity();
  const T* from = static_cast<const T*>(p.x) + (outer * p.width + begin + y) * p.inner + column;
  const int64_t step = threads_y * p.inner;
  const uint8_t* mask = nullptr;
  if (N == 1 && p.mask && column < p.inner) mask = p.mask + p.mask_view.outer_map(outer) + p.mask_view.inner_map(column);
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);

  for (int64_t a = begin + y; a < end; a += U * threads_y, from += U * step) {
    const int left = static_cast<int>(min(end - a, int64_t{U} * threads_y));
    V v[U][N];
    if constexpr (N == 1) {
      T raw[U];
      bool in[U];
      int count = 0;
#pragma unroll
      for (int i = 0; i < U; ++i) {
        in[i] = i * threads_y < left;
        if (in[i]) raw[i] = from[i * step];
      }
      if (mask) {
#pragma unroll
        for (int i = 0; i < U; ++i) {
          if (in[i]) in[i] = mask[(a + i * threads_y) * p.mask_view.axis_stride];
        }
      }
#pragma unroll
      for (int i = 0; i < U; ++i) {
        v[i][0] = in[i] ? ValueOf<V>(raw[i]) : Op::Neutral(p);
        count += in[i];
      }
      Op::Count(stat[0], count);
    } else {
      Pack<T, N> raw[U];
#pragma unroll
      for (int i = 0; i < U; ++i) {
        raw[i] = NeutralPack<T, N>(p);
        if (i * threads_y < left) raw[i] = LoadVector<T, N>(from + i * step, policy);
      }
#pragma unroll
      for (int i = 0; i < U; ++i) Values(raw[i], v[i]);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      V down[U];
#pragma unroll
      for (int i = 0; i < U; ++i) down[i] = v[i][j];
      Op::Accumulate(p, stat[j], down);
    }
  }

  const int columns = N << log_x;
#pragma unroll
  for (int j = 0; j < N; ++j) room[y * columns + x * N + j] = stat[j];
  __syncthreads();
  for (int c = threadIdx.x; c < columns && first + c < p.inner; c += kColumnsThreads) {
    Stat all = room[c];
    for (int k = 1; k < threads_y; ++k) all = Op::Merge(all, room[k * columns + c]);
    Deliver<Op>(p, outer * p.inner + first + c, blockIdx.y, all);
  }
}

// A warp, or else a block, for each of the p.rows results; `partials` holds p.parts Stats of each.
template <class Op>
__global__ void __launch_bounds__(kMergeThreads)
ReduceMerge(const __grid_constant__ ReduceParams p, const typename Op::Stat* partials, bool warps) {
  const int lane = warps ? threadIdx.x % kWarp : threadIdx.x, lanes = warps ? kWarp : kMergeThreads;
  const int64_t row = warps ? int64_t{blockIdx.x} * (kMergeThreads / kWarp) + threadIdx.x / kWarp : blockIdx.x;
  if (row >= p.rows) return;
  typename Op::Stat stat = Op::Identity();
#pragma unroll 4
  for (int64_t i = lane; i < p.parts; i += lanes) stat = Op::Merge(stat, partials[row * p.parts + i]);
  stat = Op::MergeLanes(stat, kWarp);
  if (!warps) stat = MergeWarps<Op>(stat);
  if (lane == 0) Op::Store(p, row, stat);
}

}  // namespace jaxkern
