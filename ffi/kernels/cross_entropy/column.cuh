// Cross-entropy over an axis that is not the last one, without a transposition.
//
//     LossColumn        reads logits and labels; writes the loss and the residuals
//     GradientColumn    reads logits, labels, weights and residuals; writes the gradient
//
// Memory traffic: the logits are read once by each kernel, and the gradient is written once. N = 1 supports every
// problem at any alignment; N > 1 requires arrays aligned to 16 bytes and inner a multiple of N.
//
// A block is 32 lanes across the inner dimension, each with N adjacent columns, and 8 warps that take turns along the
// axis. The LossStats of the warps are merged through shared memory.
//
// Template parameters: T, the element type; N, columns of a thread; kMasked, p.mask is applied.
#pragma once

#include "cross_entropy/ops.cuh"

namespace jaxkern {

constexpr int kLossColumnWarps = 8;
constexpr int kLossColumnUnroll = 4;

// The rows of the problem (columns in memory) of a thread.
template <class T, int N> struct LossColumns {
  int64_t outer, inner;  // of the first row
  bool active;
  int64_t first;  // offset of the first element

  __device__ __forceinline__ LossColumns(const LossParams& p) {
    const int64_t tiles = (p.inner + kWarp * N - 1) / (kWarp * N);
    outer = blockIdx.x / tiles;
    inner = (blockIdx.x - outer * tiles) * (kWarp * N) + threadIdx.x % kWarp * N;
    active = inner < p.inner;
    first = outer * p.width * p.inner + inner;
  }
  __device__ __forceinline__ int64_t Row(const LossParams& p, int j) const { return outer * p.inner + inner + j; }
  __device__ __forceinline__ bool Kept(const LossParams& p, int64_t a, int j) const {
    return p.mask[p.mask_view.Offset(outer, a, inner + j)];
  }
};

template <class T, int N, bool kMasked> __global__ void __launch_bounds__(kWarp* kLossColumnWarps)
    LossColumn(const __grid_constant__ LossParams p) {
  using C = Compute<T>;
  using Stat = LossStat<T>;
  const LossColumns<T, N> own(p);
  const T* const logits = static_cast<const T*>(p.logits) + own.first;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  const bool smoothing = p.Smoothing();

  Stat stat[N];
  C reference[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    stat[j] = Stat::Identity();
    reference[j] = smoothing && own.active ? ReferenceOf(logits[j]) : C(0);
  }
  if (own.active) {
    for (int64_t a0 = warp; a0 < p.width; a0 += kLossColumnUnroll * kLossColumnWarps) {
      Pack<T, N> raw[kLossColumnUnroll];
#pragma unroll
      for (int u = 0; u < kLossColumnUnroll; ++u) {
        const int64_t a = a0 + u * kLossColumnWarps;
        raw[u] = Filled<T, N>(FromCompute<T>(-Infinity<C>()));
        if (a < p.width) raw[u] = LoadVector<T, N>(logits + a * p.inner, policy);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        Pack<T, 1> column[kLossColumnUnroll];
#pragma unroll
        for (int u = 0; u < kLossColumnUnroll; ++u) {
          const int64_t a = a0 + u * kLossColumnWarps;
          bool in = a < p.width;
          if constexpr (kMasked) in = in && own.Kept(p, a, j);
          column[u] = Filled<T, 1>(in ? Element(raw[u], j) : FromCompute<T>(-Infinity<C>()));
          if constexpr (kMasked) stat[j].count += in;
          if (smoothing && in) stat[j].above += ToCompute(Element(column[u], 0)) - reference[j];
        }
        Accumulate<T>(stat[j], column);
      }
    }
  }

  __shared__ Stat room[kLossColumnWarps][kWarp];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (j > 0) __syncthreads();
    room[warp][lane] = stat[j];
    __syncthreads();
    if (warp != j % kLossColumnWarps || !own.active) continue;
    Stat all = room[0][lane];
    for (int w = 1; w < kLossColumnWarps; ++w) all = Stat::Merge(all, room[w][lane]);
    const Label label = ReadLabel(p, own.Row(p, j));
    C x_label = 0;
    if (label.at >= 0) {
      x_label = ToCompute(logits[label.at * p.inner + j]);
      if (kMasked && !own.Kept(p, label.at, j)) x_label = -Infinity<C>();
    }
    WriteRow<T>(p, own.Row(p, j), all, label, x_label, reference[j]);
  }
}

// gridDim.y blocks share the axis.
template <class T, int N, bool kMasked>
__global__ void __launch_bounds__(kWarp* kLossColumnWarps, sizeof(T) == 2 ? 3 : 1)
    GradientColumn(const __grid_constant__ LossParams p) {
  using C = Compute<T>;
  const LossColumns<T, N> own(p);
  if (!own.active) return;
  const T* const logits = static_cast<const T*>(p.logits) + own.first;
  T* const gradient = static_cast<T*>(p.gradient) + own.first;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  // The members of Slope that differ among the columns; an array of Slopes would spill.
  C base[N], factor[N], smooth[N], hot[N];
  int64_t label[N];
  bool nothing[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int64_t row = own.Row(p, j);
    const Label own_label = ReadLabel(p, row);
    const C largest = static_cast<const C*>(p.largest)[row];
    const Sum<T> total = OwnTotal<T>(largest, static_cast<const C*>(p.total)[row]);
    const C count = kMasked ? static_cast<const C*>(p.count)[row] : p.template Numbers<C>().width;
    Slope<T> s(p, own_label, 0, largest, total, count, static_cast<const C*>(p.weight)[row]);
    s.SettleHot(total);
    base[j] = s.base, factor[j] = s.factor, smooth[j] = s.smooth, hot[j] = s.hot, nothing[j] = !s.live;
    label[j] = own_label.at;
  }
  const int64_t step = int64_t{kLossColumnWarps} * gridDim.y;
  for (int64_t a = int64_t{blockIdx.y} * kLossColumnWarps + threadIdx.x / kWarp; a < p.width; a += step) {
    C v[N];
    Unpack(LoadVector<T, N>(logits + a * p.inner, policy), v);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      v[j] = fma(ExpDifference<T>(v[j], base[j]), factor[j], -smooth[j]) - (label[j] == a ? hot[j] : C(0));
      if (nothing[j] || (kMasked && !own.Kept(p, a, j))) v[j] = 0;
    }
    StoreVector<T, N>(gradient + a * p.inner, Repack<T, N>(v));
  }
}

}  // namespace jaxkern
