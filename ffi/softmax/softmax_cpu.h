// The softmax family on the CPU: see softmax.h for what is computed.
#pragma once

#include "../common/parallel_for.h"
#include "softmax.h"

namespace jaxkern {

// Returns when the result is written. The same bits whatever the executor and its threads.
void SoftmaxCpu(const SoftmaxArgs& args, const Executor& executor);

// The same of a fused call.
void SoftmaxFusedCpu(const SoftmaxArgs& args, const Executor& executor);

}  // namespace jaxkern
