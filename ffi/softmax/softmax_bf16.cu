// The softmax kernels for bf16.
#include "softmax.cuh"

template cudaError_t jaxkern::LaunchSoftmax<__nv_bfloat16>(const SoftmaxArgs&, const SoftmaxProblem&, SoftmaxTier,
                                                const Device&, cudaStream_t);
