// The cross-entropy kernels for f64.
#include "cross_entropy.cuh"

template cudaError_t jaxkern::LaunchLoss<double>(const CrossEntropyArgs&, const LossProblem&, LossTier, const Device&,
                                             cudaStream_t);
