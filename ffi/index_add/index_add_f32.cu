// The kernels of the index_add family for f32.
#include "index_add_kernels.cuh"

template cudaError_t jaxkern::LaunchIndexRun<float>(IndexPlan, IndexOp, const IndexRun&, bool, cudaStream_t);
