// A parallel loop over independent shards, on whatever runs tasks: an Executor. Knows nothing of
// XLA; ffi/common/handler.h makes an Executor of XLA's thread pool.
//
// Shards are claimed from an atomic counter, by the calling thread as well as by the tasks that it
// schedules. The caller therefore never waits for a task to start, only for shards that another
// thread is already working on: a pool whose threads are all busy, or all inside such a loop
// themselves, cannot deadlock it. Which thread runs a shard is up to chance, what a shard is made
// of is not: results do not depend on the number of threads as long as shards are independent.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace jaxkern {

class Executor {
 public:
  virtual ~Executor() = default;
  virtual int64_t Threads() const = 0;
  // Runs the task some time, on another thread or right here.
  virtual void Schedule(std::function<void()> task) const = 0;
};

// Calls body(begin, end) on disjoint ranges that cover [0, count), each of `grain` items but the
// last. Returns when all are done.
template <class Body>
void ParallelFor(const Executor& executor, int64_t count, int64_t grain, Body&& body) {
  if (count <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int64_t shards = (count + grain - 1) / grain;
  const int64_t helpers = shards == 1 ? 0 : std::min(executor.Threads() - 1, shards - 1);
  if (helpers <= 0) return body(int64_t{0}, count);

  // Outlives the call: a task may start after the last shard is done, and must find that out
  // without touching `body`, which is gone by then.
  struct State {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable all_done;
    int64_t done = 0;
  };
  auto state = std::make_shared<State>();
  const auto work = [state, shards, grain, count, &body] {
    int64_t done = 0;
    for (int64_t s; (s = state->next.fetch_add(1, std::memory_order_relaxed)) < shards; ++done) {
      body(s * grain, std::min(count, (s + 1) * grain));
    }
    if (done == 0) return;
    std::lock_guard<std::mutex> lock(state->mutex);  // publishes what the shards wrote
    state->done += done;
    if (state->done == shards) state->all_done.notify_one();
  };
  for (int64_t i = 0; i < helpers; ++i) executor.Schedule(work);
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done == shards; });
}

}  // namespace jaxkern
