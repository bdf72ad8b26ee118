// Dispatch of the row reductions to a tier and an element type.
#include "reduction_cuda.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace jaxkern {

template <class T>
cudaError_t LaunchReduction(const ReduceArgs&, const ReduceProblem&, ReduceTier, const Device&, cudaStream_t);

namespace {

ReduceProblem Describe(const ReduceArgs& a) {
  ReduceProblem p;
  p.rows = a.outer;
  p.width = a.width;
  p.inner = a.inner;
  p.element_bytes = SizeOf(a.type);
  p.integer = IsInteger(a.type);
  p.masked = a.mask != nullptr;
  p.misalignment = static_cast<int>(reinterpret_cast<uintptr_t>(a.x) % 16);
  p.scratch_bytes = a.scratch_bytes;
  return p;
}

}  // namespace

ReduceTier ResolveReduceTier(const ReduceArgs& args, const Device& device) {
  return ResolveTier(args.tier, Describe(args), device, ChooseReduceTier, ReduceTierFits);
}

cudaError_t ReductionCuda(const ReduceArgs& args, const Device& device, cudaStream_t stream) {
  if (args.outer == 0 || args.width == 0 || args.inner == 0) return cudaSuccess;
  if (device.error != cudaSuccess) return device.error;
  const ReduceProblem problem = Describe(args);
  const ReduceTier tier = ResolveTier(args.tier, problem, device, ChooseReduceTier, ReduceTierFits);
  if (tier == ReduceTier::kAuto) return cudaErrorInvalidConfiguration;
  const auto launch = [&](auto run) { return run(args, problem, tier, device, stream); };
  switch (args.type) {
    case ReduceType::kF16: return launch(LaunchReduction<__half>);
    case ReduceType::kBF16: return launch(LaunchReduction<__nv_bfloat16>);
    case ReduceType::kF32: return launch(LaunchReduction<float>);
    case ReduceType::kF64: return launch(LaunchReduction<double>);
    case ReduceType::kS8: return launch(LaunchReduction<int8_t>);
    case ReduceType::kS16: return launch(LaunchReduction<int16_t>);
    case ReduceType::kS32: return launch(LaunchReduction<int32_t>);
    case ReduceType::kS64: return launch(LaunchReduction<int64_t>);
    case ReduceType::kU8: return launch(LaunchReduction<uint8_t>);
    case ReduceType::kU16: return launch(LaunchReduction<uint16_t>);
    case ReduceType::kU32: return launch(LaunchReduction<uint32_t>);
    case ReduceType::kU64: return launch(LaunchReduction<uint64_t>);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxkern
