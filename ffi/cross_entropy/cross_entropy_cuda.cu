// Dispatch of cross-entropy to a tier and a dtype.
#include "cross_entropy_cuda.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace jaxkern {

template <class T>
cudaError_t LaunchLoss(const CrossEntropyArgs&, const LossProblem&, LossTier, const Device&, cudaStream_t);

namespace {

LossProblem Describe(const CrossEntropyArgs& a) {
  const auto misalignment = [](const void* p) { return static_cast<int>(reinterpret_cast<uintptr_t>(p) % 16); };
  LossProblem p;
  p.pass = a.pass;
  p.rows = a.outer;
  p.width = a.width;
  p.inner = a.inner;
  p.dtype = a.dtype;
  p.masked = a.mask != nullptr;
  p.scratch_bytes = a.scratch_bytes;
  p.misalignment = misalignment(a.logits);
  p.aligned_alike = a.pass == LossPass::kLoss || misalignment(a.gradient) == p.misalignment;
  return p;
}

}  // namespace

LossTier ResolveLossTier(const CrossEntropyArgs& args, const Device& device) {
  return ResolveTier(args.tier, Describe(args), device, ChooseLossTier, LossTierFits);
}

cudaError_t CrossEntropyCuda(const CrossEntropyArgs& args, const Device& device, cudaStream_t stream) {
  if (args.outer == 0 || args.width == 0 || args.inner == 0) return cudaSuccess;
  if (device.error != cudaSuccess) return device.error;
  const LossProblem problem = Describe(args);
  const LossTier tier = ResolveTier(args.tier, problem, device, ChooseLossTier, LossTierFits);
  if (tier == LossTier::kAuto) return cudaErrorInvalidConfiguration;
  switch (args.dtype) {
    case DType::kF16: return LaunchLoss<__half>(args, problem, tier, device, stream);
    case DType::kBF16: return LaunchLoss<__nv_bfloat16>(args, problem, tier, device, stream);
    case DType::kF32: return LaunchLoss<float>(args, problem, tier, device, stream);
    case DType::kF64: return LaunchLoss<double>(args, problem, tier, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxkern
