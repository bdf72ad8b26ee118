// A least-significant-digit radix sort of (key, payload) pairs, digits of up to 9 bits. Of each pass, three
// launches:
//
//     RadixCount      a block a tile: how many of its keys have each digit
//     RadixScan       the sums of those counts over the tiles before; left out where tiles are few
//     RadixScatter    a block a tile: ranks its pairs, brings them into order in shared memory and writes
//                     each digit's to where the scan says
//
// The first pass reads the indices themselves. Cub's sort does the same with one launch a pass, in which
// each tile waits for those before it; with at most a few hundred tiles that chain, and its fixed cost
// of a launch for each 8 bits, take longer than three short launches for each 9. Nothing here depends on
// the device, so the room it needs is known without one.
#include "index_add_sort.h"

namespace jaxkern {
namespace {

constexpr int kDigits = 1 << kRadixBitsMax;
constexpr int kOwners = kDigits / 2;  // threads of a block that look after two digits each
constexpr int kUnscannedTiles = 32;   // so few, of the smallest, are added up by each block of RadixScatter itself
constexpr int kScanThreads = 1024, kScanDigits = 8, kScanSegments = kScanThreads / kScanDigits;

struct RadixPass {
  int shift, bits;
  uint32_t tiles;
  uint32_t* counts;  // [tiles + 1, 2^bits]; once scanned, the last row has the totals
  bool scanned;
  const uint32_t* keys_in;
  const uint32_t* payload_in;
  uint32_t* keys_out;
  uint32_t* payload_out;
  uint2* pairs_out;  // or both, side by side
};

// Of a lane's items, so many are taken through a step at a time where registers are short.
template <int kItems> constexpr int kItemsAtOnce = kItems % 4 == 0 ? 4 : 3;

// The first pass makes keys of the indices; what travels with them is there, or is their position.
enum class Pass { kFirstOfPositions, kFirstOfElements2, kFirstOfElements4, kLater };

// A warp has its items in order: item i of lane l is number 32 * i + l of the warp's stretch of the tile.
template <int kThreads, int kItems> __device__ __forceinline__ uint32_t FirstOfLane(uint32_t tile) {
  return tile * (kThreads * kItems) + threadIdx.x / kWarp * (kWarp * kItems) + threadIdx.x % kWarp;
}

// The lane's keys; all bits set beyond the last position. Questions that have one answer for all items are asked
// once for all of them, so that their loads are under way together.
template <int kItems, bool kFirst>
__device__ __forceinline__ void LoadKeys(const IndexRun& run, const uint32_t* keys_in, uint32_t first,
                                         uint32_t (&key)[kItems]) {
  const int left = static_cast<int>(run.positions - first);  // positions from the lane's first on, if any
  if (!kFirst || run.plain) {
    const uint32_t* const from = Pinned((kFirst ? static_cast<const uint32_t*>(run.index) : keys_in) + first);
#pragma unroll
    for (int i = 0; i < kItems; ++i) key[i] = i * kWarp < left ? __ldg(from + i * kWarp) : UINT32_MAX;
  } else {
#pragma unroll
    for (int i = 0; i < kItems; i += kItemsAtOnce<kItems>) {
      RawIndex raw[kItemsAtOnce<kItems>];
#pragma unroll
      for (int u = 0; u < kItemsAtOnce<kItems>; ++u) {
        const uint32_t at = first + (i + u) * kWarp;
        raw[u] = at < run.positions ? LoadIndex(run, at) : RawIndex{};
      }
#pragma unroll
      for (int u = 0; u < kItemsAtOnce<kItems>; ++u) key[i + u] = RowKey(run, raw[u]);
    }
  }
  if constexpr (!kFirst) return;
  if (run.plain) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) key[i] = PlainKey(run, key[i]);
  }
  if (run.batch > 1) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (key[i] != run.dropped) key[i] += run.by_count.Div(first + i * kWarp) * run.rows;
    }
  }
  if (left > (kItems - 1) * kWarp) return;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i * kWarp >= left) key[i] = UINT32_MAX;
  }
}

// What travels with the lane's keys where it lies in memory: take(i, its address) for item i.
template <int kItems, Pass kPass, class Take>
__device__ __forceinline__ void ForPayload(const IndexRun& run, const RadixPass& pass, uint32_t first, Take take) {
  const int left = static_cast<int>(run.positions - first);
  const auto for_all = [&](const auto* from, bool extra) {
    if (extra) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (i * kWarp < left) take(i, from + run.SourceRow(first + i * kWarp));
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
  else for_all(static_cast<const Element*>(run.source), run.source_extra);
}

template <int kItems, Pass kPass>
__device__ __forceinline__ void LoadPayload(const IndexRun& run, const RadixPass& pass, uint32_t first,
                                            uint32_t (&payload)[kItems]) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) payload[i] = 0;
  ForPayload<kItems, kPass>(run, pass, first, [&](int i, const auto* from) { payload[i] = __ldg(from); });
}

// The same, of 4 bytes each, to where it does not cost registers: to[0], to[kWarp], ... The lane that asks for it
// has it after WaitForCopies, and nobody before.
template <int kItems, Pass kPass>
__device__ __forceinline__ void CopyPayload(const IndexRun& run, const RadixPass& pass, uint32_t first, uint32_t* to) {
  ForPayload<kItems, kPass>(run, pass, first, [&](int i, const auto* from) {
    static_assert(sizeof *from == 4);
    CopyAsync<4>(to + i * kWarp, from);
  });
}

// Has the keys of a tile brought to L2, a line a thread, so far ahead that its block does not run yet: that will wait
// for them less.
template <int kThreads, int kItems, bool kFirst>
__device__ __forceinline__ void PrefetchKeys(const IndexRun& run, const uint32_t* keys_in) {
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

template <int kThreads, int kItems, bool kFirst>
__global__ void __launch_bounds__(kThreads)
RadixCount(const __grid_constant__ IndexRun run, const __grid_constant__ RadixPass pass) {
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
  // A warp whose digits are all the same adds once: a hot row must not serialise the atomics.
  const int left = static_cast<int>(run.positions - first);
  const bool last_held = (kItems - 1) * kWarp < left;
  differ |= key[0] ^ __shfl_sync(~0u, key[0], 0);
  if (__all_sync(~0u, last_held && differ == 0)) {
    if (threadIdx.x % kWarp == 0) atomicAdd(&count[key[0]], kWarp * kItems);
  } else if (last_held) {  // without a branch an item
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

// Turns each digit's counts into the sums of those of the tiles before. A block takes kScanDigits digits; its
// threads a segment of the tiles each, of which they hold the first few counts and read the others again.
__global__ void __launch_bounds__(kScanThreads) RadixScan(uint32_t* counts, uint32_t tiles, int digits) {
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
  // A warp scans one digit's segments, several a lane.
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

template <int kThreads, int kItems> struct ScatterRoom {
  static constexpr int kWarps = kThreads / kWarp, kPairs = kThreads * kItems;
  // Where registers are short, what travels with the keys waits here while they are ranked.
  static constexpr bool kStages = sizeof(uint32_t[kWarps][kDigits]) <= 4 * kPairs && kPairs > kTile;
  struct Staged {
    uint32_t peers[kPairs], payload[kPairs];
  };
  union {
    uint32_t peers[kWarps][kDigits];  // the lanes of a warp that have the digit, while it ranks an item
    Staged staged;
    uint2 in_order[kPairs];           // afterwards: keys and what travels with them
  };
  union {  // of a warp's next key with the digit; two digits a word
    uint16_t rank[kWarps][kDigits];
    uint32_t ranks[kWarps][kOwners];
  };
  uint32_t offset[kDigits];  // from a place in the tile to one in the output
  uint2 sums[kWarps];
};

// The sums of v over the block's threads before this one. One barrier; `room` is left with those of each warp.
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

// A dependent step through shared memory is some 30 cycles, so what can be read together is: the order of the loops
// here is what the kernel's speed comes from. Nor is memory waited for where others wait behind a barrier.
template <int kThreads, int kItems, Pass kPass>
__global__ void __launch_bounds__(kThreads, 2)
RadixScatter(const __grid_constant__ IndexRun run, const __grid_constant__ RadixPass pass) {
  constexpr int kWarps = kThreads / kWarp, kPairs = kThreads * kItems;
  constexpr int kStep = kItemsAtOnce<kItems>, kWritten = kItems == 16 ? 8 : kItems;
  static_assert(kItems % kStep == 0 && kItems % kWritten == 0 && kThreads >= kOwners && kPairs < 1 << 16);
  extern __shared__ __align__(16) char shared_bytes[];
  using Room = ScatterRoom<kThreads, kItems>;
  auto& s = *reinterpret_cast<Room*>(shared_bytes);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t first = FirstOfLane<kThreads, kItems>(blockIdx.x);
  const Digits digits(pass);
  uint32_t key[kItems], payload[kItems];
  constexpr bool kLoads = kPass != Pass::kFirstOfPositions, kStages = kLoads && Room::kStages;
  constexpr bool kCopies = kStages && kPass != Pass::kFirstOfElements2;
  uint32_t* const staged = s.staged.payload + warp * (kWarp * kItems) + lane;
  // Before the keys, which are waited for. Copies have time until the keys are ranked.
  if constexpr (kLoads && !kCopies) LoadPayload<kItems, kPass>(run, pass, first, payload);
  LoadKeys<kItems, kPass != Pass::kLater>(run, pass.keys_in, first, key);
  if constexpr (kCopies) {
    CopyPayload<kItems, kPass>(run, pass, first, staged);
  } else if constexpr (kStages) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) staged[i * kWarp] = payload[i];
  }
  // How many pairs of all tiles, and of those before this one, have either of the thread's digits.
  uint2 total = {0, 0}, earlier = {0, 0};
  if (2 * threadIdx.x < 1 << pass.bits) {
    const uint2* const counts = reinterpret_cast<const uint2*>(pass.counts) + threadIdx.x;
    const int row = 1 << (pass.bits - 1);
    if (kPairs > kSmallTile || pass.scanned) {  // larger tiles are never few
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
  // A warp's tables are its own until it has ranked all its items.
  for (int i = lane; i < kDigits / 4; i += kWarp) reinterpret_cast<uint4*>(s.peers[warp])[i] = {0, 0, 0, 0};
  for (int i = lane; i < kDigits / 8; i += kWarp) reinterpret_cast<uint4*>(s.rank[warp])[i] = {0, 0, 0, 0};
  __syncwarp();

  // Ranks among the warp's pairs with the same digit, of which the lanes tell each other through a word a
  // digit. Places beyond the last position have all bits set and come last of all.
  const uint32_t below = (1u << lane) - 1, above = ~below << 1;
  uint32_t ranks[(kItems + 1) / 2];  // two a word
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
  // From ranks within a warp to places in the tile, and from those to places behind the pairs of smaller digits
  // and of earlier tiles.
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
    for (int w = 0; w < kWarps; ++w) {  // read once more: held since above, they would be registers that others need
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
      if constexpr (!kLoads) payload[i + u] = static_cast<uint32_t>(run.SourceRow(first + (i + u) * kWarp));
    }
#pragma unroll
    for (int u = 0; u < kStep; ++u) s.in_order[place[u]] = {key[i + u], payload[i + u]};
  }
  __syncthreads();
  if constexpr (Room::kStages) PrefetchKeys<kThreads, kItems, kPass != Pass::kLater>(run, pass.keys_in);
  const uint32_t held_here = min(static_cast<uint32_t>(kPairs), run.positions - blockIdx.x * kPairs);
  const auto write_all = [&](auto write) {
#pragma unroll
    for (int i = 0; i < kItems; i += kWritten) {
      uint2 pair[kWritten];
      uint32_t to[kWritten];
#pragma unroll
      for (int u = 0; u < kWritten; ++u) {  // beyond the last pair lie those without a position
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

template <int kThreads, int kItems, Pass kPass>
cudaError_t LaunchPass(const IndexRun& run, const RadixPass& pass, cudaStream_t stream) {
  constexpr bool kFirst = kPass != Pass::kLater;
  cudaError_t error = Launch(RadixCount<kThreads, kItems, kFirst>, {pass.tiles, 1, kThreads}, stream, run, pass);
  if (error != cudaSuccess) return error;
  const int digits = 1 << pass.bits;
  if (pass.scanned) {
    const int blocks = (digits + kScanDigits - 1) / kScanDigits;
    error = Launch(RadixScan, {blocks, 1, kScanThreads}, stream, pass.counts, pass.tiles, digits);
    if (error != cudaSuccess) return error;
  }
  constexpr int kBytes = sizeof(ScatterRoom<kThreads, kItems>);
  static std::atomic<bool> done[kMaxDevices];
  error = OncePerDevice(done, CurrentDevice().ordinal, [] {
    return cudaFuncSetAttribute(RadixScatter<kThreads, kItems, kPass>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                kBytes);
  });
  if (error != cudaSuccess) return error;
  return Launch(RadixScatter<kThreads, kItems, kPass>, {pass.tiles, 1, kThreads, kBytes}, stream, run, pass);
}

template <int kPairs, int kThreads> auto LaunchTile(Pass pass) {
  constexpr int kItems = kPairs / kThreads;
  return pass == Pass::kLater              ? LaunchPass<kThreads, kItems, Pass::kLater>
         : pass == Pass::kFirstOfPositions ? LaunchPass<kThreads, kItems, Pass::kFirstOfPositions>
         : pass == Pass::kFirstOfElements2 ? LaunchPass<kThreads, kItems, Pass::kFirstOfElements2>
                                           : LaunchPass<kThreads, kItems, Pass::kFirstOfElements4>;
}

constexpr int kDescribeThreads = 128, kKeysWritten = 16;  // a thread

// A thread a chunk. Where run.keys is missing, further blocks write them; the first `describing` blocks, if any, then
// take the keys of the indices themselves, plain ones of one slice.
template <bool kKeyed>
__global__ void __launch_bounds__(kDescribeThreads, 8)
Describe(const __grid_constant__ IndexRun run, uint32_t chunk, uint32_t chunks, uint32_t describing) {
  if (!kKeyed && blockIdx.x >= describing) {
    const uint32_t first = FirstOfLane<kDescribeThreads, kKeysWritten>(blockIdx.x - describing);
    uint32_t key[kKeysWritten];
    LoadKeys<kKeysWritten, true>(run, nullptr, first, key);
#pragma unroll
    for (int i = 0; i < kKeysWritten; ++i) {
      const uint32_t at = first + i * kWarp;
      if (at >= run.positions) continue;
      run.keys_room[at] = key[i];
      if (run.order_room) run.order_room[at] = static_cast<uint32_t>(run.SourceRow(at));
    }
    return;
  }
  constexpr Keys kKeys = kKeyed ? Keys::kListed : Keys::kPlain;
  const uint32_t thread = blockIdx.x * kDescribeThreads + threadIdx.x;
  if (thread >= chunks) return;
  const uint32_t begin = thread * chunk, end = min(begin + chunk, run.positions), reach = ChunkReach(chunk);
  const uint32_t head = KeyAt<kKeys>(run, begin), last = KeyAt<kKeys>(run, end - 1);
  const uint32_t before = KeyAt<kKeys>(run, begin - (begin > 0));
  const uint32_t next = KeyAt<kKeys>(run, min(begin + chunk, run.positions - 1));
  const uint32_t behind_reach = KeyAt<kKeys>(run, min(begin + reach, run.positions - 1));
  const uint32_t earlier = KeyAt<kKeys>(run, begin - min(begin, chunk + 1));
  const bool cut = IsCut<kKeys>(run, chunk, thread, reach);
  const bool comes_in = begin > 0 && head < run.dropped && before == head;
  const bool goes_on = end < run.positions && last < run.dropped && next == last;
  // It goes on behind the reach of the chunk before, or came into that one too.
  const bool reaches = begin + reach < run.positions && behind_reach == head;
  const bool long_head = comes_in && (reaches || (begin > chunk && earlier == head));
  // Where the run that came in ends, and that of the chunk's last place: among the places, or among the chunks.
  EndSearch search[2] = {{begin, begin, head, 1}, {end, end, last, 1}};
  if (comes_in && !long_head) search[0].high = min(begin + reach, end);
  if (cut) search[1] = {thread + 2, chunks, last, chunk};
  else if (goes_on && !(long_head && head == last)) search[1].high = min(end + reach, run.positions);
  FindEnds<kKeys>(run, search);
  ChunkInfo info = {search[0].low, long_head, end, 0, last};
  if (cut) info.parts = search[1].low - thread;
  else if (info.start < end) info.stop = search[1].low;
  run.chunks[thread] = info;
}

}  // namespace

cudaError_t DescribeChunks(IndexRun* run, cudaStream_t stream) {
  const auto blocks_of = [](int64_t n, int64_t each) { return (n + each - 1) / each; };
  const int64_t chunks = blocks_of(run->positions, run->chunk), describing = blocks_of(chunks, kDescribeThreads);
  const auto launch = [&](auto kernel, int64_t describing, int64_t writing) {
    return Launch(kernel, {describing + writing, 1, kDescribeThreads}, stream, *run, run->chunk,
                  static_cast<uint32_t>(chunks), static_cast<uint32_t>(describing));
  };
  if (run->keys) return launch(Describe<true>, describing, 0);
  const bool at_once = run->plain && run->batch == 1;
  const cudaError_t error = launch(Describe<false>, at_once ? describing : 0,
                                   blocks_of(run->positions, kDescribeThreads * kKeysWritten));
  run->keys = run->keys_room;
  run->order = run->order_room;
  return at_once || error != cudaSuccess ? error : launch(Describe<true>, describing, 0);
}

cudaError_t SortUpdates(IndexRun* run, int low_bit, SortPayload payload, const IndexLayout& layout, void* scratch,
                        cudaStream_t stream) {
  const IndexRadix& radix = layout.radix;
  const auto room = [&](int64_t offset) { return reinterpret_cast<uint32_t*>(static_cast<char*>(scratch) + offset); };
  RadixPass pass = {};
  pass.bits = radix.bits;
  pass.tiles = static_cast<uint32_t>((run->positions + radix.tile - 1) / radix.tile);
  pass.counts = room(layout.counts);
  pass.scanned = radix.tile > kSmallTile || pass.tiles > kUnscannedTiles;
  for (int i = 0; i < radix.passes; ++i) {
    pass.shift = low_bit + i * radix.bits;
    pass.keys_out = room(layout.keys[i % 2]);
    pass.payload_out = room(layout.values[i % 2]);
    // Whoever reads elements in the order of their keys reads both.
    const bool pairs = payload != SortPayload::kPosition && i == radix.passes - 1;
    if (pairs) pass.pairs_out = reinterpret_cast<uint2*>(pass.keys_out);
    const Pass kind = i > 0                               ? Pass::kLater
                      : payload == SortPayload::kPosition ? Pass::kFirstOfPositions
                      : payload == SortPayload::kElement2 ? Pass::kFirstOfElements2
                                                          : Pass::kFirstOfElements4;
    const auto launch = radix.tile == kSmallTile ? LaunchTile<kSmallTile, 512>(kind)
                        : radix.tile == kTile    ? LaunchTile<kTile, 512>(kind)
                                                 : LaunchTile<kLargeTile, 512>(kind);
    const cudaError_t error = launch(*run, pass, stream);
    if (error != cudaSuccess) return error;
    pass.keys_in = pass.keys_out;
    pass.payload_in = pass.payload_out;
  }
  run->sorted_bits = radix.passes * radix.bits;
  run->pairs = pass.pairs_out;
  if (run->pairs) return cudaSuccess;
  run->keys = pass.keys_out;
  run->order = pass.payload_out;
  run->sorted_keys = true;
  return cudaSuccess;
}

}  // namespace jaxkern
