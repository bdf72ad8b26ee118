// Entry to the CUDA kernels of the index_add family.
#pragma once

#include "../common/launch.h"
#include "index_add.h"

namespace jaxkern {

// What the choice of a plan sees of a call.
IndexProblem DescribeIndex(const IndexArgs& args);

// Runs the call; out already holds x for index_add. A plan that was asked for but does not fit the
// problem, or scratch smaller than IndexScratchBytes(), is cudaErrorInvalidConfiguration.
cudaError_t IndexCuda(const IndexArgs& args, const Device& device, cudaStream_t stream);

// The plan that IndexCuda would take; kAuto when it cannot run.
IndexPlan ResolveIndexPlan(const IndexArgs& args, const Device& device);

}  // namespace jaxkern
