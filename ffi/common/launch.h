// Launching a kernel: device attributes, read once per device and cached, and the errors of a
// launch. Nothing here allocates, synchronises or asks the driver on the launch path.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <tuple>
#include <utility>

#include "device_traits.h"

namespace jaxkern {

constexpr int kMaxDevices = 64;

struct Device {
  int ordinal = 0;
  int sm_count = 0;
  int compute_capability = 0;  // 10 * major + minor
  int shared_memory = 0;       // bytes a block can opt in to
  int l2_bytes = 0;
  cudaError_t error = cudaSuccess;
};

// The attributes of the calling thread's current device; the first call for each device reads them.
const Device& CurrentDevice();

// The tier that runs a problem: the one asked for, or kAuto where that cannot; the best where none was asked for.
template <class Tier, class Problem>
Tier ResolveTier(Tier asked, const Problem& problem, const Device& device,
                 Tier (*choose)(const Problem&, const DeviceTraits&),
                 bool (*fits)(Tier, const Problem&, const DeviceTraits&)) {
  const DeviceTraits traits = {device.sm_count, device.compute_capability, device.shared_memory};
  if (asked == Tier::kAuto) return choose(problem, traits);
  return fits(asked, problem, traits) ? asked : Tier::kAuto;
}

// Runs `prepare` once per device for this call site's `done` flags: function attributes, occupancy.
template <class Prepare>
cudaError_t OncePerDevice(std::atomic<bool> (&done)[kMaxDevices], int ordinal, Prepare prepare) {
  if (done[ordinal].load(std::memory_order_acquire)) return cudaSuccess;
  // Two threads may both come here; preparing twice does no harm.
  const cudaError_t error = prepare();
  if (error == cudaSuccess) done[ordinal].store(true, std::memory_order_release);
  return error;
}

struct LaunchShape {
  int64_t blocks = 1;
  int blocks_y = 1;
  int threads = 128;
  int shared_bytes = 0;
  int cluster = 1;
};

// Launches kernel(args...), a __global__ function, on the stream.
template <class... Params, class... Args>
cudaError_t Launch(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream, Args&&... args) {
  if (shape.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks), shape.blocks_y);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  if (shape.cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = shape.cluster;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  std::tuple<Params...> values(std::forward<Args>(args)...);
  void* pointers[sizeof...(Params)];
  std::apply([&](auto&... v) { int i = 0; ((pointers[i++] = const_cast<void*>(static_cast<const void*>(&v))), ...); },
             values);
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers);
}

}  // namespace jaxkern
