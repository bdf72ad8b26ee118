// The XLA FFI handlers of cross-entropy on the CPU.
#include "common/huge_pages.h"
#include "cross_entropy/cross_entropy_cpu.h"
#include "cross_entropy/cross_entropy_ffi.h"

namespace jaxkern {
namespace {

template <LossPass kPass> struct Handler {
  static ffi::Error Run(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis,
                        double smoothing, double z_loss, bool has_ignore, int64_t ignore, std::string_view tier) {
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

  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    static auto* handler = BindLossAttributes(BindCpu()).To(Run).release();
    return handler->Call(frame);
  }
};

}  // namespace

Targets CrossEntropyCpuTargets() { return CrossEntropyTargets<Handler>(); }

}  // namespace jaxkern
