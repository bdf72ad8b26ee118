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

inline void AddApiVersion(nanobind::module_& m) {
  m.attr("api_version") = nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}

}  // namespace jaxkern
