// Gather of rows (index_select):
//
//     out[b, o, k, :] = x[b, o, index[b, k], :]    x [batch, outer, rows, width], index [batch, count]
//
// Gather reads x and index and writes out. A row is `vectors` vectors of type V; x and out are aligned to V. Each
// thread copies one vector of each of kGathered rows. It first loads all of its indices and then all of its vectors, so
// that the loads of a stage overlap. Threads are numbered over the vectors of the result: narrow rows fill warps, and
// wide rows are read in whole lines. Memory traffic: each vector of the result is written once; a row of x is read as
// often as it is selected.
//
// An index that is out of range after wrapping or clipping selects a row of the fill pattern. Nothing outside of x is
// read, whatever the indices are.
#pragma once

#include "common/divider.h"

namespace jaxkern {

constexpr int kGatherThreads = 256, kGathered = 4;

struct GatherShape {
  int64_t vectors, total;  // vectors of a row, and of the result
  int64_t count, rows;
  Divider by_vectors, by_count, by_outer;
  uint64_t fill;    // bits of an element, repeated to 8 bytes
  bool wrap, clip;  // negative indices count from the end; indices out of range select the nearest row
  bool streams;     // stores bypass L2, which is left to the rows of x
};
static_assert(sizeof(GatherShape) == 120);

template <class V> __device__ __forceinline__ V FilledWith(uint64_t pattern) {
  const uint32_t low = static_cast<uint32_t>(pattern), high = static_cast<uint32_t>(pattern >> 32);
  if constexpr (sizeof(V) == 16) return make_uint4(low, high, low, high);
  else if constexpr (sizeof(V) == 8) return make_uint2(low, high);
  else return static_cast<V>(low);
}

// Returns the row that an index selects; outside of [0, rows) if there is none.
template <class I> __device__ __forceinline__ int64_t SelectedRow(const GatherShape& s, I index) {
  int64_t row = static_cast<int64_t>(index);
  if constexpr (std::is_signed_v<I>) {
    if (s.wrap && row < 0) row += s.rows;
  } else {
    if (row < 0) row = INT64_MAX;  // 2^63 or more as an unsigned index
  }
  if (s.clip) row = max(min(row, s.rows - 1), static_cast<int64_t>(0));
  return row;
}

// V: unit of copying. I: index type. N: type that numbers the vectors of the result: uint32_t if they fit, because
// three 64-bit divisions take most of a thread's registers.
template <class V, class I, class N> __global__ void __launch_bounds__(kGatherThreads, sizeof(N) == 4 ? 8 : 5)
    Gather(const V* __restrict__ x, const I* __restrict__ index, V* __restrict__ out,
           const __grid_constant__ GatherShape s) {
  const N first = static_cast<N>(blockIdx.x) * (kGatherThreads * kGathered) + threadIdx.x;
  const N total = static_cast<N>(s.total), vectors = static_cast<N>(s.vectors), count = static_cast<N>(s.count);
  I selected[kGathered];
  N slice[kGathered], column[kGathered];
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    const N at = first + u * kGatherThreads;
    if (at >= total) continue;
    const N row = s.by_vectors.Div(at);
    column[u] = at - row * vectors;
    slice[u] = s.by_count.Div(row);
    const N b = s.by_outer.Div(slice[u]);
    selected[u] = __ldg(index + (b * count + (row - slice[u] * count)));
  }
  V v[kGathered];
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    v[u] = FilledWith<V>(s.fill);
    if (first + u * kGatherThreads >= total) continue;
    const int64_t row = SelectedRow(s, selected[u]);
    if (row >= 0 && row < s.rows) v[u] = __ldg(x + (slice[u] * s.rows + row) * s.vectors + column[u]);
  }
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    const N at = first + u * kGatherThreads;
    if (at >= total) continue;
    if (s.streams) __stcs(out + at, v[u]);
    else out[at] = v[u];
  }
}

}  // namespace jaxkern
