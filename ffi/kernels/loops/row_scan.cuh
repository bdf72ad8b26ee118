// Scans by an associative operation whose steps are adjacent in memory: what each warp or block runs (see associative.cuh).
//
// kLanes lanes of a warp load kLanes * kItems adjacent elements of a row as vectors, in the order of memory. They exchange them
// in shared memory, so that each lane has kItems adjacent elements, and exchange results in the same way before they store
// them. kLanes is 32, or less for short rows: a warp then takes several rows.
#pragma once

#include "associative.cuh"

namespace jaxkern {

// Packs of N elements of kLanes * kPacks adjacent ones: a lane loads pack v * kLanes + lane of them as number v, and computes on
// packs lane * kPacks + v. Lanes exchange packs in shared memory, where a pack lies at its place with the lower bits changed,
// so that neither order has bank conflicts.
template <class T, int N, int kPacks, int kLanes> struct Chunk {
  Pack<T, N> pack[kPacks];

  static constexpr int kUnit = 128 / sizeof(Pack<T, N>);  // packs in all banks of shared memory
  // The place of pack k of this thread's lanes in the room of the warp.
  static __device__ __forceinline__ int At(int k) {
    k += threadIdx.x % 32 / kLanes * (kLanes * kPacks);
    return k ^ (k / kUnit % kUnit);
  }

  // begin: of the lanes' elements in the row, may be negative. Elements outside of [0, length) are 0.
  __device__ __forceinline__ void Load(const T* row, int64_t begin, int64_t length) {
    const int lane = threadIdx.x % kLanes;
    const bool whole = begin >= 0 && begin + kLanes * kPacks * N <= length;
    if (whole) {
#pragma unroll
      for (int v = 0; v < kPacks; ++v) pack[v] = LoadLanes<T, N>(row + begin + (v * kLanes + lane) * N);
      return;
    }
#pragma unroll
    for (int v = 0; v < kPacks; ++v) {
      const int64_t at = begin + (v * kLanes + lane) * N;
      pack[v] = ZeroPack<T, N>();
      if (at >= 0 && at + N <= length) {
        pack[v] = LoadLanes<T, N>(row + at);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (at + i >= 0 && at + i < length) SetElement(pack[v], i, row[at + i]);
        }
      }
    }
  }
  __device__ __forceinline__ void Store(T* row, int64_t begin, int64_t length) const {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int v = 0; v < kPacks; ++v) {
      const int64_t at = begin + (v * kLanes + lane) * N;
      if (at >= 0 && at + N <= length) {
        StoreLanes<T, N>(row + at, pack[v]);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (at + i >= 0 && at + i < length) row[at + i] = Element(pack[v], i);
        }
      }
    }
  }

  // `own`: the lane whose packs this thread computes on. room: of the warp, 32 * kPacks packs.
  __device__ __forceinline__ void ToOwn(char* room, int own) {
    if (kPacks == 1 && own == static_cast<int>(threadIdx.x % kLanes)) return;
    Pack<T, N>* packs = reinterpret_cast<Pack<T, N>*>(room);
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kPacks; ++v) packs[At(v * kLanes + threadIdx.x % kLanes)] = pack[v];
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kPacks; ++v) pack[v] = packs[At(own * kPacks + v)];
  }
  __device__ __forceinline__ void ToStriped(char* room, int own) {
    if (kPacks == 1 && own == static_cast<int>(threadIdx.x % kLanes)) return;
    Pack<T, N>* packs = reinterpret_cast<Pack<T, N>*>(room);
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kPacks; ++v) packs[At(own * kPacks + v)] = pack[v];
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kPacks; ++v) pack[v] = packs[At(v * kLanes + threadIdx.x % kLanes)];
  }
};

template <class... T> constexpr int MostBytes() {
  int most = 4;
  ((most = static_cast<int>(sizeof(T)) > most ? static_cast<int>(sizeof(T)) : most), ...);
  return most;
}

template <class F, int N, int kItems, int kLanes, int kThreads, int kRadix, bool kAhead, Over kOver, bool kReverse,
          class Xs = typename F::Xs, class Ys = typename F::Ys>
struct RowScan;

template <class F, int N, int kItems, int kLanes, int kThreads, int kRadix, bool kAhead, Over kOver, bool kReverse,
          class... X, class... Y>
struct RowScan<F, N, kItems, kLanes, kThreads, kRadix, kAhead, kOver, kReverse, Types<X...>, Types<Y...>> {
  using Engine = AssociativeEngine<F, 1>;
  using Loop = typename Engine::Loop;
  using State = typename Engine::State;
  using XIndex = typename Loop::XIndex;
  using YIndex = typename Loop::YIndex;
  static constexpr int kWarps = kThreads / 32, kPacks = kItems / N;
  static_assert(kRadix <= 32, "a lane for each tile of a group");
  static_assert(kLanes == 32 || kOver == kOverWarp, "");
  static constexpr int kTile = (kOver == kOverWarp ? kLanes : kThreads) * kItems;
  static constexpr int kRoom = 32 * kPacks * MostBytes<Pack<X, N>..., Pack<Y, N>...>();
  template <class T> using ChunkOf = Chunk<T, N, kPacks, kLanes>;
  using Loaded = Slots<XIndex, ChunkOf<X>...>;

  struct Place {
    int64_t row, tile;
  };

  struct Shared {
    alignas(16) char room[kWarps][kRoom];
    State warp[2][kWarps];
    State before;
  };

  template <size_t... L> static __device__ __forceinline__ void Load(const typename Engine::Args& a, const Place& place,
                                                                     Loaded& x, std::index_sequence<L...>) {
    (At<L>(x).Load(static_cast<const X*>(a.loop.x[L]) + Loop::template Offset<F::XsMap(L)>(a.loop, place.row),
                   Begin(a, place.tile), Length(a, place)),
     ...);
  }
  template <size_t... M> static __device__ __forceinline__ void Store(const typename Engine::Args& a,
                                                                      const Place& place,
                                                                      Slots<YIndex, ChunkOf<Y>...>& y, char* room,
                                                                      int own, std::index_sequence<M...>) {
    ((At<M>(y).ToStriped(room, own),
      At<M>(y).Store(static_cast<Y*>(a.loop.y[M]) + Loop::template Offset<F::YsMap(M)>(a.loop, place.row),
                     Begin(a, place.tile), Length(a, place))),
     ...);
  }
  template <size_t... L>
  static __device__ __forceinline__ typename Engine::Step Item(const Loaded& x, int u, std::index_sequence<L...>) {
    const int k = kReverse ? kItems - 1 - u : u;
    typename Engine::Step step;
    ((At<L>(step) = Wide<X>(Element(At<L>(x).pack[k / N], k % N))), ...);
    return step;
  }
  template <size_t... M> static __device__ __forceinline__ void SetItem(Slots<YIndex, ChunkOf<Y>...>& y, int u,
                                                                        const typename Engine::Stored& value,
                                                                        std::index_sequence<M...>) {
    const int k = kReverse ? kItems - 1 - u : u;
    (SetElement(At<M>(y).pack[k / N], k % N, Rounded<Y>(At<M>(value))), ...);
  }
  template <size_t... L>
  static __device__ __forceinline__ void ToOwn(Loaded& x, char* room, int own, std::index_sequence<L...>) {
    (At<L>(x).ToOwn(room, own), ...);
  }

  // Where the elements of this thread's lanes begin in the row, in the order of memory.
  static __device__ __forceinline__ int64_t Begin(const typename Engine::Args& a, int64_t tile) {
    const int warp = kOver == kOverWarp ? 0 : threadIdx.x / 32;
    const int64_t rank = tile * kTile + warp * 32 * kItems;
    return kReverse ? a.loop.steps - rank - kLanes * kItems : rank;
  }
  // Lanes without a row have one of length 0 to load and store.
  static __device__ __forceinline__ int64_t Length(const typename Engine::Args& a, const Place& place) {
    return kOver != kOverWarp || place.row < a.loop.lanes ? a.loop.steps : 0;
  }

  static __device__ __forceinline__ Place First(const typename Engine::Args& a) {
    const int64_t block = blockIdx.x, thread = block * kThreads + threadIdx.x;
    if (kOver == kOverTiles) return {block % a.loop.lanes, block / a.loop.lanes};
    return {kOver == kOverBlock ? block : thread / kLanes, 0};
  }

  static __device__ __forceinline__ void Run(const typename Engine::Args& a, Shared& shared) {
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / 32;
    const int own = kReverse ? kLanes - 1 - lane : lane;
    Place place = First(a);
    const int64_t end = kOver == kOverTiles ? place.tile + 1 : a.tiles;
    Loaded x;
    Load(a, place, x, XIndex());
    typename Engine::Lane numbers[1];
    typename Engine::Carry init[1];
    Engine::Read(a, Length(a, place) ? place.row : 0, numbers, init);
    typename Engine::Prefix walked;
    for (int phase = 0;; phase ^= 1) {
      ToOwn(x, shared.room[warp], own, XIndex());
      State inclusive = Engine::ElementOf(numbers[0], Item(x, 0, XIndex()));
#pragma unroll
      for (int u = 1; u < kItems; ++u) {
        inclusive = Engine::Join(inclusive, Engine::ElementOf(numbers[0], Item(x, u, XIndex())));
      }
      inclusive = Engine::template Inclusive<kLanes>(inclusive);
      const State exclusive = Engine::Up(inclusive, 1);

      typename Engine::Prefix before = walked;
      const Place next = {place.row, place.tile + 1};
      const bool goes_on = next.tile < end;
      Loaded ahead;
      if constexpr (kOver == kOverWarp) {
        if (kAhead && goes_on) Load(a, next, ahead, XIndex());
        walked.Append(Engine::From(inclusive, threadIdx.x % 32 / kLanes * kLanes + kLanes - 1));
      } else {
        // The other half of shared.warp is read until all threads have come here again.
        State* const warps = shared.warp[phase];
        if (lane == 31) warps[warp] = inclusive;
        __syncthreads();
        if (kAhead && goes_on) Load(a, next, ahead, XIndex());
        const State all = Engine::template Inclusive<kWarps>(warps[lane % kWarps]);
        const State total = Engine::From(all, kWarps - 1);
        if constexpr (kOver == kOverTiles) {
          if (warp == 0) LookBack(a, place.row, place.tile, total, shared);
          __syncthreads();
          before.Append(place.tile > 0, shared.before);
        } else {
          walked.Append(total);
        }
        const State earlier = Engine::From(all, (warp + kWarps - 1) % kWarps);
        before.Append(warp > 0, earlier);
      }
      before.Append(lane > 0, exclusive);

      const int64_t rank = place.tile * kTile + (kOver == kOverWarp ? lane : threadIdx.x) * kItems;
      typename Engine::Carry carry[1] = {Engine::Behind(init[0], before)};
      Slots<YIndex, ChunkOf<Y>...> y;
#pragma unroll
      for (int u = 0; u < kItems; ++u) {
        typename Engine::Stored value;
        Engine::Run(u == 0 && !before.any, numbers[0], carry[0], Item(x, u, XIndex()), value);
        SetItem(y, u, value, YIndex());
        if constexpr (F::kLast) {
          if (rank + u == Length(a, place) - 1) Engine::StoreLast(a, place.row, carry, typename Loop::CarryIndex());
        }
      }
      Store(a, place, y, shared.room[warp], own, YIndex());
      if (!goes_on) return;
      if constexpr (kAhead) x = ahead;
      else Load(a, next, x, XIndex());
      place = next;
    }
  }

  // Publishes the state of this block's tile, and what its block publishes of the tiles before it; leaves the state of those in
  // shared.before. For warp 0.
  static __device__ __forceinline__ void LookBack(const typename Engine::Args& a, int64_t row, int64_t tile,
                                                  const State& total, Shared& shared) {
    const int lane = threadIdx.x % 32;
    typename Engine::Published published;
    const int64_t each = Engine::kWords;
    const int64_t of_row = (a.tiles + a.tiles / kRadix + a.tiles / (kRadix * kRadix)) * each;
    published.template Set<kRadix>(a.slots + row * of_row, a.tiles, each);
    if (lane == 0) Engine::Publish(published.tile + tile * each, 1, total);
    const int64_t group = tile / kRadix, super = group / kRadix;
    const int tiles = static_cast<int>(tile % kRadix), groups = static_cast<int>(group % kRadix);
    const bool closes = tiles == kRadix - 1, closes_super = closes && groups == kRadix - 1;

    typename Engine::Pending of_tile, of_group, of_super;
    if (lane < tiles) of_tile.Begin(published.tile + (group * kRadix + lane) * each, 1);
    if (lane < groups) of_group.Begin(published.group + (super * kRadix + lane) * each, 1);
    if (super > 0) of_super.Begin(published.before + (super - 1) * each, 1);
    typename Engine::Prefix in_group, before;
    if (tiles > 0) {
      State state = total;
      if (lane < tiles) state = of_tile.Finish(1, typename Engine::StateIndex());
      in_group.Append(Engine::Reduce(state, tiles));
      if (closes && lane == 0) Engine::Publish(published.group + group * each, 1, Engine::Join(in_group.state, total));
    }
    if (super > 0) before.Append(of_super.Finish(1, typename Engine::StateIndex()));
    if (groups > 0) {
      State state = total;
      if (lane < groups) state = of_group.Finish(1, typename Engine::StateIndex());
      before.Append(Engine::Reduce(state, groups));
    }
    before.Append(tiles > 0, in_group.state);
    if (lane == 0) {
      if (tile > 0) shared.before = before.state;
      if (closes_super) Engine::Publish(published.before + super * each, 1, Engine::Join(before.state, total));
    }
  }
};

template <class F, int N, int kItems, int kLanes, int kThreads, int kMinBlocks, int kRadix, bool kAhead, Over kOver,
          bool kReverse>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    RowScanKernel(const __grid_constant__ typename AssociativeEngine<F, 1>::Args a) {
  using Scan = RowScan<F, N, kItems, kLanes, kThreads, kRadix, kAhead, kOver, kReverse>;
  __shared__ typename Scan::Shared shared;
  Scan::Run(a, shared);
}

}  // namespace jaxkern
