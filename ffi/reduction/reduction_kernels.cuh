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
// With N = 1, elements are read one by one, and a mask may say which of them take part; in ReduceRows, whose
// masks have their bytes side by side, vectors of them are read too.
#pragma once

#include "reduction_ops.cuh"

namespace jaxkern {

constexpr int kNarrowThreads = 128, kNarrowRows = 4;
constexpr int kRowThreads = 256;   // a block, at most
constexpr int kWarpsOfRows = 4;    // a block of the warp tier
constexpr int kColumnsThreads = 256;
constexpr int kMergeThreads = 256;

// Packs that a thread has in flight.
template <class T> constexpr int kInFlight = sizeof(T) == 1 ? 2 : sizeof(T) == 4 ? 8 : 4;

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

  typename Op::Stat stat[kNarrowRows];
#pragma unroll
  for (int u = 0; u < kNarrowRows; ++u) {
    stat[u] = Op::Identity();
    Op::Accumulate(p, stat[u], v[u]);
    Op::Count(stat[u], count[u]);
  }
  // Merging over two lanes halves the rows that a lane looks after, until it is one; then over the others.
  int row = 0, rows = kNarrowRows;
#pragma unroll
  for (int bit = 1; bit < kNarrowRows; bit *= 2) {
    rows /= 2;
    const bool upper = lane & bit;
    row += upper ? rows : 0;
#pragma unroll
    for (int u = 0; u < rows; ++u) {
      const auto keep = upper ? stat[u + rows] : stat[u], give = upper ? stat[u] : stat[u + rows];
      stat[u] = Op::Merge(keep, Op::Exchange(give, bit));
    }
  }
  for (int step = kNarrowRows; step < 1 << log_lanes; step *= 2) stat[0] = Op::Merge(stat[0], Op::Exchange(stat[0], step));
  const int64_t at = first + row * groups;
  if (lane < kNarrowRows && at < p.rows) Op::Store(p, at, stat[0]);
}

// The N bytes of a mask at m, as words; `aligned`: m is a multiple of N.
template <int N> __device__ __forceinline__ void LoadMaskWords(const uint8_t* m, bool aligned, uint32_t (&w)[(N + 3) / 4]) {
  if (aligned) {
    if constexpr (N == 2) w[0] = *reinterpret_cast<const uint16_t*>(m);
#pragma unroll
    for (int i = 0; i < N / 4; ++i) w[i] = reinterpret_cast<const uint32_t*>(m)[i];
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) w[i / 4] = (i % 4 ? w[i / 4] : 0) | uint32_t{m[i]} << (i % 4 * 8);
  }
}

// blockIdx.x: a row, or in the warp tier kWarpsOfRows of them; blockIdx.y: a part of it.
template <class Op, int N, bool kMasked>
__global__ void __launch_bounds__(kRowThreads, sizeof(typename Op::T) == 8 ? 2 : 4)
ReduceRows(const __grid_constant__ ReduceParams p, bool warps) {
  using T = typename Op::T;
  using V = typename Op::V;
  constexpr int U = kMasked && N * kInFlight<T> > 16 ? 16 / N : kInFlight<T>;
  const int lane = warps ? threadIdx.x % kWarp : threadIdx.x, lanes = warps ? kWarp : blockDim.x;
  const int64_t row = warps ? int64_t{blockIdx.x} * kWarpsOfRows + threadIdx.x / kWarp : blockIdx.x;
  if (row >= p.rows) return;

  constexpr int kGrain = 128 / sizeof(T);
  const int64_t each = (p.width + p.parts * kGrain - 1) / (p.parts * kGrain) * kGrain;
  const int64_t begin = min(p.width, each * blockIdx.y);
  int64_t width = min(p.width - begin, each);
  const T* const x = static_cast<const T*>(p.x) + row * p.width + begin;
  typename Op::Stat stat = Op::Identity();

  // A mask has a byte for each element, or one for the row.
  const uint8_t* mask = nullptr;
  if constexpr (kMasked) {
    mask = p.mask + p.mask_view.outer_map(row);
    if (p.mask_view.axis_stride) {
      mask += begin;
    } else {
      if (!*mask) width = 0;
      if (lane == 0) Op::Count(stat, width);
      mask = nullptr;
    }
  }

  // Elements before the first whole vector and after the last one: fewer than lanes.
  const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
  const int head = static_cast<int>(min(width, int64_t{offset ? N - offset : 0}));
  const int64_t packs = (width - head) / N;
  const int tail = static_cast<int>(width - head - packs * N);
  const T* const body = x + head;
  V ends[2] = {Op::Neutral(p), Op::Neutral(p)};
  if (head | tail) {
    const int64_t last = head + packs * N + lane;
    bool has_head = lane < head, has_tail = lane < tail;
    if (kMasked && mask) {
      has_head = has_head && mask[lane];
      has_tail = has_tail && mask[last];
      Op::Count(stat, has_head + has_tail);
    }
    if (has_head) ends[0] = ValueOf<V>(x[lane]);
    if (has_tail) ends[1] = ValueOf<V>(x[last]);
  }
  const bool mask_aligned = kMasked && reinterpret_cast<uintptr_t>(mask + head) % (N < 4 ? N : 4) == 0;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  for (int64_t at = lane; at < packs; at += U * lanes) {
    const int left = static_cast<int>(min(packs - at, int64_t{U} * lanes));
    Pack<T, N> raw[U];
#pragma unroll
    for (int i = 0; i < U; ++i) {
      raw[i] = NeutralPack<T, N>(p);
      if (i * lanes < left) raw[i] = LoadVector<T, N>(body + (at + i * lanes) * N, policy);
    }
    uint32_t in[kMasked ? U : 1][(N + 3) / 4];
    if (kMasked && mask) {
#pragma unroll
      for (int i = 0; i < U; ++i) {
        if (i * lanes < left) LoadMaskWords<N>(mask + head + (at + i * lanes) * N, mask_aligned, in[i]);
      }
    }
    V v[U * N];
#pragma unroll
    for (int i = 0; i < U; ++i) Values(raw[i], v + i * N);
    if (kMasked && mask) {
#pragma unroll
      for (int i = 0; i < U; ++i) {
        if (i * lanes >= left) continue;
#pragma unroll
        for (int j = 0; j < N; ++j) v[i * N + j] = in[i][j / 4] >> (j % 4 * 8) & 1 ? v[i * N + j] : Op::Neutral(p);
#pragma unroll
        for (int w = 0; w < (N + 3) / 4; ++w) Op::Count(stat, __popc(in[i][w]));
      }
    }
    if constexpr (Op::kKnowsLargest && !kMasked) Op::Accumulate(stat, v, LargestOf<V>(raw));
    else Op::Accumulate(p, stat, v);
  }
  if (head | tail) Op::Accumulate(p, stat, ends);

  stat = Op::MergeLanes(stat, kWarp);
  if (!warps) stat = MergeWarps<Op>(stat);
  if (lane == 0) Deliver<Op>(p, row, blockIdx.y, stat);
}

// Tiles of 2^log_x threads across, each with N columns, and the other threads of the block down.
template <class Op, int N>
__global__ void __launch_bounds__(kColumnsThreads, sizeof(typename Op::T) == 8 ? 2 : N == 8 ? 3 : 4)
ReduceColumns(const __grid_constant__ ReduceParams p, int log_x, int64_t tiles) {
  using T = typename Op::T;
  using V = typename Op::V;
  using Stat = typename Op::Stat;
  constexpr int U = N == 1 ? 8 : 4;
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
