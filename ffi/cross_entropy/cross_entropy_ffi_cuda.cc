// The XLA FFI handlers of cross-entropy on CUDA.
#include "common/handler_cuda.h"
#include "cross_entropy/cross_entropy_cuda.h"
#include "cross_entropy/cross_entropy_ffi.h"

namespace jaxkern {
namespace {

template <LossPass kPass>
ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis, double smoothing,
               double z_loss, bool has_ignore, int64_t ignore, std::string_view tier) {
  CrossEntropyArgs args;
  size_t used = 0;
  const LossAttributes attributes = {axis, smoothing, z_loss, has_ignore, ignore, tier};
  if (ffi::Error e = DecodeCrossEntropy(kPass, operands, results, attributes, &args, &used); e.failure()) return e;
  if (results.size() > used) {
    auto scratch = results.get<ffi::AnyBuffer>(used);
    if (!scratch) return scratch.error();
    args.scratch = (*scratch)->untyped_data();
    args.scratch_bytes = (*scratch)->size_bytes();
  }
  const Device& device = CurrentDevice();
  if (args.tier != LossTier::kAuto && ResolveLossTier(args, device) == LossTier::kAuto) {
    return InvalidArgument(LossName(kPass), "the tier '", tier, "' cannot run a width of ", args.width, " here");
  }
  return LaunchError(LossName(kPass), CrossEntropyCuda(args, device, stream));
}

template <LossPass kPass>
XLA_FFI_Error* Handler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<cudaStream_t>>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attr<int64_t>("axis")
                             .Attr<double>("smoothing")
                             .Attr<double>("z_loss")
                             .Attr<bool>("has_ignore")
                             .Attr<int64_t>("ignore")
                             .Attr<std::string_view>("tier")
                             .To(Run<kPass>, {ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}

}  // namespace

Targets CrossEntropyCudaTargets() {
  return {{"jaxkern_cross_entropy", Handler<LossPass::kLoss>},
          {"jaxkern_cross_entropy_grad", Handler<LossPass::kGradient>},
          {"jaxkern_cross_entropy_both", Handler<LossPass::kBoth>}};
}

}  // namespace jaxkern
