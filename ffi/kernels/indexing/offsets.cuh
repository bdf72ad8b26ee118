// The first position of each row among ascending keys.
//
//     RowOffsets      one block per tile of keys writes the offsets of the rows that begin in it, each found by a binary
//                     search in shared memory; the last block writes those after all keys, too
//
// Memory traffic: keys are read once, offsets written once. No thread walks a gap between two keys alone.
#pragma once

#include "common/std.h"

namespace jaxkern {

// kThreads: of a block; kTile: keys of a block. keys: [count], ascending. offsets: [rows + 1]. offsets[r] is the number of keys that are less than r.
template <uint32_t kThreads, uint32_t kTile> __global__ void __launch_bounds__(kThreads)
    RowOffsets(const uint32_t* keys, uint32_t* offsets, uint32_t count, uint32_t rows) {
  __shared__ uint32_t tile[kTile];
  const uint32_t first = blockIdx.x * kTile, held = min(kTile, count - first);
  for (uint32_t i = threadIdx.x; i < held; i += kThreads) tile[i] = keys[first + i];
  const uint32_t begin = first ? min(keys[first - 1], rows) + 1 : 0;
  __syncthreads();
  const uint32_t end = first + held == count ? rows + 1 : min(tile[held - 1], rows) + 1;
  for (uint32_t row = begin + threadIdx.x; row < end; row += kThreads) {
    uint32_t low = 0, high = held;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (tile[middle] < row) low = middle + 1;
      else high = middle;
    }
    offsets[row] = first + low;
  }
}

}  // namespace jaxkern
