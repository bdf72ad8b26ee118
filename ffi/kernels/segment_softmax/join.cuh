// Long runs of the segment softmax: SegmentJoin merges the Stats that the tiles of each long run left in its slots, and
// writes the total to all of them.
//
// A block takes kJoinTiles tiles and kJoinColumns columns, and processes the long runs that begin in these tiles in
// sequence. For each run, teams of threads (one thread per column) take parts in turn, and the totals of the teams are
// merged through shared memory in a fixed order. Memory traffic: run.keys are read at a few places per tile, and each
// slot in use is read and written once. Most calls have no long run.
#pragma once

#include "ops.cuh"
#include "run.cuh"

namespace jaxkern {

// Returns the number of tiles of the long run that begins in `tile`; 0 if there is none.
__device__ inline uint32_t PartsOf(const SegmentRun& run, uint32_t tile) {
  const uint32_t begin = tile * run.places, end = begin + run.places;
  // Issue all loads together.
  const uint32_t before = run.Key(begin - (begin > 0)), head = run.Key(begin);
  const uint32_t key = run.Key(min(end, run.positions) - 1), next = run.Key(min(end, run.positions - 1));
  const uint32_t far = run.Key(min(end + run.lookahead, run.positions - 1));
  const bool began_earlier = begin > 0 && head == key && before == key;
  if (end + run.lookahead >= run.positions || key >= run.dropped || next != key || far != key || began_earlier)
    return 0;
  // Find the first tile from `low` on that does not begin with the key. Each step examines several tiles, because
  // memory latency dominates a step.
  constexpr uint32_t kLooks = 7;
  uint32_t low = tile + 2, high = run.tiles;
  while (low < high) {
    const uint32_t step = (high - low + kLooks) / (kLooks + 1);
    uint32_t found[kLooks], passed = 0;
#pragma unroll
    for (uint32_t i = 0; i < kLooks; ++i) found[i] = run.Key(min(low + (i + 1) * step - 1, high - 1) * run.places);
#pragma unroll
    for (uint32_t i = 0; i < kLooks; ++i) passed += low + (i + 1) * step - 1 < high && found[i] == key;
    if (passed < kLooks) high = min(high, low + (passed + 1) * step - 1);
    low += passed * step;
  }
  return low - tile;
}

constexpr int kJoinThreads = 256, kJoinColumns = 8, kJoinTeams = kJoinThreads / kJoinColumns, kJoinTiles = 64;
// Op: SegmentForward or SegmentBackward (ops.cuh). `column_tiles`: of a row. groups: groups of kJoinTiles tiles.
template <class Op> __global__ void __launch_bounds__(kJoinThreads)
    SegmentJoin(const __grid_constant__ SegmentRun run, int64_t column_tiles, int64_t groups) {
  using Stat = typename Op::Stat;
  constexpr int kMany = sizeof(typename Op::C) == 8 ? 4 : 16;
  __shared__ uint32_t first[kJoinTiles], parts[kJoinTiles];
  __shared__ int runs;
  __shared__ Stat room[kJoinThreads];
  const int64_t item = blockIdx.x / column_tiles, o = item / groups, group = item - o * groups;
  if (threadIdx.x == 0) runs = 0;
  __syncthreads();
  const int64_t tile = group * kJoinTiles + threadIdx.x;
  if (threadIdx.x < kJoinTiles && tile < run.tiles) {
    const uint32_t count = PartsOf(run, static_cast<uint32_t>(tile));
    if (count > 0) {
      const int at = atomicAdd(&runs, 1);
      first[at] = static_cast<uint32_t>(tile);
      parts[at] = count;
    }
  }
  __syncthreads();
  const int team = threadIdx.x / kJoinColumns;
  const int64_t column = (blockIdx.x - item * column_tiles) * kJoinColumns + threadIdx.x % kJoinColumns;
  const bool active = column < run.inner;
  for (int r = 0; r < runs; ++r) {
    const auto slot = [&](uint32_t j) { return run.Slot<Stat>(o, first[r] + j, j == 0) + column; };
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

}  // namespace jaxkern
