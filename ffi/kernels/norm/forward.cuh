// RMSNorm and LayerNorm of rows that fit the registers of a few threads.
//
//     NormForward<Norm<...>, N, kLanes, kPacks, kRows, kThreads, kWhole, epilogue>
//
// kLanes selects the threads that hold a row. 1 to 32: that many lanes of a warp. 0: a block of kThreads threads. -b: a
// cluster of b such blocks (sm_90 and newer). Thread t of the n threads of a row holds packs t, t + n, and so on, kPacks of them, of
// kRows rows. All loads are issued before the first use. Each element is read once and written once; with a residual, both
// inputs are read, and their sum is written too. kWhole says that the packs of all threads fill a row exactly. The
// epilogue is a function that is applied before the store (epilogue.cuh), or quantisation (quantize.cuh).
//
// The variance is computed in a second pass over registers, from deviations. Their sum, 0 except for rounding, corrects the
// mean (Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983), so that a constant row has
// variance 0.
#pragma once

#include "norm.cuh"

namespace jaxkern {

// Blocks per multiprocessor that leave enough registers for `words` words of rows in each thread.
constexpr int NormBlocks(int threads, int words) {
  const int resident = words <= 8 ? 1536 : words <= 32 ? 1024 : 512;
  return std::max(resident / threads, 1);
}

template <class Op, int N, int kLanes, int kPacks, int kRows, int kThreads, bool kWhole, class E = NoEpilogue>
__global__ void __launch_bounds__(
    kThreads, NormBlocks(kThreads, std::max(kRows * kPacks * Pack<typename Op::T, N>::kWords * (Op::kResidual + 1),
                                            E::Held(kPacks* N))))
    NormForward(const __grid_constant__ typename E::Params p) {
  using T = typename Op::T;
  using O = typename Op::O;
  using P = typename Op::P;
  using C = typename Op::C;
  using Owners = RowOwners<kLanes, kThreads>;
  constexpr int kGroup = Owners::kGroup, kGroups = Owners::kGroups;
  static_assert(kLanes > 0 || kRows == 1, "a block has one row");
  static_assert(kLanes >= 0 || !E::kQuantizes, "quantisation finds the largest element of a block, not of a cluster");
  __shared__ ClusterSums<C, Owners::kBlocks, 1 + Op::kCentre> cluster;
  __shared__ C room_of_mean[kThreads / kWarp][1], room[kThreads / kWarp][1 + Op::kCentre];
  const int lane = Owners::Lane();
  const int64_t first = static_cast<int64_t>(Owners::Block()) * (kGroups * kRows) + Owners::GroupOfBlock();
  const int width = static_cast<int>(p.width), packs = width / N;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  cluster.Init();
  const auto has = [&](int i) { return kWhole || lane + i * kGroup < packs; };
  const auto at = [&](int u, int i) { return (first + u * kGroups) * width + (lane + i * kGroup) * N; };
  const auto live = [&](int u) {
    return kLanes <= 0 || first + u * kGroups < p.rows;
  };  // there are as many blocks as rows

  Pack<T, N> raw[kRows][kPacks];
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      raw[u][i] = ZeroPack<T, N>();
      if (live(u) && has(i)) raw[u][i] = LoadPack<T, N>(p.x, at(u, i), policy);
    }
  }
  if constexpr (Op::kResidual) {
    Pack<T, N> residual[kRows][kPacks];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        residual[u][i] = ZeroPack<T, N>();
        if (live(u) && has(i)) residual[u][i] = LoadPack<T, N>(p.residual, at(u, i), policy);
      }
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        raw[u][i] = Added(raw[u][i], residual[u][i]);
        if (live(u) && has(i)) StorePack(p.sum, at(u, i), raw[u][i]);
      }
    }
  }

  cluster.Ready();

  // Many 16-bit elements are unpacked again for each use, because a thread has no registers to keep them all as floats.
  const auto unpack = [&](int u, int i, C(&v)[N]) {
    if constexpr (sizeof(T) == 2 && kRows * kPacks * N > 32) Forget(raw[u][i]);
    Unpack(raw[u][i], v);
  };
  const C each = C(1) / static_cast<C>(width);
  C mean[kRows], rstd[kRows];
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    mean[u] = 0;
    if constexpr (Op::kCentre) {
      C total[1] = {0};
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        C v[N];
        unpack(u, i, v);
        total[0] += Fold(v, SumOf());
      }
      RowSums<kLanes, kThreads>(total, room_of_mean);
      cluster.Add(total, 0);
      mean[u] = total[0] * each;
    }
    C sums[1 + Op::kCentre] = {};  // of squares, and of deviations
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      C v[N], squares[N];
      unpack(u, i, v);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (Op::kCentre) v[j] = has(i) ? v[j] - mean[u] : C(0);
        squares[j] = v[j] * each * v[j];
      }
      sums[0] += Fold(squares, SumOf());
      if constexpr (Op::kCentre) sums[1] += Fold(v, SumOf());
    }
    RowSums<kLanes, kThreads>(sums, room);
    cluster.Add(sums, Op::kCentre);
    if constexpr (Op::kCentre) {
      const C delta = sums[1] * each;
      mean[u] += delta;
      sums[0] = Max(sums[0] - delta * delta, C(0));
    }
    rstd[u] = InverseRoot(sums[0] + static_cast<C>(p.eps));
  }

  if constexpr (E::kQuantizes) {
    C scale[N], bias[N];
    const auto load_parameters = [&](int i) {
      if constexpr (Op::kScale) LoadParameters<P, N>(p.scale, (lane + i * kGroup) * N, scale);
      if constexpr (Op::kBias) LoadParameters<P, N>(p.bias, (lane + i * kGroup) * N, bias);
    };
    if (kPacks == 1 && has(0)) load_parameters(0);  // the same for all rows
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const auto normalise = [&](int i, C(&v)[N]) {
        if (kPacks > 1) load_parameters(i);
        unpack(u, i, v);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (Op::kCentre) v[j] -= mean[u];
          v[j] *= rstd[u];
          if constexpr (Op::kScale) v[j] *= scale[j];
          if constexpr (Op::kBias) v[j] += bias[j];
        }
        E::Apply(p, first + u * kGroups, (lane + i * kGroup) * N, v);
      };
      E::template Store<N, kLanes, kThreads, kPacks>(p, first + u * kGroups, live(u), lane, has, normalise);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (!has(i)) continue;
      const int64_t column = (lane + i * kGroup) * N;
      C scale[N], bias[N];
      if constexpr (Op::kScale) LoadParameters<P, N>(p.scale, column, scale);
      if constexpr (Op::kBias) LoadParameters<P, N>(p.bias, column, bias);
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (!live(u)) continue;
        C v[N];
        unpack(u, i, v);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (Op::kCentre) v[j] -= mean[u];
          v[j] *= rstd[u];
          if constexpr (Op::kScale) v[j] *= scale[j];
          if constexpr (Op::kBias) v[j] += bias[j];
        }
        E::Apply(p, first + u * kGroups, column, v);
        StorePack(p.y, at(u, i), Repack<O, N>(v));
      }
    }
  }
}

}  // namespace jaxkern
