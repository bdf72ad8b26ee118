// The XLA FFI handlers of segment_softmax on the CPU.
#include "index_add/index_add_cpu.h"
#include "segment_softmax/segment_softmax_cpu.h"
#include "segment_softmax/segment_softmax_ffi.h"

namespace jaxkern {
namespace {

template <IndexOp op, class... Attributes>
ffi::Error Run(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t num_segments,
               Attributes... attributes) {
  IndexArgs args;
  if (ffi::Error e = DecodeSegmentSoftmax(op, operands, results, num_segments, {attributes...}, &args); e.failure()) {
    return e;
  }
  if (args.rows > kIndexCpuLimit || args.count > kIndexCpuLimit) {
    return InvalidArgument(IndexName(op), args.rows, " segments and ", args.count, " ids are more than 32 bits count");
  }
  SegmentSoftmaxCpu(args, XlaExecutor(pool));
  return ffi::Error::Success();
}

template <IndexOp op> struct Handler {
  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    static auto* handler =
        BindSegmentAttributes(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets())
            .To(Run<op, int64_t, int64_t, bool, bool, bool, bool, bool, bool, std::string_view>)
            .release();
    return handler->Call(frame);
  }
};

}  // namespace

Targets SegmentSoftmaxCpuTargets() { return SegmentSoftmaxTargets<Handler>(); }

}  // namespace jaxkern
