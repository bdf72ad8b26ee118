// The kernels of the index_add family for bf16.
#include "index_add_kernels.cuh"

template cudaError_t jaxkern::LaunchIndexRun<__nv_bfloat16>(IndexPlan, IndexOp, const IndexRun&, bool, cudaStream_t);
