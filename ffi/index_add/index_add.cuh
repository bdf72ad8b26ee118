// What the kernels of the index_add family share: a run's parameters, reading indices of any type, rows as
// vectors, the reductions, and filling the rows that nothing is added to.
//
// A run has at most kMaxKeys keys and kMaxPositions positions, so that both are 32-bit numbers:
//
//     key        batch * rows + row: the row of x that an update goes to; `dropped` where it goes nowhere
//     position   batch * count + k: the number of an update
//
// Offsets into x, source and out are 64 bit everywhere.
#pragma once

#include "kernels/common/broadcast.h"
#include "../common/launch.h"
#include "kernels/common/pack.cuh"
#include "kernels/common/reduce.cuh"
#include "index_add.h"

namespace jaxkern {

// Division by a number that does not change; fast while both are below 2^32.
struct Divider {
  int64_t divisor = 1;
  FastDivmod fast;
  bool wide = false;

  Divider() = default;
  explicit Divider(int64_t d) : divisor(d), fast(d < INT32_MAX ? static_cast<uint32_t>(d) : 1), wide(d >= INT32_MAX) {}
  __device__ __forceinline__ int64_t Div(int64_t n) const {
    if (wide || n >> 32) return n / divisor;
    return fast.Div(static_cast<uint32_t>(n));
  }
  __device__ __forceinline__ uint32_t Div(uint32_t n) const { return wide ? 0 : fast.Div(n); }
};

// What of a chunk of places the chunk itself reduces (index_add_reduce.cuh).
struct alignas(16) ChunkInfo {
  uint32_t start : 31;      // of the places that it reduces
  uint32_t long_head : 1;   // whether the first run is a long one that came in from the chunk before
  uint32_t stop, parts;     // parts: of the long run that begins in it and goes on, else 0
  uint32_t key;             // of its last place
};

struct IndexRun {
  // The indices as they came, [batch, count] of them.
  const void* index;
  int index_bytes;
  bool index_signed, wrap, clip;
  bool plain;          // 4 bytes, signed, not clipped, and rows == all_rows
  int64_t all_rows;    // the rows that indices count in
  int64_t first_row;   // the first of them that this run has
  uint32_t rows, count, batch;
  uint32_t positions;  // batch * count
  uint32_t dropped;    // batch * rows, the key of an update that goes nowhere

  // The updates in the order of their keys, and the row of source of each; without `order` they are in
  // their own, which only a sort changes.
  const uint32_t* keys;  // dropped, or more, where they go nowhere
  const uint32_t* order;
  const uint2* pairs;  // or keys and elements of source, sorted by the keys' leading bits
  bool sorted_keys;  // keys ascend, those that go nowhere last; else the indices do, if anything does
  int sorted_bits;   // of keys whose low bits were left out of the sort: how many more it has looked at
  uint32_t *keys_room, *order_room;  // for those of ascending indices, where they are read more than once
  ChunkInfo* chunks;

  const void* source;
  const void* alpha;
  void* out;
  int64_t outer, inner;
  int64_t source_stride, out_stride;  // rows from one `outer` to the next
  int64_t source_extra, out_extra;    // rows that one b lies further than count, or rows, after the last
  Divider by_count, by_rows;
  bool reads_out;                     // out holds what the reduction goes on from
  bool tiles;                         // ascending indices are reduced in tiles of source as it lies
  uint32_t chunk;                     // places of the order that a tile has, or a thread goes through
  int under_way;                      // so many at once

  void* partials;

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

// All of a call as one run, without the numbers of 32 bits, and so much of it: slices [b, b + batch) of the batch, and
// of the rows and positions of each those from `row` and `position` on.
struct IndexPart {
  int64_t b, batch, row, rows, position, count;
};
IndexRun RunOf(const IndexArgs& args);
IndexRun RunOf(const IndexArgs& args, const IndexPart& part);
// The most slices of the batch that a run can have.
int64_t BatchOf(const IndexArgs& args);

// Has the line that holds an address brought to L2.
__device__ __forceinline__ void Prefetch(const char* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// An index as it lies in memory: loaded without looking at it, so that several loads can be under way.
struct RawIndex {
  uint32_t low, high;
};

__device__ __forceinline__ RawIndex LoadIndex(const IndexRun& run, int64_t at) {
  RawIndex raw = {0, 0};
  if (run.index_bytes == 4) {
    raw.low = __ldg(static_cast<const uint32_t*>(run.index) + at);
  } else if (run.index_bytes == 8) {
    const uint2 both = __ldg(static_cast<const uint2*>(run.index) + at);
    raw = {both.x, both.y};
  } else if (run.index_bytes == 2) {
    raw.low = __ldg(static_cast<const uint16_t*>(run.index) + at);
  } else {
    raw.low = __ldg(static_cast<const uint8_t*>(run.index) + at);
  }
  return raw;
}

// The row that an index means, wrapped or clipped; may lie outside [0, all_rows).
__device__ __forceinline__ int64_t RowOf(const IndexRun& run, RawIndex raw) {
  int64_t row = static_cast<int64_t>(static_cast<uint64_t>(raw.high) << 32 | raw.low);
  if (run.index_signed) {
    if (run.index_bytes == 4) row = static_cast<int32_t>(raw.low);
    else if (run.index_bytes == 2) row = static_cast<int16_t>(raw.low);
    else if (run.index_bytes == 1) row = static_cast<int8_t>(raw.low);
    if (run.wrap && row < 0) row += run.all_rows;
  } else if (row < 0) {
    row = INT64_MAX;  // an unsigned index beyond all rows
  }
  if (run.clip) row = max(min(row, run.all_rows - 1), int64_t{0});
  return row;
}

// The key of an index in the first slice of the batch: of any, and of a `plain` one, by far the most common.
__device__ __forceinline__ uint32_t RowKey(const IndexRun& run, RawIndex raw) {
  const uint64_t row = static_cast<uint64_t>(RowOf(run, raw) - run.first_row);
  return row < run.rows ? static_cast<uint32_t>(row) : run.dropped;
}

__device__ __forceinline__ uint32_t PlainKey(const IndexRun& run, uint32_t index) {
  const uint32_t row = run.wrap && static_cast<int32_t>(index) < 0 ? index + run.rows : index;
  return row < run.rows ? row : run.dropped;
}

__device__ __forceinline__ uint32_t KeyOf(const IndexRun& run, RawIndex raw, uint32_t position) {
  const uint32_t key = run.plain ? PlainKey(run, raw.low) : RowKey(run, raw);
  return run.batch > 1 && key != run.dropped ? key + run.by_count.Div(position) * run.rows : key;
}

// Where the keys are: in run.keys, in the plain indices of one slice, or wherever the run says. That is a branch or
// more a key, behind which each is waited for alone.
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

// The first of places [low, high) whose key is `key` or more, where keys ascend. The lanes of a warp look at a place
// each time: a thread alone would wait for memory five times as often.
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

// Whether the chunks cut the run that begins in `chunk` and goes on behind it: where it ends within `reach` places
// from there it needs no cutting.
template <Keys kKeys = Keys::kAny>
__device__ __forceinline__ bool IsCut(const IndexRun& run, uint32_t chunk_places, uint32_t chunk, uint32_t reach) {
  const uint32_t begin = chunk * chunk_places, end = begin + chunk_places;
  // All that decides, under way at once.
  const uint32_t before = KeyAt<kKeys>(run, begin - (begin > 0)), head = KeyAt<kKeys>(run, begin);
  const uint32_t key = KeyAt<kKeys>(run, min(end, run.positions) - 1);
  const uint32_t next = KeyAt<kKeys>(run, min(end, run.positions - 1));
  const uint32_t far = KeyAt<kKeys>(run, min(end + reach, run.positions - 1));
  const bool began_earlier = begin > 0 && head == key && before == key;
  return end + reach < run.positions && key < run.dropped && next == key && far == key && !began_earlier;
}

// The first of low, low + 1, ... that is `high` or at whose place, `unit` times as far, the key is not `key`; before
// it all are.
struct EndSearch {
  uint32_t low, high, key, unit;
};

// Leaves each search's end in its `low`. They take their steps together, since a step is a wait for memory, and look
// at several places in each.
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

// Into how many parts the chunks cut the run that begins in `chunk` and goes on behind it, or 0.
__device__ inline uint32_t PartsOf(const IndexRun& run, uint32_t chunk_places, uint32_t chunks, uint32_t chunk,
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

// What a row of out becomes: x + alpha * sum, or the extreme of both.
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
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
    return;
  }
#endif
#pragma unroll
  for (int i = 0; i < N; ++i) atomicAdd(at + i, v[i]);
}

template <class C> __device__ __forceinline__ C Alpha(const IndexRun& run) {
  return run.alpha ? *static_cast<const C*>(run.alpha) : C(1);
}

// Lists in order the places where runs end: begin + i for each bit i of a thread's mask. How many there are. `warp_runs`:
// room for a number a warp, in shared memory as `ends` is. All threads take part, and may read both afterwards.
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

// Where keys are in no order (index_add_gaps.cuh has the others), untouched rows of out are written by blocks of their
// own, a tile of rows and vectors each.
constexpr int kFillRows = 1024;
struct FillShape {
  int64_t rows = 0;     // of a tile
  int64_t vectors = 0;  // of a tile's rows
  int64_t slabs = 0, row_tiles = 0;
  Divider by_vectors;
  int64_t blocks = 0;
};

// `vectors` a row, `bytes` each.
inline FillShape FillShapeOf(int64_t keys, int64_t outer, int64_t vectors, int64_t bytes) {
  FillShape f;
  constexpr int64_t kTileBytes = 64 * 1024;
  f.vectors = vectors * bytes > 2 * kTileBytes ? kTileBytes / bytes : vectors;
  f.slabs = (vectors + f.vectors - 1) / f.vectors;
  f.rows = kTileBytes / (f.vectors * bytes);
  f.rows = f.rows < 1 ? 1 : f.rows > kFillRows ? kFillRows : f.rows;
  f.row_tiles = (keys + f.rows - 1) / f.rows;
  f.by_vectors = Divider(f.vectors);
  f.blocks = f.row_tiles * f.slabs * outer;
  return f;
}

// Writes the identity to the rows of tile `block` that `mark` leaves unmarked. mark(first key, keys, bits)
// sets the bits of touched rows; all threads of the block take part.
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
