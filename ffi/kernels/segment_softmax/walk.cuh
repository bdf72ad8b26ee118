// Segment softmax of all but short segments of narrow rows: in SegmentWalk a warp walks the runs that begin in a tile
// of places, for a strip of columns.
//
// The kernel reads run.keys, run.order and the inputs and writes run.out. Adjacent lanes take adjacent vectors of a row
// (or kParts elements at a fixed stride if rows are not whole vectors), and the rest of the warp takes further rows. A
// batch of a run is kUnroll rows per lane, all in flight at once. The maximum of each column of the batch is computed
// before its exponentials; the sum is rescaled if a later batch has a larger maximum. The second pass goes backwards,
// from the last batch, which is still in registers, to the first, which is in a cache. Memory traffic: a run of one
// batch is read once, a longer one twice, mostly from L2; results are written once.
//
// Long runs (run.cuh) leave Stats in slots; after SegmentJoin a second launch of this kernel, with `rewrites`, searches
// several tiles per warp and writes those rows.
//
// N > 1 requires rows and arrays aligned to N elements. No shared memory, no barriers.
#pragma once

#include "ops.cuh"
#include "run.cuh"

namespace jaxkern {

constexpr int kWalkThreads = 128, kWalkWarps = kWalkThreads / kWarp;

struct WalkShape {
  int64_t warps;
  Divider by_strips, by_groups;  // by_groups: groups of tiles
  int log_lanes;                 // log2 of the lanes across a row
  int strips;
  uint32_t tiles;  // tiles of a warp, at most 32
  bool rewrites;
};
static_assert(sizeof(WalkShape) == 72);

// True if the run that starts in this tile and ends at `end` is long.
__device__ __forceinline__ bool GoesOnLong(const SegmentRun& run, uint32_t end, uint32_t key) {
  return end + run.lookahead < run.positions && run.Key(end + run.lookahead) == key;
}

// Whether the run that continues into the tile at `begin` is long. `first`: end of the tile in which the run begins.
__device__ __forceinline__ bool ComesInLong(const SegmentRun& run, uint32_t begin, uint32_t key) {
  uint32_t first = begin;
  while (begin - first < run.lookahead && first > run.places && run.Key(first - run.places - 1) == key)
    first -= run.places;
  return begin - first >= run.lookahead || GoesOnLong(run, first, key);
}

// A warp's window on the keys: the keys of 32 places, one per lane, and a bit mask of the places that begin a run. The
// next 32 keys are in flight.
struct KeyWindow {
  uint32_t first, key, starts, next;

  static __device__ __forceinline__ uint32_t At(const SegmentRun& run, uint32_t place) {
    return place < run.positions ? min(run.Key(place), run.dropped) : UINT32_MAX;
  }
  __device__ __forceinline__ KeyWindow(const SegmentRun& run, uint32_t begin) : first(begin) {
    const uint32_t lane = threadIdx.x % kWarp;
    key = At(run, begin + lane);
    next = At(run, begin + kWarp + lane);
    Mark(begin > 0 ? At(run, begin - 1) : UINT32_MAX);
  }
  __device__ __forceinline__ void Advance(const SegmentRun& run) {
    const uint32_t last = __shfl_sync(~0u, key, kWarp - 1);
    first += kWarp;
    key = next;
    next = At(run, first + kWarp + threadIdx.x % kWarp);
    Mark(last);
  }

 private:
  __device__ __forceinline__ void Mark(uint32_t last) {
    uint32_t before = __shfl_up_sync(~0u, key, 1);
    if (threadIdx.x % kWarp == 0) before = last;
    starts = __ballot_sync(~0u, key != before);
  }
};

// Op: SegmentForward or SegmentBackward (ops.cuh). N: elements of a vector. kParts: parts per lane; 1 for whole
// vectors.
template <class Op, int N, int kParts> __global__ void __launch_bounds__(kWalkThreads, kParts > 1 ? 4 : 5)
    SegmentWalk(const __grid_constant__ SegmentRun run, const __grid_constant__ WalkShape s) {
  using T = typename Op::T;
  using C = typename Op::C;
  using Stat = typename Op::Stat;
  constexpr int kE = N * kParts, kUnroll = sizeof(T) == 8 ? 2 : 8 / Op::kInputs;
  struct Slice {
    Pack<T, N> part[kParts];
  };
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWalkWarps + threadIdx.x / kWarp;
  if (warp >= s.warps) return;
  const uint32_t lane = threadIdx.x % kWarp, places = run.places, lookahead = run.lookahead;
  const int64_t item = s.by_strips.Div(warp), o = s.by_groups.Div(item);
  const uint32_t groups = static_cast<uint32_t>(s.by_groups.divisor), group = static_cast<uint32_t>(item - o * groups);
  const int lanes = 1 << s.log_lanes, rows_at_once = kWarp >> s.log_lanes, batch = kUnroll * rows_at_once;
  const int ahead = lane >> s.log_lanes, step = lanes * N;  // step: elements between parts
  const int64_t column = (warp - item * s.strips) * lanes * kE + (lane & (lanes - 1)) * N;
  // A part beyond the end of the row reads the row's first elements instead, and is not written.
  uint32_t apart[kParts];
  bool has[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    has[p] = column + p * step < run.inner;
    apart[p] = has[p] ? p * step : 0;
  }
  const int64_t safe = has[0] ? column : 0;
  const char* inputs[Op::kInputs];
#pragma unroll
  for (int k = 0; k < Op::kInputs; ++k) inputs[k] = reinterpret_cast<const char*>(run.Input<T>(k, o) + safe);
  char* out = reinterpret_cast<char*>(run.Output<T>(o) + safe);
  const uint64_t row_bytes = run.inner * sizeof(T);

  // Reads a batch of rows [base, stop) of a run; lanes beyond its end read its last row again. `skipped`, without an
  // order: offset between the rows of the run's slice of the batch and their positions.
  Slice x[kUnroll][Op::kInputs];
  uint32_t number[kUnroll], skipped = 0;
  const auto read = [&](uint32_t base, uint32_t stop) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) number[u] = min(base + u * rows_at_once + ahead, stop - 1) + skipped;
    if (run.order) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) number[u] = __ldg(run.order + number[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * rows_at_once >= stop) break;
#pragma unroll
      for (int k = 0; k < Op::kInputs; ++k) {
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          x[u][k].part[p] = LoadPart<T, N>(reinterpret_cast<const T*>(inputs[k] + number[u] * row_bytes) + apart[p]);
        }
      }
    }
  };
  // Returns column i of row u.
  const auto values = [&](int u, int i, C(&v)[Op::kInputs]) {
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) {
      C all[N];
      Unpack(x[u][k].part[i / N], all);
      v[k] = all[i % N];
    }
  };
  const auto slot = [&](uint32_t tile, int tail, int i) {
    return run.Slot<Stat>(o, tile, tail) + column + i / N * step + i % N;
  };

  // Bit mask of the tiles that this warp processes: every groups-th one, because the tiles of a long run are adjacent.
  uint32_t pending = 1;
  if (s.rewrites) {
    const uint32_t tile = group + lane * groups, begin = tile * places, end = begin + places;
    bool some = false;
    if (lane < s.tiles && tile < run.tiles) {
      const uint32_t head = run.Key(begin), last = run.Key(min(end, run.positions) - 1);
      some = last < run.dropped && end < run.positions && run.Key(end) == last && GoesOnLong(run, end, last);
      some = some || (begin > 0 && head < run.dropped && run.Key(begin - 1) == head && ComesInLong(run, begin, head));
    }
    pending = __ballot_sync(~0u, some);
  }
#pragma unroll 1
  for (; pending; pending &= pending - 1) {
    const uint32_t tile = group + (__ffs(pending) - 1) * groups, begin = tile * places;
    const uint32_t end = min(begin + places, run.positions);
    KeyWindow window(run, begin);
    uint32_t first = begin, stop;
#pragma unroll 1
    for (; first < end; first = stop) {
      const uint32_t key = __shfl_sync(~0u, window.key, first - window.first);
      const bool dropped = key >= run.dropped, comes_in = first == begin && !(window.starts & 1);
      // Find the end of the run, or that it is beyond the lookahead.
      const uint32_t far = dropped || comes_in ? end : end + lookahead;
      uint32_t behind = window.starts & ~((2u << (first - window.first)) - 1);
      while (!behind && window.first + kWarp <= far) {
        window.Advance(run);
        behind = window.starts;
      }
      stop = behind ? window.first + __ffs(behind) - 1 : far + 1;
      const bool open = stop > end + lookahead;
      if (dropped || comes_in || open) stop = min(stop, end);
      bool is_part = open;
      int tail = 1;
      if (dropped) {
        if (s.rewrites) continue;
        const Pack<T, N> zero = Filled<T, N>(FromCompute<T>(C(0)));
        for (uint32_t place = first + ahead; place < stop; place += rows_at_once) {
          const uint64_t row = run.RowAt(place);
#pragma unroll
          for (int p = 0; p < kParts; ++p) {
            if (has[p]) StorePart<T, N>(reinterpret_cast<T*>(out + row * row_bytes) + apart[p], zero);
          }
        }
        continue;
      } else if (comes_in) {
        if (!ComesInLong(run, begin, key)) continue;
        is_part = true;
        tail = 0;
      }
      if (s.rewrites && !is_part) continue;

      if (run.extra && !run.order) skipped = static_cast<uint32_t>(run.RowAt(first)) - first;
      uint32_t base = first;
      Stat total[kE];
      if (s.rewrites) {
#pragma unroll
        for (int i = 0; i < kE; ++i) total[i] = has[i / N] ? *slot(tile, tail, i) : Op::Identity();
        base = first + ((stop - first - 1) >> (5 - s.log_lanes)) / kUnroll * batch;
      } else {
#pragma unroll
        for (int i = 0; i < kE; ++i) total[i] = Op::Identity();
#pragma unroll 1
        for (;; base += batch) {
          read(base, stop);
          if constexpr (Op::kMaxima) {
            bool grows = false;
            C largest[kE];
#pragma unroll
            for (int i = 0; i < kE; ++i) largest[i] = total[i].max;
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
              if (base + u * rows_at_once >= stop) break;
#pragma unroll
              for (int i = 0; i < kE; ++i) {
                C v[Op::kInputs];
                values(u, i, v);
                largest[i] = Max(largest[i], v[0]);  // ignores NaN, which its exponential propagates
              }
            }
            for (int apart = lanes; apart < kWarp; apart *= 2) {
#pragma unroll
              for (int i = 0; i < kE; ++i) largest[i] = Max(largest[i], __shfl_xor_sync(~0u, largest[i], apart));
            }
#pragma unroll
            for (int i = 0; i < kE; ++i) grows |= largest[i] != total[i].max;
            if (base > first && grows) {
#pragma unroll
              for (int i = 0; i < kE; ++i) total[i].sum *= Power<T>(total[i].max, Base(largest[i]));
            }
#pragma unroll
            for (int i = 0; i < kE; ++i) total[i].max = largest[i];
          }
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            if (base + u * rows_at_once >= stop) break;
            const bool inside = base + u * rows_at_once + ahead < stop;
#pragma unroll
            for (int i = 0; i < kE; ++i) {
              C v[Op::kInputs];
              values(u, i, v);
              const C term = Op::Term(v, total[i]);
              if (inside) total[i].sum += term;
            }
          }
          if (base + batch >= stop) break;
        }
        for (int apart = lanes; apart < kWarp; apart *= 2) {
#pragma unroll
          for (int i = 0; i < kE; ++i) total[i].sum += __shfl_xor_sync(~0u, total[i].sum, apart);
        }
        if (is_part) {
#pragma unroll
          for (int i = 0; i < kE; ++i) {
            if (ahead == 0 && has[i / N]) *slot(tile, tail, i) = total[i];
          }
          continue;
        }
      }

      typename Op::Final final[kE];
#pragma unroll
      for (int i = 0; i < kE; ++i) final[i] = Op::Finish(total[i]);
      bool held = !s.rewrites;
#pragma unroll 1
      for (;; base -= batch) {
        if (!held) read(base, stop);
        held = false;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (base + u * rows_at_once >= stop) break;
          C y[kParts][N];
#pragma unroll
          for (int i = 0; i < kE; ++i) {
            C v[Op::kInputs];
            values(u, i, v);
            y[i / N][i % N] = Op::Map(v, final[i]);
          }
          const bool inside = base + u * rows_at_once + ahead < stop;
#pragma unroll
          for (int p = 0; p < kParts; ++p) {
            const Pack<T, N> pack = Repack<T, N>(y[p]);
            if (inside && has[p]) {
              StorePart<T, N>(reinterpret_cast<T*>(out + number[u] * row_bytes) + apart[p], pack);
            }
          }
        }
        if (base == first) break;
      }
    }
  }
}

}  // namespace jaxkern
