// The choice of a plan, and the scratch it takes: see index_add_plan.h. The limits are those of the kernels;
// the preferences were measured (benchmarks/NOTES.md).
#include "index_add_plan.h"

#include <algorithm>
#include <cmath>

namespace jaxkern {
namespace {

constexpr int64_t kSmallCount = 1024;  // indices: 32 for each lane of a warp

constexpr int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The largest power of two up to n, within [least, most]; both of them powers of two.
int64_t PowerOfTwo(int64_t n, int64_t least, int64_t most) {
  int64_t p = least;
  while (p < most && 2 * p <= n) p *= 2;
  return p;
}

int64_t Sum(ElementType t) { return SizeOf(t) == 2 ? 4 : SizeOf(t); }  // bytes of what a T is summed in

int64_t RowBytes(const IndexProblem& p) { return p.inner * SizeOf(p.type); }

// Every update compares itself with all others of its slice; a team of threads each 4 KB of its row.
bool SmallPays(const IndexProblem& p) {
  if (p.count > kSmallCount) return false;
  const double compares = static_cast<double>(p.batch * p.outer) * p.count * p.count * Ceil(RowBytes(p), 4096);
  return p.count <= 64 || compares <= 16e6;
}

bool NarrowPays(const IndexProblem& p) {
  const int64_t positions = p.batch * p.outer * p.count;
  if (p.rows <= kBins && p.count >= 4 * p.rows && positions >= 4096) return true;
  if (p.count <= kFewUpdates && BinWindowsOf(p.batch * p.outer, p.rows, p.count) > 0) return true;
  return (p.outer == 1 || p.rows <= kWideBins) && positions >= (1 << 18) && p.count >= p.rows;
}

// Of the bits [low_bit, high_bit) of so many keys.
IndexRadix RadixOf(int64_t positions, int low_bit, int high_bit) {
  IndexRadix r;
  const int bits = std::max(high_bit - low_bit, 0);
  r.passes = static_cast<int>(Ceil(bits, kRadixBitsMax));
  r.bits = r.passes ? static_cast<int>(Ceil(bits, r.passes)) : 0;
  r.tile = positions < (1 << 19) ? kSmallTile : positions < (1 << 22) ? kTile : kLargeTile;
  r.tiles = Ceil(positions, r.tile);
  return r;
}

// Places that a thread of the segmented reduction has under way. The more, the better it hides how long memory takes; but
// small vectors have threads enough for that, and each row of x that is added to is waited for by the places behind it.
int UnderWay(const IndexProblem& p) {
  if (RowBytes(p) % 16 != 0) return 8;
  const bool many_rows = p.op == IndexOp::kAdd && p.count < 32 * p.rows;
  return SizeOf(p.type) > 2 || many_rows ? 4 : 8;
}

// Positions a chunk of the segmented reduction.
int64_t ChunkOf(int64_t positions, const IndexProblem& p, int under_way) {
  constexpr int kMultiprocessors = 128;  // a few less than there are: whole waves of threads
  const int64_t size = SizeOf(p.type), row_bytes = RowBytes(p);
  const bool whole = row_bytes % 16 == 0;
  const double wave = kMultiprocessors * ReduceBlocks(whole, size, under_way) * kReduceThreads;
  const double lanes = static_cast<double>(positions) * p.outer * Ceil(row_bytes, 16);
  constexpr double kLeast = 16, kMost = 500;
  // One wave has the fewest edges of chunks to see to, but waits for its slowest thread. More are better where threads
  // differ most, in how many long rows they write, and where there are many and short.
  double waves = std::max(1.0, std::ceil(lanes / (kMost * wave)));
  if (whole && size == 2 && row_bytes >= 8192) waves = std::max(waves, 2.0);
  if (whole && size > 2 && lanes >= 3 * 64 * wave) waves = std::max(waves, 3.0);
  // Odd: chunks that are walked side by side must not all meet in the same memory channels.
  return static_cast<int64_t>(std::clamp(std::ceil(lanes / (waves * wave)), kLeast, kMost)) | 1;
}

// Places of a tile: as many as make whole waves of tiles of about the same length.
int64_t TilePlaces(int64_t positions, int64_t outer, int64_t inner, int64_t element_bytes) {
  constexpr int64_t kWave = 640, kLeast = 256;
  const IndexTile tile = TileOf(inner, element_bytes);
  const int64_t wave = std::max(kWave / (outer * Ceil(inner, tile.slab)), int64_t{1});
  const int64_t tiles = Ceil(Ceil(positions, tile.places), wave) * wave;
  return std::clamp(Ceil(positions, tiles), std::min(kLeast, tile.places), tile.places);
}

}  // namespace

bool IndexPlanFits(IndexPlan plan, const IndexProblem& p, const DeviceTraits&) {
  if (plan == IndexPlan::kAuto) return true;
  if (p.op == IndexOp::kSelect) return plan == IndexPlan::kGather;
  switch (plan) {
    case IndexPlan::kUnique: return p.unique;
    case IndexPlan::kSmall: return p.count <= kSmallCount;
    case IndexPlan::kSorted: return p.sorted;
    case IndexPlan::kSort: return true;
    case IndexPlan::kNarrow:
      if (p.inner != 1 || SizeOf(p.type) > 4) return false;
      return p.rows <= kWideBins || (p.outer == 1 && p.batch * p.rows < kMaxKeys && p.batch * p.count <= kMaxPositions);
    case IndexPlan::kAtomic:
      return !p.deterministic && p.op == IndexOp::kAdd && SizeOf(p.type) == 4;
    default: return false;
  }
}

IndexPlan ChooseIndexPlan(const IndexProblem& p, const DeviceTraits& d) {
  if (p.op == IndexOp::kSelect) return IndexPlan::kGather;
  const auto fits = [&](IndexPlan plan) { return IndexPlanFits(plan, p, d); };
  if (fits(IndexPlan::kUnique) && p.op == IndexOp::kAdd) return IndexPlan::kUnique;
  if (SmallPays(p)) return IndexPlan::kSmall;
  // Atomics win where there are too few updates for a sort to pay, and lose by any measure where many meet.
  if (fits(IndexPlan::kAtomic) && p.batch * p.count <= 16384) return IndexPlan::kAtomic;
  if (fits(IndexPlan::kSorted)) return IndexPlan::kSorted;
  if (fits(IndexPlan::kUnique)) return IndexPlan::kUnique;
  if (fits(IndexPlan::kNarrow) && NarrowPays(p)) return IndexPlan::kNarrow;
  return IndexPlan::kSort;
}

IndexTile TileOf(int64_t inner, int64_t element_bytes) {
  const int64_t n = 16 / element_bytes;
  IndexTile tile = {0, inner, inner};
  if (inner * element_bytes > 512) {
    // Slabs of equal width that kTilePacks vectors hold, wherever they begin. From one place to the next the vectors of a
    // slab shift as those of source do, and those of two places never overlap.
    const int64_t slabs = Ceil(inner, (kTilePacks - 1) * n + 1);
    tile.slab = Ceil(inner, slabs);
    tile.pitch = tile.slab + 2 * n - 2;
    while (tile.pitch % n != inner % n) ++tile.pitch;
  }
  tile.places = std::min(kTilePlaces, (kTileBytes - 512) / (tile.pitch * element_bytes + 7));  // keys, ends of runs
  return tile;
}

bool ReducesTiles(IndexPlan plan, const IndexProblem& p) {
  if (plan != IndexPlan::kSorted || p.batch != 1 || p.inner > INT32_MAX) return false;
  // Slabs of long rows pay where elements are too small to be fetched one by one.
  const bool odd = RowBytes(p) % 16 != 0 && (RowBytes(p) <= 512 || SizeOf(p.type) < 4);
  return p.inner <= kNarrowInner || odd;
}

int64_t BinChunkOf(int64_t positions, int64_t bins) {
  return PowerOfTwo(positions / (bins > kBins ? 512 : 1024), 4096, 32768);
}

int64_t BinWindowsOf(int64_t slices, int64_t rows, int64_t count) {
  constexpr int64_t kMostRead = 1 << 23;  // indices, by all blocks; they come from L2
  if (rows > kBins || count > (rows > 32 ? 1 << 17 : kFewUpdates)) return 0;
  const int64_t windows = Ceil(rows, kBinWindow);
  return slices * windows <= 512 && slices * windows * count <= kMostRead ? windows : 0;
}

IndexLayout LayoutOf(IndexPlan plan, const IndexProblem& p) {
  IndexLayout layout;
  const auto take = [&](int64_t bytes) {
    const int64_t at = layout.total;
    layout.total += Ceil(bytes, 256) * 256;
    return at;
  };
  // A batch that is too large for one run of the kernels is run slice by slice.
  const int64_t positions = std::min(p.batch * p.count, std::max(kMaxPositions, int64_t{1}));
  const int64_t keys = std::min(p.batch * p.rows + 1, kMaxKeys);
  const auto sort = [&](int low_bit, int64_t values) {
    const IndexRadix radix = RadixOf(positions, low_bit, BitsFor(std::min(values, kMaxKeys)));
    layout.radix = radix;
    for (int i = 0; i < std::min(radix.passes, 2); ++i) {
      layout.keys[i] = take(4 * positions);
      layout.values[i] = take(4 * positions);
    }
    if (radix.passes) layout.counts = take(4 * (radix.tiles + 1) * (int64_t{1} << radix.bits));
  };
  if (p.rows == 0 || positions == 0) return layout;
  switch (plan) {
    case IndexPlan::kSort:
    case IndexPlan::kSorted: {
      layout.under_way = UnderWay(p);
      const bool tiles = ReducesTiles(plan, p), narrow = tiles || p.inner <= kNarrowInner;
      layout.chunk = tiles    ? TilePlaces(positions, p.outer, p.inner, SizeOf(p.type))
                     : narrow ? NarrowTileOf(p.inner, SizeOf(p.type))
                              : ChunkOf(positions, p, layout.under_way);
      const int64_t chunks = Ceil(positions, layout.chunk);
      if (plan == IndexPlan::kSort) sort(0, keys);
      else if (!narrow) layout.keys[0] = take(4 * positions);
      if (plan == IndexPlan::kSorted && !narrow && p.batch > 1) layout.values[0] = take(4 * positions);
      if (!narrow) layout.chunks = take(16 * chunks);
      layout.partials = take(2 * chunks * p.outer * p.inner * Sum(p.type));
      break;
    }
    case IndexPlan::kNarrow:
      if (p.rows <= kWideBins) {
        const int64_t updates = p.batch * p.outer * p.count, chunks = Ceil(p.count, BinChunkOf(updates, p.rows));
        // A call that is cut may have shorter chunks in its last run.
        const bool cut = updates > kMaxPositions || p.batch * p.rows > kMaxKeys - 2;
        if (chunks > 1 || cut) layout.partials = take(4 * p.batch * p.outer * chunks * p.rows);
      } else {
        sort(kBinBits, p.batch * p.rows);
        layout.partials = take(4 * 2 * Ceil(positions, BinChunkOf(positions, kBins)) * kBins);
      }
      break;
    default: break;
  }
  return layout;
}

int64_t IndexScratchBytes(IndexPlan plan, const IndexProblem& p) {
  // The choice depends on the problem alone, whatever the device.
  if (plan == IndexPlan::kAuto) plan = ChooseIndexPlan(p, DeviceTraits());
  return LayoutOf(plan, p).total;
}

}  // namespace jaxkern
