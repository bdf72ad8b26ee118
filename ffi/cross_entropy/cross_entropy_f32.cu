// The cross-entropy kernels for f32.
#include "cross_entropy.cuh"

template cudaError_t jaxkern::LaunchLoss<float>(const CrossEntropyArgs&, const LossProblem&, LossTier, const Device&,
                                             cudaStream_t);
