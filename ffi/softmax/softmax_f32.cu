// The softmax kernels for f32.
#include "softmax.cuh"

template cudaError_t jaxkern::LaunchSoftmax<float>(const SoftmaxArgs&, const SoftmaxProblem&, SoftmaxTier,
                                                const Device&, cudaStream_t);
