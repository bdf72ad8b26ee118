// The choice of a softmax tier: see softmax_tier.h. The limits are those of the kernels in
// softmax_registers.cuh and softmax_pipeline.cuh; the preferences were measured (benchmarks/NOTES.md).
#include "softmax_tier.h"

namespace jaxkern {
namespace {

// Packs of a row that a tier can hold.
constexpr int64_t kSubWarpPacks = 32;       // a pack a lane
constexpr int64_t kWarpPacks = 32 * 4;      // 4 packs a lane
constexpr int64_t kBlockPacks = 512 * 8;    // 8 packs a thread, 512 threads
constexpr int64_t kFusedPacks = 512 * 4;   // the same, fused
constexpr int64_t kClusterBlocks = 16;
constexpr int64_t kClusterPacks = 512 * 4;  // a block of a cluster: 4 packs a thread, or 8
constexpr int64_t kRingBytes = 208 * 1024;  // of rows in a block's shared memory
constexpr int64_t kMaxGridY = 65535;

// Clusters, and the shared memory of a data-centre chip.
bool Hopper(const DeviceTraits& d) { return d.compute_capability >= 90 && d.shared_memory >= 227 * 1024; }

// No pack of a row is ragged.
bool Whole(const SoftmaxProblem& p) { return p.width * SizeOf(p.dtype) % 16 == 0 && p.misalignment % 16 == 0; }

int64_t Inputs(const SoftmaxProblem& p) { return p.backward ? 2 : 1; }

}  // namespace

bool SoftmaxTierFits(SoftmaxTier tier, const SoftmaxProblem& p, const DeviceTraits& d) {
  if (tier == SoftmaxTier::kAuto) return true;
  if (p.fused) {
    const bool registers = p.aligned_alike && p.dtype != DType::kF64 && p.inner == 1;
    if (tier == SoftmaxTier::kWarp) return registers && RowPacks(p) <= kWarpPacks;
    if (tier == SoftmaxTier::kBlock) return registers && RowPacks(p) <= kFusedPacks;
    return tier == SoftmaxTier::kStreaming && p.inner == 1;
  }
  if (tier == SoftmaxTier::kColumn) return true;  // a last axis is a column tile of width 1
  if (p.inner != 1) return false;
  const int64_t packs = RowPacks(p);
  switch (tier) {
    case SoftmaxTier::kSubWarp: return p.aligned_alike && packs <= kSubWarpPacks;
    case SoftmaxTier::kWarp: return p.aligned_alike && packs <= kWarpPacks;
    case SoftmaxTier::kBlock: return p.aligned_alike && packs <= kBlockPacks;
    case SoftmaxTier::kCluster:
      return Hopper(d) && p.aligned_alike && !p.masked && packs > kClusterBlocks &&
             packs <= kClusterBlocks * kClusterPacks * (Whole(p) ? 2 : 1);
    case SoftmaxTier::kPipeline:
      return Hopper(d) && p.aligned_alike && !p.masked && packs * 16 * Inputs(p) <= kClusterBlocks * kRingBytes;
    case SoftmaxTier::kStreaming: return true;
    case SoftmaxTier::kSplit: return p.aligned_alike && p.rows <= kMaxGridY && p.scratch_bytes >= 24 * p.rows;
    default: return false;
  }
}

SoftmaxTier ChooseSoftmaxTier(const SoftmaxProblem& p, const DeviceTraits& d) {
  if (p.fused) {
    for (const SoftmaxTier tier : {SoftmaxTier::kWarp, SoftmaxTier::kBlock}) {
      if (SoftmaxTierFits(tier, p, d)) return tier;
    }
    return SoftmaxTier::kStreaming;
  }
  if (p.inner != 1) return SoftmaxTier::kColumn;
  const auto fits = [&](SoftmaxTier tier) { return SoftmaxTierFits(tier, p, d); };
  const int64_t packs = RowPacks(p), inputs = Inputs(p);
  if (packs <= kSubWarpPacks && fits(SoftmaxTier::kSubWarp)) return SoftmaxTier::kSubWarp;
  if (packs <= 64 && fits(SoftmaxTier::kWarp)) return SoftmaxTier::kWarp;

  // Few long rows: all multiprocessors on each.
  const bool few = p.rows * 2 <= d.sm_count && packs >= 256;
  if (few && p.rows * kClusterBlocks < d.sm_count / 2 && packs * inputs >= 16384 && fits(SoftmaxTier::kSplit)) {
    return SoftmaxTier::kSplit;
  }
  if (few && packs * inputs <= 65536 && fits(SoftmaxTier::kCluster)) return SoftmaxTier::kCluster;

  // Exponentials by the byte: twice as many in 16 bit, none in the gradient of softmax. What has many is
  // better off where a thread holds raw packs and takes them when it writes: not in a cluster, which
  // keeps them in float.
  const bool many_powers = SizeOf(p.dtype) == 2 && (!p.backward || p.log);
  const int64_t block = p.backward && many_powers ? kBlockPacks : kBlockPacks / 2;
  if (packs <= block && fits(SoftmaxTier::kBlock)) return SoftmaxTier::kBlock;
  // A cluster leaves long ragged rows too many idle lanes. The gradient of log_softmax, with a power and two sums, wants
  // more registers than its blocks have, and in 16 bit a cluster of 16 blocks is as slow: the ring is faster, measured.
  const int64_t cluster = !p.backward                 ? 49152
                          : SizeOf(p.dtype) == 2      ? 8192
                          : !p.log                    ? 32768
                          : p.dtype == DType::kF64    ? 8192
                                                      : 0;
  if (Whole(p) && !many_powers && packs <= cluster && fits(SoftmaxTier::kCluster)) return SoftmaxTier::kCluster;
  if (fits(SoftmaxTier::kPipeline)) return SoftmaxTier::kPipeline;
  // Without Hopper's tiers, or masked.
  if (fits(SoftmaxTier::kBlock)) return SoftmaxTier::kBlock;
  return SoftmaxTier::kStreaming;
}

}  // namespace jaxkern
