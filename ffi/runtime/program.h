// A launch list, read from its text (jaxkern/_core/launch.py writes it):
//
//     jaxkern VERSION
//     operation NAME(TYPES) -> (TYPES), ALGORITHM
//     bytes SIZE ...                          of each buffer: operands, results, scratch
//     alignment BYTES                         the launches that follow serve buffers aligned so; the first that fit run
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

struct BufferRef {
  int buffer = 0;
  int64_t offset = 0;
};

// A kernel launch, or with memset_bytes >= 0 a memset of `target`.
struct Step {
  KernelName kernel;
  unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, cluster = 1, shared_bytes = 0, waves = 0;

  // The arguments one behind the other, where each begins, and where pointers are to be written into them.
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

// Empty, or what is wrong with the text.
std::string ParseProgram(std::string_view text, Program* program);

}  // namespace jaxkern
