// Gradients of RMSNorm and LayerNorm: dx (which is also the gradient of the residual), dscale and dbias in one pass.
//
//     NormBackward<Norm<...>, N, kLanes, kPacks, kThreads, kStages, kWhole, kBlocks>   dx; sums over the rows of each block
//     NormSums<C, S>                                                                  over the blocks: dscale, dbias
//
// A row belongs to the same threads as in forward.cuh, a group of them. The groups of all `blocks` blocks are numbered, and
// group i takes row i, then every row that is a multiple of the number of groups further on. With kLanes < 0 a group is a
// cluster, and there are as many of them as the GPU runs at once, at most `blocks`. The sums over rows stay in registers,
// because a thread always has the same columns. At the end each block adds the sums of its groups in order, and NormSums
// adds the sums of the blocks in order, so results are reproducible. With clusters this holds for runs on the same GPU,
// because the number of clusters that run at once depends on it.
//
// Rows are copied to kStages slots of shared memory asynchronously and are read there, which needs no registers. A thread
// copies the packs that it reads itself, into room that no other thread touches; that needs no barriers. Packs of two
// bytes cannot be copied so: then (`shifted`) the threads of a row copy the 16-byte vectors that it touches, and wait for
// each other.
//
// Every element of s, g and sum_g is read once from memory, and dx written once. The statistics are computed again:
// nothing else must be kept from the forward pass.
#pragma once

#include "norm.cuh"

namespace jaxkern {

constexpr int kNormKept = 80;  // words of registers, of a row and of sums over rows in a thread

// The slots of one array: kStages rows for each group of kGroup threads.
template <class T, int N, int kGroup, int kPacks, int kThreads, int kStages, bool kShifted> struct NormSlots {
  static constexpr int kGroups = kThreads / kGroup, kEach = kVector<T>;
  char* room;
  const T* array;
  int64_t size;  // elements of the array
  int width, lane, group;

  // Bytes of a row's vectors at any alignment; of a stage.
  __device__ __forceinline__ int RowBytes() const { return 16 * ((width + kEach - 1) / kEach + 1); }
  __device__ __forceinline__ int StageBytes() const {
    return kShifted ? kGroups * RowBytes() : kPacks * kThreads * static_cast<int>(sizeof(Pack<T, N>));
  }
  __device__ __forceinline__ Pack<T, N>* Own(int stage, int i) const {
    return reinterpret_cast<Pack<T, N>*>(room + stage * StageBytes()) + i * kThreads + threadIdx.x;
  }

  // Copies pack i of the thread, which exists; if kShifted, the whole row.
  __device__ __forceinline__ void Fetch(int stage, int64_t row, int i) const {
    const int64_t first = row * width;
    if constexpr (kShifted) {
      const int64_t begin = first / kEach, end = (first + width + kEach - 1) / kEach;
      char* const to = room + stage * StageBytes() + group * RowBytes();
      for (int v = lane; v < end - begin; v += kGroup) {
        const int64_t at = (begin + v) * kEach;
        CopyAsyncFront(to + 16 * v, array + at, static_cast<int>(min(size - at, int64_t{kEach})) * sizeof(T));
      }
    } else {
      CopyAsync<N * sizeof(T)>(Own(stage, i), array + first + (lane + i * kGroup) * N);
    }
  }
  __device__ __forceinline__ Pack<T, N> Read(int stage, int64_t row, int i) const {
    if constexpr (kShifted) {
      const T* const from = reinterpret_cast<const T*>(room + stage * StageBytes() + group * RowBytes());
      return Filled<T, N>(from[static_cast<int>(row * width % kEach) + lane + i * kGroup]);
    } else {
      return *Own(stage, i);
    }
  }
};

template <class Op, int N, int kLanes, int kPacks, int kThreads, int kStages, bool kWhole, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) NormBackward(const __grid_constant__ NormParams p) {
  using T = typename Op::T;
  using O = typename Op::O;
  using P = typename Op::P;
  using C = typename Op::C;
  using Owners = RowOwners<kLanes, kThreads>;
  constexpr int kGroup = Owners::kGroup, kGroups = Owners::kGroups;
  constexpr int kSums = 2 + 2 * Op::kCentre;
  constexpr bool kShifted = N * (sizeof(T) < sizeof(O) ? sizeof(T) : sizeof(O)) < 4;
  static_assert(kLanes >= 0 || !kShifted, "a block copies its own packs");
  // What a thread computes of its packs stays in registers, if these are enough. Not so in a block of odd rows: there the
  // compiler branches around each of the many small packs (layer_norm, bfloat16, 32768 x 4097: 689 us, against 443).
  constexpr bool kKept =
      !(kShifted && kLanes == 0) && kPacks * N * (2 + Op::kScaleSum + Op::kBias) * sizeof(C) <= 4 * kNormKept;
  constexpr int kHeld = kKept ? kPacks : 1;
  __shared__ ClusterSums<C, Owners::kBlocks, kSums> cluster;
  __shared__ C room_of_mean[kThreads / kWarp][1], room[2][kThreads / kWarp][kSums];
  JAXKERN_DYNAMIC_SHARED(shared);

  const int lane = Owners::Lane(), group = Owners::GroupOfBlock();
  cluster.Init();
  const int width = static_cast<int>(p.width), packs = width / N;
  const int64_t walkers = kLanes < 0 ? gridDim.x / Owners::kBlocks : p.blocks;
  const int64_t step = walkers * kGroups, size = p.rows * width;
  NormSlots<T, N, kGroup, kPacks, kThreads, kStages, kShifted> x, r;
  NormSlots<O, N, kGroup, kPacks, kThreads, kStages, kShifted> g;
  x = {shared, static_cast<const T*>(p.x), size, width, lane, group};
  g = {shared + kStages * x.StageBytes(), static_cast<const O*>(p.g), size, width, lane, group};
  r = {g.room + kStages * g.StageBytes(), static_cast<const T*>(p.residual), size, width, lane, group};
  const auto has = [&](int i) { return kWhole || lane + i * kGroup < packs; };
  const auto fetch = [&](int stage, int64_t row) {
#pragma unroll
    for (int i = 0; i < (kShifted ? 1 : kPacks); ++i) {
      if (row >= p.rows || !(kShifted || has(i))) continue;
      x.Fetch(stage, row, i);
      g.Fetch(stage, row, i);
      if constexpr (Op::kResidual) r.Fetch(stage, row, i);
    }
    CommitCopies();
  };

  // Deviations are multiplied by a power of 2 near 1 / sqrt(width), so that the sum of their squares overflows only if
  // their mean does.
  const C each = C(1) / static_cast<C>(width);
  C unit = 1;
  for (int w = width; w > 1; w /= 4) unit *= C(0.5);
  C dscale[kPacks][N] = {}, dbias[kPacks][N] = {};
  int64_t base = static_cast<int64_t>(Owners::Block()) * kGroups;
#pragma unroll
  for (int s = 0; s + 1 < kStages; ++s) fetch(s, base + group + s * step);
  cluster.Ready();
  int stage = 0, turn = 0;
  uint32_t calls = 0;
  for (; base < p.rows; base += step) {  // as often for all groups, which reduce together
    const int64_t row = base + group;
    const bool live = row < p.rows;
    WaitForCopyGroups<kStages - 2>();
    if constexpr (kShifted && kLanes == 0) __syncthreads();
    else if constexpr (kShifted) __syncwarp();
    fetch(stage == 0 ? kStages - 1 : stage - 1, row + (kStages - 1) * step);  // where the row before has been read

    C mean = 0, v[kHeld][N], h[kHeld][N];  // h and s of a pack; then (s - mean) * unit
    if constexpr (Op::kCentre) {
      C total[1] = {0};
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (!(live && has(i))) continue;
        C(&own)[N] = v[i % kHeld];
        Unpack(x.Read(stage, row, i), own);
        total[0] += Fold(own, SumOf());
      }
      RowSums<kLanes, kThreads>(total, room_of_mean);
      cluster.Add(total, calls++);
      mean = total[0] * each;
    }
    const auto deviations = [&](int i, C(&own)[N]) {
      if constexpr (!(kKept && Op::kCentre)) Unpack(x.Read(stage, row, i), own);
#pragma unroll
      for (int j = 0; j < N; ++j) own[j] = Op::kCentre ? own[j] * unit - mean * unit : own[j] * unit;
    };
    const auto gradients = [&](int i, C(&own)[N]) {
      C scale[N];
      Unpack(g.Read(stage, row, i), own);
      if constexpr (Op::kScale) {
        LoadParameters<P, N>(p.scale, (lane + i * kGroup) * N, scale);
#pragma unroll
        for (int j = 0; j < N; ++j) own[j] = Rounded(own[j], scale[j]);
      }
    };
    C sums[kSums] = {};  // of v^2, v * h, v and h
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (!(live && has(i))) continue;
      C(&a)[N] = v[i % kHeld], (&b)[N] = h[i % kHeld];
      deviations(i, a);
      gradients(i, b);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sums[0] += a[j] * a[j];
        sums[1] += a[j] * b[j];
        if constexpr (Op::kCentre) {
          sums[2] += a[j];
          sums[3] += b[j];
        }
      }
    }
    RowSums<kLanes, kThreads>(sums, room[turn]);
    cluster.Add(sums, calls++);
    C shift = 0, delta = 0;  // means of h and v
    if constexpr (Op::kCentre) {
      delta = sums[2] * each;
      sums[0] = Max(sums[0] - delta * sums[2], C(0));
      sums[1] -= delta * sums[3];
      shift = sums[3] * each;
    }
    const C rstd = InverseRoot(sums[0] * (each / (unit * unit)) + static_cast<C>(p.eps));
    const C factor = rstd / unit;             // z = (v - delta) * factor
    const C slope = sums[1] * each * factor;  // mean(h * z)

#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (!(live && has(i))) continue;
      C(&z)[N] = v[i % kHeld], (&out)[N] = h[i % kHeld];
      if constexpr (!kKept) {
        deviations(i, z);
        gradients(i, out);
      }
      C own[N], more[N];
      Unpack(g.Read(stage, row, i), own);
      if constexpr (Op::kResidual) Unpack(r.Read(stage, row, i), more);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        z[j] = (z[j] - delta) * factor;
        if constexpr (Op::kScaleSum) dscale[i][j] += own[j] * z[j];
        if constexpr (Op::kBias) dbias[i][j] += own[j];
        out[j] = (out[j] - shift - z[j] * slope) * rstd;
        if constexpr (Op::kResidual) out[j] += more[j];
      }
      StorePack(p.y, row * width + (lane + i * kGroup) * N, Repack<T, N>(out));
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
    turn ^= 1;
  }
  if constexpr (!Op::kScaleSum && !Op::kBias) return;

  // The sums of the block's groups: [kGroups][width] in shared memory, then a thread per column.
  WaitForCopyGroups<0>();
  auto* const partial = static_cast<C*>(p.partial) + static_cast<int64_t>(Owners::Block()) * width;
  const auto write = [&](C(&sum)[kPacks][N], C* out) {
    C* const to = kGroups == 1 ? out : reinterpret_cast<C*>(shared) + group * width;
    if constexpr (kGroups > 1) __syncthreads();
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (!has(i)) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) to[(lane + i * kGroup) * N + j] = sum[i][j];
    }
    if constexpr (kGroups > 1) {
      __syncthreads();
      for (int c = threadIdx.x; c < width; c += kThreads) {
        C total = 0;
#pragma unroll 4
        for (int k = 0; k < kGroups; ++k) total += reinterpret_cast<const C*>(shared)[k * width + c];
        out[c] = total;
      }
    }
  };
  const int64_t second = Op::kScaleSum ? static_cast<int64_t>(p.blocks) * width : 0;
  if constexpr (Op::kScaleSum) write(dscale, partial);
  if constexpr (Op::kBias) write(dbias, partial + second);
  if constexpr (kLanes < 0) {  // zeros for clusters that there are not
    C none[kPacks][N] = {};
    for (int64_t b = walkers; Owners::Block() + b < p.blocks; b += walkers) {
      if constexpr (Op::kScaleSum) write(none, partial + b * width);
      if constexpr (Op::kBias) write(none, partial + second + b * width);
    }
  }
}

struct NormSumsParams {
  const void* partial;  // [sums][blocks][width]
  void* out[2];         // [width] each
  int64_t width;
  int32_t blocks;
};
static_assert(sizeof(NormSumsParams) == 40, "plan.py lays it out");

constexpr int kNormSumsWarps = 16;

// out[y][c] = sum over blocks of partial[y][block][c]. A block takes 32 columns; its warps take every 16th row.
template <class C, class S> __global__ void __launch_bounds__(kNormSumsWarps* kWarp)
    NormSums(const __grid_constant__ NormSumsParams p) {
  __shared__ C sums[kNormSumsWarps][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  C sum = 0;
  if (column < p.width) {
    const C* const from = static_cast<const C*>(p.partial) + blockIdx.y * p.blocks * p.width + column;
#pragma unroll 8
    for (int b = warp; b < p.blocks; b += kNormSumsWarps) sum += from[b * p.width];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= p.width) return;
#pragma unroll
  for (int w = 1; w < kNormSumsWarps; ++w) sum += sums[w][lane];
  static_cast<S*>(blockIdx.y ? p.out[1] : p.out[0])[column] = FromCompute<S>(sum);
}

}  // namespace jaxkern
