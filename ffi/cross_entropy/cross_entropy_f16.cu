// The cross-entropy kernels for f16.
#include "cross_entropy.cuh"

template cudaError_t jaxkern::LaunchLoss<__half>(const CrossEntropyArgs&, const LossProblem&, LossTier, const Device&,
                                             cudaStream_t);
