// The XLA FFI handlers of cross-entropy on the CPU.
#include "common/huge_pages.h"
#include "cross_entropy/cross_entropy_cpu.h"
#include "cross_entropy/cross_entropy_ffi.h"

namespace jaxkern {
namespace {

template <LossPass kPass>
ffi::Error Run(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis, double smoothing,
               double z_loss, bool has_ignore, int64_t ignore, std::string_view tier) {
  CrossEntropyArgs args;
  size_t used = 0;
  const LossAttributes attributes = {axis, smoothing, z_loss, has_ignore, ignore, tier};
  if (ffi::Error e = DecodeCrossEntropy(kPass, operands, results, attributes, &args, &used); e.failure()) return e;
  if (args.gradient && args.gradient != args.logits) {
    PreferHugePages(args.gradient, results.get<ffi::AnyBuffer>(used - 1).value()->size_bytes());
  }
  CrossEntropyCpu(args, XlaExecutor(pool));
  return ffi::Error::Success();
}

template <LossPass kPass>
XLA_FFI_Error* Handler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attr<int64_t>("axis")
                             .Attr<double>("smoothing")
                             .Attr<double>("z_loss")
                             .Attr<bool>("has_ignore")
                             .Attr<int64_t>("ignore")
                             .Attr<std::string_view>("tier")
                             .To(Run<kPass>)
                             .release();
  return handler->Call(frame);
}

}  // namespace

Targets CrossEntropyCpuTargets() {
  return {{"jaxkern_cross_entropy", Handler<LossPass::kLoss>},
          {"jaxkern_cross_entropy_grad", Handler<LossPass::kGradient>},
          {"jaxkern_cross_entropy_both", Handler<LossPass::kBoth>}};
}

}  // namespace jaxkern
