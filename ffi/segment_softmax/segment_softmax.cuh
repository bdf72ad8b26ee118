// The segment softmax and its gradient on CUDA, over positions in the order of their segments: of narrow rows or short
// segments, and the launcher of all.
//
// The order is cut into tiles (segment_softmax_plan.h). A block takes a tile and a slab of columns, and of the tile the
// segments that begin in it, beyond its end if need be: it
//
//     reads the keys      which of its places end a run of equal keys, as a bit mask a stretch of places
//     stages the rows     to shared memory, as vectors, in the type that is computed in
//     reduces             a thread a stretch and column: the statistics of each run, or of the parts of the two that
//                         its edges cut; exponentials stay in registers
//     carries over        a segmented scan over stretches joins those parts
//     writes              the result in the place of the data, from there to memory, as vectors
//
// so that data is read and written once, whatever the segments are like: nothing is decided for each element but
// whether a run ends there. A segment that the tile has no room for is long: the tiles that it lies in leave the
// statistics of their parts in slots (head: the run came in from the tile before; tail: it begins here), SegmentJoin
// merges them in order and leaves the total in each slot, and SegmentRewrite reads these rows once more.
//
// A position of no segment counts as a run of its own, of -inf.
#pragma once

#include <algorithm>

#include "segment_softmax_join.cuh"
#include "segment_softmax_walk.cuh"

namespace jaxkern {

// Whether the run that comes into the chunk at `begin` is a long one: it has the place `end` too, or came into
// the chunk before.
__device__ __forceinline__ bool LongHead(const IndexRun& run, uint32_t chunk, uint32_t begin, uint32_t end,
                                         uint32_t key) {
  return (end < run.positions && KeyAt(run, end) == key) || (begin > chunk && KeyAt(run, begin - chunk - 1) == key);
}

// Whether the run that begins in a chunk goes on for more than `reach` places behind its `end`.
__device__ __forceinline__ bool LongTail(const IndexRun& run, uint32_t reach, uint32_t end, uint32_t key) {
  return end + reach < run.positions && KeyAt(run, end + reach) == key;
}

// `carry`: a Stat for each stretch and column, of what is open at its end; afterwards with what comes in from stretches
// before it. All threads take part.
template <class Op>
__device__ __forceinline__ void CarryOver(const SegmentShape& s, const uint32_t* ends, typename Op::Stat* carry) {
  using Stat = typename Op::Stat;
  __shared__ Stat warp_stat[kSegmentWarps];
  __shared__ bool warp_flag[kSegmentWarps];
  // A column's stretches side by side.
  const int t = threadIdx.x, lane = t % kWarp, warp = t / kWarp;
  const int c = s.by_stretches.Div(t), k = t - c * s.stretches;
  const bool inside = c < s.columns;
  Stat stat = inside ? carry[k * s.columns + c] : Op::Identity();
  bool flag = !inside || k == 0 || ends[k] != 0;  // nothing comes in
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
    Stat before = warp_stat[w];  // thread 0 has a flag, and with it warp 0
    for (++w; w < warp; ++w) before = Op::Merge(before, warp_stat[w]);
    stat = Op::Merge(before, stat);
  }
  if (inside) carry[k * s.columns + c] = stat;
  __syncthreads();
}

template <class Op>
__global__ void __launch_bounds__(kSegmentThreads, sizeof(typename Op::C) == 8 ? 2 : 3)
SegmentTiles(const __grid_constant__ IndexRun run, const __grid_constant__ SegmentShape s) {
  using T = typename Op::T;
  using C = typename Op::C;
  using Stat = typename Op::Stat;
  constexpr int kQ = SegmentStretch(sizeof(T));
  extern __shared__ __align__(16) char shared_bytes[];
  __shared__ SegmentEnds<kQ> runs;
  __shared__ Stat carry[kSegmentThreads], totals[kSegmentThreads];
  const SegmentBlock b(run, s, blockIdx.x);
  const int t = threadIdx.x, places = s.places, room = s.room;
  const uint32_t left = run.positions - b.begin;  // positions from the tile's first on

  // Keys of the tile, of all that it has room for, and of a place before and behind.
  uint32_t* const keys = reinterpret_cast<uint32_t*>(shared_bytes) + 1;
  const uint32_t* const known = run.keys ? run.keys + b.begin : nullptr;
#pragma unroll 8
  for (int i = t; i <= room; i += kSegmentThreads) {
    keys[i] = i >= left ? UINT32_MAX : known ? __ldg(known + i) : KeyAt(run, b.begin + i);
  }
  if (t == 0) keys[-1] = b.begin > 0 ? KeyAt(run, b.begin - 1) : UINT32_MAX;
  __syncthreads();
  runs.Find(keys, s.stretches, run.dropped);
  __syncthreads();

  // What comes in and what goes out, and the places that are the block's.
  const uint32_t first_key = keys[0], last_key = keys[places - 1];
  const bool comes_in = b.begin > 0 && first_key < run.dropped && keys[-1] == first_key;
  const bool long_head = comes_in && LongHead(run, s.places, b.begin, b.begin + s.reach, first_key);
  const bool goes_on = last_key < run.dropped && keys[places] == last_key;
  const int first_end = runs.From(0, room);
  const bool passes = comes_in && first_end >= places;  // one run, from before to behind
  const bool open = goes_on && (passes ? long_head : keys[room] == last_key);  // to the end of the tile, and long
  int high = min(places, static_cast<int>(min(left, s.places)));
  if (goes_on && !open) high = min(min(runs.From(places / kQ, room) + 1, room), static_cast<int>(min(left, s.room)));
  const int own_first = comes_in ? first_end + 1 : 0, own_last = open ? runs.Before(places / kQ) + 1 : high;
  const int low = comes_in && !long_head ? own_first : 0;
  if (low >= high) return;
  __syncthreads();

  C* const images = reinterpret_cast<C*>(shared_bytes);
  C* values[Op::kInputs];
  Staged<T> staged = StageInputs<T>(run, s, b, images, low, high, values);
  __syncthreads();

  const int j = s.by_columns.Div(t), c = t - j * s.columns;
  const bool active = j < s.stretches && c < b.width && j * kQ < high && (j + 1) * kQ > low;
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
      SegmentSlot<Stat>(run, s, b.o, b.tile, 0)[b.column + c] = totals[t];
    }
    if (open && j == places / kQ - 1) {
      SegmentSlot<Stat>(run, s, b.o, b.tile, !passes)[b.column + c] = carry[t];
    }
    const int next = runs.From(j + 1, room);  // the end of what is open here; a long run's is elsewhere
    const Stat behind = next < high ? totals[next / kQ * s.columns + c] : Op::Identity();
    Op::Write(values, s.columns, ends, kept, head, ends ? totals[t] : behind, tail, behind);
  }
  __syncthreads();
  if (own_first < own_last) staged.Write(run, s, b, OutputOf<T>(run, b.o), own_first, own_last);
}

// The rows of long segments that lie in tiles, from the totals in the tiles' slots. A block looks through every gridDim-th
// tile and slab, a thread each, for those with such rows: mostly there are none, else they are neighbours.
template <class Op>
__global__ void __launch_bounds__(kSegmentThreads, 2)
SegmentRewrite(const __grid_constant__ IndexRun run, const __grid_constant__ SegmentShape s, int64_t tiles) {
  using T = typename Op::T;
  using C = typename Op::C;
  extern __shared__ __align__(16) char shared_bytes[];
  __shared__ typename Op::Final finals[kSegmentColumns];
  __shared__ int held_keys;
  __shared__ uint8_t parts[kSegmentThreads];  // 1: of the run that comes in, 2: of the one that goes on
  const auto tile = [](int i) { return blockIdx.x + static_cast<int64_t>(i) * gridDim.x; };
  const int number = static_cast<int>((tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
  if (threadIdx.x < number) {
    const SegmentBlock b(run, s, tile(threadIdx.x));
    const uint32_t end = b.begin + s.places;
    const uint32_t held = min(s.places, run.positions - b.begin);
    const uint32_t first_key = KeyAt(run, b.begin), last_key = KeyAt(run, b.begin + held - 1);
    const bool comes_in = b.begin > 0 && first_key < run.dropped && KeyAt(run, b.begin - 1) == first_key;
    const bool long_head = comes_in && LongHead(run, s.places, b.begin, b.begin + s.reach, first_key);
    const bool goes_on = end < run.positions && last_key < run.dropped && KeyAt(run, end) == last_key;
    const bool passes = comes_in && goes_on && first_key == last_key;
    const bool open = goes_on && !passes && LongTail(run, s.reach, end, last_key);
    parts[threadIdx.x] = long_head | open << 1;
  }
  __syncthreads();

#pragma unroll 1
  for (int i = 0; i < 2 * number; ++i) {
    const int tail = i % 2;
    if (!(parts[i / 2] >> tail & 1)) continue;
    const SegmentBlock b(run, s, tile(i / 2));
    const int held = static_cast<int>(min(s.places, run.positions - b.begin));
    // How much of the tile is of that run.
    if (threadIdx.x == 0) held_keys = 0;
    __syncthreads();
    const uint32_t wanted = KeyAt(run, b.begin + (tail ? held - 1 : 0));
    int count = 0;
#pragma unroll 4
    for (int k = threadIdx.x; k < held; k += kSegmentThreads) count += KeyAt(run, b.begin + k) == wanted;
    count = ReduceLanes<kWarp>(count, SumOf());
    if (threadIdx.x % kWarp == 0) atomicAdd(&held_keys, count);
    if (threadIdx.x < b.width) {
      finals[threadIdx.x] =
          Op::Finish(SegmentSlot<typename Op::Stat>(run, s, b.o, b.tile, tail)[b.column + threadIdx.x]);
    }
    __syncthreads();
    const int low = tail ? held - held_keys : 0, high = tail ? held : held_keys;
    C* const images = reinterpret_cast<C*>(shared_bytes);
    C* values[Op::kInputs];
    Staged<T> staged = StageInputs<T>(run, s, b, images, low, high, values);
    __syncthreads();
#pragma unroll 4
    for (int e = low * s.columns + threadIdx.x; e < high * s.columns; e += kSegmentThreads) {
      const int c = e - s.by_columns.Div(e) * s.columns;
      if (c >= b.width) continue;
      C x[Op::kInputs];
#pragma unroll
      for (int k = 0; k < Op::kInputs; ++k) x[k] = values[k][e];
      values[0][e] = Op::Map(x, finals[c]);
    }
    __syncthreads();
    staged.Write(run, s, b, OutputOf<T>(run, b.o), low, high);
    __syncthreads();
  }
}

// --- Launching -----------------------------------------------------------------------------------------

template <class Op> cudaError_t LaunchSegmentOp(const IndexRun& run, const void* cotangent, cudaStream_t stream) {
  using T = typename Op::T;
  constexpr int64_t kSize = sizeof(T), kN = kVector<T>;
  const SegmentCut cut = SegmentCutOf(run.rows, run.count, run.outer, run.inner, kSize);
  SegmentShape s;
  s.places = static_cast<uint32_t>(cut.places);
  s.room = static_cast<uint32_t>(cut.room);
  s.reach = s.room - s.places;
  s.tiles = (run.positions + s.places - 1) / s.places;
  s.cotangent = cotangent;
  const int64_t arrays = reinterpret_cast<int64_t>(run.source) | reinterpret_cast<int64_t>(run.out) |
                         reinterpret_cast<int64_t>(cotangent) | run.inner * kSize;
  if (cut.walk) {
    if constexpr (kSize < 8) {
      if (arrays % 16 == 0) return LaunchWalk<Op, kN, 1>(run, s, stream);
    }
    return LaunchWalk<Op, 1, 4>(run, s, stream);
  }
  const SegmentTile tile = SegmentTileOf(run.inner, kSize);
  s.columns = tile.columns, s.slabs = tile.slabs, s.stretches = tile.stretches;
  const auto held = [](int64_t elements) { return static_cast<int>((elements + 2 * kN) / kN * kN); };
  s.held = held(tile.room * tile.columns);
  s.contiguous = !run.order && !run.source_extra && s.slabs == 1;
  s.vectors = (arrays | s.columns * kSize) % 16 == 0;
  s.by_slabs = Divider(s.slabs);
  s.by_tiles = Divider(s.tiles);
  s.by_columns = FastDivmod(s.columns);
  s.by_vectors = FastDivmod(s.vectors ? s.columns / kN : 1);
  s.by_stretches = FastDivmod(s.stretches);

  constexpr int kMostBytes = Op::kInputs * sizeof(typename Op::C) * (kSegmentThreads * SegmentStretch(kSize) + 2 * kN);
  static std::atomic<bool> done[kMaxDevices];
  cudaError_t error = OncePerDevice(done, CurrentDevice().ordinal, [] {
    const cudaError_t tiles =
        cudaFuncSetAttribute(SegmentTiles<Op>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes);
    if (tiles != cudaSuccess) return tiles;
    return cudaFuncSetAttribute(SegmentRewrite<Op>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes);
  });
  if (error != cudaSuccess) return error;
  const int bytes = Op::kInputs * s.held * static_cast<int>(sizeof(typename Op::C));
  const int64_t blocks = run.outer * s.tiles * s.slabs;
  error = Launch(SegmentTiles<Op>, {blocks, 1, kSegmentThreads, bytes}, stream, run, s);
  if (error != cudaSuccess || run.positions <= s.room) return error;  // no segment is long
  error = LaunchJoin<Op>(run, s, stream);
  if (error != cudaSuccess) return error;
  // One wave of blocks where none has anything to do, and as many as that is where all have.
  constexpr int64_t kBlocks = 512;
  const int64_t least = (blocks + kSegmentThreads - 1) / kSegmentThreads;
  const int64_t grid = std::min(blocks, std::max(kBlocks, least));
  return Launch(SegmentRewrite<Op>, {grid, 1, kSegmentThreads, bytes}, stream, run, s, blocks);
}

// Runs everything after the sort.
template <class T>
cudaError_t LaunchSegmentSoftmax(IndexOp op, const IndexRun& run, const void* cotangent, cudaStream_t stream) {
  return op == IndexOp::kSegmentSoftmaxGrad ? LaunchSegmentOp<SegmentBackward<T>>(run, cotangent, stream)
                                            : LaunchSegmentOp<SegmentForward<T>>(run, nullptr, stream);
}

}  // namespace jaxkern
