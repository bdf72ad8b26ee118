// Shared parts of the reductions of rows at indices: the parameters of a run, searches in ordered keys, the reductions,
// rows as vectors, and filling of rows without updates. Device functions only; the kernels are in the other files of
// this folder.
//
// Arrays of a run:
//
//     out      [batch, outer, rows, inner]      source   [batch, outer, count, inner]
//     index    [batch, count]                   every slice of `outer` uses the same indices
//
// A run reduces the rows of source with the same target row of out, together with the old value of that row if
// `reads_out`. Old values are in `base`, which is out itself or, where ReduceChunks (chunks.cuh) copies rows, another
// array of its shape:
//
//     kSum     out[b, o, r, :] = base[b, o, r, :] + alpha * sum of source[b, o, k, :] over all k with index[b, k] == r
//     kMax     their largest element, -inf (the least integer) if there is none; NaN propagates
//     kMin     likewise the smallest
//     kProd    their product, 1 if there is none
//
// Sums and products are accumulated in float (double for double, modulo 2^n for integers) and rounded once. A call with more keys or
// positions than 32 bits can number is split into several runs (jaxkern/_ops/indexing/problem.py).
//
// A "place" is a number in the order of keys; a "run" of keys is a maximal sequence of places with equal keys.
#pragma once

#include "common/extremes.h"
#include "indexing/indices.cuh"

namespace jaxkern {

// The part of the ordered updates that a chunk reduces (chunks.cuh).
struct alignas(16) ChunkInfo {
  uint32_t start : 31;     // first place to reduce
  uint32_t long_head : 1;  // the run at its head is long and began in an earlier chunk
  uint32_t stop;           // end of the places to reduce
  uint32_t parts;          // number of parts of the long run that begins here and continues after; 0: none
  uint32_t key;            // key of the last place
};

struct IndexRun : Indices {
  // Updates in the order of their keys. `order` has the source row of each update; null: positions are in order
  // already. An update whose key is `dropped` or more is ignored.
  const uint32_t* keys;
  const uint32_t* order;
  const uint2* pairs;  // alternatively, (key, element of source) pairs, sorted by the leading bits of the keys
  uint32_t *keys_out, *order_out;  // outputs of Describe: keys and order of ascending indices
  ChunkInfo* chunks;
  const void* source;
  const void* alpha;  // one element in the computing type; null: 1
  void* out;
  const void* base;  // old values of the rows, if `reads_out`: out, or an array of its shape
  void* partials;
  int64_t outer, inner;
  int64_t source_stride, out_stride;  // rows between successive `outer` slices
  int64_t source_extra, out_extra;    // rows beyond count (or rows) from one b to the next
  Divider by_rows;
  uint32_t chunk;       // places of a tile, or of a thread
  int32_t sorted_bits;  // `pairs`: number of leading key bits that are sorted
  bool sorted_keys;     // keys ascend, dropped ones last; if false, the indices ascend, or nothing does
  bool reads_out;       // the values of base take part in the reduction

  __device__ __forceinline__ int64_t SourceRow(uint32_t position) const {
    int64_t row = position;
    if (source_extra) row += by_count.Div(position) * source_extra;
    return row;
  }
  __device__ __forceinline__ int64_t OutRow(uint32_t key) const {
    int64_t row = key + first_row;
    if (out_extra) row += by_rows.Div(key) * out_extra;
    return row;
  }
  // Returns the old value of an element of out.
  template <class T> __device__ __forceinline__ const T* Old(const T* at) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(at) +
                                      (static_cast<const char*>(base) - static_cast<const char*>(out)));
  }
};
static_assert(sizeof(IndexRun) == 256);

// Source of keys: run.keys, the plain indices of one slice, or either according to the run. kAny costs at least one
// branch per key, and its loads do not overlap.
enum class Keys { kListed, kPlain, kAny };

// Returns the key at a place.
template <Keys kKeys = Keys::kAny> __device__ __forceinline__ uint32_t KeyAt(const IndexRun& run, uint32_t place) {
  if constexpr (kKeys == Keys::kListed) {
    return run.keys[place];
  } else if constexpr (kKeys == Keys::kPlain) {
    return PlainKey(run, __ldg(static_cast<const uint32_t*>(run.index) + place));
  } else {
    return run.keys ? run.keys[place] : KeyOf(run, LoadIndex(run, place), place);
  }
}

// Returns the first of places [low, high) whose key is at least `key`, for ascending keys. All lanes of a warp must
// call it: each step examines 32 places, which takes a fifth of the dependent loads of a binary search.
__device__ __forceinline__ uint32_t LowerBound(const IndexRun& run, uint32_t low, uint32_t high, uint32_t key) {
  // If keys are not listed, rows are compared: the rows of ascending indices ascend, but an out-of-range index has the
  // key `dropped` wherever it is.
  const bool keyed = run.sorted_keys;
  const int64_t row = (!keyed && run.batch > 1 ? key % run.rows : key) + (keyed ? 0 : run.first_row);
  const uint32_t lane = threadIdx.x % kWarp;
  while (low < high) {
    const uint32_t step = (high - low + kWarp) / (kWarp + 1), at = low + (lane + 1) * step - 1;
    bool less = false;
    if (at < high) less = (keyed ? int64_t{__ldg(run.keys + at)} : RowOf(run, LoadIndex(run, at))) < row;
    const uint32_t passed = __popc(__ballot_sync(~0u, less));
    if (passed < kWarp) high = min(high, low + (passed + 1) * step - 1);
    low += passed * step;
  }
  return low;
}

// Whether the run that begins in `chunk` and continues after it is divided among chunks. A run that ends within
// `lookahead` places after the chunk is not.
template <Keys kKeys = Keys::kAny>
__device__ __forceinline__ bool IsCut(const IndexRun& run, uint32_t chunk_places, uint32_t chunk, uint32_t lookahead) {
  const uint32_t begin = chunk * chunk_places, end = begin + chunk_places;
  // Issue all loads together.
  const uint32_t before = KeyAt<kKeys>(run, begin - (begin > 0)), head = KeyAt<kKeys>(run, begin);
  const uint32_t key = KeyAt<kKeys>(run, min(end, run.positions) - 1);
  const uint32_t next = KeyAt<kKeys>(run, min(end, run.positions - 1));
  const uint32_t far = KeyAt<kKeys>(run, min(end + lookahead, run.positions - 1));
  const bool began_earlier = begin > 0 && head == key && before == key;
  return end + lookahead < run.positions && key < run.dropped && next == key && far == key && !began_earlier;
}

// Search for the first number in [low, high] whose place (number * unit) has a key other than `key`.
struct EndSearch {
  uint32_t low, high, key, unit;
};

// Stores the result of each search in its `low`. The searches advance together and examine kLooks places per step,
// because the latency of a load dominates a step. kSearches: number of searches.
template <Keys kKeys = Keys::kAny, int kSearches>
__device__ __forceinline__ void FindEnds(const IndexRun& run, EndSearch (&search)[kSearches]) {
  constexpr uint32_t kLooks = 7;
  const auto goes_on = [&] {
    bool any = false;
#pragma unroll
    for (const EndSearch& s : search) any = any || s.low < s.high;
    return any;
  };
  while (goes_on()) {
    uint32_t step[kSearches], key[kSearches][kLooks];
#pragma unroll
    for (int n = 0; n < kSearches; ++n) {
      const EndSearch& s = search[n];
      step[n] = s.low < s.high ? (s.high - s.low + kLooks) / (kLooks + 1) : 0;
#pragma unroll
      for (uint32_t i = 0; i < kLooks; ++i) {
        key[n][i] = KeyAt<kKeys>(run, min(s.low + (i + 1) * step[n] - 1, max(s.high, 1u) - 1) * s.unit);
      }
    }
#pragma unroll
    for (int n = 0; n < kSearches; ++n) {
      EndSearch& s = search[n];
      uint32_t passed = 0;
#pragma unroll
      for (uint32_t i = 0; i < kLooks; ++i) passed += s.low + (i + 1) * step[n] - 1 < s.high && key[n][i] == s.key;
      if (step[n] == 0) continue;
      if (passed < kLooks) s.high = min(s.high, s.low + (passed + 1) * step[n] - 1);
      s.low += passed * step[n];
    }
  }
}

// Returns the number of chunks that share the run that begins in `chunk` and continues after it; 0 if it is not
// divided.
__device__ __forceinline__ uint32_t PartsOf(const IndexRun& run, uint32_t chunk_places, uint32_t chunks, uint32_t chunk,
                                            uint32_t lookahead) {
  if (!IsCut(run, chunk_places, chunk, lookahead)) return 0;
  EndSearch search[1] = {{chunk + 2, chunks, KeyAt(run, (chunk + 1) * chunk_places), chunk_places}};
  FindEnds(run, search);
  return search[0].low - chunk;
}

// --- Reductions

enum class Reduction { kSum, kMax, kMin, kProd };

template <class C> constexpr bool kIsFloat = std::is_floating_point_v<C>;

// Returns the smallest or largest value of C; infinities for floats.
template <class C> __device__ __forceinline__ C Extreme(bool largest) {
  if constexpr (std::is_same_v<C, float>) return __uint_as_float(largest ? 0x7f800000u : 0xff800000u);
  else if constexpr (std::is_same_v<C, double>) return __hiloint2double(largest ? 0x7ff00000 : 0xfff00000, 0);
  else if constexpr (std::is_same_v<C, uint32_t>) return largest ? UINT32_MAX : 0;
  else if constexpr (std::is_same_v<C, int32_t>) return largest ? INT32_MAX : INT32_MIN;
  else return largest ? INT64_MAX : INT64_MIN;
}

template <Reduction kOp, class C> __device__ __forceinline__ C Identity() {
  if constexpr (kOp == Reduction::kSum) return C(0);
  else if constexpr (kOp == Reduction::kProd) return C(1);
  else return Extreme<C>(kOp == Reduction::kMin);
}

template <Reduction kOp, class C> __device__ __forceinline__ C Combined(C a, C b) {
  if constexpr (kOp == Reduction::kSum) {
    if constexpr (kIsFloat<C>) return a + b;
    else return static_cast<C>(static_cast<std::make_unsigned_t<C>>(a) + static_cast<std::make_unsigned_t<C>>(b));
  } else if constexpr (kOp == Reduction::kProd) {
    if constexpr (kIsFloat<C>) return a * b;
    else return static_cast<C>(static_cast<std::make_unsigned_t<C>>(a) * static_cast<std::make_unsigned_t<C>>(b));
  } else {
    return kOp == Reduction::kMax ? LargerOrNan(a, b) : SmallerOrNan(a, b);
  }
}

// Returns the new value of an element of out: x + alpha * total, or the extreme or the product of both.
template <Reduction kOp, class C> __device__ __forceinline__ C Finished(C total, C alpha, bool has_x, C x) {
  if constexpr (kOp == Reduction::kSum) {
    if constexpr (std::is_same_v<C, float>) return has_x ? fmaf(alpha, total, x) : total;
    else if constexpr (std::is_same_v<C, double>) return has_x ? fma(alpha, total, x) : total;
    else {
      using U = std::make_unsigned_t<C>;
      const U sum = static_cast<U>(total);
      return static_cast<C>(has_x ? static_cast<U>(x) + static_cast<U>(alpha) * sum : sum);
    }
  } else {
    return has_x ? Combined<kOp>(total, x) : total;
  }
}

// Adds to memory atomically, without return value. The order is unspecified, and subnormal numbers are treated as 0.
template <int N> __device__ __forceinline__ void AddInPlace(float* at, const float (&v)[N]) {
#if __CUDA_ARCH__ >= 900
  if constexpr (N == 4) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
    return;
  }
#endif
#pragma unroll
  for (int i = 0; i < N; ++i) atomicAdd(at + i, v[i]);
}

template <class C> __device__ __forceinline__ C Alpha(const IndexRun& run) {
  return run.alpha ? *static_cast<const C*>(run.alpha) : C(1);
}

// Lists the places where runs end in order (begin + i for each bit i of a thread's mask) and returns their number.
// `ends` and `warp_runs` (one number per warp) are in shared memory. All threads of the block must call it; a barrier
// follows the writes.
template <int kThreads>
__device__ __forceinline__ int ListRunEnds(uint32_t mask, int begin, uint16_t* ends, uint32_t* warp_runs) {
  uint32_t listed = SumOfThreadsBefore(__popc(mask), warp_runs);
  for (uint32_t left = mask; left; left &= left - 1) ends[listed++] = begin + __ffs(left) - 1;
  __syncthreads();
  int runs = 0;
#pragma unroll
  for (int w = 0; w < kThreads / kWarp; ++w) runs += warp_runs[w];
  return runs;
}

template <Reduction kOp, class T, int N>
__device__ __forceinline__ void Accumulate(Compute<T> (&total)[N], const Pack<T, N>& pack) {
  Compute<T> v[N];
  Unpack(pack, v);
#pragma unroll
  for (int i = 0; i < N; ++i) total[i] = Combined<kOp>(total[i], v[i]);
}

template <Reduction kOp, class T, int N>
__device__ __forceinline__ Pack<T, N> FinishedPack(const Compute<T> (&total)[N], Compute<T> alpha, bool has_x,
                                                   const Pack<T, N>& x) {
  Compute<T> v[N], old[N];
  Unpack(x, old);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = Finished<kOp>(total[i], alpha, has_x, old[i]);
  return Repack<T, N>(v);
}

// --- Rows without updates

// For keys that are not in order, further blocks fill the untouched rows of out, one tile of rows and vectors each.
// (For ordered keys, gaps.cuh finds these rows between neighbouring keys.)
constexpr int kFillRows = 1024;
struct FillShape {
  int64_t rows;     // rows of a tile
  int64_t vectors;  // vectors per row of a tile
  int64_t column_tiles, row_tiles;
  Divider by_vectors;
  int64_t blocks;
};
static_assert(sizeof(FillShape) == 64);

// Writes the identity to the unmarked rows of tile `block`. mark(first key, rows, bits) sets the bits of touched rows.
// All threads of the block must call it; `bits` is shared memory of kFillRows bits. kOp: the reduction. T, N: element
// type and elements of a vector.
template <Reduction kOp, class T, int N, class Mark>
__device__ __forceinline__ void FillTile(const IndexRun& run, const FillShape& f, int64_t vectors, int64_t block,
                                         uint32_t* bits, Mark mark) {
  const int64_t column_tile = block % f.column_tiles, o = block / f.column_tiles / f.row_tiles;
  const uint32_t first = static_cast<uint32_t>(block / f.column_tiles % f.row_tiles * f.rows);
  const int rows = static_cast<int>(min(f.rows, int64_t{run.dropped} - first));
  for (int i = threadIdx.x; i < kFillRows / 32; i += blockDim.x) bits[i] = 0;
  __syncthreads();
  mark(first, rows, bits);
  __syncthreads();
  const int64_t begin = column_tile * f.vectors;
  const uint32_t width = static_cast<uint32_t>(min(f.vectors, vectors - begin));
  const Pack<T, N> identity = Filled<T, N>(FromCompute<T>(Identity<kOp, Compute<T>>()));
  T* const out = static_cast<T*>(run.out) + o * run.out_stride * run.inner;
  const uint32_t all = rows * static_cast<uint32_t>(f.vectors);
  for (uint32_t i = threadIdx.x; i < all; i += blockDim.x) {
    const uint32_t r = f.by_vectors.Div(i), v = i - r * static_cast<uint32_t>(f.vectors);
    if (v < width && !(bits[r / 32] >> (r % 32) & 1)) {
      StorePart<T, N>(out + run.OutRow(first + r) * run.inner + (begin + v) * N, identity);
    }
  }
}

}  // namespace jaxkern
