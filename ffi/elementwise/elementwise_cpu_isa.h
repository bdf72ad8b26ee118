// Between elementwise_cpu.cc and what is compiled once an instruction set.
#pragma once

#include "elementwise_cpu.h"

namespace jaxkern {

// The generated files, each with its share of the loops.
#define JAXKERN_ELEMENTWISE_ISA(isa)                            \
  namespace isa {                                               \
  ElementwiseLoops ElementwiseLoops0();                         \
  ElementwiseLoops ElementwiseLoops1();                         \
  void FillElementwiseConversions(ElementwiseConversions* c);   \
  }
JAXKERN_ELEMENTWISE_ISA(baseline)
JAXKERN_ELEMENTWISE_ISA(avx2)
JAXKERN_ELEMENTWISE_ISA(avx512)
#undef JAXKERN_ELEMENTWISE_ISA

}  // namespace jaxkern
