// Long segments: the statistics of their parts, which the tiles or chunks that they lie in left in slots, merged.
#pragma once

#include "segment_softmax_ops.cuh"
#include "segment_softmax_tile.cuh"

namespace jaxkern {

// Merges the statistics of the parts of each long segment, and leaves the total in the slots of all. A block looks
// through a group of tiles for those that begin there, for a few columns; teams of threads take parts in turn.
constexpr int kJoinColumns = 8, kJoinTeams = kSegmentThreads / kJoinColumns, kJoinTiles = 64;
template <class Op>
__global__ void __launch_bounds__(kSegmentThreads)
SegmentJoin(const __grid_constant__ IndexRun run, const __grid_constant__ SegmentShape s, int64_t slabs, int64_t groups) {
  using Stat = typename Op::Stat;
  constexpr int kMany = sizeof(typename Op::C) == 8 ? 4 : 16;
  __shared__ uint32_t first[kJoinTiles], parts[kJoinTiles];
  __shared__ int runs;
  __shared__ Stat room[kSegmentThreads];
  const int64_t item = blockIdx.x / slabs, o = item / groups, group = item - o * groups;
  if (threadIdx.x == 0) runs = 0;
  __syncthreads();
  const int64_t tile = group * kJoinTiles + threadIdx.x;
  if (threadIdx.x < kJoinTiles && tile < s.tiles) {
    const uint32_t count = PartsOf(run, s.places, s.tiles, static_cast<uint32_t>(tile), s.reach);
    if (count > 0) {
      const int at = atomicAdd(&runs, 1);
      first[at] = static_cast<uint32_t>(tile);
      parts[at] = count;
    }
  }
  __syncthreads();
  const int team = threadIdx.x / kJoinColumns;
  const int64_t column = (blockIdx.x - item * slabs) * kJoinColumns + threadIdx.x % kJoinColumns;
  const bool active = column < run.inner;
  for (int r = 0; r < runs; ++r) {
    const auto slot = [&](uint32_t j) { return SegmentSlot<Stat>(run, s, o, first[r] + j, j == 0) + column; };
    Stat total = Op::Identity(), part[kMany];
    for (uint32_t j = team; active && j < parts[r]; j += kMany * kJoinTeams) {
#pragma unroll
      for (int u = 0; u < kMany; ++u) {
        part[u] = j + u * kJoinTeams < parts[r] ? *slot(j + u * kJoinTeams) : Op::Identity();
      }
      Op::MergeAll(&total, part);
    }
    room[threadIdx.x] = total;
    __syncthreads();
    if (team == 0) {
      total = Op::Identity();
      for (int i = 0; i < kJoinTeams; i += kMany) {
#pragma unroll
        for (int u = 0; u < kMany; ++u) part[u] = room[(i + u) * kJoinColumns + threadIdx.x];
        Op::MergeAll(&total, part);
      }
      room[threadIdx.x] = total;
    }
    __syncthreads();
    total = room[threadIdx.x % kJoinColumns];
    for (uint32_t j = team; active && j < parts[r]; j += kJoinTeams) *slot(j) = total;
    __syncthreads();
  }
}

template <class Op>
cudaError_t LaunchJoin(const IndexRun& run, const SegmentShape& s, cudaStream_t stream) {
  const int64_t slabs = (run.inner + kJoinColumns - 1) / kJoinColumns, groups = (s.tiles + kJoinTiles - 1) / kJoinTiles;
  return Launch(SegmentJoin<Op>, {run.outer * groups * slabs, 1, kSegmentThreads}, stream, run, s, slabs, groups);
}

}  // namespace jaxkern
