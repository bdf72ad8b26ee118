// Which kernels run a call of the index_add family, and the scratch they need: pure functions of the
// shapes, the hints and the device, so that they can be asked from Python and overridden by tests.
// Host only. What an operation means is in index_add.h.
//
//     unique    no row twice (a hint): each update is added to its row, or written, on its own
//     small     few indices: one launch; every update looks through all of them for its row's others
//     sorted    ascending indices (a hint): a segmented reduction over fixed chunks of them
//     sort      any indices: a stable radix sort of (row, position), then as `sorted`
//     narrow    rows of one element: bins in shared memory; where it has no room for all rows of a slice,
//               the updates are first split, stably, by the leading bits of their row
//     atomic    floats or integers added by atomics: not reproducible, only with deterministic = false
//     gather    index_select
//
// Every plan but `atomic` gives the same bits from run to run, on any device: the chunks depend on
// the problem alone and their partial sums are added in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "../common/device_traits.h"

namespace jaxkern {

// The last two are those of ffi/segment_softmax.
enum class IndexOp : int32_t { kAdd, kSegmentSum, kSegmentMax, kSegmentMin, kSelect, kSegmentSoftmax, kSegmentSoftmaxGrad };
enum class ElementType : int32_t { kF16, kBF16, kF32, kF64, kS32, kS64, kU32 };
enum class IndexType : int32_t { kS8, kS16, kS32, kS64, kU8, kU16, kU32, kU64 };

constexpr int64_t SizeOf(ElementType t) {
  switch (t) {
    case ElementType::kF16:
    case ElementType::kBF16: return 2;
    case ElementType::kF32:
    case ElementType::kS32:
    case ElementType::kU32: return 4;
    case ElementType::kF64:
    case ElementType::kS64: return 8;
  }
  return 0;
}

enum class IndexPlan : int32_t { kAuto, kUnique, kSmall, kSorted, kSort, kNarrow, kAtomic, kGather };

constexpr std::string_view kIndexPlanNames[] = {"auto",   "unique", "small",  "sorted",
                                                "sort",   "narrow", "atomic", "gather"};
constexpr int kIndexPlanCount = sizeof(kIndexPlanNames) / sizeof(kIndexPlanNames[0]);

// "sort" -> kSort; false for an unknown name.
constexpr bool ParseIndexPlan(std::string_view name, IndexPlan* plan) {
  for (int i = 0; i < kIndexPlanCount; ++i) {
    if (kIndexPlanNames[i] == name) {
      *plan = static_cast<IndexPlan>(i);
      return true;
    }
  }
  return false;
}

// x, out [batch, outer, rows, inner]; source [batch, outer, count, inner]; index [batch, count].
struct IndexProblem {
  IndexOp op = IndexOp::kAdd;
  ElementType type = ElementType::kF32;
  IndexType index_type = IndexType::kS32;
  int64_t batch = 1, outer = 1, rows = 0, count = 0, inner = 1;
  bool sorted = false, unique = false, deterministic = true;
};

// Whether the plan can run the problem at all. `sorted` and `unique` need their hint, for without it
// they would be wrong.
bool IndexPlanFits(IndexPlan plan, const IndexProblem& p, const DeviceTraits& d);

// The plan that runs it by default. Every problem has one.
IndexPlan ChooseIndexPlan(const IndexProblem& p, const DeviceTraits& d);

// Bytes of scratch that the plan takes, or with kAuto the most that any device's choice would take;
// the same on every device and without one. O(batch * count) plus partial sums of chunks, and never
// anything like the size of source.
int64_t IndexScratchBytes(IndexPlan plan, const IndexProblem& p);

// --- For the kernels -------------------------------------------------------------------------------

// Keys, that is batch * rows + 1, and positions, that is batch * count, of one run of the kernels: a call
// beyond that is cut into several (index_add_cuda.cu).
constexpr int64_t kMaxKeys = int64_t{1} << 31, kMaxPositions = int64_t{1} << 30;

// The radix sort: stable passes over the key's bits, lowest first, a tile of positions a block.
constexpr int kRadixBitsMax = 9;
// Of the largest tiles a digit's pairs, which are written side by side, fill a sector and more; smaller ones keep the
// multiprocessors evenly busy.
constexpr int64_t kSmallTile = 2048, kTile = 4608, kLargeTile = 8192;
struct IndexRadix {
  int passes = 0, bits = 0;   // bits a pass
  int64_t tile = 0, tiles = 0;
};

// The number of bits that hold 0 .. n - 1.
constexpr int BitsFor(int64_t n) {
  int bits = 0;
  while ((int64_t{1} << bits) < n) ++bits;
  return bits;
}

// The segmented reduction by chunks: the threads of a block, and the blocks that a multiprocessor has at once. Elements of
// 16 bits are summed in twice the registers of a vector, rows of no whole vectors are read in smaller pieces, and the
// places that a thread has under way, 4 or 8, take registers too.
constexpr int kReduceThreads = 128;
constexpr int ReduceBlocks(bool whole_vectors, int64_t element_bytes, int under_way) {
  return !whole_vectors ? 4 : element_bytes > 2 ? 8 : under_way == 4 ? 7 : 5;
}
// How far behind its chunk a run may end that the chunk takes all of: further, and chunks would differ in length too much.
constexpr uint32_t ChunkReach(uint32_t chunk) { return chunk / 4; }

// The segmented reduction of narrow rows: in shared memory, a tile of positions a block, of which each of 256
// threads walks a stretch in one column. An odd length, so that threads find their elements in different banks.
constexpr int64_t kNarrowInner = 8;
constexpr int NarrowStretch(int64_t element_bytes) { return element_bytes == 8 ? 9 : 17; }
constexpr int64_t NarrowTileOf(int64_t inner, int64_t element_bytes) {
  return 256 / inner * NarrowStretch(element_bytes);
}

// The segmented reduction of ascending indices where rows are a few elements or no whole vectors, in tiles of shared
// memory: the most places, columns, and elements from one place to the next. Five tiles live on a multiprocessor at
// once. Runs that end within kTileReach places behind a tile are not cut by it. A slab of long rows is kTilePacks vectors.
constexpr int64_t kTilePlaces = 2048, kTileBytes = 45000;
constexpr int kTileReach = 32, kTilePacks = 16;
struct IndexTile {
  int64_t places, slab, pitch;
};
IndexTile TileOf(int64_t inner, int64_t element_bytes);
bool ReducesTiles(IndexPlan plan, const IndexProblem& p);

// The bins of the narrow plan: of a warp, of which a block has eight, or of a block.
constexpr int kBinBits = 11;
constexpr int64_t kBins = int64_t{1} << kBinBits, kWideBins = 16384;
int64_t BinChunkOf(int64_t positions, int64_t bins);  // positions a block
// Few updates: a block for kBinWindow rows of a slice looks through all of its updates, in one launch. How many such
// windows a slice has, or 0 where that does not pay.
constexpr int kBinWindow = 16;
constexpr int64_t kFewUpdates = 16384;  // whose indices may be of any kind
int64_t BinWindowsOf(int64_t slices, int64_t rows, int64_t count);

// Scratch of one run of the kernels, as byte offsets; -1 where the plan has no use for it.
struct IndexLayout {
  // The sort's two buffers, [positions] of 4 bytes each. Values follow their keys: a buffer has room for pairs of both.
  int64_t keys[2] = {-1, -1}, values[2] = {-1, -1};
  int64_t counts = -1;                               // the sort's [tiles + 1, 2^bits] counts
  int64_t chunks = -1;                               // what each chunk of the reduction does, 16 bytes each
  int64_t partials = -1;
  int64_t total = 0;
  // What the room above is for. A call that is cut into runs has the same digits, tiles and chunks in each of them: a
  // shorter run by itself might have shorter ones, and so more.
  IndexRadix radix;
  int64_t chunk = 0;  // places, of the reduction's chunks or tiles
  int under_way = 8;  // of them, in a thread of its chunks
};
IndexLayout LayoutOf(IndexPlan plan, const IndexProblem& p);

}  // namespace jaxkern
