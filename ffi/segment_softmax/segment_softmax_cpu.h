// The CPU kernels of segment_softmax. They know nothing of XLA or Python.
#pragma once

#include "common/parallel_for.h"
#include "segment_softmax/segment_softmax.h"

namespace jaxkern {

// Runs the call; at most kIndexCpuLimit rows and positions of one b. Bitwise the same for any number of threads.
void SegmentSoftmaxCpu(const IndexArgs& args, const Executor& executor);

}  // namespace jaxkern
