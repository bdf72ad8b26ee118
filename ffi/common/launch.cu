// The cache of device attributes behind launch.h.
#include "launch.h"

#include <mutex>

namespace jaxkern {

const Device& CurrentDevice() {
  static Device devices[kMaxDevices];
  static std::once_flag once[kMaxDevices];
  static const Device bad = [] {
    Device d;
    d.error = cudaErrorInvalidDevice;
    return d;
  }();
  int ordinal = -1;
  if (cudaGetDevice(&ordinal) != cudaSuccess || ordinal >= kMaxDevices) return bad;  // a thread-local read
  std::call_once(once[ordinal], [&] {
    Device& d = devices[ordinal];
    d.ordinal = ordinal;
    int major = 0, minor = 0;
    auto read = [&](int* value, cudaDeviceAttr attribute) {
      if (d.error == cudaSuccess) d.error = cudaDeviceGetAttribute(value, attribute, ordinal);
    };
    read(&d.sm_count, cudaDevAttrMultiProcessorCount);
    read(&major, cudaDevAttrComputeCapabilityMajor);
    read(&minor, cudaDevAttrComputeCapabilityMinor);
    read(&d.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    read(&d.l2_bytes, cudaDevAttrL2CacheSize);
    d.compute_capability = 10 * major + minor;
  });
  return devices[ordinal];
}

}  // namespace jaxkern
