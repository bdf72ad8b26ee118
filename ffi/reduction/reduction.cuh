// Launching the row reductions of one element type: from ReduceArgs and a tier to a kernel. Each
// reduction_<type>.cu instantiates LaunchReduction, so that types compile side by side.
#pragma once

#include <algorithm>

#include "reduction_cuda.h"
#include "reduction_kernels.cuh"

namespace jaxkern {

inline int64_t ReduceCeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int Log2Ceil(int64_t n) {
  int log = 0;
  while ((int64_t{1} << log) < n) ++log;
  return log;
}

// `Of` tells the Op with a count of elements, for masks, from the one without.
template <template <bool> class Of> struct ReduceLauncher {
  using Op = typename Of<false>::type;
  using Counting = typename Of<true>::type;
  using T = typename Op::T;
  using Stat = typename Op::Stat;
  static_assert(sizeof(Stat) <= kPartialBytes && sizeof(typename Counting::Stat) <= kPartialBytes);
  static constexpr int N = kVector<T>;

  ReduceParams p;
  const ReduceArgs& args;
  const ReduceProblem& problem;
  const Device& device;
  cudaStream_t stream;

  cudaError_t Narrow() const {
    if constexpr (!std::is_integral_v<T>) {
      // Half vectors where whole ones would leave most of four lanes without any.
      if (WholePacks(problem) && p.width <= 32 * N && (sizeof(T) != 2 || p.width > 2 * N)) return NarrowPacks<N>();
      if constexpr (sizeof(T) == 2) {
        if (!p.mask && problem.misalignment % 8 == 0 && p.width % 4 == 0 && p.width <= 32 * 4) return NarrowPacks<4>();
      }
    }
    constexpr int kPacks = kSubWarpElements / 32;
    const int log_lanes = std::max(2, Log2Ceil(ReduceCeilDiv(p.width, kPacks)));
    return Launch(ReduceNarrow<Counting, 1, kPacks, kRowsTogether, false>, NarrowShape(log_lanes), stream, p, log_lanes,
                  static_cast<int>(p.width));
  }
  template <int M> cudaError_t NarrowPacks() const {
    const int packs = static_cast<int>(p.width / M), log_lanes = std::max(2, Log2Ceil(packs));
    return Launch(ReduceNarrow<typename Op::Short, M, 1, kRowsTogether, false>, NarrowShape(log_lanes), stream, p, log_lanes,
                  packs);
  }
  LaunchShape NarrowShape(int log_lanes, int rows = kRowsTogether) const {
    LaunchShape shape;
    shape.threads = kNarrowThreads;
    shape.blocks = ReduceCeilDiv(p.rows, (kNarrowThreads >> log_lanes) * rows);
    return shape;
  }
  // Whole rows of a few packs a lane, several a warp, which reads all of them at once.
  template <class O, int kPacks, bool kMasked> cudaError_t WarpPacks() const {
    constexpr int kRows = kWarpPacks * 2 / kPacks;
    return Launch(ReduceNarrow<typename O::Short, N, kPacks, kRows, kMasked>, NarrowShape(5, kRows), stream, p, 5,
                  static_cast<int>(p.width / N));
  }

  // Whole rows, or p.parts parts of each.
  cudaError_t Rows(bool warps) {
    LaunchShape shape;
    int rows_each = 0;
    if constexpr (!std::is_integral_v<T> && sizeof(T) <= 4) {
      if (warps && p.whole && p.width <= kWarpPacks * kWarp * N) {
        // All rows of a mask begin where its vectors do, if the first one does.
        const bool vectors = p.mask && p.mask_view.axis_stride == 1 && reinterpret_cast<uintptr_t>(p.mask) % N == 0;
        constexpr int kPacks = sizeof(T) == 2 ? kWarpPacks / 2 : kWarpPacks;
        if (vectors && p.width <= kPacks * kWarp * N) {
          return p.mean ? WarpPacks<Counting, kPacks, true>() : WarpPacks<Op, kPacks, true>();
        }
        if constexpr (sizeof(T) == 2) {
          if (!p.mask) return WarpPacks<Op, kWarpPacks, false>();
        }
      }
    }
    if (warps) {
      // Several rows a warp share the steps of merging, where that leaves warps enough.
      const int most = p.mask || kTogether<T, false> ? kRowsTogether : 1;
      rows_each = static_cast<int>(std::clamp<int64_t>(p.rows / (32 * device.sm_count), 1, most));
      shape.threads = kWarpsOfRows * kWarp;
      shape.blocks = ReduceCeilDiv(p.rows, kWarpsOfRows * rows_each);
    } else {
      // Few threads with two turns or more each: blocks of many warps go through their phases in step. One turn
      // where there are few rows, whose time is that of one block; parts of rows are all there at once.
      const int turns = p.parts == 1 && p.rows <= 2 * device.sm_count ? 1 : 2;
      const int most = p.parts == 1 ? kRowThreads : kPartThreads;
      const int64_t warps_wanted = ReduceCeilDiv(p.width / N, p.parts * turns * kInFlight<T> * kWarp);
      shape.threads = static_cast<int>(std::clamp<int64_t>(warps_wanted, 2, most / kWarp)) * kWarp;
      shape.blocks = p.rows;
      shape.blocks_y = static_cast<int>(p.parts);
      constexpr int kGrain = 128 / sizeof(T);
      p.each = ReduceCeilDiv(p.width, p.parts * kGrain) * kGrain;
      if constexpr (!std::is_integral_v<T> && sizeof(T) <= 4) {
        if (p.whole && !p.mask) {
          return Partly<Op>(Launch(ReduceWhole<Op, N>, shape, stream, p, static_cast<int>(p.each / N)));
        }
      }
    }
    if (!p.mask) return Partly<Op>(Launch(ReduceRows<Op, N, false>, shape, stream, p, rows_each));
    if (p.mean) return Partly<Counting>(Launch(ReduceRows<Counting, N, true>, shape, stream, p, rows_each));
    return Partly<Op>(Launch(ReduceRows<Op, N, true>, shape, stream, p, rows_each));
  }

  cudaError_t Columns() {
    const bool packs = !std::is_integral_v<T> && !p.mask && problem.misalignment == 0 && p.inner % N == 0;
    const int64_t across = packs ? p.inner / N : p.inner;
    // 32 threads across, more where there are too few rows for the others: a thread has 16, if there are. Of parts 8.
    p.each = ReduceCeilDiv(p.width, p.parts);
    const int log_y = p.parts > 1 ? 3 : p.each < 32 ? 0 : p.each < 64 ? 1 : p.each < 128 ? 2 : 3;
    // Small blocks where threads have few rows, and each block's beginning and end count.
    const int log_threads = log_y == 0 ? 7 : 8;
    static_assert(kColumnsThreads == 1 << 8);
    const int log_x = std::min(log_threads - log_y, Log2Ceil(across));
    const int64_t tiles = ReduceCeilDiv(across, int64_t{1} << log_x);
    LaunchShape shape;
    shape.threads = 1 << log_threads;
    shape.blocks = p.rows * tiles;
    shape.blocks_y = static_cast<int>(p.parts);
    if constexpr (!std::is_integral_v<T>) {
      if (packs) return Partly<Op>(Launch(ReduceColumns<Op, N>, shape, stream, p, log_x, tiles));
    }
    return Partly<Counting>(Launch(ReduceColumns<Counting, 1>, shape, stream, p, log_x, tiles));
  }

  // What follows a launch of kernels that computed the Stats of O, perhaps of parts.
  template <class O> cudaError_t Partly(cudaError_t error) const {
    if (error != cudaSuccess || p.parts == 1) return error;
    ReduceParams q = p;
    q.out = args.out;
    q.rows = p.rows * p.inner;
    // A lane a part, but a warp for up to 128 of them, and then a block.
    const int log_lanes = Log2Ceil(p.parts > 4 * kWarp ? kMergeThreads : std::min<int64_t>(p.parts, kWarp));
    LaunchShape shape;
    shape.threads = kMergeThreads;
    shape.blocks = ReduceCeilDiv(q.rows, kMergeThreads >> log_lanes);
    return Launch(ReduceMerge<O>, shape, stream, q, static_cast<const typename O::Stat*>(args.scratch), log_lanes);
  }

  cudaError_t Run(ReduceTier tier) {
    const DeviceTraits traits = {device.sm_count, device.compute_capability, device.shared_memory};
    if (tier == ReduceTier::kSplit || tier == ReduceTier::kColumn) p.parts = SplitParts(problem, traits);
    if (p.parts > 1) p.out = args.scratch;
    switch (tier) {
      case ReduceTier::kSubWarp: return Narrow();
      case ReduceTier::kWarp: return Rows(true);
      case ReduceTier::kBlock:
      case ReduceTier::kSplit: return Rows(false);
      case ReduceTier::kColumn: return Columns();
      case ReduceTier::kAuto: break;
    }
    return cudaErrorInvalidValue;
  }
};

// Bits of the type's own width, repeated to 8 bytes.
template <class T> uint64_t Repeated(uint64_t bits) {
  if (sizeof(T) < 8) bits &= (uint64_t{1} << (8 * sizeof(T) % 64)) - 1;
  for (int width = sizeof(T); width < 8; width *= 2) bits |= bits << (8 * width);
  return bits;
}

template <class T> struct OpsOf {
  template <bool kCounts> struct Sum {
    using type = Sum_<T, kCounts>;
  };
  template <bool> struct Max {
    using type = Max_<T>;
  };
  template <bool> struct LogSumExp {
    using type = LogSumExp_<T>;
  };
};

template <class T>
cudaError_t LaunchReduction(const ReduceArgs& args, const ReduceProblem& problem, ReduceTier tier, const Device& device,
                            cudaStream_t stream) {
  ReduceParams p = {};
  p.x = args.x;
  p.out = args.out;
  p.largest = args.largest;
  p.total = args.total;
  p.rows = args.outer;
  p.width = args.width;
  p.inner = args.inner;
  p.parts = 1;
  p.each = args.width;
  p.whole = WholeVectors(problem);
  p.mask = args.mask;
  p.mask_view = args.mask_view;
  p.wide = args.wide;
  p.mean = args.op == ReduceOp::kMean;
  p.scale = p.mean ? 1.0 / static_cast<double>(args.width) : 1.0;
  p.exceeds_l2 = args.outer * args.width * args.inner * int64_t{sizeof(T)} > device.l2_bytes;

  constexpr uint64_t kSign = uint64_t{1} << (8 * sizeof(T) - 1), kOnes = ~uint64_t{0} >> (64 - 8 * sizeof(T));
  if constexpr (std::is_integral_v<T>) {
    const bool extreme = args.op == ReduceOp::kMax || args.op == ReduceOp::kMin;
    // A signed minimum is computed on 32 or 64 bits, of which all are flipped.
    p.flip = args.op == ReduceOp::kMin ? (std::is_signed_v<T> ? ~uint64_t{0} : kOnes) : 0;
    const uint64_t least = std::is_signed_v<T> ? kSign : 0;
    p.neutral = extreme ? Repeated<T>((least ^ p.flip) & kOnes) : 0;
    if (extreme) return ReduceLauncher<OpsOf<T>::template Max>{p, args, problem, device, stream}.Run(tier);
    return ReduceLauncher<OpsOf<T>::template Sum>{p, args, problem, device, stream}.Run(tier);
  } else {
    constexpr uint64_t kInfinity = std::is_same_v<T, __half> ? 0x7c00 : sizeof(T) == 2 ? 0x7f80
                                   : sizeof(T) == 4 ? 0x7f800000 : 0x7ff0000000000000;
    switch (args.op) {
      case ReduceOp::kSum:
      case ReduceOp::kMean:
        return ReduceLauncher<OpsOf<T>::template Sum>{p, args, problem, device, stream}.Run(tier);
      case ReduceOp::kMax:
      case ReduceOp::kMin:
        // The values are flipped in the type that they are computed in.
        p.flip = args.op == ReduceOp::kMin ? uint64_t{1} << (sizeof(T) == 8 ? 63 : 31) : 0;
        p.neutral = Repeated<T>(kInfinity | (p.flip ? 0 : kSign));
        return ReduceLauncher<OpsOf<T>::template Max>{p, args, problem, device, stream}.Run(tier);
      case ReduceOp::kLogSumExp:
        p.neutral = Repeated<T>(kInfinity | kSign);
        return ReduceLauncher<OpsOf<T>::template LogSumExp>{p, args, problem, device, stream}.Run(tier);
    }
    return cudaErrorInvalidValue;
  }
}

}  // namespace jaxkern
