// The kernels of the index_add family for s32.
#include "index_add_kernels.cuh"

template cudaError_t jaxkern::LaunchIndexRun<int32_t>(IndexPlan, IndexOp, const IndexRun&, bool, cudaStream_t);
