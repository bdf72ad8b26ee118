// What numbers are quantized to in 8 bits, beside Float8; the factor of a row or block, and reading and writing of a few elements.
#pragma once

#include "common/extremes.h"
#include "common/float8.cuh"
#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace jaxkern {

struct Int8 {
  static constexpr float kMost = 127.0f;

  // The integer nearest to x is in the low bits of the result: adding 1.5 * 2^23 rounds to it.
  static __device__ __forceinline__ uint32_t Rounded(float x) { return __float_as_uint(x + 12582912.0f); }
  static __device__ __forceinline__ uint32_t Saturated(float x) {
    const uint32_t rounded = Rounded(fminf(fmaxf(x, -kMost), kMost));
    return x == x ? rounded : 0;
  }

  static __device__ __forceinline__ uint32_t From(float x) { return Saturated(x) & 0xffu; }
  static __device__ __forceinline__ uint16_t Pair(float a, float b) {
    return static_cast<uint16_t>(From(a) | From(b) << 8);
  }
  // kBounded: the numbers are at most kMost.
  template <bool kBounded> static __device__ __forceinline__ uint32_t Four(float a, float b, float c, float d) {
    if constexpr (kBounded) return LowBytes(Rounded(a), Rounded(b), Rounded(c), Rounded(d));
    else return LowBytes(Saturated(a), Saturated(b), Saturated(c), Saturated(d));
  }
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

// The larger of two magnitudes; NaN is the largest.
__device__ __forceinline__ float LargerMagnitude(float a, float b) { return LargerOrNan(fabsf(a), fabsf(b)); }

// The largest magnitude of N numbers.
template <int N> __device__ __forceinline__ uint32_t Largest(const float (&v)[N]) {
  float largest = v[0];
#pragma unroll
  for (int i = 1; i < N; ++i) largest = LargerMagnitude(largest, v[i]);
  return Magnitude(largest);
}

// The larger magnitude of each of two 16-bit numbers, with any sign; NaN is the largest. T: of the numbers.
template <class T> __device__ __forceinline__ uint32_t LargerPair(uint32_t a, uint32_t b) {
  static_assert(sizeof(T) == 2);
  constexpr uint32_t kSigns = 0x80008000u;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t larger;
  if constexpr (std::is_same_v<T, __half>) asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  else asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  return LargerOrNanOfPairs<T>(a & ~kSigns, b & ~kSigns);
#endif
}

// The larger magnitude of each element of two packs, with any sign.
template <class T, int N> __device__ __forceinline__ Pack<T, N> Larger(const Pack<T, N>& a, const Pack<T, N>& b) {
  Pack<T, N> larger;
#pragma unroll
  for (int w = 0; w < Pack<T, N>::kWords; ++w) {
    if constexpr (sizeof(T) == 2) larger.word[w] = LargerPair<T>(a.word[w], b.word[w]);
    else larger.word[w] = __float_as_uint(LargerMagnitude(__uint_as_float(a.word[w]), __uint_as_float(b.word[w])));
  }
  return larger;
}

// The largest magnitude of the numbers of several packs, in float. In 16 bits, N is even or the rest of the word is 0.
template <class T, int N, int kPacks> __device__ __forceinline__ uint32_t Largest(const Pack<T, N> (&packs)[kPacks]) {
  Pack<T, N> largest = packs[0];
#pragma unroll
  for (int u = 1; u < kPacks; ++u) largest = Larger(largest, packs[u]);
  if constexpr (sizeof(T) == 2) {
    Pack<T, 2> last = {{largest.word[0]}};
#pragma unroll
    for (int w = 1; w < Pack<T, N>::kWords; ++w) last.word[0] = LargerPair<T>(last.word[0], largest.word[w]);
    float v[2];
    Unpack(last, v);
    return Largest(v);
  } else {
    float v[N];
    Unpack(largest, v);
    return Largest(v);
  }
}

struct LargerOf {
  __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const { return max(a, b); }
};

// The largest over aligned groups of kLanes lanes; all 32 lanes take part. Of a whole warp: one instruction.
template <int kLanes> __device__ __forceinline__ uint32_t LargestOfLanes(uint32_t v) {
#ifdef __CUDA_ARCH__
  if constexpr (kLanes == kWarp) return __reduce_max_sync(0xffffffffu, v);
#endif
  return ReduceLanes<kLanes>(v, LargerOf());
}

// What numbers are multiplied by before they are rounded, where `largest` are the bits of the largest magnitude.
template <class Q> __device__ __forceinline__ float QuantizeFactor(uint32_t largest) {
  const float most = __uint_as_float(largest);
  const float factor = most == 0 ? 1.0f : Q::kMost / most;
  return factor > 3.402823466e38f ? 3.402823466e38f : factor;  // for subnormal numbers
}
template <class Q> __device__ __forceinline__ float QuantizeScale(uint32_t largest) {
  const float most = __uint_as_float(largest);
  constexpr float kInverse = 1.0f / Q::kMost;
  return most == 0 ? 1.0f : most * kInverse;
}

// The same for a scale that is given.
__device__ __forceinline__ float GivenFactor(const float* scale) {
  const float factor = 1.0f / *scale;
  return factor > 3.402823466e38f ? 3.402823466e38f : factor;
}

// Writes N elements, 1 or an even number of them, to a q aligned to N bytes. kBounded: `factor` is the QuantizeFactor of
// numbers that include these. Then int8 need not be clamped, and a factor that is 0 or NaN marks numbers
// with infinity or NaN, which all become 0.
template <class Q, bool kBounded, int N>
__device__ __forceinline__ void StoreQuantized(uint8_t* q, const float (&v)[N], float factor) {
  if constexpr (N == 1) {
    *q = static_cast<uint8_t>(Q::From(v[0] * factor));
  } else if constexpr (N == 2) {
    *reinterpret_cast<uint16_t*>(q) = Q::Pair(v[0] * factor, v[1] * factor);
  } else {
    using Words = typename WordsOf<N>::type;
    constexpr bool kZeros = kBounded && std::is_same_v<Q, Int8>;
    alignas(N) uint32_t out[N / 4];
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = __fmul_rn(v[i + j], factor);  // rounded, also before the addition of int8
      const uint32_t four = Q::template Four<kBounded>(x[0], x[1], x[2], x[3]);
      out[i / 4] = !kZeros || factor > 0 ? four : 0;
    }
    *reinterpret_cast<Words*>(q) = *reinterpret_cast<Words*>(out);
  }
}

}  // namespace jaxkern
