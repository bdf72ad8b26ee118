// The CPU kernels of segment_softmax, compiled once an instruction set. A segment's rows lie anywhere; a few vectors of
// columns are taken through all of them, three times over (the gradient: twice), the later times from the cache.
// Elements are added up in double (float) or with what rounding loses (double).
#include "segment_softmax/segment_softmax_cpu_isa.h"

#include "common/simd.h"

namespace jaxkern {
namespace JAXKERN_ISA {
namespace {

constexpr int kAhead = 8;  // rows that are brought to the cache before their turn

template <class C>
JAXKERN_INLINE Vec<C> Total(const Accumulator<C>& a) {
  if constexpr (sizeof(C) == 4) {
    const auto low = __builtin_convertvector(a.low, HalfVec), high = __builtin_convertvector(a.high, HalfVec);
    Vec<float> v;
    std::memcpy(&v, &low, sizeof low);
    std::memcpy(reinterpret_cast<char*>(&v) + sizeof low, &high, sizeof high);
    return v;
  } else {
    const Vec<C> total = a.sum + a.lost;
    return a.sum - a.sum == 0 ? total : a.sum;  // an infinity has lost NaN
  }
}

template <class T, bool kGrad>
struct Kernel {
  using C = Compute<T>;
  using V = Vec<C>;
  static constexpr int W = kLanes<C>;

  // What is known of a segment's columns c .. c + W - 1.
  struct Stats {
    V largest, sum;
  };

  // n < W only if kPart.
  template <bool kPart>
  static JAXKERN_INLINE V Read(const T* p, int n, C fill) {
    if constexpr (kPart) return LoadPart(p, n, Splat<C>(fill));
    else return Load(p);
  }
  static JAXKERN_INLINE V BaseOf(V largest) { return largest == Splat<C>(-C(__builtin_inf())) ? V{} : largest; }

  static JAXKERN_INLINE void Prefetch(const T* p) { __builtin_prefetch(p); }

  // K whole vectors from column c, or the last n < W elements of the row.
  template <int K, bool kPart>
  static JAXKERN_INLINE void ReduceColumns(const SegmentSlice& s, int64_t c, int n, const IndexEntry* begin,
                                           const IndexEntry* end, Stats* stats) {
    const T *source = static_cast<const T*>(s.source) + c, *x = static_cast<const T*>(s.x) + c;
    Accumulator<C> sum[K];
    V largest[K];
    const C least = -C(__builtin_inf());
    for (int k = 0; k < K; ++k) largest[k] = Splat<C>(least);
    if constexpr (!kGrad) {
      for (const IndexEntry* e = begin; e != end; ++e) {
        Prefetch(source + (e + kAhead < end ? e + kAhead : e)->position * s.inner);
        const T* p = source + e->position * s.inner;
        for (int k = 0; k < K; ++k) largest[k] = Max(Read<kPart>(p + k * W, n, least), largest[k]);
      }
    }
    V base[K];
    for (int k = 0; k < K; ++k) base[k] = BaseOf(largest[k]);
    for (const IndexEntry* e = begin; e != end; ++e) {
      const int64_t at = e->position * s.inner;
      for (int k = 0; k < K; ++k) {
        if constexpr (kGrad) {
          const V y = Read<kPart>(source + at + k * W, n, 0), g = Read<kPart>(x + at + k * W, n, 0);
          sum[k].Add(y == V{} ? V{} : y * g);
        } else {
          sum[k].Add(Exp<C>(Read<kPart>(source + at + k * W, n, least) - base[k]));
        }
      }
    }
    for (int k = 0; k < K; ++k) stats[k] = {largest[k], Total<C>(sum[k])};
  }

  template <int K, bool kPart>
  static JAXKERN_INLINE void WriteColumns(const SegmentSlice& s, int64_t c, int n, const IndexEntry* begin,
                                          const IndexEntry* end, const Stats* stats) {
    const T *source = static_cast<const T*>(s.source) + c, *x = static_cast<const T*>(s.x) + c;
    T* out = static_cast<T*>(s.out) + c;
    V base[K], sum[K];
    for (int k = 0; k < K; ++k) {
      base[k] = BaseOf(stats[k].largest);
      sum[k] = kGrad || stats[k].sum != V{} ? stats[k].sum : Splat<C>(1);
    }
    for (const IndexEntry* e = begin; e != end; ++e) {
      const int64_t at = e->position * s.inner;
      for (int k = 0; k < K; ++k) {
        V result;
        if constexpr (kGrad) {
          const V y = Read<kPart>(source + at + k * W, n, 0), g = Read<kPart>(x + at + k * W, n, 0);
          result = y == V{} ? V{} : y * (g - sum[k]);
        } else {
          result = Exp<C>(Read<kPart>(source + at + k * W, n, -C(__builtin_inf())) - base[k]) / sum[k];
        }
        if constexpr (kPart) StorePart(out + at + k * W, n, result);
        else JAXKERN_ISA::Store(out + at + k * W, result);
      }
    }
  }

  template <int n>
  struct Number {
    static constexpr int value = n;
  };
  // f(Number<K>, Number<kPart>, column, n) for all columns.
  template <class F>
  static JAXKERN_INLINE void ForColumns(const SegmentSlice& s, F f) {
    int64_t c = s.first;
    for (; c + 2 * W <= s.last; c += 2 * W) f(Number<2>(), Number<0>(), c, W);
    for (; c + W <= s.last; c += W) f(Number<1>(), Number<0>(), c, W);
    if (c < s.last) f(Number<1>(), Number<1>(), c, int(s.last - c));
  }

  static void Segment(const SegmentSlice& s, const IndexEntry* e, const IndexEntry* end) {
    ForColumns(s, [&](auto k, auto part, int64_t c, int n) __attribute__((always_inline)) {
      Stats stats[decltype(k)::value];
      ReduceColumns<decltype(k)::value, decltype(part)::value>(s, c, n, e, end, stats);
      WriteColumns<decltype(k)::value, decltype(part)::value>(s, c, n, e, end, stats);
    });
  }

  static void Reduce(const SegmentSlice& s, const IndexEntry* e, const IndexEntry* end, double* out) {
    const int64_t columns = s.last - s.first;
    ForColumns(s, [&](auto k, auto part, int64_t c, int n) __attribute__((always_inline)) {
      Stats stats[decltype(k)::value];
      ReduceColumns<decltype(k)::value, decltype(part)::value>(s, c, n, e, end, stats);
      for (int i = 0; i < decltype(k)::value; ++i) {
        for (int l = 0; l < n; ++l) {
          out[c - s.first + i * W + l] = kGrad ? 0 : double(stats[i].largest[l]);
          out[columns + c - s.first + i * W + l] = double(stats[i].sum[l]);
        }
      }
    });
  }

  static void Merge(double* stats, int64_t parts, int64_t columns) {
    for (int64_t c = 0; c < columns; ++c) {
      double largest = stats[c];
      for (int64_t p = 1; p < parts; ++p) largest = stats[2 * p * columns + c] > largest ? stats[2 * p * columns + c] : largest;
      const double base = largest == -__builtin_inf() ? 0 : largest;
      double sum = 0;
      for (int64_t p = 0; p < parts; ++p) {
        const double* own = stats + 2 * p * columns;
        const double factor = kGrad ? 1 : own[c] == -__builtin_inf() ? 0 : __builtin_exp(own[c] - base);
        sum += own[columns + c] == 0 ? 0 : own[columns + c] * factor;
      }
      stats[c] = largest, stats[columns + c] = sum;
    }
  }

  static void Write(const SegmentSlice& s, const IndexEntry* e, const IndexEntry* end, const double* in) {
    const int64_t columns = s.last - s.first;
    ForColumns(s, [&](auto k, auto part, int64_t c, int n) __attribute__((always_inline)) {
      Stats stats[decltype(k)::value] = {};
      for (int i = 0; i < decltype(k)::value; ++i) {
        for (int l = 0; l < n; ++l) {
          stats[i].largest[l] = C(in[c - s.first + i * W + l]);
          stats[i].sum[l] = C(in[columns + c - s.first + i * W + l]);
        }
      }
      WriteColumns<decltype(k)::value, decltype(part)::value>(s, c, n, e, end, stats);
    });
  }

  // --- Narrow rows ---
  // Exponentials stay where the result will be, if that can hold them as they are.
  static constexpr bool kKept = !kGrad && sizeof(T) == sizeof(C);
  static constexpr int64_t kMost = kSegmentNarrow * kSegmentBlock + W;

  // Elements of the block in the computing type.
  static JAXKERN_INLINE void Widen(const T* from, int64_t size, C* to) {
    int64_t i = 0;
    for (; i + W <= size; i += W) JAXKERN_ISA::Store(to + i, Load(from + i));
    if (i < size) JAXKERN_ISA::Store(to + i, LoadPart(from + i, int(size - i), V{}));
  }
  // f(element, number of its segment and column) for all.
  template <int kInner, class F>
  static JAXKERN_INLINE void Each(const uint32_t* row, int64_t size, F f) {
    for (int64_t k = 0; k < size; ++k) {
      for (int c = 0; c < kInner; ++c) f(k * kInner + c, int64_t{row[k]} * kInner + c);
    }
  }
  template <class F>
  static JAXKERN_INLINE void EachOf(int64_t inner, const uint32_t* row, int64_t size, F f) {
    switch (inner) {
      case 1: return Each<1>(row, size, f);
      case 2: return Each<2>(row, size, f);
      case 3: return Each<3>(row, size, f);
      case 4: return Each<4>(row, size, f);
      case 5: return Each<5>(row, size, f);
      case 6: return Each<6>(row, size, f);
      case 7: return Each<7>(row, size, f);
      default: return Each<8>(row, size, f);
    }
  }
  // What is added up: exponentials, or products.
  static JAXKERN_INLINE void Terms(const SegmentSlice& s, int64_t first, const uint32_t* row, int64_t size,
                                   const double* largest, C* terms, C* other) {
    const int64_t at = first * s.inner, n = size * s.inner;
    Widen(static_cast<const T*>(s.source) + at, n, terms);
    if constexpr (kGrad) Widen(static_cast<const T*>(s.x) + at, n, other);
    else EachOf(s.inner, row, size, [&](int64_t e, int64_t at) __attribute__((always_inline)) { other[e] = C(largest[at]); });
    for (int64_t i = 0; i < n; i += W) {
      const V a = Load(terms + i), b = Load(other + i);
      if constexpr (kGrad) JAXKERN_ISA::Store(terms + i, a == V{} ? V{} : a * b);
      else JAXKERN_ISA::Store(terms + i, Exp<C>(a - b));
    }
  }

  static void FindLargest(const SegmentSlice& s, int64_t first, const uint32_t* row, int64_t size, double* largest) {
    alignas(64) C x[kMost];
    Widen(static_cast<const T*>(s.source) + first * s.inner, size * s.inner, x);
    EachOf(s.inner, row, size, [&](int64_t e, int64_t at) __attribute__((always_inline)) {
      largest[at] = double(x[e]) > largest[at] ? double(x[e]) : largest[at];
    });
  }

  static void AddUp(const SegmentSlice& s, int64_t first, const uint32_t* row, int64_t size, const double* largest,
                    double* sum) {
    alignas(64) C terms[kMost], other[kMost];
    Terms(s, first, row, size, largest, terms, other);
    if constexpr (kKept) std::memcpy(static_cast<T*>(s.out) + first * s.inner, terms, size * s.inner * sizeof(T));
    EachOf(s.inner, row, size, [&](int64_t e, int64_t at) __attribute__((always_inline)) { sum[at] += double(terms[e]); });
  }

  static void WriteAll(const SegmentSlice& s, int64_t first, const uint32_t* row, int64_t size, uint32_t rows,
                       const double* largest, const double* sum) {
    alignas(64) C x[kMost], other[kMost], total[kMost];
    const int64_t at = first * s.inner, n = size * s.inner;
    T* out = static_cast<T*>(s.out) + at;
    if constexpr (kKept) {
      Widen(out, n, x);
    } else if constexpr (kGrad) {
      Widen(static_cast<const T*>(s.source) + at, n, x);
      Widen(static_cast<const T*>(s.x) + at, n, other);
    } else {
      Terms(s, first, row, size, largest, x, other);
    }
    EachOf(s.inner, row, size, [&](int64_t e, int64_t at) __attribute__((always_inline)) { total[e] = C(sum[at]); });
    for (int64_t i = 0; i < n; i += W) {
      const V a = Load(x + i), b = Load(total + i);
      V result;
      if constexpr (kGrad) result = a == V{} ? V{} : a * (Load(other + i) - b);
      else result = a / (b == V{} ? Splat<C>(1) : b);
      if (i + W <= n) JAXKERN_ISA::Store(out + i, result);
      else StorePart(out + i, int(n - i), result);
    }
    for (int64_t k = 0; k < size; ++k) {
      if (row[k] == rows) std::memset(out + k * s.inner, 0, s.inner * sizeof(T));
    }
  }
};

template <class T, bool kGrad>
SegmentCpuKernels Kernels() {
  using K = Kernel<T, kGrad>;
  return {K::Segment, K::Reduce, K::Merge, K::Write, kGrad ? nullptr : K::FindLargest, K::AddUp, K::WriteAll};
}

template <class T>
SegmentCpuKernels KernelsOf(IndexOp op) {
  return op == IndexOp::kSegmentSoftmaxGrad ? Kernels<T, true>() : Kernels<T, false>();
}

}  // namespace

SegmentCpuKernels ChooseSegmentKernels(const IndexArgs& args) {
  switch (args.type) {
    case ElementType::kF16: return KernelsOf<Half>(args.op);
    case ElementType::kBF16: return KernelsOf<BFloat>(args.op);
    case ElementType::kF64: return KernelsOf<double>(args.op);
    default: return KernelsOf<float>(args.op);
  }
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
