// The arithmetic of cross-entropy, shared by its kernels. Device functions only. Per row they read the label and the
// weight and write the loss and the residuals; the kernels read the logits and write the gradient.
//
// Over the middle dimension of logits [rows, width, inner], for the label y of each row:
//
//     lse       log(sum(exp(x)))
//     loss      lse - (1 - s) x[y] - s mean(x) + z lse^2          s: label_smoothing, z: z_loss
//     gradient  g (p (1 + 2 z lse) - s / count - (1 - s) [y])     p = exp(x - lse), g: the row's weight
//
// Sums and means are over the `count` elements whose mask is true. A masked element has gradient 0; if it is the label,
// the loss is infinite, the logarithm of 0. A row without participants, or whose logits are all -inf, has loss 0 and
// gradient 0. A label that equals `ignore` has loss 0 and gradient 0, whether it is a class or not. Any other label that is
// not a class has NaN for both. NaN and +inf in a row make both NaN. The residuals of a row are its largest logit and `total`, the sum of exp(x -
// largest). lse alone would be too inaccurate for the probabilities of large logits.
//
// `as_written` selects the special cases that JAX has in logsumexp(x) - x[y]:
//
//     all logits are -inf             loss and gradient are NaN
//     +inf, and no NaN, in the row    the loss is inf, or NaN if the label's logit is +inf; the gradient has NaN
//     the label is not a class        the loss is NaN; the gradient is the gradient of logsumexp(x)
//
//     Label      the class of a row, or the reason why it has no class
//     LossStat   statistics of a share of a row: largest logit, sum of exponentials, sums for smoothing
//     WriteRow   stores the loss and the residuals, from the LossStat of the whole row
//     Slope      maps a row's logits to their gradient
//
// Exponentials (common/exponential.cuh) are relative to the largest logit and take one ex2 each. Template parameter T:
// element type of the logits.
#pragma once

#include "common/async.cuh"
#include "common/broadcast.h"
#include "softmax/ops.cuh"

namespace jaxkern {

// In the order of _LABELS in jaxkern/_ops/cross_entropy/plan.py.
enum class LabelType : int32_t { kS8, kS16, kS32, kS64, kU8, kU16, kU32, kU64 };

// The options in the computing type C; converting them in each thread would take longer than using them.
template <class C> struct LossNumbers {
  C soft, hard, z_loss;  // soft: label_smoothing; hard: 1 - label_smoothing
  C width;
};

// Parameters of every kernel; plan.py writes this layout. Values per row are float, or double for double logits.
struct LossParams {
  const void* logits;
  void* gradient;      // may alias the logits
  const void* labels;  // [rows, inner], like all that follow
  const void* weight;
  void* loss;
  void* largest;
  void* total;
  void* count;  // null without a mask
  int64_t rows, width, inner;
  int parts;        // units of work per row
  bool ragged;      // some row does not begin and end at a 16-byte boundary
  bool exceeds_l2;  // see ReadPolicy
  bool has_ignore;
  bool as_written;
  LabelType label_type;
  int64_t ignore;  // bits of the label to ignore
  LossNumbers<float> single;
  LossNumbers<double> wide;
  void* partials;       // LossStats of parts, or null
  const uint8_t* mask;  // one byte per element, 1 = takes part; null: all do
  BroadcastView mask_view;

  __device__ __forceinline__ bool Smoothing() const { return single.soft != 0; }
  template <class C> __device__ __forceinline__ const LossNumbers<C>& Numbers() const {
    if constexpr (sizeof(C) == 8) return wide;
    else return single;
  }
};
static_assert(sizeof(LossParams) == 360, "plan.py");

template <class C> __device__ __forceinline__ C NaN() { return static_cast<C>(__int_as_float(0x7fffffff)); }

// ---- labels

struct Label {
  int64_t at;  // the class, or one of the constants below
  static constexpr int64_t kIgnored = -1, kBad = -2;
};

// A label as loaded. Resolve is the first use of the load.
struct RawLabel {
  int32_t low, high;  // high: for 64-bit labels only
};

__device__ __forceinline__ RawLabel LoadLabel(const LossParams& p, int64_t row) {
  RawLabel raw = {0, 0};
  switch (p.label_type) {
    case LabelType::kS8: raw.low = static_cast<const int8_t*>(p.labels)[row]; break;
    case LabelType::kS16: raw.low = static_cast<const int16_t*>(p.labels)[row]; break;
    case LabelType::kU8: raw.low = static_cast<const uint8_t*>(p.labels)[row]; break;
    case LabelType::kU16: raw.low = static_cast<const uint16_t*>(p.labels)[row]; break;
    case LabelType::kS32:
    case LabelType::kU32: raw.low = static_cast<const int32_t*>(p.labels)[row]; break;
    default: {
      const int2 both = static_cast<const int2*>(p.labels)[row];
      raw.low = both.x, raw.high = both.y;
    }
  }
  return raw;
}

__device__ __forceinline__ Label Resolve(const LossParams& p, RawLabel raw) {
  int64_t label = raw.low;
  if (p.label_type == LabelType::kU32) label = static_cast<uint32_t>(raw.low);
  if (p.label_type == LabelType::kS64 || p.label_type == LabelType::kU64) {
    label = static_cast<int64_t>(raw.high) << 32 | static_cast<uint32_t>(raw.low);
  }
  if (p.has_ignore && label == p.ignore) return {Label::kIgnored};
  // As unsigned numbers, negative labels exceed the width.
  return {static_cast<uint64_t>(label) < static_cast<uint64_t>(p.width) ? label : Label::kBad};
}
__device__ __forceinline__ Label ReadLabel(const LossParams& p, int64_t row) { return Resolve(p, LoadLabel(p, row)); }

// ---- a row's statistics

template <class T> struct LossStat {
  using C = Compute<T>;
  using S = Sum<T>;
  C max;
  int count;  // participants; only computed if there is a mask
  S sum;      // sum of e^(x - max)
  S above;    // for smoothing: sum of x - reference, where the reference is the row's first logit

  static __device__ __forceinline__ LossStat Identity() { return {-Infinity<C>(), 0, S(0), S(0)}; }

  static __device__ __forceinline__ LossStat Merge(const LossStat& a, const LossStat& b) {
    const C max = Max(a.max, b.max), base = Base(max);
    return {max, a.count + b.count, a.sum * Rescale<T>(a.max, base) + b.sum * Rescale<T>(b.max, base),
            a.above + b.above};
  }

  // Merges over aligned groups of kLanes lanes. Members that the options do not need are unchanged.
  template <int kLanes> __device__ __forceinline__ LossStat MergeLanes(bool smoothing, bool masked) const {
    LossStat s = *this;
    s.max = ReduceLanes<kLanes>(max, MaxOf());
    s.sum = ReduceLanes<kLanes>(sum * Rescale<T>(max, Base(s.max)), SumOf());
    if (smoothing) s.above = ReduceLanes<kLanes>(above, SumOf());
    if (masked) s.count = ReduceLanes<kLanes>(count, SumOf());
    return s;
  }
};
static_assert(sizeof(LossStat<double>) == 32 && sizeof(LossStat<float>) == 24 && sizeof(LossStat<__half>) == 16,
              "plan.py");

// The largest element of some packs; 16-bit elements are compared in pairs. NaN may be ignored here; the exponentials
// propagate it.
template <class T, int kPacks, int N>
__device__ __forceinline__ Compute<T> LargestOf(const Pack<T, N> (&packs)[kPacks]) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    Two<T> of_pack[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) of_pack[i] = LargestTwo<T, N>(packs[i]);
    return Largest<T>(Fold(of_pack, MaxOfTwo()));
  } else {
    Compute<T> of_pack[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      Compute<T> v[N];
      Unpack(packs[i], v);
      of_pack[i] = Fold(v, MaxOf());
    }
    return Fold(of_pack, MaxOf());
  }
}

// Adds packs. Elements that take no part are -inf.
template <class T, int kPacks, int N>
__device__ __forceinline__ void Accumulate(LossStat<T>& stat, const Pack<T, N> (&packs)[kPacks]) {
  using C = Compute<T>;
  const C max = Max(stat.max, LargestOf<T>(packs)), base = Base(max);
  C of_pack[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    C v[N];
    Unpack(packs[i], v);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = ExpDifference<T>(v[j], base);
    of_pack[i] = Fold(v, SumOf());
  }
  stat.sum = stat.sum * Rescale<T>(stat.max, base) + Fold(of_pack, SumOf());
  stat.max = max;
}

template <class T, int N>
__device__ __forceinline__ void AddAbove(LossStat<T>& stat, const Pack<T, N>& pack, Compute<T> reference) {
  Compute<T> v[N];
  Unpack(pack, v);
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] -= reference;
  stat.above += Fold(v, SumOf());
}

// Returns a finite number near a row's logits. Smoothing subtracts it before it sums them.
template <class T> __device__ __forceinline__ Compute<T> ReferenceOf(T first) {
  const Compute<T> x = ToCompute(first);
  return x - x == Compute<T>(0) ? x : Compute<T>(0);
}

// KeptTotal returns the residual `total`, sum(e^(x - base)), from the kernels' sum, whose terms have a common factor in
// 16 bit (see LogOfExcess); OwnTotal is the inverse. The total of a row with a single participant is exactly 1.
template <class T> __device__ __forceinline__ Compute<T> KeptTotal(Compute<T> base, Sum<T> sum) {
  if constexpr (sizeof(T) == 2) return WithoutExcess<T>(static_cast<float>(sum), base);
  else return static_cast<Compute<T>>(sum);
}
template <class T> __device__ __forceinline__ Compute<T> OwnTotal(Compute<T> base, Compute<T> kept) {
  if constexpr (sizeof(T) == 2) return kept * Exp2Approx(LogOfExcess<T>(base));
  else return kept;
}

// Returns log(sum(e^(x - base))).
template <class T> __device__ __forceinline__ Compute<T> LogTotal(Compute<T> base, Sum<T> sum) {
  using C = Compute<T>;
  const C total = KeptTotal<T>(base, sum);
  if constexpr (sizeof(T) == 8) return log(total);
  else if constexpr (sizeof(T) == 4) return logf(total) + static_cast<C>(sum - total) / total;
  else return logf(total);
}

// Stores the loss of a row and its residuals; called by one thread. x_label: the label's logit, -inf if masked; ignored
// if there is no label.
template <class T> __device__ __forceinline__ void WriteRow(const LossParams& p, int64_t row, const LossStat<T>& stat,
                                                            Label label, Compute<T> x_label, Compute<T> reference) {
  using C = Compute<T>;
  const LossNumbers<C>& numbers = p.template Numbers<C>();
  const C base = Base(stat.max), count = p.mask ? C(stat.count) : numbers.width;
  C loss = 0;
  if (label.at == Label::kBad) {
    loss = NaN<C>();
  } else if (p.as_written && stat.max == Infinity<C>()) {
    loss = stat.max - x_label;
  } else if (label.at != Label::kIgnored && (p.as_written || !(stat.sum == Sum<T>(0)))) {
    const C log_total = LogTotal<T>(base, stat.sum);
    loss = log_total;
    if (numbers.hard != 0) loss += numbers.hard * (base - x_label);
    if (numbers.soft != 0) loss += numbers.soft * ((base - reference) - static_cast<C>(stat.above / count));
    const C lse = base + log_total;
    if (numbers.z_loss != 0) loss += numbers.z_loss * lse * lse;
  }
  static_cast<C*>(p.loss)[row] = loss;
  static_cast<C*>(p.largest)[row] = base;
  // Beside +inf the sum is NaN, which debuggers of programs would report.
  static_cast<C*>(p.total)[row] = p.as_written && base == Infinity<C>() ? base : KeptTotal<T>(base, stat.sum);
  if (p.mask) static_cast<C*>(p.count)[row] = count;
}

// ---- the layout of a row

// A row as whole aligned packs, with fewer than N single elements before (head) and after (tail) them. The logits are
// aligned to 16 bytes. Each of `parts` parts has an equal share of the packs; the first one also has the single
// elements.
template <class T> struct LossRow {
  static constexpr int N = kVector<T>;
  int64_t body;  // offset of the first pack
  int head, tail;
  int begin, end;  // range of packs

  __device__ __forceinline__ LossRow(const LossParams& p, int64_t row, int part = 0, int parts = 1) {
    body = row * p.width;
    head = 0, tail = 0;
    int64_t packs = p.width / N;
    if (p.ragged) {
      const int gap = static_cast<int>(-body) & (N - 1);
      head = gap < p.width ? gap : static_cast<int>(p.width);
      packs = (p.width - head) / N;
      tail = static_cast<int>(p.width - head - packs * N);
      body += head;
    }
    begin = 0, end = static_cast<int>(packs);
    if (parts > 1) {
      const int each = ((end + parts - 1) / parts + kWarp - 1) / kWarp * kWarp;  // no part begins within a sector
      begin = min(end, each * part);
      end = min(end, begin + each);
      if (part > 0) tail = 0;
    }
    if (row >= p.rows) tail = 0, begin = end = 0;
  }
  __device__ __forceinline__ int64_t At(int pack) const { return body + int64_t{pack} * N; }
  __device__ __forceinline__ int64_t Column(int pack) const { return head + int64_t{pack} * N; }
};

// The single elements of a row: each of the first N threads has at most one of the head and one of the tail.
template <class T> struct LossSingles {
  int64_t column[2];  // -1: none

  __device__ __forceinline__ LossSingles(const LossParams& p, const LossRow<T>& span, int thread, bool any) {
    column[0] = any && thread < span.head ? thread : -1;
    column[1] = any && thread < span.tail ? p.width - span.tail + thread : -1;
  }
  __device__ __forceinline__ Pack<T, 1> Load(const T* row, int k) const {
    return Filled<T, 1>(column[k] >= 0 ? row[column[k]] : FromCompute<T>(-Infinity<Compute<T>>()));
  }
};

// ---- the gradient

template <class T> struct Slope {
  using C = Compute<T>;
  static constexpr int N = kVector<T>;
  C base;
  C rise;          // factor of the probabilities: weight * d(loss)/d(lse)
  C factor;        // factor of e^(x - base)
  C smooth, hot;   // subtracted from every participant; and from the label
  int label_pack;  // pack of the label; -1: none
  int label_place;
  uint32_t live;  // mask of the gradient's bits: 0 if the gradient is 0 for all logits

  Slope() = default;
  __device__ __forceinline__ Slope(const LossParams& p, Label label, int head, C largest, Sum<T> total, C count,
                                   C weight)
      : base(largest) {
    const int64_t offset = label.at - head;
    label_pack = label.at >= head ? static_cast<int>(offset / N) : -1;
    label_place = static_cast<int>(offset & (N - 1));
    const bool bad = label.at == Label::kBad, empty = total == Sum<T>(0);
    live = label.at == Label::kIgnored || (empty && !bad && !p.as_written) ? 0u : ~0u;
    const LossNumbers<C>& numbers = p.template Numbers<C>();
    smooth = 0;
    if (numbers.soft != 0) smooth = weight * numbers.soft / count;
    hot = weight * numbers.hard;
    rise = (p.as_written ? empty : bad) ? NaN<C>() : weight;
    if (numbers.z_loss != 0) rise *= 1 + 2 * numbers.z_loss * (largest + LogTotal<T>(largest, total));
    factor = rise / static_cast<C>(total);
  }

  // 16 bit: makes the label's gradient exact if its probability is exactly 1, so that a row of one class has gradient
  // 0. The power of the largest logit is not 1 (LogOfExcess), and its product with `factor` may round; `hot`
  // compensates both. Needed only by threads that subtract `hot`.
  __device__ __forceinline__ void SettleHot(Sum<T> total) {
    if constexpr (sizeof(T) == 2) {
      const C e = Exp2Approx(LogOfExcess<T>(base));
      if (e == total) hot += fma(e, factor, -smooth) - (rise - smooth);
    }
  }

  // Returns the gradient of a pack. pack: its number, or kNoLabel if another thread subtracts `hot`.
  static constexpr int kNoLabel = -2;
  __device__ __forceinline__ Pack<T, N> Gradient(const Pack<T, N>& x, int pack = kNoLabel) const {
    C v[N];
    Unpack(x, v);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = fma(ExpDifference<T>(v[j], base), factor, -smooth);
    if (pack == label_pack) {
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] -= j == label_place ? hot : C(0);
    }
    Pack<T, N> result = Repack<T, N>(v);
#pragma unroll
    for (int w = 0; w < Pack<T, N>::kWords; ++w) result.word[w] &= live;
    return result;
  }
  // 16 bit: e^(x - base) * factor as the single power 2^(x * log2(e) - offset), for rows without smoothing where moving
  // log2(factor) into the exponent costs at most 2^-19: this saves a multiplication per element.
  static constexpr bool kOnePower = sizeof(T) == 2;
  __device__ __forceinline__ bool OnePower(float* offset) const {
    *offset = __fmul_rn(base, kLog2E) - __log2f(factor);  // NaN unless the factor is positive
    return live && smooth == 0 && fabsf(*offset) < 64;
  }
  static __device__ __forceinline__ Pack<T, N> OfOnePower(const Pack<T, N>& x, float offset) {
    C v[N];
    Unpack(x, v);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = Exp2Approx(fmaf(v[j], kLog2E, -offset));
    return Repack<T, N>(v);
  }
  __device__ __forceinline__ T FromPower(C e, bool is_label) const {
    const C dx = fma(e, factor, -smooth) - (is_label ? hot : C(0));
    return FromCompute<T>(live ? dx : C(0));
  }
  __device__ __forceinline__ T Gradient(const Pack<T, 1>& x, bool is_label) const {
    return FromPower(ExpDifference<T>(ToCompute(Element(x, 0)), base), is_label);
  }
};

}  // namespace jaxkern
