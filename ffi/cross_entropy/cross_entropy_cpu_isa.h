// Between cross_entropy_cpu.cc and the variants of cross_entropy_cpu_isa.cc, one an instruction set.
#pragma once

#include <cstdint>

#include "cross_entropy.h"

namespace jaxkern {

// A strip is a row, or the neighbouring rows of one outer index that a register covers; `run` does the strips
// [first, last). Their number depends on the shape alone, and so do the results.
struct CrossEntropyCpuPlan {
  int64_t strips = 0;
  void (*run)(const CrossEntropyArgs&, int64_t first, int64_t last) = nullptr;
};

namespace baseline {
CrossEntropyCpuPlan PlanCrossEntropy(const CrossEntropyArgs& args);
}
namespace avx2 {
CrossEntropyCpuPlan PlanCrossEntropy(const CrossEntropyArgs& args);
}
namespace avx512 {
CrossEntropyCpuPlan PlanCrossEntropy(const CrossEntropyArgs& args);
}

}  // namespace jaxkern
