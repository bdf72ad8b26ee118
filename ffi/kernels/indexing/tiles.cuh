// Segmented reduction of ascending indices (algorithm `sorted`) for rows of a few elements, or rows that are not whole
// vectors.
//
// ReduceTiles reads keys (or indices) and source and writes out and run.partials. A block copies a tile of source to
// shared memory as 16-byte vectors, whatever the rows are: some places and, if rows are long, a tile of their columns.
// Then it
//
//     lists the runs     each thread searches some places for the ends of runs of equal keys
//     adds them up       one thread per run and column, from shared memory; it writes the row, whose neighbours in out
//                        are mostly written at the same time
//
// A run that ends within kTileLookahead places after the tile in which it begins is reduced by that tile, which reads the
// rest from memory; the next tile skips it. A longer run leaves its parts to ReduceFixup (reduce.cuh). Memory traffic:
// source is read once, each touched row of out is read (with reads_out) and written once. Arrays may have any
// alignment.
#pragma once

#include "indexing/reduce.cuh"

namespace jaxkern {

constexpr int kTileThreads = 256, kTileLookahead = 32;
constexpr int kTilePacks = 16;  // vectors of a column tile of long rows

struct TileShape {
  int columns, pitch;  // columns of a tile, at most; elements between places in shared memory
  int64_t column_tiles;
  Divider by_column_tiles;
  FastDivmod by_columns;
  int values;  // elements of shared memory
  int each;    // places per thread in the search for the ends of runs
};
static_assert(sizeof(TileShape) == 64);

// Dynamic shared memory: the elements; the keys (two words of padding, two places before the tile, the tile, kTileLookahead
// + 1 places after it); the ends of runs, from the one before the first on. kOp: the reduction. T: element type.
template <Reduction kOp, class T> __global__ void __launch_bounds__(kTileThreads, 5)
    ReduceTiles(const __grid_constant__ IndexRun run, const __grid_constant__ ReduceShape s,
                const __grid_constant__ TileShape tile) {
  using C = Compute<T>;
  // Floats are summed in double and rounded once; the kernel is limited by memory, so this is free.
  using A = std::conditional_t<kOp == Reduction::kSum && std::is_same_v<T, float>, double, C>;
  constexpr int kN = kVector<T>;
  extern __shared__ __align__(16) char shared_bytes[];
  const int t = threadIdx.x;
  if (blockIdx.x >= s.blocks) {
    const int64_t warp = (blockIdx.x - s.blocks) * (kTileThreads / kWarp) + t / kWarp;
    if (warp < s.ranges.warps) FillGaps<kOp, T, 1>(run, s.ranges, warp);
    return;
  }
  const int places = static_cast<int>(s.chunk);
  T* const values = reinterpret_cast<T*>(shared_bytes);
  uint32_t* const keys = reinterpret_cast<uint32_t*>(values + tile.values) + 4;
  uint16_t* const ends = reinterpret_cast<uint16_t*>(keys + places + kTileLookahead + 1) + 1;
  __shared__ uint32_t warp_runs[kTileThreads / kWarp];

  // All of these are less than 2^31. As 64-bit numbers they would not fit in the registers of the last loop.
  const uint32_t item = static_cast<uint32_t>(tile.by_column_tiles.Div(blockIdx.x));
  const uint32_t o = static_cast<uint32_t>(s.by_chunks.Div(item));
  const uint32_t number = item - o * static_cast<uint32_t>(s.chunks), begin = number * s.chunk;
  const int held = static_cast<int>(min(s.chunk, run.positions - begin));
  const int column = static_cast<int>(blockIdx.x - item * static_cast<uint32_t>(tile.column_tiles)) * tile.columns;
  const int width = static_cast<int>(min(int64_t{tile.columns}, run.inner - column));
  const int64_t before = begin * run.inner + column;  // elements before the tile in this slice of source
  const T* const from = static_cast<const T*>(run.source) + o * run.source_stride * run.inner + before;

  const int wanted = static_cast<int>(min(s.chunk + kTileLookahead + 1, run.positions - begin));
  if (run.keys) {
    const uint32_t* const key = run.keys + begin;
#pragma unroll 4
    for (int i = t; i < wanted; i += kTileThreads) CopyAsync<4>(keys + i, key + i);
  } else {
#pragma unroll 4
    for (int i = t; i < wanted; i += kTileThreads) keys[i] = KeyAt(run, begin + i);
  }
#pragma unroll 1
  for (int i = wanted + t; i < places + kTileLookahead + 1; i += kTileThreads) keys[i] = kNoKey;
  if (t == 0) keys[-1] = begin > 0 ? KeyAt(run, begin - 1) : kNoKey;
  if (t == kWarp) keys[-2] = begin > s.chunk ? KeyAt(run, begin - s.chunk - 1) : kNoKey;
  if (t == 0) ends[-1] = UINT16_MAX;

  // Element `ahead` of shared memory is the first of the tile; both have the same offset from a 16-byte boundary.
  // Vectors may extend beyond the tile, but not beyond the slice of source, [low, high).
  const int ahead = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16 / sizeof(T)), pitch = tile.pitch;
  const int64_t low = -before, high = run.positions * run.inner - before;
  if (tile.column_tiles == 1) {  // the tile is contiguous
    const int elements = held * width, all = (ahead + elements + kN - 1) / kN;
    const int first = -ahead < low, last = all - (all * kN - ahead > high);
    const T* const p = from - ahead;
#pragma unroll 4
    for (int i = first + t; i < last; i += kTileThreads) CopyAsync<16>(values + i * kN, p + i * kN);
    const int head = first ? min(kN - ahead, elements) : 0, tail = max(last * kN - ahead, head);
    if (t < head) values[ahead + t] = from[t];
    if (t < elements - tail) values[ahead + tail + t] = from[tail + t];
  } else {
    // kTilePacks threads per place. All vectors of a thread have the same offset from the first column.
    constexpr int kLines = kTileThreads / kTilePacks;
    const int line = t / kTilePacks, at = ahead + line * pitch;
    const int c = at / kN * kN + t % kTilePacks * kN - at;
    if (c > -kN && c < width) {
      T* to = values + at + c;
      const T* p = from + line * run.inner + c;
      const int64_t step = kLines * run.inner;
      if (low <= -kN && high >= (held - 1) * run.inner + width + kN) {
#pragma unroll 4
        for (int i = line; i < held; i += kLines, to += kLines * pitch, p += step) CopyAsync<16>(to, p);
      } else {
        int64_t g = line * run.inner + c;
        for (int i = line; i < held; i += kLines, to += kLines * pitch, p += step, g += step) {
          if (g >= low && g + kN <= high) {
            CopyAsync<16>(to, p);
          } else {
#pragma unroll 1
            for (int e = max(-c, 0); e < min(kN, width - c); ++e) to[e] = p[e];
          }
        }
      }
    }
  }
  WaitForCopies();
  __syncthreads();

  // Find the ends of runs. For now the last run of the tile ends with the tile.
  const int place = t * tile.each, left = held - place;
  uint32_t mask = 0;
  if (left > 0) {
    if (tile.each >= 4) {
      for (int i = 0; i < tile.each; i += 4) {
        const uint4 key = *reinterpret_cast<const uint4*>(keys + place + i);
        const uint32_t next = keys[place + i + 4];
        mask |= ((key.x != key.y) | (key.y != key.z) << 1 | (key.z != key.w) << 2 | (key.w != next) << 3) << i;
      }
    } else {
      for (int i = 0; i < tile.each; ++i) mask |= (keys[place + i] != keys[place + i + 1]) << i;
    }
    if (left <= tile.each) mask = (mask & ((1u << (left - 1)) - 1)) | 1u << (left - 1);
  }
  const int runs = ListRunEnds<kTileThreads>(mask, place, ends, warp_runs);

  if (s.ranges.rows) {
    ForGapsOfTile(run, s.ranges, keys, ends, runs, begin + held == run.positions,
                  [&](uint32_t first, uint32_t last) { FillRows<kOp, T, 1>(run, o, column, width, first, last); });
  }
  const C alpha = Alpha<C>(run);
  const uint32_t inner = static_cast<uint32_t>(run.inner);
  T* const out = static_cast<T*>(run.out) + (o * run.out_stride + run.first_row) * run.inner + column;
  // The runs, if any, that may have parts in other tiles.
  const int first_cut = keys[-1] == keys[0] ? 0 : -1, last_cut = keys[held] == keys[held - 1] ? runs - 1 : -1;
#pragma unroll 1
  for (int unit = t; unit < runs * tile.columns; unit += kTileThreads) {
    const int r = tile.by_columns.Div(unit), c = unit - r * tile.columns;
    const int first = static_cast<uint16_t>(ends[r - 1] + 1), end = ends[r] + 1;
    const uint32_t own = keys[first];
    if (own >= run.dropped || c >= width) continue;
    enum { kWhole, kHead, kTail, kGoesOn } part = kWhole;
    if (r == first_cut) {
      if (keys[-2] != own && keys[kTileLookahead] != own) continue;  // the preceding tile has reduced it
      part = kHead;
    } else if (r == last_cut) {
      part = keys[held + kTileLookahead] == own ? kTail : kGoesOn;
    }
    A total[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) total[u] = Identity<kOp, A>();
    const T* p = values + ahead + first * pitch + c;
    int left = end - first;
    const auto add = [&](int u) { total[u] = Combined<kOp>(total[u], static_cast<A>(ToCompute(p[u * pitch]))); };
#pragma unroll 1
    for (; left >= 4; left -= 4, p += 4 * pitch) add(0), add(1), add(2), add(3);
    if (left > 0) add(0);
    if (left > 1) add(1);
    if (left > 2) add(2);
    if (part == kGoesOn) {
      bool on = true;
#pragma unroll 1
      for (int i = held; on; i += 4) {
        T v[4];
        bool has[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          has[u] = i + u < held + kTileLookahead && keys[i + u] == own;
          if (has[u]) v[u] = from[(i + u) * run.inner + c];
        }
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          if (has[u]) total[u] = Combined<kOp>(total[u], static_cast<A>(ToCompute(v[u])));
        }
        on = has[3];
      }
    }
    const C all = static_cast<C>(Combined<kOp>(Combined<kOp>(total[0], total[1]), Combined<kOp>(total[2], total[3])));
    if (part == kHead || part == kTail) {
      Slot<C>(run, s, o, number, part == kTail)[column + c] = all;
    } else {
      T* const at = out + static_cast<uint64_t>(own) * inner + c;
      const C x = run.reads_out ? ToCompute(*at) : C(0);
      *at = FromCompute<T>(Finished<kOp>(all, alpha, run.reads_out, x));
    }
  }
}

}  // namespace jaxkern
