// Which of the instruction sets that *_cpu_isa.cc files are compiled for a process uses. Host only, x86.
#pragma once

#if defined(JAXKERN_X86_VARIANTS)
#include <cstdlib>
#include <string_view>

namespace jaxkern {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// The widest that this CPU has, or at most what the environment variable JAXKERN_CPU_ISA names
// (avx2, baseline), with which tests reach the others.
inline Isa ChooseIsa() {
  const char* variable = std::getenv("JAXKERN_CPU_ISA");
  const std::string_view limit = variable ? variable : "avx512";
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx2 && has_avx512 && limit == "avx512") return Isa::kAvx512;
  return has_avx2 && limit != "baseline" ? Isa::kAvx2 : Isa::kBaseline;
}

}  // namespace jaxkern
#endif
