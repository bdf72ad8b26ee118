// Loss and gradient in one read, a row held in registers.
//
// A row belongs to a group of kLanes lanes or to a block (kWholeBlock), and a thread holds kPacks of its packs,
// as exponentials relative to its warp's maximum. Groups and blocks live as long as the kernel and load their
// next row as soon as this one has been unpacked. Who holds the label's logit writes the row's loss: it need not
// be read again, and the gradient may overwrite the logits.
#pragma once

#include "cross_entropy_rows.cuh"

namespace jaxkern {

// Threads a multiprocessor, as whole blocks, which caps the registers of each.
constexpr int kBothThreads = 640;

// A row as it was loaded.
template <class T, int kPacks> struct HeldRow {
  static constexpr int N = kVector<T>;
  Pack<T, N> packs[kPacks];
  Pack<T, 1> single[2];
  RawLabel label;
  Compute<T> weight;

  __device__ __forceinline__ void Load(const LossParams& p, int64_t row, int lane, int lanes, ReadPolicy policy) {
    const LossRow<T> span(p, row);
    const T* const logits = static_cast<const T*>(p.logits);
    const T* const at = logits + span.At(lane);
    const T nothing = FromCompute<T>(-Infinity<Compute<T>>());
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      packs[i] = Filled<T, N>(nothing);
      if (lane + i * lanes < span.end) packs[i] = LoadVector<T, N>(at + i * lanes * N, policy);
    }
    single[0] = single[1] = Filled<T, 1>(nothing);
    if (row >= p.rows) return;
    if (p.ragged) {
      const LossSingles<T> singles(p, span, lane, true);
#pragma unroll
      for (int k = 0; k < 2; ++k) single[k] = singles.Load(logits + row * p.width, k);
    }
    label = LoadLabel(p, row);
    weight = static_cast<const Compute<T>*>(p.weight)[row];
  }
};

template <class T, int kLanes, int kPacks, int kThreads>
__global__ void __launch_bounds__(kThreads, (kPacks > 4 ? 512 : kBothThreads) / kThreads)
BothRegisters(const __grid_constant__ LossParams p) {
  using C = Compute<T>;
  using Stat = LossStat<T>;
  constexpr int N = kVector<T>;
  constexpr bool kGroup = kLanes != kWholeBlock;
  constexpr int kMaxWarps = kLossBlockThreads / kWarp;
  __shared__ Stat rooms[2][kMaxWarps];

  const int lanes = kGroup ? kLanes : static_cast<int>(blockDim.x);
  const int lane = threadIdx.x % lanes;
  constexpr int kGroups = kGroup ? kThreads / (kGroup ? kLanes : 1) : 1;
  const int64_t step = int64_t{gridDim.x} * kGroups;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  T* const gradient = static_cast<T*>(p.gradient);
  const bool smoothing = p.Smoothing();

  int64_t row = int64_t{blockIdx.x} * kGroups + threadIdx.x / lanes;
  // The lanes of a warp stay together: its first row decides.
  const int64_t behind = kGroup ? threadIdx.x % kWarp / lanes : 0;
  HeldRow<T, kPacks> raw;
  raw.Load(p, row, lane, lanes, policy);
  for (int turn = 0; row - behind < p.rows; ++turn, row += step) {
    const bool real = row < p.rows;
    const LossRow<T> span(p, row);
    const LossSingles<T> singles(p, span, lane, real);
    const Label label = real ? Resolve(p, raw.label) : Label{Label::kIgnored};
    const C weight = raw.weight;
    C reference = 0;
    if (smoothing && real) reference = ReferenceOf(static_cast<const T*>(p.logits)[row * p.width]);

    Stat stat = Stat::Identity();
    C held[kPacks][N], single[2] = {ToCompute(Element(raw.single[0], 0)), ToCompute(Element(raw.single[1], 0))};
    stat.max = LargestOf<T>(raw.packs);
    if (p.ragged) stat.max = Max(stat.max, Max(single[0], single[1]));
    // Whether the label is among this thread's, and which.
    const int offset = static_cast<int>(label.at) - span.head, place = offset & (N - 1);
    const int label_pack = label.at >= span.head && offset / N < span.end ? offset / N : -1;
    C x_label = 0;
    bool own = false;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (smoothing && lane + i * lanes < span.end) AddAbove(stat, raw.packs[i], reference);
      Unpack(raw.packs[i], held[i]);
      if (lane + i * lanes == label_pack) {
        own = true;
#pragma unroll
        for (int j = 0; j < N; ++j) x_label = j == place ? held[i][j] : x_label;
      }
    }
    raw.Load(p, row + step, lane, lanes, policy);

    stat.max = ReduceLanes<kGroup ? kLanes : kWarp>(stat.max, MaxOf());
    const C base = Base(stat.max);
    C of_pack[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) held[i][j] = ExpDifference<T>(held[i][j], base);
      of_pack[i] = Fold(held[i], SumOf());
    }
    stat.sum = Fold(of_pack, SumOf());
    if (p.ragged) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (smoothing && singles.column[k] >= 0) stat.above += single[k] - reference;
        if (singles.column[k] >= 0 && singles.column[k] == label.at) own = true, x_label = single[k];
        single[k] = ExpDifference<T>(single[k], base);
        stat.sum += single[k];
      }
    }

    // The warp's share, all relative to one maximum, then the row's.
    stat.sum = ReduceLanes<kGroup ? kLanes : kWarp>(stat.sum, SumOf());
    if (smoothing) stat.above = ReduceLanes<kGroup ? kLanes : kWarp>(stat.above, SumOf());
    C rescale = 1;
    if constexpr (!kGroup) {
      const C of_warp = stat.max;
      stat = ReduceWarps<kMaxWarps>(stat, rooms[turn % 2], blockDim.x / kWarp, Stat::Identity(), [] { __syncthreads(); },
                                    [=](const Stat& s) { return s.template MergeLanes<kMaxWarps>(smoothing, false); });
      // A warp of nothing but -inf holds zeros; its factor must not make them NaN.
      rescale = of_warp == -Infinity<C>() ? C(0) : Rescale<T>(of_warp, Base(stat.max));
    }

    Slope<T> slope(p, label, span.head, Base(stat.max), stat.sum, p.template Numbers<C>().width, weight);
    slope.factor *= rescale;
    T* const out = gradient + span.At(lane);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int pack = lane + i * lanes;
      if (pack >= span.end) break;
      StoreVector<T, N>(out + i * lanes * N, slope.FromPowers(held[i], pack));
    }
    if (!real) continue;
    if (p.ragged) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int64_t column = singles.column[k];
        if (column >= 0) gradient[row * p.width + column] = slope.FromPower(single[k], column == label.at);
      }
    }
    if (label.at >= 0 ? own : lane == 0) WriteRow<T>(p, row, stat, label, x_label, reference);
  }
}

}  // namespace jaxkern
