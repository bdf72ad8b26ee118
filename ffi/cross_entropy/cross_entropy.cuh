// Launching cross-entropy for one dtype: from CrossEntropyArgs and a tier to kernels. Each
// cross_entropy_<dtype>.cu instantiates LaunchLoss once, so that dtypes compile side by side.
#pragma once

#include <algorithm>

#include "../softmax/softmax.cuh"
#include "cross_entropy_column.cuh"
#include "cross_entropy_cuda.h"
#include "cross_entropy_pipeline.cuh"
#include "cross_entropy_registers.cuh"
#include "cross_entropy_rows.cuh"

namespace jaxkern {

constexpr int64_t kGradientPartPacks = 512;  // of a row, that a warp writes; a quarter where all together are few
constexpr int64_t kLossPartPacks = 2048;     // of a row split over blocks, at least

// Groups that live as long as the kernel: as many as fit the device, or as there are units.
inline int64_t PersistentBlocks(int64_t units, int groups, int per_sm, const Device& device) {
  return std::max<int64_t>(1, std::min(CeilDiv(units, groups), int64_t{per_sm} * device.sm_count));
}

template <class T, int kLanes, bool kMasked>
cudaError_t LaunchLossGroups(const LossParams& p, const Device& device, cudaStream_t stream) {
  LaunchShape shape;
  shape.threads = kLossGroupThreads;
  shape.blocks = PersistentBlocks(p.rows, kLossGroupThreads / kLanes, kLossGroupBlocks<T, kMasked>, device);
  return Launch(LossRows<T, kLanes, kMasked>, shape, stream, p);
}

template <class T, bool kMasked>
cudaError_t LaunchLossBlocks(LossParams p, const CrossEntropyArgs& args, bool split, const Device& device, cudaStream_t stream) {
  const int64_t packs = CeilDiv(p.width, kVector<T>);
  LaunchShape shape;
  // Several blocks of few warps a multiprocessor: what one of them waits for at a row's end, the others do not.
  shape.threads = static_cast<int>(std::min<int64_t>(kLossStreamThreads, std::max<int64_t>(128, CeilDiv(packs, 4 * kWarp) * kWarp)));
  if (split) {
    const int64_t room = args.scratch_bytes / kLossPartialBytes / p.rows;
    const int64_t useful = std::min(CeilDiv(packs, kLossPartPacks), CeilDiv(4 * device.sm_count, p.rows));
    p.parts = static_cast<int>(std::max<int64_t>(1, std::min(room, useful)));
    if (p.parts > 1) p.partials = args.scratch;
  }
  shape.blocks = p.rows * p.parts;
  const cudaError_t e = Launch(LossRows<T, kWholeBlock, kMasked>, shape, stream, p);
  if (e != cudaSuccess || !p.partials) return e;
  shape.threads = kLossGroupThreads;
  shape.blocks = CeilDiv(p.rows, kLossGroupThreads / kWarp);
  return Launch(LossMerge<T>, shape, stream, p);
}

template <class T, int kLanes, bool kMasked>
cudaError_t LaunchGradient(LossParams p, const Device& device, cudaStream_t stream) {
  constexpr int kGroups = kLossGroupThreads / kLanes;
  const int64_t packs = CeilDiv(p.width, kVector<T>);
  // Four times as many units as run at a time, if there are enough packs: the last ones leave few multiprocessors idle.
  const int64_t wanted = CeilDiv(4 * kLossGroupBlocks<T, kMasked> * kGroups * int64_t{device.sm_count}, p.rows);
  p.parts = static_cast<int>(std::max(CeilDiv(packs, kGradientPartPacks),
                                      std::min(CeilDiv(packs, kGradientPartPacks / 4), wanted)));
  LaunchShape shape;
  shape.threads = kLossGroupThreads;
  shape.blocks = CeilDiv(p.rows * p.parts, kGroups);
  return Launch(GradientRows<T, kLanes, kMasked>, shape, stream, p);
}

template <class T, bool kMasked>
cudaError_t LaunchColumns(const LossParams& p, bool loss, bool gradient, bool aligned, const Device& device, cudaStream_t stream) {
  const auto go = [&](auto pack) {
    constexpr int N = decltype(pack)::value;
    LaunchShape shape;
    shape.threads = kWarp * kLossColumnWarps;
    shape.blocks = p.rows * CeilDiv(p.inner, kWarp * N);
    if (loss) {
      const cudaError_t e = Launch(LossColumn<T, N, kMasked>, shape, stream, p);
      if (e != cudaSuccess || !gradient) return e;
    }
    const int64_t useful = std::min(CeilDiv(p.width, 4 * kLossColumnWarps), CeilDiv(8 * device.sm_count, shape.blocks));
    shape.blocks_y = static_cast<int>(std::min<int64_t>(std::max<int64_t>(useful, 1), 65535));
    return Launch(GradientColumn<T, N, kMasked>, shape, stream, p);
  };
  if constexpr (!kMasked && sizeof(T) < 8) {
    if (aligned && p.inner % kVector<T> == 0) return go(kInt<kVector<T>>);
  }
  return go(kInt<1>);
}

// Loss and gradient with the row in the registers of a group or a block.
template <class T, bool kRagged>
cudaError_t LaunchBothRegisters(const BothParams& p, int64_t packs, LossTier tier, cudaStream_t stream) {
  const auto go = [&](auto lanes, auto held, int threads) {
    constexpr int kLanes = decltype(lanes)::value;
    LaunchShape shape;
    shape.threads = threads;
    shape.blocks = kLanes == kBlockLanes ? p.rows : CeilDiv(p.rows, kWarpTierThreads / std::max(kLanes, 1));
    return Launch(SoftmaxRegisters<BothForward<T>, BothRow<T, kRagged>, kLanes, decltype(held)::value, 1>, shape, stream, p);
  };
  if (tier == LossTier::kSubWarp && packs <= 32) return go(kInt<8>, kInt<4>, kWarpTierThreads);
  if (tier == LossTier::kSubWarp && packs <= 64) return go(kInt<16>, kInt<4>, kWarpTierThreads);
  if (packs <= 128) return go(kInt<kWarp>, kInt<4>, kWarpTierThreads);
  // 16 bit: 4 packs a thread in 64 registers; 8 take 105, and half of the threads are not there to hide what a row waits for.
  if constexpr (sizeof(T) == 2) return go(kInt<kBlockLanes>, kInt<4>, static_cast<int>(CeilDiv(packs, 4 * kWarp) * kWarp));
  else return WithHeld(packs, [&](auto held, int threads) { return go(kInt<kBlockLanes>, held, threads); });
}

// The smallest cluster whose blocks hold a row in shared memory.
template <class T, int kGroups>
cudaError_t LaunchBothPipeline(const LossParams& p, const Device& device, cudaStream_t stream) {
  constexpr auto kKernel = BothPipeline<T, kGroups>;
  const int64_t packs = std::max<int64_t>(1, p.width / kVector<T>);
  int log_size = 0;
  while (CeilDiv(CeilDiv(packs, 1 << log_size), kLossChunkPacks) > kLossSlots) ++log_size;
  LaunchShape shape;
  shape.threads = kLossPipelineThreads;
  shape.shared_bytes = kLossPipelineBytes<T, kGroups>;
  shape.cluster = 1 << log_size;
  cudaError_t e = AllowSharedMemory<kKernel>(device, shape.shared_bytes);
  if (e == cudaSuccess) e = AllowLargeClusters<kKernel>(device);
  int clusters = 0;
  if (e == cudaSuccess) e = ActiveClusters<kKernel>(device, log_size, shape, &clusters);
  if (e != cudaSuccess) return e;
  // Few rows a cluster: all consumers together on each.
  if constexpr (kGroups > 1) {
    if (p.rows < 4 * clusters) return LaunchBothPipeline<T, 1>(p, device, stream);
  }
  shape.blocks = std::min<int64_t>(clusters, p.rows) << log_size;
  return Launch(kKernel, shape, stream, p, static_cast<int>(CeilDiv(packs, shape.cluster)));
}

template <class T>
cudaError_t LaunchLoss(const CrossEntropyArgs& args, const LossProblem& problem, LossTier tier, const Device& device,
                       cudaStream_t stream) {
  constexpr int N = kVector<T>;
  LossParams p = {};
  p.logits = args.logits, p.gradient = args.gradient, p.labels = args.labels, p.weight = args.weight;
  p.loss = args.loss, p.largest = args.largest, p.total = args.total, p.count = args.count;
  p.rows = args.outer, p.width = args.width, p.inner = args.inner;
  p.misalignment = problem.misalignment / static_cast<int>(sizeof(T));
  p.parts = 1;
  p.ragged = problem.misalignment != 0 || p.width % N != 0;
  const int tensors = args.pass == LossPass::kLoss ? 1 : 2;
  p.exceeds_l2 = args.outer * args.width * args.inner * int64_t{sizeof(T)} * tensors > device.l2_bytes;
  p.has_ignore = args.has_ignore, p.ignore = args.ignore, p.label_type = args.label_type;
  p.wide = {args.smoothing, 1 - args.smoothing, args.z_loss, static_cast<double>(args.width)};
  p.single = {static_cast<float>(p.wide.soft), static_cast<float>(p.wide.hard), static_cast<float>(p.wide.z_loss),
              static_cast<float>(p.wide.width)};
  p.mask = args.mask, p.mask_view = args.mask_view;

  const bool loss = args.pass != LossPass::kGradient, gradient = args.pass != LossPass::kLoss;
  if (tier == LossTier::kColumn) {
    const bool aligned = problem.misalignment == 0 && problem.aligned_alike;
    return args.mask ? LaunchColumns<T, true>(p, loss, gradient, aligned, device, stream)
                     : LaunchColumns<T, false>(p, loss, gradient, aligned, device, stream);
  }
  if constexpr (sizeof(T) < 8) {
    if (loss && gradient && tier != LossTier::kStreaming && tier != LossTier::kSplit) {
      if (tier == LossTier::kPipeline) return LaunchBothPipeline<T, 2>(p, device, stream);
      BothParams both = {};
      both.input[0] = p.logits, both.out = p.gradient, both.rows = p.rows, both.width = p.width, both.inner = 1;
      both.misalignment = p.misalignment, both.grain = N, both.exceeds_l2 = p.exceeds_l2, both.loss = p;
      if (p.ragged) return LaunchBothRegisters<T, true>(both, RaggedLossPacks(problem), tier, stream);
      return LaunchBothRegisters<T, false>(both, p.width / N, tier, stream);
    }
  }
  const int64_t packs = CeilDiv(p.width, N);
  if (loss) {
    cudaError_t e;
    const bool split = tier == LossTier::kSplit;
    if (tier == LossTier::kWarp) {
      e = args.mask ? LaunchLossGroups<T, 32, true>(p, device, stream) : LaunchLossGroups<T, 32, false>(p, device, stream);
    } else if (tier != LossTier::kSubWarp) {
      e = args.mask ? LaunchLossBlocks<T, true>(p, args, split, device, stream)
                    : LaunchLossBlocks<T, false>(p, args, split, device, stream);
    } else if constexpr (sizeof(T) < 8) {
      e = packs <= 32 ? LaunchLossGroups<T, 8, false>(p, device, stream) : LaunchLossGroups<T, 16, false>(p, device, stream);
    } else {
      e = cudaErrorInvalidValue;
    }
    if (e != cudaSuccess || !gradient) return e;
  }
  if (args.mask) return LaunchGradient<T, 32, true>(p, device, stream);
  if constexpr (sizeof(T) < 8) {
    if (tier == LossTier::kSubWarp) {
      return packs <= 32 ? LaunchGradient<T, 8, false>(p, device, stream) : LaunchGradient<T, 16, false>(p, device, stream);
    }
  }
  return LaunchGradient<T, 32, false>(p, device, stream);
}

}  // namespace jaxkern
