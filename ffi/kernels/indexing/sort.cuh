// Stable least-significant-digit radix sort of (key, payload) pairs, by digits of up to 9 bits. Each pass is three
// launches:
//
//     RadixCount      one block per tile counts the keys of each digit; reads keys, writes pass.counts
//     RadixScan       exclusive sums of the counts over the tiles, in place; omitted if tiles are few
//     RadixScatter    one block per tile ranks its pairs, sorts them in shared memory, and writes the pairs of each
//                     digit to the offset that the scan gives
//     SourceRows      converts the sorted positions to rows of source, where the two differ
//
// The first pass reads the indices themselves. Memory traffic of a pass: keys are read twice, payloads once, and both
// are written once. CUB's sort has one launch per pass, in which each tile waits for the preceding tiles. With at most
// a few hundred tiles that chain and the fixed cost of a launch per 8 bits take longer than three short launches per 9
// bits.
//
// The order depends only on the indices, so it can be computed once and used many times: see
// jaxkern/_ops/indexing/sort.py.
#pragma once

#include "indexing/indices.cuh"

namespace jaxkern {

#ifndef JAXKERN_EMULATED
#define JAXKERN_DYNAMIC_SHARED(name) extern __shared__ __align__(16) char name[]
#endif

constexpr int kRadixBitsMax = 9;
constexpr int kDigits = 1 << kRadixBitsMax;
constexpr int kOwners = kDigits / 2;  // threads of a block that own two digits each
// Pairs of a tile. In the largest tiles, the pairs of a digit, which are written side by side, fill more than a sector;
// smaller tiles balance the load of the multiprocessors.
constexpr int kSmallTile = 2048, kTile = 4608;
constexpr int kScanThreads = 1024, kScanDigits = 8, kScanSegments = kScanThreads / kScanDigits;

struct RadixPass {
  int shift, bits;
  uint32_t tiles;
  bool scanned;
  uint32_t* counts;  // [tiles + 1, 2^bits]; after the scan the last row has the totals
  const uint32_t* keys_in;
  const uint32_t* payload_in;
  uint32_t* keys_out;
  uint32_t* payload_out;
  uint2* pairs_out;      // alternatively, keys and payloads interleaved
  const void* source;    // payloads of the first pass, if they are elements of source
  int64_t source_extra;  // rows of source beyond count from one b to the next
};
static_assert(sizeof(RadixPass) == 80);

// Kind of a pass. A first pass computes keys from the indices; the payload is the position, or an element of 2 or 4
// bytes.
enum class Pass { kFirstOfPositions, kFirstOfElements2, kFirstOfElements4, kLater };

// Returns the row of source of a position.
__device__ __forceinline__ int64_t SourceRow(const Indices& run, int64_t source_extra, uint32_t position) {
  int64_t row = position;
  if (source_extra) row += run.by_count.Div(position) * source_extra;
  return row;
}

// Calls take(i, address) for the payload of each of the lane's items i. kItems: items per lane. kPass: kind of the
// pass.
template <int kItems, Pass kPass, class Take>
__device__ __forceinline__ void ForPayload(const Indices& run, const RadixPass& pass, uint32_t first, Take take) {
  const int left = static_cast<int>(run.positions - first);
  const auto for_all = [&](const auto* from, bool extra) {
    if (extra) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (i * kWarp < left) take(i, from + SourceRow(run, pass.source_extra, first + i * kWarp));
      }
    } else {
      from = Pinned(from + first);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (i * kWarp < left) take(i, from + i * kWarp);
      }
    }
  };
  using Element = std::conditional_t<kPass == Pass::kFirstOfElements2, uint16_t, uint32_t>;
  if constexpr (kPass == Pass::kLater) for_all(pass.payload_in, false);
  else for_all(static_cast<const Element*>(pass.source), pass.source_extra);
}

template <int kItems, Pass kPass> __device__ __forceinline__ void LoadPayload(const Indices& run, const RadixPass& pass,
                                                                              uint32_t first,
                                                                              uint32_t (&payload)[kItems]) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) payload[i] = 0;
  ForPayload<kItems, kPass>(run, pass, first, [&](int i, const auto* from) { payload[i] = __ldg(from); });
}

// Copies payloads of 4 bytes to shared memory, which takes no registers: to[0], to[kWarp], .... After WaitForCopies the
// same lane may read them.
template <int kItems, Pass kPass>
__device__ __forceinline__ void CopyPayload(const Indices& run, const RadixPass& pass, uint32_t first, uint32_t* to) {
  ForPayload<kItems, kPass>(run, pass, first, [&](int i, const auto* from) {
    static_assert(sizeof *from == 4);
    CopyAsync<4>(to + i * kWarp, from);
  });
}

// Prefetches the keys of a tile whose block is not running yet to L2, one line per thread.
template <int kThreads, int kItems, bool kFirst>
__device__ __forceinline__ void PrefetchKeys(const Indices& run, const uint32_t* keys_in) {
  constexpr uint32_t kPairs = kThreads * kItems, kTilesAhead = 384, kLine = 128;
  const uint32_t bytes = kFirst ? run.index_bytes : 4, at = threadIdx.x * (kLine / bytes);
  const int64_t position = (int64_t{blockIdx.x} + kTilesAhead) * kPairs + at;
  if (at >= kPairs || position >= run.positions) return;
  const char* const keys = static_cast<const char*>(kFirst ? run.index : keys_in);
  Prefetch(keys + position * bytes);
}

struct Digits {
  uint32_t shift, mask;
  __device__ __forceinline__ explicit Digits(const RadixPass& pass) : shift(pass.shift), mask((1u << pass.bits) - 1) {}
  __device__ __forceinline__ uint32_t Of(uint32_t key) const { return key >> shift & mask; }
};

// kThreads: threads of a block. kItems: keys per thread. kFirst: keys are computed from the indices.
template <int kThreads, int kItems, bool kFirst> __global__ void __launch_bounds__(kThreads)
    RadixCount(const __grid_constant__ Indices run, const __grid_constant__ RadixPass pass) {
  __shared__ uint32_t count[kDigits];
  const uint32_t first = FirstOfLane<kThreads, kItems>(blockIdx.x);
  uint32_t key[kItems];
  LoadKeys<kItems, kFirst>(run, pass.keys_in, first, key);
  for (int i = threadIdx.x; i < kDigits; i += kThreads) count[i] = 0;
  __syncthreads();
  const Digits digits(pass);
  uint32_t differ = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    key[i] = digits.Of(key[i]);
    differ |= key[i] ^ key[0];
  }
  // A warp with a single digit adds once, so that a frequent row does not serialize the atomics.
  const int left = static_cast<int>(run.positions - first);
  const bool last_held = (kItems - 1) * kWarp < left;
  differ |= key[0] ^ __shfl_sync(~0u, key[0], 0);
  if (__all_sync(~0u, last_held && differ == 0)) {
    if (threadIdx.x % kWarp == 0) atomicAdd(&count[key[0]], kWarp * kItems);
  } else if (last_held) {  // no branch per item
#pragma unroll
    for (int i = 0; i < kItems; ++i) atomicAdd(&count[key[i]], 1);
  } else {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * kWarp < left) atomicAdd(&count[key[i]], 1);
    }
  }
  __syncthreads();
  uint32_t* const out = pass.counts + (static_cast<int64_t>(blockIdx.x) << pass.bits);
  for (int i = threadIdx.x; i <= digits.mask; i += kThreads) out[i] = count[i];
}

// Replaces each digit's counts by the sums over the preceding tiles. A block takes kScanDigits digits. Each thread
// takes a segment of the tiles; it holds the first few counts in registers and reads the others again.
template <int kThreads>  // always kScanThreads: as a template it is compiled only where it is launched
__global__ void __launch_bounds__(kThreads) RadixScan(uint32_t* counts, uint32_t tiles, int digits) {
  constexpr uint32_t kHeld = 4, kAhead = 16;
  __shared__ uint32_t sum[kScanSegments][kScanDigits];
  const int digit = threadIdx.x % kScanDigits, segment = threadIdx.x / kScanDigits;
  const uint32_t each = (tiles + kScanSegments - 1) / kScanSegments;
  const uint32_t begin = min(segment * each, tiles), end = min(begin + each, tiles);
  const bool active = blockIdx.x * kScanDigits + digit < digits;
  uint32_t* const mine = counts + blockIdx.x * kScanDigits + digit;
  uint32_t held[kHeld], total = 0;
#pragma unroll
  for (uint32_t u = 0; u < kHeld; ++u) {
    held[u] = active && begin + u < end ? mine[static_cast<int64_t>(begin + u) * digits] : 0;
  }
  if (active) {
#pragma unroll 16
    for (uint32_t t = begin + kHeld; t < end; ++t) total += mine[static_cast<int64_t>(t) * digits];
  }
#pragma unroll
  for (uint32_t u = 0; u < kHeld; ++u) total += held[u];
  sum[segment][digit] = total;
  __syncthreads();
  // A warp scans the segments of one digit, several per lane.
  constexpr int kEach = kScanSegments / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (warp < kScanDigits) {
    uint32_t v[kEach], s = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) v[i] = sum[kEach * lane + i][warp];
#pragma unroll
    for (int i = 0; i < kEach; ++i) s += v[i];
    uint32_t inclusive = s;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    uint32_t before = inclusive - s;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      sum[kEach * lane + i][warp] = before;
      before += v[i];
    }
    if (lane == kWarp - 1 && blockIdx.x * kScanDigits + warp < digits) {
      counts[static_cast<int64_t>(tiles) * digits + blockIdx.x * kScanDigits + warp] = before;
    }
  }
  __syncthreads();
  if (!active) return;
  uint32_t before = sum[segment][digit];
#pragma unroll
  for (uint32_t u = 0; u < kHeld; ++u) {
    if (begin + u < end) mine[static_cast<int64_t>(begin + u) * digits] = before;
    before += held[u];
  }
  for (uint32_t t = begin + kHeld; t < end; t += kAhead) {
    uint32_t v[kAhead];
#pragma unroll
    for (uint32_t u = 0; u < kAhead; ++u) v[u] = t + u < end ? mine[static_cast<int64_t>(t + u) * digits] : 0;
#pragma unroll
    for (uint32_t u = 0; u < kAhead; ++u) {
      if (t + u < end) mine[static_cast<int64_t>(t + u) * digits] = before;
      before += v[u];
    }
  }
}

// Shared memory of RadixScatter. kThreads: threads of a block. kItems: pairs per thread.
template <int kThreads, int kItems> struct ScatterShared {
  static constexpr int kWarps = kThreads / kWarp, kPairs = kThreads * kItems;
  // Where registers are scarce, payloads are staged in shared memory while keys are ranked.
  static constexpr bool kStages = sizeof(uint32_t[kWarps][kDigits]) <= 4 * kPairs && kPairs > kTile;
  struct Staged {
    uint32_t peers[kPairs], payload[kPairs];
  };
  union {
    uint32_t peers[kWarps][kDigits];  // while an item is ranked: mask of the warp's lanes that have the digit
    Staged staged;
    uint2 in_order[kPairs];  // after ranking: sorted keys and payloads
  };
  union {  // rank of the warp's next key with the digit; two digits per word
    uint16_t rank[kWarps][kDigits];
    uint32_t ranks[kWarps][kOwners];
  };
  uint32_t offset[kDigits];  // from a place in the tile to its place in the output
  uint2 sums[kWarps];
};
static_assert(sizeof(ScatterShared<512, 4>) == 51328);
static_assert(sizeof(ScatterShared<512, 9>) == 55424);
static_assert(sizeof(ScatterShared<512, 16>) == 84096);

// Returns the sum of v over the preceding threads of the block. One barrier; `room` is left with the sums of the warps.
__device__ __forceinline__ uint2 SumsOfThreadsBefore(uint2 v, uint2* room) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint2 sum = v;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint2 other = {__shfl_up_sync(~0u, sum.x, step), __shfl_up_sync(~0u, sum.y, step)};
    if (lane >= step) sum.x += other.x, sum.y += other.y;
  }
  if (lane == kWarp - 1) room[warp] = sum;
  __syncthreads();
  const uint2 earlier = lane < warp ? room[lane] : uint2{0, 0};
  return {__reduce_add_sync(~0u, earlier.x) + sum.x - v.x, __reduce_add_sync(~0u, earlier.y) + sum.y - v.y};
}

// A dependent access to shared memory takes about 30 cycles. The loops therefore issue independent reads together, and
// global loads are issued before the barriers. kThreads: threads of a block. kItems: pairs per thread. kPass: kind of
// the pass.
template <int kThreads, int kItems, Pass kPass> __global__ void __launch_bounds__(kThreads, 2)
    RadixScatter(const __grid_constant__ Indices run, const __grid_constant__ RadixPass pass) {
  constexpr int kWarps = kThreads / kWarp, kPairs = kThreads * kItems;
  constexpr int kStep = kItemsAtOnce<kItems>, kWritten = kItems == 16 ? 8 : kItems;
  static_assert(kItems % kStep == 0 && kItems % kWritten == 0 && kThreads >= kOwners && kPairs < 1 << 16);
  JAXKERN_DYNAMIC_SHARED(shared_bytes);
  using Shared = ScatterShared<kThreads, kItems>;
  auto& s = *reinterpret_cast<Shared*>(shared_bytes);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t first = FirstOfLane<kThreads, kItems>(blockIdx.x);
  const Digits digits(pass);
  uint32_t key[kItems], payload[kItems];
  constexpr bool kLoads = kPass != Pass::kFirstOfPositions, kStages = kLoads && Shared::kStages;
  constexpr bool kCopies = kStages && kPass != Pass::kFirstOfElements2;
  uint32_t* const staged = s.staged.payload + warp * (kWarp * kItems) + lane;
  // Issued before the keys, which are needed first. Copies complete while the keys are ranked.
  if constexpr (kLoads && !kCopies) LoadPayload<kItems, kPass>(run, pass, first, payload);
  LoadKeys<kItems, kPass != Pass::kLater>(run, pass.keys_in, first, key);
  if constexpr (kCopies) {
    CopyPayload<kItems, kPass>(run, pass, first, staged);
  } else if constexpr (kStages) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) staged[i * kWarp] = payload[i];
  }
  // Counts of the thread's two digits, over all tiles and over the preceding ones.
  uint2 total = {0, 0}, earlier = {0, 0};
  if (2 * threadIdx.x < 1 << pass.bits) {
    const uint2* const counts = reinterpret_cast<const uint2*>(pass.counts) + threadIdx.x;
    const int row = 1 << (pass.bits - 1);
    if (kPairs > kSmallTile || pass.scanned) {  // large tiles are always scanned
      total = counts[static_cast<int64_t>(pass.tiles) * row];
      earlier = counts[static_cast<int64_t>(blockIdx.x) * row];
    } else {
#pragma unroll 16
      for (uint32_t t = 0; t < pass.tiles; ++t) {
        const uint2 count = counts[t * row];
        total.x += count.x, total.y += count.y;
        if (t < blockIdx.x) earlier.x += count.x, earlier.y += count.y;
      }
    }
  }
  // A warp's tables are private until it has ranked all its items.
  for (int i = lane; i < kDigits / 4; i += kWarp) reinterpret_cast<uint4*>(s.peers[warp])[i] = {0, 0, 0, 0};
  for (int i = lane; i < kDigits / 8; i += kWarp) reinterpret_cast<uint4*>(s.rank[warp])[i] = {0, 0, 0, 0};
  __syncwarp();

  // Rank the pairs of the warp that have the same digit; the lanes exchange their membership through one word per
  // digit. Places beyond the last position have all key bits set and sort last.
  const uint32_t below = (1u << lane) - 1, above = ~below << 1;
  uint32_t ranks[(kItems + 1) / 2];  // two per word
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t digit = digits.Of(key[i]);
    uint32_t* const peers_of = &s.peers[warp][digit];
    uint16_t* const rank_of = &s.rank[warp][digit];
    atomicOr(peers_of, 1u << lane);
    __syncwarp();
    const uint32_t peers = *peers_of;
    const uint32_t rank = *rank_of + __popc(peers & below);
    ranks[i / 2] = i % 2 ? ranks[i / 2] | rank << 16 : rank;
    __syncwarp();
    if ((peers & above) == 0) {
      *rank_of = rank + 1;
      *peers_of = 0;
    }
    __syncwarp();
  }
  __syncthreads();
  // Convert ranks within the warp to places in the tile, and compute the offset from these to places in the output,
  // after the pairs of smaller digits and of preceding tiles.
  const bool owner = threadIdx.x < kOwners;
  uint32_t in_tile = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) in_tile += owner ? s.ranks[w][threadIdx.x] : 0;
  const uint32_t in_first = in_tile & 0xffff;
  const uint2 before = SumsOfThreadsBefore({total.x + total.y, in_first + (in_tile >> 16)}, s.sums);
  if (owner) {
    uint32_t start = before.y | (before.y + in_first) << 16;
    s.offset[2 * threadIdx.x] = before.x + earlier.x - before.y;
    s.offset[2 * threadIdx.x + 1] = before.x + total.x + earlier.y - (before.y + in_first);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {  // read again: holding them since the first read would take registers
      const uint32_t held = s.ranks[w][threadIdx.x];
      s.ranks[w][threadIdx.x] = start;
      start += held;
    }
  }
  if constexpr (kStages) {
    WaitForCopies();
#pragma unroll
    for (int i = 0; i < kItems; ++i) payload[i] = staged[i * kWarp];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; i += kStep) {
    uint32_t place[kStep];
#pragma unroll
    for (int u = 0; u < kStep; ++u) {
      const uint32_t rank = (i + u) % 2 ? ranks[(i + u) / 2] >> 16 : ranks[(i + u) / 2] & 0xffff;
      place[u] = s.rank[warp][digits.Of(key[i + u])] + rank;
      if constexpr (!kLoads) payload[i + u] = first + (i + u) * kWarp;
    }
#pragma unroll
    for (int u = 0; u < kStep; ++u) s.in_order[place[u]] = {key[i + u], payload[i + u]};
  }
  __syncthreads();
  if constexpr (Shared::kStages) PrefetchKeys<kThreads, kItems, kPass != Pass::kLater>(run, pass.keys_in);
  const uint32_t held_here = min(static_cast<uint32_t>(kPairs), run.positions - blockIdx.x * kPairs);
  const auto write_all = [&](auto write) {
#pragma unroll
    for (int i = 0; i < kItems; i += kWritten) {
      uint2 pair[kWritten];
      uint32_t to[kWritten];
#pragma unroll
      for (int u = 0; u < kWritten; ++u) {  // the last places may have no position
        pair[u] = s.in_order[threadIdx.x + (i + u) * kThreads];
      }
#pragma unroll
      for (int u = 0; u < kWritten; ++u) to[u] = s.offset[digits.Of(pair[u].x)] + threadIdx.x + (i + u) * kThreads;
#pragma unroll
      for (int u = 0; u < kWritten; ++u) {
        if (threadIdx.x + (i + u) * kThreads < held_here) write(to[u], pair[u]);
      }
    }
  };
  if (kLoads && pass.pairs_out) {
    write_all([&](uint32_t to, uint2 pair) { pass.pairs_out[to] = pair; });
  } else {
    write_all([&](uint32_t to, uint2 pair) {
      pass.keys_out[to] = pair.x;
      pass.payload_out[to] = pair.y;
    });
  }
}

// Converts positions to rows of source. kThreads: threads of a block.
template <int kThreads> __global__ void __launch_bounds__(kThreads)
    SourceRows(const __grid_constant__ Indices run, const uint32_t* order, uint32_t* rows, int64_t source_extra) {
  const uint32_t at = blockIdx.x * kThreads + threadIdx.x;
  if (at < run.positions) rows[at] = static_cast<uint32_t>(SourceRow(run, source_extra, order[at]));
}

}  // namespace jaxkern
