// Fills an array at any address with a pattern of 8 bytes: Fill writes `bytes` bytes at `out`, once. Each thread writes
// kVectors vectors of 16 bytes.
#pragma once

#include "common/std.h"

namespace jaxkern {

template <int kThreads, int kVectors> __global__ void __launch_bounds__(kThreads)
    Fill(char* out, int64_t bytes, uint64_t pattern) {
  // The array is up to 15 bytes ahead of the first whole vector, the vectors, and up to 15 bytes after them.
  const int64_t ahead = min((16 - reinterpret_cast<uintptr_t>(out) % 16) % 16, static_cast<uintptr_t>(bytes));
  const int64_t vectors = (bytes - ahead) / 16, tail = ahead + vectors * 16;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const auto byte = [&](int64_t at) { return static_cast<char>(pattern >> (at % 8 * 8)); };
  // The pattern rotated to its phase at `ahead`.
  uint64_t turned = pattern;
  if (ahead % 8) turned = pattern >> (ahead % 8 * 8) | pattern << (64 - ahead % 8 * 8);
  const uint32_t low = static_cast<uint32_t>(turned), high = static_cast<uint32_t>(turned >> 32);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int64_t v = static_cast<int64_t>(blockIdx.x) * (kThreads * kVectors) + threadIdx.x + u * kThreads;
    if (v < vectors) __stcs(reinterpret_cast<uint4*>(out + ahead) + v, make_uint4(low, high, low, high));
  }
  if (thread < ahead) out[thread] = byte(thread);
  if (thread < bytes - tail) out[tail + thread] = byte(tail + thread);
}

}  // namespace jaxkern
