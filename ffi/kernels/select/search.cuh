// Where each query would be inserted into an ascending array: how many of its elements are less than the query, or, with kRight,
// how many are not greater.
//
//     Search          every block keeps evenly spaced elements of the array in shared memory. A binary search compares the query with
//                     these, another one with the first elements of the vectors between two of them, in L2, and at last the query is
//                     compared with all elements of one vector
//
// Reads of 32 lanes at different places take 32 cycles, and no fewer if each reads less. More elements in shared memory, and
// vectors, save such reads. -0 equals 0, and NaN is greater than every number, as in a sort. Memory traffic: queries and results
// once.
#pragma once

#include "common/pack.cuh"
#include "order.h"

namespace jaxkern {

#ifndef JAXKERN_EMULATED
#define JAXKERN_DYNAMIC_SHARED(name) extern __shared__ __align__(16) char name[]
#endif

constexpr uint32_t kSearchQueries = 4;  // of a thread at once

struct SearchArgs {
  const void* array;    // [size], ascending
  const void* queries;  // [count], of the same type
  uint32_t* results;    // [count]
  uint64_t count;
  uint64_t largest;  // of SortKey
  uint32_t size;     // 1 or more
  uint32_t stride;   // from one element in shared memory to the next one, a multiple of kVector
};

// Shared memory: ceil(size / stride) keys. The array is aligned to vectors of kVector elements.
template <class Bits, Order kOrder, bool kRight, int kThreads, int kVector> __global__ void __launch_bounds__(kThreads)
    Search(const __grid_constant__ SearchArgs a) {
  JAXKERN_DYNAMIC_SHARED(shared_bytes);
  auto* keys = reinterpret_cast<Key<Bits>*>(shared_bytes);
  const auto* array = static_cast<const Bits*>(a.array);
  const auto* queries = static_cast<const Bits*>(a.queries);
  auto key = [&](Bits bits) { return SortKey<Bits, kOrder>(bits, static_cast<Key<Bits>>(a.largest)); };
  const uint32_t held = (a.size - 1) / a.stride + 1;
  for (uint32_t i = threadIdx.x; i < held; i += kThreads) keys[i] = key(array[i * a.stride]);
  __syncthreads();
  auto before = [](Key<Bits> key, Key<Bits> query) { return kRight ? key <= query : key < query; };
  constexpr uint64_t kTile = kThreads * kSearchQueries;
  for (uint64_t first = blockIdx.x * kTile + threadIdx.x; first < a.count; first += gridDim.x * kTile) {
    Key<Bits> query[kSearchQueries];
    uint32_t low[kSearchQueries] = {};
#pragma unroll
    for (uint32_t q = 0; q < kSearchQueries; ++q) {
      const uint64_t at = first + q * kThreads;
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
    // The last of the keys before a query is at (low - 1) * stride. Without one, no element is before it: `none` has its bit.
    uint32_t none = 0;
#pragma unroll
    for (uint32_t q = 0; q < kSearchQueries; ++q) {
      none |= static_cast<uint32_t>(low[q] == 0) << q;
      low[q] = low[q] ? (low[q] - 1) * a.stride : 0;
    }
    // The first vector from `low` on is known to begin before the query.
    for (uint32_t n = a.stride / kVector - 1; n;) {
      const uint32_t half = n > 1 ? n / 2 : 1;
#pragma unroll
      for (uint32_t q = 0; q < kSearchQueries; ++q) {
        const uint32_t at = low[q] + half * kVector;
        if (at < a.size && before(key(array[at]), query[q])) low[q] = at;
      }
      n -= half;
    }
    if constexpr (kVector == 1) {
#pragma unroll
      for (uint32_t q = 0; q < kSearchQueries; ++q) ++low[q];
    } else {
      Pack<Bits, kVector> pack[kSearchQueries];
#pragma unroll
      for (uint32_t q = 0; q < kSearchQueries; ++q) {
        pack[q] = ZeroPack<Bits, kVector>();
        if (low[q] + kVector <= a.size) {
          pack[q] = LoadVector<Bits, kVector>(array + low[q]);
        } else {
          for (int i = 0; i < kVector && low[q] + i < a.size; ++i) SetElement(pack[q], i, array[low[q] + i]);
        }
      }
#pragma unroll
      for (uint32_t q = 0; q < kSearchQueries; ++q) {
        uint32_t more = 0;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          more += low[q] + i < a.size && before(key(Element(pack[q], i)), query[q]);
        }
        low[q] += more;
      }
    }
#pragma unroll
    for (uint32_t q = 0; q < kSearchQueries; ++q) {
      const uint64_t at = first + q * kThreads;
      if (at < a.count) a.results[at] = none >> q & 1 ? 0 : low[q];
    }
  }
}

}  // namespace jaxkern
