// Loss and gradient in one read, with a row held in registers: SoftmaxRegisters (softmax/registers.cuh) with
// BothForward and BothRow, which convert the exponentials to the gradient and store the loss.
//
// Reads the logits, labels and weights; writes the loss and the gradient. Memory traffic: the logits are read once and
// the gradient is written once. The thread that holds the label's logit stores the row's loss, so the logit is not read
// again, and the gradient may overwrite the logits.
//
// Template parameters: T, the element type; kRagged, rows may begin or end within a pack.
#pragma once

#include "cross_entropy/ops.cuh"
#include "softmax/registers.cuh"

namespace jaxkern {

struct BothParams : SoftmaxParams {
  LossParams loss;
};
static_assert(sizeof(BothParams) == sizeof(SoftmaxParams) + sizeof(LossParams), "plan.py");

// Softmax up to the sum. Get returns the held exponentials; BothRow multiplies them by the Final's inverse.
template <class T> struct BothForward : Forward<T, false> {
  using C = Compute<T>;
  template <int kPacks, int N, bool = false> struct Tile : Forward<T, false>::template Tile<kPacks, N> {
    template <class Final> __device__ __forceinline__ void Get(int i, const Final&, C (&out)[N]) const {
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = this->held[i][j];
    }
  };
};

template <class T, bool kRagged> struct BothRow : SoftmaxRow<BothForward<T>, kVector<T>, int, kRagged> {
  using Op = BothForward<T>;
  using C = Compute<T>;
  using Base = SoftmaxRow<Op, kVector<T>, int, kRagged>;
  using Params = BothParams;
  using Base::span;
  static constexpr int N = kVector<T>;
  static constexpr int GroupBlocks(int) { return 8; }  // 64 registers per thread

  struct Place {  // label and weight of the row, as loaded
    RawLabel label;
    C weight;
  };
  struct Raw {
    Pack<T, N> data[1];
    Place mask;  // set in the first pack only
  };

  const LossParams& p;
  int64_t row;
  Label label = {Label::kIgnored};
  C reference = 0, x_label = 0;
  typename LossStat<T>::S above = 0;
  bool own = false;  // this thread holds the label's logit
  Slope<T> slope;

  __device__ __forceinline__ BothRow(const BothParams& params, int64_t at) : Base(params, at), p(params.loss), row(at) {
    if (p.Smoothing() && Real()) reference = ReferenceOf(this->input[0][row * p.width]);
  }
  __device__ __forceinline__ bool Real() const { return row < p.rows; }

  template <int kPacks> __device__ __forceinline__ void LoadAll(Raw (&raw)[kPacks], int first, int step) const {
    Base::LoadAll(raw, first, step);
    raw[0].mask = {};
    if (Real()) raw[0].mask = {LoadLabel(p, row), static_cast<const C*>(p.weight)[row]};
  }

  template <int kPacks> __device__ __forceinline__ void Begin(const Raw (&raw)[kPacks], int first, int step) {
    if (Real()) label = Resolve(p, raw[0].mask.label);
    const int place = static_cast<int>(label.at) - span.Column(0);
    const int pack = label.at >= 0 ? place / N : -1;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) own |= first + i * step == pack;
    if (own) {
      Pack<T, N> of_label = raw[0].data[0];
#pragma unroll
      for (int i = 1; i < kPacks; ++i) {
        if (first + i * step == pack) of_label = raw[i].data[0];
      }
#pragma unroll
      for (int j = 0; j < N; ++j) x_label = j == (place & (N - 1)) ? ToCompute(Element(of_label, j)) : x_label;
    }
    if (p.Smoothing()) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const int column = span.Column(first + i * step);
        C d[N];
        Unpack(raw[i].data[0], d);
#pragma unroll
        for (int j = 0; j < N; ++j) d[j] = span.Has(column + j) ? d[j] - reference : C(0);
        above += Fold(d, SumOf());
      }
    }
  }

  static __device__ __forceinline__ void Values(const Raw& raw, C (&v)[1][N], int) { Base::Values({{raw.data[0]}}, v); }

  __device__ __forceinline__ void Settle(const Raw& raw, const typename Op::Stat& stat) {
    slope = Slope<T>(p, label, span.Column(0), ::jaxkern::Base(stat.max), stat.sum, p.template Numbers<C>().width,
                     raw.mask.weight);
    if (own) slope.SettleHot(stat.sum);
  }
  __device__ __forceinline__ Pack<T, N> Result(C (&v)[N], const typename Op::Final& final, const Raw&, int) const {
    const C factor = slope.rise * final.inverse;
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = fma(v[j], factor, -slope.smooth);
    return Repack<T, N>(v);
  }
  // The thread that holds the label's element stores it again after its pack.
  template <int kPacks>
  __device__ __forceinline__ void StoreAll(T* out, Pack<T, N> (&pack)[kPacks], int first, int step) const {
    if (!slope.live) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        pack[i] = {};
        Forget(pack[i]);  // keeps this a branch, which few rows take
      }
    }
    Base::StoreAll(out, pack, first, step);
    if (own) out[row * p.width + label.at] = slope.FromPower(ExpDifference<T>(x_label, slope.base), true);
  }

  // All threads of the row must call it. kLanes: lanes of a row, or kBlockLanes.
  template <int kLanes> __device__ __forceinline__ void Close(const Raw&, const typename Op::Stat& stat, int lane) {
    LossStat<T> whole = {stat.max, 0, stat.sum, above};
    if (p.Smoothing()) {
      whole.above = ReduceLanes<kLanes == kBlockLanes ? kWarp : kLanes>(above, SumOf());
      if constexpr (kLanes == kBlockLanes) {
        constexpr int kMaxWarps = kBlockThreads / kWarp;
        using S = typename LossStat<T>::S;
        __shared__ S room[kMaxWarps];
        whole.above = ReduceWarps<kMaxWarps>(
            whole.above, room, blockDim.x / kWarp, S(0), [] { __syncthreads(); },
            [](S s) { return ReduceLanes<kMaxWarps>(s, SumOf()); });
      }
    }
    if (Real() && (label.at >= 0 ? own : lane == 0)) WriteRow<T>(p, row, whole, label, x_label, reference);
  }
};

}  // namespace jaxkern
