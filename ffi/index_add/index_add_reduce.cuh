// The segmented reduction of the sorted and sort plans, with a row's updates side by side.
//
// The order of keys is cut into fixed chunks. A thread walks one chunk with one vector of the row: it
// loads kRows source vectors at a time, adds them in float, and at the end of each run of equal keys
// writes the row of out. Little code and few registers a vector, and so many warps, are what makes it
// fast. Where a row's bytes are no whole vectors, a thread takes kParts elements (or words) of it instead,
// equally far apart, so that its work for a place is for as much and neighbours still read side by side. A run is
//
//     short    a run that ends by the end of the chunk after the one it begins in: the chunk that it
//              begins in takes all of it, and the next one skips what is not its own
//     long     any other: each chunk writes the partial sum of its part, in one of its two slots
//              (head: the run came in from the chunk before; tail: it begins here), and ReduceFixup
//              adds the parts up in order
//
// so a row is written once, whole runs of up to a chunk cost nothing extra, and half of all updates may go
// to one row without anything waiting for it. For the segment operations, further blocks of the same
// launch write the rows that have no update.
#pragma once

#include "index_add.cuh"

namespace jaxkern {

constexpr int kReduceThreads = 128;
constexpr int kFixupThreads = 512;

struct ReduceShape {
  uint32_t chunk = 0, chunks = 0;
  int64_t vectors = 0;     // of a row, or rather threads
  Divider by_vectors, by_chunks;
  int64_t threads = 0;     // of the reduction
  FillShape fill;          // its blocks come first
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

// As many blocks a multiprocessor as leave each thread the registers that it needs.
template <Reduction kOp, class T, int N, int kParts, int kRows>
__global__ void __launch_bounds__(kReduceThreads, kParts > 1 ? 5 : 8)
ReduceChunks(const __grid_constant__ IndexRun run, const __grid_constant__ ReduceShape s) {
  using C = Compute<T>;
  struct Slice {
    Pack<T, N> part[kParts];
  };
  if (blockIdx.x < s.fill.blocks) {
    __shared__ uint32_t bits[kFillRows / 32], room[2];
    FillTile<kOp, T, N>(run, s.fill, run.inner / N, blockIdx.x, bits, [&](uint32_t first, int rows, uint32_t* marks) {
      MarkTouched(run, first, rows, marks, room);
    });
    return;
  }
  const int64_t thread = (blockIdx.x - s.fill.blocks) * kReduceThreads + threadIdx.x;
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
        newest = key[u];
      }
    }
    // The row of the run that is open at the end of these places; those of others are read when they are closed.
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

// Adds up the parts of long runs. A block looks through a group of chunks for runs that begin there, for a slab of
// columns; a team of as many threads adds up a run of few parts, all teams one of many.
struct FixupShape {
  int columns, chunks;  // of a slab, of a group
  int64_t slabs, groups;
};

template <Reduction kOp, class T>
__global__ void __launch_bounds__(kFixupThreads)
ReduceFixup(const __grid_constant__ IndexRun run, const __grid_constant__ ReduceShape s, const FixupShape f) {
  using C = Compute<T>;
  constexpr uint32_t kFew = 16;
  __shared__ uint32_t first[kFixupThreads], parts[kFixupThreads];
  __shared__ int runs;
  __shared__ C room[kFixupThreads];
  const int64_t slab = blockIdx.x % f.slabs, item = blockIdx.x / f.slabs, group = item % f.groups, o = item / f.groups;
  const int columns = f.columns, team = threadIdx.x / columns, teams = kFixupThreads / columns;

  if (threadIdx.x == 0) runs = 0;
  __syncthreads();
  const int64_t chunk = group * f.chunks + threadIdx.x;
  if (threadIdx.x < f.chunks && chunk < s.chunks) {
    const uint32_t count = run.chunks ? run.chunks[chunk].parts : PartsOf(run, s.chunk, s.chunks, chunk, 0);
    if (count > 0) {
      const int at = atomicAdd(&runs, 1);
      first[at] = chunk;
      parts[at] = count;
    }
  }
  __syncthreads();

  const int64_t column = slab * columns + threadIdx.x % columns;
  const bool active = column < run.inner;
  const auto part = [&](uint32_t chunk, uint32_t j) {
    return active ? Slot<C>(run, s, o, chunk + j, j == 0)[column] : Identity<kOp, C>();
  };
  const auto finish = [&](uint32_t chunk, C total) {
    if (!active) return;
    const uint32_t key = KeyAt(run, (chunk + 1) * s.chunk);
    if (key >= run.dropped) return;  // only where the hint that they ascend is wrong
    T* const at = static_cast<T*>(run.out) + (o * run.out_stride + run.OutRow(key)) * run.inner + column;
    const C x = run.reads_out ? ToCompute(*at) : C(0);
    *at = FromCompute<T>(Finished<kOp>(total, Alpha<C>(run), run.reads_out, x));
  };
  // Parts begin, begin + step, ... in order, sixteen loads at a time.
  const auto add = [&](uint32_t chunk, uint32_t count, uint32_t begin, uint32_t step) {
    C total = Identity<kOp, C>();
    for (uint32_t j = begin; j < count; j += 16 * step) {
      C v[16];
#pragma unroll
      for (uint32_t u = 0; u < 16; ++u) v[u] = j + u * step < count ? part(chunk, j + u * step) : Identity<kOp, C>();
#pragma unroll
      for (uint32_t u = 0; u < 16; ++u) total = Combined<kOp>(total, v[u]);
    }
    return total;
  };
  for (int r = team; r < runs; r += teams) {
    if (parts[r] <= kFew) finish(first[r], add(first[r], parts[r], 0, 1));
  }
  for (int r = 0; r < runs; ++r) {
    if (parts[r] <= kFew) continue;
    __syncthreads();
    room[threadIdx.x] = add(first[r], parts[r], team, teams);
    __syncthreads();
    if (team == 0) {
      C total = Identity<kOp, C>();
      for (int i = 0; i < teams; ++i) total = Combined<kOp>(total, room[i * columns + threadIdx.x]);
      finish(first[r], total);
    }
  }
}

template <Reduction kOp, class T>
cudaError_t LaunchFixup(const IndexRun& run, const ReduceShape& s, cudaStream_t stream) {
  FixupShape f;
  // Rows of few columns would leave a long run to few blocks: sectors instead of lines, then.
  f.columns = run.inner <= 1024 ? 8 : kWarp;
  f.slabs = (run.inner + f.columns - 1) / f.columns;
  // Small groups, so that the runs of one are few; but most have none, and no more than a wave or two should look.
  f.chunks = kFixupThreads / 8;
  f.groups = (s.chunks + f.chunks - 1) / f.chunks;
  while (f.chunks < kFixupThreads && f.slabs * f.groups * run.outer > 1024) {
    f.chunks *= 2;
    f.groups = (s.chunks + f.chunks - 1) / f.chunks;
  }
  return Launch(ReduceFixup<kOp, T>, {f.slabs * f.groups * run.outer, 1, kFixupThreads}, stream, run, s, f);
}

// Runs the reduction over run.keys and run.order, or over ascending indices.
template <Reduction kOp, class T, int N>
cudaError_t LaunchReduce(const IndexRun& run, bool fills, cudaStream_t stream) {
  constexpr bool kWhole = N * sizeof(T) == 16;
  constexpr int kParts = kWhole ? 1 : 4, kRows = 4;
  ReduceShape s;
  s.vectors = (run.inner / N + kParts - 1) / kParts;
  s.chunk = static_cast<uint32_t>(ChunkOf(run.positions, run.outer, run.inner * sizeof(T)));
  s.chunks = (run.positions + s.chunk - 1) / s.chunk;
  s.by_vectors = Divider(s.vectors);
  s.by_chunks = Divider(s.chunks);
  s.threads = run.outer * s.chunks * s.vectors;
  if (fills) s.fill = FillShapeOf(run.dropped, run.outer, run.inner / N, N * sizeof(T));
  const int64_t blocks = s.fill.blocks + (s.threads + kReduceThreads - 1) / kReduceThreads;
  const cudaError_t error = Launch(ReduceChunks<kOp, T, N, kParts, kRows>, {blocks, 1, kReduceThreads}, stream, run, s);
  if (error != cudaSuccess || s.chunks <= 2) return error;  // two chunks have no long run
  return LaunchFixup<kOp, T>(run, s, stream);
}

}  // namespace jaxkern
