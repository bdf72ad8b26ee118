// The fused softmax on the CPU for one instruction set: what comes before and after the kernels of
// softmax_cpu_isa.cc, which do the rest in a few rows of the type that is computed in.
//
//     Prepare   s = scale * x + bias, -inf where masked; of a gradient also h, the cotangent of what was kept, times the scale
//     Finish    the result, with dropout, rounded
//
// Each is a few short passes over a row that lies in the L1 or L2 cache.
#include "common/philox.h"
#include "common/simd.h"
#include "softmax_cpu_isa.h"

namespace jaxkern {
namespace JAXKERN_ISA {
namespace {

constexpr double kInf = __builtin_inf();
constexpr int kBlocks = 16, kDraws = 8 * kBlocks;  // drawn at a time

// Bits for elements [first, first + kDraws) of a row, where first is a multiple of 8. Lanes side by side, for
// the compiler to make vectors of.
JAXKERN_OUTLINE void Draw(uint32_t first, uint32_t row, uint32_t key0, uint32_t key1, uint16_t (&draws)[kDraws]) {
  PhiloxBlock blocks[kBlocks];
  for (int b = 0; b < kBlocks; ++b) blocks[b] = Philox(first / 8 + b, row, key0, key1);
  for (int b = 0; b < kBlocks; ++b) {
    for (int i = 0; i < 4; ++i) {
      draws[8 * b + 2 * i] = uint16_t(blocks[b].word[i]);
      draws[8 * b + 2 * i + 1] = uint16_t(blocks[b].word[i] >> 16);
    }
  }
}

// to[i] = f(from[i]) in registers; f also gets the place of its elements and their number.
template <class From, class To, class F>
JAXKERN_INLINE void Map(const From* from, To* to, int64_t count, F f) {
  using V = Vec<Compute<From>>;
  constexpr int W = kLanes<Compute<From>>;
  int64_t i = 0;
  for (; i + W <= count; i += W) Store(to + i, f(Load(from + i), i, W));
  if (i < count) StorePart(to + i, int(count - i), f(LoadPart(from + i, int(count - i), V{}), i, int(count - i)));
}
template <class From, class To>
JAXKERN_INLINE void Convert(const From* from, To* to, int64_t count) {
  Map(from, to, count, [](auto v, int64_t, int) { return v; });
}

template <class T>
struct Fused {
  using C = Compute<T>;

  struct RowOf {
    int64_t limit;
    const uint8_t* mask;  // null: none
    C scale;
    uint32_t key0, key1, number;
  };
  static JAXKERN_INLINE RowOf MakeRow(const SoftmaxArgs& a, int64_t row) {
    const SoftmaxExtras& e = a.extras;
    RowOf r = {};
    r.limit = e.Limit(uint32_t(row), a.width);
    if (a.mask) r.mask = a.mask + a.mask_view.outer_map(row);
    r.scale = e.scale ? static_cast<const C*>(e.scale)[e.scale_view.outer_map(row)] : C(1);
    if (e.key) {
      const uint32_t* const words = e.key + (e.key_per_row ? 4 * row : 0);
      r.key0 = words[0], r.key1 = words[1];
      r.number = e.key_per_row ? words[2] : uint32_t(row);
    }
    return r;
  }

  // What the result is multiplied by.
  static JAXKERN_INLINE C Factor(const SoftmaxArgs& a, const RowOf& r) {
    const C kept = a.extras.key ? C(a.extras.kept_inverse) : C(1);
    return a.backward && !a.extras.unscaled ? kept * r.scale : kept;
  }

  // Elements that take no part become `otherwise`.
  static JAXKERN_INLINE void Mask(const SoftmaxArgs& a, const RowOf& r, C* v, C otherwise) {
    if (r.mask && a.mask_view.axis_stride) {
      for (int64_t i = 0; i < r.limit; ++i) v[i] = r.mask[i] ? v[i] : otherwise;
    }
    for (int64_t i = r.mask && !a.mask_view.axis_stride && !*r.mask ? 0 : r.limit; i < a.width; ++i) v[i] = otherwise;
  }
  // Elements that are dropped become 0.
  static JAXKERN_INLINE void Drop(const SoftmaxArgs& a, const RowOf& r, C* v) {
    const uint32_t threshold = a.extras.threshold;
    for (int64_t first = 0; first < r.limit; first += kDraws) {
      uint16_t draws[kDraws];
      Draw(uint32_t(first), r.number, r.key0, r.key1, draws);
      const int64_t count = r.limit - first < kDraws ? r.limit - first : kDraws;
      for (int64_t i = 0; i < count; ++i) v[first + i] = draws[i] >= threshold ? v[first + i] : C(0);
    }
  }

  template <class B>
  static JAXKERN_INLINE void ScaleAndBias(const SoftmaxArgs& a, int64_t row, const RowOf& r, const T* x, C* s) {
    const BroadcastView& view = a.extras.bias_view;
    const B* const bias = static_cast<const B*>(a.extras.bias) + view.outer_map(row);
    C same;
    Convert(bias, &same, 1);
    if (view.axis_stride == 0) {
      Map(x, s, r.limit, [&](auto v, int64_t, int) { return v * r.scale + same; });
    } else {
      Map(x, s, r.limit, [&](auto v, int64_t i, int count) {
        return v * r.scale + (count == kLanes<C> ? Load(bias + i) : LoadPart(bias + i, count, Vec<C>{}));
      });
    }
  }

  static void Prepare(const SoftmaxArgs& a, int64_t first, int64_t count, void* logits, void* cotangents) {
    for (int64_t k = 0; k < count; ++k) {
      const RowOf r = MakeRow(a, first + k);
      const int64_t at = (first + k) * a.width;
      const T* const x = static_cast<const T*>(a.a) + at;
      C* const s = static_cast<C*>(logits) + k * a.width;
      if (a.extras.bias) {
        a.extras.bias_wide ? ScaleAndBias<C>(a, first + k, r, x, s) : ScaleAndBias<T>(a, first + k, r, x, s);
      } else {
        Map(x, s, r.limit, [&](auto v, int64_t, int) { return v * r.scale; });
      }
      Mask(a, r, s, C(-kInf));
      if (!a.backward) continue;
      C* const h = static_cast<C*>(cotangents) + k * a.width;
      const C factor = Factor(a, r);  // the gradient is linear in h
      Map(static_cast<const T*>(a.b) + at, h, r.limit, [&](auto v, int64_t, int) { return v * factor; });
      Mask(a, r, h, C(0));
      if (a.extras.key) Drop(a, r, h);
    }
  }

  static void Finish(const SoftmaxArgs& a, int64_t first, int64_t count, void* result) {
    for (int64_t k = 0; k < count; ++k) {
      const RowOf r = MakeRow(a, first + k);
      C* const v = static_cast<C*>(result) + k * a.width;
      if (a.extras.key && !a.backward) {
        const C factor = Factor(a, r);
        for (int64_t i = 0; i < r.limit; ++i) v[i] *= factor;
        Drop(a, r, v);
      }
      Mask(a, r, v, a.log && !a.backward ? C(-kInf) : C(0));  // a row with NaN has it everywhere
      T* const out = static_cast<T*>(a.out) + (first + k) * a.width;
      if (static_cast<void*>(v) != out) Convert(v, out, a.width);
    }
  }
};

}  // namespace

FusedCpuPlan PlanFused(const SoftmaxArgs& a) {
  switch (a.dtype) {
    case DType::kF16: return {Fused<Half>::Prepare, Fused<Half>::Finish};
    case DType::kBF16: return {Fused<BFloat>::Prepare, Fused<BFloat>::Finish};
    case DType::kF32: return {Fused<float>::Prepare, Fused<float>::Finish};
    case DType::kF64: return {Fused<double>::Prepare, Fused<double>::Finish};
  }
  return {};
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
