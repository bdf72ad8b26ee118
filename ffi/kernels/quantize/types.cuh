// The types of 8 bits that numbers are quantized to, the factor of a row or block, and reading and writing of a few elements.
#pragma once

#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace jaxkern {

// An 8-bit float with kMantissa mantissa bits, rounded to nearest even and saturated at kMost.
template <int kMantissa> struct Float8 {
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

  // Converts two numbers; the first is in the lower byte.
  static __device__ __forceinline__ uint32_t Pair(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t pair;
    if constexpr (kMantissa == 3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
    else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
    return pair;
#else
    return From(a) | From(b) << 8;
#endif
  }
};

struct Int8 {
  static constexpr float kMost = 127.0f;

  static __device__ __forceinline__ uint32_t From(float x) {
    if (!(x == x)) return 0;
    // The addition of 1.5 * 2^23 rounds to an integer, in the low bits of the sum.
    const float clamped = x < -kMost ? -kMost : x > kMost ? kMost : x;
    return __float_as_uint(clamped + 12582912.0f) & 0xffu;
  }
  static __device__ __forceinline__ uint32_t Pair(float a, float b) { return From(a) | From(b) << 8; }
};

// The unsigned type, or vector of words, of kBytes bytes.
template <int kBytes> struct WordsOf;
template <> struct WordsOf<1> {
  using type = uint8_t;
};
template <> struct WordsOf<2> {
  using type = uint16_t;
};
template <> struct WordsOf<4> {
  using type = uint32_t;
};
template <> struct WordsOf<8> {
  using type = uint2;
};
template <> struct WordsOf<16> {
  using type = uint4;
};

template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadElements(const T* p) {
  using Words = typename WordsOf<N * sizeof(T)>::type;
  Pack<T, N> pack = {};
  *reinterpret_cast<Words*>(pack.word) = *reinterpret_cast<const Words*>(p);
  return pack;
}

// Magnitudes are compared by their bits; NaN is the largest.
__device__ __forceinline__ uint32_t Magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

struct LargerOf {
  __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const { return max(a, b); }
};

// What numbers are multiplied by before they are rounded, where `largest` are the bits of the largest magnitude.
template <class Q> __device__ __forceinline__ float QuantizeFactor(uint32_t largest) {
  const float most = __uint_as_float(largest);
  const float factor = most == 0 ? 1.0f : Q::kMost / most;
  return factor > 3.402823466e38f ? 3.402823466e38f : factor;  // for subnormal numbers
}
template <class Q> __device__ __forceinline__ float QuantizeScale(uint32_t largest) {
  const float most = __uint_as_float(largest);
  return most == 0 ? 1.0f : most / Q::kMost;
}

// The same for a scale that is given.
__device__ __forceinline__ float GivenFactor(const float* scale) {
  const float factor = 1.0f / *scale;
  return factor > 3.402823466e38f ? 3.402823466e38f : factor;
}

// Writes N elements, 1 or an even number of them, to a q aligned to N bytes.
template <class Q, int N>
__device__ __forceinline__ void StoreQuantized(uint8_t* q, const float (&v)[N], float factor) {
  if constexpr (N == 1) {
    *q = static_cast<uint8_t>(Q::From(v[0] * factor));
  } else {
    using Words = typename WordsOf<N>::type;
    alignas(8) uint32_t out[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < N; i += 2) out[i / 4] |= Q::Pair(v[i] * factor, v[i + 1] * factor) << 8 * (i % 4);
    *reinterpret_cast<Words*>(q) = *reinterpret_cast<Words*>(out);
  }
}

}  // namespace jaxkern
