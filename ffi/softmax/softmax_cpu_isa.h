// Between softmax_cpu.cc and the variants of softmax_cpu_isa.cc and softmax_fused_cpu_isa.cc, one an
// instruction set.
#pragma once

#include <cstdint>

#include "softmax.h"

namespace jaxkern {

// How a problem is cut for one instruction set. A strip is a set of neighbouring rows that one pass
// of vectors covers, a chunk a run of a strip short enough to stay in the L1 cache. Both depend on
// the shape alone, and so do the results.
struct SoftmaxCpuPlan {
  int64_t strips = 0;
  int64_t chunks = 0;      // of a strip
  int64_t stats_size = 0;  // doubles that the statistics of a strip or a chunk take

  // Whole strips [first, last).
  void (*run)(const SoftmaxArgs&, int64_t first, int64_t last) = nullptr;

  // The same in three steps, for few strips of many chunks: the statistics of a chunk, those of a
  // second run of chunks merged into a first, the output of a chunk from those of its strip.
  void (*reduce)(const SoftmaxArgs&, int64_t strip, int64_t chunk, double* stats) = nullptr;
  void (*merge)(const SoftmaxArgs&, double* into, const double* from) = nullptr;
  void (*write)(const SoftmaxArgs&, int64_t strip, int64_t chunk, const double* stats) = nullptr;
};

// A fused call on rows [first, last), with a buffer of the caller's, aligned to a line of the cache, that no other
// thread uses.
struct FusedCpuPlan {
  int64_t buffer_bytes = 0;
  void (*run)(const SoftmaxArgs&, int64_t first, int64_t last, void* buffer) = nullptr;
};

namespace baseline {
SoftmaxCpuPlan PlanSoftmax(const SoftmaxArgs& args);
FusedCpuPlan PlanFused(const SoftmaxArgs& args);
}
namespace avx2 {
SoftmaxCpuPlan PlanSoftmax(const SoftmaxArgs& args);
FusedCpuPlan PlanFused(const SoftmaxArgs& args);
}
namespace avx512 {
SoftmaxCpuPlan PlanSoftmax(const SoftmaxArgs& args);
FusedCpuPlan PlanFused(const SoftmaxArgs& args);
}

}  // namespace jaxkern
