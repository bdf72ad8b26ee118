// Bitonic networks: they sort 64-bit numbers in shared memory, by the threads of a block, or the numbers of the lanes of a warp.
#pragma once

#include "common/std.h"

namespace jaxkern {

// The first `size` elements of `held`, in shared memory, in descending order: size / 8 threads hold 8 elements each. Those less than 256
// apart are exchanged in registers and by shuffles. size is a power of two
// from 256 on, and the block has at least so many threads. The caller puts a barrier before it, and after it.
__device__ __forceinline__ void SortDescending(uint64_t* held, uint32_t size) {
  constexpr uint32_t kOwn = 8;
  const uint32_t t = threadIdx.x, threads = size / kOwn, first = t * kOwn;
  const bool active = t < threads;  // for whole warps
  uint64_t own[kOwn];               // elements [first, first + 8), whose order at the start is of no importance
#pragma unroll
  for (uint32_t i = 0; i < kOwn; ++i) own[i] = active ? held[i * threads + t] : 0;
  auto exchange = [&](uint32_t i, uint32_t j, bool descending) {
    const uint64_t a = own[i], b = own[j];
    const bool swaps = (a < b) == descending;
    own[i] = swaps ? b : a, own[j] = swaps ? a : b;
  };
#pragma unroll
  for (uint32_t run = 2; run < kOwn; run *= 2) {
#pragma unroll
    for (uint32_t apart = run / 2; apart; apart /= 2) {
#pragma unroll
      for (uint32_t i = 0; i < kOwn; ++i) {
        if (!(i & apart)) exchange(i, i | apart, !(i & run));
      }
    }
  }
#pragma unroll 1
  for (uint32_t run = kOwn; run <= size; run *= 2) {
    const bool descending = !(first & run);
#pragma unroll 1
    for (uint32_t apart = run / 2; apart >= kOwn; apart /= 2) {
      const bool larger = !(first & apart) == descending, shared = apart >= 32 * kOwn;
      if (shared) {
        __syncthreads();
#pragma unroll
        for (uint32_t i = 0; i < kOwn; ++i) {
          if (active) held[i * threads + t] = own[i];
        }
        __syncthreads();
      }
      if (!active) continue;
#pragma unroll
      for (uint32_t i = 0; i < kOwn; ++i) {
        const uint64_t other =
            shared ? held[i * threads + (t ^ apart / kOwn)] : __shfl_xor_sync(~0u, own[i], apart / kOwn);
        if ((own[i] < other) == larger) own[i] = other;
      }
    }
#pragma unroll
    for (uint32_t apart = kOwn / 2; apart; apart /= 2) {
#pragma unroll
      for (uint32_t i = 0; i < kOwn; ++i) {
        if (!(i & apart)) exchange(i, i | apart, descending);
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (uint32_t i = 0; i < kOwn; ++i) {
    if (active) held[first + i] = own[i];
  }
}

// The values of the lanes of a warp in descending order.
template <class V> __device__ __forceinline__ V SortedInWarp(V own) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t run = 2; run <= 32; run *= 2) {
#pragma unroll
    for (uint32_t apart = run / 2; apart; apart /= 2) {
      const V other = __shfl_xor_sync(~0u, own, apart);
      const bool larger = ((lane & apart) == 0) == ((lane & run) == 0);
      own = larger == (own < other) ? other : own;
    }
  }
  return own;
}

}  // namespace jaxkern
