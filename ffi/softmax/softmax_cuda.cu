// Dispatch of the softmax family to a tier and a dtype.
#include "softmax_cuda.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace jaxkern {

template <class T>
cudaError_t LaunchSoftmax(const SoftmaxArgs&, const SoftmaxProblem&, SoftmaxTier, const Device&, cudaStream_t);
template <class T>
cudaError_t LaunchSoftmaxFused(const SoftmaxArgs&, const SoftmaxProblem&, SoftmaxTier, const Device&, cudaStream_t);

namespace {

int Misalignment(const void* p) { return static_cast<int>(reinterpret_cast<uintptr_t>(p) % 128); }

SoftmaxProblem Describe(const SoftmaxArgs& a) {
  SoftmaxProblem p;
  p.rows = a.outer;
  p.width = a.width;
  p.inner = a.inner;
  p.dtype = a.dtype;
  p.log = a.log;
  p.backward = a.backward;
  p.scratch_bytes = a.scratch_bytes;
  p.misalignment = Misalignment(a.a);
  const auto alike = [&](const void* other) { return (Misalignment(other) - p.misalignment) % 16 == 0; };
  p.aligned_alike = alike(a.out) && (!a.backward || alike(a.b));
  p.masked = a.mask != nullptr;
  p.fused = a.fused;
  return p;
}

}  // namespace

SoftmaxTier ResolveSoftmaxTier(const SoftmaxArgs& args, const Device& device) {
  return ResolveTier(args.tier, Describe(args), device, ChooseSoftmaxTier, SoftmaxTierFits);
}

template <class T>
static cudaError_t LaunchOne(const SoftmaxArgs& args, const SoftmaxProblem& problem, SoftmaxTier tier,
                             const Device& device, cudaStream_t stream) {
  return args.fused ? LaunchSoftmaxFused<T>(args, problem, tier, device, stream)
                    : LaunchSoftmax<T>(args, problem, tier, device, stream);
}

cudaError_t SoftmaxCuda(const SoftmaxArgs& args, const Device& device, cudaStream_t stream) {
  if (args.outer == 0 || args.width == 0 || args.inner == 0) return cudaSuccess;
  if (device.error != cudaSuccess) return device.error;
  const SoftmaxProblem problem = Describe(args);
  const SoftmaxTier tier = ResolveTier(args.tier, problem, device, ChooseSoftmaxTier, SoftmaxTierFits);
  if (tier == SoftmaxTier::kAuto) return cudaErrorInvalidConfiguration;
  switch (args.dtype) {
    case DType::kF16: return LaunchOne<__half>(args, problem, tier, device, stream);
    case DType::kBF16: return LaunchOne<__nv_bfloat16>(args, problem, tier, device, stream);
    case DType::kF32: return LaunchOne<float>(args, problem, tier, device, stream);
    case DType::kF64: return LaunchOne<double>(args, problem, tier, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxkern
