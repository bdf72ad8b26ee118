// The 16-bit floating-point types of CUDA, and conversions. NVRTC takes 11 ms to read CUDA's headers of them, which declare
// several hundred functions: a third of what it takes for all headers of a kernel. For a kernel that names no such type
// (see runtime/nvrtc.cc), it reads these few declarations instead, which other kernels of the same headers need.
#pragma once

#include "std.h"

#if !defined(JAXKERN_NO_16_BITS)

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#else

struct alignas(2) __half {
  uint16_t bits;
};
struct alignas(2) __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

__device__ __forceinline__ __half __ushort_as_half(uint16_t bits) { return {bits}; }
__device__ __forceinline__ float __half2float(__half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t{x.bits} << 16); }
__device__ __forceinline__ __half __float2half_rn(float x) {
  __half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
__device__ __forceinline__ __nv_bfloat16 __float2bfloat16_rn(float x) {
  __nv_bfloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

#endif
