// Rows that fit a register more than once: part of softmax_cpu_isa.cc, for contiguous rows only.
//
// A register holds as many whole rows as fit it, side by side as they lie in memory. Lanes of a row
// are merged by log2(width) permutations within the register, and go back to all lanes of the row by
// one more. Lanes above the last whole row compute what belongs to the next register: nothing reads
// their statistics, and the next register overwrites what they store.
#pragma once

#include "common/simd.h"
#include "softmax.h"

namespace jaxkern {
namespace JAXKERN_ISA {

// For 2 * width <= lanes. Row is the Kernel that treats a row at a time, of which this shares the arithmetic.
template <class Row, bool kLog, bool kBackward, class T, bool kMask>
struct NarrowKernel {
  using C = Compute<T>;
  using V = Vec<C>;
  using I = IntVec<C>;
  static constexpr int W = kLanes<C>;
  // Of a group, whose divisions and logarithms are done together, and which stays in the L1 cache.
  using Factors = typename Row::FactorsOfRows;
  static constexpr int kMaxRows = sizeof(Factors::p) / sizeof(C), kMaxRegisters = 16;
  static constexpr int kMaxSteps = 3;       // log2 of the widest row

  struct Layout {
    int width, rows, lanes, steps;
    I shift[kMaxSteps];   // the lane 1, 2, 4 places further along the row; itself where that is another row's
    I inside[kMaxSteps];  // whether it is another lane of the row
    I first, row;         // a lane's first lane of its row, and its row
  };
  static JAXKERN_INLINE Layout MakeLayout(int width) {
    Layout y;
    y.width = width;
    y.rows = W / width;
    y.lanes = y.rows * width;
    for (y.steps = 0; 1 << y.steps < width; ++y.steps) {
    }
    for (int l = 0; l < W; ++l) {
      const int row = l / width, at = l - row * width;
      y.row[l] = l < y.lanes ? row : 0;
      y.first[l] = row * width;
      for (int k = 0; k < y.steps; ++k) {
        const bool inside = l < y.lanes && at + (1 << k) < width;
        y.shift[k][l] = inside ? l + (1 << k) : l;
        y.inside[k][l] = inside ? -1 : 0;
      }
    }
    return y;
  }

  // In the first lane of every row, all lanes of the row.
  static JAXKERN_INLINE V MaxOfRows(const Layout& y, V v) {
    for (int k = 0; k < y.steps; ++k) v = Max(Permute<C>(v, y.shift[k]), v);
    return v;
  }
  static JAXKERN_INLINE V Further(const Layout& y, int k, V v) {  // from the lane 2^k further along, or 0
    return BitCast<V>(BitCast<I>(Permute<C>(v, y.shift[k])) & y.inside[k]);
  }
  static JAXKERN_INLINE Sum<V> SumOfRows(const Layout& y, V v) {
    Sum<V> s{v, V{}};
    for (int k = 0; k < y.steps; ++k) s.Merge({Further(y, k, s.sum), Further(y, k, s.lost)});
    return s;
  }
  // At most 8 terms of at most 1: the parts of them that are multiples of the unit in the last
  // place of 16 add up exactly, the rests are so small that their rounding does not matter.
  static JAXKERN_INLINE Sum<V> SumOfPowers(const Layout& y, V v) {
    Sum<V> s{(v + C(24)) - C(24), V{}};
    s.lost = v - s.sum;
    for (int k = 0; k < y.steps; ++k) s.sum += Further(y, k, s.sum), s.lost += Further(y, k, s.lost);
    return s;
  }

  struct Stats {
    alignas(64) double state[kMaxRows], sum[kMaxRows], lost[kMaxRows], sum_of_g[kMaxRows], lost_of_g[kMaxRows];
  };
  static JAXKERN_INLINE void Collect(const Layout& y, V v, double* rows) {
    C lanes[W];
    Store(lanes, v);
    for (int r = 0; r < y.rows; ++r) rows[r] = lanes[r * y.width];
  }

  // The elements of a register, of which `left` may be read.
  static JAXKERN_INLINE V LoadRows(const void* array, int64_t at, int64_t left, V fill) {
    const T* p = static_cast<const T*>(array) + at;
    return left >= W ? Load(p) : LoadPart(p, int(left), fill);
  }
  // Which lanes of rows [row, row + count) take part.
  static JAXKERN_INLINE I Participants(const SoftmaxArgs& a, const Layout& y, int64_t row, int count) {
    const IndexMap& rows = a.mask_view.outer_map;
    if (rows.rank == 1 && rows.stride[0] == y.width && a.mask_view.axis_stride == 1) {  // as x lies
      return LoadMask<C>(a.mask + row * y.width, count * y.width);
    }
    uint8_t bytes[W] = {};
    for (int r = 0; r < count; ++r) {
      const uint8_t* mask = a.mask + rows(row + r);
      for (int k = 0; k < y.width; ++k) bytes[r * y.width + k] = mask[k * a.mask_view.axis_stride];
    }
    return LoadMask<C>(bytes);
  }

  static void Run(const SoftmaxArgs& a, int64_t first, int64_t last) {
    const Layout y = MakeLayout(int(a.width));
    const int64_t total = a.outer * a.width, end = last * a.width;
    const int group = y.rows * kMaxRegisters < kMaxRows ? y.rows * kMaxRegisters : kMaxRows / y.rows * y.rows;
    alignas(64) Stats stats = {};
    V x[kMaxRegisters], state[kMaxRegisters];
    Exponential<V> kept[kMaxRegisters];
    I mask[kMaxRegisters], same{};  // same: for all rows, if they have one mask
    if (kMask && a.mask_view.outer_map.rank == 0) same = Participants(a, y, 0, y.rows);
    const auto masked = [&](int i, V v, V otherwise) { return kMask ? (mask[i] ? v : otherwise) : v; };
    for (int64_t row = first; row < last; row += group) {
      const int count = int(last - row < group ? last - row : group);
      // One thing for every register before the next for any, so that the CPU overlaps them.
      for (int r = 0, i = 0; r < count; r += y.rows, ++i) {
        const int64_t at = (row + r) * a.width;
        const int rows = count - r < y.rows ? count - r : y.rows;
        if constexpr (kMask) mask[i] = a.mask_view.outer_map.rank == 0 ? same : Participants(a, y, row + r, rows);
        x[i] = masked(i, LoadRows(a.a, at, total - at, Row::Nothing()), Row::Nothing());
        __builtin_prefetch(static_cast<const T*>(a.a) + at + group * a.width);
        state[i] = MaxOfRows(y, Row::kPowers ? x[i] : x[i] == Row::Nothing() ? V{} : Splat(C(1)));
        Collect(y, state[i], stats.state + r);
      }
      for (int r = 0, i = 0; r < count; r += y.rows, ++i) {
        if constexpr (Row::kPowers) {
          const V largest = Permute<C>(state[i], y.first);
          kept[i] = ExpParts<C>(x[i] - (largest == Splat(C(-__builtin_inf())) ? V{} : largest));
          const V power = kept[i].Rounded();
          const Sum<V> sum = SumOfPowers(y, power);
          Collect(y, sum.sum, stats.sum + r), Collect(y, sum.lost, stats.lost + r);
          if constexpr (!Row::kParts) kept[i].scale = power;
        }
        if constexpr (kBackward) {
          const int64_t at = (row + r) * a.width;
          const V g = masked(i, LoadRows(a.b, at, total - at, V{}), V{});
          const Sum<V> sum = SumOfRows(y, kLog ? g : x[i] * g);
          Collect(y, sum.sum, (Row::kPowers ? stats.sum_of_g : stats.sum) + r);
          Collect(y, sum.lost, (Row::kPowers ? stats.lost_of_g : stats.lost) + r);
        }
      }
      struct {
        Factors rows;
        C beyond[W];  // of the last rows a whole register is read
      } f;
      Row::Finish(stats.state, kMaxRows, count, &f.rows);
      for (int r = 0, i = 0; r < count; r += y.rows, ++i) {
        const int64_t at = (row + r) * a.width;
        const auto spread = [&](const C* of_row) { return Permute<C>(Load(of_row + r), y.row); };
        const V g = kBackward ? LoadRows(a.b, at, total - at, V{}) : V{};
        V out = Row::Output(x[i], g, kept[i], spread(f.rows.p), spread(f.rows.q), spread(f.rows.r));
        out = masked(i, out, kLog && !kBackward ? Splat(C(-__builtin_inf())) : V{});
        T* p = static_cast<T*>(a.out) + at;
        end - at >= W ? Store(p, out) : StorePart(p, int(end - at), out);
      }
    }
  }

  static SoftmaxCpuPlan Plan(const SoftmaxArgs& a) {
    SoftmaxCpuPlan plan;
    plan.strips = a.outer;
    plan.chunks = 1;
    plan.run = Run;
    return plan;
  }
};

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
