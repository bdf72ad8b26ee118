// Packs: elements of any dtype as they lie in memory, read and written as vectors of up to 16 bytes and computed on in float
// (double for double, integers unchanged). Conversions, loads and stores of packs, and asynchronous copies to shared memory.
#pragma once

#include "half.h"
#include "std.h"

namespace jaxkern {

// The type that T is computed in.
template <class T> struct ComputeOf {
  using type = float;
};
template <> struct ComputeOf<double> {
  using type = double;
};
template <> struct ComputeOf<int32_t> {
  using type = int32_t;
};
template <> struct ComputeOf<int64_t> {
  using type = int64_t;
};
template <> struct ComputeOf<uint32_t> {
  using type = uint32_t;
};
template <class T> using Compute = typename ComputeOf<T>::type;

// The type of a T in the functor of a Python function, which has no type to compute everything in.
template <class T> struct OwnOf {
  using type = T;
};
template <> struct OwnOf<__half> {
  using type = float;
};
template <> struct OwnOf<__nv_bfloat16> {
  using type = float;
};
template <class T> using Own = typename OwnOf<T>::type;

// The number of elements in 16 bytes.
template <class T> constexpr int kVector = 16 / static_cast<int>(sizeof(T));

// N elements as they lie in memory, stored as 32-bit words. Storing elements instead would make the compiler unpack loaded
// vectors into 16-bit registers, and wait for each load before it issues the next.
// Aligned to the largest power of two that divides their size, and to a word.
template <class T, int N> struct alignas(N * sizeof(T) % 4 ? 4 : (N * sizeof(T)) & (0 - N * sizeof(T))) Pack {
  static constexpr int kWords = (N * sizeof(T) + 3) / 4;
  uint32_t word[kWords];
};

__device__ __forceinline__ float ToCompute(float x) { return x; }
__device__ __forceinline__ double ToCompute(double x) { return x; }
__device__ __forceinline__ int32_t ToCompute(int32_t x) { return x; }
__device__ __forceinline__ int64_t ToCompute(int64_t x) { return x; }
__device__ __forceinline__ uint32_t ToCompute(uint32_t x) { return x; }
__device__ __forceinline__ float ToCompute(__half x) { return __half2float(x); }
__device__ __forceinline__ float ToCompute(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T> __device__ __forceinline__ T FromCompute(Compute<T> x) {
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  else return x;
}

// An element in its own type, and back.
template <class T> __device__ __forceinline__ Own<T> Wide(T x) {
  if constexpr (std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>) return ToCompute(x);
  else return x;
}
template <class T> __device__ __forceinline__ T Stored(Own<T> x) {
  if constexpr (std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>) return FromCompute<T>(x);
  else return x;
}

// Element i of a pack, by its bits. i is a compile-time constant wherever this is unrolled.
template <class T, int N> __device__ __forceinline__ void SetElement(Pack<T, N>& pack, int i, T x) {
  if constexpr (sizeof(T) == 1) {
    const uint32_t bits = *reinterpret_cast<const uint8_t*>(&x);
    uint32_t& word = pack.word[i / 4];
    word = (word & ~(0xffu << i % 4 * 8)) | bits << i % 4 * 8;
  } else if constexpr (sizeof(T) == 2) {
    const uint32_t bits = *reinterpret_cast<const uint16_t*>(&x);
    uint32_t& word = pack.word[i / 2];
    word = i % 2 ? (word & 0x0000ffffu) | bits << 16 : (word & 0xffff0000u) | bits;
  } else if constexpr (sizeof(T) == 4) {
    pack.word[i] = *reinterpret_cast<const uint32_t*>(&x);
  } else if constexpr (sizeof(T) == 16) {
#pragma unroll
    for (int w = 0; w < 4; ++w) pack.word[4 * i + w] = reinterpret_cast<const uint32_t*>(&x)[w];
  } else {
    const uint64_t bits = *reinterpret_cast<const uint64_t*>(&x);
    pack.word[2 * i] = static_cast<uint32_t>(bits);
    pack.word[2 * i + 1] = static_cast<uint32_t>(bits >> 32);
  }
}

template <class T, int N> __device__ __forceinline__ T Element(const Pack<T, N>& pack, int i) {
  if constexpr (sizeof(T) == 1) {
    const uint8_t bits = static_cast<uint8_t>(pack.word[i / 4] >> i % 4 * 8);
    if constexpr (std::is_same_v<Own<T>, T>) return static_cast<T>(bits);
    else return *reinterpret_cast<const T*>(&bits);  // an 8-bit float
  } else if constexpr (sizeof(T) == 2) {
    const uint16_t bits = static_cast<uint16_t>(i % 2 ? pack.word[i / 2] >> 16 : pack.word[i / 2]);
    T x;
    *reinterpret_cast<uint16_t*>(&x) = bits;
    return x;
  } else if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const T*>(&pack.word[i]);
  } else if constexpr (sizeof(T) == 16) {
    return *reinterpret_cast<const T*>(&pack.word[4 * i]);
  } else {
    const uint64_t bits = static_cast<uint64_t>(pack.word[2 * i + 1]) << 32 | pack.word[2 * i];
    return *reinterpret_cast<const T*>(&bits);
  }
}

// An element in its own type. A bfloat16 is the upper half of a float: one instruction, where a shift of its bits takes two.
template <class T, int N> __device__ __forceinline__ Own<T> WideElement(const Pack<T, N>& pack, int i) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __uint_as_float(i % 2 ? pack.word[i / 2] & 0xffff0000u : pack.word[i / 2] << 16);
  } else {
    return Wide<T>(Element(pack, i));
  }
}

// Where a vector is then loaded under a condition, NVRTC would read the zeros of `= {}` from global memory first.
template <class T, int N> __device__ __forceinline__ Pack<T, N> ZeroPack() {
  Pack<T, N> pack;
#pragma unroll
  for (int w = 0; w < Pack<T, N>::kWords; ++w) pack.word[w] = 0;
  return pack;
}

template <class T, int N> __device__ __forceinline__ Pack<T, N> Filled(T x) {
  Pack<T, N> pack = {};
#pragma unroll
  for (int i = 0; i < N; ++i) SetElement(pack, i, x);
  return pack;
}

template <class T, int N> __device__ __forceinline__ void Unpack(const Pack<T, N>& pack, Compute<T> (&out)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // a bf16 is the upper half of a float
      out[i] = __uint_as_float(i % 2 ? pack.word[i / 2] & 0xffff0000u : pack.word[i / 2] << 16);
    } else {
      out[i] = ToCompute(Element(pack, i));
    }
  }
}

// Hides the value of a pack from the compiler, so that it unpacks the pack again later instead of keeping the result: N
// floats take twice the registers of the 16-bit pack.
template <class T, int N> __device__ __forceinline__ void Forget(Pack<T, N>& pack) {
#pragma unroll
  for (int w = 0; w < Pack<T, N>::kWords; ++w) asm volatile("" : "+r"(pack.word[w]));
}

// Keeps a pointer in a register: the compiler does not recompute it at every use.
template <class P> __device__ __forceinline__ P* Pinned(P* p) {
  asm volatile("" : "+l"(p));
  return p;
}

template <class T, int N> __device__ __forceinline__ Pack<T, N> Repack(const Compute<T> (&in)[N]) {
  Pack<T, N> pack = {};
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {  // one instruction rounds two elements
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(in[2 * i], in[2 * i + 1]);
        pack.word[i] = *reinterpret_cast<const uint32_t*>(&pair);
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
        pack.word[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) SetElement(pack, i, FromCompute<T>(in[i]));
  }
  return pack;
}

// The larger of the first and of the second of two 16-bit elements; NaN if either is NaN (extremes.h does this for one).
template <class T> __device__ __forceinline__ uint32_t LargerOrNanOfPairs(uint32_t a, uint32_t b) {
#ifdef JAXKERN_EMULATED
  Pack<T, 2> x, y;
  x.word[0] = a, y.word[0] = b;
  float u[2], v[2];
  Unpack(x, u), Unpack(y, v);
  return (u[0] != u[0] || u[0] > v[0] ? a & 0xffff : b & 0xffff) |
         (u[1] != u[1] || u[1] > v[1] ? a & 0xffff0000 : b & 0xffff0000);
#else
  uint32_t larger;
  if constexpr (std::is_same_v<T, __half>) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  else asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#endif
}

// The L2 eviction policy of the lines that a kernel reads.
//
// Calls that move more than L2 holds use evict_last. Measured beside a stream of writes, reads with evict_last are 2-3%
// faster, and reads with evict_first (__ldcs, .nc.no_allocate, a bulk copy's hint) 8% slower, whatever the policy of the
// writes. The effect wears off: the next kernel that reads half an L2 twice takes 2 us longer, once. Calls that fit L2 use
// the default policy.
struct ReadPolicy {
  uint64_t bits;
};

// A read with the default policy, also of data that the kernel itself has written.
template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadVector(const T* p) {
  Pack<T, N> pack = {};
  if constexpr (N * sizeof(T) == 16) {
    *reinterpret_cast<uint4*>(pack.word) = *reinterpret_cast<const uint4*>(p);
  } else if constexpr (N * sizeof(T) == 8) {
    *reinterpret_cast<uint2*>(pack.word) = *reinterpret_cast<const uint2*>(p);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) SetElement(pack, i, p[i]);
  }
  return pack;
}

#ifndef JAXKERN_EMULATED

__device__ __forceinline__ ReadPolicy MakeReadPolicy(bool exceeds_l2) {
  uint64_t last, normal;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
  asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(normal));
  return {exceeds_l2 ? last : normal};
}

template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadVector(const T* p, ReadPolicy policy) {
  Pack<T, N> pack = {};
  if constexpr (N * sizeof(T) == 16) {
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
                 : "l"(p), "l"(policy.bits));
  } else if constexpr (N * sizeof(T) == 8) {
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(pack.word[0]), "=r"(pack.word[1])
                 : "l"(p), "l"(policy.bits));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) SetElement(pack, i, p[i]);
  }
  return pack;
}

// LoadVector if `has`, else zeros, without a branch: the compiler would wait for the vector where branches meet.
template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadVectorIf(bool has, const T* p, ReadPolicy policy) {
  Pack<T, N> pack = ZeroPack<T, N>();
  if constexpr (N * sizeof(T) == 16) {
    asm volatile(
        "{\n\t.reg .pred has;\n\tsetp.ne.u32 has, %6, 0;\n\t"
        "@has ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;\n\t}"
        : "+r"(pack.word[0]), "+r"(pack.word[1]), "+r"(pack.word[2]), "+r"(pack.word[3])
        : "l"(p), "l"(policy.bits), "r"(static_cast<uint32_t>(has)));
  } else if constexpr (N * sizeof(T) == 8) {
    asm volatile(
        "{\n\t.reg .pred has;\n\tsetp.ne.u32 has, %4, 0;\n\t"
        "@has ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;\n\t}"
        : "+r"(pack.word[0]), "+r"(pack.word[1])
        : "l"(p), "l"(policy.bits), "r"(static_cast<uint32_t>(has)));
  } else {
    if (has) pack = LoadVector<T, N>(p, policy);
  }
  return pack;
}

#else  // tests that run kernels on the CPU

__device__ __forceinline__ ReadPolicy MakeReadPolicy(bool) { return {0}; }
template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadVector(const T* p, ReadPolicy) {
  emulated::CheckAligned(p, N * sizeof(T));
  return LoadVector<T, N>(p);
}
template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadVectorIf(bool has, const T* p, ReadPolicy policy) {
  return has ? LoadVector<T, N>(p, policy) : ZeroPack<T, N>();
}

#endif

// A write of data that the kernel does not read again.
template <class T, int N> __device__ __forceinline__ void StoreVector(T* p, const Pack<T, N>& pack) {
  if constexpr (N * sizeof(T) == 16) {
    __stcs(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(pack.word));
  } else if constexpr (N * sizeof(T) == 8) {
    __stcs(reinterpret_cast<uint2*>(p), *reinterpret_cast<const uint2*>(pack.word));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) p[i] = Element(pack, i);
  }
}

// Parts of a row: vectors of 4 bytes too. Such a vector shares its sector with others and is stored normally.
template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadPart(const T* p) {
  if constexpr (N * sizeof(T) == 4) {
    Pack<T, N> pack;
    pack.word[0] = *reinterpret_cast<const uint32_t*>(p);
    return pack;
  } else {
    return LoadVector<T, N>(p);
  }
}

template <class T, int N> __device__ __forceinline__ void StorePart(T* p, const Pack<T, N>& pack) {
  if constexpr (N * sizeof(T) == 4) *reinterpret_cast<uint32_t*>(p) = pack.word[0];
  else StoreVector<T, N>(p, pack);
}

// --- Asynchronous copies to shared memory, which use no registers and complete at WaitForCopies --------------------

#ifndef JAXKERN_EMULATED

// Copies 4, 8 or 16 bytes; both addresses are aligned to that size.
template <int kBytes> __device__ __forceinline__ void CopyAsync(void* shared, const void* global) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else if constexpr (kBytes == 8)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(global) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}

// Copies the first `bytes` of 16 bytes, and sets the others to 0 without reading them.
__device__ __forceinline__ void CopyAsyncFront(void* shared, const void* global, int bytes) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}

// Waits for the copies of this thread. A barrier must follow before a thread reads what others have copied.
__device__ __forceinline__ void WaitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Ends a group of copies, and waits until at most kPending groups of this thread are incomplete.
__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void WaitForCopyGroups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#else

template <int kBytes> __device__ __forceinline__ void CopyAsync(void* shared, const void* global) {
  memcpy(shared, global, kBytes);
}
__device__ __forceinline__ void CopyAsyncFront(void* shared, const void* global, int bytes) {
  memset(shared, 0, 16);
  memcpy(shared, global, bytes);
}
__device__ __forceinline__ void WaitForCopies() {}
__device__ __forceinline__ void CommitCopies() {}
template <int kPending> __device__ __forceinline__ void WaitForCopyGroups() {}

#endif

}  // namespace jaxkern
