// GroupNorm and BatchNorm of any shape, in two passes over x forward, and over x and g backward.
//
//     GroupMoments<Group<...>>      mean and sum of squared deviations of each entry of a part: a channel, or the channels of
//                                   a pack if they belong to one group
//     GroupStatistics<C, kEntries, kThreads>  merges them: mean and variance of a sample and group
//     GroupApply<Group<...>>        y
//     GroupSums<Group<...>>         sums of g and g * z of each channel of a part
//     GroupSlopes<C, P, S, kScale, kDirect, kThreads>   merges them: what dx depends on, and sums over the parts
//     GroupOverSamples<C, S>        dscale and dbias, if several samples share them
//     GroupGradient<Group<...>>     dx
//
// The second pass takes blocks, and the steps of a thread, in the reverse order: it finds the end of the first pass in L2.
// group.cuh has the layout of work. Memory traffic: forward 2 reads and 1 write, backward 4 reads and 1 write.
#pragma once

#include "group.cuh"

namespace jaxkern {

// The compiler moves no loads across this call. Without it, it issues all loads whose results the next round of a loop uses at
// the end of a round, and the warp has none in flight while it computes.
__device__ __forceinline__ void KeepLoadsHere() {
#ifndef JAXKERN_EMULATED
  __syncwarp(__activemask());
#endif
}

// Calls load(u, step, more) and use(u, step, more) for the steps `step + more` of a thread. kAhead steps are loaded ahead: slot u
// is loaded again as soon as the kBatch slots in its batch are used. init() runs while the first loads are in flight. kReverse:
// from the last step to the first.
template <int kAhead, int kBatch, bool kReverse, class Op, class Load, class Init, class Use>
__device__ __forceinline__ void EachStep(const GroupParams& p, const GroupWalk<Op>& walk, const Load& load,
                                         const Init& init, const Use& use) {
  const int count = walk.live ? walk.Count(p, walk.row) : 0;
  const int from = walk.first + (kReverse ? (count - 1) * Op::kDown : 0);
  constexpr int kStep = kReverse ? -Op::kDown : Op::kDown;
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    if (u < count) load(u, from, u * kStep);
  }
  init();
  int k = 0;
#pragma unroll 1
  for (; k + 2 * kAhead <= count; k += kAhead) {
#pragma unroll
    for (int b = 0; b < kAhead; b += kBatch) {
#pragma unroll
      for (int u = b; u < b + kBatch; ++u) use(u, from + k * kStep, u * kStep);
#pragma unroll
      for (int u = b; u < b + kBatch; ++u) load(u, from + k * kStep, (kAhead + u) * kStep);
      KeepLoadsHere();
    }
  }
#pragma unroll 1
  for (; k < count; k += kAhead) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (k + u < count) use(u, from + k * kStep, u * kStep);
      if (k + kAhead + u < count) load(u, from + k * kStep, (kAhead + u) * kStep);
    }
  }
}

template <class Op> __global__ void __launch_bounds__(kGroupThreads, 3)
    GroupMoments(const __grid_constant__ GroupParams p) {
  using T = typename Op::T;
  using C = typename Op::C;
  constexpr int N = Op::N;
  GroupWalk<Op> walk;
  walk.Init(p, blockIdx.x);
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  const T* const x = static_cast<const T*>(p.x) + walk.base;
  C shift[N] = {}, sum[N] = {}, square[N] = {};
  if (walk.first < walk.end) Unpack(LoadPack<T, N>(walk.At(p, x, walk.first), 0, policy), shift);
  constexpr int kAhead = Op::kInner ? 4 : 8;
  Pack<T, N> raw[kAhead];
  EachStep<kAhead, 2, false>(
      p, walk, [&](int u, int n, int more) { raw[u] = LoadPack<T, N>(walk.At(p, x, n, more), 0, policy); }, [] {},
      [&](int u, int, int) {
        C v[N];
        Unpack(raw[u], v);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const C d = v[j] - shift[j];
          sum[j] += d;
          square[j] += d * d;
        }
      });
  const int count = walk.Count(p, walk.row);
  FinishMoments(count, shift, sum, square);
  auto* const out = static_cast<Pair<C>*>(p.partial);
  if constexpr (Op::kInner) {
    C from = sum[0];  // of the first thread, which has a step
    if constexpr (Op::kLanes == kWarp) {
      from = __shfl_sync(0xffffffffu, from, 0);
    } else {
      __shared__ C base;
      if (threadIdx.x == 0) base = from;
      __syncthreads();
      from = base;
    }
    const C whole = C(1) / static_cast<C>(walk.Length(p));
    C total[1] = {0};
#pragma unroll
    for (int j = 0; j < N; ++j) total[0] += count ? sum[j] - from : C(0);
    total[0] *= static_cast<C>(count);
    GroupBlockSums<Op::kLanes>(total);
    const C mean = from + total[0] * whole;
    total[0] = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const C d = sum[j] - mean;
      total[0] += count ? square[j] + d * d * static_cast<C>(count) : C(0);
    }
    GroupBlockSums<Op::kLanes>(total);
    if (walk.row == 0 && walk.live) out[walk.Partial(p, p.channels, walk.channel)] = {mean, total[0]};
  } else {
    constexpr int E = N / Op::kPerEntry, kEntries = Op::kAcross * E;
    __shared__ Pair<C> room[kRoomRow * E];
    if constexpr (E == 1) {
      room[threadIdx.x] = FoldMoments(count, sum, square);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) room[j * kRoomRow + threadIdx.x] = {sum[j], square[j]};
    }
    __syncthreads();
    const int entries = p.channels / Op::kPerEntry, first = walk.tile * kEntries;
    MergeMoments<kEntries, Op::kDown, C>(
        min(kEntries, entries - first), [&](int k, int r) { return room[k % E * kRoomRow + r * Op::kAcross + k / E]; },
        [&](int, int r) { return walk.Count(p, r) * Op::kPerEntry; },
        [&](int k, const Pair<C>& of, int lane) {
          if (lane == 0) out[walk.Partial(p, entries, first + k)] = of;
        });
  }
}

// A block per sample and group. The entries of a group lie one after the other.
template <class C, int kEntries, int kThreads> __global__ void __launch_bounds__(kThreads)
    GroupStatistics(const __grid_constant__ GroupParams p) {
  const int entries = kEntries * p.parts;
  const auto* const from = static_cast<const Pair<C>*>(p.partial) + static_cast<int64_t>(blockIdx.x) * entries;
  const C each = C(1) / (static_cast<C>(p.rows) * static_cast<C>(p.inner) * static_cast<C>(p.per_group));
  const auto share = [&](int e) {  // of all elements of the group
    const int part = kEntries == 1 ? e : static_cast<int>(static_cast<unsigned>(e) % static_cast<unsigned>(p.parts));
    return static_cast<C>((min(p.steps, (part + 1) * p.length) - part * p.length) * p.per_step) * each;
  };
  const C base = from[0].a;
  C total[1] = {0};
#pragma unroll 4
  for (int e = threadIdx.x; e < entries; e += kThreads) total[0] += share(e) * (from[e].a - base);
  GroupBlockSums<kThreads>(total);
  const C mean = base + total[0];
  total[0] = 0;
#pragma unroll 4
  for (int e = threadIdx.x; e < entries; e += kThreads) {
    const Pair<C> of = from[e];
    total[0] += of.b * each + share(e) * ((of.a - mean) * (of.a - mean));
  }
  GroupBlockSums<kThreads>(total);
  if (threadIdx.x == 0) {
    static_cast<C*>(p.mean)[blockIdx.x] = mean;
    static_cast<C*>(p.var)[blockIdx.x] = total[0];
  }
}

// The number of a block counted from the last one.
__device__ __forceinline__ uint32_t FromLast(const GroupParams& p) {
  return static_cast<uint32_t>(p.samples) * static_cast<uint32_t>(p.parts * p.tiles) - 1 - blockIdx.x;
}

template <class Op, class E = NoGroupEpilogue> __global__ void __launch_bounds__(kGroupThreads, 3)
    GroupApply(const __grid_constant__ GroupParams p) {
  using T = typename Op::T;
  using O = typename Op::O;
  using C = typename Op::C;
  constexpr int N = Op::N;
  GroupWalk<Op> walk;
  walk.Init(p, FromLast(p));
  if (walk.first >= walk.end) return;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  GroupStats<Op> stats;
  C scale[Op::kChannels] = {}, bias[Op::kChannels] = {};
  const T* const x = static_cast<const T*>(p.x) + walk.base;
  O* const y = static_cast<O*>(p.y) + walk.base;
  constexpr int kAhead = Op::kInner ? 4 : Op::kStats > 1 ? 6 : 8;
  Pack<T, N> raw[kAhead];
  EachStep<kAhead, 2, true>(
      p, walk, [&](int u, int n, int more) { raw[u] = LoadPack<T, N>(walk.At(p, x, n, more), 0, policy); },
      [&] {
        stats.Init(p, walk.sample, walk.channel, true);
        if constexpr (Op::kScale) GroupParameters<Op>(p, p.scale, walk.sample, walk.channel, scale);
        if constexpr (Op::kBias) GroupParameters<Op>(p, p.bias, walk.sample, walk.channel, bias);
#pragma unroll
        for (int j = 0; j < Op::kChannels; ++j) {
          const C rstd = stats.rstd[j % Op::kStats];
          scale[j] = Op::kScale ? rstd * scale[j] : rstd;
        }
      },
      [&](int u, int n, int more) {
        StorePack(walk.At(p, y, n, more), 0, Normalised<Op, E>(raw[u], stats.mean, scale, bias));
      });
}

template <class Op> __global__ void __launch_bounds__(kGroupThreads, 3)
    GroupSums(const __grid_constant__ GroupParams p) {
  using T = typename Op::T;
  using O = typename Op::O;
  using C = typename Op::C;
  constexpr int N = Op::N;
  GroupWalk<Op> walk;
  walk.Init(p, blockIdx.x);
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  const T* const from_x = static_cast<const T*>(p.x) + walk.base;
  const O* const from_g = static_cast<const O*>(p.g) + walk.base;
  GroupStats<Op> stats;
  C plain[N] = {}, product[N] = {};
  Pack<T, N> x[4];
  Pack<O, N> g[4];
  EachStep<4, 1, false>(
      p, walk,
      [&](int u, int n, int more) {
        x[u] = LoadPack<T, N>(walk.At(p, from_x, n, more), 0, policy);
        g[u] = LoadPack<O, N>(walk.At(p, from_g, n, more), 0, policy);
      },
      [&] { stats.Init(p, walk.sample, walk.channel, walk.live); },
      [&](int u, int, int) { AddToSums<Op>(x[u], g[u], stats, plain, product); });
  auto* const out = static_cast<Pair<C>*>(p.partial);
  if constexpr (Op::kInner) {
    C total[2] = {Fold(plain, SumOf()), Fold(product, SumOf()) * stats.rstd[0]};
    GroupBlockSums<Op::kLanes>(total);
    if (walk.row == 0 && walk.live) out[walk.Partial(p, p.channels, walk.channel)] = {total[0], total[1]};
  } else {
    __shared__ Pair<C> room[kRoomRow * N];
#pragma unroll
    for (int j = 0; j < N; ++j) product[j] *= stats.rstd[j % Op::kStats];
    TileSums(p, walk, plain, product, room, [&](int c, const Pair<C>& of, int lane) {
      if (lane == 0) out[walk.Partial(p, p.channels, walk.tile * Op::kWidth + c)] = of;
    });
  }
}

// A block per sample and group; a warp adds the parts of a channel.
template <class C, class P, class S, bool kScale, bool kDirect, int kThreads>
__global__ void __launch_bounds__(kThreads) GroupSlopes(const __grid_constant__ GroupParams p) {
  constexpr int kWarps = kThreads / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, groups = p.channels / p.per_group;
  const int64_t sample = blockIdx.x / static_cast<unsigned>(groups);
  const int first = static_cast<int>(blockIdx.x % static_cast<unsigned>(groups)) * p.per_group;
  C sums[2] = {0, 0};
  for (int begin = 0; begin < p.per_group; begin += kWarps) {  // as often for all warps
    const int k = begin + warp;
    const int64_t at = sample * p.channels + first + k;
    const auto* const from = static_cast<const Pair<C>*>(p.partial) + at * p.parts;
    Pair<C> own = {0, 0};
#pragma unroll 8
    for (int e = k < p.per_group ? lane : p.parts; e < p.parts; e += kWarp) {
      own.a += from[e].a;
      own.b += from[e].b;
    }
    own = {ReduceLanes<kWarp>(own.a, SumOf()), ReduceLanes<kWarp>(own.b, SumOf())};
    if (lane > 0 || k >= p.per_group) continue;
    StoreSums<S, kDirect>(p, at, own);
    const C scale = kScale ? ToCompute(static_cast<const P*>(p.scale)[sample / p.each * p.channels + first + k]) : C(1);
    sums[0] += Rounded(own.a, scale);
    sums[1] += Rounded(own.b, scale);
  }
  if (!p.slope) return;
  __syncwarp();
  GroupBlockSums<kThreads>(sums);
  if (threadIdx.x == 0) static_cast<Pair<C>*>(p.slope)[blockIdx.x] = SlopesOf(p, blockIdx.x, sums[0], sums[1]);
}

// A block takes 32 channels of `each` samples; its warps take every 8th sample.
template <class C, class S> __global__ void __launch_bounds__(kGroupThreads)
    GroupOverSamples(const __grid_constant__ GroupParams p) {
  constexpr int kWarps = kGroupThreads / kWarp;
  __shared__ Pair<C> room[kWarps][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, tiles = (p.channels + kWarp - 1) / kWarp;
  const int channel = static_cast<int>(blockIdx.x % tiles) * kWarp + lane;
  const int64_t set = blockIdx.x / tiles;
  Pair<C> sum = {0, 0};
  if (channel < p.channels) {
    const auto* const from = static_cast<const Pair<C>*>(p.total) + set * p.each * p.channels + channel;
#pragma unroll 8
    for (int64_t s = warp; s < p.each; s += kWarps) {
      sum.a += from[s * p.channels].a;
      sum.b += from[s * p.channels].b;
    }
  }
  room[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || channel >= p.channels) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    sum.a += room[w][lane].a;
    sum.b += room[w][lane].b;
  }
  StoreSums<S, true>(p, set * p.channels + channel, sum);
}

template <class Op> __global__ void __launch_bounds__(kGroupThreads, 2)
    GroupGradient(const __grid_constant__ GroupParams p) {
  using T = typename Op::T;
  using O = typename Op::O;
  using C = typename Op::C;
  constexpr int N = Op::N;
  GroupWalk<Op> walk;
  walk.Init(p, FromLast(p));
  if (walk.first >= walk.end) return;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  GroupStats<Op> stats;
  GroupSlope<Op> slope;
  const T* const from_x = static_cast<const T*>(p.x) + walk.base;
  const O* const from_g = static_cast<const O*>(p.g) + walk.base;
  T* const to = static_cast<T*>(p.y) + walk.base;
  Pack<T, N> x[4];
  Pack<O, N> g[4];
  EachStep<4, 1, true>(
      p, walk,
      [&](int u, int n, int more) {
        x[u] = LoadPack<T, N>(walk.At(p, from_x, n, more), 0, policy);
        g[u] = LoadPack<O, N>(walk.At(p, from_g, n, more), 0, policy);
      },
      [&] {
        stats.Init(p, walk.sample, walk.channel, true);
        C scale[Op::kChannels] = {};
        if constexpr (Op::kScale) GroupParameters<Op>(p, p.scale, walk.sample, walk.channel, scale);
        slope.Init(stats, scale, [&](int j) {
          const int64_t at = stats.first + static_cast<uint32_t>(walk.channel + j) / Op::kPerGroup;
          return static_cast<const Pair<C>*>(p.slope)[at];
        });
      },
      [&](int u, int n, int more) { StorePack(walk.At(p, to, n, more), 0, slope(x[u], g[u], stats)); });
}

}  // namespace jaxkern
