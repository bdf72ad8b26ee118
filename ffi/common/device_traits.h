// What the choice of a kernel depends on, of a device. Host only.
#pragma once

namespace jaxkern {

struct DeviceTraits {
  int sm_count = 132;
  int compute_capability = 90;      // 10 * major + minor
  int shared_memory = 227 * 1024;   // bytes a block can opt in to
};

}  // namespace jaxkern
