// The XLA FFI handler of the elementwise operations on the CPU.
#include "common/huge_pages.h"
#include "elementwise/elementwise_cpu.h"
#include "elementwise/elementwise_ffi.h"

namespace jaxkern {
namespace {

ffi::Error Run(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, std::string_view operation,
               int64_t split) {
  ElementwiseArgs args;
  const ElementwiseCpuKernel* kernel = nullptr;
  ElementwiseDecoder decoder(operation, split);
  if (ffi::Error e = decoder.Decode(operands, results, ElementwiseCpuKernels(), &kernel, &args); e.failure()) return e;
  for (int k = 0; k < args.outputs; ++k) PreferHugePages(args.out[k].data, args.Count() * SizeOf(args.out[k].type));
  ElementwiseCpu(*kernel, args, XlaExecutor(pool));
  return ffi::Error::Success();
}

XLA_FFI_Error* Handler(XLA_FFI_CallFrame* frame) {
  static auto* handler = BindCpu().Attr<std::string_view>("operation").Attr<int64_t>("split").To(Run).release();
  return handler->Call(frame);
}

}  // namespace

Targets ElementwiseCpuTargets() { return {{"jaxkern_elementwise", Handler}}; }

}  // namespace jaxkern
