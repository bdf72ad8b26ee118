// The largest candidates (order.h) that a block has found so far, held in shared memory: Append adds those above a bound, and Keep leaves
// the k largest, by a radix selection.
#pragma once

#include "bitonic.cuh"
#include "common/std.h"
#include "order.h"

namespace jaxkern {

constexpr uint32_t kTopKThreads = 256, kTopKHeld = 4096, kTopKDigit = 11, kTopKBins = 1 << kTopKDigit;

struct TopKShared {
  uint64_t held[kTopKHeld];
  uint32_t bins[kTopKBins];
  uint64_t different[kTopKThreads / 32];
  uint32_t warp_sums[kTopKThreads / 32];
  uint32_t count;                 // of elements in `held`, or more if some did not fit
  uint32_t digit, above, within;  // the digit of the k-th largest; how many digits are greater, and how many are equal
};

// words[i], by selections: the index is not known when the kernel is compiled. N is a power of two.
template <class Word, int N> __device__ __forceinline__ Word Picked(const Word (&words)[N], uint32_t i) {
  if constexpr (N == 1) {
    return words[0];
  } else {
    Word half[N / 2];
#pragma unroll
    for (int w = 0; w < N / 2; ++w) half[w] = i & (N / 2) ? words[w + N / 2] : words[w];
    return Picked(half, i);
  }
}

// Appends the elements `of(i)` above the bound among those whose bit i of `wanted` is set; lanes of a warp call it together. Returns
// the bits of those for which there was no place.
template <class Of> __device__ __forceinline__ uint32_t Append(TopKShared& s, uint32_t wanted, uint64_t bound, Of of) {
  const uint32_t lane = threadIdx.x % 32;
  while (__any_sync(~0u, wanted != 0)) {
    const uint64_t own = wanted ? of(__ffs(wanted) - 1) : 0;
    const uint32_t above = __ballot_sync(~0u, own > bound);
    uint32_t at = lane == 0 && above ? atomicAdd(&s.count, static_cast<uint32_t>(__popc(above))) : 0;
    at = __shfl_sync(~0u, at, 0) + __popc(above & ((1u << lane) - 1));
    const bool fits = own <= bound || at < kTopKHeld;
    if (own > bound && fits) s.held[at] = own;
    if (fits) wanted &= wanted - 1;
    if (__any_sync(~0u, !fits)) break;
  }
  return wanted;
}

// Leaves the k largest elements of s.held, which holds at least k; all threads call it. Returns a lower bound of them that is
// greater than all others.
__device__ __forceinline__ uint64_t Keep(TopKShared& s, uint32_t k) {
  const uint32_t t = threadIdx.x, lane = t % 32, held = min(s.count, kTopKHeld);
  // The first digit begins at the first bit in which elements differ: few of them share it with the k-th largest.
  const uint64_t some = s.held[0];
  uint64_t different = 0;
  for (uint32_t i = t; i < held; i += kTopKThreads) different |= s.held[i] ^ some;
  const uint64_t high = __reduce_or_sync(~0u, static_cast<uint32_t>(different >> 32));
  const uint32_t low = __reduce_or_sync(~0u, static_cast<uint32_t>(different));
  if (lane == 0) s.different[t / 32] = high << 32 | low;
  __syncthreads();
  different = 0;
#pragma unroll
  for (uint32_t w = 0; w < kTopKThreads / 32; ++w) different |= s.different[w];
  uint32_t shift = different >> 32 ? 64 - __clz(static_cast<uint32_t>(different >> 32))
                                   : 32 - __clz(static_cast<uint32_t>(different));
  uint32_t wanted = k;
  uint64_t bound = shift == 64 ? 0 : some >> shift << shift;  // equal to the k-th largest from bit `shift` on
  do {
    const uint32_t next = shift > kTopKDigit ? shift - kTopKDigit : 0;
#pragma unroll
    for (uint32_t i = t; i < kTopKBins; i += kTopKThreads) s.bins[i] = 0;
    __syncthreads();
    for (uint32_t i = t; i < held; i += kTopKThreads) {
      const uint64_t c = s.held[i];
      if (shift == 64 || (c ^ bound) >> shift == 0) atomicAdd(&s.bins[c >> next & ((1u << (shift - next)) - 1)], 1u);
    }
    __syncthreads();
    // Thread t has the bins from `last` down: the sum over threads before it counts the greater digits.
    constexpr uint32_t kOwn = kTopKBins / kTopKThreads;
    const uint32_t last = kTopKBins - 1 - t * kOwn;
    uint32_t own = 0;
#pragma unroll
    for (uint32_t i = 0; i < kOwn; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(&s.bins[last - i - 3]);
      own += four.x + four.y + four.z + four.w;
    }
    uint32_t sum = own;
#pragma unroll
    for (uint32_t by = 1; by < 32; by *= 2) {
      const uint32_t below = __shfl_up_sync(~0u, sum, by);
      if (lane >= by) sum += below;
    }
    if (lane == 31) s.warp_sums[t / 32] = sum;
    __syncthreads();
    uint32_t above = sum - own;
#pragma unroll
    for (uint32_t w = 0; w < kTopKThreads / 32; ++w) above += w < t / 32 ? s.warp_sums[w] : 0;
    if (above < wanted && wanted <= above + own) {
      uint32_t i = 0;
      while (above + s.bins[last - i] < wanted) above += s.bins[last - i++];
      s.digit = last - i, s.above = above, s.within = s.bins[last - i];
      s.count = 0;  // here, as all threads have read it, and none reads it before the next barrier
    }
    __syncthreads();
    bound |= static_cast<uint64_t>(s.digit) << next;
    wanted -= s.above;
    shift = next;
  } while (s.within != wanted && shift);  // all threads write s.within again only after the next barrier

  // In place: what is kept of the elements that were read so far fits where these were.
  constexpr int kAtOnce = 4;
#pragma unroll 1
  for (uint32_t first = 0; first < held; first += kAtOnce * kTopKThreads) {
    uint64_t own[kAtOnce];
    uint32_t kept = 0;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t at = first + i * kTopKThreads + t;
      own[i] = at < held ? s.held[at] : 0;
      kept |= static_cast<uint32_t>(own[i] && own[i] >= bound) << i;
    }
    __syncthreads();
    Append(s, kept, 0, [&](int i) { return Picked(own, i); });
    __syncthreads();
  }
  return bound;
}

// A bound that at least k elements of the first tile exceed, where each thread has its largest key; all threads call it.
__device__ __forceinline__ uint64_t FirstBound(TopKShared& s, uint32_t largest, uint32_t k) {
  constexpr uint32_t kWarps = kTopKThreads / 32;
  const uint32_t of_warp = (k + kWarps - 1) / kWarps;  // each warp has so many elements above the bound
  if (of_warp > 32) return 0;
  const uint32_t key = __shfl_sync(~0u, SortedInWarp(largest), of_warp - 1);
  if (threadIdx.x % 32 == 0) s.warp_sums[threadIdx.x / 32] = key;
  __syncthreads();
  uint32_t bound = s.warp_sums[0];
#pragma unroll
  for (uint32_t w = 1; w < kWarps; ++w) bound = k == 1 ? max(bound, s.warp_sums[w]) : min(bound, s.warp_sums[w]);
  return static_cast<uint64_t>(bound) << 32;  // no candidate equals it
}

// The largest of the threads' candidates; all threads call it.
__device__ __forceinline__ uint64_t LargestOfBlock(TopKShared& s, uint64_t own) {
  const uint32_t high = __reduce_max_sync(~0u, KeyOf(own));
  const uint32_t low = __reduce_max_sync(~0u, KeyOf(own) == high ? static_cast<uint32_t>(own) : 0);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.different[threadIdx.x / 32] = static_cast<uint64_t>(high) << 32 | low;
  __syncthreads();
  uint64_t largest = 0;
#pragma unroll
  for (uint32_t w = 0; w < kTopKThreads / 32; ++w) largest = max(largest, s.different[w]);
  return largest;
}

}  // namespace jaxkern
