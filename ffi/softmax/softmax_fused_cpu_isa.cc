// The fused softmax on the CPU for one instruction set: three passes over a row up to its causal limit, which lies in
// the L1 cache but for the longest.
//
//     Logits   s = scale * x + bias, -inf where masked, and its maximum
//     Reduce   exp(s - maximum) in place of s, and its sum; of a gradient also the sum of exp(s - maximum) * h, or of
//              h alone for log_softmax, where h is the cotangent of what was kept. Up to kK terms are added in a float.
//     Write    the result
//
// A pass runs over a few rows before the next does, so that the CPU overlaps rows.
#include "kernels/common/philox.h"
#include "common/simd.h"
#include "softmax_cpu_isa.h"
#include "softmax_cpu_quotient.h"

namespace jaxkern {
namespace JAXKERN_ISA {
namespace {

constexpr double kInf = __builtin_inf();
constexpr int kK = 4;                        // registers at a time
constexpr int kDraws = 8 * kLanes<double>;  // elements that a vector of Philox blocks is for

// The bits of philox.h for elements [first, first + kDraws) of a row, where first is a multiple of 8. A lane has a
// block, a word of it the lower half of a lane; the upper half may hold anything.
JAXKERN_INLINE void Draw(int64_t first, uint32_t row, uint32_t key0, uint32_t key1, uint16_t* draws) {
  U64 c0 = U64{} + uint64_t(first / 8), c1 = U64{} + row, c2{}, c3{};
  for (int l = 0; l < kLanes<double>; ++l) c0[l] += l;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const U64 a = MulLower(c0, U64{} + 0xD2511F53u), b = MulLower(c2, U64{} + 0xCD9E8D57u);
    c0 = (b >> 32) ^ c1 ^ uint64_t(key0), c2 = (a >> 32) ^ c3 ^ uint64_t(key1);
    c1 = b, c3 = a;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  const U64 low = (c0 & 0xFFFFFFFFu) | c1 << 32, high = (c2 & 0xFFFFFFFFu) | c3 << 32;
  uint64_t pairs[2 * kLanes<double>];
  for (int l = 0; l < kLanes<double>; ++l) pairs[2 * l] = low[l], pairs[2 * l + 1] = high[l];
  std::memcpy(draws, pairs, sizeof pairs);
}

template <int kCount>
struct Registers {
  static constexpr int count = kCount;
};

// f(registers, i, n) for all elements i of a row: kK registers at a time, then one, and of the last n elements.
template <class C, class F>
JAXKERN_INLINE void Walk(int64_t count, F f) {
  constexpr int W = kLanes<C>;
  int64_t i = 0;
  for (; i + kK * W <= count; i += kK * W) f(Registers<kK>{}, i, W);
  for (; i < count; i += W) f(Registers<1>{}, i, count - i < W ? int(count - i) : W);
}
template <class T>
JAXKERN_INLINE Vec<Compute<T>> Get(const T* p, int n) {
  return n == kLanes<Compute<T>> ? Load(p) : LoadPart(p, n, Vec<Compute<T>>{});
}
template <class T>
JAXKERN_INLINE void Put(T* p, int n, Vec<Compute<T>> v) {
  n == kLanes<Compute<T>> ? Store(p, v) : StorePart(p, n, v);
}

template <bool kLog, bool kBackward, class T>
struct Fused {
  using C = Compute<T>;
  using V = Vec<C>;
  static constexpr int W = kLanes<C>;
  static constexpr int kRows = 16, kElements = 2048;  // that a pass runs over, at most, if not one row

  struct Row {
    const T *x, *g;
    T* out;
    int64_t limit;        // how many elements may take part
    const uint8_t* mask;  // of those, null: all do
    const T* bias;        // null: none, or the same for all
    const C* wide_bias;
    C scale, same_bias;
    uint32_t key0, key1, number, threshold;
    C *s, *fraction;  // fraction: beside exp(s - maximum), of the forward pass
    uint16_t* draws;  // null: nothing is dropped
    int64_t ahead;    // elements to the row that will be read next; 0: too far
    C maximum, p, q, r;  // what Write computes with
  };
  // Whole registers are written, and vectors of draws.
  static JAXKERN_INLINE int64_t Padded(int64_t width) { return (width + kDraws - 1) / kDraws * kDraws; }
  static JAXKERN_INLINE int64_t Group(int64_t width) {
    return width > kElements ? 1 : width * kRows > kElements ? kElements / width : kRows;
  }

  static JAXKERN_INLINE Row MakeRow(const SoftmaxArgs& a, int64_t row, C* buffer) {
    const SoftmaxExtras& e = a.extras;
    Row r = {};
    r.x = static_cast<const T*>(a.a) + row * a.width;
    r.g = kBackward ? static_cast<const T*>(a.b) + row * a.width : nullptr;
    r.out = static_cast<T*>(a.out) + row * a.width;
    r.limit = e.Limit(uint32_t(row), a.width);
    if (a.mask) {
      r.mask = a.mask + a.mask_view.outer_map(row);
      if (a.mask_view.axis_stride == 0) r.limit = *r.mask ? r.limit : 0, r.mask = nullptr;
    }
    if (e.bias) {
      const int64_t at = e.bias_view.outer_map(row);
      r.wide_bias = e.bias_wide ? static_cast<const C*>(e.bias) + at : nullptr;
      r.bias = e.bias_wide ? nullptr : static_cast<const T*>(e.bias) + at;
      if (e.bias_view.axis_stride == 0) {
        r.same_bias = e.bias_wide ? *r.wide_bias : LoadPart(r.bias, 1, V{})[0];
        r.bias = nullptr, r.wide_bias = nullptr;
      }
    }
    r.scale = e.scale ? static_cast<const C*>(e.scale)[e.scale_view.outer_map(row)] : C(1);
    if (e.key) {
      const uint32_t* const words = e.key + (e.key_per_row ? 4 * row : 0);
      r.key0 = words[0], r.key1 = words[1];
      r.number = e.key_per_row ? words[2] : uint32_t(row);
      r.threshold = e.threshold;
      r.draws = reinterpret_cast<uint16_t*>(buffer + 2 * Padded(a.width));
    }
    r.s = buffer, r.fraction = buffer + Padded(a.width);
    r.ahead = a.width <= 4 * kElements ? Group(a.width) * a.width : 0;
    return r;
  }

  // Elements that take no part become `otherwise`.
  static JAXKERN_INLINE V Masked(const Row& r, int64_t i, int n, V v, V otherwise) {
    if (!r.mask) return v;
    return LoadMask<C>(r.mask + i, n) ? v : otherwise;
  }
  // Elements that are dropped become 0.
  static JAXKERN_INLINE V Kept(const Row& r, int64_t i, V v) {
    if (!r.draws) return v;
    VecN<uint16_t, W> drawn;
    std::memcpy(&drawn, r.draws + i, sizeof drawn);
    return __builtin_convertvector(drawn, IntVec<C>) >= typename IntOf<C>::type(r.threshold) ? v : V{};
  }
  static JAXKERN_INLINE V Cotangent(const Row& r, int64_t i, int n) {
    return Kept(r, i, Masked(r, i, n, Get(r.g + i, n), V{}));
  }

  static JAXKERN_OUTLINE void Logits(Row* row) {
    const Row r = *row;
    const V nothing = Splat(C(-kInf)), scale = Splat(r.scale), same_bias = Splat(r.same_bias);
    V largest[kK];
    for (V& v : largest) v = nothing;
    Walk<C>(r.limit, [&](auto registers, int64_t begin, int n) {
      for (int k = 0; k < registers.count; ++k) {
        const int64_t i = begin + k * W;
        const V bias = r.bias ? Get(r.bias + i, n) : r.wide_bias ? Get(r.wide_bias + i, n) : same_bias;
        V v = Masked(r, i, n, Get(r.x + i, n) * scale + bias, nothing);
        if (n < W) v = Below<C>(n, v, nothing);
        largest[k] = Max(v, largest[k]);
        Store(r.s + i, v);
      }
    });
    for (const V v : largest) largest[0] = Max(v, largest[0]);
    const C maximum = Fold<C, W>(largest[0], [](auto p, auto q) { return p > q ? p : q; });
    row->maximum = maximum == -kInf ? 0 : maximum;
  }

  // Tells the cache what the next rows read and this one writes, while exponentials keep memory idle. Hints, which may
  // point anywhere.
  static JAXKERN_INLINE void Prefetch(const Row& r, int64_t i) {
    if (r.ahead == 0) return;
    __builtin_prefetch(r.x + r.ahead + i);
    if constexpr (kBackward) __builtin_prefetch(r.g + r.ahead + i);
    if (r.bias) __builtin_prefetch(r.bias + r.ahead + i);
    if (r.mask) __builtin_prefetch(r.mask + r.ahead + i);
    __builtin_prefetch(r.out + i, 1);
  }

  static JAXKERN_OUTLINE void Reduce(const SoftmaxArgs& a, Row* row) {
    const Row r = *row;
    const V maximum = Splat(r.maximum);
    Accumulator<C> powers, products;
    if (r.draws) {
      for (int64_t i = 0; i < r.limit; i += kDraws) Draw(i, r.number, r.key0, r.key1, r.draws + i);
    }
    Walk<C>(r.limit, [&](auto registers, int64_t begin, int n) {
      V power{}, product{};
      for (int k = 0; k < registers.count; ++k) {
        const int64_t i = begin + k * W;
        const Exponential<V> parts = ExpParts<C>(Load(r.s + i) - maximum);
        const V e = parts.Rounded();
        power += e;
        Prefetch(r, i);
        if constexpr (kBackward) {
          const V h = Cotangent(r, i, n);
          product = kLog ? product + h : Fma(e, h, product);
          Store(r.s + i, e);
        } else if constexpr (!kLog) {
          Store(r.s + i, parts.scale);
          Store(r.fraction + i, parts.fraction);
        }
      }
      powers.Add(power);
      if constexpr (kBackward) products.Add(product);
    });
    const Sum<double> sum = powers.Total(), of_h = products.Total();
    const double total = sum.sum + Finite(sum.lost), inverse = Factor(a, r) / total;
    if (total == 0) row->limit = 0;
    // p and q to more digits than C has, the rest in r
    if constexpr (kBackward) {
      const double mean = (of_h.sum + Finite(of_h.lost)) / total;
      row->q = C(kLog ? mean * Factor(a, r) : inverse);
      row->p = C(kLog ? Factor(a, r) : mean);
      row->r = Finite(C(mean - row->p));
    } else {
      const double q = kLog ? Log(Splat(total))[0] : inverse;
      row->q = C(q);
      row->r = C(q - row->q);
    }
  }
  template <class E>
  static JAXKERN_INLINE E Finite(E lost) {  // what rounding lost of infinity
    return lost - lost == 0 ? lost : E(0);
  }
  static JAXKERN_INLINE double Factor(const SoftmaxArgs& a, const Row& r) {
    const double kept = a.extras.key ? a.extras.kept_inverse : 1;
    return kBackward && !a.extras.unscaled ? kept * r.scale : kept;
  }

  static JAXKERN_OUTLINE void Write(int64_t width, const Row& row) {
    const Row r = row;
    const V maximum = Splat(r.maximum), p = Splat(r.p), q = Splat(r.q), rest = Splat(r.r);
    const V nothing = kLog && !kBackward ? Splat(C(-kInf)) : V{};
    Walk<C>(r.limit, [&](auto registers, int64_t begin, int n) {
      for (int k = 0; k < registers.count; ++k) {
        const int64_t i = begin + k * W;
        const V s = Load(r.s + i);
        V v;
        if constexpr (kBackward) {
          const V h = Cotangent(r, i, n);
          v = kLog ? Fma(-s, q, h * p) : s * q * ((h - p) - rest);
        } else {
          v = kLog ? LogQuotient(s, maximum, q, rest) : Kept(r, i, Quotient<V>({s, Load(r.fraction + i)}, q, rest));
        }
        Put(r.out + i, n, Masked(r, i, n, v, nothing));
      }
    });
    Walk<C>(width - r.limit, [&](auto registers, int64_t i, int n) {
      for (int k = 0; k < registers.count; ++k) Put(r.out + r.limit + i + k * W, n, nothing);
    });
  }

  static void Run(const SoftmaxArgs& a, int64_t first, int64_t last, void* buffer) {
    for (; first < last; first += Group(a.width)) {
      const int64_t left = last - first, count = left < Group(a.width) ? left : Group(a.width);
      Row rows[kRows];
      for (int64_t i = 0; i < count; ++i) {
        rows[i] = MakeRow(a, first + i, static_cast<C*>(buffer) + i * 3 * Padded(a.width));
        Logits(&rows[i]);
      }
      for (int64_t i = 0; i < count; ++i) Reduce(a, &rows[i]);
      for (int64_t i = 0; i < count; ++i) Write(a.width, rows[i]);
    }
  }

  static FusedCpuPlan Plan(const SoftmaxArgs& a) {
    return {Group(a.width) * 3 * Padded(a.width) * int64_t(sizeof(C)), Run};
  }
};

// The gradient of softmax without dropout from its result, which is 0 where nothing takes part.
template <class T>
struct FromOutput {
  using C = Compute<T>;
  using V = Vec<C>;
  static constexpr int W = kLanes<C>;

  static void Run(const SoftmaxArgs& a, int64_t first, int64_t last, void*) {
    for (; first < last; ++first) {
      const SoftmaxExtras& e = a.extras;
      const T* const y = static_cast<const T*>(a.a) + first * a.width;
      const T* const g = static_cast<const T*>(a.b) + first * a.width;
      T* const out = static_cast<T*>(a.out) + first * a.width;
      const int64_t limit = e.Limit(uint32_t(first), a.width);
      const bool scaled = e.scale && !e.unscaled;
      const V scale = Splat(scaled ? static_cast<const C*>(e.scale)[e.scale_view.outer_map(first)] : C(1));
      Accumulator<C> products;
      Walk<C>(limit, [&](auto registers, int64_t begin, int n) {
        V product{};
        for (int k = 0; k < registers.count; ++k) {
          const V p = Get(y + begin + k * W, n), h = Get(g + begin + k * W, n);
          product = Fma(p, p != V{} ? h : V{}, product);
        }
        products.Add(product);
      });
      const Sum<double> of_h = products.Total();
      const double dot = of_h.sum + (of_h.lost - of_h.lost == 0 ? of_h.lost : 0);
      const C rest = C(dot - C(dot));
      const V sum = Splat(C(dot)), lost = Splat(rest - rest == 0 ? rest : C(0));
      Walk<C>(a.width, [&](auto registers, int64_t begin, int n) {
        for (int k = 0; k < registers.count; ++k) {
          const int64_t i = begin + k * W;
          const V p = Get(y + i, n), v = p * scale * ((Get(g + i, n) - sum) - lost);
          Put(out + i, n, p != V{} ? v : V{});
        }
      });
    }
  }
};

template <class T>
FusedCpuPlan PlanType(const SoftmaxArgs& a) {
  if (a.extras.from_output) return {0, FromOutput<T>::Run};
  if (a.log) return a.backward ? Fused<true, true, T>::Plan(a) : Fused<true, false, T>::Plan(a);
  return a.backward ? Fused<false, true, T>::Plan(a) : Fused<false, false, T>::Plan(a);
}

}  // namespace

FusedCpuPlan PlanFused(const SoftmaxArgs& a) {
  switch (a.dtype) {
    case DType::kF16: return PlanType<Half>(a);
    case DType::kBF16: return PlanType<BFloat>(a);
    case DType::kF32: return PlanType<float>(a);
    case DType::kF64: return PlanType<double>(a);
  }
  return {};
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
