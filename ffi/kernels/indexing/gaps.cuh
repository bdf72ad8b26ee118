// Writes the rows that receive no update, for keys that are in order. The rows of each slice are cut into ranges of a
// power of two of rows:
//
//     empty ranges   one warp per range searches the keys and fills the range if it contains no key
//     gaps           the untouched rows of other ranges lie between two neighbouring keys. The threads that compare the
//                    two keys fill them: the reductions in shared memory, which hold the keys already, or else FillGaps
//
// So rows need no marks, the work per gap is at most two ranges, and many warps share long empty ranges. These are
// device functions for the kernels of reduce.cuh, chunks.cuh, narrow_rows.cuh and tiles.cuh. They read the keys and
// write each untouched row of run.out once: the identity of the reduction, or in ReduceChunks with run.reads_out the row
// of run.base.
#pragma once

#include "indexing/run.cuh"

namespace jaxkern {

constexpr uint32_t kNoKey = UINT32_MAX;  // stands before the first and after the last place

struct RangeShape {
  uint32_t rows;   // rows of a range; 0: nothing to fill
  int64_t ranges;  // total over all slices
  uint32_t slice_ranges;
  int64_t column_tile, column_tiles;  // vectors of a row that a warp fills, and column tiles of a row
  int64_t spans;                      // spans of `span` places that FillGaps searches for gaps
  uint32_t span;
  int64_t gap_warps, warps;
  Divider by_column_tiles, by_ranges, by_slice, by_spans;
};
static_assert(sizeof(RangeShape) == 168);

constexpr uint32_t kGapPlaces = 4 * kWarp;

// Calls fill(first, end) for the rows between two neighbouring keys that are not in empty ranges. The range may be
// empty.
template <class Fill> __device__ __forceinline__ void ForGap(const IndexRun& run, const RangeShape& f, uint32_t before,
                                                             uint32_t behind, Fill fill) {
  const bool has_before = before < run.dropped, has_behind = behind < run.dropped;
  const auto slice_of = [&](uint32_t key) { return run.batch > 1 ? run.by_rows.Div(key) * run.rows : 0; };
  // [first, end): the rest of the range of `before`. [next, next_end): the start of the range of `behind`.
  uint32_t first = before + 1, end = first, next = behind, next_end = behind;
  if (has_before) {
    const uint32_t slice = slice_of(before);
    end = min(((before - slice) | (f.rows - 1)) + 1, run.rows) + slice;
  }
  if (has_behind) {
    const uint32_t slice = slice_of(behind);
    next = ((behind - slice) & ~(f.rows - 1)) + slice;
  }
  if (has_before && has_behind && before < behind && behind < end) end = next = behind;
#pragma unroll 1
  for (int i = 0; i < 2; ++i, first = next, end = next_end) fill(first, end);
}

// Copies elements; all lanes of a warp must call it. Vectors of 16 bytes, kAhead of them in flight per lane, wherever
// both arrays are equally far from an address that is aligned to them.
template <class T> __device__ __forceinline__ void CopyElements(T* to, const T* from, int64_t elements) {
  constexpr int V = 16 / sizeof(T), kAhead = 4;
  const int lane = threadIdx.x % kWarp;
  const uintptr_t gap = -reinterpret_cast<uintptr_t>(to) % 16;
  int64_t head = elements;
  if (-reinterpret_cast<uintptr_t>(from) % 16 == gap) head = min(elements, static_cast<int64_t>(gap / sizeof(T)));
  for (int64_t i = lane; i < head; i += kWarp) to[i] = from[i];
  const int64_t vectors = (elements - head) / V, behind = head + vectors * V;
  to += head, from += head;
  for (int64_t i = lane; i < vectors; i += kAhead * kWarp) {
    Pack<T, V> pack[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (i + u * kWarp < vectors) pack[u] = LoadPart<T, V>(from + (i + u * kWarp) * V);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (i + u * kWarp < vectors) StorePart<T, V>(to + (i + u * kWarp) * V, pack[u]);
    }
  }
  if (behind + lane < elements) to[vectors * V + lane] = from[vectors * V + lane];
}

// Writes the identity, or with run.reads_out the old values, to vectors [begin, begin + width) of rows [first, end) of
// one slice. All lanes of a warp must call it. kOp: the reduction. T, N: element type and elements of a vector. kCopies:
// whether there may be old values, which take registers.
template <Reduction kOp, class T, int N, bool kCopies = false>
__device__ __forceinline__ void FillRows(const IndexRun& run, int64_t o, int64_t begin, int64_t width, uint32_t first,
                                         uint32_t end) {
  if (first >= end) return;
  const Pack<T, N> identity = Filled<T, N>(FromCompute<T>(Identity<kOp, Compute<T>>()));
  T* to = static_cast<T*>(run.out) + (o * run.out_stride + run.OutRow(first)) * run.inner + begin * N;
  const bool whole = width * N == run.inner;  // the rows are contiguous
  const int64_t each = whole ? (end - first) * width : width;
  if (kCopies && run.reads_out) {
#pragma unroll 1
    for (uint32_t lines = whole ? 1 : end - first; lines > 0; --lines, to += run.inner) {
      CopyElements(to, run.Old(to), each * N);
    }
    return;
  }
  for (uint32_t lines = whole ? 1 : end - first; lines > 0; --lines, to += run.inner) {
#pragma unroll 4
    for (int64_t i = threadIdx.x % kWarp; i < each; i += kWarp) StorePart<T, N>(to + i * N, identity);
  }
}

// The same as a call, for kernels with blocks that do nothing else: it is compiled once, though there are several.
template <Reduction kOp, class T, int N, bool kCopies>
__device__ __noinline__ void CallFillRows(const IndexRun& run, int64_t o, int64_t begin, int64_t width, uint32_t first,
                                          uint32_t end) {
  FillRows<kOp, T, N, kCopies>(run, o, begin, width, first, end);
}

// Whether rows may lie between two neighbouring keys.
__device__ __forceinline__ bool Apart(const IndexRun& run, uint32_t before, uint32_t behind) {
  return before != behind && before + 1 != behind && min(before, behind) < run.dropped;
}

// Calls ForGap for one pair of neighbours per lane; the lanes of the warp fill each gap together.
template <class Fill> __device__ __forceinline__ void ForGaps(const IndexRun& run, const RangeShape& f, uint32_t before,
                                                              uint32_t behind, Fill fill) {
  for (uint32_t left = __ballot_sync(~0u, Apart(run, before, behind)); left; left &= left - 1) {
    const int at = __ffs(left) - 1;
    ForGap(run, f, __shfl_sync(~0u, before, at), __shfl_sync(~0u, behind, at), fill);
  }
}

// Fills the gaps before the runs of a tile, which end at places `ends`, and, if the tile has the last place of all
// (`last`), the gap after it. keys[-1] is the key before the tile. All threads of a block must call it.
template <class Fill> __device__ __forceinline__ void ForGapsOfTile(const IndexRun& run, const RangeShape& f,
                                                                    const uint32_t* keys, const uint16_t* ends,
                                                                    int runs, bool last, Fill fill) {
  const int all = runs + last;
  for (int base = threadIdx.x / kWarp * kWarp; base < all; base += blockDim.x) {
    const int r = base + threadIdx.x % kWarp;
    const int at = r > 0 && r < all ? ends[r - 1] + 1 : 0;
    ForGaps(run, f, r < all ? keys[at - 1] : kNoKey, r < runs ? keys[at] : kNoKey, fill);
  }
}

// Does the work of warp `number` of f.warps. Parameters as for FillRows. kListed: run.keys lists the keys.
template <Reduction kOp, class T, int N, bool kCopies = false, bool kListed = false>
__device__ __forceinline__ void FillGaps(const IndexRun& run, const RangeShape& f, int64_t number) {
  const bool looks_for_gaps = number < f.gap_warps;
  if (!looks_for_gaps) number -= f.gap_warps;
  const int64_t item = f.by_column_tiles.Div(number), begin = (number - item * f.column_tiles) * f.column_tile;
  const int64_t width = min(f.column_tile, run.inner / N - begin);
  if (!looks_for_gaps) {
    const int64_t o = f.by_ranges.Div(item);
    const uint32_t range = static_cast<uint32_t>(item - o * f.ranges), b = f.by_slice.Div(range);
    const uint32_t row = (range - b * f.slice_ranges) * f.rows, first = b * run.rows + row;
    const uint32_t end = first + min(f.rows, run.rows - row);
    const bool one_slice = !run.sorted_keys && run.batch > 1;  // indices are in order only within a slice
    const uint32_t low = one_slice ? b * run.count : 0, high = one_slice ? low + run.count : run.positions;
    const uint32_t place = LowerBound(run, low, high, first);
    constexpr Keys kKeys = kListed ? Keys::kListed : Keys::kAny;
    if (place >= high || KeyAt<kKeys>(run, place) >= end)
      CallFillRows<kOp, T, N, kCopies>(run, o, begin, width, first, end);
    return;
  }
  const int64_t o = f.by_spans.Div(item);
  const uint32_t start = static_cast<uint32_t>(item - o * f.spans) * f.span, lane = threadIdx.x % kWarp;
  const auto key_at = [&](uint32_t place) { return place < run.positions ? __ldg(run.keys + place) : kNoKey; };
  if (f.span == kGapPlaces) {  // fast path: mostly there is no gap between any of these places
    constexpr uint32_t kEach = kGapPlaces / kWarp;
    uint32_t key[kEach + 1];
    bool apart = false;
#pragma unroll
    for (uint32_t u = 0; u <= kEach; ++u) key[u] = key_at(start + kEach * lane + u - 1);
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u) apart |= Apart(run, key[u], key[u + 1]);
    if (!__any_sync(~0u, apart)) return;
  }
#pragma unroll 1
  for (uint32_t place = start + lane; place < start + f.span; place += kWarp) {
    ForGaps(run, f, key_at(place - 1), key_at(place),
            [&](uint32_t first, uint32_t end) { CallFillRows<kOp, T, N, kCopies>(run, o, begin, width, first, end); });
  }
}

}  // namespace jaxkern
