// The reduction kernels for integers of 8 and 16 bits.
#include "reduction.cuh"

template cudaError_t jaxkern::LaunchReduction<int8_t>(const ReduceArgs&, const ReduceProblem&, ReduceTier,
                                                  const Device&, cudaStream_t);
template cudaError_t jaxkern::LaunchReduction<uint8_t>(const ReduceArgs&, const ReduceProblem&, ReduceTier,
                                                  const Device&, cudaStream_t);
template cudaError_t jaxkern::LaunchReduction<int16_t>(const ReduceArgs&, const ReduceProblem&, ReduceTier,
                                                  const Device&, cudaStream_t);
template cudaError_t jaxkern::LaunchReduction<uint16_t>(const ReduceArgs&, const ReduceProblem&, ReduceTier,
                                                  const Device&, cudaStream_t);
