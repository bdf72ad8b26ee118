// Launching the fused softmax kernels for one dtype; as softmax.cuh does it for the others. Each
// softmax_fused_<dtype>.cu instantiates LaunchSoftmaxFused once. double has the streaming tier alone.
#pragma once

#include "softmax.cuh"
#include "softmax_fused_ops.cuh"

namespace jaxkern {

constexpr int kFusedPacks = 4;  // a thread, at most

// Whether taking the rows of matrices by runs lets an operand that broadcasts over matrices stay in L2.
inline RowOrder ChooseOrder(const SoftmaxArgs& args, bool exceeds_l2) {
  RowOrder order;
  order.matrix_rows = static_cast<uint32_t>(args.extras.matrix_rows);
  const int64_t matrices = args.outer / order.matrix_rows;
  const auto repeats = [](const void* operand, const BroadcastView& view) {
    return operand != nullptr && view.axis_stride == 1 && view.outer_map.rank > 1 && view.outer_map.stride[0] != 0;
  };
  order.by_runs = exceeds_l2 && matrices > 1 && order.matrix_rows % RowOrder::kRun == 0 &&
                  (repeats(args.mask, args.mask_view) || repeats(args.extras.bias, args.extras.bias_view));
  if (order.by_runs) order.turn = FastDivmod(static_cast<uint32_t>(matrices * RowOrder::kRun));
  return order;
}

// Calls run with the first of the sets that has all the features; false: none has.
template <uint32_t... kSets, class Run> bool WithFeatures(FeatureSets<kSets...>, uint32_t features, Run run) {
  return (((features & ~kSets) == 0 && (run(std::integral_constant<uint32_t, kSets>()), true)) || ...);
}

template <class Op>
cudaError_t LaunchFusedOp(const SoftmaxArgs& args, const SoftmaxProblem& problem, SoftmaxTier tier,
                          const Device& device, cudaStream_t stream) {
  using T = typename Op::T;
  constexpr int N = kVector<T>;
  if (args.outer > INT32_MAX) return cudaErrorInvalidValue;
  FusedParams p = {};
  static_cast<SoftmaxParams&>(p) = MakeParams<Op>(args, problem, device);
  p.extras = args.extras;
  p.order = ChooseOrder(args, p.exceeds_l2);
  // No pack is ragged, of the mask and the bias neither.
  const auto aligned = [](const void* operand) { return reinterpret_cast<uintptr_t>(operand) % 16 == 0; };
  const bool whole = problem.misalignment % 16 == 0 && p.width % N == 0 && aligned(p.mask) && aligned(p.extras.bias);
  const uint32_t bias = p.extras.bias_wide ? kMayWideBias : kMayBias;
  const uint32_t features = (p.extras.bias ? bias : 0) | (p.mask ? kMayMask : 0) |
                            (p.extras.causal ? kMayCausal : 0) | (p.extras.key ? kMayDrop : 0);
  if (features & ~Op::kMay) return cudaErrorInvalidValue;
  LaunchShape shape;
  if (tier == SoftmaxTier::kStreaming) {
    shape.blocks = p.rows;
    shape.threads = kStreamThreads;
    if (problem.aligned_alike) {
      return Launch(SoftmaxStreaming<Op, FusedRow<Op, N, Op::kMay, int64_t>>, shape, stream, p);
    }
    return Launch(SoftmaxStreaming<Op, FusedRow<Op, 1, Op::kMay, int64_t>>, shape, stream, p);
  }
  if constexpr (sizeof(T) < 8) {
    const auto run = [&](auto may, auto ragged, int64_t packs) {
      constexpr bool kRagged = decltype(ragged)::value;
      using RowOf = FusedRow<Op, N, decltype(may)::value, int, kRagged>;
      if (tier == SoftmaxTier::kBlock) {
        shape.threads = static_cast<int>(CeilDiv(CeilDiv(packs, kFusedPacks), kWarp) * kWarp);
        shape.blocks = p.rows;
        return Launch(SoftmaxRegisters<Op, RowOf, kBlockLanes, kFusedPacks, 1>, shape, stream, p);
      }
      shape.threads = kWarpTierThreads;
      if constexpr (!kRagged) {
        // Two short rows a warp: half the steps to reduce a row, and a causal one ends nearer to its limit.
        if (packs <= kWarp / 2 * kFusedPacks) {
          shape.blocks = CeilDiv(p.rows, kWarpTierThreads / kWarp * 2);
          return Launch(SoftmaxRegisters<Op, RowOf, kWarp / 2, kFusedPacks, 1>, shape, stream, p);
        }
      }
      shape.blocks = CeilDiv(p.rows, kWarpTierThreads / kWarp);
      return Launch(SoftmaxRegisters<Op, RowOf, kWarp, kFusedPacks, 1>, shape, stream, p);
    };
    if (tier == SoftmaxTier::kWarp || tier == SoftmaxTier::kBlock) {
      cudaError_t result = cudaErrorInvalidValue;
      const auto whole_run = [&](auto may) { result = run(may, std::false_type(), p.width / N); };
      if (whole && WithFeatures(typename Op::Sets(), features, whole_run)) return result;
      return run(std::integral_constant<uint32_t, Op::kMay>(), std::true_type(), RowPacks(problem));
    }
  }
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t LaunchSoftmaxFused(const SoftmaxArgs& args, const SoftmaxProblem& problem, SoftmaxTier tier,
                               const Device& device, cudaStream_t stream) {
  const auto direction = [&](auto log) {
    constexpr bool kLog = decltype(log)::value;
    if constexpr (!kLog) {
      if (args.extras.from_output) return LaunchFusedOp<FusedFromOutput<T>>(args, problem, tier, device, stream);
    }
    if (args.backward) return LaunchFusedOp<FusedBackward<T, kLog>>(args, problem, tier, device, stream);
    return LaunchFusedOp<FusedForward<T, kLog>>(args, problem, tier, device, stream);
  };
  return args.log ? direction(std::true_type()) : direction(std::false_type());
}

}  // namespace jaxkern
