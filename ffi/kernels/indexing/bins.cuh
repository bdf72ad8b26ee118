// Reduction of rows of one element of up to 4 bytes with many updates each (algorithm `narrow`): bins in shared memory
// accumulate the sums. Floats are not added by atomics: a bin belongs to one thread or warp at a time.
//
//     few updates        BinWindows: each block owns a window of the rows, reads all indices and selects its own
//     few rows           BinSlices: every thread has its own bins
//     up to kBins        BinSlices: every warp has its own bins. Updates of lanes that target the same bin are first
//                        summed across the warp
//     up to WIDE_BINS    BinSlices: one set of bins per block, to which its warps add in turn
//     more               BinSorted: a radix sort (sort.cuh) has grouped updates by the leading bits of their keys into
//                        spans; a block takes one span after the other
//
// The kernels read run.index and run.source (BinSorted: run.pairs) and write run.out, or partial sums to run.partials.
// Each block takes a chunk of the updates. BinParts (BinSpans) adds up the partial sums of the chunks of a slice
// (of a span) in a fixed order. Each index and element is read once, except by BinWindows, whose blocks read all
// indices from L2. An untouched bin of a float sum is -0, the identity of addition, so index_add can skip its row.
//
// bin_accumulators.cuh explains the template parameters.
#pragma once

#include "indexing/bin_accumulators.cuh"

namespace jaxkern {

constexpr int kPrefetched = 2048;                      // in updates
constexpr int kWindowThreads = 768, kWindowEach = 16;  // kWindowEach: indices in flight per thread

struct BinShape {
  uint32_t chunk, chunks;  // updates of a chunk, chunks of a slice
  int64_t slices;          // batch * outer
  int bins;                // per slice
  int copies;              // sets of bins of a block: one per warp, or 1
  uint32_t spans;          // mask of the leading key bits that the sort has ordered
  int64_t fill_after;
  FillShape fill;
};
static_assert(sizeof(BinShape) == 104);

// Up to WIDE_BINS rows: one block per chunk of a slice reads index and source unsorted.
template <Reduction kOp, class T, bool kFew> __global__ void __launch_bounds__(kBinThreads)
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
  // A block of few warps has too few loads in flight for the latency of memory, but enough for L2. In each turn each
  // thread therefore prefetches a line of the updates kPrefetched ahead, and before the first turn the initial ones.
  const char* const indices = static_cast<const char*>(run.index) + int64_t{place} * run.index_bytes;
  const auto prefetch = [&](uint32_t from, uint32_t count, uint32_t thread, uint32_t threads) {
    const uint32_t to = min(from + count, end);
    for (uint32_t k = from + thread * 32; k < to; k += threads * 32) {  // 32 indices are one or two lines
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

// Few updates: one block per window of the rows (x) and slice (y). Every thread has its own bins, so there are no
// conflicts. `vectors`: number of vectors of four plain indices per slice; 0 if indices are not plain or not aligned.
template <Reduction kOp, class T> __global__ void __launch_bounds__(kWindowThreads)
    BinWindows(const __grid_constant__ IndexRun run, const uint32_t vectors) {
  using C = Compute<T>;
  constexpr int kVectors = kWindowEach / 4, kFetched = 2;  // index vectors, updates loaded at once
  static_assert((kBinWindow & (kBinWindow - 1)) == 0 && kWindowEach <= 32);
  struct alignas(16) Four {
    C v[4];
  };
  __shared__ Four sums[kBinWindow][kWindowThreads / 4];
  uint32_t thread = threadIdx.x;
  asm("" : "+r"(thread));  // pinned in a register instead of read again at every use
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
  // Start fetching source into L2: the blocks together prefetch all of it, one line per thread, before a block needs
  // its few updates.
  const T* source = static_cast<const T*>(run.source) + o * run.source_stride + run.SourceRow(place);
  asm("" : "+l"(index), "+l"(source));  // pinned, too
  const uint32_t line = (thread * gridDim.x + blockIdx.x) * 32;
  if (line < run.count) Prefetch(reinterpret_cast<const char*>(source + line));
  T* const out = static_cast<T*>(run.out) + o * run.out_stride + run.OutRow(b * run.rows) + first;
  const uint32_t negative = run.wrap ? run.rows : 0;  // added to a negative index
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
    uint32_t mask = 0;  // bit 31 - i: index i is in the window
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
        row[u] = __ldg(index + k);  // read again, from L1
        v[u] = __ldg(source + k);
      }
#pragma unroll
      for (int u = 0; u < kFetched; ++u) {
        if (found[u]) add(row[u] + (static_cast<int32_t>(row[u]) < 0 ? negative : 0), v[u]);
      }
    }
  }
  // The indices after the last vector; all of them, if they are not plain or not aligned.
#pragma unroll 1
  for (uint32_t k = 4 * vectors + thread; k < run.count; k += threads) {
    const uint32_t row = RowKey(run, LoadIndex(run, int64_t{place} + k));
    if (row < run.rows && row / kBinWindow == blockIdx.x) add(row, __ldg(source + k));
  }
  __syncthreads();
  // One warp per bin. A lane has at most a few updates of the bin; summing in double leaves little more than the final
  // rounding.
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

// Adds up the chunks of a slice: one block per 32 bins, each warp takes every 32nd chunk.
template <Reduction kOp, class T> __global__ void __launch_bounds__(1024)
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

__device__ __forceinline__ uint32_t SpanAt(const IndexRun& run, const BinShape& s, uint32_t place) {
  return __ldg(&run.pairs[place].x) >> kBinBits & s.spans;
}

// More rows: one block per chunk of the updates, which are sorted by span. Blocks from fill_after on fill untouched
// rows.
template <Reduction kOp, class T> __global__ void __launch_bounds__(kBinThreads, 3)
    BinSorted(const __grid_constant__ IndexRun run, const __grid_constant__ BinShape s) {
  using C = Compute<T>;
  if (blockIdx.x >= s.fill_after) {
    __shared__ uint32_t bits[kFillRows / 32];
    static_assert(kBins % kFillRows == 0, "a tile is in one span, whose rows are all written or none");
    FillTile<kOp, T, 1>(run, s.fill, 1, blockIdx.x - s.fill_after, bits, [&](uint32_t first, int, uint32_t* marks) {
      uint32_t low = 0, high = run.positions;
      const uint32_t span = first >> kBinBits;
      while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (SpanAt(run, s, middle) < span) low = middle + 1;
        else high = middle;
      }
      const bool touched = low < run.positions && SpanAt(run, s, low) == span;
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
    const uint32_t span = SpanAt(run, s, begin);
    // Find the end of the span, 256 probes at a time.
    uint32_t end = chunk_end;
    if (SpanAt(run, s, chunk_end - 1) != span) {
      uint32_t low = begin, high = chunk_end - 1;
      while (high - low > 1) {
        const uint32_t step = (high - low + kBinThreads) / (kBinThreads + 1), probe = low + (threadIdx.x + 1) * step;
        const int inside = __syncthreads_count(probe < high && SpanAt(run, s, probe) == span);
        low += inside * step;
        high = min(low + step, high);
      }
      end = high;
    }
    bins.Clear();
    __syncthreads();
    const auto load = [&](uint32_t k) { return __ldg(run.pairs + k); };
    bins.AddAll(
        begin, end, [](uint32_t, uint32_t) {}, load,
        [&](const uint2& update, int* bin, C* v) {
          *bin = update.x < run.dropped ? static_cast<int>(update.x % kBins) : -1;
          *v = ToCompute(*reinterpret_cast<const T*>(&update.y));
        });
    const bool head = begin == chunk_begin && begin > 0 && SpanAt(run, s, begin - 1) == span;
    const bool tail = end == chunk_end && end < run.positions && SpanAt(run, s, end) == span;
    bins.ForEach([&](int bin, int step, const auto& totals) {
      if (head || tail) {
        C* const parts = static_cast<C*>(run.partials) + (2 * static_cast<int64_t>(chunk) + !head) * kBins;
        for (const C& total : totals) {
          parts[bin] = total;
          bin += step;
        }
      } else {
        EmitBins<kOp, T>(run, 0, static_cast<uint32_t>(span * kBins + bin), step, run.dropped, totals);
      }
    });
    begin = end;
  }
}

// Adds up the partial sums of a span that crosses chunks: one block per chunk, for the span that begins in it.
constexpr int kSpanThreads = 512;
template <Reduction kOp, class T> __global__ void __launch_bounds__(kSpanThreads)
    BinSpans(const __grid_constant__ IndexRun run, const __grid_constant__ BinShape s) {
  using C = Compute<T>;
  const uint32_t chunk = blockIdx.x, begin = chunk * s.chunk, end = begin + s.chunk;
  if (end >= run.positions) return;
  const uint32_t span = SpanAt(run, s, end - 1);
  if (SpanAt(run, s, end) != span) return;
  if (begin > 0 && SpanAt(run, s, begin - 1) == span) return;  // begins in an earlier chunk
  uint32_t last = chunk + 1, step = 1;
  while (last + step < s.chunks && SpanAt(run, s, (last + step) * s.chunk) == span) last += step, step *= 2;
  for (; step; step /= 2) {
    if (last + step < s.chunks && SpanAt(run, s, (last + step) * s.chunk) == span) last += step;
  }
  constexpr int kEach = kBins / kSpanThreads;
  const C* parts = static_cast<const C*>(run.partials) + (2 * int64_t{chunk} + 1) * kBins + threadIdx.x;
  C total[kEach];
#pragma unroll
  for (int u = 0; u < kEach; ++u) total[u] = parts[u * kSpanThreads];
  parts += kBins;
#pragma unroll 4
  for (uint32_t c = chunk + 1; c <= last; ++c, parts += 2 * kBins) {
#pragma unroll
    for (int u = 0; u < kEach; ++u) total[u] = Combined<kOp>(total[u], parts[u * kSpanThreads]);
  }
  EmitBins<kOp, T>(run, 0, static_cast<uint32_t>(span * kBins + threadIdx.x), kSpanThreads, run.dropped, total);
}

}  // namespace jaxkern
