// Dispatch of segment_softmax: the plan, the sort, the element type.
#include "segment_softmax_cuda.h"

#include <algorithm>

#include "../index_add/index_add_cuda.h"
#include "../index_add/index_add_sort.h"

namespace jaxkern {

template <class T> cudaError_t LaunchSegmentSoftmax(IndexOp, const IndexRun&, const void* cotangent, cudaStream_t);

namespace {

cudaError_t LaunchTyped(const IndexArgs& a, const IndexRun& run, const void* cotangent, cudaStream_t stream) {
  switch (a.type) {
    case ElementType::kF16: return LaunchSegmentSoftmax<__half>(a.op, run, cotangent, stream);
    case ElementType::kBF16: return LaunchSegmentSoftmax<__nv_bfloat16>(a.op, run, cotangent, stream);
    case ElementType::kF32: return LaunchSegmentSoftmax<float>(a.op, run, cotangent, stream);
    case ElementType::kF64: return LaunchSegmentSoftmax<double>(a.op, run, cotangent, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t SegmentSoftmaxCuda(const IndexArgs& a, const Device& device, cudaStream_t stream) {
  const int64_t slice = a.outer * a.count * a.inner * SizeOf(a.type);  // bytes of one b
  if (a.batch * slice == 0) return cudaSuccess;
  if (device.error != cudaSuccess) return device.error;
  if (a.rows == 0) return cudaMemsetAsync(a.out, 0, a.batch * slice, stream);
  const IndexPlan plan = ResolveIndexPlan(a, device);
  if (plan == IndexPlan::kAuto) return cudaErrorInvalidConfiguration;
  const IndexLayout layout = LayoutOf(plan, DescribeIndex(a));
  // As many slices of the batch at once as 32-bit keys and positions number.
  const int64_t batch = BatchOf(a);
  for (int64_t b = 0; b < a.batch; b += batch) {
    IndexRun run = RunOf(a, {b, std::min(batch, a.batch - b), 0, a.rows, 0, a.count});
    run.out = static_cast<char*>(a.out) + b * slice;
    run.partials = layout.partials < 0 ? nullptr : static_cast<char*>(a.scratch) + layout.partials;
    if (plan == IndexPlan::kSort) {
      const cudaError_t error =
          SortUpdates(&run, 0, SortPayload::kPosition, layout, a.scratch, stream);
      if (error != cudaSuccess) return error;
    }
    // Ascending ids of this kind are keys as they are: as a number without a sign, one out of range is no segment either.
    if (plan == IndexPlan::kSorted && run.plain && !run.wrap && run.batch == 1) {
      run.keys = static_cast<const uint32_t*>(run.index);
    }
    const void* cotangent = a.x ? static_cast<const char*>(a.x) + b * slice : nullptr;
    const cudaError_t error = LaunchTyped(a, run, cotangent, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jaxkern
