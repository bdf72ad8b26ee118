// Entry to the CUDA kernels of the softmax family.
#pragma once

#include "../common/launch.h"
#include "softmax.h"

namespace jaxkern {

// Resolves kAuto, then launches. A tier that was asked for but does not fit the problem is
// cudaErrorInvalidConfiguration.
cudaError_t SoftmaxCuda(const SoftmaxArgs& args, const Device& device, cudaStream_t stream);

// The tier that SoftmaxCuda would take.
SoftmaxTier ResolveSoftmaxTier(const SoftmaxArgs& args, const Device& device);

}  // namespace jaxkern
