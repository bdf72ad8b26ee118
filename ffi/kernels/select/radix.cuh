// Rows of any length in sorted order, by a stable least-significant-digit radix sort with digits of 8 bits.
//
//     SortBlock       one block per row that fits in its shared memory; all digits in one launch
//     SortCount       longer rows: counts the keys of each row by each of their digits
//     SortScatter     one pass over a digit. Each block ranks the keys of a tile, sorts them in shared memory, and writes those of
//                     each digit side by side, behind the keys of preceding tiles. It publishes its own counts of digits,
//                     and adds up what preceding tiles have published
//
// Blocks take tiles in the order in which they start, so that a tile waits only for tiles whose blocks are running. Rows that few.cuh has
// sorted are left out.
//
// Keys are moved as they are, and each pass computes the digit of the number that stands for a key in the order of a sort
// (order.h). So -0 equals 0 and keeps its sign, and NaN keeps its bits. Columns follow their keys if they are wanted, or 4 bytes of
// another array in their place; what has another size SortBlock reads at the columns.
//
// Memory traffic for keys of e bytes: SortBlock reads and writes rows once. Otherwise there are e passes, each of which reads keys
// once and writes them once, and reads and writes columns once; the first pass reads no columns. SortCount reads keys once.
#pragma once

#include "indexing/sort.cuh"
#include "order.h"

namespace jaxkern {

constexpr int kSortDigits = 256, kSortOwners = kSortDigits / 2;  // threads of a block that own two digits each

struct SortArgs {
  const void* keys_in;         // [rows, width]
  const uint32_t* columns_in;  // [rows, width]: columns, or 4 bytes that are carried in their place; or null
  void* keys_out;              // [rows, width], or null; the results of SortBlock are [rows, kept]
  uint32_t* columns_out;       // [rows, width]
  const void* carried_in;      // [rows, width]: what SortBlock puts into the order of the keys, or null
  void* carried_out;           // [rows, kept]
  uint32_t* totals;            // [rows, passes, 256], 0 before SortCount; moved to the digit of this pass
  uint64_t* published;         // [rows, tiles, 128], 0 before the pass
  uint32_t* taken;             // how many tiles have been taken, 0 before the pass
  uint32_t* done;              // [rows]: not 0 for rows that few.cuh has sorted; or null
  uint64_t largest;            // of SortKey
  uint64_t flipped;            // all bits set to sort in descending order, otherwise 0
  uint32_t width, tiles;       // tiles of a row
  uint32_t kept;               // so many elements of each row SortBlock writes
  uint32_t parts;              // blocks of SortCount for a row
  uint32_t shift;              // of the digit of this pass, or of the first one
  int passes;
};

template <class Bits, Order kOrder> struct SortDigit {
  Key<Bits> largest, flipped;
  uint32_t shift;
  __device__ __forceinline__ explicit SortDigit(const SortArgs& a)
      : largest(static_cast<Key<Bits>>(a.largest)), flipped(static_cast<Key<Bits>>(a.flipped)), shift(a.shift) {}
  __device__ __forceinline__ uint32_t Of(Bits key) const {
    return static_cast<uint32_t>((SortKey<Bits, kOrder>(key, largest) ^ flipped) >> shift) & (kSortDigits - 1);
  }
  // Whether the keys of a warp have one digit. It may be false for floats that differ elsewhere: their digits depend on all bits.
  // left: how many keys there are from the lane's first one on.
  template <int kItems> __device__ __forceinline__ bool Equal(const Bits (&key)[kItems], int left) const {
    Bits differ = key[0] ^ __shfl_sync(~0u, key[0], 0);
#pragma unroll
    for (int i = 1; i < kItems; ++i) differ |= key[i] ^ key[0];
    if constexpr (kOrder == Order::kSigned || kOrder == Order::kUnsigned) differ = differ >> shift & (kSortDigits - 1);
    return !__any_sync(~0u, differ != 0 || (kItems - 1) * kWarp >= left);
  }
};

// Shared memory of a tile.
template <class Bits, int kThreads, int kItems> struct alignas(16) SortShared {
  static constexpr int kWarps = kThreads / kWarp, kTile = kThreads * kItems;
  static_assert(kSortOwners == 4 * kWarp);
  union {
    uint32_t peers[kWarps][kSortDigits];  // while an item is ranked: mask of the warp's lanes that have the digit
    Bits keys[kTile];                     // after ranking, in order
    uint32_t columns[kTile];
  };
  union {  // rank of the warp's next key with the digit; two digits per word
    uint16_t rank[kWarps][kSortDigits];
    uint32_t ranks[kWarps][kSortOwners];
  };
  uint32_t offset[kSortDigits];  // from a place in the tile to its place in the output
  uint2 sums[kWarps];
  uint32_t taken;
};

// Places of a thread's items in a tile, two in a word.
template <int kItems> struct SortPlaces {
  uint32_t word[(kItems + 1) / 2];
  __device__ __forceinline__ uint32_t operator[](int i) const {
    return i % 2 ? word[i / 2] >> 16 : word[i / 2] & 0xffff;
  }
  __device__ __forceinline__ void Set(int i, uint32_t x) {  // in ascending order of i
    word[i / 2] = i % 2 ? word[i / 2] | x << 16 : x;
  }
  // Hides the words from the compiler, which would keep all places in registers of their own until their next use.
  __device__ __forceinline__ void Forget() {
#pragma unroll
    for (int w = 0; w < (kItems + 1) / 2; ++w) asm volatile("" : "+r"(word[w]));
  }
};

// Of a thread's two digits: how many keys of a tile have each, and how many have a smaller digit, in the row and in the tile.
struct SortSums {
  uint2 own;
  uint32_t less_of_row, less;
};

// Ranks the keys of a tile by their digits: place[i] is where the thread's item i belongs in the tile. Item i of lane l is number
// 32 * i + l of the warp's part. equal: whether the warp's items have one digit, false if that is not known. total: the keys of the row with one of the thread's two digits. publish: called with the counts
// of the two digits in the tile as soon as they are known. The first kSortOwners threads have digits. All threads call it,
// behind a barrier if s was in use; afterwards s.keys may be written.
template <int kItems, class Shared, class Publish, class Digit>
__device__ __forceinline__ SortSums RankTile(Shared& s, bool equal, uint32_t total, Publish publish, Digit digit,
                                             SortPlaces<kItems>& place) {
  constexpr int kWarps = Shared::kWarps;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  // A warp's tables are private until it has ranked all its items.
#pragma unroll
  for (int i = 0; i < kSortDigits / 4; i += kWarp) reinterpret_cast<uint4*>(s.peers[warp])[i + lane] = {0, 0, 0, 0};
  reinterpret_cast<uint4*>(s.ranks[warp])[lane] = {0, 0, 0, 0};
  __syncwarp();
  const uint32_t below = (1u << lane) - 1, above = ~below << 1;
  if (equal) {  // lanes that share a word wait for each other
#pragma unroll
    for (int i = 0; i < kItems; ++i) place.Set(i, i * kWarp + lane);
    if (lane == 0) s.rank[warp][digit(0)] = kItems * kWarp;
  } else {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t own = digit(i);
      uint32_t* const peers_of = &s.peers[warp][own];
      uint16_t* const rank_of = &s.rank[warp][own];
      atomicOr(peers_of, 1u << lane);
      __syncwarp();
      const uint32_t peers = *peers_of;
      const uint32_t rank = *rank_of + __popc(peers & below);
      place.Set(i, rank);
      __syncwarp();
      if ((peers & above) == 0) {
        *rank_of = rank + 1;
        *peers_of = 0;
      }
      __syncwarp();
    }
  }
  __syncthreads();
  // From ranks within the warp to places in the tile.
  const bool owner = threadIdx.x < kSortOwners;
  uint32_t in_tile = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) in_tile += owner ? s.ranks[w][threadIdx.x] : 0;
  const uint2 own = {in_tile & 0xffff, in_tile >> 16};
  if (owner) publish(own);
  const uint2 less = SumsOfThreadsBefore({total, own.x + own.y}, s.sums);
  if (owner) {
    uint32_t start = less.y | (less.y + own.x) << 16;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const uint32_t held = s.ranks[w][threadIdx.x];
      s.ranks[w][threadIdx.x] = start;
      start += held;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t start = s.rank[warp][digit(i)];
    place.word[i / 2] += i % 2 ? start << 16 : start;
  }
  return {own, less.x, less.y};
}

// width <= kThreads * kItems < 2^16, kThreads >= 128. kColumns: columns are wanted, or something is carried. Carried: an unsigned
// number of the size of carried_in.
template <class Bits, Order kOrder, int kThreads, int kItems, bool kColumns, class Carried>
__global__ void __launch_bounds__(kThreads, kColumns&& kThreads == 256 && kItems == 16 ? 3 : 0)
    SortBlock(const __grid_constant__ SortArgs a) {
  static_assert(kThreads >= kSortOwners && kThreads * kItems < 1 << 16);
  __shared__ SortShared<Bits, kThreads, kItems> s;
  const uint32_t first = FirstOfLane<kThreads, kItems>(0);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * a.width, to = static_cast<int64_t>(blockIdx.x) * a.kept;
  const Bits* keys_in = static_cast<const Bits*>(a.keys_in) + row;
  SortDigit<Bits, kOrder> digits(a);
  Bits key[kItems];
  SortPlaces<kItems> place;
  uint32_t column[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    column[i] = first + i * kWarp;
    key[i] = column[i] < a.width ? keys_in[column[i]] : 0;
  }
  if (kColumns && a.columns_in) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (first + i * kWarp < a.width) column[i] = a.columns_in[row + first + i * kWarp];
    }
  }
#pragma unroll 1
  for (digits.shift = 0; digits.shift < 8 * sizeof(Bits); digits.shift += 8) {
    // Places beyond the row have the last digit in each pass, and so stay where they are.
    const auto digit = [&](int i) { return first + i * kWarp < a.width ? digits.Of(key[i]) : kSortDigits - 1; };
    RankTile(s, false, 0, [](uint2) {}, digit, place);
#pragma unroll
    for (int i = 0; i < kItems; ++i) s.keys[place[i]] = key[i];
    place.Forget();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) key[i] = s.keys[first + i * kWarp];
    __syncthreads();
    if constexpr (kColumns) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) s.columns[place[i]] = column[i];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kItems; ++i) column[i] = s.columns[first + i * kWarp];
      __syncthreads();
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t at = first + i * kWarp;
    if (at < a.kept) {
      if (a.keys_out) static_cast<Bits*>(a.keys_out)[to + at] = key[i];
      if (kColumns && a.columns_out) a.columns_out[to + at] = column[i];
      if (kColumns && a.carried_out) {
        static_cast<Carried*>(a.carried_out)[to + at] = static_cast<const Carried*>(a.carried_in)[row + column[i]];
      }
    }
  }
}

// Adds the counts of every a.parts-th tile of a row to a.totals.
template <class Bits, Order kOrder, int kThreads, int kItems> __global__ void __launch_bounds__(kThreads)
    SortCount(const __grid_constant__ SortArgs a) {
  __shared__ uint32_t count[sizeof(Bits)][kSortDigits];
  const uint32_t row = blockIdx.x / a.parts, part = blockIdx.x - row * a.parts;
  if (a.done && a.done[row]) return;
  const Bits* const keys = static_cast<const Bits*>(a.keys_in) + static_cast<int64_t>(row) * a.width;
  for (int i = threadIdx.x; i < a.passes * kSortDigits; i += kThreads) count[i / kSortDigits][i % kSortDigits] = 0;
  __syncthreads();
  for (uint32_t tile = part; tile < a.tiles; tile += a.parts) {
    const uint32_t first = FirstOfLane<kThreads, kItems>(tile);
    const int left = static_cast<int>(a.width - first);  // keys from the lane's first on; may be negative
    Bits key[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) key[i] = i * kWarp < left ? keys[first + i * kWarp] : 0;
    SortDigit<Bits, kOrder> digits(a);
#pragma unroll 1
    for (int pass = 0; pass < a.passes; ++pass, digits.shift += 8) {
      const uint32_t of_first = __shfl_sync(~0u, digits.Of(key[0]), 0);
      bool equal = true;
#pragma unroll
      for (int i = 0; i < kItems; ++i) equal = equal && digits.Of(key[i]) == of_first;
      // A warp with a single digit adds once: additions to one counter wait for each other.
      if (__ballot_sync(~0u, equal && (kItems - 1) * kWarp < left) == ~0u) {
        if (threadIdx.x % kWarp == 0) atomicAdd(&count[pass][of_first], static_cast<uint32_t>(kWarp * kItems));
      } else {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (i * kWarp < left) atomicAdd(&count[pass][digits.Of(key[i])], 1u);
        }
      }
    }
  }
  __syncthreads();
  uint32_t* const totals = a.totals + static_cast<int64_t>(row) * a.passes * kSortDigits;
  for (int i = threadIdx.x; i < a.passes * kSortDigits; i += kThreads) {
    const uint32_t own = count[i / kSortDigits][i % kSortDigits];
    if (own) atomicAdd(&totals[i], own);
  }
}

// What the tiles of a row publish of a thread's two digits: their counts of 31 bits each, below a flag that tells whether they are
// those of the tile or of all tiles up to it. Counts and flag are one word, which is written and read at once.
struct SortBefore {
  static constexpr uint64_t kOwn = uint64_t{1} << 62, kAll = uint64_t{2} << 62;
  volatile uint64_t* own;  // the word of this tile, kSortOwners words behind the one of the preceding tile
  uint32_t tile;           // in its row

  static __device__ __forceinline__ uint64_t Word(uint2 counts) {
    return static_cast<uint64_t>(counts.y) << 31 | counts.x;
  }
  __device__ __forceinline__ void Publish(uint2 counts) const { *own = Word(counts) | (tile ? kOwn : kAll); }
  // Sums over the preceding tiles, which have started before and do not wait for this one.
  __device__ __forceinline__ uint2 Sum(uint2 counts) const {
    constexpr uint32_t kAtOnce = 4;
    uint64_t sum = 0;
    bool all = tile == 0;
    for (uint32_t before = 1; !all; before += kAtOnce) {
      uint64_t word[kAtOnce];
#pragma unroll
      for (uint32_t u = 0; u < kAtOnce; ++u) word[u] = before + u <= tile ? At(before + u) : kAll;
#pragma unroll
      for (uint32_t u = 0; u < kAtOnce; ++u) {
        if (all) break;
        while (word[u] < kOwn) word[u] = At(before + u);
        sum += word[u] & (kOwn - 1);
        all = word[u] >= kAll;
      }
    }
    const uint2 found = {static_cast<uint32_t>(sum) & 0x7fffffffu, static_cast<uint32_t>(sum >> 31)};
    if (tile) *own = Word({found.x + counts.x, found.y + counts.y}) | kAll;
    return found;
  }
  __device__ __forceinline__ uint64_t At(uint32_t before) const {
    return own[-static_cast<int64_t>(before) * kSortOwners];
  }
};

template <class Bits, Order kOrder, int kThreads, int kItems, bool kColumns>
__global__ void __launch_bounds__(kThreads, (kItems <= 8 && sizeof(Bits) <= 4 ? 1536 : 1024) / kThreads)
    SortScatter(const __grid_constant__ SortArgs a) {
  static_assert(kThreads >= kSortOwners && kThreads * kItems < 1 << 16);
  __shared__ SortShared<Bits, kThreads, kItems> s;
  if (threadIdx.x == 0) {
    const uint32_t taken = atomicAdd(a.taken, 1u);
    s.taken = a.done && a.done[taken / a.tiles] ? ~0u : taken;
  }
  __syncthreads();
  if (s.taken == ~0u) return;
  const uint32_t taken = s.taken, row = taken / a.tiles, tile = taken - row * a.tiles;
  const uint32_t first = FirstOfLane<kThreads, kItems>(tile);
  const int64_t begin = static_cast<int64_t>(row) * a.width;
  const int left = static_cast<int>(a.width - first);
  const Bits* const keys_in = static_cast<const Bits*>(a.keys_in) + begin;
  const SortDigit<Bits, kOrder> digits(a);
  Bits key[kItems];
  SortPlaces<kItems> place;
  uint32_t to[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) key[i] = i * kWarp < left ? keys_in[first + i * kWarp] : 0;
  const uint32_t owner = threadIdx.x % kSortOwners;
  const auto* totals = reinterpret_cast<const uint2*>(a.totals) + static_cast<int64_t>(row) * a.passes * kSortOwners;
  const uint2 total = threadIdx.x < kSortOwners ? totals[owner] : uint2{0, 0};
  const SortBefore before = {a.published + static_cast<int64_t>(taken) * kSortOwners + owner, tile};
  // Places beyond the row, in the last tile, come behind all keys.
  const SortSums sums = RankTile(
      s, digits.Equal(key, left), total.x + total.y, [&](uint2 own) { before.Publish(own); },
      [&](int i) { return i * kWarp < left ? digits.Of(key[i]) : kSortDigits - 1; }, place);
#pragma unroll
  for (int i = 0; i < kItems; ++i) s.keys[place[i]] = key[i];
  place.Forget();
  if (threadIdx.x < kSortOwners) {  // from places in the tile to places in the output
    const uint2 earlier = before.Sum(sums.own);
    s.offset[2 * owner] = sums.less_of_row + earlier.x - sums.less;
    s.offset[2 * owner + 1] = sums.less_of_row + total.x + earlier.y - (sums.less + sums.own.x);
  }
  __syncthreads();
  const uint32_t held = min(static_cast<uint32_t>(kThreads * kItems), a.width - tile * (kThreads * kItems));
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t at = threadIdx.x + i * kThreads;
    key[i] = s.keys[at];
    to[i] = s.offset[digits.Of(key[i])] + at;
  }
  if (a.keys_out) {
    Bits* const keys_out = static_cast<Bits*>(a.keys_out) + begin;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (threadIdx.x + i * kThreads < held) keys_out[to[i]] = key[i];
    }
  }
  if constexpr (kColumns) {
    uint32_t column[kItems];
    if (a.columns_in) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        column[i] = i * kWarp < left ? a.columns_in[begin + first + i * kWarp] : 0;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kItems; ++i) column[i] = first + i * kWarp;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) s.columns[place[i]] = column[i];
    __syncthreads();
    uint32_t* const columns_out = a.columns_out + begin;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t at = threadIdx.x + i * kThreads;
      if (at < held) columns_out[to[i]] = s.columns[at];
    }
  }
}

}  // namespace jaxkern
