// The softmax kernels for f64.
#include "softmax.cuh"

template cudaError_t jaxkern::LaunchSoftmax<double>(const SoftmaxArgs&, const SoftmaxProblem&, SoftmaxTier,
                                                const Device&, cudaStream_t);
