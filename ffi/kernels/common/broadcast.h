// Reads an operand that broadcasts against a larger array in place, without materialising it.
//
// Kernels see the main operand as [outer, axis, inner]. A smaller operand (a mask, say) has the same rank before dimensions
// are merged, with some dimensions of size 1. Its element for (outer, a, inner) lies at
//
//     outer_map(outer) + a * axis_stride + inner_map(inner)
//
// where each map runs over the few groups of adjacent dimensions that are all broadcast or all not.
// jaxkern/_core/define.py builds the views.
#pragma once

#include "std.h"

namespace jaxkern {

// Division of any 32-bit number by a fixed one without a divide instruction
// (Granlund & Montgomery, "Division by Invariant Integers using Multiplication", 1994).
struct FastDivmod {
  uint32_t divisor = 1, multiplier = 0, shift = 0;

  __device__ __forceinline__ uint32_t Div(uint32_t n) const {
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier) >> 32);
    return static_cast<uint32_t>((static_cast<uint64_t>(n) + high) >> shift);
  }
};

// Maps a linear index over merged dimensions to an element offset. Dimension 0 is the innermost. Operands with more than
// kMaxRank groups are broadcast before the call.
struct IndexMap {
  static constexpr int kMaxRank = 4;
  int32_t rank = 0;  // 0: everything is broadcast, the offset is always 0
  FastDivmod size[kMaxRank];
  int64_t stride[kMaxRank] = {};

  __device__ __forceinline__ int64_t operator()(int64_t index) const {
    if (rank == 0) return 0;
    if (rank == 1) return index * stride[0];
    int64_t offset = 0;
    // Sizes and indices beyond 32 bits use plain division.
    if (index >> 32) {
      for (int d = 0; d + 1 < rank; ++d) {
        const int64_t q = index / size[d].divisor;
        offset += (index - q * size[d].divisor) * stride[d];
        index = q;
      }
    } else {
      uint32_t i = static_cast<uint32_t>(index);
      for (int d = 0; d + 1 < rank; ++d) {
        const uint32_t q = size[d].Div(i);
        offset += static_cast<int64_t>(i - q * size[d].divisor) * stride[d];
        i = q;
      }
      index = i;
    }
    return offset + index * stride[rank - 1];
  }

  // The same for an index that fits 32 bits, with a tenth of the code. The general form does not call it, because that
  // would duplicate the last step.
  __device__ __forceinline__ int64_t Below32Bits(uint32_t i) const {
    int64_t offset = 0;
#pragma unroll 1
    for (int d = 0; d + 1 < rank; ++d) {
      const uint32_t q = size[d].Div(i);
      offset += static_cast<int64_t>(i - q * size[d].divisor) * stride[d];
      i = q;
    }
    return rank == 0 ? 0 : offset + i * stride[rank - 1];
  }
};

struct BroadcastView {
  IndexMap outer_map;
  int64_t axis_stride = 0;
  IndexMap inner_map;

  __device__ __forceinline__ int64_t Offset(int64_t outer, int64_t axis, int64_t inner) const {
    return outer_map(outer) + axis * axis_stride + inner_map(inner);
  }
};

}  // namespace jaxkern
