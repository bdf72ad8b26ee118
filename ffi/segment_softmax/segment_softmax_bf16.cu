// The kernels of segment_softmax for bf16.
#include "segment_softmax.cuh"

template cudaError_t jaxkern::LaunchSegmentSoftmax<__nv_bfloat16>(IndexOp, const IndexRun&, const void*, cudaStream_t);
