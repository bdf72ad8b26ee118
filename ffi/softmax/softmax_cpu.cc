// The softmax family on the CPU: chooses the instruction set and spreads the work over threads.
//
// Many strips: each thread runs whole strips, one after the other. Few and long ones: the chunks of
// all strips are spread, in two loops with the merge of their statistics between. The arithmetic
// and its order are the same either way.
#include "softmax_cpu.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "../common/isa.h"
#include "softmax_cpu_isa.h"

namespace jaxkern {
namespace {

// Work below this is done before another thread has woken up.
constexpr int64_t kShardElements = 16 * 1024;

struct Planners {
  SoftmaxCpuPlan (*softmax)(const SoftmaxArgs&);
  FusedCpuPlan (*fused)(const SoftmaxArgs&);
};

Planners ChoosePlanners() {
#if defined(JAXKERN_X86_VARIANTS)
  switch (ChooseIsa()) {
    case Isa::kAvx512: return {avx512::PlanSoftmax, avx512::PlanFused};
    case Isa::kAvx2: return {avx2::PlanSoftmax, avx2::PlanFused};
    case Isa::kBaseline: break;
  }
#endif
  return {baseline::PlanSoftmax, baseline::PlanFused};
}

const Planners& ChosenPlanners() {
  static const Planners planners = ChoosePlanners();
  return planners;
}

}  // namespace

void SoftmaxFusedCpu(const SoftmaxArgs& args, const Executor& executor) {
  if (args.outer == 0 || args.width == 0) return;
  const FusedCpuPlan plan = ChosenPlanners().fused(args);
  const int64_t grain = std::max(kShardElements / args.width, args.outer / (16 * std::max<int64_t>(executor.Threads(), 1)));
  ParallelFor(executor, args.outer, grain, [&](int64_t first, int64_t last) {
    struct alignas(64) Line {
      char bytes[64];
    };
    const std::unique_ptr<Line[]> buffer(new Line[(plan.buffer_bytes + 63) / 64]);
    plan.run(args, first, last, buffer.get());
  });
}

void SoftmaxCpu(const SoftmaxArgs& args, const Executor& executor) {
  const int64_t elements = args.outer * args.width * args.inner;
  if (elements == 0) return;
  const SoftmaxCpuPlan plan = ChosenPlanners().softmax(args);

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
