// The calling convention of cross-entropy on the CPU. Knows neither XLA nor Python.
//
// Over the middle dimension of logits [outer, width, inner], for the label y of each row:
//
//     lse       log(sum(exp(x)))
//     loss      lse - (1 - s) x[y] - s mean(x) + z lse^2          s: label_smoothing, z: z_loss
//     gradient  g (p (1 + 2 z lse) - s / count - (1 - s) [y])     p = exp(x - lse), g: the row's weight
//
// Sums and means are over the elements that take part, `count` of them: those whose mask is true. An element
// that does not has the gradient 0; as the label it is the logarithm of 0, and the loss infinite. A row
// without a participant, or with nothing but -inf, has loss 0 and gradient 0. A label that is no class has
// loss 0 and gradient 0 if it equals `ignore`, else NaN for both. NaN and +inf in a row make both NaN.
//
// lse is kept as the largest logit and `total`, the sum of exp(x - largest): one number would have rounded
// away what tells probabilities apart where logits are large.
#pragma once

#include <cstdint>

#include "kernels/common/broadcast.h"
#include "../common/dtype.h"

namespace jaxkern {

// In the order of their names in Python: int8, int16, int32, int64, uint8, ...
enum class LabelType : int32_t { kS8, kS16, kS32, kS64, kU8, kU16, kU32, kU64 };

enum class LossPass : int32_t { kLoss, kGradient, kBoth };

struct CrossEntropyArgs {
  LossPass pass = LossPass::kLoss;
  DType dtype = DType::kF32;
  LabelType label_type = LabelType::kS32;
  int64_t outer = 0, width = 0, inner = 1;
  const void* logits = nullptr;
  const void* labels = nullptr;    // [outer, inner]
  const uint8_t* mask = nullptr;   // one byte an element, true = takes part; null = all do
  BroadcastView mask_view;
  double smoothing = 0, z_loss = 0;
  bool has_ignore = false;
  int64_t ignore = 0;              // the bits of the label; never a class
  // A number a row, float, or double for double. `loss`: written by every pass but kGradient; the other
  // three likewise, and read by kGradient.
  void* loss = nullptr;
  void* largest = nullptr;
  void* total = nullptr;
  void* count = nullptr;           // null without a mask
  const void* weight = nullptr;    // kGradient, kBoth
  void* gradient = nullptr;        // likewise; may be the logits
};

}  // namespace jaxkern
