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
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == 4 ? 2 : 3)
    QuantizeTiles(const __grid_constant__ QuantizeTilesParams p) {
  constexpr int N = kVector<T>, kLoads = kTileCell / N, kWarps = kTileThreads / kWarp;
  alignas(16) __shared__ uint8_t bytes[kTile * kTile];
  __shared__ uint32_t largest_of[kWarps][kTile];
  __shared__ float factors[kTile];
  const int lane = threadIdx.x % kTileLanes, group = threadIdx.x / kTileLanes;
  const int64_t across = p.width / kTile, down = p.height / kTile;
  const int64_t strip = blockIdx.x / across, x_tile = blockIdx.x % across;
  const int64_t matrix = strip / down, y_tile = strip % down;
  const int64_t row = matrix * p.height + y_tile * kTile + group * kTileCell;  // of all matrices, the thread's first
  const auto column = [&](int k) { return k * (kTileLanes * N) + lane * N; };  // of the tile, the first of load k

  Pack<T, N> raw[kTileCell][kLoads];
#pragma unroll
  for (int j = 0; j < kTileCell; ++j) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const T* const from = static_cast<const T*>(p.x) + (row + j) * p.width + x_tile * kTile + column(k);
      if constexpr (kVectors) {
        raw[j][k] = LoadElements<T, N>(from);
      } else {
        raw[j][k] = {};
#pragma unroll
        for (int i = 0; i < N; ++i) SetElement(raw[j][k], i, from[i]);
      }
    }
  }

  uint32_t in_column[kTileCell] = {}, in_tile = 0;
  float factor = kGiven ? GivenFactor(p.given) : 0.0f;
#pragma unroll
  for (int j = 0; j < kTileCell; ++j) {
    uint32_t in_row = 0;
    float v[kLoads][N];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      Unpack(raw[j][k], v[k]);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        in_row = max(in_row, Magnitude(v[k][i]));
        if constexpr (!kGiven) in_column[k * N + i] = max(in_column[k * N + i], Magnitude(v[k][i]));
      }
    }
    if constexpr (kGiven) {
      in_tile = max(in_tile, in_row);
    } else {
      in_row = ReduceLanes<kTileLanes>(in_row, LargerOf());
      factor = QuantizeFactor<Q>(in_row);
      if (lane == 0) p.scale[(row + j) * across + x_tile] = QuantizeScale<Q>(in_row);
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      uint8_t* const to = p.q + (row + j) * p.width + x_tile * kTile + column(k);
      if constexpr (kVectors) {
        StoreQuantized<Q>(to, v[k], factor);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = static_cast<uint8_t>(Q::From(v[k][i] * factor));
      }
    }
  }

  if constexpr (kGiven) {
    in_tile = ReduceLanes<kWarp>(in_tile, LargerOf());
    if (threadIdx.x % kWarp == 0) largest_of[threadIdx.x / kWarp][0] = in_tile;
  } else {
#pragma unroll
    for (int e = 0; e < kTileCell; ++e) {
      const uint32_t both = max(in_column[e], __shfl_xor_sync(0xffffffffu, in_column[e], kTileLanes));
      if (threadIdx.x % kWarp < kTileLanes) largest_of[threadIdx.x / kWarp][column(e / N) + e % N] = both;
    }
    __syncthreads();
    if (threadIdx.x < kTile) {
      uint32_t largest = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) largest = max(largest, largest_of[w][threadIdx.x]);
      factors[threadIdx.x] = QuantizeFactor<Q>(largest);
      const int64_t at = matrix * p.width + x_tile * kTile + threadIdx.x;
      p.scale_t[at * down + y_tile] = QuantizeScale<Q>(largest);
    }
    __syncthreads();
  }

#pragma unroll
  for (int e = 0; e < kTileCell; ++e) {
    const int c = column(e / N) + e % N;
    if constexpr (!kGiven) factor = factors[c];
    float v[kTileCell];
#pragma unroll
    for (int j = 0; j < kTileCell; ++j) v[j] = ToCompute(Element(raw[j][e / N], e % N));
    StoreQuantized<Q>(bytes + c * kTile + (group ^ lane) * kTileCell, v, factor);
  }
  __syncthreads();
  if constexpr (kGiven) {
    if (threadIdx.x == 0) {
      for (int w = 1; w < kWarps; ++w) in_tile = max(in_tile, largest_of[w][0]);
      p.scale[blockIdx.x] = __uint_as_float(in_tile);
    }
  }
#pragma unroll
  for (int c = group; c < kTile; c += kTileThreads / kTileLanes) {  // 16 lanes write a row of q_t
    const uint8_t* const from = bytes + c * kTile + (lane ^ c / N % kTileLanes) * kTileCell;
    uint8_t* const to = p.q_t + (matrix * p.width + x_tile * kTile + c) * p.height + y_tile * kTile + lane * kTileCell;
    if constexpr (kVectors) {
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kTileCell; ++i) to[i] = from[i];
    }
  }
}

}  // namespace jaxkern
