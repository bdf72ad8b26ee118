// The segmented reduction of ascending indices, where rows are a few elements or no whole vectors. Source is then read
// as it lies in memory, whatever its rows are: a block brings a tile of it to shared memory, some places and, where
// rows are long, a slab of their columns, as vectors of 16 bytes. Then it
//
//     lists the runs     a thread some places: at which of them a run of equal keys ends
//     adds them up       a thread a run and column, from shared memory, and writes the row, which mostly lies beside
//                        its neighbours' in out
//
// A run that ends within kTileReach places behind the tile is taken, from memory, by the tile that it begins in, and
// skipped by the next; any longer one leaves its parts for ReduceFixup. Sums of float are made in double, whose
// additions this has room for, and rounded once: a run that no tile cuts is as exact as float can say.
#pragma once

#include "index_add_reduce.cuh"

namespace jaxkern {

constexpr int kTileThreads = 256, kTileAhead = 8;  // vectors a thread, under way at once

struct TileShape {
  int slab, pitch;       // columns of a tile, all but the last of a row; elements from one place to the next
  int64_t slabs;
  int line_packs;        // vectors that hold a line: a slab of a row, or where slabs are whole rows all of the tile
  Divider by_slabs, by_columns, by_packs;
  int values;            // elements of shared memory

  TileShape(const IndexTile& tile, int64_t inner, int n)
      : slab(static_cast<int>(tile.slab)), pitch(static_cast<int>(tile.pitch)), slabs((inner + slab - 1) / slab),
        line_packs((slab + 2 * n - 2) / n), by_slabs(slabs), by_columns(slab),
        by_packs(line_packs), values((static_cast<int>(tile.places) * pitch + 3 * n) / n * n) {}
  // values; the keys of two places before the tile, of its own and of those within reach; the ends of runs
  int Bytes(int places, int element_bytes) const {
    const int bytes = values * element_bytes + (places + kTileReach + 3) * 4 + places * 2;
    return bytes < kFillRows / 32 * 4 + 8 ? kFillRows / 32 * 4 + 8 : bytes;
  }
};

template <Reduction kOp, class T>
__global__ void __launch_bounds__(kTileThreads, 4)
ReduceTiles(const __grid_constant__ IndexRun run, const __grid_constant__ ReduceShape s,
            const __grid_constant__ TileShape tile) {
  using C = Compute<T>;
  // Floats are summed in double, which costs nothing here and rounds a sum once.
  using A = std::conditional_t<kOp == Reduction::kSum && std::is_same_v<T, float>, double, C>;
  constexpr int kN = kVector<T>, kKeys = (kTilePlaces + kTileReach) / kTileThreads + 1;
  constexpr uint32_t kNone = UINT32_MAX;  // a key that no row has
  extern __shared__ __align__(16) char shared_bytes[];
  const int t = threadIdx.x;
  if (blockIdx.x < s.fill.blocks) {
    uint32_t* const bits = reinterpret_cast<uint32_t*>(shared_bytes);
    FillTile<kOp, T, 1>(run, s.fill, run.inner, blockIdx.x, bits, [&](uint32_t first, int rows, uint32_t* marks) {
      MarkTouched(run, first, rows, marks, bits + kFillRows / 32);
    });
    return;
  }
  T* const values = reinterpret_cast<T*>(shared_bytes);
  uint32_t* const keys = reinterpret_cast<uint32_t*>(values + tile.values) + 2;
  uint16_t* const ends = reinterpret_cast<uint16_t*>(keys + s.chunk + kTileReach + 1);
  __shared__ uint32_t warp_runs[kTileThreads / kWarp];

  const int64_t block = blockIdx.x - s.fill.blocks, item = tile.by_slabs.Div(block), o = s.by_chunks.Div(item);
  const uint32_t number = static_cast<uint32_t>(item - o * s.chunks), begin = number * s.chunk;
  const int held = static_cast<int>(min(s.chunk, run.positions - begin));
  const int64_t column = (block - item * tile.slabs) * tile.slab;
  const int width = static_cast<int>(min(int64_t{tile.slab}, run.inner - column));
  const int64_t before = begin * run.inner + column;  // elements of this slice of source
  const T* const from = static_cast<const T*>(run.source) + o * run.source_stride * run.inner + before;

  // The keys, all of them under way at once, and the source behind them.
  uint32_t key[kKeys];
  const int wanted = static_cast<int>(min(s.chunk + kTileReach, run.positions - begin));
  if (run.keys) {
#pragma unroll
    for (int u = 0; u < kKeys; ++u) {
      const int i = t + u * kTileThreads;
      key[u] = i < wanted ? __ldg(run.keys + begin + i) : kNone;
    }
  }
  // Element `ahead` of shared memory holds the tile's first; both lie equally far behind a boundary of 16 bytes.
  // Vectors may stick out of the tile, not of the slice of source, of which `low` and `high` are the ends.
  const int ahead = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16 / sizeof(T));
  const int64_t low = -before, high = run.positions * run.inner - before;
  const auto put = [&](T* to, const Pack<T, kN>& part) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(part.word);
  };
  if (tile.slabs == 1) {  // all of the tile is one stretch of memory
    const int elements = held * width, all = (ahead + elements + kN - 1) / kN;
    const int i = t + (-ahead < low), end = all - (all * kN - ahead > high);
    const T* p = from + (i * kN - ahead);
    T* to = values + i * kN;
    for (int left = end - i; left > 0; left -= kTileAhead * kTileThreads) {
      Pack<T, kN> part[kTileAhead];
#pragma unroll
      for (int u = 0; u < kTileAhead; ++u) {
        if (u * kTileThreads < left) part[u] = LoadVector<T, kN>(p + u * kTileThreads * kN);
      }
#pragma unroll
      for (int u = 0; u < kTileAhead; ++u) {
        if (u * kTileThreads < left) put(to + u * kTileThreads * kN, part[u]);
      }
      p += kTileAhead * kTileThreads * kN;
      to += kTileAhead * kTileThreads * kN;
    }
    const int head = -ahead < low ? min(kN - ahead, elements) : 0, tail = max(end * kN - ahead, head);
    if (t < head) values[ahead + t] = from[t];
    if (t < elements - tail) values[ahead + tail + t] = from[tail + t];
  } else {
    const int packs = held * tile.line_packs;
    const bool safe = low <= -kN && high >= (held - 1) * run.inner + width + kN;
    struct Place {
      int64_t line;    // where the line of a vector begins in source
      int at, column;  // and in shared memory; the vector's own first column, which may be before that
    };
    const auto place_of = [&](int i) {
      const int line = static_cast<int>(tile.by_packs.Div(static_cast<uint32_t>(i))), at = ahead + line * tile.pitch;
      return Place{line * run.inner, at, at / kN * kN + (i - line * tile.line_packs) * kN - at};
    };
    const auto inside = [&](const Place& p) {
      const int64_t g = p.line + p.column;
      return p.column > -kN && p.column < width && (safe || (g >= low && g + kN <= high));
    };
    for (int base = t; base < packs; base += kTileAhead * kTileThreads) {
      Pack<T, kN> part[kTileAhead];
      int to[kTileAhead];
#pragma unroll
      for (int u = 0; u < kTileAhead; ++u) {
        const int i = base + u * kTileThreads;
        const Place p = place_of(i);
        to[u] = -1;
        if (i < packs && inside(p)) {
          part[u] = LoadVector<T, kN>(from + (p.line + p.column));
          to[u] = p.at + p.column;
        }
      }
#pragma unroll
      for (int u = 0; u < kTileAhead; ++u) {
        if (to[u] >= 0) put(values + to[u], part[u]);
      }
    }
#pragma unroll 1
    for (int i = t; !safe && i < packs; i += kTileThreads) {
      const Place p = place_of(i);
      if (inside(p)) continue;
      for (int c = max(p.column, 0); c < min(p.column + kN, width); ++c) values[p.at + c] = from[p.line + c];
    }
  }
  const int listed_keys = static_cast<int>(s.chunk) + kTileReach;
  if (run.keys) {
#pragma unroll
    for (int u = 0; u < kKeys; ++u) {
      if (t + u * kTileThreads < listed_keys) keys[t + u * kTileThreads] = key[u];
    }
  }
  // Those that are not there yet: all of indices that are no keys; the last; -1, before the tile; and -2, before the
  // tile before it.
#pragma unroll 1
  for (int i = run.keys ? listed_keys + t : t; i < listed_keys + 3; i += kTileThreads) {
    const int to = i > listed_keys ? listed_keys - i : i;
    const int64_t place = begin + int64_t{to == -2 ? -1 - static_cast<int>(s.chunk) : to};
    keys[to] = place >= 0 && place < run.positions ? KeyAt(run, static_cast<uint32_t>(place)) : kNone;
  }
  __syncthreads();

  // Where runs end. The tile's last one ends with it for now.
  const int each = (static_cast<int>(s.chunk) + kTileThreads - 1) / kTileThreads;
  uint32_t mask = 0;
#pragma unroll 2
  for (int i = 0; i < each; ++i) {
    const int place = t * each + i;
    if (place < held && (place == held - 1 || keys[place + 1] != keys[place])) mask |= 1u << i;
  }
  const int runs = ListRunEnds<kTileThreads>(mask, t * each, ends, warp_runs);

  const C alpha = Alpha<C>(run);
  T* const out = static_cast<T*>(run.out) + o * run.out_stride * run.inner + column;
  C* const slots = Slot<C>(run, s, o, number, 0) + column;
  const int pitch = tile.pitch;
#pragma unroll 1
  for (int unit = t; unit < runs * tile.slab; unit += kTileThreads) {
    const int r = tile.by_columns.Div(static_cast<uint32_t>(unit)), c = unit - r * tile.slab;
    const int first = r > 0 ? ends[r - 1] + 1 : 0, end = ends[r] + 1;
    const uint32_t own = keys[first];
    if (own >= run.dropped || c >= width) continue;
    const bool comes_in = r == 0 && keys[-1] == own, goes_on = r == runs - 1 && keys[held] == own;
    const bool head = comes_in && (keys[-2] == own || keys[kTileReach] == own);
    if (comes_in && !head) continue;  // the tile before has added it up
    const bool tail = !head && goes_on && keys[held + kTileReach] == own;
    A total[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) total[u] = Identity<kOp, A>();
    const T* p = values + ahead + first * pitch + c;
    int left = end - first;
    const auto add = [&](int u) { total[u] = Combined<kOp>(total[u], static_cast<A>(ToCompute(p[u * pitch]))); };
#pragma unroll 1
    for (; left >= 4; left -= 4, p += 4 * pitch) add(0), add(1), add(2), add(3);
    if (left > 0) add(0);
    if (left > 1) add(1);
    if (left > 2) add(2);
    if (goes_on && !head && !tail) {
      bool on = true;
#pragma unroll 1
      for (int i = held; on; i += 4) {
        T v[4];
        bool has[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          has[u] = i + u < held + kTileReach && keys[i + u] == own;
          if (has[u]) v[u] = from[(i + u) * run.inner + c];
        }
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          if (has[u]) total[u] = Combined<kOp>(total[u], static_cast<A>(ToCompute(v[u])));
        }
        on = has[3];
      }
    }
    const C all = static_cast<C>(Combined<kOp>(Combined<kOp>(total[0], total[1]), Combined<kOp>(total[2], total[3])));
    if (head || tail) {
      slots[c + (head ? 0 : run.inner)] = all;
    } else {
      T* const at = out + run.OutRow(own) * run.inner + c;
      const C x = run.reads_out ? ToCompute(*at) : C(0);
      *at = FromCompute<T>(Finished<kOp>(all, alpha, run.reads_out, x));
    }
  }
}

// Runs the reduction over ascending indices.
template <Reduction kOp, class T>
cudaError_t LaunchTiles(const IndexRun& run, bool fills, cudaStream_t stream) {
  const IndexTile t = TileOf(run.inner, sizeof(T));
  const TileShape tile(t, run.inner, kVector<T>);
  ReduceShape s;
  s.chunk = static_cast<uint32_t>(t.places);
  s.chunks = (run.positions + s.chunk - 1) / s.chunk;
  s.reach = kTileReach;
  s.by_chunks = Divider(s.chunks);
  if (fills) s.fill = FillShapeOf(run.dropped, run.outer, run.inner, sizeof(T));
  const int64_t blocks = s.fill.blocks + run.outer * s.chunks * tile.slabs;
  const int bytes = tile.Bytes(static_cast<int>(t.places), sizeof(T));
  const cudaError_t error = Launch(ReduceTiles<kOp, T>, {blocks, 1, kTileThreads, bytes}, stream, run, s, tile);
  if (error != cudaSuccess || s.chunks == 1) return error;
  return LaunchFixup<kOp, T>(run, s, stream);
}

}  // namespace jaxkern
