// The segmented reduction of the sorted and sort plans for rows of a few elements, of which a warp's loads
// would touch a line each if a thread walked its own stretch of them. A block brings a tile of keys and rows
// to shared memory; a thread walks kStretch places of it in one column and writes the runs that begin and
// end there; a segmented scan over the threads adds up those that do not, and ReduceFixup those that a
// tile's edge cuts, short or long.
//
// Untouched rows of the segment operations: the thread that sees the gap between two keys writes it if it
// is short; gaps of more than kGap rows are found by bisection, by blocks of their own.
#pragma once

#include "index_add_reduce.cuh"

namespace jaxkern {

constexpr int kNarrowThreads = 256;
constexpr uint32_t kGap = 32, kBeforeAll = UINT32_MAX;

// As KeyOf, but kBeforeAll for an index below zero, so that the gap before the first row can be seen.
__device__ __forceinline__ uint32_t OrderedKey(const IndexRun& run, RawIndex raw, uint32_t place) {
  if (run.plain && run.batch == 1 && !run.wrap) {
    const int32_t row = static_cast<int32_t>(raw.low);
    return row < 0 ? kBeforeAll : min(static_cast<uint32_t>(row), run.dropped);
  }
  if (run.batch == 1 && RowOf(run, raw) < run.first_row) return kBeforeAll;
  return KeyOf(run, raw, place);
}

__device__ __forceinline__ uint32_t OrderedKeyAt(const IndexRun& run, uint32_t place) {
  return run.keys ? __ldg(run.keys + place) : OrderedKey(run, LoadIndex(run, place), place);
}

// Clears the bits of rows of a tile that lie in gaps of more than kGap. Such a gap has the first row of each
// word of bits that it reaches into, or that of the next word.
__device__ inline void MarkAllButGaps(const IndexRun& run, uint32_t first, int rows, uint32_t* marks, uint32_t* room) {
  static_assert(kGap == 32, "rows of a word");
  for (int w = threadIdx.x; w < kFillRows / 32; w += blockDim.x) marks[w] = ~0u;
  if (threadIdx.x == 0) room[0] = LowerBound(run, 0, run.positions, first);
  if (threadIdx.x == kWarp) room[1] = LowerBound(run, 0, run.positions, first + rows - 1);
  __syncthreads();
  for (int t = threadIdx.x; t < 2 * ((rows + 31) / 32); t += blockDim.x) {
    const uint32_t word = first + t / 2 * 32, row = word + t % 2 * 32;
    if (row >= run.dropped) continue;
    const bool inside = row < first + rows;
    const uint32_t low = LowerBound(run, room[inside ? 0 : 1], inside ? room[1] : run.positions, row);
    const uint32_t after = low < run.positions ? OrderedKeyAt(run, low) : run.dropped;
    const uint32_t before = low > 0 ? OrderedKeyAt(run, low - 1) + 1 : 0;  // the first row of the gap
    if (after <= before || after - before <= kGap) continue;
    const uint32_t from = max(before, word), to = min(after, word + 32);
    if (from >= to) continue;
    const uint32_t mask = (to - from == 32 ? ~0u : (1u << (to - from)) - 1) << (from - word);
    atomicAnd(&marks[t / 2], ~mask);
  }
}

template <Reduction kOp, class T>
__global__ void __launch_bounds__(kNarrowThreads)
ReduceNarrow(const __grid_constant__ IndexRun run, const __grid_constant__ ReduceShape s) {
  using C = Compute<T>;
  constexpr int kQ = NarrowStretch(sizeof(T)), kHeld = kNarrowThreads * kQ;
  // Both padded, so that threads a stretch apart find theirs in different banks.
  __shared__ uint32_t room[kHeld + kHeld / kQ + 4];
  __shared__ C values[kHeld + kHeld / kQ];
  const auto keys = [&](int i) -> uint32_t& { return room[i + 1 + (i + 1) / kQ]; };  // of place i of the tile, from -1 on
  __shared__ C sums[kNarrowThreads];
  __shared__ C warp_sum[kNarrowThreads / kWarp];
  __shared__ bool warp_flag[kNarrowThreads / kWarp];
  const int width = static_cast<int>(run.inner);
  if (blockIdx.x < s.fill.blocks) {
    uint32_t* const ends = room + kFillRows / 32;
    FillTile<kOp, T, 1>(run, s.fill, width, blockIdx.x, room, [&](uint32_t first, int rows, uint32_t* marks) {
      if (s.fills_gaps) MarkAllButGaps(run, first, rows, marks, ends);
      else MarkTouched(run, first, rows, marks, ends);
    });
    return;
  }
  const int64_t block = blockIdx.x - s.fill.blocks;
  const int64_t o = s.by_chunks.Div(block);
  const uint32_t tile = static_cast<uint32_t>(block - o * s.chunks), begin = tile * s.chunk;
  const int held = static_cast<int>(min(s.chunk, run.positions - begin)), elements = held * width;
  const T* const source = static_cast<const T*>(run.source) + o * run.source_stride * run.inner;
  T* const out = static_cast<T*>(run.out) + o * run.out_stride * run.inner;

  // The tile's rows, eight loads at a time; without an order they are one stretch of memory.
  const bool contiguous = !run.order && !run.source_extra;
  const T* const stretch = source + static_cast<int64_t>(begin) * width;
  for (int base = threadIdx.x; base < elements; base += 8 * kNarrowThreads) {
    T v[8];
    if (contiguous) {
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        if (base + u * kNarrowThreads < elements) v[u] = stretch[base + u * kNarrowThreads];
      }
    } else {
      int64_t row[8];
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        const int e = base + u * kNarrowThreads;
        const uint32_t place = begin + s.by_vectors.Div(static_cast<uint32_t>(e));
        if (e < elements) row[u] = run.order ? __ldg(run.order + place) : run.SourceRow(place);
      }
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        const int e = base + u * kNarrowThreads;
        if (e < elements) v[u] = source[row[u] * width + (e - s.by_vectors.Div(static_cast<uint32_t>(e)) * width)];
      }
    }
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      const int e = base + u * kNarrowThreads;
      if (e < elements) values[e + s.by_vectors.Div(static_cast<uint32_t>(e)) / kQ] = ToCompute(v[u]);
    }
  }
  for (int base = threadIdx.x; base < held; base += 8 * kNarrowThreads) {
    RawIndex raw[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      const int i = base + u * kNarrowThreads;
      raw[u] = {};
      if (i < held) raw[u] = run.keys ? RawIndex{__ldg(run.keys + begin + i), 0} : LoadIndex(run, begin + i);
    }
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      const int i = base + u * kNarrowThreads;
      if (i < held) keys(i) = run.keys ? raw[u].low : OrderedKey(run, raw[u], begin + i);
    }
  }
  if (threadIdx.x == 0) keys(-1) = begin > 0 ? OrderedKeyAt(run, begin - 1) : kBeforeAll;
  if (threadIdx.x == 1) {
    // Behind the last update: a key that no run has, `dropped` so that the gap before it is seen.
    keys(held) = begin + held < run.positions ? OrderedKeyAt(run, begin + held) : run.dropped;
  }
  __syncthreads();

  const int stretches = s.chunk / kQ;  // a column; a thread each
  const int column = threadIdx.x / stretches, j = threadIdx.x - column * stretches;
  const int from = j * kQ, to = min(from + kQ, held);
  const bool active = column < width && from < to;
  const C alpha = Alpha<C>(run);
  const auto write = [&](uint32_t key, C total) {
    T* const at = out + run.OutRow(key) * width + column;
    const C x = run.reads_out ? ToCompute(*at) : C(0);
    *at = FromCompute<T>(Finished<kOp>(total, alpha, run.reads_out, x));
  };
  const auto fill = [&](uint32_t after, uint32_t before) {  // the rows between two keys
    const uint32_t first = after + 1;
    if (!s.fills_gaps || before == kBeforeAll || before <= first || before - first > kGap) return;
    for (uint32_t key = first; key < before; ++key) {
      out[run.OutRow(key) * width + column] = FromCompute<T>(Identity<kOp, C>());
    }
  };

  // The stretch's runs: those that end in it, but for the first if it came in, are written.
  C total = Identity<kOp, C>(), head = total;
  bool comes_in = false, single = true;
  uint32_t current = run.dropped;
  if (active) {
    current = keys(from);
    comes_in = keys(from - 1) == current && current < run.dropped;
    if (!comes_in) fill(keys(from - 1), current);
    for (int i = from; i < to; ++i) {
      const uint32_t key = keys(i);
      if (key != current) {
        if (single && comes_in) head = total;
        else if (current < run.dropped) write(current, total);
        fill(current, key);
        single = false;
        current = key;
        total = Identity<kOp, C>();
      }
      if (key < run.dropped) total = Combined<kOp>(total, values[i * width + column + i / kQ]);
    }
    if (begin + to == run.positions) fill(current, run.dropped);
  }
  // The sum of the last run's part up to and with this stretch, from where the run or the column begins.
  const bool opens = j == 0 || !(single && comes_in);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  C sum = total;
  bool flag = opens || !active;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const C other = __shfl_up_sync(~0u, sum, step);
    const bool other_flag = __shfl_up_sync(~0u, flag, step);
    if (lane >= step) {
      if (!flag) sum = Combined<kOp>(other, sum);
      flag |= other_flag;
    }
  }
  if (lane == kWarp - 1) warp_sum[warp] = sum, warp_flag[warp] = flag;
  __syncthreads();
  if (!flag) {
    C before = Identity<kOp, C>();
    int w = warp - 1;
    while (w > 0 && !warp_flag[w]) --w;
    for (; w < warp; ++w) before = Combined<kOp>(before, warp_sum[max(w, 0)]);
    sum = Combined<kOp>(before, sum);
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (!active) return;
  const bool tile_comes_in = begin > 0 && keys(-1) == keys(0);
  C* const slots = static_cast<C*>(run.partials) + (o * s.chunks + tile) * 2 * run.inner + column;
  const auto close = [&](uint32_t key, C all) {  // of a run that ends in this stretch
    if (tile_comes_in && key == keys(0)) slots[0] = all;
    else write(key, all);
  };
  if (comes_in && !single) close(keys(from), j > 0 ? Combined<kOp>(sums[threadIdx.x - 1], head) : head);
  if (current >= run.dropped) return;
  if (keys(to) != current) {  // ends with the stretch
    if (single && comes_in) close(current, sum);
    else write(current, total);
  } else if (to == held) {  // goes on in the next tile
    slots[tile_comes_in && current == keys(0) ? 0 : run.inner] = sum;
  }
}

// Runs the reduction over run.keys and run.order, or over ascending indices.
template <Reduction kOp, class T>
cudaError_t LaunchNarrowReduce(const IndexRun& run, bool fills, cudaStream_t stream) {
  ReduceShape s;
  s.vectors = run.inner;
  s.chunk = static_cast<uint32_t>(NarrowTileOf(run.inner, sizeof(T)));
  s.chunks = (run.positions + s.chunk - 1) / s.chunk;
  s.by_vectors = Divider(run.inner);
  s.by_chunks = Divider(s.chunks);
  if (fills) {
    s.fills_gaps = run.keys || run.batch == 1;
    s.fill = FillShapeOf(run.dropped, run.outer, run.inner, sizeof(T));
  }
  const int64_t blocks = s.fill.blocks + run.outer * s.chunks;
  cudaError_t error = Launch(ReduceNarrow<kOp, T>, {blocks, 1, kNarrowThreads}, stream, run, s);
  if (error != cudaSuccess || s.chunks == 1) return error;
  return LaunchFixup<kOp, T>(run, s, stream);
}

}  // namespace jaxkern
