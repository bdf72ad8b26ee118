// Reductions over the lanes of a warp, then over the warps of a block. All threads get the result (for a scan, their own).
// The order depends only on the number of threads, so that results are reproducible.
#pragma once

#include "std.h"

namespace jaxkern {

constexpr int kWarp = 32;

// Folds an array pairwise: short dependency chains, and a rounding error that grows with log(N).
template <int N, class V, class Combine> __device__ __forceinline__ V Fold(const V (&v)[N], Combine combine) {
  V level[N];
#pragma unroll
  for (int i = 0; i < N; ++i) level[i] = v[i];
#pragma unroll
  for (int step = 1; step < N; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < N; i += 2 * step) level[i] = combine(level[i], level[i + step]);
  }
  return level[0];
}

// Combines over aligned groups of kLanes lanes (a power of two up to 32); all 32 lanes take part.
template <int kLanes, class V, class Combine> __device__ __forceinline__ V ReduceLanes(V v, Combine combine) {
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) v = combine(v, __shfl_xor_sync(0xffffffffu, v, lane));
  return v;
}

// Combines each of kCount values (a power of two up to kLanes) over aligned groups of kLanes lanes. Lane l gets one of them:
// number (l % kLanes) / (kLanes / kCount). While there are several, each half of a group takes half of them. Overwrites v;
// all 32 lanes take part.
template <int kLanes, int kCount, class V, class Combine>
__device__ __forceinline__ V ReduceLanesApart(V (&v)[kCount], Combine combine) {
  int count = kCount;
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) {
    if (count > 1) {
      count /= 2;
      const bool upper = threadIdx.x & half;
#pragma unroll
      for (int k = 0; k < kCount / 2; ++k) {
        if (k >= count) continue;
        const V other = upper ? v[k] : v[k + count];
        v[k] = combine(upper ? v[k + count] : v[k], __shfl_xor_sync(0xffffffffu, other, half));
      }
    } else {
      v[0] = combine(v[0], __shfl_xor_sync(0xffffffffu, v[0], half));
    }
  }
  return v[0];
}

// Combines one value per warp into one per block, in the order of the warps. `merge` combines over kMaxWarps lanes;
// `identity` pads smaller blocks. `room`: shared memory for one Stat per warp. Contains one barrier; the caller must place
// another one before it uses `room` again.
template <int kMaxWarps, class Stat, class Sync, class MergeLanes>
__device__ __forceinline__ Stat ReduceWarps(Stat mine, Stat* room, int warps, Stat identity, Sync sync,
                                            MergeLanes merge) {
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) room[threadIdx.x / kWarp] = mine;
  sync();
  const int slot = lane % kMaxWarps;
  return merge(slot < warps ? room[slot] : identity);
}

// The exclusive prefix sum of v over the threads of the block. On return `room`, in shared memory, holds the sum of each
// warp. Contains two barriers, the second after the last use of `room`.
__device__ __forceinline__ uint32_t SumOfThreadsBefore(uint32_t v, uint32_t* room) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint32_t sum = v;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == kWarp - 1) room[warp] = sum;
  __syncthreads();
  uint32_t before = sum - v;
  for (int w = 0; w < warp; ++w) before += room[w];
  __syncthreads();
  return before;
}

}  // namespace jaxkern
