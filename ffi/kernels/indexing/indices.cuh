// Indices of any integer type, and the keys that kernels compute from them:
//
//     position   b * count + k: number of the update that index[b, k] sends to a row
//     key        b * rows + row: number of that row; `dropped` if the index is out of range
//
// Both are 32-bit numbers: a run has fewer than 2^31 keys and at most 2^30 positions. Offsets into arrays are 64-bit.
// Device functions only, for the kernels of this folder; each index is read once per call.
#pragma once

#include "common/divider.h"
#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace jaxkern {

struct Indices {
  const void* index;  // [batch, count]
  int64_t all_rows;   // size of the dimension that indices refer to
  int64_t first_row;  // first row of this run's part of that dimension
  uint32_t rows, count, batch;
  uint32_t positions;  // batch * count
  uint32_t dropped;    // batch * rows
  int32_t index_bytes;
  bool index_signed, wrap, clip;
  bool plain;  // 4 bytes, signed, not clipped, and rows == all_rows
  Divider by_count;
};
static_assert(sizeof(Indices) == 80);

// An index as loaded. Decoding it later lets several loads be in flight.
struct RawIndex {
  uint32_t low, high;
};

__device__ __forceinline__ RawIndex LoadIndex(const Indices& run, int64_t at) {
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

// Returns the row of an index after wrapping or clipping; may be outside of [0, all_rows).
__device__ __forceinline__ int64_t RowOf(const Indices& run, RawIndex raw) {
  int64_t row = static_cast<int64_t>(static_cast<uint64_t>(raw.high) << 32 | raw.low);
  if (run.index_signed) {
    if (run.index_bytes == 4) row = static_cast<int32_t>(raw.low);
    else if (run.index_bytes == 2) row = static_cast<int16_t>(raw.low);
    else if (run.index_bytes == 1) row = static_cast<int8_t>(raw.low);
    if (run.wrap && row < 0) row += run.all_rows;
  } else if (row < 0) {
    row = INT64_MAX;  // an unsigned index of 2^63 or more
  }
  if (run.clip) row = max(min(row, run.all_rows - 1), int64_t{0});
  return row;
}

// Returns the key of an index in the first slice of the batch.
__device__ __forceinline__ uint32_t RowKey(const Indices& run, RawIndex raw) {
  const uint64_t row = static_cast<uint64_t>(RowOf(run, raw) - run.first_row);
  return row < run.rows ? static_cast<uint32_t>(row) : run.dropped;
}

// Returns the key of a `plain` index, by far the most common kind.
__device__ __forceinline__ uint32_t PlainKey(const Indices& run, uint32_t index) {
  const uint32_t row = run.wrap && static_cast<int32_t>(index) < 0 ? index + run.rows : index;
  return row < run.rows ? row : run.dropped;
}

__device__ __forceinline__ uint32_t KeyOf(const Indices& run, RawIndex raw, uint32_t position) {
  const uint32_t key = run.plain ? PlainKey(run, raw.low) : RowKey(run, raw);
  return run.batch > 1 && key != run.dropped ? key + run.by_count.Div(position) * run.rows : key;
}

// Number of a lane's items that a step processes together where registers are scarce.
template <int kItems> constexpr int kItemsAtOnce = kItems % 4 == 0 ? 4 : 3;

// Number of the lane's first item. Item i of lane l is number 32 * i + l of the warp's part of the tile. kThreads:
// threads of a block. kItems: items per lane.
template <int kThreads, int kItems> __device__ __forceinline__ uint32_t FirstOfLane(uint32_t tile) {
  return tile * (kThreads * kItems) + threadIdx.x / kWarp * (kWarp * kItems) + threadIdx.x % kWarp;
}

// Loads the keys of positions first, first + 32, ...; UINT32_MAX beyond the last position. kItems: items per lane.
// kFirst: compute keys from the indices instead of reading keys_in. Conditions that are equal for all items are tested
// once, outside of the loops, so that all loads are in flight together.
template <int kItems, bool kFirst> __device__ __forceinline__ void LoadKeys(const Indices& run, const uint32_t* keys_in,
                                                                            uint32_t first, uint32_t (&key)[kItems]) {
  const int left = static_cast<int>(run.positions - first);  // positions from the lane's first on; may be negative
  if (!kFirst || run.plain) {
    const uint32_t* const from = Pinned((kFirst ? static_cast<const uint32_t*>(run.index) : keys_in) + first);
#pragma unroll
    for (int i = 0; i < kItems; ++i) key[i] = i * kWarp < left ? __ldg(from + i * kWarp) : UINT32_MAX;
  } else {
#pragma unroll
    for (int i = 0; i < kItems; i += kItemsAtOnce<kItems>) {
      RawIndex raw[kItemsAtOnce<kItems>];
#pragma unroll
      for (int u = 0; u < kItemsAtOnce<kItems>; ++u) {
        const uint32_t at = first + (i + u) * kWarp;
        raw[u] = at < run.positions ? LoadIndex(run, at) : RawIndex{};
      }
#pragma unroll
      for (int u = 0; u < kItemsAtOnce<kItems>; ++u) key[i + u] = RowKey(run, raw[u]);
    }
  }
  if constexpr (!kFirst) return;
  if (run.plain) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) key[i] = PlainKey(run, key[i]);
  }
  if (run.batch > 1) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (key[i] != run.dropped) key[i] += run.by_count.Div(first + i * kWarp) * run.rows;
    }
  }
  if (left > (kItems - 1) * kWarp) return;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i * kWarp >= left) key[i] = UINT32_MAX;
  }
}

// Prefetches the line of an address to L2.
__device__ __forceinline__ void Prefetch(const char* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

}  // namespace jaxkern
