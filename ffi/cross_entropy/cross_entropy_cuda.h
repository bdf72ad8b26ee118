// Entry to the CUDA kernels of cross-entropy.
#pragma once

#include "../common/launch.h"
#include "cross_entropy.h"

namespace jaxkern {

// Resolves kAuto, then launches. A tier that was asked for but does not fit the problem is
// cudaErrorInvalidConfiguration.
cudaError_t CrossEntropyCuda(const CrossEntropyArgs& args, const Device& device, cudaStream_t stream);

// The tier that CrossEntropyCuda would take.
LossTier ResolveLossTier(const CrossEntropyArgs& args, const Device& device);

}  // namespace jaxkern
