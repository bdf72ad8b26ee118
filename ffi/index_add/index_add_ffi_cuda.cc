// The XLA FFI handlers of the index_add family on CUDA.
#include "common/handler_cuda.h"
#include "index_add/index_add_cuda.h"
#include "index_add/index_add_ffi.h"

namespace jaxkern {
namespace {

template <IndexOp kOp>
ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis,
               int64_t batch_dims, bool wrap, bool clip, bool sorted, bool unique, bool deterministic, bool fill_nan,
               std::string_view plan) {
  IndexArgs args;
  const IndexAttributes attributes = {axis, batch_dims, wrap, clip, sorted, unique, deterministic, fill_nan, plan};
  if (ffi::Error e = DecodeIndex(kOp, operands, results, attributes, &args); e.failure()) return e;
  if (ffi::Error e = DecodeScratch(results, 1, &args); e.failure()) return e;
  const Device& device = CurrentDevice();
  if (ResolveIndexPlan(args, device) == IndexPlan::kAuto) {
    return InvalidArgument(IndexName(kOp), "the plan '", plan, "' cannot run this problem with ", args.scratch_bytes,
                           " bytes of scratch");
  }
  if (kOp == IndexOp::kAdd && args.x != args.out) {
    const size_t bytes = args.batch * args.outer * args.rows * args.inner * SizeOf(args.type);
    const cudaError_t copied = cudaMemcpyAsync(args.out, args.x, bytes, cudaMemcpyDeviceToDevice, stream);
    if (copied != cudaSuccess) return LaunchError(IndexName(kOp), copied);
  }
  return LaunchError(IndexName(kOp), IndexCuda(args, device, stream));
}

template <IndexOp kOp> struct Handler {
  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    static auto* handler = BindIndexAttributes(BindCuda()).To(Run<kOp>, {ffi::Traits::kCmdBufferCompatible}).release();
    return handler->Call(frame);
  }
};

}  // namespace

Targets IndexCudaTargets() { return IndexTargets<Handler>(); }

}  // namespace jaxkern
