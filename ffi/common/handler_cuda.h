// What every CUDA handler of this library shares beyond handler.h.
#pragma once

#include <cuda_runtime_api.h>

#include "common/handler.h"

namespace jaxkern {

// What a CUDA handler is given: the stream, the operands and the results. Attributes follow.
inline auto BindCuda() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets();
}

// The result behind the first `used` ones, if there is one, as the scratch of these arguments.
template <class Args>
ffi::Error DecodeScratch(const ffi::RemainingRets& results, size_t used, Args* args) {
  if (results.size() <= used) return ffi::Error::Success();
  auto scratch = results.get<ffi::AnyBuffer>(used);
  if (!scratch) return scratch.error();
  args->scratch = (*scratch)->untyped_data();
  args->scratch_bytes = (*scratch)->size_bytes();
  return ffi::Error::Success();
}

// A failed launch as an error that names the operation.
inline ffi::Error LaunchError(const char* operation, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(operation) + ": CUDA kernel launch failed: " + cudaGetErrorName(error) +
                              ": " + cudaGetErrorString(error));
}

}  // namespace jaxkern
