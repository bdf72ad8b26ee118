// Vectors of one register for the CPU kernels: load and store with conversion from the 16-bit
// types, fused multiply-add, exp. For *_isa.cc files only, which are compiled once an instruction
// set with JAXKERN_ISA as the name of the namespace.
//
// The same inline function compiled for AVX-512 in one object file and for SSE2 in another is one
// function to the linker, which keeps either. Everything here is therefore in the namespace of the
// instruction set, and an *_isa.cc file calls no inline function of any other header, the standard
// library's included, unless it is always_inline.
//
// The arithmetic is GCC's and Clang's vector extension; intrinsics only where that has no word.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define JAXKERN_INLINE inline __attribute__((always_inline))
// Large, and called from several places: compiled once.
#if defined(__clang__)
#define JAXKERN_OUTLINE __attribute__((noinline))
#else
#define JAXKERN_OUTLINE __attribute__((noinline, noclone))
#endif

namespace jaxkern {
namespace JAXKERN_ISA {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
#if defined(__FMA__) || defined(__aarch64__)
constexpr bool kHasFma = true;
#else
constexpr bool kHasFma = false;
#endif

template <class E, int N>
struct VecOf {
  typedef E type __attribute__((vector_size(N * sizeof(E))));
};
template <class E, int N>
using VecN = typename VecOf<E, N>::type;

template <class C>  // C: what is computed in, float or double
constexpr int kLanes = kRegisterBytes / int(sizeof(C));
template <class C>
using Vec = VecN<C, kLanes<C>>;

template <class C>
struct IntOf;
template <>
struct IntOf<float> {
  using type = int32_t;
};
template <>
struct IntOf<double> {
  using type = int64_t;
};
template <class C>
using IntVec = VecN<typename IntOf<C>::type, kLanes<C>>;  // also what a comparison yields: -1 or 0

template <class To, class From>
JAXKERN_INLINE To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class C>
JAXKERN_INLINE Vec<C> Splat(C value) {
  return value - Vec<C>{};
}

template <class V>
JAXKERN_INLINE V Max(V a, V b) {  // b where either is NaN
  return a > b ? a : b;
}

// a * b + c in one rounding, where the instruction set has it.
JAXKERN_INLINE Vec<float> Fma(Vec<float> a, Vec<float> b, Vec<float> c) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
JAXKERN_INLINE Vec<double> Fma(Vec<double> a, Vec<double> b, Vec<double> c) {
#if defined(__AVX512F__)
  return (Vec<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
  return (Vec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
  return (Vec<double>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  return a * b + c;
#endif
}

using HalfVec = VecN<float, kLanes<double>>;
JAXKERN_INLINE Vec<double> Widen(HalfVec v) {
#if defined(__AVX512F__)  // GCC 12 halves this one once more
  return (Vec<double>)_mm512_cvtps_pd((__m256)v);
#else
  return __builtin_convertvector(v, Vec<double>);
#endif
}

// The products of the lower halves of the lanes.
using U64 = VecN<uint64_t, kLanes<double>>;
JAXKERN_INLINE U64 MulLower(U64 a, U64 b) {
#if defined(__AVX512F__)
  return (U64)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (U64)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (U64)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

// --- Element types in memory ----------------------------------------------------------------------

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

template <class T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class T>
using Compute = typename ComputeOf<T>::type;

constexpr int kF = kLanes<float>;
using U16 = VecN<uint16_t, kF>;
using U32 = VecN<uint32_t, kF>;

JAXKERN_INLINE Vec<float> Load(const float* p) {
  Vec<float> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
JAXKERN_INLINE Vec<double> Load(const double* p) {
  Vec<double> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
JAXKERN_INLINE void Store(float* p, Vec<float> v) { std::memcpy(p, &v, sizeof v); }
JAXKERN_INLINE void Store(double* p, Vec<double> v) { std::memcpy(p, &v, sizeof v); }

JAXKERN_INLINE Vec<float> Load(const BFloat* p) {
  U16 h;
  std::memcpy(&h, p, sizeof h);
  return BitCast<Vec<float>>(__builtin_convertvector(h, U32) << 16);
}
JAXKERN_INLINE void Store(BFloat* p, Vec<float> v) {  // to nearest, ties to even
  const U32 u = BitCast<U32>(v);
  U32 r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  r = v == v ? r : (u >> 16) | 0x40;  // a NaN must not be rounded into an infinity
  const U16 h = __builtin_convertvector(r, U16);
  std::memcpy(p, &h, sizeof h);
}

JAXKERN_INLINE Vec<float> Load(const Half* p) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  return (Vec<float>)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#else
  U16 h;
  std::memcpy(&h, p, sizeof h);
  const U32 u = __builtin_convertvector(h, U32), magnitude = u & 0x7fff;
  // Subnormals through an integer conversion, which needs no subnormal float on the way.
  const Vec<float> tiny = __builtin_convertvector(BitCast<IntVec<float>>(magnitude), Vec<float>) * 0x1p-24f;
  U32 r = (magnitude << 13) + 0x38000000;
  r = magnitude >= 0x7c00 ? r | 0x7f800000 : r;
  r = magnitude < 0x400 ? BitCast<U32>(tiny) : r;
  return BitCast<Vec<float>>(r | (u & 0x8000) << 16);
#endif
}
JAXKERN_INLINE void Store(Half* p, Vec<float> v) {  // to nearest, ties to even
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#else
  const U32 u = BitCast<U32>(v), magnitude = u & 0x7fffffff;
  U32 r = (magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13;
  // The unit in the last place of 0.5 is that of a subnormal: adding it rounds.
  r = magnitude < 0x38800000 ? BitCast<U32>(BitCast<Vec<float>>(magnitude) + 0.5f) - 0x3f000000u : r;
  r = magnitude >= 0x47800000 ? (magnitude > 0x7f800000 ? U32{} + 0x7e00 : U32{} + 0x7c00) : r;
  const U16 h = __builtin_convertvector(r | (u >> 16 & 0x8000), U16);
  std::memcpy(p, &h, sizeof h);
#endif
}

// The lanes below n from a, the others from b.
template <class C>
JAXKERN_INLINE Vec<C> Below(int n, Vec<C> a, Vec<C> b) {
  using I = typename IntOf<C>::type;
  IntVec<C> lane;
  for (int l = 0; l < kLanes<C>; ++l) lane[l] = I(l);
  return lane < I(n) ? a : b;
}

// Lane l of the result is lane index[l] of v.
template <class C>
constexpr bool kPermuteIsFast = kRegisterBytes == 64 || (kRegisterBytes == 32 && sizeof(C) == 4);
template <class C>
JAXKERN_INLINE Vec<C> Permute(Vec<C> v, IntVec<C> index) {
#if defined(__AVX512F__)
  if constexpr (sizeof(C) == 4) return (Vec<C>)_mm512_permutexvar_ps((__m512i)index, (__m512)v);
  if constexpr (sizeof(C) == 8) return (Vec<C>)_mm512_permutexvar_pd((__m512i)index, (__m512d)v);
#elif defined(__AVX2__)
  if constexpr (sizeof(C) == 4) return (Vec<C>)_mm256_permutevar8x32_ps((__m256)v, (__m256i)index);
#endif
  Vec<C> result;
  for (int l = 0; l < kLanes<C>; ++l) result[l] = v[index[l]];
  return result;
}

// The first n elements, the other lanes from `fill`; nothing beyond p[n-1] is touched.
#if defined(__AVX512F__)
constexpr bool kPartIsFast = true;
JAXKERN_INLINE uint32_t FirstLanes(int n) { return n < 32 ? (1u << n) - 1 : ~0u; }
JAXKERN_INLINE Vec<float> LoadPart(const float* p, int n, Vec<float> fill) {
  return (Vec<float>)_mm512_mask_loadu_ps((__m512)fill, __mmask16(FirstLanes(n)), p);
}
JAXKERN_INLINE Vec<double> LoadPart(const double* p, int n, Vec<double> fill) {
  return (Vec<double>)_mm512_mask_loadu_pd((__m512d)fill, __mmask8(FirstLanes(n)), p);
}
template <class T>
JAXKERN_INLINE Vec<float> LoadPart(const T* p, int n, Vec<float> fill) {
  T buffer[kF];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(buffer), _mm256_maskz_loadu_epi16(__mmask16(FirstLanes(n)), p));
  return Below<float>(n, Load(buffer), fill);
}
JAXKERN_INLINE void StorePart(float* p, int n, Vec<float> v) {
  _mm512_mask_storeu_ps(p, __mmask16(FirstLanes(n)), (__m512)v);
}
JAXKERN_INLINE void StorePart(double* p, int n, Vec<double> v) {
  _mm512_mask_storeu_pd(p, __mmask8(FirstLanes(n)), (__m512d)v);
}
template <class T>
JAXKERN_INLINE void StorePart(T* p, int n, Vec<float> v) {
  T buffer[kF];
  Store(buffer, v);
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(buffer));
  _mm256_mask_storeu_epi16(p, __mmask16(FirstLanes(n)), bits);
}
#else
constexpr bool kPartIsFast = false;
template <class T>
JAXKERN_INLINE Vec<Compute<T>> LoadPart(const T* p, int n, Vec<Compute<T>> fill) {
  T buffer[kLanes<Compute<T>>];
  Store(buffer, fill);
  std::memcpy(buffer, p, n * sizeof(T));
  return Load(buffer);
}
template <class T>
JAXKERN_INLINE void StorePart(T* p, int n, Vec<Compute<T>> v) {
  T buffer[kLanes<Compute<T>>];
  Store(buffer, v);
  std::memcpy(p, buffer, n * sizeof(T));
}
#endif

// The first n bytes -> lanes: -1 where a byte is not 0; 0 in the other lanes. Nothing beyond p[n-1] is touched. By
// intrinsics, since GCC 12 takes such a conversion apart byte by byte.
template <class C>
JAXKERN_INLINE IntVec<C> LoadMask(const uint8_t* p, int n = kLanes<C>) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_maskz_loadu_epi8(__mmask16(FirstLanes(n)), p);
  if constexpr (sizeof(C) == 4) return (IntVec<C>)_mm512_cvtepu8_epi32(bytes) != 0;
  else return (IntVec<C>)_mm512_cvtepu8_epi64(bytes) != 0;
#else
  VecN<uint8_t, kLanes<C>> bytes{};
  n == kLanes<C> ? std::memcpy(&bytes, p, sizeof bytes) : std::memcpy(&bytes, p, n);
#if defined(__AVX2__)
  __m128i low{};
  std::memcpy(&low, &bytes, sizeof bytes);
  if constexpr (sizeof(C) == 4) return (IntVec<C>)_mm256_cvtepu8_epi32(low) != 0;
  else return (IntVec<C>)_mm256_cvtepu8_epi64(low) != 0;
#else
  return __builtin_convertvector(bytes, IntVec<C>) != 0;
#endif
#endif
}

// --- exp -------------------------------------------------------------------------------------------

// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2, e^r = 1 + r + r^2 q(r). q minimises the
// largest relative error (2^-28 and 2^-56), found with the weighted least squares of Lawson (1961).
template <class C>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr float kMin = -88;  // its n is the first whose 2^n is not normal: exponent bits 0
  static constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kRound = 0x1.8p23f + 127;  // adding it rounds to an integer; biased, in the low bits
  static constexpr int kMantissa = 23;
  static constexpr float q[] = {0x1.6a23ccp-10f, 0x1.123a2p-7f, 0x1.5558f2p-5f, 0x1.555492p-3f, 0x1.fffffcp-2f};
};
template <>
struct ExpConstants<double> {
  static constexpr double kMin = -709;
  static constexpr double kLog2e = 1.4426950408889634, kLn2High = 6.93145751953125e-1,
                          kLn2Low = 1.42860682030941723212e-6;
  static constexpr double kRound = 0x1.8p52 + 1023;
  static constexpr int kMantissa = 52;
  static constexpr double q[] = {0x1.ad7f4113f9686p-26, 0x1.28ad9be8e1acep-22, 0x1.71df25b244dc4p-19,
                                 0x1.a01999e1ec9b4p-16, 0x1.a01a012a0f2f2p-13, 0x1.6c16c18438e15p-10,
                                 0x1.1111111127d10p-7,  0x1.555555555083dp-5,  0x1.55555555554f9p-3,
                                 0x1.000000000000ap-1};
};

// e^x as scale + scale * fraction, where scale is a power of two: good to a quarter of a unit in the
// last place, of which the sum of the two would take a half.
template <class V>
struct Exponential {
  V scale, fraction;
  JAXKERN_INLINE V Rounded() const { return Fma(scale, fraction, scale); }
};

// For x <= 88. 0 where the result would be subnormal; NaN stays NaN.
template <class C>
JAXKERN_INLINE Exponential<Vec<C>> ExpParts(Vec<C> x) {
  using K = ExpConstants<C>;
  using V = Vec<C>;
  const V c = Max(Splat(K::kMin), x);
  const V shifted = Fma(c, Splat(K::kLog2e), Splat(K::kRound));
  const V n = shifted - K::kRound;
  // The first step is exact: kLn2High has few bits.
  const V r = Fma(n, Splat(-K::kLn2Low), Fma(n, Splat(-K::kLn2High), c));
  V q = Splat(K::q[0]);
#pragma GCC unroll 16
  for (unsigned i = 1; i < sizeof(K::q) / sizeof(C); ++i) q = Fma(q, r, Splat(K::q[i]));
  return {BitCast<V>(BitCast<IntVec<C>>(shifted) << K::kMantissa), Fma(r * r, q, r)};
}
template <class C>
JAXKERN_INLINE Vec<C> Exp(Vec<C> x) {
  return ExpParts<C>(x).Rounded();
}

// The logarithm of a normal number >= 1, or NaN, within 1 unit in the last place: the method and the
// coefficients of FreeBSD's e_log.c (Sun Microsystems, 1993).
JAXKERN_INLINE Vec<double> Log(Vec<double> x) {
  using D = Vec<double>;
  using I = VecN<uint64_t, kLanes<double>>;
  const I bits = BitCast<I>(x), n = (bits - 0x3fe6a09e667f3bcdull) >> 52;  // x = 2^n m, m in [1, 2] / sqrt 2
  const D e = BitCast<D>(n | 0x4330000000000000ull) - 0x1p52;
  const D f = BitCast<D>(bits - (n << 52)) - 1.0;
  const D s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
  D r = Splat(1.479819860511658591e-01);
  for (const double c : {1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
                         2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01}) {
    r = Fma(r, z, Splat(c));
  }
  const D low = s * (half + r * z) + e * 1.90821492927058770002e-10;
  const D log = e * 6.93147180369123816490e-01 - ((half - low) - f);
  return x == x ? log : x;
}

// --- Reductions ------------------------------------------------------------------------------------

// All lanes into one, halves first: the order is fixed.
template <class C, int N, class F>
JAXKERN_INLINE C Fold(VecN<C, N> v, F f) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    struct Halves {
      VecN<C, N / 2> low, high;
    };
    const Halves h = BitCast<Halves>(v);
    return Fold<C, N / 2>(f(h.low, h.high), f);
  }
}

// The sum of every lane, and what rounding lost of it: Knuth's TwoSum.
template <class V>
struct Sum {
  V sum{}, lost{};

  JAXKERN_INLINE void Add(V x) {
    const V total = sum + x, t = total - sum;
    lost += (sum - (total - t)) + (x - t);
    sum = total;
  }
  JAXKERN_INLINE void Merge(const Sum& other) {
    Add(other.sum);
    lost += other.lost;
  }
};

// All lanes into one.
template <class C, int N>
JAXKERN_INLINE Sum<C> FoldSum(const Sum<VecN<C, N>>& s) {
  struct Halves {
    VecN<C, N / 2> low, high;
  };
  const Halves sum = BitCast<Halves>(s.sum), lost = BitCast<Halves>(s.lost);
  if constexpr (N == 2) {
    Sum<C> total{sum.low[0], lost.low[0]};
    total.Merge({sum.high[0], lost.high[0]});
    return total;
  } else {
    Sum<VecN<C, N / 2>> total{sum.low, lost.low};
    total.Merge({sum.high, lost.high});
    return FoldSum<C, N / 2>(total);
  }
}

// What the terms of every lane are added up in: float in double, double as a Sum.
template <class C>
struct Accumulator;
template <>
struct Accumulator<float> {
  Vec<double> low{}, high{};  // the lower and the upper half of the lanes

  JAXKERN_INLINE void Add(Vec<float> x) {
    struct Halves {
      HalfVec low, high;
    };
    const Halves h = BitCast<Halves>(x);
    low += Widen(h.low);
    high += Widen(h.high);
  }
  JAXKERN_INLINE void Merge(const Accumulator& other) { low += other.low, high += other.high; }
  JAXKERN_INLINE void Store(double* sum, double* lost) const {
    JAXKERN_ISA::Store(sum, low), JAXKERN_ISA::Store(sum + kF / 2, high);
    JAXKERN_ISA::Store(lost, Vec<double>{}), JAXKERN_ISA::Store(lost + kF / 2, Vec<double>{});
  }
  JAXKERN_INLINE Sum<double> Total() const {
    return {Fold<double, kF / 2>(low + high, [](auto p, auto q) { return p + q; }), 0};
  }
};
template <>
struct Accumulator<double> : Sum<Vec<double>> {
  JAXKERN_INLINE void Store(double* sum_out, double* lost_out) const {
    JAXKERN_ISA::Store(sum_out, sum), JAXKERN_ISA::Store(lost_out, lost);
  }
  JAXKERN_INLINE Sum<double> Total() const { return FoldSum<double, kLanes<double>>(*this); }
};

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
