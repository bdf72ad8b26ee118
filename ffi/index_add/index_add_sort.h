// The stable radix sort of the index_add family, of updates by their keys or by the leading bits of them, and
// what the reduction wants to know of the order that results.
#pragma once

#include "index_add.cuh"

namespace jaxkern {

// What travels with a key: the update's position, or the element of source itself as it lies in memory.
enum class SortPayload : int32_t { kPosition = 0, kElement2 = 2, kElement4 = 4 };

// Sorts the run's updates by the bits of their keys from low_bit on into run->keys and run->order, or with elements
// into run->pairs, which lie in `scratch` as `layout` says. Updates with equal bits stay in the order of their
// positions.
cudaError_t SortUpdates(IndexRun* run, int low_bit, SortPayload payload, const IndexLayout& layout, void* scratch,
                        cudaStream_t stream);

// Fills run->chunks, and run->keys where there are only indices that ascend.
cudaError_t DescribeChunks(IndexRun* run, cudaStream_t stream);

}  // namespace jaxkern
