// The CPU kernels of the index_add family. They know nothing of XLA or Python.
#pragma once

#include "common/parallel_for.h"
#include "index_add/index_add.h"

namespace jaxkern {

// The most rows and indices (of one b) that the kernels can number.
constexpr int64_t kIndexCpuLimit = (int64_t{1} << 32) - 2;

// Runs the call; out already holds x for index_add. Bitwise the same for any number of threads.
void IndexCpu(const IndexArgs& args, const Executor& executor);

}  // namespace jaxkern
