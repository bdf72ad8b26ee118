// Which CUDA kernel runs a cross-entropy: a pure function of the problem and the device, so that it can be
// asked from Python (jaxkern.tiers) and overridden by tests and benchmarks. Host only.
//
//                loss                          gradient      both in one call
//     sub_warp   8 or 16 lanes a row           the same      rows up to 1 KB in registers
//     warp       a warp a row                  any row       rows up to 2 KB in registers
//     block      a block a row                 -             rows up to 64 KB (16 bit: 32 KB) in registers
//     pipeline   -                             -             sm_90: a row in the shared memory of 1-16 blocks,
//                                                            which bulk copies refill while it is written
//     streaming  a block a row                 as warp       the two, one after the other
//     split      several blocks a row          as warp       the two, one after the other
//     column     axes other than the last      the same      the two, one after the other
//
// Where loss and gradient come one after the other the logits are read twice, else once.
#pragma once

#include <cstdint>
#include <string_view>

#include "../common/device_traits.h"
#include "../common/dtype.h"

namespace jaxkern {

enum class LossPass : int32_t { kLoss, kGradient, kBoth };

enum class LossTier : int32_t { kAuto, kSubWarp, kWarp, kBlock, kPipeline, kStreaming, kSplit, kColumn };

constexpr std::string_view kLossPassNames[] = {"loss", "gradient", "both"};
constexpr std::string_view kLossTierNames[] = {"auto",     "sub_warp",  "warp",  "block",
                                               "pipeline", "streaming", "split", "column"};

// The position of a name among those of an enum; false for an unknown one.
template <class Enum, size_t n>
constexpr bool ParseLossName(std::string_view name, const std::string_view (&names)[n], Enum* value) {
  for (size_t i = 0; i < n; ++i) {
    if (names[i] == name) {
      *value = static_cast<Enum>(i);
      return true;
    }
  }
  return false;
}

struct LossProblem {
  LossPass pass = LossPass::kLoss;
  int64_t rows = 0, width = 0, inner = 1;
  DType dtype = DType::kF32;
  bool masked = false;
  int64_t scratch_bytes = 0;
  int misalignment = 0;       // of the logits from 16, in bytes
  bool aligned_alike = true;  // the gradient has the same
};

constexpr int64_t kLossPartialBytes = 32;  // of scratch, for a part of a row

// 16-byte vectors of a row, at most.
constexpr int64_t LossPacks(const LossProblem& p) { return p.width * SizeOf(p.dtype) / 16; }

// The same with vectors of which only a part is the row's, wherever it begins.
constexpr int64_t RaggedLossPacks(const LossProblem& p) {
  const int64_t n = 16 / SizeOf(p.dtype);
  const bool whole = p.misalignment == 0 && p.width % n == 0;
  return whole ? p.width / n : (p.width + 2 * n - 2) / n;
}

// Whether the tier can run the problem at all.
bool LossTierFits(LossTier tier, const LossProblem& p, const DeviceTraits& d);

// The tier that runs it by default. Every problem has one.
LossTier ChooseLossTier(const LossProblem& p, const DeviceTraits& d);

}  // namespace jaxkern
