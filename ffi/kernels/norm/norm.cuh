// What the kernels of RMSNorm and LayerNorm share: types, reading and writing of packs, statistics of a row.
//
//     forward    s  = x + residual, rounded to the type of x; x if there is no residual
//                y  = (s - mean) * rstd * scale + bias           rstd = 1 / sqrt(mean((s - mean)^2) + eps)
//     backward   h  = g * scale,  z = (s - mean) * rstd
//                dx = rstd * (h - mean(h) - z * mean(h * z)) + sum_g
//                dscale = sum over rows of g * z,  dbias = sum over rows of g
//
// over rows of `width` elements that lie one after the other. RMSNorm is the same without the mean. sum_g is the cotangent
// of s, which the forward pass with a residual returns too.
//
// Packs have N elements, the largest power of two that divides the width and makes 16 bytes of the widest array, so that
// no pack crosses the end of a row. Arithmetic is in float (double for double). Squares are divided by the width before
// they are added: a row's statistics overflow only if its mean square does.
#pragma once

#include "../common/async.cuh"
#include "../common/exponential.cuh"
#include "../common/pack.cuh"
#include "../common/reduce.cuh"

namespace jaxkern {

#ifndef JAXKERN_EMULATED
#define JAXKERN_DYNAMIC_SHARED(name) extern __shared__ __align__(16) char name[]
#endif

struct NormParams {
  const void* x;         // of the backward pass: s
  const void* residual;  // null if there is none; of the backward pass: sum_g
  const void* g;         // of the backward pass
  const void* scale;
  const void* bias;
  void* y;  // of the backward pass: dx
  void* sum;
  void* partial;  // of the backward pass: [sums][blocks][width], in the computing type
  int64_t rows;
  int64_t width;
  double eps;
  int32_t blocks;  // of a grid that walks over the rows
  bool exceeds_l2;
};
static_assert(sizeof(NormParams) == 96, "plan.py lays it out");

constexpr int kNormCentre = 1, kNormScale = 2, kNormBias = 4, kNormResidual = 8, kNormScaleSum = 16;

// T: of x, s and dx. O: of y and g. P: of scale and bias. In the backward pass kBias and kScaleSum are the sums to compute.
template <class T_, class O_, class P_, int kFlags> struct Norm {
  using T = T_;
  using O = O_;
  using P = P_;
  using C = Compute<T>;
  static constexpr bool kCentre = kFlags & kNormCentre;
  static constexpr bool kScale = kFlags & kNormScale;
  static constexpr bool kBias = kFlags & kNormBias;
  static constexpr bool kResidual = kFlags & kNormResidual;
  static constexpr bool kScaleSum = kFlags & kNormScaleSum;
};

// What happens to a normalised element before it is stored: nothing. See epilogue.cuh.
struct NoEpilogue {
  using Params = NormParams;
  static constexpr bool kQuantizes = false;  // see quantize.cuh
  static constexpr int Held(int) { return 0; }
  template <int N, class C> static __device__ __forceinline__ void Apply(const Params&, int64_t, int64_t, C (&)[N]) {}
};

template <class T, int N>
__device__ __forceinline__ Pack<T, N> LoadPack(const void* array, int64_t at, ReadPolicy policy) {
  const T* const p = static_cast<const T*>(array) + at;
  if constexpr (N * sizeof(T) == 4) {
    Pack<T, N> pack;
    pack.word[0] = *reinterpret_cast<const uint32_t*>(p);
    return pack;
  } else {
    return LoadVector<T, N>(p, policy);
  }
}

template <class T, int N> __device__ __forceinline__ void StorePack(void* array, int64_t at, const Pack<T, N>& pack) {
  T* const p = static_cast<T*>(array) + at;
  if constexpr (N * sizeof(T) == 4) __stcs(reinterpret_cast<uint32_t*>(p), pack.word[0]);
  else StoreVector<T, N>(p, pack);
}

// Elements [at, at + N) of scale or bias, which every row reads again.
template <class P, int N, class C>
__device__ __forceinline__ void LoadParameters(const void* array, int64_t at, C (&out)[N]) {
  constexpr int kEach = N * sizeof(P) > 16 ? 16 / sizeof(P) : N;
  const P* const p = static_cast<const P*>(array) + at;
#pragma unroll
  for (int i = 0; i < N; i += kEach) {
    Compute<P> part[kEach];
    Unpack(LoadVector<P, kEach>(p + i), part);
#pragma unroll
    for (int j = 0; j < kEach; ++j) out[i + j] = part[j];
  }
}

// x + residual in the type of x.
template <class T, int N> __device__ __forceinline__ Pack<T, N> Added(const Pack<T, N>& x, const Pack<T, N>& residual) {
  Compute<T> a[N], b[N];
  Unpack(x, a);
  Unpack(residual, b);
#pragma unroll
  for (int j = 0; j < N; ++j) a[j] += b[j];
  return Repack<T, N>(a);
}

// a * b, rounded: never fused into a multiply-add. Gradients subtract the mean of h = g * scale from h and divide by the
// deviation of the row; in short rows that leaves the rounding of h, unless all uses have the same.
template <class C> __device__ __forceinline__ C Rounded(C a, C b) {
  if constexpr (sizeof(C) == 8) return __dmul_rn(a, b);
  else return __fmul_rn(a, b);
}

template <class C> __device__ __forceinline__ C InverseRoot(C x) {
  if constexpr (sizeof(C) == 8) return 1.0 / sqrt(x);
  else return 1.0f / sqrtf(x);
}

constexpr int PowerOfTwo(int n) { return n <= 1 ? 1 : 2 * PowerOfTwo((n + 1) / 2); }

// Sums over the group of threads that owns a row: kLanes lanes of a warp, or with kLanes <= 0 all kThreads of the block.
// Every thread gets the same result. All threads of the warp (kLanes <= 0: of the block) take part. For a block: contains
// one barrier. Consecutive calls must alternate between two rooms, because nothing waits for the last reader.
template <int kLanes, int kThreads, int kCount, class C>
__device__ __forceinline__ void RowSums(C (&v)[kCount], C (*room)[kCount]) {
  constexpr int kGroup = kLanes <= 0 ? kWarp : kLanes;
  if constexpr (kGroup < kCount) {  // a lane or two
#pragma unroll
    for (int k = 0; k < kCount; ++k) v[k] = ReduceLanes<kGroup>(v[k], SumOf());
    return;
  } else {
    constexpr int kEach = kGroup / kCount;  // lanes that get the same value
    const int lane = threadIdx.x % kWarp;
    C mine = ReduceLanesApart<kGroup>(v, SumOf());
    if constexpr (kLanes <= 0 && kThreads > kWarp) {
      constexpr int kWarps = kThreads / kWarp, kSlots = std::min(kEach, PowerOfTwo(kWarps));
      if (lane % kEach == 0) room[threadIdx.x / kWarp][lane / kEach] = mine;
      __syncthreads();
      mine = 0;
#pragma unroll
      for (int w = 0; w < kWarps; w += kSlots) {
        if (w + lane % kSlots < kWarps) mine += room[w + lane % kSlots][lane / kEach];
      }
      mine = ReduceLanes<kSlots>(mine, SumOf());
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      v[k] = kCount == 1 ? mine : __shfl_sync(0xffffffffu, mine, lane / kGroup * kGroup + k * kEach);
    }
  }
}

// Finds the threads that own a row. The template argument kLanes of a kernel selects them: 1 to 32 lanes of a warp, 0 for
// a block of kThreads threads, -b for a cluster of b such blocks.
template <int kLanes, int kThreads> struct RowOwners {
  static constexpr int kBlocks = kLanes < 0 ? -kLanes : 1;
  static constexpr int kGroup = kLanes > 0 ? kLanes : kThreads * kBlocks;
  static constexpr int kGroups = kLanes > 0 ? kThreads / kLanes : 1;  // in a block or cluster

  static __device__ __forceinline__ int Lane() {
    return kLanes > 0 ? threadIdx.x % kGroup : (kBlocks > 1 ? blockIdx.x % kBlocks * kThreads : 0) + threadIdx.x;
  }
  static __device__ __forceinline__ int GroupOfBlock() { return kLanes > 0 ? threadIdx.x / kGroup : 0; }
  static __device__ __forceinline__ uint32_t Block() { return blockIdx.x / kBlocks; }
};

// Adds up to kMost sums over the blocks of a cluster, in the order of the ranks. Every thread calls Init, then Ready, then
// Add. All blocks call Add equally often, and a barrier of the block precedes each call.
//
// Calls use two mailboxes in turn. A block sends to a mailbox again only after the other one has been filled, and all
// blocks fill that one after they have read this one. A block may exit after its last Add, because nothing more is sent to
// it.
template <class C, int kBlocks, int kMost> struct ClusterSums {
  struct alignas(8) Sums {
    C value[kMost];
  };
  Sums from[2][kBlocks];
#ifdef JAXKERN_HAS_BULK_COPY
  Barrier barrier[2];
#endif

  __device__ __forceinline__ void Init() {
#ifdef JAXKERN_HAS_BULK_COPY
    OpenBarriers<kBlocks>(barrier);
#endif
  }
  // Waits for the other blocks to have called Init.
  __device__ __forceinline__ void Ready() { WaitOpened<kBlocks>(); }
  // Replaces v, the sums of this block, by the sums over the cluster. Every thread passes the same v. `call` is the number
  // of earlier calls.
  template <int kCount> __device__ __forceinline__ void Add(C (&v)[kCount], uint32_t call) {
#ifdef JAXKERN_HAS_BULK_COPY
    if constexpr (kBlocks > 1) {
      const uint32_t slot = call % 2;
      if (threadIdx.x == 0) ArriveExpect(&barrier[slot], kBlocks * static_cast<uint32_t>(sizeof(Sums)));
      if (threadIdx.x < kBlocks) {
        Sums mine = {};
#pragma unroll
        for (int k = 0; k < kCount; ++k) mine.value[k] = v[k];
        StoreRemote(&from[slot][blockIdx.x % kBlocks], mine, &barrier[slot], threadIdx.x);
      }
      __syncwarp();
      Wait(&barrier[slot], call / 2 % 2);
#pragma unroll
      for (int k = 0; k < kCount; ++k) v[k] = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) v[k] += from[slot][b].value[k];
      }
    }
#endif
  }
};

}  // namespace jaxkern
