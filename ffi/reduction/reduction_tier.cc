// The choice of a reduction's tier: see reduction_tier.h. The limits are those of the kernels in
// reduction_kernels.cuh; the preferences were measured (benchmarks/NOTES.md).
#include "reduction_tier.h"

#include <algorithm>

namespace jaxkern {
namespace {

constexpr int64_t kBlocksWanted = 8;      // blocks a multiprocessor, where work is cut to make them
constexpr int64_t kPartPacks = 4096;      // of a row that is worth a block of the split tier
constexpr int64_t kPartRows = 64;         // of a column that are worth a block
constexpr int64_t kTileBytes = 512;       // that a block of the column tier is wide
constexpr int64_t kColumnBlocksAtATime = 4;
constexpr int64_t kMaxGridY = 65535;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t RowPacks(const ReduceProblem& p) { return CeilDiv(p.width * p.element_bytes, 16); }

// A thread counts the packs of a row, and the rows that have masks, in 32 bits.
bool CountsFit(const ReduceProblem& p, int64_t parts) {
  return RowPacks(p) / parts < (int64_t{1} << 31) - kPartPacks && (!p.masked || p.rows < int64_t{1} << 32);
}

}  // namespace

int64_t SplitParts(const ReduceProblem& p, const DeviceTraits& d) {
  const int64_t room = p.scratch_bytes / kPartialBytes / std::max<int64_t>(p.rows * p.inner, 1);
  if (p.inner == 1) {
    const int64_t wanted = kBlocksWanted * d.sm_count / std::max<int64_t>(p.rows, 1);
    return std::max<int64_t>(1, std::min({room, wanted, RowPacks(p) / (kPartPacks / 4), kMaxGridY}));
  }
  // The fewest parts that keep nine tenths of the blocks busy which all multiprocessors run at a time, to the last; or
  // else those that come nearest.
  const int64_t tiles = std::max<int64_t>(1, p.rows * CeilDiv(p.inner * p.element_bytes, kTileBytes));
  const int64_t most = std::min({room, p.width / kPartRows, kMaxGridY}), slots = kColumnBlocksAtATime * d.sm_count;
  int64_t best = 1;
  double best_busy = 0;
  for (int64_t times = CeilDiv(tiles, slots), last = times + 3; times <= last; ++times) {
    const int64_t parts = std::max<int64_t>(1, std::min(most, times * slots / tiles)), blocks = parts * tiles;
    const double busy = static_cast<double>(blocks) / static_cast<double>(CeilDiv(blocks, slots) * slots);
    if (busy > best_busy) best = parts, best_busy = busy;
    if (best_busy >= 0.9) break;
  }
  return best;
}

bool ReduceTierFits(ReduceTier tier, const ReduceProblem& p, const DeviceTraits& d) {
  if (tier == ReduceTier::kAuto || tier == ReduceTier::kColumn) return true;  // a last axis is a column of width 1
  if (p.inner != 1) return false;
  switch (tier) {
    case ReduceTier::kSubWarp:
      return p.width <= kSubWarpElements || (!p.integer && WholePacks(p) && RowPacks(p) <= 32);
    case ReduceTier::kWarp:
    case ReduceTier::kBlock: return CountsFit(p, 1);
    case ReduceTier::kSplit: return SplitParts(p, d) > 1 && CountsFit(p, SplitParts(p, d));
    default: return false;
  }
}

ReduceTier ChooseReduceTier(const ReduceProblem& p, const DeviceTraits& d) {
  if (p.inner != 1) return ReduceTier::kColumn;
  if (ReduceTierFits(ReduceTier::kSubWarp, p, d)) return ReduceTier::kSubWarp;
  const int64_t packs = RowPacks(p);
  // Rows that do not give every multiprocessor two blocks, or not evenly.
  if (p.rows <= kBlocksWanted * d.sm_count && packs >= kPartPacks && ReduceTierFits(ReduceTier::kSplit, p, d)) {
    return ReduceTier::kSplit;
  }
  // A warp has at most 8 packs a lane in flight.
  const bool many = p.rows >= 32 * d.sm_count;
  const ReduceTier tier = packs <= (many ? 256 : 64) ? ReduceTier::kWarp : ReduceTier::kBlock;
  return ReduceTierFits(tier, p, d) ? tier : ReduceTier::kColumn;
}

}  // namespace jaxkern
