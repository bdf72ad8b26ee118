// The largest elements of a row that a warp holds in registers, for top_k and the router.
#pragma once

#include "bitonic.cuh"
#include "order.h"

namespace jaxkern {

// A row that a warp holds: `kVector` elements of a lane from column `first` on, and as many from every 32 * kVector columns later.
template <int kVector, int kPacks> struct RowOfWarp {
  static constexpr int kOwn = kVector * kPacks;
  static constexpr uint32_t kStep = 32 * kVector;
  static_assert(kOwn <= 32);
  uint32_t keys[kOwn], first;
  uint32_t left;  // the bits of the elements that exist

  // Lane n gets the n-th largest candidate, for n < k <= 32. room: memory of this warp; others must not write it until the next barrier.
  __device__ __forceinline__ uint64_t Select(uint32_t k, uint64_t* room) {
    constexpr uint32_t kFew = 3;  // so many are found one by one
    return k <= kFew ? OneByOne(k) : AboveBound(k, room);
  }

 private:
  __device__ __forceinline__ uint32_t Column(int i) const { return first + i / kVector * kStep + i % kVector; }

  // The largest of what is left, 0 if nothing is. Columns of a lane ascend with i.
  __device__ __forceinline__ uint64_t Largest() const {
    uint32_t key = 0, column = ~0u;
#pragma unroll
    for (int i = kOwn - 1; i >= 0; --i) {
      if (left >> i & 1 && keys[i] >= key) key = keys[i], column = Column(i);
    }
    return Candidate(key, column);
  }

  __device__ __forceinline__ uint64_t OneByOne(uint32_t k) {
    uint64_t own = Largest(), kept = 0;
    for (uint32_t n = 0; n < k; ++n) {
      const uint32_t key = __reduce_max_sync(~0u, KeyOf(own));
      const uint32_t low = __reduce_max_sync(~0u, KeyOf(own) == key ? static_cast<uint32_t>(own) : 0);
      const uint64_t chosen = static_cast<uint64_t>(key) << 32 | low;
      if (threadIdx.x % 32 == n) kept = chosen;
      if (own == chosen) {
        const uint32_t column = ColumnOf(chosen) - first;
        left &= ~(1u << (column / kStep * kVector + column % kVector));
        own = Largest();
      }
    }
    return kept;
  }

  // At least k elements reach the k-th largest of the lanes' largest keys, and few more do.
  __device__ __forceinline__ uint64_t AboveBound(uint32_t k, uint64_t* room) {
    const uint32_t lane = threadIdx.x % 32, below = (1u << lane) - 1;
    uint32_t largest = 0, count = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) largest = left >> i & 1 ? max(largest, keys[i]) : largest;
    const uint32_t bound = __shfl_sync(~0u, SortedInWarp(largest), k - 1);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool reaches = left >> i & 1 && keys[i] >= bound;
      const uint32_t all = __ballot_sync(~0u, reaches), at = count + __popc(all & below);
      if (reaches && at < 32) room[at] = Candidate(keys[i], Column(i));
      count += __popc(all);
    }
    if (count > 32) return OneByOne(k);  // equal elements
    __syncwarp();
    const uint64_t own = lane < count ? room[lane] : 0;
    __syncwarp();
    return SortedInWarp(own);
  }
};

}  // namespace jaxkern
