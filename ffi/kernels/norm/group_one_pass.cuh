// GroupNorm of samples that fit the registers of a cluster of blocks, and its gradients: every array is read once.
//
//     GroupNormOnePass<Group<...>, kHeld, kCluster>                  y, mean, var
//     GroupGradientOnePass<Group<...>, S, kDirect, kHeld, kCluster>  dx, and sums of g and g * z per sample and channel
//
// Channels lie last. A cluster (kCluster = false: a block) owns a tile of whole groups of a sample, and each of its `parts`
// blocks `length` rows, of which a thread holds kHeld packs. All loads are issued before the first use. The blocks leave
// what they found in their shared memory, and each merges that of all in the order of their ranks. Memory traffic: one read
// and one write forward; two reads and one write backward.
#pragma once

#ifndef JAXKERN_EMULATED
#include "../common/async.cuh"
#endif
#include "group.cuh"

namespace jaxkern {

constexpr int kGroupTile = 64;  // packs of a tile, at most

// Block `part` of a cluster comes right behind block `part` - 1.
template <class Op> __device__ __forceinline__ GroupWalk<Op> ClusterWalk(const GroupParams& p) {
  const int64_t block = blockIdx.x, tile = block / p.parts, sample = tile / p.tiles;
  return GroupWalk<Op>(p, (sample * p.parts + block % p.parts) * p.tiles + tile % p.tiles);
}

// The barrier of the cluster; writes to shared memory before it are visible to all its blocks. Its instructions want whole
// warps.
template <bool kCluster> __device__ __forceinline__ void SyncGroup() {
#ifdef JAXKERN_HAS_BULK_COPY
  __syncwarp();
  if constexpr (kCluster) SyncCluster();
  else __syncthreads();
#else
  static_assert(!kCluster);
  __syncthreads();
#endif
}

// *at in the shared memory of block `rank`.
template <bool kCluster, class C> __device__ __forceinline__ Pair<C> FromBlock(const Pair<C>* at, int rank) {
#ifdef JAXKERN_HAS_BULK_COPY
  if constexpr (kCluster) {
    uint32_t from;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(from) : "r"(SharedAddress(at)), "r"(rank));
    Pair<C> found;
    if constexpr (sizeof(C) == 4) {
      asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(found.a), "=f"(found.b) : "r"(from) : "memory");
    } else {
      asm volatile("ld.shared::cluster.v2.f64 {%0, %1}, [%2];" : "=d"(found.a), "=d"(found.b) : "r"(from) : "memory");
    }
    return found;
  }
#endif
  return *at;
}

// Blocks stay until no other reads their shared memory: all arrive when they have read, and wait before they end.
template <bool kCluster> __device__ __forceinline__ void ArriveAfterReading() {
#ifdef JAXKERN_HAS_BULK_COPY
  if constexpr (kCluster) ArriveClusterRelaxed();
#endif
}
template <bool kCluster> __device__ __forceinline__ void WaitForReaders() {
#ifdef JAXKERN_HAS_BULK_COPY
  __syncwarp();
  if constexpr (kCluster) WaitCluster();
#endif
}

template <class Op, int kHeld, bool kCluster, class E = NoGroupEpilogue>
__global__ void __launch_bounds__(kGroupThreads, kHeld > 16 ? 1 : 2)
    GroupNormOnePass(const __grid_constant__ GroupParams p) {
  using T = typename Op::T;
  using C = typename Op::C;
  constexpr int N = Op::N;
  __shared__ Pair<C> room[kGroupThreads * N], channel[kGroupTile * N], group[kGroupTile * N], whole[kGroupTile * N];
  const GroupWalk<Op> walk = ClusterWalk<Op>(p);
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  Pack<T, N> raw[kHeld];
  const auto has = [&](int u) { return walk.first + u * walk.down < walk.end; };
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    raw[u] = ZeroPack<T, N>();
    if (has(u)) raw[u] = LoadPack<T, N>(p.x, walk.At(p, walk.first + u * walk.down), policy);
  }
  C shift[N], sum[N] = {}, square[N] = {};
  Unpack(raw[0], shift);
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    if (!has(u)) continue;
    C v[N];
    Unpack(raw[u], v);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const C d = v[j] - shift[j];
      sum[j] += d;
      square[j] += d * d;
    }
  }
  FinishMoments(walk.Count(p, walk.row), shift, sum, square);
  TileMoments(p, walk, sum, square, room, [&](int c, const Pair<C>& of) { channel[c] = of; });
  __syncthreads();

  // The moments of the groups of the tile: of this block, then of all.
  const int width = p.across * N, groups = min(width, p.channels - walk.tile * width) / p.per_group;
  const int64_t first = (walk.sample * p.channels + walk.tile * width) / p.per_group;
  const C length = static_cast<C>(walk.Length(p));
  for (int k = threadIdx.x; k < groups; k += kGroupThreads) {
    const Pair<C>* const of = channel + k * p.per_group;
    C mean = 0, rest = 0;
    for (int c = 0; c < p.per_group; ++c) mean += of[c].a - of[0].a;
    mean = of[0].a + mean / static_cast<C>(p.per_group);
    for (int c = 0; c < p.per_group; ++c) rest += of[c].b + length * ((of[c].a - mean) * (of[c].a - mean));
    group[k] = {mean, rest};
  }
  SyncGroup<kCluster>();
  const C each = C(1) / static_cast<C>(p.rows);
  for (int k = threadIdx.x; k < groups; k += kGroupThreads) {
    const C base = FromBlock<kCluster>(group + k, 0).a;
    C mean = 0, var = 0;
    const auto share = [&](int r) {  // of the rows
      return static_cast<C>(max(min(p.steps, (r + 1) * p.length) - r * p.length, 0)) * each;
    };
    for (int r = 0; r < p.parts; ++r) {
      const C of = share(r);
      mean += of > 0 ? of * (FromBlock<kCluster>(group + k, r).a - base) : C(0);
    }
    mean += base;
    for (int r = 0; r < p.parts; ++r) {
      const C of = share(r);
      const Pair<C> part = FromBlock<kCluster>(group + k, r);
      const C d = part.a - mean;
      var += of > 0 ? part.b * (each / static_cast<C>(p.per_group)) + of * d * d : C(0);
    }
    if (walk.part == 0) {
      static_cast<C*>(p.mean)[first + k] = mean;
      static_cast<C*>(p.var)[first + k] = var;
    }
    whole[k] = {mean, InverseRoot(var + static_cast<C>(p.eps))};
  }
  __syncthreads();
  ArriveAfterReading<kCluster>();

  C scale[N] = {}, bias[N] = {};
  if constexpr (Op::kScale) {
    if (walk.live) GroupParameters<Op>(p, p.scale, walk.sample, walk.channel, scale);
  }
  if constexpr (Op::kBias) {
    if (walk.live) GroupParameters<Op>(p, p.bias, walk.sample, walk.channel, bias);
  }
  const int own = walk.channel - walk.tile * width;
  C mean[Op::kStats], rstd[Op::kStats];
#pragma unroll
  for (int j = 0; j < Op::kStats; ++j) {
    const Pair<C> of = whole[walk.live ? (own + j) / p.per_group : 0];
    mean[j] = of.a;
    rstd[j] = of.b;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) scale[j] = Op::kScale ? rstd[j % Op::kStats] * scale[j] : rstd[j % Op::kStats];
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    if (!has(u)) continue;
    C v[N];
    Forget(raw[u]);
    Unpack(raw[u], v);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      v[j] = (v[j] - mean[j % Op::kStats]) * scale[j];
      if constexpr (Op::kBias) v[j] += bias[j];
    }
    E::Apply(v);
    StorePack(p.y, walk.At(p, walk.first + u * walk.down), Repack<typename Op::O, N>(v));
  }
  WaitForReaders<kCluster>();
}

template <class Op, class S, bool kDirect, int kHeld, bool kCluster>
__global__ void __launch_bounds__(kGroupThreads, kHeld > 8 ? 1 : 2)
    GroupGradientOnePass(const __grid_constant__ GroupParams p) {
  using T = typename Op::T;
  using O = typename Op::O;
  using P = typename Op::P;
  using C = typename Op::C;
  constexpr int N = Op::N;
  __shared__ Pair<C> room[kGroupThreads * N], channel[kGroupTile * N], total[kGroupTile * N], slopes[kGroupTile * N];
  const GroupWalk<Op> walk = ClusterWalk<Op>(p);
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  Pack<T, N> x[kHeld];
  Pack<O, N> g[kHeld];
  const auto has = [&](int u) { return walk.first + u * walk.down < walk.end; };
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    x[u] = ZeroPack<T, N>();
    g[u] = ZeroPack<O, N>();
    if (!has(u)) continue;
    x[u] = LoadPack<T, N>(p.x, walk.At(p, walk.first + u * walk.down), policy);
    g[u] = LoadPack<O, N>(p.g, walk.At(p, walk.first + u * walk.down), policy);
  }
  const GroupStats<Op> stats(p, walk.sample, walk.channel, walk.live);
  C plain[N] = {}, product[N] = {};
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    if (!has(u)) continue;
    C v[N], w[N];
    Unpack(x[u], v);
    Unpack(g[u], w);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      plain[j] += w[j];
      product[j] += w[j] * (v[j] - stats.mean[j % Op::kStats]);
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) product[j] *= stats.rstd[j % Op::kStats];
  TileSums(p, walk, plain, product, room, [&](int c, const Pair<C>& of) { channel[c] = of; });

  // The sums of each channel over the cluster, times scale; then shift and slope of each group.
  SyncGroup<kCluster>();
  const int width = p.across * N, begin = walk.tile * width, channels = min(width, p.channels - begin);
  for (int c = threadIdx.x; c < channels; c += kGroupThreads) {
    Pair<C> all = {0, 0};
    for (int r = 0; r < p.parts; ++r) {
      const Pair<C> part = FromBlock<kCluster>(channel + c, r);
      all.a += part.a;
      all.b += part.b;
    }
    if (walk.part == 0) StoreSums<S, kDirect>(p, walk.sample * p.channels + begin + c, all);
    if constexpr (Op::kScale) {
      const C scale = ToCompute(static_cast<const P*>(p.scale)[walk.sample / p.each * p.channels + begin + c]);
      all = {Rounded(all.a, scale), Rounded(all.b, scale)};
    }
    total[c] = all;
  }
  __syncthreads();
  ArriveAfterReading<kCluster>();
  for (int k = threadIdx.x; k < channels / p.per_group; k += kGroupThreads) {
    Pair<C> all = {0, 0};
    for (int c = 0; c < p.per_group; ++c) {
      all.a += total[k * p.per_group + c].a;
      all.b += total[k * p.per_group + c].b;
    }
    slopes[k] = SlopesOf(p, (walk.sample * p.channels + begin) / p.per_group + k, all.a, all.b);
  }
  __syncthreads();

  C scale[N] = {}, shift[Op::kStats], slope[Op::kStats];
  if constexpr (Op::kScale) {
    if (walk.live) GroupParameters<Op>(p, p.scale, walk.sample, walk.channel, scale);
  }
#pragma unroll
  for (int j = 0; j < Op::kStats; ++j) {
    const Pair<C> of = slopes[walk.live ? (walk.channel - begin + j) / p.per_group : 0];
    shift[j] = of.a;
    slope[j] = of.b * stats.rstd[j] * stats.rstd[j];
  }
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    if (!has(u)) continue;
    C v[N], h[N];
    Forget(x[u]);
    Forget(g[u]);
    Unpack(x[u], v);
    Unpack(g[u], h);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int s = j % Op::kStats;
      if constexpr (Op::kScale) h[j] = Rounded(h[j], scale[j]);
      h[j] = stats.rstd[s] * (h[j] - shift[s]) - (v[j] - stats.mean[s]) * slope[s];
    }
    StorePack(p.y, walk.At(p, walk.first + u * walk.down), Repack<T, N>(h));
  }
  WaitForReaders<kCluster>();
}

}  // namespace jaxkern
