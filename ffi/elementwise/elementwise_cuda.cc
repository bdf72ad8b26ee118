// The table of elementwise CUDA kernels, put together from the generated files.
#include "elementwise/elementwise_cuda.h"

namespace jaxkern {

#define JAXKERN_PART(i) ElementwiseCudaPart ElementwiseCudaPart##i();
#include "elementwise_cuda_parts.inc"
#undef JAXKERN_PART

const ElementwiseTable<ElementwiseCudaKernel>& ElementwiseCudaKernels() {
  static const auto kernels = [] {
    ElementwiseTable<ElementwiseCudaKernel> table;
    const auto add = [&](const ElementwiseCudaPart& part) {
      for (int i = 0; i < part.count; ++i) table.emplace(part.entries[i].signature, part.entries[i].kernel);
    };
#define JAXKERN_PART(i) add(ElementwiseCudaPart##i());
#include "elementwise_cuda_parts.inc"
#undef JAXKERN_PART
    return table;
  }();
  return kernels;
}

}  // namespace jaxkern
