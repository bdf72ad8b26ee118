// The router of a mixture of experts: for each token its k most probable experts, their weights, and the slots of the token.
//
//     RouteChoose     one warp per token, a contiguous run of tokens per warp: experts and weights. In shared memory every warp counts
//                     the tokens that chose each expert; a slot is at first the number of earlier tokens of the block with this expert.
//     RoutePlace      the same blocks: adds the tokens of earlier blocks, and the first slot of the expert
//
// The blocks are so few that each block of RoutePlace reads the counts of all blocks. Memory traffic: the logits are read once; results
// are written once, and slots three times.
#pragma once

#include "common/exponential.cuh"
#include "common/reduce.cuh"
#include "row_of_warp.cuh"

namespace jaxkern {

constexpr uint32_t kRouteThreads = 1024, kRouteWarps = kRouteThreads / 32, kRouteExperts = 512;

struct RouteArgs {
  const void* logits;  // [tokens, width]
  void* weights;       // [tokens, k]
  uint32_t* experts;   // [tokens, k]
  uint32_t* slots;     // [tokens, k]
  uint32_t* counts;    // [width]
  uint32_t* totals;    // [blocks, width]: how many tokens of a block chose an expert
  uint32_t tokens, width, k;
  uint32_t run;       // tokens of a warp; kRouteWarps * run < 2^16
  uint32_t capacity;  // of an expert
  bool normalized;
};

// width <= min(kRouteExperts, 32 * kVector * kPacks), k <= 32. Rows are whole vectors, and the logits are aligned to them.
template <class T, int kVector, int kPacks> __global__ void __launch_bounds__(kRouteThreads)
    RouteChoose(const __grid_constant__ RouteArgs a) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  constexpr int kOwn = kVector * kPacks;
  constexpr bool kAhead = kOwn <= 8;  // a token is loaded while the one before it is routed, if registers suffice
  constexpr uint32_t kStep = 32 * kVector;
  __shared__ uint64_t room[kRouteThreads];
  __shared__ uint16_t counts[kRouteWarps * kRouteExperts];  // [kRouteWarps, width]
  const uint32_t t = threadIdx.x, lane = t % 32, first = lane * kVector, warp = t / 32;
  uint16_t* own = counts + warp * a.width;
  for (uint32_t e = lane; e < a.width; e += 32) own[e] = 0;
  __syncwarp();
  const uint32_t begin = min((blockIdx.x * kRouteWarps + warp) * a.run, a.tokens), end = min(begin + a.run, a.tokens);
  const T* logits = static_cast<const T*>(a.logits);
  auto load = [&](uint32_t token, Pack<T, kVector>(&packs)[kPacks]) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      packs[p] = ZeroPack<T, kVector>();
      if (token < end && first + p * kStep < a.width) {
        packs[p] = LoadVector<T, kVector>(logits + static_cast<int64_t>(token) * a.width + first + p * kStep);
      }
    }
  };
  uint32_t exists = 0;  // the bits of the elements of a lane
#pragma unroll
  for (int i = 0; i < kOwn; ++i) exists |= static_cast<uint32_t>(first + i / kVector * kStep < a.width) << i;
  Pack<T, kVector> packs[kPacks], next[kPacks];
  load(begin, packs);
  for (uint32_t token = begin; token < end; ++token) {
    if constexpr (kAhead) load(token + 1, next);
    RowOfWarp<kVector, kPacks> held;
    held.first = first, held.left = exists;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const T x = Element(packs[i / kVector], i % kVector);
      held.keys[i] = ToKey<Bits, Order::kFloat>(*reinterpret_cast<const Bits*>(&x));
    }
    const uint64_t kept = held.Select(a.k, room + warp * 32);
    const Bits bits = FromKey<Bits, Order::kFloat>(KeyOf(kept));
    const float value = ToCompute(*reinterpret_cast<const T*>(&bits)), largest = __shfl_sync(~0u, value, 0);
    const float mass = lane < a.k ? expf(value - largest) : 0;
    float sum = mass;
    if (!a.normalized) {
      sum = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (exists >> i & 1) sum += expf(ToCompute(Element(packs[i / kVector], i % kVector)) - largest);
      }
    }
    // Of the lanes below k, the sum over these, or over all.
    for (uint32_t by = 1; by < (a.normalized ? a.k : 32); by *= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (lane < a.k) {
      const int64_t at = static_cast<int64_t>(token) * a.k + lane;
      const uint32_t expert = ColumnOf(kept);
      // As in softmax, the weights of a token without a logit above -inf are 0.
      static_cast<T*>(a.weights)[at] = FromCompute<T>(largest == -Infinity<float>() ? 0 : mass / sum);
      a.experts[at] = expert;
      a.slots[at] = own[expert]++;  // the experts of a token differ
    }
    __syncwarp();
    if constexpr (kAhead) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) packs[p] = next[p];
    } else {
      load(token + 1, packs);
    }
  }
  __syncthreads();
  for (uint32_t e = t; e < a.width; e += kRouteThreads) {
    uint32_t sum = 0;
    constexpr int kAtOnce = 8;
    for (uint32_t w = 0; w < kRouteWarps; w += kAtOnce) {
      uint32_t of_warps[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) of_warps[i] = counts[(w + i) * a.width + e];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        counts[(w + i) * a.width + e] = sum;
        sum += of_warps[i];
      }
    }
    a.totals[blockIdx.x * a.width + e] = sum;
  }
  __syncthreads();
  for (int64_t at = static_cast<int64_t>(begin) * a.k + lane; at < static_cast<int64_t>(end) * a.k; at += 32) {
    a.slots[at] += own[a.experts[at]];
  }
}

// The grid of RouteChoose. kBounded: experts have a capacity.
template <bool kBounded> __global__ void __launch_bounds__(kRouteThreads)
    RoutePlace(const __grid_constant__ RouteArgs a) {
  __shared__ uint32_t all[kRouteThreads], before[kRouteThreads], sums[kRouteWarps];
  const uint32_t t = threadIdx.x;
  all[t] = before[t] = 0;
  __syncthreads();
  // Thread t has expert t % width, and every `groups`-th block.
  const uint32_t groups = kRouteThreads / a.width, expert = t % a.width;
  uint32_t sum = 0, earlier = 0;
  for (uint32_t b = t / a.width; b < (t < groups * a.width ? gridDim.x : 0); b += groups) {
    const uint32_t count = a.totals[b * a.width + expert];
    sum += count;
    earlier += b < blockIdx.x ? count : 0;
  }
  if (sum) atomicAdd(&all[expert], sum);
  if (earlier) atomicAdd(&before[expert], earlier);
  __syncthreads();
  const uint32_t count = all[t];  // 0 from `width` on
  if (blockIdx.x == 0 && t < a.width) a.counts[t] = count;
  const uint32_t start = SumOfThreadsBefore(count, sums);
  if (!kBounded) before[t] += start;
  __syncthreads();
  const int64_t run = static_cast<int64_t>(kRouteWarps) * a.run * a.k, all_slots = static_cast<int64_t>(a.tokens) * a.k;
  const int64_t end = min((blockIdx.x + 1) * run, all_slots);
  for (int64_t at = blockIdx.x * run + t; at < end; at += kRouteThreads) {
    const uint32_t chosen = a.experts[at], slot = a.slots[at] + before[chosen];
    a.slots[at] = !kBounded ? slot : slot < a.capacity ? chosen * a.capacity + slot : ~0u;
  }
}

}  // namespace jaxkern
