// The XLA FFI handler of every CUDA operation, registered under each operation's name. Attributes: `program`, a launch
// list as text, and `key`, a hash of it. Initialize compiles and loads what Execute launches on aligned buffers, as XLA's
// are; Execute finds the program by its key and launches. If a buffer is not aligned, the first Execute compiles and loads
// the kernels for such buffers: they are rarely needed, and every first call would wait for them.
#include "runtime/handler.h"

#include "runtime/runtime.h"

namespace jaxkern {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kMostBuffers = 64;

struct Buffers {
  void* data[kMostBuffers];
  int64_t bytes[kMostBuffers];
  int count = 0;
};

ffi::Error Decode(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results, Buffers* buffers) {
  if (operands.size() + results.size() > kMostBuffers) return ffi::Error::InvalidArgument("jaxkern: too many arrays");
  for (size_t i = 0; i < operands.size(); ++i) {
    auto buffer = operands.get<ffi::AnyBuffer>(i);
    if (!buffer) return buffer.error();
    buffers->data[buffers->count] = buffer->untyped_data();
    buffers->bytes[buffers->count++] = static_cast<int64_t>(buffer->size_bytes());
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = results.get<ffi::AnyBuffer>(i);
    if (!buffer) return buffer.error();
    buffers->data[buffers->count] = (*buffer)->untyped_data();
    buffers->bytes[buffers->count++] = static_cast<int64_t>((*buffer)->size_bytes());
  }
  return ffi::Error::Success();
}

ffi::Error ToError(const std::string& error) {
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal(error);
}

ffi::Error Initialize(int32_t device, std::string_view text, int64_t key, ffi::RemainingArgs, ffi::RemainingRets) {
  std::string error;
  LoadedProgram* const program = AddProgram(key, text, &error);
  if (program) program->Load(device, 0, &error);
  return ToError(error);
}

ffi::Error Execute(CUstream stream, int32_t device, std::string_view text, int64_t key, ffi::RemainingArgs operands,
                   ffi::RemainingRets results) {
  LoadedProgram* program = FindProgram(key);
  if (!program) {  // a runtime that has no Initialize stage
    std::string error;
    program = AddProgram(key, text, &error);
    if (!program) return ToError(error);
  }
  Buffers buffers;
  ffi::Error error = Decode(operands, results, &buffers);
  if (error.failure()) return error;
  return ToError(Launch(*program, device, stream, buffers.data, buffers.bytes, buffers.count));
}

ffi::Error ExecuteOnCpu(std::string_view text, int64_t key, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  ffi::Error error = Initialize(0, text, key, operands, results);
  return error.failure() ? error : Execute(nullptr, 0, text, key, operands, results);
}

// A macro, since the type grows with each attribute.
#define JAXKERN_WITH_PROGRAM(binding) \
  binding.Attr<std::string_view>("program").Attr<int64_t>("key").RemainingArgs().RemainingRets()

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxkernInitialize, Initialize,
    JAXKERN_WITH_PROGRAM(ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxkernExecute, Execute,
    JAXKERN_WITH_PROGRAM(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream>>().Ctx<ffi::DeviceOrdinal>()),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxkernExecuteOnCpu, ExecuteOnCpu, JAXKERN_WITH_PROGRAM(ffi::Ffi::Bind()));

}  // namespace jaxkern
