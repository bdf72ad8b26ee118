// Softmax with a row held in registers: the algorithms sub_warp, warp, block and cluster. A row belongs to a group of lanes, to a block
// or to a cluster. Memory traffic: one read and one write of each row.
#pragma once

#include "common/async.cuh"
#include "softmax/row.cuh"

namespace jaxkern {

constexpr int kBlockLanes = 0, kClusterLanes = -1;

constexpr int kWarpThreads = 128;
constexpr int kBlockThreads = 512;  // maximum

// Minimum number of blocks of 512 threads per multiprocessor, which limits a thread to 64 or 128 registers.
template <class Op, int kPacks, bool kManyRegisters> constexpr int kMinBlocks =
    !kManyRegisters && sizeof(typename Op::T) <= 4 && kPacks * Op::kInputs * (sizeof(typename Op::T) == 4 ? 1 : 2) <= 8
        ? 2
        : 1;

// Merges one Stat per block over the cluster, in the order of rank, through a mailbox in each block's shared memory.
// The kernel must call Open() first; only Merge() waits for the other blocks to start. No block exits while others
// still write to it, because Merge() waits for all of them.
template <class Op> struct ClusterMailbox {
  using Stat = typename Op::Stat;
#ifdef JAXKERN_HAS_BULK_COPY
  struct Shared {
    Barrier arrived;
    Stat stat[kMaxCluster];
  };
  static __device__ __forceinline__ void Open(Shared* box) {
    if (threadIdx.x == 0) {
      InitBarrier(&box->arrived, 1);
      FenceBarrierInit();
    }
    ArriveClusterRelaxed();
  }
  static __device__ __forceinline__ Stat Merge(Shared* box, Stat stat, uint32_t rank, uint32_t blocks) {
    WaitCluster();
    if (threadIdx.x == 0) ArriveExpect(&box->arrived, blocks * sizeof(Stat));
    if (threadIdx.x < blocks) StoreRemote(&box->stat[rank], stat, &box->arrived, threadIdx.x);
    Wait(&box->arrived, 0);
    const uint32_t lane = threadIdx.x % kMaxCluster;
    return Op::template MergeLanes<kMaxCluster>(lane < blocks ? box->stat[lane] : Op::Identity());
  }
#endif
};

// Returns the maximum over the block of one value per warp.
template <class C> __device__ __forceinline__ C BlockMax(C max) {
  constexpr int kMaxWarps = kBlockThreads / kWarp;
  __shared__ C room[kMaxWarps];
  return ReduceWarps<kMaxWarps>(
      max, room, blockDim.x / kWarp, -Infinity<C>(), [] { __syncthreads(); },
      [](C m) { return ReduceLanes<kMaxWarps>(m, MaxOf()); });
}

// Minimum number of blocks of 128 threads per multiprocessor: 12 where 40 registers per thread are enough.
template <class Op, class RowOf, int kPacks> constexpr int kMinGroupBlocks =
    kPacks == 1 && Op::kInputs == 1 && sizeof(typename Op::T) == 2 ? 12 : RowOf::GroupBlocks(kPacks);

// Each group, block or cluster computes kRows rows, and loads all of them before it reduces the first.
//
//     Op      operation; see ops.cuh
//     RowOf   a SoftmaxRow or a class with its interface
//     kLanes  threads of a row, at most a warp; or kBlockLanes, kClusterLanes
//     kPacks  packs of a row that a thread holds
//     kRows   rows that a thread holds at once
template <class Op, class RowOf, int kLanes, int kPacks, int kRows>
__global__ void __launch_bounds__(kLanes > 0 ? kWarpThreads : kBlockThreads,
                                  kLanes > 0 ? kMinGroupBlocks<Op, RowOf, kPacks>
                                             : kMinBlocks<Op, kPacks, RowOf::kManyRegisters>)
    SoftmaxRegisters(const __grid_constant__ typename RowOf::Params p) {
  using T = typename Op::T;
  using O = typename RowOf::O;
  using C = typename Op::C;
  constexpr int N = RowOf::kPack;
  constexpr bool kGroup = kLanes > 0, kCluster = kLanes == kClusterLanes;
  static_assert(kGroup || kRows == 1, "a block has one row");

  uint32_t rank = 0, blocks = 1;
#ifdef JAXKERN_HAS_BULK_COPY
  __shared__ typename ClusterMailbox<Op>::Shared mailbox;
  if constexpr (kCluster) {
    rank = ClusterRank();
    blocks = ClusterSize();
    ClusterMailbox<Op>::Open(&mailbox);
  }
#endif
  const int lanes = kGroup ? kLanes : static_cast<int>(blocks * blockDim.x);
  const int lane = kGroup ? threadIdx.x % lanes : rank * blockDim.x + threadIdx.x;
  constexpr int kGroups = kGroup ? kWarpThreads / (kGroup ? kLanes : 1) : 1;
  const int64_t first_row =
      kGroup ? static_cast<int64_t>(blockIdx.x) * (kGroups * kRows) + threadIdx.x / lanes : blockIdx.x / blocks;

  typename RowOf::Raw raw[kRows][kPacks];
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    const RowOf row(p, first_row + u * kGroups);
    row.LoadAll(raw[u], lane, lanes);
  }

#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    RowOf row(p, first_row + u * kGroups);
    row.Begin(raw[u], lane, lanes);
    const auto skips = [&](int i) {
      if constexpr (RowOf::kSkips) return row.Skips(raw[u][i], lane + i * lanes);
      else return false;
    };
    typename Op::template Tile<kPacks, N, RowOf::kSkips> tile;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if constexpr (RowOf::kSkips) {
        if (skips(i)) {
          tile.Skip(i);
          continue;
        }
      }
      C v[Op::kInputs][N];
      row.Values(raw[u][i], v, lane + i * lanes);
      tile.Set(i, v, raw[u][i].data);
    }
    typename Op::Stat stat = tile.template Reduce<kGroup ? kLanes : kWarp>([](C max) {
      // float64 rows share the maximum of the block, because rescaling a warp's sum would add a rounding error. The
      // extra barrier costs no time here.
      if constexpr (!kGroup && sizeof(T) == 8) return BlockMax(max);
      else return max;
    });
    if constexpr (!kGroup) {
      __shared__ typename Op::Stat room[kBlockThreads / kWarp];
      stat = ReduceBlock<Op>(stat, room);
    }
#ifdef JAXKERN_HAS_BULK_COPY
    if constexpr (kCluster) stat = ClusterMailbox<Op>::Merge(&mailbox, stat, rank, blocks);
#endif
    row.Settle(raw[u][0], stat);
    typename Op::Final final = Op::Finish(stat);
    if constexpr (!kGroup) final = tile.Localize(final);
    row.Scale(final);
    Pack<O, N> result[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if constexpr (RowOf::kSkips) {
        if (skips(i)) {
          result[i] = row.ResultOfSkipped(lane + i * lanes);
          continue;
        }
      }
      C out[N];
      tile.Get(i, final, out);
      result[i] = row.Result(out, final, raw[u][i], lane + i * lanes);
    }
    row.StoreAll(static_cast<O*>(p.out), result, lane, lanes);
    row.template Close<kLanes>(raw[u][0], stat, lane);
  }
}

}  // namespace jaxkern
