// Segmented reduction over sorted keys (algorithms `sort` and `sorted`) for rows of a few elements. One thread per
// chunk of rows would touch one line per lane; instead, ReduceNarrow copies a tile of keys and rows to shared memory
// and then
//
//     lists the runs     one thread per span of places finds where runs of equal keys end in it
//     accumulates        one thread per span and column leaves the total of each run at the run's end
//     carries over       a segmented scan adds the part of each span's first run that lies in earlier spans
//     writes             one thread per element of the listed rows, which are mostly adjacent in out
//
// The inner loop has one condition per element: whether a run ends there. It reads run.keys, run.order and source, and
// writes out and run.partials. Memory traffic: keys, order and source are read once, each touched row of out is read
// (with reads_out) and written once. Every run that a tile boundary cuts leaves its parts to ReduceFixup (reduce.cuh).
// Arrays may have any alignment.
#pragma once

#include "indexing/reduce.cuh"

namespace jaxkern {

constexpr int kNarrowThreads = 256;
// Places of a thread's span: odd, so that the threads of a warp access different banks.
constexpr int NarrowSpan(int element_bytes) { return element_bytes == 8 ? 9 : 17; }

// Dynamic shared memory: values, one carry and one mask per thread, the keys from the place before the tile to the one
// after it, the ends of runs.
struct NarrowTile {
  int values, places;  // elements of shared memory, including the offset to a 16-byte boundary; places of the tile
};
static_assert(sizeof(NarrowTile) == 8);

// kOp: the reduction. T: element type.
template <Reduction kOp, class T> __global__ void __launch_bounds__(kNarrowThreads, 4)
    ReduceNarrow(const __grid_constant__ IndexRun run, const __grid_constant__ ReduceShape s,
                 const __grid_constant__ NarrowTile room) {
  using C = Compute<T>;
  constexpr int kQ = NarrowSpan(sizeof(T)), kN = kVector<T>;
  constexpr int kParts = (kNarrowThreads * kQ + 2 * kN - 2) / kN / kNarrowThreads + 1;  // vectors per thread
  extern __shared__ __align__(16) char shared_bytes[];
  const int width = static_cast<int>(run.inner), t = threadIdx.x;
  if (blockIdx.x >= s.blocks) {
    const int64_t warp = (blockIdx.x - s.blocks) * (kNarrowThreads / kWarp) + t / kWarp;
    if (warp < s.ranges.warps) FillGaps<kOp, T, 1>(run, s.ranges, warp);
    return;
  }
  C* const image = reinterpret_cast<C*>(shared_bytes);
  C* const carry = image + room.values;
  uint32_t* const masks = reinterpret_cast<uint32_t*>(carry + kNarrowThreads);
  uint32_t* const keys = masks + kNarrowThreads + 1;  // keys[-1]: the place before the tile
  uint16_t* const ends = reinterpret_cast<uint16_t*>(keys + s.chunk + 1);
  __shared__ uint32_t warp_runs[kNarrowThreads / kWarp];
  __shared__ C warp_sum[kNarrowThreads / kWarp];
  __shared__ bool warp_flag[kNarrowThreads / kWarp];

  const int64_t block = blockIdx.x;
  const int64_t o = s.by_chunks.Div(block);
  const uint32_t tile = static_cast<uint32_t>(block - o * s.chunks), begin = tile * s.chunk;
  const int held = static_cast<int>(min(s.chunk, run.positions - begin)), elements = held * width;
  const T* const source = static_cast<const T*>(run.source) + o * run.source_stride * run.inner;
  T* const out = static_cast<T*>(run.out) + o * run.out_stride * run.inner;

  // Copy the rows. Without an order they are contiguous and are loaded as vectors, wherever they begin.
  const bool contiguous = !run.order && !run.source_extra;
  const T* const span = source + static_cast<int64_t>(begin) * width;
  const int ahead = contiguous ? static_cast<int>(reinterpret_cast<uintptr_t>(span) % 16 / sizeof(T)) : 0;
  C* const values = image + ahead;
  const auto whole = [&](int v) { return v * kN >= ahead && v * kN + kN <= ahead + elements; };
  Pack<T, kN> part[kParts] = {};
  if (contiguous) {
#pragma unroll
    for (int u = 0; u < kParts; ++u) {
      const int v = t + u * kNarrowThreads;
      if (whole(v)) part[u] = LoadVector<T, kN>(span - ahead + v * kN);
    }
  } else {
    for (int base = t; base < elements; base += 8 * kNarrowThreads) {
      T v[8];
      int64_t row[8];
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        const int e = base + u * kNarrowThreads;
        const uint32_t place = begin + s.by_vectors.Div(static_cast<uint32_t>(e));
        if (e < elements) row[u] = run.order ? __ldg(run.order + place) : run.SourceRow(place);
      }
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        const int e = base + u * kNarrowThreads;
        if (e < elements) v[u] = source[row[u] * width + (e - s.by_vectors.Div(static_cast<uint32_t>(e)) * width)];
      }
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        if (base + u * kNarrowThreads < elements) values[base + u * kNarrowThreads] = ToCompute(v[u]);
      }
    }
  }
  if (run.keys) {
    uint32_t key[kQ];  // all in flight at once, together with the rows; kQ keys per thread suffice for any width
    const uint32_t* from = run.keys + begin + t;
    asm volatile("" : "+l"(from));
#pragma unroll
    for (int u = 0; u < kQ; ++u) {
      if (t + u * kNarrowThreads < held) key[u] = __ldg(from + u * kNarrowThreads);
    }
#pragma unroll
    for (int u = 0; u < kQ; ++u) {
      if (t + u * kNarrowThreads < held) keys[t + u * kNarrowThreads] = key[u];
    }
  } else {
#pragma unroll 4
    for (int i = t; i < held; i += kNarrowThreads) keys[i] = KeyAt(run, begin + i);
  }
  // A key that no row has stands before the first and after the last update.
  if (t == 0) keys[-1] = begin > 0 ? KeyAt(run, begin - 1) : kNoKey;
  if (t == kWarp) keys[held] = begin + held < run.positions ? KeyAt(run, begin + held) : kNoKey;
  if (contiguous) {
#pragma unroll
    for (int u = 0; u < kParts; ++u) {
      const int v = t + u * kNarrowThreads;
      if (whole(v)) {
        alignas(16) C c[kN];
        Unpack(part[u], c);
#pragma unroll
        for (int i = 0; i < kN; i += 16 / sizeof(C)) {
          *reinterpret_cast<uint4*>(image + v * kN + i) = *reinterpret_cast<const uint4*>(c + i);
        }
      } else {
        for (int e = max(v * kN, ahead); e < min(v * kN + kN, ahead + elements); ++e) {
          image[e] = ToCompute(span[e - ahead]);
        }
      }
    }
  }
  __syncthreads();

  // Find the ends of runs. For now the last run of the tile ends with the tile.
  const int spans = s.chunk / kQ, lane = t % kWarp, warp = t / kWarp;
  uint32_t mask = 0;
  if (t < spans) {
    uint32_t key = keys[t * kQ];
#pragma unroll
    for (int i = 0; i < kQ; ++i) {
      const int place = t * kQ + i;
      const uint32_t next = keys[place + 1];
      if (place < held && (next != key || place == held - 1)) mask |= 1u << i;
      key = next;
    }
    masks[t] = mask;
  }
  const int runs = ListRunEnds<kNarrowThreads>(mask, t * kQ, ends, warp_runs);

  // Accumulate the parts of runs within a span; the remainder at its end carries over to the next span.
  const int j = s.by_vectors.Div(static_cast<uint32_t>(t)), column = t - j * width;
  const bool active = j < spans;
  C* const mine = values + j * kQ * width + column;
  mask = active ? masks[j] : 0;
  if (active) {
    C v[kQ], total = Identity<kOp, C>();
#pragma unroll
    for (int i = 0; i < kQ; ++i) v[i] = mine[i * width];
#pragma unroll
    for (int i = 0; i < kQ; ++i) {
      total = Combined<kOp>(total, v[i]);
      if (mask >> i & 1) {
        mine[i * width] = total;
        total = Identity<kOp, C>();
      }
    }
    carry[t] = total;
  }
  __syncthreads();
  // Segmented scan over the spans of each column.
  {
    const int c = t / spans, k = t - c * spans;
    C sum = c < width ? carry[k * width + c] : Identity<kOp, C>();
    bool flag = c >= width || k == 0 || masks[k] != 0;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const C other = __shfl_up_sync(~0u, sum, step);
      const bool other_flag = __shfl_up_sync(~0u, flag, step);
      if (lane >= step) {
        if (!flag) sum = Combined<kOp>(other, sum);
        flag |= other_flag;
      }
    }
    if (lane == kWarp - 1) warp_sum[warp] = sum, warp_flag[warp] = flag;
    __syncthreads();
    if (!flag) {
      C before = Identity<kOp, C>();
      int w = warp - 1;
      while (w > 0 && !warp_flag[w]) --w;
      for (; w < warp; ++w) before = Combined<kOp>(before, warp_sum[max(w, 0)]);
      sum = Combined<kOp>(before, sum);
    }
    if (c < width) carry[k * width + c] = sum;
  }
  __syncthreads();
  if (j > 0 && mask) {
    C* const first = mine + (__ffs(mask) - 1) * width;
    *first = Combined<kOp>(carry[t - width], *first);
  }
  __syncthreads();

  const C alpha = Alpha<C>(run);
  C* const slots = static_cast<C*>(run.partials) + (o * s.chunks + tile) * 2 * run.inner;
  if (s.ranges.rows) {
    ForGapsOfTile(run, s.ranges, keys, ends, runs, begin + held == run.positions,
                  [&](uint32_t first, uint32_t last) { FillRows<kOp, T, 1>(run, o, 0, width, first, last); });
  }
  for (int e = t; e < runs * width; e += kNarrowThreads) {
    const int r = s.by_vectors.Div(static_cast<uint32_t>(e)), c = e - r * width, place = ends[r];
    const uint32_t key = keys[place];
    if (key >= run.dropped) continue;
    const C total = values[place * width + c];
    const bool comes_in = r == 0 && keys[-1] == key;
    if (comes_in || (r == runs - 1 && keys[held] == key)) {
      slots[comes_in ? c : width + c] = total;
    } else {
      T* const at = out + run.OutRow(key) * width + c;
      const C x = run.reads_out ? ToCompute(*at) : C(0);
      *at = FromCompute<T>(Finished<kOp>(total, alpha, run.reads_out, x));
    }
  }
}

}  // namespace jaxkern
