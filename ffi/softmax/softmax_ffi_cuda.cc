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

template <bool kLog, bool kBackward>
ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis,
               std::string_view tier) {
  SoftmaxArgs args;
  if (ffi::Error e = DecodeSoftmax(kLog, kBackward, operands, results, axis, tier, &args); e.failure()) return e;
  if (results.size() > 1) {
    auto scratch = results.get<ffi::AnyBuffer>(1);
    if (!scratch) return scratch.error();
    args.scratch = (*scratch)->untyped_data();
    args.scratch_bytes = (*scratch)->size_bytes();
  }
  return RunArgs(stream, args, tier);
}

template <bool kBackward>
ffi::Error RunFused(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis,
                    std::string_view tier, bool log, std::string_view extras, bool causal, int64_t threshold,
                    bool unscaled) {
  SoftmaxArgs args;
  if (ffi::Error e = DecodeFused(kBackward, operands, results, axis, tier, log, extras, causal, threshold, unscaled, &args);
      e.failure()) {
    return e;
  }
  return RunArgs(stream, args, tier);
}

template <bool kLog, bool kBackward>
XLA_FFI_Error* Handler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<cudaStream_t>>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attr<int64_t>("axis")
                             .Attr<std::string_view>("tier")
                             .To(Run<kLog, kBackward>, {ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}

template <bool kBackward>
XLA_FFI_Error* FusedHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<cudaStream_t>>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attr<int64_t>("axis")
                             .Attr<std::string_view>("tier")
                             .Attr<bool>("log")
                             .Attr<std::string_view>("extras")
                             .Attr<bool>("causal")
                             .Attr<int64_t>("threshold")
                             .Attr<bool>("unscaled")
                             .To(RunFused<kBackward>, {ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}

}  // namespace

Targets SoftmaxCudaTargets() {
  return {{"jaxkern_softmax", Handler<false, false>},
          {"jaxkern_log_softmax", Handler<true, false>},
          {"jaxkern_softmax_grad", Handler<false, true>},
          {"jaxkern_log_softmax_grad", Handler<true, true>},
          {"jaxkern_softmax_fused", FusedHandler<false>},
          {"jaxkern_softmax_fused_grad", FusedHandler<true>}};
}

}  // namespace jaxkern
