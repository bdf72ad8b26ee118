// Entry to the CUDA kernels of the row reductions.
#pragma once

#include "../common/launch.h"
#include "reduction.h"

namespace jaxkern {

// Resolves kAuto, then launches. A tier that was asked for but does not fit the problem is
// cudaErrorInvalidConfiguration.
cudaError_t ReductionCuda(const ReduceArgs& args, const Device& device, cudaStream_t stream);

// The tier that ReductionCuda would take.
ReduceTier ResolveReduceTier(const ReduceArgs& args, const Device& device);

}  // namespace jaxkern
