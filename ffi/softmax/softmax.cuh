// Launching the softmax family for one dtype: from SoftmaxArgs and a tier to a kernel. Each
// softmax_<dtype>.cu instantiates LaunchSoftmax once, so that dtypes compile side by side.
#pragma once

#include <algorithm>
#include <type_traits>

#include "softmax_pipeline.cuh"
#include "softmax_column.cuh"
#include "softmax_cuda.h"
#include "softmax_registers.cuh"
#include "softmax_stream.cuh"

namespace jaxkern {

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kClusterTarget = 1024;  // packs that a block of a cluster gets, where rows are many

// Grants the kernel its dynamic shared memory on this device, once.
template <auto kKernel> cudaError_t AllowSharedMemory(const Device& device, int bytes) {
  static std::atomic<bool> done[kMaxDevices];
  return OncePerDevice(done, device.ordinal, [&] {
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                bytes);
  });
}

// Grants the kernel clusters of more than 8 blocks on this device, once.
template <auto kKernel> cudaError_t AllowLargeClusters(const Device& device) {
  static std::atomic<bool> done[kMaxDevices];
  return OncePerDevice(done, device.ordinal, [&] {
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel),
                                cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  });
}

// How many clusters of 2^log_size blocks of this kernel run at a time on this device.
template <auto kKernel>
cudaError_t ActiveClusters(const Device& device, int log_size, const LaunchShape& shape, int* count) {
  static std::atomic<int> cache[kMaxDevices][5];
  int n = cache[device.ordinal][log_size].load(std::memory_order_acquire);
  if (n == 0) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1 << log_size);
    config.blockDim = dim3(shape.threads);
    config.dynamicSmemBytes = shape.shared_bytes;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 1 << log_size;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    const cudaError_t e = cudaOccupancyMaxActiveClusters(&n, reinterpret_cast<const void*>(kKernel), &config);
    if (e != cudaSuccess) return e;
    if (n == 0) return cudaErrorInvalidConfiguration;
    cache[device.ordinal][log_size].store(n, std::memory_order_release);
  }
  *count = n;
  return cudaSuccess;
}

template <int kValue> constexpr std::integral_constant<int, kValue> kInt = {};

// Calls run(packs a thread, threads) for a block that holds `packs`: 4 or 8 a thread, whichever
// leaves fewer threads idle in the last warp; of equals, 4 for short rows and 8 for long ones.
template <class Run> cudaError_t WithHeld(int64_t packs, Run run) {
  const auto threads = [&](int held) { return static_cast<int>(CeilDiv(CeilDiv(packs, held), kWarp) * kWarp); };
  const int64_t room4 = 4 * int64_t{threads(4)}, room8 = 8 * int64_t{threads(8)};
  bool four = room4 < room8 || (room4 == room8 && packs < 512);
  if (threads(4) > kBlockTierThreads) four = false;
  return four ? run(kInt<4>, threads(4)) : run(kInt<8>, threads(8));
}

template <class Op, bool kMasked, bool kRagged>
cudaError_t LaunchRegisters(const SoftmaxParams& p, int64_t packs, SoftmaxTier tier, cudaStream_t stream) {
  using RowOf = SoftmaxRow<Op, kVector<typename Op::T>, kMasked, int, kRagged>;
  auto go = [&](auto lanes, auto held, auto rows) {
    constexpr int kLanes = decltype(lanes)::value, kPacks = decltype(held)::value, kRows = decltype(rows)::value;
    LaunchShape shape;
    shape.blocks = CeilDiv(p.rows, kWarpTierThreads / kLanes * kRows);
    shape.threads = kWarpTierThreads;
    return Launch(SoftmaxRegisters<Op, RowOf, kLanes, kPacks, kRows>, shape, stream, p);
  };
  if (tier == SoftmaxTier::kWarp) {
    if (packs <= 64) return go(kInt<32>, kInt<2>, kInt<2>);
    return go(kInt<32>, kInt<4>, kInt<1>);
  }
  return WithHeld(packs, [&](auto held, int threads) {
    LaunchShape shape;
    shape.blocks = p.rows;
    shape.threads = threads;
    return Launch(SoftmaxRegisters<Op, RowOf, kBlockLanes, decltype(held)::value, 1>, shape, stream, p);
  });
}

// A row over 2, 4, 8 or 16 blocks: about kClusterTarget packs a block, or fewer when there are few rows.
template <class Op, bool kRagged>
cudaError_t LaunchCluster(const SoftmaxParams& p, int64_t packs, const Device& device, cudaStream_t stream) {
  int log_size = 1;
  const auto each = [&] { return CeilDiv(packs, 1 << log_size); };
  while (log_size < 4 && each() > kClusterTarget) ++log_size;
  while (log_size < 4 && (p.rows << (log_size + 1)) <= 2 * device.sm_count && each() > 256) ++log_size;
  const auto go = [&](auto held, int threads) {
    using RowOf = SoftmaxRow<Op, kVector<typename Op::T>, false, int, kRagged>;
    constexpr auto kKernel = SoftmaxRegisters<Op, RowOf, kClusterLanes, decltype(held)::value, 1>;
    LaunchShape shape;
    shape.cluster = 1 << log_size;
    shape.blocks = p.rows << log_size;
    shape.threads = threads;
    const cudaError_t e = AllowLargeClusters<kKernel>(device);
    if (e != cudaSuccess) return e;
    return Launch(kKernel, shape, stream, p);
  };
  if constexpr (kRagged) return go(kInt<4>, static_cast<int>(CeilDiv(CeilDiv(each(), 4), kWarp) * kWarp));
  else return WithHeld(each(), go);
}

// Rows of up to 32 packs of N elements, none of them ragged.
template <class Op, int N> cudaError_t LaunchSubWarp(const SoftmaxParams& p, cudaStream_t stream) {
  auto go = [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value, kRows = 2;
    LaunchShape shape;
    shape.blocks = CeilDiv(p.rows, kWarpTierThreads / kLanes * kRows);
    shape.threads = kWarpTierThreads;
    return Launch(SoftmaxRegisters<Op, SoftmaxRow<Op, N, false, int, false>, kLanes, 1, kRows>, shape, stream, p);
  };
  const int64_t packs = p.width / N;
  if (packs <= 2) return go(kInt<2>);
  if (packs <= 4) return go(kInt<4>);
  if (packs <= 8) return go(kInt<8>);
  if (packs <= 16) return go(kInt<16>);
  return go(kInt<32>);
}

// Narrow rows at any alignment.
template <class Op, bool kMasked>
cudaError_t LaunchStaged(const SoftmaxParams& p, const Device& device, cudaStream_t stream) {
  using T = typename Op::T;
  constexpr int N = kVector<T>;
  auto go = [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value, kGroups = kWarpTierThreads / kLanes;
    // About 8 KB of rows a block, or less where that would leave multiprocessors idle.
    const int64_t full = 8192 / (p.width * static_cast<int64_t>(sizeof(T)) * kGroups);
    const int64_t turns = std::max<int64_t>(1, std::min(full, p.rows / (int64_t{kGroups} * 4 * device.sm_count)));
    const int rows = static_cast<int>(turns * kGroups);
    const int room_packs = static_cast<int>(CeilDiv(rows * p.width + N - 1, N));
    LaunchShape shape;
    shape.blocks = CeilDiv(p.rows, rows);
    shape.threads = kWarpTierThreads;
    shape.shared_bytes = room_packs * 16 * Op::kInputs;
    return Launch(SoftmaxStaged<Op, kLanes, kMasked>, shape, stream, p, rows, room_packs);
  };
  const int64_t lanes = CeilDiv(p.width, kStagedElements);
  if (lanes <= 1) return go(kInt<1>);
  if (lanes <= 2) return go(kInt<2>);
  if (lanes <= 4) return go(kInt<4>);
  if (lanes <= 8) return go(kInt<8>);
  if (lanes <= 16) return go(kInt<16>);
  return go(kInt<32>);
}

// The smallest cluster whose blocks hold a row in shared memory.
template <class Op>
cudaError_t LaunchPipeline(const SoftmaxParams& p, int64_t packs, const Device& device, cudaStream_t stream) {
  constexpr auto kKernel = SoftmaxPipeline<Op, false>;
  int log_size = 0;
  while (CeilDiv(CeilDiv(packs, 1 << log_size), kChunkPacks<Op>) > kSlots<Op>) ++log_size;
  LaunchShape shape;
  shape.threads = kPipelineThreads;
  shape.shared_bytes = kPipelineSharedBytes<Op>;
  shape.cluster = 1 << log_size;
  cudaError_t e = AllowSharedMemory<kKernel>(device, shape.shared_bytes);
  if (e == cudaSuccess) e = AllowLargeClusters<kKernel>(device);
  if (e != cudaSuccess) return e;
  int clusters = 0;
  e = ActiveClusters<kKernel>(device, log_size, shape, &clusters);
  if (e != cudaSuccess) return e;
  shape.blocks = std::min<int64_t>(clusters, p.rows) << log_size;
  return Launch(kKernel, shape, stream, p, static_cast<int>(CeilDiv(packs, shape.cluster)));
}

template <class Op, int N, bool kMasked>
cudaError_t LaunchSplit(const SoftmaxParams& p, const SoftmaxArgs& args, const Device& device, cudaStream_t stream) {
  using Stat = typename Op::Stat;
  const int64_t room = args.scratch_bytes / static_cast<int64_t>(sizeof(Stat)) / p.rows;
  // One block a multiprocessor: more would spend their time merging partial results.
  const int64_t useful = std::min(CeilDiv(p.width, int64_t{N} * kStreamThreads),
                                  std::max<int64_t>(1, device.sm_count / p.rows));
  LaunchShape shape;
  shape.threads = kStreamThreads;
  shape.blocks = std::max<int64_t>(1, std::min(room, useful));
  shape.blocks_y = static_cast<int>(p.rows);
  Stat* const partials = static_cast<Stat*>(args.scratch);
  const cudaError_t e = Launch(SoftmaxPartials<Op, N, kMasked>, shape, stream, p, partials);
  if (e != cudaSuccess) return e;
  return Launch(SoftmaxApply<Op, N, kMasked>, shape, stream, p, partials);
}

// Tiles of up to 16 warps in registers.
constexpr int64_t kMostTileRows = int64_t{kTileWarps} * kTileRows * 8;

template <class Op> cudaError_t LaunchColumnRegisters(const SoftmaxParams& p, cudaStream_t stream) {
  const auto go = [&](auto held, auto alone, int64_t lanes, int64_t warps) {
    const int64_t tiles = CeilDiv(p.inner, lanes * kVector<typename Op::T>);
    LaunchShape shape;
    shape.threads = static_cast<int>(kWarp * (warps == 1 ? 4 : warps));
    shape.blocks = warps == 1 ? CeilDiv(p.rows * tiles, 4) : p.rows * tiles;
    return Launch(SoftmaxColumnRegisters<Op, decltype(held)::value, decltype(alone)::value>, shape, stream, p,
                  static_cast<int>(warps), tiles);
  };
  // All rows in one thread's registers, while they are few.
  constexpr int kAlone = Op::kInputs == 1 ? 24 : 8;
  if (p.width <= kAlone) return go(kInt<kAlone>, std::true_type(), kWarp, 1);
  if (p.width <= 4 * kTileRows) return go(kInt<4>, std::false_type(), kTileLanes, 1);
  return go(kInt<8>, std::false_type(), kTileLanes, CeilDiv(p.width, int64_t{kTileRows} * 8));
}

template <class Op, int N, bool kMasked>
cudaError_t LaunchColumn(const SoftmaxParams& p, const Device& device, cudaStream_t stream) {
  constexpr auto kKernel = SoftmaxColumn<Op, N, kMasked>;
  using Stat = typename Op::Stat;
  constexpr int64_t kLaneBytes = sizeof(Pack<typename Op::T, N>) * Op::kInputs;
  const int64_t across = CeilDiv(p.inner, N);
  ColumnPlan plan = {};
  auto bytes = [&](int lanes) {
    return int64_t{kColumnThreads} * N * sizeof(Stat) + int64_t{lanes} * N * sizeof(Stat) + p.width * kLaneBytes * lanes;
  };
  // Wide tiles for long runs of memory, but three or more tiles a multiprocessor.
  const int64_t target = device.shared_memory / 3, most = device.shared_memory;
  const int narrowest = static_cast<int>(std::min<int64_t>(across, CeilDiv(32, kLaneBytes / Op::kInputs)));
  int lanes = kColumnThreads;
  while (lanes > 1 && (lanes / 2 >= across || (bytes(lanes) > target && lanes / 2 >= narrowest))) lanes /= 2;
  plan.resident = bytes(lanes) <= most;
  if (!plan.resident) {
    lanes = 32;
    while (lanes > 1 && lanes / 2 >= across) lanes /= 2;
  }
  plan.lanes_x = lanes;
  plan.tiles = CeilDiv(across, lanes);
  plan.shared_bytes = static_cast<int>(plan.resident ? bytes(lanes) : bytes(lanes) - p.width * kLaneBytes * lanes);
  LaunchShape shape;
  shape.blocks = p.rows * plan.tiles;
  shape.threads = kColumnThreads;
  shape.shared_bytes = plan.shared_bytes;
  const cudaError_t e = AllowSharedMemory<kKernel>(device, device.shared_memory);
  if (e != cudaSuccess) return e;
  return Launch(kKernel, shape, stream, p, plan);
}

template <class Op>
SoftmaxParams MakeParams(const SoftmaxArgs& args, const SoftmaxProblem& problem, const Device& device) {
  constexpr int kSize = sizeof(typename Op::T);
  SoftmaxParams p = {};
  p.input[0] = args.a;
  p.input[1] = args.b;
  p.out = args.out;
  p.mask = args.mask;
  p.mask_view = args.mask_view;
  p.rows = args.outer;
  p.width = args.width;
  p.inner = args.inner;
  p.misalignment = problem.misalignment / kSize;
  p.grain = RowGrain(problem) / kSize;
  p.exceeds_l2 = args.outer * args.width * args.inner * kSize * (Op::kInputs + 1) > device.l2_bytes;
  return p;
}

template <class Op, bool kMasked>
cudaError_t LaunchOp(const SoftmaxArgs& args, const SoftmaxProblem& problem, SoftmaxTier tier, const Device& device,
                     cudaStream_t stream) {
  using T = typename Op::T;
  constexpr int N = kVector<T>;
  const SoftmaxParams p = MakeParams<Op>(args, problem, device);
  const bool alike = problem.aligned_alike;  // else element by element
  const bool whole = problem.misalignment % 16 == 0 && p.width % N == 0;  // no pack is ragged
  const int64_t packs = RowPacks(problem);
  switch (tier) {
    case SoftmaxTier::kSubWarp:
      if constexpr (!kMasked) {
        if (whole && p.width > N) return LaunchSubWarp<Op, N>(p, stream);
        if (problem.misalignment % 16 == 0 && p.width % (N / 2) == 0 && p.width > 4 * N && p.width <= 16 * N) {
          return LaunchSubWarp<Op, N / 2>(p, stream);
        }
      }
      return LaunchStaged<Op, kMasked>(p, device, stream);
    case SoftmaxTier::kWarp:
    case SoftmaxTier::kBlock:
      if (whole) return LaunchRegisters<Op, kMasked, false>(p, p.width / N, tier, stream);
      return LaunchRegisters<Op, kMasked, true>(p, packs, tier, stream);
    case SoftmaxTier::kCluster:
      if constexpr (!kMasked) {
        return whole ? LaunchCluster<Op, false>(p, p.width / N, device, stream)
                     : LaunchCluster<Op, true>(p, packs, device, stream);
      }
      break;
    case SoftmaxTier::kPipeline:
      if constexpr (!kMasked) return LaunchPipeline<Op>(p, packs, device, stream);
      break;
    case SoftmaxTier::kStreaming: {
      LaunchShape shape;
      shape.blocks = p.rows;
      shape.threads = kStreamThreads;
      if (alike) return Launch(SoftmaxStreaming<Op, SoftmaxRow<Op, N, kMasked, int64_t>>, shape, stream, p);
      return Launch(SoftmaxStreaming<Op, SoftmaxRow<Op, 1, kMasked, int64_t>>, shape, stream, p);
    }
    case SoftmaxTier::kSplit:
      return LaunchSplit<Op, N, kMasked>(p, args, device, stream);
    case SoftmaxTier::kColumn: {
      using ForColumns = typename Op::ForColumns;
      if (!alike || problem.misalignment % 16 != 0 || p.inner % N != 0) return LaunchColumn<ForColumns, 1, kMasked>(p, device, stream);
      if constexpr (!kMasked) {
        if (p.width <= kMostTileRows) return LaunchColumnRegisters<ForColumns>(p, stream);
      }
      return LaunchColumn<ForColumns, N, kMasked>(p, device, stream);
    }
    case SoftmaxTier::kAuto:
      break;
  }
  return cudaErrorInvalidValue;
}

template <class Op> struct Type { using type = Op; };

template <class T>
cudaError_t LaunchSoftmax(const SoftmaxArgs& args, const SoftmaxProblem& problem, SoftmaxTier tier,
                          const Device& device, cudaStream_t stream) {
  auto masked = [&](auto op) {
    using Op = typename decltype(op)::type;
    return args.mask ? LaunchOp<Op, true>(args, problem, tier, device, stream)
                     : LaunchOp<Op, false>(args, problem, tier, device, stream);
  };
  auto direction = [&](auto log) {
    constexpr bool kLog = decltype(log)::value;
    if (args.backward) return masked(Type<Backward<T, kLog>>());
    return masked(Type<Forward<T, kLog>>());
  };
  return args.log ? direction(std::true_type()) : direction(std::false_type());
}

}  // namespace jaxkern
