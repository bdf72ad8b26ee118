// Copies an array: Copy reads `elements` elements at `from` and writes them at `to`, once. Each thread has kCopied packs
// in flight.
#pragma once

#include "common/pack.cuh"

namespace jaxkern {

constexpr int kCopyThreads = 256, kCopied = 4;

// T: element type. N: elements of a pack; with more than one, both arrays are aligned to 16 bytes.
template <class T, int N> __global__ void __launch_bounds__(kCopyThreads) Copy(const T* from, T* to, int64_t elements) {
  const int64_t packs = elements / N, first = int64_t{blockIdx.x} * (kCopyThreads * kCopied) + threadIdx.x;
  Pack<T, N> pack[kCopied];
#pragma unroll
  for (int u = 0; u < kCopied; ++u) {
    if (first + u * kCopyThreads < packs) pack[u] = LoadPart<T, N>(from + (first + u * kCopyThreads) * N);
  }
#pragma unroll
  for (int u = 0; u < kCopied; ++u) {
    if (first + u * kCopyThreads < packs) StorePart<T, N>(to + (first + u * kCopyThreads) * N, pack[u]);
  }
  if (first < elements - packs * N) to[packs * N + first] = from[packs * N + first];
}

}  // namespace jaxkern
