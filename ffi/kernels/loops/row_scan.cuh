// Scans by an associative operation whose steps are adjacent in memory: what each warp or block runs (see associative.cuh).
//
// kLanes lanes of a warp load kLanes * kItems adjacent elements of a row as vectors, in the order of memory. They exchange them
// in shared memory, so that each lane has kItems adjacent elements, and exchange results in the same way before they store
// them. kLanes is 32, or less for short rows: a warp then takes several rows.
//
// With kOverTiles and kAhead, elements stay in shared memory, and results take their places. This needs arrays of elements of one
// size, and as many operands as results or more.
#pragma once

#include "associative.cuh"

namespace jaxkern {

// The N elements of a row from `at` on. Elements outside of [0, length) are 0.
template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadSome(const T* row, int64_t at, int64_t length) {
  Pack<T, N> pack = ZeroPack<T, N>();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (at + i >= 0 && at + i < length) SetElement(pack, i, row[at + i]);
  }
  return pack;
}
template <class T, int N>
__device__ __forceinline__ void StoreSome(T* row, int64_t at, int64_t length, const Pack<T, N>& pack) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (at + i >= 0 && at + i < length) row[at + i] = Element(pack, i);
  }
}

// Packs of N elements of kLanes * kPacks adjacent ones: a lane loads pack v * kLanes + lane of them as number v, and computes on
// packs lane * kPacks + v. Lanes exchange packs in shared memory, where a place is left free behind each 128 bytes if kPacks is even,
// so that neither order has bank conflicts. Places are sums of a part that depends on the lane and one that depends on v, so
// that addresses are one register and constants.
template <class T, int N, int kPacks, int kLanes> struct Chunk {
  Pack<T, N> pack[kPacks];

  static constexpr int kUnit = 128 / sizeof(Pack<T, N>);  // packs in all banks of shared memory
  static constexpr bool kPlain = kLanes == 32 && kPacks % 2 == 1;
  static constexpr int kPlaces = 32 * kPacks + (kPlain ? 0 : 32 * kPacks / kUnit);
  // The places in the room of the warp: of pack v that this thread loads, and of pack v that lane `own` computes on.
  static __device__ __forceinline__ int Striped(int v) {
    const int lane = threadIdx.x % 32;
    if (kPlain) return lane + v * 32;
    if (kLanes == 32) return lane + lane / kUnit + v * (32 + 32 / kUnit);
    const int k = lane / kLanes * (kLanes * kPacks) + v * kLanes + lane % kLanes;
    return k + k / kUnit;
  }
  static __device__ __forceinline__ int Own(int own, int v) {
    if (kPlain) return own * kPacks + v;
    own += threadIdx.x % 32 / kLanes * kLanes;
    if (kPacks % kUnit == 0) return own * (kPacks + kPacks / kUnit) + v + v / kUnit;
    if (kUnit % kPacks == 0) return own * kPacks + own / (kUnit / kPacks) + v;
    const int k = own * kPacks + v;
    return k + k / kUnit;
  }

  __device__ __forceinline__ Pack<T, N> Get(int p) const { return pack[p]; }
  __device__ __forceinline__ void Put(int p, const Pack<T, N>& value) { pack[p] = value; }

  // Whether the row has all elements of these lanes.
  static __device__ __forceinline__ bool Whole(int64_t begin, int64_t length) {
    return begin >= 0 && begin + kLanes * kPacks * N <= length;
  }

  // begin: of the lanes' elements in the row, may be negative. Elements outside of [0, length) are 0.
  __device__ __forceinline__ void Load(const T* row, int64_t begin, int64_t length, char*) {
    const int lane = threadIdx.x % kLanes;
    if (Whole(begin, length)) {
#pragma unroll
      for (int v = 0; v < kPacks; ++v) pack[v] = LoadLanes<T, N>(row + begin + (v * kLanes + lane) * N);
      return;
    }
#pragma unroll
    for (int v = 0; v < kPacks; ++v) {
      const int64_t at = begin + (v * kLanes + lane) * N;
      if (at >= 0 && at + N <= length) pack[v] = LoadLanes<T, N>(row + at);
      else pack[v] = LoadSome<T, N>(row, at, length);
    }
  }
  __device__ __forceinline__ void Store(T* row, int64_t begin, int64_t length) const {
    const int lane = threadIdx.x % kLanes;
    if (Whole(begin, length)) {
#pragma unroll
      for (int v = 0; v < kPacks; ++v) StoreLanes<T, N>(row + begin + (v * kLanes + lane) * N, pack[v]);
      return;
    }
#pragma unroll
    for (int v = 0; v < kPacks; ++v) {
      const int64_t at = begin + (v * kLanes + lane) * N;
      if (at >= 0 && at + N <= length) StoreLanes<T, N>(row + at, pack[v]);
      else StoreSome<T, N>(row, at, length, pack[v]);
    }
  }

  // `own`: the lane whose packs this thread computes on. room: of the warp, kPlaces packs.
  __device__ __forceinline__ void ToOwn(char* room, int own) {
    if (kPacks == 1 && own == static_cast<int>(threadIdx.x % kLanes)) return;
    Pack<T, N>* packs = reinterpret_cast<Pack<T, N>*>(room);
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kPacks; ++v) packs[Striped(v)] = pack[v];
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kPacks; ++v) pack[v] = packs[Own(own, v)];
  }
  __device__ __forceinline__ void ToStriped(char* room, int own) {
    if (kPacks == 1 && own == static_cast<int>(threadIdx.x % kLanes)) return;
    Pack<T, N>* packs = reinterpret_cast<Pack<T, N>*>(room);
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kPacks; ++v) packs[Own(own, v)] = pack[v];
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kPacks; ++v) pack[v] = packs[Striped(v)];
  }
};

// The same in shared memory, where packs stay. Results take the places of elements. N elements have at least 4 bytes.
template <class T, int N, int kPacks> struct StagedChunk {
  using Places = Chunk<T, N, kPacks, 32>;
  Pack<T, N>* packs;
  int own;

  __device__ __forceinline__ Pack<T, N> Get(int p) const { return packs[Places::Own(own, p)]; }
  __device__ __forceinline__ void Put(int p, const Pack<T, N>& value) { packs[Places::Own(own, p)] = value; }
  // Pack v that this thread copies.
  static __device__ __forceinline__ int Copied(int v) { return v * 32 + threadIdx.x % 32; }

  __device__ __forceinline__ void Load(const T* row, int64_t begin, int64_t length, char* room) {
    packs = reinterpret_cast<Pack<T, N>*>(room);
    const T* const from = row + begin;
    if (Places::Whole(begin, length)) {
#pragma unroll
      for (int v = 0; v < kPacks; ++v) CopyAsync<N * sizeof(T)>(&packs[Places::Striped(v)], from + Copied(v) * N);
      return;
    }
#pragma unroll 1
    for (int v = 0; v < kPacks; ++v) {
      packs[Places::Striped(v)] = LoadSome<T, N>(row, begin + Copied(v) * N, length);
    }
  }
  __device__ __forceinline__ void ToOwn(char*, int own_lane) {
    own = own_lane;
    WaitForCopies();
    __syncwarp();
  }
  __device__ __forceinline__ void ToStriped(char* room, int) {
    packs = reinterpret_cast<Pack<T, N>*>(room);
    __syncwarp();
  }
  __device__ __forceinline__ void Store(T* row, int64_t begin, int64_t length) const {
    T* const to = row + begin;
    if (Places::Whole(begin, length)) {
#pragma unroll
      for (int v = 0; v < kPacks; ++v) StoreLanes<T, N>(to + Copied(v) * N, packs[Places::Striped(v)]);
      return;
    }
#pragma unroll 1
    for (int v = 0; v < kPacks; ++v) {
      StoreSome<T, N>(row, begin + Copied(v) * N, length, packs[Places::Striped(v)]);
    }
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
  static constexpr int kMost = MostBytes<Pack<X, N>..., Pack<Y, N>...>();
  static constexpr int kFree = kLanes == 32 && kPacks % 2 == 1 ? 0 : 32 * kPacks * kMost / 128;
  static constexpr int kX = static_cast<int>(sizeof...(X)), kRoom = ((32 * kPacks + kFree) * kMost + 15) / 16 * 16;
  static constexpr bool kStaged = kOver == kOverTiles && kAhead;
  template <class T> using ChunkOf =
      std::conditional_t<kStaged, StagedChunk<T, N, kPacks>, Chunk<T, N, kPacks, kLanes>>;
  using Loaded = Slots<XIndex, ChunkOf<X>...>;
  using Results = Slots<YIndex, ChunkOf<Y>...>;
  using ResultPacks = Slots<YIndex, Pack<Y, N>...>;

  struct Place {
    int64_t row, tile;
  };

  struct Shared {
    alignas(16) char room[kWarps][(kStaged ? kX : 1) * kRoom];
    State warp[2][kWarps];
    State before;
  };

  template <size_t... L> static __device__ __forceinline__ void Load(const typename Engine::Args& a, const Place& place,
                                                                     Loaded& x, char* room, std::index_sequence<L...>) {
    (At<L>(x).Load(static_cast<const X*>(a.loop.x[L]) + Loop::template Offset<F::XsMap(L)>(a.loop, place.row),
                   Begin(a, place.tile), Length(a, place), room + L * kRoom),
     ...);
  }
  template <size_t... M> static __device__ __forceinline__ void Store(const typename Engine::Args& a,
                                                                      const Place& place, Results& y, char* room,
                                                                      int own, std::index_sequence<M...>) {
    ((At<M>(y).ToStriped(room + (kStaged ? M * kRoom : 0), own),
      At<M>(y).Store(static_cast<Y*>(a.loop.y[M]) + Loop::template Offset<F::YsMap(M)>(a.loop, place.row),
                     Begin(a, place.tile), Length(a, place))),
     ...);
  }
  template <size_t... L>
  static __device__ __forceinline__ typename Engine::Step Item(const Loaded& x, int u, std::index_sequence<L...>) {
    const int k = kReverse ? kItems - 1 - u : u;
    typename Engine::Step step;
    ((At<L>(step) = Wide<X>(Element(At<L>(x).Get(k / N), k % N))), ...);
    return step;
  }
  // Sets item u of y. Items are set in order; `packs` holds the items of a pack until all of them are set.
  template <size_t... M> static __device__ __forceinline__ void SetItem(Results& y, ResultPacks& packs, int u,
                                                                        const typename Engine::Stored& value,
                                                                        std::index_sequence<M...>) {
    const int k = kReverse ? kItems - 1 - u : u;
    if (u % N == 0) ((At<M>(packs) = ZeroPack<Y, N>()), ...);
    (SetElement(At<M>(packs), k % N, Rounded<Y>(At<M>(value))), ...);
    if (u % N == N - 1) (At<M>(y).Put(k / N, At<M>(packs)), ...);
  }
  // Results take the places of the elements of as many arrays of the same type.
  template <size_t... M>
  static __device__ __forceinline__ void Begin(Results& y, char* room, int own, std::index_sequence<M...>) {
    if constexpr (kStaged) {
      ((At<M>(y).packs = reinterpret_cast<Pack<Y, N>*>(room + M * kRoom), At<M>(y).own = own), ...);
    }
  }
  // The elements of a tile in shared memory.
  template <size_t... L>
  static __device__ __forceinline__ void Staged(Loaded& x, char* room, int own, std::index_sequence<L...>) {
    ((At<L>(x).packs = reinterpret_cast<Pack<X, N>*>(room + L * kRoom), At<L>(x).own = own), ...);
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
    if (kOver == kOverTiles) {
      const uint32_t rows = static_cast<uint32_t>(a.loop.lanes);
      return {blockIdx.x % rows, blockIdx.x / rows};
    }
    return {kOver == kOverBlock ? block : thread / kLanes, 0};
  }

  static __device__ __forceinline__ void Run(const typename Engine::Args& a, Shared& shared) {
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / 32;
    const int own = kReverse ? kLanes - 1 - lane : lane;
    Place place = First(a);
    const int64_t end = kOver == kOverTiles ? place.tile + 1 : a.tiles;
    Loaded x;
    Load(a, place, x, shared.room[warp], XIndex());
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
        if (kAhead && !kStaged && goes_on) Load(a, next, ahead, shared.room[warp], XIndex());
        walked.Append(Engine::From(inclusive, threadIdx.x % 32 / kLanes * kLanes + kLanes - 1));
      } else {
        // The other half of shared.warp is read until all threads have come here again.
        State* const warps = shared.warp[phase];
        if (lane == 31) warps[warp] = inclusive;
        __syncthreads();
        if (kAhead && !kStaged && goes_on) Load(a, next, ahead, shared.room[warp], XIndex());
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
      Results y;
      ResultPacks packs;
      Begin(y, shared.room[warp], own, YIndex());
#pragma unroll
      for (int u = 0; u < kItems; ++u) {
        typename Engine::Stored value;
        Engine::Run(u == 0 && !before.any, numbers[0], carry[0], Item(x, u, XIndex()), value);
        SetItem(y, packs, u, value, YIndex());
        if constexpr (F::kLast) {
          if (rank + u == Length(a, place) - 1) Engine::StoreLast(a, place.row, carry, typename Loop::CarryIndex());
        }
      }
      Store(a, place, y, shared.room[warp], own, YIndex());
      if (!goes_on) return;
      if constexpr (kAhead) x = ahead;
      else Load(a, next, x, shared.room[warp], XIndex());
      place = next;
    }
  }

  // Publishes the state of this block's tile and, in the first or last block of a group, the state before the group or of the
  // group; leaves the state before the tile in shared.before. For warp 0.
  //
  // The first block of a group alone reads the states of earlier groups. So few blocks poll a word, however many wait.
  static __device__ __forceinline__ void LookBack(const typename Engine::Args& a, int64_t row, int64_t tile,
                                                  const State& total, Shared& shared) {
    const int lane = threadIdx.x % 32;
    constexpr int64_t kEach = Engine::kWords;
    const int64_t groups = a.tiles / kRadix + 1, group = tile / kRadix;
    uint64_t* const of_tile = a.slots + row * (a.tiles + 2 * groups) * kEach;
    uint64_t* const of_group = of_tile + a.tiles * kEach;
    uint64_t* const before_group = of_group + groups * kEach;
    const int tiles = static_cast<int>(tile % kRadix);
    if (lane == 0) Engine::Publish(of_tile + tile * kEach, 1, total);

    typename Engine::Pending pending, pending_before;
    typename Engine::Prefix before, earlier;
    // The groups of a supergroup before this group, or the tiles of the group before this tile.
    const int64_t first = tiles > 0 ? group * kRadix : group > 0 ? (group - 1) / kRadix * kRadix : 0;
    const int count = static_cast<int>(tiles > 0 ? tiles : group - first);
    const uint64_t* const slots = (tiles > 0 ? of_tile : of_group) + first * kEach;
    const int64_t begun = tiles > 0 ? group : first;  // the group whose predecessors' state is published
    if (lane < count) pending.Begin(slots + lane * kEach, 1);
    if (begun > 0) pending_before.Begin(before_group + begun * kEach, 1);
    if (count > 0) {
      State state = total;
      if (lane < count) state = pending.Finish(slots + lane * kEach, 1);
      earlier.Append(Engine::Reduce(state, count));
      if (tiles == kRadix - 1 && lane == 0) {
        Engine::Publish(of_group + group * kEach, 1, Engine::Join(earlier.state, total));
      }
    }
    if (begun > 0) before.Append(pending_before.Finish(before_group + begun * kEach, 1));
    before.Append(count > 0, earlier.state);
    if (lane == 0 && tile > 0) {
      shared.before = before.state;
      if (tiles == 0) Engine::Publish(before_group + group * kEach, 1, before.state);
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
