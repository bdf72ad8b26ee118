// Loss and gradient in one read, a row held in registers: the kernel of softmax (softmax_registers.cuh) with another
// end, which turns a row's exponentials into the gradient and adds the loss.
//
// Who holds the label's logit writes the row's loss: it need not be read again, and the gradient may overwrite
// the logits.
#pragma once

#include "../softmax/softmax_registers.cuh"
#include "cross_entropy_rows.cuh"

namespace jaxkern {

struct BothParams : SoftmaxParams {
  LossParams loss;
};

// As softmax up to the sum; what is held leaves as it is, and what it must be multiplied by is the Final's inverse.
template <class T> struct BothForward : Forward<T, false> {
  using C = Compute<T>;
  template <int kPacks, int N, bool = false> struct Tile : Forward<T, false>::template Tile<kPacks, N> {
    template <class Final> __device__ __forceinline__ void Get(int i, const Final&, C (&out)[N]) const {
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = this->held[i][j];
    }
  };
};

template <class T, bool kRagged> struct BothRow : SoftmaxRow<BothForward<T>, kVector<T>, false, int, kRagged> {
  using Op = BothForward<T>;
  using C = Compute<T>;
  using Base = SoftmaxRow<Op, kVector<T>, false, int, kRagged>;
  using Params = BothParams;
  using Base::span;
  static constexpr int N = kVector<T>;
  static constexpr int kGroupBlocks = 5;  // 102 registers a thread

  struct Place {  // of a pack, and what its row's threads have read of the label
    int pack;
    RawLabel label;
    C weight;
  };
  struct Raw {
    Pack<T, N> data[1];
    Place mask;
  };

  const LossParams& p;
  int64_t row;
  C reference = 0, x_label = 0;
  typename LossStat<T>::S above = 0;
  bool own = false;
  Slope<T> slope;

  __device__ __forceinline__ BothRow(const BothParams& params, int64_t at) : Base(params, at), p(params.loss), row(at) {
    if (p.Smoothing() && Real()) reference = ReferenceOf(this->input[0][row * p.width]);
  }
  __device__ __forceinline__ bool Real() const { return row < p.rows; }

  template <int kPacks> __device__ __forceinline__ void LoadAll(Raw (&raw)[kPacks], int first, int step) const {
    Base::LoadAll(raw, first, step);
    Place place = {};
    if (Real()) place.label = LoadLabel(p, row), place.weight = static_cast<const C*>(p.weight)[row];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) raw[i].mask = {first + i * step, place.label, place.weight};
  }

  __device__ __forceinline__ Label LabelOf(const Place& place) const {
    return Real() ? Resolve(p, place.label) : Label{Label::kIgnored};
  }

  __device__ __forceinline__ void Values(const Raw& raw, C (&v)[1][N], int) {
    Base::Values({{raw.data[0]}, {}}, v);
    const int column = span.Column(raw.mask.pack);
    const Label label = LabelOf(raw.mask);
    const int place = static_cast<int>(label.at) - column;
    if (label.at >= 0 && place >= 0 && place < N) {
      own = true;
#pragma unroll
      for (int j = 0; j < N; ++j) x_label = j == place ? v[0][j] : x_label;
    }
    if (p.Smoothing()) {
      C d[N];
#pragma unroll
      for (int j = 0; j < N; ++j) d[j] = span.Has(column + j) ? v[0][j] - reference : C(0);
      above += Fold(d, SumOf());
    }
  }

  __device__ __forceinline__ void Settle(const Raw& raw, const typename Op::Stat& stat) {
    const Place& place = raw.mask;
    slope = Slope<T>(p, LabelOf(place), span.Column(0), ::jaxkern::Base(stat.max), stat.sum,
                     p.template Numbers<C>().width, place.weight);
  }
  __device__ __forceinline__ Pack<T, N> Result(C (&v)[N], const typename Op::Final& final, const Raw& raw, int) const {
    Slope<T> of_held = slope;
    of_held.factor = slope.rise * final.inverse;
    return of_held.FromPowers(v, raw.mask.pack);
  }

  // kLanes: of a group that has the row to itself, or kBlockLanes. By all of them.
  template <int kLanes>
  __device__ __forceinline__ void Close(const Raw& raw, const typename Op::Stat& stat, int lane) {
    const Place& place = raw.mask;
    LossStat<T> whole = {stat.max, 0, stat.sum, above};
    if (p.Smoothing()) {
      whole.above = ReduceLanes<kLanes == kBlockLanes ? kWarp : kLanes>(above, SumOf());
      if constexpr (kLanes == kBlockLanes) {
        constexpr int kMaxWarps = kBlockTierThreads / kWarp;
        using S = typename LossStat<T>::S;
        __shared__ S room[kMaxWarps];
        whole.above = ReduceWarps<kMaxWarps>(whole.above, room, blockDim.x / kWarp, S(0), [] { __syncthreads(); },
                                             [](S s) { return ReduceLanes<kMaxWarps>(s, SumOf()); });
      }
    }
    const Label label = LabelOf(place);
    if (Real() && (label.at >= 0 ? own : lane == 0)) WriteRow<T>(p, row, whole, label, x_label, reference);
  }
};

}  // namespace jaxkern
