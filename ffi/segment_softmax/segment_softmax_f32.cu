// The kernels of segment_softmax for f32.
#include "segment_softmax.cuh"

template cudaError_t jaxkern::LaunchSegmentSoftmax<float>(IndexOp, const IndexRun&, const void*, cudaStream_t);
