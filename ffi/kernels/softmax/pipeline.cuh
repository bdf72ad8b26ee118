// Softmax of rows too long for registers, on sm_90: the algorithm pipeline.
//
// SoftmaxPipeline reads p.input and writes p.out. Memory traffic: one read and one write of each row.
//
// A cluster of 1, 2, 4, 8 or 16 blocks holds a row in shared memory, each block an equal piece of it. The grid is
// persistent: a cluster processes one row after the other. A piece is cut into chunks, which occupy the slots of a ring
// buffer:
//
//     producer warp   for every chunk of every row: wait until its slot is empty, start a bulk copy
//     consumer warps  pass 1: wait for each chunk, accumulate the Stat
//                     merge over the block, then over the cluster through distributed shared memory
//                     pass 2: read each chunk again, write the output, release the slot
//
// A slot that pass 2 releases is refilled with the next row at once, so loads continue while this row is reduced and
// written. The merge has the only block-wide barrier. Its shared memory is double-buffered by row parity, so that a
// fast warp cannot overwrite what a slow one still reads.
#pragma once

#include "common/async.cuh"
#include "softmax/row.cuh"

namespace jaxkern {

// Consumer threads; one producer warp is added.
constexpr int kConsumers = 512;
constexpr int kPipelineThreads = kConsumers + kWarp;

// Packs of a chunk per thread and per block, and bytes of a slot over all inputs. Op: operation; see ops.cuh.
template <class Op> constexpr int kChunkUnroll = Op::kInputs == 1 ? 2 : 1;
template <class Op> constexpr int kChunkPacks = kConsumers * kChunkUnroll<Op>;
template <class Op> constexpr int kSlotBytes = 16 * kChunkPacks<Op> * Op::kInputs;
constexpr int kRingBytes = 208 * 1024;
template <class Op> constexpr int kSlots = kRingBytes / kSlotBytes<Op>;

template <class Op> struct PipelineShared {
  Barrier full[kSlots<Op>];
  Barrier empty[kSlots<Op>];
  Barrier exchanged[2];
  typename Op::Stat room[2][kConsumers / kWarp];
  typename Op::Stat exchange[2][kMaxCluster];
};

// Op: operation; see ops.cuh. piece_packs: packs of a row that a block holds.
template <class Op> __global__ void __launch_bounds__(kPipelineThreads, 1)
    SoftmaxPipeline(const __grid_constant__ SoftmaxParams p, int piece_packs) {
  static_assert(kStatSizes<typename Op::T>, "plan.py");
  static_assert(sizeof(PipelineShared<Op>) == 224 + 64 * sizeof(typename Op::Stat), "plan.py");
#ifdef JAXKERN_HAS_BULK_COPY
  using T = typename Op::T;
  using C = typename Op::C;
  using Stat = typename Op::Stat;
  constexpr int N = kVector<T>;
  using RowOf = SoftmaxRow<Op, N, false, int>;
  extern __shared__ __align__(128) char shared_bytes[];
  char* const ring = shared_bytes;
  auto& shared = *reinterpret_cast<PipelineShared<Op>*>(shared_bytes + kRingBytes);

  const int rank = ClusterRank(), cluster = ClusterSize();
  const int64_t first_row = blockIdx.x / cluster, row_step = gridDim.x / cluster;
  const int begin = rank * piece_packs;
  const int chunks = (piece_packs + kChunkPacks<Op> - 1) / kChunkPacks<Op>;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kSlots<Op>; ++s) {
      InitBarrier(&shared.full[s], 1);
      InitBarrier(&shared.empty[s], kConsumers / kWarp);
    }
    for (int i = 0; i < 2; ++i) InitBarrier(&shared.exchanged[i], 1);
    FenceBarrierInit();
  }
  // Every block of the cluster must have started and initialized its barriers before remote arrivals and writes.
  __syncthreads();
  SyncCluster();

  // A pack is copied in bulk if all of it lies inside the arrays, even if it extends beyond the row. Only at the ends
  // of the arrays does a consumer load the elements of a pack itself.
  int slot = 0;
  uint32_t parity = 0;
  auto advance = [&] {
    if (++slot == kSlots<Op>) slot = 0, parity ^= 1;
  };

  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) {
      for (int64_t r = first_row; r < p.rows; r += row_step) {
        const RowOf row(p, r);
        const int end = min(row.span.Count(), begin + piece_packs);
        for (int c = 0; c < chunks; ++c, advance()) {
          int from = begin + c * kChunkPacks<Op>, to = min(end, from + kChunkPacks<Op>);
          const int start = from;
          from = max(from, row.span.head);
          if (from < to && row.span.At(from) < 0) ++from;
          if (from < to && row.span.At(to) > row.array_size) --to;
          Wait(&shared.empty[slot], parity ^ 1);
          if (from >= to) {
            Arrive(&shared.full[slot]);
            continue;
          }
          ArriveExpect(&shared.full[slot], (to - from) * 16 * Op::kInputs);
#pragma unroll
          for (int k = 0; k < Op::kInputs; ++k) {
            BulkCopy(ring + slot * kSlotBytes<Op> + (k * kChunkPacks<Op> + from - start) * 16,
                     row.input[k] + row.span.base + static_cast<int64_t>(from) * N, (to - from) * 16,
                     &shared.full[slot], row.policy);
          }
        }
      }
    }
  } else {
    // Whether a chunk is full and has whole packs only: the common case.
    auto whole_chunk = [&](const RowOf& row, int c) {
      const int from = begin + c * kChunkPacks<Op>;
      return from >= row.span.whole_begin && from + kChunkPacks<Op> <= min(row.span.whole_end, begin + piece_packs);
    };
    auto load_whole = [&](const RowOf& row, int at_slot, int c, int u) {
      typename RowOf::Raw raw;
      const int offset = threadIdx.x + u * kConsumers;
#pragma unroll
      for (int k = 0; k < Op::kInputs; ++k) {
        raw.data[k] =
            *reinterpret_cast<const Pack<T, N>*>(ring + at_slot * kSlotBytes<Op> + (k * kChunkPacks<Op> + offset) * 16);
      }
      return raw;
    };
    // Loads a pack of any chunk.
    auto load = [&](const RowOf& row, int at_slot, int offset, int pack) {
      typename RowOf::Raw raw;
      const char* const slot_packs = ring + at_slot * kSlotBytes<Op> + offset * 16;
      if (row.span.Whole(pack)) {
#pragma unroll
        for (int k = 0; k < Op::kInputs; ++k) {
          raw.data[k] = *reinterpret_cast<const Pack<T, N>*>(slot_packs + k * kChunkPacks<Op> * 16);
        }
      } else if (row.span.Inside(pack, row.array_size)) {
#pragma unroll
        for (int k = 0; k < Op::kInputs; ++k) {
          raw.data[k] = *reinterpret_cast<const Pack<T, N>*>(slot_packs + k * kChunkPacks<Op> * 16);
          row.span.Trim(raw.data[k], pack, RowOf::Otherwise(k));
        }
      } else {
#pragma unroll
        for (int k = 0; k < Op::kInputs; ++k)
          raw.data[k] = row.span.LoadElements(row.input[k], pack, RowOf::Otherwise(k));
      }
      return raw;
    };

    int turn = 0;  // number of rows done
    for (int64_t r = first_row; r < p.rows; r += row_step, ++turn) {
      const RowOf row(p, r);
      const int end = min(row.span.Count(), begin + piece_packs);
      const int row_slot = slot;
      Stat stat = Op::Identity();
      for (int c = 0; c < chunks; ++c, advance()) {
        Wait(&shared.full[slot], parity);
        if (whole_chunk(row, c)) {
          C v[Op::kInputs][kChunkUnroll<Op> * N];
#pragma unroll
          for (int u = 0; u < kChunkUnroll<Op>; ++u) {
            C one[Op::kInputs][N];
            RowOf::Values(load_whole(row, slot, c, u), one);
#pragma unroll
            for (int k = 0; k < Op::kInputs; ++k)
#pragma unroll
              for (int j = 0; j < N; ++j) v[k][u * N + j] = one[k][j];
          }
          Op::Accumulate(stat, v);
          continue;
        }
#pragma unroll
        for (int u = 0; u < kChunkUnroll<Op>; ++u) {
          const int offset = threadIdx.x + u * kConsumers;
          const int pack = begin + c * kChunkPacks<Op> + offset;
          if (pack >= row.span.head && pack < end) {
            C v[Op::kInputs][N];
            RowOf::Values(load(row, slot, offset, pack), v);
            Op::Accumulate(stat, v);
          }
        }
      }

      stat = ReduceWarps<kWarp>(
          Op::template MergeLanes<kWarp>(stat), shared.room[turn % 2], kConsumers / kWarp, Op::Identity(),
          [] { SyncThreads(1, kConsumers); }, [](Stat s) { return Op::template MergeLanes<kWarp>(s); });
      if (cluster > 1) {
        Stat* exchange = shared.exchange[turn % 2];
        Barrier* exchanged = &shared.exchanged[turn % 2];
        if (threadIdx.x == 0) ArriveExpect(exchanged, cluster * sizeof(Stat));
        if (threadIdx.x < cluster) StoreRemote(&exchange[rank], stat, exchanged, threadIdx.x);
        Wait(exchanged, (turn / 2) % 2);
        stat = exchange[0];
        for (int b = 1; b < cluster; ++b) stat = Op::Merge(stat, exchange[b]);
      }
      const typename Op::Final final = Op::Finish(stat);

      float offset = 0;
      bool one_power = false;
      if constexpr (Op::kOnePower) one_power = Op::OnePower(final, &offset);
      int again = row_slot;
      for (int c = 0; c < chunks; ++c) {
        if (whole_chunk(row, c)) {
          typename RowOf::Raw raw[kChunkUnroll<Op>];
#pragma unroll
          for (int u = 0; u < kChunkUnroll<Op>; ++u) raw[u] = load_whole(row, again, c, u);
          T* const out = static_cast<T*>(p.out) + row.span.At(begin + c * kChunkPacks<Op> + threadIdx.x);
          const auto write = [&](auto map) {
#pragma unroll
            for (int u = 0; u < kChunkUnroll<Op>; ++u) {
              C v[Op::kInputs][N], y[N];
              RowOf::Values(raw[u], v);
              map(v, y);
              StoreVector<T, N>(out + u * kConsumers * N, RowOf::Result(y, final, raw[u]));
            }
          };
          if constexpr (Op::kOnePower) {
            if (one_power) write([&](auto& v, auto& y) { Op::MapOnePower(v, offset, y); });
          }
          if (!one_power) write([&](auto& v, auto& y) { Op::Map(v, final, y); });
        } else {
#pragma unroll
          for (int u = 0; u < kChunkUnroll<Op>; ++u) {
            const int place = threadIdx.x + u * kConsumers;
            const int pack = begin + c * kChunkPacks<Op> + place;
            if (pack >= row.span.head && pack < end) {
              C v[Op::kInputs][N], y[N];
              const auto raw = load(row, again, place, pack);
              RowOf::Values(raw, v);
              Op::Map(v, final, y);
              row.Store(static_cast<T*>(p.out), pack, y, final, raw);
            }
          }
        }
        __syncwarp();  // all lanes have read the slot
        if (threadIdx.x % kWarp == 0) Arrive(&shared.empty[again]);
        if (++again == kSlots<Op>) again = 0;
      }
    }
  }
  // A block must not exit while another one still writes to its shared memory.
  __syncwarp();
  SyncCluster();
#endif
}

}  // namespace jaxkern
