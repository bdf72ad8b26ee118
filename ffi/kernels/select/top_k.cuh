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

#include "bitonic.cuh"
#include "common/pack.cuh"
#include "order.h"

namespace jaxkern {

constexpr uint32_t kTopKThreads = 256, kTopKHeld = 4096, kTopKDigit = 11, kTopKBins = 1 << kTopKDigit;

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

struct TopKShared {
  uint64_t held[kTopKHeld];
  uint32_t bins[kTopKBins];
  uint64_t different[kTopKThreads / 32];
  uint32_t warp_sums[kTopKThreads / 32];
  uint32_t count;                 // of elements in `held`, or more if some did not fit
  uint32_t digit, above, within;  // the digit of the k-th largest; how many digits are greater, and how many are equal
};

// words[i], by selections: the index is not known when the kernel is compiled. N is a power of two.
template <class Word, int N> __device__ __forceinline__ Word Picked(const Word (&words)[N], uint32_t i) {
  if constexpr (N == 1) {
    return words[0];
  } else {
    Word half[N / 2];
#pragma unroll
    for (int w = 0; w < N / 2; ++w) half[w] = i & (N / 2) ? words[w + N / 2] : words[w];
    return Picked(half, i);
  }
}

// Appends the elements `of(i)` above the bound among those whose bit i of `wanted` is set; lanes of a warp call it together. Returns
// the bits of those for which there was no place.
template <class Of> __device__ __forceinline__ uint32_t Append(TopKShared& s, uint32_t wanted, uint64_t bound, Of of) {
  const uint32_t lane = threadIdx.x % 32;
  while (__any_sync(~0u, wanted != 0)) {
    const uint64_t own = wanted ? of(__ffs(wanted) - 1) : 0;
    const uint32_t above = __ballot_sync(~0u, own > bound);
    uint32_t at = lane == 0 && above ? atomicAdd(&s.count, static_cast<uint32_t>(__popc(above))) : 0;
    at = __shfl_sync(~0u, at, 0) + __popc(above & ((1u << lane) - 1));
    const bool fits = own <= bound || at < kTopKHeld;
    if (own > bound && fits) s.held[at] = own;
    if (fits) wanted &= wanted - 1;
    if (__any_sync(~0u, !fits)) break;
  }
  return wanted;
}

// Leaves the k largest of s.held, of which there are at least k; all threads call it. Returns a lower bound of them that is
// greater than all others.
__device__ __forceinline__ uint64_t Keep(TopKShared& s, uint32_t k) {
  const uint32_t t = threadIdx.x, lane = t % 32, held = min(s.count, kTopKHeld);
  // The first digit begins at the first bit in which elements differ: few of them share it with the k-th largest.
  const uint64_t some = s.held[0];
  uint64_t different = 0;
  for (uint32_t i = t; i < held; i += kTopKThreads) different |= s.held[i] ^ some;
  const uint64_t high = __reduce_or_sync(~0u, static_cast<uint32_t>(different >> 32));
  const uint32_t low = __reduce_or_sync(~0u, static_cast<uint32_t>(different));
  if (lane == 0) s.different[t / 32] = high << 32 | low;
  __syncthreads();
  different = 0;
#pragma unroll
  for (uint32_t w = 0; w < kTopKThreads / 32; ++w) different |= s.different[w];
  uint32_t shift = different >> 32 ? 64 - __clz(static_cast<uint32_t>(different >> 32))
                                   : 32 - __clz(static_cast<uint32_t>(different));
  uint32_t wanted = k;
  uint64_t bound = shift == 64 ? 0 : some >> shift << shift;  // its bits from `shift` on are those of the k-th largest
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
    for (uint32_t i = 0; i < kOwn; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(&s.bins[last - i - 3]);
      own += four.x + four.y + four.z + four.w;
    }
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
    Append(s, kept, 0, [&](int i) { return Picked(own, i); });
    __syncthreads();
  }
  return bound;
}

template <class Bits, Order kOrder>
__device__ __forceinline__ void StoreChosen(const TopKArgs& a, int64_t at, uint64_t candidate) {
  static_cast<Bits*>(a.values)[at] = FromKey<Bits, kOrder>(KeyOf(candidate));
  a.indices[at] = ColumnOf(candidate);
}

// The values of the lanes of a warp in descending order.
template <class V> __device__ __forceinline__ V SortedInWarp(V own) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t run = 2; run <= 32; run *= 2) {
#pragma unroll
    for (uint32_t apart = run / 2; apart; apart /= 2) {
      const V other = __shfl_xor_sync(~0u, own, apart);
      const bool larger = ((lane & apart) == 0) == ((lane & run) == 0);
      own = larger == (own < other) ? other : own;
    }
  }
  return own;
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

// A bound that at least k elements of the first tile exceed, where each thread has its largest key; all threads call it.
__device__ __forceinline__ uint64_t FirstBound(TopKShared& s, uint32_t largest, uint32_t k) {
  constexpr uint32_t kWarps = kTopKThreads / 32;
  const uint32_t of_warp = (k + kWarps - 1) / kWarps;  // each warp has so many elements above the bound
  if (of_warp > 32) return 0;
  const uint32_t key = __shfl_sync(~0u, SortedInWarp(largest), of_warp - 1);
  if (threadIdx.x % 32 == 0) s.warp_sums[threadIdx.x / 32] = key;
  __syncthreads();
  uint32_t bound = s.warp_sums[0];
#pragma unroll
  for (uint32_t w = 1; w < kWarps; ++w) bound = k == 1 ? max(bound, s.warp_sums[w]) : min(bound, s.warp_sums[w]);
  return static_cast<uint64_t>(bound) << 32;  // no candidate equals it
}

// The largest of the threads' candidates; all threads call it.
__device__ __forceinline__ uint64_t LargestOfBlock(TopKShared& s, uint64_t own) {
  const uint32_t high = __reduce_max_sync(~0u, KeyOf(own));
  const uint32_t low = __reduce_max_sync(~0u, KeyOf(own) == high ? static_cast<uint32_t>(own) : 0);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.different[threadIdx.x / 32] = static_cast<uint64_t>(high) << 32 | low;
  __syncthreads();
  uint64_t largest = 0;
#pragma unroll
  for (uint32_t w = 0; w < kTopKThreads / 32; ++w) largest = max(largest, s.different[w]);
  return largest;
}

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

// A row that a warp holds: `kVector` elements of a lane from column `first` on, and as many from every 32 * kVector columns later.
template <int kVector, int kPacks> struct RowOfWarp {
  static constexpr int kOwn = kVector * kPacks;
  static constexpr uint32_t kStep = 32 * kVector;
  static_assert(kOwn <= 32);
  uint32_t keys[kOwn], first;
  uint32_t left;  // the bits of the elements that exist

  // Lane n gets the n-th largest candidate, for n < k <= 32. room: memory of this warp; others must not write it until the next barrier.
  __device__ __forceinline__ uint64_t Select(uint32_t k, uint64_t* room) {
    constexpr uint32_t kFew = 3;  // so many are found one by one
    return k <= kFew ? OneByOne(k) : AboveBound(k, room);
  }

 private:
  __device__ __forceinline__ uint32_t Column(int i) const { return first + i / kVector * kStep + i % kVector; }

  // The largest of what is left, 0 if nothing is. Columns of a lane ascend with i.
  __device__ __forceinline__ uint64_t Largest() const {
    uint32_t key = 0, column = ~0u;
#pragma unroll
    for (int i = kOwn - 1; i >= 0; --i) {
      if (left >> i & 1 && keys[i] >= key) key = keys[i], column = Column(i);
    }
    return Candidate(key, column);
  }

  __device__ __forceinline__ uint64_t OneByOne(uint32_t k) {
    uint64_t own = Largest(), kept = 0;
    for (uint32_t n = 0; n < k; ++n) {
      const uint32_t key = __reduce_max_sync(~0u, KeyOf(own));
      const uint32_t low = __reduce_max_sync(~0u, KeyOf(own) == key ? static_cast<uint32_t>(own) : 0);
      const uint64_t chosen = static_cast<uint64_t>(key) << 32 | low;
      if (threadIdx.x % 32 == n) kept = chosen;
      if (own == chosen) {
        const uint32_t column = ColumnOf(chosen) - first;
        left &= ~(1u << (column / kStep * kVector + column % kVector));
        own = Largest();
      }
    }
    return kept;
  }

  // At least k elements reach the k-th largest of the lanes' largest keys, and few more do.
  __device__ __forceinline__ uint64_t AboveBound(uint32_t k, uint64_t* room) {
    const uint32_t lane = threadIdx.x % 32, below = (1u << lane) - 1;
    uint32_t largest = 0, count = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) largest = left >> i & 1 ? max(largest, keys[i]) : largest;
    const uint32_t bound = __shfl_sync(~0u, SortedInWarp(largest), k - 1);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool reaches = left >> i & 1 && keys[i] >= bound;
      const uint32_t all = __ballot_sync(~0u, reaches), at = count + __popc(all & below);
      if (reaches && at < 32) room[at] = Candidate(keys[i], Column(i));
      count += __popc(all);
    }
    if (count > 32) return OneByOne(k);  // equal elements
    __syncwarp();
    const uint64_t own = lane < count ? room[lane] : 0;
    __syncwarp();
    return SortedInWarp(own);
  }
};

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
