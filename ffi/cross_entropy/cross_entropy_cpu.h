// Cross-entropy on the CPU: see cross_entropy.h for what is computed.
#pragma once

#include "../common/parallel_for.h"
#include "cross_entropy.h"

namespace jaxkern {

// Returns when the results are written. The same bits whatever the executor and its threads.
void CrossEntropyCpu(const CrossEntropyArgs& args, const Executor& executor);

}  // namespace jaxkern
