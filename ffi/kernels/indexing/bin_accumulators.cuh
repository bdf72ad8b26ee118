// Accumulators in shared memory for the kernels of bins.cuh, and how their totals are written to rows.
//
// BlockBins holds the bins of a block: a set for each thread (kFew) or each warp, or one set to which the warps add in
// turn. All threads of the block call Clear, then a barrier; all lanes of a warp call Add together.
//
// Template parameters of this file: kOp, the reduction; T, the element type; C, the computing type; kFew, bins per
// thread.
#pragma once

#include "common/async.cuh"
#include "indexing/run.cuh"

namespace jaxkern {

constexpr int kBinBits = 11;
constexpr int64_t kBins = int64_t{1} << kBinBits;
constexpr int kBinWindow = 16;  // rows of a block
constexpr int kBinThreads = 256, kBinWarps = kBinThreads / kWarp, kBinAhead = 8;
constexpr int kWideThreads = 128, kWideWarps = kWideThreads / kWarp;

// The initial value of a bin.
template <Reduction kOp, class C> __device__ __forceinline__ C Empty() {
  if constexpr (kOp == Reduction::kSum && std::is_same_v<C, float>) return -0.0f;
  else return Identity<kOp, C>();
}

// Whether the row of a bin with this total needs no write.
template <Reduction kOp, class C> __device__ __forceinline__ bool Untouched(const IndexRun& run, C total) {
  if constexpr (kOp == Reduction::kSum && std::is_same_v<C, float>) {
    return run.reads_out && __float_as_uint(total) == 0x80000000u;
  }
  return false;
}

template <Reduction kOp, class T>
__device__ __forceinline__ void WriteBin(const IndexRun& run, T* at, Compute<T> total, Compute<T> alpha, Compute<T> x) {
  if constexpr (kOp == Reduction::kSum && kIsFloat<Compute<T>>) total += 0.0f;
  *at = FromCompute<T>(Finished<kOp>(total, alpha, run.reads_out, x));
}

// Writes one bin to its row.
template <Reduction kOp, class T> __device__ __forceinline__ void EmitAt(const IndexRun& run, T* at, Compute<T> total) {
  using C = Compute<T>;
  if (Untouched<kOp>(run, total)) return;
  WriteBin<kOp>(run, at, total, Alpha<C>(run), run.reads_out ? ToCompute(*at) : C(0));
}

// Writes the bins of keys first, first + step, ... that are below `end`. The old values of the N rows are loaded
// together.
template <Reduction kOp, class T, int N>
__device__ __forceinline__ void EmitBins(const IndexRun& run, int64_t o, uint32_t first, uint32_t step, uint32_t end,
                                         const Compute<T> (&total)[N]) {
  using C = Compute<T>;
  T* const out = static_cast<T*>(run.out) + o * run.out_stride;
  end = min(end, run.dropped);
  T* at[N];
  C x[N];
#pragma unroll
  for (int u = 0; u < N; ++u) {
    const uint32_t key = first + u * step;
    at[u] = key < end && !Untouched<kOp>(run, total[u]) ? out + run.OutRow(key) : nullptr;
    x[u] = at[u] && run.reads_out ? ToCompute(*at[u]) : C(0);
  }
  const C alpha = Alpha<C>(run);
#pragma unroll
  for (int u = 0; u < N; ++u) {
    if (at[u]) WriteBin<kOp>(run, at[u], total[u], alpha, x[u]);
  }
}

template <Reduction kOp, class T>
__device__ __forceinline__ void EmitBin(const IndexRun& run, int64_t o, uint32_t key, Compute<T> total) {
  EmitBins<kOp, T, 1>(run, o, key, 0, run.dropped, {total});
}

// Shared-memory accumulators of a block, privatized per thread (kFew) or per warp, or shared by the block. Each warp
// also keeps one flag bit per bin to detect lanes that target the same bin.
template <Reduction kOp, class C, bool kFew> struct BlockBins {
  static constexpr int kBinsAtOnce = kFew ? 1 : 4;  // sums that a thread passes to `emit` together
  C* sum;
  uint32_t* taken;
  int bins, copies, warps;  // warps: number of warps that add

  static constexpr int Taken(int bins) { return bins <= kBins ? kBins / 32 : (bins + 31) / 32; }  // in words
  static constexpr int Warps(int copies) { return copies == 1 ? kWideWarps : copies; }

  __device__ __forceinline__ BlockBins(char* shared, int bins, int copies)
      : sum(reinterpret_cast<C*>(shared)),
        taken(reinterpret_cast<uint32_t*>(shared) + bins * copies),
        bins(bins),
        copies(copies),
        warps(Warps(copies)) {}

  // Number of threads that add.
  __device__ __forceinline__ uint32_t Adding() const { return kFew ? kBinThreads : warps * kWarp; }

  __device__ __forceinline__ void Clear() {
    const int all = bins * (kFew ? kBinThreads : copies);
#pragma unroll 4
    for (int i = threadIdx.x; i < all; i += blockDim.x) sum[i] = Empty<kOp, C>();
    if (!kFew) {
      for (int i = threadIdx.x; i < warps * Taken(bins); i += blockDim.x) taken[i] = 0;
    }
  }

  // Adds N updates per lane. All lanes of a warp must call it. A negative bin means no update. Warps that share bins
  // add in turn; first_turn and last_turn mark the first and the last call of the block.
  template <int N> __device__ __forceinline__ void Add(int (&bin)[N], C (&v)[N], bool first_turn, bool last_turn) {
    if constexpr (kFew) {
#pragma unroll
      for (int u = 0; u < N; ++u) {
        C* const mine = sum + bin[u] * kBinThreads + threadIdx.x;
        if (bin[u] >= 0) *mine = Combined<kOp>(*mine, v[u]);
      }
    } else {
      const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
      int first = copies == 1 ? 0 : warp * bins;
      asm("" : "+r"(first));  // pinned in a register instead of recomputed for every update
      uint32_t* const mine_taken = taken + warp * Taken(bins);
      // atomicOr reports a conflict to every lane but the first that targets a bin (__match_any_sync is slow). No
      // result is consumed inside the loop, so the queries overlap.
      uint32_t there[N];
#pragma unroll
      for (int u = 0; u < N; ++u) {
        const uint32_t bit = bin[u] >= 0 ? 1u << (bin[u] & 31) : 0;
        const int word = bin[u] >= 0 ? bin[u] >> 5 : lane;
        there[u] = atomicOr(&mine_taken[word], bit) & bit;
        __syncwarp();
        if (bins <= kBins) {
#pragma unroll
          for (int i = 0; i < kBins / 32; i += kWarp) mine_taken[i + lane] = 0;
        } else {
          mine_taken[word] = 0;
        }
        __syncwarp();
      }
#pragma unroll
      for (int u = 0; u < N; ++u) {
        uint32_t met = __ballot_sync(~0u, there[u] != 0);
        while (met) {  // each iteration resolves one bin: its leader adds the sum
          const int leader = __ffs(met) - 1;
          const bool same = bin[u] == __shfl_sync(~0u, bin[u], leader);
          met &= ~__ballot_sync(~0u, same);
          const C all = ReduceLanes<kWarp>(same ? v[u] : Empty<kOp, C>(), [](C a, C b) { return Combined<kOp>(a, b); });
          if (same) v[u] = all, bin[u] = lane == leader ? bin[u] : -1;
        }
      }
      if (copies == 1) {
#pragma unroll
        for (int w = 0; w < kWideWarps; ++w) {  // constant barrier numbers; otherwise all 16 are reserved
          if (warp == w && !(first_turn && w == 0)) SyncThreadsApart(1 + w, 2 * kWarp);
        }
      }
#pragma unroll
      for (int u = 0; u < N; ++u) {
        C* const mine = sum + (first + bin[u]);
        if (bin[u] >= 0) *mine = Combined<kOp>(*mine, v[u]);
        __syncwarp();
      }
      if (copies == 1) {
#pragma unroll
        for (int w = 0; w < kWideWarps; ++w) {
          if (warp == w && !(last_turn && w == kWideWarps - 1)) SyncThreadsApart(1 + (w + 1) % kWideWarps, 2 * kWarp);
        }
      }
    }
  }

  // Adds updates [begin, end). load(k) loads update k, and take(loaded, &bin, &v) decodes it. The next loads are in
  // flight while updates are added. turn(k, n) is called before updates [k, k + n).
  template <class Turn, class Load, class Take>
  __device__ __forceinline__ void AddAll(uint32_t begin, uint32_t end, Turn turn, Load load, Take take) {
    const uint32_t adding = Adding(), step = adding * kBinAhead;
    if (threadIdx.x >= adding) return;
    decltype(load(begin)) next[kBinAhead];
#pragma unroll
    for (int u = 0; u < kBinAhead; ++u) {
      const uint32_t k = begin + u * adding + threadIdx.x;
      next[u] = {};
      if (k < end) next[u] = load(k);
    }
    for (uint32_t i = begin; i < end; i += step) {
      turn(i, step);
      int bin[kBinAhead];
      C v[kBinAhead];
#pragma unroll
      for (int u = 0; u < kBinAhead; ++u) {
        take(next[u], &bin[u], &v[u]);
        if (i + u * adding + threadIdx.x >= end) bin[u] = -1;
      }
#pragma unroll
      for (int u = 0; u < kBinAhead; ++u) {
        const uint32_t k = i + step + u * adding + threadIdx.x;
        if (k < end) next[u] = load(k);
      }
      Add(bin, v, i == begin, end - i <= step);
    }
  }

  // Calls emit(bin, step, totals) with the totals over the copies of bins bin, bin + step, .... Barriers before and
  // after.
  template <class Emit> __device__ __forceinline__ void ForEach(Emit emit) {
    __syncthreads();
    if constexpr (kFew) {
      const int lane = threadIdx.x % kWarp;
      for (int bin = threadIdx.x / kWarp; bin < bins; bin += kBinWarps) {
        C total = sum[bin * kBinThreads + lane];
#pragma unroll
        for (int i = 1; i < kBinThreads / kWarp; ++i) {
          total = Combined<kOp>(total, sum[bin * kBinThreads + i * kWarp + lane]);
        }
        const C totals[1] = {ReduceLanes<kWarp>(total, [](C a, C b) { return Combined<kOp>(a, b); })};
        if (lane == 0) emit(bin, 0, totals);
      }
    } else {
      const int threads = blockDim.x;
      for (int bin = threadIdx.x; bin < bins; bin += threads * kBinsAtOnce) {
        C totals[kBinsAtOnce];
#pragma unroll
        for (int u = 0; u < kBinsAtOnce; ++u) totals[u] = bin + u * threads < bins ? sum[bin + u * threads] : C(0);
        for (int w = 1; w < copies; ++w) {
#pragma unroll
          for (int u = 0; u < kBinsAtOnce; ++u) {
            if (bin + u * threads < bins) totals[u] = Combined<kOp>(totals[u], sum[w * bins + bin + u * threads]);
          }
        }
        emit(bin, threads, totals);
      }
    }
    __syncthreads();
  }
};

}  // namespace jaxkern
