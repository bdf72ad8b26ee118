// The 16-bit types of CUDA as far as the kernels use them, for a compiler that knows no device.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct uint2 {
  uint32_t x, y;
};
struct uint3 {
  uint32_t x, y, z;
};
struct uint4 {
  uint32_t x, y, z, w;
};

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};

inline uint32_t FloatBits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(uint32_t x) {
  float f;
  memcpy(&f, &x, 4);
  return f;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float __half2float(__half h) {
  const int exponent = h.bits >> 10 & 31, mantissa = h.bits & 1023;
  const float size = exponent == 31  ? (mantissa ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp(float(mantissa), -24)
                                     : std::ldexp(float(mantissa + 1024), exponent - 25);
  return h.bits >> 15 ? -size : size;
}
inline __half __float2half_rn(float x) {
  const uint16_t sign = FloatBits(x) >> 16 & 0x8000;
  const float size = std::fabs(x);
  if (x != x) return {0x7fff};
  if (size >= 65520.f) return {uint16_t(sign | 0x7c00)};
  const int exponent = size < 6.103515625e-5f ? -14 : std::ilogb(size);
  const int mantissa = int(std::nearbyint(std::ldexp(size, 10 - exponent)));  // a carry goes into the exponent
  return {uint16_t(sign | (((exponent + 14) << 10) + mantissa))};
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t bits = FloatBits(x);
  return {uint16_t(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }

struct alignas(4) __half2 {
  __half x, y;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
