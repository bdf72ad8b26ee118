// The kernels of segment_softmax for f16.
#include "segment_softmax.cuh"

template cudaError_t jaxkern::LaunchSegmentSoftmax<__half>(IndexOp, const IndexRun&, const void*, cudaStream_t);
