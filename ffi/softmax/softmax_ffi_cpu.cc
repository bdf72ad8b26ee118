// The XLA FFI handlers of the softmax family on the CPU.
#include "common/huge_pages.h"
#include "softmax/softmax_cpu.h"
#include "softmax/softmax_ffi.h"

namespace jaxkern {
namespace {

template <bool kLog, bool kBackward> struct Handler {
  static ffi::Error Run(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis,
                        std::string_view /*tier: of CUDA*/) {
    SoftmaxArgs args;
    if (ffi::Error e = DecodeSoftmax(kLog, kBackward, operands, results, axis, &args); e.failure()) return e;
    PreferHugePages(args.out, results.get<ffi::AnyBuffer>(0).value()->size_bytes());
    SoftmaxCpu(args, XlaExecutor(pool));
    return ffi::Error::Success();
  }

  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    static auto* handler = BindCpu().Attr<int64_t>("axis").Attr<std::string_view>("tier").To(Run).release();
    return handler->Call(frame);
  }
};

template <bool kBackward, bool kFromOutput> struct FusedHandler {
  static ffi::Error Run(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis,
                        bool log, std::string_view extras, bool causal, int64_t threshold,
                        bool unscaled) {
    SoftmaxArgs args;
    const FusedAttributes attributes = {axis, log, extras, causal, threshold, unscaled};
    if (ffi::Error e = DecodeFused(kBackward, operands, results, attributes, &args); e.failure()) return e;
    args.extras.from_output = kFromOutput;
    PreferHugePages(args.out, results.get<ffi::AnyBuffer>(0).value()->size_bytes());
    SoftmaxFusedCpu(args, XlaExecutor(pool));
    return ffi::Error::Success();
  }

  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    static auto* handler = BindFusedAttributes(BindCpu()).To(Run).release();
    return handler->Call(frame);
  }
};

}  // namespace

Targets SoftmaxCpuTargets() {
  return {{"jaxkern_softmax", Handler<false, false>::Call},
          {"jaxkern_log_softmax", Handler<true, false>::Call},
          {"jaxkern_softmax_grad", Handler<false, true>::Call},
          {"jaxkern_log_softmax_grad", Handler<true, true>::Call},
          {"jaxkern_softmax_fused", FusedHandler<false, false>::Call},
          {"jaxkern_softmax_fused_grad", FusedHandler<true, false>::Call},
          {"jaxkern_softmax_fused_output_grad", FusedHandler<true, true>::Call}};
}

}  // namespace jaxkern
