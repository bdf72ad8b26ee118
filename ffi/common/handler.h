// What every XLA FFI handler of this library shares: errors that name the operation, dtypes, and the
// list of targets that a module hands out.
#pragma once

#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/common/broadcast.h"
#include "common/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkern {

namespace ffi = xla::ffi;

// A target's name, which is also its primitive's, and the handler behind it.
struct Target {
  const char* name;
  XLA_FFI_Handler* handler;
};
using Targets = std::vector<Target>;

// InvalidArgument("jaxkern.softmax", "axis ", 3, " of rank ", 2) says "jaxkern.softmax: axis 3 of rank 2".
template <class... Parts>
ffi::Error InvalidArgument(const char* operation, const Parts&... parts) {
  std::ostringstream message;
  message << operation << ": ";
  (message << ... << parts);
  return ffi::Error::InvalidArgument(message.str());
}

inline std::optional<DType> ToDType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F16: return DType::kF16;
    case ffi::DataType::BF16: return DType::kBF16;
    case ffi::DataType::F32: return DType::kF32;
    case ffi::DataType::F64: return DType::kF64;
    default: return std::nullopt;
  }
}

// "[8,128,64]", for messages.
inline std::string ShapeString(ffi::Span<const int64_t> dims) {
  std::string s = "[";
  for (size_t i = 0; i < dims.size(); ++i) s += (i ? "," : "") + std::to_string(dims[i]);
  return s + "]";
}

// The product of dims[first .. last-1].
inline int64_t Product(ffi::Span<const int64_t> dims, size_t first, size_t last) {
  int64_t n = 1;
  for (size_t i = first; i < last; ++i) n *= dims[i];
  return n;
}

// Fills the view of an operand that broadcasts to an array of these dimensions, of which `axis` is the row.
inline ffi::Error DecodeBroadcast(const char* operation, const char* what, const ffi::AnyBuffer& part,
                                  ffi::Span<const int64_t> dims, int64_t axis, BroadcastView* view) {
  const ffi::Span<const int64_t> own = part.dimensions();
  bool broadcasts = own.size() == dims.size();
  for (size_t d = 0; broadcasts && d < dims.size(); ++d) broadcasts = own[d] == 1 || own[d] == dims[d];
  if (broadcasts && BroadcastView::FromShapes(dims, own, static_cast<int>(dims.size()), static_cast<int>(axis), view)) {
    return ffi::Error::Success();
  }
  return InvalidArgument(operation, "a ", what, " of shape ", ShapeString(own), " for an array of shape ", ShapeString(dims));
}

// The same of a mask, into arguments that have `mask` and `mask_view`.
template <class Args>
ffi::Error DecodeMask(const char* operation, const ffi::AnyBuffer& mask, ffi::Span<const int64_t> dims, int64_t axis,
                      Args* args) {
  if (mask.element_type() != ffi::DataType::PRED) return InvalidArgument(operation, "a mask that is not boolean");
  args->mask = static_cast<const uint8_t*>(mask.untyped_data());
  return DecodeBroadcast(operation, "mask", mask, dims, axis, &args->mask_view);
}

}  // namespace jaxkern
