// Loops whose steps are joined by an associative operation: all steps of a lane are spread over the threads of a block, or
// over many blocks.
//
//     RowScanKernel<F, N, kItems, kLanes, kThreads, kMinBlocks, kRadix, kAhead, kOver, kReverse>       row_scan.cuh
//     RingScanKernel<F, N, kItems, kThreads, kMinBlocks, kReverse>       ring_scan.cuh
//     ColumnScanKernel<F, N, kLanes, kParts, kItems, kMinBlocks, kRadix, kAhead, kOver, kReverse>      column_scan.cuh
//
// In the first two the steps of a lane are adjacent in memory, in the last one lanes are. The second is for one long lane; it has
// groups and waits of its own.
//
// F is a loop's F (loops.cuh) that also has a state, a few numbers that stand for one step or for adjacent steps:
//
//     States                           the types of its members, types that are computed in
//     Element(constants, carries, xs, indices, state&)        the state of one step; it does not depend on the carries
//     Combine(earlier, later, state&)  associative
//     Apply(state, carries, carries&)  the carries after the steps of a state
//     kStart                           kGiven: initial carries are operands. kNumbers: Start(carries&) returns them. kOpen: there
//                                      is no initial carry. Then First(constants, xs, indices, carries&, ys&) is the first
//                                      step, and carries have the types of the state
//     kLast                            the last carries are results
//
// A thread loads kItems adjacent steps, joins their states, finds out the state of all steps before its own,
// and runs the loop's Step over its own from there. So each element of xs is read once, and each of ys written once.
//
// How states are joined depends on shapes alone, so results are the same in each run: in a thread in order, then over the
// lanes of a warp and over warps in trees of fixed shape. Where several blocks share the steps of a lane, each takes a tile.
// kRadix adjacent tiles are a group, and kRadix adjacent groups a supergroup. A block publishes the state of its tile, and the
// last block of a group the state of the group. The state before a tile joins the state before its supergroup, the states of
// earlier groups in it, and the states of earlier tiles in its group, in this order. A block waits only for blocks with
// smaller indices, which the GPU starts first.
//
// kAhead: a block that walks through tiles loads the next one while it finishes one. A block of one tile (kOverTiles) copies its
// elements to shared memory instead, where they take no registers, so that more blocks are resident while some wait.
//
// Published states lie in `slots`, which are 0 at the start. Each word of a state has 64 bits, with a flag in the upper half
// that says that it is there, so that no fence is needed: a store of 64 bits is seen whole or not at all.
//
// Steps after the last, in the last tile, have states of zeros or of anything. They come after all others, and nothing that is
// stored depends on them.
#pragma once

#include "loops.cuh"

#ifndef JAXKERN_EMULATED
#define JAXKERN_DYNAMIC_SHARED(name) extern __shared__ __align__(16) char name[]
#endif

namespace jaxkern {

enum Start { kGiven, kNumbers, kOpen };

// What shares the steps of a lane: lanes of one warp, one block, or the blocks of several tiles.
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
  template <size_t... I> static __device__ __forceinline__ void Publish(uint64_t* at, int64_t stride, const State& a,
                                                                        std::index_sequence<I...>) {
    (PublishMember(at, stride, At<I>(a)), ...);
  }
  static __device__ __forceinline__ void Publish(uint64_t* at, int64_t stride, const State& a) {
    Publish(at, stride, a, StateIndex());
  }

  // What has been read of a published state. Finish waits until all of it is there; it takes the same arguments as Begin, which
  // need no registers meanwhile.
  struct Pending {
    uint64_t word[kWords];

    __device__ __forceinline__ void Begin(const uint64_t* at, int64_t stride) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) word[w] = ReadSlot(at + w * stride);
    }
    template <size_t... I>
    __device__ __forceinline__ State Finish(const uint64_t* at, int64_t stride, std::index_sequence<I...>) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        while (!(word[w] >> 32)) word[w] = ReadSlot(at + w * stride);
      }
      State a;
      int w = 0;
      ((At<I>(a) = Member<S>(w)), ...);
      return a;
    }
    __device__ __forceinline__ State Finish(const uint64_t* at, int64_t stride) {
      return Finish(at, stride, StateIndex());
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

  // The carry after the steps of a prefix. open: there is none.
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
    ((At<J>(carry) = Round<C>(At<J>(carry))), ...);  // as loops.cuh does
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
    ((At<I>(constant) = Loop::template Read<K, F::ConstsKind(I), F::ConstsMap(I)>(a.loop, a.loop.constant[I], lane)),
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
  template <size_t... J> static __device__ __forceinline__ void StoreLast(const Args& a, int64_t lane,
                                                                          const Carry (&carry)[N],
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
    Loop::template Store<T, F::CarriesKind(J), F::CarriesMap(J)>(
        place, 0, value, Loop::template Owners<F::CarriesOwner(J)>(a.loop, lane));
  }
};

}  // namespace jaxkern
