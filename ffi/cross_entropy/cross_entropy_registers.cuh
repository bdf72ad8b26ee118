// Loss and gradient in one read, a row held in registers.
//
// A row belongs to a group of kLanes lanes, to a block (kWholeBlock) or to a cluster of blocks (kWholeCluster,
// sm_90), and a thread holds kPacks of its packs, as exponentials relative to its warp's maximum. All loads
// are issued before the first use. Who holds the label's logit writes the row's loss: it need not be read
// again, and the gradient may overwrite the logits.
#pragma once

#include "cross_entropy_rows.cuh"

namespace jaxkern {

constexpr int kWholeCluster = -1;

template <class T, int kLanes, int kPacks, int kRows>
__global__ void __launch_bounds__(kLanes > 0 ? kLossGroupThreads : kLossBlockThreads, kLanes > 0 ? 6 : kLanes == kWholeCluster && kPacks > 4 ? 1 : 2)
BothRegisters(const __grid_constant__ LossParams p) {
  using C = Compute<T>;
  using Stat = LossStat<T>;
  constexpr int N = kVector<T>;
  constexpr bool kGroup = kLanes > 0, kCluster = kLanes == kWholeCluster;
  static_assert(kGroup || kRows == 1, "a block has one row");
  __shared__ Stat room[kLossBlockThreads / kWarp];

  uint32_t rank = 0, blocks = 1;
#ifdef JAXKERN_HAS_BULK_COPY
  __shared__ Stat mail[kMaxCluster];
  __shared__ Barrier mailed;
  if constexpr (kCluster) {
    rank = ClusterRank();
    blocks = ClusterSize();
    if (threadIdx.x == 0) {
      InitBarrier(&mailed, 1);
      FenceBarrierInit();
    }
    ArriveClusterRelaxed();
  }
#endif
  const int lanes = kGroup ? kLanes : static_cast<int>(blocks * blockDim.x);
  const int lane = kGroup ? threadIdx.x % lanes : rank * blockDim.x + threadIdx.x;
  constexpr int kGroups = kGroup ? kLossGroupThreads / (kGroup ? kLanes : 1) : 1;
  const int64_t first_row = kGroup ? int64_t{blockIdx.x} * (kGroups * kRows) + threadIdx.x / lanes : blockIdx.x / blocks;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  const T* const logits = static_cast<const T*>(p.logits);
  T* const gradient = static_cast<T*>(p.gradient);
  const T nothing = FromCompute<T>(-Infinity<C>());
  const bool smoothing = p.smoothing != 0;

  Pack<T, N> raw[kRows][kPacks];
  Pack<T, 1> single[kRows][2];
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    const LossRow<T> span(p, first_row + u * kGroups);
    const T* const at = logits + span.At(lane);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      raw[u][i] = Filled<T, N>(nothing);
      if (lane + i * lanes < span.end) raw[u][i] = LoadVector<T, N>(at + i * lanes * N, policy);
    }
    single[u][0] = single[u][1] = Filled<T, 1>(nothing);
    if (p.ragged) {
      const LossSingles<T> singles(p, span, lane, first_row + u * kGroups < p.rows);
#pragma unroll
      for (int k = 0; k < 2; ++k) single[u][k] = singles.Load(logits + (first_row + u * kGroups) * p.width, k);
    }
  }

#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    const int64_t row = first_row + u * kGroups;
    const bool real = row < p.rows;
    const LossRow<T> span(p, row);
    const LossSingles<T> singles(p, span, lane, real);
    Label label = {Label::kIgnored};
    C weight = 0, reference = 0;
    if (real) {
      label = ReadLabel(p, row);
      weight = static_cast<const C*>(p.weight)[row];
      if (smoothing) reference = ReferenceOf(logits[row * p.width]);
    }

    Stat stat = Stat::Identity();
    C held[kPacks][N], x_label = 0;
    const C max = LargestOf<T>(raw[u]);
    C local = max;
    if (p.ragged) local = Max(local, Max(ToCompute(Element(single[u][0], 0)), ToCompute(Element(single[u][1], 0))));
    stat.max = ReduceLanes<kGroup ? kLanes : kWarp>(local, MaxOf());
    const C base = Base(stat.max);
    // Whether the label is among this thread's, and which.
    const int offset = static_cast<int>(label.at) - span.head, place = offset & (N - 1);
    const int label_pack = label.at >= span.head && offset / N < span.end ? offset / N : -1;
    bool own = false;
    C of_pack[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      Unpack(raw[u][i], held[i]);
      if (lane + i * lanes == label_pack) {
        own = true;
#pragma unroll
        for (int j = 0; j < N; ++j) x_label = j == place ? held[i][j] : x_label;
      }
      if (smoothing && lane + i * lanes < span.end) AddAbove(stat, raw[u][i], reference);
#pragma unroll
      for (int j = 0; j < N; ++j) held[i][j] = ExpDifference<T>(held[i][j], base);
      of_pack[i] = Fold(held[i], SumOf());
    }
    stat.sum = Fold(of_pack, SumOf());
    C single_power[2] = {0, 0};
    if (p.ragged) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const C x = ToCompute(Element(single[u][k], 0));
        if (smoothing && singles.column[k] >= 0) stat.above += x - reference;
        if (singles.column[k] >= 0 && singles.column[k] == label.at) own = true, x_label = x;
        single_power[k] = ExpDifference<T>(x, base);
        stat.sum += single_power[k];
      }
    }

    // The warp's share, all relative to one maximum, then the row's.
    stat.sum = ReduceLanes<kGroup ? kLanes : kWarp>(stat.sum, SumOf());
    if (smoothing) stat.above = ReduceLanes<kGroup ? kLanes : kWarp>(stat.above, SumOf());
    C rescale = 1;
    if constexpr (!kGroup) {
      const C of_warp = stat.max;
      constexpr int kMaxWarps = kLossBlockThreads / kWarp;
      stat = ReduceWarps<kMaxWarps>(stat, room, blockDim.x / kWarp, Stat::Identity(), [] { __syncthreads(); },
                                    [=](const Stat& s) { return s.template MergeLanes<kMaxWarps>(smoothing, false); });
#ifdef JAXKERN_HAS_BULK_COPY
      if constexpr (kCluster) {
        WaitCluster();
        if (threadIdx.x == 0) ArriveExpect(&mailed, blocks * sizeof(Stat));
        if (threadIdx.x < blocks) StoreRemote(&mail[rank], stat, &mailed, threadIdx.x);
        Wait(&mailed, 0);
        const uint32_t from = threadIdx.x % kMaxCluster;
        stat = (from < blocks ? mail[from] : Stat::Identity()).template MergeLanes<kMaxCluster>(smoothing, false);
      }
#endif
      // A warp of nothing but -inf holds zeros; its factor must not make them NaN.
      rescale = of_warp == -Infinity<C>() ? C(0) : Rescale<T>(of_warp, Base(stat.max));
    } else {
      __syncwarp();  // all of a row has been read before any of it is overwritten
    }

    if (!real) continue;
    if (label.at >= 0 ? own : lane == 0) WriteRow<T>(p, row, stat, label, x_label, reference);
    Slope<T> slope(p, label, span.head, Base(stat.max), stat.sum, C(p.width), weight);
    slope.factor *= rescale;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int pack = lane + i * lanes;
      if (pack >= span.end) break;
      slope.FromPowers(held[i], pack);
      StoreVector<T, N>(gradient + span.At(pack), Repack<T, N>(held[i]));
    }
    if (p.ragged) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int64_t column = singles.column[k];
        if (column >= 0) gradient[row * p.width + column] = slope.FromPower(single_power[k], column == label.at);
      }
    }
  }
}

}  // namespace jaxkern
