// The softmax kernels for f16.
#include "softmax.cuh"

template cudaError_t jaxkern::LaunchSoftmax<__half>(const SoftmaxArgs&, const SoftmaxProblem&, SoftmaxTier,
                                                const Device&, cudaStream_t);
