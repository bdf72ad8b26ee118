// Shared parts of the segmented reductions. The ordered updates are cut into chunks (or tiles). A run of equal keys
// that spans several chunks leaves the partial sums of its parts in slots, two per chunk:
//
//     head    the part of the run that began in an earlier chunk
//     tail    the part of the run that begins in this chunk and continues after it
//
//     ReduceGroups    adds up the heads within very long runs, kHeadGroup at a time; reads and writes run.partials
//     ReduceFixup     adds up the parts of each long run; reads run.partials, writes rows of out
//
// The order of the additions depends only on the chunks, so results are reproducible. No thread waits for another one,
// even if half of all updates target one row. Memory traffic: each slot in use is read once.
#pragma once

#include "indexing/gaps.cuh"

namespace jaxkern {

constexpr int kFixupThreads = 256, kHeadThreads = 128;
constexpr uint32_t kHeadGroup = 32;  // chunks whose heads are added up together

struct ReduceShape {
  uint32_t chunk, chunks;
  uint32_t lookahead;  // without ChunkInfos: places after a chunk that belong to it if its last run ends there
  int64_t vectors;     // threads per row
  Divider by_vectors, by_chunks;
  int64_t threads;  // threads of the reduction
  int64_t blocks;   // blocks of the reduction; further blocks fill gaps
  RangeShape ranges;
};
static_assert(sizeof(ReduceShape) == 256);

// Returns a slot of run.partials [outer][chunk][head, tail][inner].
template <class C>
__device__ __forceinline__ C* Slot(const IndexRun& run, const ReduceShape& s, int64_t o, uint32_t chunk, int tail) {
  return static_cast<C*>(run.partials) + ((o * s.chunks + chunk) * 2 + tail) * run.inner;
}

// Adds up the heads of each group of kHeadGroup chunks that lies within one long run. The result replaces the tail of
// the first chunk, which is unused there. One thread per group and column. The first and the last group are excluded:
// their runs end or begin within them. kOp: the reduction. T: element type. kDescribed: run.chunks describes the chunks (Describe in
// chunks.cuh), and run.keys lists the keys.
template <Reduction kOp, class T, bool kDescribed> __global__ void __launch_bounds__(kHeadThreads)
    ReduceGroups(const __grid_constant__ IndexRun run, const __grid_constant__ ReduceShape s, const Divider by_columns,
                 const Divider by_groups, int64_t threads) {
  using C = Compute<T>;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kHeadThreads + threadIdx.x;
  if (thread >= threads) return;
  const int64_t item = by_columns.Div(thread), column = thread - item * run.inner, o = by_groups.Div(item);
  const uint32_t chunk = static_cast<uint32_t>(item - o * by_groups.divisor + 1) * kHeadGroup;
  constexpr Keys kKeys = kDescribed ? Keys::kListed : Keys::kAny;
  const uint32_t key = KeyAt<kKeys>(run, chunk * s.chunk - 1),
                 behind = KeyAt<kKeys>(run, (chunk + kHeadGroup) * s.chunk);
  if (key >= run.dropped || behind != key) return;
  const C* const head = Slot<C>(run, s, o, chunk, 0) + column;
  C total = Identity<kOp, C>();
#pragma unroll
  for (uint32_t begin = 0; begin < kHeadGroup; begin += 16) {
    C v[16];
#pragma unroll
    for (uint32_t u = 0; u < 16; ++u) v[u] = head[(begin + u) * 2 * run.inner];
#pragma unroll
    for (uint32_t u = 0; u < 16; ++u) total = Combined<kOp>(total, v[u]);
  }
  Slot<C>(run, s, o, chunk, 1)[column] = total;
}

// Adds up the parts of long runs. A block searches some chunks for long runs that begin there: groups of kFixupChunks
// adjacent chunks, with the groups far apart, because rows with many updates are often adjacent. One warp, or several
// if runs are few, takes a run and a tile of columns. Each lane has V adjacent columns; the remaining lanes of the warp
// take different parts of the run.
constexpr int kFixupLanes = 8, kFixupChunks = 8;
constexpr int FixupAhead(bool wide) { return wide ? 8 : 16; }  // parts in flight per lane
struct FixupShape {
  int lanes;              // lanes across the columns
  uint32_t chunks, step;  // chunks of a block, and the stride of its groups
  int64_t column_tiles;
  bool grouped;  // ReduceGroups has run
};
static_assert(sizeof(FixupShape) == 32);

// kOp, T, kDescribed: as in ReduceGroups. V: columns per lane.
template <Reduction kOp, class T, int V, bool kDescribed> __global__ void __launch_bounds__(kFixupThreads, 4)
    ReduceFixup(const __grid_constant__ IndexRun run, const __grid_constant__ ReduceShape s, const FixupShape f) {
  using C = Compute<T>;
  struct LongRun {
    uint32_t chunk, parts, key;
  };
  struct alignas(V * sizeof(C)) Columns {
    C c[V];
  };
  constexpr int kWarps = kFixupThreads / kWarp, kAhead = FixupAhead(V > 1);
  __shared__ LongRun found[kFixupThreads];
  __shared__ Columns room[kWarps][kFixupLanes];
  __shared__ int runs;
  const int64_t column_tile = blockIdx.x % f.column_tiles, item = blockIdx.x / f.column_tiles, o = item / f.step;
  const uint32_t first = static_cast<uint32_t>(item - o * f.step);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, lane_ways = kWarp / f.lanes;
  const int64_t column = (column_tile * f.lanes + lane % f.lanes) * V;
  const bool active = column < run.inner;
  const C alpha = Alpha<C>(run);
  const auto add = [](Columns& total, const Columns& v) {
#pragma unroll
    for (int i = 0; i < V; ++i) total.c[i] = Combined<kOp>(total.c[i], v.c[i]);
  };
  Columns identity;
#pragma unroll
  for (int i = 0; i < V; ++i) identity.c[i] = Identity<kOp, C>();

  for (uint32_t base = 0; base < f.chunks; base += kFixupThreads) {
    if (threadIdx.x == 0) runs = 0;
    __syncthreads();
    const uint32_t number = base + threadIdx.x;
    const uint32_t chunk = (number / kFixupChunks * f.step + first) * kFixupChunks + number % kFixupChunks;
    if (number < f.chunks && chunk < s.chunks) {
      uint32_t parts, key;
      if constexpr (kDescribed) {
        const ChunkInfo info = run.chunks[chunk];
        parts = info.parts, key = info.key;
      } else {
        parts = PartsOf(run, s.chunk, s.chunks, chunk, s.lookahead);
        key = KeyAt(run, min((chunk + 1) * s.chunk, run.positions) - 1);
      }
      if (parts > 0) found[atomicAdd(&runs, 1)] = {chunk, parts, key};
    }
    __syncthreads();
    int team = kWarps;  // warps per run
    while (team > 1 && team * runs > kWarps) team /= 2;
    const uint32_t ways = lane_ways * team, way = warp % team * lane_ways + lane / f.lanes;
    for (int begin = 0; begin < runs; begin += kWarps / team) {  // a single pass if a run has several warps
      const int i = begin + warp / team;
      const bool has = active && i < runs;
      const LongRun r = found[min(i, runs - 1)];
      T* const at = static_cast<T*>(run.out) + (o * run.out_stride + run.OutRow(r.key)) * run.inner + column;
      Columns x = {};
      if (run.reads_out && has && way == 0) {
#pragma unroll
        for (int c = 0; c < V; ++c) x.c[c] = ToCompute(run.Old(at)[c]);
      }
      // The parts of a run: the tail of its first chunk, heads up to the first whole group, the sums of whole groups,
      // and the remaining heads.
      const uint32_t end = r.chunk + r.parts - 1;  // last chunk of the run
      uint32_t heads = r.parts - 1, groups = 0;
      if (f.grouped && end / kHeadGroup > r.chunk / kHeadGroup + 1) {
        groups = end / kHeadGroup - r.chunk / kHeadGroup - 1;
        heads = (r.chunk / kHeadGroup + 1) * kHeadGroup - 1 - r.chunk;
      }
      const uint32_t parts = groups ? 1 + heads + groups + end % kHeadGroup + 1 : r.parts;
      const C* const slots = Slot<C>(run, s, o, 0, 0) + column;
      Columns total = identity;
      for (uint32_t j = way; j < parts; j += kAhead * ways) {
        Columns v[kAhead];
#pragma unroll
        for (uint32_t u = 0; u < kAhead; ++u) {
          const uint32_t p = j + u * ways;
          uint32_t slot = (r.chunk + p) * 2 + (p == 0);
          if (p > heads) slot = (r.chunk + heads + 1 + (p - heads - 1) * kHeadGroup) * 2 + 1;
          if (p > heads + groups) slot = (end - (parts - 1 - p)) * 2;
          v[u] = p < parts && has ? *reinterpret_cast<const Columns*>(slots + slot * run.inner) : identity;
        }
#pragma unroll
        for (uint32_t u = 0; u < kAhead; ++u) add(total, v[u]);
      }
      for (int step = f.lanes; step < kWarp; step *= 2) {
        Columns other;
#pragma unroll
        for (int c = 0; c < V; ++c) other.c[c] = __shfl_xor_sync(~0u, total.c[c], step);
        add(total, other);
      }
      if (team > 1) {
        if (lane < f.lanes) room[warp][lane] = total;
        __syncthreads();
        if (lane < f.lanes && warp % team == 0) {
          for (int w = 1; w < team; ++w) add(total, room[warp + w][lane]);
        }
      }
      if (has && way == 0) {
#pragma unroll
        for (int c = 0; c < V; ++c) {
          at[c] = FromCompute<T>(Finished<kOp>(total.c[c], alpha, run.reads_out, x.c[c]));
        }
      }
    }
    __syncthreads();
  }
}

}  // namespace jaxkern
