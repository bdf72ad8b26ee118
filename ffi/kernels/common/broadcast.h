// Reads an operand that broadcasts against a larger array in place, without materialising it.
//
// Kernels see the main operand as [outer, axis, inner]. A smaller operand (a mask, say) has the same rank before dimensions
// are merged, with some dimensions of size 1. Its element for (outer, a, inner) lies at
//
//     outer_map(outer) + a * axis_stride + inner_map(inner)
//
// where each map runs over the few groups of adjacent dimensions that are all broadcast or all not.
// FromShapes() builds it on the host; the maps are evaluated on the host and on the device.
#pragma once

#include "std.h"

#if defined(__CUDACC_RTC__)
#define JAXKERN_HD __device__ __forceinline__
#elif defined(__CUDACC__)
#define JAXKERN_HD __host__ __device__ __forceinline__
#else
// Never a function of its own on the host: CPU kernels are compiled for several instruction sets.
#define JAXKERN_HD inline __attribute__((always_inline))
#endif

namespace jaxkern {

// Division of any 32-bit number by a fixed one without a divide instruction
// (Granlund & Montgomery, "Division by Invariant Integers using Multiplication", 1994).
struct FastDivmod {
  uint32_t divisor = 1, multiplier = 0, shift = 0;

  FastDivmod() = default;
  explicit FastDivmod(uint32_t d) : divisor(d) {
    while (shift < 32 && (uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1);
  }
  JAXKERN_HD uint32_t Div(uint32_t n) const {
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

  JAXKERN_HD int64_t operator()(int64_t index) const {
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
  JAXKERN_HD int64_t Below32Bits(uint32_t i) const {
    int64_t offset = 0;
#if defined(__CUDACC__)
#pragma unroll 1
#endif
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

  JAXKERN_HD int64_t Offset(int64_t outer, int64_t axis, int64_t inner) const {
    return outer_map(outer) + axis * axis_stride + inner_map(inner);
  }

  // `full` is the shape of the main operand, `part` that of the broadcast one: equal, or 1, in each
  // dimension. Returns false when the view needs more than IndexMap::kMaxRank groups.
  template <class Dims>
  static bool FromShapes(const Dims& full, const Dims& part, int rank, int axis, BroadcastView* view) {
    int64_t stride = 1;
    *view = BroadcastView();
    auto collapse = [&](int first, int last, IndexMap* map) {  // dimensions last-1 .. first
      int64_t sizes[IndexMap::kMaxRank];
      for (int d = last - 1; d >= first; --d) {
        if (full[d] == 1) continue;
        const int64_t s = part[d] == 1 ? 0 : stride;
        stride *= part[d];
        const int r = map->rank;
        const bool joins = r > 0 && (s == 0 ? map->stride[r - 1] == 0
                                            : map->stride[r - 1] != 0 && s == map->stride[r - 1] * sizes[r - 1]);
        if (joins) {
          sizes[r - 1] *= full[d];
        } else {
          if (r == IndexMap::kMaxRank) return false;
          map->stride[r] = s;
          sizes[r] = full[d];
          ++map->rank;
        }
      }
      if (map->rank == 1 && map->stride[0] == 0) map->rank = 0;
      for (int r = 0; r < map->rank; ++r) {
        // Only sizes below the outermost are divided by; they fit 32 bits or the view is refused.
        if (r + 1 < map->rank && sizes[r] >= (int64_t{1} << 32)) return false;
        map->size[r] = FastDivmod(r + 1 < map->rank ? static_cast<uint32_t>(sizes[r]) : 1u);
      }
      return true;
    };
    if (!collapse(axis + 1, rank, &view->inner_map)) return false;
    view->axis_stride = part[axis] == 1 ? 0 : stride;
    stride *= part[axis];
    return collapse(0, axis, &view->outer_map);
  }
};

}  // namespace jaxkern
