// What a nanobind module of this library hands to Python: its FFI targets as capsules, and the
// version of the XLA FFI headers that it was built with.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>

#include "common/handler.h"

namespace jaxkern {

// {target name: capsule}
inline nanobind::dict Registrations(std::initializer_list<Targets> lists) {
  nanobind::dict capsules;
  for (const Targets& targets : lists) {
    for (const Target& t : targets) {
      capsules[t.name] = nanobind::capsule(reinterpret_cast<void*>(t.handler));
    }
  }
  return capsules;
}

// {signature: whether operands may be broadcast in place}, for the lowering to choose by
template <class Table, class Broadcasts>
nanobind::dict ElementwiseSignatures(const Table& table, Broadcasts broadcasts) {
  nanobind::dict signatures;
  for (const auto& [signature, kernel] : table) signatures[signature.c_str()] = broadcasts(kernel);
  return signatures;
}

inline void AddApiVersion(nanobind::module_& m) {
  m.attr("api_version") = nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}

}  // namespace jaxkern
