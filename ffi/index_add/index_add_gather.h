// The kernels of the index_add family that move bytes and know no element type.
#pragma once

#include "index_add.cuh"

namespace jaxkern {

// index_select. run.source is x, [batch, outer, all_rows, inner]; run.out [batch, outer, count, inner];
// element_bytes each; of any size. Rows out of range are filled with `fill`, the element's bits repeated to 8 bytes.
cudaError_t GatherRows(const IndexRun& run, int64_t batch, int64_t count, int64_t element_bytes, uint64_t fill,
                       cudaStream_t stream);

// Fills `bytes` bytes, a multiple of the pattern's element, as out is aligned to its element.
cudaError_t FillPattern(void* out, int64_t bytes, uint64_t pattern, cudaStream_t stream);

}  // namespace jaxkern
