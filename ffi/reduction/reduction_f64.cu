// The reduction kernels for f64.
#include "reduction.cuh"

template cudaError_t jaxkern::LaunchReduction<double>(const ReduceArgs&, const ReduceProblem&, ReduceTier,
                                                  const Device&, cudaStream_t);
