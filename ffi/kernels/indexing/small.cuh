// Few updates (algorithm `small`): one launch without a sort.
//
//     SmallUpdates    all reductions, batches and index types
//     SmallSums       sums into x by plain indices
//
// Both read index and source and update rows of out. A warp takes one update and a tile of the columns of its row, and
// compares all indices with its own to find the updates of the same row. Let c be their number and S the largest power
// of two up to min(c, 32). The first S of the c warps each take a share of the columns for all c updates; the others
// exit. So the work per warp is about the same whether all indices differ or all are equal, and the order of the
// additions depends on the indices alone. Memory traffic: every warp reads all indices, mostly from L1 or L2; source is
// read once (SmallSums: at most twice), each touched row of out is read and written once.
//
// The time of a call with a few dozen updates is the latency of its dependent memory accesses and of fetching its code.
// SmallSums is therefore a separate kernel with little code: each lane holds up to 32 indices in registers, the source
// row of the update is loaded together with them, and the row of out while the warp compares indices.
#pragma once

#include "indexing/run.cuh"

namespace jaxkern {

constexpr int kSmallThreads = 256, kSmallWarps = kSmallThreads / kWarp;
constexpr int kSmallVectors = 4;  // maximum number of vectors in flight per thread

// Words between groups of 32 keys in shared memory, padded so that 16-byte reads are free of bank conflicts.
constexpr int kKeyPitch = 36;

struct SmallShape {
  int64_t vectors;       // per row
  int64_t column_tiles;  // per row; a column tile has kWarp * each vectors
  int each;              // vectors per thread
  int64_t groups;        // blocks for the updates of one b and column tile
  Divider by_column_tiles, by_groups;
  int words;  // groups of 32 indices
  int64_t fill_after;
  FillShape fill;
};
static_assert(sizeof(SmallShape) == 160);

// Adds up this warp's share of the `all` updates of one row. Does nothing unless the warp is one of the first S,
// `before` being its rank.
//
//     same                  bit per index of the lane, set if it refers to the row
//     number(bit)           number of that update
//     row_of(number)        start of its row of source
//     list, sums            the warp's own shared memory
//
// kOp: the reduction. T, N: element type and elements of a vector.
template <Reduction kOp, class T, int N, class Number, class RowAt, class Store>
__device__ __forceinline__ void AddTogether(uint32_t same, int all, int before, Number number, RowAt row_of,
                                            Store store, const T* out, bool reads, int64_t column_begin, int each,
                                            int64_t vectors, uint16_t* list, Compute<T>* sums) {
  using C = Compute<T>;
  constexpr int kPartsAtOnce = N * sizeof(T) == 16 && sizeof(T) == 2 ? 4 : 8;
  const int lane = threadIdx.x % kWarp;
  int shares = 1;
  while (shares < kWarp && 2 * shares <= all) shares *= 2;
  if (before >= shares) return;

  int to = __popc(same);  // end of this lane's part of the list
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(~0u, to, step);
    if (lane >= step) to += other;
  }
  to -= __popc(same);
  for (uint32_t word = same; word; word &= word - 1) list[to++] = number(__ffs(word) - 1);
  __syncwarp();
  if (all <= kSmallVectors && each >= shares) {  // long rows: whole columns per lane, with all loads in flight
    for (int i = 0; i < each / shares; ++i) {
      const int64_t v = column_begin + (before * (each / shares) + i) * kWarp + lane;
      if (v >= vectors) break;
      Pack<T, N> part[kSmallVectors], x = {};
#pragma unroll
      for (int k = 0; k < kSmallVectors; ++k) {
        if (k < all) part[k] = LoadPart<T, N>(row_of(list[k]) + v * N);
      }
      if (reads) x = LoadPart<T, N>(out + v * N);
      C total[N];
#pragma unroll
      for (int j = 0; j < N; ++j) total[j] = Identity<kOp, C>();
#pragma unroll
      for (int k = 0; k < kSmallVectors; ++k) {
        if (k < all) Accumulate<kOp>(total, part[k]);
      }
      store(v, total, x);
    }
    return;
  }
  // `width` adjacent columns with `shares` threads each, which take every shares-th update.
  const int width = kWarp / shares, first = lane / width, c = lane % width;
  for (int i = 0; i < each; ++i) {
    const int64_t v = column_begin + (before * each + i) * width + c;
    const bool active = v < vectors;
    Pack<T, N> x = {};
    if (active && first == 0 && reads) x = LoadPart<T, N>(out + v * N);
    C total[N];
#pragma unroll
    for (int j = 0; j < N; ++j) total[j] = Identity<kOp, C>();
    for (int u = first; active && u < all; u += kPartsAtOnce * shares) {
      Pack<T, N> part[kPartsAtOnce];
#pragma unroll
      for (int k = 0; k < kPartsAtOnce; ++k) {
        if (u + k * shares < all) {
          part[k] = LoadPart<T, N>(row_of(list[u + k * shares]) + v * N);
        }
      }
#pragma unroll
      for (int k = 0; k < kPartsAtOnce; ++k) {
        if (u + k * shares < all) Accumulate<kOp>(total, part[k]);
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) sums[j * kWarp + lane] = total[j];
    __syncwarp();
    if (active && first == 0) {
      for (int f = 1; f < shares; ++f) {
#pragma unroll
        for (int j = 0; j < N; ++j) total[j] = Combined<kOp>(total[j], sums[j * kWarp + f * width + c]);
      }
      store(v, total, x);
    }
    __syncwarp();
  }
}

// kOp: the reduction. T, N: element type and elements of a vector.
template <Reduction kOp, class T, int N> __global__ void __launch_bounds__(kSmallThreads, 4)
    SmallUpdates(const __grid_constant__ IndexRun run, const __grid_constant__ SmallShape s) {
  using C = Compute<T>;
  constexpr int kAhead = 4;
  if (blockIdx.x >= s.fill_after) {
    __shared__ uint32_t bits[kFillRows / 32];
    FillTile<kOp, T, N>(run, s.fill, s.vectors, blockIdx.x - s.fill_after, bits,
                        [&](uint32_t first, int rows, uint32_t* marks) {
                          for (uint32_t p = threadIdx.x; p < run.positions; p += kSmallThreads) {
                            const uint32_t r = KeyAt(run, p) - first;
                            if (r < static_cast<uint32_t>(rows)) atomicOr(&marks[r / 32], 1u << (r % 32));
                          }
                        });
    return;
  }
  extern __shared__ __align__(16) char shared_bytes[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  uint32_t* const keys = reinterpret_cast<uint32_t*>(shared_bytes);
  char* const behind = shared_bytes + s.words * kKeyPitch * 4;
  C* const sums = reinterpret_cast<C*>(behind) + warp * kWarp * N;
  uint16_t* const list = reinterpret_cast<uint16_t*>(behind + kSmallThreads * N * sizeof(C)) + warp * s.words * 32;
  const int64_t item = s.by_column_tiles.Div(int64_t{blockIdx.x}), column_tile = blockIdx.x - item * s.column_tiles;
  const int64_t slice = s.by_groups.Div(item);  // o * batch + b
  const int mine = static_cast<int>(item - slice * s.groups) * kSmallWarps + warp;
  const int64_t o = slice / run.batch;
  const uint32_t b_begin = static_cast<uint32_t>(slice - o * run.batch) * run.count;
  const C alpha = Alpha<C>(run);

  for (int base = threadIdx.x; base < s.words * 32; base += kAhead * kSmallThreads) {
    RawIndex raw[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t p = base + i * kSmallThreads;
      raw[i] = p < run.count ? LoadIndex(run, b_begin + p) : RawIndex{};
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t p = base + i * kSmallThreads;
      const uint32_t key = p < run.count ? KeyOf(run, raw[i], b_begin + p) : UINT32_MAX;
      if (p < s.words * 32) keys[p / 32 * kKeyPitch + p % 32] = key;
    }
  }
  __syncthreads();
  if (mine >= run.count) return;  // the whole warp exits, here and below
  const uint32_t position = b_begin + mine, key = keys[mine / 32 * kKeyPitch + mine % 32];
  if (key >= run.dropped) return;

  // Compare 32 indices per lane; the result is a bit mask.
  uint32_t same = 0;
  if (lane < s.words) {
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      const uint4 four = *reinterpret_cast<const uint4*>(keys + lane * kKeyPitch + 4 * q);
      same |= ((four.x == key) | (four.y == key) << 1 | (four.z == key) << 2 | (four.w == key) << 3) << (4 * q);
    }
  }
  const int lower = mine - lane * 32;
  const uint32_t earlier = lower >= 32 ? same : lower > 0 ? same & ((1u << lower) - 1) : 0;
  const int all = __reduce_add_sync(~0u, __popc(same)), before = __reduce_add_sync(~0u, __popc(earlier));

  const T* const source = static_cast<const T*>(run.source) + o * run.source_stride * run.inner;
  T* const out = static_cast<T*>(run.out) + (o * run.out_stride + run.OutRow(key)) * run.inner;
  const int64_t column_begin = column_tile * kWarp * s.each;
  const bool reads = run.reads_out;
  const auto store = [&](int64_t v, const C(&total)[N], const Pack<T, N>& x) {
    StorePart<T, N>(out + v * N, FinishedPack<kOp, T, N>(total, alpha, reads, x));
  };
  if (all == 1) {
    const T* const row = source + run.SourceRow(position) * run.inner;
    Pack<T, N> part[kSmallVectors] = {}, old[kSmallVectors] = {};
#pragma unroll
    for (int i = 0; i < kSmallVectors; ++i) {
      const int64_t v = column_begin + lane + i * kWarp;
      if (i < s.each && v < s.vectors) {
        part[i] = LoadPart<T, N>(row + v * N);
        if (reads) old[i] = LoadPart<T, N>(out + v * N);
      }
    }
#pragma unroll
    for (int i = 0; i < kSmallVectors; ++i) {
      const int64_t v = column_begin + lane + i * kWarp;
      if (i < s.each && v < s.vectors) {
        C total[N];
        Unpack(part[i], total);
        store(v, total, old[i]);
      }
    }
    return;
  }
  const auto row_of = [&](uint32_t u) { return source + run.SourceRow(b_begin + u) * run.inner; };
  const auto number = [&](int bit) { return lane * 32 + bit; };
  AddTogether<kOp, T, N>(same, all, before, number, row_of, store, out, reads, column_begin, s.each, s.vectors, list,
                         sums);
}

// The kernel's parameters. With 48 bytes they end at the end of a line of constant memory, given what precedes them
// there.
struct SmallSum {
  const int32_t* index;
  const void* source;
  const void* alpha;
  void* out;
  uint32_t inner, rows;
  uint32_t wraps;  // added to negative indices: rows, or 0
  uint16_t count;
  uint16_t each;  // vectors per thread
};
static_assert(sizeof(SmallSum) == 48);

// Stores a vector that may stay in L2: the rows are few, and the next kernel may use them.
template <class T, int N> __device__ __forceinline__ void KeepPart(T* p, const Pack<T, N>& pack) {
  if constexpr (N * sizeof(T) == 16) {  // one store; the compiler would split a plain assignment
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(pack.word[0]), "r"(pack.word[1]),
                 "r"(pack.word[2]), "r"(pack.word[3])
                 : "memory");
  } else {
    StorePart<T, N>(p, pack);
  }
}

constexpr int32_t kNoIndex = INT32_MIN;  // out of range for every array, wrapped or not

// T, N: element type and elements of a vector. kKeys: indices per lane; index 32 * j + lane is bit j of a mask.
template <class T, int N, int kKeys> __global__ void __launch_bounds__(kSmallThreads, 2)
    SmallSums(const __grid_constant__ SmallSum s) {
  using C = Compute<T>;
  extern __shared__ __align__(16) char shared_bytes[];
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, turn = blockIdx.y * kSmallWarps + warp;
  const uint32_t mine = min(turn, s.count - 1u);
  const int32_t own = s.index[mine];
  const C alpha = s.alpha ? *static_cast<const C*>(s.alpha) : C(1);

  const int64_t vectors = s.inner / N, column_begin = static_cast<int64_t>(blockIdx.x) * kWarp * s.each;
  const T* const source = static_cast<const T*>(s.source);
  const int64_t column = (column_begin + lane) * N;
  // Number of vectors from the lane's first one on; it takes every kWarp-th.
  const int vectors_left = static_cast<int>(min(vectors - column_begin - lane, int64_t{s.each} * kWarp));
  Pack<T, N> part[kSmallVectors], old[kSmallVectors] = {};
  const auto load = [&](Pack<T, N>(&to)[kSmallVectors], const T* row) {
#pragma unroll
    for (int i = 0; i < kSmallVectors; ++i) {
      if (i * kWarp < vectors_left) to[i] = LoadPart<T, N>(row + column + i * (kWarp * N));
    }
  };
  load(part, source + int64_t{mine} * s.inner);
  if constexpr (kKeys > 4) __syncthreads();  // keeps the loads below after the ones above
  if (turn >= s.count) return;               // the whole warp exits, here and below
  const int32_t* const index = Pinned(s.index + lane);
  const int left = static_cast<int>(s.count - lane);
  int32_t other[kKeys];
#pragma unroll
  for (int j = 0; j < kKeys; ++j) other[j] = j * kWarp < left ? index[j * kWarp] : kNoIndex;
  const uint32_t key = own < 0 ? own + s.wraps : own;
  if (key >= s.rows) return;
  T* const out = static_cast<T*>(s.out) + int64_t{key} * s.inner;
  load(old, out);
  // Compare with both forms of the row's index: counted from the start, and from the end.
  const int32_t first = static_cast<int32_t>(key), second = static_cast<int32_t>(key - s.wraps);
  uint32_t same = 0;
#pragma unroll
  for (int j = 0; j < kKeys; ++j) same |= other[j] == first || other[j] == second ? 1u << j : 0;
  const uint32_t own_bit = lane == mine % kWarp ? 1u << (mine / kWarp) : 0;
  const auto store = [&](int64_t v, const C(&total)[N], const Pack<T, N>& x) {
    KeepPart<T, N>(out + v * N, FinishedPack<Reduction::kSum, T, N>(total, alpha, true, x));
  };
  if (!__any_sync(~0u, same != own_bit)) {
#pragma unroll
    for (int i = 0; i < kSmallVectors; ++i) {
      if (i * kWarp < vectors_left) {
        C total[N];
        Unpack(part[i], total);
        store(column_begin + lane + i * kWarp, total, old[i]);
      }
    }
    return;
  }
  const uint32_t lower = lane < mine % kWarp ? same : same & (own_bit ? own_bit - 1 : 0);
  const int all = __reduce_add_sync(~0u, __popc(same)), before = __reduce_add_sync(~0u, __popc(lower));
  C* const sums = reinterpret_cast<C*>(shared_bytes) + warp * kWarp * N;
  uint16_t* const lists = reinterpret_cast<uint16_t*>(shared_bytes + kSmallThreads * N * sizeof(C));
  uint16_t* const list = lists + warp * kKeys * kWarp;
  const auto row_of = [&](uint32_t u) { return source + int64_t{u} * s.inner; };
  const auto number = [&](int bit) { return bit * kWarp + lane; };
  AddTogether<Reduction::kSum, T, N>(same, all, before, number, row_of, store, out, true, column_begin, s.each, vectors,
                                     list, sums);
}

}  // namespace jaxkern
