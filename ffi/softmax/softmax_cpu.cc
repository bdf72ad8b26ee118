// The softmax family on the CPU: chooses the instruction set and spreads the work over threads.
//
// Many strips: each thread runs whole strips, one after the other. Few and long ones: the chunks of
// all strips are spread, in two loops with the merge of their statistics between. The arithmetic
// and its order are the same either way.
#include "softmax_cpu.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "softmax_cpu_isa.h"

namespace jaxkern {
namespace {

// Work below this is done before another thread has woken up.
constexpr int64_t kShardElements = 16 * 1024;

using Planner = SoftmaxCpuPlan (*)(const SoftmaxArgs&);

// The widest that this CPU has, or at most what the environment variable JAXKERN_CPU_ISA names
// (avx2, baseline), with which tests reach the others.
Planner ChoosePlanner() {
#if defined(JAXKERN_X86_VARIANTS)
  const char* variable = std::getenv("JAXKERN_CPU_ISA");
  const std::string_view limit = variable ? variable : "avx512";
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx2 && has_avx512 && limit == "avx512") return avx512::PlanSoftmax;
  if (has_avx2 && limit != "baseline") return avx2::PlanSoftmax;
#endif
  return baseline::PlanSoftmax;
}

}  // namespace

void SoftmaxCpu(const SoftmaxArgs& args, const Executor& executor) {
  const int64_t elements = args.outer * args.width * args.inner;
  if (elements == 0) return;
  static const Planner planner = ChoosePlanner();
  const SoftmaxCpuPlan plan = planner(args);

  const int64_t threads = std::max<int64_t>(executor.Threads(), 1);
  if (plan.chunks == 1 || threads == 1 || plan.strips >= 4 * threads) {
    // At most 16 shards a thread: enough to even out, few enough to claim.
    const int64_t grain = std::max(kShardElements * plan.strips / elements, plan.strips / (16 * threads));
    ParallelFor(executor, plan.strips, grain,
                [&](int64_t first, int64_t last) { plan.run(args, first, last); });
    return;
  }

  const int64_t count = plan.strips * plan.chunks;
  const int64_t grain = std::max(kShardElements * count / elements, count / (16 * threads));
  std::vector<double> stats(count * plan.stats_size);
  const auto at = [&](int64_t i) { return stats.data() + i * plan.stats_size; };
  ParallelFor(executor, count, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) plan.reduce(args, i / plan.chunks, i % plan.chunks, at(i));
  });
  for (int64_t i = 0; i < count; ++i) {
    if (i % plan.chunks) plan.merge(args, at(i - i % plan.chunks), at(i));
  }
  ParallelFor(executor, count, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) plan.write(args, i / plan.chunks, i % plan.chunks, at(i - i % plan.chunks));
  });
}

}  // namespace jaxkern
