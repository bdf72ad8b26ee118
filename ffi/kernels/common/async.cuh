// Hopper's asynchronous copies and the barriers they complete on (sm_90 and newer): mbarrier, cp.async.bulk from global
// to shared memory, and arrival at a barrier of another block of the cluster. Thin wrappers of the PTX instructions; see
// "Asynchronous copy" in the PTX ISA.
#pragma once

#include "pack.cuh"
#include "std.h"

#if (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900) && !defined(JAXKERN_EMULATED)
#define JAXKERN_HAS_BULK_COPY 1
#endif

namespace jaxkern {

constexpr int kMaxCluster = 16;  // blocks; more than 8 require the attribute for non-portable cluster sizes

using Barrier = uint64_t;  // an mbarrier object, in shared memory

#ifdef JAXKERN_HAS_BULK_COPY

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void InitBarrier(Barrier* b, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(b)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster. A cluster-wide barrier
// must follow before other threads use them.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void Arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(b)) : "memory");
}

// Arrives, and adds `bytes` to the bytes that copies must deliver before the phase completes.
__device__ __forceinline__ void ArriveExpect(Barrier* b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(b)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void Wait(Barrier* b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(SharedAddress(b)),
      "r"(parity)
      : "memory");
}

// Copies bytes (a multiple of 16, both addresses aligned to 16); completes on the barrier.
__device__ __forceinline__ void BulkCopy(void* shared, const void* global, uint32_t bytes, Barrier* b,
                                         ReadPolicy policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(b)), "l"(policy.bits)
      : "memory");
}

// Starts to read the whole 16-byte vectors among `bytes` bytes at p into L2. It is a hint; one thread calls it for many.
__device__ __forceinline__ void PrefetchL2(const void* p, int bytes, ReadPolicy policy) {
  const uint64_t from = (reinterpret_cast<uint64_t>(p) + 15) / 16 * 16,
                 to = (reinterpret_cast<uint64_t>(p) + bytes) / 16 * 16;
  if (from >= to) return;
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from),
               "r"(static_cast<uint32_t>(to - from)), "l"(policy.bits)
               : "memory");
}

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

__device__ __forceinline__ uint32_t ClusterSize() {
  uint32_t n;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return n;
}

// The barrier of all threads of the cluster, split into arrive and wait.
__device__ __forceinline__ void ArriveCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Arrives without ordering any memory access.
__device__ __forceinline__ void ArriveClusterRelaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void WaitCluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void SyncCluster() {
  ArriveCluster();
  WaitCluster();
}

// The address of the same shared object of block `rank`.
__device__ __forceinline__ uint32_t RemoteAddress(const void* at, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(SharedAddress(at)), "r"(rank));
  return remote;
}

// Writes a value to the same shared object of block `rank`, and counts its bytes at that block's barrier, so that threads
// waiting there see the value. No fence is needed. A store and a releasing arrival would wait for all global stores of
// this thread.
template <class V> __device__ __forceinline__ void StoreRemote(V* at, const V& value, Barrier* b, uint32_t rank) {
  static_assert(sizeof(V) % 8 == 0);
  const uint32_t remote_at = RemoteAddress(at, rank), remote_barrier = RemoteAddress(b, rank);
  const uint64_t* words = reinterpret_cast<const uint64_t*>(&value);
#pragma unroll
  for (int i = 0; i < sizeof(V) / 8; ++i) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(remote_at + 8 * i),
                 "l"(words[i]), "r"(remote_barrier)
                 : "memory");
  }
}

#else

__device__ __forceinline__ void PrefetchL2(const void*, int, ReadPolicy) {}

#endif  // JAXKERN_HAS_BULK_COPY

// Announces to a cluster of kBlocks blocks that this one has initialised its barriers, and waits until all have. They do
// nothing for one block. All threads call them, and thread 0 initialises.
template <int kBlocks> __device__ __forceinline__ void ArriveOpened() {
#ifdef JAXKERN_HAS_BULK_COPY
  if constexpr (kBlocks > 1) {
    __syncwarp();
    ArriveClusterRelaxed();
  }
#endif
}
template <int kBlocks> __device__ __forceinline__ void WaitOpened() {
#ifdef JAXKERN_HAS_BULK_COPY
  if constexpr (kBlocks > 1) {
    __syncwarp();
    WaitCluster();
  }
#endif
}

// Initialises barriers of one arrival, which the other blocks of a cluster may use after WaitOpened, and announces it. All
// threads call it.
template <int kBlocks, int n> __device__ __forceinline__ void OpenBarriers(Barrier (&barrier)[n]) {
#ifdef JAXKERN_HAS_BULK_COPY
  if constexpr (kBlocks > 1) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < n; ++i) InitBarrier(&barrier[i], 1);
      FenceBarrierInit();
    }
  }
#endif
  ArriveOpened<kBlocks>();
}

// A barrier of `threads` threads of the block: whole warps, which must all reach it at the same place in the code.
__device__ __forceinline__ void SyncThreads(int id, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same for warps that reach it at different places in the code, which the aligned form does not allow.
__device__ __forceinline__ void SyncThreadsApart(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace jaxkern
