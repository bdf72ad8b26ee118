// The choice of a tier of cross-entropy: see cross_entropy_tier.h. The limits are those of the kernels.
#include "cross_entropy_tier.h"

namespace jaxkern {
namespace {

constexpr int64_t kSubWarpPacks = 16 * 4;
constexpr int64_t kWarpPacks = 32 * 4;
constexpr int64_t kBlockThreads = 512, kClusterBlocks = 16;
constexpr int64_t kRingBytes = 208 * 1024;

// Clusters, and the shared memory of a data-centre chip.
bool Hopper(const DeviceTraits& d) { return d.compute_capability >= 90 && d.shared_memory >= 227 * 1024; }

// A thread's registers hold so many vectors beside their exponentials, which in 16 bit take twice the room.
int64_t HeldPacks(const LossProblem& p) { return SizeOf(p.dtype) == 2 ? 4 : 8; }

}  // namespace

bool LossTierFits(LossTier tier, const LossProblem& p, const DeviceTraits& d) {
  if (tier == LossTier::kAuto || tier == LossTier::kColumn) return true;  // a last axis is a column tile of width 1
  if (p.inner != 1 || (p.pass != LossPass::kLoss && !p.aligned_alike)) return false;
  const int64_t packs = LossPacks(p);
  const bool in_registers = p.pass == LossPass::kBoth && !p.masked && p.dtype != DType::kF64;
  const bool narrow = p.dtype != DType::kF64 && !p.masked;
  switch (tier) {
    case LossTier::kSubWarp: return narrow && packs <= kSubWarpPacks;
    case LossTier::kWarp: return p.pass == LossPass::kBoth ? in_registers && RaggedLossPacks(p) <= kWarpPacks : true;
    case LossTier::kBlock:
      return p.pass == LossPass::kLoss || (in_registers && RaggedLossPacks(p) <= kBlockThreads * HeldPacks(p));
    case LossTier::kPipeline: return in_registers && Hopper(d) && packs * 16 <= kClusterBlocks * kRingBytes;
    case LossTier::kStreaming: return p.pass != LossPass::kGradient;
    case LossTier::kSplit:
      return p.pass != LossPass::kGradient && p.scratch_bytes >= 2 * kLossPartialBytes * p.rows;
    default: return false;
  }
}

LossTier ChooseLossTier(const LossProblem& p, const DeviceTraits& d) {
  const auto fits = [&](LossTier tier) { return LossTierFits(tier, p, d); };
  if (p.inner != 1 || !fits(LossTier::kWarp) && !fits(LossTier::kStreaming)) return LossTier::kColumn;
  const int64_t packs = LossPacks(p);
  if (fits(LossTier::kSubWarp)) return LossTier::kSubWarp;
  if (p.pass == LossPass::kGradient) return LossTier::kWarp;
  // Few long rows: all multiprocessors on each.
  const bool few = p.rows * 2 <= d.sm_count && packs >= 2048;
  if (p.pass == LossPass::kLoss) {
    if (few && fits(LossTier::kSplit)) return LossTier::kSplit;
    // A warp a row wants many more rows than there are warps, or short ones.
    const int64_t wanted = (packs <= 1024 ? 24 : 60) * int64_t{d.sm_count};
    return p.rows >= wanted ? LossTier::kWarp : LossTier::kBlock;
  }
  if (fits(LossTier::kWarp)) return LossTier::kWarp;
  if (few && p.rows * kClusterBlocks < d.sm_count / 2 && packs >= 16384 && fits(LossTier::kSplit)) return LossTier::kSplit;
  if (fits(LossTier::kBlock)) return LossTier::kBlock;
  if (fits(LossTier::kPipeline)) return LossTier::kPipeline;
  return fits(LossTier::kStreaming) ? LossTier::kStreaming : LossTier::kColumn;
}

}  // namespace jaxkern
