// Dispatch of the index_add family: the plan, the element type, and the cutting of calls that are too large
// for 32-bit keys and positions into several runs of the kernels.
#include "index_add_cuda.h"

#include <algorithm>

#include "index_add_gather.h"
#include "index_add_sort.h"

namespace jaxkern {

template <class T> cudaError_t LaunchIndexRun(IndexPlan, IndexOp, const IndexRun&, bool fills, cudaStream_t);

namespace {

DeviceTraits TraitsOf(const Device& device) {
  return {device.sm_count, device.compute_capability, device.shared_memory};
}

int IndexBytes(IndexType t) {
  switch (t) {
    case IndexType::kS8:
    case IndexType::kU8: return 1;
    case IndexType::kS16:
    case IndexType::kU16: return 2;
    case IndexType::kS32:
    case IndexType::kU32: return 4;
    case IndexType::kS64:
    case IndexType::kU64: return 8;
  }
  return 0;
}

bool IsSigned(IndexType t) {
  return t == IndexType::kS8 || t == IndexType::kS16 || t == IndexType::kS32 || t == IndexType::kS64;
}

// An element repeated to 8 bytes.
uint64_t Repeated(uint64_t bits, int64_t bytes) {
  if (bytes == 2) bits |= bits << 16;
  return bytes <= 4 ? bits | bits << 32 : bits;
}

// What a segment without elements holds.
uint64_t IdentityBits(IndexOp op, ElementType t) {
  const bool least = op == IndexOp::kSegmentMax;
  if (op == IndexOp::kSegmentSum) return 0;
  switch (t) {
    case ElementType::kF16: return Repeated(least ? 0xfc00 : 0x7c00, 2);
    case ElementType::kBF16: return Repeated(least ? 0xff80 : 0x7f80, 2);
    case ElementType::kF32: return Repeated(least ? 0xff800000 : 0x7f800000, 4);
    case ElementType::kF64: return least ? 0xfff0000000000000 : 0x7ff0000000000000;
    case ElementType::kS32: return Repeated(least ? 0x80000000 : 0x7fffffff, 4);
    case ElementType::kS64: return least ? 0x8000000000000000 : 0x7fffffffffffffff;
    case ElementType::kU32: return least ? 0 : ~uint64_t{0};
  }
  return 0;
}

// What index_select puts where an index is out of range.
uint64_t FillBits(bool nan, ElementType t) {
  if (!nan) return 0;
  switch (t) {
    case ElementType::kF16: return Repeated(0x7e00, 2);
    case ElementType::kBF16: return Repeated(0x7fc0, 2);
    case ElementType::kF32: return Repeated(0x7fc00000, 4);
    case ElementType::kF64: return 0x7ff8000000000000;
    case ElementType::kS32: return Repeated(0x80000000, 4);
    case ElementType::kS64: return 0x8000000000000000;
    case ElementType::kU32: return ~uint64_t{0};
  }
  return 0;
}

cudaError_t LaunchTyped(ElementType type, IndexPlan plan, IndexOp op, const IndexRun& run, bool fills,
                        cudaStream_t stream) {
  switch (type) {
    case ElementType::kF16: return LaunchIndexRun<__half>(plan, op, run, fills, stream);
    case ElementType::kBF16: return LaunchIndexRun<__nv_bfloat16>(plan, op, run, fills, stream);
    case ElementType::kF32: return LaunchIndexRun<float>(plan, op, run, fills, stream);
    case ElementType::kF64: return LaunchIndexRun<double>(plan, op, run, fills, stream);
    case ElementType::kS32: return LaunchIndexRun<int32_t>(plan, op, run, fills, stream);
    case ElementType::kS64: return LaunchIndexRun<int64_t>(plan, op, run, fills, stream);
    case ElementType::kU32: return LaunchIndexRun<uint32_t>(plan, op, run, fills, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

IndexRun RunOf(const IndexArgs& a) {
  IndexRun run = {};
  run.index = a.index;
  run.index_bytes = IndexBytes(a.index_type);
  run.index_signed = IsSigned(a.index_type);
  run.wrap = a.wrap && run.index_signed;
  run.clip = a.clip;
  run.all_rows = a.rows;
  run.source = a.source;
  run.alpha = a.alpha;
  run.out = a.out;
  run.outer = a.outer;
  run.inner = a.inner;
  run.source_stride = a.count;
  run.out_stride = a.rows;
  run.reads_out = a.op == IndexOp::kAdd;
  return run;
}

IndexRun RunOf(const IndexArgs& a, const IndexPart& part) {
  const int64_t size = SizeOf(a.type), source_batch = a.source_batched ? a.outer * a.count : 0;
  IndexRun run = RunOf(a);
  run.batch = static_cast<uint32_t>(part.batch);
  run.rows = static_cast<uint32_t>(part.rows);
  run.count = static_cast<uint32_t>(part.count);
  run.positions = run.batch * run.count;
  run.dropped = run.batch * run.rows;
  run.first_row = part.row;
  run.plain = run.index_bytes == 4 && run.index_signed && !run.clip && run.rows == a.rows;
  run.by_count = Divider(run.count);
  run.by_rows = Divider(run.rows);
  run.index = static_cast<const char*>(a.index) + (part.b * a.count + part.position) * run.index_bytes;
  run.source = static_cast<const char*>(a.source) +
               (part.b * source_batch + part.position * (run.batch == 1)) * a.inner * size;
  run.out = static_cast<char*>(a.out) + part.b * a.outer * a.rows * a.inner * size;
  if (run.batch > 1) {
    run.source_extra = source_batch - a.count;
    run.out_extra = (a.outer - 1) * a.rows;
  }
  return run;
}

int64_t BatchOf(const IndexArgs& a) {
  const int64_t fit = std::min((kMaxKeys - 2) / a.rows, kMaxPositions / a.count / a.outer);
  return std::min(a.batch, std::max(int64_t{1}, fit));
}

IndexProblem DescribeIndex(const IndexArgs& a) {
  return {a.op, a.type, a.index_type, a.batch, a.outer, a.rows, a.count, a.inner, a.sorted, a.unique, a.deterministic};
}

IndexPlan ResolveIndexPlan(const IndexArgs& args, const Device& device) {
  const IndexProblem problem = DescribeIndex(args);
  const IndexPlan plan = args.plan == IndexPlan::kAuto ? ChooseIndexPlan(problem, TraitsOf(device)) : args.plan;
  if (!IndexPlanFits(plan, problem, TraitsOf(device))) return IndexPlan::kAuto;
  if (static_cast<int64_t>(args.scratch_bytes) < LayoutOf(plan, problem).total) return IndexPlan::kAuto;
  return plan;
}

cudaError_t IndexCuda(const IndexArgs& a, const Device& device, cudaStream_t stream) {
  const int64_t size = SizeOf(a.type), slices = a.batch * a.outer;
  if (slices == 0 || a.inner == 0) return cudaSuccess;
  if (device.error != cudaSuccess) return device.error;
  const IndexPlan plan = ResolveIndexPlan(a, device);
  if (plan == IndexPlan::kAuto) return cudaErrorInvalidConfiguration;

  if (a.op == IndexOp::kSelect) {
    if (a.count == 0) return cudaSuccess;
    const uint64_t fill = FillBits(a.fill_nan, a.type);
    if (a.rows == 0) return FillPattern(a.out, slices * a.count * a.inner * size, fill, stream);
    IndexRun run = RunOf(a);
    run.source = a.x;
    return GatherRows(run, a.batch, a.count, size, fill, stream);
  }

  if (a.rows == 0) return cudaSuccess;
  const bool adds = a.op == IndexOp::kAdd;
  if (!adds && (a.count == 0 || plan == IndexPlan::kUnique)) {
    const cudaError_t error =
        FillPattern(a.out, slices * a.rows * a.inner * size, IdentityBits(a.op, a.type), stream);
    if (error != cudaSuccess) return error;
  }
  if (a.count == 0) return cudaSuccess;

  // The largest runs: whole slices of the batch where they fit, else parts of the rows and of the updates of one.
  const int64_t rows = std::min(a.rows, kMaxKeys - 2), count = std::min(a.count, kMaxPositions);
  const int64_t batch = BatchOf(a);
  const IndexLayout layout = LayoutOf(plan, DescribeIndex(a));
  for (int64_t b = 0; b < a.batch; b += batch) {
    for (int64_t r = 0; r < a.rows; r += rows) {
      for (int64_t k = 0; k < a.count; k += count) {
        IndexRun run = RunOf(a, {b, std::min(batch, a.batch - b), r, std::min(rows, a.rows - r), k,
                                 std::min(count, a.count - k)});
        // Rows that an earlier part of the updates has written are read back.
        run.reads_out = adds || (k > 0 && plan != IndexPlan::kUnique);
        run.tiles = ReducesTiles(plan, DescribeIndex(a));
        run.chunk = static_cast<uint32_t>(layout.chunk);
        run.under_way = layout.under_way;
        cudaError_t error = cudaSuccess;
        const auto room = [&](int64_t offset) { return offset < 0 ? nullptr : static_cast<char*>(a.scratch) + offset; };
        run.partials = room(layout.partials);
        run.chunks = reinterpret_cast<ChunkInfo*>(room(layout.chunks));
        if (plan == IndexPlan::kSort) {
          error = SortUpdates(&run, 0, SortPayload::kPosition, layout, a.scratch, stream);
        } else if (plan == IndexPlan::kNarrow && a.rows > kWideBins) {
          const SortPayload payload = size == 2 ? SortPayload::kElement2 : SortPayload::kElement4;
          // Updates that go nowhere may mix with others here, which spares a bit where the rows are a power of two.
          error = SortUpdates(&run, kBinBits, payload, layout, a.scratch, stream);
        }
        // Ascending indices of this kind are keys as they are: one that is out of range is no row as a number
        // without a sign either.
        if (plan == IndexPlan::kSorted && run.plain && !run.wrap && run.batch == 1 &&
            reinterpret_cast<uintptr_t>(run.index) % 16 == 0) {
          run.keys = static_cast<const uint32_t*>(run.index);
        }
        if (error == cudaSuccess && run.chunks) {
          if (!run.keys) run.keys_room = reinterpret_cast<uint32_t*>(room(layout.keys[0]));
          if (!run.keys && run.source_extra) run.order_room = reinterpret_cast<uint32_t*>(room(layout.values[0]));
          error = DescribeChunks(&run, stream);
        }
        if (error != cudaSuccess) return error;
        error = LaunchTyped(a.type, plan, a.op, run, !adds && k == 0 && plan != IndexPlan::kUnique, stream);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace jaxkern
