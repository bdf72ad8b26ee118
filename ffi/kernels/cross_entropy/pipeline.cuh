// Loss and gradient in one read of rows too long for registers, on sm_90: the algorithm pipeline.
//
// BothPipeline reads the logits, labels and weights and writes the loss and the gradient. Memory traffic: the logits
// are read once and the gradient is written once. Both are aligned to 16 bytes.
//
// A cluster of 1, 2, 4, 8 or 16 blocks holds the packs of a row in shared memory, each block an equal piece of them.
// The grid is persistent: a cluster processes one row after the other. A piece is cut into chunks, which occupy the
// slots of a ring buffer:
//
//     producer warp   for every chunk of every row: wait until its slot is empty, start a bulk copy
//     consumer warps  pass 1: wait for each chunk, add it to the LossStat
//                     merge over the block, then over the cluster through distributed shared memory
//                     pass 2: read each chunk again, write the gradient, release the slot
//
// Loads continue while a row is reduced and written. The consumers are one group, or two groups that take alternate
// rows: while one waits for its merge, the other one computes. The first threads of the first block process the
// elements of a row outside of whole packs. The thread that holds the label's logit stores the loss, and stores the
// label's element of the gradient again after its pack.
//
// Template parameters: T, the element type; kGroups, groups of consumers (1 or 2).
#pragma once

#include "cross_entropy/ops.cuh"

namespace jaxkern {

constexpr int kLossConsumers = 512;
constexpr int kLossPipelineThreads = kLossConsumers + kWarp;  // one producer warp
constexpr int kLossChunkPacks = 1024;
constexpr int kLossSlotBytes = 16 * kLossChunkPacks;
constexpr int kLossSlots = 13;
constexpr int kLossRingBytes = kLossSlots * kLossSlotBytes;

template <class T, int kGroups> struct LossPipelineShared {
  Barrier empty[kLossSlots];
  struct Group {
    Barrier
        full[kLossSlots];  // per group: every waiter must observe every phase, since a parity repeats after two phases
    Barrier exchanged[2];
    LossStat<T> room[2][kLossConsumers / kGroups / kWarp];
    LossStat<T> exchange[2][kMaxCluster];
  } group[kGroups];
};
template <class T, int kGroups> __global__ void __launch_bounds__(kLossPipelineThreads, 1)
    BothPipeline(const __grid_constant__ LossParams p, int piece_packs) {
  static_assert(sizeof(LossPipelineShared<T, kGroups>) ==
                    104 + kGroups * (120 + (1024 / kWarp / kGroups + 32) * sizeof(LossStat<T>)),
                "plan.py");
#ifdef JAXKERN_HAS_BULK_COPY
  using C = Compute<T>;
  using Stat = LossStat<T>;
  constexpr int N = kVector<T>, kThreads = kLossConsumers / kGroups, kUnroll = kLossChunkPacks / kThreads;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<LossPipelineShared<T, kGroups>*>(shared_bytes + kLossRingBytes);

  const int rank = ClusterRank(), cluster = ClusterSize();
  const int64_t first_row = blockIdx.x / cluster, row_step = gridDim.x / cluster;
  const int begin = rank * piece_packs;
  const int chunks = (piece_packs + kLossChunkPacks - 1) / kLossChunkPacks;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  const T* const logits = static_cast<const T*>(p.logits);

  if (threadIdx.x == 0) {
    for (int s = 0; s < kLossSlots; ++s) {
      InitBarrier(&shared.empty[s], kThreads / kWarp);
      for (auto& group : shared.group) InitBarrier(&group.full[s], 1);
    }
    for (auto& group : shared.group) {
      for (Barrier& exchanged : group.exchanged) InitBarrier(&exchanged, 1);
    }
    FenceBarrierInit();
  }
  // Every block of the cluster must have started and initialized its barriers before remote writes.
  __syncthreads();
  SyncCluster();

  int slot = 0;
  if (threadIdx.x >= kLossConsumers) {
    if (threadIdx.x == kLossConsumers) {
      uint32_t parity = 0;
      int turn = 0;
      for (int64_t r = first_row; r < p.rows; r += row_step, ++turn) {
        const LossRow<T> span(p, r);
        Barrier* const full = shared.group[turn % kGroups].full;
        const int end = min(static_cast<int>(span.end), begin + piece_packs);
        for (int c = 0; c < chunks; ++c) {
          const int from = begin + c * kLossChunkPacks, to = min(end, from + kLossChunkPacks);
          Wait(&shared.empty[slot], parity ^ 1);
          if (from < to) {
            ArriveExpect(&full[slot], (to - from) * 16);
            BulkCopy(shared_bytes + slot * kLossSlotBytes, logits + span.At(from), (to - from) * 16, &full[slot],
                     policy);
          } else {
            Arrive(&full[slot]);
          }
          if (++slot == kLossSlots) slot = 0, parity ^= 1;
        }
      }
    }
  } else {
    const bool smoothing = p.Smoothing();
    const int group = threadIdx.x / kThreads, lane = threadIdx.x % kThreads;
    auto& mine = shared.group[group];
    T* const gradient = static_cast<T*>(p.gradient);
    const auto pack_at = [&](int at_slot, int u) -> const Pack<T, N>& {
      return *reinterpret_cast<const Pack<T, N>*>(shared_bytes + at_slot * kLossSlotBytes + (lane + u * kThreads) * 16);
    };
    uint32_t parities = 0;  // parity of the next phase of each slot's full barrier, one bit per slot
    const auto pass_over_row = [&] {
      slot += chunks;
      if (slot >= kLossSlots) slot -= kLossSlots;
    };
    for (int g = 0; g < group; ++g) pass_over_row();
    int turn = 0;  // number of rows done
    for (int64_t r = first_row + group * row_step; r < p.rows; r += kGroups * row_step, ++turn) {
      const LossRow<T> span(p, r);
      const int end = min(static_cast<int>(span.end), begin + piece_packs);
      const int row_slot = slot;
      const RawLabel raw_label = LoadLabel(p, r);  // first used after pass 1
      const C weight = static_cast<const C*>(p.weight)[r];
      C reference = 0;
      if (smoothing) reference = ReferenceOf(logits[r * p.width]);
      const LossSingles<T> singles(p, span, lane, p.ragged && rank == 0);
      const Pack<T, 1> single[2] = {singles.Load(logits + r * p.width, 0), singles.Load(logits + r * p.width, 1)};

      Stat stat = Stat::Identity();
      for (int c = 0; c < chunks; ++c) {
        Wait(&mine.full[slot], (parities >> slot) & 1);
        parities ^= 1u << slot;
        const int left = end - (begin + c * kLossChunkPacks);
        Pack<T, N> packs[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) packs[u] = pack_at(slot, u);
        if (left < kLossChunkPacks) {
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            if (lane + u * kThreads >= left) packs[u] = Filled<T, N>(FromCompute<T>(-Infinity<C>()));
          }
        }
        if (smoothing) {
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            if (lane + u * kThreads < left) AddAbove(stat, packs[u], reference);
          }
        }
        Accumulate<T>(stat, packs);
        if (++slot == kLossSlots) slot = 0;
      }
      if (p.ragged) {
        Accumulate<T>(stat, single);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (smoothing && singles.column[k] >= 0) stat.above += ToCompute(Element(single[k], 0)) - reference;
        }
      }

      constexpr int kWarps = kThreads / kWarp;
      stat = stat.template MergeLanes<kWarp>(smoothing, false);
      if (lane % kWarp == 0) mine.room[turn % 2][lane / kWarp] = stat;
      SyncThreads(1 + group, kThreads);
      stat = mine.room[turn % 2][lane % kWarps].template MergeLanes<kWarps>(smoothing, false);
      if (cluster > 1) {
        Stat* const exchange = mine.exchange[turn % 2];
        Barrier* const exchanged = &mine.exchanged[turn % 2];
        if (lane == 0) ArriveExpect(exchanged, cluster * sizeof(Stat));
        if (lane < cluster) StoreRemote(&exchange[rank], stat, exchanged, lane);
        Wait(exchanged, (turn / 2) % 2);
        const int from = lane % kMaxCluster;
        stat = (from < cluster ? exchange[from] : Stat::Identity()).template MergeLanes<kMaxCluster>(smoothing, false);
      }

      const Label label = Resolve(p, raw_label);
      Slope<T> slope(p, label, span.head, Base(stat.max), stat.sum, p.template Numbers<C>().width, weight);
      float offset = 0;
      bool one_power = false;
      if constexpr (Slope<T>::kOnePower) one_power = slope.OnePower(&offset);
      bool own = label.at < 0 && rank == 0 && lane == 0;  // this thread stores the loss
      C x_label = 0;
      // The chunk with the label, if this thread holds it.
      const int to_label = slope.label_pack - begin;
      const bool has_label = to_label >= 0 && slope.label_pack < end && to_label % kThreads == lane;
      const int label_chunk = has_label ? to_label / kLossChunkPacks : -1;
      int again = row_slot;
      for (int c = 0; c < chunks; ++c) {
        const int left = end - (begin + c * kLossChunkPacks);
        T* const out = gradient + span.At(begin + c * kLossChunkPacks + lane);
        const auto write = [&](auto map) {
          Pack<T, N> packs[kUnroll];
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) packs[u] = pack_at(again, u);
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) packs[u] = map(packs[u]);
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            if (lane + u * kThreads < left) StoreVector<T, N>(out + u * kThreads * N, packs[u]);
          }
        };
        if (one_power) write([&](const Pack<T, N>& x) { return Slope<T>::OfOnePower(x, offset); });
        else write([&](const Pack<T, N>& x) { return slope.Gradient(x); });
        if (c == label_chunk) {
          const int place = (to_label - c * kLossChunkPacks) * N + slope.label_place;
          const auto x = Filled<T, 1>(reinterpret_cast<const T*>(shared_bytes + again * kLossSlotBytes)[place]);
          own = true, x_label = ToCompute(Element(x, 0));
          slope.SettleHot(stat.sum);
          gradient[r * p.width + label.at] = slope.Gradient(x, true);
        }
        __syncwarp();  // all lanes have read the slot
        if (lane % kWarp == 0) Arrive(&shared.empty[again]);
        if (++again == kLossSlots) again = 0;
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int64_t column = singles.column[k];
        if (column < 0) continue;
        if (column == label.at) {
          own = true, x_label = ToCompute(Element(single[k], 0));
          slope.SettleHot(stat.sum);
        }
        gradient[r * p.width + column] = slope.Gradient(single[k], column == label.at);
      }
      if (own) WriteRow<T>(p, r, stat, label, x_label, reference);
      for (int g = 1; g < kGroups; ++g) pass_over_row();
    }
  }
  // A block must not exit while another one still writes to its shared memory.
  __syncwarp();
  SyncCluster();
#endif
}

}  // namespace jaxkern
