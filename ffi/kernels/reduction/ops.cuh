// The arithmetic of the row reductions: one Op per operation, used by every kernel of reduction.cuh. Device functions
// only. The only memory accesses here are the stores of results (Op::Store): one element per row of p.out and, for
// logsumexp, optionally of p.largest and p.total.
//
// An Op works on values of its type V:
//     Neutral      returns the value of an element that takes no part
//     Accumulate   folds values, or packs of them, into a Stat, a thread's share of a row
//     Merge        combines two Stats
//     Level        brings the Stats of a group of lanes to a common base before Join; AccumulateLevel does both
//     Exchange     returns the Stat of the lane whose number differs in the bit `lane`
//     Join         combines two Stats with a common base
//     Store        writes the result of a whole row from its Stat
//     Short        is the Op for rows of a few elements per lane
//     Down         accumulates N columns while a thread walks down them: Add takes values of one column or packs of
//                  all, Count the number of elements that take part, and Finish writes the Stats to the thread's slots
//                  of shared memory. kAhead: registers suffice to load the next packs early
//
// Template parameters of the Ops: T_, the element type; U, packs or values per call; N, elements of a pack or columns
// of a thread; K, rows whose Stats are handled together.
#pragma once

#include "common/broadcast.h"
#include "common/exponential.cuh"
#include "common/extremes.h"
#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace jaxkern {

// A reduction over the middle dimension of [rows, width, inner]. plan.py writes this layout.
struct ReduceParams {
  const void* x;
  void* out;      // [rows, inner]
  void* largest;  // logsumexp: the largest element of each row, or null
  void* total;    // sum of e^(x - largest); 0 if largest is -inf, largest itself if inf or NaN
  int64_t rows;
  int64_t width;
  int64_t inner;
  int64_t parts;     // blocks per row or column; if more than 1, out is [rows, inner, parts] of Stats
  int64_t each;      // elements of a part, at most
  uint64_t flip;     // min is the max of values with these bits flipped; otherwise 0
  uint64_t neutral;  // bits of the neutral element before flipping, repeated to 8 bytes
  double scale;      // mean: 1 / width; otherwise 1
  bool mean;
  bool wide;            // result type: int64 for integer sums, float for 16-bit types
  bool whole;           // every row consists of whole vectors
  bool exceeds_l2;      // see ReadPolicy
  const uint8_t* mask;  // one byte per element, 1 = takes part; null: all do
  BroadcastView mask_view;
};
static_assert(sizeof(ReduceParams) == 296, "plan.py");

// Converts the elements of a pack to V.
template <class V, class T, int N> __device__ __forceinline__ void Values(const Pack<T, N>& pack, V* v) {
  if constexpr (std::is_integral_v<T>) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (sizeof(T) == 8) {
        v[i] = static_cast<V>(static_cast<uint64_t>(pack.word[2 * i + 1]) << 32 | pack.word[2 * i]);
      } else {
        constexpr int kPer = 4 / sizeof(T);
        v[i] = static_cast<V>(static_cast<T>(pack.word[i / kPer] >> (i % kPer * 8 * sizeof(T))));
      }
    }
  } else {
    V out[N];
    Unpack(pack, out);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = out[i];
  }
}
template <class V, class T> __device__ __forceinline__ V ValueOf(T x) {
  if constexpr (std::is_integral_v<T>) return static_cast<V>(x);
  else return ToCompute(x);
}

// Merges the Stats of aligned groups of `lanes` lanes, a power of two.
template <class Op> __device__ __forceinline__ typename Op::Stat MergeLanes(typename Op::Stat stat, int lanes) {
  typename Op::Stat all[1] = {stat};
  Op::Level(all, lanes);
  for (int lane = lanes / 2; lane > 0; lane /= 2) all[0] = Op::Join(all[0], Op::Exchange(all[0], lane));
  return all[0];
}

struct MaxOrNan {
  template <class V> __device__ __forceinline__ V operator()(V a, V b) const { return LargerOrNan(a, b); }
};

template <class T> __device__ __forceinline__ uint32_t MaxOrNanOfPairs(uint32_t a, uint32_t b) {
  uint32_t m;
  if constexpr (std::is_same_v<T, __half>) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  else asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  return m;
}

template <class T> __device__ __forceinline__ void StoreRounded(const ReduceParams& p, int64_t at, Compute<T> y) {
  if (sizeof(T) == 2 && p.wide) static_cast<Compute<T>*>(p.out)[at] = y;
  else static_cast<T*>(p.out)[at] = FromCompute<T>(y);
}

// The larger value of a pair; NaN if either is NaN.
template <class V, class T> __device__ __forceinline__ V LargerOf(uint32_t word) {
  Pack<T, 2> pair;
  pair.word[0] = word;
  V v[2];
  Unpack(pair, v);
  return MaxOrNan()(v[0], v[1]);
}

// The largest 16-bit element of some packs, compared in pairs; NaN if any is NaN.
template <class V, class T, int U, int N> __device__ __forceinline__ V LargestOf(const Pack<T, N> (&raw)[U]) {
  static_assert(sizeof(T) == 2 && N % 2 == 0);
  uint32_t m[U];
#pragma unroll
  for (int i = 0; i < U; ++i) {
    m[i] = raw[i].word[0];
#pragma unroll
    for (int w = 1; w < Pack<T, N>::kWords; ++w) m[i] = MaxOrNanOfPairs<T>(m[i], raw[i].word[w]);
    if (i > 0) m[0] = MaxOrNanOfPairs<T>(m[0], m[i]);
  }
  return LargerOf<V, T>(m[0]);
}

// Converts all elements of some packs to V.
template <class V, class T, int U, int N>
__device__ __forceinline__ void AllValues(const Pack<T, N> (&raw)[U], V (&v)[U * N]) {
#pragma unroll
  for (int i = 0; i < U; ++i) Values(raw[i], v + i * N);
}

// A thread's slots of shared memory: one Stat per column.
template <class Stat> struct ColumnsRoom {
  Stat* first;
  int stride;
  __device__ __forceinline__ Stat& operator[](int j) const { return first[j * stride]; }
};

// Down with one Stat per column.
template <class Op, int N> struct StatsDown {
  static constexpr bool kAhead = sizeof(typename Op::T) == 4 && sizeof(typename Op::Stat) <= 8;
  typename Op::Stat stat[N];
  ColumnsRoom<typename Op::Stat> room;

  explicit __device__ __forceinline__ StatsDown(ColumnsRoom<typename Op::Stat> room) : room(room) {
#pragma unroll
    for (int j = 0; j < N; ++j) stat[j] = Op::Identity();
  }
  template <int U> __device__ __forceinline__ void Add(const ReduceParams& p, const typename Op::V (&v)[U]) {
    static_assert(N == 1);
    Op::Accumulate(p, stat[0], v);
  }
  template <int U> __device__ __forceinline__ void Add(const ReduceParams& p, const Pack<typename Op::T, N> (&raw)[U]) {
    typename Op::V v[U * N];
    AllValues(raw, v);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      typename Op::V of_column[U];
#pragma unroll
      for (int i = 0; i < U; ++i) of_column[i] = v[i * N + j];
      Op::Accumulate(p, stat[j], of_column);
    }
  }
  __device__ __forceinline__ void Count(int n) { Op::Count(stat[0], n); }
  __device__ __forceinline__ void Finish() const {
#pragma unroll
    for (int j = 0; j < N; ++j) room[j] = stat[j];
  }
};

// Base of Ops whose Stats have no base.
template <class Op> struct AlreadyLevel {
  template <class Stat, int K> static __device__ __forceinline__ void Level(Stat (&)[K], int) {}
  template <class Stat, int K, class T, int U, int N>
  static __device__ __forceinline__ void AccumulateLevel(const ReduceParams& p, Stat (&stat)[K],
                                                         const Pack<T, N> (&raw)[K][U], int) {
#pragma unroll
    for (int u = 0; u < K; ++u) Op::Accumulate(p, stat[u], raw[u]);
  }
};

// ---- sum and mean

// kMasked: count elements, for the mean of a masked row. kFloat: accumulate in float, for rows of so few 16-bit
// elements that the error is a few float ulps.
template <class T_, bool kMasked, bool kFloat = false> struct Sum_ : AlreadyLevel<Sum_<T_, kMasked, kFloat>> {
  using T = T_;
  static constexpr bool kInteger = std::is_integral_v<T>, kCounts = kMasked && !kInteger;
  // The values of a few packs of small integers are summed in 32 bits.
  using V = std::conditional_t<!kInteger, Compute<T>, std::conditional_t<sizeof(T) <= 2, int32_t, int64_t>>;
  using S = std::conditional_t<kInteger, int64_t, std::conditional_t<kFloat, float, double>>;
  using Short = Sum_<T, kMasked, !kInteger && sizeof(T) == 2>;
  struct Counted {
    S sum;
    int64_t count;
  };
  struct Uncounted {
    S sum;
  };
  using Stat = std::conditional_t<kCounts, Counted, Uncounted>;

  // Down for 16-bit types: four calls of Add are summed in float, and then added to the double in shared memory.
  // Conversions to double have an eighth of the throughput of additions, and doubles take registers. Each float
  // addition has a relative error of 2^-24.
  template <int N> struct FloatsDown {
    static constexpr bool kAhead = true;
    float low[N] = {};
    int times = 0;
    ColumnsRoom<Stat> room;

    explicit __device__ __forceinline__ FloatsDown(ColumnsRoom<Stat> room) : room(room) {
#pragma unroll
      for (int j = 0; j < N; ++j) room[j] = Identity();
    }
    template <int U> __device__ __forceinline__ void Add(const ReduceParams&, const Pack<T, N> (&raw)[U]) {
#pragma unroll
      for (int w = 0; w < Pack<T, N>::kWords; ++w) {
        V left[U], right[U];
#pragma unroll
        for (int i = 0; i < U; ++i) {
          Pack<T, 2> pair;
          V v[2];
          pair.word[0] = raw[i].word[w];
          Unpack(pair, v);
          left[i] = v[0], right[i] = v[1];
        }
        low[2 * w] += Fold(left, SumOf());
        low[2 * w + 1] += Fold(right, SumOf());
      }
      if (++times % 4 == 0) Keep();
    }
    __device__ __forceinline__ void Keep() {
#pragma unroll
      for (int j = 0; j < N; ++j) room[j].sum += static_cast<S>(low[j]), low[j] = 0;
    }
    __device__ __forceinline__ void Finish() { Keep(); }
    __device__ __forceinline__ void Count(int) {}
  };
  template <int N> using Down =
      std::conditional_t<!kInteger && sizeof(T) == 2 && (N > 1), FloatsDown<N>, StatsDown<Sum_, N>>;

  static __device__ __forceinline__ Stat Identity() { return {S(0)}; }
  static __device__ __forceinline__ V Neutral(const ReduceParams&) { return V(0); }
  static __device__ __forceinline__ void Count(Stat& stat, int64_t n) {
    if constexpr (kCounts) stat.count += n;
  }
  template <int N> static __device__ __forceinline__ void Accumulate(const ReduceParams&, Stat& stat, const V (&v)[N]) {
    stat.sum += static_cast<S>(Fold(v, SumOf()));
  }
  template <int U, int N>
  static __device__ __forceinline__ void Accumulate(const ReduceParams& p, Stat& stat, const Pack<T, N> (&raw)[U]) {
    V v[U * N];
    AllValues(raw, v);
    Accumulate(p, stat, v);
  }
  static __device__ __forceinline__ Stat Merge(Stat a, Stat b) {
    a.sum += b.sum;
    if constexpr (kCounts) a.count += b.count;
    return a;
  }
  static __device__ __forceinline__ Stat Exchange(Stat stat, int lane) {
    stat.sum = __shfl_xor_sync(0xffffffffu, stat.sum, lane);
    if constexpr (kCounts) stat.count = __shfl_xor_sync(0xffffffffu, stat.count, lane);
    return stat;
  }
  static __device__ __forceinline__ Stat Join(Stat a, Stat b) { return Merge(a, b); }
  static __device__ __forceinline__ void Store(const ReduceParams& p, int64_t at, const Stat& stat) {
    if constexpr (kInteger) {
      if (p.wide) static_cast<int64_t*>(p.out)[at] = stat.sum;
      else static_cast<int32_t*>(p.out)[at] = static_cast<int32_t>(stat.sum);
    } else {
      double sum = static_cast<double>(stat.sum) * p.scale;
      if constexpr (kCounts) {
        if (p.mean && p.mask) sum = static_cast<double>(stat.sum) / static_cast<double>(stat.count);
      }
      StoreRounded<T>(p, at, static_cast<V>(sum));
    }
  }
};

// ---- max and min

template <class T_> struct Max_ : AlreadyLevel<Max_<T_>> {
  using T = T_;
  using V = std::conditional_t<
      !std::is_integral_v<T>, Compute<T>,
      std::conditional_t<(sizeof(T) < 4), std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>, T>>;
  using Short = Max_;
  struct Stat {
    V max;
  };

  // Down for 16-bit types: two columns at a time.
  template <int N> struct PairsDown {
    static constexpr bool kAhead = true;
    Pack<T, N> most;
    bool any = false;
    ColumnsRoom<Stat> room;

    explicit __device__ __forceinline__ PairsDown(ColumnsRoom<Stat> room) : room(room) {}
    template <int U> __device__ __forceinline__ void Add(const ReduceParams& p, const Pack<T, N> (&raw)[U]) {
#pragma unroll
      for (int w = 0; w < Pack<T, N>::kWords; ++w) {
        uint32_t m = raw[0].word[w] ^ FlipOfPairs(p);
        if (any) m = MaxOrNanOfPairs<T>(m, most.word[w]);
#pragma unroll
        for (int i = 1; i < U; ++i) m = MaxOrNanOfPairs<T>(m, raw[i].word[w] ^ FlipOfPairs(p));
        most.word[w] = m;
      }
      any = true;
    }
    __device__ __forceinline__ void Finish() const {
      V v[N];
      Unpack(most, v);
#pragma unroll
      for (int j = 0; j < N; ++j) room[j] = {any ? v[j] : Least()};
    }
  };
  template <int N> using Down =
      std::conditional_t<!std::is_integral_v<T> && sizeof(T) == 2 && (N > 1), PairsDown<N>, StatsDown<Max_, N>>;

  static __device__ __forceinline__ V Flip(const ReduceParams& p, V x) {
    if constexpr (std::is_same_v<V, float>) return __uint_as_float(__float_as_uint(x) ^ static_cast<uint32_t>(p.flip));
    else if constexpr (std::is_same_v<V, double>) return __longlong_as_double(__double_as_longlong(x) ^ p.flip);
    else return x ^ static_cast<V>(p.flip);
  }
  static __device__ __forceinline__ V Least() {
    if constexpr (std::is_integral_v<T>) {
      return std::is_signed_v<T> ? static_cast<V>(static_cast<T>(uint64_t{1} << (8 * sizeof(T) - 1))) : V(0);
    } else {
      return -Infinity<V>();
    }
  }
  static __device__ __forceinline__ Stat Identity() { return {Least()}; }
  static __device__ __forceinline__ V Neutral(const ReduceParams& p) { return Flip(p, Least()); }
  static __device__ __forceinline__ void Count(Stat&, int64_t) {}
  template <int N>
  static __device__ __forceinline__ void Accumulate(const ReduceParams& p, Stat& stat, const V (&v)[N]) {
    V flipped[N];
#pragma unroll
    for (int i = 0; i < N; ++i) flipped[i] = Flip(p, v[i]);
    stat.max = MaxOrNan()(stat.max, Fold(flipped, MaxOrNan()));
  }
  template <int U, int N>
  static __device__ __forceinline__ void Accumulate(const ReduceParams& p, Stat& stat, const Pack<T, N> (&raw)[U]) {
    if constexpr (!std::is_integral_v<T> && sizeof(T) == 2) {
      Pack<T, N> flipped[U];
#pragma unroll
      for (int i = 0; i < U; ++i)
#pragma unroll
        for (int w = 0; w < Pack<T, N>::kWords; ++w) flipped[i].word[w] = raw[i].word[w] ^ FlipOfPairs(p);
      stat.max = MaxOrNan()(stat.max, LargestOf<V>(flipped));
    } else {
      V v[U * N];
      AllValues(raw, v);
      Accumulate(p, stat, v);
    }
  }
  // The sign bit of p.flip for each of two 16-bit numbers.
  static __device__ __forceinline__ uint32_t FlipOfPairs(const ReduceParams& p) {
    return static_cast<uint32_t>(p.flip) | static_cast<uint32_t>(p.flip) >> 16;
  }
  static __device__ __forceinline__ Stat Merge(Stat a, Stat b) { return {MaxOrNan()(a.max, b.max)}; }
  static __device__ __forceinline__ Stat Exchange(Stat stat, int lane) {
    return {__shfl_xor_sync(0xffffffffu, stat.max, lane)};
  }
  static __device__ __forceinline__ Stat Join(Stat a, Stat b) { return Merge(a, b); }
  static __device__ __forceinline__ void Store(const ReduceParams& p, int64_t at, const Stat& stat) {
    const V x = Flip(p, stat.max);
    if constexpr (std::is_integral_v<T>) static_cast<T*>(p.out)[at] = static_cast<T>(x);
    else StoreRounded<T>(p, at, x);
  }
};

// ---- logsumexp

// Returns max + log(sum * (1 + low)). The error of logf is relative to a logarithm that may be larger than the result.
// Therefore sum = m * 2^k with m near 1, whose logarithm and error are small. The high part of k * log(2) is exact, and
// the rounding error of max + high is added to the rest.
__device__ __forceinline__ float PlusLog(float max, float sum, float low) {
  const int bits = __float_as_int(sum), k = (bits - 0x3f3504f3) >> 23;  // bits of sqrt(1/2)
  const float high = static_cast<float>(k) * 0x1.62e4p-1f;              // upper 16 bits of log(2)
  const float rest = fmaf(static_cast<float>(k), 0x1.7f7d1cp-20f, logf(__int_as_float(bits - (k << 23))) + low);
  const float y = max + high, of_high = y - max;
  return y + ((max - (y - of_high)) + (high - of_high) + rest);
}

// One pass: the sum is relative to the largest value so far and rescaled when a larger one occurs (Milakov and
// Gimelshein, 2018). NaN and +inf propagate in the maximum; the sum is then meaningless.
template <class T_> struct LogSumExp_ {
  using T = T_;
  using V = Compute<T>;
  // For 16-bit results a float sum is accurate enough.
  using S = std::conditional_t<sizeof(T) == 2, float, double>;
  struct Stat {
    V max;
    S sum;  // of e^(x - max)
  };
  using Short = LogSumExp_;
  template <int N> using Down = StatsDown<LogSumExp_, N>;

  // 16 bit: sums are relative to the rounded product max * log2(e); Store corrects this. See ExpDifference.
  static __device__ __forceinline__ V Exp(V x, V base) { return ExpDifference<T>(x, base); }
  static __device__ __forceinline__ S Factor(V from, V to) { return static_cast<S>(Rescale<T>(from, to)); }

  static __device__ __forceinline__ Stat Identity() { return {-Infinity<V>(), S(0)}; }
  static __device__ __forceinline__ V Neutral(const ReduceParams&) { return -Infinity<V>(); }
  static __device__ __forceinline__ void Count(Stat&, int64_t) {}
  template <int N> static __device__ __forceinline__ void Accumulate(const ReduceParams&, Stat& stat, const V (&v)[N]) {
    Accumulate(stat, v, Fold(v, MaxOrNan()));
  }
  template <int U, int N>
  static __device__ __forceinline__ void Accumulate(const ReduceParams& p, Stat& stat, const Pack<T, N> (&raw)[U]) {
    V v[U * N];
    AllValues(raw, v);
    if constexpr (sizeof(T) == 2) Accumulate(stat, v, LargestOf<V>(raw));
    else Accumulate(p, stat, v);
  }
  // `largest`: the maximum of the values.
  template <int N> static __device__ __forceinline__ void Accumulate(Stat& stat, const V (&v)[N], V largest) {
    const V max = MaxOrNan()(stat.max, largest), base = Base(max);
    V e[N];
#pragma unroll
    for (int i = 0; i < N; ++i) e[i] = Exp(v[i], base);
    stat = {max, stat.sum * Factor(stat.max, base) + static_cast<S>(Fold(e, SumOf()))};
  }
  static __device__ __forceinline__ Stat Merge(Stat a, Stat b) {
    const V max = MaxOrNan()(a.max, b.max), base = Base(max);
    return {max, a.sum * Factor(a.max, base) + b.sum * Factor(b.max, base)};
  }
  // Rescales all sums to the group's maximum: one exponential per lane instead of two per step.
  template <int K> static __device__ __forceinline__ void Level(Stat (&stat)[K], int lanes) {
    V max[K];
#pragma unroll
    for (int u = 0; u < K; ++u) max[u] = stat[u].max;
    LevelMaxima(max, lanes);
#pragma unroll
    for (int u = 0; u < K; ++u) stat[u] = {max[u], stat[u].sum * Factor(stat[u].max, Base(max[u]))};
  }
  // Starts from the identity, so only the elements need exponentials.
  template <int K, int U, int N>
  static __device__ __forceinline__ void AccumulateLevel(const ReduceParams&, Stat (&stat)[K],
                                                         const Pack<T, N> (&raw)[K][U], int lanes) {
    V v[K][U * N], max[K];
#pragma unroll
    for (int u = 0; u < K; ++u) {
      AllValues(raw[u], v[u]);
      if constexpr (sizeof(T) == 2) max[u] = LargestOf<V>(raw[u]);
      else max[u] = Fold(v[u], MaxOrNan());
    }
    LevelMaxima(max, lanes);
#pragma unroll
    for (int u = 0; u < K; ++u) {
      const V base = Base(max[u]);
      V e[U * N];
#pragma unroll
      for (int i = 0; i < U * N; ++i) e[i] = Exp(v[u][i], base);
      stat[u] = {max[u], static_cast<S>(Fold(e, SumOf()))};
    }
  }
  template <int K> static __device__ __forceinline__ void LevelMaxima(V (&max)[K], int lanes) {
    for (int lane = lanes / 2; lane > 0; lane /= 2) {
#pragma unroll
      for (int u = 0; u < K; ++u) max[u] = MaxOrNan()(max[u], __shfl_xor_sync(0xffffffffu, max[u], lane));
    }
  }
  static __device__ __forceinline__ Stat Exchange(Stat stat, int lane) {
    return {stat.max, __shfl_xor_sync(0xffffffffu, stat.sum, lane)};
  }
  static __device__ __forceinline__ Stat Join(Stat a, Stat b) { return {a.max, a.sum + b.sum}; }
  static __device__ __forceinline__ void Store(const ReduceParams& p, int64_t at, const Stat& stat) {
    V y = stat.max;
    if (y - y == V(0)) {  // finite
      const V sum = static_cast<V>(stat.sum);
      if constexpr (sizeof(T) == 8) {
        y += log(sum);
      } else if constexpr (sizeof(T) == 4) {
        y = PlusLog(y, sum, static_cast<V>(stat.sum - sum) / sum);
      } else {
        y += logf(sum) - LogOfExcess<T>(y) * kLn2;
      }
    }
    StoreRounded<T>(p, at, y);
    if (p.largest) {
      V total = stat.max < V(0) ? V(0) : stat.max;  // for infinities and NaN
      if (stat.max - stat.max == V(0)) {
        total = static_cast<V>(stat.sum);
        if constexpr (sizeof(T) == 2) total *= Exp2Approx(-LogOfExcess<T>(stat.max));
      }
      static_cast<V*>(p.largest)[at] = stat.max;
      static_cast<V*>(p.total)[at] = total;
    }
  }
};

}  // namespace jaxkern
