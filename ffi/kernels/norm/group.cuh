// What the kernels of GroupNorm and BatchNorm share: parameters, the walk of a block over its part, sums over a block.
//
//     forward    mean, var of each sample and group;  y = (x - mean) * rstd * scale + bias,  rstd = 1 / sqrt(var + eps)
//     backward   h  = g * scale,  z = (x - mean) * rstd
//                dx = rstd * (h - shift - z * slope)
//                shift = mean(h) - g_mean / (n * rstd),  slope = mean(h * z) - 2 * g_var / (n * rstd^2)
//                dscale = sum of g * z,  dbias = sum of g, over samples, rows and inner
//
// x is [samples, rows, channels, inner], and a group has `per_group` adjacent channels. A statistic is of n = rows *
// per_group * inner elements. BatchNorm has one sample, and groups of one channel. `each` samples share scale and bias.
//
// Two layouts. inner = 1 (kLanes = 0), channels last: a thread owns N adjacent channels and walks down the rows; a step is a
// row. inner > 1: kLanes threads, a warp or the block, own one channel and walk along its elements; a step is a pack of N of
// them. Both cut the steps of a sample into `parts` of `length` steps, and what blocks find is merged in the order of the
// parts.
#pragma once

#include "../common/divider.h"
#include "norm.cuh"

namespace jaxkern {

constexpr int kGroupThreads = 256;

struct GroupParams {
  const void* x;
  const void* g;        // of the backward pass
  const void* scale;    // [samples / each, channels]
  const void* bias;     // the same
  void* y;              // of the backward pass: dx
  void* mean;           // [samples, groups], in the computing type
  void* var;            // the same
  const void* of_mean;  // the cotangents of mean and var
  const void* of_var;
  void* partial;  // Pair[samples, channels, parts]
  void* total;    // Pair[samples, channels]: sums of g and of g * z
  void* slope;    // Pair[samples, groups]: shift and slope; null if they are not wanted
  void* dscale;   // [samples / each, channels]; null if it is not wanted
  void* dbias;    // the same
  int64_t samples;
  int64_t rows;
  int64_t inner;
  int64_t each;
  double eps;
  int32_t channels;
  int32_t per_group;
  int32_t steps;   // of a sample: rows, or packs of a channel
  int32_t length;  // steps of a part
  int32_t parts;
  int32_t across;    // packs of a tile
  int32_t tiles;     // of the channels
  int32_t per_step;  // elements of a channel in a step
  Divider run;       // by the packs of inner
  bool exceeds_l2;
};
static_assert(sizeof(GroupParams) == 14 * 8 + 5 * 8 + 8 * 4 + 24 + 8, "plan.py lays it out");

constexpr int kGroupScale = 1, kGroupBias = 2;

// T: of x and dx. O: of y and g. P: of scale and bias. N: elements of a pack. kStats: different statistics in a pack, N
// or 1. kLanes: threads that own a channel; 0: a thread owns several channels.
template <class T_, class O_, class P_, int kFlags, int kN, int kStats_, int kLanes_> struct Group {
  using T = T_;
  using O = O_;
  using P = P_;
  using C = Compute<T>;
  static constexpr bool kScale = kFlags & kGroupScale;
  static constexpr bool kBias = kFlags & kGroupBias;
  static constexpr int N = kN;
  static constexpr int kLanes = kLanes_;
  static constexpr bool kInner = kLanes > 0;
  static constexpr int kChannels = kInner ? 1 : N;     // in a pack
  static constexpr int kStats = kInner ? 1 : kStats_;  // in a pack
};

// What happens to a normalised element before it is stored: nothing. See group_epilogue.cuh.
struct NoGroupEpilogue {
  template <int N, class C> static __device__ __forceinline__ void Apply(C (&)[N]) {}
};

template <class C> struct alignas(2 * sizeof(C)) Pair {
  C a, b;
};

// What a thread of block `block` walks over: steps `first`, + down, ... , below `end`, of the packs at channel `channel`.
template <class Op> struct GroupWalk {
  int64_t sample, base, stride;
  int channel, part, row, down, tile, first, end;
  bool live;  // whether the thread has any channels

  __device__ __forceinline__ GroupWalk(const GroupParams& p, int64_t block) {
    tile = static_cast<int>(block % p.tiles);
    block /= p.tiles;
    part = static_cast<int>(block % p.parts);
    sample = block / p.parts;
    const int t = threadIdx.x;
    if constexpr (Op::kInner) {
      row = t % Op::kLanes;
      down = Op::kLanes;
      channel = tile * (kGroupThreads / Op::kLanes) + t / Op::kLanes;
      live = channel < p.channels;
      stride = p.channels * p.inner;
    } else {
      row = t / p.across;
      down = kGroupThreads / p.across;
      channel = (tile * p.across + t % p.across) * Op::N;
      live = row < down && channel < p.channels;
      stride = p.channels;
    }
    base = sample * p.rows * p.channels * p.inner + channel * p.inner;
    first = part * p.length + row;
    end = live ? min(p.steps, (part + 1) * p.length) : 0;
  }
  // The first element of a step.
  __device__ __forceinline__ int64_t At(const GroupParams& p, int step) const {
    if constexpr (Op::kInner) {
      const int turn = static_cast<int>(p.run.Div(static_cast<uint32_t>(step)));
      return base + turn * stride + static_cast<int64_t>(step - turn * static_cast<int>(p.run.divisor)) * Op::N;
    } else {
      return base + step * stride;
    }
  }
  // Steps of the threads in a row of the block.
  __device__ __forceinline__ int Count(const GroupParams& p, int of_row) const {
    const int begin = part * p.length + of_row, last = min(p.steps, (part + 1) * p.length);
    return last > begin ? (last - begin + down - 1) / down : 0;
  }
  // Elements of a channel in the part.
  __device__ __forceinline__ int Length(const GroupParams& p) const {
    return max(min(p.steps, (part + 1) * p.length) - part * p.length, 0) * p.per_step;
  }
  __device__ __forceinline__ int64_t Partial(const GroupParams& p, int channel) const {
    return (sample * p.channels + channel) * p.parts + part;
  }
};

// Statistics of the channels of a pack.
template <class Op> struct GroupStats {
  using C = typename Op::C;
  C mean[Op::kStats], rstd[Op::kStats];
  int64_t first;  // of the statistics

  __device__ __forceinline__ GroupStats(const GroupParams& p, int64_t sample, int channel, bool live) {
    const int groups = p.channels / p.per_group;
    first = sample * groups;
#pragma unroll
    for (int j = 0; j < Op::kStats; ++j) {
      const int64_t at = first + (live ? (channel + j) / p.per_group : 0);
      mean[j] = static_cast<const C*>(p.mean)[at];
      rstd[j] = InverseRoot(static_cast<const C*>(p.var)[at] + static_cast<C>(p.eps));
    }
  }
};

// scale or bias of the channels of a pack.
template <class Op> __device__ __forceinline__ void GroupParameters(const GroupParams& p, const void* array,
                                                                    int64_t sample, int channel,
                                                                    typename Op::C (&out)[Op::kChannels]) {
  const auto* const from = static_cast<const typename Op::P*>(array) + sample / p.each * p.channels + channel;
#pragma unroll
  for (int j = 0; j < Op::kChannels; ++j) out[j] = ToCompute(from[j]);
}

// Sums over the kThreads of a warp or of a block; every thread of them gets the result, and all must take part.
template <int kThreads, int kCount, class C> __device__ __forceinline__ void GroupBlockSums(C (&v)[kCount]) {
  if constexpr (kThreads == kWarp) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) v[k] = ReduceLanes<kWarp>(v[k], SumOf());
  } else {
    __shared__ C room[kThreads / kWarp][kCount];
    __syncthreads();  // the room of the call before
    RowSums<0, kThreads>(v, room);
  }
}

// A thread's moments of `count` steps: from sums of x - shift and its square to the mean and the sum of squared deviations.
// shift is the first element. Its squared distance from the mean is at most the sum of squared deviations of the thread's
// elements, so that over n steps (128 at most, see plan.py) the rounding is multiplied by n at worst.
template <int N, class C>
__device__ __forceinline__ void FinishMoments(int count, const C (&shift)[N], C (&sum)[N], C (&square)[N]) {
  const C each = count ? C(1) / static_cast<C>(count) : C(0);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const C d = sum[j] * each;
    square[j] -= d * sum[j];
    square[j] = square[j] < 0 ? C(0) : square[j];  // not Max, which drops NaN
    sum[j] = shift[j] + d;
  }
}

// Merges the moments of the threads of each column, in their order, and calls emit(channel of the tile, moments).
// room: one Pair per thread and channel. All threads take part.
template <class Op, class Emit>
__device__ __forceinline__ void TileMoments(const GroupParams& p, const GroupWalk<Op>& walk,
                                            const typename Op::C (&mean)[Op::N], const typename Op::C (&square)[Op::N],
                                            Pair<typename Op::C>* room, const Emit& emit) {
  using C = typename Op::C;
  constexpr int N = Op::N;
  const int width = p.across * N, channels = p.channels - walk.tile * width;
  if (walk.row < walk.down) {
#pragma unroll
    for (int j = 0; j < N; ++j) room[threadIdx.x * N + j] = {mean[j], square[j]};  // [row][channel of the tile]
  }
  __syncthreads();
  const int length = walk.Length(p);
  const C whole = length > 0 ? C(1) / static_cast<C>(length) : C(0);
  for (int c = threadIdx.x; c < min(width, channels); c += kGroupThreads) {
    const C from = room[c].a;
    C delta = 0, rest = 0;
#pragma unroll 4
    for (int r = 0; r < walk.down; ++r) {
      const int n = walk.Count(p, r);
      delta += n ? static_cast<C>(n) * (room[r * width + c].a - from) : C(0);
    }
    const C middle = from + delta * whole;
#pragma unroll 4
    for (int r = 0; r < walk.down; ++r) {
      const int n = walk.Count(p, r);
      const Pair<C> of = room[r * width + c];
      rest += n ? of.b + static_cast<C>(n) * ((of.a - middle) * (of.a - middle)) : C(0);
    }
    emit(c, Pair<C>{middle, rest});
  }
}

// The same for two sums.
template <class Op, class Emit>
__device__ __forceinline__ void TileSums(const GroupParams& p, const GroupWalk<Op>& walk,
                                         const typename Op::C (&a)[Op::N], const typename Op::C (&b)[Op::N],
                                         Pair<typename Op::C>* room, const Emit& emit) {
  constexpr int N = Op::N;
  const int width = p.across * N, channels = p.channels - walk.tile * width;
  if (walk.row < walk.down) {
#pragma unroll
    for (int j = 0; j < N; ++j) room[threadIdx.x * N + j] = {a[j], b[j]};
  }
  __syncthreads();
  for (int c = threadIdx.x; c < min(width, channels); c += kGroupThreads) {
    Pair<typename Op::C> total = {0, 0};
#pragma unroll 8
    for (int r = 0; r < walk.down; ++r) {
      total.a += room[r * width + c].a;
      total.b += room[r * width + c].b;
    }
    emit(c, total);
  }
}

// shift and slope from the sums of h and h * z of a sample and group.
template <class C> __device__ __forceinline__ Pair<C> SlopesOf(const GroupParams& p, int64_t stat, C shift, C slope) {
  const C each = C(1) / (static_cast<C>(p.rows) * static_cast<C>(p.inner) * static_cast<C>(p.per_group));
  const C root = C(1) / InverseRoot(static_cast<const C*>(p.var)[stat] + static_cast<C>(p.eps));
  shift -= static_cast<const C*>(p.of_mean)[stat] * root;
  slope -= 2 * (static_cast<const C*>(p.of_var)[stat] * root) * root;
  return {shift * each, slope * each};
}

// Stores the sums of a sample and channel: as dscale and dbias if no other sample shares them.
template <class S, bool kDirect, class C>
__device__ __forceinline__ void StoreSums(const GroupParams& p, int64_t at, const Pair<C>& sums) {
  if constexpr (kDirect) {
    if (p.dbias) static_cast<S*>(p.dbias)[at] = FromCompute<S>(sums.a);
    if (p.dscale) static_cast<S*>(p.dscale)[at] = FromCompute<S>(sums.b);
  } else {
    static_cast<Pair<C>*>(p.total)[at] = sums;
  }
}

}  // namespace jaxkern
