// Which kernels run a call of the index_add family, and the scratch they need: pure functions of the
// shapes, the hints and the device, so that they can be asked from Python and overridden by tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace jaxkern {

enum class IndexOp : int32_t { kAdd, kSegmentSum, kSegmentMax, kSegmentMin, kSelect };
enum class ElementType : int32_t { kF16, kBF16, kF32, kF64, kS32, kS64, kU32 };
enum class IndexType : int32_t { kS8, kS16, kS32, kS64, kU8, kU16, kU32, kU64 };

enum class IndexPlan : int32_t { kAuto, kUnique, kSmall, kSorted, kSort, kNarrow, kAtomic, kGather };

}  // namespace jaxkern
