// Huge pages for a large output. XLA's CPU client takes each large buffer fresh from the system, and
// the first write to a page of it enters the kernel: at 4 KB a page that takes longer than a softmax
// does. Where Linux leaves the size of pages to the program (transparent_hugepage/enabled is madvise,
// as most distributions set it), one call makes them 2 MB. Elsewhere it changes nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jaxkern {

inline void PreferHugePages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = 2 << 20;
  // Below, pages are recycled rather than fresh. Only whole huge pages that nothing else lies in.
  if (bytes < 8 * static_cast<int64_t>(kHuge)) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (address + kHuge - 1) / kHuge * kHuge, last = (address + bytes) / kHuge * kHuge;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // advice: its failure does not matter
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace jaxkern
