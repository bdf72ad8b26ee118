// The extension module jaxkern._cpu: the CPU's FFI targets, and the pure host functions that say
// which CUDA kernel a problem would run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "common/bindings.h"
#include "softmax/softmax_ffi.h"
#include "softmax/softmax_tier.h"

namespace nb = nanobind;
using namespace jaxkern;

namespace {

DType ParseDType(const std::string& name) {
  if (name == "float16") return DType::kF16;
  if (name == "bfloat16") return DType::kBF16;
  if (name == "float32") return DType::kF32;
  if (name == "float64") return DType::kF64;
  throw nb::value_error(("no kernel for dtype " + name).c_str());
}

SoftmaxProblem Problem(int64_t rows, int64_t width, int64_t inner, const std::string& dtype, bool log, bool backward,
                       bool masked, int64_t scratch_bytes) {
  SoftmaxProblem problem;
  problem.rows = rows;
  problem.width = width;
  problem.inner = inner;
  problem.dtype = ParseDType(dtype);
  problem.log = log;
  problem.backward = backward;
  problem.masked = masked;
  problem.scratch_bytes = scratch_bytes;
  return problem;
}

std::string Tier(int64_t rows, int64_t width, int64_t inner, const std::string& dtype, bool log, bool backward,
                 bool masked, int64_t scratch_bytes, int sm_count, int compute_capability, int shared_memory) {
  const SoftmaxProblem problem = Problem(rows, width, inner, dtype, log, backward, masked, scratch_bytes);
  const SoftmaxTier tier = ChooseSoftmaxTier(problem, {sm_count, compute_capability, shared_memory});
  return std::string(kSoftmaxTierNames[static_cast<int>(tier)]);
}

bool TierFits(const std::string& tier_name, int64_t rows, int64_t width, int64_t inner, const std::string& dtype,
              bool log, bool backward, bool masked, int64_t scratch_bytes, int sm_count, int compute_capability,
              int shared_memory) {
  SoftmaxTier tier;
  if (!ParseSoftmaxTier(tier_name, &tier)) throw nb::value_error(("unknown tier " + tier_name).c_str());
  const SoftmaxProblem problem = Problem(rows, width, inner, dtype, log, backward, masked, scratch_bytes);
  return SoftmaxTierFits(tier, problem, {sm_count, compute_capability, shared_memory});
}

}  // namespace

NB_MODULE(_cpu, m) {
  AddApiVersion(m);
  m.def("registrations", [] { return Registrations({SoftmaxCpuTargets()}); });
  m.def("softmax_tier", &Tier, nb::arg("rows"), nb::arg("width"), nb::arg("inner"), nb::arg("dtype"),
        nb::arg("log"), nb::arg("backward"), nb::arg("masked"), nb::arg("scratch_bytes"), nb::arg("sm_count"),
        nb::arg("compute_capability"), nb::arg("shared_memory"));
  m.def("softmax_tier_fits", &TierFits, nb::arg("tier"), nb::arg("rows"), nb::arg("width"), nb::arg("inner"),
        nb::arg("dtype"), nb::arg("log"), nb::arg("backward"), nb::arg("masked"), nb::arg("scratch_bytes"),
        nb::arg("sm_count"), nb::arg("compute_capability"), nb::arg("shared_memory"));
}
