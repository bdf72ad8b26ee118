// The reduction kernels for integers of 32 and 64 bits.
#include "reduction.cuh"

template cudaError_t jaxkern::LaunchReduction<int32_t>(const ReduceArgs&, const ReduceProblem&, ReduceTier,
                                                  const Device&, cudaStream_t);
template cudaError_t jaxkern::LaunchReduction<uint32_t>(const ReduceArgs&, const ReduceProblem&, ReduceTier,
                                                  const Device&, cudaStream_t);
template cudaError_t jaxkern::LaunchReduction<int64_t>(const ReduceArgs&, const ReduceProblem&, ReduceTier,
                                                  const Device&, cudaStream_t);
template cudaError_t jaxkern::LaunchReduction<uint64_t>(const ReduceArgs&, const ReduceProblem&, ReduceTier,
                                                  const Device&, cudaStream_t);
