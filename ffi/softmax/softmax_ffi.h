// From the buffers and attributes of an FFI call to SoftmaxArgs, for the CPU handlers. Python has validated all of it at trace time; what is checked here
// is what would otherwise read or write out of bounds, for a caller who goes around Python.
#pragma once

#include <cstdint>
#include <string_view>

#include "common/handler.h"
#include "softmax/softmax.h"

namespace jaxkern {

Targets SoftmaxCpuTargets();

struct FusedAttributes {
  int64_t axis;
  bool log;
  std::string_view extras;
  bool causal;
  int64_t threshold;
  bool unscaled;
};

// The attributes, in the order of FusedAttributes, at the end of a handler's binding.
template <class Binding>
auto BindFusedAttributes(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Attr<int64_t>("axis")
      .template Attr<bool>("log")
      .template Attr<std::string_view>("extras")
      .template Attr<bool>("causal")
      .template Attr<int64_t>("threshold")
      .template Attr<bool>("unscaled");
}

// The operation's name in messages.
constexpr const char* SoftmaxName(bool log, bool backward) {
  return log ? (backward ? "jaxkern.log_softmax gradient" : "jaxkern.log_softmax")
             : (backward ? "jaxkern.softmax gradient" : "jaxkern.softmax");
}

// Fills what every call has: x or y, of a gradient the cotangent, and the result, all of one shape and type.
inline ffi::Error DecodeArrays(const char* name, bool log, bool backward, const ffi::RemainingArgs& operands,
                               const ffi::RemainingRets& results, int64_t axis, SoftmaxArgs* args) {
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
  return ffi::Error::Success();
}

// Operands: x[, mask]; of a gradient y or x (see softmax.h), g[, mask].
inline ffi::Error DecodeSoftmax(bool log, bool backward, const ffi::RemainingArgs& operands,
                                const ffi::RemainingRets& results, int64_t axis, SoftmaxArgs* args) {
  const char* name = SoftmaxName(log, backward);
  const size_t arrays = backward ? 2 : 1;
  if (operands.size() < arrays || operands.size() > arrays + 1 || results.empty()) {
    return InvalidArgument(name, "takes ", arrays, " operands and an optional mask, got ", operands.size());
  }
  if (ffi::Error e = DecodeArrays(name, log, backward, operands, results, axis, args); e.failure()) return e;
  if (operands.size() == arrays) return ffi::Error::Success();
  const auto mask = operands.get<ffi::AnyBuffer>(arrays);
  if (!mask) return mask.error();
  return DecodeMask(name, *mask, operands.get<ffi::AnyBuffer>(0)->dimensions(), axis, args);
}

// The same of a fused call. Operands: x, of a gradient g, then those of bias, scale, mask and key that `extras`
// names, in this order.
inline ffi::Error DecodeFused(bool backward, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                              const FusedAttributes& attributes, SoftmaxArgs* args) {
  const auto [axis, log, extras, causal, threshold, unscaled] = attributes;
  const char* name = SoftmaxName(log, backward);
  size_t at = backward ? 2 : 1;
  if (operands.size() < at || results.empty()) return InvalidArgument(name, "got ", operands.size(), " operands");
  if (ffi::Error e = DecodeArrays(name, log, backward, operands, results, axis, args); e.failure()) return e;
  const ffi::Span<const int64_t> dims = operands.get<ffi::AnyBuffer>(0)->dimensions();
  if (args->inner != 1 || args->outer > INT32_MAX || (causal && axis == 0) || threshold < 0 || threshold >= 1 << 16) {
    return InvalidArgument(name, "axis ", axis, " or dropout threshold ", threshold, " for an array of shape ",
                           ShapeString(dims));
  }
  const ffi::DataType type = operands.get<ffi::AnyBuffer>(0)->element_type();
  const ffi::DataType wide = args->dtype == DType::kF64 ? ffi::DataType::F64 : ffi::DataType::F32;
  args->fused = true;
  SoftmaxExtras& e = args->extras;
  e.causal = causal;
  e.unscaled = unscaled;
  e.matrix_rows = axis == 0 || dims[axis - 1] == 0 ? 1 : dims[axis - 1];
  if (args->outer != 0) e.matrix = FastDivmod(static_cast<uint32_t>(e.matrix_rows));
  for (const std::string_view what : {"bias", "scale", "mask", "key"}) {
    if (extras.find(what) == std::string_view::npos) continue;
    const auto operand = operands.get<ffi::AnyBuffer>(at++);
    if (!operand) return operand.error();
    if (what == "mask") {
      if (ffi::Error error = DecodeMask(name, *operand, dims, axis, args); error.failure()) return error;
    } else if (what == "key") {
      const ffi::Span<const int64_t> own = operand->dimensions();
      const int64_t words = own.size() ? own[own.size() - 1] : 0, count = Product(own, 0, own.size());
      if (operand->element_type() != ffi::DataType::U32 ||
          !((words == 2 && count == 2) || (words == 4 && count == 4 * args->outer))) {
        return InvalidArgument(name, "a key of shape ", ShapeString(own), " for an array of shape ", ShapeString(dims));
      }
      e.key = static_cast<const uint32_t*>(operand->untyped_data());
      e.key_per_row = words == 4;
      e.threshold = static_cast<uint32_t>(threshold);
      e.kept_inverse = 65536.0 / static_cast<double>(65536 - threshold);
    } else {
      const bool bias = what == "bias";
      if (operand->element_type() != wide && !(bias && operand->element_type() == type)) {
        return InvalidArgument(name, "a ", what, " of element type ", static_cast<int>(operand->element_type()));
      }
      BroadcastView* const view = bias ? &e.bias_view : &e.scale_view;
      if (ffi::Error error = DecodeBroadcast(name, bias ? "bias" : "scale", *operand, dims, axis, view); error.failure()) {
        return error;
      }
      if (bias) {
        e.bias = operand->untyped_data();
        e.bias_wide = operand->element_type() != type;
      } else if (view->axis_stride != 0) {
        return InvalidArgument(name, "a scale of shape ", ShapeString(operand->dimensions()));
      } else {
        e.scale = operand->untyped_data();
      }
    }
  }
  if (at != operands.size()) return InvalidArgument(name, operands.size(), " operands for '", extras, "'");
  return ffi::Error::Success();
}

}  // namespace jaxkern
