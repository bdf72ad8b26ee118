// The XLA FFI handlers of the index_add family on the CPU.
#include <cstring>

#include "index_add/index_add_cpu.h"
#include "index_add/index_add_ffi.h"

namespace jaxkern {
namespace {

template <IndexOp op, class... Attributes>
ffi::Error Run(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results,
               Attributes... attributes) {
  IndexArgs args;
  if (ffi::Error e = DecodeIndex(op, operands, results, {attributes...}, &args); e.failure()) return e;
  if (args.rows > kIndexCpuLimit || args.count > kIndexCpuLimit) {
    return InvalidArgument(IndexName(op), args.rows, " rows and ", args.count, " indices are more than 32 bits count");
  }
  if (op == IndexOp::kAdd && args.out != args.x) {
    std::memcpy(args.out, args.x, (*results.get<ffi::AnyBuffer>(0))->size_bytes());
  }
  IndexCpu(args, XlaExecutor(pool));
  return ffi::Error::Success();
}

template <IndexOp op> struct Handler {
  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    static auto* handler =
        BindIndexAttributes(BindCpu())
            .To(Run<op, int64_t, int64_t, bool, bool, bool, bool, bool, bool, std::string_view>)
            .release();
    return handler->Call(frame);
  }
};

}  // namespace

Targets IndexCpuTargets() { return IndexTargets<Handler>(); }

}  // namespace jaxkern
