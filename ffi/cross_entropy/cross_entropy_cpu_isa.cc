// The CPU kernels of cross-entropy for one instruction set: JAXKERN_ISA, see common/simd.h.
//
// A strip is walked in steps of a register. Along a row (kRow) every lane belongs to the same row, elsewhere
// each lane to a row of its own, one of the neighbours along the inner dimension. The statistics of a strip are
// taken chunk by chunk, each read from the L1 cache the second time: its maximum, then the sum of
// exp(x - maximum); the gradient reads the strip once more. float sums run in double, double ones as a pair.
#include "cross_entropy_cpu_isa.h"

#include "common/simd.h"

namespace jaxkern {
namespace JAXKERN_ISA {
namespace {

constexpr double kInf = __builtin_inf(), kNaN = __builtin_nan("");
constexpr int kChunkBytes = 16 * 1024;

JAXKERN_INLINE int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
JAXKERN_INLINE int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kIgnored = -1, kBad = -2;

// The class of a row, or why it has none.
JAXKERN_INLINE int64_t ReadLabel(const CrossEntropyArgs& a, int64_t row) {
  int64_t label = 0;
  switch (a.label_type) {
    case LabelType::kS8: label = static_cast<const int8_t*>(a.labels)[row]; break;
    case LabelType::kS16: label = static_cast<const int16_t*>(a.labels)[row]; break;
    case LabelType::kS32: label = static_cast<const int32_t*>(a.labels)[row]; break;
    case LabelType::kU8: label = static_cast<const uint8_t*>(a.labels)[row]; break;
    case LabelType::kU16: label = static_cast<const uint16_t*>(a.labels)[row]; break;
    case LabelType::kU32: label = static_cast<const uint32_t*>(a.labels)[row]; break;
    default: label = static_cast<const int64_t*>(a.labels)[row]; break;
  }
  if (a.has_ignore && label == a.ignore) return kIgnored;
  // Negative numbers, and those of 64 unsigned bits, are large here.
  return uint64_t(label) < uint64_t(a.width) ? label : kBad;
}

// What is known of a row, in double.
struct RowStat {
  double max = -kInf, sum = 0, lost = 0, above = 0;  // above: of x - reference, for smoothing
  int64_t count = 0;                                 // of participants
};

template <class T, bool kRow>
struct Kernel {
  using C = Compute<T>;
  using V = Vec<C>;
  using I = IntVec<C>;
  static constexpr int W = kLanes<C>;
  static constexpr int64_t kChunkSteps = kChunkBytes / (W * int(sizeof(T)));
  static constexpr int kUnroll = kRow ? 4 : 1;

  struct Strip {
    int64_t outer, inner;  // of the first row
    int rows;              // 1, or the lanes that are rows
    int64_t base;          // offset of the first element
    int64_t steps, step;   // of registers, and elements from one to the next
    int64_t first_row;

    JAXKERN_INLINE int Valid(const CrossEntropyArgs& a, int64_t t) const { return kRow ? int(Min(W, a.width - t * W)) : rows; }
  };

  static JAXKERN_INLINE Strip MakeStrip(const CrossEntropyArgs& a, int64_t index) {
    Strip s;
    const int64_t tiles = kRow ? 1 : CeilDiv(a.inner, W);
    s.outer = index / tiles;
    s.inner = (index - s.outer * tiles) * W;
    s.rows = kRow ? 1 : int(Min(W, a.inner - s.inner));
    s.base = s.outer * a.width * a.inner + s.inner;
    s.steps = kRow ? CeilDiv(a.width, W) : a.width;
    s.step = kRow ? W : a.inner;
    s.first_row = s.outer * a.inner + s.inner;
    return s;
  }

  static JAXKERN_INLINE V LoadStep(const CrossEntropyArgs& a, const Strip& s, int64_t t, V fill) {
    const T* p = static_cast<const T*>(a.logits) + s.base + t * s.step;
    const int n = s.Valid(a, t);
    return __builtin_expect(n == W, 1) ? Load(p) : LoadPart(p, n, fill);
  }
  // -1 where an element takes part.
  static JAXKERN_INLINE I Participants(const CrossEntropyArgs& a, const Strip& s, int64_t t) {
    const int n = s.Valid(a, t);
    uint8_t bytes[W] = {};
    if (!a.mask) {
      for (int l = 0; l < n; ++l) bytes[l] = 1;
    } else if (kRow) {
      const uint8_t* p = a.mask + a.mask_view.outer_map(s.outer) + t * W * a.mask_view.axis_stride;
      if (n == W && a.mask_view.axis_stride == 1) return LoadMask<C>(p);
      for (int l = 0; l < n; ++l) bytes[l] = p[l * a.mask_view.axis_stride];
    } else {
      for (int l = 0; l < n; ++l) bytes[l] = a.mask[a.mask_view.Offset(s.outer, t, s.inner + l)];
    }
    return LoadMask<C>(bytes);
  }
  static JAXKERN_INLINE V LoadKept(const CrossEntropyArgs& a, const Strip& s, int64_t t) {
    const V nothing = Splat(C(-kInf)), x = LoadStep(a, s, t, nothing);
    return a.mask ? (Participants(a, s, t) ? x : nothing) : x;
  }

  // Merges what one chunk found into a row.
  static JAXKERN_INLINE void Merge(RowStat* into, double max, double sum, double lost) {
    if (max == -kInf && sum == 0) return;  // nothing; NaN has a sum
    const double reference = max > into->max ? max : into->max;
    const Vec<double> f = Exp<double>(Splat(into->max - reference)), g = Exp<double>(Splat(max - reference));
    Sum<double> x{into->sum * f[0], into->lost * f[0]};
    x.Merge({sum * g[0], lost * g[0]});
    into->max = reference, into->sum = x.sum, into->lost = x.lost;
  }

  static JAXKERN_INLINE void ReduceChunk(const CrossEntropyArgs& a, const Strip& s, int64_t begin, int64_t end, V reference,
                                         RowStat* stats) {
    V max[kUnroll];
    for (int u = 0; u < kUnroll; ++u) max[u] = Splat(C(-kInf));
    for (int64_t t = begin; t < end; t += kUnroll) {
      for (int u = 0; u < kUnroll; ++u) {
        if (t + u < end) max[u] = Max(LoadKept(a, s, t + u), max[u]);
      }
    }
    const auto larger = [](auto p, auto q) { return p > q ? p : q; };
    V shift = max[0];
    if constexpr (kRow) {
      for (int u = 1; u < kUnroll; ++u) shift = Max(max[u], shift);
      shift = Splat(Fold<C, W>(shift, larger));
    }
    const V base = shift == Splat(C(-kInf)) ? V{} : shift;
    Accumulator<C> sums[kUnroll];
    for (int64_t t = begin; t < end; t += kUnroll) {
      for (int u = 0; u < kUnroll; ++u) {
        if (t + u < end) sums[u].Add(Exp<C>(LoadKept(a, s, t + u) - base));
      }
    }
    Accumulator<C> above;
    alignas(64) int64_t count[W] = {};
    if (a.smoothing != 0 || a.mask) {
      for (int64_t t = begin; t < end; ++t) {
        const I in = Participants(a, s, t);
        above.Add(in ? LoadStep(a, s, t, V{}) - reference : V{});
        for (int l = 0; l < W; ++l) count[l] -= in[l];
      }
    }
    if constexpr (kRow) {
      for (int u = 1; u < kUnroll; ++u) sums[0].Merge(sums[u]);
      const Sum<double> total = sums[0].Total(), aside = above.Total();
      Merge(stats, shift[0], total.sum, total.lost);
      stats->above += aside.lost == aside.lost ? aside.sum + aside.lost : aside.sum;  // an infinite sum has lost NaN
      for (int l = 0; l < W; ++l) stats->count += count[l];
    } else {
      alignas(64) double sum[W], lost[W], aside[W], aside_lost[W];
      sums[0].Store(sum, lost);
      above.Store(aside, aside_lost);
      for (int r = 0; r < s.rows; ++r) {
        Merge(stats + r, shift[r], sum[r], lost[r]);
        stats[r].above += aside_lost[r] == aside_lost[r] ? aside[r] + aside_lost[r] : aside[r];
        stats[r].count += count[r];
      }
    }
  }

  static JAXKERN_INLINE double At(const CrossEntropyArgs& a, const Strip& s, int r, int64_t t) {
    const T* p = static_cast<const T*>(a.logits) + s.base + (kRow ? t : t * a.inner + r);
    return double(LoadPart(p, 1, V{})[0]);
  }
  static JAXKERN_INLINE C* Number(void* array, int64_t row) { return static_cast<C*>(array) + row; }
  static JAXKERN_INLINE double LogOf(double x) { return Log(Splat(x))[0]; }

  static JAXKERN_INLINE void WriteRow(const CrossEntropyArgs& a, const Strip& s, int r, const RowStat& stat, double reference) {
    const int64_t row = s.first_row + r, label = ReadLabel(a, row);
    const double total = stat.sum + stat.lost, max = stat.max == -kInf ? 0 : stat.max;
    const double count = a.mask ? double(stat.count) : double(a.width);
    double loss = 0;
    if (label == kBad) {
      loss = kNaN;
    } else if (label != kIgnored && total != 0) {
      const double log_total = LogOf(total), lse = max + log_total;
      loss = log_total;
      if (a.smoothing != 1) {
        const bool in = !a.mask || a.mask[a.mask_view.Offset(s.outer, label, s.inner + r)];
        loss += (1 - a.smoothing) * (in ? max - At(a, s, r, label) : kInf);
      }
      if (a.smoothing != 0) loss += a.smoothing * ((max - reference) - stat.above / count);
      if (a.z_loss != 0) loss += a.z_loss * lse * lse;
    }
    *Number(a.loss, row) = C(loss);
    *Number(a.largest, row) = C(max);
    *Number(a.total, row) = C(total);
    if (a.mask) *Number(a.count, row) = C(count);
  }

  // What turns a row's logits into their gradient; see Slope in cross_entropy_ops.cuh.
  struct Slopes {
    alignas(64) C base[W], factor[W], smooth[W];
    C hot[W];
    int64_t label[W];
    bool nothing[W];
  };
  static JAXKERN_INLINE void MakeSlope(const CrossEntropyArgs& a, const Strip& s, int r, Slopes* to) {
    const int64_t row = s.first_row + r, label = ReadLabel(a, row);
    const double base = *Number(a.largest, row), total = *Number(a.total, row);
    const double count = a.mask ? double(*Number(a.count, row)) : double(a.width);
    const double weight = static_cast<const C*>(a.weight)[row];
    double rise = weight;
    if (a.z_loss != 0) rise *= 1 + 2 * a.z_loss * (base + LogOf(total));
    to->base[r] = C(base);
    to->factor[r] = label == kBad ? C(kNaN) : C(rise / total);
    to->smooth[r] = C(weight * a.smoothing / count);
    to->hot[r] = C(weight * (1 - a.smoothing));
    to->label[r] = label;
    to->nothing[r] = label == kIgnored || (total == 0 && label != kBad);
  }

  static JAXKERN_INLINE void WriteGradient(const CrossEntropyArgs& a, const Strip& s) {
    Slopes slopes;
    for (int r = 0; r < s.rows; ++r) MakeSlope(a, s, r, &slopes);
    for (int r = s.rows; r < W; ++r) {
      slopes.base[r] = slopes.base[0], slopes.factor[r] = slopes.factor[0], slopes.smooth[r] = slopes.smooth[0];
      slopes.nothing[r] = slopes.nothing[0];
    }
    const V base = Load(slopes.base), factor = Load(slopes.factor), smooth = Load(slopes.smooth);
    uint8_t live_bytes[W];
    for (int r = 0; r < W; ++r) live_bytes[r] = !slopes.nothing[kRow ? 0 : r];
    const I live = LoadMask<C>(live_bytes);
    T* const out = static_cast<T*>(a.gradient) + s.base;
    for (int64_t t = 0; t < s.steps; ++t) {
      const int n = s.Valid(a, t);
      V dx = Fma(Exp<C>(LoadStep(a, s, t, V{}) - base), factor, -smooth);
      if (kRow) {
        const int64_t l = slopes.label[0] - t * W;
        if (l >= 0 && l < W && slopes.label[0] >= 0) dx[int(l)] -= slopes.hot[0];
      } else {
        for (int r = 0; r < n; ++r) {
          if (slopes.label[r] == t) dx[r] -= slopes.hot[r];
        }
      }
      dx = live ? dx : V{};
      if (a.mask) dx = Participants(a, s, t) ? dx : V{};
      if (n == W) Store(out + t * s.step, dx);
      else StorePart(out + t * s.step, n, dx);
    }
  }

  static void Run(const CrossEntropyArgs& a, int64_t first, int64_t last) {
    for (; first < last; ++first) {
      const Strip s = MakeStrip(a, first);
      if (a.pass != LossPass::kGradient) {
        RowStat stats[kRow ? 1 : W];
        alignas(64) C reference[W] = {};
        for (int r = 0; r < W; ++r) {
          const double x = At(a, s, kRow || r >= s.rows ? 0 : r, 0);
          reference[r] = x - x == 0 ? C(x) : C(0);
        }
        const V from = Load(reference);
        for (int64_t t = 0; t < s.steps; t += kChunkSteps) ReduceChunk(a, s, t, Min(t + kChunkSteps, s.steps), from, stats);
        for (int r = 0; r < s.rows; ++r) WriteRow(a, s, r, stats[r], reference[r]);
      }
      if (a.pass != LossPass::kLoss) WriteGradient(a, s);
    }
  }

  static CrossEntropyCpuPlan Plan(const CrossEntropyArgs& a) { return {kRow ? a.outer : a.outer * CeilDiv(a.inner, W), Run}; }
};

template <class T>
CrossEntropyCpuPlan PlanShape(const CrossEntropyArgs& a) {
  return a.inner == 1 ? Kernel<T, true>::Plan(a) : Kernel<T, false>::Plan(a);
}

}  // namespace

CrossEntropyCpuPlan PlanCrossEntropy(const CrossEntropyArgs& a) {
  switch (a.dtype) {
    case DType::kF16: return PlanShape<Half>(a);
    case DType::kBF16: return PlanShape<BFloat>(a);
    case DType::kF32: return PlanShape<float>(a);
    case DType::kF64: return PlanShape<double>(a);
  }
  return {};
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
