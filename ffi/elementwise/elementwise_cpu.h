// The elementwise operations on the CPU. Functors are compiled for float, double and int32_t, once an
// instruction set; other types are converted block by block on the way in and out, while the block is in the L1 cache.
#pragma once

#include <cstdint>

#include "../common/parallel_for.h"
#include "elementwise.h"

namespace jaxkern {

// A functor over n elements of its computing type.
using ElementwiseLoop = void (*)(const void* const* in, void* const* out, const void* const* parameter, int64_t n);

struct ElementwiseLoops {
  const ElementwiseEntry<ElementwiseLoop>* entries;
  int count;
};

// n elements of one type to another.
using ElementwiseConversion = void (*)(const void* from, void* to, int64_t n);

// Between the element types in memory and those that are computed in; null where nothing needs it.
struct ElementwiseConversions {
  ElementwiseConversion load[8][8], store[8][8];  // [type in memory][computing type]
};

struct ElementwiseCpuKernel {
  ElementwiseLoop loop;
  ElementwiseType computing;
  int parameters;
};

const ElementwiseTable<ElementwiseCpuKernel>& ElementwiseCpuKernels();

void ElementwiseCpu(const ElementwiseCpuKernel& kernel, const ElementwiseArgs& args, const Executor& executor);

}  // namespace jaxkern
