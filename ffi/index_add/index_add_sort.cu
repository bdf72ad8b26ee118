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

constexpr int kThreads = 512, kWarps = kThreads / kWarp, kDigits = 1 << kRadixBitsMax;
static_assert(kDigits == kThreads, "a thread a digit");
constexpr int kUnscannedTiles = 32;  // so few are added up by each block of RadixScatter itself
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
  SortPayload payload;
};

// The tile's keys, a warp's in order: item i of lane l is number 32 * i + l of the warp's stretch. `held` of them.
template <int kItems, bool kFirst>
__device__ __forceinline__ void LoadKeys(const IndexRun& run, const RadixPass& pass, uint32_t first,
                                         uint32_t (&key)[kItems]) {
  if constexpr (kFirst) {
    RawIndex raw[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t at = first + i * kWarp;
      raw[i] = at < run.positions ? LoadIndex(run, at) : RawIndex{};
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t at = first + i * kWarp;
      key[i] = at < run.positions ? KeyOf(run, raw[i], at) : UINT32_MAX;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t at = first + i * kWarp;
      key[i] = at < run.positions ? __ldg(pass.keys_in + at) : UINT32_MAX;
    }
  }
}

template <int kItems> __device__ __forceinline__ uint32_t FirstOfLane() {
  return (blockIdx.x * kWarps + threadIdx.x / kWarp) * (kWarp * kItems) + threadIdx.x % kWarp;
}

__device__ __forceinline__ uint32_t DigitOf(uint32_t key, const RadixPass& pass) {
  return (key >> pass.shift) & ((1u << pass.bits) - 1);
}

template <int kItems, bool kFirst>
__global__ void __launch_bounds__(kThreads)
RadixCount(const __grid_constant__ IndexRun run, const __grid_constant__ RadixPass pass) {
  __shared__ uint32_t count[kDigits];
  count[threadIdx.x] = 0;
  const uint32_t first = FirstOfLane<kItems>();
  uint32_t key[kItems];
  LoadKeys<kItems, kFirst>(run, pass, first, key);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const bool held = first + i * kWarp < run.positions;
    const uint32_t digit = DigitOf(key[i], pass);
    // A warp whose digits are all the same adds once: a hot row must not serialise the atomics.
    const uint32_t first_digit = __shfl_sync(~0u, digit, 0);
    if (__all_sync(~0u, held && digit == first_digit)) {
      if (threadIdx.x % kWarp == 0) atomicAdd(&count[digit], kWarp);
    } else if (held) {
      atomicAdd(&count[digit], 1);
    }
  }
  __syncthreads();
  const int digits = 1 << pass.bits;
  if (threadIdx.x < digits) pass.counts[static_cast<int64_t>(blockIdx.x) * digits + threadIdx.x] = count[threadIdx.x];
}

// Turns each digit's counts into the sums of those of the tiles before. A block takes kScanDigits digits; its
// threads a segment of the tiles each.
__global__ void __launch_bounds__(kScanThreads) RadixScan(uint32_t* counts, uint32_t tiles, int digits) {
  __shared__ uint32_t sum[kScanSegments][kScanDigits];
  const int digit = threadIdx.x % kScanDigits, segment = threadIdx.x / kScanDigits;
  const uint32_t each = (tiles + kScanSegments - 1) / kScanSegments;
  const uint32_t begin = min(segment * each, tiles), end = min(begin + each, tiles);
  const bool active = blockIdx.x * kScanDigits + digit < digits;
  uint32_t* const mine = counts + blockIdx.x * kScanDigits + digit;
  uint32_t total = 0;
  if (active) {
#pragma unroll 8
    for (uint32_t t = begin; t < end; ++t) total += mine[static_cast<int64_t>(t) * digits];
  }
  sum[segment][digit] = total;
  __syncthreads();
  // A warp scans one digit's segments, four a lane.
  static_assert(kScanSegments == 4 * kWarp);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (warp < kScanDigits) {
    uint32_t v[4], s = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = sum[4 * lane + i][warp];
#pragma unroll
    for (int i = 0; i < 4; ++i) s += v[i];
    uint32_t inclusive = s;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    uint32_t before = inclusive - s;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[4 * lane + i][warp] = before;
      before += v[i];
    }
    if (lane == kWarp - 1 && blockIdx.x * kScanDigits + warp < digits) {
      counts[static_cast<int64_t>(tiles) * digits + blockIdx.x * kScanDigits + warp] = before;
    }
  }
  __syncthreads();
  if (!active) return;
  uint32_t before = sum[segment][digit];
  for (uint32_t t = begin; t < end; t += 8) {
    uint32_t v[8];
#pragma unroll
    for (uint32_t u = 0; u < 8; ++u) v[u] = t + u < end ? mine[static_cast<int64_t>(t + u) * digits] : 0;
#pragma unroll
    for (uint32_t u = 0; u < 8; ++u) {
      if (t + u < end) mine[static_cast<int64_t>(t + u) * digits] = before;
      before += v[u];
    }
  }
}

template <int kItems> struct ScatterRoom {
  static constexpr int kPairs = kThreads * kItems;
  uint32_t key[kPairs];  // with `payload`, first a word for each digit and warp
  uint32_t payload[kPairs > kWarps * kDigits - kPairs ? kPairs : kWarps * kDigits - kPairs];
  uint16_t rank[kWarps][kDigits];  // of a warp's next key with the digit
  uint32_t offset[kDigits];        // from a place in the tile to one in the output
  uint32_t room[kWarps];
};

template <int kItems, bool kFirst>
__global__ void __launch_bounds__(kThreads, kItems <= 8 ? 3 : 2)
RadixScatter(const __grid_constant__ IndexRun run, const __grid_constant__ RadixPass pass) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& s = *reinterpret_cast<ScatterRoom<kItems>*>(shared_bytes);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, digits = 1 << pass.bits;
  const uint32_t first = FirstOfLane<kItems>();
  uint32_t key[kItems], payload[kItems];
  LoadKeys<kItems, kFirst>(run, pass, first, key);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t at = first + i * kWarp;
    payload[i] = 0;
    if (at >= run.positions) continue;
    if constexpr (!kFirst) {
      payload[i] = __ldg(pass.payload_in + at);
    } else if (pass.payload == SortPayload::kElement4) {
      payload[i] = __ldg(static_cast<const uint32_t*>(run.source) + run.SourceRow(at));
    } else if (pass.payload == SortPayload::kElement2) {
      payload[i] = __ldg(static_cast<const uint16_t*>(run.source) + run.SourceRow(at));
    } else {
      payload[i] = static_cast<uint32_t>(run.SourceRow(at));
    }
  }
  // Where the digit's pairs of this tile go: behind those of smaller digits and those of earlier tiles.
  uint32_t total = 0, earlier = 0;
  if (threadIdx.x < digits && pass.scanned) {
    total = pass.counts[static_cast<int64_t>(pass.tiles) * digits + threadIdx.x];
    earlier = pass.counts[static_cast<int64_t>(blockIdx.x) * digits + threadIdx.x];
  } else if (threadIdx.x < digits) {
#pragma unroll 8
    for (uint32_t t = 0; t < pass.tiles; ++t) {
      const uint32_t count = pass.counts[static_cast<int64_t>(t) * digits + threadIdx.x];
      total += count;
      if (t < blockIdx.x) earlier += count;
    }
  }
  for (int i = threadIdx.x; i < kWarps * kDigits / 2; i += kThreads) reinterpret_cast<uint32_t*>(s.rank)[i] = 0;
  for (int i = threadIdx.x; i < kWarps * kDigits; i += kThreads) s.key[i] = 0;
  const uint32_t to = SumOfThreadsBefore(total, s.room) + earlier;

  // Ranks among the warp's pairs with the same digit, of which the lanes tell each other through a word a
  // digit; these words lie where the pairs themselves come to lie afterwards. Places beyond the
  // last position have all bits set and come last of all.
  uint32_t* const peers_of = s.key + warp * kDigits;
  uint16_t rank[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t digit = DigitOf(key[i], pass);
    atomicOr(&peers_of[digit], 1u << lane);
    __syncwarp();
    const uint32_t peers = peers_of[digit];
    const uint16_t before = s.rank[warp][digit];
    __syncwarp();
    const uint32_t lower = peers & ((1u << lane) - 1);
    rank[i] = before + __popc(lower);
    if (lower == 0) {
      s.rank[warp][digit] = before + __popc(peers);
      peers_of[digit] = 0;
    }
    __syncwarp();
  }
  __syncthreads();
  // From ranks within a warp to places in the tile, for the digit threadIdx.x.
  uint32_t in_tile = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) in_tile += s.rank[w][threadIdx.x];
  const uint32_t start = SumOfThreadsBefore(in_tile, s.room);
  uint32_t place_of = start;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const uint16_t held = s.rank[w][threadIdx.x];
    s.rank[w][threadIdx.x] = place_of;
    place_of += held;
  }
  s.offset[threadIdx.x] = to - start;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t digit = DigitOf(key[i], pass);
    const uint32_t place = s.rank[warp][digit] + rank[i];
    s.key[place] = key[i];
    s.payload[place] = payload[i];
  }
  __syncthreads();
  const uint32_t held = min(static_cast<uint32_t>(kThreads * kItems), run.positions - blockIdx.x * (kThreads * kItems));
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t place = threadIdx.x + i * kThreads;
    if (place < held) {
      const uint32_t k = s.key[place], out = s.offset[DigitOf(k, pass)] + place;
      pass.keys_out[out] = k;
      pass.payload_out[out] = s.payload[place];
    }
  }
}

template <int kItems, bool kFirst>
cudaError_t LaunchPass(const IndexRun& run, const RadixPass& pass, cudaStream_t stream) {
  cudaError_t error = Launch(RadixCount<kItems, kFirst>, {pass.tiles, 1, kThreads}, stream, run, pass);
  if (error != cudaSuccess) return error;
  const int digits = 1 << pass.bits;
  if (pass.scanned) {
    const int blocks = (digits + kScanDigits - 1) / kScanDigits;
    error = Launch(RadixScan, {blocks, 1, kScanThreads}, stream, pass.counts, pass.tiles, digits);
    if (error != cudaSuccess) return error;
  }
  constexpr int kBytes = sizeof(ScatterRoom<kItems>);
  static std::atomic<bool> done[kMaxDevices];
  error = OncePerDevice(done, CurrentDevice().ordinal, [] {
    return cudaFuncSetAttribute(RadixScatter<kItems, kFirst>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  });
  if (error != cudaSuccess) return error;
  return Launch(RadixScatter<kItems, kFirst>, {pass.tiles, 1, kThreads, kBytes}, stream, run, pass);
}

constexpr int kDescribeThreads = 256;

// The first of places [low, high) whose key is not `key`, which those before it all have.
__device__ __forceinline__ uint32_t EndOf(const IndexRun& run, uint32_t low, uint32_t high, uint32_t key) {
  constexpr uint32_t kLooks = 7;  // at once
  while (low < high) {
    const uint32_t step = (high - low + kLooks) / (kLooks + 1);
    uint32_t passed = 0;
#pragma unroll
    for (uint32_t i = 1; i <= kLooks; ++i) {
      const uint32_t at = low + i * step - 1;
      if (at < high) passed += KeyAt(run, at) == key;
    }
    if (passed < kLooks) high = min(high, low + (passed + 1) * step - 1);
    low += passed * step;
  }
  return low;
}

// One thread a chunk; where run.keys is missing, first one a place, which writes its key.
__global__ void __launch_bounds__(kDescribeThreads)
Describe(const __grid_constant__ IndexRun run, uint32_t chunk, uint32_t chunks) {
  const uint32_t thread = blockIdx.x * kDescribeThreads + threadIdx.x;
  if (!run.keys && thread < run.positions) {
    run.keys_room[thread] = KeyAt(run, thread);
    if (run.order_room) run.order_room[thread] = static_cast<uint32_t>(run.SourceRow(thread));
  }
  if (thread >= chunks) return;
  const uint32_t begin = thread * chunk, end = min(begin + chunk, run.positions);
  const uint32_t head = KeyAt(run, begin), last = KeyAt(run, end - 1);
  const uint32_t before = KeyAt(run, begin - (begin > 0)), next = KeyAt(run, min(end, run.positions - 1));
  const bool comes_in = begin > 0 && head < run.dropped && before == head;
  const bool goes_on = end < run.positions && last < run.dropped && next == last;
  const bool long_head = comes_in && LongHead(run, chunk, begin, end, head);
  ChunkInfo info = {begin, long_head, end, PartsOf(run, chunk, chunks, thread, chunk), last};
  if (comes_in && !long_head) info.start = EndOf(run, begin, end, head);
  if (goes_on && info.parts == 0 && !(long_head && head == last) && info.start < end) {
    info.stop = EndOf(run, end, min(end + chunk, run.positions), last);
  }
  run.chunks[thread] = info;
}

}  // namespace

cudaError_t DescribeChunks(IndexRun* run, int64_t chunk, cudaStream_t stream) {
  const int64_t chunks = (run->positions + chunk - 1) / chunk, threads = run->keys ? chunks : run->positions;
  const int64_t blocks = (threads + kDescribeThreads - 1) / kDescribeThreads;
  const cudaError_t error = Launch(Describe, {blocks, 1, kDescribeThreads}, stream, *run,
                                   static_cast<uint32_t>(chunk), static_cast<uint32_t>(chunks));
  if (!run->keys) {
    run->keys = run->keys_room;
    run->order = run->order_room;
  }
  return error;
}

cudaError_t SortUpdates(IndexRun* run, int low_bit, int high_bit, SortPayload payload, const IndexLayout& layout,
                        void* scratch, cudaStream_t stream) {
  const IndexRadix radix = RadixOf(run->positions, low_bit, high_bit);
  const auto room = [&](int64_t offset) { return reinterpret_cast<uint32_t*>(static_cast<char*>(scratch) + offset); };
  RadixPass pass = {};
  pass.bits = radix.bits;
  pass.tiles = static_cast<uint32_t>(radix.tiles);
  pass.counts = room(layout.counts);
  pass.payload = payload;
  pass.scanned = pass.tiles > kUnscannedTiles;
  for (int i = 0; i < radix.passes; ++i) {
    pass.shift = low_bit + i * radix.bits;
    pass.keys_out = room(layout.keys[i % 2]);
    pass.payload_out = room(layout.values[i % 2]);
    const auto launch = radix.tile == kThreads * 16 ? (i == 0 ? LaunchPass<16, true> : LaunchPass<16, false>)
                        : radix.tile == kThreads * 8 ? (i == 0 ? LaunchPass<8, true> : LaunchPass<8, false>)
                                                     : (i == 0 ? LaunchPass<4, true> : LaunchPass<4, false>);
    const cudaError_t error = launch(*run, pass, stream);
    if (error != cudaSuccess) return error;
    pass.keys_in = pass.keys_out;
    pass.payload_in = pass.payload_out;
  }
  run->keys = pass.keys_out;
  run->order = pass.payload_out;
  run->sorted_keys = true;
  return cudaSuccess;
}

}  // namespace jaxkern
