// Which kernel runs a softmax: a pure function of the problem and the device, so that it can be
// asked from Python (jaxkern.tiers) and overridden by tests and benchmarks. Host only. The widths below
// are what a tier can hold; ChooseSoftmaxTier takes some of them only for shorter rows.
//
//     sub_warp   rows up to 512 B: 1-32 lanes a row, several rows a lane group, in registers
//     warp       rows up to 2 KB: a warp a row, in registers
//     block      rows up to 64 KB: a block a row, in registers
//     cluster    sm_90: a row over the registers of 2-16 blocks, which exchange their (max, sum)
//     pipeline   sm_90: one block, or a cluster of up to 16, holds a row in shared memory, and
//                bulk copies refill it while the previous row is still being written
//     streaming  any row: a block reads it twice
//     split      few long rows: each over many blocks, in two launches (needs scratch)
//     column     the axis is not the last one: threads along the inner dimension
#pragma once

#include <cstdint>
#include <string_view>

#include "../common/device_traits.h"
#include "../common/dtype.h"

namespace jaxkern {

enum class SoftmaxTier : int32_t { kAuto, kSubWarp, kWarp, kBlock, kCluster, kPipeline, kStreaming, kSplit, kColumn };

constexpr std::string_view kSoftmaxTierNames[] = {"auto",     "sub_warp",  "warp",  "block", "cluster",
                                                  "pipeline", "streaming", "split", "column"};
constexpr int kSoftmaxTierCount = sizeof(kSoftmaxTierNames) / sizeof(kSoftmaxTierNames[0]);

// "warp" -> kWarp; false for an unknown name.
constexpr bool ParseSoftmaxTier(std::string_view name, SoftmaxTier* tier) {
  for (int i = 0; i < kSoftmaxTierCount; ++i) {
    if (kSoftmaxTierNames[i] == name) {
      *tier = static_cast<SoftmaxTier>(i);
      return true;
    }
  }
  return false;
}

struct SoftmaxProblem {
  int64_t rows = 0, width = 0, inner = 1;
  DType dtype = DType::kF32;
  bool log = false;            // log_softmax
  bool backward = false;
  int64_t scratch_bytes = 0;
  int misalignment = 0;        // of the first array from 128, in bytes
  bool aligned_alike = true;   // the other arrays have the same misalignment from 16
  bool masked = false;
  bool fused = false;          // see SoftmaxExtras: the warp, block and streaming tiers only
};

// Rows start their packs on a boundary of so many bytes at or before their first element.
constexpr int RowGrain(const SoftmaxProblem& p) { return p.width * SizeOf(p.dtype) >= 8192 ? 128 : 32; }

// 16-byte packs from the first such boundary to the end of a row, at most.
constexpr int64_t RowPacks(const SoftmaxProblem& p) {
  const int64_t bytes = p.width * SizeOf(p.dtype);
  int64_t align = RowGrain(p);
  while (bytes % align || p.misalignment % align) align /= 2;
  return (bytes + (RowGrain(p) - align) + 15) / 16;
}

// Whether the tier can run the problem at all.
bool SoftmaxTierFits(SoftmaxTier tier, const SoftmaxProblem& p, const DeviceTraits& d);

// The tier that runs it by default. Every problem has one.
SoftmaxTier ChooseSoftmaxTier(const SoftmaxProblem& p, const DeviceTraits& d);

}  // namespace jaxkern
