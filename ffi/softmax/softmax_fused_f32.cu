// The fused softmax kernels for f32.
#include "softmax_fused.cuh"

template cudaError_t jaxkern::LaunchSoftmaxFused<float>(const SoftmaxArgs&, const SoftmaxProblem&, SoftmaxTier,
                                                    const Device&, cudaStream_t);
