// The cross-entropy kernels for bf16.
#include "cross_entropy.cuh"

template cudaError_t jaxkern::LaunchLoss<__nv_bfloat16>(const CrossEntropyArgs&, const LossProblem&, LossTier, const Device&,
                                             cudaStream_t);
