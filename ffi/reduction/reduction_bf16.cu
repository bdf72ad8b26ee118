// The reduction kernels for bf16.
#include "reduction.cuh"

template cudaError_t jaxkern::LaunchReduction<__nv_bfloat16>(const ReduceArgs&, const ReduceProblem&, ReduceTier,
                                                  const Device&, cudaStream_t);
