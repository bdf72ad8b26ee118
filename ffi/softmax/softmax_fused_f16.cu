// The fused softmax kernels for f16.
#include "softmax_fused.cuh"

template cudaError_t jaxkern::LaunchSoftmaxFused<__half>(const SoftmaxArgs&, const SoftmaxProblem&, SoftmaxTier,
                                                    const Device&, cudaStream_t);
