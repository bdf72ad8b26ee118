// The extension module jaxkern._cpu: pure host functions that say which CUDA kernel a problem would run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "common/bindings.h"
#include "index_add/index_add_plan.h"

namespace nb = nanobind;
using namespace jaxkern;

namespace {

// The position of a name in a list of them, which is the value of its enumerator.
template <class Enum, size_t n>
Enum ParseName(const char* what, const std::string& name, const char* const (&names)[n]) {
  for (size_t i = 0; i < n; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
  }
  throw nb::value_error((std::string("no kernel for ") + what + " " + name).c_str());
}

IndexPlan ParsePlan(const std::string& name) {
  IndexPlan plan;
  if (!ParseIndexPlan(name, &plan)) throw nb::value_error(("unknown plan " + name).c_str());
  return plan;
}

// A problem of the index_add family as Python hands it over.
struct IndexQuery {
  IndexProblem problem;
  IndexQuery(const std::string& op, const std::string& dtype, const std::string& index_dtype, int64_t batch,
             int64_t outer, int64_t rows, int64_t count, int64_t inner, bool sorted, bool unique, bool deterministic) {
    static constexpr const char* kOps[] = {"index_add",    "segment_sum",     "segment_max",         "segment_min",
                                           "index_select", "segment_softmax", "segment_softmax_grad"};
    static constexpr const char* kTypes[] = {"float16", "bfloat16", "float32", "float64", "int32", "int64", "uint32"};
    static constexpr const char* kIndexTypes[] = {"int8",  "int16",  "int32",  "int64",
                                                  "uint8", "uint16", "uint32", "uint64"};
    problem.op = ParseName<IndexOp>("operation", op, kOps);
    problem.type = ParseName<ElementType>("dtype", dtype, kTypes);
    problem.index_type = ParseName<IndexType>("indices of dtype", index_dtype, kIndexTypes);
    problem.batch = batch, problem.outer = outer, problem.rows = rows, problem.count = count, problem.inner = inner;
    problem.sorted = sorted, problem.unique = unique, problem.deterministic = deterministic;
  }
  std::string Plan(int sm_count, int compute_capability, int shared_memory) const {
    const IndexPlan plan = ChooseIndexPlan(problem, {sm_count, compute_capability, shared_memory});
    return std::string(kIndexPlanNames[static_cast<int>(plan)]);
  }
  bool Fits(const std::string& plan, int sm_count, int compute_capability, int shared_memory) const {
    return IndexPlanFits(ParsePlan(plan), problem, {sm_count, compute_capability, shared_memory});
  }
  int64_t ScratchBytes(const std::string& plan) const { return IndexScratchBytes(ParsePlan(plan), problem); }
};

}  // namespace

NB_MODULE(_cpu, m) {
  AddApiVersion(m);
  m.def("registrations", [] { return Registrations({}); });
  nb::class_<IndexQuery>(m, "IndexQuery")
      .def(nb::init<const std::string&, const std::string&, const std::string&, int64_t, int64_t, int64_t, int64_t,
                    int64_t, bool, bool, bool>(),
           nb::arg("op"), nb::arg("dtype"), nb::arg("index_dtype"), nb::arg("batch"), nb::arg("outer"), nb::arg("rows"),
           nb::arg("count"), nb::arg("inner"), nb::arg("sorted"), nb::arg("unique"), nb::arg("deterministic"))
      .def("plan", &IndexQuery::Plan, nb::arg("sm_count"), nb::arg("compute_capability"), nb::arg("shared_memory"))
      .def("fits", &IndexQuery::Fits, nb::arg("plan"), nb::arg("sm_count"), nb::arg("compute_capability"),
           nb::arg("shared_memory"))
      .def("scratch_bytes", &IndexQuery::ScratchBytes, nb::arg("plan"));
}
