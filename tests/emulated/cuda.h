// CUDA on the CPU, for kernels that are tested without a GPU: each thread of a block is a fiber, which runs to the next
// point where it waits for the threads of its warp, block or cluster. It goes on when all of these that have not ended wait there
// too.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define JAXKERN_EMULATED
// Shared memory that each block of a cluster has.
#define JAXKERN_SHARED(type, name) \
  static type name##_of[16];       \
  type& name = name##_of[emulated::rank]
#define JAXKERN_DYNAMIC_SHARED(name)                  \
  alignas(128) static char name##_of[16][227 * 1024]; \
  char* const name = name##_of[emulated::rank]

namespace emulated {

constexpr int kStack = 1 << 16;
inline uint3 thread, block, grid;
inline unsigned rank;  // of the block in its cluster

// What `at`, which lies in the `shared` of this block, is in block `peer` of the cluster. `shared`: of JAXKERN_SHARED.
template <class V, class Shared> V* Peer(V* at, const Shared& shared, unsigned peer) {
  const auto distance = (static_cast<std::ptrdiff_t>(peer) - static_cast<std::ptrdiff_t>(rank)) * sizeof shared;
  return reinterpret_cast<V*>(reinterpret_cast<char*>(at) + distance);
}

inline ucontext_t scheduler;
inline std::vector<ucontext_t> fibers;
enum State : char { kRuns, kAtWarp, kAtBlock, kAtCluster, kEnded };
inline std::vector<State> state;
inline std::vector<uint64_t> exchanged;
inline void (*body)(void*);
inline void* body_args;
inline unsigned current;

// A GPU has no vectors at other addresses.
inline void CheckAligned(const void* p, size_t bytes) {
  if ((bytes == 8 || bytes == 16) && reinterpret_cast<uintptr_t>(p) % bytes) {
    fprintf(stderr, "a vector of %zu bytes is not aligned\n", bytes);
    abort();
  }
}

inline void Wait(State at = kAtWarp) {
  state[current] = at;
  swapcontext(&fibers[current], &scheduler);
}

inline void Begin() {
  body(body_args);
  Wait(kEnded);
}

// Lets threads [begin, end) go on if they all wait at `at`, or have ended; whether some do.
inline bool Release(unsigned begin, unsigned end, State at) {
  bool some = false;
  for (unsigned t = begin; t < end; ++t) {
    if (state[t] != at && state[t] != kEnded) return false;
    some = some || state[t] == at;
  }
  for (unsigned t = begin; t < end; ++t) {
    if (state[t] == at) state[t] = kRuns;
  }
  return some;
}

template <class Kernel, class Args> struct Call {
  Kernel kernel;
  const Args* args;
};

template <class Args>
void Run(void (*kernel)(Args), const void* args, unsigned gx, unsigned gy, unsigned threads, unsigned cluster) {
  using Own = std::remove_const_t<Args>;
  static Call<void (*)(Args), Own> call;
  Own copy;
  memcpy(static_cast<void*>(&copy), args, sizeof copy);
  call = {kernel, &copy};
  body = [](void* c) {
    auto* own = static_cast<Call<void (*)(Args), Own>*>(c);
    own->kernel(*own->args);
  };
  body_args = &call;
  const unsigned all = threads * cluster;
  fibers.resize(all);
  exchanged.resize(all);
  std::vector<std::unique_ptr<char[]>> stacks;
  grid = {gx, gy, 1};
  for (unsigned t = 0; t < all; ++t) stacks.emplace_back(new char[kStack]);
  for (unsigned y = 0; y < gy; ++y) {
    for (unsigned x = 0; x < gx; x += cluster) {
      state.assign(all, kRuns);
      for (unsigned t = 0; t < all; ++t) {
        getcontext(&fibers[t]);
        fibers[t].uc_stack.ss_sp = stacks[t].get();
        fibers[t].uc_stack.ss_size = kStack;
        fibers[t].uc_link = &scheduler;
        makecontext(&fibers[t], Begin, 0);
      }
      for (;;) {
        for (unsigned t = 0; t < all; ++t) {
          if (state[t] != kRuns) continue;
          current = t, rank = t / threads;
          thread = {t % threads, 0, 0}, block = {x + rank, y, 0};
          swapcontext(&scheduler, &fibers[t]);
        }
        bool goes_on = false;
        for (unsigned b = 0; b < all; b += threads) {
          for (unsigned w = 0; w < threads; w += 32) {
            goes_on = Release(b + w, b + (w + 32 < threads ? w + 32 : threads), kAtWarp) || goes_on;
          }
          goes_on = Release(b, b + threads, kAtBlock) || goes_on;
        }
        if (goes_on || Release(0, all, kAtCluster)) continue;
        for (State own : state) {
          if (own == kEnded) continue;
          fprintf(stderr, "threads wait for each other at different places\n");
          abort();
        }
        break;
      }
    }
  }
}

}  // namespace emulated

#define threadIdx emulated::thread
#define blockIdx emulated::block
#define gridDim emulated::grid

// CUDA has no overload for bool, nor for 8-bit floats and complex numbers.
template <class T> T __ldg(const T* p) {
  static_assert(std::is_arithmetic_v<T> ? !std::is_same_v<T, bool>
                                        : std::is_same_v<T, uint2> || std::is_same_v<T, uint4>);
  return *p;
}
template <class T> void __stcs(T* p, T x) {
  emulated::CheckAligned(p, sizeof x);
  *p = x;
}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline double __hiloint2double(int high, int low) {
  const uint64_t bits = static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low);
  double d;
  memcpy(&d, &bits, 8);
  return d;
}
template <class T> T Unfused(T x) {  // the compiler cannot see where it comes from
  volatile T y = x;
  return y;
}
inline float __fmul_rn(float a, float b) { return Unfused(a * b); }
inline float __fadd_rn(float a, float b) {  // NaN as a GPU makes it
  const float sum = Unfused(a + b);
  return sum == sum ? sum : __uint_as_float(0x7fffffff);
}
inline double __dmul_rn(double a, double b) { return Unfused(a * b); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t bits) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (bits & 31));
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t found = 0;
  for (int k = 0; k < 4; ++k) found |= uint32_t(bytes >> 8 * (selector >> 4 * k & 7) & 255) << 8 * k;
  return found;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline void __syncthreads() { emulated::Wait(emulated::kAtBlock); }
inline void __syncwarp() { emulated::Wait(); }
// Of the threads that still run: used where they exchange nothing.
inline void __syncwarp(unsigned) {}
inline unsigned __activemask() { return ~0u; }
namespace emulated {
template <class T> T Exchange(T x, unsigned from) {
  memcpy(&exchanged[current], &x, sizeof x);
  Wait();
  T y;
  memcpy(&y, &exchanged[from], sizeof y);
  Wait();
  return y;
}
}  // namespace emulated
template <class T> T __shfl_xor_sync(unsigned, T x, int lane) {
  return emulated::Exchange(x, emulated::current ^ lane);
}
template <class T> T __shfl_sync(unsigned, T x, int lane) {
  return emulated::Exchange(x, emulated::current / 32 * 32 + lane);
}
template <class T> T __shfl_up_sync(unsigned, T x, int by) {
  const unsigned own = emulated::current, lane = own % 32;
  return emulated::Exchange(x, lane >= unsigned(by) ? own - by : own);
}
template <class T> T __shfl_down_sync(unsigned, T x, int by) {
  const unsigned own = emulated::current, lane = own % 32;
  return emulated::Exchange(x, lane + by < 32 ? own + by : own);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const unsigned own = emulated::current;
  emulated::exchanged[own] = x;
  emulated::Wait();
  unsigned found = 0;
  for (unsigned lane = 0; lane < 32; ++lane) found |= unsigned(emulated::exchanged[own / 32 * 32 + lane]) << lane;
  emulated::Wait();
  return found;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const unsigned first = emulated::current / 32 * 32;
  emulated::exchanged[emulated::current] = x;
  emulated::Wait();
  unsigned found = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    const unsigned other = static_cast<unsigned>(emulated::exchanged[first + lane]);
    found = found < other ? other : found;
  }
  emulated::Wait();
  return found;
}
inline unsigned __reduce_add_sync(unsigned, unsigned x) {
  const unsigned first = emulated::current / 32 * 32;
  emulated::exchanged[emulated::current] = x;
  emulated::Wait();
  unsigned found = 0;
  for (unsigned lane = 0; lane < 32; ++lane) found += static_cast<unsigned>(emulated::exchanged[first + lane]);
  emulated::Wait();
  return found;
}
inline unsigned __reduce_or_sync(unsigned, unsigned x) {
  const unsigned first = emulated::current / 32 * 32;
  emulated::exchanged[emulated::current] = x;
  emulated::Wait();
  unsigned found = 0;
  for (unsigned lane = 0; lane < 32; ++lane) found |= static_cast<unsigned>(emulated::exchanged[first + lane]);
  emulated::Wait();
  return found;
}
inline int __syncthreads_or(int x) {
  static int found;
  __syncthreads();
  found = 0;
  __syncthreads();
  found |= x;
  __syncthreads();
  return found;
}
inline bool __any_sync(unsigned all, bool x) { return __ballot_sync(all, x) != 0; }
inline unsigned __match_any_sync(unsigned, unsigned x) {
  const unsigned first = emulated::current / 32 * 32;
  emulated::exchanged[emulated::current] = x;
  emulated::Wait();
  unsigned found = 0;
  for (unsigned lane = 0; lane < 32; ++lane) found |= unsigned(emulated::exchanged[first + lane] == x) << lane;
  emulated::Wait();
  return found;
}
// Threads take turns only where they wait.
template <class T> T atomicAdd(T* at, T x) {
  const T old = *at;
  *at = old + x;
  return old;
}
template <class T> T atomicOr(T* at, T x) {
  const T old = *at;
  *at = old | x;
  return old;
}
template <class T> T atomicCAS(T* at, T wanted, T x) {
  const T old = *at;
  if (old == wanted) *at = x;
  return old;
}
inline unsigned __brev(unsigned x) {
  unsigned found = 0;
  for (int i = 0; i < 32; ++i) found |= (x >> i & 1u) << (31 - i);
  return found;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
