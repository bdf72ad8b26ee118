// The segment softmax and its gradient on CUDA, over positions in the order of their segments.
//
// The order is cut into tiles (segment_softmax_plan.h). A block takes a tile and a slab of columns, and of the tile the
// segments that begin in it, beyond its end if need be: it
//
//     reads the keys      which of its places end a run of equal keys, as a bit mask a stretch of places
//     stages the rows     to shared memory, as vectors, in the type that is computed in
//     reduces             a thread a stretch and column: the statistics of each run, or of the parts of the two that
//                         its edges cut; exponentials stay in registers
//     carries over        a segmented scan over stretches joins those parts
//     writes              the result in the place of the data, from there to memory, as vectors
//
// so that data is read and written once, whatever the segments are like: nothing is decided for each element but
// whether a run ends there. A segment that the tile has no room for is long: the tiles that it lies in leave the
// statistics of their parts in slots (head: the run came in from the tile before; tail: it begins here), SegmentJoin
// merges them in order and leaves the total in each slot, and SegmentRewrite reads these rows once more.
//
// A position of no segment counts as a run of its own, of -inf.
#pragma once

#include "../index_add/index_add.cuh"
#include "../softmax/softmax_ops.cuh"
#include "segment_softmax.h"

namespace jaxkern {

constexpr int kSegmentWarps = kSegmentThreads / kWarp;

struct SegmentShape {
  uint32_t places = 0, room = 0, tiles = 0;  // of a tile; reach: how far beyond its end it can go
  uint32_t reach = 0;
  int columns = 1, slabs = 1, stretches = 1;
  int held = 0;             // elements of an input in shared memory
  bool contiguous = false;  // the rows of a tile are one stretch of memory
  bool vectors = false;     // else: a slab's part of a row is whole aligned vectors
  const void* cotangent = nullptr;
  Divider by_slabs, by_tiles;
  FastDivmod by_columns, by_vectors, by_stretches;
};

// --- What is computed ----------------------------------------------------------------------------------
//
//     Stat      of a run or a part of one, merged in any grouping
//     Reduce    a stretch: what Write needs of each element, and the Stats of the parts of runs at its ends
//               (head: up to the first end in it; tail: from the last one on; both all of it if there is none)
//     Write     a stretch, given the totals of those two runs; other runs are known
//     Map       an element, given the total of its run
//
// `v` are the inputs, of which the first is overwritten, elements `step` apart.

template <class C> __device__ __forceinline__ C Reciprocal(C x) {
  if constexpr (sizeof(C) == 4) return __fdividef(1.0f, x);
  else return C(1) / x;
}

__device__ __forceinline__ bool EndsAt(uint32_t ends, int i) { return ends >> i & 1; }
// Where the run begins that goes on behind the stretch.
__device__ __forceinline__ int TailOf(uint32_t ends) { return ends ? 32 - __clz(ends) : 0; }

template <class T_> struct SegmentForward {
  using T = T_;
  using C = Compute<T>;
  static constexpr int kInputs = 1;

  struct Stat {
    C max, sum;  // of e^(x - max)
  };
  // What exponentials are multiplied by: the reciprocal of their sum, and what that lacks.
  struct Factor {
    C high, low;
  };
  struct Final {
    C base;
    Factor factor;
  };

  static __device__ __forceinline__ C Exp(C x, C base) { return ExpDifference<T, true>(x, base); }
  static __device__ __forceinline__ Stat Identity() { return {-Infinity<C>(), C(0)}; }
  static __device__ __forceinline__ Stat Merge(Stat a, Stat b) {
    const C max = Max(a.max, b.max), base = Base(max);
    return {max, a.sum * Exp(a.max, base) + b.sum * Exp(b.max, base)};
  }
  static __device__ __forceinline__ Stat ShuffleUp(Stat s, int step) {
    return {__shfl_up_sync(~0u, s.max, step), __shfl_up_sync(~0u, s.sum, step)};
  }

  static __device__ __forceinline__ Factor Inverse(C sum) {
    const C high = sum == C(0) ? C(0) : Reciprocal(sum);
    return {high, sizeof(T) >= 4 ? fma(-sum, high, C(1)) * high : C(0)};
  }
  // For exponentials of x - max where the run's total has a larger maximum.
  static __device__ __forceinline__ Factor Scaled(Stat total, C max) {
    const Factor f = Inverse(total.sum);
    const C scale = Exp(max, Base(total.max)), high = scale * f.high;
    return {high, sizeof(T) >= 4 ? fma(scale, f.high, -high) + scale * f.low : C(0)};
  }
  static __device__ __forceinline__ C Times(C e, Factor f) {
    if constexpr (sizeof(T) >= 4) return fma(e, f.high, e * f.low);
    else return e * f.high;
  }

  template <int kQ>
  static __device__ __forceinline__ void Reduce(C* const (&v)[1], int step, uint32_t ends, uint32_t drops,
                                                C (&kept)[kQ], Stat* head, Stat* tail) {
    for (uint32_t left = drops; left; left &= left - 1) v[0][(__ffs(left) - 1) * step] = -Infinity<C>();
    C largest = -Infinity<C>();
#pragma unroll
    for (int i = 0; i < kQ; ++i) {
      largest = Max(largest, v[0][i * step]);  // leaves out NaN, whose power is NaN all the same
      kept[i] = largest;
      if (EndsAt(ends, i)) largest = -Infinity<C>();
    }
    tail->max = largest;
    // Backwards, where the maximum of a run is met before its elements; the sum is known where it begins.
    C base = Base(largest), sum = C(0);
#pragma unroll
    for (int i = kQ - 1; i >= 0; --i) {
      if (EndsAt(ends, i)) {
        largest = kept[i];
        base = Base(largest);
        sum = C(0);
      }
      kept[i] = Exp(v[0][i * step], base);
      sum += kept[i];
      v[0][i * step] = sum;
    }
    *head = {largest, sum};
    const int begin = TailOf(ends);
    tail->sum = begin < kQ ? v[0][begin * step] : C(0);
  }

  template <int kQ>
  static __device__ __forceinline__ void Write(C* const (&v)[1], int step, uint32_t ends, const C (&kept)[kQ],
                                               Stat head, Stat head_total, Stat tail, Stat tail_total) {
    Factor f = Scaled(head_total, head.max);
    const Factor last = Scaled(tail_total, tail.max);
    const int begin = TailOf(ends);
#pragma unroll
    for (int i = 0; i < kQ; ++i) {
      if (i > 0 && EndsAt(ends, i - 1)) f = i == begin ? last : Inverse(v[0][i * step]);
      v[0][i * step] = Times(kept[i], f);
    }
  }

  static __device__ __forceinline__ Final Finish(Stat total) { return {Base(total.max), Inverse(total.sum)}; }
  static __device__ __forceinline__ C Map(const C (&x)[1], const Final& f) { return Times(Exp(x[0], f.base), f.factor); }
};

template <class T_> struct SegmentBackward {
  using T = T_;
  using C = Compute<T>;
  static constexpr int kInputs = 2;  // y, g

  struct Stat {
    C sum;  // of y * g
  };
  using Final = Stat;

  static __device__ __forceinline__ Stat Identity() { return {C(0)}; }
  static __device__ __forceinline__ Stat Merge(Stat a, Stat b) { return {a.sum + b.sum}; }
  static __device__ __forceinline__ Stat ShuffleUp(Stat s, int step) { return {__shfl_up_sync(~0u, s.sum, step)}; }

  template <int kQ>
  static __device__ __forceinline__ void Reduce(C* const (&v)[2], int step, uint32_t ends, uint32_t drops,
                                                C (&kept)[kQ], Stat* head, Stat* tail) {
    for (uint32_t left = drops; left; left &= left - 1) v[0][(__ffs(left) - 1) * step] = C(0);
    const int begin = TailOf(ends);
    C sum = C(0);
    tail->sum = C(0);
#pragma unroll
    for (int i = kQ - 1; i >= 0; --i) {
      if (EndsAt(ends, i)) sum = C(0);
      const C y = v[0][i * step];
      if (y != C(0)) sum += y * v[1][i * step];  // whatever g is beside a y of 0
      kept[i] = sum;
      if (i == begin) tail->sum = sum;
    }
    head->sum = sum;
  }

  template <int kQ>
  static __device__ __forceinline__ void Write(C* const (&v)[2], int step, uint32_t ends, const C (&kept)[kQ], Stat,
                                               Stat head_total, Stat, Stat tail_total) {
    Stat total = head_total;
    const int begin = TailOf(ends);
#pragma unroll
    for (int i = 0; i < kQ; ++i) {
      if (i > 0 && EndsAt(ends, i - 1)) total.sum = i == begin ? tail_total.sum : kept[i];
      v[0][i * step] = Map({v[0][i * step], v[1][i * step]}, total);
    }
  }

  static __device__ __forceinline__ Final Finish(Stat total) { return total; }
  static __device__ __forceinline__ C Map(const C (&x)[2], const Final& f) {
    return x[0] == C(0) ? C(0) : x[0] * (x[1] - f.sum);
  }
};

// --- Between memory and shared memory ------------------------------------------------------------------

// Where a block works.
struct SegmentBlock {
  int64_t o;
  uint32_t tile, begin;  // the first position of the tile
  int column, width;     // of the slab

  __device__ __forceinline__ SegmentBlock(const IndexRun& run, const SegmentShape& s) {
    const int64_t item = s.by_slabs.Div(int64_t{blockIdx.x});
    column = static_cast<int>(blockIdx.x - item * s.slabs) * s.columns;
    o = s.by_tiles.Div(item);
    tile = static_cast<uint32_t>(item - o * s.tiles);
    begin = tile * s.places;
    width = static_cast<int>(min(int64_t{s.columns}, run.inner - column));
  }
};

// An array's rows in shared memory: place p and column c of the tile at values[p * columns + c]. Rows that are one
// stretch of memory are read and written as vectors wherever it begins; they lie in shared memory as far from a
// boundary of 16 bytes as they do in the array.
template <class T> struct Staged {
  using C = Compute<T>;
  static constexpr int kN = kVector<T>, kBatch = 4;  // vectors that a thread has under way
  C* image;
  C* values;
  int ahead;  // elements from a boundary to the tile's first

  __device__ __forceinline__ Staged(const SegmentShape& s, const SegmentBlock& b, C* room, const T* array) : image(room) {
    ahead = s.contiguous ? Ahead(s, b, array) : 0;
    values = image + ahead;
  }
  static __device__ __forceinline__ int Ahead(const SegmentShape& s, const SegmentBlock& b, const T* array) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(array + int64_t{b.begin} * s.columns) % 16 / sizeof(T));
  }

  // `array`: of this o. Places [first, last).
  __device__ __forceinline__ void Read(const IndexRun& run, const SegmentShape& s, const SegmentBlock& b,
                                       const T* array, int first, int last) {
    if (s.contiguous) {
      const T* const from = array + int64_t{b.begin} * s.columns - ahead;
      const int low = ahead + first * s.columns, high = ahead + last * s.columns, stop = (high + kN - 1) / kN;
      for (int base = low / kN + threadIdx.x; base < stop; base += kBatch * kSegmentThreads) {
        Pack<T, kN> part[kBatch] = {};
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const int v = base + u * kSegmentThreads;
          if (v * kN >= low && v * kN + kN <= high) part[u] = LoadVector<T, kN>(from + v * kN);
        }
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const int v = base + u * kSegmentThreads;
          if (v * kN >= low && v * kN + kN <= high) {
            Put(v * kN, part[u]);
          } else {
            for (int e = max(v * kN, low); e < min(v * kN + kN, high); ++e) image[e] = ToCompute(from[e]);
          }
        }
      }
    } else if (s.vectors) {
      ReadRows<kN>(run, s, b, array, first, last, s.by_vectors);
    } else {
      ReadRows<1>(run, s, b, array, first, last, s.by_columns);
    }
  }

  __device__ __forceinline__ void Write(const IndexRun& run, const SegmentShape& s, const SegmentBlock& b, T* array,
                                        int first, int last) const {
    if (s.contiguous) {
      const int out = Ahead(s, b, array);
      T* const to = array + int64_t{b.begin} * s.columns - out;
      const C* const from = values - out;
      const int low = out + first * s.columns, high = out + last * s.columns;
      for (int v = low / kN + threadIdx.x; v < (high + kN - 1) / kN; v += kSegmentThreads) {
        if (v * kN >= low && v * kN + kN <= high) {
          StoreVector<T, kN>(to + v * kN, Get(from + v * kN, out == ahead));
        } else {
          for (int e = max(v * kN, low); e < min(v * kN + kN, high); ++e) to[e] = FromCompute<T>(from[e]);
        }
      }
    } else if (s.vectors) {
      WriteRows<kN>(run, s, b, array, first, last, s.by_vectors);
    } else {
      WriteRows<1>(run, s, b, array, first, last, s.by_columns);
    }
  }

 private:
  __device__ __forceinline__ void Put(int at, const Pack<T, kN>& pack) {
    alignas(16) C c[kN];
    Unpack(pack, c);
#pragma unroll
    for (int i = 0; i < kN; i += 16 / sizeof(C)) {
      *reinterpret_cast<uint4*>(image + at + i) = *reinterpret_cast<const uint4*>(c + i);
    }
  }
  static __device__ __forceinline__ Pack<T, kN> Get(const C* from, bool aligned) {
    alignas(16) C c[kN];
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kN; i += 16 / sizeof(C)) {
        *reinterpret_cast<uint4*>(c + i) = *reinterpret_cast<const uint4*>(from + i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kN; ++i) c[i] = from[i];
    }
    return Repack<T, kN>(c);
  }

  // N elements at a time, of which `by` divides by how many a place has.
  template <int N>
  __device__ __forceinline__ void ReadRows(const IndexRun& run, const SegmentShape& s, const SegmentBlock& b,
                                           const T* array, int first, int last, const FastDivmod& by) {
    const int each = static_cast<int>(by.divisor), items = (last - first) * each;
    for (int base = threadIdx.x; base < items; base += kBatch * kSegmentThreads) {
      Pack<T, N> part[kBatch];
      int64_t row[kBatch];
      int place[kBatch], offset[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int e = base + u * kSegmentThreads, p = by.Div(e);
        place[u] = first + p;
        offset[u] = e < items ? (e - p * each) * N : b.width;
        if (offset[u] < b.width) row[u] = Row(run, b.begin + place[u]);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (offset[u] < b.width) part[u] = LoadPart<T, N>(array + row[u] * run.inner + b.column + offset[u]);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (offset[u] >= b.width) continue;
        const int at = place[u] * s.columns + offset[u];
        if constexpr (N == kN) Put(at, part[u]);
        else image[at] = ToCompute(Element(part[u], 0));
      }
    }
  }
  template <int N>
  __device__ __forceinline__ void WriteRows(const IndexRun& run, const SegmentShape& s, const SegmentBlock& b,
                                            T* array, int first, int last, const FastDivmod& by) const {
    const int each = static_cast<int>(by.divisor), items = (last - first) * each;
#pragma unroll 4
    for (int e = threadIdx.x; e < items; e += kSegmentThreads) {
      const int p = by.Div(e), offset = (e - p * each) * N;
      if (offset >= b.width) continue;
      T* const to = array + Row(run, b.begin + first + p) * run.inner + b.column + offset;
      const C* const from = image + (first + p) * s.columns + offset;
      if constexpr (N == kN) StorePart<T, N>(to, Get(from, true));
      else *to = FromCompute<T>(*from);
    }
  }
  static __device__ __forceinline__ int64_t Row(const IndexRun& run, uint32_t position) {
    return run.order ? int64_t{__ldg(run.order + position)} : run.SourceRow(position);
  }
};

template <class T> __device__ __forceinline__ const T* InputOf(const IndexRun& run, const SegmentShape& s, int k, int64_t o) {
  return static_cast<const T*>(k == 0 ? run.source : s.cotangent) + o * run.source_stride * run.inner;
}
template <class T> __device__ __forceinline__ T* OutputOf(const IndexRun& run, int64_t o) {
  return static_cast<T*>(run.out) + o * run.source_stride * run.inner;
}

template <class Stat>
__device__ __forceinline__ Stat* SegmentSlot(const IndexRun& run, const SegmentShape& s, int64_t o, uint32_t tile, int tail) {
  return static_cast<Stat*>(run.partials) + ((o * s.tiles + tile) * 2 + tail) * run.inner;
}

// --- The kernels ---------------------------------------------------------------------------------------

// In shared memory, which places of a tile end a run.
template <int kQ> struct SegmentEnds {
  uint32_t ends[kSegmentThreads];  // of each stretch
  uint32_t drops[kSegmentThreads]; // places of no segment, each of which is a run
  uint32_t some[kSegmentWarps];    // stretches in which something ends

  // Finds them from the keys of the tile and of the place behind it.
  __device__ __forceinline__ void Find(const uint32_t* keys, int stretches, uint32_t dropped) {
    const int t = threadIdx.x;
    uint32_t end = 0, drop = 0;
    if (t < stretches) {
      uint32_t key = keys[t * kQ];
#pragma unroll
      for (int i = 0; i < kQ; ++i) {
        const uint32_t next = keys[t * kQ + i + 1];
        if (key >= dropped) drop |= 1u << i;
        if (key >= dropped || next != key) end |= 1u << i;
        key = next;
      }
    }
    ends[t] = end;
    drops[t] = drop;
    const uint32_t bits = __ballot_sync(~0u, end != 0);
    if (t % kWarp == 0) some[t / kWarp] = bits;
  }
  // The first end in stretches from `stretch` on, or `none`.
  __device__ __forceinline__ int From(int stretch, int none) const {
    for (int w = stretch / kWarp; w < kSegmentWarps; ++w) {
      const uint32_t bits = w == stretch / kWarp ? some[w] >> (stretch % kWarp) << (stretch % kWarp) : some[w];
      if (bits) {
        const int k = w * kWarp + __ffs(bits) - 1;
        return k * kQ + __ffs(ends[k]) - 1;
      }
    }
    return none;
  }
  // The last end in stretches before `stretch`, or -1.
  __device__ __forceinline__ int Before(int stretch) const {
    for (int w = (stretch - 1) / kWarp; w >= 0; --w) {
      const uint32_t bits = some[w] & (stretch - w * kWarp < kWarp ? (1u << (stretch - w * kWarp)) - 1 : ~0u);
      if (bits) {
        const int k = w * kWarp + 31 - __clz(bits);
        return k * kQ + 31 - __clz(ends[k]);
      }
    }
    return -1;
  }
};

// `carry`: a Stat for each stretch and column, of what is open at its end; afterwards with what comes in from stretches
// before it. All threads take part.
template <class Op>
__device__ __forceinline__ void CarryOver(const SegmentShape& s, const uint32_t* ends, typename Op::Stat* carry) {
  using Stat = typename Op::Stat;
  __shared__ Stat warp_stat[kSegmentWarps];
  __shared__ bool warp_flag[kSegmentWarps];
  // A column's stretches side by side.
  const int t = threadIdx.x, lane = t % kWarp, warp = t / kWarp;
  const int c = s.by_stretches.Div(t), k = t - c * s.stretches;
  const bool inside = c < s.columns;
  Stat stat = inside ? carry[k * s.columns + c] : Op::Identity();
  bool flag = !inside || k == 0 || ends[k] != 0;  // nothing comes in
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const Stat other = Op::ShuffleUp(stat, step);
    const bool other_flag = __shfl_up_sync(~0u, static_cast<int>(flag), step);
    if (lane >= step) {
      if (!flag) stat = Op::Merge(other, stat);
      flag |= other_flag;
    }
  }
  if (lane == kWarp - 1) warp_stat[warp] = stat, warp_flag[warp] = flag;
  __syncthreads();
  if (!flag) {
    int w = warp - 1;
    while (w > 0 && !warp_flag[w]) --w;
    Stat before = warp_stat[w];  // thread 0 has a flag, and with it warp 0
    for (++w; w < warp; ++w) before = Op::Merge(before, warp_stat[w]);
    stat = Op::Merge(before, stat);
  }
  if (inside) carry[k * s.columns + c] = stat;
  __syncthreads();
}

template <class Op>
__global__ void __launch_bounds__(kSegmentThreads, sizeof(typename Op::C) == 8 ? 2 : 3)
SegmentTiles(const __grid_constant__ IndexRun run, const __grid_constant__ SegmentShape s) {
  using T = typename Op::T;
  using C = typename Op::C;
  using Stat = typename Op::Stat;
  constexpr int kQ = SegmentStretch(sizeof(T));
  extern __shared__ __align__(16) char shared_bytes[];
  __shared__ SegmentEnds<kQ> runs;
  __shared__ Stat carry[kSegmentThreads], totals[kSegmentThreads];
  const SegmentBlock b(run, s);
  const int t = threadIdx.x, places = s.places, room = s.room;
  const uint32_t left = run.positions - b.begin;  // positions from the tile's first on

  // Keys of the tile, of all that it has room for, and of a place before and behind.
  uint32_t* const keys = reinterpret_cast<uint32_t*>(shared_bytes) + 1;
  const uint32_t* const known = run.keys ? run.keys + b.begin : nullptr;
#pragma unroll 4
  for (int i = t; i <= room; i += kSegmentThreads) {
    keys[i] = i >= left ? UINT32_MAX : known ? __ldg(known + i) : KeyAt(run, b.begin + i);
  }
  if (t == 0) keys[-1] = b.begin > 0 ? KeyAt(run, b.begin - 1) : UINT32_MAX;
  __syncthreads();
  runs.Find(keys, s.stretches, run.dropped);
  __syncthreads();

  // What comes in and what goes out, and the places that are the block's.
  const uint32_t first_key = keys[0], last_key = keys[places - 1];
  const bool comes_in = b.begin > 0 && first_key < run.dropped && keys[-1] == first_key;
  const bool long_head = comes_in && LongHead(run, s.places, b.begin, b.begin + s.reach, first_key);
  const bool goes_on = last_key < run.dropped && keys[places] == last_key;
  const int first_end = runs.From(0, room);
  const bool passes = comes_in && first_end >= places;  // one run, from before to behind
  const bool open = goes_on && (passes ? long_head : keys[room] == last_key);  // to the end of the tile, and long
  int high = min(places, static_cast<int>(min(left, s.places)));
  if (goes_on && !open) high = min(min(runs.From(places / kQ, room) + 1, room), static_cast<int>(min(left, s.room)));
  const int own_first = comes_in ? first_end + 1 : 0, own_last = open ? runs.Before(places / kQ) + 1 : high;
  const int low = comes_in && !long_head ? own_first : 0;
  if (low >= high) return;
  __syncthreads();

  C* const images = reinterpret_cast<C*>(shared_bytes);
  Staged<T> staged(s, b, images, InputOf<T>(run, s, 0, b.o));
  staged.Read(run, s, b, InputOf<T>(run, s, 0, b.o), low, high);
  C* values[Op::kInputs] = {staged.values};
  if constexpr (Op::kInputs == 2) {
    Staged<T> other(s, b, images + s.held, InputOf<T>(run, s, 1, b.o));
    other.Read(run, s, b, InputOf<T>(run, s, 1, b.o), low, high);
    values[1] = other.values;
  }
  __syncthreads();

  const int j = s.by_columns.Div(t), c = t - j * s.columns;
  const bool active = j < s.stretches && c < b.width && j * kQ < high && (j + 1) * kQ > low;
  const uint32_t ends = active ? runs.ends[j] : 0;
  C kept[kQ];
  Stat head = Op::Identity(), tail = Op::Identity();
  if (active) {
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) values[k] += j * kQ * s.columns + c;
    Op::Reduce(values, s.columns, ends, runs.drops[j], kept, &head, &tail);
    if (!ends) tail = head;
  }
  carry[t] = tail;
  __syncthreads();
  CarryOver<Op>(s, runs.ends, carry);
  if (ends) totals[t] = j > 0 ? Op::Merge(carry[t - s.columns], head) : head;
  __syncthreads();

  if (active) {
    if (long_head && !passes && j == first_end / kQ) {
      SegmentSlot<Stat>(run, s, b.o, b.tile, 0)[b.column + c] = totals[t];
    }
    if (open && j == places / kQ - 1) {
      SegmentSlot<Stat>(run, s, b.o, b.tile, !passes)[b.column + c] = carry[t];
    }
    const int next = runs.From(j + 1, room);  // the end of what is open here; a long run's is elsewhere
    const Stat behind = next < high ? totals[next / kQ * s.columns + c] : Op::Identity();
    Op::Write(values, s.columns, ends, kept, head, ends ? totals[t] : behind, tail, behind);
  }
  __syncthreads();
  if (own_first < own_last) staged.Write(run, s, b, OutputOf<T>(run, b.o), own_first, own_last);
}

// Merges the statistics of the parts of each long segment, and leaves the total in the slots of all. A block looks
// through a group of tiles for those that begin there, for a few columns; teams of threads take parts in turn.
constexpr int kJoinColumns = 8, kJoinTeams = kSegmentThreads / kJoinColumns, kJoinTiles = 64;
template <class Op>
__global__ void __launch_bounds__(kSegmentThreads)
SegmentJoin(const __grid_constant__ IndexRun run, const __grid_constant__ SegmentShape s, int64_t slabs, int64_t groups) {
  using Stat = typename Op::Stat;
  __shared__ uint32_t first[kJoinTiles], parts[kJoinTiles];
  __shared__ int runs;
  __shared__ Stat room[kSegmentThreads];
  const int64_t item = blockIdx.x / slabs, o = item / groups, group = item - o * groups;
  if (threadIdx.x == 0) runs = 0;
  __syncthreads();
  const int64_t tile = group * kJoinTiles + threadIdx.x;
  if (threadIdx.x < kJoinTiles && tile < s.tiles) {
    const uint32_t count = PartsOf(run, s.places, s.tiles, static_cast<uint32_t>(tile), s.reach);
    if (count > 0) {
      const int at = atomicAdd(&runs, 1);
      first[at] = static_cast<uint32_t>(tile);
      parts[at] = count;
    }
  }
  __syncthreads();
  const int team = threadIdx.x / kJoinColumns;
  const int64_t column = (blockIdx.x - item * slabs) * kJoinColumns + threadIdx.x % kJoinColumns;
  const bool active = column < run.inner;
  for (int r = 0; r < runs; ++r) {
    const auto slot = [&](uint32_t j) { return SegmentSlot<Stat>(run, s, o, first[r] + j, j == 0) + column; };
    Stat total = Op::Identity();
    for (uint32_t j = team; active && j < parts[r]; j += 4 * kJoinTeams) {
      Stat part[4];
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u) part[u] = j + u * kJoinTeams < parts[r] ? *slot(j + u * kJoinTeams) : Op::Identity();
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u) total = Op::Merge(total, part[u]);
    }
    room[threadIdx.x] = total;
    __syncthreads();
    if (team == 0) {
      for (int i = 1; i < kJoinTeams; ++i) total = Op::Merge(total, room[i * kJoinColumns + threadIdx.x]);
      room[threadIdx.x] = total;
    }
    __syncthreads();
    total = room[threadIdx.x % kJoinColumns];
    for (uint32_t j = team; active && j < parts[r]; j += kJoinTeams) *slot(j) = total;
    __syncthreads();
  }
}

// The rows of long segments, a tile a block, from the totals in the tile's slots.
template <class Op>
__global__ void __launch_bounds__(kSegmentThreads, 3)
SegmentRewrite(const __grid_constant__ IndexRun run, const __grid_constant__ SegmentShape s) {
  using T = typename Op::T;
  using C = typename Op::C;
  extern __shared__ __align__(16) char shared_bytes[];
  __shared__ typename Op::Final finals[kSegmentColumns];
  __shared__ int counts[2];
  const SegmentBlock b(run, s);
  const uint32_t end = b.begin + s.places;
  const int held = static_cast<int>(min(s.places, run.positions - b.begin));
  const uint32_t first_key = KeyAt(run, b.begin), last_key = KeyAt(run, b.begin + held - 1);
  const bool comes_in = b.begin > 0 && first_key < run.dropped && KeyAt(run, b.begin - 1) == first_key;
  const bool long_head = comes_in && LongHead(run, s.places, b.begin, b.begin + s.reach, first_key);
  const bool goes_on = end < run.positions && last_key < run.dropped && KeyAt(run, end) == last_key;
  const bool passes = comes_in && goes_on && first_key == last_key;
  const bool open = goes_on && !passes && LongTail(run, s.reach, end, last_key);
  if (!long_head && !open) return;

  // How much of the tile is of the run that comes in, and of the one that goes on.
  if (threadIdx.x < 2) counts[threadIdx.x] = 0;
  __syncthreads();
  int count[2] = {0, 0};
#pragma unroll 4
  for (int i = threadIdx.x; i < held; i += kSegmentThreads) {
    const uint32_t key = KeyAt(run, b.begin + i);
    count[0] += key == first_key;
    count[1] += key == last_key;
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    count[k] = ReduceLanes<kWarp>(count[k], SumOf());
    if (threadIdx.x % kWarp == 0) atomicAdd(&counts[k], count[k]);
  }
  __syncthreads();

  for (int tail = 0; tail < 2; ++tail) {
    if (tail ? !open : !long_head) continue;
    const int low = tail ? held - counts[1] : 0, high = tail ? held : counts[0];
    if (threadIdx.x < b.width) {
      finals[threadIdx.x] =
          Op::Finish(SegmentSlot<typename Op::Stat>(run, s, b.o, b.tile, tail)[b.column + threadIdx.x]);
    }
    C* const images = reinterpret_cast<C*>(shared_bytes);
    Staged<T> staged(s, b, images, InputOf<T>(run, s, 0, b.o));
    staged.Read(run, s, b, InputOf<T>(run, s, 0, b.o), low, high);
    C* values[Op::kInputs] = {staged.values};
    if constexpr (Op::kInputs == 2) {
      Staged<T> other(s, b, images + s.held, InputOf<T>(run, s, 1, b.o));
      other.Read(run, s, b, InputOf<T>(run, s, 1, b.o), low, high);
      values[1] = other.values;
    }
    __syncthreads();
#pragma unroll 4
    for (int e = low * s.columns + threadIdx.x; e < high * s.columns; e += kSegmentThreads) {
      const int c = e - s.by_columns.Div(e) * s.columns;
      if (c >= b.width) continue;
      C x[Op::kInputs];
#pragma unroll
      for (int k = 0; k < Op::kInputs; ++k) x[k] = values[k][e];
      values[0][e] = Op::Map(x, finals[c]);
    }
    __syncthreads();
    staged.Write(run, s, b, OutputOf<T>(run, b.o), low, high);
    __syncthreads();
  }
}

// --- Launching -----------------------------------------------------------------------------------------

template <class Op> cudaError_t LaunchSegmentOp(const IndexRun& run, const void* cotangent, cudaStream_t stream) {
  using T = typename Op::T;
  constexpr int64_t kSize = sizeof(T), kN = kVector<T>;
  const SegmentTile tile = SegmentTileOf(run.inner, kSize);
  SegmentShape s;
  s.places = static_cast<uint32_t>(tile.places);
  s.room = static_cast<uint32_t>(tile.room);
  s.reach = s.room - s.places;
  s.tiles = (run.positions + s.places - 1) / s.places;
  s.columns = tile.columns, s.slabs = tile.slabs, s.stretches = tile.stretches;
  const auto held = [](int64_t elements) { return static_cast<int>((elements + 2 * kN) / kN * kN); };
  s.held = held(tile.room * tile.columns);
  s.contiguous = !run.order && !run.source_extra && s.slabs == 1;
  const int64_t together = reinterpret_cast<int64_t>(run.source) | reinterpret_cast<int64_t>(run.out) |
                           reinterpret_cast<int64_t>(cotangent) | run.inner * kSize | s.columns * kSize;
  s.vectors = together % 16 == 0;
  s.cotangent = cotangent;
  s.by_slabs = Divider(s.slabs);
  s.by_tiles = Divider(s.tiles);
  s.by_columns = FastDivmod(s.columns);
  s.by_vectors = FastDivmod(s.vectors ? s.columns / kN : 1);
  s.by_stretches = FastDivmod(s.stretches);

  constexpr int kMostBytes = Op::kInputs * sizeof(typename Op::C) * (kSegmentThreads * SegmentStretch(kSize) + 2 * kN);
  static std::atomic<bool> done[kMaxDevices];
  cudaError_t error = OncePerDevice(done, CurrentDevice().ordinal, [] {
    const cudaError_t tiles =
        cudaFuncSetAttribute(SegmentTiles<Op>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes);
    if (tiles != cudaSuccess) return tiles;
    return cudaFuncSetAttribute(SegmentRewrite<Op>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes);
  });
  if (error != cudaSuccess) return error;
  const int bytes = Op::kInputs * s.held * static_cast<int>(sizeof(typename Op::C));
  const int64_t blocks = run.outer * s.tiles * s.slabs;
  error = Launch(SegmentTiles<Op>, {blocks, 1, kSegmentThreads, bytes}, stream, run, s);
  if (error != cudaSuccess || run.positions <= s.room) return error;  // no segment is long
  const int64_t slabs = (run.inner + kJoinColumns - 1) / kJoinColumns, groups = (s.tiles + kJoinTiles - 1) / kJoinTiles;
  error = Launch(SegmentJoin<Op>, {run.outer * groups * slabs, 1, kSegmentThreads}, stream, run, s, slabs, groups);
  if (error != cudaSuccess) return error;
  return Launch(SegmentRewrite<Op>, {blocks, 1, kSegmentThreads, bytes}, stream, run, s);
}

// Runs everything after the sort.
template <class T>
cudaError_t LaunchSegmentSoftmax(IndexOp op, const IndexRun& run, const void* cotangent, cudaStream_t stream) {
  return op == IndexOp::kSegmentSoftmaxGrad ? LaunchSegmentOp<SegmentBackward<T>>(run, cotangent, stream)
                                            : LaunchSegmentOp<SegmentForward<T>>(run, nullptr, stream);
}

}  // namespace jaxkern
