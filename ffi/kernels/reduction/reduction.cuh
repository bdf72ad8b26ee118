// Reductions over the middle dimension of [rows, width, inner]: sum, mean, max, min and logsumexp.
//
//     ReduceNarrow    a group of 4 to 32 lanes loads two or four rows at once, then reduces them
//     ReduceWhole     a block reduces a row of whole vectors, or a part of one
//     ReduceRows      a warp reduces up to four rows in turn, or a block reduces a row or a part of one; elements
//                     before the first and after the last whole 16-byte vector are loaded one by one
//     ReduceColumns   inner > 1: a block reduces a tile of columns, or a part of it; each thread walks down its own
//                     columns, and the block merges the Stats of equal ones
//     ReduceMerge     merges the parts of each row or column in order
//
// The kernels read p.x (and p.mask) and write p.out. Memory traffic: x is read once, and one number (or one Stat per
// part) is written per row. Throughput depends on the loads in flight, and in 16 bit on the number of instructions per
// element. With N > 1, x is aligned to 16 bytes, except in ReduceRows with p.whole = false. ReduceRows loads masks
// whose bytes are contiguous along the row as vectors, too. The order of additions depends only on the problem.
//
// Template parameters of the kernels: Op, the operation (ops.cuh); N, elements of a vector, where N = 1 allows any
// alignment and any mask; kMasked, p.mask is applied.
#pragma once

#include "reduction/ops.cuh"

namespace jaxkern {

constexpr int kNarrowThreads = 128;
constexpr int kRowsTogether = 4;  // maximum number of rows that a group of lanes or a warp merges at once
constexpr int kRowThreads = 256;  // maximum per block
constexpr int kWarpsOfRows = 4;   // warps per block, if a warp has its own rows
constexpr int kColumnsThreads = 256, kColumnsBlocks = 4;  // maximum per block; blocks per multiprocessor
constexpr int kMergeThreads = 256;
static_assert(kColumnsThreads == kMergeThreads && kRowThreads == kMergeThreads);

// Whether a warp may reduce several rows. For wide elements without a mask this is no faster and exceeds the registers.
template <class T, bool kMasked> constexpr bool kTogether = sizeof(T) <= 2 || kMasked;

// Packs in flight per thread.
template <class T> constexpr int kInFlight = sizeof(T) == 1 ? 2 : sizeof(T) == 4 ? 8 : 4;

template <class T, int N> __device__ __forceinline__ Pack<T, N> NeutralPack(const ReduceParams& p) {
  Pack<T, N> pack;
#pragma unroll
  for (int w = 0; w < Pack<T, N>::kWords; ++w) pack.word[w] = static_cast<uint32_t>(p.neutral >> (w % 2 * 32));
  return pack;
}

// Stores the result of a row, or the Stat of a part.
template <class Op> __device__ __forceinline__ void Deliver(const ReduceParams& p, int64_t at, int64_t part,
                                                            const typename Op::Stat& stat) {
  if (p.parts > 1) static_cast<typename Op::Stat*>(p.out)[at * p.parts + part] = stat;
  else Op::Store(p, at, stat);
}

// Merges the Stats of the warps of a block; the result is valid in thread 0. All threads must call it, once per kernel.
template <class Op> __device__ __forceinline__ typename Op::Stat MergeWarps(typename Op::Stat stat) {
  __shared__ typename Op::Stat room[kRowThreads / kWarp];
  return ReduceWarps<kRowThreads / kWarp>(
      stat, room, blockDim.x / kWarp, Op::Identity(), [] { __syncthreads(); },
      [](typename Op::Stat s) { return MergeLanes<Op>(s, kRowThreads / kWarp); });
}

// Merges the Stats of kRows rows over aligned groups of 2^log_lanes lanes (at least four) with a common base.
// Afterwards each of the first kRows lanes of a group holds the Stat of one row, whose number is *row.
template <class Op, int kRows> __device__ __forceinline__ typename Op::Stat MergeRows(typename Op::Stat (&stat)[kRows],
                                                                                      int lane, int log_lanes,
                                                                                      int* row) {
  // The first steps halve the number of rows per lane, down to one; the remaining steps merge that row.
  *row = 0;
  int rows = kRows;
#pragma unroll
  for (int bit = 1; bit < kRows; bit *= 2) {
    rows /= 2;
    const bool upper = lane & bit;
    *row += upper ? rows : 0;
#pragma unroll
    for (int u = 0; u < rows; ++u) {
      const auto keep = upper ? stat[u + rows] : stat[u], give = upper ? stat[u] : stat[u + rows];
      stat[u] = Op::Join(keep, Op::Exchange(give, bit));
    }
  }
  for (int step = kRows; step < 1 << log_lanes; step *= 2) {
    stat[0] = Op::Join(stat[0], Op::Exchange(stat[0], step));
  }
  return stat[0];
}

// Loads N mask bytes at m, aligned to N, as words.
template <int N> __device__ __forceinline__ void LoadMaskVector(const uint8_t* m, uint32_t (&w)[(N + 3) / 4]) {
  if constexpr (N == 2) {
    w[0] = *reinterpret_cast<const uint16_t*>(m);
  } else {
    const Pack<uint32_t, N / 4> all = LoadVector<uint32_t, N / 4>(reinterpret_cast<const uint32_t*>(m));
#pragma unroll
    for (int i = 0; i < N / 4; ++i) w[i] = all.word[i];
  }
}

// Loads N mask bytes at any m. bytes = false: one mask byte applies to the whole row, and all elements count as 1.
template <int N>
__device__ __forceinline__ void LoadMaskBytes(const uint8_t* m, bool bytes, uint32_t (&w)[(N + 3) / 4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) w[i / 4] = (i % 4 ? w[i / 4] : 0) | uint32_t{bytes ? m[i] : uint8_t{1}} << (i % 4 * 8);
}

// Replaces elements whose mask byte is 0 by `otherwise`. Each byte is replicated over the bits of its element.
template <class T, int N>
__device__ __forceinline__ void Mask(Pack<T, N>& pack, const uint32_t (&in)[(N + 3) / 4], const Pack<T, N>& otherwise) {
  constexpr int kPer = sizeof(T) < 4 ? 4 / sizeof(T) : 1, kWordsOf = sizeof(T) < 4 ? 1 : sizeof(T) / 4;
#pragma unroll
  for (int w = 0; w < Pack<T, N>::kWords; ++w) {
    const int first = w / kWordsOf * kPer;  // number of the word's first element
    const uint32_t bytes = in[first / 4] * 255;
    const int byte = first % 4;
    const uint32_t keep = kPer == 4 ? bytes : __byte_perm(bytes, 0, kPer == 2 ? byte * 0x1111 + 0x1100 : byte * 0x1111);
    pack.word[w] = (pack.word[w] & keep) | (otherwise.word[w] & ~keep);
  }
}

// A row has `packs` packs of N elements.
//
//     kPacks   packs per lane, at most
//     kRows    rows of a group
//     kMasked  the mask bytes of a row are contiguous and aligned to N, and log_lanes is 5; N = 1 allows any mask
//              without it
template <class Op, int N, int kPacks, int kRows, bool kMasked>
__global__ void __launch_bounds__(kNarrowThreads, kPacks* N > 8 ? 8 : 1)
    ReduceNarrow(const __grid_constant__ ReduceParams p, int log_lanes, int packs) {
  using T = typename Op::T;
  using V = typename Op::V;
  const int lane = threadIdx.x & ((1 << log_lanes) - 1), groups = kNarrowThreads >> log_lanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (groups * kRows) + (threadIdx.x >> log_lanes);
  const T* const x = static_cast<const T*>(p.x);

  typename Op::Stat stat[kRows];
#pragma unroll
  for (int u = 0; u < kRows; ++u) stat[u] = Op::Identity();
  if constexpr (N == 1) {
    T raw[kRows][kPacks];
    bool in[kRows][kPacks];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t row = first + u * groups;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const int at = lane + (i << log_lanes);
        in[u][i] = row < p.rows && at < packs;
        if (in[u][i]) raw[u][i] = x[row * p.width + at];
      }
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t row = first + u * groups;
      if (p.mask && row < p.rows) {
        const uint8_t* const mask = p.mask + p.mask_view.outer_map(row);
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          if (in[u][i]) in[u][i] = mask[(lane + (i << log_lanes)) * p.mask_view.axis_stride];
        }
      }
      V v[kPacks];
      int count = 0;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        v[i] = in[u][i] ? ValueOf<V>(raw[u][i]) : Op::Neutral(p);
        count += in[u][i];
      }
      Op::Accumulate(p, stat[u], v);
      Op::Count(stat[u], count);
    }
    Op::Level(stat, 1 << log_lanes);
  } else {
    constexpr int kMaskWords = (N + 3) / 4;
    uint32_t taken[kMasked ? kRows : 1][kPacks][kMaskWords];
    if constexpr (kMasked) {
      // Lane u % kRows computes the mask offset of row u for the whole warp.
      const int64_t mine = first + lane % kRows * groups;
      const int64_t mask_at = mine < p.rows ? p.mask_view.outer_map.Below32Bits(static_cast<uint32_t>(mine)) : 0;
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const uint8_t* const in = p.mask + __shfl_sync(0xffffffffu, mask_at, u) + lane * N;
        const int has = first + u * groups < p.rows ? packs - lane : 0;
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
#pragma unroll
          for (int w = 0; w < kMaskWords; ++w) taken[u][i][w] = 0;
          if (i << log_lanes < has) LoadMaskVector<N>(in + (i << log_lanes) * N, taken[u][i]);
        }
      }
    }
    Pack<T, N> raw[kRows][kPacks];
    const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
    const T* from = x + first * p.width + lane * N;
#pragma unroll
    for (int u = 0; u < kRows; ++u, from += groups * p.width) {
      const int has = first + u * groups < p.rows ? packs - lane : 0;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        raw[u][i] = NeutralPack<T, N>(p);
        if (i << log_lanes < has) {
          if constexpr (kPacks > 1) raw[u][i] = LoadVector<T, N>(from + (i << log_lanes) * N, policy);
          else raw[u][i] = LoadVector<T, N>(from + (i << log_lanes) * N);
        }
      }
    }
    if constexpr (kMasked) {
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        uint32_t count = 0;
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          Mask(raw[u][i], taken[u][i], NeutralPack<T, N>(p));
#pragma unroll
          for (int w = 0; w < kMaskWords; ++w) count = __dp4a(taken[u][i][w], 0x01010101u, count);
        }
        Op::Count(stat[u], count);
      }
    }
    Op::AccumulateLevel(p, stat, raw, 1 << log_lanes);
  }
  int row;
  const typename Op::Stat merged = MergeRows<Op>(stat, lane, log_lanes, &row);
  const int64_t at = first + row * groups;
  if (lane < kRows && at < p.rows) Op::Store(p, at, merged);
}

// Loads one element as a pack; converted at its use.
template <class T> __device__ __forceinline__ Pack<T, 1> LoadElement(const T* x) {
  Pack<T, 1> pack;
  if constexpr (sizeof(T) == 8) {
    const uint2 words = *reinterpret_cast<const uint2*>(x);
    pack.word[0] = words.x, pack.word[1] = words.y;
  } else if constexpr (sizeof(T) == 4) {
    pack.word[0] = *reinterpret_cast<const uint32_t*>(x);
  } else if constexpr (sizeof(T) == 2) {
    pack.word[0] = *reinterpret_cast<const uint16_t*>(x);
  } else {
    pack.word[0] = *reinterpret_cast<const uint8_t*>(x);
  }
  return pack;
}

// Distribution of a row over the threads of a warp or a block. In each turn, a warp loads 32 * kInFlight adjacent
// packs, kInFlight per lane; the warps of a block load adjacent stretches.
struct RowShare {
  int64_t width;    // of the row or part
  int whole_packs;  // if the row consists of whole vectors
  int thread;
  int first, turn;  // first pack of the thread; packs between turns
};

// Reduces a thread's share of a row. A mask has a byte per element or one for the whole row. U: packs in flight.
template <class Op, int N, bool kMasked, int U>
__device__ __forceinline__ typename Op::Stat ReduceRow(const ReduceParams& p, const typename Op::T* x,
                                                       const uint8_t* mask, const RowShare& share) {
  using T = typename Op::T;
  using V = typename Op::V;
  constexpr int kStep = kWarp * N;
  typename Op::Stat stat = Op::Identity();
  const bool bytes = kMasked && p.mask_view.axis_stride, skip = kMasked && !bytes && !*mask;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  const auto load = [&](const T* at) {
    if constexpr (kMasked) return LoadVector<T, N>(at);
    else return LoadVector<T, N>(at, policy);  // volatile: not moved after the use of other packs
  };

  // Elements before the first and after the last whole vector, fewer than the threads. They are loaded first and used
  // last.
  int head = 0, tail = 0, packs = share.whole_packs;
  Pack<T, 1> ends[2] = {};
  uint8_t ends_taken[2] = {};
  if (!p.whole) {
    const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
    head = static_cast<int>(min(share.width, int64_t{offset ? N - offset : 0}));
    tail = static_cast<int>(share.width - head) & (N - 1);
    packs = static_cast<int>((share.width - head) / N);
    const int64_t last = head + int64_t{packs} * N + share.thread;
    const bool has_head = share.thread < head && !skip, has_tail = share.thread < tail && !skip;
    if (has_head) ends[0] = LoadElement(x + share.thread), ends_taken[0] = bytes ? mask[share.thread] : 1;
    if (has_tail) ends[1] = LoadElement(x + last), ends_taken[1] = bytes ? mask[last] : 1;
  }
  const T* from = x + (head + int64_t{share.first} * N);
  const uint8_t* in = kMasked ? mask + (head + int64_t{share.first} * N) : nullptr;
  const bool vectors = bytes && reinterpret_cast<uintptr_t>(in) % N == 0;
  for (int left = skip ? 0 : packs - share.first; left > 0; left -= share.turn, from += share.turn * int64_t{N}) {
    uint32_t taken[kMasked ? U : 1][(N + 3) / 4] = {};
    if constexpr (kMasked) {
      if (vectors) {
#pragma unroll
        for (int i = 0; i < U; ++i) {
          if (left > i * kWarp) LoadMaskVector<N>(in + i * kStep, taken[i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < U; ++i) {
          if (left > i * kWarp) LoadMaskBytes<N>(in + i * kStep, bytes, taken[i]);
        }
      }
      in += share.turn * int64_t{N};
    }
    Pack<T, N> raw[U];
    if (left > (U - 1) * kWarp) {
#pragma unroll
      for (int i = 0; i < U; ++i) raw[i] = load(from + i * kStep);
    } else {
#pragma unroll
      for (int i = 0; i < U; ++i) {
        raw[i] = NeutralPack<T, N>(p);
        if (left > i * kWarp) raw[i] = load(from + i * kStep);
      }
    }
    if constexpr (kMasked) {
      uint32_t count = 0;
#pragma unroll
      for (int i = 0; i < U; ++i) {
        Mask(raw[i], taken[i], NeutralPack<T, N>(p));
#pragma unroll
        for (int w = 0; w < (N + 3) / 4; ++w) count = __dp4a(taken[i][w], 0x01010101u, count);
      }
      Op::Count(stat, count);
    }
    Op::Accumulate(p, stat, raw);
  }
  if (head | tail) {
    V v[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      V one[1];
      Values(ends[i], one);
      v[i] = ends_taken[i] ? one[0] : Op::Neutral(p);
    }
    Op::Accumulate(p, stat, v);
    Op::Count(stat, ends_taken[0] + ends_taken[1]);
  }
  return stat;
}

// blockIdx.x: the row. blockIdx.y: a part of `each` packs (the last ones may have fewer). No masks. In 16 bit, the next
// packs are loaded while the current ones are reduced.
template <class Op, int N> __global__ void __launch_bounds__(kRowThreads, 4)
    ReduceWhole(const __grid_constant__ ReduceParams p, int each) {
  using T = typename Op::T;
  constexpr int U = kInFlight<T>, kBuffers = sizeof(T) == 2 ? 2 : 1;
  const int first = threadIdx.x / kWarp * U * kWarp + threadIdx.x % kWarp, turn = blockDim.x * U;
  const int64_t begin = int64_t{blockIdx.y} * each;
  int left = static_cast<int>(min(p.width / N - begin, int64_t{each})) - first;
  const T* from = static_cast<const T*>(p.x) + blockIdx.x * p.width + (begin + first) * N;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);

  Pack<T, N> raw[kBuffers][U];
  const auto load = [&](Pack<T, N>(&raw)[U]) {
    if (left > (U - 1) * kWarp) {
#pragma unroll
      for (int i = 0; i < U; ++i) raw[i] = LoadVector<T, N>(from + i * (kWarp * N), policy);
    } else {
#pragma unroll
      for (int i = 0; i < U; ++i) {
        raw[i] = NeutralPack<T, N>(p);
        if (left > i * kWarp) raw[i] = LoadVector<T, N>(from + i * (kWarp * N), policy);
      }
    }
    left -= turn, from += int64_t{turn} * N;
  };
  typename Op::Stat stat = Op::Identity();
  if constexpr (kBuffers == 1) {
    while (left > 0) {
      load(raw[0]);
      Op::Accumulate(p, stat, raw[0]);
    }
  } else if (left > 0) {
    load(raw[0]);
    for (bool more = true; more;) {
#pragma unroll
      for (int b = 0; b < kBuffers; ++b) {
        more = left > 0;
        if (more) load(raw[1 - b]);
        Op::Accumulate(p, stat, raw[b]);
        if (!more) break;
      }
    }
  }
  stat = MergeWarps<Op>(MergeLanes<Op>(stat, kWarp));
  if (threadIdx.x == 0) Deliver<Op>(p, blockIdx.x, blockIdx.y, stat);
}

// blockIdx.x: the row, and blockIdx.y a part of it; or, with rows_each > 0, the rows of kWarpsOfRows warps, rows_each
// per warp.
template <class Op, int N, bool kMasked>
__global__ void __launch_bounds__(kRowThreads, sizeof(typename Op::T) == 8 ? 2 : 4)
    ReduceRows(const __grid_constant__ ReduceParams p, int rows_each) {
  using T = typename Op::T;
  using Stat = typename Op::Stat;
  constexpr int U = kMasked && N * kInFlight<T> > 16 ? 16 / N : kInFlight<T>;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const bool warps = rows_each > 0;
  const int64_t first = warps ? (int64_t{blockIdx.x} * kWarpsOfRows + warp) * rows_each : blockIdx.x;
  if (first >= p.rows) return;
  const int rows = warps ? static_cast<int>(min(p.rows - first, int64_t{rows_each})) : 1;
  const int64_t begin = min(p.width, p.each * blockIdx.y), width = min(p.width - begin, p.each);
  const RowShare share = {width, static_cast<int>(width / N), warps ? lane : static_cast<int>(threadIdx.x),
                          warps ? lane : warp * U * kWarp + lane, (warps ? kWarp : static_cast<int>(blockDim.x)) * U};
  int64_t mask_at = 0;  // mask offset of row `lane` of the warp
  if constexpr (kMasked) {
    if (lane < rows) {
      mask_at = p.mask_view.outer_map.Below32Bits(static_cast<uint32_t>(first + lane));
      mask_at += begin * p.mask_view.axis_stride;
    }
  }

  const T* x = static_cast<const T*>(p.x) + first * p.width + begin;
  const auto deliver = [&](Stat one) {
    one = MergeLanes<Op>(one, kWarp);
    if (!warps) one = MergeWarps<Op>(one);
    if (share.thread == 0) Deliver<Op>(p, first, blockIdx.y, one);
  };
  if constexpr (!kTogether<T, kMasked>) {
    deliver(ReduceRow<Op, N, kMasked, U>(p, x, nullptr, share));
  } else {
    Stat stat[kRowsTogether];
#pragma unroll
    for (int u = 0; u < kRowsTogether; ++u) stat[u] = Op::Identity();
    for (int u = 0; u < rows; ++u, x += p.width) {
      const uint8_t* mask = nullptr;
      if constexpr (kMasked) mask = p.mask + __shfl_sync(0xffffffffu, mask_at, u);
      const Stat one = ReduceRow<Op, N, kMasked, U>(p, x, mask, share);
#pragma unroll
      for (int k = 0; k < kRowsTogether; ++k) stat[k] = k == u ? one : stat[k];
    }
    if (rows_each > 1) {
      int row;
      Op::Level(stat, kWarp);
      const Stat merged = MergeRows<Op>(stat, lane, 5, &row);
      if (lane < kRowsTogether && row < rows) Op::Store(p, first + row, merged);
    } else {
      deliver(stat[0]);
    }
  }
}

// blockIdx.x: a tile of 2^log_x threads across with N columns each; the other threads of the block share the rows of
// the tile. blockIdx.y: a part of the rows.
template <class Op, int N>
__global__ void __launch_bounds__(kColumnsThreads, sizeof(typename Op::T) == 8 ? 2 : kColumnsBlocks)
    ReduceColumns(const __grid_constant__ ReduceParams p, int log_x, int64_t tiles) {
  using T = typename Op::T;
  using Stat = typename Op::Stat;
  constexpr int U = N == 1 ? 8 : 4;
  constexpr int kPad = kWarp / N;  // keeps accesses to shared memory free of bank conflicts
  __shared__ Stat room[kColumnsThreads * N + kColumnsThreads];

  const int x = threadIdx.x & ((1 << log_x) - 1), y = threadIdx.x >> log_x, threads_y = blockDim.x >> log_x;
  const int64_t outer = blockIdx.x / tiles, first = (blockIdx.x - outer * tiles << log_x) * N, column = first + x * N;
  const int64_t begin = min(p.width, p.each * blockIdx.y), end = column < p.inner ? min(p.width, begin + p.each) : 0;

  const int across = (1 << log_x) + (log_x >= 5 ? kPad : 0);
  using Down = typename Op::template Down<N>;
  Down down({room + y * N * across + x, across});
  const T* from = static_cast<const T*>(p.x) + (outer * p.width + begin + y) * p.inner + column;
  const int64_t step = threads_y * p.inner;
  const uint8_t* mask = nullptr;
  if (N == 1 && p.mask && column < p.inner)
    mask = p.mask + p.mask_view.outer_map(outer) + p.mask_view.inner_map(column);

  if constexpr (N == 1) {
    for (int64_t a = begin + y; a < end; a += U * threads_y, from += U * step) {
      const int left = static_cast<int>(min(end - a, int64_t{U} * threads_y));
      using V = typename Op::V;
      T raw[U];
      bool in[U];
      int count = 0;
#pragma unroll
      for (int i = 0; i < U; ++i) {
        in[i] = i * threads_y < left;
        if (in[i]) raw[i] = from[i * step];
      }
      if (mask) {
#pragma unroll
        for (int i = 0; i < U; ++i) {
          if (in[i]) in[i] = mask[(a + i * threads_y) * p.mask_view.axis_stride];
        }
      }
      V v[U];
#pragma unroll
      for (int i = 0; i < U; ++i) {
        v[i] = in[i] ? ValueOf<V>(raw[i]) : Op::Neutral(p);
        count += in[i];
      }
      down.Add(p, v);
      down.Count(count);
    }
  } else {
    constexpr int kBuffers = Down::kAhead ? 2 : 1;
    Pack<T, N> raw[kBuffers][U];
    int64_t a = begin + y;
    const auto load = [&](Pack<T, N>(&raw)[U]) {
      const int left = static_cast<int>(min(end - a, int64_t{U} * threads_y));
#pragma unroll
      for (int i = 0; i < U; ++i) {
        raw[i] = NeutralPack<T, N>(p);
        if (i * threads_y < left) raw[i] = LoadVector<T, N>(from + i * step);
      }
      a += U * threads_y, from += U * step;
    };
    if constexpr (kBuffers == 1) {
      while (a < end) {
        load(raw[0]);
        down.Add(p, raw[0]);
      }
    } else if (a < end) {
      load(raw[0]);
      for (bool more = true; more;) {
#pragma unroll
        for (int b = 0; b < kBuffers; ++b) {
          more = a < end;
          if (more) load(raw[1 - b]);
          down.Add(p, raw[b]);
          if (!more) break;
        }
      }
    }
  }

  down.Finish();
  __syncthreads();
  const int columns = N << log_x;
  for (int c = threadIdx.x; c < columns && first + c < p.inner; c += blockDim.x) {
    const Stat* const of = room + c % N * across + c / N;
    Stat all = of[0];
#pragma unroll 4
    for (int k = 1; k < threads_y; ++k) all = Op::Merge(all, of[k * N * across]);
    Deliver<Op>(p, outer * p.inner + first + c, blockIdx.y, all);
  }
}

// 2^log_lanes lanes (up to a warp) or the whole block merge the p.parts Stats of each of the p.rows results.
template <class Op> __global__ void __launch_bounds__(kMergeThreads)
    ReduceMerge(const __grid_constant__ ReduceParams p, const typename Op::Stat* partials, int log_lanes) {
  static_assert(sizeof(typename Op::Stat) <= 16, "plan.py");
  const bool block = kMergeThreads >> log_lanes == 1;
  const int lanes = 1 << log_lanes, lane = threadIdx.x & (lanes - 1), parts = static_cast<int>(p.parts);
  const int64_t row = int64_t{blockIdx.x} * (kMergeThreads >> log_lanes) + (threadIdx.x >> log_lanes);
  typename Op::Stat stat = Op::Identity();
  if (row < p.rows) {
    const typename Op::Stat* from = partials + row * parts + lane;
#pragma unroll 1
    for (int left = parts - lane; left > 0; left -= 4 * lanes, from += 4 * lanes) {
      typename Op::Stat some[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) some[i] = left > i * lanes ? from[i * lanes] : Op::Identity();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (left > i * lanes) stat = Op::Merge(stat, some[i]);
      }
    }
  }
  stat = MergeLanes<Op>(stat, min(lanes, kWarp));
  if (block) stat = MergeWarps<Op>(stat);
  if (lane == 0 && row < p.rows) Op::Store(p, row, stat);
}

}  // namespace jaxkern
