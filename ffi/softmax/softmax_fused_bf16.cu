// The fused softmax kernels for bf16.
#include "softmax_fused.cuh"

template cudaError_t jaxkern::LaunchSoftmaxFused<__nv_bfloat16>(const SoftmaxArgs&, const SoftmaxProblem&, SoftmaxTier,
                                                    const Device&, cudaStream_t);
