// logsumexp of 16-bit rows with a mask, which has a byte for each element: 1 for elements that take part.
//
//     MaskedLogSumExp<T, kStatistics>
//
// A warp loads four rows at once, two packs of 8 elements per lane, with their mask bytes. Masked elements become -inf in the packs as
// they were read, and maxima are taken two elements at a time. The maxima of the four rows are known to all lanes before the
// exponentials; the sums of the four rows then share the lanes in the steps that add them up. With kStatistics, the largest element
// and the sum of exp(x - largest) of each row are results, too: 0 where the largest is -inf, and the largest itself if it is inf or NaN.
//
// Memory traffic: x and the mask are read once, and one number, or three, are written for each row. Throughput depends on the
// number of instructions per element.
// On entry: rows have at most 64 packs and no other elements, x is aligned to 16 bytes, and the mask to 8.
#pragma once

#include "../common/broadcast.h"
#include "../common/exponential.cuh"
#include "../common/extremes.h"
#include "../common/pack.cuh"
#include "../common/reduce.cuh"

namespace jaxkern {

struct MaskedLogSumExpParams {
  const void* x;        // [rows, 8 * packs]
  const uint8_t* mask;  // the row with index r begins at mask_map(r)
  void* y;
  float *largest, *total;
  IndexMap mask_map;
  int64_t rows;  // below 2^32
  int32_t packs;
  bool exceeds_l2;
};

template <class T, bool kStatistics> __global__ void __launch_bounds__(128, 8)
    MaskedLogSumExp(const __grid_constant__ MaskedLogSumExpParams p) {
  constexpr int kWarps = 4, kRows = 4, kPacks = 2, N = 8;
  constexpr uint32_t kAll = 0xffffffffu,
                     kLowest = std::is_same_v<T, __half> ? 0xfc00fc00u : 0xff80ff80u;  // -inf, twice
  const int lane = threadIdx.x % kWarp;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kWarps * kRows) + threadIdx.x / kWarp;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  Pack<T, N> x[kRows][kPacks];
  uint2 taken[kRows][kPacks];

  // Lane u % kRows computes the place of the mask of row u for the whole warp.
  const int64_t mine = first + lane % kRows * kWarps;
  const int64_t mask_at = mine < p.rows ? p.mask_map.Below32Bits(static_cast<uint32_t>(mine)) : 0;
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    const int64_t row = first + u * kWarps;
    const uint8_t* const mask = p.mask + __shfl_sync(kAll, mask_at, u);
    const T* const from = static_cast<const T*>(p.x) + row * (p.packs * N);
    const int has = row < p.rows ? p.packs : 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int pack = lane + i * kWarp;
      taken[u][i] = {0, 0};
#pragma unroll
      for (int w = 0; w < N / 2; ++w) x[u][i].word[w] = kLowest;
      if (pack < has) {
        taken[u][i] = *reinterpret_cast<const uint2*>(mask + pack * N);
        x[u][i] = LoadVector<T, N>(from + pack * N, policy);
      }
    }
  }

  float largest[kRows], sum[kRows];
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    uint32_t most = kLowest;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int w = 0; w < N / 2; ++w) {
        // Each byte is replicated over the bits of its element.
        const uint32_t bytes = (w < N / 4 ? taken[u][i].x : taken[u][i].y) * 255;
        const uint32_t keep = __byte_perm(bytes, 0, w % 2 ? 0x3322 : 0x1100);
        x[u][i].word[w] = (x[u][i].word[w] & keep) | (kLowest & ~keep);
        most = LargerOrNanOfPairs<T>(most, x[u][i].word[w]);
      }
    }
    Pack<T, 2> pair;
    pair.word[0] = most;
    float two[2];
    Unpack(pair, two);
    largest[u] = LargerOrNan(two[0], two[1]);
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) largest[u] = LargerOrNan(largest[u], __shfl_xor_sync(kAll, largest[u], step));
  }
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    const float base = Base(largest[u]);
    float e[kPacks * N];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float v[N];
      Unpack(x[u][i], v);
#pragma unroll
      for (int j = 0; j < N; ++j) e[i * N + j] = ExpDifference<T>(v[j], base);
    }
    sum[u] = Fold(e, SumOf());
  }

  // The first steps halve the number of rows of a lane; then lane u has row u, in the order of the bits of u.
  int own = 0, rows = kRows;
#pragma unroll
  for (int bit = 1; bit < kRows; bit *= 2) {
    rows /= 2;
    const bool upper = lane & bit;
    own += upper ? rows : 0;
#pragma unroll
    for (int u = 0; u < rows; ++u) {
      const float keep = upper ? sum[u + rows] : sum[u], give = upper ? sum[u] : sum[u + rows];
      sum[u] = keep + __shfl_xor_sync(kAll, give, bit);
      largest[u] = upper ? largest[u + rows] : largest[u];
    }
  }
#pragma unroll
  for (int step = kRows; step < kWarp; step *= 2) sum[0] += __shfl_xor_sync(kAll, sum[0], step);
  const int64_t row = first + own * kWarps;
  if (lane >= kRows || row >= p.rows) return;

  // All terms have the factor that ExpDifference describes.
  const float most = largest[0], excess = LogOfExcess<T>(most);
  const bool finite = most - most == 0.0f;
  static_cast<T*>(p.y)[row] = FromCompute<T>(finite ? most + (logf(sum[0]) - excess * kLn2) : most);
  if constexpr (kStatistics) {
    p.largest[row] = most;
    p.total[row] = finite ? sum[0] * Exp2Approx(-excess) : most < 0 ? 0.0f : most;
  }
}

}  // namespace jaxkern
