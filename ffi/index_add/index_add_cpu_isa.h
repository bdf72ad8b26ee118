// Between index_add_cpu.cc and the variants of index_add_cpu_isa.cc, one an instruction set.
#pragma once

#include <cstdint>

#include "index_add/index_add.h"

namespace jaxkern {

constexpr int64_t kIndexNarrow = 16;  // elements of a row, at most, for an accumulator each

// A position along the axis of the source and the row that it goes to, `rows` if it goes nowhere.
struct IndexEntry {
  uint32_t row, position;
};

// The positions of one b in the order of their rows, and which columns of which slice to reduce. A chunk
// is a fixed number of positions, so that what is added to what depends on the shapes alone.
struct IndexSlice {
  const IndexEntry* entries;  // sorted by (row, position)
  int64_t size;               // of them
  int64_t chunk;              // positions in a chunk
  const void* source;         // [count, inner] of this b and o
  void* out;                  // [rows, inner]
  void* partials;             // [chunks][2][inner] accumulators: of runs that a chunk's edges cut
  int64_t first, last;        // columns
};

// An accumulator is what a result is added up in: 8 bytes for sums of float (double, then), else the
// size of the element or of float.
struct IndexCpuKernels {
  int64_t accumulator_bytes = 0;

  // Rows whose positions all lie in this chunk are finished; of others the partial result is kept.
  void (*reduce)(const IndexArgs&, const IndexSlice&, int64_t chunk) = nullptr;
  // The rows that reduce left, from the partial results in the order of the chunks.
  void (*join)(const IndexArgs&, const IndexSlice&) = nullptr;

  // The same with an accumulator for each element of each row, for narrow rows. row[k] is the row that
  // position first + k goes to; `row == rows` must have room too.
  void (*start)(void* accumulators, int64_t size) = nullptr;
  void (*accumulate)(const IndexArgs&, const void* source, const uint32_t* row, int64_t size,
                     void* accumulators) = nullptr;
  void (*accumulate_at)(const IndexArgs&, const void* source, const IndexEntry* entries, int64_t size,
                        int64_t first_row, void* accumulators) = nullptr;
  void (*merge)(void* into, const void* from, int64_t size) = nullptr;
  // out = the accumulators rounded, added to what is there for index_add.
  void (*finish)(const IndexArgs&, const void* accumulators, void* out, int64_t size) = nullptr;

  // What a row is that nothing goes to.
  void (*fill)(void* out, int64_t size) = nullptr;

  // selected[k, first..last) = x[row[k], first..last), in bytes, or from `fill`, likewise an [inner].
  void (*select)(const void* x, int64_t row_bytes, const uint32_t* row, int64_t size, uint32_t rows, int64_t first,
                 int64_t last, const void* fill, void* selected) = nullptr;
};

namespace baseline {
IndexCpuKernels ChooseIndexKernels(const IndexArgs& args);
}
namespace avx2 {
IndexCpuKernels ChooseIndexKernels(const IndexArgs& args);
}
namespace avx512 {
IndexCpuKernels ChooseIndexKernels(const IndexArgs& args);
}

}  // namespace jaxkern
