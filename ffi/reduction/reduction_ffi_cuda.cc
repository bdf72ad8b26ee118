// The XLA FFI handlers of the row reductions on CUDA.
#include "common/handler_cuda.h"
#include "reduction/reduction_cuda.h"
#include "reduction/reduction_ffi.h"

namespace jaxkern {
namespace {

template <ReduceOp kOp, bool kStatistics> struct Handler {
  static ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis,
                        std::string_view tier) {
    ReduceArgs args;
    if (ffi::Error e = DecodeReduction(kOp, kStatistics, operands, results, axis, tier, &args); e.failure()) return e;
    if (ffi::Error e = DecodeScratch(results, kStatistics ? 3 : 1, &args); e.failure()) return e;
    const Device& device = CurrentDevice();
    const char* name = ReduceName(kOp);
    if (args.tier != ReduceTier::kAuto && ResolveReduceTier(args, device) == ReduceTier::kAuto) {
      return InvalidArgument(name, "the tier '", tier, "' cannot run a width of ", args.width, " here");
    }
    return LaunchError(name, ReductionCuda(args, device, stream));
  }

  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    static auto* handler = ffi::Ffi::Bind()
                               .Ctx<ffi::PlatformStream<cudaStream_t>>()
                               .RemainingArgs()
                               .RemainingRets()
                               .Attr<int64_t>("axis")
                               .Attr<std::string_view>("tier")
                               .To(Run, {ffi::Traits::kCmdBufferCompatible})
                               .release();
    return handler->Call(frame);
  }
};

}  // namespace

Targets ReductionCudaTargets() { return ReductionTargets<Handler>(); }

}  // namespace jaxkern
