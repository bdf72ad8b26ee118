// What every CUDA handler of this library shares beyond handler.h.
#pragma once

#include <cuda_runtime_api.h>

#include "common/handler.h"

namespace jaxkern {

// A failed launch as an error that names the operation.
inline ffi::Error LaunchError(const char* operation, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(operation) + ": CUDA kernel launch failed: " + cudaGetErrorName(error) +
                              ": " + cudaGetErrorString(error));
}

}  // namespace jaxkern
