// The fused softmax kernels for f64.
#include "softmax_fused.cuh"

template cudaError_t jaxkern::LaunchSoftmaxFused<double>(const SoftmaxArgs&, const SoftmaxProblem&, SoftmaxTier,
                                                    const Device&, cudaStream_t);
