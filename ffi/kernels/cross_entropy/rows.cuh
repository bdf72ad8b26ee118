// Cross-entropy over the last axis, with the logits read as a stream.
//
//     LossRows        reads logits and labels; writes the loss and the residuals, or a LossStat per part of a row
//     LossMerge       merges the LossStats of the parts of each row in order
//     GradientRows    reads logits, labels, weights and residuals; writes the gradient
//
// Memory traffic: LossRows and GradientRows read the logits once, and GradientRows writes the gradient once. Logits and
// gradient are aligned to 16 bytes.
//
// A unit of work, a row or a part of one, belongs to a group of 8, 16 or 32 lanes, or to a block (kWholeBlock). The
// next batch of packs is loaded while the current one is processed. The groups of the loss are persistent, and the next
// batch may belong to the next unit, so that loads do not stop at the end of a row. GradientRows writes as much as it
// reads and is faster with one unit per group.
//
// Template parameters: T, the element type; kLanes, lanes of a unit, or kWholeBlock; kMasked, p.mask is applied.
#pragma once

#include "cross_entropy/ops.cuh"

namespace jaxkern {

constexpr int kWholeBlock = 0;
constexpr int kLossUnroll = 4;  // packs per lane and batch
constexpr int kLossGroupThreads = 128;
constexpr int kLossStreamThreads = 256;  // maximum for a block per unit
// Blocks of groups per multiprocessor, which limits a thread to 80 or 128 registers. plan.py sizes grids by it.
template <class T, bool kMasked> constexpr int kLossGroupBlocks = kMasked || sizeof(T) == 8 ? 4 : 6;

// Merges one LossStat per warp over the block; every thread gets the result. Callers alternate between two `room`s, so
// that one barrier suffices.
template <class T> __device__ __forceinline__ LossStat<T> ReduceLossBlock(const LossParams& p, const LossStat<T>& stat,
                                                                          LossStat<T>* room) {
  constexpr int kMaxWarps = kLossStreamThreads / kWarp;
  const bool smoothing = p.Smoothing(), masked = p.mask != nullptr;
  return ReduceWarps<kMaxWarps>(
      stat.template MergeLanes<kWarp>(smoothing, masked), room, blockDim.x / kWarp, LossStat<T>::Identity(),
      [] { __syncthreads(); },
      [=](const LossStat<T>& s) { return s.template MergeLanes<kMaxWarps>(smoothing, masked); });
}

// A unit of work: a row, or a part of one.
template <class T> struct LossUnit {
  static constexpr int N = kVector<T>;
  int64_t row;
  bool first_part;
  LossRow<T> span;

  __device__ __forceinline__ LossUnit(const LossParams& p, int64_t unit)
      : LossUnit(p, p.parts == 1 ? unit : unit / p.parts, unit) {}
  __device__ __forceinline__ LossUnit(const LossParams& p, int64_t of_row, int64_t unit)
      : row(of_row),
        first_part(unit == of_row * p.parts),
        span(p, of_row, static_cast<int>(unit - of_row * p.parts), p.parts) {}

  // Loads packs from + lane, from + lane + lanes, ....
  __device__ __forceinline__ void Load(const LossParams& p, int from, int lane, int lanes, ReadPolicy policy,
                                       Pack<T, N> (&batch)[kLossUnroll]) const {
    const T* const at = static_cast<const T*>(p.logits) + span.At(from + lane);
    const int left = span.end - (from + lane);
#pragma unroll
    for (int i = 0; i < kLossUnroll; ++i) {
      batch[i] = Filled<T, N>(FromCompute<T>(-Infinity<Compute<T>>()));
      if (i * lanes < left) batch[i] = LoadVector<T, N>(at + i * lanes * N, policy);
    }
  }
};

template <int N> struct KeptElements {
  bool of[N];
};

// Loads the mask of a pack: which of its N elements take part.
template <int N>
__device__ __forceinline__ KeptElements<N> LoadKept(const LossParams& p, const uint8_t* mask_row, int64_t column) {
  KeptElements<N> kept;
  const uint8_t* const at = mask_row + column * p.mask_view.axis_stride;
  if (N == 8 && p.mask_view.axis_stride == 1 && reinterpret_cast<uintptr_t>(at) % 8 == 0) {
    const uint2 bytes = *reinterpret_cast<const uint2*>(at);
#pragma unroll
    for (int j = 0; j < N; ++j) kept.of[j] = ((j < 4 ? bytes.x : bytes.y) >> (j % 4 * 8)) & 0xff;
  } else if (N == 4 && p.mask_view.axis_stride == 1 && reinterpret_cast<uintptr_t>(at) % 4 == 0) {
    const uint32_t bytes = *reinterpret_cast<const uint32_t*>(at);
#pragma unroll
    for (int j = 0; j < N; ++j) kept.of[j] = (bytes >> (j % 4 * 8)) & 0xff;
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) kept.of[j] = at[j * p.mask_view.axis_stride];
  }
  return kept;
}

template <class T, int kLanes, bool kMasked>
__global__ void __launch_bounds__(kLanes ? kLossGroupThreads : kLossStreamThreads,
                                  kLossGroupBlocks<T, kMasked> / (kLanes ? 1 : 2))
    LossRows(const __grid_constant__ LossParams p) {
  using C = Compute<T>;
  using Stat = LossStat<T>;
  constexpr int N = kVector<T>;
  constexpr bool kGroup = kLanes != kWholeBlock;
  __shared__ Stat room[2][kLossStreamThreads / kWarp];

  const int lanes = kGroup ? kLanes : blockDim.x;
  const int lane = threadIdx.x % lanes;
  const int groups = kGroup ? kLossGroupThreads / lanes : 1;
  const int64_t units = p.rows * p.parts, step = int64_t{gridDim.x} * groups;
  const int batch_packs = lanes * kLossUnroll;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  const bool smoothing = p.Smoothing();
  const T* const logits = static_cast<const T*>(p.logits);

  int64_t at = int64_t{blockIdx.x} * groups + threadIdx.x / lanes;
  // All lanes of a warp loop until the warp's first unit is past the end, so that shuffles are converged.
  const int64_t behind = kGroup ? threadIdx.x % kWarp / lanes : 0;
  LossUnit<T> unit(p, at);
  Pack<T, N> next[kLossUnroll];
  unit.Load(p, unit.span.begin, lane, lanes, policy, next);
  RawLabel next_label = {};
  if (lane == 0 && at < units) next_label = LoadLabel(p, unit.row);
  for (int turn = 0; at - behind < units; ++turn) {
    const bool real = at < units;
    const int64_t row = real ? unit.row : 0;
    const T* const first = logits + row * p.width;
    Label label = {Label::kIgnored};
    T label_logit = {};
    if (lane == 0 && real) {
      label = Resolve(p, next_label);
      if (label.at >= 0) label_logit = first[label.at];
    }
    C reference = 0;
    if (smoothing) reference = ReferenceOf(*first);
    const uint8_t* mask_row = nullptr;
    if constexpr (kMasked) mask_row = p.mask + p.mask_view.outer_map(row);

    Stat stat = Stat::Identity();
    // Groups with fewer batches than others of their warp continue with empty batches.
    int from = unit.span.begin;
    LossUnit<T> following = unit;
    do {
      Pack<T, N> batch[kLossUnroll];
#pragma unroll
      for (int i = 0; i < kLossUnroll; ++i) batch[i] = next[i];
      const bool last = from + batch_packs >= unit.span.end;
      if (last) following = LossUnit<T>(p, at + step);
      following.Load(p, last ? following.span.begin : from + batch_packs, lane, lanes, policy, next);
      if (last && lane == 0 && at + step < units) next_label = LoadLabel(p, following.row);
      if (kMasked || smoothing) {
#pragma unroll
        for (int i = 0; i < kLossUnroll; ++i) {
          const int pack = from + lane + i * lanes;
          if (pack < unit.span.end) {
            if constexpr (kMasked) {
              const KeptElements<N> kept = LoadKept<N>(p, mask_row, unit.span.Column(pack));
#pragma unroll
              for (int j = 0; j < N; ++j) {
                stat.count += kept.of[j];
                if (kept.of[j]) stat.above += smoothing ? ToCompute(Element(batch[i], j)) - reference : C(0);
                else SetElement(batch[i], j, FromCompute<T>(-Infinity<C>()));
              }
            } else {
              AddAbove(stat, batch[i], reference);
            }
          }
        }
      }
      Accumulate<T>(stat, batch);
      from += batch_packs;
    } while (from < unit.span.end);

    if (p.ragged) {
      LossSingles<T> singles(p, unit.span, lane, real && unit.first_part);
      Pack<T, 1> single[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if constexpr (kMasked) {
          if (singles.column[k] >= 0 && !mask_row[singles.column[k] * p.mask_view.axis_stride]) singles.column[k] = -1;
        }
        const bool in = singles.column[k] >= 0;
        single[k] = singles.Load(first, k);
        if constexpr (kMasked) stat.count += in;
        if (smoothing && in) stat.above += ToCompute(Element(single[k], 0)) - reference;
      }
      Accumulate<T>(stat, single);
    }

    C x_label = 0;
    if (lane == 0 && label.at >= 0) {
      x_label = ToCompute(label_logit);
      if (kMasked && !mask_row[label.at * p.mask_view.axis_stride]) x_label = -Infinity<C>();
    }
    if constexpr (kGroup) stat = stat.template MergeLanes<kGroup ? kLanes : 1>(smoothing, kMasked);
    else stat = ReduceLossBlock<T>(p, stat, room[turn % 2]);
    if (lane == 0 && real) {
      if (p.partials) static_cast<Stat*>(p.partials)[at] = stat;
      else WriteRow<T>(p, row, stat, label, x_label, reference);
    }
    at += step;
    unit = following;
  }
}

// One warp per row merges the LossStats of its parts.
template <class T> __global__ void __launch_bounds__(kLossGroupThreads)
    LossMerge(const __grid_constant__ LossParams p) {
  using C = Compute<T>;
  using Stat = LossStat<T>;
  const int lane = threadIdx.x % kWarp;
  const int64_t row = int64_t{blockIdx.x} * (kLossGroupThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= p.rows) return;
  const Stat* const partials = static_cast<const Stat*>(p.partials) + row * p.parts;
  Stat stat = Stat::Identity();
  for (int i = lane; i < p.parts; i += kWarp) stat = Stat::Merge(stat, partials[i]);
  stat = stat.template MergeLanes<kWarp>(p.Smoothing(), p.mask != nullptr);
  if (lane != 0) return;
  const T* const first = static_cast<const T*>(p.logits) + row * p.width;
  const Label label = ReadLabel(p, row);
  C x_label = 0;
  if (label.at >= 0) {
    x_label = ToCompute(first[label.at]);
    if (p.mask && !p.mask[p.mask_view.Offset(row, label.at, 0)]) x_label = -Infinity<C>();
  }
  WriteRow<T>(p, row, stat, label, x_label, ReferenceOf(*first));
}

// The values of a row that its gradient depends on, as loaded.
template <class C, bool kMasked> struct RowNumbers {
  RawLabel label;
  C largest, total, weight, count;

  __device__ __forceinline__ RowNumbers(const LossParams& p, int64_t row)
      : label(LoadLabel(p, row)),
        largest(static_cast<const C*>(p.largest)[row]),
        total(static_cast<const C*>(p.total)[row]),
        weight(static_cast<const C*>(p.weight)[row]),
        count(kMasked ? static_cast<const C*>(p.count)[row] : p.template Numbers<C>().width) {}
};

template <class T, int kLanes, bool kMasked>
__global__ void __launch_bounds__(kLossGroupThreads, kLossGroupBlocks<T, kMasked>)
    GradientRows(const __grid_constant__ LossParams p) {
  using C = Compute<T>;
  constexpr int N = kVector<T>, kGroups = kLossGroupThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t at = int64_t{blockIdx.x} * kGroups + threadIdx.x / kLanes;
  if (at >= p.rows * p.parts) return;
  constexpr int kBatchPacks = kLanes * kLossUnroll;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  T* const gradient = static_cast<T*>(p.gradient);

  const LossUnit<T> unit(p, at);
  const int64_t row = unit.row;
  Pack<T, N> next[kLossUnroll];
  unit.Load(p, unit.span.begin, lane, kLanes, policy, next);
  const RowNumbers<C, kMasked> numbers(p, row);
  const Label label = Resolve(p, numbers.label);
  const Sum<T> total = OwnTotal<T>(numbers.largest, numbers.total);
  Slope<T> slope(p, label, unit.span.head, numbers.largest, total, numbers.count, numbers.weight);
  slope.SettleHot(total);
  const uint8_t* mask_row = nullptr;
  if constexpr (kMasked) mask_row = p.mask + p.mask_view.outer_map(row);
  for (int from = unit.span.begin; from < unit.span.end; from += kBatchPacks) {
    Pack<T, N> batch[kLossUnroll];
#pragma unroll
    for (int i = 0; i < kLossUnroll; ++i) batch[i] = next[i];
    unit.Load(p, from + kBatchPacks, lane, kLanes, policy, next);
#pragma unroll
    for (int i = 0; i < kLossUnroll; ++i) {
      const int pack = from + lane + i * kLanes;
      if (pack >= unit.span.end) break;
      Pack<T, N> result = slope.Gradient(batch[i], pack);
      if constexpr (kMasked) {
        const KeptElements<N> kept = LoadKept<N>(p, mask_row, unit.span.Column(pack));
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (!kept.of[j]) SetElement(result, j, FromCompute<T>(C(0)));
        }
      }
      StoreVector<T, N>(gradient + unit.span.At(pack), result);
    }
  }
  if (p.ragged) {
    const LossSingles<T> singles(p, unit.span, lane, unit.first_part);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int64_t column = singles.column[k];
      if (column < 0) continue;
      T result = slope.Gradient(singles.Load(static_cast<const T*>(p.logits) + row * p.width, k), column == label.at);
      if (kMasked && !mask_row[column * p.mask_view.axis_stride]) result = FromCompute<T>(C(0));
      gradient[row * p.width + column] = result;
    }
  }
}

}  // namespace jaxkern
