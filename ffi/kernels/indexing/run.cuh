// What the reductions of rows at indices share: a run's parameters, searching the ordered keys, the reductions, rows as
// vectors, and writing the rows that nothing is added to.
//
// Arrays, seen by a run:
//
//     out      [batch, outer, rows, inner]      source   [batch, outer, count, inner]
//     index    [batch, count]                   every slice of `outer` uses the same indices
//
// A run reduces the rows of source that go to the same row of out, and with `reads_out` what that row holds:
//
//     kSum     out[b, o, r, :] = out[b, o, r, :] + alpha * sum of source[b, o, k, :] over all k with index[b, k] == r
//     kMax     their largest element, -inf (the least integer) where there is none; NaN wins
//     kMin     likewise the smallest
//
// Sums are taken in float (double for double, modulo 2^n for integers) and rounded once. A call that has more keys or
// positions than 32 bits number is cut into several runs (jaxkern/_ops/indexing/plan.py).
#pragma once

#include "indexing/indices.cuh"

namespace jaxkern {

// What a chunk of places reduces itself (chunks.cuh).
struct alignas(16) ChunkInfo {
  uint32_t start : 31;     // the first place that it reduces
  uint32_t long_head : 1;  // whether the run at its head is a long one that began in an earlier chunk
  uint32_t stop;           // the end of the places that it reduces
  uint32_t parts;          // of the long run that begins in it and goes on behind it; 0 if there is none
  uint32_t key;            // of its last place
};

struct IndexRun : Indices {
  // The updates in the order of their keys. `order` has the row of source of each; without it updates are in the order
  // of their positions, which only a sort changes. A key of `dropped` or more goes nowhere.
  const uint32_t* keys;
  const uint32_t* order;
  const uint2* pairs;              // or keys and elements of source, sorted by the leading bits of the keys
  uint32_t *keys_out, *order_out;  // where Describe writes keys and order of ascending indices
  ChunkInfo* chunks;
  const void* source;
  const void* alpha;  // one element of the computing type; null: 1
  void* out;
  void* partials;
  int64_t outer, inner;
  int64_t source_stride, out_stride;  // rows from one `outer` to the next
  int64_t source_extra, out_extra;    // rows that one b lies further than count, or rows, after the last
  Divider by_rows;
  uint32_t chunk;       // places of the order that a tile has, or a thread goes through
  int32_t sorted_bits;  // of `pairs`: how many leading bits of the keys the sort has looked at
  bool sorted_keys;     // keys ascend, dropped ones last; else the indices do, if anything does
  bool reads_out;       // out holds what the reduction goes on from

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
};
static_assert(sizeof(IndexRun) == 248);

// Where the keys are: in run.keys, in the plain indices of one slice, or wherever the run says. The last costs a branch
// or more per key, and loads that do not overlap.
enum class Keys { kListed, kPlain, kAny };

// The key at a place in the order of keys.
template <Keys kKeys = Keys::kAny> __device__ __forceinline__ uint32_t KeyAt(const IndexRun& run, uint32_t place) {
  if constexpr (kKeys == Keys::kListed) {
    return run.keys[place];
  } else if constexpr (kKeys == Keys::kPlain) {
    return PlainKey(run, __ldg(static_cast<const uint32_t*>(run.index) + place));
  } else {
    return run.keys ? run.keys[place] : KeyOf(run, LoadIndex(run, place), place);
  }
}

// The first of places [low, high) whose key is `key` or more, where keys ascend. All lanes of a warp take part: each
// step looks at 32 places, which needs a fifth of the dependent loads of a binary search.
__device__ __forceinline__ uint32_t LowerBound(const IndexRun& run, uint32_t low, uint32_t high, uint32_t key) {
  // Indices that are out of range do not have their place among the keys, but their rows do.
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

// Whether the run that begins in `chunk` and goes on behind it is cut by chunks. A run that ends within `reach` places
// behind the chunk is not.
template <Keys kKeys = Keys::kAny>
__device__ __forceinline__ bool IsCut(const IndexRun& run, uint32_t chunk_places, uint32_t chunk, uint32_t reach) {
  const uint32_t begin = chunk * chunk_places, end = begin + chunk_places;
  // All loads in flight at once.
  const uint32_t before = KeyAt<kKeys>(run, begin - (begin > 0)), head = KeyAt<kKeys>(run, begin);
  const uint32_t key = KeyAt<kKeys>(run, min(end, run.positions) - 1);
  const uint32_t next = KeyAt<kKeys>(run, min(end, run.positions - 1));
  const uint32_t far = KeyAt<kKeys>(run, min(end + reach, run.positions - 1));
  const bool began_earlier = begin > 0 && head == key && before == key;
  return end + reach < run.positions && key < run.dropped && next == key && far == key && !began_earlier;
}

// A search for the first of low, low + 1, ..., high at whose place, `unit` times as far, the key differs from `key`.
struct EndSearch {
  uint32_t low, high, key, unit;
};

// Leaves the result of each search in its `low`. The searches step together and look at several places in each step,
// because a step takes as long as a load from memory.
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

// Into how many parts chunks cut the run that begins in `chunk` and goes on behind it; 0 if they do not.
__device__ __forceinline__ uint32_t PartsOf(const IndexRun& run, uint32_t chunk_places, uint32_t chunks, uint32_t chunk,
                                            uint32_t reach) {
  if (!IsCut(run, chunk_places, chunk, reach)) return 0;
  EndSearch search[1] = {{chunk + 2, chunks, KeyAt(run, (chunk + 1) * chunk_places), chunk_places}};
  FindEnds(run, search);
  return search[0].low - chunk;
}

// --- Reductions --------------------------------------------------------------------------------------

enum class Reduction { kSum, kMax, kMin };

template <class C> constexpr bool kIsFloat = std::is_floating_point_v<C>;

// The least and the largest value of a C, infinities where it has them.
template <class C> __device__ __forceinline__ C Extreme(bool largest) {
  if constexpr (std::is_same_v<C, float>) return __uint_as_float(largest ? 0x7f800000u : 0xff800000u);
  else if constexpr (std::is_same_v<C, double>) return __hiloint2double(largest ? 0x7ff00000 : 0xfff00000, 0);
  else if constexpr (std::is_same_v<C, uint32_t>) return largest ? UINT32_MAX : 0;
  else if constexpr (std::is_same_v<C, int32_t>) return largest ? INT32_MAX : INT32_MIN;
  else return largest ? INT64_MAX : INT64_MIN;
}

template <Reduction kOp, class C> __device__ __forceinline__ C Identity() {
  if constexpr (kOp == Reduction::kSum) return C(0);
  else return Extreme<C>(kOp == Reduction::kMin);
}

template <Reduction kOp, class C> __device__ __forceinline__ C Combined(C a, C b) {
  if constexpr (kOp == Reduction::kSum) {
    if constexpr (kIsFloat<C>) return a + b;
    else return static_cast<C>(static_cast<std::make_unsigned_t<C>>(a) + static_cast<std::make_unsigned_t<C>>(b));
  } else if constexpr (std::is_same_v<C, float>) {  // a NaN wins
    float r;
    if constexpr (kOp == Reduction::kMax) asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    else asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  } else {
    return a != a || (kOp == Reduction::kMax ? a > b : a < b) ? a : b;
  }
}

// The new value of an element of out: x + alpha * sum, or the extreme of both.
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

// Adds to memory in no particular order, without waiting for what is there; takes subnormal numbers for 0.
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

// Lists in order the places where runs end, begin + i for each bit i of a thread's mask, and returns how many there
// are. `ends` and `warp_runs` (one number per warp) lie in shared memory. All threads take part; a barrier follows the
// writes.
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

// --- Vectors of a row --------------------------------------------------------------------------------
// Vectors of 16 bytes are read and written once; narrower ones may share a sector with others.

template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadPart(const T* p) {
  if constexpr (N * sizeof(T) == 4) {
    Pack<T, N> pack;
    pack.word[0] = *reinterpret_cast<const uint32_t*>(p);
    return pack;
  } else {
    return LoadVector<T, N>(p);
  }
}

template <class T, int N> __device__ __forceinline__ void StorePart(T* p, const Pack<T, N>& pack) {
  if constexpr (N * sizeof(T) == 4) *reinterpret_cast<uint32_t*>(p) = pack.word[0];
  else StoreVector<T, N>(p, pack);
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

// --- Rows that nothing goes to ------------------------------------------------------------------------

// Where keys are in no order, further blocks write the untouched rows of out, a tile of rows and vectors each. (Where
// keys are in order, gaps.cuh finds these rows between neighbouring keys.)
constexpr int kFillRows = 1024;
struct FillShape {
  int64_t rows;     // of a tile
  int64_t vectors;  // of a tile's rows
  int64_t slabs, row_tiles;
  Divider by_vectors;
  int64_t blocks;
};
static_assert(sizeof(FillShape) == 64);

// Writes the identity to the rows of tile `block` that `mark` leaves unmarked: mark(first key, rows, bits) sets the
// bits of touched rows. All threads of the block take part; `bits` is shared memory of kFillRows bits.
template <Reduction kOp, class T, int N, class Mark>
__device__ __forceinline__ void FillTile(const IndexRun& run, const FillShape& f, int64_t vectors, int64_t block,
                                         uint32_t* bits, Mark mark) {
  const int64_t slab = block % f.slabs, o = block / f.slabs / f.row_tiles;
  const uint32_t first = static_cast<uint32_t>(block / f.slabs % f.row_tiles * f.rows);
  const int rows = static_cast<int>(min(f.rows, int64_t{run.dropped} - first));
  for (int i = threadIdx.x; i < kFillRows / 32; i += blockDim.x) bits[i] = 0;
  __syncthreads();
  mark(first, rows, bits);
  __syncthreads();
  const int64_t begin = slab * f.vectors;
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
