// How groups of threads that share the elements of a tile of adjacent rows combine what they have reduced (strided.cuh): through
// shuffles within a warp, and shared memory of the block and of the other blocks of its cluster, always in the same order.
#pragma once

#include "exchange.cuh"
#include "stages.cuh"

namespace jaxkern {

// Shared memory of a block, where JoinGroups combines N * kLanes partial results.
template <class F, int N, int kLanes, int kThreads, int kBlocks, bool kShifted> struct GroupRoom {
  // Groups of a warp that have the same shift combine what they have through shuffles first.
  static constexpr int kAtOnce = kShifted ? kLanes : kWarp, kParts = kThreads / kAtOnce, kColumns = N * kLanes;
  static constexpr bool kJoins = kThreads > kLanes || kBlocks > 1;
  static constexpr int kWords = kJoins ? (RowStages<F>::template LargestPartial<0>() * kColumns + 7) / 8 + 1 : 1;
  uint64_t of_parts[kParts * kWords], joined[kWords], of_blocks[2][kBlocks > 1 ? kBlocks * kWords : 1];
};

// Writes a value to the shared memory of a block of the cluster, where it is known after SyncBlocks.
template <class P, class Room>
__device__ __forceinline__ void StoreToBlock(P* at, const P& value, const Room& room, uint32_t rank) {
#ifdef JAXKERN_EMULATED
  memcpy(emulated::Peer(at, room, rank), &value, sizeof value);
#elif defined(JAXKERN_HAS_BULK_COPY)
  uint32_t words[sizeof(P) / 4];
  memcpy(words, &value, sizeof value);
  const uint32_t remote = RemoteAddress(at, rank);
#pragma unroll
  for (int w = 0; w < static_cast<int>(sizeof(P) / 4); ++w)
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote + 4 * w), "r"(words[w]) : "memory");
#endif
}
__device__ __forceinline__ void SyncBlocks() {
  __syncwarp();
#ifdef JAXKERN_EMULATED
  emulated::Wait(emulated::kAtCluster);
#elif defined(JAXKERN_HAS_BULK_COPY)
  SyncCluster();
#endif
}

// The place in shared memory of row i of N in a lane, whose first row is `shift` rows before the tile. Negative: before the tile.
template <int N, int kLanes, bool kShifted> __device__ __forceinline__ int PlaceOfRow(int i, int lane, int shift) {
  if constexpr (!kShifted) return i * kLanes + lane;
  const int row = lane * N + i - shift;
  return row < 0 ? -1 : row % N * kLanes + row / N;
}

// Combines the partial results of stage s of all groups of a block or cluster, N from each thread; all threads that have a row get
// its result. shift: of the rows of this thread. The room may be used for the next stage at once. ArriveOpened precedes the first call.
template <class F, int s, bool kShifted, int N, int kLanes, int kThreads, int kBlocks>
__device__ __forceinline__ void JoinGroups(typename RowStages<F>::template Partial<s> (&sum)[N],
                                           GroupRoom<F, N, kLanes, kThreads, kBlocks, kShifted>& room, int shift = 0) {
  using Partial = typename RowStages<F>::template Partial<s>;
  using Room = GroupRoom<F, N, kLanes, kThreads, kBlocks, kShifted>;
  constexpr int kAtOnce = Room::kAtOnce, kParts = Room::kParts, kColumns = Room::kColumns;
  if constexpr (!Room::kJoins) return;  // each thread has all elements of its rows
  const typename RowStages<F>::template Combine<s> combine;
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = combine.template Lanes<kAtOnce, kLanes>(sum[i]);
  Partial* const of_parts = reinterpret_cast<Partial*>(room.of_parts);
  Partial* const of_blocks = reinterpret_cast<Partial*>(room.of_blocks[s % 2]);
  Partial* const joined = reinterpret_cast<Partial*>(room.joined);
  if (threadIdx.x % kAtOnce < kLanes) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int place = PlaceOfRow<N, kLanes, kShifted>(i, lane, shift);
      if (place >= 0) of_parts[threadIdx.x / kAtOnce * kColumns + place] = sum[i];
    }
  }
  __syncthreads();
  if constexpr (s == 0) WaitOpened<kBlocks>();
  for (int c = threadIdx.x; c < kColumns; c += kThreads) {
    const Partial all = combine.All(of_parts + c, kColumns, kParts);
    if constexpr (kBlocks == 1) {
      joined[c] = all;
    } else {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) StoreToBlock(&of_blocks[blockIdx.x % kBlocks * kColumns + c], all, room, b);
    }
  }
  if constexpr (kBlocks > 1) {
    SyncBlocks();
    for (int c = threadIdx.x; c < kColumns; c += kThreads) joined[c] = combine.All(of_blocks + c, kColumns, kBlocks);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = joined[max(0, PlaceOfRow<N, kLanes, kShifted>(i, lane, shift))];
}

}  // namespace jaxkern
