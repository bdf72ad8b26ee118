// The narrow plan: rows of one element of up to 4 bytes, many updates to each. Bins in shared memory take the
// sums. Floats are not added by atomics: a bin belongs to one warp at a time.
//
//     few rows       every thread has bins of its own
//     up to kBins    every warp has. The updates of lanes that meet in a bin are first added up across the warp
//     more           the sort has brought updates with equal leading bits of the key together; a block
//                    takes one stretch after the other of its chunk of them, as above
//
// A chunk of updates is a block's; the sums of the parts of a slice (or of a stretch that chunks cut) are added
// in order by BinParts (or BinStretches). Untouched bins of a float sum hold -0, which changes no sum, so
// that index_add leaves their rows alone.
#pragma once

#include "index_add.cuh"

namespace jaxkern {

constexpr int kBinThreads = 256, kBinWarps = kBinThreads / kWarp, kBinAhead = 8, kFewBins = 32;

struct BinShape {
  uint32_t chunk = 0, chunks = 0;  // of a slice
  int64_t slices = 1;              // batch * outer
  int bins = 0;                    // of a slice
  uint32_t stretches = 0;          // a mask: the leading bits that the sort has looked at
  int64_t fill_after = 0;
  FillShape fill;
};

// What a bin holds before anything is added.
template <Reduction kOp, class C> __device__ __forceinline__ C Empty() {
  if constexpr (kOp == Reduction::kSum && std::is_same_v<C, float>) return -0.0f;
  else return Identity<kOp, C>();
}

template <Reduction kOp, class T>
__device__ __forceinline__ void EmitBin(const IndexRun& run, int64_t o, uint32_t key, Compute<T> total) {
  using C = Compute<T>;
  if (key >= run.dropped) return;
  T* const at = static_cast<T*>(run.out) + o * run.out_stride + run.OutRow(key);
  if constexpr (kOp == Reduction::kSum && kIsFloat<C>) {
    if (run.reads_out && __float_as_uint(total) == 0x80000000u) return;
    total += 0.0f;
  }
  const C x = run.reads_out ? ToCompute(*at) : C(0);
  *at = FromCompute<T>(Finished<kOp>(total, Alpha<C>(run), run.reads_out, x));
}

// A block's bins: a copy a thread or a warp, and for the latter a bit a bin, to see who meets whom.
template <Reduction kOp, class C, bool kFew> struct BlockBins {
  static constexpr int kTaken = kBins / 32;  // words
  C* sum;
  uint32_t* taken;
  int bins;

  static constexpr int Bytes(int bins) {
    return bins * (kFew ? kBinThreads : kBinWarps) * 4 + (kFew ? 0 : kBinWarps * kTaken * 4);
  }

  __device__ __forceinline__ BlockBins(char* shared, int n)
      : sum(reinterpret_cast<C*>(shared)), taken(reinterpret_cast<uint32_t*>(shared) + n * kBinWarps), bins(n) {}

  __device__ __forceinline__ void Clear() {
    const int all = bins * (kFew ? kBinThreads : kBinWarps);
    for (int i = threadIdx.x; i < all; i += kBinThreads) sum[i] = Empty<kOp, C>();
    if (!kFew) {
      for (int i = threadIdx.x; i < kBinWarps * kTaken; i += kBinThreads) taken[i] = 0;
    }
  }

  // All lanes of a warp come here.
  __device__ __forceinline__ void Add(int bin, C v, bool valid) {
    if constexpr (kFew) {
      C* const mine = sum + bin * kBinThreads + threadIdx.x;
      if (valid) *mine = Combined<kOp>(*mine, v);
    } else {
      const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
      C* const mine = sum + warp * bins;
      uint32_t* const mine_taken = taken + warp * kTaken;
      const uint32_t bit = 1u << (bin % 32);
      // All but one of those that meet see that somebody was there before them. Not __match_any_sync, which is slow.
      uint32_t met = __ballot_sync(~0u, valid && (atomicOr(&mine_taken[bin / 32], bit) & bit));
#pragma unroll
      for (int i = 0; i < kTaken; i += kWarp) mine_taken[i + lane] = 0;
      while (met) {  // one bin a turn
        const int leader = __ffs(met) - 1;
        const int bin_met = __shfl_sync(~0u, bin, leader);
        const bool same = valid && bin == bin_met;
        met &= ~__ballot_sync(~0u, same);
        const C all = ReduceLanes<kWarp>(same ? v : Empty<kOp, C>(), [](C a, C b) { return Combined<kOp>(a, b); });
        if (lane == leader) mine[bin] = Combined<kOp>(mine[bin], all);
        if (same) valid = false;
      }
      if (valid) mine[bin] = Combined<kOp>(mine[bin], v);
      __syncwarp();
    }
  }

  // emit(bin, sum over the copies), between two barriers.
  template <class Emit> __device__ __forceinline__ void ForEach(Emit emit) {
    __syncthreads();
    if constexpr (kFew) {
      const int lane = threadIdx.x % kWarp;
      for (int bin = threadIdx.x / kWarp; bin < bins; bin += kBinWarps) {
        C total = sum[bin * kBinThreads + lane];
#pragma unroll
        for (int i = 1; i < kBinThreads / kWarp; ++i) {
          total = Combined<kOp>(total, sum[bin * kBinThreads + i * kWarp + lane]);
        }
        total = ReduceLanes<kWarp>(total, [](C a, C b) { return Combined<kOp>(a, b); });
        if (lane == 0) emit(bin, total);
      }
    } else {
      for (int bin = threadIdx.x; bin < bins; bin += kBinThreads) {
        C total = sum[bin];
#pragma unroll
        for (int w = 1; w < kBinWarps; ++w) total = Combined<kOp>(total, sum[w * bins + bin]);
        emit(bin, total);
      }
    }
    __syncthreads();
  }
};

// Up to kBins rows: a block a chunk of a slice, straight from index and source.
template <Reduction kOp, class T, bool kFew>
__global__ void __launch_bounds__(kBinThreads)
BinSlices(const __grid_constant__ IndexRun run, const __grid_constant__ BinShape s) {
  using C = Compute<T>;
  extern __shared__ __align__(16) char shared_bytes[];
  BlockBins<kOp, C, kFew> bins(shared_bytes, s.bins);
  const int64_t slice = blockIdx.x / s.chunks;
  const uint32_t chunk = blockIdx.x % s.chunks;
  const int64_t b = slice / run.outer, o = slice % run.outer;
  const uint32_t begin = chunk * s.chunk, end = min(begin + s.chunk, run.count);
  const uint32_t place = static_cast<uint32_t>(b * run.count);
  const T* const source = static_cast<const T*>(run.source) + o * run.source_stride + run.SourceRow(place);
  bins.Clear();
  __syncthreads();
  for (uint32_t i = begin; i < end; i += kBinThreads * kBinAhead) {
    RawIndex raw[kBinAhead];
    T value[kBinAhead];
#pragma unroll
    for (int u = 0; u < kBinAhead; ++u) {
      const uint32_t k = i + u * kBinThreads + threadIdx.x;
      raw[u] = {};
      value[u] = FromCompute<T>(C(0));
      if (k < end) {
        raw[u] = LoadIndex(run, place + k);
        value[u] = source[k];
      }
    }
#pragma unroll
    for (int u = 0; u < kBinAhead; ++u) {
      const uint32_t k = i + u * kBinThreads + threadIdx.x;
      const int64_t row = RowOf(run, raw[u]) - run.first_row;
      const bool valid = k < end && row >= 0 && row < run.rows;
      bins.Add(valid ? static_cast<int>(row) : 0, ToCompute(value[u]), valid);
    }
  }
  bins.ForEach([&](int bin, C total) {
    if (s.chunks == 1) EmitBin<kOp, T>(run, o, static_cast<uint32_t>(b * run.rows + bin), total);
    else static_cast<C*>(run.partials)[(slice * s.chunks + chunk) * s.bins + bin] = total;
  });
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
  return __ldg(run.keys + place) >> kBinBits & s.stretches;
}

// More rows: a block a chunk of the updates in the order of their stretch, run.order holding their elements.
template <Reduction kOp, class T>
__global__ void __launch_bounds__(kBinThreads)
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
  BlockBins<kOp, C, false> bins(shared_bytes, static_cast<int>(kBins));
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
    for (uint32_t i = begin; i < end; i += kBinThreads * kBinAhead) {
      uint32_t key[kBinAhead], value[kBinAhead];
#pragma unroll
      for (int u = 0; u < kBinAhead; ++u) {
        const uint32_t k = i + u * kBinThreads + threadIdx.x;
        key[u] = run.dropped, value[u] = 0;
        if (k < end) key[u] = run.keys[k], value[u] = run.order[k];
      }
#pragma unroll
      for (int u = 0; u < kBinAhead; ++u) {
        bins.Add(key[u] % kBins, ToCompute(*reinterpret_cast<const T*>(&value[u])), key[u] < run.dropped);
      }
    }
    const bool head = begin == chunk_begin && begin > 0 && StretchAt(run, s, begin - 1) == stretch;
    const bool tail = end == chunk_end && end < run.positions && StretchAt(run, s, end) == stretch;
    bins.ForEach([&](int bin, C total) {
      if (head || tail) static_cast<C*>(run.partials)[(2 * static_cast<int64_t>(chunk) + !head) * kBins + bin] = total;
      else EmitBin<kOp, T>(run, 0, static_cast<uint32_t>(stretch * kBins + bin), total);
    });
    begin = end;
  }
}

// Adds up the parts of a stretch that chunks cut: two blocks a chunk, for the stretch that begins in it.
template <Reduction kOp, class T>
__global__ void __launch_bounds__(1024)
BinStretches(const __grid_constant__ IndexRun run, const __grid_constant__ BinShape s) {
  using C = Compute<T>;
  const uint32_t chunk = blockIdx.x / 2, begin = chunk * s.chunk, end = begin + s.chunk;
  if (end >= run.positions) return;
  const uint32_t stretch = StretchAt(run, s, end - 1);
  if (StretchAt(run, s, end) != stretch) return;
  if (begin > 0 && StretchAt(run, s, begin - 1) == stretch) return;  // began earlier
  uint32_t last = chunk + 1, step = 1;
  while (last + step < s.chunks && StretchAt(run, s, (last + step) * s.chunk) == stretch) last += step, step *= 2;
  for (; step; step /= 2) {
    if (last + step < s.chunks && StretchAt(run, s, (last + step) * s.chunk) == stretch) last += step;
  }
  const int64_t bin = blockIdx.x % 2 * 1024 + threadIdx.x;
  const C* const parts = static_cast<const C*>(run.partials) + bin;
  C total = parts[(2 * static_cast<int64_t>(chunk) + 1) * kBins];
#pragma unroll 8
  for (uint32_t c = chunk + 1; c <= last; ++c) total = Combined<kOp>(total, parts[2 * static_cast<int64_t>(c) * kBins]);
  EmitBin<kOp, T>(run, 0, static_cast<uint32_t>(stretch * kBins + bin), total);
}

template <Reduction kOp, class T, bool kFew>
cudaError_t LaunchBinSlices(const IndexRun& run, const BinShape& s, cudaStream_t stream) {
  constexpr int kMost = kFew ? kFewBins : static_cast<int>(kBins);
  static std::atomic<bool> done[kMaxDevices];
  cudaError_t error = OncePerDevice(done, CurrentDevice().ordinal, [] {
    return cudaFuncSetAttribute(BinSlices<kOp, T, kFew>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                BlockBins<kOp, Compute<T>, kFew>::Bytes(kMost));
  });
  if (error != cudaSuccess) return error;
  const int bytes = BlockBins<kOp, Compute<T>, kFew>::Bytes(s.bins);
  error = Launch(BinSlices<kOp, T, kFew>, {s.slices * s.chunks, 1, kBinThreads, bytes}, stream, run, s);
  if (error != cudaSuccess || s.chunks == 1) return error;
  return Launch(BinParts<kOp, T>, {s.slices * ((s.bins + kWarp - 1) / kWarp), 1, 1024}, stream, run, s);
}

// Up to kBins rows, or updates that SortUpdates has brought in the order of their keys' leading bits.
template <Reduction kOp, class T>
cudaError_t LaunchNarrow(const IndexRun& run, bool fills, cudaStream_t stream) {
  BinShape s;
  if (!run.keys) {
    s.slices = run.batch * run.outer;
    s.chunk = static_cast<uint32_t>(BinChunkOf(run.positions * run.outer));
    s.chunks = (run.count + s.chunk - 1) / s.chunk;
    s.bins = static_cast<int>(run.rows);
    if (run.rows <= kFewBins) return LaunchBinSlices<kOp, T, true>(run, s, stream);
    return LaunchBinSlices<kOp, T, false>(run, s, stream);
  }
  s.chunk = static_cast<uint32_t>(BinChunkOf(run.positions));
  s.chunks = (run.positions + s.chunk - 1) / s.chunk;
  s.stretches = (1u << (BitsFor(run.dropped) - kBinBits)) - 1;
  s.fill_after = s.chunks;
  int64_t blocks = s.chunks;
  if (fills) {
    s.fill = FillShapeOf(run.dropped, 1, 1, sizeof(T));
    blocks += s.fill.blocks;
  }
  constexpr int kBytes = BlockBins<kOp, Compute<T>, false>::Bytes(kBins);
  static std::atomic<bool> done[kMaxDevices];
  cudaError_t error = OncePerDevice(done, CurrentDevice().ordinal, [] {
    return cudaFuncSetAttribute(BinSorted<kOp, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  });
  if (error != cudaSuccess) return error;
  error = Launch(BinSorted<kOp, T>, {blocks, 1, kBinThreads, kBytes}, stream, run, s);
  if (error != cudaSuccess || s.chunks == 1) return error;
  return Launch(BinStretches<kOp, T>, {2 * int64_t{s.chunks}, 1, 1024}, stream, run, s);
}

}  // namespace jaxkern
