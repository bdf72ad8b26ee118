// The calling convention of the CPU kernels of the softmax family: softmax, log_softmax and the gradient of each.
//
//     forward    softmax       y  = exp(x - max) / sum(exp(x - max))
//                log_softmax   y  = x - max - log(sum(exp(x - max)))
//     gradient   softmax       dx = y * (g - sum(y * g))
//                log_softmax   dx = g - softmax(x) * sum(g), in 16 bit g - exp(y) * sum(g)
//
// over the middle dimension of [outer, width, inner]. An element whose mask is false takes no part:
// its output is 0 (log_softmax: -inf), its gradient 0. A row without a single participant, or with
// nothing but -inf, is such a row of masked elements: never NaN. NaN and +inf propagate.
//
// A fused call starts from scale * x + bias in place of x, masks what lies above the diagonal if it is causal,
// and drops elements of the result of softmax; its gradient starts from x, or without dropout from y:
//
//     forward    softmax       y  = kept / (1 - rate) * softmax(scale * x + bias)
//     gradient   softmax       ds = p * (h - sum(p * h)), p = softmax(scale * x + bias), h = kept / (1 - rate) * g,
//                              without dropout also from y, which is p
//                log_softmax   ds = g - p * sum(g)
//                              dx = scale * ds
#pragma once

#include <cstdint>

#include "kernels/common/broadcast.h"
#include "../common/dtype.h"

namespace jaxkern {

// What a fused call has beyond a mask. Its rows lie along the last dimension, inner is 1, and there are fewer
// than 2^31 of them.
struct SoftmaxExtras {
  const void* bias = nullptr;   // null: none
  bool bias_wide = false;       // in the type that is computed in, not in that of x
  BroadcastView bias_view;
  const void* scale = nullptr;  // null: 1. In the type that is computed in; the same along a row
  BroadcastView scale_view;
  int64_t matrix_rows = 1;      // the size of the dimension before the last
  FastDivmod matrix;            // by matrix_rows
  bool causal = false;          // the last row of a matrix takes all columns, each one before it one less
  const uint32_t* key = nullptr;  // null: no dropout. Two words, or for each row two, its number and one unused
  bool key_per_row = false;
  uint32_t threshold = 0;       // of 2^16: see philox.h
  double kept_inverse = 1;      // 1 / the fraction that is kept
  bool unscaled = false;        // the gradient is ds
  bool from_output = false;     // the gradient of softmax starts from y; of the extras it needs the scale and the limit only

  // The columns of row `row` that take part lie below this.
  int64_t Limit(uint32_t row, int64_t width) const {
    if (!causal) return width;
    const uint32_t in_matrix = row - matrix.Div(row) * matrix.divisor;
    const int64_t limit = int64_t{in_matrix} + 1 + width - matrix_rows;
    return limit < 0 ? 0 : limit;
  }
};

struct SoftmaxArgs {
  bool log = false;       // log_softmax
  bool backward = false;  // the gradient: a = y (log_softmax: x, in 16 bit y), b = g; else a = x
  DType dtype = DType::kF32;
  int64_t outer = 0, width = 0, inner = 1;
  const void* a = nullptr;
  const void* b = nullptr;
  void* out = nullptr;
  const uint8_t* mask = nullptr;  // one byte an element, true = takes part; null = all do
  BroadcastView mask_view;
  bool fused = false;
  SoftmaxExtras extras;
};

}  // namespace jaxkern
