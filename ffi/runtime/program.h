// A launch list, parsed from the text that jaxkern/_core/launch.py writes:
//
//     jaxkern VERSION
//     operation NAME(TYPES) -> (TYPES), ALGORITHM
//     bytes SIZE ...                          size of each buffer: operands, results, scratch
//     alignment BYTES                         alignment that the following launches require: 16 and 1, or only 1; the first
//                                             list that fits runs
//     launch grid=X,Y,Z block=X,Y,Z cluster=N shared=BYTES waves=N
//     header HEADER
//     source DEFINITIONS                      optional; \n stands for a new line
//     kernel TEMPLATE<ARGUMENTS>
//     args ARG ...                            pBUFFER+OFFSET, TYPE:VALUE (i32 u32 i64 u64 u8 f32 f64), {ALIGN ARG ... }
//     memset pBUFFER+OFFSET VALUE BYTES
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/nvrtc.h"

namespace jaxkern {

constexpr size_t kMostArgumentBytes = 4096, kMostArguments = 64;  // of a kernel; the bytes are CUDA's own limit
constexpr size_t kMostVariants = 2;
constexpr uintptr_t kMostAlignment = 16;

struct BufferRef {
  int buffer = 0;
  int64_t offset = 0;
};

// A kernel launch, or with memset_bytes >= 0 a memset of `target`.
struct Step {
  KernelName kernel;
  unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, cluster = 1, shared_bytes = 0, waves = 0;

  // The bytes of all arguments, the offset of each, and the offsets at which pointers are inserted.
  std::vector<unsigned char> arguments;
  std::vector<uint32_t> argument_offsets;
  struct Pointer {
    uint32_t at;
    BufferRef ref;
  };
  std::vector<Pointer> pointers;

  int64_t memset_bytes = -1;
  unsigned char memset_value = 0;
  BufferRef target;
};

struct Variant {
  uintptr_t alignment = 1;
  std::vector<Step> steps;
};

struct Program {
  std::string text, version, operation;
  std::vector<int64_t> buffer_bytes;
  std::vector<Variant> variants;
};

// Returns an empty string, or the error in the text. An accepted program has 1 to kMostVariants variants, and the
// last one serves any address. Buffer references and memsets lie inside their buffers.
std::string ParseProgram(std::string_view text, Program* program);

}  // namespace jaxkern
