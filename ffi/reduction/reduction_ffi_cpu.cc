// The XLA FFI handlers of the row reductions on the CPU.
#include "reduction/reduction_cpu.h"
#include "reduction/reduction_ffi.h"

namespace jaxkern {
namespace {

template <ReduceOp kOp, bool kStatistics> struct Handler {
  static ffi::Error Run(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis,
                        std::string_view /*tier: of CUDA*/) {
    ReduceArgs args;
    if (ffi::Error e = DecodeReduction(kOp, kStatistics, operands, results, axis, &args); e.failure()) return e;
    ReductionCpu(args, XlaExecutor(pool));
    return ffi::Error::Success();
  }

  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    static auto* handler = ffi::Ffi::Bind()
                               .Ctx<ffi::ThreadPool>()
                               .RemainingArgs()
                               .RemainingRets()
                               .Attr<int64_t>("axis")
                               .Attr<std::string_view>("tier")
                               .To(Run)
                               .release();
    return handler->Call(frame);
  }
};

}  // namespace

Targets ReductionCpuTargets() { return ReductionTargets<Handler>(); }

}  // namespace jaxkern
