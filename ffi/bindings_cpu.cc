// The extension module jaxkern._cpu: pure host functions that say which CUDA kernel a problem would run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "common/bindings.h"
#include "cross_entropy/cross_entropy_tier.h"

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

// A problem of cross-entropy as Python hands it over.
struct LossQuery {
  LossProblem problem;
  LossQuery(const std::string& pass, const std::string& dtype, int64_t rows, int64_t width, int64_t inner, bool masked,
            int64_t scratch_bytes) {
    if (!ParseLossName(pass, kLossPassNames, &problem.pass)) throw nb::value_error(("unknown pass " + pass).c_str());
    problem.dtype = ParseDType(dtype);
    problem.rows = rows, problem.width = width, problem.inner = inner;
    problem.masked = masked, problem.scratch_bytes = scratch_bytes;
  }
  std::string Tier(int sm_count, int compute_capability, int shared_memory) const {
    const LossTier tier = ChooseLossTier(problem, {sm_count, compute_capability, shared_memory});
    return std::string(kLossTierNames[static_cast<int>(tier)]);
  }
  bool Fits(const std::string& name, int sm_count, int compute_capability, int shared_memory) const {
    LossTier tier;
    if (!ParseLossName(name, kLossTierNames, &tier)) throw nb::value_error(("unknown tier " + name).c_str());
    return LossTierFits(tier, problem, {sm_count, compute_capability, shared_memory});
  }
};

}  // namespace

NB_MODULE(_cpu, m) {
  AddApiVersion(m);
  m.def("registrations", [] { return Registrations({}); });
  nb::class_<LossQuery>(m, "LossQuery")
      .def(nb::init<const std::string&, const std::string&, int64_t, int64_t, int64_t, bool, int64_t>(), nb::arg("pass_"),
           nb::arg("dtype"), nb::arg("rows"), nb::arg("width"), nb::arg("inner"), nb::arg("masked"), nb::arg("scratch_bytes"))
      .def("tier", &LossQuery::Tier, nb::arg("sm_count"), nb::arg("compute_capability"), nb::arg("shared_memory"))
      .def("fits", &LossQuery::Fits, nb::arg("tier"), nb::arg("sm_count"), nb::arg("compute_capability"),
           nb::arg("shared_memory"));
}
