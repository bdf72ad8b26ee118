// The kernels of the index_add family for f16.
#include "index_add_kernels.cuh"

template cudaError_t jaxkern::LaunchIndexRun<__half>(IndexPlan, IndexOp, const IndexRun&, bool, cudaStream_t);
