// The handlers that bindings.cc gives to Python.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxkern {

extern "C" {
XLA_FFI_Error* JaxkernInitialize(XLA_FFI_CallFrame*);
XLA_FFI_Error* JaxkernExecute(XLA_FFI_CallFrame*);
XLA_FFI_Error* JaxkernExecuteOnCpu(XLA_FFI_CallFrame*);  // for tests with a stand-in for the driver
}

}  // namespace jaxkern
