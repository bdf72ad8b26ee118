// Loss and gradient in one read of rows too long for registers, on sm_90: the pipeline tier.
//
// A cluster of 1, 2, 4, 8 or 16 blocks holds a row's packs in shared memory, each block an equal piece of
// them, and walks over its rows (the grid is persistent). A piece is cut into chunks that live in a ring:
//
//     producer warp   for every chunk of every row: wait until its slot is empty, start a bulk copy
//     consumer warps  pass 1: wait for each chunk, add it to the LossStat
//                     merge over the block, then over the cluster through distributed shared memory
//                     pass 2: read each chunk again, write the gradient, hand the slot back
//
// so that loading does not stop while a row is reduced and written. The few elements of a row outside whole
// packs are read and written by the first threads of the first block. The loss is written by who holds the
// label's logit.
#pragma once

#include "cross_entropy_rows.cuh"

namespace jaxkern {

constexpr int kLossConsumers = 512;
constexpr int kLossPipelineThreads = kLossConsumers + kWarp;  // one producer warp
constexpr int kLossChunkUnroll = 2;                           // packs of a chunk that a thread handles
constexpr int kLossChunkPacks = kLossConsumers * kLossChunkUnroll;
constexpr int kLossSlotBytes = 16 * kLossChunkPacks;
constexpr int kLossSlots = 13;
constexpr int kLossRingBytes = kLossSlots * kLossSlotBytes;

template <class T> struct LossPipelineShared {
  Barrier full[kLossSlots];
  Barrier empty[kLossSlots];
  Barrier exchanged[2];
  LossStat<T> room[2][kLossConsumers / kWarp];
  LossStat<T> exchange[2][kMaxCluster];
};
template <class T> constexpr int kLossPipelineBytes = kLossRingBytes + static_cast<int>(sizeof(LossPipelineShared<T>));

template <class T>
__global__ void __launch_bounds__(kLossPipelineThreads, 1)
BothPipeline(const __grid_constant__ LossParams p, int piece_packs) {
#ifdef JAXKERN_HAS_BULK_COPY
  using C = Compute<T>;
  using Stat = LossStat<T>;
  constexpr int N = kVector<T>;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<LossPipelineShared<T>*>(shared_bytes + kLossRingBytes);

  const int rank = ClusterRank(), cluster = ClusterSize();
  const int64_t first_row = blockIdx.x / cluster, row_step = gridDim.x / cluster;
  const int begin = rank * piece_packs;
  const int chunks = (piece_packs + kLossChunkPacks - 1) / kLossChunkPacks;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  const T* const logits = static_cast<const T*>(p.logits);

  if (threadIdx.x == 0) {
    for (int s = 0; s < kLossSlots; ++s) {
      InitBarrier(&shared.full[s], 1);
      InitBarrier(&shared.empty[s], kLossConsumers / kWarp);
    }
    for (int i = 0; i < 2; ++i) InitBarrier(&shared.exchanged[i], 1);
    FenceBarrierInit();
  }
  // Remote writes need every block of the cluster to have come this far.
  __syncthreads();
  SyncCluster();

  int slot = 0;
  uint32_t parity = 0;
  const auto advance = [&] {
    if (++slot == kLossSlots) slot = 0, parity ^= 1;
  };

  if (threadIdx.x >= kLossConsumers) {
    if (threadIdx.x == kLossConsumers) {
      for (int64_t r = first_row; r < p.rows; r += row_step) {
        const LossRow<T> span(p, r);
        const int end = min(static_cast<int>(span.end), begin + piece_packs);
        for (int c = 0; c < chunks; ++c, advance()) {
          const int from = begin + c * kLossChunkPacks, to = min(end, from + kLossChunkPacks);
          Wait(&shared.empty[slot], parity ^ 1);
          if (from >= to) {
            Arrive(&shared.full[slot]);
            continue;
          }
          ArriveExpect(&shared.full[slot], (to - from) * 16);
          BulkCopy(shared_bytes + slot * kLossSlotBytes, logits + span.At(from), (to - from) * 16, &shared.full[slot], policy);
        }
      }
    }
  } else {
    const bool smoothing = p.Smoothing();
    const int lane = threadIdx.x;
    T* const gradient = static_cast<T*>(p.gradient);
    const auto pack_at = [&](int at_slot, int u) -> const Pack<T, N>& {
      return *reinterpret_cast<const Pack<T, N>*>(shared_bytes + at_slot * kLossSlotBytes + (lane + u * kLossConsumers) * 16);
    };
    int turn = 0;  // rows done
    for (int64_t r = first_row; r < p.rows; r += row_step, ++turn) {
      const LossRow<T> span(p, r);
      const int end = min(static_cast<int>(span.end), begin + piece_packs);
      const int row_slot = slot;
      const RawLabel raw_label = LoadLabel(p, r);  // not looked at before pass 1 is done
      const C weight = static_cast<const C*>(p.weight)[r];
      C reference = 0;
      if (smoothing) reference = ReferenceOf(logits[r * p.width]);
      const LossSingles<T> singles(p, span, lane, p.ragged && rank == 0);
      const Pack<T, 1> single[2] = {singles.Load(logits + r * p.width, 0), singles.Load(logits + r * p.width, 1)};

      Stat stat = Stat::Identity();
      for (int c = 0; c < chunks; ++c, advance()) {
        Wait(&shared.full[slot], parity);
        const int from = begin + c * kLossChunkPacks + lane;
        Pack<T, N> packs[kLossChunkUnroll];
#pragma unroll
        for (int u = 0; u < kLossChunkUnroll; ++u) {
          packs[u] = pack_at(slot, u);
          if (from + u * kLossConsumers >= end) packs[u] = Filled<T, N>(FromCompute<T>(-Infinity<C>()));
          else if (smoothing) AddAbove(stat, packs[u], reference);
        }
        Accumulate<T>(stat, packs);
      }
      if (p.ragged) {
        Accumulate<T>(stat, single);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (smoothing && singles.column[k] >= 0) stat.above += ToCompute(Element(single[k], 0)) - reference;
        }
      }

      constexpr int kWarps = kLossConsumers / kWarp;
      stat = ReduceWarps<kWarps>(stat.template MergeLanes<kWarp>(smoothing, false), shared.room[turn % 2], kWarps,
                                 Stat::Identity(), [] { SyncThreads(1, kLossConsumers); },
                                 [=](const Stat& s) { return s.template MergeLanes<kWarps>(smoothing, false); });
      if (cluster > 1) {
        Stat* const exchange = shared.exchange[turn % 2];
        Barrier* const exchanged = &shared.exchanged[turn % 2];
        if (lane == 0) ArriveExpect(exchanged, cluster * sizeof(Stat));
        if (lane < cluster) StoreRemote(&exchange[rank], stat, exchanged, lane);
        Wait(exchanged, (turn / 2) % 2);
        const int from = lane % kMaxCluster;
        stat = (from < cluster ? exchange[from] : Stat::Identity()).template MergeLanes<kMaxCluster>(smoothing, false);
      }

      const Label label = Resolve(p, raw_label);
      const Slope<T> slope(p, label, span.head, Base(stat.max), stat.sum, p.template Numbers<C>().width, weight);
      bool own = label.at < 0 && rank == 0 && lane == 0;  // who writes the loss
      C x_label = 0;
      int again = row_slot;
      for (int c = 0; c < chunks; ++c) {
        const int from = begin + c * kLossChunkPacks + lane;
        T* const out = gradient + span.At(from);
#pragma unroll
        for (int u = 0; u < kLossChunkUnroll; ++u) {
          const int pack = from + u * kLossConsumers;
          if (pack < end) {
            const Pack<T, N> x = pack_at(again, u);
            if (pack == slope.label_pack) {
              C v[N];
              Unpack(x, v);
#pragma unroll
              for (int j = 0; j < N; ++j) x_label = j == slope.label_place ? v[j] : x_label;
              own = true;
            }
            StoreVector<T, N>(out + u * kLossConsumers * N, slope.Gradient(x, pack));
          }
        }
        __syncwarp();  // all lanes have read the slot
        if (lane % kWarp == 0) Arrive(&shared.empty[again]);
        if (++again == kLossSlots) again = 0;
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int64_t column = singles.column[k];
        if (column < 0) continue;
        if (column == label.at) own = true, x_label = ToCompute(Element(single[k], 0));
        gradient[r * p.width + column] = slope.Gradient(single[k], column == label.at);
      }
      if (own) WriteRow<T>(p, r, stat, label, x_label, reference);
    }
  }
  // No block may leave while another still writes to its shared memory.
  __syncwarp();
  SyncCluster();
#endif
}

}  // namespace jaxkern
