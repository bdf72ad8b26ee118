#include "runtime/driver.h"

#include <dlfcn.h>

namespace jaxkern {
namespace {

Driver Load(const char* path) {
  Driver d;
  void* library = dlopen(path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    d.error = dlerror();
    return d;
  }
  const auto resolve = [&](auto& function, const char* name, const char* versioned = nullptr) {
    void* symbol = versioned ? dlsym(library, versioned) : nullptr;
    if (!symbol) symbol = dlsym(library, name);
    if (!symbol && d.error.empty())
      d.error = std::string("the driver has no ") + name + ": one of CUDA 12 or later is needed";
    function = reinterpret_cast<std::decay_t<decltype(function)>>(symbol);
  };
  resolve(d.cuInit, "cuInit");
  resolve(d.cuGetErrorName, "cuGetErrorName");
  resolve(d.cuGetErrorString, "cuGetErrorString");
  resolve(d.cuDeviceGet, "cuDeviceGet");
  resolve(d.cuDeviceGetAttribute, "cuDeviceGetAttribute");
  resolve(d.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  resolve(d.cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2");
  resolve(d.cuCtxPushCurrent, "cuCtxPushCurrent", "cuCtxPushCurrent_v2");
  resolve(d.cuCtxPopCurrent, "cuCtxPopCurrent", "cuCtxPopCurrent_v2");
  resolve(d.cuLibraryLoadData, "cuLibraryLoadData");
  resolve(d.cuLibraryGetKernel, "cuLibraryGetKernel");
  resolve(d.cuKernelSetAttribute, "cuKernelSetAttribute");
  resolve(d.cuOccupancyMaxActiveBlocksPerMultiprocessor, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  resolve(d.cuOccupancyMaxActiveClusters, "cuOccupancyMaxActiveClusters");
  resolve(d.cuLaunchKernelEx, "cuLaunchKernelEx");
  resolve(d.cuMemsetD8Async, "cuMemsetD8Async");
  resolve(d.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  if (d.error.empty()) {
    if (const CUresult r = d.cuInit(0); r != kCudaSuccess) d.error = d.Describe(r);
  }
  return d;
}

}  // namespace

const Driver& Driver::Get(const char* path) {
  static const Driver* const driver = new Driver(Load(path));  // outlives every thread that may launch
  return *driver;
}

std::string Driver::Describe(CUresult result) const {
  const char *name = nullptr, *text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  return std::string(name ? name : "unknown CUDA error") + ": " + (text ? text : "");
}

}  // namespace jaxkern
