// From the buffers and attributes of an FFI call to ElementwiseArgs: what the CPU and the CUDA handler share.
//
//     operation   a name in the table of kernels; with the types of operands and results it is a signature
//     split       -1, or the axis along which the first operand, an array of twice the size, is two operands side by
//                 side, and the first result of a derivative two results
//
// Operands have the rank of the result, each dimension equal or 1; parameters are scalars. All of them are views of
// the result's index space, of which neighbouring dimensions are merged wherever that is one stride for every view.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/handler.h"
#include "elementwise/elementwise.h"

namespace jaxkern {

Targets ElementwiseCpuTargets();
Targets ElementwiseCudaTargets();

inline bool ToElementwiseType(ffi::DataType type, ElementwiseType* to) {
  switch (type) {
    case ffi::DataType::F16: *to = ElementwiseType::kF16; return true;
    case ffi::DataType::BF16: *to = ElementwiseType::kBF16; return true;
    case ffi::DataType::F32: *to = ElementwiseType::kF32; return true;
    case ffi::DataType::F64: *to = ElementwiseType::kF64; return true;
    case ffi::DataType::S8: *to = ElementwiseType::kS8; return true;
    case ffi::DataType::U8: *to = ElementwiseType::kU8; return true;
    case ffi::DataType::S32: *to = ElementwiseType::kS32; return true;
    case ffi::DataType::PRED: *to = ElementwiseType::kPred; return true;
    default: return false;
  }
}

class ElementwiseDecoder {
 public:
  ElementwiseDecoder(std::string_view operation, int64_t split) : operation_(operation), split_(split) {}

  // Finds the kernel in `table` and fills `args`.
  template <class Table, class Kernel>
  ffi::Error Decode(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results, const Table& table,
                    const Kernel** kernel, ElementwiseArgs* args) {
    for (size_t i = 0; i < operands.size(); ++i) {
      const auto buffer = operands.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      Add(buffer->untyped_data(), buffer->element_type(), buffer->dimensions(), split_ >= 0 && i == 0, &operands_);
    }
    for (size_t i = 0; i < results.size(); ++i) {
      auto buffer = results.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      // A result as large as the operand that is split is split as well.
      const bool whole = split_ >= 0 && i == 0 && ToDims((*buffer)->dimensions()) == operands_[0].dims;
      Add((*buffer)->untyped_data(), (*buffer)->element_type(), (*buffer)->dimensions(), whole, &results_);
    }
    if (!error_.empty()) return InvalidArgument("jaxkern", operation_, ": ", error_);
    if (results_.empty() || operands_.empty()) return InvalidArgument("jaxkern", operation_, ": no operands or no results");

    const std::string signature = Signature();
    const auto at = table.find(signature);
    if (at == table.end()) return InvalidArgument("jaxkern", "no kernel for ", signature);
    *kernel = &at->second;
    const int parameters = at->second.parameters;
    args->inputs = static_cast<int>(operands_.size()) - parameters;
    args->outputs = static_cast<int>(results_.size());
    args->parameters = parameters;
    for (int k = 0; k < parameters; ++k) {
      const Part& part = operands_[args->inputs + k];
      for (int64_t d : part.dims) {
        if (d != 1) return InvalidArgument("jaxkern", signature, ": a parameter that is no scalar");
      }
      args->parameter[k] = part.data;
    }
    operands_.resize(args->inputs);
    return Collapse(signature, args);
  }

 private:
  using Dims = std::vector<int64_t>;
  static Dims ToDims(ffi::Span<const int64_t> dims) { return Dims(dims.begin(), dims.end()); }

  struct Part {
    char* data;
    ElementwiseType type;
    Dims dims;    // of the whole buffer
    bool half;    // a half of it along the axis
  };

  void Add(void* data, ffi::DataType type, ffi::Span<const int64_t> span, bool split, std::vector<Part>* parts) {
    Part part = {static_cast<char*>(data), ElementwiseType::kF32, ToDims(span), split};
    if (!ToElementwiseType(type, &part.type)) error_ = "an element type without a kernel";
    parts->push_back(part);
    if (!split) return;
    if (split_ >= static_cast<int64_t>(part.dims.size()) || part.dims[split_] % 2) {
      error_ = "cannot be split along axis " + std::to_string(split_);
      return;
    }
    int64_t offset = part.dims[split_] / 2;
    for (size_t d = split_ + 1; d < part.dims.size(); ++d) offset *= part.dims[d];
    part.data += offset * SizeOf(part.type);
    parts->push_back(part);
  }

  std::string Signature() const {
    std::string text(operation_);
    const auto list = [&](const std::vector<Part>& parts) {
      for (size_t i = 0; i < parts.size(); ++i) {
        text += (i ? "," : "") + std::string(kElementwiseTypeNames[static_cast<int>(parts[i].type)]);
      }
    };
    text += "(", list(operands_), text += ")->", list(results_);
    return text;
  }

  ffi::Error Collapse(const std::string& signature, ElementwiseArgs* args) {
    Dims full = results_[0].dims;
    if (results_[0].half) full[split_] /= 2;
    const size_t rank = full.size();
    const int views = args->inputs + args->outputs;
    std::vector<Dims> strides(views);
    for (int v = 0; v < views; ++v) {
      const Part& part = v < args->inputs ? operands_[v] : results_[v - args->inputs];
      bool fits = part.dims.size() == rank;
      strides[v].resize(rank);
      int64_t stride = 1;
      for (size_t d = rank; fits && d-- > 0;) {
        const int64_t size = part.half && static_cast<int64_t>(d) == split_ ? part.dims[d] / 2 : part.dims[d];
        fits = size == full[d] || (size == 1 && v < args->inputs);
        strides[v][d] = size == 1 && full[d] != 1 ? 0 : stride;
        stride *= part.dims[d];
      }
      if (!fits) return InvalidArgument("jaxkern", signature, ": operand ", v, " does not broadcast to ", Text(full));
      ElementwiseView& view = v < args->inputs ? args->in[v] : args->out[v - args->inputs];
      view.data = part.data;
      view.type = part.type;
    }
    // Innermost first; dimensions of size 1 do not matter, but for one that is split: there rows begin and end.
    int groups = 0;
    int64_t size[3];
    std::vector<int64_t> group[3];
    for (size_t d = rank; d-- > 0;) {
      if (full[d] == 1 && static_cast<int64_t>(d) != split_) continue;
      bool joins = groups > 0;
      for (int v = 0; joins && v < views; ++v) joins = strides[v][d] == group[groups - 1][v] * size[groups - 1];
      if (joins) {
        size[groups - 1] *= full[d];
        continue;
      }
      if (groups == 3) return InvalidArgument("jaxkern", signature, ": operands broadcast in too many places");
      size[groups] = full[d];
      for (int v = 0; v < views; ++v) group[groups].push_back(strides[v][d]);
      ++groups;
    }
    if (groups == 0) size[0] = 1, group[0].assign(views, 1), groups = 1;
    for (int g = 0; g < groups; ++g) {
      args->size[2 - g] = size[g];
      for (int v = 0; v < views; ++v) {
        (v < args->inputs ? args->in[v] : args->out[v - args->inputs]).stride[2 - g] = group[g][v];
      }
    }
    return ffi::Error::Success();
  }

  static std::string Text(const Dims& dims) { return ShapeString(ffi::Span<const int64_t>(dims.data(), dims.size())); }

  std::string_view operation_;
  int64_t split_;
  std::vector<Part> operands_, results_;
  std::string error_;
};

}  // namespace jaxkern
