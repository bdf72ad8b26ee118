// Kernels for the tests of the runtime. fake_cuda.cc does on the host what they do on a GPU.
#pragma once

#include "common/std.h"

namespace jaxkern {

struct Inner {
  uint8_t flag;
  double shift;
};

struct ProbeArgs {
  const float* x;
  int32_t count;
  Inner inner;
  uint8_t last;
  float* y;
};
static_assert(sizeof(ProbeArgs) == 48);

// y = scale * x + shift for the first `count` elements. kVectors: the variant for aligned buffers.
template <class T, bool kVectors> __global__ void Probe(ProbeArgs a, T scale) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < a.count && a.inner.flag) a.y[i] = scale * a.x[i] + static_cast<float>(a.inner.shift);
}

}  // namespace jaxkern
