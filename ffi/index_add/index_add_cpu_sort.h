// What other families take from the CPU side of index_add: rows that indices stand for, positions in the order of
// their rows, loops over tasks.
#pragma once

#include <algorithm>
#include <memory>

#include "common/parallel_for.h"
#include "index_add/index_add.h"
#include "index_add/index_add_cpu_isa.h"

namespace jaxkern {

constexpr int64_t kShardElements = 16 * 1024;  // work below this is done before another thread has woken up
constexpr int64_t kChunkElements = 64 * 1024;  // of the source, in a chunk of sorted positions
constexpr int64_t kSlabElements = 4096;        // columns that a task takes where there are few chunks

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
std::unique_ptr<T[]> Uninitialised(int64_t size) {
  return std::unique_ptr<T[]>(new T[std::max<int64_t>(size, 1)]);
}

// body(task) for tasks of about `elements` elements each.
template <class Body>
void ParallelTasks(const Executor& executor, int64_t tasks, int64_t elements, const Body& body) {
  const int64_t grain = std::max<int64_t>(CeilDiv(kShardElements, std::max<int64_t>(elements, 1)),
                                          tasks / (16 * std::max<int64_t>(executor.Threads(), 1)));
  ParallelFor(executor, tasks, grain, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) body(t);
  });
}

// Runs a loop on the calling thread alone: inside a task.
class Alone : public Executor {
 public:
  int64_t Threads() const override { return 1; }
  void Schedule(std::function<void()> task) const override { task(); }
};

// row[k - first] for positions [first, last) of one b: the row that each goes to, `rows` if out of range.
void DecodeRows(const IndexArgs& args, int64_t b, int64_t first, int64_t last, uint32_t* row);

// The entries of every b in the order of their rows, [batch, count], and how many of each b go to a row at all: they
// come first.
struct SortedEntries {
  std::unique_ptr<IndexEntry[]> entries;
  std::unique_ptr<int64_t[]> sizes;
};
SortedEntries SortAllEntries(const Executor& executor, const IndexArgs& args);

}  // namespace jaxkern
