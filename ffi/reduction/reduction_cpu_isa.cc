// The CPU kernels of the row reductions for one instruction set: JAXKERN_ISA, see common/simd.h.
//
// A strip is walked in steps, each a block of L lanes. What a lane of the block belongs to:
//
//     inner == 1    every lane to the same row; a step advances along the row
//     inner small   a strip is the contiguous [width, inner] of one outer index; a step takes the
//                   largest multiple of inner that fits the block, so that lane l always belongs to
//                   column l % inner. What lanes above that multiple find out is ignored.
//     inner large   every lane to a column of its own; a step advances by `inner`. The last strip of an
//                   outer index ends where the columns end, and so goes over some of them once more.
//
// A strip is reduced a chunk at a time; logsumexp reads a chunk twice, from the L1 cache the second time.
// Under a mask a chunk is first copied, with neutral elements in the place of those that take no part.
#include "reduction_cpu_isa.h"

#include "common/simd.h"

namespace jaxkern {
namespace JAXKERN_ISA {
namespace {

constexpr int kMaxK = 4;
constexpr int kChunkBytes = 16 * 1024;
constexpr double kInf = __builtin_inf();

enum Kind { kSum, kMax, kMin, kLogSumExp };

JAXKERN_INLINE int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
JAXKERN_INLINE int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }

// The larger, or smaller, of two; NaN if either is.
template <bool kLess>
struct Extreme {
  template <class V>
  JAXKERN_INLINE V operator()(V a, V b) const {
    return ((kLess ? a < b : a > b) | (a != a)) ? a : b;
  }
};

// --- Geometry, the same for all types ---

template <class T, int L, bool kRow>
struct Cut {
  static constexpr int64_t kChunkSteps = kChunkBytes / (L * sizeof(T));

  struct Strip {
    const T* x;
    int64_t steps;
    int64_t step;    // elements from one step to the next
    int64_t extent;  // packed: contiguous elements of the strip; else 0
    int lanes;       // that count
    int rows;        // results
    int skip;        // of these, the first that another strip delivers
    int64_t out;     // offset of the first result
    int64_t outer, first;
  };
  // A run of steps of a strip, or its masked copy.
  struct Run {
    const T* x;
    int64_t steps, step;
    int64_t extent;  // contiguous elements, or 0 where every step is a full one
  };

  static JAXKERN_INLINE bool Packed(const ReduceArgs& a) { return kRow || a.inner < L; }
  static JAXKERN_INLINE int64_t Tiles(const ReduceArgs& a) { return Packed(a) ? 1 : CeilDiv(a.inner, L); }
  static JAXKERN_INLINE int64_t Step(const ReduceArgs& a) {
    return kRow ? L : Packed(a) ? L / a.inner * a.inner : a.inner;
  }
  static JAXKERN_INLINE int64_t Steps(const ReduceArgs& a) {
    return Packed(a) ? CeilDiv(a.width * a.inner, Step(a)) : a.width;
  }

  static JAXKERN_INLINE Strip MakeStrip(const ReduceArgs& a, int64_t index) {
    Strip s;
    const int64_t tiles = Tiles(a);
    s.outer = kRow ? index : index / tiles;
    const int64_t wanted = (index - s.outer * tiles) * L;
    s.first = Packed(a) ? 0 : Min(wanted, a.inner - L);
    s.skip = int(wanted - s.first);
    s.x = static_cast<const T*>(a.x) + s.outer * a.width * a.inner + s.first;
    s.steps = Steps(a);
    s.step = Step(a);
    s.extent = Packed(a) ? a.width * a.inner : 0;
    s.lanes = Packed(a) ? int(s.step) : L;
    s.rows = kRow ? 1 : int(Min(a.inner, L));
    s.out = s.outer * a.inner + s.first;
    return s;
  }

  static JAXKERN_INLINE Run MakeRun(const Strip& s, int64_t begin, int64_t end) {
    Run r{s.x + begin * s.step, end - begin, s.step, 0};
    if (s.extent) r.extent = Min(s.extent - begin * s.step, (end - begin) * s.step + L - s.lanes);
    return r;
  }

  // The run with `neutral` for what takes no part, and counts[row] of what does.
  static JAXKERN_OUTLINE Run Masked(const ReduceArgs& a, const Strip& s, int64_t begin, int64_t end, T neutral,
                                    T* copy, int64_t* counts) {
    const BroadcastView& view = a.mask_view;
    const uint8_t* mask = a.mask + view.outer_map(s.outer);
    const Run run = MakeRun(s, begin, end);
    for (int r = 0; r < s.rows; ++r) counts[r] = 0;
    if (kRow) {
      const int64_t n = Min(run.extent, run.steps * L), first = begin * L;
      int64_t count = 0;
      if (view.axis_stride == 1) {
        for (int64_t i = 0; i < n; ++i) {
          copy[i] = mask[first + i] ? run.x[i] : neutral;
          count += mask[first + i] != 0;
        }
      } else {
        const bool in = mask[0];
        for (int64_t i = 0; i < n; ++i) copy[i] = in ? run.x[i] : neutral;
        count = in ? n : 0;
      }
      counts[0] = count;
      return {copy, run.steps, L, n};
    }
    int64_t at[L];
    for (int r = 0; r < s.rows; ++r) at[r] = view.inner_map(s.first + r);
    // Positions along the axis of a step, each with all of the strip's columns.
    const int64_t positions = s.extent ? s.step / a.inner : 1, from = begin * positions,
                  to = Min(a.width, end * positions);
    for (int64_t p = from; p < to; ++p) {
      const T* x = s.x + p * a.inner;
      const uint8_t* m = mask + p * view.axis_stride;
      T* out = copy + (p - from) * s.rows;
      for (int r = 0; r < s.rows; ++r) {
        const bool in = m[at[r]];
        out[r] = in ? x[r] : neutral;
        counts[r] += in;
      }
    }
    const int64_t step = positions * s.rows;
    return {copy, run.steps, step, s.extent ? (to - from) * s.rows : 0};
  }
};

// --- Floating-point types ---

// Statistics of the rows of a strip or group are arrays of doubles, one after the other:
//     extreme (logsumexp: the maximum), sum (of x, or of exp(x - maximum)), what rounding lost of it, count
template <Kind kKind, class T, int K, bool kRow>
struct FloatKernel {
  using C = Compute<T>;
  using V = Vec<C>;
  using D = Vec<double>;
  static constexpr int W = kLanes<C>, L = K * W;
  static constexpr int kGroup = kMaxK * kLanes<double>;         // rows at a time
  static constexpr int P = kRow ? kGroup : L;                   // length of those arrays
  static constexpr bool kExtreme = kKind == kMax || kKind == kMin;
  using Cutting = Cut<T, L, kRow>;
  using Strip = typename Cutting::Strip;
  using Run = typename Cutting::Run;
  static constexpr int64_t kChunkSteps = Cutting::kChunkSteps;
  using Better = Extreme<kKind == kMin>;

  static JAXKERN_INLINE C Neutral() { return kKind == kSum ? C(0) : kKind == kMin ? C(kInf) : C(-kInf); }
  static JAXKERN_INLINE T Narrowed(C value) {
    T lanes[W];
    Store(lanes, Splat(value));
    return lanes[0];
  }

  // f of every block of the run.
  template <class F>
  static JAXKERN_INLINE void ForSteps(const Run& run, F f) {
    const int64_t full = !run.extent ? run.steps : run.extent < L ? 0 : Min(run.steps, (run.extent - L) / run.step + 1);
    V v[K];
    const T* p = run.x;
    for (int64_t t = 0; t < full; ++t, p += run.step) {
      for (int k = 0; k < K; ++k) v[k] = Load(p + k * W);
      f(v);
    }
    for (int64_t t = full; t < run.steps; ++t, p += run.step) {
      const int64_t n = run.extent - t * run.step;
      for (int k = 0; k < K; ++k) {
        const int64_t left = n - k * W;
        v[k] = left >= W ? Load(p + k * W) : left > 0 ? LoadPart(p + k * W, int(left), Splat(Neutral())) : Splat(Neutral());
      }
      f(v);
    }
  }

  // The chunk's statistics into position `slot` of the arrays (columns: into all of them).
  static JAXKERN_OUTLINE void Reduce(const ReduceArgs& a, const Strip& s, int64_t begin, int64_t end, double* stats,
                                     int slot) {
    Run run;
    alignas(64) T copy[kChunkSteps * L];
    if (__builtin_expect(a.mask != nullptr, 0)) {
      int64_t counts[kRow ? 1 : L];
      run = Cutting::Masked(a, s, begin, end, Narrowed(Neutral()), copy, counts);
      for (int r = 0; r < s.rows; ++r) stats[3 * P + slot + r] = double(counts[r]);
    } else {
      run = Cutting::MakeRun(s, begin, end);
    }
    V reference[K];
    if constexpr (kKind != kSum) {
      V m[K];
      for (int k = 0; k < K; ++k) m[k] = Splat(Neutral());
      ForSteps(run, [&](const V(&v)[K]) {
        for (int k = 0; k < K; ++k) m[k] = Better()(v[k], m[k]);
      });
      const auto reference_of = [](C x) { return x == C(-kInf) ? C(0) : x; };
      if constexpr (kRow) {
        for (int k = 1; k < K; ++k) m[0] = Better()(m[k], m[0]);
        const C best = Fold<C, W>(m[0], Better());
        stats[slot] = best;
        for (int k = 0; k < K; ++k) reference[k] = Splat(reference_of(best));
      } else {
        alignas(64) C lanes[L];
        for (int k = 0; k < K; ++k) Store(lanes + k * W, m[k]);
        for (int l = s.rows; l < s.lanes; ++l) lanes[l % s.rows] = Better()(lanes[l], lanes[l % s.rows]);
        for (int r = 0; r < s.rows; ++r) {
          stats[r] = lanes[r];
          lanes[r] = reference_of(lanes[r]);
        }
        for (int l = s.rows; l < L; ++l) lanes[l] = lanes[l - s.rows];
        for (int k = 0; k < K; ++k) reference[k] = Load(lanes + k * W);
      }
    }
    if constexpr (!kExtreme) {
      Accumulator<C> sums[K];
      ForSteps(run, [&](const V(&v)[K]) {
        for (int k = 0; k < K; ++k) {
          if constexpr (kKind == kSum) sums[k].Add(v[k]);
          else sums[k].Add(Exp<C>(v[k] - reference[k]));
        }
      });
      if constexpr (kRow) {
        for (int k = 1; k < K; ++k) sums[0].Merge(sums[k]);
        const Sum<double> total = sums[0].Total();
        stats[P + slot] = total.sum;
        stats[2 * P + slot] = total.lost;
      } else {
        alignas(64) double sum[L], lost[L];
        for (int k = 0; k < K; ++k) sums[k].Store(sum + k * W, lost + k * W);
        for (int r = 0; r < s.rows; ++r) {
          Sum<double> total{sum[r], lost[r]};
          for (int l = r + s.rows; l < s.lanes; l += s.rows) total.Merge({sum[l], lost[l]});
          stats[P + r] = total.sum;
          stats[2 * P + r] = total.lost;
        }
      }
    }
  }

  // into := into and from. Positions beyond the rows hold whatever they hold.
  static JAXKERN_OUTLINE void Merge(double* into, const double* from) {
    for (int r = 0; r < P; r += kLanes<double>) {
      double *state = into + r, *sum = state + P, *lost = sum + P, *count = lost + P;
      const D other = Load(from + r), best = Better()(Load(state), other);
      if constexpr (!kExtreme) {
        Sum<D> x{Load(sum), Load(lost)}, y{Load(from + r + P), Load(from + r + 2 * P)};
        if constexpr (kKind == kLogSumExp) {
          const D reference = best == Splat(-kInf) ? D{} : best;
          const D f = Exp<double>(Load(state) - reference), h = Exp<double>(other - reference);
          x.sum *= f, x.lost *= f, y.sum *= h, y.lost *= h;
        }
        x.Merge(y);
        Store(sum, x.sum);
        Store(lost, x.lost);
      }
      Store(state, best);
      Store(count, Load(count) + Load(from + r + 3 * P));
      if constexpr (kRow) return;  // one row
    }
  }

  // Writes the results at positions [skip, rows) of the arrays.
  static JAXKERN_OUTLINE void Finish(const ReduceArgs& a, const double* stats, int skip, int rows, int64_t at) {
    using Narrow = VecN<C, kLanes<double>>;
    constexpr int M = kLanes<double>;
    alignas(64) C result[P < W ? W : P], totals[P < W ? W : P];
    const double width = double(a.width);
    const bool mean = a.op == ReduceOp::kMean;
    for (int r = 0; r < rows; r += M) {
      D y = Load(stats + r);
      if constexpr (!kExtreme) {
        const D sum = Load(stats + P + r);
        D lost = Load(stats + 2 * P + r);
        lost = lost == lost ? lost : D{};  // the sum is infinite or NaN
        const D total = sum + lost;
        if constexpr (kKind == kLogSumExp) {
          const auto finite = y - y == D{};
          const D sum_of_row = finite ? total : y < D{} ? D{} : y;
          const Narrow n = __builtin_convertvector(sum_of_row, Narrow);
          std::memcpy(totals + r, &n, sizeof n);
          y = finite ? y + Log(finite ? total : Splat(1.0)) : y;
        } else {
          y = total;
          if (mean) y /= a.mask ? Load(stats + 3 * P + r) : Splat(width);
        }
      }
      const Narrow v = __builtin_convertvector(y, Narrow);
      std::memcpy(result + r, &v, sizeof v);
    }
    if (kKind == kLogSumExp && a.largest) {
      StoreResults(static_cast<C*>(a.total) + at, totals, skip, rows);
      for (int r = skip; r < rows; ++r) static_cast<C*>(a.largest)[at + r] = C(stats[r]);
    }
    if (sizeof(T) == 2 && a.wide) StoreResults(static_cast<C*>(a.out) + at, result, skip, rows);
    else StoreResults(static_cast<T*>(a.out) + at, result, skip, rows);
  }

  template <class To>
  static JAXKERN_INLINE void StoreResults(To* out, const C* result, int skip, int rows) {
    for (int r = skip; r < rows; r += W) {
      alignas(64) C part[W] = {};
      const int n = int(Min(W, rows - r));
      for (int i = 0; i < n; ++i) part[i] = result[r + i];
      StorePart(out + r, n, Load(part));
    }
  }

  // --- The entry points of ReduceCpuPlan ---
  static void RunStrips(const ReduceArgs& a, int64_t first, int64_t last) {
    alignas(64) double total[4 * P] = {}, chunk[4 * P] = {};
    const int64_t steps = Cutting::Steps(a);
    if (kRow && steps <= kChunkSteps) {
      for (; first < last; first += kGroup) {
        const int count = int(Min(kGroup, last - first));
        for (int j = 0; j < count; ++j) Reduce(a, Cutting::MakeStrip(a, first + j), 0, steps, total, j);
        Finish(a, total, 0, count, first);
      }
      return;
    }
    for (; first < last; ++first) {
      const Strip s = Cutting::MakeStrip(a, first);
      for (int64_t t = 0; t < steps; t += kChunkSteps) {
        Reduce(a, s, t, Min(t + kChunkSteps, steps), t ? chunk : total, 0);
        if (t) Merge(total, chunk);
      }
      Finish(a, total, s.skip, s.rows, s.out);
    }
  }
  static void ReduceChunk(const ReduceArgs& a, int64_t strip, int64_t chunk, double* stats) {
    const Strip s = Cutting::MakeStrip(a, strip);
    Reduce(a, s, chunk * kChunkSteps, Min((chunk + 1) * kChunkSteps, s.steps), stats, 0);
  }
  static void FinishStrip(const ReduceArgs& a, int64_t strip, double* stats) {
    const Strip s = Cutting::MakeStrip(a, strip);
    for (int64_t c = 1; c < CeilDiv(s.steps, kChunkSteps); ++c) Merge(stats, stats + c * 4 * P);
    Finish(a, stats, s.skip, s.rows, s.out);
  }
  static ReduceCpuPlan Plan(const ReduceArgs& a) {
    return {a.outer * Cutting::Tiles(a), CeilDiv(Cutting::Steps(a), kChunkSteps), 4 * P, RunStrips, ReduceChunk, FinishStrip};
  }
};

// --- Integers: loops that the compiler turns into vectors by itself ---

template <Kind kKind, class T, bool kRow>
struct IntegerKernel {
  static constexpr int L = 64;  // results of a strip, at most; a row is L lanes of one result
  using Cutting = Cut<T, L, kRow>;
  using Strip = typename Cutting::Strip;
  using Run = typename Cutting::Run;
  static constexpr int64_t kChunkSteps = Cutting::kChunkSteps;
  static constexpr bool kSigned = T(-1) < T(0);
  static constexpr T kLeast = kSigned ? T(1ull << (8 * sizeof(T) - 1)) : T(0), kGreatest = T(~kLeast);
  // What is accumulated: sums in 64 bits, extremes as they are.
  template <bool, class A, class B>
  struct Pick {
    using type = A;
  };
  template <class A, class B>
  struct Pick<false, A, B> {
    using type = B;
  };
  using Acc = typename Pick<kKind == kSum, int64_t, T>::type;
  static constexpr int kSlots = kRow ? 1 : L;  // of the statistics of a chunk

  static JAXKERN_INLINE Acc Neutral() { return kKind == kSum ? Acc(0) : kKind == kMin ? Acc(kGreatest) : Acc(kLeast); }
  static JAXKERN_INLINE Acc Join(Acc a, Acc b) {
    // Sums wrap: -fwrapv.
    return kKind == kSum ? Acc(a + b) : kKind == kMin ? (b < a ? b : a) : (b > a ? b : a);
  }

  static JAXKERN_OUTLINE void Reduce(const ReduceArgs& a, const Strip& s, int64_t begin, int64_t end, double* stats) {
    alignas(64) T copy[kChunkSteps * L];
    Run run;
    if (a.mask) {
      int64_t counts[kRow ? 1 : L];
      run = Cutting::Masked(a, s, begin, end, T(Neutral()), copy, counts);
    } else {
      run = Cutting::MakeRun(s, begin, end);
    }
    Acc acc[kRow ? 1 : L];
    for (int r = 0; r < s.rows; ++r) acc[r] = Neutral();
    if constexpr (kRow) {
      Acc total = Neutral();
      const int64_t n = Min(run.extent, run.steps * L);
      for (int64_t i = 0; i < n; ++i) total = Join(total, Acc(run.x[i]));
      acc[0] = total;
    } else if (s.extent) {
      const int64_t positions = Min(run.extent, run.steps * run.step) / s.rows;
      for (int64_t p = 0; p < positions; ++p) {
        for (int r = 0; r < s.rows; ++r) acc[r] = Join(acc[r], Acc(run.x[p * s.rows + r]));
      }
    } else {
      for (int64_t t = 0; t < run.steps; ++t) {
        for (int l = 0; l < L; ++l) acc[l] = Join(acc[l], Acc(run.x[t * run.step + l]));
      }
    }
    for (int r = 0; r < s.rows; ++r) {
      const int64_t bits = int64_t(acc[r]);
      std::memcpy(stats + r, &bits, sizeof bits);
    }
  }
  static JAXKERN_INLINE Acc At(const double* stats) {
    int64_t bits;
    std::memcpy(&bits, stats, sizeof bits);
    return Acc(bits);
  }
  static JAXKERN_OUTLINE void Finish(const ReduceArgs& a, const Strip& s, const double* stats, int64_t chunks) {
    for (int r = s.skip; r < s.rows; ++r) {
      Acc total = At(stats + r);
      for (int64_t c = 1; c < chunks; ++c) total = Join(total, At(stats + c * kSlots + r));
      if (kKind != kSum) static_cast<T*>(a.out)[s.out + r] = T(total);
      else if (a.wide) static_cast<int64_t*>(a.out)[s.out + r] = int64_t(total);
      else static_cast<int32_t*>(a.out)[s.out + r] = int32_t(total);
    }
  }

  static void RunStrips(const ReduceArgs& a, int64_t first, int64_t last) {
    double stats[2 * kSlots];
    const int64_t steps = Cutting::Steps(a);
    for (; first < last; ++first) {
      const Strip s = Cutting::MakeStrip(a, first);
      for (int64_t t = 0; t < steps; t += kChunkSteps) {
        Reduce(a, s, t, Min(t + kChunkSteps, steps), t ? stats + kSlots : stats);
        if (!t) continue;
        for (int r = 0; r < s.rows; ++r) {
          const int64_t bits = int64_t(Join(At(stats + r), At(stats + kSlots + r)));
          std::memcpy(stats + r, &bits, sizeof bits);
        }
      }
      Finish(a, s, stats, 1);
    }
  }
  static void ReduceChunk(const ReduceArgs& a, int64_t strip, int64_t chunk, double* stats) {
    const Strip s = Cutting::MakeStrip(a, strip);
    Reduce(a, s, chunk * kChunkSteps, Min((chunk + 1) * kChunkSteps, s.steps), stats);
  }
  static void FinishStrip(const ReduceArgs& a, int64_t strip, double* stats) {
    const Strip s = Cutting::MakeStrip(a, strip);
    Finish(a, s, stats, CeilDiv(s.steps, kChunkSteps));
  }
  static ReduceCpuPlan Plan(const ReduceArgs& a) {
    return {a.outer * Cutting::Tiles(a), CeilDiv(Cutting::Steps(a), kChunkSteps), kSlots, RunStrips, ReduceChunk, FinishStrip};
  }
};

// --- From run-time values to template arguments ---

template <Kind kKind, class T>
ReduceCpuPlan PlanFloat(const ReduceArgs& a) {
  if (a.inner > 1) return FloatKernel<kKind, T, kMaxK, false>::Plan(a);
  // Short rows would leave most of a wide block empty.
  return a.width < 4 * kLanes<Compute<T>> ? FloatKernel<kKind, T, 1, true>::Plan(a) : FloatKernel<kKind, T, kMaxK, true>::Plan(a);
}

template <class T>
ReduceCpuPlan PlanFloats(const ReduceArgs& a) {
  switch (a.op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean: return PlanFloat<kSum, T>(a);
    case ReduceOp::kMax: return PlanFloat<kMax, T>(a);
    case ReduceOp::kMin: return PlanFloat<kMin, T>(a);
    case ReduceOp::kLogSumExp: return PlanFloat<kLogSumExp, T>(a);
  }
  return {};
}

template <Kind kKind, class T>
ReduceCpuPlan PlanInteger(const ReduceArgs& a) {
  return a.inner > 1 ? IntegerKernel<kKind, T, false>::Plan(a) : IntegerKernel<kKind, T, true>::Plan(a);
}

template <class T>
ReduceCpuPlan PlanIntegers(const ReduceArgs& a) {
  if (a.op == ReduceOp::kMax) return PlanInteger<kMax, T>(a);
  if (a.op == ReduceOp::kMin) return PlanInteger<kMin, T>(a);
  return PlanInteger<kSum, T>(a);
}

}  // namespace

ReduceCpuPlan PlanReduction(const ReduceArgs& a) {
  switch (a.type) {
    case ReduceType::kF16: return PlanFloats<Half>(a);
    case ReduceType::kBF16: return PlanFloats<BFloat>(a);
    case ReduceType::kF32: return PlanFloats<float>(a);
    case ReduceType::kF64: return PlanFloats<double>(a);
    case ReduceType::kS8: return PlanIntegers<int8_t>(a);
    case ReduceType::kS16: return PlanIntegers<int16_t>(a);
    case ReduceType::kS32: return PlanIntegers<int32_t>(a);
    case ReduceType::kS64: return PlanIntegers<int64_t>(a);
    case ReduceType::kU8: return PlanIntegers<uint8_t>(a);
    case ReduceType::kU16: return PlanIntegers<uint16_t>(a);
    case ReduceType::kU32: return PlanIntegers<uint32_t>(a);
    case ReduceType::kU64: return PlanIntegers<uint64_t>(a);
  }
  return {};
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
