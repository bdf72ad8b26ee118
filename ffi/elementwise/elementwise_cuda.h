// The table of elementwise CUDA kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/launch.h"
#include "elementwise.h"

namespace jaxkern {

struct ElementwiseCudaKernel {
  cudaError_t (*launch)(const ElementwiseArgs&, const Device&, cudaStream_t);
  int parameters;
  bool broadcasts;  // takes views that are not flat
};

// What each generated file contributes.
struct ElementwiseCudaPart {
  const ElementwiseEntry<ElementwiseCudaKernel>* entries;
  int count;
};

const ElementwiseTable<ElementwiseCudaKernel>& ElementwiseCudaKernels();

}  // namespace jaxkern
