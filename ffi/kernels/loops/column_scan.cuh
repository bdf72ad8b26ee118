// Scans by an associative operation whose lanes are adjacent in memory (see associative.cuh).
//
// A block takes kLanes * N adjacent lanes. Its threads are kParts parts of kLanes threads, and each part takes kItems steps of
// a tile. A thread loads and stores N lanes of a step as a vector. It keeps what it loads in registers, or, with kOverTiles and
// kAhead, in places of dynamic shared memory that no other thread reads; a tile can then have more steps than a loop should repeat.
//
// The last block of a supergroup publishes the state of all steps up to its end.
#pragma once

#include "associative.cuh"

namespace jaxkern {

template <class F, int N, int kLanes, int kParts, int kItems, int kRadix, bool kAhead, Over kOver, bool kReverse,
          class Xs = typename F::Xs, class Ys = typename F::Ys>
struct ColumnScan;

template <class F, int N, int kLanes, int kParts, int kItems, int kRadix, bool kAhead, Over kOver, bool kReverse,
          class... X, class... Y>
struct ColumnScan<F, N, kLanes, kParts, kItems, kRadix, kAhead, kOver, kReverse, Types<X...>, Types<Y...>> {
  using Engine = AssociativeEngine<F, N>;
  using Loop = typename Engine::Loop;
  using State = typename Engine::State;
  using Prefix = typename Engine::Prefix;
  using XIndex = typename Loop::XIndex;
  using YIndex = typename Loop::YIndex;
  static constexpr int kTile = kParts * kItems, kWaits = (kRadix + kParts - 1) / kParts;
  static constexpr int64_t kSign = kReverse ? -1 : 1;
  template <size_t... L> static auto LoadedType(std::index_sequence<L...>)
      -> Slots<XIndex, typename Loop::template Loaded<X, F::XsKind(L)>...>;
  using Loaded = decltype(LoadedType(XIndex()));
  static constexpr bool kStaged = kOver == kOverTiles && kAhead;
  static constexpr int kUnroll = !kStaged ? kItems : kItems % 8 == 0 ? 8 : 4;

  // The elements of a thread's steps of a tile, in registers.
  struct Registers {
    Loaded x[kItems];
    __device__ __forceinline__ Loaded& Get(int u) { return x[u]; }
    __device__ __forceinline__ const Loaded& Get(int u) const { return x[u]; }
  };
  // The same in shared memory, [step][thread].
  struct Staged {
    Loaded (*x)[kLanes * kParts];
    __device__ __forceinline__ Loaded& Get(int u) const { return x[u][threadIdx.x]; }
  };
  using Held = std::conditional_t<kStaged, Staged, Registers>;

  // [part][lane]
  template <int kCount> struct Room {
    State of[kCount][kLanes][N];
  };
  struct Shared {
    Room<kParts> part[kOver == kOverTiles ? 1 : 2];
    Room<kOver == kOverTiles ? kRadix : 1> tile, group;
    Room<2> before;  // the states before the group of this tile, and of the tiles before it in the group
  };

  template <size_t... L> static __device__ __forceinline__ void Load(const typename Engine::Args& a, int64_t lane,
                                                                     int64_t rank, Held& x, std::index_sequence<L...>) {
    Slots<XIndex, typename Loop::template Place<const X, F::XsKind(L), F::XsMap(L)>...> from;
    const int64_t begin = kReverse ? a.loop.steps - 1 - rank : rank;
    (At<L>(from).Set(a.loop, static_cast<const X*>(a.loop.x[L]) + begin * F::XsStep(L), lane), ...);
    // Steps behind the last are 0. Loads without conditions are all in flight at once.
    const int left = Left(a, rank);
    if (left == kItems) {
#pragma unroll kUnroll
      for (int u = 0; u < kItems; ++u) (LoadStep<L, X>(At<L>(from), kSign * u * F::XsStep(L), At<L>(x.Get(u))), ...);
      return;
    }
#pragma unroll kUnroll
    for (int u = 0; u < kItems; ++u) {
      if (u < left) (LoadStep<L, X>(At<L>(from), kSign * u * F::XsStep(L), At<L>(x.Get(u))), ...);
      else ((At<L>(x.Get(u)) = ZeroPack<X, F::XsKind(L) == kSame ? 1 : N>()), ...);
    }
  }
  // The steps of a thread from `rank` on, kItems at most.
  static __device__ __forceinline__ int Left(const typename Engine::Args& a, int64_t rank) {
    const int64_t left = a.loop.steps - rank;
    return static_cast<int>(left < 0 ? 0 : left < kItems ? left : kItems);
  }
  // Loads a step of an array, or begins to copy it to shared memory.
  template <size_t L, class T, class From, class Pack>
  static __device__ __forceinline__ void LoadStep(const From& from, int64_t step, Pack& to) {
    constexpr bool kAsync = kStaged && F::XsKind(L) == kPack && N * sizeof(T) >= 4;
    if constexpr (kAsync) CopyAsync<N * sizeof(T)>(&to, from.first + step);
    else to = Loop::template Load<T, F::XsKind(L), F::XsMap(L)>(from, step);
  }
  template <size_t... L>
  static __device__ __forceinline__ typename Engine::Step Item(const Loaded& x, int i, std::index_sequence<L...>) {
    typename Engine::Step step;
    ((At<L>(step) = Wide<X>(Element(At<L>(x), F::XsKind(L) == kSame ? 0 : i))), ...);
    return step;
  }

  template <size_t... M> static __device__ __forceinline__ void Finish(const typename Engine::Args& a, int64_t lane,
                                                                       bool valid, int64_t rank, const Held& x,
                                                                       const typename Engine::Lane (&numbers)[N],
                                                                       typename Engine::Carry (&carry)[N], bool first,
                                                                       std::index_sequence<M...>) {
    Slots<YIndex, typename Loop::template Place<Y, F::YsKind(M), F::YsMap(M)>...> to;
    const int64_t begin = kReverse ? a.loop.steps - 1 - rank : rank;
    (At<M>(to).Set(a.loop, static_cast<Y*>(a.loop.y[M]) + begin * F::YsStep(M), lane), ...);
    const uint32_t owners[sizeof...(M) + 1] = {Loop::template Owners<F::YsOwner(M)>(a.loop, lane)..., 0};
    const int left = valid ? Left(a, rank) : 0;
    const int last = rank + left == a.loop.steps ? left - 1 : -1;  // one thread alone has the last step of a lane
#pragma unroll kUnroll
    for (int u = 0; u < kItems; ++u) {
      Slots<YIndex, PerLane<Own<Y>, N>...> y;
      const Loaded step = x.Get(u);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        typename Engine::Stored value;
        Engine::Run(u == 0 && first, numbers[i], carry[i], Item(step, i, XIndex()), value);
        ((At<M>(y).of[i] = At<M>(value)), ...);
      }
      (Loop::template Store<Y, F::YsKind(M), F::YsMap(M)>(At<M>(to), kSign * u * F::YsStep(M), At<M>(y),
                                                          u < left ? owners[M] : 0),
       ...);
      if constexpr (F::kLast) {
        if (u == last) Engine::StoreLast(a, lane, carry, typename Loop::CarryIndex());
      }
    }
  }

  // staged: the places of elements in shared memory.
  static __device__ __forceinline__ void Run(const typename Engine::Args& a, Shared& shared, char* staged) {
    const int side = threadIdx.x % kLanes, part = threadIdx.x / kLanes;
    const uint32_t blocks = static_cast<uint32_t>((a.loop.lanes + kLanes * N - 1) / (kLanes * N));
    int64_t tile = kOver == kOverTiles ? blockIdx.x / blocks : 0;
    const int64_t end = kOver == kOverTiles ? tile + 1 : a.tiles;
    // Threads without lanes compute lane 0, and store nothing.
    const int64_t place = (static_cast<int64_t>(blockIdx.x % blocks) * kLanes + side) * N;
    const bool valid = place < a.loop.lanes;
    const int64_t lane = valid ? place : 0;

    Held x;
    if constexpr (kStaged) x.x = reinterpret_cast<Loaded(*)[kLanes * kParts]>(staged);
    Load(a, lane, tile * kTile + part * kItems, x, XIndex());
    typename Engine::Lane numbers[N];
    typename Engine::Carry init[N];
    Engine::Read(a, lane, numbers, init);
    Prefix walked[N];
    if constexpr (kStaged) WaitForCopies();
    for (int phase = 0;; phase ^= 1) {
      State own[N];
#pragma unroll kUnroll
      for (int u = 0; u < kItems; ++u) {
        const Loaded step = x.Get(u);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const State element = Engine::ElementOf(numbers[i], Item(step, i, XIndex()));
          own[i] = u == 0 ? element : Engine::Join(own[i], element);
        }
      }
      const int64_t rank = tile * kTile + part * kItems;
      const bool goes_on = ++tile < end;
      // The other half of shared.part is read until all threads have come here again.
      const Room<kParts>& parts = shared.part[kOver == kOverTiles ? 0 : phase];
      if constexpr (kParts > 1 || kOver == kOverTiles) {
#pragma unroll
        for (int i = 0; i < N; ++i) shared.part[kOver == kOverTiles ? 0 : phase].of[part][side][i] = own[i];
        __syncthreads();
      }
      Held ahead;
      if (kAhead && !kStaged && goes_on) Load(a, lane, rank + kTile, ahead, XIndex());

      Prefix before[N];
      if constexpr (kOver == kOverTiles) {
        LookBack(a, place, side, part, tile - 1, own, before, parts, shared);
      }
      typename Engine::Carry carry[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (kOver != kOverTiles) {
          before[i] = walked[i];
          if constexpr (kParts > 1) walked[i].Append(Total(parts, kParts, side, i));
          else walked[i].Append(own[i]);
        }
        if constexpr (kParts > 1) {
          if (part > 0) before[i].Append(Total(parts, part, side, i));
        }
        carry[i] = Engine::Behind(init[i], before[i]);
      }
      Finish(a, lane, valid, rank, x, numbers, carry, !before[0].any, YIndex());
      if (!goes_on) return;
      if constexpr (kAhead) x = ahead;
      else Load(a, lane, rank + kTile, x, XIndex());
    }
  }

  // The states of the first `count` parts joined, count > 0.
  static __device__ __forceinline__ State Total(const Room<kParts>& parts, int count, int side, int i) {
    State all = parts.of[0][side][i];
#pragma unroll
    for (int p = 1; p < kParts; ++p) {
      if (p < count) all = Engine::Join(all, parts.of[p][side][i]);
    }
    return all;
  }

  // Publishes the states of this block's tile, and what its block publishes of the tiles before it; sets `before` to the states
  // of those. parts: the states of all parts. Contains a barrier.
  static __device__ __forceinline__ void LookBack(const typename Engine::Args& a, int64_t place, int side, int part,
                                                  int64_t tile, const State (&own)[N], Prefix (&before)[N],
                                                  const Room<kParts>& parts, Shared& shared) {
    const int64_t stride = (a.loop.lanes + kLanes * N - 1) / (kLanes * N) * (kLanes * N);
    const int64_t each = Engine::kWords * stride;
    typename Engine::Published published;
    published.template Set<kRadix>(a.slots + place, a.tiles, each);
    const int64_t group = tile / kRadix, super = group / kRadix;
    const int tiles = static_cast<int>(tile % kRadix), groups = static_cast<int>(group % kRadix);
    const bool closes = tiles == kRadix - 1, closes_super = closes && groups == kRadix - 1;
    const bool publishes = part == kParts - 1;

    State total[N];
    if (publishes) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        total[i] = Total(parts, kParts, side, i);
        Engine::Publish(published.tile + tile * each + i, stride, total[i]);
      }
    }
    if (tile == 0) {
      __syncthreads();
      return;
    }
    const auto tile_slot = [&](int at, int i) { return published.tile + (group * kRadix + at) * each + i; };
    const auto group_slot = [&](int at, int i) { return published.group + (super * kRadix + at) * each + i; };
    const auto super_slot = [&](int i) { return published.before + (super - 1) * each + i; };
    typename Engine::Pending of_tile[kWaits][N], of_group[kWaits][N], of_super[N];
#pragma unroll
    for (int k = 0; k < kWaits; ++k) {
      const int at = part + k * kParts;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (at < tiles) of_tile[k][i].Begin(tile_slot(at, i), stride);
        if (at < groups) of_group[k][i].Begin(group_slot(at, i), stride);
      }
    }
    if (super > 0 && part == 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) of_super[i].Begin(super_slot(i), stride);
    }
    if (tiles > 0) {
#pragma unroll
      for (int k = 0; k < kWaits; ++k) {
        const int at = part + k * kParts;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (at < tiles) shared.tile.of[at][side][i] = of_tile[k][i].Finish(tile_slot(at, i), stride);
        }
      }
      __syncthreads();
      if (closes && publishes) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          Prefix all;
          for (int k = 0; k < kRadix - 1; ++k) all.Append(shared.tile.of[k][side][i]);
          Engine::Publish(published.group + group * each + i, stride, Engine::Join(all.state, total[i]));
        }
      }
    }
    if (groups > 0) {
#pragma unroll
      for (int k = 0; k < kWaits; ++k) {
        const int at = part + k * kParts;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (at < groups) shared.group.of[at][side][i] = of_group[k][i].Finish(group_slot(at, i), stride);
        }
      }
      __syncthreads();
    }
    // For all parts, the first one joins the states of earlier groups, and another one the states of earlier tiles.
    if (part == 0 && group > 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        Prefix all;
        if (super > 0) all.Append(of_super[i].Finish(super_slot(i), stride));
        Prefix of_groups;
        for (int k = 0; k < groups; ++k) of_groups.Append(shared.group.of[k][side][i]);
        all.Append(groups > 0, of_groups.state);
        shared.before.of[0][side][i] = all.state;
      }
    }
    if (part == (kParts > 1) && tiles > 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        Prefix all;
        for (int k = 0; k < tiles; ++k) all.Append(shared.tile.of[k][side][i]);
        shared.before.of[1][side][i] = all.state;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      before[i].Append(group > 0, shared.before.of[0][side][i]);
      before[i].Append(tiles > 0, shared.before.of[1][side][i]);
      if (closes_super && publishes) {
        Engine::Publish(published.before + super * each + i, stride, Engine::Join(before[i].state, total[i]));
      }
    }
  }
};

template <class F, int N, int kLanes, int kParts, int kItems, int kMinBlocks, int kRadix, bool kAhead, Over kOver,
          bool kReverse>
__global__ void __launch_bounds__(kLanes* kParts, kMinBlocks)
    ColumnScanKernel(const __grid_constant__ typename AssociativeEngine<F, N>::Args a) {
  using Scan = ColumnScan<F, N, kLanes, kParts, kItems, kRadix, kAhead, kOver, kReverse>;
  __shared__ typename Scan::Shared shared;
  JAXKERN_DYNAMIC_SHARED(staged);
  Scan::Run(a, shared, staged);
}

}  // namespace jaxkern
