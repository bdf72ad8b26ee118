// From the buffers and attributes of an FFI call to IndexArgs: what the CPU and the CUDA handler of the
// index_add family share. Python has validated all of it at trace time; what is checked here is what
// would otherwise read or write out of bounds, for a caller who goes around Python.
//
//     target                 operands                       results
//     jaxkern_index_add      x, index, source[, alpha]      out, in the place of x (aliased)
//     jaxkern_segment_sum    source, index                  out
//     jaxkern_segment_max    source, index                  out
//     jaxkern_segment_min    source, index                  out
//     jaxkern_index_select   x, index                       selected
//
// CUDA adds one u8 result, the scratch. Every target takes all the attributes of IndexAttributes. Shapes,
// with k = batch_dims and axis >= k:
//
//     x, out              (*lead, rows, *trail)      axis = rank of lead
//     source, selected    (*lead, count, *trail)     source: its first k dimensions may all be 1, read for every b
//     index               (*batch, count)            batch: the first k of lead, or all 1
//     alpha               any shape; its elements are equal, in the computing type (float for 16 bit)
#pragma once

#include <cstdint>
#include <string_view>

#include "common/handler.h"
#include "index_add/index_add.h"

namespace jaxkern {

Targets IndexCudaTargets();

// The targets of a platform, given its handler of each operation.
template <template <IndexOp> class Handler> Targets IndexTargets() {
  return {{"jaxkern_index_add", Handler<IndexOp::kAdd>::Call},
          {"jaxkern_segment_sum", Handler<IndexOp::kSegmentSum>::Call},
          {"jaxkern_segment_max", Handler<IndexOp::kSegmentMax>::Call},
          {"jaxkern_segment_min", Handler<IndexOp::kSegmentMin>::Call},
          {"jaxkern_index_select", Handler<IndexOp::kSelect>::Call}};
}

struct IndexAttributes {
  int64_t axis, batch_dims;
  bool wrap, clip, sorted, unique, deterministic, fill_nan;
  std::string_view plan;
};

// The attributes, in the order of IndexAttributes, at the end of a handler's binding.
template <class Binding>
auto BindIndexAttributes(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Attr<int64_t>("axis")
      .template Attr<int64_t>("batch_dims")
      .template Attr<bool>("wrap")
      .template Attr<bool>("clip")
      .template Attr<bool>("sorted")
      .template Attr<bool>("unique")
      .template Attr<bool>("deterministic")
      .template Attr<bool>("fill_nan")
      .template Attr<std::string_view>("plan");
}

// The operation's name in messages.
constexpr const char* IndexName(IndexOp op) {
  switch (op) {
    case IndexOp::kAdd: return "jaxkern.index_add";
    case IndexOp::kSegmentSum: return "jaxkern.segment_sum";
    case IndexOp::kSegmentMax: return "jaxkern.segment_max";
    case IndexOp::kSegmentMin: return "jaxkern.segment_min";
    case IndexOp::kSelect: return "jaxkern.index_select";
    case IndexOp::kSegmentSoftmax: return "jaxkern.segment_softmax";
    case IndexOp::kSegmentSoftmaxGrad: return "the gradient of jaxkern.segment_softmax";
  }
  return "jaxkern";
}

inline bool ToElementType(ffi::DataType type, ElementType* element) {
  switch (type) {
    case ffi::DataType::F16: *element = ElementType::kF16; return true;
    case ffi::DataType::BF16: *element = ElementType::kBF16; return true;
    case ffi::DataType::F32: *element = ElementType::kF32; return true;
    case ffi::DataType::F64: *element = ElementType::kF64; return true;
    case ffi::DataType::S32: *element = ElementType::kS32; return true;
    case ffi::DataType::S64: *element = ElementType::kS64; return true;
    case ffi::DataType::U32: *element = ElementType::kU32; return true;
    default: return false;
  }
}

inline bool ToIndexType(ffi::DataType type, IndexType* index) {
  switch (type) {
    case ffi::DataType::S8: *index = IndexType::kS8; return true;
    case ffi::DataType::S16: *index = IndexType::kS16; return true;
    case ffi::DataType::S32: *index = IndexType::kS32; return true;
    case ffi::DataType::S64: *index = IndexType::kS64; return true;
    case ffi::DataType::U8: *index = IndexType::kU8; return true;
    case ffi::DataType::U16: *index = IndexType::kU16; return true;
    case ffi::DataType::U32: *index = IndexType::kU32; return true;
    case ffi::DataType::U64: *index = IndexType::kU64; return true;
    default: return false;
  }
}

// What alpha is held in: the type that the sums are scaled and rounded from.
constexpr ffi::DataType ComputingType(ffi::DataType type) {
  return type == ffi::DataType::F16 || type == ffi::DataType::BF16 ? ffi::DataType::F32 : type;
}

// Fills everything but the scratch. args->x is set for index_add too: a handler whose out does not lie
// where x does copies x there first.
inline ffi::Error DecodeIndex(IndexOp op, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                              const IndexAttributes& attributes, IndexArgs* args) {
  const char* name = IndexName(op);
  const bool add = op == IndexOp::kAdd, select = op == IndexOp::kSelect;
  const size_t least = add ? 3 : 2, most = add ? 4 : 2;
  if (operands.size() < least || operands.size() > most || results.empty()) {
    return InvalidArgument(name, "takes ", least, " to ", most, " operands, got ", operands.size());
  }
  const auto first = operands.get<ffi::AnyBuffer>(0), index = operands.get<ffi::AnyBuffer>(1);
  auto result = results.get<ffi::AnyBuffer>(0);
  if (!first) return first.error();
  if (!index) return index.error();
  if (!result) return result.error();
  const auto third = add ? operands.get<ffi::AnyBuffer>(2) : first;
  if (!third) return third.error();
  // The array of rows, and the one that has as many along the axis as there are indices.
  const ffi::AnyBuffer& rows = select ? *first : **result;
  const ffi::AnyBuffer& counted = select ? **result : *third;

  const ffi::Span<const int64_t> shape = rows.dimensions(), many = counted.dimensions(), at = index->dimensions();
  const int64_t rank = static_cast<int64_t>(shape.size()), axis = attributes.axis, k = attributes.batch_dims;
  const auto shapes_refused = [&] {
    return InvalidArgument(name, "rows of shape ", ShapeString(shape), ", index ", ShapeString(at), " and source ",
                           ShapeString(many), " do not fit along axis ", axis, " with ", k, " batch dimensions");
  };
  if (axis < 0 || axis >= rank || k < 0 || k > axis || static_cast<int64_t>(many.size()) != rank ||
      static_cast<int64_t>(at.size()) != k + 1 || at[k] != many[axis]) {
    return shapes_refused();
  }
  bool index_whole = true, index_ones = true, source_whole = true, source_ones = true;
  for (int64_t d = 0; d < rank; ++d) {
    if (d < k) {
      index_whole &= at[d] == shape[d];
      index_ones &= at[d] == 1;
      source_whole &= many[d] == shape[d];
      source_ones &= many[d] == 1;
    } else if (d != axis && many[d] != shape[d]) {
      return shapes_refused();
    }
  }
  if ((!index_whole && !index_ones) || (!source_whole && (!source_ones || select))) return shapes_refused();
  if (add && ShapeString(first->dimensions()) != ShapeString(shape)) {
    return InvalidArgument(name, "x of shape ", ShapeString(first->dimensions()), ", result of shape ",
                           ShapeString(shape));
  }
  const ffi::DataType type = (*result)->element_type();
  if (!ToElementType(type, &args->type) || first->element_type() != type || third->element_type() != type) {
    return InvalidArgument(name, "no kernel for element types ", static_cast<int>(first->element_type()), " and ",
                           static_cast<int>(third->element_type()), " to ", static_cast<int>(type));
  }
  if (!ToIndexType(index->element_type(), &args->index_type)) {
    return InvalidArgument(name, "no kernel for indices of element type ", static_cast<int>(index->element_type()));
  }

  args->op = op;
  // Indices that are the same for every b make b one more dimension of `outer`, unless the source is not
  // there for every b: then x and out have a single b or the indices must be repeated.
  const int64_t b = Product(shape, 0, k), o = Product(shape, k, axis);
  if (!index_whole && !source_whole) return shapes_refused();
  args->batch = index_whole ? b : 1;
  args->outer = index_whole ? o : b * o;
  args->rows = shape[axis];
  args->count = many[axis];
  args->inner = Product(shape, axis + 1, rank);
  args->source_batched = source_whole;
  args->wrap = attributes.wrap;
  args->clip = attributes.clip;
  args->sorted = attributes.sorted;
  args->unique = attributes.unique;
  args->deterministic = attributes.deterministic;
  args->fill_nan = attributes.fill_nan;
  if (!ParseIndexPlan(attributes.plan, &args->plan)) {
    return InvalidArgument(name, "unknown plan '", attributes.plan, "'");
  }
  args->x = add || select ? first->untyped_data() : nullptr;
  args->index = index->untyped_data();
  args->source = select ? nullptr : third->untyped_data();
  args->out = (*result)->untyped_data();
  if (operands.size() == 4) {
    const auto alpha = operands.get<ffi::AnyBuffer>(3);
    if (!alpha) return alpha.error();
    if (alpha->element_type() != ComputingType(type) || alpha->element_count() < 1) {
      return InvalidArgument(name, "alpha of shape ", ShapeString(alpha->dimensions()), " and element type ",
                             static_cast<int>(alpha->element_type()));
    }
    args->alpha = alpha->untyped_data();
  }
  return ffi::Error::Success();
}

}  // namespace jaxkern
