// How the CUDA kernels cut a segment softmax into tiles, and the room that takes: pure functions of the shapes, for
// the plans of ffi/index_add/index_add_plan.cc and the launcher. Host only.
#pragma once

#include <cstdint>

namespace jaxkern {

// A tile is a block's: sorted positions times the columns of a slab. Each thread walks a stretch of its positions in
// one column. A stretch has an odd length, so that the threads of a warp find their elements in different banks, and
// no more than a mask of 32 bits has.
constexpr int kSegmentThreads = 256, kSegmentColumns = 16;
constexpr int SegmentStretch(int64_t element_bytes) { return element_bytes == 8 ? 15 : 31; }

struct SegmentTile {
  int columns = 1;    // of a slab: whole rows up to 16 elements, else vectors of 16 bytes
  int slabs = 1;
  int stretches = 1;  // side by side in a block
  int64_t places = 0; // the positions of a tile, of whose segments the block takes those that begin there
  int64_t room = 0;   // the positions it can hold: a segment that ends beyond is long
};

constexpr SegmentTile SegmentTileOf(int64_t inner, int64_t element_bytes) {
  SegmentTile t;
  if (inner > kSegmentColumns) {
    const int64_t vector = 16 / element_bytes, slabs = (inner + kSegmentColumns - 1) / kSegmentColumns;
    const int64_t columns = ((inner + slabs - 1) / slabs + vector - 1) / vector * vector;
    t.columns = static_cast<int>(columns);
    t.slabs = static_cast<int>((inner + columns - 1) / columns);
  } else {
    t.columns = static_cast<int>(inner < 1 ? 1 : inner);
  }
  t.stretches = kSegmentThreads / t.columns;
  const int stretch = SegmentStretch(element_bytes);
  t.room = int64_t{t.stretches} * stretch;
  t.places = int64_t{t.stretches - t.stretches / 3} * stretch;
  return t;
}

// Statistics of parts of long segments: [outer][tile][head, tail][inner]; none where no segment can be long.
constexpr int64_t SegmentPartials(const SegmentTile& t, int64_t positions, int64_t outer, int64_t inner) {
  return positions <= t.room ? 0 : 2 * ((positions + t.places - 1) / t.places) * outer * inner;
}

}  // namespace jaxkern
