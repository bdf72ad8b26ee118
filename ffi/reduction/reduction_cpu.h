// The row reductions on the CPU: see reduction.h for what is computed.
#pragma once

#include "../common/parallel_for.h"
#include "reduction.h"

namespace jaxkern {

// Returns when the result is written. The same bits whatever the executor and its threads.
void ReductionCpu(const ReduceArgs& args, const Executor& executor);

}  // namespace jaxkern
