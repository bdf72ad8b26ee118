// Where each query would be inserted into an ascending array: how many of its elements are less than the query, or, with kRight,
// how many are not greater.
//
//     Search          every block keeps evenly spaced elements of the array in shared memory. A binary search compares the query with
//                     these, and then with the elements between two of them, which are in L2 unless the array is large
//
// -0 equals 0, and NaN is greater than every number, as in a sort. Memory traffic: queries and results once.
#pragma once

#include "common/std.h"
#include "order.h"

namespace jaxkern {

constexpr uint32_t kSearchThreads = 256, kSearchKeys = 4096, kSearchQueries = 4;
constexpr uint32_t kSearchLargest = 0x7f800000;  // infinity

struct SearchArgs {
  const void* array;    // [size], ascending, of elements of 32 bits
  const void* queries;  // [count], of the same type
  uint32_t* results;    // [count]
  uint64_t count;
  uint32_t size;    // 1 or more
  uint32_t stride;  // from one element in shared memory to the next one; ceil(size / stride) <= kSearchKeys
};

template <Order kOrder, bool kRight> __global__ void __launch_bounds__(kSearchThreads)
    Search(const __grid_constant__ SearchArgs a) {
  __shared__ uint32_t keys[kSearchKeys];
  const auto* array = static_cast<const uint32_t*>(a.array);
  const auto* queries = static_cast<const uint32_t*>(a.queries);
  auto key = [](uint32_t bits) { return SortKey<uint32_t, kOrder>(bits, kSearchLargest); };
  const uint32_t held = (a.size - 1) / a.stride + 1;
  for (uint32_t i = threadIdx.x; i < held; i += kSearchThreads) keys[i] = key(array[i * a.stride]);
  __syncthreads();
  auto before = [](uint32_t key, uint32_t query) { return kRight ? key <= query : key < query; };
  constexpr uint64_t kTile = kSearchThreads * kSearchQueries;
  for (uint64_t first = blockIdx.x * kTile + threadIdx.x; first < a.count; first += gridDim.x * kTile) {
    uint32_t query[kSearchQueries], low[kSearchQueries] = {};
#pragma unroll
    for (uint32_t q = 0; q < kSearchQueries; ++q) {
      const uint64_t at = first + q * kSearchThreads;
      query[q] = at < a.count ? key(queries[at]) : 0;
    }
    // Of n elements from `low` on, half are skipped at a time: all queries take the same number of steps.
    for (uint32_t n = held; n;) {
      const uint32_t half = n > 1 ? n / 2 : 1;
#pragma unroll
      for (uint32_t q = 0; q < kSearchQueries; ++q) {
        if (before(keys[low[q] + half - 1], query[q])) low[q] += half;
      }
      n -= half;
    }
    // The last of the keys before a query is at (low - 1) * stride. Without one, the first element is not before it either.
#pragma unroll
    for (uint32_t q = 0; q < kSearchQueries; ++q) low[q] = low[q] ? (low[q] - 1) * a.stride + 1 : 0;
    for (uint32_t n = a.stride - 1; n;) {
      const uint32_t half = n > 1 ? n / 2 : 1;
#pragma unroll
      for (uint32_t q = 0; q < kSearchQueries; ++q) {
        const uint32_t at = low[q] + half - 1;
        if (at < a.size && before(key(array[at]), query[q])) low[q] += half;
      }
      n -= half;
    }
#pragma unroll
    for (uint32_t q = 0; q < kSearchQueries; ++q) {
      const uint64_t at = first + q * kSearchThreads;
      if (at < a.count) a.results[at] = low[q];
    }
  }
}

}  // namespace jaxkern
