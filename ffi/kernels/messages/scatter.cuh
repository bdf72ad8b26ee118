// Messages summed by row in no fixed order: out[r, :] += sum of f(operands of e) over the edges e with index[e] == r. No sort.
//
//     EdgeScatter<F, N, kParts, U, kPlain, T, operands...>     kPlain: all indices are int32, and not clipped
//
// A thread owns an edge, U of them at a time: it computes all kParts * N features. A block has a range of neighbouring edges.
// Additions to one address of global memory wait for each other, so that rows with many edges decide how long such a scatter takes.
// Three things remove additions:
//
//     in a warp      where rows repeat among 32 neighbouring edges, the lanes of a warp with the same row are found and summed, in a
//                    tree
//     in a block     rows that have a large share of the edges are hot: the block sums them in shared memory. If out is small
//                    (`all`), every row is summed there
//     in vectors     the rest is added by vector reductions, neighbouring lanes at neighbouring addresses
//
// A block decides on the first two from a sample of its edges. Nothing depends on the host.
// Memory traffic: indices and operands once; out once for each row of an edge that is not summed before. Additions of 32 bits treat
// subnormal numbers as 0. On entry out holds what the sums are added to.
#pragma once

#include "../indexing/indices.cuh"
#include "operands.cuh"

#ifndef JAXKERN_DYNAMIC_SHARED
#define JAXKERN_DYNAMIC_SHARED(name) extern __shared__ __align__(16) char name[]
#endif

namespace jaxkern {

constexpr uint32_t kScatterThreads = 512, kScatterWarps = kScatterThreads / kWarp;
constexpr int kSampleBins = 2048, kBinBits = 11;  // count how often a row is in the sample, by its hash
constexpr int kHotSlots = 512, kMostHot = 128;    // of the hash table of hot rows; hot rows
// A hot row is so often in the sample of 512 edges. Hot rows must have one of kHotMass edges; rows that repeat in a warp one of kRepeats
// edges, by one of kLooking warps.
constexpr uint32_t kHot = 5, kHotMass = 16, kRepeats = 10, kLooking = 4;
constexpr uint32_t kNoRow = ~0u;

__device__ __forceinline__ uint32_t HashOf(uint32_t row) { return row * 0x9E3779B1u; }

// What a block finds in the sample, in shared memory.
struct Sample {
  uint32_t listed, mass, repeats;  // hot rows; edges of these; edges whose row an earlier lane of their warp has
  uint32_t table[kHotSlots], ids[kHotSlots];  // hot rows by their hash, kNoRow where there is none, and their numbers
};

// The number of a hot row; kNoRow for others.
__device__ __forceinline__ uint32_t HotRow(const Sample& sample, uint32_t row) {
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t slot = ((HashOf(row) >> 10) + i) % kHotSlots;
    if (sample.table[slot] == row) return sample.ids[slot] < kMostHot ? sample.ids[slot] : kNoRow;
  }
  return kNoRow;
}

// Puts a hot row into the first of its two places that is free; without one it is not hot.
__device__ __forceinline__ void ListHotRow(Sample& sample, uint32_t row) {
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t slot = ((HashOf(row) >> 10) + i) % kHotSlots, old = atomicCAS(&sample.table[slot], kNoRow, row);
    if (old == row) return;
    if (old == kNoRow) {
      sample.ids[slot] = atomicAdd(&sample.listed, 1u);
      return;
    }
  }
}

// Where the other end of an edge is: index[e], wrapped around zero and limited to the nodes, or, without an index,
// (e / stride) % nodes.
struct OtherArgs {
  const void* index;
  uint32_t nodes;
  int32_t index_bytes;
  bool index_signed, wrap;
  FastDivmod by_stride, by_nodes;
};

template <bool kPlain> __device__ __forceinline__ RawIndex LoadOther(const OtherArgs& a, uint32_t edge) {
  RawIndex raw = {0, 0};
  if (a.index_bytes == 4) {
    raw.low = __ldg(static_cast<const uint32_t*>(a.index) + edge);
  } else if (!kPlain && a.index_bytes == 8) {
    const uint2 both = __ldg(static_cast<const uint2*>(a.index) + edge);
    raw = {both.x, both.y};
  } else if (!kPlain && a.index_bytes == 2) {
    raw.low = __ldg(static_cast<const uint16_t*>(a.index) + edge);
  } else if (!kPlain && a.index_bytes == 1) {
    raw.low = __ldg(static_cast<const uint8_t*>(a.index) + edge);
  } else {
    const uint32_t q = a.by_stride.Div(edge);
    raw.low = q - a.by_nodes.Div(q) * a.nodes;
  }
  return raw;
}

template <bool kPlain> __device__ __forceinline__ uint32_t OtherOf(const OtherArgs& a, RawIndex raw) {
  if constexpr (kPlain) {
    const uint32_t node = a.wrap && static_cast<int32_t>(raw.low) < 0 ? raw.low + a.nodes : raw.low;
    return min(static_cast<uint32_t>(max(static_cast<int32_t>(node), 0)), a.nodes - 1);
  }
  int64_t node = static_cast<int64_t>(static_cast<uint64_t>(raw.high) << 32 | raw.low);
  if (a.index_signed) {
    if (a.index_bytes == 4) node = static_cast<int32_t>(raw.low);
    else if (a.index_bytes == 2) node = static_cast<int16_t>(raw.low);
    else if (a.index_bytes == 1) node = static_cast<int8_t>(raw.low);
    if (a.wrap && node < 0) node += a.nodes;
    node = max(node, int64_t{0});
  }
  return static_cast<uint32_t>(min(static_cast<uint64_t>(node), static_cast<uint64_t>(a.nodes - 1)));
}

// An edge's row: its index as loaded, and the row that it names, or kNoRow.
template <bool kPlain> __device__ __forceinline__ RawIndex LoadRow(const Indices& index, uint32_t edge) {
  if constexpr (kPlain) return {__ldg(static_cast<const uint32_t*>(index.index) + edge), 0};
  else return LoadIndex(index, edge);
}
template <bool kPlain> __device__ __forceinline__ uint32_t KeyOfRow(const Indices& index, RawIndex raw) {
  const uint32_t row = kPlain ? PlainKey(index, raw.low) : RowKey(index, raw);
  return row < index.dropped ? row : kNoRow;
}

struct OfEdge {
  constexpr bool operator()(End end) const { return end == End::kEdge; }
};
struct OfNodes {
  constexpr bool operator()(End end) const { return end != End::kEdge; }
};

template <int kOperands> struct ScatterArgs {
  Indices index;
  OtherArgs other;
  OperandArgs operand[kOperands];
  FeatureArgs features;
  void* out;
  uint32_t all;  // rows, if each block sums all of them in shared memory; else 0
};

struct ZerosArgs {
  char* out;
  int64_t bytes;
};

// out = 0. Each thread writes 64 bytes. The address and the bytes are multiples of 4.
template <int kThreads> __global__ void __launch_bounds__(kThreads) ScatterZeros(const __grid_constant__ ZerosArgs a) {
  const int64_t words = a.bytes / 4, first = static_cast<int64_t>(blockIdx.x) * (16 * kThreads) + threadIdx.x * 4;
  uint32_t* const out = reinterpret_cast<uint32_t*>(a.out);
  const bool aligned = reinterpret_cast<uintptr_t>(out) % 16 == 0;
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const int64_t at = first + u * (4 * kThreads);
    if (aligned && at + 4 <= words) {
      *reinterpret_cast<uint4*>(out + at) = make_uint4(0, 0, 0, 0);
    } else {
      for (int64_t i = at; i < min(at + 4, words); ++i) out[i] = 0;
    }
  }
}

// Adds N neighbouring elements to global memory.
template <int N> __device__ __forceinline__ void AddVector(float* at, const float* v) {
#if __CUDA_ARCH__ >= 900
  constexpr int kVector = N;
#else
  constexpr int kVector = 1;
#endif
  if constexpr (kVector == 4) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
  } else if constexpr (kVector == 2) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(v[0]), "f"(v[1]) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) atomicAdd(at + i, v[i]);
  }
}
template <int N> __device__ __forceinline__ void AddVector(double* at, const double* v) {
#pragma unroll
  for (int i = 0; i < N; ++i) atomicAdd(at + i, v[i]);
}

// Sums the values of lanes with equal rows. Returns the row to the first of these lanes, which has the sum, and kNoRow to others.
// In each round, every second lane that is left takes the sum of the next one.
template <int kWidth, class C> __device__ __forceinline__ uint32_t SumInWarp(uint32_t row, C (&v)[kWidth]) {
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t peers = __match_any_sync(~0u, row), rank = __popc(peers & ((1u << lane) - 1));
  if (row == kNoRow) peers = rank = 0;
  const bool leads = rank == 0;
  peers &= ~1u << lane;  // those after it
  while (__any_sync(~0u, peers != 0)) {
    const int next = __ffs(peers);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const C other = __shfl_sync(~0u, v[i], next ? next - 1 : static_cast<int>(lane));
      if (next) v[i] += other;
    }
    peers &= __ballot_sync(~0u, rank % 2 == 0);
    rank /= 2;
  }
  return leads ? row : kNoRow;
}

// Dynamic shared memory: the sums of the block, [width, all or kMostHot]; then the bins of the sample, and later rows of the edges of
// each warp, [warps, 32, width].
template <class F, int N, int kParts, int U, bool kPlain, class T, class... Operands>
__global__ void __launch_bounds__(kScatterThreads, 2)
    EdgeScatter(const __grid_constant__ ScatterArgs<sizeof...(Operands)> a) {
  using V = Vectors<N, Operands...>;
  using C = Value<T>;
  constexpr int kWidth = N * kParts, kTile = kScatterThreads * U;
  JAXKERN_DYNAMIC_SHARED(shared_bytes);
  __shared__ Sample sample;
  __shared__ uint32_t staged_row[kScatterWarps][kWarp];
  const uint32_t t = threadIdx.x, lane = t % kWarp, warp = t / kWarp, places = a.all ? a.all : kMostHot;
  C* const sums = reinterpret_cast<C*>(shared_bytes);
  C* const stage = sums + places * kWidth + warp * (kWarp * kWidth);
  uint32_t* const bins = reinterpret_cast<uint32_t*>(sums + places * kWidth);
  for (uint32_t i = t; i < places * kWidth; i += kScatterThreads) sums[i] = C(0);
  if (!a.all) {
    for (uint32_t i = t; i < kSampleBins; i += kScatterThreads) bins[i] = 0;
    for (uint32_t i = t; i < kHotSlots; i += kScatterThreads) sample.table[i] = kNoRow;
  }
  if (t == 0) sample.listed = sample.mass = sample.repeats = 0;
  const char* from[kParts][V::kOperands];
#pragma unroll
  for (int p = 0; p < kParts; ++p) V::Find(a.operand, a.features, p * N, from[p]);
  T* const out = static_cast<T*>(a.out);
  const F f;
  const uint64_t warps = (a.index.positions + kWarp - 1) / kWarp;  // of edges; a block has whole ones
  const uint32_t begin = static_cast<uint32_t>(warps * blockIdx.x / gridDim.x) * kWarp;
  const uint32_t end = min(static_cast<uint32_t>(warps * (blockIdx.x + 1) / gridDim.x) * kWarp, a.index.positions);
  bool hot = a.all, in_warp = false;
  __syncthreads();
  RawIndex raw[U], raw_other[U];  // of the next edges, which are loaded while those before them are added
  const auto load_indices = [&](uint32_t tile) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const uint32_t edge = tile + u * kScatterThreads + t;
      if (edge >= end) continue;
      raw[u] = LoadRow<kPlain>(a.index, edge);
      if constexpr (V::kReadsOther) raw_other[u] = LoadOther<kPlain>(a.other, edge);
    }
  };
  load_indices(begin);
  for (uint32_t tile = begin; tile < end; tile += kTile) {
    uint32_t row[U];
    V operands[U][kParts];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const uint32_t edge = tile + u * kScatterThreads + t;
      if (edge >= end) continue;
#pragma unroll
      for (int p = 0; p < kParts; ++p) operands[u][p].Load(a.operand, from[p], {0, 0, edge}, OfEdge());
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const uint32_t edge = tile + u * kScatterThreads + t;
      row[u] = edge < end ? KeyOfRow<kPlain>(a.index, raw[u]) : kNoRow;
      if (row[u] == kNoRow) continue;
      const Places at = {row[u], V::kReadsOther ? OtherOf<kPlain>(a.other, raw_other[u]) : 0, edge};
#pragma unroll
      for (int p = 0; p < kParts; ++p) operands[u][p].Load(a.operand, from[p], at, OfNodes());
    }
    load_indices(tile + kTile);
    if (tile == begin) {
      // One of so many edges of the block's range, by the warp, while the operands are loaded.
      const uint32_t part = (end - begin) / kScatterThreads * kWarp, sampled = min(end - begin, kScatterThreads);
      const uint32_t at = part ? begin + warp * part + lane : begin + t;
      const uint32_t key = at < end ? KeyOfRow<kPlain>(a.index, LoadRow<kPlain>(a.index, at)) : kNoRow;
      uint32_t* const bin = &bins[HashOf(key) >> (32 - kBinBits)];
      if (!a.all && key != kNoRow) atomicAdd(bin, 1u);
      if (warp % kLooking == 0) {
        const uint32_t peers = __match_any_sync(~0u, key);
        if (key != kNoRow && peers & ((1u << lane) - 1)) atomicAdd(&sample.repeats, 1u);
      }
      __syncthreads();
      if (!a.all) {
        if (key != kNoRow && *bin >= kHot) {
          ListHotRow(sample, key);
          atomicAdd(&sample.mass, 1u);
        }
        __syncthreads();
        hot = sample.mass * kHotMass > sampled;
      }
      in_warp = sample.repeats * kLooking * kRepeats > sampled;
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      C v[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) v[i] = C(0);
      if (row[u] != kNoRow) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) operands[u][i / N].Apply(f, operands[u][i / N], i % N, v[i]);
      }
      uint32_t own = in_warp ? SumInWarp(row[u], v) : row[u];
      if (hot && own != kNoRow) {
        const uint32_t place = a.all ? own : HotRow(sample, own);
        if (place != kNoRow) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) atomicAdd(sums + i * places + place, v[i]);
          own = kNoRow;
        }
      }
      if constexpr (kParts == 1) {
        if (own != kNoRow) AddVector<N>(out + static_cast<int64_t>(own) * kWidth, v);
      } else {
        // Neighbouring lanes take neighbouring vectors, so that one instruction adds whole rows.
        const uint32_t left = __ballot_sync(~0u, own != kNoRow);
        if (left == 0) continue;
        const uint32_t to = __popc(left & ((1u << lane) - 1)), count = __popc(left) * kParts;
        if (own != kNoRow) {
          staged_row[warp][to] = own;
#pragma unroll
          for (int i = 0; i < kWidth; ++i) stage[to * kWidth + i] = v[i];
        }
        __syncwarp();
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          const uint32_t n = p * kWarp + lane, r = n / kParts;
          if (n < count) {
            C part[N];
#pragma unroll
            for (int i = 0; i < N; ++i) part[i] = stage[n * N + i];
            AddVector<N>(out + static_cast<int64_t>(staged_row[warp][r]) * kWidth + (n - r * kParts) * N, part);
          }
        }
        __syncwarp();
      }
    }
  }
  if (!hot) return;
  __syncthreads();
  const auto flush = [&](uint32_t place, uint32_t to) {
#pragma unroll
    for (int i = 0; i < kWidth; i += N) {
      C part[N];
      bool any = false;
#pragma unroll
      for (int k = 0; k < N; ++k) part[k] = sums[(i + k) * places + place], any = any || !(part[k] == C(0));
      if (any) AddVector<N>(out + static_cast<int64_t>(to) * kWidth + i, part);
    }
  };
  if (a.all) {
    for (uint32_t r = t; r < a.all; r += kScatterThreads) flush(r, r);
  } else {
    for (uint32_t i = t; i < kHotSlots; i += kScatterThreads) {
      if (sample.table[i] != kNoRow && sample.ids[i] < kMostHot) flush(sample.ids[i], sample.table[i]);
    }
  }
}

}  // namespace jaxkern
