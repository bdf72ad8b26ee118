// From the buffers and attributes of an FFI call to the IndexArgs of a segment softmax. Python has validated all of it at
// trace time; the checks here prevent reads and writes out of bounds for a caller who goes around Python.
//
//     target                           operands        results
//     jaxkern_segment_softmax          data, index     y
//     jaxkern_segment_softmax_grad     y, g, index     the gradient
//
// The attributes are num_segments and those of ffi/index_add. All arrays but index have the shape (*lead, count, *trail),
// axis = rank of lead; index (*batch, count), batch the first batch_dims of lead.
#pragma once

#include "index_add/index_add_ffi.h"
#include "segment_softmax/segment_softmax.h"

namespace jaxkern {

Targets SegmentSoftmaxCpuTargets();

template <template <IndexOp> class Handler> Targets SegmentSoftmaxTargets() {
  return {{"jaxkern_segment_softmax", Handler<IndexOp::kSegmentSoftmax>::Call},
          {"jaxkern_segment_softmax_grad", Handler<IndexOp::kSegmentSoftmaxGrad>::Call}};
}

template <class Binding> auto BindSegmentAttributes(Binding&& binding) {
  return BindIndexAttributes(std::forward<Binding>(binding).template Attr<int64_t>("num_segments"));
}

inline ffi::Error DecodeSegmentSoftmax(IndexOp op, const ffi::RemainingArgs& operands,
                                       const ffi::RemainingRets& results, int64_t num_segments,
                                       const IndexAttributes& attributes, IndexArgs* args) {
  const bool grad = op == IndexOp::kSegmentSoftmaxGrad;
  const char* name = IndexName(op);
  if (operands.size() != (grad ? 3 : 2) || results.empty()) {
    return InvalidArgument(name, "takes ", grad ? 3 : 2, " operands, got ", operands.size());
  }
  const auto source = operands.get<ffi::AnyBuffer>(0), other = operands.get<ffi::AnyBuffer>(grad ? 1 : 0);
  const auto index = operands.get<ffi::AnyBuffer>(grad ? 2 : 1);
  auto result = results.get<ffi::AnyBuffer>(0);
  if (!source) return source.error();
  if (!other) return other.error();
  if (!index) return index.error();
  if (!result) return result.error();
  const ffi::Span<const int64_t> shape = source->dimensions(), at = index->dimensions();
  const int64_t rank = static_cast<int64_t>(shape.size()), axis = attributes.axis, k = attributes.batch_dims;
  bool fits = axis >= 0 && axis < rank && k >= 0 && k <= axis && static_cast<int64_t>(at.size()) == k + 1 &&
              at[k] == shape[axis] && num_segments >= 0;
  for (int64_t d = 0; fits && d < k; ++d) fits = at[d] == shape[d];
  const std::string own = ShapeString(shape);
  if (!fits || own != ShapeString(other->dimensions()) || own != ShapeString((*result)->dimensions())) {
    return InvalidArgument(name, "arrays of shape ", own, " and ", ShapeString(other->dimensions()), " and index ",
                           ShapeString(at), " do not fit along axis ", axis, " with ", k, " batch dimensions and ",
                           num_segments, " segments");
  }
  const ffi::DataType type = source->element_type();
  if (!ToDType(type) || !ToElementType(type, &args->type) || other->element_type() != type ||
      (*result)->element_type() != type) {
    return InvalidArgument(name, "no kernel for element types ", static_cast<int>(type), " and ",
                           static_cast<int>(other->element_type()));
  }
  if (!ToIndexType(index->element_type(), &args->index_type)) {
    return InvalidArgument(name, "no kernel for indices of element type ", static_cast<int>(index->element_type()));
  }
  args->op = op;
  args->batch = Product(shape, 0, k);
  args->outer = Product(shape, k, axis);
  args->rows = num_segments;
  args->count = shape[axis];
  args->inner = Product(shape, axis + 1, rank);
  args->wrap = attributes.wrap;
  args->clip = attributes.clip;
  args->sorted = attributes.sorted;
  args->unique = attributes.unique;
  if (!ParseIndexPlan(attributes.plan, &args->plan)) {
    return InvalidArgument(name, "unknown plan '", attributes.plan, "'");
  }
  args->index = index->untyped_data();
  args->source = source->untyped_data();
  args->x = grad ? other->untyped_data() : nullptr;
  args->out = (*result)->untyped_data();
  return ffi::Error::Success();
}

}  // namespace jaxkern
