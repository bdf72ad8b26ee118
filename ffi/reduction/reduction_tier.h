// Which kernel runs a row reduction: a pure function of the problem and the device, so that it can be
// asked from Python (jaxkern.tiers) and overridden by tests and benchmarks. Host only.
//
//     sub_warp   rows up to 512 B, or up to 128 elements: 4-32 lanes a row and four rows a lane group,
//                all loads before any of them is reduced
//     warp       a warp a row, of any width; where there are many, up to four, one after the other; short rows of
//                whole vectors two or four at once
//     block      a block a row, of any width: the streaming tier
//     split      few long rows: each over many blocks, in two launches (needs scratch)
//     column     the axis is not the last one: threads along the inner dimension; where that leaves too
//                few blocks, each column over several of them, in two launches (with scratch)
#pragma once

#include <cstdint>
#include <string_view>

#include "../common/device_traits.h"

namespace jaxkern {

enum class ReduceTier : int32_t { kAuto, kSubWarp, kWarp, kBlock, kSplit, kColumn };

constexpr std::string_view kReduceTierNames[] = {"auto", "sub_warp", "warp", "block", "split", "column"};
constexpr int kReduceTierCount = sizeof(kReduceTierNames) / sizeof(kReduceTierNames[0]);

// "warp" -> kWarp; false for an unknown name.
constexpr bool ParseReduceTier(std::string_view name, ReduceTier* tier) {
  for (int i = 0; i < kReduceTierCount; ++i) {
    if (kReduceTierNames[i] == name) {
      *tier = static_cast<ReduceTier>(i);
      return true;
    }
  }
  return false;
}

struct ReduceProblem {
  int64_t rows = 0, width = 0, inner = 1;
  int element_bytes = 4;
  bool integer = false;       // integers have fewer kernels
  bool masked = false;
  int misalignment = 0;       // of the array from 16, in bytes
  int64_t scratch_bytes = 0;  // for partial results
};

constexpr int kPartialBytes = 16;       // of a partial result, at most
constexpr int kSubWarpElements = 128;   // that a lane group holds one by one

// A row is 16-byte vectors throughout, none of them ragged.
constexpr bool WholeVectors(const ReduceProblem& p) {
  return p.misalignment == 0 && p.width * p.element_bytes % 16 == 0;
}
// And it is read as such in the sub-warp tier.
constexpr bool WholePacks(const ReduceProblem& p) { return !p.masked && WholeVectors(p); }

// Over how many blocks the split tier spreads a row, and the column tier a column; 1: none.
int64_t SplitParts(const ReduceProblem& p, const DeviceTraits& d);

// Whether the tier can run the problem at all.
bool ReduceTierFits(ReduceTier tier, const ReduceProblem& p, const DeviceTraits& d);

// The tier that runs it by default. Every problem has one.
ReduceTier ChooseReduceTier(const ReduceProblem& p, const DeviceTraits& d);

}  // namespace jaxkern
