// The reduction kernels for f16.
#include "reduction.cuh"

template cudaError_t jaxkern::LaunchReduction<__half>(const ReduceArgs&, const ReduceProblem&, ReduceTier,
                                                  const Device&, cudaStream_t);
