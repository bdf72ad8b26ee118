// Cross-entropy on the CPU: chooses the instruction set and spreads the rows over threads.
#include "cross_entropy_cpu.h"

#include <algorithm>

#include "../common/isa.h"
#include "cross_entropy_cpu_isa.h"

namespace jaxkern {
namespace {

// Work below this is done before another thread has woken up.
constexpr int64_t kShardElements = 16 * 1024;

using Planner = CrossEntropyCpuPlan (*)(const CrossEntropyArgs&);

Planner ChoosePlanner() {
#if defined(JAXKERN_X86_VARIANTS)
  switch (ChooseIsa()) {
    case Isa::kAvx512: return avx512::PlanCrossEntropy;
    case Isa::kAvx2: return avx2::PlanCrossEntropy;
    case Isa::kBaseline: break;
  }
#endif
  return baseline::PlanCrossEntropy;
}

}  // namespace

void CrossEntropyCpu(const CrossEntropyArgs& args, const Executor& executor) {
  const int64_t elements = args.outer * args.width * args.inner;
  if (elements == 0) return;
  static const Planner planner = ChoosePlanner();
  const CrossEntropyCpuPlan plan = planner(args);
  // At most 16 shards a thread: enough to even out, few enough to claim.
  const int64_t threads = std::max<int64_t>(executor.Threads(), 1);
  const int64_t grain = std::max(kShardElements * plan.strips / elements, plan.strips / (16 * threads));
  ParallelFor(executor, plan.strips, grain, [&](int64_t first, int64_t last) { plan.run(args, first, last); });
}

}  // namespace jaxkern
