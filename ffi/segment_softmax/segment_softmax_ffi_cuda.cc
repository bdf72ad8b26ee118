// The XLA FFI handlers of segment_softmax on CUDA.
#include "common/handler_cuda.h"
#include "index_add/index_add_cuda.h"
#include "segment_softmax/segment_softmax_cuda.h"
#include "segment_softmax/segment_softmax_ffi.h"

namespace jaxkern {
namespace {

template <IndexOp kOp>
ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t num_segments,
               int64_t axis, int64_t batch_dims, bool wrap, bool clip, bool sorted, bool unique, bool deterministic,
               bool fill_nan, std::string_view plan) {
  IndexArgs args;
  const IndexAttributes attributes = {axis, batch_dims, wrap, clip, sorted, unique, deterministic, fill_nan, plan};
  if (ffi::Error e = DecodeSegmentSoftmax(kOp, operands, results, num_segments, attributes, &args); e.failure()) {
    return e;
  }
  if (results.size() > 1) {
    auto scratch = results.get<ffi::AnyBuffer>(1);
    if (!scratch) return scratch.error();
    args.scratch = (*scratch)->untyped_data();
    args.scratch_bytes = (*scratch)->size_bytes();
  }
  const Device& device = CurrentDevice();
  if (ResolveIndexPlan(args, device) == IndexPlan::kAuto) {
    return InvalidArgument(IndexName(kOp), "the plan '", plan, "' cannot run this problem with ", args.scratch_bytes,
                           " bytes of scratch");
  }
  return LaunchError(IndexName(kOp), SegmentSoftmaxCuda(args, device, stream));
}

template <IndexOp kOp> struct Handler {
  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    static auto* handler = BindSegmentAttributes(ffi::Ffi::Bind()
                                                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                                     .RemainingArgs()
                                                     .RemainingRets())
                               .To(Run<kOp>, {ffi::Traits::kCmdBufferCompatible})
                               .release();
    return handler->Call(frame);
  }
};

}  // namespace

Targets SegmentSoftmaxCudaTargets() { return SegmentSoftmaxTargets<Handler>(); }

}  // namespace jaxkern
