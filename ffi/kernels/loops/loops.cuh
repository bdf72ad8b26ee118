// Loops: scans whose body is elementwise over lanes.
//
//     LoopKernel<F, N, kAhead, kRest, kThreads, kMinBlocks, kReverse>
//
// F is generated from the body's jaxpr (jaxkern/_engines/loops/generate.py) and computes one step of one lane. A thread runs all
// steps of N adjacent lanes, with their carries in registers. It runs rounds of kAhead steps, and loads the elements of xs one
// round before it uses them, into registers: the loop over a round is unrolled. kRest steps, which fill no round, come first.
// kReverse: the last element of xs and ys comes first.
//
// The distance of two steps in an array is a constant (XsStep, YsStep), so that the addresses in a round are one pointer and
// immediate offsets: where few warps run, instructions for addresses would cost more than the body.
//
// An array that lacks a dimension of the lanes is read through an index map, and written by the lanes whose place along that
// dimension is 0. kFar: lanes of one thread may lie 2^31 or more elements apart in an array. FromZero: carries that start
// with 0, which are not read.
//
// An element of ys may be a sum over lanes of a block: YsInner and YsGroup say over which, and `YsSums` is defined. All lanes of the
// block run. Each thread adds up its own lanes, warps exchange what is left, and one barrier in each step joins the warps of a block.
// The order of a sum is fixed.
//
// Memory traffic: each element of xs is read once, each element of ys is written once; constants and carries are read and
// written once per loop.
#pragma once

#include "../common/broadcast.h"
#include "../common/functions.h"
#include "../common/pack.cuh"
#include "../common/slots.h"

namespace jaxkern {

// Steps between two barriers of a warp, across which the assembler moves no loads or stores. Without them it computes all
// steps of a round first and then loads the next round, and nothing is in flight meanwhile.
constexpr int kFence = 8;

// How the N lanes of a thread lie in an array: at one element, at N adjacent elements that are aligned as a vector, or anywhere.
enum LaneKind { kSame, kPack, kEach };

template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadLanes(const T* p) { return LoadPart<T, N>(p); }

template <class T, int N> __device__ __forceinline__ void StoreLanes(T* p, const Pack<T, N>& pack) {
  if constexpr (N * sizeof(T) == 4) __stcs(reinterpret_cast<uint32_t*>(p), pack.word[0]);
  else StoreVector<T, N>(p, pack);
}

// A number, rounded to the type of an array. In bfloat16 it is converted to the high half of a word whose low half is 0: this
// is one fast instruction, and the word is the number as a float32.
template <class T> __device__ __forceinline__ Own<T> Round(Own<T> x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(0, x);
    return __uint_as_float(*reinterpret_cast<const uint32_t*>(&pair));
  } else {
    return Wide<T>(Stored<T>(x));
  }
}
// The number as it is stored.
template <class T> __device__ __forceinline__ T Rounded(Own<T> x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __floats2bfloat162_rn(0, x).y;
  else return Stored<T>(x);
}

template <class T, int N> struct PerLane {
  T of[N];
};

// Over which lanes of a block the elements of ys are summed: those whose places in the block differ only in the digits of
// weight Inner, 2 * Inner, ..., Inner * Group / 2.
template <class F, class = void> struct YsSums {
  static constexpr bool kAny = false;
  static constexpr int Inner(int) { return 1; }
  static constexpr int Group(int) { return 1; }
};
template <class F> struct YsSums<F, std::void_t<typename F::YsSums>> {
  static constexpr bool kAny = true;
  static constexpr int Inner(int k) { return F::YsInner(k); }
  static constexpr int Group(int k) { return F::YsGroup(k); }
};

// The sums over lanes of a block of one element of ys. InWarp leaves the sum over a warp in all its lanes. If the lanes of a sum are
// in several warps, Put leaves that where other warps find it, and Get, behind a barrier, gives the lanes that store a sum all of it.
// turn: 0 and 1, one step after the other. k: the place of the element among ys; each has shared memory of its own.
template <int k, int kInner, int kGroup, int kThreads, int N, class T> struct SumOverLanes {
  static constexpr int kEnd = kInner * kGroup, kOfWarp = 32 * N;
  static constexpr bool kOverBlock = kEnd > kOfWarp;
  static constexpr int kWidth = kInner < kOfWarp ? kInner : kOfWarp;      // sums of a warp
  static constexpr int kApart = kInner < kOfWarp ? 1 : kInner / kOfWarp;  // the distance of two warps that share sums
  static constexpr int kWarps = kInner < kOfWarp ? kEnd / kOfWarp : kGroup;
  static_assert(kEnd <= kThreads * N && (kThreads % 32 == 0 || kGroup == 1), "");

  static __device__ __forceinline__ void InWarp(PerLane<T, N>& value) {
    if constexpr (kGroup > 1) {
#pragma unroll
      for (int d = kInner; d < kEnd && d < N; d *= 2) {
        const PerLane<T, N> own = value;
#pragma unroll
        for (int i = 0; i < N; ++i) value.of[i] = own.of[i] + own.of[i ^ d];
      }
      // If there are shuffles, the lanes of a thread that are summed have one value.
      constexpr int kOwn = kInner < N && kEnd >= N ? kInner : N;
#pragma unroll
      for (int d = kInner < N ? N : kInner; d < kEnd && d < kOfWarp; d *= 2) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) value.of[i] = value.of[i] + __shfl_xor_sync(0xffffffffu, value.of[i], d / N);
      }
#pragma unroll
      for (int i = kOwn; i < N; ++i) value.of[i] = value.of[i % kOwn];
    }
  }

  static __device__ __forceinline__ T* Room(int turn) {
    __shared__ T room[2 * (kThreads / 32 + (kThreads < 32)) * kWidth];
    return room + turn * (kThreads / 32) * kWidth;
  }
  static __device__ __forceinline__ void Put(const PerLane<T, N>& value, int turn) {
    const int at = threadIdx.x % 32 * N;
    T* room = Room(turn) + threadIdx.x / 32 * kWidth;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (at + i < kWidth) room[at + i] = value.of[i];
    }
  }
  static __device__ __forceinline__ void Get(PerLane<T, N>& value, int turn) {
    const int at = threadIdx.x % 32 * N, first = threadIdx.x / 32;
    if (at >= kWidth || first / kApart % kWarps != 0) return;
    const T* room = Room(turn) + first * kWidth;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (at + i >= kWidth) continue;
      T total = room[at + i];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) total = total + room[w * kApart * kWidth + at + i];
      value.of[i] = total;
    }
  }
};

template <class F, int N, class Consts = typename F::Consts, class Carries = typename F::Carries,
          class Xs = typename F::Xs, class Ys = typename F::Ys>
struct LoopEngine;

template <class F, int N, class... K, class... C, class... X, class... Y>
struct LoopEngine<F, N, Types<K...>, Types<C...>, Types<X...>, Types<Y...>> {
  static constexpr int kConsts = sizeof...(K), kCarries = sizeof...(C), kXs = sizeof...(X), kYs = sizeof...(Y);
  using ConstIndex = std::make_index_sequence<kConsts>;
  using CarryIndex = std::make_index_sequence<kCarries>;
  using XIndex = std::make_index_sequence<kXs>;
  using YIndex = std::make_index_sequence<kYs>;
  using PlaceIndex = std::make_index_sequence<F::kIndices>;

  // Each list has one member more than F has arrays, so that none is empty.
  struct Args {
    const void* constant[kConsts + 1];
    const void* init[kCarries + 1];
    const void* x[kXs + 1];
    void* last[kCarries + 1];
    void* y[kYs + 1];
    IndexMap map[F::kMaps + 1];
    int64_t lanes, steps;
  };

  // The offset of a lane by a map of F.
  template <int map> static __device__ __forceinline__ int64_t Offset(const Args& a, int64_t lane) {
    if constexpr (map == -1) return lane;
    else if constexpr (map == -2) return 0;
    else if constexpr (map == -3) return lane * a.steps;
    else return a.map[map](lane);
  }

  // Where the N lanes of a thread lie in one array: a pointer to the first, and the distances of the others from it.
  template <class T, int kKind, int kMap> struct Place {
    using Distance = std::conditional_t<F::kFar, int64_t, int32_t>;
    T* first;
    Distance from_first[kKind == kEach ? N : 1];

    __device__ __forceinline__ void Set(const Args& a, T* array, int64_t lane) {
      const int64_t at = Offset<kMap>(a, lane);
      first = array + at;
      if constexpr (kKind == kEach) {
#pragma unroll
        for (int i = 0; i < N; ++i) from_first[i] = static_cast<Distance>(Offset<kMap>(a, lane + i) - at);
      }
    }
    __device__ __forceinline__ T* At(int i, int64_t step) const {
      if constexpr (kKind == kSame) return first + step;
      else if constexpr (kKind == kPack) return first + step + i;
      else return first + step + from_first[i];
    }
  };

  // What a thread loads of an array in one step.
  template <class T, int kKind> using Loaded = Pack<T, kKind == kSame ? 1 : N>;

  // step: elements from the place to the step that is loaded or stored.
  template <class T, int kKind, int kMap>
  static __device__ __forceinline__ Loaded<T, kKind> Load(const Place<const T, kKind, kMap>& place, int64_t step) {
    if constexpr (kKind == kEach) {
      Pack<T, N> pack = ZeroPack<T, N>();
#pragma unroll
      for (int i = 0; i < N; ++i) SetElement(pack, i, *place.At(i, step));
      return pack;
    } else {
      return LoadLanes<T, kKind == kSame ? 1 : N>(place.first + step);
    }
  }

  // Stores the lanes of a thread. owners: bit i says whether lane i writes.
  template <class T, int kKind, int kMap>
  static __device__ __forceinline__ void Store(const Place<T, kKind, kMap>& place, int64_t step,
                                               const PerLane<Own<T>, N>& value, uint32_t owners) {
    if constexpr (kKind == kPack) {
      if (owners & 1) {
        Pack<T, N> pack = ZeroPack<T, N>();
#pragma unroll
        for (int i = 0; i < N; ++i) SetElement(pack, i, Rounded<T>(value.of[i]));
        StoreLanes<T, N>(place.first + step, pack);
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (owners >> i & 1) *place.At(i, step) = Rounded<T>(value.of[i]);
      }
    }
  }

  template <int kMap> static __device__ __forceinline__ uint32_t Owners(const Args& a, int64_t lane) {
    if constexpr (kMap == -2) return ~0u;
    uint32_t owners = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) owners |= (Offset<kMap>(a, lane + i) == 0 ? 1u : 0u) << i;
    return owners;
  }

  // The value of an array that is read once, in each lane.
  template <class T, int kKind, int kMap>
  static __device__ __forceinline__ PerLane<Own<T>, N> Read(const Args& a, const void* array, int64_t lane) {
    Place<const T, kKind, kMap> place;
    place.Set(a, static_cast<const T*>(array), lane);
    const auto pack = Load<T, kKind, kMap>(place, 0);
    PerLane<Own<T>, N> value;
#pragma unroll
    for (int i = 0; i < N; ++i) value.of[i] = Wide<T>(Element(pack, kKind == kSame ? 0 : i));
    return value;
  }
  template <size_t J, class T> static __device__ __forceinline__ PerLane<Own<T>, N> Init(const Args& a, int64_t lane) {
    if constexpr (F::FromZero(J)) return {};
    else return Read<T, F::CarriesKind(J), F::CarriesMap(J)>(a, a.init[J], lane);
  }

  // The sums of an element of ys.
  template <class Y_, int k, int kThreads> using Sum =
      SumOverLanes<k, YsSums<F>::Inner(k), YsSums<F>::Group(k), kThreads, N, Own<Y_>>;

  template <int kThreads, int kAhead, int kRest, bool kReverse, size_t... I, size_t... J, size_t... L, size_t... M,
            size_t... P>
  static __device__ __forceinline__ void Run(const Args& a, int64_t lane, std::index_sequence<I...>,
                                             std::index_sequence<J...>, std::index_sequence<L...>,
                                             std::index_sequence<M...>, std::index_sequence<P...>) {
    Slots<ConstIndex, PerLane<Own<K>, N>...> constant;
    Slots<CarryIndex, PerLane<Own<C>, N>...> carry;
    ((At<I>(constant) = Read<K, F::ConstsKind(I), F::ConstsMap(I)>(a, a.constant[I], lane)), ...);
    ((At<J>(carry) = Init<J, C>(a, lane)), ...);
    int32_t index[F::kIndices + 1][N];
#pragma unroll
    for (int i = 0; i < N; ++i) ((index[P][i] = static_cast<int32_t>(Offset<F::PlaceMap(P)>(a, lane + i))), ...);

    constexpr int64_t kSign = kReverse ? -1 : 1;
    const int64_t begin = kReverse ? a.steps - 1 : 0;
    Slots<XIndex, Place<const X, F::XsKind(L), F::XsMap(L)>...> from;
    Slots<YIndex, Place<Y, F::YsKind(M), F::YsMap(M)>...> to;
    (At<L>(from).Set(a, static_cast<const X*>(a.x[L]) + begin * F::XsStep(L), lane), ...);
    (At<M>(to).Set(a, static_cast<Y*>(a.y[M]) + begin * F::YsStep(M), lane), ...);
    const uint32_t owners[kYs + 1] = {Owners<F::YsOwner(M)>(a, lane)..., 0};

    using Step = Slots<XIndex, Loaded<X, F::XsKind(L)>...>;
    // Loads and runs step u from where the places are.
    const auto load = [&](Step& x, int u) {
      ((At<L>(x) = Load<X, F::XsKind(L), F::XsMap(L)>(At<L>(from), kSign * u * F::XsStep(L))), ...);
    };
    [[maybe_unused]] int turn = 0;
    const auto run = [&](const Step& x, int u) {
      Slots<YIndex, PerLane<Own<Y>, N>...> y;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        typename F::Step()(At<I>(constant).of[i]..., At<J>(carry).of[i]...,
                           Wide<X>(Element(At<L>(x), F::XsKind(L) == kSame ? 0 : i))..., index[P][i]...,
                           At<J>(carry).of[i]..., At<M>(y).of[i]...);
        // A carry of 16 bits is rounded in every step.
        ((At<J>(carry).of[i] = Round<C>(At<J>(carry).of[i])), ...);
      }
      if constexpr (YsSums<F>::kAny) {
        (Sum<Y, M, kThreads>::InWarp(At<M>(y)), ...);
        if constexpr ((Sum<Y, M, kThreads>::kOverBlock || ...)) {
          const auto put = [&](auto sum, auto& value) {
            if constexpr (decltype(sum)::kOverBlock) sum.Put(value, turn);
          };
          const auto get = [&](auto sum, auto& value) {
            if constexpr (decltype(sum)::kOverBlock) sum.Get(value, turn);
          };
          (put(Sum<Y, M, kThreads>(), At<M>(y)), ...);
          __syncthreads();
          (get(Sum<Y, M, kThreads>(), At<M>(y)), ...);
          turn ^= 1;
        }
      }
      (Store<Y, F::YsKind(M), F::YsMap(M)>(At<M>(to), kSign * u * F::YsStep(M), At<M>(y), owners[M]), ...);
    };
    const auto advance_loads = [&](int steps) { ((At<L>(from).first += kSign * steps * F::XsStep(L)), ...); };
    const auto advance_stores = [&](int steps) { ((At<M>(to).first += kSign * steps * F::YsStep(M)), ...); };

    Step ahead[kAhead];
    if constexpr (kRest > 0) {
#pragma unroll
      for (int u = 0; u < kRest; ++u) load(ahead[u], u);
#pragma unroll
      for (int u = 0; u < kRest; ++u) run(ahead[u], u);
      advance_loads(kRest);
      advance_stores(kRest);
    }
    const uint32_t active = __activemask();
    int64_t rounds = a.steps / kAhead;
    if (rounds > 0) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) load(ahead[u], u);
    }
    for (; rounds > 0; --rounds) {
      advance_loads(kAhead);
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const Step x = ahead[u];
        if (rounds > 1) load(ahead[u], u);
        run(x, u);
        if (u % kFence == kFence - 1) __syncwarp(active);
      }
      advance_stores(kAhead);
    }
    Slots<CarryIndex, Place<C, F::CarriesKind(J), F::CarriesMap(J)>...> last;
    ((At<J>(last).Set(a, static_cast<C*>(a.last[J]), lane),
      Store<C, F::CarriesKind(J), F::CarriesMap(J)>(At<J>(last), 0, At<J>(carry), Owners<F::CarriesOwner(J)>(a, lane))),
     ...);
  }
};

template <class F, int N, int kAhead, int kRest, int kThreads, int kMinBlocks, bool kReverse>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    LoopKernel(const __grid_constant__ typename LoopEngine<F, N>::Args a) {
  using Engine = LoopEngine<F, N>;
  const int64_t lane = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (lane >= a.lanes) return;
  Engine::template Run<kThreads, kAhead, kRest, kReverse>(a, lane, typename Engine::ConstIndex(),
                                                          typename Engine::CarryIndex(), typename Engine::XIndex(),
                                                          typename Engine::YIndex(), typename Engine::PlaceIndex());
}

}  // namespace jaxkern
