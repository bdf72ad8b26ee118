// Loops over steps whose body reduces along rows, such as the states of a hidden Markov model.
//
//     RowLoopKernel<F, kThreads, kAhead, kRest, kReverse>
//
// F is generated from the body's jaxpr (jaxkern/_engines/loops/generate_rows.py). A team of F::kTeam threads, part of a warp or
// whole warps, runs all steps of one lane: thread w owns elements w, w + width, ... of each row. Own elements are in registers. Several
// adjacent threads may own the same elements, and share the rows that are reduced for each. What
// threads read from each other is in shared memory, with matrices that are carried or the same in every step. A block has
// kThreads / kTeam teams. Teams after the last lane run it again, and store nothing.
//
// kAhead steps are loaded ahead, into registers; the loop over them is unrolled. kRest steps, which fill no round, come first.
// kReverse: the last element of xs and ys comes first.
//
// F has:
//     X                           the elements of xs of one step that a thread loads
//     Begin(args, shared)         reads constants and initial carries
//     Load(args, x, step)         loads elements of xs
//     Step(args, x, step)         runs a step; stores elements of ys
//     End(args)                   stores the last carries
//
// Memory traffic: each element of xs is read once, except for matrices, which each reduction over them reads; each element of
// ys is written once.
#pragma once

#include "../rows/exchange.cuh"
#include "../rows/sums.cuh"
#include "loops.cuh"

namespace jaxkern {

// Joins value(0), ..., value(n - 1): R::Join(a, b) joins b to a, and R() is neutral. kSplit adjacent threads share them: thread p
// takes a run of kRun in each 32, so that columns and rows of a matrix lie in different banks of shared memory. Each thread gets the
// join of its own. kChains sums run side by side, to hide latency.
template <int n, int kSplit, class R, class Value> __device__ __forceinline__ R OverSerial(int p, Value value) {
  constexpr int kChains = n >= 8 * kSplit ? 4 : 1, kRun = 32 / kSplit;
  R total[kChains];
  if constexpr (kSplit == 1) {
#pragma unroll(kChains == 1 ? n : 4)
    for (int r = 0; r < n / kChains; ++r) {
#pragma unroll
      for (int c = 0; c < kChains; ++c) R::Join(total[c], value(r * kChains + c));
    }
#pragma unroll
    for (int r = n / kChains * kChains; r < n; ++r) R::Join(total[0], value(r));
  } else {
#pragma unroll(kRun >= 16 ? 1 : 2)
    for (int first = 0; first + 32 <= n; first += 32) {
#pragma unroll
      for (int c = 0; c < kRun; ++c) R::Join(total[c % kChains], value(first + p * kRun + c));
    }
    if constexpr (n % 32 > 0) {
#pragma unroll 1
      for (int c = 0; c < kRun; ++c) {
        const int r = n / 32 * 32 + p * kRun + c;
        if (r < n) R::Join(total[0], value(r));
      }
    }
  }
#pragma unroll
  for (int step = 1; step < kChains; step *= 2) {
#pragma unroll
    for (int c = 0; c + step < kChains; c += 2 * step) R::Join(total[c], total[c + step]);
  }
  return total[0];
}

// Joins the values of aligned groups of kLanes threads of a warp; all get the result. kAlike adjacent threads have the same value.
template <int kLanes, int kAlike, class R> __device__ __forceinline__ R OverLanes(R mine) {
#pragma unroll
  for (int d = kLanes / 2; d >= kAlike; d /= 2) R::Join(mine, FromLane(mine, d));
  return mine;
}

// Joins what each warp of a team has left in `room`.
template <int kWarps, class R> __device__ __forceinline__ R OverRoom(const R* room) {
  R total = room[0];
#pragma unroll 4
  for (int w = 1; w < kWarps; ++w) R::Join(total, room[w]);
  return total;
}

// Whether the value b at index j is the result of argmax or argmin rather than the value a at index i: the first of equal values, and
// the first NaN if there is one. i < 0: there is no value yet.
template <bool kMax, class T> __device__ __forceinline__ bool IsBefore(T a, int i, T b, int j) {
  if (j < 0) return false;
  if (i < 0) return true;
  if (a != a || b != b) return b != b && (a == a || j < i);
  return (kMax ? b > a : b < a) || (b == a && j < i);
}

template <class F, int kThreads, int kAhead, int kRest, bool kReverse> __global__ void __launch_bounds__(kThreads, 1)
    RowLoopKernel(const __grid_constant__ typename F::Args a) {
  JAXKERN_DYNAMIC_SHARED(shared);
  constexpr int64_t kSign = kReverse ? -1 : 1;
  int64_t at = kReverse ? a.steps - 1 : 0;
  F f;
  f.Begin(a, shared);
  typename F::X ahead[kAhead];
#pragma unroll 1
  for (int u = 0; u < kRest; ++u) {
    f.Load(a, ahead[0], at);
    f.Step(a, ahead[0], at);
    at += kSign;
  }
  int64_t rounds = a.steps / kAhead;
  if (rounds > 0) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) f.Load(a, ahead[u], at + kSign * u);
  }
#pragma unroll 1
  for (; rounds > 0; --rounds) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const typename F::X x = ahead[u];
      if (rounds > 1) f.Load(a, ahead[u], at + kSign * kAhead);
      f.Step(a, x, at);
      at += kSign;
    }
  }
  f.End(a);
}

}  // namespace jaxkern
