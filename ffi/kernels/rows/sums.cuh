// Sums over rows: those that a thread adds up for its columns, and the sum over blocks.
#pragma once

#include "../common/pack.cuh"
#include "../common/reduce.cuh"
#include "../common/slots.h"

#ifndef JAXKERN_EMULATED
#define JAXKERN_DYNAMIC_SHARED(name) extern __shared__ __align__(16) char name[]
#endif

namespace jaxkern {

// For each type S, a sum for each element of the kPacks packs of a thread.
template <int N, int kPacks, class... S> struct RegisterSums {
  Slots<std::make_index_sequence<sizeof...(S)>, S[kPacks][N]...> sum;

  template <size_t... L> __device__ __forceinline__ void ClearAll(std::index_sequence<L...>) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) ((At<L>(sum)[i][j] = 0), ...);
    }
  }
  __device__ __forceinline__ void Clear() { ClearAll(std::make_index_sequence<sizeof...(S)>()); }
  // Adds to the sums L of pack i.
  template <size_t L, class E> __device__ __forceinline__ void Add(int i, const E (&term)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) At<L>(sum)[i][j] += term[j];
  }
  template <size_t L, class E> __device__ __forceinline__ void Read(int i, E (&out)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = At<L>(sum)[i][j];
  }
};

// The same in dynamic shared memory, sizeof(S) * N * kPacks * kThreads bytes for each S, where they leave the registers to more
// blocks. A thread reads and writes its own sums alone, in vectors, so there are neither barriers nor bank conflicts.
template <int N, int kPacks, int kThreads, class... S> struct SharedSums {
  static constexpr int kBytes[] = {static_cast<int>(sizeof(S))..., 0};

  // Vector v of the sums L of pack i.
  template <size_t L, class E, int V> static __device__ __forceinline__ Pack<E, V>* Place(int i, int v) {
    JAXKERN_DYNAMIC_SHARED(room);
    int before = 0;
#pragma unroll
    for (int k = 0; k < static_cast<int>(L); ++k) before += kBytes[k];
    const auto vectors = reinterpret_cast<Pack<E, V>*>(room + before * (N * kPacks * kThreads));
    return vectors + (i * (N / V) + v) * kThreads + threadIdx.x;
  }
  template <class E> static constexpr int kWidth = N * sizeof(E) > 16 ? 16 / sizeof(E) : N;  // of a vector

  template <size_t L, class E> __device__ __forceinline__ void ClearOne() {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int v = 0; v < N / kWidth<E>; ++v) *Place<L, E, kWidth<E>>(i, v) = ZeroPack<E, kWidth<E>>();
    }
  }
  template <size_t... L> __device__ __forceinline__ void ClearAll(std::index_sequence<L...>) {
    (ClearOne<L, S>(), ...);
  }
  __device__ __forceinline__ void Clear() { ClearAll(std::make_index_sequence<sizeof...(S)>()); }
  template <size_t L, class E> __device__ __forceinline__ void Add(int i, const E (&term)[N]) {
    constexpr int V = kWidth<E>;
#pragma unroll
    for (int v = 0; v < N / V; ++v) {
      Pack<E, V>* const at = Place<L, E, V>(i, v);
      Pack<E, V> sum = *at;
#pragma unroll
      for (int j = 0; j < V; ++j) SetElement(sum, j, Element(sum, j) + term[v * V + j]);
      *at = sum;
    }
  }
  template <size_t L, class E> __device__ __forceinline__ void Read(int i, E (&out)[N]) {
    constexpr int V = kWidth<E>;
#pragma unroll
    for (int v = 0; v < N / V; ++v) {
      const Pack<E, V> sum = *Place<L, E, V>(i, v);
#pragma unroll
      for (int j = 0; j < V; ++j) out[v * V + j] = Element(sum, j);
    }
  }
};

// The sum over the threads of a block, in a fixed order; thread 0 gets it, and others get arbitrary values.
template <int kThreads, class E> __device__ __forceinline__ E SumOverThreads(E mine) {
  __shared__ E room[kThreads];
  room[threadIdx.x] = mine;
  __syncthreads();
  for (int count = kThreads; count > 1; count = (count + 1) / 2) {
    const int half = (count + 1) / 2;
    if (threadIdx.x + half < count) room[threadIdx.x] += room[threadIdx.x + half];
    __syncthreads();
  }
  return room[threadIdx.x];
}

// The plan may count on more clusters than the GPU runs at once: those that there are, of Owners `Own`, write zeros for the others.
template <class E, class Own>
__device__ __forceinline__ void ClearMissing(E* sums, int64_t width, int64_t walkers, Own) {
  if constexpr (Own::kBlocks > 1) {
    for (int64_t b = Own::Walker() + Own::Walkers(); b < walkers; b += Own::Walkers()) {
      for (int64_t c = Own::Lane(); c < width; c += Own::kGroup) sums[b * width + c] = 0;
    }
  }
}

struct SumOverBlocksArgs {
  const void* partial;  // [blocks][count]
  void* out;            // [gridDim.y][count]
  int64_t blocks, count;
  int64_t each;  // blocks that are added for one element of out
};

constexpr int kSumThreads = 512;

// out[g][c] = the sum of partial[b][c] over b in [g * each, (g + 1) * each). kSplit warps share 32 columns, and each takes every
// kSplit-th b; a block has kSumThreads / kSplit columns of one g.
template <class E, class Result, int kSplit> __global__ void __launch_bounds__(kSumThreads)
    SumOverBlocks(const __grid_constant__ SumOverBlocksArgs a) {
  __shared__ E room[kSumThreads / kWarp][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t column =
      (static_cast<int64_t>(blockIdx.x) * (kSumThreads / kWarp / kSplit) + warp / kSplit) * kWarp + lane;
  E sum = 0;
  if (column < a.count) {
    const E* const from = static_cast<const E*>(a.partial) + column;
    const int64_t first = blockIdx.y * a.each, end = min(a.blocks, first + a.each);
#pragma unroll 8
    for (int64_t b = first + warp % kSplit; b < end; b += kSplit) sum += from[b * a.count];
  }
  room[warp][lane] = sum;
  __syncthreads();
  if (warp % kSplit == 0 && column < a.count) {
#pragma unroll
    for (int w = 1; w < kSplit; ++w) sum += room[warp + w][lane];
    static_cast<Result*>(a.out)[blockIdx.y * a.count + column] = Stored<Result>(sum);
  }
}

}  // namespace jaxkern
