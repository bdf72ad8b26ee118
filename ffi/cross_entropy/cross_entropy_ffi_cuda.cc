// The XLA FFI handlers of cross-entropy on CUDA.
#include "common/handler_cuda.h"
#include "cross_entropy/cross_entropy_cuda.h"
#include "cross_entropy/cross_entropy_ffi.h"

namespace jaxkern {
namespace {

template <LossPass kPass> struct Handler {
  static ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis,
                        double smoothing, double z_loss, bool has_ignore, int64_t ignore, std::string_view tier) {
    CrossEntropyArgs args;
    size_t used = 0;
    const LossAttributes attributes = {axis, smoothing, z_loss, has_ignore, ignore, tier};
    if (ffi::Error e = DecodeCrossEntropy(kPass, operands, results, attributes, &args, &used); e.failure()) return e;
    if (ffi::Error e = DecodeScratch(results, used, &args); e.failure()) return e;
    const Device& device = CurrentDevice();
    if (args.tier != LossTier::kAuto && ResolveLossTier(args, device) == LossTier::kAuto) {
      return InvalidArgument(LossName(kPass), "the tier '", tier, "' cannot run a width of ", args.width, " here");
    }
    return LaunchError(LossName(kPass), CrossEntropyCuda(args, device, stream));
  }

  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    static auto* handler = BindLossAttributes(BindCuda()).To(Run, {ffi::Traits::kCmdBufferCompatible}).release();
    return handler->Call(frame);
  }
};

}  // namespace

Targets CrossEntropyCudaTargets() { return CrossEntropyTargets<Handler>(); }

}  // namespace jaxkern
