// The kernels of the index_add family for s64.
#include "index_add_kernels.cuh"

template cudaError_t jaxkern::LaunchIndexRun<int64_t>(IndexPlan, IndexOp, const IndexRun&, bool, cudaStream_t);
