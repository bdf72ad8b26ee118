// The segment softmax of all but short segments of narrow rows: a warp walks the segments that begin in a chunk of
// sorted positions, for a strip of columns.
//
// Lanes lie side by side in a row, a vector each (or kParts elements equally far apart, where rows are no whole
// vectors), and in as many rows at once as that leaves lanes. A segment is read kUnroll rows a lane at a time, all
// under way at once; for each column the warp knows the maximum before it takes exponentials, and what it has summed is
// scaled where a later batch has a larger one. Then it goes back over the segment, from the last batch, which is still
// in registers, to the first, which a cache has: a segment of one batch is read once.
//
// A segment that goes beyond the room of its chunk (segment_softmax_plan.h) is long: the chunks leave the statistics of
// their parts in slots, SegmentJoin merges them, and a second launch of the same kernel, `rewrites`, of one wave of
// warps that look through several chunks each, writes those rows.
#pragma once

#include <algorithm>

#include "segment_softmax_join.cuh"

namespace jaxkern {

constexpr int kWalkThreads = 128, kWalkWarps = kWalkThreads / kWarp;
constexpr int64_t kRewriteWarps = 132 * 20;  // of one wave on the largest devices of today

struct WalkShape {
  SegmentShape cut;  // of which the walk uses places, reach, tiles and cotangent
  int log_lanes = 0;  // of the lanes side by side
  int strips = 1;
  uint32_t chunks = 1;  // a warp
  bool rewrites = false;
  int64_t warps = 0;
  Divider by_strips, by_groups;
};

// As KeyAt(), with one copy of the code for indices that are no keys yet.
static __device__ __noinline__ uint32_t KeyOfIndex(const IndexRun& run, uint32_t place) {
  return KeyOf(run, LoadIndex(run, place), place);
}
__device__ __forceinline__ uint32_t WalkKey(const IndexRun& run, uint32_t place) {
  return run.keys ? __ldg(run.keys + place) : KeyOfIndex(run, place);
}

// Whether the run that begins in a chunk goes on for more than `reach` places behind its `end`.
__device__ __forceinline__ bool GoesOnLong(const IndexRun& run, uint32_t reach, uint32_t end, uint32_t key) {
  return end + reach < run.positions && WalkKey(run, end + reach) == key;
}

// Whether the run that comes into the chunk at `begin` is long. `first`: where the chunk behind the one that it begins
// in does.
__device__ __forceinline__ bool ComesInLong(const IndexRun& run, const SegmentShape& s, uint32_t begin, uint32_t key) {
  uint32_t first = begin;
  while (begin - first < s.reach && first > s.places && WalkKey(run, first - s.places - 1) == key) first -= s.places;
  return begin - first >= s.reach || GoesOnLong(run, s.reach, first, key);
}

// The keys from a place on, a lane each, and where runs begin among them. The next ones are under way.
struct KeyWindow {
  uint32_t first, key, starts, next;

  static __device__ __forceinline__ uint32_t At(const IndexRun& run, uint32_t place) {
    return place < run.positions ? min(WalkKey(run, place), run.dropped) : UINT32_MAX;
  }
  __device__ __forceinline__ KeyWindow(const IndexRun& run, uint32_t begin) : first(begin) {
    const uint32_t lane = threadIdx.x % kWarp;
    key = At(run, begin + lane);
    next = At(run, begin + kWarp + lane);
    Mark(begin > 0 ? At(run, begin - 1) : UINT32_MAX);
  }
  __device__ __forceinline__ void Advance(const IndexRun& run) {
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

template <class Op, int N, int kParts>
__global__ void __launch_bounds__(kWalkThreads, kParts > 1 ? 4 : 5)
SegmentWalk(const __grid_constant__ IndexRun run, const __grid_constant__ WalkShape s) {
  using T = typename Op::T;
  using C = typename Op::C;
  using Stat = typename Op::Stat;
  constexpr int kE = N * kParts, kUnroll = sizeof(T) == 8 ? 2 : 8 / Op::kInputs;
  struct Slice {
    Pack<T, N> part[kParts];
  };
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWalkWarps + threadIdx.x / kWarp;
  if (warp >= s.warps) return;
  const uint32_t lane = threadIdx.x % kWarp, places = s.cut.places, reach = s.cut.reach;
  const int64_t item = s.by_strips.Div(warp), o = s.by_groups.Div(item);
  const uint32_t groups = static_cast<uint32_t>(s.by_groups.divisor), group = static_cast<uint32_t>(item - o * groups);
  const int lanes = 1 << s.log_lanes, rows_at_once = kWarp >> s.log_lanes, batch = kUnroll * rows_at_once;
  const int ahead = lane >> s.log_lanes, step = lanes * N;  // step: from one part to the next
  const int64_t column = (warp - item * s.strips) * lanes * kE + (lane & (lanes - 1)) * N;
  // A part behind the row is the row's first elements once more, not written.
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
  for (int k = 0; k < Op::kInputs; ++k) inputs[k] = reinterpret_cast<const char*>(InputOf<T>(run, s.cut, k, o) + safe);
  char* out = reinterpret_cast<char*>(OutputOf<T>(run, o) + safe);
  const uint64_t row_bytes = run.inner * sizeof(T);

  // Rows [base, stop) of a run, as far as they fit: a row behind it is its last one once more. `skipped`: rows
  // between the first position and the first row of the run's slice of the batch, beyond the positions between them.
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
  // Column i of row u.
  const auto values = [&](int u, int i, C (&v)[Op::kInputs]) {
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) {
      C all[N];
      Unpack(x[u][k].part[i / N], all);
      v[k] = all[i % N];
    }
  };
  const auto slot = [&](uint32_t chunk, int tail, int i) {
    return SegmentSlot<Stat>(run, s.cut, o, chunk, tail) + column + i / N * step + i % N;
  };

  // Chunks with rows to write, a bit each, of every groups-th: those of one segment are neighbours. The walk has one.
  uint32_t chunks = 1;
  if (s.rewrites) {
    const uint32_t chunk = group + lane * groups, begin = chunk * places, end = begin + places;
    bool some = false;
    if (lane < s.chunks && chunk < s.cut.tiles) {
      const uint32_t head = WalkKey(run, begin), last = WalkKey(run, min(end, run.positions) - 1);
      some = last < run.dropped && end < run.positions && WalkKey(run, end) == last &&
             GoesOnLong(run, reach, end, last);
      some = some || (begin > 0 && head < run.dropped && WalkKey(run, begin - 1) == head &&
                      ComesInLong(run, s.cut, begin, head));
    }
    chunks = __ballot_sync(~0u, some);
  }
#pragma unroll 1
  for (; chunks; chunks &= chunks - 1) {
    const uint32_t chunk = group + (__ffs(chunks) - 1) * groups, begin = chunk * places;
    const uint32_t end = min(begin + places, run.positions);
    KeyWindow window(run, begin);
    uint32_t first = begin, stop;
#pragma unroll 1
    for (; first < end; first = stop) {
      const uint32_t key = __shfl_sync(~0u, window.key, first - window.first);
      const bool dropped = key >= run.dropped, comes_in = first == begin && !(window.starts & 1);
      // Where it ends, or goes on for longer than matters.
      const uint32_t far = dropped || comes_in ? end : end + reach;
      uint32_t behind = window.starts & ~((2u << (first - window.first)) - 1);
      while (!behind && window.first + kWarp <= far) {
        window.Advance(run);
        behind = window.starts;
      }
      stop = behind ? window.first + __ffs(behind) - 1 : far + 1;
      const bool open = stop > end + reach;
      if (dropped || comes_in || open) stop = min(stop, end);
      bool is_part = open;
      int tail = 1;
      if (dropped) {
        if (s.rewrites) continue;
        const Pack<T, N> zero = Filled<T, N>(FromCompute<T>(C(0)));
        for (uint32_t place = first + ahead; place < stop; place += rows_at_once) {
          const uint64_t row = run.order ? __ldg(run.order + place) : run.SourceRow(place);
#pragma unroll
          for (int p = 0; p < kParts; ++p) {
            if (has[p]) StorePart<T, N>(reinterpret_cast<T*>(out + row * row_bytes) + apart[p], zero);
          }
        }
        continue;
      } else if (comes_in) {
        if (!ComesInLong(run, s.cut, begin, key)) continue;
        is_part = true;
        tail = 0;
      }
      if (s.rewrites && !is_part) continue;

      if (run.source_extra && !run.order) skipped = static_cast<uint32_t>(run.SourceRow(first)) - first;
      uint32_t base = first;
      Stat total[kE];
      if (s.rewrites) {
#pragma unroll
        for (int i = 0; i < kE; ++i) total[i] = has[i / N] ? *slot(chunk, tail, i) : Op::Identity();
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
                largest[i] = Max(largest[i], v[0]);  // leaves out NaN, whose power is NaN all the same
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
            if (ahead == 0 && has[i / N]) *slot(chunk, tail, i) = total[i];
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

template <class Op, int N, int kParts>
cudaError_t LaunchWalk(const IndexRun& run, const SegmentShape& cut, cudaStream_t stream) {
  WalkShape s;
  s.cut = cut;
  const int64_t lanes = (run.inner + N * kParts - 1) / (N * kParts);
  // Fewer lanes side by side where that leaves fewer of them idle.
  int side = WalkLanes(lanes, kWalkLanes);
  const auto slots = [&](int64_t n) { return (lanes + n - 1) / n * n; };
  if (side == kWalkLanes && slots(kWalkLanes / 2) < slots(kWalkLanes)) side /= 2;
  while (1 << s.log_lanes < side) ++s.log_lanes;
  s.strips = static_cast<int>(slots(side) / side);
  s.by_strips = Divider(s.strips);
  const auto launch = [&](uint32_t chunks) {
    s.chunks = chunks;
    const int64_t groups = (cut.tiles + chunks - 1) / chunks;
    s.by_groups = Divider(groups);
    s.warps = run.outer * groups * s.strips;
    const int64_t blocks = (s.warps + kWalkWarps - 1) / kWalkWarps;
    return Launch(SegmentWalk<Op, N, kParts>, {blocks, 1, kWalkThreads}, stream, run, s);
  };
  cudaError_t error = launch(1);
  if (error != cudaSuccess || run.positions <= cut.room) return error;  // no segment is long
  error = LaunchJoin<Op>(run, cut, stream);
  if (error != cudaSuccess) return error;
  s.rewrites = true;
  const int64_t each = (run.outer * cut.tiles * s.strips + kRewriteWarps - 1) / kRewriteWarps;
  return launch(static_cast<uint32_t>(std::min(each, int64_t{kWarp})));
}

}  // namespace jaxkern
