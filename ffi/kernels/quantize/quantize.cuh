// Quantisation of rows to 8 bits, with one scale per row:
//
//     scale = max|x| / most,  q = round(x * (most / max|x|))    x, q [rows, width], scale [rows]
//
// Quantize reads x and writes q and scale. Memory traffic: each element is read once and written once.
//
// q is int8 (round half to even) or an 8-bit float, e4m3 without infinities or e5m2; `most` is its largest number. The
// scale of a row of zeros is 1. The scale of a row with NaN or infinity is NaN or infinite.
//
// A group of kGroup threads holds a row in registers, kVectors vectors of kWidth elements per thread. Groups of up to
// 32 threads are lanes of a warp, and a block has several of them; a larger group is a block. x is aligned to a vector
// of its elements, q to a vector of as many bytes. width is a multiple of kWidth and at most kGroup * kVectors *
// kWidth.
#pragma once

#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace jaxkern {

constexpr int kQuantizeThreads = 256;  // threads of a block of several groups

struct QuantizeRows {
  const void* x;
  void* q;
  float* scale;
  int64_t rows;
  int32_t width;
};
static_assert(sizeof(QuantizeRows) == 40);

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

// T: element type of x. Q: Int8 or Float8. kGroup, kVectors, kWidth: see above.
template <class T, class Q, int kGroup, int kVectors, int kWidth>
__global__ void __launch_bounds__(kGroup > 32 ? kGroup : kQuantizeThreads)
    Quantize(const __grid_constant__ QuantizeRows p) {
  constexpr int kRows = kGroup > 32 ? 1 : kQuantizeThreads / kGroup;
  const int thread = threadIdx.x % kGroup;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kGroup;
  const bool live = row < p.rows;  // lanes without a row take part in the reduction
  const T* x = static_cast<const T*>(p.x) + (live ? row * p.width : 0);

  Pack<T, kWidth> loaded[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int at = (u * kGroup + thread) * kWidth;
    loaded[u] = Pack<T, kWidth>{};
    if (live && at < p.width) loaded[u] = LoadElements<T, kWidth>(x + at);
  }

  // Magnitudes are compared by their bits; NaN is the largest.
  uint32_t largest = 0;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    float v[kWidth];
    Unpack(loaded[u], v);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
  }
  const auto greater = [](uint32_t a, uint32_t b) { return max(a, b); };
  largest = ReduceLanes<(kGroup < 32 ? kGroup : 32)>(largest, greater);
  if constexpr (kGroup > 32) {
    __shared__ uint32_t room[32];
    largest = ReduceWarps<32>(
        largest, room, kGroup / 32, 0u, [] { __syncthreads(); },
        [&](uint32_t mine) { return ReduceLanes<32>(mine, greater); });
  }

  const float most = __uint_as_float(largest);
  float factor = most == 0 ? 1.0f : Q::kMost / most;
  if (factor > 3.402823466e38f) factor = 3.402823466e38f;  // for a row of subnormal numbers
  if (!live) return;
  if (thread == 0) p.scale[row] = most == 0 ? 1.0f : most / Q::kMost;

  uint8_t* q = static_cast<uint8_t*>(p.q) + row * p.width;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int at = (u * kGroup + thread) * kWidth;
    if (at >= p.width) continue;
    float v[kWidth];
    Unpack(loaded[u], v);
    if constexpr (kWidth == 1) {
      q[at] = static_cast<uint8_t>(Q::From(v[0] * factor));
    } else {
      using Words = typename WordsOf<kWidth>::type;
      alignas(8) uint32_t out[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < kWidth; i += 2) out[i / 4] |= Q::Pair(v[i] * factor, v[i + 1] * factor) << 8 * (i % 4);
      *reinterpret_cast<Words*>(q + at) = *reinterpret_cast<Words*>(out);
    }
  }
}

}  // namespace jaxkern
