// What the kernels of the segment softmax share: the problem, the cut of its positions, and rows as vectors.
//
//     position   b * count + k: an element of index [batch, count]; each slice `o` of an array
//                [batch, outer, count, inner] has a row for it
//     key        b * rows + segment: positions of one key are a run. `dropped` or more: of no segment
//     place      a position's number in the order of keys
//
// Keys and positions are 32-bit numbers; offsets into arrays are 64 bits wide. Places are cut into tiles. A tile owns
// the runs that begin in it, and follows a run for up to `reach` places beyond its own end. A run that ends further
// behind is long: the tiles that it lies in leave the Stats of their parts in slots (head: the run came in from the
// tile before; tail: it begins here), SegmentJoin merges the parts in order and leaves the total in each slot, and a
// last kernel reads these rows once more.
//
// Memory is safe whatever keys hold; results are meaningful if those below `dropped` ascend.
#pragma once

#include "common/divider.h"
#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace jaxkern {

struct SegmentRun {
  const uint32_t* keys;   // by place
  const uint32_t* order;  // the row of each place in slice 0; null: place and position are the same
  const void* input[2];
  void* out;
  void* slots;  // [outer][tiles][head, tail][inner] Stats; null if no run can be long
  int64_t inner, count;
  int64_t extra;  // rows from the end of one b's slice of `o` to the beginning of the next b's: (outer - 1) * count
  uint32_t positions, dropped;
  uint32_t places, reach, tiles;  // `places` and `reach` of a tile
  Divider by_count;

  __device__ __forceinline__ uint32_t Key(uint32_t place) const { return __ldg(keys + place); }
  // The row of a place in the arrays of slice `o`.
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
  // The Stat of column 0.
  template <class Stat> __device__ __forceinline__ Stat* Slot(int64_t o, uint32_t tile, int tail) const {
    return static_cast<Stat*>(slots) + ((o * tiles + tile) * 2 + tail) * inner;
  }
};
static_assert(sizeof(SegmentRun) == 120);

// Vectors of 16 and 8 bytes are written once and not read again; a narrower one may share a sector with others.
template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadRowPart(const T* p) {
  if constexpr (N * sizeof(T) == 4) {
    Pack<T, N> pack;
    pack.word[0] = *reinterpret_cast<const uint32_t*>(p);
    return pack;
  } else {
    return LoadVector<T, N>(p);
  }
}
template <class T, int N> __device__ __forceinline__ void StoreRowPart(T* p, const Pack<T, N>& pack) {
  if constexpr (N * sizeof(T) == 4) *reinterpret_cast<uint32_t*>(p) = pack.word[0];
  else StoreVector<T, N>(p, pack);
}

}  // namespace jaxkern
