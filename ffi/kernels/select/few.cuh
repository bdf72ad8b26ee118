// Sorts rows of which all elements are equal but for a few, as those of logits that are -infinity but for the largest.
//
//     SortFew         one block per row. 32 samples of the row show whether one number is common. If it is, the other elements, of
//                     which there are at most kFewHeld, are collected in shared memory and sorted there with their columns; then the block
//                     writes those that come before the common number, that number, and those that come after it
//
// A row with more of other elements, or with elements that equal the common number in the order of the sort and differ in bits, is left as
// it is; the kernels of radix.cuh sort it. Memory traffic: rows are read once and written once; what is left is read in part, or as
// 32 samples.
#pragma once

#include "bitonic.cuh"
#include "order.h"

namespace jaxkern {

constexpr uint32_t kFewThreads = 1024, kFewHeld = 4096,
                   kFewVotes = 24;  // votes: samples that must have the common number

struct FewArgs {
  const void* keys_in;  // [rows, width]
  void* keys_out;       // [rows, width]
  uint32_t* done;       // [rows], 0 before; 1 for rows that are sorted
  uint64_t largest;     // of SortKey
  uint64_t flipped;     // all bits set to sort in descending order, otherwise 0
  uint32_t width;
};

template <class Bits, Order kOrder> __global__ void __launch_bounds__(kFewThreads)
    SortFew(const __grid_constant__ FewArgs a) {
  static_assert(sizeof(Bits) <= 4);
  constexpr uint32_t kItems = 16;
  __shared__ uint64_t held[kFewHeld];  // ~(key, column), so that the greatest number comes first
  __shared__ uint32_t count;
  const uint32_t t = threadIdx.x, lane = t % 32;
  const Bits* const keys = static_cast<const Bits*>(a.keys_in) + static_cast<int64_t>(blockIdx.x) * a.width;
  const uint32_t largest = static_cast<uint32_t>(a.largest), flipped = static_cast<uint32_t>(a.flipped);
  const auto key_of = [&](Bits bits) { return SortKey<Bits, kOrder>(bits, largest) ^ flipped; };

  const Bits sample = keys[static_cast<uint64_t>(a.width - 1) * lane / 31];
  const uint32_t votes = __popc(__match_any_sync(~0u, static_cast<uint32_t>(sample)));
  const uint32_t winner = __reduce_max_sync(~0u, votes << 5 | lane);
  if (winner >> 5 < kFewVotes) return;  // all warps have the same samples
  const Bits common = __shfl_sync(~0u, sample, winner % 32);
  const uint32_t common_key = key_of(common);

  if (t == 0) count = 0;
  __syncthreads();
  for (uint32_t first = t; first - t < a.width; first += kFewThreads * kItems) {
    Bits own[kItems];
#pragma unroll
    for (uint32_t i = 0; i < kItems; ++i) {
      const uint32_t column = first + i * kFewThreads;
      own[i] = column < a.width ? keys[column] : common;
    }
    bool leaves = false;
#pragma unroll
    for (uint32_t i = 0; i < kItems; ++i) {
      if (own[i] == common) continue;
      const uint32_t key = key_of(own[i]), at = atomicAdd(&count, 1u);
      leaves = leaves || key == common_key || at >= kFewHeld;
      if (at < kFewHeld) held[at] = ~(static_cast<uint64_t>(key) << 32 | (first + i * kFewThreads));
    }
    if (__syncthreads_or(leaves)) return;
  }

  const uint32_t others = count, size = min(kFewHeld, max(256u, 2u << (31 - __clz(others | 1))));
  for (uint32_t i = others + t; i < size; i += kFewThreads) held[i] = 0;
  __syncthreads();
  SortDescending(held, size);
  __syncthreads();
  // How many come before the common number.
  uint32_t before = 0, end = others;
  while (before < end) {
    const uint32_t middle = (before + end) / 2;
    if (static_cast<uint32_t>(~held[middle] >> 32) < common_key) before = middle + 1;
    else end = middle;
  }
  const uint32_t equal = a.width - others;
  Bits* const to = static_cast<Bits*>(a.keys_out) + static_cast<int64_t>(blockIdx.x) * a.width;
  for (uint32_t at = t; at < a.width; at += kFewThreads) {
    Bits bits = common;
    if (at < before) bits = keys[static_cast<uint32_t>(~held[at])];
    else if (at >= before + equal) bits = keys[static_cast<uint32_t>(~held[at - equal])];
    to[at] = bits;
  }
  if (t == 0) a.done[blockIdx.x] = 1;
}

}  // namespace jaxkern
