// The narrow plan: rows of one element of up to 4 bytes, many updates to each. Bins in shared memory take the
// sums. Floats are not added by atomics: a bin belongs to one warp at a time.
//
//     few updates    a block for a window of the rows looks through all indices for those of its own
//     few rows       every thread has bins of its own
//     up to kBins    every warp has. The updates of lanes that meet in a bin are first added up across the warp
//     up to kWideBins    likewise, but there is room for one copy a block: its warps add to it in turn
//     more           the sort has brought updates with equal leading bits of the key together; a block
//                    takes one stretch after the other of its chunk of them, as above
//
// A chunk of updates is a block's; the sums of the parts of a slice (or of a stretch that chunks cut) are added
// in order by BinParts (or BinStretches). Untouched bins of a float sum hold -0, which changes no sum, so
// that index_add leaves their rows alone.
#pragma once

#include <algorithm>

#include "index_add_bins.cuh"

namespace jaxkern {

constexpr int kFewBins = 32, kPrefetched = 2048;  // updates
constexpr int kWindowThreads = 768, kWindowEach = 16;  // indices that a thread of a window has under way

struct BinShape {
  uint32_t chunk = 0, chunks = 0;  // of a slice
  int64_t slices = 1;              // batch * outer
  int bins = 0;                    // of a slice
  int copies = kBinWarps;          // warps with bins of their own
  uint32_t stretches = 0;          // a mask: the leading bits that the sort has looked at
  int64_t fill_after = 0;
  FillShape fill;
};

// Up to kWideBins rows: a block a chunk of a slice, straight from index and source.
template <Reduction kOp, class T, bool kFew>
__global__ void __launch_bounds__(kBinThreads)
BinSlices(const __grid_constant__ IndexRun run, const __grid_constant__ BinShape s) {
  using C = Compute<T>;
  extern __shared__ __align__(16) char shared_bytes[];
  BlockBins<kOp, C, kFew> bins(shared_bytes, s.bins, s.copies);
  const int64_t slice = blockIdx.x / s.chunks;
  const uint32_t chunk = blockIdx.x % s.chunks;
  const int64_t b = slice / run.outer, o = slice % run.outer;
  const uint32_t begin = chunk * s.chunk, end = min(begin + s.chunk, run.count);
  const uint32_t place = static_cast<uint32_t>(b * run.count);
  const T* const source = static_cast<const T*>(run.source) + o * run.source_stride + run.SourceRow(place);
  // Few warps have too few loads under way for memory, but not for L2: in each turn threads ask for a line each of the
  // updates that lie kPrefetched ahead, and at first for those before.
  const char* const indices = static_cast<const char*>(run.index) + int64_t{place} * run.index_bytes;
  const auto prefetch = [&](uint32_t from, uint32_t count, uint32_t thread, uint32_t threads) {
    const uint32_t to = min(from + count, end);
    for (uint32_t k = from + thread * 32; k < to; k += threads * 32) {  // a line of 4 bytes each, two of 8
      Prefetch(indices + int64_t{k} * run.index_bytes);
      if (run.index_bytes == 8) Prefetch(indices + int64_t{min(k + 16, to - 1)} * 8);
      Prefetch(reinterpret_cast<const char*>(source + k));
    }
  };
  const bool wide = !kFew && s.copies == 1;
  if (wide) prefetch(begin, kPrefetched, threadIdx.x, kWideThreads);
  bins.Clear();
  __syncthreads();
  struct Update {
    RawIndex raw;
    T value;
  };
  const auto turn = [&](uint32_t k, uint32_t n) {
    if (wide) prefetch(k + kPrefetched, n, threadIdx.x, kWideThreads);
  };
  const auto add = [&](auto load, auto row_of) {
    bins.AddAll(begin, end, turn, load, [&](const Update& update, int* bin, C* v) {
      const uint32_t row = row_of(update.raw);
      *bin = row < run.rows ? static_cast<int>(row) : -1;
      *v = ToCompute(update.value);
    });
  };
  if (run.plain) {
    const uint32_t* const index = reinterpret_cast<const uint32_t*>(indices);
    const uint32_t negative = run.wrap ? run.rows : 0;
    add([&](uint32_t k) { return Update{{__ldg(index + k), 0}, __ldg(source + k)}; },
        [&](RawIndex raw) { return raw.low + (static_cast<int32_t>(raw.low) < 0 ? negative : 0); });
  } else {
    add([&](uint32_t k) { return Update{LoadIndex(run, place + k), source[k]}; },
        [&](RawIndex raw) { return RowKey(run, raw); });
  }
  bins.ForEach([&](int bin, int step, const auto& totals) {
    if (s.chunks == 1) {
      const uint32_t key = static_cast<uint32_t>(b * run.rows);
      EmitBins<kOp, T>(run, o, key + bin, step, key + run.rows, totals);
    } else {
      C* const parts = static_cast<C*>(run.partials) + (slice * s.chunks + chunk) * s.bins;
      for (const C& total : totals) {
        if (bin < s.bins) parts[bin] = total;
        bin += step;
      }
    }
  });
}

// Few updates: a block for each window of the rows (x) and slice (y). Every thread has bins of its own, so
// that nobody meets anybody. `vectors`: of four plain indices each, of a slice.
template <Reduction kOp, class T>
__global__ void __launch_bounds__(kWindowThreads)
BinWindows(const __grid_constant__ IndexRun run, const uint32_t vectors) {
  using C = Compute<T>;
  constexpr int kVectors = kWindowEach / 4, kFetched = 2;  // vectors, and then updates, that a thread loads at once
  static_assert((kBinWindow & (kBinWindow - 1)) == 0 && kWindowEach <= 32);
  struct alignas(16) Four { C v[4]; };
  __shared__ Four sums[kBinWindow][kWindowThreads / 4];
  uint32_t thread = threadIdx.x;
  asm("" : "+r"(thread));  // a register, not to be asked for again at every use
  const uint32_t threads = blockDim.x, first = blockIdx.x * kBinWindow;
  uint32_t b = 0, o = 0;
  if (gridDim.y > 1) {
    b = blockIdx.y / static_cast<uint32_t>(run.outer);
    o = blockIdx.y % static_cast<uint32_t>(run.outer);
  }
  const uint32_t place = b * run.count;
  const uint32_t* index = static_cast<const uint32_t*>(run.index) + place;
  uint4 rows[kVectors];
  const auto load = [&](uint32_t from) {
#pragma unroll
    for (int g = 0; g < kVectors; ++g) {
      rows[g] = __ldg(reinterpret_cast<const uint4*>(index) + min(from + g * threads, vectors - 1));
    }
  };
  if (vectors) load(thread);
  C* const mine = &sums[0][0].v[0] + thread;
#pragma unroll
  for (int bin = 0; bin < kBinWindow; ++bin) mine[bin * kWindowThreads] = Empty<kOp, C>();
  // A block waits for the few updates that are its own: all blocks together have brought them to L2 by then.
  const T* source = static_cast<const T*>(run.source) + o * run.source_stride + run.SourceRow(place);
  asm("" : "+l"(index), "+l"(source));  // likewise
  const uint32_t line = (thread * gridDim.x + blockIdx.x) * 32;
  if (line < run.count) Prefetch(reinterpret_cast<const char*>(source + line));
  T* const out = static_cast<T*>(run.out) + o * run.out_stride + run.OutRow(b * run.rows) + first;
  const uint32_t negative = run.wrap ? run.rows : 0;  // what is added to a row below 0
  const auto add = [&](uint32_t row, T v) {
    C* const sum = mine + row % kBinWindow * kWindowThreads;
    *sum = Combined<kOp>(*sum, ToCompute(v));
  };
  for (uint32_t at = thread; at < vectors;) {
    if (negative) {
#pragma unroll
      for (int g = 0; g < kVectors; ++g) {
        const auto wrap = [&](uint32_t& row) { row += static_cast<int32_t>(row) < 0 ? negative : 0; };
        wrap(rows[g].x), wrap(rows[g].y), wrap(rows[g].z), wrap(rows[g].w);
      }
    }
    uint32_t mask = 0;  // which of them are in the window, first to last; rows beyond the last one are nobody's
#pragma unroll
    for (int g = 0; g < kVectors; ++g) {
      const auto look = [&](uint32_t row, int i) {
        if (((row ^ first) & ~(kBinWindow - 1u)) == 0) mask |= 0x80000000u >> (4 * g + i);
      };
      look(rows[g].x, 0), look(rows[g].y, 1), look(rows[g].z, 2), look(rows[g].w, 3);
      if (at + g * threads >= vectors) mask &= ~(0xf0000000u >> 4 * g);
    }
    const uint32_t from = at;
    at += kVectors * threads;
    if (at < vectors) load(at);
    while (mask) {
      uint32_t row[kFetched];
      T v[kFetched];
      bool found[kFetched];
#pragma unroll
      for (int u = 0; u < kFetched; ++u) {
        found[u] = mask != 0;
        if (!found[u]) continue;
        const uint32_t i = __clz(mask), k = 4 * (from + i / 4 * threads) + i % 4;
        mask &= 0x7fffffffu >> i;
        row[u] = __ldg(index + k);  // once more, from L1
        v[u] = __ldg(source + k);
      }
#pragma unroll
      for (int u = 0; u < kFetched; ++u) {
        if (found[u]) add(row[u] + (static_cast<int32_t>(row[u]) < 0 ? negative : 0), v[u]);
      }
    }
  }
  // What is left of the last vector; or all, where indices are of another kind or lie elsewhere.
#pragma unroll 1
  for (uint32_t k = 4 * vectors + thread; k < run.count; k += threads) {
    const uint32_t row = RowKey(run, LoadIndex(run, int64_t{place} + k));
    if (row < run.rows && row / kBinWindow == blockIdx.x) add(row, __ldg(source + k));
  }
  __syncthreads();
  // A warp a bin. A lane has a few updates of it at most: a sum in double has hardly more than its last rounding.
  using Wide = std::conditional_t<kOp == Reduction::kSum && std::is_same_v<C, float>, double, C>;
  const auto combine = [](auto a, auto b) { return Combined<kOp>(a, b); };
  constexpr int kMost = kWindowThreads / (4 * kWarp);
  const uint32_t lane = thread % kWarp;
#pragma unroll 1
  for (uint32_t bin = thread / kWarp; bin < kBinWindow; bin += threads / kWarp) {
    Four part[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i * 4 * kWarp < threads) part[i] = sums[bin][i * kWarp + lane];
    }
#pragma unroll
    for (int i = 1; i < kMost; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (i * 4 * kWarp < threads) part[0].v[j] = Combined<kOp>(part[0].v[j], part[i].v[j]);
      }
    }
    const Wide total = ReduceLanes<kWarp>(static_cast<Wide>(Fold(part[0].v, combine)), combine);
    if (lane == 0 && first + bin < run.rows) EmitAt<kOp>(run, out + bin, static_cast<C>(total));
  }
}

// Adds up a slice's chunks: a block for 32 bins, its warps every 32nd chunk each.
template <Reduction kOp, class T>
__global__ void __launch_bounds__(1024)
BinParts(const __grid_constant__ IndexRun run, const __grid_constant__ BinShape s) {
  using C = Compute<T>;
  __shared__ C room[kWarp][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, groups = (s.bins + kWarp - 1) / kWarp;
  const int64_t slice = blockIdx.x / groups;
  const int bin = blockIdx.x % groups * kWarp + lane;
  const C* const parts = static_cast<const C*>(run.partials) + slice * s.chunks * s.bins + bin;
  C total = Empty<kOp, C>();
  if (bin < s.bins) {
#pragma unroll 8
    for (int64_t c = warp; c < s.chunks; c += kWarp) total = Combined<kOp>(total, parts[c * s.bins]);
  }
  room[warp][lane] = total;
  __syncthreads();
  if (warp > 0 || bin >= s.bins) return;
  for (int w = 1; w < kWarp; ++w) total = Combined<kOp>(total, room[w][lane]);
  EmitBin<kOp, T>(run, slice % run.outer, static_cast<uint32_t>(slice / run.outer * run.rows + bin), total);
}

__device__ __forceinline__ uint32_t StretchAt(const IndexRun& run, const BinShape& s, uint32_t place) {
  return __ldg(&run.pairs[place].x) >> kBinBits & s.stretches;
}

// More rows: a block a chunk of the updates in the order of their stretch.
template <Reduction kOp, class T>
__global__ void __launch_bounds__(kBinThreads, 3)
BinSorted(const __grid_constant__ IndexRun run, const __grid_constant__ BinShape s) {
  using C = Compute<T>;
  if (blockIdx.x >= s.fill_after) {
    __shared__ uint32_t bits[kFillRows / 32];
    static_assert(kBins % kFillRows == 0, "a tile is in one stretch, whose rows are all written or none");
    FillTile<kOp, T, 1>(run, s.fill, 1, blockIdx.x - s.fill_after, bits, [&](uint32_t first, int, uint32_t* marks) {
      uint32_t low = 0, high = run.positions;
      const uint32_t stretch = first >> kBinBits;
      while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (StretchAt(run, s, middle) < stretch) low = middle + 1;
        else high = middle;
      }
      const bool touched = low < run.positions && StretchAt(run, s, low) == stretch;
      for (int i = threadIdx.x; touched && i < kFillRows / 32; i += kBinThreads) marks[i] = ~0u;
    });
    return;
  }
  extern __shared__ __align__(16) char shared_bytes[];
  BlockBins<kOp, C, false> bins(shared_bytes, static_cast<int>(kBins), kBinWarps);
  static_assert(kBins % (kBinThreads * decltype(bins)::kBinsAtOnce) == 0);
  const uint32_t chunk = blockIdx.x, chunk_begin = chunk * s.chunk;
  const uint32_t chunk_end = min(chunk_begin + s.chunk, run.positions);
  for (uint32_t begin = chunk_begin; begin < chunk_end;) {
    const uint32_t stretch = StretchAt(run, s, begin);
    // Where it ends: 256 probes at a time.
    uint32_t end = chunk_end;
    if (StretchAt(run, s, chunk_end - 1) != stretch) {
      uint32_t low = begin, high = chunk_end - 1;
      while (high - low > 1) {
        const uint32_t step = (high - low + kBinThreads) / (kBinThreads + 1), probe = low + (threadIdx.x + 1) * step;
        const int inside = __syncthreads_count(probe < high && StretchAt(run, s, probe) == stretch);
        low += inside * step;
        high = min(low + step, high);
      }
      end = high;
    }
    bins.Clear();
    __syncthreads();
    const auto load = [&](uint32_t k) { return __ldg(run.pairs + k); };
    bins.AddAll(begin, end, [](uint32_t, uint32_t) {}, load, [&](const uint2& update, int* bin, C* v) {
      *bin = update.x < run.dropped ? static_cast<int>(update.x % kBins) : -1;
      *v = ToCompute(*reinterpret_cast<const T*>(&update.y));
    });
    const bool head = begin == chunk_begin && begin > 0 && StretchAt(run, s, begin - 1) == stretch;
    const bool tail = end == chunk_end && end < run.positions && StretchAt(run, s, end) == stretch;
    bins.ForEach([&](int bin, int step, const auto& totals) {
      if (head || tail) {
        C* const parts = static_cast<C*>(run.partials) + (2 * static_cast<int64_t>(chunk) + !head) * kBins;
        for (const C& total : totals) {
          parts[bin] = total;
          bin += step;
        }
      } else {
        EmitBins<kOp, T>(run, 0, static_cast<uint32_t>(stretch * kBins + bin), step, run.dropped, totals);
      }
    });
    begin = end;
  }
}

// Adds up the parts of a stretch that chunks cut: a block a chunk, for the stretch that begins in it.
constexpr int kStretchThreads = 512;
template <Reduction kOp, class T>
__global__ void __launch_bounds__(kStretchThreads)
BinStretches(const __grid_constant__ IndexRun run, const __grid_constant__ BinShape s) {
  using C = Compute<T>;
  const uint32_t chunk = blockIdx.x, begin = chunk * s.chunk, end = begin + s.chunk;
  if (end >= run.positions) return;
  const uint32_t stretch = StretchAt(run, s, end - 1);
  if (StretchAt(run, s, end) != stretch) return;
  if (begin > 0 && StretchAt(run, s, begin - 1) == stretch) return;  // began earlier
  uint32_t last = chunk + 1, step = 1;
  while (last + step < s.chunks && StretchAt(run, s, (last + step) * s.chunk) == stretch) last += step, step *= 2;
  for (; step; step /= 2) {
    if (last + step < s.chunks && StretchAt(run, s, (last + step) * s.chunk) == stretch) last += step;
  }
  constexpr int kEach = kBins / kStretchThreads;
  const C* parts = static_cast<const C*>(run.partials) + (2 * int64_t{chunk} + 1) * kBins + threadIdx.x;
  C total[kEach];
#pragma unroll
  for (int u = 0; u < kEach; ++u) total[u] = parts[u * kStretchThreads];
  parts += kBins;
#pragma unroll 4
  for (uint32_t c = chunk + 1; c <= last; ++c, parts += 2 * kBins) {
#pragma unroll
    for (int u = 0; u < kEach; ++u) total[u] = Combined<kOp>(total[u], parts[u * kStretchThreads]);
  }
  EmitBins<kOp, T>(run, 0, static_cast<uint32_t>(stretch * kBins + threadIdx.x), kStretchThreads, run.dropped, total);
}

template <Reduction kOp, class T, bool kFew>
cudaError_t LaunchBinSlices(const IndexRun& run, const BinShape& s, cudaStream_t stream) {
  using Bins = BlockBins<kOp, Compute<T>, kFew>;
  constexpr int kMost = kFew ? Bins::Bytes(kFewBins, 0)
                             : std::max(Bins::Bytes(kBins, kBinWarps), Bins::Bytes(kWideBins, 1));
  static std::atomic<bool> done[kMaxDevices];
  cudaError_t error = OncePerDevice(done, CurrentDevice().ordinal, [] {
    return cudaFuncSetAttribute(BinSlices<kOp, T, kFew>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost);
  });
  if (error != cudaSuccess) return error;
  const int threads = s.copies == 1 ? kWideThreads : kBinThreads, bytes = Bins::Bytes(s.bins, s.copies);
  error = Launch(BinSlices<kOp, T, kFew>, {s.slices * s.chunks, 1, threads, bytes}, stream, run, s);
  if (error != cudaSuccess || s.chunks == 1) return error;
  return Launch(BinParts<kOp, T>, {s.slices * ((s.bins + kWarp - 1) / kWarp), 1, 1024}, stream, run, s);
}

template <Reduction kOp, class T>
cudaError_t LaunchBinWindows(const IndexRun& run, int64_t slices, int64_t windows, bool whole, cudaStream_t stream) {
  // As few turns as can be, and threads that they keep busy; of whole vectors of bins.
  const uint32_t turns = (run.count + kWindowEach * kWindowThreads - 1) / (kWindowEach * kWindowThreads);
  const uint32_t each = kWindowEach * turns, step = 4 * kWarp;
  const int threads = static_cast<int>((run.count + each * step - 1) / (each * step) * step);
  const LaunchShape shape = {windows, static_cast<int>(slices), threads};
  return Launch(BinWindows<kOp, T>, shape, stream, run, whole ? run.count / 4 : 0);
}

// Up to kWideBins rows, or updates that SortUpdates has brought in the order of their keys' leading bits.
template <Reduction kOp, class T>
cudaError_t LaunchNarrow(const IndexRun& run, bool fills, cudaStream_t stream) {
  BinShape s;
  if (!run.pairs) {
    s.slices = run.batch * run.outer;
    if (const int64_t windows = BinWindowsOf(s.slices, run.rows, run.count)) {
      const bool whole = run.plain && reinterpret_cast<uintptr_t>(run.index) % 16 == 0 &&
                         (run.batch == 1 || run.count % 4 == 0);
      // One by one, indices take their time.
      if (whole || run.count <= kFewUpdates) return LaunchBinWindows<kOp, T>(run, s.slices, windows, whole, stream);
    }
    s.chunk = static_cast<uint32_t>(BinChunkOf(run.positions * run.outer, run.rows));
    s.chunks = (run.count + s.chunk - 1) / s.chunk;
    s.bins = static_cast<int>(run.rows);
    if (run.rows > kBins) s.copies = 1;
    if (run.rows <= kFewBins) return LaunchBinSlices<kOp, T, true>(run, s, stream);
    return LaunchBinSlices<kOp, T, false>(run, s, stream);
  }
  s.chunk = static_cast<uint32_t>(BinChunkOf(run.positions, kBins));
  s.chunks = (run.positions + s.chunk - 1) / s.chunk;
  s.stretches = (1u << run.sorted_bits) - 1;
  s.fill_after = s.chunks;
  int64_t blocks = s.chunks;
  if (fills) {
    s.fill = FillShapeOf(run.dropped, 1, 1, sizeof(T));
    blocks += s.fill.blocks;
  }
  constexpr int kBytes = BlockBins<kOp, Compute<T>, false>::Bytes(kBins, kBinWarps);
  static std::atomic<bool> done[kMaxDevices];
  cudaError_t error = OncePerDevice(done, CurrentDevice().ordinal, [] {
    return cudaFuncSetAttribute(BinSorted<kOp, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  });
  if (error != cudaSuccess) return error;
  error = Launch(BinSorted<kOp, T>, {blocks, 1, kBinThreads, kBytes}, stream, run, s);
  if (error != cudaSuccess || s.chunks == 1) return error;
  return Launch(BinStretches<kOp, T>, {int64_t{s.chunks}, 1, kStretchThreads}, stream, run, s);
}

}  // namespace jaxkern
