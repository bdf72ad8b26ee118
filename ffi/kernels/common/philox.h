// Random bits from a counter: Philox4x32-7 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers:
// As Easy as 1, 2, 3", 2011: the fastest of the variants that pass their tests (BigCrush). The same bits on the CPU, on
// CUDA and in jaxkern/_core/draws.py.
//
// Dropout draws 16 bits per element. Block (column / 8, row) of the key's sequence holds the bits of 8 neighbouring elements
// of a row, the lower half of each word first. An element is kept if its bits, as a number, are not below a threshold.
#pragma once

#include "broadcast.h"
#include "std.h"

namespace jaxkern {

constexpr int kPhiloxRounds = 7;

struct PhiloxBlock {
  uint32_t word[4];
};

__device__ __forceinline__ PhiloxBlock Philox(uint32_t column_block, uint32_t row, uint32_t key0, uint32_t key1) {
  uint32_t c0 = column_block, c1 = row, c2 = 0, c3 = 0;
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ key0, n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(b), c3 = static_cast<uint32_t>(a);
    c0 = n0, c2 = n2;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

namespace lax {

// The 16 bits of an element at a place of a row, one of eight from `first` on, which a thread computes together: all but the last line is
// the same for them, and so computed once. The second block is needed if `first` is no multiple of 8.
__device__ __forceinline__ uint32_t draw(uint32_t place, uint32_t first, uint32_t row, uint32_t key0, uint32_t key1) {
  const PhiloxBlock one = Philox(first / 8, row, key0, key1), next = Philox(first / 8 + 1, row, key0, key1);
  uint32_t word[9] = {
      one.word[0], one.word[1], one.word[2], one.word[3], next.word[0], next.word[1], next.word[2], next.word[3], 0};
  for (int w = 0; w < 6; ++w) word[w] = first & 4 ? word[w + 2] : word[w];
  for (int w = 0; w < 5; ++w) word[w] = first & 2 ? word[w + 1] : word[w];
  for (int w = 0; w < 4; ++w) word[w] = first & 1 ? word[w] >> 16 | word[w + 1] << 16 : word[w];
  const uint32_t half = place - first;
  return half % 2 == 0 ? word[half / 2] & 0xFFFF : word[half / 2] >> 16;
}
__device__ __forceinline__ uint32_t draw(uint32_t place, uint32_t row, uint32_t key0, uint32_t key1) {
  return draw(place, place, row, key0, key1);
}

}  // namespace lax

}  // namespace jaxkern
