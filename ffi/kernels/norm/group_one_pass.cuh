// GroupNorm of samples that fit the registers and shared memory of a cluster of blocks, and its gradients: every array is
// read once.
//
//     GroupNormOnePass<Group<...>, kHeld, kShared, kBlocks, kWhole>             y, mean, var
//     GroupGradientOnePass<Group<...>, S, kDirect, kHeld, kBlocks, kWhole>      dx, and sums of g and g * z per sample and
//                                                                               channel
//
// Channels lie last. A cluster of kBlocks = `parts` blocks owns a tile of whole groups of a sample, and each block `length`
// rows of it. A thread holds kHeld packs in registers and kShared packs in dynamic shared memory; backward it holds x in
// registers and g in shared memory. A thread reads only packs that it has copied itself. All loads are issued before the
// first use. kWhole: every thread of every block has all its packs. Blocks send what they found to the shared memory of all
// blocks of the cluster, and each merges it in the order of the ranks. Memory traffic: one read and one write forward; two
// reads and one write backward.
#pragma once

#ifndef JAXKERN_EMULATED
#include "../common/async.cuh"
#endif
#include "group.cuh"

namespace jaxkern {

// Waits for quarter `n` of the packs in shared memory, and those before it; a thread commits four quarters.
constexpr int Quarter(int packs) { return (packs + 3) / 4; }
__device__ __forceinline__ void WaitForQuarter(int n) {
  if (n == 0) WaitForCopyGroups<3>();
  else if (n == 1) WaitForCopyGroups<2>();
  else if (n == 2) WaitForCopyGroups<1>();
  else WaitForCopyGroups<0>();
}

// Exchange of kCount values of each block of a cluster. One thread calls Init for `count` values per block; all
// threads call Ready before any calls Send, and Wait before they read. Every value must be sent to every rank. A block that
// has waited has everything sent to it, so that blocks may end at any time after Wait.
template <class V, int kBlocks, int kCount> struct Exchange {
  V from[kBlocks][kCount];
#ifdef JAXKERN_HAS_BULK_COPY
  Barrier barrier;
#endif

  __device__ __forceinline__ void Init(int count) {
#ifdef JAXKERN_HAS_BULK_COPY
    if constexpr (kBlocks > 1) {
      if (threadIdx.x == 0) {
        InitBarrier(&barrier, 1);
        FenceBarrierInit();
        ArriveExpect(&barrier, kBlocks * count * static_cast<uint32_t>(sizeof(V)));
      }
    }
#endif
    ArriveOpened<kBlocks>();
  }
  // Contains a barrier of the block, or of the cluster.
  __device__ __forceinline__ void Ready() {
    WaitOpened<kBlocks>();
    __syncthreads();
  }
  __device__ __forceinline__ void Send(int at, const V& value, int mine, int rank) {
#ifdef JAXKERN_HAS_BULK_COPY
    if constexpr (kBlocks > 1) {
      StoreRemote(&from[mine][at], value, &barrier, static_cast<uint32_t>(rank));
      return;
    }
#endif
    static_assert(sizeof(V) > 0);
    from[mine][at] = value;
  }
  // With one block, a barrier of the block.
  __device__ __forceinline__ void Wait() {
#ifdef JAXKERN_HAS_BULK_COPY
    if constexpr (kBlocks > 1) {
      jaxkern::Wait(&barrier, 0);
      return;
    }
#endif
    __syncthreads();
  }
};

template <class Op, int kHeld, int kShared, int kBlocks, bool kWhole, class E = NoGroupEpilogue>
__global__ void __launch_bounds__(kGroupThreads, 2) GroupNormOnePass(const __grid_constant__ GroupParams p) {
  using T = typename Op::T;
  using O = typename Op::O;
  using C = typename Op::C;
  constexpr int N = Op::N, kPacks = kHeld + kShared, kEach = N / Op::kPerEntry;  // kEach: entries of a pack
  constexpr int kColumns = Op::kPerGroup / Op::kPerEntry, kGroups = Op::kWidth / Op::kPerGroup;
  JAXKERN_DYNAMIC_SHARED(dynamic);
  __shared__ Pair<C> room[kRoomRow * kEach], whole[kGroups];
  __shared__ Exchange<Pair<C>, kBlocks, kGroups> exchange;
  GroupWalk<Op> walk;
  walk.template Init<kBlocks>(p, blockIdx.x);
  const int groups = min(Op::kWidth, p.channels - walk.tile * Op::kWidth) / Op::kPerGroup;
  exchange.Init(groups);
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  const T* const x = walk.At(p, static_cast<const T*>(p.x) + walk.base, walk.first);
  const auto has = [&](int u) { return kWhole || walk.first + u * Op::kDown < walk.end; };
  Pack<T, N>* const held = reinterpret_cast<Pack<T, N>*>(dynamic) + threadIdx.x;
  Pack<T, N> raw[kHeld];
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    if (!kWhole) raw[u] = ZeroPack<T, N>();
    if (has(u)) raw[u] = LoadPack<T, N>(walk.At(p, x, u * Op::kDown), 0, policy);
  }
  constexpr int kQuarter = Quarter(kShared);
#pragma unroll
  for (int u = 0; u < 4 * kQuarter; ++u) {
    if (u < kShared && has(kHeld + u)) {
      CopyAsync<N * sizeof(T)>(held + u * kGroupThreads, walk.At(p, x, (kHeld + u) * Op::kDown));
    }
    if (u % kQuarter == kQuarter - 1) CommitCopies();
  }

  // A thread's moments: of each channel, or of all if they are of one group, from sums in a few independent chains. They are
  // relative to its first element; see FinishMoments.
  constexpr int kSums = kEach > 1 ? N : std::min(N, 4);
  C shift[kEach], sum[kSums] = {}, square[kSums] = {};
  {
    C v[N];
    Unpack(raw[0], v);
#pragma unroll
    for (int j = 0; j < kEach; ++j) shift[j] = v[j];
  }
  const auto add = [&](const Pack<T, N>& pack) {
    C v[N];
    Unpack(pack, v);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const C d = v[j] - shift[j % kEach];
      sum[j % kSums] += d;
      square[j % kSums] += d * d;
    }
  };
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    if (has(u)) add(raw[u]);
  }
  if constexpr (kShared > 0) __syncthreads();  // that the compiler does not wait for copies first
#pragma unroll
  for (int u = 0; u < kShared; ++u) {
    if (u % kQuarter == 0) WaitForQuarter(u / kQuarter);
    if (has(kHeld + u)) add(held[u * kGroupThreads]);
  }
  if constexpr (kEach > 1) {
    FinishMoments(walk.Count(p, walk.row), shift, sum, square);
#pragma unroll
    for (int j = 0; j < N; ++j) room[j * kRoomRow + threadIdx.x] = {sum[j], square[j]};
  } else {
    C total[1] = {Fold(sum, SumOf())}, squares[1] = {Fold(square, SumOf())};
    FinishMoments(walk.Count(p, walk.row) * N, shift, total, squares);
    room[threadIdx.x] = {total[0], squares[0]};
  }
  exchange.Ready();

  // The moments of the groups of the tile: of this block, then of all.
  constexpr int kLanes = LanesFor(kGroups);
  MergeMoments<kGroups, kColumns * Op::kDown, C>(
      groups,
      [&](int k, int e) {
        const int column = k * kColumns + e % kColumns;
        return room[column % kEach * kRoomRow + e / kColumns * Op::kAcross + column / kEach];
      },
      [&](int, int e) { return (kWhole ? kPacks : walk.Count(p, e / kColumns)) * Op::kPerEntry; },
      [&](int k, const Pair<C>& of, int lane) {
        for (int rank = lane; rank < kBlocks; rank += kLanes) exchange.Send(k, of, walk.part, rank);
      });
  C scale[N] = {}, bias[N] = {};
  if constexpr (Op::kScale) {
    if (walk.live) GroupParameters<Op>(p, p.scale, walk.sample, walk.channel, scale);
  }
  if constexpr (Op::kBias) {
    if (walk.live) GroupParameters<Op>(p, p.bias, walk.sample, walk.channel, bias);
  }
  exchange.Wait();
  const C each = C(1) / static_cast<C>(p.rows);
#pragma unroll 1
  for (int k = threadIdx.x; k < groups; k += kGroupThreads) {
    const C base = exchange.from[0][k].a;
    C mean = 0, var = 0;
    const auto share = [&](int r) {  // of the rows
      return static_cast<C>(max(min(p.steps, (r + 1) * p.length) - r * p.length, 0)) * each;
    };
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
      const C of = share(r);
      mean += of > 0 ? of * (exchange.from[r][k].a - base) : C(0);
    }
    mean += base;
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
      const C of = share(r);
      const Pair<C> part = exchange.from[r][k];
      const C d = part.a - mean;
      var += of > 0 ? part.b * (each * (C(1) / Op::kPerGroup)) + of * d * d : C(0);
    }
    if (walk.part == 0) {
      const int64_t first = walk.sample * (p.channels / Op::kPerGroup) + walk.tile * kGroups;
      static_cast<C*>(p.mean)[first + k] = mean;
      static_cast<C*>(p.var)[first + k] = var;
    }
    whole[k] = {mean, InverseRoot(var + static_cast<C>(p.eps))};
  }
  __syncthreads();

  C mean[Op::kStats];
#pragma unroll
  for (int j = 0; j < Op::kStats; ++j) {
    const int own = walk.channel - walk.tile * Op::kWidth + j;
    const Pair<C> of = whole[walk.live ? static_cast<unsigned>(own) / Op::kPerGroup : 0];
    mean[j] = of.a;
#pragma unroll
    for (int c = j; c < N; c += Op::kStats) scale[c] = Op::kScale ? of.b * scale[c] : of.b;
  }
  O* const y = walk.At(p, static_cast<O*>(p.y) + walk.base, walk.first);
  const auto store = [&](int u, const Pack<T, N>& pack) {
    StorePack(walk.At(p, y, u * Op::kDown), 0, Normalised<Op, E>(pack, mean, scale, bias));
  };
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    Forget(raw[u]);
    if (has(u)) store(u, raw[u]);
  }
#pragma unroll
  for (int u = 0; u < kShared; ++u) {
    if (has(kHeld + u)) store(kHeld + u, held[u * kGroupThreads]);
  }
}

template <class Op, class S, bool kDirect, int kHeld, int kBlocks, bool kWhole>
__global__ void __launch_bounds__(kGroupThreads, 2) GroupGradientOnePass(const __grid_constant__ GroupParams p) {
  using T = typename Op::T;
  using O = typename Op::O;
  using P = typename Op::P;
  using C = typename Op::C;
  constexpr int N = Op::N, kGroups = Op::kWidth / Op::kPerGroup;
  JAXKERN_DYNAMIC_SHARED(dynamic);
  __shared__ Pair<C> room[kRoomRow * N], total[Op::kWidth], slopes[kGroups];
  __shared__ Exchange<Pair<C>, kBlocks, Op::kWidth> exchange;
  GroupWalk<Op> walk;
  walk.template Init<kBlocks>(p, blockIdx.x);
  const int begin = walk.tile * Op::kWidth, channels = min(Op::kWidth, p.channels - begin);
  exchange.Init(channels);
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  const auto has = [&](int u) { return kWhole || walk.first + u * Op::kDown < walk.end; };
  const T* const from_x = walk.At(p, static_cast<const T*>(p.x) + walk.base, walk.first);
  const O* const from_g = walk.At(p, static_cast<const O*>(p.g) + walk.base, walk.first);
  Pack<T, N> x[kHeld];
  Pack<O, N>* const g = reinterpret_cast<Pack<O, N>*>(dynamic) + threadIdx.x;
  constexpr int kQuarter = Quarter(kHeld);
#pragma unroll
  for (int u = 0; u < 4 * kQuarter; ++u) {
    if (u % kQuarter == 0 && u > 0) CommitCopies();
    if (u >= kHeld) continue;
    if (!kWhole) x[u] = ZeroPack<T, N>();
    if (!has(u)) continue;
    x[u] = LoadPack<T, N>(walk.At(p, from_x, u * Op::kDown), 0, policy);
    CopyAsync<N * sizeof(O)>(g + u * kGroupThreads, walk.At(p, from_g, u * Op::kDown));
  }
  CommitCopies();
  GroupStats<Op> stats;
  stats.Init(p, walk.sample, walk.channel, walk.live);
  C plain[N] = {}, product[N] = {};
  __syncthreads();  // that the compiler does not wait for copies before it loads
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    if (u % kQuarter == 0) WaitForQuarter(u / kQuarter);
    if (has(u)) AddToSums<Op>(x[u], g[u * kGroupThreads], stats, plain, product);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) product[j] *= stats.rstd[j % Op::kStats];

  // The sums of each channel over the block, then over the cluster and times scale; then shift and slope of each group.
  exchange.Ready();
  constexpr int kLanes = LanesFor(Op::kWidth);
  TileSums(p, walk, plain, product, room, [&](int c, const Pair<C>& of, int lane) {
    for (int rank = lane; rank < kBlocks; rank += kLanes) exchange.Send(c, of, walk.part, rank);
  });
  C scale[N] = {};
  if constexpr (Op::kScale) {
    if (walk.live) GroupParameters<Op>(p, p.scale, walk.sample, walk.channel, scale);
  }
  exchange.Wait();
#pragma unroll 1
  for (int c = threadIdx.x; c < channels; c += kGroupThreads) {
    Pair<C> all = {0, 0};
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
      all.a += exchange.from[r][c].a;
      all.b += exchange.from[r][c].b;
    }
    if (walk.part == 0) StoreSums<S, kDirect>(p, walk.sample * p.channels + begin + c, all);
    if constexpr (Op::kScale) {
      const C of = ToCompute(static_cast<const P*>(p.scale)[ParameterRow(p, walk.sample) + begin + c]);
      all = {Rounded(all.a, of), Rounded(all.b, of)};
    }
    total[c] = all;
  }
  __syncthreads();
#pragma unroll 1
  for (int k = threadIdx.x; k < channels / Op::kPerGroup; k += kGroupThreads) {
    Pair<C> all = {0, 0};
#pragma unroll 8
    for (int c = 0; c < Op::kPerGroup; ++c) {
      all.a += total[k * Op::kPerGroup + c].a;
      all.b += total[k * Op::kPerGroup + c].b;
    }
    slopes[k] = SlopesOf(p, walk.sample * (p.channels / Op::kPerGroup) + begin / Op::kPerGroup + k, all.a, all.b);
  }
  __syncthreads();

  GroupSlope<Op> slope;
  slope.Init(stats, scale, [&](int j) {
    return slopes[walk.live ? static_cast<unsigned>(walk.channel - begin + j) / Op::kPerGroup : 0];
  });
  T* const to = walk.At(p, static_cast<T*>(p.y) + walk.base, walk.first);
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    Forget(x[u]);
    if (has(u)) StorePack(walk.At(p, to, u * Op::kDown), 0, slope(x[u], g[u * kGroupThreads], stats));
  }
}

}  // namespace jaxkern
