// The CPU kernels of the softmax family for one instruction set: JAXKERN_ISA, see common/simd.h.
//
// A strip is walked in steps, each a block of K registers. What a lane of the block belongs to:
//
//     inner == 1    every lane to the same row; a step advances along the row
//     inner small   a strip is the contiguous [width, inner] of one outer index; a step takes the
//                   largest multiple of inner that fits the block, so that lane l always belongs to
//                   row l % inner. Lanes above that multiple compute what the next step does again:
//                   their statistics are ignored and the next step overwrites what they store.
//     inner large   every lane to a row of its own; a step advances by `inner`
//
// so only the end of a chunk, where lanes of the same row are merged, knows which it was. Nothing is
// transposed and a row is never copied:
//
//     forward   a chunk at a time: its maximum, then the sum of exp(x - maximum), from the L1 cache
//               the second time; chunks merge as (maximum, sum) pairs; then y from x again
//     gradient  the sum of y * g (log_softmax: of g), then dx; of log_softmax, but in 16 bit, also all that
//               the forward pass does
//
// A strip of one chunk keeps exp(x - maximum) in the L1 cache from the sum to the output, except where
// that is log_softmax's and needs none. A longer one evaluates it twice, which costs less than keeping it
// would: a 16-bit output could not hold it, and memory is slower than the polynomial.
#include "softmax_cpu_isa.h"

#include "common/simd.h"
#include "softmax_cpu_narrow.h"
#include "softmax_cpu_quotient.h"

namespace jaxkern {
namespace JAXKERN_ISA {
namespace {

constexpr int kMaxK = 4;
constexpr int kChunkBytes = 16 * 1024;
// Short rows are computed in groups of about this size: less, and rows wait for each other; more,
// and reading and writing memory alternate in bursts, which is slower.
constexpr int kGroupBytes = 4 * 1024;
constexpr double kInf = __builtin_inf();

JAXKERN_INLINE int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
JAXKERN_INLINE int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }


// What a row's output is computed with, an array over lanes each.
template <class C>
struct alignas(64) Factors {
  C p[kMaxK * kLanes<C>], q[kMaxK * kLanes<C>], r[kMaxK * kLanes<C>];
};

template <bool kLog, bool kBackward, class T, int K, bool kRow, bool kMask>
struct Kernel {
  using C = Compute<T>;
  using V = Vec<C>;
  using D = Vec<double>;
  using FactorsOfRows = Factors<C>;
  static constexpr int W = kLanes<C>;  // of a register
  static constexpr int L = K * W;      // of a block
  static constexpr int64_t kChunkSteps = kChunkBytes / (L * sizeof(T));
  static constexpr bool kPowers = !kBackward || (kLog && sizeof(T) > 2);  // exp(x - maximum) is summed
  // Strips of one chunk keep exp(x - maximum) from the sum to the output: in two parts, or rounded.
  static constexpr bool kParts = !kBackward && !kLog, kKeeps = kParts || (kPowers && kBackward);
  static constexpr int kKept = kParts ? 2 * L : L;  // a step
  static constexpr int kStats = kPowers && kBackward ? 5 : 3;
  // The gradient of log_softmax has two sums. That of exponentials, which cannot cancel, is added to precisely only
  // every few steps.
  static constexpr int kFew = sizeof(C) == 4 ? 8 : 1;
  static constexpr int kGroup = kRow ? kMaxK * kLanes<double> : 1;  // strips at a time, at most

  // Statistics of the rows of a strip, a chunk or a group, [kStats][padded rows]:
  //     forward                maximum, sum of exp(x - maximum), what rounding lost of that sum
  //     gradient from x        the same, the sum of g, what it lost
  //     gradient from y        1 if the row is alive (has a participant that is not -inf), the sum, what it lost
  static JAXKERN_INLINE int PaddedRows(const SoftmaxArgs& a) {
    return kRow ? kGroup : int(CeilDiv(Rows(a), kLanes<double>)) * kLanes<double>;
  }

  // --- Geometry ---
  struct Strip {
    int64_t base;       // offset of the first element
    int64_t steps;
    int64_t step;       // elements from one step to the next
    int64_t extent;     // packed: contiguous elements of the strip; else 0
    int64_t readable;   // elements from the strip's first to the end of the array
    int lanes;          // that hold elements of the strip
    int rows;
    // Masks only: a lane's byte for step t is at mask[t * mask_step + lane_offset[lane]].
    const uint8_t* mask;
    int64_t mask_step;
    enum { kContiguous, kSame, kAnywhere } mask_lanes;
    int64_t lane_offset[kMask && !kRow ? L : 1];

    // Lanes of a step that may be read and written.
    JAXKERN_INLINE int Valid(int64_t t) const { return kRow || extent ? int(Min(L, extent - t * step)) : lanes; }
  };

  static JAXKERN_INLINE bool Packed(const SoftmaxArgs& a) { return kRow || a.inner <= L; }
  static JAXKERN_INLINE int64_t Tiles(const SoftmaxArgs& a) {
    return Packed(a) ? 1 : CeilDiv(a.inner, L);
  }
  static JAXKERN_INLINE int Rows(const SoftmaxArgs& a) { return kRow ? 1 : Packed(a) ? int(a.inner) : L; }
  static JAXKERN_INLINE int64_t PackedStep(const SoftmaxArgs& a) { return kRow ? L : L / a.inner * a.inner; }
  static JAXKERN_INLINE int64_t Steps(const SoftmaxArgs& a) {
    return kRow ? CeilDiv(a.width, L) : Packed(a) ? CeilDiv(a.width * a.inner, PackedStep(a)) : a.width;
  }

  static JAXKERN_INLINE Strip MakeStrip(const SoftmaxArgs& a, int64_t index) {
    Strip s;
    const int64_t tiles = Tiles(a), outer = kRow ? index : index / tiles, first = (index - outer * tiles) * L;
    s.base = outer * a.width * a.inner + first;
    s.steps = Steps(a);
    s.readable = a.outer * a.width * a.inner - s.base;
    if (Packed(a)) {
      s.step = PackedStep(a);
      s.extent = a.width * a.inner;
      s.lanes = int(s.step);
      s.rows = Rows(a);
    } else {
      s.step = a.inner;
      s.extent = 0;
      s.lanes = s.rows = int(Min(L, a.inner - first));
    }
    if constexpr (kMask) {
      const BroadcastView& view = a.mask_view;
      s.mask = a.mask + view.outer_map(outer) + (kRow ? 0 : view.inner_map(first));
      const int64_t per_step = Packed(a) ? s.step / a.inner : 1;  // positions along the axis
      s.mask_step = per_step * view.axis_stride;
      bool contiguous = true, same = kRow ? view.axis_stride == 0 : s.mask_step == 0 || per_step == 1;
      for (int l = 0; !kRow && l < L; ++l) {
        const int along = l / s.rows, row = l - along * s.rows;
        s.lane_offset[l] = along * view.axis_stride + view.inner_map(first + row) - view.inner_map(first);
        contiguous &= s.lane_offset[l] == l;
        same &= s.lane_offset[l] == 0;
      }
      s.mask_lanes = same ? Strip::kSame : contiguous ? Strip::kContiguous : Strip::kAnywhere;
    }
    return s;
  }

  // --- Blocks ---
  struct Block {
    V v[K];
  };
  // What x or y of an element that takes no part is.
  static JAXKERN_INLINE V Nothing() { return kBackward && !kLog ? V{} : Splat(C(-kInf)); }

  static JAXKERN_INLINE Block LoadBlock(const Strip& s, const T* x, int64_t t, int n, V fill) {
    Block b;
    const T* p = x + t * s.step;
    if (__builtin_expect(n == L, 1)) {
      for (int k = 0; k < K; ++k) b.v[k] = Load(p + k * W);
    } else {
      const int64_t readable = s.readable - t * s.step;
      for (int k = 0; k < K; ++k) {
        const int left = n - k * W;
        if (left <= 0) {
          b.v[k] = fill;
        } else if (!kPartIsFast && k * W + W <= readable) {
          b.v[k] = Below<C>(left, Load(p + k * W), fill);
        } else {
          b.v[k] = LoadPart(p + k * W, left, fill);
        }
      }
    }
    return b;
  }
  static JAXKERN_INLINE void StoreBlock(const Strip& s, T* out, int64_t t, int n, const Block& b, int64_t writable) {
    T* p = out + t * s.step;
    if (__builtin_expect(n == L, 1)) {
      for (int k = 0; k < K; ++k) Store(p + k * W, b.v[k]);
    } else {
      for (int k = 0; k < K; ++k) {
        const int left = n - k * W;
        if (left >= W || (!kPartIsFast && left > 0 && t * s.step + k * W + W <= writable)) {
          Store(p + k * W, b.v[k]);
        } else if (left > 0) {
          StorePart(p + k * W, left, b.v[k]);
        }
      }
    }
  }
  struct MaskBlock {
    IntVec<C> v[K];
  };
  static JAXKERN_INLINE MaskBlock LoadMaskBlock(const Strip& s, int64_t t, int n) {
    MaskBlock m;
    const uint8_t* p = s.mask + t * s.mask_step;
    if (s.mask_lanes == Strip::kContiguous) {
      for (int k = 0; k < K; ++k) {
        const int left = n - k * W;
        m.v[k] = left >= W ? LoadMask<C>(p + k * W) : left > 0 ? LoadMask<C>(p + k * W, left) : IntVec<C>{};
      }
    } else if (s.mask_lanes == Strip::kSame) {
      const IntVec<C> all = IntVec<C>{} - typename IntOf<C>::type(*p != 0);
      for (int k = 0; k < K; ++k) m.v[k] = all;
    } else {
      uint8_t bytes[L] = {};
      for (int l = 0; l < n; ++l) bytes[l] = p[s.lane_offset[l]];
      for (int k = 0; k < K; ++k) m.v[k] = LoadMask<C>(bytes + k * W);
    }
    return m;
  }
  static JAXKERN_INLINE void Apply(const Strip& s, int64_t t, int n, Block* b, V otherwise) {
    if constexpr (kMask) {
      const MaskBlock m = LoadMaskBlock(s, t, n);
      for (int k = 0; k < K; ++k) b->v[k] = m.v[k] ? b->v[k] : otherwise;
    }
  }

  // --- Lanes of the same row ---
  // stats[row] = the lanes l of `lanes` with l % rows == row, merged by f.
  template <class E, class F>
  static JAXKERN_INLINE void MergeLanes(const Strip& s, const E* lanes, double* stats, F f) {
    for (int r = 0; r < s.rows; ++r) stats[r] = lanes[r];
    for (int l = s.rows; l < s.lanes; l += s.rows) {
      for (int r = 0; r < s.rows; ++r) stats[r] = f(stats[r], double(lanes[l + r]));
    }
  }
  static JAXKERN_INLINE void MergeSums(const Strip& s, const Accumulator<C>* sums, double* sum, double* lost) {
    if constexpr (kRow) {
      Accumulator<C> block = sums[0];
      for (int k = 1; k < K; ++k) block.Merge(sums[k]);
      const Sum<double> total = block.Total();
      *sum = total.sum;
      *lost = total.lost;
    } else {
      alignas(64) double lanes[2][L];
      for (int k = 0; k < K; ++k) sums[k].Store(lanes[0] + k * W, lanes[1] + k * W);
      for (int row = 0; row < s.rows; ++row) {
        Sum<double> total;
        for (int l = row; l < s.lanes; l += s.rows) total.Merge({lanes[0][l], lanes[1][l]});
        sum[row] = total.sum;
        lost[row] = total.lost;
      }
    }
  }

  // --- The statistics of steps [begin, end) of `count` strips ---
  // One thing for every strip before the next for any, so that the CPU overlaps strips. `kept`, where
  // there is one, gets exp(x - maximum), kParts as a block of scales and one of fractions a step. The cache is
  // told of what will be read `ahead` elements from here, while the exponentials keep it idle.
  static JAXKERN_OUTLINE void Reduce(const SoftmaxArgs& a, const Strip* strips, int count, int64_t begin, int64_t end,
                                     double* stats, C* kept, int64_t ahead) {
    if constexpr (!kPowers) {
      // Of several short rows the cache is also told that they will be written; of one, that would be slower.
      for (int j = 0; j < count; ++j) ReduceGradient(a, strips[j], begin, end, stats + j, ahead, count > 1);
    } else {
      for (int j = 0; j < count; ++j) ReduceMax(a, strips[j], begin, end, stats + j);
      for (int j = 0; j < count; ++j) {
        ReduceExp(a, strips[j], begin, end, stats + j, kept ? kept + j * (end - begin) * kKept : nullptr, ahead,
                  count > 1);
      }
    }
  }

  // A hint, which may point anywhere.
  template <int kWrite>
  static JAXKERN_INLINE void Prefetch(const T* p) {
    for (int byte = 0; byte < L * int(sizeof(T)); byte += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(p) + byte, kWrite);
    }
  }

  static JAXKERN_INLINE void ReduceMax(const SoftmaxArgs& a, const Strip& s, int64_t begin, int64_t end,
                                       double* state) {
    const T* x = static_cast<const T*>(a.a) + s.base;
    V m[K];
    for (int k = 0; k < K; ++k) m[k] = Nothing();
    for (int64_t t = begin; t < end; ++t) {
      const int n = s.Valid(t);
      Block b = LoadBlock(s, x, t, n, Nothing());
      Apply(s, t, n, &b, Nothing());
      for (int k = 0; k < K; ++k) m[k] = Max(b.v[k], m[k]);
    }
    const auto max = [](auto p, auto q) { return p > q ? p : q; };
    if constexpr (kRow) {
      for (int k = 1; k < K; ++k) m[0] = Max(m[k], m[0]);
      state[0] = Fold<C, W>(m[0], max);
    } else {
      alignas(64) C lanes[L];
      for (int k = 0; k < K; ++k) Store(lanes + k * W, m[k]);
      MergeLanes(s, lanes, state, max);
    }
  }

  static JAXKERN_INLINE void ReduceExp(const SoftmaxArgs& a, const Strip& s, int64_t begin, int64_t end,
                                       double* stats, C* kept, int64_t ahead, bool several) {
    const T* x = static_cast<const T*>(a.a) + s.base;
    const T* g = kBackward ? static_cast<const T*>(a.b) + s.base : nullptr;
    const int padded = PaddedRows(a);
    const auto reference_of = [&](int r) { return C(stats[r] == -kInf ? 0 : stats[r]); };
    V reference[kRow ? 1 : K];
    if constexpr (kRow) {
      reference[0] = Splat(reference_of(0));
    } else {
      alignas(64) C lanes[L];
      SpreadRows(s, lanes, reference_of);
      for (int k = 0; k < K; ++k) reference[k] = Load(lanes + k * W);
    }
    Accumulator<C> sums[K], of_g[kBackward ? K : 1];
    V few[kBackward ? K : 1] = {};  // of exponentials, until they are added to those
    for (int64_t t = begin; t < end; ++t) {
      const int n = s.Valid(t);
      Block b = LoadBlock(s, x, t, n, Nothing());
      Apply(s, t, n, &b, Nothing());
      if constexpr (kRow) Prefetch<0>(x + t * s.step + ahead);
      if constexpr (kBackward) {
        Block d = LoadBlock(s, g, t, n, V{});
        if constexpr (kRow) Prefetch<0>(g + t * s.step + ahead);
        if (kRow && several) Prefetch<1>(static_cast<const T*>(a.out) + s.base + t * s.step);
        Apply(s, t, n, &d, V{});
        for (int k = 0; k < K; ++k) of_g[k].Add(d.v[k]);
      }
      if (kParts && kept) {
        for (int k = 0; k < K; ++k) {
          const Exponential<V> e = ExpParts<C>(b.v[k] - reference[kRow ? 0 : k]);
          sums[k].Add(e.Rounded());
          Store(kept + k * W, e.scale);
          Store(kept + L + k * W, e.fraction);
        }
        kept += kKept;
      } else {
        for (int k = 0; k < K; ++k) {
          const V e = Exp<C>(b.v[k] - reference[kRow ? 0 : k]);
          if constexpr (kBackward) few[k] += e;
          else sums[k].Add(e);
          if (kKeeps && kept) Store(kept + k * W, e);
        }
        if (kKeeps && kept) kept += kKept;
      }
      if constexpr (kBackward) {
        if (t % kFew == kFew - 1 || t + 1 == end) {
          for (int k = 0; k < K; ++k) {
            sums[k].Add(few[k]);
            few[k] = V{};
          }
        }
      }
    }
    MergeSums(s, sums, stats + padded, stats + 2 * padded);
    if constexpr (kBackward) MergeSums(s, of_g, stats + 3 * padded, stats + 4 * padded);
  }

  static JAXKERN_INLINE void ReduceGradient(const SoftmaxArgs& a, const Strip& s, int64_t begin, int64_t end,
                                            double* stats, int64_t ahead, bool several) {
    const T *y = static_cast<const T*>(a.a) + s.base, *g = static_cast<const T*>(a.b) + s.base;
    const int padded = PaddedRows(a);
    Accumulator<C> sums[K];
    IntVec<C> alive[K] = {};
    for (int64_t t = begin; t < end; ++t) {
      const int n = s.Valid(t);
      Block b = LoadBlock(s, y, t, n, Nothing()), d = LoadBlock(s, g, t, n, V{});
      if constexpr (kRow) Prefetch<0>(y + t * s.step + ahead), Prefetch<0>(g + t * s.step + ahead);
      if (kRow && several) Prefetch<1>(static_cast<const T*>(a.out) + s.base + t * s.step);
      Apply(s, t, n, &b, Nothing());
      Apply(s, t, n, &d, V{});
      for (int k = 0; k < K; ++k) {
        alive[k] |= BitCast<IntVec<C>>(b.v[k]) ^ BitCast<IntVec<C>>(Nothing());  // a bit, where they differ
        sums[k].Add(kLog ? d.v[k] : b.v[k] * d.v[k]);
      }
    }
    MergeSums(s, sums, stats + padded, stats + 2 * padded);
    if constexpr (kRow) {
      for (int k = 1; k < K; ++k) alive[0] |= alive[k];
      stats[0] = Fold<typename IntOf<C>::type, W>(alive[0], [](auto p, auto q) { return p | q; }) ? 1 : 0;
    } else {
      alignas(64) typename IntOf<C>::type lanes[L];
      for (int k = 0; k < K; ++k) {
        alive[k] = -(alive[k] != 0);  // true is -1 in a vector
        std::memcpy(lanes + k * W, &alive[k], sizeof alive[k]);
      }
      MergeLanes(s, lanes, stats, [](double p, double q) { return p > q ? p : q; });
    }
  }

  // into := into and from. Lanes beyond the rows hold whatever they hold.
  static JAXKERN_INLINE void Merge(const SoftmaxArgs& a, double* into, const double* from) {
    const int padded = PaddedRows(a);
    for (int r = 0; r < Rows(a); r += kLanes<double>) {
      double *state = into + r, *sum = state + padded, *lost = sum + padded;
      const D other_state = Load(from + r), m = Max(Load(state), other_state);
      Sum<D> x{Load(sum), Load(lost)}, y{Load(from + r + padded), Load(from + r + 2 * padded)};
      if constexpr (kPowers) {
        const D reference = m == Splat(-kInf) ? D{} : m;
        const D f = Exp<double>(Load(state) - reference), h = Exp<double>(other_state - reference);
        x.sum *= f, x.lost *= f, y.sum *= h, y.lost *= h;
      }
      x.Merge(y);
      if constexpr (kPowers && kBackward) {
        double *of_g = lost + padded, *lost_of_g = of_g + padded;
        Sum<D> g{Load(of_g), Load(lost_of_g)};
        g.Merge({Load(from + r + 3 * padded), Load(from + r + 4 * padded)});
        Store(of_g, g.sum);
        Store(lost_of_g, g.lost);
      }
      Store(state, m);
      Store(sum, x.sum);
      Store(lost, x.lost);
    }
  }

  // lanes[l] = f(l % rows)
  template <class F>
  static JAXKERN_INLINE void SpreadRows(const Strip& s, C* lanes, F f) {
    for (int r = 0; r < s.rows; ++r) lanes[r] = f(r);
    for (int l = s.rows; l < L; ++l) lanes[l] = lanes[l - s.rows];
  }

  // The factors of the rows:
  //     softmax       y  = exp(x - p) * (q + r), q + r = 1 / sum; without fma exp(x - p) / q, q = sum
  //     log_softmax   y  = (x - p) - q, q = log(sum), and what rounding lost of x - p
  //     gradients     dx = y * (g - (p + q)), dx = g - exp(x - p) * q, dx = g - exp(y) * p; 0 where r is 0
  static JAXKERN_INLINE void Finish(const double* stats, int padded, int rows, Factors<C>* f) {
    constexpr int N = kLanes<double>;
    const D zero{}, one = Splat(1.0);
    for (int i = 0; i < rows; i += N) {
      const D state = Load(stats + i), sum = Load(stats + padded + i);
      D lost = Load(stats + 2 * padded + i);
      lost = lost == lost ? lost : zero;  // the sum is infinite or NaN
      const D total = sum + lost, rest = (sum - total) + lost;
      D p, q, r;
      if constexpr (!kPowers) {
        p = Rounded(total);
        q = (total - p) + rest;
        q = q == q ? q : zero;
        r = state;
      } else {
        const auto dead = total == 0;
        const D divisor = dead ? one : total;
        p = state == -kInf ? zero : state;
        if constexpr (kBackward) {
          D lost_of_g = Load(stats + 4 * padded + i);
          lost_of_g = lost_of_g == lost_of_g ? lost_of_g : zero;
          q = (Load(stats + 3 * padded + i) + lost_of_g) / divisor;
          r = dead ? zero : one;
        } else if constexpr (kLog) {
          const D log = Log(divisor);
          q = Rounded(log);
          r = (log - q) + rest / divisor;
        } else {
          const D inverse = one / divisor;
          q = kHasFma ? Rounded(inverse) : divisor;
          r = (inverse - q) + (Fma(-inverse, divisor, one) - inverse * rest) * inverse;
          q = dead ? zero + !kHasFma : q;
          r = dead ? zero : r;
        }
      }
      Put(f->p + i, p), Put(f->q + i, q), Put(f->r + i, r);
    }
  }
  using Narrow = VecN<C, kLanes<double>>;
  static JAXKERN_INLINE D Rounded(D x) { return __builtin_convertvector(__builtin_convertvector(x, Narrow), D); }
  static JAXKERN_INLINE void Put(C* p, D x) {
    const Narrow v = __builtin_convertvector(x, Narrow);
    std::memcpy(p, &v, sizeof v);
  }

  // The output from x or y, g, and exp(x - p), as far as the operation has them; e in one part: as its scale.
  static JAXKERN_INLINE V Output(V x, V g, const Exponential<V>& e, V p, V q, V r) {
    if constexpr (kBackward) {
      const V dx = !kLog ? x * ((g - p) - q) : kPowers ? Fma(-e.scale, q, g) : Fma(-Exp<C>(x), p, g);
      return r == V{} ? V{} : dx;
    } else if constexpr (kLog) {
      return LogQuotient(x, p, q, r);
    } else if constexpr (kHasFma) {
      return Quotient(e, q, r);
    } else {
      return e.Rounded() / q;
    }
  }

  // --- The output of steps [begin, end) ---
  // Up to `writable` elements from the strip's first, what is stored beyond the last step does not
  // matter: this thread writes it later.
  static JAXKERN_OUTLINE void Write(const SoftmaxArgs& a, const Strip& s, int64_t begin, int64_t end,
                                    const Factors<C>& factors, int index, const C* kept, int64_t writable) {
    constexpr int F = kRow ? 1 : K;
    V p[F], q[F], r[F];
    for (int k = 0; k < F; ++k) {
      p[k] = kRow ? Splat(factors.p[index]) : Load(factors.p + k * W);
      q[k] = kRow ? Splat(factors.q[index]) : Load(factors.q + k * W);
      r[k] = kRow ? Splat(factors.r[index]) : Load(factors.r + k * W);
    }
    const T* x = static_cast<const T*>(a.a) + s.base;
    const T* g = kBackward ? static_cast<const T*>(a.b) + s.base : nullptr;
    T* out = static_cast<T*>(a.out) + s.base;
    for (int64_t t = begin; t < end; ++t) {
      // Another thread may be writing from `end` on.
      const int n = t + 1 < end ? s.Valid(t) : int(Min(s.lanes, s.Valid(t)));
      Block b, d;
      if (!kKeeps || !kept) b = LoadBlock(s, x, t, n, V{});
      if constexpr (kBackward) d = LoadBlock(s, g, t, n, V{});
      for (int k = 0; k < K; ++k) {
        const int f = kRow ? 0 : k;
        Exponential<V> e{};
        if constexpr (kParts) {
          e = kept ? Exponential<V>{Load(kept + k * W), Load(kept + L + k * W)} : ExpParts<C>(b.v[k] - p[f]);
        } else if constexpr (kKeeps) {
          e.scale = kept ? Load(kept + k * W) : Exp<C>(b.v[k] - p[f]);
        }
        b.v[k] = Output(kKeeps ? V{} : b.v[k], kBackward ? d.v[k] : V{}, e, p[f], q[f], r[f]);
      }
      if (kKeeps && kept) kept += kKept;
      Apply(s, t, n, &b, kLog && !kBackward ? Splat(C(-kInf)) : V{});
      StoreBlock(s, out, t, n, b, writable);
    }
  }

  // The factors of every lane of a strip, or of every row of a group.
  static JAXKERN_INLINE Factors<C> LaneFactors(const SoftmaxArgs& a, const Strip& s, int count, const double* stats) {
    Factors<C> f;
    Finish(stats, PaddedRows(a), kRow ? count : s.rows, &f);
    if constexpr (!kRow) {
      SpreadRows(s, f.p, [&](int i) { return f.p[i]; });
      SpreadRows(s, f.q, [&](int i) { return f.q[i]; });
      SpreadRows(s, f.r, [&](int i) { return f.r[i]; });
    }
    return f;
  }

  // --- The entry points of SoftmaxCpuPlan ---
  static void RunStrips(const SoftmaxArgs& a, int64_t first, int64_t last) {
    alignas(64) double total[kStats * kMaxK * kLanes<float>] = {}, chunk[kStats * kMaxK * kLanes<float>];
    alignas(64) C buffer[kKeeps ? kKept * kChunkSteps : 1];  // what Reduce keeps for Write
    const int64_t steps = Steps(a);
    C* const kept = kKeeps && steps <= kChunkSteps ? buffer : nullptr;
    constexpr int64_t kGroupSteps = kGroupBytes / (L * sizeof(T));
    const int group = int(steps < kGroupSteps ? Min(kGroup, kGroupSteps / steps) : 1);
    for (; first < last; first += group) {
      const int count = int(Min(group, last - first));
      Strip strips[kGroup];
      for (int j = 0; j < count; ++j) strips[j] = MakeStrip(a, first + j);
      const int64_t ahead = Min(kChunkSteps * L, count * a.width);
      Reduce(a, strips, count, 0, Min(kChunkSteps, steps), total, kept, ahead);
      for (int64_t t = kChunkSteps; t < steps; t += kChunkSteps) {
        Reduce(a, strips, 1, t, Min(t + kChunkSteps, steps), chunk, nullptr, ahead);
        Merge(a, total, chunk);
      }
      const Factors<C> f = LaneFactors(a, strips[0], count, total);
      for (int j = 0; j < count; ++j) {
        const int64_t writable = Packed(a) ? (last - first - j) * strips[j].extent : 0;
        Write(a, strips[j], 0, steps, f, j, kept ? kept + j * steps * kKept : nullptr, writable);
      }
    }
  }
  static void ReduceChunk(const SoftmaxArgs& a, int64_t strip, int64_t chunk, double* stats) {
    const Strip s = MakeStrip(a, strip);
    Reduce(a, &s, 1, chunk * kChunkSteps, Min((chunk + 1) * kChunkSteps, s.steps), stats, nullptr, kChunkSteps * L);
  }
  static void MergeChunks(const SoftmaxArgs& a, double* into, const double* from) { Merge(a, into, from); }
  static void WriteChunk(const SoftmaxArgs& a, int64_t strip, int64_t chunk, const double* stats) {
    const Strip s = MakeStrip(a, strip);
    Write(a, s, chunk * kChunkSteps, Min((chunk + 1) * kChunkSteps, s.steps), LaneFactors(a, s, 1, stats), 0, nullptr, 0);
  }

  static SoftmaxCpuPlan Plan(const SoftmaxArgs& a) {
    SoftmaxCpuPlan plan;
    plan.strips = a.outer * Tiles(a);
    plan.chunks = CeilDiv(Steps(a), kChunkSteps);
    plan.stats_size = kStats * PaddedRows(a);
    plan.run = RunStrips;
    plan.reduce = ReduceChunk;
    plan.merge = MergeChunks;
    plan.write = WriteChunk;
    return plan;
  }
};

// --- From run-time values to template arguments ---

template <bool kLog, bool kBackward, class T, int K, bool kRow>
SoftmaxCpuPlan PlanMask(const SoftmaxArgs& a) {
  return a.mask ? Kernel<kLog, kBackward, T, K, kRow, true>::Plan(a) : Kernel<kLog, kBackward, T, K, kRow, false>::Plan(a);
}

template <bool kLog, bool kBackward, class T>
SoftmaxCpuPlan PlanShape(const SoftmaxArgs& a) {
  if (a.inner > 1) return PlanMask<kLog, kBackward, T, kMaxK, false>(a);
  // Short rows would leave most of a wide block empty, the shortest most of a register.
  if constexpr (kPermuteIsFast<Compute<T>>) {
    using Row = Kernel<kLog, kBackward, T, 1, true, false>;
    if (2 * a.width <= kLanes<Compute<T>>) {
      return a.mask ? NarrowKernel<Row, kLog, kBackward, T, true>::Plan(a) : NarrowKernel<Row, kLog, kBackward, T, false>::Plan(a);
    }
  }
  return a.width < 4 * kLanes<Compute<T>> ? PlanMask<kLog, kBackward, T, 1, true>(a)
                                           : PlanMask<kLog, kBackward, T, kMaxK, true>(a);
}

template <bool kLog, bool kBackward>
SoftmaxCpuPlan PlanType(const SoftmaxArgs& a) {
  switch (a.dtype) {
    case DType::kF16: return PlanShape<kLog, kBackward, Half>(a);
    case DType::kBF16: return PlanShape<kLog, kBackward, BFloat>(a);
    case DType::kF32: return PlanShape<kLog, kBackward, float>(a);
    case DType::kF64: return PlanShape<kLog, kBackward, double>(a);
  }
  return {};
}

}  // namespace

SoftmaxCpuPlan PlanSoftmax(const SoftmaxArgs& a) {
  if (a.log) return a.backward ? PlanType<true, true>(a) : PlanType<true, false>(a);
  return a.backward ? PlanType<false, true>(a) : PlanType<false, false>(a);
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
