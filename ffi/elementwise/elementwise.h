// What a call of an elementwise operation is: its operands and results as views of one index space, the
// types of each, and the table of kernels by signature. Knows nothing of CUDA, XLA or Python.
//
// All views run over the same three dimensions, into which the handler (elementwise_ffi.h) has collapsed
// the array's own. A stride is 0 where the operand is broadcast. The innermost stride is 0 or 1.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

namespace jaxkern {

enum class ElementwiseType : int8_t { kF16, kBF16, kF32, kF64, kS8, kU8, kS32, kPred };
// Their names in signatures, and in jaxkern/_elementwise_table.py.
constexpr const char* kElementwiseTypeNames[] = {"f16", "bf16", "f32", "f64", "s8", "u8", "s32", "pred"};

constexpr int64_t SizeOf(ElementwiseType t) {
  return t == ElementwiseType::kF64 ? 8
         : t == ElementwiseType::kF32 || t == ElementwiseType::kS32 ? 4
         : t == ElementwiseType::kF16 || t == ElementwiseType::kBF16 ? 2 : 1;
}

struct ElementwiseView {
  void* data = nullptr;
  ElementwiseType type = ElementwiseType::kF32;
  int64_t stride[3] = {};  // in elements, outermost first

  bool IsScalar() const { return stride[0] == 0 && stride[1] == 0 && stride[2] == 0; }
};

struct ElementwiseArgs {
  static constexpr int kMaxInputs = 4, kMaxOutputs = 3, kMaxParameters = 2;

  int64_t size[3] = {1, 1, 1};  // outermost first
  int inputs = 0, outputs = 0, parameters = 0;
  ElementwiseView in[kMaxInputs], out[kMaxOutputs];
  const void* parameter[kMaxParameters] = {};  // scalars, of the type that the functor computes in

  int64_t Count() const { return size[0] * size[1] * size[2]; }
  // Every view is a scalar or all of its elements one after the other.
  bool IsFlat() const {
    const auto flat = [&](const ElementwiseView& v) {
      return v.stride[2] == 1 && (size[1] == 1 || v.stride[1] == size[2]) &&
             (size[0] == 1 || v.stride[0] == size[1] * size[2]);
    };
    for (int k = 0; k < inputs; ++k) {
      if (!in[k].IsScalar() && !flat(in[k])) return false;
    }
    for (int k = 0; k < outputs; ++k) {
      if (!flat(out[k])) return false;
    }
    return true;
  }
};

// A kernel and its signature, as in "where(pred,f16,f16)->f16".
template <class Kernel>
struct ElementwiseEntry {
  const char* signature;
  Kernel kernel;
};
template <class Kernel>
using ElementwiseTable = std::unordered_map<std::string, Kernel>;

}  // namespace jaxkern
