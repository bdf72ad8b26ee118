// The kernels of the index_add family for f64.
#include "index_add_kernels.cuh"

template cudaError_t jaxkern::LaunchIndexRun<double>(IndexPlan, IndexOp, const IndexRun&, bool, cudaStream_t);
