// RMSNorm and LayerNorm that write 8 bits per element: norm + quantisation in one kernel.
//
//     NormForward<..., NormQuantize<Q, kSpan, epilogue>>          rows that fit the registers of a few threads
//     NormQuantizeStream<Norm<...>, N, Q, kGiven, epilogue>       any row, block of columns and address
//
// y, the result of the norm (and of the epilogue) in float, is never rounded to another type:
//
//     scale = max|y| * (1 / most),  q = round(y * (most / max|y|))   per row, or per block of neighbouring columns
//     q = round(y * (1 / given)),  scale = max|y| of the row         kGiven
//
// Q and `most` are as in quantize/types.cuh. kSpan: the lanes of a warp that share a scale, a power of two, and have one pack
// each of its columns; 0: a row has one scale; -1: kGiven. Memory traffic: each element is read once and written once; of
// NormQuantizeStream read three times, mostly from L2 and L1.
#pragma once

#include "../quantize/types.cuh"
#include "epilogue.cuh"
#include "forward.cuh"
#include "stream.cuh"

namespace jaxkern {

template <class Params> struct NormQuantizeParams : Params {  // `y` is q
  const float* given;                                         // null without kGiven
  float* scale_of_q;                                          // [rows][width / block], or [rows]
  int64_t block;                                              // columns that share a scale
};
static_assert(sizeof(NormQuantizeParams<NormParams>) == 96 + 24, "plan.py lays it out");

constexpr int kNormQuantizeHeld = 32;

template <class Q, int kSpan, class E = NoEpilogue> struct NormQuantize {
  using Params = NormQuantizeParams<typename E::Params>;
  static constexpr bool kQuantizes = true;

  // Words of registers for a thread's `elements` of a row, which are kept until the largest of the row is known; 0 if they
  // are computed again instead.
  static constexpr int Held(int elements) { return kSpan == 0 && elements <= kNormQuantizeHeld ? elements : 0; }

  template <int N, class C>
  static __device__ __forceinline__ void Apply(const Params& p, int64_t row, int64_t column, C (&v)[N]) {
    E::Apply(p, row, column, v);
  }

  // Writes a row. A thread has the packs i with has(i), and normalise(i, v) computes one. All threads of the warp
  // (kLanes = 0: of the block) take part, also those whose row is not `live`, because it does not exist. kLanes = 0: called
  // once, and contains a barrier.
  template <int N, int kLanes, int kThreads, int kPacks, class Has, class Normalise>
  static __device__ __forceinline__ void Store(const Params& p, int64_t row, bool live, int lane, const Has& has,
                                               const Normalise& normalise) {
    constexpr int kGroup = kLanes == 0 ? kThreads : kLanes;
    constexpr bool kHeld = Held(kPacks * N) > 0;
    uint8_t* const q = static_cast<uint8_t*>(p.y) + row * p.width;
    const auto mine = [&](int i) { return live && has(i); };
    // Without operands to read, rows that do not exist are computed too: a branch would keep packs' loads from overlapping.
    const auto computed = [&](int i) { return (live || std::is_same_v<E, NoEpilogue>) && has(i); };
    const auto write = [&](int i, const float (&v)[N], float factor) {
      StoreQuantized<Q, (kSpan >= 0)>(q + (lane + i * kGroup) * N, v, factor);
    };
    if constexpr (kSpan > 0) {
      // kOnce blocks at a time: their maxima are reduced together, after which kEach lanes have the same one of them, compute
      // its factor and scale, and send the factor to the other lanes of the block.
      constexpr int kMost = kPacks * N <= kNormQuantizeHeld ? kNormQuantizeHeld : kNormQuantizeHeld / 2;  // elements
      constexpr int kOnce = std::min(std::min(PowerOfTwo(kPacks), kMost / N), kSpan);
      constexpr int kEach = kSpan / kOnce;
      const int in_block = lane % kSpan, start = threadIdx.x % kWarp - in_block;
      float* const scales = p.scale_of_q + row * (static_cast<int>(p.width) / (kSpan * N));
#pragma unroll
      for (int from = 0; from < kPacks; from += kOnce) {
        float v[kOnce][N];
        uint32_t largest[kOnce];
#pragma unroll
        for (int k = 0; k < kOnce; ++k) {
#pragma unroll
          for (int j = 0; j < N; ++j) v[k][j] = 0;
          if (from + k < kPacks && computed(from + k)) normalise(from + k, v[k]);
          largest[k] = Largest(v[k]);
        }
        const uint32_t own = ReduceLanesApart<kSpan>(largest, LargerOf());
        const float factor = QuantizeFactor<Q>(own);
        const int of = from + in_block / kEach;
        if (in_block % kEach == 0 && of < kPacks && mine(of)) {
          scales[(lane + of * kGroup) / kSpan] = QuantizeScale<Q>(own);
        }
#pragma unroll
        for (int k = 0; k < kOnce; ++k) {
          const float factor_of_k = __shfl_sync(0xffffffffu, factor, start + k * kEach);
          if (from + k < kPacks && mine(from + k)) write(from + k, v[k], factor_of_k);
        }
      }
    } else {
      float y[kHeld ? kPacks : 1][N];
      float factor = kSpan < 0 ? GivenFactor(p.given) : 0.0f;
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (!computed(i)) continue;
        float (&v)[N] = y[kHeld ? i : 0];
        normalise(i, v);
        largest = max(largest, Largest(v));
        if (kSpan < 0 && mine(i)) write(i, v, factor);
      }
      largest = LargestOfLanes<(kLanes == 0 ? kWarp : kLanes)>(largest);
      if constexpr (kLanes == 0 && kThreads > kWarp) {
        __shared__ uint32_t room[kThreads / kWarp];
        largest = ReduceWarps<kWarp>(
            largest, room, kThreads / kWarp, 0u, [] { __syncthreads(); },
            [&](uint32_t own) { return LargestOfLanes<kWarp>(own); });
      }
      if (live && lane == 0) p.scale_of_q[row] = kSpan < 0 ? __uint_as_float(largest) : QuantizeScale<Q>(largest);
      if constexpr (kSpan == 0) {
        factor = QuantizeFactor<Q>(largest);
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          if (!mine(i)) continue;
          float (&v)[N] = y[kHeld ? i : 0];
          if constexpr (!kHeld) normalise(i, v);
          write(i, v, factor);
        }
      }
    }
  }
};

// `blocks` blocks walk over the rows. A block of threads computes the statistics of a row; then a warp has a block of columns
// at a time, or all warps the row. Packs of N elements do not cross the end of a block of columns.
template <class Op, int N, class Q, bool kGiven, class E = NoEpilogue>
__global__ void __launch_bounds__(kNormStreamThreads)
    NormQuantizeStream(const __grid_constant__ NormQuantizeParams<typename E::Params> p) {
  using C = typename Op::C;
  constexpr int kWarps = kNormStreamThreads / kWarp;
  __shared__ uint32_t room[kWarps];
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  const bool whole = p.block == p.width;
  const int team = whole ? kNormStreamThreads : kWarp, member = threadIdx.x % team, teams = kNormStreamThreads / team;
  const int64_t blocks = p.width / p.block;
  uint8_t* const q = static_cast<uint8_t*>(p.y);
  for (int64_t row = blockIdx.x; row < p.rows; row += p.blocks) {
    const int64_t first = row * p.width;
    const StreamedRow<Op, N, E> of(p, row, policy);
    // As often for all warps, which reduce together.
    for (int64_t from = 0; from < blocks; from += teams) {
      const int64_t own = from + threadIdx.x / team;
      const int64_t begin = own * p.block, end = own < blocks ? begin + p.block : begin;
      uint32_t largest = 0;
      for (int64_t c = begin + member * N; c < end; c += team * N) {
        C v[N];
        of.Normalise(c, v);
        largest = max(largest, Largest(v));
      }
      largest = LargestOfLanes<kWarp>(largest);
      if (whole) {
        largest = ReduceWarps<kWarp>(
            largest, room, kWarps, 0u, [] { __syncthreads(); },
            [&](uint32_t mine) { return LargestOfLanes<kWarp>(mine); });
      }
      if (member == 0 && begin < end) {
        p.scale_of_q[row * blocks + own] = kGiven ? __uint_as_float(largest) : QuantizeScale<Q>(largest);
      }
      const float factor = kGiven ? GivenFactor(p.given) : QuantizeFactor<Q>(largest);
      for (int64_t c = begin + member * N; c < end; c += team * N) {
        C v[N];
        of.Normalise(c, v);
        StoreQuantized<Q, !kGiven>(q + first + c, v, factor);
      }
    }
  }
}

}  // namespace jaxkern
