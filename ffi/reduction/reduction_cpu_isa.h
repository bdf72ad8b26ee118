// Between reduction_cpu.cc and the variants of reduction_cpu_isa.cc, one an instruction set.
#pragma once

#include <cstdint>

#include "reduction.h"

namespace jaxkern {

// How a problem is cut for one instruction set. A strip is a row, or a set of neighbouring columns that
// one pass of vectors covers; a chunk is a run of a strip short enough to stay in the L1 cache. Both
// depend on the shape alone, and so do the results.
struct ReduceCpuPlan {
  int64_t strips = 0;
  int64_t chunks = 0;      // of a strip
  int64_t stats_size = 0;  // doubles that the statistics of a chunk take

  // Whole strips [first, last).
  void (*run)(const ReduceArgs&, int64_t first, int64_t last) = nullptr;

  // The same in two steps, for few strips of many chunks: the statistics of a chunk, and the output of a
  // strip from those of all its chunks, merged in their order.
  void (*reduce)(const ReduceArgs&, int64_t strip, int64_t chunk, double* stats) = nullptr;
  void (*finish)(const ReduceArgs&, int64_t strip, double* stats) = nullptr;
};

namespace baseline {
ReduceCpuPlan PlanReduction(const ReduceArgs& args);
}
namespace avx2 {
ReduceCpuPlan PlanReduction(const ReduceArgs& args);
}
namespace avx512 {
ReduceCpuPlan PlanReduction(const ReduceArgs& args);
}

}  // namespace jaxkern
