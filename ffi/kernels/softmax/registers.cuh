// Softmax with a row held in registers: the algorithms sub_warp, warp, block and cluster.
//
//     SoftmaxRegisters    a row per group of lanes, per block or per cluster
//     SoftmaxStaged       narrow rows that do not begin on 16 bytes
//
// Both read p.input and write p.out. Memory traffic: one read and one write of each row.
//
// SoftmaxRegisters: a row belongs to a group of kLanes threads, to a block (kBlockLanes) or to a cluster of blocks
// (kClusterLanes, sm_90). Thread t of the group holds packs t, t + group, ..., kPacks of them, of kRows rows. All loads
// are issued before the first use. A row of a block takes one barrier: each warp contributes its Stat, and every thread
// merges them in the same order. The blocks of a cluster merge theirs in the same way through distributed shared
// memory.
//
// SoftmaxStaged: the rows of a block are contiguous. They are copied to and from shared memory as 16-byte vectors, and
// each group reads its row there at its own alignment.
#pragma once

#include "common/async.cuh"
#include "softmax/row.cuh"

namespace jaxkern {

constexpr int kBlockLanes = 0, kClusterLanes = -1;

constexpr int kWarpThreads = 128;
constexpr int kBlockThreads = 512;  // maximum
constexpr int kStagedElements = 8;  // per lane

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
      tile.Set(i, v, raw[u][i].data, RowOf::kChanges);
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

// Rows of at most kLanes * kStagedElements elements. A block has `rows_per_block` rows in shared memory at once; each
// of the inputs has `room_packs` packs. The output replaces input 0. Op: operation; see ops.cuh. kLanes: threads of a
// row. kMasked: p.mask is applied.
template <class Op, int kLanes, bool kMasked> __global__ void __launch_bounds__(kWarpThreads)
    SoftmaxStaged(const __grid_constant__ SoftmaxParams p, int rows_per_block, int room_packs) {
  using T = typename Op::T;
  using C = typename Op::C;
  constexpr int N = kVector<T>, kHeld = kStagedElements, kGroups = kWarpThreads / kLanes;
  extern __shared__ __align__(128) char shared_bytes[];
  auto* const room = reinterpret_cast<Pack<T, N>*>(shared_bytes);  // [kInputs][room_packs]

  // The rows of the block, as one contiguous row.
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * rows_per_block;
  const int rows = static_cast<int>(min(int64_t{rows_per_block}, p.rows - first_row));
  const int width = static_cast<int>(p.width);
  const Row<T, N, int> stretch(first_row * p.width, rows * width, 0, N);
  const int packs = stretch.Count();
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
#pragma unroll
  for (int k = 0; k < Op::kInputs; ++k) {
    for (int i = threadIdx.x; i < packs; i += kWarpThreads) {
      room[k * room_packs + i] =
          stretch.Load(static_cast<const T*>(p.input[k]), i, FromCompute<T>(Op::Neutral(k)), policy);
    }
  }
  __syncthreads();

  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  for (int turn = 0; turn < rows_per_block; turn += kGroups) {
    const int r = turn + group;
    T* elements[Op::kInputs];
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) {
      elements[k] = reinterpret_cast<T*>(room + k * room_packs) + stretch.shift + r * width;
    }
    typename Op::template Tile<kHeld, 1> tile;
    bool takes_part[kHeld];
    int64_t mask_row = 0;
    if constexpr (kMasked) mask_row = p.mask_view.outer_map(first_row + min(r, rows - 1));
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int e = lane + i * kLanes;
      takes_part[i] = r < rows && e < width;
      if constexpr (kMasked) takes_part[i] = takes_part[i] && p.mask[mask_row + e * p.mask_view.axis_stride];
      C v[Op::kInputs][1];
      Pack<T, 1> raw[Op::kInputs];
#pragma unroll
      for (int k = 0; k < Op::kInputs; ++k) {
        const T x = takes_part[i] ? elements[k][e] : FromCompute<T>(Op::Neutral(k));
        v[k][0] = ToCompute(x);
        raw[k] = Filled<T, 1>(x);
      }
      tile.Set(i, v, raw, false);
    }
    const typename Op::Final final = Op::Finish(tile.template Reduce<kLanes>([](C max) { return max; }));
    __syncwarp();  // all lanes of the group that read the row must have done so before it is overwritten
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int e = lane + i * kLanes;
      C out[1];
      tile.Get(i, final, out);
      if (r < rows && e < width) elements[0][e] = FromCompute<T>(takes_part[i] ? out[0] : Op::Masked());
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < packs; i += kWarpThreads) {
    stretch.Store(static_cast<T*>(p.out), i, room[i]);
  }
}

}  // namespace jaxkern
