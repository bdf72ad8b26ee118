// The element types that the kernels are compiled for, and the mapping from a run-time DType to a
// template argument. Host only; the C++ type behind each DType is chosen by the including side
// (CUDA's __half and __nv_bfloat16 on the GPU, two small structs on the CPU).
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxkern {

enum class DType : int32_t { kF16, kBF16, kF32, kF64 };

constexpr int64_t SizeOf(DType t) {
  switch (t) {
    case DType::kF16:
    case DType::kBF16: return 2;
    case DType::kF32: return 4;
    case DType::kF64: return 8;
  }
  return 0;
}

}  // namespace jaxkern
