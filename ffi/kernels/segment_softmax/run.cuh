// Shared parts of the segment softmax: parameters, tiles of places, and rows as vectors. No kernels.
//
//     position   b * count + k: an element of index [batch, count]; each slice `o` of an array [batch, outer, count,
//                inner] has a row for it
//     key        b * rows + segment; the positions with one key are a run. `dropped` or more: of no segment
//     place      number of a position in the order of keys
//
// Keys and positions are 32-bit numbers; offsets into arrays are 64-bit. Places are cut into tiles. A tile owns the
// runs that begin in it, and follows a run for up to `lookahead` places beyond its own end. A run that ends further on
// is long. Each tile that it spans leaves the Stat of its part in a slot (head: the run continues from the tile before;
// tail: it begins here). SegmentJoin merges the parts in order and writes the total to each slot, and a last kernel
// reads these rows once more.
//
// No access is out of bounds for any keys; results are meaningful if keys below `dropped` ascend.
#pragma once

#include "common/divider.h"
#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace jaxkern {

struct SegmentRun {
  const uint32_t* keys;   // by place
  const uint32_t* order;  // row of each place in slice 0; null: place and position are equal
  const void* input[2];
  void* out;
  void* slots;  // Stats [outer][tiles][head, tail][inner]; null if no run can be long
  int64_t inner, count;
  int64_t extra;  // rows between the end of a slice `o` of one b and its beginning in the next: (outer - 1) * count
  uint32_t positions, dropped;
  uint32_t places, lookahead, tiles;  // places and lookahead of a tile; number of tiles
  Divider by_count;

  __device__ __forceinline__ uint32_t Key(uint32_t place) const { return __ldg(keys + place); }
  // Returns the row of a place in the arrays of slice `o`.
  __device__ __forceinline__ int64_t RowAt(uint32_t place) const {
    if (order) return __ldg(order + place);
    return extra ? place + by_count.Div(place) * extra : place;
  }

  template <class T> __device__ __forceinline__ const T* Input(int k, int64_t o) const {
    return static_cast<const T*>(input[k]) + o * count * inner;
  }
  template <class T> __device__ __forceinline__ T* Output(int64_t o) const {
    return static_cast<T*>(out) + o * count * inner;
  }
  // Returns the Stat of column 0.
  template <class Stat> __device__ __forceinline__ Stat* Slot(int64_t o, uint32_t tile, int tail) const {
    return static_cast<Stat*>(slots) + ((o * tiles + tile) * 2 + tail) * inner;
  }
};
static_assert(sizeof(SegmentRun) == 120);

}  // namespace jaxkern
