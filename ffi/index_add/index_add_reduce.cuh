// The segmented reduction of the sorted and sort plans, with a row's updates side by side.
//
// The order of keys is cut into fixed chunks. A thread walks one chunk with one vector of the row: it
// loads kRows source vectors at a time, adds them in float, and at the end of each run of equal keys
// writes the row of out. Little code and few registers a vector, and so many warps, are what makes it
// fast. Where a row's bytes are no whole vectors, a thread takes kParts elements (or words) of it instead,
// equally far apart, so that its work for a place is for as much and neighbours still read side by side. A run is
//
//     short    a run that ends soon behind the chunk that it begins in (ChunkReach): that chunk takes all
//              of it, and the next one skips what is not its own
//     long     any other: each chunk writes the partial sum of its part, in one of its two slots
//              (head: the run came in from the chunk before; tail: it begins here), and ReduceFixup
//              adds the parts up in an order that the chunks give; those of very long runs first kHeadGroup at a time
//
// so a row is written once, whole runs of up to a chunk cost nothing extra, and half of all updates may go
// to one row without anything waiting for it. For the segment operations, further blocks of the same
// launch write the rows that have no update (index_add_gaps.cuh).
#pragma once

#include "index_add_gaps.cuh"

namespace jaxkern {

constexpr int kFixupThreads = 256, kHeadThreads = 128;
constexpr uint32_t kHeadGroup = 32;  // chunks whose heads are added up before

struct ReduceShape {
  uint32_t chunk = 0, chunks = 0;
  uint32_t reach = 0;      // places behind a chunk that it takes of its last run, where nothing describes the chunks
  int64_t vectors = 0;     // of a row, or rather threads
  Divider by_vectors, by_chunks;
  int64_t threads = 0;     // of the reduction
  int64_t blocks = 0;      // of it; those that fill gaps come behind
  BandShape bands;
};

// Slots of partial sums: [outer][chunk][head, tail][inner].
template <class C>
__device__ __forceinline__ C* Slot(const IndexRun& run, const ReduceShape& s, int64_t o, uint32_t chunk, int tail) {
  return static_cast<C*>(run.partials) + ((o * s.chunks + chunk) * 2 + tail) * run.inner;
}

// Places [i, i + kRows) of an array of keys or positions, which goes on behind them.
template <int kRows>
__device__ __forceinline__ void LoadPlaces(const uint32_t* array, uint32_t i, uint32_t (&v)[kRows]) {
#pragma unroll
  for (int u = 0; u < kRows; u += 4) {
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(array + i + u));
    v[u] = four.x, v[u + 1] = four.y, v[u + 2] = four.z, v[u + 3] = four.w;
  }
}

template <Reduction kOp, class T, int N, int kParts, int kRows>
__global__ void __launch_bounds__(kReduceThreads, ReduceBlocks(kParts == 1, sizeof(T), kRows))
ReduceChunks(const __grid_constant__ IndexRun run, const __grid_constant__ ReduceShape s) {
  using C = Compute<T>;
  struct Slice {
    Pack<T, N> part[kParts];
  };
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (blockIdx.x >= s.blocks) {
    const int64_t warp = thread / kWarp - s.blocks * (kReduceThreads / kWarp);
    if (warp < s.bands.warps) FillGaps<kOp, T, N>(run, s.bands, warp);
    return;
  }
  if (thread >= s.threads) return;
  const int64_t item = s.by_vectors.Div(thread), o = s.by_chunks.Div(item);
  const int64_t vector = thread - item * s.vectors, column = vector * N;
  const uint32_t chunk = static_cast<uint32_t>(item - o * s.chunks);
  const ChunkInfo info = run.chunks[chunk];
  if (info.start >= info.stop) return;
  const char* source = reinterpret_cast<const char*>(static_cast<const T*>(run.source) +
                                                     o * run.source_stride * run.inner + column);
  char* out = reinterpret_cast<char*>(static_cast<T*>(run.out) + o * run.out_stride * run.inner + column);
  // Two registers each are cheaper than finding them again for every row, as the compiler would.
  asm volatile("" : "+l"(source), "+l"(out));
  const uint64_t row_bytes = run.inner * sizeof(T);
  // How far the thread's parts lie apart. One that would lie behind the row is the first once more, not written.
  const uint32_t step = static_cast<uint32_t>(s.vectors) * N;
  uint32_t apart[kParts];
  bool has[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    has[p] = p == 0 || column + p * int64_t{step} < run.inner;
    apart[p] = has[p] ? p * step : 0;
  }
  const auto load = [&](const char* row) {
    Slice slice;
#pragma unroll
    for (int p = 0; p < kParts; ++p) slice.part[p] = LoadPart<T, N>(reinterpret_cast<const T*>(row) + apart[p]);
    return slice;
  };
  const auto in_source = [&](uint32_t row) { return source + row * row_bytes; };
  const auto in_out = [&](uint32_t key) { return out + run.OutRow(key) * row_bytes; };
  const C alpha = Alpha<C>(run);
  const bool reads_out = run.reads_out, ordered = run.order != nullptr;

  bool at_head = info.long_head;  // the run being added up is the one that came in
  uint32_t current = run.dropped;
  C total[kParts][N];
  Slice x = {};  // what out holds of the current row, once that has been read
  bool x_read = true;
  const auto clear = [&] {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < N; ++i) total[p][i] = Identity<kOp, C>();
    }
  };
  clear();
  const auto put = [&](int tail) {
    C* const slot = Slot<C>(run, s, o, chunk, tail) + column;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (has[p]) slot[apart[p] + i] = total[p][i];
      }
    }
  };
  const auto flush = [&] {
    if (current >= run.dropped) return;
    if (at_head) {
      put(0);
      at_head = false;
    } else {
      char* const to = in_out(current);
      if (!x_read) x = load(to);
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const Pack<T, N> finished = FinishedPack<kOp, T, N>(total[p], alpha, reads_out, x.part[p]);
        if (has[p]) StorePart<T, N>(reinterpret_cast<T*>(to) + apart[p], finished);
      }
    }
  };

  for (uint32_t i = info.start / kRows * kRows; i < info.stop; i += kRows) {
    // Mostly from the line that the places before came from: not worth registers to have them in advance.
    uint32_t key[kRows], row[kRows];
    if (i + kRows <= run.positions) {
      LoadPlaces<kRows>(run.keys, i, key);
      if (ordered) LoadPlaces<kRows>(run.order, i, row);
    } else {
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        key[u] = i + u < run.positions ? __ldg(run.keys + i + u) : run.dropped;
        if (ordered && i + u < run.positions) row[u] = __ldg(run.order + i + u);
      }
    }
    if (!ordered) {
#pragma unroll
      for (int u = 0; u < kRows; ++u) row[u] = i + u;
    }
    if (i < info.start || i + kRows > info.stop) {  // places that are not the chunk's look like dropped ones
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (i + u < info.start || i + u >= info.stop) key[u] = run.dropped;
      }
    }
    Slice slice[kRows], x_next = {};
    uint32_t newest = current;
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (key[u] < run.dropped) {
        slice[u] = load(in_source(row[u]));
        // A run that begins and ends among these places: its row is read when it is closed. With 8 places under way there
        // are few such runs, or no registers.
        if (kRows == 4 && reads_out && key[u] != newest && newest != current) Prefetch(in_out(newest));
        newest = key[u];
      }
    }
    // The row of the run that is open at the end of these places.
    const bool reads = reads_out && newest != current;
    if (reads) x_next = load(in_out(newest));
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (key[u] >= run.dropped) continue;
      if (key[u] != current) {
        flush();
        current = key[u];
        x_read = !reads_out;
        clear();
      }
#pragma unroll
      for (int p = 0; p < kParts; ++p) Accumulate<kOp>(total[p], slice[u].part[p]);
    }
    if (reads) {
      x = x_next;
      x_read = true;
    }
  }
  if (info.parts > 0) put(1);
  else flush();
}

// Groups of kHeadGroup chunks that a long run comes into and goes on behind: the sum of their heads, in the tail of the
// first, which such a chunk has no use for. A thread a group and column; no run comes into the first group or goes on
// behind the last.
template <Reduction kOp, class T>
__global__ void __launch_bounds__(kHeadThreads)
ReduceGroups(const __grid_constant__ IndexRun run, const __grid_constant__ ReduceShape s, const Divider by_columns,
             const Divider by_groups, int64_t threads) {
  using C = Compute<T>;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kHeadThreads + threadIdx.x;
  if (thread >= threads) return;
  const int64_t item = by_columns.Div(thread), column = thread - item * run.inner, o = by_groups.Div(item);
  const uint32_t chunk = static_cast<uint32_t>(item - o * by_groups.divisor + 1) * kHeadGroup;
  const uint32_t key = KeyAt(run, chunk * s.chunk - 1), behind = KeyAt(run, (chunk + kHeadGroup) * s.chunk);
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

// Adds up the parts of long runs. A block looks through some chunks for runs that begin there: groups of kFixupChunks
// chunks that are far apart, since rows with many updates often have neighbours that do too. A run and a slab of columns
// are a warp's, or several warps' where runs are few; it has the columns side by side, V a lane, and as many parts at once
// as that leaves lanes.
constexpr int kFixupLanes = 8, kFixupChunks = 8;
constexpr int FixupAhead(bool wide) { return wide ? 8 : 16; }  // parts that a lane has under way
struct FixupShape {
  int lanes;              // side by side
  uint32_t chunks, step;  // a block's, and groups from one of its to the next
  int64_t slabs;
  bool grouped;  // ReduceGroups came before
};

template <Reduction kOp, class T, int V>
__global__ void __launch_bounds__(kFixupThreads, 4)
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
  const int64_t slab = blockIdx.x % f.slabs, item = blockIdx.x / f.slabs, o = item / f.step;
  const uint32_t first = static_cast<uint32_t>(item - o * f.step);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, lane_ways = kWarp / f.lanes;
  const int64_t column = (slab * f.lanes + lane % f.lanes) * V;
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
      if (run.chunks) {
        const ChunkInfo info = run.chunks[chunk];
        parts = info.parts, key = info.key;
      } else {
        parts = PartsOf(run, s.chunk, s.chunks, chunk, s.reach);
        key = KeyAt(run, min((chunk + 1) * s.chunk, run.positions) - 1);
      }
      if (parts > 0) found[atomicAdd(&runs, 1)] = {chunk, parts, key};
    }
    __syncthreads();
    int team = kWarps;  // warps for a run
    while (team > 1 && team * runs > kWarps) team /= 2;
    const uint32_t ways = lane_ways * team, way = warp % team * lane_ways + lane / f.lanes;
    for (int begin = 0; begin < runs; begin += kWarps / team) {  // once, where teams are of several warps
      const int i = begin + warp / team;
      const bool has = active && i < runs;
      const LongRun r = found[min(i, runs - 1)];
      T* const at = static_cast<T*>(run.out) + (o * run.out_stride + run.OutRow(r.key)) * run.inner + column;
      Columns x = {};
      if (run.reads_out && has && way == 0) {
#pragma unroll
        for (int c = 0; c < V; ++c) x.c[c] = ToCompute(at[c]);
      }
      // The tail of the chunk that it begins in, heads up to the first of the groups that it fills, the sums of
      // those, and the heads behind them.
      const uint32_t end = r.chunk + r.parts - 1;  // the chunk that it ends in
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

template <Reduction kOp, class T>
cudaError_t LaunchFixup(const IndexRun& run, const ReduceShape& s, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(Compute<T>);
  const bool wide = run.inner % kWide == 0;
  const int64_t vectors = wide ? run.inner / kWide : run.inner;
  FixupShape f;
  f.lanes = vectors >= 5 ? kFixupLanes : vectors >= 3 ? 4 : static_cast<int>(vectors);
  f.slabs = (vectors + f.lanes - 1) / f.lanes;
  // One wave of blocks: most of them find nothing to do.
  constexpr int64_t kBlocks = 512;
  const int64_t pieces = (s.chunks + kFixupChunks - 1) / kFixupChunks;
  const int64_t each = (pieces * f.slabs * run.outer + kBlocks - 1) / kBlocks;
  f.chunks = static_cast<uint32_t>(each < pieces ? each : pieces) * kFixupChunks;
  f.step = (s.chunks + f.chunks - 1) / f.chunks;
  // Where the longest run would keep a warp, alone, waiting for memory more than 24 times.
  f.grouped = s.chunks > 24 * FixupAhead(wide) * kWarp / f.lanes;
  if (f.grouped) {
    const int64_t groups = (s.chunks - 1) / kHeadGroup - 1, threads = groups * run.inner * run.outer;
    const int64_t blocks = (threads + kHeadThreads - 1) / kHeadThreads;
    const cudaError_t error = Launch(ReduceGroups<kOp, T>, {blocks, 1, kHeadThreads}, stream, run, s,
                                     Divider(run.inner), Divider(groups), threads);
    if (error != cudaSuccess) return error;
  }
  const auto launch = [&](auto kernel) {
    return Launch(kernel, {f.slabs * f.step * run.outer, 1, kFixupThreads}, stream, run, s, f);
  };
  return wide ? launch(ReduceFixup<kOp, T, kWide>) : launch(ReduceFixup<kOp, T, 1>);
}

// Runs the reduction over run.keys and run.order, or over ascending indices.
template <Reduction kOp, class T, int N>
cudaError_t LaunchReduce(const IndexRun& run, bool fills, cudaStream_t stream) {
  constexpr bool kWhole = N * sizeof(T) == 16;
  constexpr int kParts = kWhole ? 1 : 4;
  ReduceShape s;
  s.vectors = (run.inner / N + kParts - 1) / kParts;
  s.chunk = run.chunk;
  s.chunks = (run.positions + s.chunk - 1) / s.chunk;
  s.by_vectors = Divider(s.vectors);
  s.by_chunks = Divider(s.chunks);
  s.threads = run.outer * s.chunks * s.vectors;
  s.blocks = (s.threads + kReduceThreads - 1) / kReduceThreads;
  if (fills) s.bands = BandShapeOf(run, run.inner / N, N * sizeof(T), true);
  constexpr int kWarps = kReduceThreads / kWarp;
  const int64_t blocks = s.blocks + (s.bands.warps + kWarps - 1) / kWarps;
  const auto launch = [&](auto kernel) { return Launch(kernel, {blocks, 1, kReduceThreads}, stream, run, s); };
  const cudaError_t error = [&] {
    // Larger elements in whole vectors have 4 places under way, rows of no whole vectors 8, whatever the plan expected.
    if constexpr (kWhole && sizeof(T) > 2) {
      return launch(ReduceChunks<kOp, T, N, kParts, 4>);
    } else {
      if constexpr (kWhole && kOp == Reduction::kSum) {
        if (run.under_way == 4) return launch(ReduceChunks<kOp, T, N, kParts, 4>);
      }
      return launch(ReduceChunks<kOp, T, N, kParts, 8>);
    }
  }();
  if (error != cudaSuccess || s.chunks == 1) return error;
  return LaunchFixup<kOp, T>(run, s, stream);
}

}  // namespace jaxkern
