// The softmax family on the CPU: chooses the instruction set and spreads the work over threads.
//
// Many strips: each thread runs whole strips, one after the other. Few and long ones: the chunks of
// all strips are spread, in two loops with the merge of their statistics between. The arithmetic
// and its order are the same either way.
#include "softmax_cpu.h"

#include <algorithm>
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

// What a fused call computes between Prepare and Finish, for `rows` rows.
template <class C>
void RunFusedRows(const SoftmaxArgs& args, int64_t rows, C* logits, C* cotangents, C* powers, C* result) {
  SoftmaxArgs plain;
  plain.dtype = sizeof(C) == 8 ? DType::kF64 : DType::kF32;
  plain.outer = rows;
  plain.width = args.width;
  plain.log = args.log;
  const auto run = [&](const C* a, const C* b, C* out) {
    plain.backward = b != nullptr;
    plain.a = a, plain.b = b, plain.out = out;
    const SoftmaxCpuPlan plan = ChosenPlanners().softmax(plain);
    plan.run(plain, 0, plan.strips);
  };
  if (!args.backward) return run(logits, nullptr, result);
  if (!args.log) run(logits, nullptr, powers);
  run(args.log ? logits : powers, cotangents, result);
}

template <class C>
void RunFused(const SoftmaxArgs& args, const Executor& executor) {
  constexpr int64_t kGroupElements = 2048;  // few enough for the L1 cache, in four buffers
  const FusedCpuPlan plan = ChosenPlanners().fused(args);
  const int64_t group = std::max<int64_t>(1, kGroupElements / args.width);
  const int64_t grain = std::max(kShardElements / args.width, args.outer / (16 * std::max<int64_t>(executor.Threads(), 1)));
  ParallelFor(executor, args.outer, grain, [&](int64_t first, int64_t last) {
    const int64_t size = std::min(group, last - first) * args.width;
    std::vector<C> buffers((args.backward ? 4 : 2) * size);
    C* const logits = buffers.data();
    C* const cotangents = args.backward ? logits + 2 * size : nullptr;
    C* const powers = args.backward ? cotangents + size : nullptr;
    for (; first < last; first += group) {
      const int64_t rows = std::min(group, last - first);
      C* const result = SizeOf(args.dtype) == sizeof(C) ? static_cast<C*>(args.out) + first * args.width : logits + size;
      plan.prepare(args, first, rows, logits, cotangents);
      RunFusedRows(args, rows, logits, cotangents, powers, result);
      plan.finish(args, first, rows, result);
    }
  });
}

}  // namespace

void SoftmaxFusedCpu(const SoftmaxArgs& args, const Executor& executor) {
  if (args.outer == 0 || args.width == 0) return;
  args.dtype == DType::kF64 ? RunFused<double>(args, executor) : RunFused<float>(args, executor);
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
