// The segment softmax on the CPU: chooses the instruction set and the way, and spreads the work over threads.
//
//     sorted   positions are sorted by segment as for index_add (not at all where they ascend already) and cut into
//              chunks; a task takes the segments that begin in its chunk. A segment that is much longer than a chunk is
//              cut into parts, which take three steps.
//     narrow   rows of a few elements, not worth sorting: three times through the data as it lies (the gradient:
//              twice), with a number for each segment and column; a private copy for each of a few fixed parts
//
// What is cut, and where, follows from shapes and indices alone, and so does the result.
#include "segment_softmax/segment_softmax_cpu.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "common/huge_pages.h"
#include "common/isa.h"
#include "index_add/index_add_cpu_sort.h"
#include "segment_softmax/segment_softmax_cpu_isa.h"

namespace jaxkern {
namespace {

constexpr int64_t kNumbersBytes = 2 << 20;

using Chooser = SegmentCpuKernels (*)(const IndexArgs&);

Chooser Choose() {
#if defined(JAXKERN_X86_VARIANTS)
  switch (ChooseIsa()) {
    case Isa::kAvx512: return avx512::ChooseSegmentKernels;
    case Isa::kAvx2: return avx2::ChooseSegmentKernels;
    case Isa::kBaseline: break;
  }
#endif
  return baseline::ChooseSegmentKernels;
}

struct LongSegment {
  const IndexEntry *begin, *end;
};

// The segments of more than `limit` >= 2 * chunk entries, each of which fills some chunk.
std::vector<LongSegment> LongSegments(const IndexEntry* entries, int64_t size, int64_t chunk, int64_t limit) {
  std::vector<LongSegment> found;
  for (int64_t first = 0; first + chunk <= size; first += chunk) {
    const uint32_t row = entries[first].row;
    if (entries[first + chunk - 1].row != row || (!found.empty() && found.back().begin->row == row)) continue;
    const auto before = [](const IndexEntry& e, uint32_t r) { return e.row < r; };
    const auto after = [](uint32_t r, const IndexEntry& e) { return r < e.row; };
    const LongSegment s = {std::lower_bound(entries, entries + size, row, before),
                           std::upper_bound(entries, entries + size, row, after)};
    if (s.end - s.begin > limit) found.push_back(s);
  }
  return found;
}

// Where a sort takes longer than going three times through the data: what there is a number for must lie in the cache,
// but for the narrowest rows.
bool NarrowPays(const IndexArgs& a) {
  if (a.inner > kSegmentNarrow || a.rows > a.count) return false;
  return a.inner <= kSegmentNarrow / 2 || (!a.sorted && 2 * a.rows * a.inner * int64_t{sizeof(double)} <= kNumbersBytes);
}

// Shifts that are not a maximum of anything, which are -inf, become 0.
void Finish(double* largest, int64_t size) {
  for (int64_t i = 0; i < size; ++i) largest[i] = largest[i] == -std::numeric_limits<double>::infinity() ? 0 : largest[i];
}

void NarrowSlice(const IndexArgs& a, const SegmentCpuKernels& kernels, const SegmentSlice& s, int64_t b,
                 const Executor& executor) {
  const int64_t size = (a.rows + 1) * a.inner;  // the last row: what is of no segment
  int64_t parts = 1;
  while (parts < 16 && 8 * parts * a.rows <= a.count && 2 * parts * 16384 <= a.count) parts *= 2;
  const auto largest = Uninitialised<double>(kernels.find_largest ? parts * size : 0);
  const auto sums = Uninitialised<double>(parts * size);
  // step(own copy, position, rows, how many) for all positions, a part with its own copy.
  const auto pass = [&](int64_t parts, const auto& start, const auto& step) {
    ParallelFor(executor, parts, 1, [&](int64_t from, int64_t to) {
      for (int64_t part = from; part < to; ++part) {
        start(part);
        uint32_t row[kSegmentBlock];
        const int64_t end = a.count * (part + 1) / parts;
        for (int64_t k = a.count * part / parts; k < end; k += kSegmentBlock) {
          const int64_t n = std::min(kSegmentBlock, end - k);
          DecodeRows(a, b, k, k + n, row);
          step(part, k, row, n);
        }
      }
    });
  };
  const auto merge = [&](double* copies, const auto& combine) {
    for (int64_t part = 1; part < parts; ++part) {
      for (int64_t i = 0; i < size; ++i) copies[i] = combine(copies[i], copies[part * size + i]);
    }
  };
  const auto fill = [&](double* copies, double value) {
    return [=](int64_t part) { std::fill_n(copies + part * size, size, value); };
  };
  if (kernels.find_largest) {
    pass(parts, fill(largest.get(), -std::numeric_limits<double>::infinity()),
         [&](int64_t part, int64_t k, const uint32_t* row, int64_t n) {
      kernels.find_largest(s, k, row, n, largest.get() + part * size);
    });
    merge(largest.get(), [](double x, double y) { return x > y ? x : y; });
    Finish(largest.get(), size);
  }
  pass(parts, fill(sums.get(), 0), [&](int64_t part, int64_t k, const uint32_t* row, int64_t n) {
    kernels.add_up(s, k, row, n, largest.get(), sums.get() + part * size);
  });
  merge(sums.get(), [](double x, double y) { return x + y; });
  pass(CeilDiv(a.count, 16384), [](int64_t) {}, [&](int64_t, int64_t k, const uint32_t* row, int64_t n) {
    kernels.write_all(s, k, row, n, static_cast<uint32_t>(a.rows), largest.get(), sums.get());
  });
}

}  // namespace

void SegmentSoftmaxCpu(const IndexArgs& a, const Executor& executor) {
  const int64_t item = SizeOf(a.type), all = a.batch * a.outer, elements = a.count * a.inner;
  if (all * elements == 0) return;
  PreferHugePages(a.out, all * elements * item);
  if (a.rows == 0) {
    std::memset(a.out, 0, all * elements * item);
    return;
  }
  static const Chooser choose = Choose();
  const SegmentCpuKernels kernels = choose(a);

  const int64_t chunk = std::clamp<int64_t>(kChunkElements / a.inner, 64, 8192), chunks = CeilDiv(a.count, chunk);
  const int64_t slabs = CeilDiv(a.inner, kSlabElements), limit = 4 * chunk;
  const auto slice_of = [&](int64_t slice, int64_t slab) {
    const auto part = [&](const void* array) { return static_cast<const char*>(array) + slice * elements * item; };
    return SegmentSlice{part(a.source), a.x ? part(a.x) : nullptr, static_cast<char*>(a.out) + slice * elements * item,
                        a.inner, slab * kSlabElements, std::min(a.inner, (slab + 1) * kSlabElements)};
  };
  if (NarrowPays(a)) {
    if (all < 4 * executor.Threads()) {
      for (int64_t i = 0; i < all; ++i) NarrowSlice(a, kernels, slice_of(i, 0), i / a.outer, executor);
    } else {
      ParallelTasks(executor, all, elements, [&](int64_t i) {
        NarrowSlice(a, kernels, slice_of(i, 0), i / a.outer, Alone());
      });
    }
    return;
  }

  const SortedEntries sorted = SortAllEntries(executor, a);
  ParallelTasks(executor, all * chunks * slabs, std::min(a.count, chunk) * std::min(a.inner, kSlabElements),
                [&](int64_t task) {
    const int64_t slice = task / slabs / chunks, b = slice / a.outer, first = task / slabs % chunks * chunk;
    const int64_t last = std::min(a.count, first + chunk), size = sorted.sizes[b];
    const SegmentSlice s = slice_of(slice, task % slabs);
    const IndexEntry* entries = sorted.entries.get() + b * a.count;
    const int64_t width = s.last - s.first;
    for (int64_t i = first, end; i < std::min(last, size); i = end) {
      const uint32_t row = entries[i].row;
      const bool is_long = i + limit < size && entries[i + limit].row == row;
      for (end = i + 1; end < (is_long ? last : size) && entries[end].row == row; ++end) {
      }
      if (!is_long && (i == 0 || entries[i - 1].row != row)) kernels.segment(s, entries + i, entries + end);
    }
    for (int64_t i = std::max(first, size); i < last; ++i) {  // of no segment
      char* out = static_cast<char*>(s.out) + (int64_t{entries[i].position} * a.inner + s.first) * item;
      std::memset(out, 0, width * item);
    }
  });

  for (int64_t b = 0; b < a.batch; ++b) {
    const std::vector<LongSegment> found =
        LongSegments(sorted.entries.get() + b * a.count, sorted.sizes[b], chunk, limit);
    for (const LongSegment& segment : found) {
      const int64_t parts = CeilDiv(segment.end - segment.begin, chunk), columns = std::min(a.inner, kSlabElements);
      const auto stats = Uninitialised<double>(a.outer * slabs * parts * 2 * columns);
      const auto run = [&](const auto& step) {
        ParallelTasks(executor, a.outer * slabs * parts, chunk * columns, [&](int64_t task) {
          const int64_t slice = task / parts, part = task % parts;
          const SegmentSlice s = slice_of(b * a.outer + slice / slabs, slice % slabs);
          const IndexEntry* e = segment.begin + part * chunk;
          double* all_parts = stats.get() + slice * parts * 2 * columns;
          step(s, e, std::min(segment.end, e + chunk), all_parts, all_parts + part * 2 * (s.last - s.first));
        });
      };
      run([&](const SegmentSlice& s, const IndexEntry* e, const IndexEntry* end, double*, double* own) {
        kernels.reduce(s, e, end, own);
      });
      ParallelTasks(executor, a.outer * slabs, parts * columns, [&](int64_t slice) {
        const SegmentSlice s = slice_of(b * a.outer + slice / slabs, slice % slabs);
        kernels.merge(stats.get() + slice * parts * 2 * columns, parts, s.last - s.first);
      });
      run([&](const SegmentSlice& s, const IndexEntry* e, const IndexEntry* end, double* total, double*) {
        kernels.write(s, e, end, total);
      });
    }
  }
}

}  // namespace jaxkern
