// The XLA FFI handlers of the softmax family on the CPU.
#include "common/huge_pages.h"
#include "softmax/softmax_cpu.h"
#include "softmax/softmax_ffi.h"

namespace jaxkern {
namespace {

template <bool kLog, bool kBackward>
ffi::Error Run(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis,
               std::string_view tier) {
  SoftmaxArgs args;
  if (ffi::Error e = DecodeSoftmax(kLog, kBackward, operands, results, axis, tier, &args); e.failure()) return e;
  PreferHugePages(args.out, results.get<ffi::AnyBuffer>(0).value()->size_bytes());
  SoftmaxCpu(args, XlaExecutor(pool));
  return ffi::Error::Success();
}

template <bool kBackward>
ffi::Error RunFused(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis,
                    std::string_view tier, bool log, std::string_view extras, bool causal, int64_t threshold,
                    bool unscaled) {
  SoftmaxArgs args;
  if (ffi::Error e = DecodeFused(kBackward, operands, results, axis, tier, log, extras, causal, threshold, unscaled, &args);
      e.failure()) {
    return e;
  }
  PreferHugePages(args.out, results.get<ffi::AnyBuffer>(0).value()->size_bytes());
  SoftmaxFusedCpu(args, XlaExecutor(pool));
  return ffi::Error::Success();
}

template <bool kLog, bool kBackward>
XLA_FFI_Error* Handler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attr<int64_t>("axis")
                             .Attr<std::string_view>("tier")
                             .To(Run<kLog, kBackward>)
                             .release();
  return handler->Call(frame);
}

template <bool kBackward>
XLA_FFI_Error* FusedHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attr<int64_t>("axis")
                             .Attr<std::string_view>("tier")
                             .Attr<bool>("log")
                             .Attr<std::string_view>("extras")
                             .Attr<bool>("causal")
                             .Attr<int64_t>("threshold")
                             .Attr<bool>("unscaled")
                             .To(RunFused<kBackward>)
                             .release();
  return handler->Call(frame);
}

}  // namespace

Targets SoftmaxCpuTargets() {
  return {{"jaxkern_softmax", Handler<false, false>},
          {"jaxkern_log_softmax", Handler<true, false>},
          {"jaxkern_softmax_grad", Handler<false, true>},
          {"jaxkern_log_softmax_grad", Handler<true, true>},
          {"jaxkern_softmax_fused", FusedHandler<false>},
          {"jaxkern_softmax_fused_grad", FusedHandler<true>}};
}

}  // namespace jaxkern
