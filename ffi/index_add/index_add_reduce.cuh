// The segmented reduction of the sorted and sort plans, with a row's updates side by side.
//
// The order of keys is cut into fixed chunks. A thread walks one chunk with one vector of the row: it
// loads kRows source vectors at a time, adds them in float, and at the end of each run of equal keys
// writes the row of out. Little code and few registers a vector, and so many warps, are what makes it
// fast. A run is
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
constexpr int kFixupThreads = 512, kFixupWarps = kFixupThreads / kWarp, kFixupChunks = 64;

struct ReduceShape {
  uint32_t chunk = 0, chunks = 0;
  int64_t vectors = 0;     // of a row
  Divider by_vectors, by_chunks;
  int64_t threads = 0;     // of the reduction
  bool fills_gaps = false;       // short gaps between keys are filled by who sees them (index_add_reduce_narrow.cuh)
  FillShape fill;          // its blocks come first
};

// Slots of partial sums: [outer][chunk][head, tail][inner].
template <class C>
__device__ __forceinline__ C* Slot(const IndexRun& run, const ReduceShape& s, int64_t o, uint32_t chunk, int tail) {
  return static_cast<C*>(run.partials) + ((o * s.chunks + chunk) * 2 + tail) * run.inner;
}

// Places [i, i + kRows) of an array of keys or positions, which ends on 256 bytes.
template <int kRows> __device__ __forceinline__ void LoadPlaces(const uint32_t* array, uint32_t i, uint32_t (&v)[kRows]) {
#pragma unroll
  for (int u = 0; u < kRows; u += 4) {
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(array + i + u));
    v[u] = four.x, v[u + 1] = four.y, v[u + 2] = four.z, v[u + 3] = four.w;
  }
}

template <Reduction kOp, class T, int N, int kRows>
__global__ void __launch_bounds__(kReduceThreads, 8)
ReduceChunks(const __grid_constant__ IndexRun run, const __grid_constant__ ReduceShape s) {
  using C = Compute<T>;
  using Vector = Pack<T, N>;
  if (blockIdx.x < s.fill.blocks) {
    __shared__ uint32_t bits[kFillRows / 32], room[2];
    FillTile<kOp, T, N>(run, s.fill, s.vectors, blockIdx.x, bits, [&](uint32_t first, int rows, uint32_t* marks) {
      MarkTouched(run, first, rows, marks, room);
    });
    return;
  }
  const int64_t thread = (blockIdx.x - s.fill.blocks) * kReduceThreads + threadIdx.x;
  if (thread >= s.threads) return;
  const int64_t item = s.by_vectors.Div(thread), o = s.by_chunks.Div(item);
  const int64_t column = (thread - item * s.vectors) * N;
  const uint32_t chunk = static_cast<uint32_t>(item - o * s.chunks);
  const ChunkInfo info = run.chunks[chunk];
  if (info.start >= info.stop) return;
  const char* source = reinterpret_cast<const char*>(static_cast<const T*>(run.source) + o * run.source_stride * run.inner + column);
  char* out = reinterpret_cast<char*>(static_cast<T*>(run.out) + o * run.out_stride * run.inner + column);
  // Two registers each are cheaper than finding them again for every row, as the compiler would.
  asm volatile("" : "+l"(source), "+l"(out));
  const uint64_t row_bytes = run.inner * sizeof(T);
  const auto in_source = [&](uint32_t row) { return reinterpret_cast<const T*>(source + row * row_bytes); };
  const auto in_out = [&](uint32_t key) { return reinterpret_cast<T*>(out + run.OutRow(key) * row_bytes); };
  const C alpha = Alpha<C>(run);
  const bool reads_out = run.reads_out, ordered = run.order != nullptr;

  bool at_head = info.long_head;  // the run being added up is the one that came in
  uint32_t current = run.dropped;
  C total[N];
  Vector x = {};  // what out holds of the current row, once that has been read
  bool x_read = true;
#pragma unroll
  for (int i = 0; i < N; ++i) total[i] = Identity<kOp, C>();
  const auto put = [&](int tail) {
    C* const slot = Slot<C>(run, s, o, chunk, tail) + column;
#pragma unroll
    for (int i = 0; i < N; ++i) slot[i] = total[i];
  };
  const auto flush = [&] {
    if (current >= run.dropped) return;
    if (at_head) {
      put(0);
      at_head = false;
    } else {
      T* const to = in_out(current);
      if (!x_read) x = LoadPart<T, N>(to);
      StorePart<T, N>(to, FinishedPack<kOp, T, N>(total, alpha, reads_out, x));
    }
  };

  for (uint32_t i = info.start / kRows * kRows; i < info.stop; i += kRows) {
    // Mostly from the line that the places before came from: not worth registers to have them in advance.
    uint32_t key[kRows], row[kRows];
    LoadPlaces<kRows>(run.keys, i, key);
    if (ordered) {
      LoadPlaces<kRows>(run.order, i, row);
    } else {
#pragma unroll
      for (int u = 0; u < kRows; ++u) row[u] = i + u;
    }
    if (i < info.start || i + kRows > info.stop) {  // places that are not the chunk's look like dropped ones
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (i + u < info.start || i + u >= info.stop) key[u] = run.dropped;
      }
    }
    Vector part[kRows], x_next = {};
    uint32_t newest = current;
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (key[u] < run.dropped) {
        part[u] = LoadPart<T, N>(in_source(row[u]));
        newest = key[u];
      }
    }
    // The row of the run that is open at the end of these places; those of others are read when they are closed.
    const bool reads = reads_out && newest != current;
    if (reads) x_next = LoadPart<T, N>(in_out(newest));
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (key[u] >= run.dropped) continue;
      if (key[u] != current) {
        flush();
        current = key[u];
        x_read = !reads_out;
#pragma unroll
        for (int j = 0; j < N; ++j) total[j] = Identity<kOp, C>();
      }
      Accumulate<kOp>(total, part[u]);
    }
    if (reads) {
      x = x_next;
      x_read = true;
    }
  }
  if (info.parts > 0) put(1);
  else flush();
}

// Adds up the parts of long runs. A block looks through kFixupChunks chunks for runs that begin there, for
// 32 columns; a warp adds up a run of few parts, all warps one of many.
template <Reduction kOp, class T>
__global__ void __launch_bounds__(kFixupThreads)
ReduceFixup(const __grid_constant__ IndexRun run, const __grid_constant__ ReduceShape s, int64_t slabs) {
  using C = Compute<T>;
  constexpr uint32_t kFew = 16;
  __shared__ uint32_t first[kFixupChunks], parts[kFixupChunks];
  __shared__ int runs;
  __shared__ C room[kFixupWarps][kWarp];
  const int64_t groups = (s.chunks + kFixupChunks - 1) / kFixupChunks;
  const int64_t slab = blockIdx.x % slabs, group = blockIdx.x / slabs % groups, o = blockIdx.x / slabs / groups;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

  if (threadIdx.x == 0) runs = 0;
  __syncthreads();
  const int64_t chunk = group * kFixupChunks + threadIdx.x;
  if (threadIdx.x < kFixupChunks && chunk < s.chunks) {
    const uint32_t count = run.chunks ? run.chunks[chunk].parts : PartsOf(run, s.chunk, s.chunks, chunk, false);
    if (count > 0) {
      const int at = atomicAdd(&runs, 1);
      first[at] = chunk;
      parts[at] = count;
    }
  }
  __syncthreads();

  const int64_t column = slab * kWarp + lane;
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
  // Parts warp_first, warp_first + step, ... in order, sixteen loads at a time.
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
  for (int r = warp; r < runs; r += kFixupWarps) {
    if (parts[r] <= kFew) finish(first[r], add(first[r], parts[r], 0, 1));
  }
  for (int r = 0; r < runs; ++r) {
    if (parts[r] <= kFew) continue;
    __syncthreads();
    room[warp][lane] = add(first[r], parts[r], warp, kFixupWarps);
    __syncthreads();
    if (warp == 0) {
      C total = Identity<kOp, C>();
#pragma unroll
      for (int w = 0; w < kFixupWarps; ++w) total = Combined<kOp>(total, room[w][lane]);
      finish(first[r], total);
    }
  }
}

template <Reduction kOp, class T>
cudaError_t LaunchFixup(const IndexRun& run, const ReduceShape& s, cudaStream_t stream) {
  const int64_t slabs = (run.inner + kWarp - 1) / kWarp;
  const int64_t groups = (s.chunks + kFixupChunks - 1) / kFixupChunks;
  return Launch(ReduceFixup<kOp, T>, {slabs * groups * run.outer, 1, kFixupThreads}, stream, run, s, slabs);
}

// Runs the reduction over run.keys and run.order, or over ascending indices.
template <Reduction kOp, class T, int N>
cudaError_t LaunchReduce(const IndexRun& run, bool fills, cudaStream_t stream) {
  constexpr int kRows = N * sizeof(T) == 16 ? 4 : 8;
  ReduceShape s;
  s.vectors = run.inner / N;
  s.chunk = static_cast<uint32_t>(ChunkOf(run.positions, run.outer, run.inner * sizeof(T)));
  s.chunks = (run.positions + s.chunk - 1) / s.chunk;
  s.by_vectors = Divider(s.vectors);
  s.by_chunks = Divider(s.chunks);
  s.threads = run.outer * s.chunks * s.vectors;
  if (fills) s.fill = FillShapeOf(run.dropped, run.outer, s.vectors, N * sizeof(T));
  const int64_t blocks = s.fill.blocks + (s.threads + kReduceThreads - 1) / kReduceThreads;
  const cudaError_t error = Launch(ReduceChunks<kOp, T, N, kRows>, {blocks, 1, kReduceThreads}, stream, run, s);
  if (error != cudaSuccess || s.chunks <= 2) return error;  // two chunks have no long run
  return LaunchFixup<kOp, T>(run, s, stream);
}

}  // namespace jaxkern
