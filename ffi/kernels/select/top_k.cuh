// The k largest elements of each row in descending order, with their columns; of equal elements the first ones.
//
//     TopKBlock       one block per row, or per part of a row: a buffer in shared memory holds the elements that may be among
//                     the k largest. Elements enter that are greater than a bound: at first one that k elements of the first tile
//                     reach, and once the buffer is full, one that a radix selection finds, which leaves the k largest.
//     TopKWarp        one warp per row that fits in its registers: elements reach a bound among the largest of its lanes
//
// `Read` is what is selected: Same, or the results of a function of the elements (top_k_function.cuh). If a row has several parts,
// each block writes the largest of its part as candidates (order.h), and TopKJoin selects among them: first come the largest of
// all parts, then the second ones, so that it can stop where all that follow are too small. If a part gives fewer than k candidates, and all of
// them are chosen, the part is read again. Memory traffic: x is read once; values and indices are written once.
#pragma once

#include "candidates.cuh"
#include "common/pack.cuh"
#include "row_of_warp.cuh"

namespace jaxkern {

// Elements that are selected as they are.
template <class T> struct Same {
  using Source = T;
  using Bits = T;
  static __device__ __forceinline__ Bits Of(Source x) { return x; }
};

struct TopKArgs {
  const void* x;         // [rows, width]: elements, or candidates
  void* values;          // [rows, k]
  uint32_t* indices;     // [rows, k]
  uint64_t* candidates;  // [rows, k, parts]: written in place of values and indices unless it is null
  const void* elements;  // [rows, columns], of TopKJoin, whose x are candidates [rows, of_part, parts]
  uint32_t columns, of_part;
  uint32_t rows, width, k;
  uint32_t parts, part;  // a row has so many parts of `part` elements; the last one may be shorter
  uint32_t sorted;       // the power of two from k on
  uint32_t tile_bits;    // a part has at most 2^tile_bits tiles; 0 for TopKWarp
};

template <class Bits, Order kOrder>
__device__ __forceinline__ void StoreChosen(const TopKArgs& a, int64_t at, uint64_t candidate) {
  static_cast<Bits*>(a.values)[at] = FromKey<Bits, kOrder>(KeyOf(candidate));
  a.indices[at] = ColumnOf(candidate);
}

// A tile of elements that a thread holds part of: kPacks loads of kVector elements, from column `first` on, each kStep after the last.
template <class Read, Order kOrder, int kVector, int kPacks> struct Tile {
  using Source = typename Read::Source;
  using Bits = typename Read::Bits;
  static constexpr uint32_t kStep = kTopKThreads * kVector;
  Pack<Source, kVector> packs[kPacks];
  uint32_t first;

  // Elements are selected by their bits. Otherwise keys are computed once for each element, and kept: two copies of a function may
  // be rounded differently, and the one that was compared must be the one that is returned.
  static constexpr bool kSame = std::is_same_v<Read, Same<Source>>;

  __device__ __forceinline__ void Load(const Source* x, uint32_t begin, uint32_t end) {
    first = begin + threadIdx.x * kVector;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      packs[p] = ZeroPack<Source, kVector>();
      if (first + p * kStep < end) packs[p] = LoadVector<Source, kVector>(x + first + p * kStep);
    }
  }
  static __device__ __forceinline__ uint32_t KeyOf(Source x) { return ToKey<Bits, kOrder>(Read::Of(x)); }
  static __device__ __forceinline__ uint32_t ColumnOf(uint32_t first, uint32_t i) {
    return first + i / kVector * kStep + i % kVector;
  }
  // Whether elements exist, as bits.
  __device__ __forceinline__ uint32_t Existing(uint32_t end) const {
    uint32_t found = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) found |= first + p * kStep < end ? ((1u << kVector) - 1) << p * kVector : 0;
    return found;
  }
  // The keys of the elements.
  __device__ __forceinline__ void Compute(uint32_t (&keys)[kPacks * kVector]) const {
#pragma unroll
    for (int i = 0; i < kPacks * kVector; ++i) keys[i] = KeyOf(Element(packs[i / kVector], i % kVector));
  }
  // The bits of elements whose key is at least `least`. keys: from Compute, unless elements are selected by their bits.
  __device__ __forceinline__ uint32_t Reaching(uint32_t least, const uint32_t (&keys)[kPacks * kVector]) const {
    if constexpr (kSame) return ReachingInOrder(least);
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kPacks * kVector; ++i) found |= static_cast<uint32_t>(keys[i] >= least) << i;
    return found;
  }
  // The largest of the keys of the elements, 0 if none exists.
  __device__ __forceinline__ uint32_t LargestKey(uint32_t end, const uint32_t (&keys)[kPacks * kVector]) const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kPacks * kVector; ++i) {
      const uint32_t key = keys[i];
      if (first + i / kVector * kStep < end) largest = max(largest, key);
    }
    return largest;
  }

 private:
  // Without keys, by comparisons of signed numbers. The bits of floats below 0 are inverted only if the bound is below 0, as otherwise
  // all of them are too small in any order.
  __device__ __forceinline__ uint32_t ReachingInOrder(uint32_t key) const {
    constexpr int kWords = Pack<Source, kVector>::kWords, kSize = 8 * sizeof(Bits), kOfWord = kVector / kWords;
    constexpr uint32_t kSign = 1u << (kSize - 1), kOnes = kSize == 32 ? 1 : kSize == 16 ? 0x00010001 : 0x01010101;
    const uint32_t inverted = key & kSign ? 0 : kSign - 1;
    const uint32_t flip = kOrder == Order::kFloat ? inverted * kOnes : kOrder == Order::kUnsigned ? kSign * kOnes : 0;
    const int32_t least = static_cast<int32_t>((key ^ kSign) << (32 - kSize));
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kPacks * kVector; ++i) {
      const uint32_t word = packs[i / kVector].word[i % kVector / kOfWord] ^ flip;
      found |= static_cast<uint32_t>(static_cast<int32_t>(word << (32 - kSize * (i % kOfWord + 1))) >= least) << i;
    }
    return found;
  }
};

// Writes the k largest of s.held in descending order.
template <class Bits, Order kOrder>
__device__ __forceinline__ void Finish(TopKShared& s, const TopKArgs& a, uint32_t row, uint32_t part) {
  constexpr uint32_t kCounted = 128;  // of so many elements each counts those that are greater; more are sorted
  const uint32_t t = threadIdx.x;
  const int64_t to = static_cast<int64_t>(row) * a.k;
  auto store = [&](uint32_t i, uint64_t chosen) {
    if (a.candidates) a.candidates[(to + i) * a.parts + part] = chosen;
    else StoreChosen<Bits, kOrder>(a, to + i, chosen);
  };
  if (s.count > max(kCounted, a.k)) Keep(s, a.k);
  const uint32_t count = s.count;
  if (count <= kCounted) {
    if (t < count) {
      const uint64_t own = s.held[t];
      uint32_t greater = 0;
#pragma unroll 8
      for (uint32_t i = 0; i < count; ++i) greater += s.held[i] > own;
      if (greater < a.k) store(greater, own);
    }
    for (uint32_t i = count + t; i < a.k; i += kTopKThreads)
      store(i, 0);  // candidates of a part that has fewer than k elements
    return;
  }
  for (uint32_t i = count + t; i < a.sorted; i += kTopKThreads) s.held[i] = 0;
  __syncthreads();
  SortDescending(s.held, a.sorted);
  __syncthreads();
  for (uint32_t i = t; i < a.k; i += kTopKThreads) store(i, s.held[i]);
}

// kVector elements in a load, kPacks loads at once. Rows and parts are whole vectors, and x is aligned to them.
template <class Read, Order kOrder, int kVector, int kPacks> __global__ void __launch_bounds__(kTopKThreads, 4)
    TopKBlock(const __grid_constant__ TopKArgs a) {
  using Held = Tile<Read, kOrder, kVector, kPacks>;
  static_assert(kVector * kPacks <= 32);
  constexpr uint32_t kTile = kTopKThreads * kVector * kPacks;
  __shared__ TopKShared s;
  const uint32_t row = blockIdx.x / a.parts, part = blockIdx.x % a.parts;
  const uint32_t begin = part * a.part, end = min(begin + a.part, a.width);
  const auto* x = static_cast<const typename Read::Source*>(a.x) + static_cast<int64_t>(row) * a.width;
  // Tiles are read in the order of their reversed bits: of a row that ascends, every tile would be greater than those before it.
  auto tile_of = [&](uint32_t n) { return begin + (__brev(n) >> 1 >> (31 - a.tile_bits)) * kTile; };
  Held tile;
  uint32_t keys[kVector * kPacks];  // of the tile
  tile.Load(x, begin, end);
  tile.Compute(keys);
  if (threadIdx.x == 0) s.count = 0;
  uint64_t bound = FirstBound(s, tile.LargestKey(end, keys), a.k);
  __syncthreads();
  for (uint32_t n = 0; n < 1u << a.tile_bits;) {
    const uint32_t first = tile.first;
    uint32_t wanted = tile.Reaching(KeyOf(bound), keys) & tile.Existing(end);
    for (++n; n < 1u << a.tile_bits && tile_of(n) >= end;) ++n;
    if (n < 1u << a.tile_bits) tile.Load(x, tile_of(n), end);
    // The few elements that are wanted are loaded again, by now from the first cache: it takes many instructions to choose from
    // registers, as keys that are computed once have to be.
    auto of = [&](uint32_t i) {
      const uint32_t column = Held::ColumnOf(first, i);
      if constexpr (Held::kSame) return Candidate(Held::KeyOf(x[column]), column);
      else return Candidate(Picked(keys, i), column);
    };
    while (true) {
      wanted = Append(s, wanted, bound, of);
      if (!__syncthreads_or(wanted != 0)) break;
      bound = Keep(s, a.k);
    }
    if constexpr (!Held::kSame) tile.Compute(keys);
  }
  Finish<typename Read::Bits, kOrder>(s, a, row, part);
}

// The same for the candidates of at most kTopKThreads * kVector * kPacks parts.
template <class Bits, Order kOrder, int kVector, int kPacks> __global__ void __launch_bounds__(kTopKThreads, 2)
    TopKJoin(const __grid_constant__ TopKArgs a) {
  constexpr uint32_t kStep = kTopKThreads * kVector, kOwn = 8;
  __shared__ TopKShared s;
  const uint32_t row = blockIdx.x;
  const uint64_t* x = static_cast<const uint64_t*>(a.x) + static_cast<int64_t>(row) * a.width;
  if (threadIdx.x == 0) s.count = 0;
  uint64_t bound = 0;
  auto append = [&](uint32_t wanted, auto of) {
    while (true) {
      wanted = Append(s, wanted, bound, of);
      if (!__syncthreads_or(wanted != 0)) break;
      bound = Keep(s, a.k);
    }
  };
  for (uint32_t tile = 0; tile < a.width; tile += kStep * kPacks) {
    const uint32_t first = tile + threadIdx.x * kVector;
    uint64_t own[kVector * kPacks];
    uint32_t wanted = 0;
#pragma unroll
    for (int i = 0; i < kVector * kPacks; ++i) own[i] = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (first + p * kStep < a.width) {
        const auto pack = LoadVector<uint64_t, kVector>(x + first + p * kStep);
#pragma unroll
        for (int i = 0; i < kVector; ++i) own[p * kVector + i] = Element(pack, i);
      }
    }
    if (tile == 0) {
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < kVector * kPacks; ++i) largest = max(largest, KeyOf(own[i]));
      bound = FirstBound(s, largest, a.k);
    }
#pragma unroll
    for (int i = 0; i < kVector * kPacks; ++i) wanted |= static_cast<uint32_t>(own[i] > bound) << i;
    // A tile has a candidate of every part, and what follows in the part is smaller.
    if (!__syncthreads_or(wanted != 0)) break;
    append(wanted, [&](uint32_t i) { return Picked(own, i); });
  }
  if (a.of_part < a.k) {
    if (s.count >= a.k) bound = Keep(s, a.k);
    const Bits* elements = static_cast<const Bits*>(a.elements) + static_cast<int64_t>(row) * a.columns;
    const uint64_t* lasts = x + static_cast<int64_t>(a.of_part - 1) * a.parts;  // 0 where a part has fewer elements
    for (uint32_t parts = 0; parts < a.parts; parts += kTopKThreads) {
      uint64_t own_last = parts + threadIdx.x < a.parts ? lasts[parts + threadIdx.x] : 0;
      while (true) {
        // First the part that gave the greatest candidates: its elements may leave none of the other parts.
        const uint64_t last = LargestOfBlock(s, own_last);
        if (last == 0 || last < bound) break;
        if (own_last == last) s.digit = parts + threadIdx.x, own_last = 0;
        __syncthreads();
        const uint32_t begin = s.digit * a.part, end = min(begin + a.part, a.columns);
        for (uint32_t first = begin; first < end; first += kTopKThreads * kOwn) {
          uint64_t own[kOwn];
          uint32_t wanted = 0;
#pragma unroll
          for (uint32_t n = 0; n < kOwn; ++n) {
            const uint32_t column = first + n * kTopKThreads + threadIdx.x;
            own[n] = column < end ? Candidate(ToKey<Bits, kOrder>(elements[column]), column) : 0;
            wanted |= static_cast<uint32_t>(own[n] > bound && own[n] < last) << n;
          }
          append(wanted, [&](uint32_t n) { return Picked(own, n); });
        }
        const bool more = s.count > a.k;
        __syncthreads();  // before the next part is appended
        if (more) bound = Keep(s, a.k);
      }
    }
  }
  Finish<Bits, kOrder>(s, a, row, 0);
}

constexpr uint32_t kTopKRows = kTopKThreads / 32;  // of a block of TopKWarp

// width <= 32 * kVector * kPacks, k <= 32.
template <class Read, Order kOrder, int kVector, int kPacks> __global__ void __launch_bounds__(kTopKThreads)
    TopKWarp(const __grid_constant__ TopKArgs a) {
  using Source = typename Read::Source;
  using Bits = typename Read::Bits;
  constexpr uint32_t kStep = 32 * kVector;
  __shared__ uint64_t room[kTopKThreads];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * kTopKRows + warp;
  if (row >= a.rows) return;
  const Source* x = static_cast<const Source*>(a.x) + static_cast<int64_t>(row) * a.width;
  RowOfWarp<kVector, kPacks> held;
  held.first = lane * kVector, held.left = 0;
  Pack<Source, kVector> packs[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    packs[p] = ZeroPack<Source, kVector>();
    if (held.first + p * kStep < a.width) packs[p] = LoadVector<Source, kVector>(x + held.first + p * kStep);
  }
#pragma unroll
  for (int i = 0; i < kVector * kPacks; ++i) {
    held.keys[i] = ToKey<Bits, kOrder>(Read::Of(Element(packs[i / kVector], i % kVector)));
    held.left |= static_cast<uint32_t>(held.first + i / kVector * kStep < a.width) << i;
  }
  const uint64_t kept = held.Select(a.k, room + warp * 32);
  if (lane < a.k) StoreChosen<Bits, kOrder>(a, static_cast<int64_t>(row) * a.k + lane, kept);
}

}  // namespace jaxkern
