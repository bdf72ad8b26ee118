// The kernels of segment_softmax for f64.
#include "segment_softmax.cuh"

template cudaError_t jaxkern::LaunchSegmentSoftmax<double>(IndexOp, const IndexRun&, const void*, cudaStream_t);
