// The segmented reduction of the sorted and sort plans, with a row's updates side by side.
//
// The order of keys is cut into fixed chunks. A thread walks one chunk with one vector of the row: it
// adds source vectors in float, and at the end of each run of equal keys writes the row of out. While
// it adds kRows of them, the next kRows, and the rows of x that they are added to, are on their way into
// its own slots of shared memory (cp.async), which takes no registers and lets many warps be resident.
// Next to nothing is known of the runs in advance:
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
  int64_t fill_after = 0;  // the blocks from here on fill
  bool cuts_short_runs = false;  // there are only long runs (index_add_reduce_narrow.cuh)
  bool fills_gaps = false;       // short gaps between keys are filled by who sees them (likewise)
  FillShape fill;
};

// Slots of partial sums: [outer][chunk][head, tail][inner].
template <class C>
__device__ __forceinline__ C* Slot(const IndexRun& run, const ReduceShape& s, int64_t o, uint32_t chunk, int tail) {
  return static_cast<C*>(run.partials) + ((o * s.chunks + chunk) * 2 + tail) * run.inner;
}

// Whether the run that comes into the chunk at `begin` is a long one.
__device__ __forceinline__ bool LongHead(const IndexRun& run, uint32_t chunk, uint32_t begin, uint32_t end, uint32_t key) {
  return (end < run.positions && KeyAt(run, end) == key) || (begin > chunk && KeyAt(run, begin - chunk - 1) == key);
}

// Whether the run that begins in a chunk and goes on behind its `end` is a long one.
__device__ __forceinline__ bool LongTail(const IndexRun& run, uint32_t chunk, uint32_t end, uint32_t key) {
  return end + chunk < run.positions && KeyAt(run, end + chunk) == key;
}

template <int kRows> struct Places {
  uint32_t key[kRows], position[kRows];
};

// The keys and positions of places [i, i + kRows), of which those from `stop` on are not looked at.
template <int kRows>
__device__ __forceinline__ Places<kRows> LoadPlaces(const IndexRun& run, uint32_t i, uint32_t stop) {
  Places<kRows> at;
  if (run.keys) {  // both arrays end on 256 bytes, so whole vectors can be read
#pragma unroll
    for (int u = 0; u < kRows; u += 4) {
      uint4 k = {}, p = {};
      if (i + u < stop) {
        k = __ldg(reinterpret_cast<const uint4*>(run.keys + i + u));
        p = __ldg(reinterpret_cast<const uint4*>(run.order + i + u));
      }
      at.key[u] = k.x, at.key[u + 1] = k.y, at.key[u + 2] = k.z, at.key[u + 3] = k.w;
      at.position[u] = p.x, at.position[u + 1] = p.y, at.position[u + 2] = p.z, at.position[u + 3] = p.w;
    }
  } else {
    RawIndex raw[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) raw[u] = i + u < stop ? LoadIndex(run, i + u) : RawIndex{};
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      at.key[u] = KeyOf(run, raw[u], i + u);
      at.position[u] = i + u;
    }
  }
  return at;
}

// Copies the vector at `from` to the thread's slot, asynchronously. Of one 16-bit element, the 4 bytes that
// it is in.
template <class T, int N> __device__ __forceinline__ void CopyAsync(void* slot, const T* from) {
  constexpr int kBytes = N * sizeof(T) < 4 ? 4 : N * sizeof(T);
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(slot));
  const uint64_t at = reinterpret_cast<uint64_t>(from) & ~uint64_t{N * sizeof(T) < 4 ? 3 : 0};
  if constexpr (kBytes == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(at) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(at), "n"(kBytes) : "memory");
}

// What CopyAsync brought from there.
template <class T, int N> __device__ __forceinline__ Pack<T, N> FromSlot(const Pack<T, N>& slot, const T* from) {
  Pack<T, N> pack = slot;
  if constexpr (N * sizeof(T) < 4) pack.word[0] >>= (reinterpret_cast<uint64_t>(from) & 2) * 8;
  return pack;
}

template <Reduction kOp, class T, int N, int kRows>
__global__ void __launch_bounds__(kReduceThreads, 6)
ReduceChunks(const __grid_constant__ IndexRun run, const __grid_constant__ ReduceShape s) {
  using C = Compute<T>;
  __shared__ Pack<T, N> room[2][2][kRows][kReduceThreads];  // [stage][source, x]
  if (blockIdx.x >= s.fill_after) {
    static_assert(sizeof(room) >= kFillRows / 8);
    FillTile<kOp, T, N>(run, s.fill, s.vectors, blockIdx.x - s.fill_after, reinterpret_cast<uint32_t*>(room),
                        [&](uint32_t first, int rows, uint32_t* marks) {
      for (int r = threadIdx.x; r < rows; r += kReduceThreads) {
        if (Touched(run, first + r)) atomicOr(&marks[r / 32], 1u << (r % 32));
      }
    });
    return;
  }
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (thread >= s.threads) return;
  const int64_t item = s.by_vectors.Div(thread), o = s.by_chunks.Div(item);
  const int64_t column = (thread - item * s.vectors) * N;
  const uint32_t chunk = static_cast<uint32_t>(item - o * s.chunks);
  const T* const source = static_cast<const T*>(run.source) + o * run.source_stride * run.inner + column;
  T* const out = static_cast<T*>(run.out) + o * run.out_stride * run.inner + column;

  const uint32_t begin = chunk * s.chunk, end = min(begin + s.chunk, run.positions);
  uint32_t stop = end;
  const uint32_t head = KeyAt(run, begin), last = KeyAt(run, end - 1);
  const bool comes_in = begin > 0 && head < run.dropped && KeyAt(run, begin - 1) == head;
  const bool long_head = comes_in && LongHead(run, s.chunk, begin, end, head);
  bool skipping = comes_in && !long_head;
  const bool goes_on = end < run.positions && last < run.dropped && KeyAt(run, end) == last;
  const bool long_tail = goes_on && LongTail(run, s.chunk, end, last);
  if (skipping && head == last) return;  // all of it the chunk before's
  if (goes_on && !long_tail && !(long_head && head == last)) stop = min(end + s.chunk, run.positions);

  // The places of the stage under way: who takes part, and which of them open a run.
  Places<kRows> next = LoadPlaces<kRows>(run, begin, stop);
  uint32_t fetched = begin, newest = run.dropped;
  struct Stage {
    uint32_t key[kRows];
    uint32_t takes, opens, odd;  // bits; odd: a 16-bit element is the upper half of its 4 bytes
  };
  // Starts the copies of the next stage; false where there is none.
  const auto fetch = [&](Stage& stage, int to) {
    stage.takes = stage.opens = stage.odd = 0;
    if (fetched >= stop || (fetched >= end && next.key[0] != last)) return false;
    const Places<kRows> at = next;
    if (fetched + kRows < stop) next = LoadPlaces<kRows>(run, fetched + kRows, stop);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const uint32_t place = fetched + u;
      stage.key[u] = at.key[u];
      if (skipping && (at.key[u] != head || place >= end)) skipping = false;
      if (skipping || place >= stop || (place >= end && at.key[u] != last) || at.key[u] >= run.dropped) continue;
      const T* const from = source + run.SourceRow(at.position[u]) * run.inner;
      CopyAsync<T, N>(&room[to][0][u][threadIdx.x], from);
      stage.takes |= 1u << u;
      if constexpr (N * sizeof(T) < 4) stage.odd |= (reinterpret_cast<uint64_t>(from) >> 1 & 1) << u;
      if (at.key[u] != newest) {
        stage.opens |= 1u << u;
        if (run.reads_out) CopyAsync<T, N>(&room[to][1][u][threadIdx.x], out + run.OutRow(at.key[u]) * run.inner);
        newest = at.key[u];
      }
    }
    fetched += kRows;
    return true;
  };

  const C alpha = Alpha<C>(run);
  bool at_head = long_head;  // the run being added up is the one that came in
  uint32_t current = run.dropped;
  C total[N];
  Pack<T, N> x = {};
#pragma unroll
  for (int i = 0; i < N; ++i) total[i] = Identity<kOp, C>();
  const auto put = [&](C* slot) {
#pragma unroll
    for (int i = 0; i < N; ++i) slot[column + i] = total[i];
  };
  const auto flush = [&] {
    if (current >= run.dropped) return;
    T* const to = out + run.OutRow(current) * run.inner;
    if (at_head) put(Slot<C>(run, s, o, chunk, 0));
    else StorePart<T, N>(to, FinishedPack<kOp, T, N>(total, alpha, run.reads_out, FromSlot<T, N>(x, to)));
    at_head = false;
  };

  Stage stage;
  bool more = fetch(stage, 0);
  asm volatile("cp.async.commit_group;");
  for (int now = 0; more; now ^= 1) {
    Stage ahead;
    more = fetch(ahead, now ^ 1);
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 1;" ::: "memory");
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (stage.opens >> u & 1) {
        flush();
        current = stage.key[u];
        if (run.reads_out) x = room[now][1][u][threadIdx.x];
#pragma unroll
        for (int j = 0; j < N; ++j) total[j] = Identity<kOp, C>();
      }
      if (stage.takes >> u & 1) {
        Pack<T, N> part = room[now][0][u][threadIdx.x];
        if constexpr (N * sizeof(T) < 4) part.word[0] >>= (stage.odd >> u & 1) * 16;
        Accumulate<kOp>(total, part);
      }
    }
    stage = ahead;
  }
  if (long_tail && !at_head && current == last) put(Slot<C>(run, s, o, chunk, 1));
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
  if (threadIdx.x < kFixupChunks) {
    const int64_t chunk = group * kFixupChunks + threadIdx.x;
    const int64_t begin = chunk * s.chunk, end = begin + s.chunk;
    if (end < run.positions) {
      const uint32_t key = KeyAt(run, end - 1);
      const bool whole = begin > 0 && KeyAt(run, begin - 1) == key && KeyAt(run, begin) == key;
      if (key < run.dropped && !whole && KeyAt(run, end) == key &&
          (s.cuts_short_runs || LongTail(run, s.chunk, end, key))) {
        // The last chunk that begins within the run: doubling steps, then bisection.
        uint32_t within = chunk + (s.cuts_short_runs ? 1 : 2), step = 1;
        while (within + step < s.chunks && KeyAt(run, (within + step) * s.chunk) == key) within += step, step *= 2;
        for (; step; step /= 2) {
          if (within + step < s.chunks && KeyAt(run, (within + step) * s.chunk) == key) within += step;
        }
        const int at = atomicAdd(&runs, 1);
        first[at] = chunk;
        parts[at] = within - chunk + 1;
      }
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
  // Parts warp_first, warp_first + step, ... in order, eight loads at a time.
  const auto add = [&](uint32_t chunk, uint32_t count, uint32_t begin, uint32_t step) {
    C total = Identity<kOp, C>();
    for (uint32_t j = begin; j < count; j += 8 * step) {
      C v[8];
#pragma unroll
      for (uint32_t u = 0; u < 8; ++u) v[u] = j + u * step < count ? part(chunk, j + u * step) : Identity<kOp, C>();
#pragma unroll
      for (uint32_t u = 0; u < 8; ++u) total = Combined<kOp>(total, v[u]);
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
  s.fill_after = (s.threads + kReduceThreads - 1) / kReduceThreads;
  int64_t blocks = s.fill_after;
  if (fills) {
    s.fill = FillShapeOf(run.dropped, run.outer, s.vectors, N * sizeof(T));
    blocks += s.fill.blocks;
  }
  cudaError_t error = Launch(ReduceChunks<kOp, T, N, kRows>, {blocks, 1, kReduceThreads}, stream, run, s);
  if (error != cudaSuccess || s.chunks <= 2) return error;  // two chunks have no long run
  return LaunchFixup<kOp, T>(run, s, stream);
}

}  // namespace jaxkern
