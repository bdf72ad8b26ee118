// Scans of one long row by an associative operation, by blocks that stay (see associative.cuh).
//
//     RingScanKernel<F, N, kItems, kThreads, kMinBlocks, kReverse>
//
// A block keeps three tiles in shared memory. In each turn it joins the states of a tile and publishes the state of the tile, looks back for
// the tile of the turn before and stores its results, and starts to load a third tile in its place. So a tile is published a
// turn before it is stored, and other blocks need not wait for it.
//
// Blocks take tiles from a counter. A block publishes a tile before it waits for anything else, and it waits for earlier tiles only, so
// the blocks make progress however many of them run at once.
//
// 32 tiles are a group. Every block joins the published states of all groups before its tile by itself: the tiles of a group in a
// tree, then groups in their order. It keeps what it has joined, so in each turn it reads the states of the tiles since its last one.
//
// Memory traffic: each element is read once and each result written once; a block reads a word of a state for each tile.
// `slots` has the states of all tiles, then the counter; all are 0 on entry.
#pragma once

#include "row_scan.cuh"

namespace jaxkern {

template <class F, int N, int kItems, int kThreads, bool kReverse> struct RingScan {
  using Rows = RowScan<F, N, kItems, 32, kThreads, 32, true, kOverTiles, kReverse>;
  using Engine = typename Rows::Engine;
  using State = typename Engine::State;
  using Prefix = typename Engine::Prefix;
  using XIndex = typename Rows::XIndex;
  using YIndex = typename Rows::YIndex;
  static constexpr int kStages = 3, kWarps = kThreads / 32, kGroup = 32;
  static constexpr int kRoom = Rows::kX * Rows::kRoom;  // of a warp
  static constexpr int kEach = 2;                       // groups that a warp reads at once
  static constexpr int kGroups = kEach * kWarps;        // groups that a block reads at once

  struct Shared {
    State warp[kWarps];
    State group[kGroups];
    int64_t tile[2];
  };

  static __device__ __forceinline__ int64_t Take(const typename Engine::Args& a) {
    auto* const counter = reinterpret_cast<unsigned long long*>(a.slots + a.tiles * Engine::kWords);
    return static_cast<int64_t>(atomicAdd(counter, 1ull));
  }

  // Starts to load a tile, if there is one, as one group of copies.
  static __device__ __forceinline__ void Load(const typename Engine::Args& a, int64_t tile, char* room) {
    typename Rows::Loaded x;
    if (tile < a.tiles) Rows::Load(a, {0, tile}, x, room, XIndex());
    CommitCopies();
  }

  // Joins to `walked`, the state before group `done`, the groups before `tile`, sets done to the group of `tile`, and returns the
  // state before `tile`. All threads of the block call it.
  static __device__ __forceinline__ Prefix LookBack(const typename Engine::Args& a, int64_t tile, Prefix& walked,
                                                    int64_t& done, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t own = tile / kGroup;
    for (;; __syncthreads()) {
      typename Engine::Pending pending[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int64_t at = (done + e * kWarps + warp) * kGroup + lane;
        if (at < tile) pending[e].Begin(a.slots + at * Engine::kWords, 1);
      }
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int64_t first = (done + e * kWarps + warp) * kGroup, at = first + lane;
        if (first >= tile) break;
        State state;
        if (at < tile) state = pending[e].Finish(a.slots + at * Engine::kWords, 1);
        const int count = static_cast<int>(tile - first < kGroup ? tile - first : kGroup);
        state = Engine::Reduce(state, count);
        if (lane == 0) shared.group[e * kWarps + warp] = state;
      }
      __syncthreads();
      int read = 0;
      for (; read < kGroups && done < own; ++read, ++done) walked.Append(shared.group[read]);
      if (done == own && read < kGroups) {
        Prefix before = walked;
        before.Append(tile % kGroup > 0, shared.group[read]);
        return before;
      }
    }
  }

  static __device__ __forceinline__ void Run(const typename Engine::Args& a, Shared& shared, char* rooms) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = kReverse ? 31 - lane : lane;
    const auto room = [&](int stage) { return rooms + (stage * kWarps + warp) * kRoom; };
    if (threadIdx.x == 0) {
      shared.tile[0] = Take(a);
      shared.tile[1] = Take(a);
    }
    typename Engine::Lane numbers[1];
    typename Engine::Carry init[1];
    Engine::Read(a, 0, numbers, init);
    __syncthreads();
    int64_t joined = shared.tile[0], next = shared.tile[1],
            last = -1;  // tiles of this turn, the next and the one before
    Load(a, joined, room(0));
    Load(a, next, room(1));

    Prefix walked, before_last;  // before_last: what precedes this thread in tile `last`
    int64_t done = 0;
    for (int stage = 0;;) {
      const int of_last = stage == 0 ? kStages - 1 : stage - 1;
      __syncthreads();  // all of `shared` has been read
      int64_t taken = 0;
      if (threadIdx.x == 0) taken = Take(a);
      Prefix before;
      State inclusive;
      if (joined < a.tiles) {
        typename Rows::Loaded x;
        Rows::Staged(x, room(stage), own, XIndex());
        WaitForCopyGroups<1>();
        __syncwarp();
        inclusive = Engine::ElementOf(numbers[0], Rows::Item(x, 0, XIndex()));
#pragma unroll
        for (int u = 1; u < kItems; ++u) {
          inclusive = Engine::Join(inclusive, Engine::ElementOf(numbers[0], Rows::Item(x, u, XIndex())));
        }
        inclusive = Engine::template Inclusive<32>(inclusive);
        if (lane == 31) shared.warp[warp] = inclusive;
      }
      if (threadIdx.x == 0) shared.tile[0] = taken;
      __syncthreads();
      taken = shared.tile[0];
      if (joined < a.tiles) {
        const State all = Engine::template Inclusive<kWarps>(shared.warp[lane % kWarps]);
        if (threadIdx.x == kWarps - 1) Engine::Publish(a.slots + joined * Engine::kWords, 1, all);
        const State earlier = Engine::From(all, (warp + kWarps - 1) % kWarps);
        const State exclusive = Engine::Up(inclusive, 1);
        before.Append(warp > 0, earlier);
        before.Append(lane > 0, exclusive);
      }
      if (last >= 0) {
        Prefix prefix = LookBack(a, last, walked, done, shared);
        prefix.Append(before_last.any, before_last.state);
        Finish(a, last, prefix, numbers[0], init[0], room(of_last), own);
        __syncwarp();
      }
      if (joined >= a.tiles) return;
      Load(a, taken, room(of_last));
      last = joined, joined = next, next = taken, before_last = before;
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
  }

  // Runs the steps of this thread in a tile, and stores their results. prefix: all steps before them.
  static __device__ __forceinline__ void Finish(const typename Engine::Args& a, int64_t tile, const Prefix& prefix,
                                                const typename Engine::Lane& numbers,
                                                const typename Engine::Carry& init, char* room, int own) {
    const int64_t rank = tile * Rows::kTile + static_cast<int64_t>(threadIdx.x) * kItems;
    typename Engine::Carry carry[1] = {Engine::Behind(init, prefix)};
    typename Rows::Loaded x;
    Rows::Staged(x, room, own, XIndex());
    typename Rows::Results y;
    typename Rows::ResultPacks packs;
    Rows::Begin(y, room, own, YIndex());
#pragma unroll
    for (int u = 0; u < kItems; ++u) {
      typename Engine::Stored value;
      Engine::Run(u == 0 && !prefix.any, numbers, carry[0], Rows::Item(x, u, XIndex()), value);
      Rows::SetItem(y, packs, u, value, YIndex());
      if constexpr (F::kLast) {
        if (rank + u == a.loop.steps - 1) Engine::StoreLast(a, 0, carry, typename Engine::Loop::CarryIndex());
      }
    }
    Rows::Store(a, {0, tile}, y, room, own, YIndex());
  }
};

template <class F, int N, int kItems, int kThreads, int kMinBlocks, bool kReverse>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    RingScanKernel(const __grid_constant__ typename AssociativeEngine<F, 1>::Args a) {
  using Scan = RingScan<F, N, kItems, kThreads, kReverse>;
  __shared__ typename Scan::Shared shared;
  JAXKERN_DYNAMIC_SHARED(rooms);
  Scan::Run(a, shared, rooms);
}

}  // namespace jaxkern
