// While loops of which every lane stops on its own.
//
//     WhileKernel<F, Condition, kThreads>
//
// F and Condition are generated from the jaxprs of a loop (jaxkern/_engines/loops/while_plan.py): F::Step computes the new carries
// of a lane, Condition whether the lane goes on. A thread runs the loop of one lane with its carries in registers, and ends when
// the condition is false. A warp takes as many steps as the longest loop of its lanes.
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

  template <size_t... I, size_t... J, size_t... P>
  static __device__ __forceinline__ void Run(const Args& a, int64_t lane, std::index_sequence<I...>,
                                             std::index_sequence<J...>, std::index_sequence<P...>) {
    Slots<std::index_sequence<I...>, PerLane<Own<K>, 1>...> constant;
    Slots<std::index_sequence<J...>, PerLane<Own<C>, 1>...> carry;
    ((At<I>(constant) = Loop::template Read<K, F::ConstsKind(I), F::ConstsMap(I)>(a, a.constant[I], lane)), ...);
    ((At<J>(carry) = Loop::template Init<J, C>(a, lane)), ...);
    int32_t index[F::kIndices + 1];
    ((index[P] = static_cast<int32_t>(Loop::template Offset<F::PlaceMap(P)>(a, lane))), ...);

    while (true) {
      bool goes_on;
      Condition()(At<I>(constant).of[0]..., At<J>(carry).of[0]..., index[P]..., goes_on);
      if (!goes_on) break;
      typename F::Step()(At<I>(constant).of[0]..., At<J>(carry).of[0]..., index[P]..., At<J>(carry).of[0]...);
      // A carry of 16 bits is rounded in every step.
      ((At<J>(carry).of[0] = Round<C>(At<J>(carry).of[0])), ...);
    }

    Slots<std::index_sequence<J...>, typename Loop::template Place<C, F::CarriesKind(J), F::CarriesMap(J)>...> last;
    ((At<J>(last).Set(a, static_cast<C*>(a.last[J]), lane),
      Loop::template Store<C, F::CarriesKind(J), F::CarriesMap(J)>(At<J>(last), 0, At<J>(carry),
                                                                   Loop::template Owners<F::CarriesOwner(J)>(a, lane))),
     ...);
  }
};

template <class F, class Condition, int kThreads> __global__ void __launch_bounds__(kThreads)
    WhileKernel(const __grid_constant__ typename WhileEngine<F, Condition>::Args a) {
  using Engine = WhileEngine<F, Condition>;
  const int64_t lane = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (lane >= a.lanes) return;
  Engine::Run(a, lane, typename Engine::ConstIndex(), typename Engine::CarryIndex(), typename Engine::PlaceIndex());
}

}  // namespace jaxkern
