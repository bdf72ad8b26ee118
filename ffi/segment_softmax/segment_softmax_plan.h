// How the CUDA kernels cut a segment softmax, and the room that takes: pure functions of the shapes, for the plans of
// ffi/index_add/index_add_plan.cc and the launcher. Host only.
//
//     walk     a warp a chunk of sorted positions and a strip of columns, a segment at a time in registers
//              (segment_softmax_walk.cuh): segments that fill most of a warp on the average, 3 rows of 128 bytes, say
//     tiles    a block a tile in shared memory (segment_softmax.cuh): shorter ones, and rows of less than 16 bytes
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

// A walk's warp has `lanes` lanes side by side in a row, of 16 bytes each, and as many rows at once as that leaves.
constexpr int kWalkLanes = 8;
constexpr int WalkLanes(int64_t lanes, int64_t most) {
  int n = 1;
  while (n < most && n < lanes) n *= 2;
  return n;
}

// The places of a tile or chunk, of whose segments those that begin there are its own, and the places that it can
// go to: a segment that ends beyond is long.
struct SegmentCut {
  bool walk = false;
  int64_t places = 0, room = 0;
};

// `count` positions of one slice of a batch: however many slices a run has, it is cut alike.
constexpr SegmentCut SegmentCutOf(int64_t rows, int64_t count, int64_t outer, int64_t inner, int64_t element_bytes) {
  SegmentCut cut;
  const int64_t bytes = inner * element_bytes, rows_at_once = 32 / WalkLanes((bytes + 15) / 16, kWalkLanes);
  // A segment costs a warp as much as its rows do if they are taken in fewer than two steps.
  cut.walk = bytes >= 16 && count >= 2 * rows_at_once * rows;
  if (!cut.walk) {
    const SegmentTile t = SegmentTileOf(inner, element_bytes);
    cut.places = t.places, cut.room = t.room;
    return cut;
  }
  // Some 8000 warps, if there is work for so many, and a segment may keep one busy for half as long as all work takes.
  const double work = static_cast<double>(count) * outer * ((bytes + 127) / 128);
  int64_t places = 32, reach = 64;
  while (places < 128 && places * 2 * 8192.0 <= work) places *= 2;
  while (reach < 1024 && reach * 2 * 4096.0 <= work) reach *= 2;
  // No power of two: chunks that are walked side by side must not all meet in the same memory channels.
  cut.places = places + 16;
  cut.room = cut.places + reach;
  return cut;
}

// Statistics of parts of long segments: [outer][tile][head, tail][inner]; none where no segment can be long.
constexpr int64_t SegmentPartials(const SegmentCut& cut, int64_t positions, int64_t outer, int64_t inner) {
  return positions <= cut.room ? 0 : 2 * ((positions + cut.places - 1) / cut.places) * outer * inner;
}

}  // namespace jaxkern
