// The k largest elements of each row in descending order, with their columns; of equal elements the first ones.
//
//     TopKBlock       one block per row, or per part of a row: a buffer in shared memory holds the elements that may be among
//                     the k largest. If it is full, a radix selection leaves its k largest, and from then on only elements
//                     that are greater than these enter. Random rows fill it once or twice.
//     TopKWarp        one warp per row that fits in its registers: finds the largest remaining element k times
//
// If a row has several parts, each block writes the k largest of its part as candidates (order.h), and a second launch of TopKBlock
// selects among them. Memory traffic: x is read once; values and indices are written once.
#pragma once

#include "common/pack.cuh"
#include "order.h"

namespace jaxkern {

constexpr uint32_t kTopKThreads = 256, kTopKHeld = 4096, kTopKDigit = 11, kTopKBins = 1 << kTopKDigit;

struct TopKArgs {
  const void* x;         // [rows, width]: elements, or candidates
  void* values;          // [rows, k]
  uint32_t* indices;     // [rows, k]
  uint64_t* candidates;  // [rows, parts, k]: written in place of values and indices unless it is null
  uint32_t rows, width, k;
  uint32_t parts, part;  // a row has so many parts of `part` elements; the last one may be shorter
  uint32_t sorted;       // the power of two from k on
};

struct TopKShared {
  uint64_t held[kTopKHeld];
  uint32_t bins[kTopKBins];
  uint32_t warp_sums[kTopKThreads / 32];
  uint32_t count;                 // of elements in `held`, or more if some did not fit
  uint32_t digit, above, within;  // the digit of the k-th largest; how many digits are greater, and how many are equal
};

// Appends the elements `of(i)` whose bit i of `wanted` is set. Returns the bits of those for which there was no place.
template <int N, class Of> __device__ __forceinline__ uint32_t Append(TopKShared& s, uint32_t wanted, Of of) {
  if (!__any_sync(~0u, wanted != 0)) return 0;
  const uint32_t lane = threadIdx.x % 32, own = __popc(wanted);
  uint32_t sum = own;
#pragma unroll
  for (uint32_t by = 1; by < 32; by *= 2) {
    const uint32_t below = __shfl_up_sync(~0u, sum, by);
    if (lane >= by) sum += below;
  }
  uint32_t at = lane == 31 ? atomicAdd(&s.count, sum) : 0;
  at = __shfl_sync(~0u, at, 31) + sum - own;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (wanted >> i & 1) {
      if (at < kTopKHeld) {
        s.held[at] = of(i);
        wanted &= ~(1u << i);
      }
      ++at;
    }
  }
  return wanted;
}

// Leaves the k largest of s.held, of which there are at least k; all threads call it. Returns a lower bound of them that is
// greater than all others.
__device__ __forceinline__ uint64_t Keep(TopKShared& s, uint32_t k) {
  const uint32_t t = threadIdx.x, lane = t % 32, held = min(s.count, kTopKHeld);
  uint64_t bound = 0;  // its bits from `shift` on are those of the k-th largest
  uint32_t shift = 64, wanted = k;
  do {
    const uint32_t next = shift > kTopKDigit ? shift - kTopKDigit : 0;
#pragma unroll
    for (uint32_t i = t; i < kTopKBins; i += kTopKThreads) s.bins[i] = 0;
    __syncthreads();
    for (uint32_t i = t; i < held; i += kTopKThreads) {
      const uint64_t c = s.held[i];
      if (shift == 64 || (c ^ bound) >> shift == 0) atomicAdd(&s.bins[c >> next & ((1u << (shift - next)) - 1)], 1u);
    }
    __syncthreads();
    // Thread t has the bins from `last` down: the sum over threads before it counts the greater digits.
    constexpr uint32_t kOwn = kTopKBins / kTopKThreads;
    const uint32_t last = kTopKBins - 1 - t * kOwn;
    uint32_t own = 0;
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) own += s.bins[last - i];
    uint32_t sum = own;
#pragma unroll
    for (uint32_t by = 1; by < 32; by *= 2) {
      const uint32_t below = __shfl_up_sync(~0u, sum, by);
      if (lane >= by) sum += below;
    }
    if (lane == 31) s.warp_sums[t / 32] = sum;
    __syncthreads();
    uint32_t above = sum - own;
#pragma unroll
    for (uint32_t w = 0; w < kTopKThreads / 32; ++w) above += w < t / 32 ? s.warp_sums[w] : 0;
    if (above < wanted && wanted <= above + own) {
      uint32_t i = 0;
      while (above + s.bins[last - i] < wanted) above += s.bins[last - i++];
      s.digit = last - i, s.above = above, s.within = s.bins[last - i];
      s.count = 0;  // here, as all threads have read it, and none reads it before the next barrier
    }
    __syncthreads();
    bound |= static_cast<uint64_t>(s.digit) << next;
    wanted -= s.above;
    shift = next;
  } while (s.within != wanted && shift);  // all threads write s.within again only after the next barrier

  // In place: what is kept of the elements that were read so far fits where these were.
  constexpr int kAtOnce = 4;
#pragma unroll 1
  for (uint32_t first = 0; first < held; first += kAtOnce * kTopKThreads) {
    uint64_t own[kAtOnce];
    uint32_t kept = 0;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t at = first + i * kTopKThreads + t;
      own[i] = at < held ? s.held[at] : 0;
      kept |= static_cast<uint32_t>(own[i] && own[i] >= bound) << i;
    }
    __syncthreads();
    Append<kAtOnce>(s, kept, [&](int i) { return own[i]; });
    __syncthreads();
  }
  return bound;
}

// The first `size` elements of s.held in descending order; size is a power of two.
__device__ __forceinline__ void SortDescending(TopKShared& s, uint32_t size) {
  for (uint32_t run = 2; run <= size; run *= 2) {
    for (uint32_t apart = run / 2; apart; apart /= 2) {
      for (uint32_t i = threadIdx.x; i < size / 2; i += kTopKThreads) {
        const uint32_t low = (i & ~(apart - 1)) * 2 | (i & (apart - 1));
        const uint64_t a = s.held[low], b = s.held[low + apart];
        if ((a < b) == ((low & run) == 0)) s.held[low] = b, s.held[low + apart] = a;
      }
      __syncthreads();
    }
  }
}

template <class Bits, Order kOrder>
__device__ __forceinline__ void StoreChosen(const TopKArgs& a, int64_t at, uint64_t candidate) {
  static_cast<Bits*>(a.values)[at] = FromKey<Bits, kOrder>(KeyOf(candidate));
  a.indices[at] = ColumnOf(candidate);
}

// kVector elements in a load, kPacks loads at once. Rows and parts are whole vectors, and x is aligned to them. kJoins: x holds
// candidates.
template <class Bits, Order kOrder, bool kJoins, int kVector, int kPacks>
__global__ void __launch_bounds__(kTopKThreads, 4) TopKBlock(const __grid_constant__ TopKArgs a) {
  using Source = std::conditional_t<kJoins, uint64_t, Bits>;
  constexpr int kOwn = kVector * kPacks;
  constexpr uint32_t kStep = kTopKThreads * kVector;  // from one load of a thread to the next one
  static_assert(kOwn <= 32);
  __shared__ TopKShared s;
  const uint32_t t = threadIdx.x, row = blockIdx.x / a.parts, part = blockIdx.x % a.parts;
  const uint32_t begin = part * a.part, end = min(begin + a.part, a.width);
  const Source* x = static_cast<const Source*>(a.x) + static_cast<int64_t>(row) * a.width;
  if (t == 0) s.count = 0;
  __syncthreads();
  uint64_t bound = 0;
  for (uint32_t tile = begin; tile < end; tile += kStep * kPacks) {
    const uint32_t first = tile + t * kVector;
    Pack<Source, kVector> packs[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      packs[p] = ZeroPack<Source, kVector>();
      if (first + p * kStep < end) packs[p] = LoadVector<Source, kVector>(x + first + p * kStep);
    }
    auto candidate = [&](int i) -> uint64_t {
      const Source element = Element(packs[i / kVector], i % kVector);
      if constexpr (kJoins) return element;
      else return Candidate(ToKey<Bits, kOrder>(element), first + i / kVector * kStep + i % kVector);
    };
    uint32_t wanted = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      wanted |= static_cast<uint32_t>(first + i / kVector * kStep < end && candidate(i) > bound) << i;
    }
    while (true) {
      wanted = Append<kOwn>(s, wanted, candidate);
      if (!__syncthreads_or(wanted != 0)) break;
      bound = Keep(s, a.k);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (candidate(i) <= bound) wanted &= ~(1u << i);
      }
    }
  }
  if (s.count > a.k) Keep(s, a.k);
  for (uint32_t i = s.count + t; i < a.sorted; i += kTopKThreads) s.held[i] = 0;
  __syncthreads();
  SortDescending(s, a.sorted);
  const int64_t to = static_cast<int64_t>(blockIdx.x) * a.k;
  for (uint32_t i = t; i < a.k; i += kTopKThreads) {
    if (a.candidates) a.candidates[to + i] = s.held[i];
    else StoreChosen<Bits, kOrder>(a, to + i, s.held[i]);
  }
}

constexpr uint32_t kTopKRows = kTopKThreads / 32;  // of a block of TopKWarp

// width <= 32 * kVector * kPacks, k <= 32.
template <class Bits, Order kOrder, int kVector, int kPacks> __global__ void __launch_bounds__(kTopKThreads)
    TopKWarp(const __grid_constant__ TopKArgs a) {
  constexpr int kOwn = kVector * kPacks;
  constexpr uint32_t kStep = 32 * kVector;
  static_assert(kOwn <= 32);
  const uint32_t lane = threadIdx.x % 32, row = blockIdx.x * kTopKRows + threadIdx.x / 32, first = lane * kVector;
  if (row >= a.rows) return;
  const Bits* x = static_cast<const Bits*>(a.x) + static_cast<int64_t>(row) * a.width;
  Pack<Bits, kVector> packs[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    packs[p] = ZeroPack<Bits, kVector>();
    if (first + p * kStep < a.width) packs[p] = LoadVector<Bits, kVector>(x + first + p * kStep);
  }
  uint32_t keys[kOwn], left = 0;  // left: the elements that are not chosen yet
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    keys[i] = ToKey<Bits, kOrder>(Element(packs[i / kVector], i % kVector));
    left |= static_cast<uint32_t>(first + i / kVector * kStep < a.width) << i;
  }
  // The largest of what is left, 0 if nothing is. Columns of a lane ascend with i.
  auto largest = [&]() -> uint64_t {
    uint32_t key = 0, column = ~0u;
#pragma unroll
    for (int i = kOwn - 1; i >= 0; --i) {
      if (left >> i & 1 && keys[i] >= key) key = keys[i], column = first + i / kVector * kStep + i % kVector;
    }
    return Candidate(key, column);
  };
  uint64_t own = largest(), kept = 0;
  for (uint32_t n = 0; n < a.k; ++n) {
    const uint32_t key = __reduce_max_sync(~0u, KeyOf(own));
    const uint32_t low = __reduce_max_sync(~0u, KeyOf(own) == key ? static_cast<uint32_t>(own) : 0);
    const uint64_t chosen = static_cast<uint64_t>(key) << 32 | low;
    if (lane == n) kept = chosen;
    if (own == chosen) {
      const uint32_t column = ColumnOf(chosen) - first;
      left &= ~(1u << (column / kStep * kVector + column % kVector));
      own = largest();
    }
  }
  if (lane < a.k) StoreChosen<Bits, kOrder>(a, static_cast<int64_t>(row) * a.k + lane, kept);
}

}  // namespace jaxkern
