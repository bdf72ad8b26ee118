// Quantisation of rows to 8 bits, with one scale per row, or with one that is given:
//
//     scale = max|x| / most,  q = round(x * (most / max|x|))    x, q [rows, width], scale [rows]
//     q = round(x * (1 / given)),  scale = max|x|               kGiven
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

#include "quantize/types.cuh"

namespace jaxkern {

constexpr int kQuantizeThreads = 256;  // threads of a block of several groups

struct QuantizeRows {
  const void* x;
  const float* given;  // null without kGiven
  void* q;
  float* scale;  // if kGiven: max|x|
  int64_t rows;
  int32_t width;
};
static_assert(sizeof(QuantizeRows) == 48, "plan.py lays it out");

// T: element type of x. Q: Int8 or Float8. kGroup, kVectors, kWidth: see above.
template <class T, class Q, int kGroup, int kVectors, int kWidth, bool kGiven>
__global__ void __launch_bounds__(kGroup > 32 ? kGroup : kQuantizeThreads)
    Quantize(const __grid_constant__ QuantizeRows p) {
  constexpr int kRows = kGroup > 32 ? 1 : kQuantizeThreads / kGroup;
  const int thread = threadIdx.x % kGroup;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kGroup;
  const bool live = kGroup > 32 || row < p.rows;  // lanes without a row take part in the reduction
  const T* x = static_cast<const T*>(p.x) + (live ? row * p.width : 0);

  Pack<T, kWidth> loaded[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int at = (u * kGroup + thread) * kWidth;
    loaded[u] = Pack<T, kWidth>{};
    if (live && at < p.width) loaded[u] = LoadElements<T, kWidth>(x + at);
  }

  uint32_t largest = Largest(loaded);
  largest = LargestOfLanes<(kGroup < 32 ? kGroup : 32)>(largest);
  if constexpr (kGroup > 32) {
    __shared__ uint32_t room[32];
    largest = ReduceWarps<32>(
        largest, room, kGroup / 32, 0u, [] { __syncthreads(); },
        [&](uint32_t mine) { return LargestOfLanes<32>(mine); });
  }

  if (!live) return;
  const float factor = kGiven ? GivenFactor(p.given) : QuantizeFactor<Q>(largest);
  if (thread == 0) p.scale[row] = kGiven ? __uint_as_float(largest) : QuantizeScale<Q>(largest);

  uint8_t* q = static_cast<uint8_t*>(p.q) + row * p.width;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int at = (u * kGroup + thread) * kWidth;
    if (at >= p.width) continue;
    float v[kWidth];
    Unpack(loaded[u], v);
    StoreQuantized<Q, !kGiven>(q + at, v, factor);
  }
}

}  // namespace jaxkern
