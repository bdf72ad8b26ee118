// Rows of up to kWidth elements, sorted, in a stable order, with the columns where their elements were.
//
//     SortRows        a bitonic network. kWidth / 8 threads sort a row. Each holds 8 elements in registers, as numbers made of the
//                     key and the column, so that no two are equal. Elements are exchanged in registers, by shuffles, and,
//                     if they are further apart than 256, through shared memory
//
// -0 equals 0, and NaN is greater than every number, as in lax.sort, or floats are in the total order of lax.top_k. Memory traffic:
// rows are read once, and again, from L1, in sorted order; values and indices are written once. What is carried is read in sorted
// order, too.
#pragma once

#include "common/std.h"
#include "order.h"

namespace jaxkern {

struct SortRowsArgs {
  const void* x;           // [rows, width]
  void* values;            // [rows, kept], or null
  uint32_t* indices;       // [rows, kept], or null
  const void* carried_in;  // [rows, width], or null: what follows its key
  void* carried_out;       // [rows, kept]
  uint64_t largest;        // of SortKey
  uint64_t flipped;        // all bits set to sort in descending order, otherwise 0
  uint32_t rows, width;
  uint32_t kept;  // so many elements of each sorted row are written
};

constexpr uint32_t kSortOwn = 8;

// A key and its column, in the order of both.
template <class Key> struct SortItem {
  Key key;
  uint32_t column;
  __device__ __forceinline__ uint32_t Column() const { return column; }
  __device__ __forceinline__ bool operator<(const SortItem& other) const {
    return key < other.key || (key == other.key && column < other.column);
  }
  __device__ __forceinline__ SortItem OfLane(uint32_t away) const {
    return {__shfl_xor_sync(~0u, key, away), __shfl_xor_sync(~0u, column, away)};
  }
};
template <> struct SortItem<uint32_t> {
  uint64_t both;
  SortItem() = default;
  __device__ __forceinline__ SortItem(uint32_t key, uint32_t column)
      : both(static_cast<uint64_t>(key) << 32 | column) {}
  __device__ __forceinline__ uint32_t Column() const { return static_cast<uint32_t>(both); }
  __device__ __forceinline__ bool operator<(const SortItem& other) const { return both < other.both; }
  __device__ __forceinline__ SortItem OfLane(uint32_t away) const {
    SortItem other;
    other.both = __shfl_xor_sync(~0u, both, away);
    return other;
  }
};

template <class Item> __device__ __forceinline__ void Exchange(Item& a, Item& b, bool ascending) {
  const bool swaps = (b < a) == ascending;  // two items that are equal are both padding
  const Item first = swaps ? b : a;
  b = swaps ? a : b, a = first;
}

// Elements `apart`, 4 or less, in the registers of a thread.
template <uint32_t kApart, class Item>
__device__ __forceinline__ void ExchangeOwn(Item (&own)[kSortOwn], bool ascending) {
#pragma unroll
  for (uint32_t i = 0; i < kSortOwn; ++i) {
    if (!(i & kApart)) Exchange(own[i], own[i | kApart], ascending);
  }
}

// kThreads: of a block, which has kThreads * 8 / kWidth rows. Carried: an unsigned number of the size of what is carried.
template <class Bits, Order kOrder, uint32_t kWidth, uint32_t kThreads, class Carried>
__global__ void __launch_bounds__(kThreads) SortRows(const __grid_constant__ SortRowsArgs a) {
  using Item = SortItem<Key<Bits> >;
  constexpr uint32_t kOfRow = kWidth / kSortOwn;
  __shared__ Item held[kThreads * (kSortOwn + 1)];
  const uint32_t t = threadIdx.x % kOfRow, row = blockIdx.x * (kThreads / kOfRow) + threadIdx.x / kOfRow;
  const uint32_t begin = threadIdx.x / kOfRow * kWidth, first = t * kSortOwn;
  const bool exists = row < a.rows;
  const Bits* x = static_cast<const Bits*>(a.x) + static_cast<int64_t>(row) * a.width;
  auto place = [&](uint32_t at) { return begin + at + (begin + at) / kSortOwn; };  // threads do not share a bank

  Item own[kSortOwn];  // elements [first, first + 8) of the network, whose order at the start is of no importance
#pragma unroll
  for (uint32_t i = 0; i < kSortOwn; ++i) {
    const uint32_t column = i * kOfRow + t;
    own[i] = {static_cast<Key<Bits> >(~uint64_t{0}), ~0u};
    if (exists && column < a.width) {
      const Key<Bits> key = SortKey<Bits, kOrder>(x[column], static_cast<Key<Bits> >(a.largest));
      own[i] = {key ^ static_cast<Key<Bits> >(a.flipped), column};
    }
  }
  // Runs of 2, 4 and 8.
#pragma unroll
  for (uint32_t i = 0; i < kSortOwn; i += 2) Exchange(own[i], own[i + 1], !(i & 2));
#pragma unroll
  for (uint32_t apart = 2; apart; apart /= 2) {
#pragma unroll
    for (uint32_t i = 0; i < kSortOwn; ++i) {
      if (!(i & apart)) Exchange(own[i], own[i | apart], !(i & 4));
    }
  }
  bool ascending = kWidth == kSortOwn || !(first & kSortOwn);
  ExchangeOwn<4>(own, ascending), ExchangeOwn<2>(own, ascending), ExchangeOwn<1>(own, ascending);

#pragma unroll 1
  for (uint32_t run = 2 * kSortOwn; run <= kWidth; run *= 2) {
    ascending = !(first & run) || run == kWidth;
#pragma unroll 1
    for (uint32_t apart = run / 2; apart >= kSortOwn; apart /= 2) {
      const bool lower = !(first & apart) == ascending;
      if (kWidth > 32 * kSortOwn && apart >= 32 * kSortOwn) {
        __syncthreads();
#pragma unroll
        for (uint32_t i = 0; i < kSortOwn; ++i) held[place(first + i)] = own[i];
        __syncthreads();
      }
#pragma unroll
      for (uint32_t i = 0; i < kSortOwn; ++i) {
        Item other;
        if (kWidth > 32 * kSortOwn && apart >= 32 * kSortOwn) other = held[place((first ^ apart) + i)];
        else other = own[i].OfLane(apart / kSortOwn);
        if ((other < own[i]) == lower) own[i] = other;
      }
    }
    ExchangeOwn<4>(own, ascending), ExchangeOwn<2>(own, ascending), ExchangeOwn<1>(own, ascending);
  }

  __syncthreads();
#pragma unroll
  for (uint32_t i = 0; i < kSortOwn; ++i) held[place(first + i)] = own[i];
  __syncthreads();
  if (!exists) return;
  const int64_t to = static_cast<int64_t>(row) * a.kept;
  const Carried* carried = static_cast<const Carried*>(a.carried_in) + static_cast<int64_t>(row) * a.width;
#pragma unroll
  for (uint32_t i = 0; i < kSortOwn; ++i) {
    const uint32_t at = i * kOfRow + t;
    if (at < a.kept) {
      const auto column = held[place(at)].Column();
      if (a.values) static_cast<Bits*>(a.values)[to + at] = x[column];
      if (a.indices) a.indices[to + at] = column;
      if (a.carried_out) static_cast<Carried*>(a.carried_out)[to + at] = carried[column];
    }
  }
}

}  // namespace jaxkern
