// While loops in which each lane stops on its own.
//
//     WhileKernel<F, Condition, kThreads, kIdle>
//
// F and Condition are generated from the jaxprs of a loop (jaxkern/_engines/loops/while_plan.py): F::Step computes the new carries
// of a lane, Condition whether the lane goes on. A thread runs the loop of a lane with its carries in registers.
//
// A warp takes a number of adjacent lanes, a multiple of 32: its threads begin with the first 32. When the loops of kIdle
// threads are done, these threads write their carries and read the next lanes, in order. So a warp does not wait for its longest
// loop before it begins others, and few of its threads are idle until the last lanes. Reading waits for memory, and all threads
// of the warp with it: a single thread that is done does not read at once.
//
// Arrays lie in memory as in loops.cuh. A carry that lacks a dimension of the lanes is the same along it: so is the condition
// that ends it.
//
// Memory traffic: constants and carries are read and written once.
#pragma once

#include "loops.cuh"

namespace jaxkern {

template <class F, class Condition, class Consts = typename F::Consts, class Carries = typename F::Carries>
struct WhileEngine;

template <class F, class Condition, class... K, class... C> struct WhileEngine<F, Condition, Types<K...>, Types<C...>>
    : LoopEngine<F, 1> {
  using Loop = LoopEngine<F, 1>;
  using Args = typename Loop::Args;

  // a.steps: how many lanes a warp takes. All threads of the warp call this, also those after the last lane.
  template <int kIdle, size_t... I, size_t... J, size_t... P>
  static __device__ __forceinline__ void Run(const Args& a, int64_t warp, int thread, std::index_sequence<I...>,
                                             std::index_sequence<J...>, std::index_sequence<P...>) {
    Slots<std::index_sequence<I...>, PerLane<Own<K>, 1>...> constant;
    Slots<std::index_sequence<J...>, PerLane<Own<C>, 1>...> carry;
    int32_t index[F::kIndices + 1];
    const auto read = [&](int64_t lane) {
      ((At<I>(constant) = Loop::template Read<K, F::ConstsKind(I), F::ConstsMap(I)>(a, a.constant[I], lane)), ...);
      ((At<J>(carry) = Loop::template Init<J, C>(a, lane)), ...);
      ((index[P] = static_cast<int32_t>(Loop::template Offset<F::PlaceMap(P)>(a, lane))), ...);
    };
    const auto write = [&](int64_t lane) {
      Slots<std::index_sequence<J...>, typename Loop::template Place<C, F::CarriesKind(J), F::CarriesMap(J)>...> last;
      ((At<J>(last).Set(a, static_cast<C*>(a.last[J]), lane),
        Loop::template Store<C, F::CarriesKind(J), F::CarriesMap(J)>(
            At<J>(last), 0, At<J>(carry), Loop::template Owners<F::CarriesOwner(J)>(a, lane))),
       ...);
    };

    const int64_t begin = warp * a.steps, end = begin + a.steps < a.lanes ? begin + a.steps : a.lanes;
    int64_t lane = begin + thread,
            next = begin + 32;  // next: of the lanes that no thread has begun; the same in the warp
    if (lane < end) read(lane);
    while (true) {
      bool goes_on = lane < end;
      if (goes_on) Condition()(At<I>(constant).of[0]..., At<J>(carry).of[0]..., index[P]..., goes_on);
      const uint32_t idle = ~__ballot_sync(~0u, goes_on);
      if (next < end && __popc(idle) >= kIdle) {
        if (!goes_on) {
          if (lane < end) write(lane);
          lane = next + __popc(idle & ((1u << thread) - 1));
          if (lane < end) read(lane);
        }
        next += __popc(idle);
        continue;
      }
      if (idle == ~0u) break;
      if (goes_on) {
        typename F::Step()(At<I>(constant).of[0]..., At<J>(carry).of[0]..., index[P]..., At<J>(carry).of[0]...);
        // A carry of 16 bits is rounded in every step.
        ((At<J>(carry).of[0] = Round<C>(At<J>(carry).of[0])), ...);
      }
    }
    if (lane < end) write(lane);
  }
};

template <class F, class Condition, int kThreads, int kIdle> __global__ void __launch_bounds__(kThreads)
    WhileKernel(const __grid_constant__ typename WhileEngine<F, Condition>::Args a) {
  using Engine = WhileEngine<F, Condition>;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  Engine::template Run<kIdle>(a, warp, threadIdx.x % 32, typename Engine::ConstIndex(), typename Engine::CarryIndex(),
                              typename Engine::PlaceIndex());
}

}  // namespace jaxkern
