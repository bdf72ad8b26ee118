// 8-bit floats as results of kernels, and packs of 8-bit elements.
#pragma once

#include "pack.cuh"

namespace jaxkern {

// An 8-bit float with kMantissa mantissa bits, e4m3 without infinities or e5m2. From, Four and Pair round to nearest even and saturate
// at kMost, and Converted does with kSaturates.
template <int kMantissa, bool kSaturates = false> struct Float8 {
  static constexpr int kBias = kMantissa == 3 ? 7 : 15;
  static constexpr float kMost = kMantissa == 3 ? 448.0f : 57344.0f;

  static __device__ __forceinline__ uint32_t From(float x) {
    const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80u;
    uint32_t size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return sign | (kMantissa == 3 ? 0x7fu : 0x7eu);
    size = min(size, __float_as_uint(kMost));
    constexpr int kShift = 23 - kMantissa;
    if (size < static_cast<uint32_t>(128 - kBias) << 23) {
      // Subnormal: the addition rounds at the last place of the result.
      constexpr uint32_t kUnit = static_cast<uint32_t>(127 + 24 - kBias - kMantissa) << 23;
      return sign | (__float_as_uint(__uint_as_float(size) + __uint_as_float(kUnit)) - kUnit);
    }
    size += (1u << (kShift - 1)) - 1 + (size >> kShift & 1);
    return sign | ((size >> kShift) - (static_cast<uint32_t>(127 - kBias) << kMantissa));
  }

  // Converts four numbers; the first is in the lowest byte.
  template <bool> static __device__ __forceinline__ uint32_t Four(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return Pair(a, b) | static_cast<uint32_t>(Pair(c, d)) << 16;
#else
    return From(a) | From(b) << 8 | From(c) << 16 | From(d) << 24;
#endif
  }
  static __device__ __forceinline__ uint16_t Pair(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t pair;
    if constexpr (kMantissa == 3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
    else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
    return pair;
#else
    return static_cast<uint16_t>(From(a) | From(b) << 8);
#endif
  }

  // Two numbers as JAX converts them: what is too large becomes NaN in e4m3, and infinite in e5m2.
  static __device__ __forceinline__ uint16_t Converted(float a, float b) {
    if constexpr (kSaturates) {
      return Pair(a, b);
    } else if constexpr (kMantissa == 3) {
      constexpr float kHalfway = 464.0f;  // between kMost and the next number, to which ties do not round
      return Pair(fabsf(a) > kHalfway ? NAN : a, fabsf(b) > kHalfway ? NAN : b);
    } else {
      constexpr float kHalfway = 61440.0f;  // ties round to infinity, which follows kMost
      return static_cast<uint16_t>(Pair(a, b) + (fabsf(a) >= kHalfway ? 1 : 0) + (fabsf(b) >= kHalfway ? 0x100 : 0));
    }
  }

  uint8_t bits;
  Float8() = default;
  __device__ __forceinline__ Float8(float x) : bits(static_cast<uint8_t>(Converted(x, 0))) {}
};

// Computed in float.
template <int kMantissa, bool kSaturates> struct OwnOf<Float8<kMantissa, kSaturates>> {
  using type = float;
};

template <class T> constexpr bool kIsFloat8 = false;
template <int kMantissa, bool kSaturates> constexpr bool kIsFloat8<Float8<kMantissa, kSaturates>> = true;

// The lowest bytes of four words.
__device__ __forceinline__ uint32_t LowBytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#ifdef __CUDA_ARCH__
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
#else
  return (a & 0xff) | (b & 0xff) << 8 | (c & 0xff) << 16 | d << 24;
#endif
}

// Stores element i of a pack, after those before it; of 8 bits, several at a time. An instruction converts two 8-bit floats.
template <class T, int N> __device__ __forceinline__ void StoreElement(Pack<T, N>& pack, int i, const Own<T> (&x)[N]) {
  if constexpr (std::is_same_v<T, int8_t> && N % 4 == 0) {
    using Byte = uint8_t;
    if (i % 4 == 3) pack.word[i / 4] = LowBytes(Byte(x[i - 3]), Byte(x[i - 2]), Byte(x[i - 1]), Byte(x[i]));
  } else if constexpr (!kIsFloat8<T>) {
    SetElement(pack, i, Stored<T>(x[i]));
  } else if constexpr (N == 1) {
    pack.word[0] = T::Converted(x[0], 0) & 0xffu;
  } else if (i % 2) {
    pack.word[i / 4] |= static_cast<uint32_t>(T::Converted(x[i - 1], x[i])) << i / 2 % 2 * 16;
  } else if (i == N - 1) {
    pack.word[i / 4] |= (T::Converted(x[i], 0) & 0xffu) << i % 4 * 8;
  }
}

}  // namespace jaxkern
