// Conversions between element types, compiled once an instruction set.
#include "elementwise/elementwise_cpu_isa.h"

#include "common/simd.h"
#include "elementwise/arithmetic.h"

namespace jaxkern {
namespace JAXKERN_ISA {
namespace {

// To the nearest float, but for an inexact one whose last bit is even: then its neighbour on x's side, so
// that a second rounding, to fewer bits, is that of x (Boldo and Melquiond, "Emulation of FMA", 2008).
JAXKERN_FN float RoundToOdd(double x) {
  const float f = float(x);
  const uint32_t bits = BitsAs<uint32_t>(f);
  const uint32_t odd = __builtin_fabs(double(f)) > __builtin_fabs(x) ? bits - 1 : bits + 1;
  return double(f) == x || x != x || bits & 1 ? f : BitsAs<float>(odd);
}

template <class T>  // float16 or bfloat16
void FromHalf(const void* from, void* to, int64_t n) {
  const T* p = static_cast<const T*>(from);
  float* q = static_cast<float*>(to);
  int64_t i = 0;
  for (; i + kF <= n; i += kF) Store(q + i, Load(p + i));
  if (i < n) StorePart(q + i, int(n - i), LoadPart(p + i, int(n - i), Vec<float>{}));
}
template <class T>
void ToHalf(const void* from, void* to, int64_t n) {
  const float* p = static_cast<const float*>(from);
  T* q = static_cast<T*>(to);
  int64_t i = 0;
  for (; i + kF <= n; i += kF) Store(q + i, Load(p + i));
  if (i < n) StorePart(q + i, int(n - i), LoadPart(p + i, int(n - i), Vec<float>{}));
}
constexpr int kBlock = 256;
template <class T>
void FromHalfToDouble(const void* from, void* to, int64_t n) {
  float buffer[kBlock];
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t m = n - i < kBlock ? n - i : kBlock;
    FromHalf<T>(static_cast<const T*>(from) + i, buffer, m);
    for (int64_t k = 0; k < m; ++k) static_cast<double*>(to)[i + k] = buffer[k];
  }
}
template <class T>
void ToHalfFromDouble(const void* from, void* to, int64_t n) {
  float buffer[kBlock];
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t m = n - i < kBlock ? n - i : kBlock;
    for (int64_t k = 0; k < m; ++k) buffer[k] = RoundToOdd(static_cast<const double*>(from)[i + k]);
    ToHalf<T>(buffer, static_cast<T*>(to) + i, m);
  }
}
template <class T, class C>
void FromPlain(const void* from, void* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) static_cast<C*>(to)[i] = C(static_cast<const T*>(from)[i]);
}
// Numbers to integers: towards 0, to the nearest that the type has, 0 for NaN.
template <class T, class C>
void ToInteger(const void* from, void* to, int64_t n) {
  constexpr C kLeast = T(-1) < T(0) ? -C(1ull << (8 * sizeof(T) - 1)) : C(0);
  constexpr C kMost = T(-1) < T(0) ? C((1ull << (8 * sizeof(T) - 1)) - 1) : C((1ull << 8 * sizeof(T)) - 1);
  for (int64_t i = 0; i < n; ++i) {
    const C x = static_cast<const C*>(from)[i];
    // float rounds the largest int32_t up, which it must not be converted from
    const T y = x >= kMost ? T(kMost == C(2147483648.0f) ? 2147483647 : kMost) : T(int32_t(x > kLeast ? x : kLeast));
    static_cast<T*>(to)[i] = x == x ? y : T(0);
  }
}
template <class C>
void ToPred(const void* from, void* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) static_cast<uint8_t*>(to)[i] = static_cast<const C*>(from)[i] != C(0);
}
template <class T, class C>
void Plain(const void* from, void* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) static_cast<T*>(to)[i] = T(static_cast<const C*>(from)[i]);
}

}  // namespace

void FillElementwiseConversions(ElementwiseConversions* c) {
  using E = ElementwiseType;
  constexpr int f16 = int(E::kF16), bf16 = int(E::kBF16), f32 = int(E::kF32), f64 = int(E::kF64), s8 = int(E::kS8),
                u8 = int(E::kU8), s32 = int(E::kS32), pred = int(E::kPred);
  c->load[f16][f32] = FromHalf<Half>, c->load[bf16][f32] = FromHalf<BFloat>;
  c->load[f16][f64] = FromHalfToDouble<Half>, c->load[bf16][f64] = FromHalfToDouble<BFloat>;
  c->load[f32][f64] = FromPlain<float, double>;
  c->load[s8][f32] = FromPlain<int8_t, float>, c->load[s8][f64] = FromPlain<int8_t, double>;
  c->load[u8][f32] = c->load[pred][f32] = FromPlain<uint8_t, float>;
  c->load[u8][f64] = c->load[pred][f64] = FromPlain<uint8_t, double>;
  c->load[s32][f32] = FromPlain<int32_t, float>, c->load[s32][f64] = FromPlain<int32_t, double>;
  c->load[pred][s32] = FromPlain<uint8_t, int32_t>;
  c->store[f16][f32] = ToHalf<Half>, c->store[bf16][f32] = ToHalf<BFloat>;
  c->store[f16][f64] = ToHalfFromDouble<Half>, c->store[bf16][f64] = ToHalfFromDouble<BFloat>;
  c->store[f32][f64] = Plain<float, double>;
  c->store[s8][f32] = ToInteger<int8_t, float>, c->store[s8][f64] = ToInteger<int8_t, double>;
  c->store[u8][f32] = ToInteger<uint8_t, float>, c->store[u8][f64] = ToInteger<uint8_t, double>;
  c->store[s32][f32] = ToInteger<int32_t, float>, c->store[s32][f64] = ToInteger<int32_t, double>;
  c->store[pred][f32] = ToPred<float>, c->store[pred][f64] = ToPred<double>, c->store[pred][s32] = ToPred<int32_t>;
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
