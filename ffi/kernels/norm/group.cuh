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
  void* partial;  // Pair[samples, entries, parts]; an entry of the sums is a channel, of the moments see Group
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
  int32_t per_step;  // elements of an entry of the moments in a step
  Divider run;       // by the packs of inner
  bool exceeds_l2;
};
static_assert(sizeof(GroupParams) == 14 * 8 + 5 * 8 + 8 * 4 + 24 + 8, "plan.py lays it out");

constexpr int kGroupScale = 1, kGroupBias = 2, kGroupSmall = 4;

// T: of x and dx. O: of y and g. P: of scale and bias. N: elements of a pack. kLanes: threads that own a channel; 0: a thread
// owns several channels, and a row of the block has kAcross packs. kSmall: groups have few elements, so that gradients must
// not depend on how products are fused; see Rounded.
template <class T_, class O_, class P_, int kFlags, int kN, int kLanes_, int kPerGroup_, int kAcross_> struct Group {
  using T = T_;
  using O = O_;
  using P = P_;
  using C = Compute<T>;
  static constexpr bool kScale = kFlags & kGroupScale;
  static constexpr bool kBias = kFlags & kGroupBias;
  static constexpr bool kSmall = kFlags & kGroupSmall;
  static constexpr int N = kN;
  static constexpr int kLanes = kLanes_;
  static constexpr int kPerGroup = kPerGroup_;
  static constexpr int kAcross = kAcross_;
  static constexpr bool kInner = kLanes > 0;
  static constexpr int kDown = kInner ? kLanes : kGroupThreads / kAcross;  // threads of a column
  static constexpr int kChannels = kInner ? 1 : N;                         // in a pack
  static constexpr int kStats = kInner || kPerGroup % N == 0 ? 1 : N;      // different statistics in a pack
  static constexpr int kPerEntry = kInner || kStats > 1 ? 1 : N;           // channels that share moments
  static constexpr int kWidth = kAcross * N;                               // channels of a tile, unless kInner
};

// What happens to a normalised element before it is stored: nothing. See group_epilogue.cuh.
struct NoGroupEpilogue {
  template <int N, class C> static __device__ __forceinline__ void Apply(C (&)[N]) {}
};

template <class C> struct alignas(2 * sizeof(C)) Pair {
  C a, b;
};

// What a thread of block `block` walks over: steps `first`, + kDown, ... , below `end`, of the packs at channel `channel`.
template <class Op> struct GroupWalk {
  int64_t sample, base, stride;
  int channel, part, row, tile, first, end;
  bool live;  // whether the thread has any channels

  // kBlocks: 0, or the parts, which are then the blocks of a cluster and follow each other.
  template <int kBlocks = 0> __device__ __forceinline__ void Init(const GroupParams& p, uint32_t block) {
    const uint32_t tiles = p.tiles, parts = kBlocks ? kBlocks : p.parts, size = kBlocks ? kBlocks : tiles;
    const uint32_t above = block / size, rest = block - above * size, other = kBlocks ? tiles : parts;
    sample = above / other;
    const uint32_t left = above - static_cast<uint32_t>(sample) * other;
    tile = static_cast<int>(kBlocks ? left : rest);
    part = static_cast<int>(kBlocks ? rest : left);
    const int t = threadIdx.x;
    if constexpr (Op::kInner) {
      row = t % Op::kLanes;
      channel = tile * (kGroupThreads / Op::kLanes) + t / Op::kLanes;
      live = channel < p.channels;
      stride = p.channels * p.inner;
    } else {
      row = t / Op::kAcross;
      channel = (tile * Op::kAcross + t % Op::kAcross) * Op::N;
      live = row < Op::kDown && channel < p.channels;
      stride = p.channels;
    }
    base = sample * p.rows * p.channels * p.inner + channel * p.inner;
    first = part * p.length + row;
    end = live ? min(p.steps, (part + 1) * p.length) : 0;
  }
  // The pack of a step. `array` points to the element `base`. Rows have less than 2^31 bytes.
  template <class V> __device__ __forceinline__ V* At(const GroupParams& p, V* array, int step) const {
    if constexpr (Op::kInner) {
      const int turn = static_cast<int>(p.run.Div(static_cast<uint32_t>(step)));
      return array + turn * stride + static_cast<int64_t>(step - turn * static_cast<int>(p.run.divisor)) * Op::N;
    } else {
      const int bytes = p.channels * static_cast<int>(sizeof(V));
      const char* const at = reinterpret_cast<const char*>(array) + static_cast<int64_t>(step) * bytes;
      return const_cast<V*>(reinterpret_cast<const V*>(at));
    }
  }
  // The pack of step `step + more`: with channels last, one instruction more if `more` is a constant.
  template <class V> __device__ __forceinline__ V* At(const GroupParams& p, V* array, int step, int more) const {
    if constexpr (Op::kInner) return At(p, array, step + more);
    else return At(p, At(p, array, step), more);
  }
  // Steps of the threads in a row of the block.
  __device__ __forceinline__ int Count(const GroupParams& p, int of_row) const {
    const int left = min(p.steps, (part + 1) * p.length) - part * p.length - of_row;
    return left > 0 ? static_cast<int>(static_cast<unsigned>(left + Op::kDown - 1) / Op::kDown) : 0;
  }
  // Elements of an entry in the part.
  __device__ __forceinline__ int Length(const GroupParams& p) const {
    return max(min(p.steps, (part + 1) * p.length) - part * p.length, 0) * p.per_step;
  }
  __device__ __forceinline__ int64_t Partial(const GroupParams& p, int entries, int entry) const {
    return (sample * entries + entry) * p.parts + part;
  }
};

// Statistics of the channels of a pack.
template <class Op> struct GroupStats {
  using C = typename Op::C;
  C mean[Op::kStats], rstd[Op::kStats];
  int64_t first;  // of the statistics

  __device__ __forceinline__ void Init(const GroupParams& p, int64_t sample, int channel, bool live) {
    first = sample * (static_cast<uint32_t>(p.channels) / Op::kPerGroup);
#pragma unroll
    for (int j = 0; j < Op::kStats; ++j) {
      const int64_t at = first + (live ? static_cast<uint32_t>(channel + j) / Op::kPerGroup : 0);
      mean[j] = static_cast<const C*>(p.mean)[at];
      rstd[j] = InverseRoot(static_cast<const C*>(p.var)[at] + static_cast<C>(p.eps));
    }
  }
};

// The row of scale and bias that a sample uses.
__device__ __forceinline__ int64_t ParameterRow(const GroupParams& p, int64_t sample) {
  return static_cast<int64_t>(static_cast<uint32_t>(sample) / static_cast<uint32_t>(p.each)) * p.channels;
}

// scale or bias of the channels of a pack.
template <class Op> __device__ __forceinline__ void GroupParameters(const GroupParams& p, const void* array,
                                                                    int64_t sample, int channel,
                                                                    typename Op::C (&out)[Op::kChannels]) {
  LoadParameters<typename Op::P, Op::kChannels>(array, ParameterRow(p, sample) + channel, out);
}

// Adds a pack to the sums of g and of g * (x - mean).
template <class Op>
__device__ __forceinline__ void AddToSums(const Pack<typename Op::T, Op::N>& x, const Pack<typename Op::O, Op::N>& g,
                                          const GroupStats<Op>& stats, typename Op::C (&plain)[Op::N],
                                          typename Op::C (&product)[Op::N]) {
  typename Op::C v[Op::N], w[Op::N];
  Unpack(x, v);
  Unpack(g, w);
#pragma unroll
  for (int j = 0; j < Op::N; ++j) {
    plain[j] += w[j];
    product[j] += w[j] * (v[j] - stats.mean[j % Op::kStats]);
  }
}

// dx of a pack. Three fused operations per element; if groups are small, five, which do not round h and shift separately.
template <class Op> struct GroupSlope {
  using C = typename Op::C;
  C scale[Op::kChannels], shift[Op::kStats], slope[Op::kStats];

  // of(j): shift and slope of the group of channel j of the pack.
  template <class Of>
  __device__ __forceinline__ void Init(const GroupStats<Op>& stats, const C (&scales)[Op::kChannels], const Of& of) {
#pragma unroll
    for (int j = 0; j < Op::kStats; ++j) {
      const Pair<C> found = of(j);
      slope[j] = found.b * stats.rstd[j] * stats.rstd[j];
      shift[j] = Op::kSmall ? found.a : -found.a * stats.rstd[j];
    }
#pragma unroll
    for (int j = 0; j < Op::kChannels; ++j) {
      const C factor = Op::kScale ? scales[j] : C(1);
      scale[j] = Op::kSmall ? factor : factor * stats.rstd[j % Op::kStats];
    }
  }
  __device__ __forceinline__ Pack<typename Op::T, Op::N> operator()(const Pack<typename Op::T, Op::N>& x,
                                                                    const Pack<typename Op::O, Op::N>& g,
                                                                    const GroupStats<Op>& stats) const {
    C v[Op::N], h[Op::N];
    Unpack(x, v);
    Unpack(g, h);
#pragma unroll
    for (int j = 0; j < Op::N; ++j) {
      const int s = j % Op::kStats, c = j % Op::kChannels;
      if constexpr (Op::kSmall) {
        if constexpr (Op::kScale) h[j] = Rounded(h[j], scale[c]);
        h[j] = stats.rstd[s] * (h[j] - shift[s]) - (v[j] - stats.mean[s]) * slope[s];
      } else {
        h[j] = h[j] * scale[c] + (shift[s] - (v[j] - stats.mean[s]) * slope[s]);
      }
    }
    return Repack<typename Op::T, Op::N>(h);
  }
};

// y of a pack; scale includes rstd. x - mean is exact where x is constant, which x * a + b would not be.
template <class Op, class E>
__device__ __forceinline__ Pack<typename Op::O, Op::N> Normalised(const Pack<typename Op::T, Op::N>& x,
                                                                  const typename Op::C (&mean)[Op::kStats],
                                                                  const typename Op::C (&scale)[Op::kChannels],
                                                                  const typename Op::C (&bias)[Op::kChannels]) {
  typename Op::C v[Op::N];
  Unpack(x, v);
#pragma unroll
  for (int j = 0; j < Op::N; ++j) {
    v[j] = (v[j] - mean[j % Op::kStats]) * scale[j % Op::kChannels];
    if constexpr (Op::kBias) v[j] += bias[j % Op::kChannels];
  }
  E::Apply(v);
  return Repack<typename Op::O, Op::N>(v);
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

// Merges the moments of the N channels of a pack, which have `count` elements each.
template <int N, class C>
__device__ __forceinline__ Pair<C> FoldMoments(int count, const C (&mean)[N], const C (&square)[N]) {
  C delta = 0, rest = 0;
#pragma unroll
  for (int j = 1; j < N; ++j) delta += mean[j] - mean[0];
  const C middle = mean[0] + delta * (C(1) / N);
#pragma unroll
  for (int j = 0; j < N; ++j) rest += square[j] + static_cast<C>(count) * ((mean[j] - middle) * (mean[j] - middle));
  return {middle, rest};
}

// Lanes that work on each of `outputs` results of a block: a power of two.
constexpr int LanesFor(int outputs) {
  int lanes = kWarp;
  while (lanes > 1 && lanes * outputs > kGroupThreads) lanes /= 2;
  return lanes;
}

// Merges kEntries moments for each of `outputs` (at most kOutputs) results, in a fixed order. at(k, e): entry e of result k.
// count(k, e): the elements it is of, maybe 0. emit(k, moments, lane of the result). All threads take part.
template <int kOutputs, int kEntries, class C, class At, class Count, class Emit>
__device__ __forceinline__ void MergeMoments(int outputs, const At& at, const Count& count, const Emit& emit) {
  constexpr int kLanes = LanesFor(kOutputs), kAtOnce = kGroupThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  for (int begin = 0; begin < kOutputs; begin += kAtOnce) {
    const int k = begin + threadIdx.x / kLanes;
    const bool has = k < outputs;
    const C base = has ? at(k, 0).a : C(0);
    C delta = 0, weight = 0, rest = 0;
    if (has) {
#pragma unroll 4
      for (int e = lane; e < kEntries; e += kLanes) {
        const C n = static_cast<C>(count(k, e));
        delta += n > 0 ? n * (at(k, e).a - base) : C(0);
        weight += n;
      }
    }
    delta = ReduceLanes<kLanes>(delta, SumOf());
    weight = ReduceLanes<kLanes>(weight, SumOf());
    const C mean = weight > 0 ? base + delta / weight : base;
    if (has) {
#pragma unroll 4
      for (int e = lane; e < kEntries; e += kLanes) {
        const C n = static_cast<C>(count(k, e));
        const Pair<C> of = at(k, e);
        rest += n > 0 ? of.b + n * ((of.a - mean) * (of.a - mean)) : C(0);
      }
    }
    rest = ReduceLanes<kLanes>(rest, SumOf());
    if (has) emit(k, Pair<C>{mean, rest}, lane);
  }
}

// Where a block leaves kValues values per thread: [value][thread], with rows shifted by one so that neither a warp that
// writes a value nor one that reads several values of few threads finds them in the same banks.
constexpr int kRoomRow = kGroupThreads + 1;

// The sums over the threads of each column, in a fixed order; emit(channel of the tile, sums, lane of the channel).
// room: kRoomRow * N. All threads take part.
template <class Op, class Emit>
__device__ __forceinline__ void TileSums(const GroupParams& p, const GroupWalk<Op>& walk,
                                         const typename Op::C (&a)[Op::N], const typename Op::C (&b)[Op::N],
                                         Pair<typename Op::C>* room, const Emit& emit) {
  using C = typename Op::C;
  constexpr int N = Op::N, kLanes = LanesFor(Op::kWidth), kAtOnce = kGroupThreads / kLanes;
#pragma unroll
  for (int j = 0; j < N; ++j) room[j * kRoomRow + threadIdx.x] = {a[j], b[j]};
  __syncthreads();
  const int channels = min(Op::kWidth, p.channels - walk.tile * Op::kWidth), lane = threadIdx.x % kLanes;
  for (int begin = 0; begin < Op::kWidth; begin += kAtOnce) {
    const int c = begin + threadIdx.x / kLanes;
    Pair<C> total = {0, 0};
    if (c < channels) {
#pragma unroll 8
      for (int r = lane; r < Op::kDown; r += kLanes) {
        const Pair<C> of = room[c % N * kRoomRow + r * Op::kAcross + c / N];
        total.a += of.a;
        total.b += of.b;
      }
    }
    total = {ReduceLanes<kLanes>(total.a, SumOf()), ReduceLanes<kLanes>(total.b, SumOf())};
    if (c < channels) emit(c, total, lane);
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
