// How the threads of a row combine what each of them has reduced. All of them get the result. The order depends only on how many
// there are, so results have the same bits in every run.
//
// The threads of a row are `Owners<kLanes, kThreads>`: kLanes lanes of a warp, a block of kThreads threads (kLanes = 0), or a
// cluster of -kLanes such blocks (kLanes < 0; sm_90 and newer).
#pragma once

#include "../common/async.cuh"
#include "../common/reduce.cuh"

// Shared memory of each block. On the CPU, the blocks of a cluster run at the same time.
#ifndef JAXKERN_EMULATED
#define JAXKERN_SHARED(type, name) __shared__ type name
#endif

namespace jaxkern {

template <int kLanes, int kThreads> struct Owners {
  static constexpr int kBlocks = kLanes < 0 ? -kLanes : 1;
  static constexpr int kGroup = kLanes > 0 ? kLanes : kThreads * kBlocks;  // threads of a row
  static constexpr int kGroups = kLanes > 0 ? kThreads / kLanes : 1;       // rows of a block or a cluster at a time

  // The place of this thread among the threads of its row, and the place of its row in the block.
  static __device__ __forceinline__ int Lane() {
    return kLanes > 0 ? threadIdx.x % kGroup : blockIdx.x % kBlocks * kThreads + threadIdx.x;
  }
  static __device__ __forceinline__ int Group() { return kLanes > 0 ? threadIdx.x / kGroup : 0; }
  // The place of this block or cluster in the grid, and how many there are.
  static __device__ __forceinline__ int64_t Walker() { return blockIdx.x / kBlocks; }
  static __device__ __forceinline__ int64_t Walkers() { return gridDim.x / kBlocks; }
};

// Exchanges the words of a struct between lanes.
template <class P> __device__ __forceinline__ P FromLane(const P& mine, int distance) {
  static_assert(sizeof(P) % 4 == 0, "");
  constexpr int kWords = sizeof(P) / 4;
  uint32_t words[kWords];
  memcpy(words, &mine, sizeof mine);
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = __shfl_xor_sync(0xffffffffu, words[w], distance);
  P other;
  memcpy(&other, words, sizeof other);
  return other;
}

// Combines over aligned groups of kLanes lanes: over all of a group, or over those that lie a multiple of kStep apart.
template <int kLanes, int kStep = 1, class P, class Combine>
__device__ __forceinline__ P JoinLanes(P mine, Combine combine) {
#pragma unroll
  for (int d = kLanes / 2; d >= kStep; d /= 2) mine = combine(mine, FromLane(mine, d));
  return mine;
}

// Combines the values that the warps of a block have left in `room`, one from each; a barrier precedes the call. `combine` is a
// function of two values; its member Lanes<n>(value) combines the values of n lanes.
template <int kCount, class P, class Combine> __device__ __forceinline__ P JoinRoom(const P* room, Combine combine) {
  const int lane = threadIdx.x % kWarp;
  constexpr int kSlots = kCount < kWarp ? kCount : kWarp;
  P mine = room[lane % kSlots];
#pragma unroll
  for (int k = kSlots; k < kCount; k += kSlots) mine = combine(mine, room[lane + k]);
  return combine.template Lanes<kSlots>(mine);
}

// Mailboxes of a block in a cluster, in shared memory. Each warp of the cluster sends its value to all blocks, and the threads of a
// block wait until all values have arrived; no other barrier is needed.
//
// Calls use two mailboxes in turn. A warp sends the values of a call after it has read the values of the previous call, and a call
// is complete when all warps have sent. So no thread still reads a mailbox when its next values arrive. A block may end after its
// last call, because nothing more is sent to it. Every thread calls Init, then Ready, then Join, equally often in all blocks.
// kBytes: of the largest value.
template <int kBlocks, int kWarps, int kBytes> struct ClusterRoom {
  static constexpr int kSenders = kBlocks * kWarps, kWords = (kBytes + 7) / 8;
  uint64_t from[2][kSenders * kWords];
  Barrier arrived[2];

  __device__ __forceinline__ void Init() { OpenBarriers<kBlocks>(arrived); }
  __device__ __forceinline__ void Ready() { WaitOpened<kBlocks>(); }

  // Combines the values of all warps; the lanes of a warp pass the same. `call`: the number of earlier calls. `combine`: see JoinRoom.
  template <class P, class Combine> __device__ __forceinline__ P Join(P mine, uint32_t call, Combine combine) {
    struct alignas(8) Letter {
      P value;
    };
    static_assert(sizeof(Letter) <= sizeof(uint64_t) * kWords, "");
    const uint32_t slot = call % 2, rank = blockIdx.x % kBlocks, lane = threadIdx.x % kWarp;
    Letter* const box = reinterpret_cast<Letter*>(from[slot]);
    Letter letter;
    letter.value = mine;
#ifdef JAXKERN_EMULATED
    if (lane < kBlocks)
      memcpy(emulated::Peer(&box[rank * kWarps + threadIdx.x / kWarp], *this, lane), &letter, sizeof letter);
    emulated::Wait(emulated::kAtCluster);
#elif defined(JAXKERN_HAS_BULK_COPY)
    if (threadIdx.x == 0) ArriveExpect(&arrived[slot], kSenders * static_cast<uint32_t>(sizeof letter));
    if (lane < kBlocks) StoreRemote(&box[rank * kWarps + threadIdx.x / kWarp], letter, &arrived[slot], lane);
    __syncwarp();
    Wait(&arrived[slot], call / 2 % 2);
#endif
    constexpr int kSlots = kSenders < kWarp ? kSenders : kWarp;
    mine = box[lane % kSlots].value;
#pragma unroll
    for (int k = kSlots; k < kSenders; k += kSlots) mine = combine(mine, box[lane + k].value);
    return combine.template Lanes<kSlots>(mine);
  }
};

// Where there is no cluster.
struct NoRoom {
  __device__ __forceinline__ void Init() {}
  __device__ __forceinline__ void Ready() {}
};

}  // namespace jaxkern
