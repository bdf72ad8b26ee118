// From the buffers and attributes of an FFI call to CrossEntropyArgs: what the CPU and the CUDA handler share.
// Python has validated all of it at trace time; what is checked here is what would otherwise read or write
// out of bounds, for a caller who goes around Python.
#pragma once

#include <cstdint>
#include <string_view>

#include "common/handler.h"
#include "cross_entropy/cross_entropy.h"

namespace jaxkern {

Targets CrossEntropyCudaTargets();

template <template <LossPass> class Handler> Targets CrossEntropyTargets() {
  return {{"jaxkern_cross_entropy", Handler<LossPass::kLoss>::Call},
          {"jaxkern_cross_entropy_grad", Handler<LossPass::kGradient>::Call},
          {"jaxkern_cross_entropy_both", Handler<LossPass::kBoth>::Call}};
}

// The operation's name in messages.
constexpr const char* LossName(LossPass pass) {
  return pass == LossPass::kLoss       ? "jaxkern.softmax_cross_entropy"
         : pass == LossPass::kGradient ? "jaxkern.softmax_cross_entropy gradient"
                                       : "jaxkern.softmax_cross_entropy_and_grad";
}

inline bool ToLabelType(ffi::DataType type, LabelType* label) {
  switch (type) {
    case ffi::DataType::S8: *label = LabelType::kS8; return true;
    case ffi::DataType::S16: *label = LabelType::kS16; return true;
    case ffi::DataType::S32: *label = LabelType::kS32; return true;
    case ffi::DataType::S64: *label = LabelType::kS64; return true;
    case ffi::DataType::U8: *label = LabelType::kU8; return true;
    case ffi::DataType::U16: *label = LabelType::kU16; return true;
    case ffi::DataType::U32: *label = LabelType::kU32; return true;
    case ffi::DataType::U64: *label = LabelType::kU64; return true;
    default: return false;
  }
}

struct LossAttributes {
  int64_t axis;
  double smoothing, z_loss;
  bool has_ignore;
  int64_t ignore;
  std::string_view tier;
};

// The attributes, in the order of LossAttributes, at the end of a handler's binding.
template <class Binding>
auto BindLossAttributes(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Attr<int64_t>("axis")
      .template Attr<double>("smoothing")
      .template Attr<double>("z_loss")
      .template Attr<bool>("has_ignore")
      .template Attr<int64_t>("ignore")
      .template Attr<std::string_view>("tier");
}

// Operands and results, with a count only where there is a mask:
//     kLoss       logits, labels[, mask]                                        -> loss, largest, total[, count]
//     kGradient   logits, labels, largest, total, weight[, count, mask]         -> gradient
//     kBoth       logits, labels, weight[, mask]                                -> loss, largest, total[, count], gradient
// *results_used: how many results those are; scratch may follow.
inline ffi::Error DecodeCrossEntropy(LossPass pass, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                                     const LossAttributes& attributes, CrossEntropyArgs* args, size_t* results_used) {
  const char* name = LossName(pass);
  const size_t plain = pass == LossPass::kLoss ? 2 : pass == LossPass::kGradient ? 5 : 3;
  const size_t with_mask = plain + (pass == LossPass::kGradient ? 2 : 1);
  const bool masked = operands.size() == with_mask;
  if (operands.size() != plain && !masked) return InvalidArgument(name, "got ", operands.size(), " operands");
  *results_used = pass == LossPass::kGradient ? 1 : 3 + masked + (pass == LossPass::kBoth);
  if (results.size() < *results_used) return InvalidArgument(name, "got ", results.size(), " results");

  const auto logits = operands.get<ffi::AnyBuffer>(0), labels = operands.get<ffi::AnyBuffer>(1);
  if (!logits) return logits.error();
  if (!labels) return labels.error();
  const ffi::Span<const int64_t> dims = logits->dimensions();
  const int64_t rank = static_cast<int64_t>(dims.size()), axis = attributes.axis;
  const std::optional<DType> dtype = ToDType(logits->element_type());
  if (!dtype) return InvalidArgument(name, "no kernel for the element type ", static_cast<int>(logits->element_type()));
  if (axis < 0 || axis >= rank) return InvalidArgument(name, "axis ", axis, " of logits of shape ", ShapeString(dims));
  args->pass = pass;
  args->dtype = *dtype;
  args->outer = Product(dims, 0, axis);
  args->width = dims[axis];
  args->inner = Product(dims, axis + 1, rank);
  args->logits = logits->untyped_data();
  args->smoothing = attributes.smoothing;
  args->z_loss = attributes.z_loss;
  args->has_ignore = attributes.has_ignore;
  args->ignore = attributes.ignore;

  const int64_t rows = args->outer * args->inner;
  if (!ToLabelType(labels->element_type(), &args->label_type) || static_cast<int64_t>(labels->element_count()) != rows) {
    return InvalidArgument(name, "labels of shape ", ShapeString(labels->dimensions()), " or of no integer type, for logits of shape ",
                           ShapeString(dims), " and axis ", axis);
  }
  args->labels = labels->untyped_data();

  const ffi::DataType row_type = *dtype == DType::kF64 ? ffi::DataType::F64 : ffi::DataType::F32;
  bool right = true;
  const auto numbers = [&](const auto& buffer) -> void* {  // one a row
    right = right && buffer.has_value() && buffer->element_type() == row_type && static_cast<int64_t>(buffer->element_count()) == rows;
    return right ? buffer->untyped_data() : nullptr;
  };
  const auto operand = [&](size_t i) { return numbers(operands.get<ffi::AnyBuffer>(i)); };
  const auto result = [&](size_t i) -> void* {
    auto buffer = results.get<ffi::AnyBuffer>(i);
    right = right && buffer.has_value();
    if (!right) return nullptr;
    right = (*buffer)->element_type() == row_type && static_cast<int64_t>((*buffer)->element_count()) == rows;
    return (*buffer)->untyped_data();
  };
  if (pass == LossPass::kGradient) {
    args->largest = operand(2);
    args->total = operand(3);
    args->weight = operand(4);
    if (masked) args->count = operand(5);
  } else {
    args->loss = result(0);
    args->largest = result(1);
    args->total = result(2);
    if (masked) args->count = result(3);
    if (pass == LossPass::kBoth) args->weight = operand(2);
  }
  if (!right) return InvalidArgument(name, "an operand or a result that is not one number a row of logits of shape ", ShapeString(dims));

  if (pass != LossPass::kLoss) {
    auto gradient = results.get<ffi::AnyBuffer>(*results_used - 1);
    if (!gradient) return gradient.error();
    if ((*gradient)->element_type() != logits->element_type() || (*gradient)->element_count() != logits->element_count()) {
      return InvalidArgument(name, "logits of shape ", ShapeString(dims), ", gradient of shape ",
                             ShapeString((*gradient)->dimensions()), " or of another element type");
    }
    args->gradient = (*gradient)->untyped_data();
  }
  if (masked) {
    const auto mask = operands.get<ffi::AnyBuffer>(with_mask - 1);
    if (!mask) return mask.error();
    if (ffi::Error e = DecodeMask(name, *mask, dims, axis, args); e.failure()) return e;
  }
  if (!ParseLossName(attributes.tier, kLossTierNames, &args->tier)) {
    return InvalidArgument(name, "unknown tier '", attributes.tier, "'");
  }
  return ffi::Error::Success();
}

}  // namespace jaxkern
