// From the buffers and attributes of an FFI call to SoftmaxArgs: what the CPU and the CUDA handler
// of the softmax family share. Python has validated all of it at trace time; what is checked here
// is what would otherwise read or write out of bounds, for a caller who goes around Python.
#pragma once

#include <cstdint>
#include <string_view>

#include "common/handler.h"
#include "softmax/softmax.h"

namespace jaxkern {

Targets SoftmaxCpuTargets();
Targets SoftmaxCudaTargets();

// The operation's name in messages.
constexpr const char* SoftmaxName(bool log, bool backward) {
  return log ? (backward ? "jaxkern.log_softmax gradient" : "jaxkern.log_softmax")
             : (backward ? "jaxkern.softmax gradient" : "jaxkern.softmax");
}

// Fills everything but the scratch, of which only CUDA has any. Operands: x[, mask]; of a gradient y or x (see
// softmax.h), g[, mask].
inline ffi::Error DecodeSoftmax(bool log, bool backward, const ffi::RemainingArgs& operands,
                                const ffi::RemainingRets& results, int64_t axis, std::string_view tier,
                                SoftmaxArgs* args) {
  const char* name = SoftmaxName(log, backward);
  const size_t arrays = backward ? 2 : 1;
  if (operands.size() < arrays || operands.size() > arrays + 1 || results.empty()) {
    return InvalidArgument(name, "takes ", arrays, " operands and an optional mask, got ", operands.size());
  }
  const auto a = operands.get<ffi::AnyBuffer>(0);
  auto out = results.get<ffi::AnyBuffer>(0);
  if (!a) return a.error();
  if (!out) return out.error();
  const ffi::Span<const int64_t> dims = a->dimensions();
  const int64_t rank = static_cast<int64_t>(dims.size());
  const auto same = [&](const ffi::AnyBuffer& buffer) {
    return buffer.element_type() == a->element_type() && ShapeString(buffer.dimensions()) == ShapeString(dims);
  };

  const std::optional<DType> dtype = ToDType(a->element_type());
  if (!dtype) return InvalidArgument(name, "no kernel for the element type ", static_cast<int>(a->element_type()));
  if (axis < 0 || axis >= rank) return InvalidArgument(name, "axis ", axis, " of an array of shape ", ShapeString(dims));
  if (!same(**out)) {
    return InvalidArgument(name, "operand of shape ", ShapeString(dims), ", result of shape ",
                           ShapeString((*out)->dimensions()), " or of another element type");
  }
  args->log = log;
  args->backward = backward;
  args->dtype = *dtype;
  args->outer = Product(dims, 0, axis);
  args->width = dims[axis];
  args->inner = Product(dims, axis + 1, rank);
  args->a = a->untyped_data();
  args->out = (*out)->untyped_data();
  if (backward) {
    const auto b = operands.get<ffi::AnyBuffer>(1);
    if (!b) return b.error();
    if (!same(*b)) {
      return InvalidArgument(name, "an operand of shape ", ShapeString(dims), ", a cotangent of shape ", ShapeString(b->dimensions()),
                             " or of another element type");
    }
    args->b = b->untyped_data();
  }
  if (operands.size() > arrays) {
    const auto mask = operands.get<ffi::AnyBuffer>(arrays);
    if (!mask) return mask.error();
    const ffi::Span<const int64_t> part = mask->dimensions();
    bool broadcasts = mask->element_type() == ffi::DataType::PRED && part.size() == dims.size();
    for (int64_t d = 0; broadcasts && d < rank; ++d) broadcasts = part[d] == 1 || part[d] == dims[d];
    if (!broadcasts || !BroadcastView::FromShapes(dims, part, static_cast<int>(rank), static_cast<int>(axis),
                                                  &args->mask_view)) {
      return InvalidArgument(name, "a mask of shape ", ShapeString(part), " for an array of shape ", ShapeString(dims));
    }
    args->mask = static_cast<const uint8_t*>(mask->untyped_data());
  }
  if (!ParseSoftmaxTier(tier, &args->tier)) return InvalidArgument(name, "unknown tier '", tier, "'");
  return ffi::Error::Success();
}

}  // namespace jaxkern
