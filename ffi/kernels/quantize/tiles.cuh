// Quantisation to 8 bits of a matrix and of its transpose, from one read:
//
//     scale   one for each 128 neighbours of a row     x, q [height, width], scale [height, width / 128]
//     scale_t one for each 128 neighbours of a column  q_t [width, height], scale_t [width, height / 128]
//     kGiven: the scale is given for all, q_t is the transpose of q, and `scale` the largest magnitude of each tile
//
// A block of 256 threads has a tile of 128 x 128 elements, and a thread 8 x 8 of them in registers: rows 8 * group + j,
// where group = thread / 16, and in each row 8 columns in vectors of 16 bytes, which 16 lanes share. So a thread has 8
// neighbours of a column of q_t too. Shared memory turns these into whole rows of q_t: 8 bytes of each thread and column,
// at a position that is swizzled by the lane, so that the 16 lanes of a group write to different banks.
//
// Memory traffic: each element is read once, and written once to q and once to q_t. height and width are multiples of 128.
// kVectors: x is aligned to 16 bytes, q and q_t to 8; otherwise elements are read and written one by one.
#pragma once

#include "quantize/types.cuh"

namespace jaxkern {

constexpr int kTile = 128, kTileThreads = 256, kTileLanes = 16, kTileCell = 8;

struct QuantizeTilesParams {
  const void* x;
  const float* given;  // null without kGiven
  uint8_t* q;
  uint8_t* q_t;
  float* scale;
  float* scale_t;  // null if kGiven
  int64_t height;  // of a matrix; there may be several, and a block for each tile of each
  int64_t width;
};
static_assert(sizeof(QuantizeTilesParams) == 64, "plan.py lays it out");

template <class T, class Q, bool kGiven, bool kVectors>
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == 4 ? 2 : 4)
    QuantizeTiles(const __grid_constant__ QuantizeTilesParams p) {
  constexpr int N = kVector<T>, kLoads = kTileCell / N, kWarps = kTileThreads / kWarp;
  alignas(16) __shared__ uint8_t bytes[kTile * kTile];
  alignas(16) __shared__ float factors[kTile];
  __shared__ Pack<T, N> largest_of[kWarps][kLoads][kTileLanes];  // elements in the order of columns
  __shared__ uint32_t in_warp[kWarps];
  const int lane = threadIdx.x % kTileLanes, group = threadIdx.x / kTileLanes;
  const uint32_t across = static_cast<uint32_t>(p.width / kTile), down = static_cast<uint32_t>(p.height / kTile);
  const uint32_t strip = blockIdx.x / across;  // there are fewer than 2^31 tiles
  const int64_t x_tile = blockIdx.x % across, matrix = strip / down, y_tile = strip % down;
  // Of all matrices, the thread's first row and the tile's first row of q_t.
  const int64_t row = matrix * p.height + y_tile * kTile + group * kTileCell, row_t = matrix * p.width + x_tile * kTile;
  const auto column = [&](int k) { return k * (kTileLanes * N) + lane * N; };  // of the tile, the first of load k

  Pack<T, N> raw[kTileCell][kLoads];
  const T* x = static_cast<const T*>(p.x) + row * p.width + x_tile * kTile;
#pragma unroll
  for (int j = 0; j < kTileCell; ++j, x += p.width) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if constexpr (kVectors) {
        raw[j][k] = LoadElements<T, N>(x + column(k));
      } else {
        raw[j][k] = {};
#pragma unroll
        for (int i = 0; i < N; ++i) SetElement(raw[j][k], i, x[column(k) + i]);
      }
    }
  }

  // The scales of rows. Two lanes have the same row's maximum, and send its factor to the others.
  constexpr int kEach = kTileLanes / kTileCell;
  uint32_t in_row[kTileCell], in_tile = 0;
#pragma unroll
  for (int j = 0; j < kTileCell; ++j) {
    in_row[j] = Largest(raw[j]);
    in_tile = max(in_tile, in_row[j]);
  }
  float factor = kGiven ? GivenFactor(p.given) : 0.0f;
  if constexpr (!kGiven) {
    const uint32_t largest = ReduceLanesApart<kTileLanes>(in_row, LargerOf());
    factor = QuantizeFactor<Q>(largest);
    if (lane % kEach == 0) p.scale[(row + lane / kEach) * across + x_tile] = QuantizeScale<Q>(largest);
  }

  uint8_t* q = p.q + row * p.width + x_tile * kTile;
#pragma unroll
  for (int j = 0; j < kTileCell; ++j, q += p.width) {
    const int from = threadIdx.x % kWarp - lane + j * kEach;
    const float factor_of_j = kGiven ? factor : __shfl_sync(0xffffffffu, factor, from);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      float v[N];
      Unpack(raw[j][k], v);
      if constexpr (kVectors) {
        StoreQuantized<Q, !kGiven>(q + column(k), v, factor_of_j);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) q[column(k) + i] = static_cast<uint8_t>(Q::From(v[i] * factor_of_j));
      }
    }
  }

  if constexpr (kGiven) {
    in_tile = LargestOfLanes<kWarp>(in_tile);
    if (threadIdx.x % kWarp == 0) in_warp[threadIdx.x / kWarp] = in_tile;
  } else {
    // The scales of columns: half of the threads compute factors, the others scales.
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      Pack<T, N> in_column = raw[0][k], other;
#pragma unroll
      for (int j = 1; j < kTileCell; ++j) in_column = Larger(in_column, raw[j][k]);
#pragma unroll
      for (int w = 0; w < Pack<T, N>::kWords; ++w) {
        other.word[w] = __shfl_xor_sync(0xffffffffu, in_column.word[w], kTileLanes);
      }
      if (threadIdx.x % kWarp < kTileLanes) largest_of[threadIdx.x / kWarp][k][lane] = Larger(in_column, other);
    }
    __syncthreads();
    const int c = threadIdx.x % kTile;
    uint32_t largest = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      largest = max(largest, Magnitude(ToCompute(reinterpret_cast<const T*>(largest_of[w])[c])));
    }
    if (threadIdx.x < kTile) factors[c] = QuantizeFactor<Q>(largest);
    else p.scale_t[(row_t + c) * down + y_tile] = QuantizeScale<Q>(largest);
    __syncthreads();
  }

#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    float factor_of[N];
#pragma unroll
    for (int i = 0; i < N; ++i) factor_of[i] = kGiven ? factor : factors[column(k) + i];
#pragma unroll
    for (int j = 0; j < kTileCell; ++j) Forget(raw[j][k]);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float v[kTileCell];
#pragma unroll
      for (int j = 0; j < kTileCell; ++j) {
        float of_row[N];
        Unpack(raw[j][k], of_row);
        v[j] = of_row[i];
      }
      StoreQuantized<Q, !kGiven>(bytes + (column(k) + i) * kTile + (group ^ lane) * kTileCell, v, factor_of[i]);
    }
  }
  __syncthreads();
  if constexpr (kGiven) {
    if (threadIdx.x == 0) {
      for (int w = 1; w < kWarps; ++w) in_tile = max(in_tile, in_warp[w]);
      p.scale[blockIdx.x] = __uint_as_float(in_tile);
    }
  }
  constexpr int kGroups = kTileThreads / kTileLanes;
  uint8_t* q_t = p.q_t + (row_t + group) * p.height + y_tile * kTile + lane * kTileCell;
#pragma unroll
  for (int i = 0; i < kTile / kGroups; ++i, q_t += kGroups * p.height) {  // 16 lanes write a row of q_t
    const int c = group + i * kGroups;
    const uint8_t* const from = bytes + c * kTile + (lane ^ c / N % kTileLanes) * kTileCell;
    if constexpr (kVectors) {
      *reinterpret_cast<uint2*>(q_t) = *reinterpret_cast<const uint2*>(from);
    } else {
#pragma unroll
      for (int j = 0; j < kTileCell; ++j) q_t[j] = from[j];
    }
  }
}

}  // namespace jaxkern
