// Entry to the CUDA kernels of segment_softmax.
#pragma once

#include "../common/launch.h"
#include "segment_softmax.h"

namespace jaxkern {

// Runs the call. A plan that was asked for but does not fit the problem, or scratch smaller than IndexScratchBytes(),
// is cudaErrorInvalidConfiguration.
cudaError_t SegmentSoftmaxCuda(const IndexArgs& args, const Device& device, cudaStream_t stream);

}  // namespace jaxkern
