// The calling convention of the row reductions on the CPU. Knows neither XLA nor Python.
//
//     sum, mean, max, min     logsumexp  log(sum(exp(x))), whatever the size of x, and what it is made of
//
// over the middle dimension of [outer, width, inner]; the result is [outer, inner]. An element whose
// mask is false takes no part. Where nothing takes part sum is 0, mean NaN, logsumexp -inf, and max and
// min are the value that any other beats: -inf and inf, or the integer type's least and greatest. NaN
// propagates.
//
// f16, bf16 and f32 are computed in float and added up in double between a few of each, f64 in double, integers
// exactly (sums modulo 2^n); one rounding at the end. Integer sums are 32 or 64 bits wide.
#pragma once

#include <cstdint>

#include "kernels/common/broadcast.h"

namespace jaxkern {

enum class ReduceOp : int32_t { kSum, kMean, kMax, kMin, kLogSumExp };
enum class ReduceType : int32_t { kF16, kBF16, kF32, kF64, kS8, kS16, kS32, kS64, kU8, kU16, kU32, kU64 };

constexpr bool IsInteger(ReduceType t) { return t >= ReduceType::kS8; }
constexpr int SizeOf(ReduceType t) {
  constexpr int kSizes[] = {2, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8};
  return kSizes[static_cast<int>(t)];
}

struct ReduceArgs {
  ReduceOp op = ReduceOp::kSum;
  ReduceType type = ReduceType::kF32;
  bool wide = false;  // an integer sum of 64 bits, else of 32; a 16-bit type's result as a float
  int64_t outer = 0, width = 0, inner = 1;
  const void* x = nullptr;
  void* out = nullptr;
  // Only of logsumexp, and only where they are wanted: of each row the largest element and the sum of
  // e^(x - largest), in the type that they are computed in. The sum is 0 where the largest is -inf, and the
  // largest itself where that is inf or NaN.
  void* largest = nullptr;
  void* total = nullptr;
  const uint8_t* mask = nullptr;  // one byte an element, true = takes part; null = all do
  BroadcastView mask_view;
};

}  // namespace jaxkern
