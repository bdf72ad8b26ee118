// Softmax over an axis that is not the last one: the algorithm column. Nothing is transposed.
//
//     SoftmaxColumnRegisters    reads a tile once and holds it in registers of one warp or of a block
//     SoftmaxColumn             any height, masks, and any alignment (N = 1)
//
// Both read p.input of [outer, width, inner] and write p.out. A tile spans the whole softmax axis; memory traffic is
// one read and one write of each array, except for tiles of SoftmaxColumn that exceed shared memory, which are read
// twice.
//
// SoftmaxColumnRegisters: a warp is 4 packs (64 bytes) across and 8 rows down. Each of the N columns of a thread's
// packs has its own Stat. Merging over the 8 rows halves the columns of a lane at each step, which costs N - 1 merges
// instead of 3 N. For few rows a warp is 32 packs across and each thread holds all rows of its columns.
//
// SoftmaxColumn: a block takes a tile of lanes_x packs. Thread (x, y) owns pack x of rows y, y + threads_y, ... .
// Asynchronous copies, all in flight at once, bring the tile to shared memory. Every thread reads back only what it
// copied itself, so the tile needs no barrier.
#pragma once

#include "softmax/row.cuh"

namespace jaxkern {

constexpr int kColumnThreads = 256;
constexpr int kColumnParts = 4;
// Rows whose exponentials share one rescaling.
constexpr int kColumnUnroll = 4;

// ---- the tile in registers

constexpr int kTileLanes = 4;  // lanes of a warp across; the other factor of 32 is rows
constexpr int kTileRows = kWarp / kTileLanes;
constexpr int kTileWarps = 16;  // maximum

// Merges each column's Stats over the rows of the warp. Lane (x, y) keeps one column of pack x in stat[0]; its number
// is returned. If a pack has fewer columns than the warp has rows, several lanes hold the same column, and all but one
// of them return -1. N: elements of a pack.
template <class Op, int N> __device__ __forceinline__ int MergeTileRows(typename Op::Stat (&stat)[N]) {
  int column = 0, columns = N;
#pragma unroll
  for (int step = kWarp / 2; step >= kTileLanes; step /= 2) {
    if (columns > 1) {
      columns /= 2;
      const bool upper = threadIdx.x & step;
      column += upper ? columns : 0;
#pragma unroll
      for (int j = 0; j < columns; ++j) {
        const auto keep = upper ? stat[j + columns] : stat[j], give = upper ? stat[j] : stat[j + columns];
        stat[j] = Op::Merge(keep, Op::Exchange(give, step));
      }
    } else {
      stat[0] = Op::Merge(stat[0], Op::Exchange(stat[0], step));
      if (threadIdx.x & step) column = -1;
    }
  }
  return column;
}

// Launch bound. Blocks have up to 512 threads; a bound of 640 limits a thread to 96 registers instead of 128, which
// lets two more blocks of 7 warps fit on a multiprocessor.
template <class Op> constexpr int kColumnRegisterThreads =
    kWarp * kTileWarps * (Op::kInputs == 2 && sizeof(typename Op::T) >= 4 ? 5 : 4) / 4;

// `warps`: warps per tile; 1, where the block has several tiles, or all warps of the block. `tiles`: tiles along the
// inner dimension. Requires arrays aligned to 16 bytes and inner a multiple of a pack.
//
//     Op      operation; see ops.cuh
//     kPacks  rows that each thread holds
//     kAlone  a tile is one warp, 32 packs across
template <class Op, int kPacks, bool kAlone>
__global__ void __launch_bounds__(kAlone ? 128 : kColumnRegisterThreads<Op>, kAlone ? 4 - Op::kInputs : 2 / Op::kInputs)
    SoftmaxColumnRegisters(const __grid_constant__ SoftmaxParams p, int warps, int64_t tiles) {
  using T = typename Op::T;
  using C = typename Op::C;
  using Stat = typename Op::Stat;
  using Final = typename Op::Final;
  constexpr int N = kVector<T>, kInputs = Op::kInputs, kLanes = kAlone ? kWarp : kTileLanes;

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, x = lane % kLanes;
  const int64_t tile = warps == 1 ? int64_t{blockIdx.x} * (blockDim.x / kWarp) + warp : blockIdx.x;
  const int64_t outer = tile / tiles;
  const int64_t column = (tile % tiles * kLanes + x) * N;
  const int first_row = kAlone ? 0 : (warps == 1 ? 0 : warp * kTileRows) + lane / kLanes;
  const int step = kAlone ? 1 : warps * kTileRows;
  const int width = outer < p.rows && column < p.inner ? static_cast<int>(p.width) : 0;
  const int64_t first = (outer * p.width + first_row) * p.inner + column;
  const int64_t stride = step * p.inner;  // pointers advance by it: a 64-bit product per row is 5% of the instructions

  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  Pack<T, N> held[kPacks][kInputs];
#pragma unroll
  for (int k = 0; k < kInputs; ++k) {
    const T* from = static_cast<const T*>(p.input[k]) + first;
#pragma unroll
    for (int i = 0; i < kPacks; ++i, from += stride) {
      held[i][k] = Filled<T, N>(FromCompute<T>(Op::Neutral(k)));
      if (first_row + i * step < width) held[i][k] = LoadVector<T, N>(from, policy);
    }
  }

  Stat stat[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    C v[kInputs][kPacks];
#pragma unroll
    for (int k = 0; k < kInputs; ++k)
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        C values[N];
        Unpack(held[i][k], values);
        v[k][i] = values[j];
      }
    stat[j] = Op::First(v);
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i)
#pragma unroll
    for (int k = 0; k < kInputs; ++k) Forget(held[i][k]);

  Final final[N];
  if constexpr (kAlone) {
#pragma unroll
    for (int j = 0; j < N; ++j) final[j] = Op::Finish(stat[j]);
  } else {
    constexpr int kColumns = kLanes * N;
    __shared__ Stat stats[kTileWarps][kColumns];
    __shared__ Final finals[kTileWarps][kColumns];
    const int own = MergeTileRows<Op, N>(stat);
    if (warps == 1) {
      if (own >= 0) finals[warp][x * N + own] = Op::Finish(stat[0]);
      __syncwarp();
    } else {
      if (own >= 0) stats[warp][x * N + own] = stat[0];
      __syncthreads();
      // 16 adjacent lanes merge a column.
      const int part = lane % kTileWarps;
      for (int c0 = 0; c0 < kColumns; c0 += blockDim.x / kTileWarps) {
        const int c = c0 + threadIdx.x / kTileWarps;
        const bool has = c < kColumns && part < warps;
        const Stat all = Op::template MergeLanes<kTileWarps>(has ? stats[part][c] : Op::Identity());
        if (part == 0 && c < kColumns) finals[0][c] = Op::Finish(all);
      }
      __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < N; ++j) final[j] = finals[warps == 1 ? warp : 0][x * N + j];
  }

  T* to = static_cast<T*>(p.out) + first;
#pragma unroll
  for (int i = 0; i < kPacks; ++i, to += stride) {
    if (first_row + i * step >= width) break;
    C values[kInputs][N], out[N];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) Unpack(held[i][k], values[k]);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      C v[kInputs][1], o[1];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) v[k][0] = values[k][j];
      Op::Map(v, final[j], o);
      out[j] = o[0];
    }
    StoreVector<T, N>(to, Repack<T, N>(out));
  }
}

// ---- the tile in shared memory

struct ColumnPlan {
  int lanes_x;    // packs across a tile: a power of two, at most kColumnThreads
  bool resident;  // the tile is held in shared memory
  int64_t tiles;  // blocks along the inner dimension
};
static_assert(sizeof(ColumnPlan) == 16, "plan.py lays it out");

// Op: operation; see ops.cuh. N: elements of a pack, 1 for unaligned arrays.
template <class Op, int N> __global__ void __launch_bounds__(kColumnThreads)
    SoftmaxColumn(const __grid_constant__ SoftmaxParams p, const __grid_constant__ ColumnPlan plan) {
  using T = typename Op::T;
  using C = typename Op::C;
  using Stat = typename Op::Stat;
  using Final = typename Op::Final;
  using Packed = Pack<T, N>;
  static_assert(kStatSizes<T>, "plan.py");
  constexpr int kInputs = Op::kInputs;
  extern __shared__ __align__(128) char shared_bytes[];
  // Layout: [threads_y][columns] Stats, [columns] merged Stats, then the tile.
  Stat* const stats = reinterpret_cast<Stat*>(shared_bytes);
  Stat* const merged = stats + kColumnThreads * N;
  const int columns = plan.lanes_x * N;
  Packed* const tile = reinterpret_cast<Packed*>(merged + columns);

  const int x = threadIdx.x % plan.lanes_x, y = threadIdx.x / plan.lanes_x;
  const int threads_y = kColumnThreads / plan.lanes_x;
  const int64_t outer = blockIdx.x / plan.tiles;
  const int64_t column = (blockIdx.x % plan.tiles * plan.lanes_x + x) * N;
  const bool active = column < p.inner;
  const int64_t first = outer * p.width * p.inner + column;

  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  auto tile_at = [&](int k, int64_t a) -> Packed& { return tile[(k * p.width + a) * plan.lanes_x + x]; };
  auto global_at = [&](int k, int64_t a) { return static_cast<const T*>(p.input[k]) + first + a * p.inner; };
  auto load = [&](int k, int64_t a) {
    if (plan.resident) return tile_at(k, a);
    return LoadVector<T, N>(global_at(k, a), policy);
  };

  if (plan.resident && active) {
    for (int64_t a = y; a < p.width; a += threads_y) {
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        if constexpr (sizeof(Packed) == 16) CopyAsync<16>(&tile_at(k, a), global_at(k, a));
        else tile_at(k, a) = LoadVector<T, N>(global_at(k, a), policy);
      }
    }
    WaitForCopies();
  }

  Stat stat[N];
#pragma unroll
  for (int j = 0; j < N; ++j) stat[j] = Op::Identity();
  if (active) {
    for (int64_t a0 = y; a0 < p.width; a0 += kColumnUnroll * threads_y) {
      Packed raw[kColumnUnroll][kInputs];
#pragma unroll
      for (int u = 0; u < kColumnUnroll; ++u) {
        const int64_t a = a0 + u * threads_y;
#pragma unroll
        for (int k = 0; k < kInputs; ++k) {
          if (a < p.width) raw[u][k] = load(k, a);
        }
      }
      C values[kColumnUnroll][kInputs][N];
#pragma unroll
      for (int u = 0; u < kColumnUnroll; ++u)
#pragma unroll
        for (int k = 0; k < kInputs; ++k) Unpack(raw[u][k], values[u][k]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        C v[kInputs][kColumnUnroll];
#pragma unroll
        for (int u = 0; u < kColumnUnroll; ++u) {
          const int64_t a = a0 + u * threads_y;
          const bool in = a < p.width;
#pragma unroll
          for (int k = 0; k < kInputs; ++k) v[k][u] = in ? values[u][k][j] : Op::Neutral(k);
        }
        Op::Accumulate(stat[j], v);
      }
    }
  }

  if (threads_y > 1) {
#pragma unroll
    for (int j = 0; j < N; ++j) stats[y * columns + x * N + j] = stat[j];
    __syncthreads();
    // kColumnParts adjacent lanes merge a column.
    const int part = threadIdx.x % kColumnParts;
    for (int c0 = 0; c0 < columns; c0 += kColumnThreads / kColumnParts) {
      const int c = c0 + threadIdx.x / kColumnParts;
      Stat all = Op::Identity();
      if (c < columns) {
        for (int row = part; row < threads_y; row += kColumnParts) all = Op::Merge(all, stats[row * columns + c]);
      }
      all = Op::template MergeLanes<kColumnParts>(all);
      if (part == 0 && c < columns) merged[c] = all;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; ++j) stat[j] = merged[x * N + j];
  }
  if (!active) return;

  Final final[N];
#pragma unroll
  for (int j = 0; j < N; ++j) final[j] = Op::Finish(stat[j]);
#pragma unroll 2
  for (int64_t a = y; a < p.width; a += threads_y) {
    C values[kInputs][N], out[N];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) Unpack(load(k, a), values[k]);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      C v[kInputs][1], o[1];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) v[k][0] = values[k][j];
      Op::Map(v, final[j], o);
      out[j] = o[0];
    }
    StoreVector<T, N>(static_cast<T*>(p.out) + first + a * p.inner, Repack<T, N>(out));
  }
}

}  // namespace jaxkern
