// Dispatch of one run to its kernels, for one element type: the widest vectors that rows and arrays allow.
// index_add_<dtype>.cu instantiates LaunchIndexRun once, so that dtypes compile side by side.
#pragma once

#include "index_add_direct.cuh"
#include "index_add_narrow.cuh"
#include "index_add_reduce.cuh"
#include "index_add_reduce_narrow.cuh"
#include "index_add_reduce_tile.cuh"
#include "index_add_small.cuh"

namespace jaxkern {

template <Reduction kOp, class T, int N>
cudaError_t LaunchWithVectors(IndexPlan plan, const IndexRun& run, bool fills, cudaStream_t stream) {
  switch (plan) {
    case IndexPlan::kSmall: return LaunchSmall<kOp, T, N>(run, fills, stream);
    case IndexPlan::kSorted:
    case IndexPlan::kSort: return LaunchReduce<kOp, T, N>(run, fills, stream);
    case IndexPlan::kUnique:
      // An update that is alone in its row is written as it is, whatever the reduction.
      return LaunchDirect<Reduction::kSum, T, N, false>(run, stream);
    case IndexPlan::kAtomic:
      if constexpr (kOp == Reduction::kSum && sizeof(T) == 4) return LaunchDirect<kOp, T, N, true>(run, stream);
      return cudaErrorInvalidConfiguration;
    default: return cudaErrorInvalidConfiguration;
  }
}

template <Reduction kOp, class T>
cudaError_t LaunchReduction(IndexPlan plan, const IndexRun& run, bool fills, cudaStream_t stream) {
  if (plan == IndexPlan::kNarrow) {
    if constexpr (sizeof(T) <= 4) return LaunchNarrow<kOp, T>(run, fills, stream);
    return cudaErrorInvalidConfiguration;
  }
  if (run.tiles) return LaunchTiles<kOp, T>(run, fills, stream);
  if ((plan == IndexPlan::kSorted || plan == IndexPlan::kSort) && run.inner <= kNarrowInner) {
    return LaunchNarrowReduce<kOp, T>(run, fills, stream);
  }
  const auto fits = [&](int64_t bytes) {
    return (run.inner * static_cast<int64_t>(sizeof(T)) | reinterpret_cast<int64_t>(run.source) |
            reinterpret_cast<int64_t>(run.out)) % bytes == 0;
  };
  if (fits(16)) return LaunchWithVectors<kOp, T, kVector<T>>(plan, run, fills, stream);
  if constexpr (sizeof(T) == 2) {
    if (fits(4)) return LaunchWithVectors<kOp, T, 2>(plan, run, fills, stream);
  }
  return LaunchWithVectors<kOp, T, 1>(plan, run, fills, stream);
}

// Runs everything after the sort. `fills`: rows without an update are written too.
template <class T>
cudaError_t LaunchIndexRun(IndexPlan plan, IndexOp op, const IndexRun& run, bool fills, cudaStream_t stream) {
  switch (op) {
    case IndexOp::kAdd:
    case IndexOp::kSegmentSum: return LaunchReduction<Reduction::kSum, T>(plan, run, fills, stream);
    case IndexOp::kSegmentMax: return LaunchReduction<Reduction::kMax, T>(plan, run, fills, stream);
    case IndexOp::kSegmentMin: return LaunchReduction<Reduction::kMin, T>(plan, run, fills, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace jaxkern
