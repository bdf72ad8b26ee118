// The XLA FFI handler of the elementwise operations on CUDA.
#include "common/handler_cuda.h"
#include "elementwise/elementwise_cuda.h"
#include "elementwise/elementwise_ffi.h"

namespace jaxkern {
namespace {

ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, std::string_view operation,
               int64_t split) {
  ElementwiseArgs args;
  const ElementwiseCudaKernel* kernel = nullptr;
  ElementwiseDecoder decoder(operation, split);
  if (ffi::Error e = decoder.Decode(operands, results, ElementwiseCudaKernels(), &kernel, &args); e.failure()) return e;
  if (args.Count() == 0) return ffi::Error::Success();
  const std::string name = "jaxkern." + std::string(operation);
  const Device& device = CurrentDevice();
  if (device.error != cudaSuccess) return LaunchError(name.c_str(), device.error);
  if (!args.IsFlat() && !kernel->broadcasts) return InvalidArgument(name.c_str(), "no kernel for operands that broadcast");
  return LaunchError(name.c_str(), kernel->launch(args, device, stream));
}

XLA_FFI_Error* Handler(XLA_FFI_CallFrame* frame) {
  static auto* handler = BindCuda()
                             .Attr<std::string_view>("operation")
                             .Attr<int64_t>("split")
                             .To(Run, {ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}

}  // namespace

Targets ElementwiseCudaTargets() { return {{"jaxkern_elementwise", Handler}}; }

}  // namespace jaxkern
