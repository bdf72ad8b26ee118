// From the buffers and attributes of an FFI call to ReduceArgs. Python has validated all of it at trace time; the checks
// here prevent accesses out of bounds for callers that bypass Python.
#pragma once

#include <cstdint>
#include <optional>

#include "common/handler.h"
#include "reduction/reduction.h"

namespace jaxkern {

Targets ReductionCpuTargets();

// The operation's name in messages.
constexpr const char* ReduceName(ReduceOp op) {
  constexpr const char* kNames[] = {"jaxkern.reduce_sum", "jaxkern.reduce_mean", "jaxkern.reduce_max",
                                    "jaxkern.reduce_min", "jaxkern.logsumexp"};
  return kNames[static_cast<int>(op)];
}

// A boolean is a byte that is 0 or 1.
inline std::optional<ReduceType> ToReduceType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F16: return ReduceType::kF16;
    case ffi::DataType::BF16: return ReduceType::kBF16;
    case ffi::DataType::F32: return ReduceType::kF32;
    case ffi::DataType::F64: return ReduceType::kF64;
    case ffi::DataType::S8: return ReduceType::kS8;
    case ffi::DataType::S16: return ReduceType::kS16;
    case ffi::DataType::S32: return ReduceType::kS32;
    case ffi::DataType::S64: return ReduceType::kS64;
    case ffi::DataType::PRED:
    case ffi::DataType::U8: return ReduceType::kU8;
    case ffi::DataType::U16: return ReduceType::kU16;
    case ffi::DataType::U32: return ReduceType::kU32;
    case ffi::DataType::U64: return ReduceType::kU64;
    default: return std::nullopt;
  }
}

// Operands: x[, mask]. Results: one, or with `statistics` three.
inline ffi::Error DecodeReduction(ReduceOp op, bool statistics, const ffi::RemainingArgs& operands,
                                  const ffi::RemainingRets& results, int64_t axis, ReduceArgs* args) {
  const char* name = ReduceName(op);
  if (operands.size() < 1 || operands.size() > 2 || results.empty()) {
    return InvalidArgument(name, "takes an operand and an optional mask, got ", operands.size());
  }
  const auto x = operands.get<ffi::AnyBuffer>(0);
  auto out = results.get<ffi::AnyBuffer>(0);
  if (!x) return x.error();
  if (!out) return out.error();
  const ffi::Span<const int64_t> dims = x->dimensions();
  const int64_t rank = static_cast<int64_t>(dims.size());
  const std::optional<ReduceType> type = ToReduceType(x->element_type());
  if (!type || (IsInteger(*type) && (op == ReduceOp::kMean || op == ReduceOp::kLogSumExp))) {
    return InvalidArgument(name, "no kernel for the element type ", static_cast<int>(x->element_type()));
  }
  if (axis < 0 || axis >= rank) return InvalidArgument(name, "axis ", axis, " of an array of shape ", ShapeString(dims));
  args->op = op;
  args->type = *type;
  args->outer = Product(dims, 0, axis);
  args->width = dims[axis];
  args->inner = Product(dims, axis + 1, rank);
  args->x = x->untyped_data();
  args->out = (*out)->untyped_data();

  int64_t bytes = SizeOf(*type);
  if (IsInteger(*type) && op == ReduceOp::kSum) {
    const ffi::DataType sum = (*out)->element_type();
    args->wide = sum == ffi::DataType::S64 || sum == ffi::DataType::U64;
    bytes = args->wide ? 8 : 4;
  } else if (bytes == 2 && !IsInteger(*type) && (*out)->element_type() == ffi::DataType::F32) {
    args->wide = true;
    bytes = 4;
  }
  if (static_cast<int64_t>((*out)->size_bytes()) != args->outer * args->inner * bytes) {
    return InvalidArgument(name, "operand of shape ", ShapeString(dims), " and axis ", axis, ", result of shape ",
                           ShapeString((*out)->dimensions()), " or of another element type");
  }
  if (statistics) {
    void** const kept[] = {&args->largest, &args->total};
    const bool is_double = *type == ReduceType::kF64;
    for (int i = 0; i < 2; ++i) {
      auto numbers = results.get<ffi::AnyBuffer>(1 + i);
      if (!numbers) return numbers.error();
      if ((*numbers)->element_type() != (is_double ? ffi::DataType::F64 : ffi::DataType::F32) ||
          static_cast<int64_t>((*numbers)->element_count()) != args->outer * args->inner) {
        return InvalidArgument(name, "statistics of shape ", ShapeString((*numbers)->dimensions()), " or of another element type");
      }
      *kept[i] = (*numbers)->untyped_data();
    }
  }
  if (operands.size() > 1) {
    const auto mask = operands.get<ffi::AnyBuffer>(1);
    if (!mask) return mask.error();
    if (ffi::Error e = DecodeMask(name, *mask, dims, axis, args); e.failure()) return e;
  }
  return ffi::Error::Success();
}

// {target name: handler} with Handler<op, whether it gives statistics> for each operation.
template <template <ReduceOp, bool> class Handler> Targets ReductionTargets() {
  return {{"jaxkern_reduce_sum", Handler<ReduceOp::kSum, false>::Call},
          {"jaxkern_reduce_mean", Handler<ReduceOp::kMean, false>::Call},
          {"jaxkern_reduce_max", Handler<ReduceOp::kMax, false>::Call},
          {"jaxkern_reduce_min", Handler<ReduceOp::kMin, false>::Call},
          {"jaxkern_logsumexp", Handler<ReduceOp::kLogSumExp, false>::Call},
          {"jaxkern_logsumexp_statistics", Handler<ReduceOp::kLogSumExp, true>::Call}};
}

}  // namespace jaxkern
