// The small plan: one launch, no sort. A team of threads, a warp or a block, takes one update and a slab of
// its row's columns, and looks through all indices for others that go to the same row. If there are
// c of them, the team's own being number r, and S is the largest power of two up to c and to the team's
// limit, the first S of these teams take a share of the columns each, for all c updates; the others
// have nothing to do. So the work of a team is the same whether all indices differ or all are
// equal, and the order of the additions depends on c alone.
#pragma once

#include "index_add.cuh"

namespace jaxkern {

constexpr int kSmallThreads = 256, kSmallVectors = 4;  // vectors a thread, when the row has as many

struct SmallShape {
  int64_t vectors = 0;     // of a row
  int64_t slabs = 0;       // of a row; each kTeam * each vectors
  int each = 1;            // vectors a thread
  int most_shares = 1;     // threads that share one column: eight columns stay side by side
  int64_t items = 0;       // teams
  Divider by_slabs, by_positions;
  int words = 0;           // of a team's bit set of updates
  int64_t fill_after = 0;
  FillShape fill;
};

// Bytes of dynamic shared memory: a bit set and a list of updates a team, a vector of sums a thread.
template <class C, int N, int kTeam> int SmallBytes(int count) {
  const int words = (count + 31) / 32, teams = kSmallThreads / kTeam;
  return kSmallThreads * N * static_cast<int>(sizeof(C)) + teams * words * (4 + 32 * 2);
}

template <Reduction kOp, class T, int N, int kTeam>
__global__ void __launch_bounds__(kSmallThreads)
SmallUpdates(const __grid_constant__ IndexRun run, const __grid_constant__ SmallShape s) {
  using C = Compute<T>;
  constexpr int kTeams = kSmallThreads / kTeam, kTeamWarps = kTeam / kWarp, kAhead = 8;
  static_assert(kTeam == kWarp || kTeam == kSmallThreads);
  if (blockIdx.x >= s.fill_after) {
    __shared__ uint32_t bits[kFillRows / 32];
    FillTile<kOp, T, N>(run, s.fill, s.vectors, blockIdx.x - s.fill_after, bits,
                        [&](uint32_t first, int rows, uint32_t* marks) {
      for (uint32_t p = threadIdx.x; p < run.positions; p += kSmallThreads) {
        const uint32_t r = KeyAt(run, p) - first;
        if (r < static_cast<uint32_t>(rows)) atomicOr(&marks[r / 32], 1u << (r % 32));
      }
    });
    return;
  }
  extern __shared__ __align__(16) char shared_bytes[];
  const int team = threadIdx.x / kTeam, t = threadIdx.x % kTeam, lane = threadIdx.x % kWarp, warp = t / kWarp;
  C* const sums = reinterpret_cast<C*>(shared_bytes) + static_cast<int64_t>(team) * kTeam * N;
  uint32_t* const words = reinterpret_cast<uint32_t*>(shared_bytes + kSmallThreads * N * sizeof(C)) + team * s.words;
  uint16_t* const list = reinterpret_cast<uint16_t*>(shared_bytes + kSmallThreads * N * sizeof(C) + kTeams * s.words * 4) +
                         team * s.words * 32;
  const auto sync = [] {
    if constexpr (kTeam == kWarp) __syncwarp();
    else __syncthreads();
  };
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kTeams + team;
  if (item >= s.items) return;  // the whole team
  const int64_t rest = s.by_slabs.Div(item), slab = item - rest * s.slabs;
  const int64_t o = s.by_positions.Div(rest);
  const uint32_t position = static_cast<uint32_t>(rest - o * run.positions);
  const uint32_t b_begin = run.batch > 1 ? run.by_count.Div(position) * run.count : 0;
  const int mine = static_cast<int>(position - b_begin);

  // Which updates go to the same row.
  const uint32_t key = KeyOf(run, LoadIndex(run, position), position);
  const int rounds = (s.words + kTeamWarps - 1) / kTeamWarps;
  for (int round = 0; round < rounds; round += kAhead) {
    RawIndex raw[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t p = (round + i) * kTeam + t;
      raw[i] = p < run.count ? LoadIndex(run, b_begin + p) : RawIndex{};
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t p = (round + i) * kTeam + t;
      const uint32_t same = __ballot_sync(~0u, p < run.count && KeyOf(run, raw[i], b_begin + p) == key);
      const int word = (round + i) * kTeamWarps + warp;
      if (lane == 0 && word < s.words) words[word] = same;
    }
  }
  if (key >= run.dropped) return;  // the whole team
  sync();
  int all = 0, before = 0;
  for (int w = 0; w < s.words; ++w) {
    const uint32_t word = words[w];
    all += __popc(word);
    if (w * 32 <= mine) before += __popc(mine - w * 32 >= 32 ? word : word & ((1u << (mine - w * 32)) - 1));
  }

  const C alpha = Alpha<C>(run);
  const T* const source = static_cast<const T*>(run.source) + o * run.source_stride * run.inner;
  T* const out = static_cast<T*>(run.out) + (o * run.out_stride + run.OutRow(key)) * run.inner;
  const int64_t slab_begin = slab * kTeam * s.each;
  if (all == 1) {
    const T* const row = source + run.SourceRow(position) * run.inner;
    Pack<T, N> part[kSmallVectors] = {}, old[kSmallVectors] = {};
#pragma unroll
    for (int i = 0; i < kSmallVectors; ++i) {
      const int64_t v = slab_begin + t + i * kTeam;
      if (i < s.each && v < s.vectors) {
        part[i] = LoadPart<T, N>(row + v * N);
        if (run.reads_out) old[i] = LoadPart<T, N>(out + v * N);
      }
    }
#pragma unroll
    for (int i = 0; i < kSmallVectors; ++i) {
      const int64_t v = slab_begin + t + i * kTeam;
      if (i < s.each && v < s.vectors) {
        C total[N];
        Unpack(part[i], total);
        StorePart<T, N>(out + v * N, FinishedPack<kOp, T, N>(total, alpha, run.reads_out, old[i]));
      }
    }
    return;
  }
  int shares = 1;
  while (shares < s.most_shares && 2 * shares <= all) shares *= 2;
  if (before >= shares) return;  // the whole team

  for (int w = t; w < s.words; w += kTeam) {
    int at = 0;
    for (int j = 0; j < w; ++j) at += __popc(words[j]);
    for (uint32_t word = words[w]; word; word &= word - 1) list[at++] = w * 32 + __ffs(word) - 1;
  }
  sync();
  // `width` columns side by side, `shares` threads to each, which take every shares-th update.
  const int width = kTeam / shares, first = t / width, c = t % width;
  for (int i = 0; i < s.each; ++i) {
    const int64_t v = slab_begin + (before * s.each + i) * width + c;
    const bool active = v < s.vectors;
    Pack<T, N> x = {};
    if (active && first == 0 && run.reads_out) x = LoadPart<T, N>(out + v * N);
    C total[N];
#pragma unroll
    for (int j = 0; j < N; ++j) total[j] = Identity<kOp, C>();
    for (int u = first; active && u < all; u += 4 * shares) {
      Pack<T, N> part[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (u + k * shares < all) part[k] = LoadPart<T, N>(source + run.SourceRow(b_begin + list[u + k * shares]) * run.inner + v * N);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (u + k * shares < all) Accumulate<kOp>(total, part[k]);
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) sums[j * kTeam + t] = total[j];
    sync();
    if (active && first == 0) {
      for (int f = 1; f < shares; ++f) {
#pragma unroll
        for (int j = 0; j < N; ++j) total[j] = Combined<kOp>(total[j], sums[j * kTeam + f * width + c]);
      }
      StorePart<T, N>(out + v * N, FinishedPack<kOp, T, N>(total, alpha, run.reads_out, x));
    }
    sync();
  }
}

template <Reduction kOp, class T, int N, int kTeam>
cudaError_t LaunchSmallTeam(const IndexRun& run, bool fills, cudaStream_t stream) {
  constexpr int kTeams = kSmallThreads / kTeam;
  SmallShape s;
  s.vectors = run.inner / N;
  while (s.each < kSmallVectors && s.vectors * run.positions * run.outer > int64_t{kTeam} * s.each * 4096 &&
         s.vectors > kTeam * s.each) {
    s.each *= 2;
  }
  s.most_shares = kTeam;
  while (s.most_shares > kTeam / 8 && kTeam / s.most_shares < s.vectors) s.most_shares /= 2;
  s.slabs = (s.vectors + kTeam * s.each - 1) / (kTeam * s.each);
  s.items = s.slabs * run.positions * run.outer;
  s.by_slabs = Divider(s.slabs);
  s.by_positions = Divider(run.positions);
  s.words = (run.count + 31) / 32;
  s.fill_after = (s.items + kTeams - 1) / kTeams;
  int64_t blocks = s.fill_after;
  if (fills) {
    s.fill = FillShapeOf(run.dropped, run.outer, s.vectors, N * sizeof(T));
    blocks += s.fill.blocks;
  }
  const int bytes = SmallBytes<Compute<T>, N, kTeam>(run.count);
  return Launch(SmallUpdates<kOp, T, N, kTeam>, {blocks, 1, kSmallThreads, bytes}, stream, run, s);
}

template <Reduction kOp, class T, int N>
cudaError_t LaunchSmall(const IndexRun& run, bool fills, cudaStream_t stream) {
  if (run.inner / N <= kWarp) return LaunchSmallTeam<kOp, T, N, kWarp>(run, fills, stream);
  return LaunchSmallTeam<kOp, T, N, kSmallThreads>(run, fills, stream);
}

}  // namespace jaxkern
