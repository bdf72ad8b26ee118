// Independent updates (algorithms `unique` and `atomic`).
//
// DirectUpdates reads index and source and updates rows of out. Each thread takes one vector of the rows of
// kDirectUpdates updates, with all of its loads in flight at once. Memory traffic: source is read once; the rows of out
// that are updated are read (with reads_out) and written once, or updated by atomics.
//
// With kAtomic false no two updates may share a row. Without reads_out the only update of a row is the result of any
// reduction, so kSum serves all of them.
#pragma once

#include "indexing/run.cuh"

namespace jaxkern {

constexpr int kDirectThreads = 256, kDirectUpdates = 4;

// vectors: vectors of a row. threads: vectors of all updates.
struct DirectShape {
  int64_t vectors, threads;
  Divider by_vectors, by_positions;
};
static_assert(sizeof(DirectShape) == 64);

// kOp: the reduction. T, N: element type and elements of a vector. kAtomic: rows may repeat; adds by atomics, in no
// particular order.
template <Reduction kOp, class T, int N, bool kAtomic> __global__ void __launch_bounds__(kDirectThreads)
    DirectUpdates(const __grid_constant__ IndexRun run, const __grid_constant__ DirectShape s) {
  using C = Compute<T>;
  const C alpha = Alpha<C>(run);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kDirectThreads * kDirectUpdates) + threadIdx.x;
  RawIndex raw[kDirectUpdates];
  uint32_t position[kDirectUpdates];
  int64_t o[kDirectUpdates], column[kDirectUpdates];
  Pack<T, N> part[kDirectUpdates] = {}, old[kDirectUpdates] = {};
  T* at[kDirectUpdates];
#pragma unroll
  for (int u = 0; u < kDirectUpdates; ++u) {
    const int64_t thread = first + u * kDirectThreads;
    const int64_t item = s.by_vectors.Div(thread);
    column[u] = (thread - item * s.vectors) * N;
    o[u] = s.by_positions.Div(item);
    position[u] = static_cast<uint32_t>(item - o[u] * run.positions);
    raw[u] = thread < s.threads ? LoadIndex(run, position[u]) : RawIndex{};
  }
#pragma unroll
  for (int u = 0; u < kDirectUpdates; ++u) {
    if (first + u * kDirectThreads < s.threads) {
      part[u] = LoadPart<T, N>(static_cast<const T*>(run.source) +
                               (o[u] * run.source_stride + run.SourceRow(position[u])) * run.inner + column[u]);
    }
  }
#pragma unroll
  for (int u = 0; u < kDirectUpdates; ++u) {
    at[u] = nullptr;
    if (first + u * kDirectThreads >= s.threads) continue;
    const uint32_t key = KeyOf(run, raw[u], position[u]);
    if (key >= run.dropped) continue;
    at[u] = static_cast<T*>(run.out) + (o[u] * run.out_stride + run.OutRow(key)) * run.inner + column[u];
    if (!kAtomic && run.reads_out) old[u] = LoadPart<T, N>(at[u]);
  }
#pragma unroll
  for (int u = 0; u < kDirectUpdates; ++u) {
    if (!at[u]) continue;
    C v[N];
    Unpack(part[u], v);
    if constexpr (kAtomic) {
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] = Finished<kOp>(v[i], alpha, true, C(0));
      if constexpr (std::is_same_v<T, float>) {
        AddInPlace<N>(at[u], v);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) atomicAdd(reinterpret_cast<unsigned*>(at[u]) + i, static_cast<unsigned>(v[i]));
      }
    } else {
      StorePart<T, N>(at[u], FinishedPack<kOp, T, N>(v, alpha, run.reads_out, old[u]));
    }
  }
}

}  // namespace jaxkern
