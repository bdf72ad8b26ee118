// The extension module jaxkern._cuda: hands out the CUDA handlers, nothing more.
#include "common/bindings.h"
#include "index_add/index_add_ffi.h"

NB_MODULE(_cuda, m) {
  m.doc() = "XLA FFI handlers of jaxkern's CUDA kernels.";
  jaxkern::AddApiVersion(m);
  m.def("registrations", [] {
    using namespace jaxkern;
    return Registrations({IndexCudaTargets()});
  }, "{target name: capsule of its handler}");
}
