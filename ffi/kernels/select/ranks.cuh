// The elements of rows that would be at given places of the sorted row, without sorting it: a radix selection.
//
//     RankCount       for each rank, counts the digits of the elements whose leading bits are those of the element of this rank.
//                     A block reads a part of a row and adds its counts to those of the row.
//     RankDigit       one block per row and rank: finds the next digit of its element among the counts
//
// These run in turn for each digit, from the first one on. The order is that of a sort (order.h): -0 equals 0, and NaN is the
// greatest. If a row has NaN, all its results are NaN. Ranks with equal leading bits share the counts of the first of them.
// Memory traffic: a row is read once for each digit. On entry the counts are 0.
#pragma once

#include "common/pack.cuh"
#include "common/reduce.cuh"
#include "order.h"

namespace jaxkern {

constexpr uint32_t kRankThreads = 256, kRankDigit = 11, kRankBins = 1 << kRankDigit, kMostRanks = 4;

struct RankArgs {
  const void* x;          // [rows, width]
  const uint32_t* ranks;  // [count], each below width
  void* values;           // [rows, count], written with the last digit
  uint32_t* counts;       // [rows, count, kRankBins]
  const uint2* before;    // [rows, count]: the leading bits of each element, and its rank among those with these bits
  uint2* found;           // the same, with this digit
  uint32_t width, count;
  uint32_t parts, part;  // a row has so many parts of `part` elements; the last one may be shorter
  uint32_t shift, bits;  // of the digit: its lowest bit, and how many it has
  uint32_t largest;      // of RankKey
  bool first, last;      // whether this is the first digit, and the last one
};

// The unsigned number of a float in the order of a sort; FromKey inverts it. -0 equals 0, and NaN, whose magnitude is greater than
// `largest`, is the greatest number.
template <class Bits> __device__ __forceinline__ Bits RankKey(Bits bits, uint32_t largest) {
  constexpr uint32_t kSign = 1u << (8 * sizeof(Bits) - 1);
  const uint32_t magnitude = bits & (kSign - 1);
  if (magnitude > largest) return static_cast<Bits>(~0u);
  return static_cast<Bits>(ToKey<Bits, Order::kFloat>(magnitude ? bits : 0));
}

// The first rank with the leading bits of rank r: its counts are those of r, too.
__device__ __forceinline__ uint32_t OwnerOf(const RankArgs& a, uint32_t row, uint32_t r) {
  if (a.first) return 0;
  const uint2* of = a.before + static_cast<int64_t>(row) * a.count;
  uint32_t owner = 0;
  while (of[owner].x != of[r].x) ++owner;
  return owner;
}

// kVector elements in a load, kPacks loads at once. Rows and parts are whole vectors, and x is aligned to them.
template <class Bits, int kVector, int kPacks> __global__ void __launch_bounds__(kRankThreads, 4)
    RankCount(const __grid_constant__ RankArgs a) {
  constexpr uint32_t kStep = kRankThreads * kVector;
  __shared__ uint32_t bins[kMostRanks][kRankBins];
  const uint32_t t = threadIdx.x, row = blockIdx.x / a.parts, part = blockIdx.x % a.parts;
  const uint32_t begin = part * a.part, end = min(begin + a.part, a.width), mask = (1u << a.bits) - 1;
  const Bits* x = static_cast<const Bits*>(a.x) + static_cast<int64_t>(row) * a.width;
  uint32_t leading[kMostRanks];
  bool counts[kMostRanks];
#pragma unroll
  for (uint32_t r = 0; r < kMostRanks; ++r) {
    counts[r] = r < a.count && OwnerOf(a, row, r) == r;
    leading[r] = counts[r] && !a.first ? a.before[static_cast<int64_t>(row) * a.count + r].x : 0;
    if (counts[r]) {
      for (uint32_t i = t; i < kRankBins; i += kRankThreads) bins[r][i] = 0;
    }
  }
  __syncthreads();
  for (uint32_t tile = begin; tile < end; tile += kStep * kPacks) {
    const uint32_t first = tile + t * kVector;
    Pack<Bits, kVector> packs[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      packs[p] = ZeroPack<Bits, kVector>();
      if (first + p * kStep < end) packs[p] = LoadVector<Bits, kVector>(x + first + p * kStep);
    }
#pragma unroll
    for (int i = 0; i < kVector * kPacks; ++i) {
      const Bits key = RankKey<Bits>(Element(packs[i / kVector], i % kVector), a.largest);
      const uint32_t leads = a.first ? 0 : key >> a.shift >> a.bits;
      if (first + i / kVector * kStep >= end) continue;
#pragma unroll
      for (uint32_t r = 0; r < kMostRanks; ++r) {
        if (counts[r] && leads == leading[r]) atomicAdd(&bins[r][key >> a.shift & mask], 1u);
      }
    }
  }
  __syncthreads();
  uint32_t* all = a.counts + static_cast<int64_t>(row) * a.count * kRankBins;
#pragma unroll
  for (uint32_t r = 0; r < kMostRanks; ++r) {
    if (!counts[r]) continue;
    for (uint32_t i = t; i < kRankBins; i += kRankThreads) {
      if (bins[r][i]) atomicAdd(&all[r * kRankBins + i], bins[r][i]);
    }
  }
}

template <class Bits> __global__ void __launch_bounds__(kRankThreads) RankDigit(const __grid_constant__ RankArgs a) {
  constexpr uint32_t kOwn = kRankBins / kRankThreads;
  __shared__ uint32_t sums[kRankThreads / 32];
  const uint32_t t = threadIdx.x, row = blockIdx.x / a.count, r = blockIdx.x % a.count;
  const uint32_t* bins = a.counts + (static_cast<int64_t>(row) * a.count + OwnerOf(a, row, r)) * kRankBins;
  const uint2 before = a.first ? make_uint2(0, a.ranks[r]) : a.before[blockIdx.x];
  // No number but NaN has the greatest first digit.
  const bool unordered = a.first && bins[(1u << a.bits) - 1] != 0;
  const uint32_t rank = unordered ? a.width - 1 : before.y;
  uint32_t own[kOwn], sum = 0;
#pragma unroll
  for (uint32_t i = 0; i < kOwn; ++i) {
    own[i] = bins[t * kOwn + i];
    sum += own[i];
  }
  uint32_t below = SumOfThreadsBefore(sum, sums);
#pragma unroll
  for (uint32_t i = 0; i < kOwn; ++i) {
    if (below <= rank && rank < below + own[i]) {
      const uint32_t leading = before.x << a.bits | (t * kOwn + i);
      a.found[blockIdx.x] = make_uint2(leading, rank - below);
      if (a.last) static_cast<Bits*>(a.values)[blockIdx.x] = FromKey<Bits, Order::kFloat>(leading);
    }
    below += own[i];
  }
}

}  // namespace jaxkern
