// How often each number of [0, bins) is among the elements of an array; numbers beyond are not counted, negative ones as 0.
//
//     CountShared     each block counts in shared memory and then adds its counts to the result
//     CountGlobal     elements are added to the result one by one
//     CountWindows    elements lie in the order of some of their bits (SortScatter in radix.cuh), so that those that follow each other
//                     are mostly in one window of 2^shift bins. Each block counts a window in shared memory at a time, and adds
//                     elements of other windows to the result one by one
//
// Atomic additions to one number wait for each other. The elements of a warp that equal its first one are therefore added at once.
// Sums of integers do not depend on their order. On entry the result is 0. Memory traffic: the array
// once.
#pragma once

#include "common/pack.cuh"

namespace jaxkern {

constexpr uint32_t kCountThreads = 512, kCountShared = 12288, kCountWindow = 8192;

struct CountArgs {
  const void* x;     // [count]
  uint32_t* result;  // [bins]
  uint64_t count;
  uint32_t bins;
  uint32_t shift;  // 2^shift bins in a window, at most kCountWindow
};

// Adds 1 to counts[x], where x < bins; all lanes of a warp call it.
__device__ __forceinline__ void CountOne(uint32_t* counts, uint32_t x, uint32_t bins) {
  const uint32_t first = __shfl_sync(~0u, x, 0), equal = __ballot_sync(~0u, x == first);
  if (threadIdx.x % 32 == 0 && first < bins) atomicAdd(&counts[first], static_cast<uint32_t>(__popc(equal)));
  if (x != first && x < bins) atomicAdd(&counts[x], 1u);
}

// The number as an index below or equal to `bins`, which counts nothing.
template <class T> __device__ __forceinline__ uint32_t BinOf(T x, uint32_t bins) {
  if (x < T(0)) return 0;
  return static_cast<uint64_t>(x) < bins ? static_cast<uint32_t>(x) : bins;
}

template <class T, int kVector, int kPacks>
__device__ __forceinline__ void CountInto(uint32_t* counts, const CountArgs& a) {
  const T* x = static_cast<const T*>(a.x);
  constexpr uint64_t kStep = kCountThreads * kVector;
  for (uint64_t tile = blockIdx.x * (kStep * kPacks); tile < a.count; tile += gridDim.x * (kStep * kPacks)) {
    Pack<T, kVector> packs[kPacks];
    const uint64_t first = tile + threadIdx.x * kVector;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      packs[p] = ZeroPack<T, kVector>();
      if (first + p * kStep < a.count) packs[p] = LoadVector<T, kVector>(x + first + p * kStep);
    }
#pragma unroll
    for (int i = 0; i < kPacks * kVector; ++i) {
      const bool exists = first + i / kVector * kStep < a.count;
      CountOne(counts, exists ? BinOf(Element(packs[i / kVector], i % kVector), a.bins) : a.bins, a.bins);
    }
  }
}

// bins <= kCountShared. The number of elements is a multiple of kVector; kPacks loads run at once.
template <class T, int kVector, int kPacks> __global__ void __launch_bounds__(kCountThreads)
    CountShared(const __grid_constant__ CountArgs a) {
  __shared__ uint32_t counts[kCountShared];
  for (uint32_t i = threadIdx.x; i < a.bins; i += kCountThreads) counts[i] = 0;
  __syncthreads();
  CountInto<T, kVector, kPacks>(counts, a);
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < a.bins; i += kCountThreads) {
    if (counts[i]) atomicAdd(&a.result[i], counts[i]);
  }
}

template <class T, int kVector, int kPacks> __global__ void __launch_bounds__(kCountThreads)
    CountGlobal(const __grid_constant__ CountArgs a) {
  CountInto<T, kVector, kPacks>(a.result, a);
}

// Each block has a part of the array, of whole tiles of kCountThreads * kVector * kPacks elements.
template <class T, int kVector, int kPacks> __global__ void __launch_bounds__(kCountThreads)
    CountWindows(const __grid_constant__ CountArgs a) {
  __shared__ uint32_t counts[kCountWindow];
  constexpr uint64_t kStep = kCountThreads * kVector, kTile = kStep * kPacks;
  const T* x = static_cast<const T*>(a.x);
  const uint32_t size = 1u << a.shift;
  const uint64_t tiles = (a.count + kTile - 1) / kTile;
  const uint64_t begin = tiles * blockIdx.x / gridDim.x * kTile;
  const uint64_t end = min(tiles * (blockIdx.x + 1) / gridDim.x * kTile, a.count);
  uint32_t window = ~0u;  // the first bin in shared memory
  const auto flush = [&] {
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < size; i += kCountThreads) {
      if (window != ~0u && counts[i]) atomicAdd(&a.result[window + i], counts[i]);
      counts[i] = 0;
    }
    __syncthreads();
  };
  for (uint64_t tile = begin; tile < end; tile += kTile) {
    Pack<T, kVector> packs[kPacks];
    const uint64_t first = tile + threadIdx.x * kVector;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      packs[p] = ZeroPack<T, kVector>();
      if (first + p * kStep < end) packs[p] = LoadVector<T, kVector>(x + first + p * kStep);
    }
    const uint32_t middle = BinOf(x[min(tile + kTile / 2, end - 1)], a.bins) >> a.shift << a.shift;
    if (middle != window) {  // for all threads or none
      flush();
      window = middle;
    }
#pragma unroll
    for (int i = 0; i < kPacks * kVector; ++i) {
      const bool exists = first + i / kVector * kStep < end;
      const uint32_t bin = exists ? BinOf(Element(packs[i / kVector], i % kVector), a.bins) : a.bins;
      const bool inside = bin < a.bins && bin - window < size;
      CountOne(counts, inside ? bin - window : size, size);
      if (!inside && bin < a.bins) atomicAdd(&a.result[bin], 1u);
    }
  }
  flush();
}

}  // namespace jaxkern
