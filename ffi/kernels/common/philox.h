// Random bits from a counter: Philox4x32-7 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers:
// As Easy as 1, 2, 3", 2011: the fastest of the variants that pass their tests (BigCrush). The same bits on the CPU, on
// CUDA and in jaxkern/_ops/softmax/dropout.py.
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

}  // namespace jaxkern
