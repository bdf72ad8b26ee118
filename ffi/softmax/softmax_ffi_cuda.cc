// The XLA FFI handlers of the softmax family on CUDA.
#include "common/handler_cuda.h"
#include "softmax/softmax_cuda.h"
#include "softmax/softmax_ffi.h"

namespace jaxkern {
namespace {

ffi::Error RunArgs(cudaStream_t stream, const SoftmaxArgs& args, std::string_view tier) {
  const Device& device = CurrentDevice();
  const char* name = SoftmaxName(args.log, args.backward);
  if (args.tier != SoftmaxTier::kAuto && ResolveSoftmaxTier(args, device) == SoftmaxTier::kAuto) {
    return InvalidArgument(name, "the tier '", tier, "' cannot run a width of ", args.width, " here");
  }
  return LaunchError(name, SoftmaxCuda(args, device, stream));
}

template <bool kLog, bool kBackward> struct Handler {
  static ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis,
                        std::string_view tier) {
    SoftmaxArgs args;
    if (ffi::Error e = DecodeSoftmax(kLog, kBackward, operands, results, axis, tier, &args); e.failure()) return e;
    if (ffi::Error e = DecodeScratch(results, 1, &args); e.failure()) return e;
    return RunArgs(stream, args, tier);
  }

  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    static auto* handler = BindCuda()
                               .Attr<int64_t>("axis")
                               .Attr<std::string_view>("tier")
                               .To(Run, {ffi::Traits::kCmdBufferCompatible})
                               .release();
    return handler->Call(frame);
  }
};

template <bool kBackward, bool kFromOutput> struct FusedHandler {
  static ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis,
                        std::string_view tier, bool log, std::string_view extras, bool causal, int64_t threshold,
                        bool unscaled) {
    SoftmaxArgs args;
    const FusedAttributes attributes = {axis, tier, log, extras, causal, threshold, unscaled};
    if (ffi::Error e = DecodeFused(kBackward, operands, results, attributes, &args); e.failure()) return e;
    args.extras.from_output = kFromOutput;
    return RunArgs(stream, args, tier);
  }

  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    static auto* handler = BindFusedAttributes(BindCuda()).To(Run, {ffi::Traits::kCmdBufferCompatible}).release();
    return handler->Call(frame);
  }
};

}  // namespace

Targets SoftmaxCudaTargets() { return SoftmaxTargets<Handler, FusedHandler>(); }

}  // namespace jaxkern
