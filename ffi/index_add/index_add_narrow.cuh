// The narrow plan: rows of one element of up to 4 bytes, many updates to each. Bins in shared memory take the
// sums. Floats are not added by atomics: a bin belongs to one warp at a time.
//
//     few rows       every thread has bins of its own; and where updates are few, a block for so many rows each
//     up to kBins    every warp has. The updates of lanes that meet in a bin are first added up across the warp
//     up to kWideBins    likewise, but there is room for one such warp a block; the others clear and write the bins
//     more           the sort has brought updates with equal leading bits of the key together; a block
//                    takes one stretch after the other of its chunk of them, as above
//
// A chunk of updates is a block's; the sums of the parts of a slice (or of a stretch that chunks cut) are added
// in order by BinParts (or BinStretches). Untouched bins of a float sum hold -0, which changes no sum, so
// that index_add leaves their rows alone.
#pragma once

#include <algorithm>

#include "index_add.cuh"

namespace jaxkern {

constexpr int kBinThreads = 256, kBinWarps = kBinThreads / kWarp, kBinAhead = 8, kFewBins = 32;
constexpr int kWideThreads = 128, kPrefetched = 2048;  // updates

struct BinShape {
  uint32_t chunk = 0, chunks = 0;  // of a slice
  int64_t slices = 1;              // batch * outer
  int bins = 0;                    // of a slice, or of a window: a block's own rows of it
  uint32_t windows = 1;            // of a slice
  int copies = kBinWarps;          // warps with bins of their own
  uint32_t stretches = 0;          // a mask: the leading bits that the sort has looked at
  int64_t fill_after = 0;
  FillShape fill;
};

// What a bin holds before anything is added.
template <Reduction kOp, class C> __device__ __forceinline__ C Empty() {
  if constexpr (kOp == Reduction::kSum && std::is_same_v<C, float>) return -0.0f;
  else return Identity<kOp, C>();
}

// Writes the bins of keys first, first + step, ... that are below `end`; what is there is read for all of them at once.
template <Reduction kOp, class T, int N>
__device__ __forceinline__ void EmitBins(const IndexRun& run, int64_t o, uint32_t first, uint32_t step, uint32_t end,
                                         const Compute<T> (&total)[N]) {
  using C = Compute<T>;
  T* const out = static_cast<T*>(run.out) + o * run.out_stride;
  end = min(end, run.dropped);
  T* at[N];
  C x[N];
#pragma unroll
  for (int u = 0; u < N; ++u) {
    const uint32_t key = first + u * step;
    bool writes = key < end;
    if constexpr (kOp == Reduction::kSum && kIsFloat<C>) {
      writes = writes && !(run.reads_out && __float_as_uint(total[u]) == 0x80000000u);
    }
    at[u] = writes ? out + run.OutRow(key) : nullptr;
    x[u] = at[u] && run.reads_out ? ToCompute(*at[u]) : C(0);
  }
  const C alpha = Alpha<C>(run);
#pragma unroll
  for (int u = 0; u < N; ++u) {
    C sum = total[u];
    if constexpr (kOp == Reduction::kSum && kIsFloat<C>) sum += 0.0f;
    if (at[u]) *at[u] = FromCompute<T>(Finished<kOp>(sum, alpha, run.reads_out, x[u]));
  }
}

template <Reduction kOp, class T>
__device__ __forceinline__ void EmitBin(const IndexRun& run, int64_t o, uint32_t key, Compute<T> total) {
  EmitBins<kOp, T, 1>(run, o, key, 0, run.dropped, {total});
}

// A block's bins: a copy a thread, or one for each of its first warps, and for these a bit a bin, to see who meets
// whom.
template <Reduction kOp, class C, bool kFew> struct BlockBins {
  static constexpr int kTogether = kFew ? 1 : 4;  // bins that a thread hands on at once
  C* sum;
  uint32_t* taken;
  int bins, copies;

  static constexpr int Taken(int bins) { return bins <= kBins ? kBins / 32 : (bins + 31) / 32; }  // words
  static constexpr int Bytes(int bins, int copies) {
    return kFew ? bins * kBinThreads * 4 : copies * (bins + Taken(bins)) * 4;
  }

  __device__ __forceinline__ BlockBins(char* shared, int bins, int copies)
      : sum(reinterpret_cast<C*>(shared)), taken(reinterpret_cast<uint32_t*>(shared) + bins * copies),
        bins(bins), copies(copies) {}

  // Threads that add.
  __device__ __forceinline__ uint32_t Adding() const { return kFew ? kBinThreads : copies * kWarp; }

  __device__ __forceinline__ void Clear() {
    const int all = bins * (kFew ? kBinThreads : copies);
#pragma unroll 4
    for (int i = threadIdx.x; i < all; i += blockDim.x) sum[i] = Empty<kOp, C>();
    if (!kFew) {
      for (int i = threadIdx.x; i < copies * Taken(bins); i += blockDim.x) taken[i] = 0;
    }
  }

  // All lanes of a warp come here. A negative bin is none.
  template <int N> __device__ __forceinline__ void Add(const int (&bin)[N], const C (&v)[N]) {
    if constexpr (kFew) {
#pragma unroll
      for (int u = 0; u < N; ++u) {
        C* const mine = sum + bin[u] * kBinThreads + threadIdx.x;
        if (bin[u] >= 0) *mine = Combined<kOp>(*mine, v[u]);
      }
    } else {
      const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
      C* const mine = sum + warp * bins;
      uint32_t* const mine_taken = taken + warp * Taken(bins);
      // All but one of those that meet see that somebody was there before them. Not __match_any_sync, which is slow.
      // Nothing here waits for an answer: the next step's question is asked behind it.
      uint32_t there[N];
#pragma unroll
      for (int u = 0; u < N; ++u) {
        const uint32_t bit = bin[u] >= 0 ? 1u << (bin[u] & 31) : 0;
        const int word = bin[u] >= 0 ? bin[u] >> 5 : lane;
        there[u] = atomicOr(&mine_taken[word], bit) & bit;
        __syncwarp();
        if (bins <= kBins) {
#pragma unroll
          for (int i = 0; i < kBins / 32; i += kWarp) mine_taken[i + lane] = 0;
        } else {
          atomicAnd(&mine_taken[word], ~bit);
        }
        __syncwarp();
      }
#pragma unroll
      for (int u = 0; u < N; ++u) {
        bool valid = bin[u] >= 0;
        uint32_t met = __ballot_sync(~0u, there[u] != 0);
        while (met) {  // one bin a turn
          const int leader = __ffs(met) - 1;
          const int bin_met = __shfl_sync(~0u, bin[u], leader);
          const bool same = valid && bin[u] == bin_met;
          met &= ~__ballot_sync(~0u, same);
          const C all =
              ReduceLanes<kWarp>(same ? v[u] : Empty<kOp, C>(), [](C a, C b) { return Combined<kOp>(a, b); });
          if (lane == leader) mine[bin_met] = Combined<kOp>(mine[bin_met], all);
          if (same) valid = false;
        }
        if (valid) mine[bin[u]] = Combined<kOp>(mine[bin[u]], v[u]);
        __syncwarp();
      }
    }
  }

  // Adds updates [begin, end), of which load(k) brings number k and take(loaded, &bin, &v) says what it is. The next
  // ones are under way while some are added. turn(k, n): the warp has come to updates [k, k + n).
  template <class Turn, class Load, class Take>
  __device__ __forceinline__ void AddAll(uint32_t begin, uint32_t end, Turn turn, Load load, Take take) {
    const uint32_t adding = Adding(), step = adding * kBinAhead;
    if (threadIdx.x >= adding) return;
    decltype(load(begin)) next[kBinAhead];
#pragma unroll
    for (int u = 0; u < kBinAhead; ++u) {
      const uint32_t k = begin + u * adding + threadIdx.x;
      next[u] = {};
      if (k < end) next[u] = load(k);
    }
    for (uint32_t i = begin; i < end; i += step) {
      turn(i, step);
      int bin[kBinAhead];
      C v[kBinAhead];
#pragma unroll
      for (int u = 0; u < kBinAhead; ++u) {
        take(next[u], &bin[u], &v[u]);
        if (i + u * adding + threadIdx.x >= end) bin[u] = -1;
      }
#pragma unroll
      for (int u = 0; u < kBinAhead; ++u) {
        const uint32_t k = i + step + u * adding + threadIdx.x;
        if (k < end) next[u] = load(k);
      }
      Add(bin, v);
    }
  }

  // emit(bin, step, sums over the copies of bins bin, bin + step, ...), between two barriers.
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
        const C totals[1] = {ReduceLanes<kWarp>(total, [](C a, C b) { return Combined<kOp>(a, b); })};
        if (lane == 0) emit(bin, 0, totals);
      }
    } else {
      const int threads = blockDim.x;
      for (int bin = threadIdx.x; bin < bins; bin += threads * kTogether) {
        C totals[kTogether];
#pragma unroll
        for (int u = 0; u < kTogether; ++u) totals[u] = bin + u * threads < bins ? sum[bin + u * threads] : C(0);
        for (int w = 1; w < copies; ++w) {
#pragma unroll
          for (int u = 0; u < kTogether; ++u) {
            if (bin + u * threads < bins) totals[u] = Combined<kOp>(totals[u], sum[w * bins + bin + u * threads]);
          }
        }
        emit(bin, threads, totals);
      }
    }
    __syncthreads();
  }
};

// Has the line that holds an address brought to L2.
__device__ __forceinline__ void Prefetch(const char* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Up to kWideBins rows: a block a chunk of a slice, straight from index and source.
template <Reduction kOp, class T, bool kFew>
__global__ void __launch_bounds__(kBinThreads)
BinSlices(const __grid_constant__ IndexRun run, const __grid_constant__ BinShape s) {
  using C = Compute<T>;
  extern __shared__ __align__(16) char shared_bytes[];
  BlockBins<kOp, C, kFew> bins(shared_bytes, s.bins, s.copies);
  const uint32_t windowed = kFew ? blockIdx.x / s.windows : blockIdx.x;
  const uint32_t first_row = kFew ? blockIdx.x % s.windows * s.bins : 0;
  const int64_t slice = windowed / s.chunks;
  const uint32_t chunk = windowed % s.chunks;
  const int64_t b = slice / run.outer, o = slice % run.outer;
  const uint32_t begin = chunk * s.chunk, end = min(begin + s.chunk, run.count);
  const uint32_t place = static_cast<uint32_t>(b * run.count);
  const T* const source = static_cast<const T*>(run.source) + o * run.source_stride + run.SourceRow(place);
  // One warp has too few loads under way for memory, but not for L2: in each turn its lanes ask for a line each of
  // the updates that lie kPrefetched ahead, and the whole block for the first of them.
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
    if (wide) prefetch(k + kPrefetched, n, threadIdx.x, kWarp);
  };
  const auto load = [&](uint32_t k) { return Update{LoadIndex(run, place + k), source[k]}; };
  bins.AddAll(begin, end, turn, load, [&](const Update& update, int* bin, C* v) {
    const uint32_t row = run.plain ? PlainKey(run, update.raw.low) : RowKey(run, update.raw);
    const bool mine = kFew ? row - first_row < static_cast<uint32_t>(s.bins) && row < run.rows : row < run.rows;
    *bin = mine ? static_cast<int>(row - first_row) : -1;
    *v = ToCompute(update.value);
  });
  bins.ForEach([&](int bin, int step, const auto& totals) {
    if (s.chunks == 1) {
      const uint32_t key = static_cast<uint32_t>(b * run.rows);
      EmitBins<kOp, T>(run, o, key + first_row + bin, step, key + min(first_row + s.bins, run.rows), totals);
    } else {
      C* const parts = static_cast<C*>(run.partials) + (slice * s.chunks + chunk) * s.bins;
      for (const C& total : totals) {
        if (bin < s.bins) parts[bin] = total;
        bin += step;
      }
    }
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
  return __ldg(&run.pairs[place].x) >> kBinBits & s.stretches;
}

// More rows: a block a chunk of the updates in the order of their stretch.
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
  BlockBins<kOp, C, false> bins(shared_bytes, static_cast<int>(kBins), kBinWarps);
  static_assert(kBins % (kBinThreads * decltype(bins)::kTogether) == 0);
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
  error = Launch(BinSlices<kOp, T, kFew>, {s.slices * s.chunks * s.windows, 1, threads, bytes}, stream, run, s);
  if (error != cudaSuccess || s.chunks == 1) return error;
  return Launch(BinParts<kOp, T>, {s.slices * ((s.bins + kWarp - 1) / kWarp), 1, 1024}, stream, run, s);
}

// Up to kWideBins rows, or updates that SortUpdates has brought in the order of their keys' leading bits.
template <Reduction kOp, class T>
cudaError_t LaunchNarrow(const IndexRun& run, bool fills, cudaStream_t stream) {
  BinShape s;
  if (!run.pairs) {
    s.slices = run.batch * run.outer;
    s.chunk = static_cast<uint32_t>(BinChunkOf(run.positions * run.outer, run.rows));
    s.chunks = (run.count + s.chunk - 1) / s.chunk;
    s.bins = static_cast<int>(run.rows);
    if (run.rows > kBins) s.copies = 1;
    if (const int64_t window = BinWindowOf(s.slices, run.rows, run.count)) {
      s.chunk = run.count;
      s.chunks = 1;
      s.bins = static_cast<int>(window);
      s.windows = static_cast<uint32_t>((run.rows + window - 1) / window);
      return LaunchBinSlices<kOp, T, true>(run, s, stream);
    }
    if (run.rows <= kFewBins) return LaunchBinSlices<kOp, T, true>(run, s, stream);
    return LaunchBinSlices<kOp, T, false>(run, s, stream);
  }
  s.chunk = static_cast<uint32_t>(BinChunkOf(run.positions, kBins));
  s.chunks = (run.positions + s.chunk - 1) / s.chunk;
  s.stretches = (1u << (BitsFor(run.dropped) - kBinBits)) - 1;
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
