// Between segment_softmax_cpu.cc and the variants of segment_softmax_cpu_isa.cc, one an instruction set.
#pragma once

#include "index_add/index_add_cpu_isa.h"
#include "segment_softmax/segment_softmax.h"

namespace jaxkern {

constexpr int64_t kSegmentNarrow = 8, kSegmentBlock = 256;

// The arrays of one b and o, [count, inner] each, and which columns to work on.
struct SegmentSlice {
  const void* source;
  const void* x;  // gradient: the cotangent
  void* out;
  int64_t inner, first, last;
};

// Of the positions [e, end), which are a segment or a part of one. Statistics are two doubles a column of the slice,
// [2][last - first]: the largest element and the sum of exponentials, or 0 and the sum of products.
struct SegmentCpuKernels {
  void (*segment)(const SegmentSlice&, const IndexEntry* e, const IndexEntry* end) = nullptr;  // all at once
  // The same in three steps, for a long segment: the statistics of a part, those of all parts (in the place of the
  // first ones, in order), the output of a part.
  void (*reduce)(const SegmentSlice&, const IndexEntry* e, const IndexEntry* end, double* stats) = nullptr;
  void (*merge)(double* stats, int64_t parts, int64_t columns) = nullptr;
  void (*write)(const SegmentSlice&, const IndexEntry* e, const IndexEntry* end, const double* stats) = nullptr;

  // Narrow rows in the order that they lie in: positions [first, first + size) of the segments row[0 .. size), with a
  // number for each segment and column, also for `rows`, which stands for none. size <= kSegmentBlock.
  void (*find_largest)(const SegmentSlice&, int64_t first, const uint32_t* row, int64_t size, double* largest) = nullptr;
  void (*add_up)(const SegmentSlice&, int64_t first, const uint32_t* row, int64_t size, const double* largest,
                 double* sum) = nullptr;
  void (*write_all)(const SegmentSlice&, int64_t first, const uint32_t* row, int64_t size, uint32_t rows,
                    const double* largest, const double* sum) = nullptr;
};

namespace baseline {
SegmentCpuKernels ChooseSegmentKernels(const IndexArgs& args);
}
namespace avx2 {
SegmentCpuKernels ChooseSegmentKernels(const IndexArgs& args);
}
namespace avx512 {
SegmentCpuKernels ChooseSegmentKernels(const IndexArgs& args);
}

}  // namespace jaxkern
