// Loops whose steps are joined by an associative operation: all steps of a lane are spread over the threads of a block, or
// over many blocks.
//
//     RowScanKernel<F, N, kItems, kThreads, kMinBlocks, kRadix, kOver, kReverse>       the steps of a lane are adjacent in memory
//     ColumnScanKernel<F, N, kLanes, kParts, kItems, kMinBlocks, kRadix, kOver, kReverse>     lanes are
//
// F is a loop's F (loops.cuh) that also has a state, a few numbers that stand for one step or for adjacent steps:
//
//     States                           the types of its members, types that are computed in
//     Element(constants, carries, xs, indices, state&)        the state of one step; it does not depend on the carries
//     Combine(earlier, later, state&)  associative
//     Apply(state, carries, carries&)  the carries behind the steps of a state
//     kStart                           kGiven: initial carries are operands. kNumbers: Start(carries&) returns them. kOpen:
//                                      there are none. Then First(constants, xs, indices, carries&, ys&) is the first step,
//                                      and carries have the types of the state
//     kLast                            the last carries are results
//
// A thread loads kItems adjacent steps into registers, joins their states, finds out the state of all steps before its own,
// and runs the loop's Step over its own from there. So each element of xs is read once, and each of ys written once.
//
// How states are joined depends on shapes alone, so results are the same in each run: in a thread in order, then over the
// lanes of a warp and over warps in trees of fixed shape. Where several blocks share the steps of a lane, each takes a tile.
// kRadix adjacent tiles are a group, and kRadix adjacent groups a supergroup. A block publishes the state of its tile, the
// last block of a group the state of the group, and the last block of a supergroup the state of all steps up to its end.
// What stands before a tile is the state before its supergroup, the states of earlier groups in it, and the states of earlier
// tiles in its group, joined in this order. A block waits for blocks with smaller indices, which the GPU starts first.
//
// Published states lie in `slots`, which are 0 at the start. Each word of a state has 64 bits, with a flag in the upper half
// that says that it is there, so that no fence is needed: a store of 64 bits is seen whole or not at all.
//
// Steps behind the last, in the last tile, have states of zeros or of anything. They come after all others, and nothing that is
// stored depends on them.
#pragma once

#include "loops.cuh"

namespace jaxkern {

enum Start { kGiven, kNumbers, kOpen };

// What shares the steps of a lane: one warp, one block, or the blocks of several tiles.
enum Over { kOverWarp, kOverBlock, kOverTiles };

__device__ __forceinline__ void PublishSlot(uint64_t* slot, uint32_t word) {
  const uint64_t bits = uint64_t{1} << 32 | word;
#ifdef JAXKERN_EMULATED
  *slot = bits;
#else
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(slot), "l"(bits) : "memory");
#endif
}

__device__ __forceinline__ uint64_t ReadSlot(const uint64_t* slot) {
#ifdef JAXKERN_EMULATED
  return *slot;
#else
  uint64_t bits;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(bits) : "l"(slot) : "memory");
  return bits;
#endif
}

// Lanes of a warp exchange numbers of 32 or 64 bits.
template <class T> __device__ __forceinline__ auto Exchangeable(T x) {
  if constexpr (sizeof(T) < 4) return static_cast<int32_t>(x);
  else return x;
}

template <class F, int N, class Consts = typename F::Consts, class Carries = typename F::Carries,
          class Xs = typename F::Xs, class Ys = typename F::Ys, class States = typename F::States>
struct AssociativeEngine;

template <class F, int N, class... K, class... C, class... X, class... Y, class... S>
struct AssociativeEngine<F, N, Types<K...>, Types<C...>, Types<X...>, Types<Y...>, Types<S...>> {
  using Loop = LoopEngine<F, N>;
  using StateIndex = std::make_index_sequence<sizeof...(S)>;
  using State = Slots<StateIndex, S...>;

  struct Args {
    typename Loop::Args loop;
    uint64_t* slots;
    int64_t tiles;
  };

  // The numbers of a lane that stay the same in all steps.
  struct Lane {
    Slots<typename Loop::ConstIndex, Own<K>...> constant;
    int32_t index[F::kIndices + 1];
  };
  using Carry = Slots<typename Loop::CarryIndex, Own<C>...>;
  using Step = Slots<typename Loop::XIndex, Own<X>...>;
  using Stored = Slots<typename Loop::YIndex, Own<Y>...>;

  // ---- states

  template <size_t... I>
  static __device__ __forceinline__ State Join(const State& a, const State& b, std::index_sequence<I...>) {
    State c;
    typename F::Combine()(At<I>(a)..., At<I>(b)..., At<I>(c)...);
    return c;
  }
  static __device__ __forceinline__ State Join(const State& a, const State& b) { return Join(a, b, StateIndex()); }

  template <size_t... I> static __device__ __forceinline__ State Up(const State& a, int by, std::index_sequence<I...>) {
    State b;
    ((At<I>(b) = static_cast<S>(__shfl_up_sync(0xffffffffu, Exchangeable(At<I>(a)), by))), ...);
    return b;
  }
  static __device__ __forceinline__ State Up(const State& a, int by) { return Up(a, by, StateIndex()); }

  template <size_t... I>
  static __device__ __forceinline__ State Down(const State& a, int by, std::index_sequence<I...>) {
    State b;
    ((At<I>(b) = static_cast<S>(__shfl_down_sync(0xffffffffu, Exchangeable(At<I>(a)), by))), ...);
    return b;
  }
  template <size_t... I>
  static __device__ __forceinline__ State From(const State& a, int lane, std::index_sequence<I...>) {
    State b;
    ((At<I>(b) = static_cast<S>(__shfl_sync(0xffffffffu, Exchangeable(At<I>(a)), lane))), ...);
    return b;
  }
  static __device__ __forceinline__ State From(const State& a, int lane) { return From(a, lane, StateIndex()); }

  // The states of lanes 0 to own of aligned groups of kLanes lanes.
  template <int kLanes> static __device__ __forceinline__ State Inclusive(State a) {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int by = 1; by < kLanes; by *= 2) {
      const State earlier = Up(a, by);
      if (lane >= by) a = Join(earlier, a);
    }
    return a;
  }

  // In lane 0, the states of lanes 0 to count - 1 joined; count > 0.
  static __device__ __forceinline__ State Reduce(State a, int count) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const State later = Down(a, by, StateIndex());
      if (lane % (2 * by) == 0 && lane + by < count) a = Join(a, later);
    }
    return a;
  }

  // A state that grows at its end; empty at first.
  struct Prefix {
    State state;
    bool any = false;
    __device__ __forceinline__ void Append(const State& later) {
      if (any) state = Join(state, later);
      else state = later;
      any = true;
    }
    __device__ __forceinline__ void Append(bool really, const State& later) {
      if (really) Append(later);
    }
  };

  // ---- published states

  static constexpr int kWords = (0 + ... + (sizeof(S) == 8 ? 2 : 1));

  template <class T> static __device__ __forceinline__ void PublishMember(uint64_t*& at, int64_t stride, T x) {
    if constexpr (sizeof(T) == 8) {
      const uint64_t bits = *reinterpret_cast<const uint64_t*>(&x);
      PublishSlot(at, static_cast<uint32_t>(bits));
      PublishSlot(at + stride, static_cast<uint32_t>(bits >> 32));
      at += 2 * stride;
    } else {
      const auto wide = Exchangeable(x);
      PublishSlot(at, *reinterpret_cast<const uint32_t*>(&wide));
      at += stride;
    }
  }
  // stride: from one word of a state to the next.
  template <size_t... I>
  static __device__ __forceinline__ void Publish(uint64_t* at, int64_t stride, const State& a,
                                                 std::index_sequence<I...>) {
    (PublishMember(at, stride, At<I>(a)), ...);
  }
  static __device__ __forceinline__ void Publish(uint64_t* at, int64_t stride, const State& a) {
    Publish(at, stride, a, StateIndex());
  }

  // What has been read of a published state. Finish waits until all of it is there.
  struct Pending {
    const uint64_t* at;
    uint64_t word[kWords];

    __device__ __forceinline__ void Begin(const uint64_t* slots, int64_t stride) {
      at = slots;
#pragma unroll
      for (int w = 0; w < kWords; ++w) word[w] = ReadSlot(at + w * stride);
    }
    template <size_t... I> __device__ __forceinline__ State Finish(int64_t stride, std::index_sequence<I...>) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        while (!(word[w] >> 32)) word[w] = ReadSlot(at + w * stride);
      }
      State a;
      int w = 0;
      ((At<I>(a) = Member<S>(w)), ...);
      return a;
    }
    template <class T> __device__ __forceinline__ T Member(int& w) const {
      if constexpr (sizeof(T) == 8) {
        const uint64_t bits = word[w + 1] << 32 | (word[w] & 0xffffffffu);
        w += 2;
        return *reinterpret_cast<const T*>(&bits);
      } else {
        const uint32_t bits = static_cast<uint32_t>(word[w++]);
        using Wide = decltype(Exchangeable(T()));
        return static_cast<T>(*reinterpret_cast<const Wide*>(&bits));
      }
    }
  };

  // Where the states of tiles, of groups, and those before supergroups lie: `each` slots for each.
  struct Published {
    uint64_t *tile, *group, *before;
    int64_t each;
    template <int kRadix> __device__ __forceinline__ void Set(uint64_t* slots, int64_t tiles, int64_t each_has) {
      each = each_has;
      tile = slots;
      group = tile + tiles * each;
      before = group + (tiles / kRadix) * each;
    }
  };

  // ---- steps

  template <size_t... I, size_t... J, size_t... L, size_t... P>
  static __device__ __forceinline__ State ElementOf(const Lane& lane, const Step& x, std::index_sequence<I...>,
                                                    std::index_sequence<J...>, std::index_sequence<L...>,
                                                    std::index_sequence<P...>) {
    State a;
    ElementInto(lane, x, a, StateIndex(), std::index_sequence<I...>(), std::index_sequence<J...>(),
                std::index_sequence<L...>(), std::index_sequence<P...>());
    return a;
  }
  template <size_t... G, size_t... I, size_t... J, size_t... L, size_t... P>
  static __device__ __forceinline__ void ElementInto(const Lane& lane, const Step& x, State& a,
                                                     std::index_sequence<G...>, std::index_sequence<I...>,
                                                     std::index_sequence<J...>, std::index_sequence<L...>,
                                                     std::index_sequence<P...>) {
    typename F::Element()(At<I>(lane.constant)..., static_cast<Own<C>>(0 * J)..., At<L>(x)..., lane.index[P]...,
                          At<G>(a)...);
  }
  static __device__ __forceinline__ State ElementOf(const Lane& lane, const Step& x) {
    return ElementOf(lane, x, typename Loop::ConstIndex(), typename Loop::CarryIndex(), typename Loop::XIndex(),
                     typename Loop::PlaceIndex());
  }

  // The carry behind the steps of a prefix. open: there is none.
  template <size_t... J, size_t... G>
  static __device__ __forceinline__ Carry Behind(const Carry& init, const Prefix& prefix, std::index_sequence<J...>,
                                                 std::index_sequence<G...>) {
    Carry carry = init;
    if (prefix.any) {
      if constexpr (F::kStart == kOpen) ((At<J>(carry) = At<J>(prefix.state)), ...);
      else typename F::Apply()(At<G>(prefix.state)..., At<J>(init)..., At<J>(carry)...);
    }
    return carry;
  }
  static __device__ __forceinline__ Carry Behind(const Carry& init, const Prefix& prefix) {
    return Behind(init, prefix, typename Loop::CarryIndex(), StateIndex());
  }

  template <size_t... I, size_t... J, size_t... L, size_t... M, size_t... P>
  static __device__ __forceinline__ void Run(bool first, const Lane& lane, Carry& carry, const Step& x, Stored& y,
                                             std::index_sequence<I...>, std::index_sequence<J...>,
                                             std::index_sequence<L...>, std::index_sequence<M...>,
                                             std::index_sequence<P...>) {
    if constexpr (F::kStart == kOpen) {
      if (first) {
        typename F::First()(At<I>(lane.constant)..., At<L>(x)..., lane.index[P]..., At<J>(carry)..., At<M>(y)...);
        return;
      }
    }
    typename F::Step()(At<I>(lane.constant)..., At<J>(carry)..., At<L>(x)..., lane.index[P]..., At<J>(carry)...,
                       At<M>(y)...);
    ((At<J>(carry) = Wide<C>(jaxkern::Stored<C>(At<J>(carry)))), ...);  // as loops.cuh does
  }
  // One step. first: no state stands before it, and F has no initial carry.
  static __device__ __forceinline__ void Run(bool first, const Lane& lane, Carry& carry, const Step& x, Stored& y) {
    Run(first, lane, carry, x, y, typename Loop::ConstIndex(), typename Loop::CarryIndex(), typename Loop::XIndex(),
        typename Loop::YIndex(), typename Loop::PlaceIndex());
  }

  // Constants, indices and initial carries of the N lanes of a thread.
  template <size_t... I, size_t... J, size_t... P>
  static __device__ __forceinline__ void Read(const Args& a, int64_t lane, Lane (&own)[N], Carry (&init)[N],
                                              std::index_sequence<I...>, std::index_sequence<J...>,
                                              std::index_sequence<P...>) {
    Slots<typename Loop::ConstIndex, PerLane<Own<K>, N>...> constant;
    ((At<I>(constant) =
          Loop::template Read<K, F::ConstsKind(I), F::ConstsMap(I)>(a.loop, a.loop.constant[I], lane)),
     ...);
    Slots<typename Loop::CarryIndex, PerLane<Own<C>, N>...> carry;
    if constexpr (F::kStart == kGiven) ((At<J>(carry) = Loop::template Init<J, C>(a.loop, lane)), ...);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      ((At<I>(own[i].constant) = At<I>(constant).of[i]), ...);
      ((own[i].index[P] = static_cast<int32_t>(Loop::template Offset<F::PlaceMap(P)>(a.loop, lane + i))), ...);
      if constexpr (F::kStart == kGiven) ((At<J>(init[i]) = At<J>(carry).of[i]), ...);
      if constexpr (F::kStart == kNumbers) typename F::Start()(At<J>(init[i])...);
      if constexpr (F::kStart == kOpen) ((At<J>(init[i]) = static_cast<Own<C>>(0)), ...);
    }
  }
  static __device__ __forceinline__ void Read(const Args& a, int64_t lane, Lane (&own)[N], Carry (&init)[N]) {
    Read(a, lane, own, init, typename Loop::ConstIndex(), typename Loop::CarryIndex(), typename Loop::PlaceIndex());
  }

  // Stores the last carries of a thread's lanes.
  template <size_t... J>
  static __device__ __forceinline__ void StoreLast(const Args& a, int64_t lane, const Carry (&carry)[N],
                                                   std::index_sequence<J...>) {
    (StoreCarry<J, C>(a, lane, carry), ...);
  }
  template <size_t J, class T>
  static __device__ __forceinline__ void StoreCarry(const Args& a, int64_t lane, const Carry (&carry)[N]) {
    typename Loop::template Place<T, F::CarriesKind(J), F::CarriesMap(J)> place;
    place.Set(a.loop, static_cast<T*>(a.loop.last[J]), lane);
    PerLane<Own<T>, N> value;
#pragma unroll
    for (int i = 0; i < N; ++i) value.of[i] = At<J>(carry[i]);
    Loop::template Store<T, F::CarriesKind(J), F::CarriesMap(J)>(place, value,
                                                                Loop::template Owners<F::CarriesOwner(J)>(a.loop, lane));
  }
};

// ---- rows

// Packs of N elements of a warp's kItems * 32 adjacent elements: a thread loads pack v * 32 + lane of them as number v, and
// computes on packs lane * kPacks + v. Lanes exchange packs in shared memory, where a pack lies at its place with the lower
// bits changed, so that neither order has bank conflicts.
template <class T, int N, int kPacks> struct Chunk {
  Pack<T, N> pack[kPacks];

  static constexpr int kUnit = 128 / sizeof(Pack<T, N>);  // packs in all banks of shared memory
  static __device__ __forceinline__ int At(int k) { return k ^ (k / kUnit % kUnit); }

  // begin: of the warp's elements in the row, may be negative. Elements outside of [0, length) are 0.
  __device__ __forceinline__ void Load(const T* row, int64_t begin, int64_t length) {
    const int lane = threadIdx.x % 32;
    const bool whole = begin >= 0 && begin + 32 * kPacks * N <= length;
    if (whole) {
#pragma unroll
      for (int v = 0; v < kPacks; ++v) pack[v] = LoadLanes<T, N>(row + begin + (v * 32 + lane) * N);
      return;
    }
#pragma unroll
    for (int v = 0; v < kPacks; ++v) {
      const int64_t at = begin + (v * 32 + lane) * N;
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
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int v = 0; v < kPacks; ++v) {
      const int64_t at = begin + (v * 32 + lane) * N;
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
    if (kPacks == 1 && own == static_cast<int>(threadIdx.x % 32)) return;
    Pack<T, N>* packs = reinterpret_cast<Pack<T, N>*>(room);
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kPacks; ++v) packs[At(v * 32 + threadIdx.x % 32)] = pack[v];
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kPacks; ++v) pack[v] = packs[At(own * kPacks + v)];
  }
  __device__ __forceinline__ void ToStriped(char* room, int own) {
    if (kPacks == 1 && own == static_cast<int>(threadIdx.x % 32)) return;
    Pack<T, N>* packs = reinterpret_cast<Pack<T, N>*>(room);
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kPacks; ++v) packs[At(own * kPacks + v)] = pack[v];
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kPacks; ++v) pack[v] = packs[At(v * 32 + threadIdx.x % 32)];
  }
};

template <class... T> constexpr int MostBytes() {
  int most = 4;
  ((most = static_cast<int>(sizeof(T)) > most ? static_cast<int>(sizeof(T)) : most), ...);
  return most;
}

template <class F, int N, int kItems, int kThreads, int kRadix, Over kOver, bool kReverse, class Xs = typename F::Xs,
          class Ys = typename F::Ys>
struct RowScan;

template <class F, int N, int kItems, int kThreads, int kRadix, Over kOver, bool kReverse, class... X, class... Y>
struct RowScan<F, N, kItems, kThreads, kRadix, kOver, kReverse, Types<X...>, Types<Y...>> {
  using Engine = AssociativeEngine<F, 1>;
  using Loop = typename Engine::Loop;
  using State = typename Engine::State;
  using XIndex = typename Loop::XIndex;
  using YIndex = typename Loop::YIndex;
  static constexpr int kWarps = kThreads / 32, kPacks = kItems / N;
  static_assert(kRadix <= 32, "a lane for each tile of a group");
  static constexpr int kTile = (kOver == kOverWarp ? 32 : kThreads) * kItems;
  static constexpr int kRoom = 32 * kPacks * MostBytes<Pack<X, N>..., Pack<Y, N>...>();
  template <class T> using ChunkOf = Chunk<T, N, kPacks>;
  using Loaded = Slots<XIndex, ChunkOf<X>...>;

  struct Shared {
    alignas(16) char room[kWarps][kRoom];
    State warp[2][kWarps];
    State before;
  };

  template <size_t... L>
  static __device__ __forceinline__ void Load(const typename Engine::Args& a, int64_t row, int64_t begin, Loaded& x,
                                              std::index_sequence<L...>) {
    (At<L>(x).Load(static_cast<const X*>(a.loop.x[L]) + Loop::template Offset<F::XsMap(L)>(a.loop, row), begin,
                   a.loop.steps),
     ...);
  }
  template <size_t... M>
  static __device__ __forceinline__ void Store(const typename Engine::Args& a, int64_t row, int64_t begin,
                                               Slots<YIndex, ChunkOf<Y>...>& y, char* room, int own,
                                               std::index_sequence<M...>) {
    ((At<M>(y).ToStriped(room, own),
      At<M>(y).Store(static_cast<Y*>(a.loop.y[M]) + Loop::template Offset<F::YsMap(M)>(a.loop, row), begin,
                     a.loop.steps)),
     ...);
  }
  template <size_t... L>
  static __device__ __forceinline__ typename Engine::Step Item(const Loaded& x, int u, std::index_sequence<L...>) {
    const int k = kReverse ? kItems - 1 - u : u;
    typename Engine::Step step;
    ((At<L>(step) = Wide<X>(Element(At<L>(x).pack[k / N], k % N))), ...);
    return step;
  }
  template <size_t... M>
  static __device__ __forceinline__ void SetItem(Slots<YIndex, ChunkOf<Y>...>& y, int u,
                                                 const typename Engine::Stored& value, std::index_sequence<M...>) {
    const int k = kReverse ? kItems - 1 - u : u;
    (SetElement(At<M>(y).pack[k / N], k % N, Stored<Y>(At<M>(value))), ...);
  }
  template <size_t... L>
  static __device__ __forceinline__ void ToOwn(Loaded& x, char* room, int own, std::index_sequence<L...>) {
    (At<L>(x).ToOwn(room, own), ...);
  }

  // Where the elements of this thread's warp begin in the row, in memory order.
  static __device__ __forceinline__ int64_t Begin(const typename Engine::Args& a, int64_t tile) {
    const int warp = kOver == kOverWarp ? 0 : threadIdx.x / 32;
    const int64_t rank = tile * kTile + warp * 32 * kItems;
    return kReverse ? a.loop.steps - rank - 32 * kItems : rank;
  }

  static __device__ __forceinline__ void Run(const typename Engine::Args& a, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t rows = a.loop.lanes;
    const int64_t block = blockIdx.x;
    const int64_t row = kOver == kOverWarp ? block * kWarps + warp : kOver == kOverBlock ? block : block % rows;
    if (kOver == kOverWarp && row >= rows) return;
    int64_t tile = kOver == kOverTiles ? block / rows : 0;
    const int64_t end = kOver == kOverTiles ? tile + 1 : a.tiles;
    const int own = kReverse ? 31 - lane : lane;

    typename Engine::Lane numbers[1];
    typename Engine::Carry init[1];
    Loaded next;
    Load(a, row, Begin(a, tile), next, XIndex());
    Engine::Read(a, row, numbers, init);
    typename Engine::Prefix walked;
    for (; tile < end; ++tile) {
      Loaded x = next;
      ToOwn(x, shared.room[warp], own, XIndex());
      if (kOver != kOverTiles && tile + 1 < end) Load(a, row, Begin(a, tile + 1), next, XIndex());
      State inclusive = Engine::ElementOf(numbers[0], Item(x, 0, XIndex()));
#pragma unroll
      for (int u = 1; u < kItems; ++u) {
        inclusive = Engine::Join(inclusive, Engine::ElementOf(numbers[0], Item(x, u, XIndex())));
      }
      inclusive = Engine::template Inclusive<32>(inclusive);
      const State exclusive = Engine::Up(inclusive, 1);

      typename Engine::Prefix before = walked;
      if constexpr (kOver == kOverWarp) {
        walked.Append(Engine::From(inclusive, 31));
      } else {
        State* const warps = shared.warp[tile % 2];
        if (lane == 31) warps[warp] = inclusive;
        __syncthreads();
        const State all = Engine::template Inclusive<kWarps>(warps[lane % kWarps]);
        const State total = Engine::From(all, kWarps - 1);
        if constexpr (kOver == kOverTiles) {
          if (warp == 0) LookBack(a, row, tile, total, shared);
          if (tile > 0) {
            __syncthreads();
            before.Append(shared.before);
          }
        } else {
          walked.Append(total);
        }
        const State earlier = Engine::From(all, (warp + kWarps - 1) % kWarps);
        before.Append(warp > 0, earlier);
      }
      before.Append(lane > 0, exclusive);

      const int64_t rank = tile * kTile + (kOver == kOverWarp ? lane : threadIdx.x) * kItems;
      typename Engine::Carry carry[1] = {Engine::Behind(init[0], before)};
      Slots<YIndex, ChunkOf<Y>...> y;
#pragma unroll
      for (int u = 0; u < kItems; ++u) {
        typename Engine::Stored value;
        Engine::Run(u == 0 && !before.any, numbers[0], carry[0], Item(x, u, XIndex()), value);
        SetItem(y, u, value, YIndex());
        if constexpr (F::kLast) {
          if (rank + u == a.loop.steps - 1) Engine::StoreLast(a, row, carry, typename Loop::CarryIndex());
        }
      }
      Store(a, row, Begin(a, tile), y, shared.room[warp], own, YIndex());
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

template <class F, int N, int kItems, int kThreads, int kMinBlocks, int kRadix, Over kOver, bool kReverse>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    RowScanKernel(const __grid_constant__ typename AssociativeEngine<F, 1>::Args a) {
  using Scan = RowScan<F, N, kItems, kThreads, kRadix, kOver, kReverse>;
  __shared__ typename Scan::Shared shared;
  Scan::Run(a, shared);
}

// ---- columns

template <class F, int N, int kLanes, int kParts, int kItems, int kRadix, Over kOver, bool kReverse, class Xs = typename F::Xs,
          class Ys = typename F::Ys>
struct ColumnScan;

// A block takes kLanes * N adjacent lanes. Its threads are kParts parts of kLanes threads, and each part takes kItems steps.
template <class F, int N, int kLanes, int kParts, int kItems, int kRadix, Over kOver, bool kReverse, class... X, class... Y>
struct ColumnScan<F, N, kLanes, kParts, kItems, kRadix, kOver, kReverse, Types<X...>, Types<Y...>> {
  using Engine = AssociativeEngine<F, N>;
  using Loop = typename Engine::Loop;
  using State = typename Engine::State;
  using Prefix = typename Engine::Prefix;
  using XIndex = typename Loop::XIndex;
  using YIndex = typename Loop::YIndex;
  static constexpr int kTile = kParts * kItems, kWaits = (kRadix + kParts - 1) / kParts;
  template <size_t L> static constexpr int kKind = F::XsKind(L);
  template <size_t... L>
  static auto LoadedType(std::index_sequence<L...>)
      -> Slots<XIndex, typename Loop::template Loaded<X, F::XsKind(L)>...>;
  using Loaded = decltype(LoadedType(XIndex()));

  // [part][lane]
  template <int kCount> struct Room {
    State of[kCount][kLanes][N];
  };
  struct Shared {
    Room<kParts> part;
    Room<kOver == kOverTiles ? kRadix : 1> tile, group;
    Room<1> before;
  };

  template <size_t... L>
  static __device__ __forceinline__ void Load(const typename Engine::Args& a, int64_t lane, int64_t rank,
                                              Loaded (&x)[kItems], std::index_sequence<L...>) {
    Slots<XIndex, typename Loop::template Place<const X, F::XsKind(L), F::XsMap(L)>...> from;
    const int64_t begin = kReverse ? a.loop.steps - 1 - rank : rank;
    (At<L>(from).Set(a.loop, static_cast<const X*>(a.loop.x[L]) + begin * a.loop.x_step[L], lane), ...);
    const int64_t left = a.loop.steps - rank;
#pragma unroll
    for (int u = 0; u < kItems; ++u) {
      if (u < left) {
        ((At<L>(x[u]) = Loop::template Load<X, F::XsKind(L), F::XsMap(L)>(At<L>(from)),
          At<L>(from).first += kReverse ? -a.loop.x_step[L] : a.loop.x_step[L]),
         ...);
      } else {
        ((At<L>(x[u]) = ZeroPack<X, F::XsKind(L) == kSame ? 1 : N>()), ...);
      }
    }
  }
  template <size_t... L>
  static __device__ __forceinline__ typename Engine::Step Item(const Loaded& x, int i, std::index_sequence<L...>) {
    typename Engine::Step step;
    ((At<L>(step) = Wide<X>(Element(At<L>(x), F::XsKind(L) == kSame ? 0 : i))), ...);
    return step;
  }

  template <size_t... M>
  static __device__ __forceinline__ void Finish(const typename Engine::Args& a, int64_t lane, bool valid, int64_t rank,
                                                const Loaded (&x)[kItems],
                                                const typename Engine::Lane (&numbers)[N],
                                                typename Engine::Carry (&carry)[N], bool first,
                                                std::index_sequence<M...>) {
    Slots<YIndex, typename Loop::template Place<Y, F::YsKind(M), F::YsMap(M)>...> to;
    const int64_t begin = kReverse ? a.loop.steps - 1 - rank : rank;
    (At<M>(to).Set(a.loop, static_cast<Y*>(a.loop.y[M]) + begin * a.loop.y_step[M], lane), ...);
    const uint32_t owners[sizeof...(M) + 1] = {(valid ? Loop::template Owners<F::YsOwner(M)>(a.loop, lane) : 0)..., 0};
    const int64_t left = a.loop.steps - rank;
#pragma unroll
    for (int u = 0; u < kItems; ++u) {
      if (u < left) {
        Slots<YIndex, PerLane<Own<Y>, N>...> y;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          typename Engine::Stored value;
          Engine::Run(u == 0 && first, numbers[i], carry[i], Item(x[u], i, XIndex()), value);
          ((At<M>(y).of[i] = At<M>(value)), ...);
        }
        ((Loop::template Store<Y, F::YsKind(M), F::YsMap(M)>(At<M>(to), At<M>(y), owners[M]),
          At<M>(to).first += kReverse ? -a.loop.y_step[M] : a.loop.y_step[M]),
         ...);
        if constexpr (F::kLast) {
          if (u == left - 1 && valid) Engine::StoreLast(a, lane, carry, typename Loop::CarryIndex());
        }
      }
    }
  }

  static __device__ __forceinline__ void Run(const typename Engine::Args& a, Shared& shared) {
    const int side = threadIdx.x % kLanes, part = threadIdx.x / kLanes;
    const int64_t blocks = (a.loop.lanes + kLanes * N - 1) / (kLanes * N);
    int64_t tile = kOver == kOverTiles ? blockIdx.x / blocks : 0;
    const int64_t end = kOver == kOverTiles ? tile + 1 : a.tiles;
    // Threads without lanes compute on those of lane 0, and store nothing.
    const int64_t place = (blockIdx.x % blocks * kLanes + side) * N;
    const bool valid = place < a.loop.lanes;
    const int64_t lane = valid ? place : 0;

    Loaded x[kItems];
    Load(a, lane, tile * kTile + part * kItems, x, XIndex());
    typename Engine::Lane numbers[N];
    typename Engine::Carry init[N];
    Engine::Read(a, lane, numbers, init);
    Prefix walked[N];
    for (;;) {
      State own[N];
#pragma unroll
      for (int i = 0; i < N; ++i) own[i] = Engine::ElementOf(numbers[i], Item(x[0], i, XIndex()));
#pragma unroll
      for (int u = 1; u < kItems; ++u) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          own[i] = Engine::Join(own[i], Engine::ElementOf(numbers[i], Item(x[u], i, XIndex())));
        }
      }
      Prefix before[N];
      if constexpr (kParts > 1) {
        __syncthreads();  // the room is free
#pragma unroll
        for (int i = 0; i < N; ++i) shared.part.of[part][side][i] = own[i];
        __syncthreads();
      }
      if constexpr (kOver == kOverTiles) LookBack(a, place, side, part, tile, own, before, shared);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (kOver != kOverTiles) before[i] = walked[i];
        if constexpr (kParts > 1) {
          Prefix parts;
#pragma unroll
          for (int p = 0; p + 1 < kParts; ++p) {
            if (p < part) parts.Append(shared.part.of[p][side][i]);
          }
          before[i].Append(parts.any, parts.state);
        }
      }
      const int64_t rank = tile * kTile + part * kItems;
      typename Engine::Carry carry[N];
#pragma unroll
      for (int i = 0; i < N; ++i) carry[i] = Engine::Behind(init[i], before[i]);
      const bool first = !before[0].any;
      ++tile;
      if constexpr (kOver == kOverTiles) {
        Finish(a, lane, valid, rank, x, numbers, carry, first, YIndex());
        return;
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          Prefix all;
          if constexpr (kParts > 1) {
#pragma unroll
            for (int p = 0; p < kParts; ++p) all.Append(shared.part.of[p][side][i]);
          } else {
            all.Append(own[i]);
          }
          walked[i].Append(all.state);
        }
        Loaded now[kItems];
#pragma unroll
        for (int u = 0; u < kItems; ++u) now[u] = x[u];
        if (tile < end) Load(a, lane, tile * kTile + part * kItems, x, XIndex());
        Finish(a, lane, valid, rank, now, numbers, carry, first, YIndex());
        if (tile >= end) return;
      }
    }
  }

  // Publishes the states of this block's tile, and what its block publishes of the tiles before it; sets `before` to the states
  // of those. shared.part holds the states of all parts.
  static __device__ __forceinline__ void LookBack(const typename Engine::Args& a, int64_t place, int side, int part,
                                                  int64_t tile, const State (&own)[N], Prefix (&before)[N],
                                                  Shared& shared) {
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
        Prefix all;
#pragma unroll
        for (int p = 0; p + 1 < kParts; ++p) all.Append(shared.part.of[p][side][i]);
        all.Append(own[i]);
        total[i] = all.state;
        Engine::Publish(published.tile + tile * each + i, stride, total[i]);
      }
    }
    if (tile == 0) return;
    typename Engine::Pending of_tile[kWaits][N], of_group[kWaits][N], of_super[N];
#pragma unroll
    for (int k = 0; k < kWaits; ++k) {
      const int at = part + k * kParts;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (at < tiles) of_tile[k][i].Begin(published.tile + (group * kRadix + at) * each + i, stride);
        if (at < groups) of_group[k][i].Begin(published.group + (super * kRadix + at) * each + i, stride);
      }
    }
    if (super > 0 && part == 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) of_super[i].Begin(published.before + (super - 1) * each + i, stride);
    }
    const auto index = typename Engine::StateIndex();
    if (tiles > 0) {
#pragma unroll
      for (int k = 0; k < kWaits; ++k) {
        const int at = part + k * kParts;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (at < tiles) shared.tile.of[at][side][i] = of_tile[k][i].Finish(stride, index);
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
    if (group > 0) {
#pragma unroll
      for (int k = 0; k < kWaits; ++k) {
        const int at = part + k * kParts;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (at < groups) shared.group.of[at][side][i] = of_group[k][i].Finish(stride, index);
        }
      }
      if (super > 0 && part == 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) shared.before.of[0][side][i] = of_super[i].Finish(stride, index);
      }
      __syncthreads();
    }
    // Each part joins the same states in the same order.
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (super > 0) before[i].Append(shared.before.of[0][side][i]);
      Prefix of_groups, of_tiles;
      for (int k = 0; k < groups; ++k) of_groups.Append(shared.group.of[k][side][i]);
      for (int k = 0; k < tiles; ++k) of_tiles.Append(shared.tile.of[k][side][i]);
      before[i].Append(of_groups.any, of_groups.state);
      before[i].Append(of_tiles.any, of_tiles.state);
      if (closes_super && publishes) {
        Engine::Publish(published.before + super * each + i, stride, Engine::Join(before[i].state, total[i]));
      }
    }
  }
};

template <class F, int N, int kLanes, int kParts, int kItems, int kMinBlocks, int kRadix, Over kOver, bool kReverse>
__global__ void __launch_bounds__(kLanes* kParts, kMinBlocks)
    ColumnScanKernel(const __grid_constant__ typename AssociativeEngine<F, N>::Args a) {
  using Scan = ColumnScan<F, N, kLanes, kParts, kItems, kRadix, kOver, kReverse>;
  __shared__ typename Scan::Shared shared;
  Scan::Run(a, shared);
}

}  // namespace jaxkern
