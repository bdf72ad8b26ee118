// Segment softmax of narrow rows and of short segments, in tiles of shared memory.
//
//     SegmentTiles      computes all runs but long ones, whose Stats it leaves in slots (run.cuh)
//     SegmentRewrite    after SegmentJoin (join.cuh), computes the rows of long runs
//
// Both read run.keys, run.order and the inputs and write run.out. Memory traffic: inputs are read and results written
// once; the rows of long runs are read once more by SegmentRewrite.
//
// A block takes a tile of places and a tile of columns. It owns the runs that begin in the tile and follows them beyond
// its end if needed. It
//
//     reads the keys      finds the places that end a run, as a bit mask per span of places
//     stages the rows     in shared memory, as vectors, converted to the computing type
//     reduces             one thread per span and column computes the Stats of runs, and of the parts of the two
//                         runs that the edges of the span cut; exponentials stay in registers
//     carries over        merges these parts by a segmented scan over spans
//     writes              the results over the data in shared memory, and from there to memory, as vectors
//
// The inner loop has one condition per element: whether a run ends there. A span has an odd length, so that the
// threads of a warp access different banks, and at most 32 places, the bits of a mask.
//
// Dynamic shared memory: Op::kInputs * s.held elements of the computing type; the keys occupy it first. Op:
// SegmentForward or SegmentBackward (ops.cuh).
#pragma once

#include "ops.cuh"
#include "staged.cuh"

namespace jaxkern {

constexpr int TileSpan(int element_bytes) { return element_bytes == 8 ? 15 : 31; }

// Ends of runs in a tile, in shared memory. A place of no segment is a run of its own. kQ: places of a span.
template <int kQ> struct RunEnds {
  uint32_t ends[kTileThreads];   // per span: bit mask of the ends
  uint32_t drops[kTileThreads];  // per span: places of no segment
  uint32_t some[kTileWarps];     // bit mask of the spans with ends

  // Computes the masks from the keys of the tile and of the place after it. A barrier must follow.
  __device__ __forceinline__ void Find(const uint32_t* keys, int spans, uint32_t dropped) {
    const int t = threadIdx.x;
    uint32_t end = 0, drop = 0;
    if (t < spans) {
      uint32_t key = keys[t * kQ];
#pragma unroll
      for (int i = 0; i < kQ; ++i) {
        const uint32_t next = keys[t * kQ + i + 1];
        if (key >= dropped) drop |= 1u << i;
        if (key >= dropped || next != key) end |= 1u << i;
        key = next;
      }
    }
    ends[t] = end;
    drops[t] = drop;
    const uint32_t bits = __ballot_sync(~0u, end != 0);
    if (t % kWarp == 0) some[t / kWarp] = bits;
  }
  // Returns the first end in spans from `span` on, or `none`.
  __device__ __forceinline__ int From(int span, int none) const {
    for (int w = span / kWarp; w < kTileWarps; ++w) {
      const uint32_t bits = w == span / kWarp ? some[w] >> (span % kWarp) << (span % kWarp) : some[w];
      if (bits) {
        const int k = w * kWarp + __ffs(bits) - 1;
        return k * kQ + __ffs(ends[k]) - 1;
      }
    }
    return none;
  }
  // Returns the last end in spans before `span`, or -1.
  __device__ __forceinline__ int Before(int span) const {
    for (int w = (span - 1) / kWarp; w >= 0; --w) {
      const uint32_t bits = some[w] & (span - w * kWarp < kWarp ? (1u << (span - w * kWarp)) - 1 : ~0u);
      if (bits) {
        const int k = w * kWarp + 31 - __clz(bits);
        return k * kQ + 31 - __clz(ends[k]);
      }
    }
    return -1;
  }
};

// Whether the run that continues into the tile at `begin` is long: it also has the place `end`, or already continued
// into the tile before.
__device__ __forceinline__ bool LongHead(const SegmentRun& run, uint32_t begin, uint32_t key) {
  const uint32_t end = begin + run.lookahead;
  return (end < run.positions && run.Key(end) == key) || (begin > run.places && run.Key(begin - run.places - 1) == key);
}

// True if the run that starts in this tile and ends at `end` is long.
__device__ __forceinline__ bool LongTail(const SegmentRun& run, uint32_t end, uint32_t key) {
  return end + run.lookahead < run.positions && run.Key(end + run.lookahead) == key;
}

// Merges the parts of runs that cross spans by a segmented scan over the spans of each column. `carry`, in
// shared memory, has for each span and column the Stat of the run that is open at its end; afterwards it includes
// the parts in preceding spans. A barrier must precede; all threads must call it; it ends with a barrier.
template <class Op>
__device__ __forceinline__ void CarryOver(const TileShape& s, const uint32_t* ends, typename Op::Stat* carry) {
  using Stat = typename Op::Stat;
  __shared__ Stat warp_stat[kTileWarps];
  __shared__ bool warp_flag[kTileWarps];
  // The spans of a column are adjacent threads.
  const int t = threadIdx.x, lane = t % kWarp, warp = t / kWarp;
  const int c = s.by_spans.Div(t), k = t - c * s.spans;
  const bool inside = c < s.columns;
  Stat stat = inside ? carry[k * s.columns + c] : Op::Identity();
  bool flag = !inside || k == 0 || ends[k] != 0;  // nothing is carried in
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const Stat other = Op::ShuffleUp(stat, step);
    const bool other_flag = __shfl_up_sync(~0u, static_cast<int>(flag), step);
    if (lane >= step) {
      if (!flag) stat = Op::Merge(other, stat);
      flag |= other_flag;
    }
  }
  if (lane == kWarp - 1) warp_stat[warp] = stat, warp_flag[warp] = flag;
  __syncthreads();
  if (!flag) {
    int w = warp - 1;
    while (w > 0 && !warp_flag[w]) --w;
    Stat before = warp_stat[w];  // thread 0, and therefore warp 0, has a flag
    for (++w; w < warp; ++w) before = Op::Merge(before, warp_stat[w]);
    stat = Op::Merge(before, stat);
  }
  if (inside) carry[k * s.columns + c] = stat;
  __syncthreads();
}

// One block per tile and column tile. kRows: layout of the rows.
template <class Op, Rows kRows> __global__ void __launch_bounds__(kTileThreads, sizeof(typename Op::C) == 8 ? 2 : 3)
    SegmentTiles(const __grid_constant__ SegmentRun run, const __grid_constant__ TileShape s) {
  using T = typename Op::T;
  using C = typename Op::C;
  using Stat = typename Op::Stat;
  constexpr int kQ = TileSpan(sizeof(T));
  extern __shared__ __align__(16) char shared_bytes[];
  __shared__ RunEnds<kQ> runs;
  __shared__ Stat carry[kTileThreads], totals[kTileThreads];
  const TileBlock b(run, s, blockIdx.x);
  const int t = threadIdx.x, places = run.places, room = run.places + run.lookahead;
  const uint32_t left = run.positions - b.begin;  // places from the tile's first one on

  // Keys of the tile, of the places in its lookahead, and of one place before and after.
  uint32_t* const keys = reinterpret_cast<uint32_t*>(shared_bytes) + 1;
#pragma unroll 8
  for (int i = t; i <= room; i += kTileThreads) {
    keys[i] = i < left ? run.Key(b.begin + i) : UINT32_MAX;
  }
  if (t == 0) keys[-1] = b.begin > 0 ? run.Key(b.begin - 1) : UINT32_MAX;
  __syncthreads();
  runs.Find(keys, s.spans, run.dropped);
  __syncthreads();

  // Runs that cross the edges of the tile, and the places of the block: [low, high), the places of its long runs within
  // the tile and of the runs that it writes; [own_first, own_last), the latter.
  const uint32_t first_key = keys[0], last_key = keys[places - 1];
  const bool comes_in = b.begin > 0 && first_key < run.dropped && keys[-1] == first_key;
  const bool long_head = comes_in && LongHead(run, b.begin, first_key);
  const bool goes_on = last_key < run.dropped && keys[places] == last_key;
  const int first_end = runs.From(0, room);
  const bool passes = comes_in && first_end >= places;                         // one run spans the tile
  const bool open = goes_on && (passes ? long_head : keys[room] == last_key);  // the last run is long
  int high = min(places, static_cast<int>(min(left, run.places)));
  if (goes_on && !open)
    high = min(min(runs.From(places / kQ, room) + 1, room), static_cast<int>(min(left, run.places + run.lookahead)));
  const int own_first = comes_in ? first_end + 1 : 0, own_last = open ? runs.Before(places / kQ) + 1 : high;
  const int low = comes_in && !long_head ? own_first : 0;
  if (low >= high) return;
  __syncthreads();

  C* const images = reinterpret_cast<C*>(shared_bytes);
  C* values[Op::kInputs];
  Staged<T, kRows> staged = StageInputs<T, kRows>(run, s, b, images, low, high, values);
  __syncthreads();

  const int j = s.by_columns.Div(t), c = t - j * s.columns;
  const bool active = j < s.spans && c < b.width && j * kQ < high && (j + 1) * kQ > low;
  const uint32_t ends = active ? runs.ends[j] : 0;
  C kept[kQ];
  Stat head = Op::Identity(), tail = Op::Identity();
  if (active) {
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) values[k] += j * kQ * s.columns + c;
    Op::Reduce(values, s.columns, ends, runs.drops[j], kept, &head, &tail);
    if (!ends) tail = head;
  }
  carry[t] = tail;
  __syncthreads();
  CarryOver<Op>(s, runs.ends, carry);
  if (ends) totals[t] = j > 0 ? Op::Merge(carry[t - s.columns], head) : head;
  __syncthreads();

  if (active) {
    if (long_head && !passes && j == first_end / kQ) {
      run.Slot<Stat>(b.o, b.tile, 0)[b.column + c] = totals[t];
    }
    if (open && j == places / kQ - 1) {
      run.Slot<Stat>(b.o, b.tile, !passes)[b.column + c] = carry[t];
    }
    const int next = runs.From(j + 1, room);  // end of the open run; elsewhere if it is long
    const Stat behind = next < high ? totals[next / kQ * s.columns + c] : Op::Identity();
    Op::Write(values, s.columns, ends, kept, head, ends ? totals[t] : behind, tail, behind);
  }
  __syncthreads();
  if (own_first < own_last) staged.Write(run, s, b, run.Output<T>(b.o), own_first, own_last);
}

// Writes the rows of long runs, from the totals in the slots. A block takes every gridDim-th tile and column tile, at most
// kTileThreads of them. One thread per tile searches for such rows. Most launches have none; the others have them in
// adjacent tiles. kRows: layout of the rows.
template <class Op, Rows kRows> __global__ void __launch_bounds__(kTileThreads, 2)
    SegmentRewrite(const __grid_constant__ SegmentRun run, const __grid_constant__ TileShape s, int64_t tiles) {
  using T = typename Op::T;
  using C = typename Op::C;
  extern __shared__ __align__(16) char shared_bytes[];
  __shared__ typename Op::Final finals[kTileColumns];
  __shared__ int held_keys;
  // Bits per tile: 1, for the run that continues into it, 2, for the run that continues after it, if that is long.
  __shared__ uint8_t parts[kTileThreads];
  const auto tile = [](int i) { return blockIdx.x + static_cast<int64_t>(i) * gridDim.x; };
  const int number = static_cast<int>((tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
  if (threadIdx.x < number) {
    const TileBlock b(run, s, tile(threadIdx.x));
    const uint32_t end = b.begin + run.places;
    const uint32_t held = min(run.places, run.positions - b.begin);
    const uint32_t first_key = run.Key(b.begin), last_key = run.Key(b.begin + held - 1);
    const bool comes_in = b.begin > 0 && first_key < run.dropped && run.Key(b.begin - 1) == first_key;
    const bool long_head = comes_in && LongHead(run, b.begin, first_key);
    const bool goes_on = end < run.positions && last_key < run.dropped && run.Key(end) == last_key;
    const bool passes = comes_in && goes_on && first_key == last_key;
    const bool open = goes_on && !passes && LongTail(run, end, last_key);
    parts[threadIdx.x] = long_head | open << 1;
  }
  __syncthreads();

#pragma unroll 1
  for (int i = 0; i < 2 * number; ++i) {
    const int tail = i % 2;
    if (!(parts[i / 2] >> tail & 1)) continue;
    const TileBlock b(run, s, tile(i / 2));
    const int held = static_cast<int>(min(run.places, run.positions - b.begin));
    // Number of places of the tile that belong to the run.
    if (threadIdx.x == 0) held_keys = 0;
    __syncthreads();
    const uint32_t wanted = run.Key(b.begin + (tail ? held - 1 : 0));
    int count = 0;
#pragma unroll 4
    for (int k = threadIdx.x; k < held; k += kTileThreads) count += run.Key(b.begin + k) == wanted;
    count = ReduceLanes<kWarp>(count, [](int a, int b) { return a + b; });
    if (threadIdx.x % kWarp == 0) atomicAdd(&held_keys, count);
    if (threadIdx.x < b.width) {
      finals[threadIdx.x] = Op::Finish(run.Slot<typename Op::Stat>(b.o, b.tile, tail)[b.column + threadIdx.x]);
    }
    __syncthreads();
    const int low = tail ? held - held_keys : 0, high = tail ? held : held_keys;
    C* const images = reinterpret_cast<C*>(shared_bytes);
    C* values[Op::kInputs];
    Staged<T, kRows> staged = StageInputs<T, kRows>(run, s, b, images, low, high, values);
    __syncthreads();
#pragma unroll 4
    for (int e = low * s.columns + threadIdx.x; e < high * s.columns; e += kTileThreads) {
      const int c = e - s.by_columns.Div(e) * s.columns;
      if (c >= b.width) continue;
      C x[Op::kInputs];
#pragma unroll
      for (int k = 0; k < Op::kInputs; ++k) x[k] = values[k][e];
      values[0][e] = Op::Map(x, finals[c]);
    }
    __syncthreads();
    staged.Write(run, s, b, run.Output<T>(b.o), low, high);
    __syncthreads();
  }
}

}  // namespace jaxkern
