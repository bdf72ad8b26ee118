// The row reductions on the CPU: chooses the instruction set and spreads the work over threads.
//
// Many strips: each thread runs whole strips. Few and long ones: the chunks of all strips are spread, and
// then joined. The arithmetic and its order are the same either way.
#include "reduction_cpu.h"

#include <algorithm>
#include <vector>

#include "../common/isa.h"
#include "reduction_cpu_isa.h"

namespace jaxkern {
namespace {

// Work below this is done before another thread has woken up.
constexpr int64_t kShardElements = 32 * 1024;

using Planner = ReduceCpuPlan (*)(const ReduceArgs&);

Planner ChoosePlanner() {
#if defined(JAXKERN_X86_VARIANTS)
  switch (ChooseIsa()) {
    case Isa::kAvx512: return avx512::PlanReduction;
    case Isa::kAvx2: return avx2::PlanReduction;
    case Isa::kBaseline: break;
  }
#endif
  return baseline::PlanReduction;
}

}  // namespace

void ReductionCpu(const ReduceArgs& args, const Executor& executor) {
  const int64_t elements = args.outer * args.width * args.inner;
  if (elements == 0) return;
  static const Planner planner = ChoosePlanner();
  const ReduceCpuPlan plan = planner(args);

  const int64_t threads = std::max<int64_t>(executor.Threads(), 1);
  // At most 16 shards a thread: enough to even out, few enough to claim.
  const auto grain = [&](int64_t count) {
    return std::max(kShardElements * count / elements, count / (16 * threads));
  };
  if (plan.chunks == 1 || threads == 1 || plan.strips >= 4 * threads) {
    ParallelFor(executor, plan.strips, grain(plan.strips),
                [&](int64_t first, int64_t last) { plan.run(args, first, last); });
    return;
  }
  const int64_t count = plan.strips * plan.chunks;
  std::vector<double> stats(count * plan.stats_size);
  ParallelFor(executor, count, grain(count), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      plan.reduce(args, i / plan.chunks, i % plan.chunks, stats.data() + i * plan.stats_size);
    }
  });
  for (int64_t s = 0; s < plan.strips; ++s) plan.finish(args, s, stats.data() + s * plan.chunks * plan.stats_size);
}

}  // namespace jaxkern
