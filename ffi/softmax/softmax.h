// The calling convention of the softmax family, shared by the CPU and the CUDA kernels: softmax,
// log-softmax and the gradient of each. Knows neither XLA nor Python.
//
//     forward    softmax       y  = exp(x - max) / sum(exp(x - max))
//                log_softmax   y  = x - max - log(sum(exp(x - max)))
//     gradient   softmax       dx = y * (g - sum(y * g))
//                log_softmax   dx = g - softmax(x) * sum(g), in 16 bit g - exp(y) * sum(g)
//
// over the middle dimension of [outer, width, inner]. An element whose mask is false takes no part:
// its output is 0 (log_softmax: -inf), its gradient 0. A row without a single participant, or with
// nothing but -inf, is such a row of masked elements: never NaN. NaN and +inf propagate.
#pragma once

#include <cstdint>

#include "../common/broadcast.h"
#include "../common/dtype.h"
#include "softmax_tier.h"

namespace jaxkern {

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
  SoftmaxTier tier = SoftmaxTier::kAuto;
  // CUDA only: room for the partial results of the split tier, may be empty.
  void* scratch = nullptr;
  int64_t scratch_bytes = 0;
};

}  // namespace jaxkern
