// The reduction kernels for f32.
#include "reduction.cuh"

template cudaError_t jaxkern::LaunchReduction<float>(const ReduceArgs&, const ReduceProblem&, ReduceTier,
                                                  const Device&, cudaStream_t);
