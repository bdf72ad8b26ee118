// The arguments of kernels of strided rows (strided.cuh), and the kernel that joins rows whose elements several blocks share. These
// blocks leave what they have reduced in a stage in scratch. A block joins kLanes rows, each in the order of its parts.
#pragma once

#include "engine.cuh"
#include "groups.cuh"

namespace jaxkern {

// `row_stride` and `result_stride`: between the elements of a row.
template <class F> struct StridedRowArgs {
  using Engine = RowEngine<F>;
  typename Engine::Args rows;
  int64_t row_stride[Engine::kRows + 1], result_stride[Engine::kResults + 1];
  void* partial[F::kStages + 1];  // of each stage: Partial<s>[parts + 1][rows], joined in the last of them
  int64_t tiles, parts, each;     // each: elements of a part, at most
  int64_t adjacent;               // rows that lie side by side
};

// The numbers of a row after stage s and all after it, up to `kEnd`, from what JoinPartsKernel left in scratch.
template <class F, int s, int kEnd>
__device__ __forceinline__ void JoinedNumbers(const StridedRowArgs<F>& a, int64_t row, typename F::Numbers& n) {
  if constexpr (s < kEnd) {
    using Stages = RowStages<F>;
    Stages::template After<s>(
        n, static_cast<const typename Stages::template Partial<s>*>(a.partial[s])[a.parts * a.rows.rows + row]);
    JoinedNumbers<F, s + 1, kEnd>(a, row, n);
  }
}

// Joins the parts of kLanes rows in each block, and after the last stage stores their numbers.
template <class F, int kStage, int kLanes, int kThreads> struct JoinParts {
  using Engine = RowEngine<F>;
  using Stages = typename Engine::Stages;
  using Partial = typename Engine::template Partial<kStage>;

  template <class... T, size_t... I>
  static __device__ __forceinline__ void Run(const StridedRowArgs<F>& a,
                                             GroupRoom<F, 1, kLanes, kThreads, 1, false>& room, Types<T...>,
                                             std::index_sequence<I...>) {
    constexpr int kGroups = kThreads / kLanes;
    const int group = threadIdx.x / kLanes, parts = static_cast<int>(a.parts);
    const int64_t own = static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x % kLanes;
    const int64_t row = min(own, a.rows.rows - 1);
    typename Engine::Numbers n =
        Engine::Begin(a.rows, row, typename Engine::NumberIndex(), std::make_index_sequence<F::kIndices>());
    JoinedNumbers<F, 0, kStage>(a, row, n);
    Partial* const partial = static_cast<Partial*>(a.partial[kStage]) + row;
    Partial sum[1] = {Stages::template Identity<kStage>(n)};
    if (group < parts) {
      sum[0] = typename Stages::template Combine<kStage>().All(partial + group * a.rows.rows, kGroups * a.rows.rows,
                                                               (parts - group + kGroups - 1) / kGroups);
    }
    JoinGroups<F, kStage, false>(sum, room);
    const bool mine = own < a.rows.rows && group == 0;
    if (mine) partial[a.parts * a.rows.rows] = sum[0];
    if constexpr (kStage + 1 == F::kStages && Engine::kNumberResults + Engine::kTotals > 0) {
      Stages::template After<kStage>(n, sum[0]);
      Slots<std::index_sequence<I...>, T...> totals;
      ((At<I>(totals) = 0), ...);
      if (mine) {
        if constexpr (Engine::kNumberResults > 0)
          Engine::StoreNumbers(a.rows, row, n, typename Engine::NumberResultIndex());
        if constexpr (Engine::kTotals > 0) Engine::AddTotals(n, totals, typename Engine::TotalIndex());
      }
      (Engine::template WriteTotal<I, kThreads>(a.rows, At<I>(totals), blockIdx.x), ...);
    }
  }
};

template <class F, int kStage, int kLanes, int kThreads> __global__ void __launch_bounds__(kThreads)
    JoinPartsKernel(const __grid_constant__ StridedRowArgs<F> a) {
  using Room = GroupRoom<F, 1, kLanes, kThreads, 1, false>;
  JAXKERN_SHARED(Room, room);
  JoinParts<F, kStage, kLanes, kThreads>::Run(a, room, typename F::Totals(), typename RowEngine<F>::TotalIndex());
}

}  // namespace jaxkern
