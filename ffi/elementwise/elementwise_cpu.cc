// The elementwise operations on the CPU: the table of kernels for this machine's instruction set, and the walk
// over an array, block by block, on all threads.
#include "elementwise_cpu.h"

#include <algorithm>
#include <cstring>

#include "../common/isa.h"
#include "elementwise_cpu_isa.h"

namespace jaxkern {
namespace {

constexpr int64_t kBlock = 1024;         // elements; what a block of all operands takes fits the L1 cache
constexpr int64_t kShard = 32 * kBlock;  // less is done before another thread has woken up

struct Signature {
  const char* signature;
  const char* loop;
  ElementwiseType computing;
  int parameters;
};
constexpr Signature kSignatures[] = {
#include "elementwise_signatures.inc"
};

struct Variant {
  ElementwiseTable<ElementwiseLoop> loops;
  ElementwiseConversions conversions = {};

  Variant() {
    const auto add = [&](auto&&... parts) {
      const auto one = [&](const ElementwiseLoops& part) {
        for (int i = 0; i < part.count; ++i) loops.emplace(part.entries[i].signature, part.entries[i].kernel);
      };
      (one(parts), ...);
    };
#if defined(JAXKERN_X86_VARIANTS)
    switch (ChooseIsa()) {
      case Isa::kAvx512:
        add(avx512::ElementwiseLoops0(), avx512::ElementwiseLoops1());
        avx512::FillElementwiseConversions(&conversions);
        return;
      case Isa::kAvx2:
        add(avx2::ElementwiseLoops0(), avx2::ElementwiseLoops1());
        avx2::FillElementwiseConversions(&conversions);
        return;
      case Isa::kBaseline: break;
    }
#endif
    add(baseline::ElementwiseLoops0(), baseline::ElementwiseLoops1());
    baseline::FillElementwiseConversions(&conversions);
  }
};

const Variant& ThisMachine() {
  static const Variant variant;
  return variant;
}

// A view as this file walks it.
struct Walked {
  const ElementwiseView* view;
  ElementwiseConversion convert;  // null: the type is the one that is computed in
  bool scalar, contiguous;
};

char* At(const ElementwiseView& v, int64_t offset) { return static_cast<char*>(v.data) + offset * SizeOf(v.type); }

// Elements [first, first + n) of the index space, in runs that lie in one row: run(position in the
// block, offset into the view, length).
template <class Run>
void ForRuns(const ElementwiseArgs& args, const ElementwiseView& v, int64_t first, int64_t n, Run&& run) {
  int64_t row = first / args.size[2], inner = first % args.size[2];
  for (int64_t i = 0; i < n; ++row, inner = 0) {
    const int64_t length = std::min(n - i, args.size[2] - inner);
    run(i, row / args.size[1] * v.stride[0] + row % args.size[1] * v.stride[1] + inner * v.stride[2], length);
    i += length;
  }
}

template <class T>
void FillWith(void* to, const void* value, int64_t n) {
  std::fill_n(static_cast<T*>(to), n, *static_cast<const T*>(value));
}
void Fill(void* to, const void* value, int64_t size, int64_t n) {
  if (size == 8) FillWith<int64_t>(to, value, n);
  else if (size == 4) FillWith<int32_t>(to, value, n);
  else if (size == 2) FillWith<int16_t>(to, value, n);
  else FillWith<int8_t>(to, value, n);
}

}  // namespace

const ElementwiseTable<ElementwiseCpuKernel>& ElementwiseCpuKernels() {
  static const auto kernels = [] {
    ElementwiseTable<ElementwiseCpuKernel> table;
    for (const Signature& s : kSignatures) {
      table.emplace(s.signature, ElementwiseCpuKernel{ThisMachine().loops.at(s.loop), s.computing, s.parameters});
    }
    return table;
  }();
  return kernels;
}

void ElementwiseCpu(const ElementwiseCpuKernel& kernel, const ElementwiseArgs& args, const Executor& executor) {
  const int64_t count = args.Count();
  if (count == 0) return;
  const ElementwiseConversions& conversions = ThisMachine().conversions;
  const int computing = static_cast<int>(kernel.computing);
  const auto walk = [&](const ElementwiseView& v, const auto& table) {
    Walked w;
    w.view = &v;
    w.convert = v.type == kernel.computing ? nullptr : table[static_cast<int>(v.type)][computing];
    w.scalar = v.IsScalar() && count > 1;
    w.contiguous = v.stride[2] == 1 && (args.size[1] == 1 || v.stride[1] == args.size[2]) &&
                   (args.size[0] == 1 || v.stride[0] == args.size[1] * args.size[2]);
    return w;
  };
  Walked in[ElementwiseArgs::kMaxInputs], out[ElementwiseArgs::kMaxOutputs];
  for (int k = 0; k < args.inputs; ++k) in[k] = walk(args.in[k], conversions.load);
  for (int k = 0; k < args.outputs; ++k) out[k] = walk(args.out[k], conversions.store);

  const auto body = [&](int64_t first, int64_t last) {
    // In their own type, where they do not lie one after the other; and in the computing type.
    alignas(64) char gathered[kBlock * 8];
    alignas(64) char x[ElementwiseArgs::kMaxInputs][kBlock * 8], y[ElementwiseArgs::kMaxOutputs][kBlock * 8];
    const void* from[ElementwiseArgs::kMaxInputs];
    void* to[ElementwiseArgs::kMaxOutputs];
    for (int64_t at = first; at < last; at += kBlock) {
      const int64_t n = std::min(kBlock, last - at);
      for (int k = 0; k < args.inputs; ++k) {
        const ElementwiseView& v = args.in[k];
        const int64_t size = SizeOf(v.type);
        if (in[k].scalar) {
          from[k] = x[k];
          if (at > first && n == kBlock) continue;  // filled already
        }
        const char* source = At(v, at);
        if (!in[k].contiguous) {
          char* target = in[k].convert ? gathered : x[k];
          ForRuns(args, v, at, n, [&](int64_t i, int64_t offset, int64_t length) {
            if (v.stride[2] == 0) Fill(target + i * size, At(v, offset), size, length);
            else std::memcpy(target + i * size, At(v, offset), length * size);
          });
          source = target;
        }
        if (in[k].convert) in[k].convert(source, x[k], n);
        from[k] = in[k].convert ? x[k] : source;
      }
      for (int k = 0; k < args.outputs; ++k) to[k] = out[k].convert || !out[k].contiguous ? y[k] : At(args.out[k], at);
      kernel.loop(from, to, args.parameter, n);
      for (int k = 0; k < args.outputs; ++k) {
        const ElementwiseView& v = args.out[k];
        const int64_t size = SizeOf(v.type);
        const char* source = y[k];
        if (out[k].convert) {
          char* target = out[k].contiguous ? At(v, at) : gathered;
          out[k].convert(y[k], target, n);
          source = target;
        }
        if (out[k].contiguous) continue;
        ForRuns(args, v, at, n, [&](int64_t i, int64_t offset, int64_t length) {
          std::memcpy(At(v, offset), source + i * size, length * size);
        });
      }
    }
  };
  const int64_t shard = std::max(kShard, (count / (16 * std::max<int64_t>(executor.Threads(), 1)) + kBlock - 1) / kBlock * kBlock);
  ParallelFor(executor, count, shard, body);
}

}  // namespace jaxkern
