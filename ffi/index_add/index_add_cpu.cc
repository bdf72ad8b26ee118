// The index_add family on the CPU: chooses the instruction set and the way, and spreads it over threads.
//
//     sorted   the positions of each b in the order of their rows, by a stable radix sort on the bits that
//              rows have (not at all where they ascend already). Then chunks of a fixed number of sorted
//              positions, each reduced in registers; rows that a chunk's edge cuts are joined at the end.
//     narrow   rows of few elements that get many: an accumulator an element. All rows at once, a private
//              copy for each of a few fixed parts of the positions; or, where that outgrows the cache, the
//              positions are first brought into buckets of neighbouring rows, one stable pass of the sort.
//     select   rows are copied, with those to come prefetched.
//
// What is cut, and where, follows from the shapes alone, and a stable sort has one result: threads decide
// who does what, never what is added to what.
#include "index_add/index_add_cpu.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "common/isa.h"
#include "index_add/index_add_cpu_sort.h"

namespace jaxkern {
namespace {

constexpr int64_t kCacheBytes = 1 << 20;       // of accumulators that stay in a core's own cache
constexpr int64_t kPieceEntries = 32 * 1024;   // that a thread sorts at least
constexpr int kDigitBits = 11;                 // of a pass of the sort, at most

using Chooser = IndexCpuKernels (*)(const IndexArgs&);

Chooser Choose() {
#if defined(JAXKERN_X86_VARIANTS)
  switch (ChooseIsa()) {
    case Isa::kAvx512: return avx512::ChooseIndexKernels;
    case Isa::kAvx2: return avx2::ChooseIndexKernels;
    case Isa::kBaseline: break;
  }
#endif
  return baseline::ChooseIndexKernels;
}

// --- Indices ---------------------------------------------------------------------------------------

// set(k, row) for positions [first, last): the row that each goes to, `rows` if out of range. The arithmetic
// is that of int64, in which no index of a narrower type can overflow.
template <class I, class Set>
void DecodeAs(const IndexArgs& a, const void* index, int64_t first, int64_t last, const Set& set) {
  const I* p = static_cast<const I*>(index);
  const int64_t rows = a.rows, wraps = a.wrap ? rows : 0;
  const bool clip = a.clip && rows > 0;
  for (int64_t k = first; k < last; ++k) {
    int64_t i;
    if constexpr (std::is_same_v<I, uint64_t>) {
      i = static_cast<int64_t>(std::min<uint64_t>(p[k], std::numeric_limits<int64_t>::max()));
    } else {
      i = static_cast<int64_t>(p[k]);
    }
    i += i < 0 ? wraps : 0;
    if (clip) i = i < 0 ? 0 : i < rows ? i : rows - 1;
    set(k, static_cast<uint32_t>(static_cast<uint64_t>(i) < static_cast<uint64_t>(rows) ? i : rows));
  }
}

template <class Set>
void Decode(const IndexArgs& a, int64_t b, int64_t first, int64_t last, const Set& set) {
  const auto at = [&](auto zero) { return static_cast<const decltype(zero)*>(a.index) + b * a.count; };
  switch (a.index_type) {
    case IndexType::kS8: return DecodeAs<int8_t>(a, at(int8_t()), first, last, set);
    case IndexType::kS16: return DecodeAs<int16_t>(a, at(int16_t()), first, last, set);
    case IndexType::kS32: return DecodeAs<int32_t>(a, at(int32_t()), first, last, set);
    case IndexType::kS64: return DecodeAs<int64_t>(a, at(int64_t()), first, last, set);
    case IndexType::kU8: return DecodeAs<uint8_t>(a, at(uint8_t()), first, last, set);
    case IndexType::kU16: return DecodeAs<uint16_t>(a, at(uint16_t()), first, last, set);
    case IndexType::kU32: return DecodeAs<uint32_t>(a, at(uint32_t()), first, last, set);
    case IndexType::kU64: return DecodeAs<uint64_t>(a, at(uint64_t()), first, last, set);
  }
}

// One thread's share of `size` entries.
struct Pieces {
  int64_t size, count;
  Pieces(const Executor& executor, int64_t size)
      : size(size), count(std::clamp<int64_t>(size / kPieceEntries, 1, std::max<int64_t>(executor.Threads(), 1))) {}
  int64_t Begin(int64_t piece) const { return size * piece / count; }
  template <class Body>
  void Run(const Executor& executor, const Body& body) const {
    ParallelFor(executor, count, 1, [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; ++p) body(p, Begin(p), Begin(p + 1));
    });
  }
};

// A stable pass: `from` into `to` by digit(row) < digits. Returns where each digit's entries begin, and the end.
template <class Digit>
std::vector<int64_t> SortPass(const Executor& executor, const IndexEntry* from, IndexEntry* to, int64_t size,
                              int64_t digits, const Digit& digit) {
  const Pieces pieces(executor, size);
  std::vector<int64_t> at(pieces.count * digits), begin(digits + 1);
  pieces.Run(executor, [&](int64_t piece, int64_t first, int64_t last) {
    int64_t* counts = at.data() + piece * digits;
    for (int64_t i = first; i < last; ++i) ++counts[digit(from[i].row)];
  });
  int64_t sum = 0;
  for (int64_t d = 0; d < digits; ++d) {
    begin[d] = sum;
    for (int64_t piece = 0; piece < pieces.count; ++piece) {
      const int64_t n = at[piece * digits + d];
      at[piece * digits + d] = sum;
      sum += n;
    }
  }
  begin[digits] = sum;
  pieces.Run(executor, [&](int64_t piece, int64_t first, int64_t last) {
    int64_t* next = at.data() + piece * digits;
    for (int64_t i = first; i < last; ++i) to[next[digit(from[i].row)]++] = from[i];
  });
  return begin;
}

void DecodeEntries(const Executor& executor, const IndexArgs& a, int64_t b, IndexEntry* entries) {
  Pieces(executor, a.count).Run(executor, [&](int64_t, int64_t first, int64_t last) {
    Decode(a, b, first, last, [&](int64_t k, uint32_t row) { entries[k] = {row, static_cast<uint32_t>(k)}; });
  });
}

// The entries of one b in the order of their rows, in `entries`; returns how many go to a row at all.
int64_t SortEntries(const Executor& executor, const IndexArgs& a, int64_t b, IndexEntry* entries, IndexEntry* spare) {
  DecodeEntries(executor, a, b, entries);
  const Pieces pieces(executor, a.count);
  std::vector<char> ascends(pieces.count, 1);
  pieces.Run(executor, [&](int64_t piece, int64_t first, int64_t last) {
    for (int64_t i = std::max<int64_t>(first, 1); i < last; ++i) {
      if (entries[i - 1].row > entries[i].row) {
        ascends[piece] = 0;
        return;
      }
    }
  });
  if (!std::all_of(ascends.begin(), ascends.end(), [](char c) { return c; })) {
    int bits = 0;
    while (bits < 32 && static_cast<uint64_t>(a.rows) >> bits) ++bits;
    const int passes = static_cast<int>(CeilDiv(bits, kDigitBits)), width = static_cast<int>(CeilDiv(bits, passes));
    IndexEntry *from = entries, *to = spare;
    for (int pass = 0; pass < passes; ++pass, std::swap(from, to)) {
      const int shift = pass * width;
      const uint32_t mask = (uint32_t{1} << width) - 1;
      SortPass(executor, from, to, a.count, int64_t{1} << width, [=](uint32_t row) { return row >> shift & mask; });
    }
    if (from != entries) std::memcpy(entries, from, a.count * sizeof(IndexEntry));
  }
  const auto row_below = [](const IndexEntry& e, int64_t row) { return e.row < row; };
  return std::lower_bound(entries, entries + a.count, a.rows, row_below) - entries;
}

// body(executor, b) for every b: many at a time, or one after the other with all threads on each.
template <class Body>
void ForEachBatch(const Executor& executor, const IndexArgs& a, const Body& body) {
  if (a.batch < 4 * executor.Threads()) {
    for (int64_t b = 0; b < a.batch; ++b) body(executor, b);
  } else {
    ParallelTasks(executor, a.batch, a.count, [&](int64_t b) { body(Alone(), b); });
  }
}

}  // namespace

void DecodeRows(const IndexArgs& a, int64_t b, int64_t first, int64_t last, uint32_t* row) {
  Decode(a, b, first, last, [&](int64_t k, uint32_t r) { row[k - first] = r; });
}

SortedEntries SortAllEntries(const Executor& executor, const IndexArgs& a) {
  SortedEntries sorted{Uninitialised<IndexEntry>(a.batch * a.count), Uninitialised<int64_t>(a.batch)};
  ForEachBatch(executor, a, [&](const Executor& inside, int64_t b) {
    const auto spare = Uninitialised<IndexEntry>(a.count);
    sorted.sizes[b] = SortEntries(inside, a, b, sorted.entries.get() + b * a.count, spare.get());
  });
  return sorted;
}

namespace {

// --- The ways --------------------------------------------------------------------------------------

// Offsets of slice (b, o) = b * outer + o in bytes.
struct Slices {
  const IndexArgs& a;
  int64_t item = SizeOf(a.type);
  const char* Source(int64_t slice) const {
    const int64_t s = a.source_batched ? slice : slice % a.outer;
    return static_cast<const char*>(a.source) + s * a.count * a.inner * item;
  }
  const char* X(int64_t slice) const { return static_cast<const char*>(a.x) + slice * a.rows * a.inner * item; }
  char* Out(int64_t slice) const { return static_cast<char*>(a.out) + slice * a.rows * a.inner * item; }
  char* Selected(int64_t slice) const { return static_cast<char*>(a.out) + slice * a.count * a.inner * item; }
};

void Sorted(const IndexArgs& a, const IndexCpuKernels& kernels, const Executor& executor) {
  const Slices slices{a};
  const SortedEntries sorted = SortAllEntries(executor, a);

  const int64_t chunk = std::clamp<int64_t>(kChunkElements / a.inner, 64, 8192), chunks = CeilDiv(a.count, chunk);
  const int64_t all = a.batch * a.outer, slabs = CeilDiv(a.inner, kSlabElements);
  const int64_t partial_bytes = 2 * chunks * a.inner * kernels.accumulator_bytes;
  const auto partials = Uninitialised<char>(chunks > 1 ? all * partial_bytes : 0);
  const auto slice_of = [&](int64_t slice, int64_t slab) {
    const int64_t b = slice / a.outer, first = slab * kSlabElements;
    return IndexSlice{sorted.entries.get() + b * a.count, sorted.sizes[b], chunk, slices.Source(slice), slices.Out(slice),
                      partials.get() + (chunks > 1 ? slice * partial_bytes : 0), first,
                      std::min(a.inner, first + kSlabElements)};
  };
  const int64_t work = std::min(a.count, chunk) * std::min(a.inner, kSlabElements);
  ParallelTasks(executor, all * chunks * slabs, work, [&](int64_t task) {
    const int64_t slab = task % slabs, c = task / slabs % chunks;
    const IndexSlice slice = slice_of(task / slabs / chunks, slab);
    if (c * chunk < slice.size) kernels.reduce(a, slice, c);
  });
  if (chunks > 1) {
    ParallelTasks(executor, all * slabs, chunks * std::min(a.inner, kSlabElements),
                  [&](int64_t task) { kernels.join(a, slice_of(task / slabs, task % slabs)); });
  }

  if (a.op == IndexOp::kAdd) return;
  // Rows that nothing goes to, the gaps between the rows of the entries.
  const int64_t block = std::max<int64_t>(1, kChunkElements / a.inner), blocks = CeilDiv(a.rows, block);
  ParallelTasks(executor, all * blocks, block * a.inner, [&](int64_t task) {
    const IndexSlice slice = slice_of(task / blocks, 0);
    int64_t row = task % blocks * block;
    const int64_t end = std::min(a.rows, row + block);
    const IndexEntry* last = slice.entries + slice.size;
    const auto before = [](const IndexEntry& e, int64_t r) { return e.row < r; };
    const IndexEntry* e = std::lower_bound(slice.entries, last, row, before);
    while (row < end) {
      const int64_t gap = e == last ? end : std::min<int64_t>(e->row, end);
      if (gap > row) kernels.fill(static_cast<char*>(slice.out) + row * a.inner * slices.item, (gap - row) * a.inner);
      for (row = gap + 1; e != last && e->row < row; ++e) {
      }
    }
  });
}

bool Narrow(const IndexArgs& a, const IndexCpuKernels& kernels, const Executor& executor) {
  if (a.inner > kIndexNarrow || a.count < a.rows / 4 || a.count < 256) return false;
  const Slices slices{a};
  const int64_t all = a.batch * a.outer, item = kernels.accumulator_bytes;
  const auto finish = [&](int64_t slice, int64_t row, const char* accumulators, int64_t elements) {
    kernels.finish(a, accumulators, slices.Out(slice) + row * a.inner * slices.item, elements);
  };

  if (a.rows * a.inner * item <= kCacheBytes) {
    int64_t parts = 1;
    const int64_t least = 16 * std::max(a.rows, kPieceEntries / 4);
    while (parts < 16 && 2 * parts * all <= 16 && parts * least <= a.count) parts *= 2;
    const int64_t elements = a.rows * a.inner, room = (a.rows + 1) * a.inner * item;  // the last row: what is dropped
    const auto copies = Uninitialised<char>(parts > 1 ? all * parts * room : 0);
    ParallelTasks(executor, all * parts, a.count / parts * a.inner, [&](int64_t task) {
      const int64_t slice = task / parts, part = task % parts, b = slice / a.outer;
      const auto own = Uninitialised<char>(parts > 1 ? 0 : room);
      char* accumulators = parts > 1 ? copies.get() + task * room : own.get();
      kernels.start(accumulators, elements + a.inner);
      constexpr int64_t kBlock = 1024;
      uint32_t row[kBlock];
      const int64_t end = a.count * (part + 1) / parts;
      for (int64_t k = a.count * part / parts; k < end; k += kBlock) {
        const int64_t n = std::min(kBlock, end - k);
        Decode(a, b, k, k + n, [&](int64_t j, uint32_t r) { row[j - k] = r; });
        kernels.accumulate(a, slices.Source(slice) + k * a.inner * slices.item, row, n, accumulators);
      }
      if (parts == 1) finish(slice, 0, accumulators, elements);
    });
    if (parts == 1) return true;
    const int64_t block = 4096, blocks = CeilDiv(elements, block);
    ParallelTasks(executor, all * blocks, block * parts, [&](int64_t task) {
      const int64_t slice = task / blocks, first = task % blocks * block, n = std::min(block, elements - first);
      char* sum = copies.get() + slice * parts * room + first * item;
      for (int64_t part = 1; part < parts; ++part) kernels.merge(sum, sum + part * room, n);
      kernels.finish(a, sum, slices.Out(slice) + first * slices.item, n);
    });
    return true;
  }

  int shift = 6;  // rows of a bucket: as many as fill a quarter of the cache
  while ((int64_t{2} << shift) * a.inner * item <= kCacheBytes / 4) ++shift;
  const int64_t buckets = (a.rows >> shift) + 1;  // `rows` itself is in the last one
  if (buckets > 4096) return false;
  const auto entries = Uninitialised<IndexEntry>(a.count), spare = Uninitialised<IndexEntry>(a.count);
  for (int64_t b = 0; b < a.batch; ++b) {
    DecodeEntries(executor, a, b, spare.get());
    const std::vector<int64_t> begin = SortPass(executor, spare.get(), entries.get(), a.count, buckets,
                                                [=](uint32_t row) { return row >> shift; });
    ParallelTasks(executor, a.outer * buckets, (a.count / buckets + 1) * a.inner, [&](int64_t task) {
      const int64_t slice = b * a.outer + task / buckets, bucket = task % buckets, first = bucket << shift;
      const int64_t rows = std::min(int64_t{1} << shift, a.rows - first);
      const auto accumulators = Uninitialised<char>((rows + 1) * a.inner * item);
      kernels.start(accumulators.get(), (rows + 1) * a.inner);
      kernels.accumulate_at(a, slices.Source(slice), entries.get() + begin[bucket], begin[bucket + 1] - begin[bucket],
                            first, accumulators.get());
      finish(slice, first, accumulators.get(), rows * a.inner);
    });
  }
  return true;
}

void Select(const IndexArgs& a, const IndexCpuKernels& kernels, const Executor& executor) {
  const Slices slices{a};
  const int64_t row_bytes = a.inner * slices.item, slab = 64 * 1024, slabs = CeilDiv(row_bytes, slab);
  std::vector<char> fill(row_bytes);
  if (a.fill_nan) {
    const auto repeat = [&](auto value) {
      for (int64_t i = 0; i < a.inner; ++i) std::memcpy(fill.data() + i * sizeof value, &value, sizeof value);
    };
    switch (a.type) {
      case ElementType::kF16: repeat(uint16_t{0x7e00}); break;
      case ElementType::kBF16: repeat(uint16_t{0x7fc0}); break;
      case ElementType::kF32: repeat(std::numeric_limits<float>::quiet_NaN()); break;
      case ElementType::kF64: repeat(std::numeric_limits<double>::quiet_NaN()); break;
      case ElementType::kS32: repeat(std::numeric_limits<int32_t>::min()); break;
      case ElementType::kS64: repeat(std::numeric_limits<int64_t>::min()); break;
      case ElementType::kU32: repeat(std::numeric_limits<uint32_t>::max()); break;
    }
  }
  constexpr int64_t kMost = 1024;
  const int64_t block = std::clamp<int64_t>(slab / row_bytes, 8, kMost), blocks = CeilDiv(a.count, block);
  const int64_t work = block * std::min(a.inner, slab / slices.item);
  ParallelTasks(executor, a.batch * a.outer * blocks * slabs, work, [&](int64_t task) {
    const int64_t slice = task / slabs / blocks, first = task / slabs % blocks * block;
    const int64_t n = std::min(block, a.count - first);
    const int64_t column = task % slabs * slab;
    uint32_t row[kMost];
    Decode(a, slice / a.outer, first, first + n, [&](int64_t k, uint32_t r) { row[k - first] = r; });
    kernels.select(slices.X(slice), row_bytes, row, n, static_cast<uint32_t>(a.rows), column,
                   std::min(row_bytes, column + slab), fill.data(), slices.Selected(slice) + first * row_bytes);
  });
}

}  // namespace

void IndexCpu(const IndexArgs& args, const Executor& executor) {
  if (args.batch * args.outer * args.inner == 0) return;
  static const Chooser choose = Choose();
  const IndexCpuKernels kernels = choose(args);
  if (args.op == IndexOp::kSelect) return args.count ? Select(args, kernels, executor) : void();
  if (args.rows == 0) return;
  if (!Narrow(args, kernels, executor)) Sorted(args, kernels, executor);
}

}  // namespace jaxkern
