// The kernels of a process: compiled once per compute capability, loaded once, and looked up by program and device.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/cache.h"
#include "runtime/driver.h"
#include "runtime/nvrtc.h"
#include "runtime/program.h"

namespace jaxkern {

struct RuntimeConfig {
  CompilerConfig compiler;
  std::string version;  // of this package; programs of other versions are refused
  std::string cache_folder;
  int64_t cache_bytes = 0;
};

// Must be called before the first use of a kernel.
void Configure(RuntimeConfig config);

// The compiler; the first call creates it.
const Nvrtc& Compiler();

// Gets a kernel from the disk cache or the compiler; returns an empty string or the error. `cached`: from the cache.
std::string CompileKernel(const KernelName& kernel, int capability, Cubin* cubin, bool* cached = nullptr);

// A loaded kernel with its launch configuration; null for a memset.
struct LoadedStep {
  const Step* step;
  CUfunction function = nullptr;
  unsigned grid_x = 0;
};

using LoadedVariant = std::vector<LoadedStep>;

class LoadedProgram {
 public:
  explicit LoadedProgram(Program program) : program(std::move(program)) {}
  const Program program;

  // Variant `v` of `program`, compiled and loaded for a device; null with an error. The first call for a device and a
  // variant compiles. It may run while a stream is captured. A failure is not kept: the next call tries again.
  const LoadedVariant* Load(int device, size_t v, std::string* error);

 private:
  static constexpr int kMaxDevices = 64;
  std::atomic<const LoadedVariant*> loaded_[kMaxDevices][kMostVariants] = {};
};

// The program with this key, or null. Lock-free.
LoadedProgram* FindProgram(int64_t key);

// Finds the program or parses it from its text; null with an error.
LoadedProgram* AddProgram(int64_t key, std::string_view text, std::string* error);

// Starts to compile the kernels of a launch list for aligned buffers in background threads, so that programs with many
// operations compile in parallel. Load reports the errors.
void Prefetch(std::string_view text, int capability);

// Stops these threads; kernels that they have not started are compiled when needed. Called before the process exits. Does
// nothing in a forked child, which does not have its parent's threads.
void StopPrefetching();

// Enqueues the launches of a program on a stream. Returns an empty string, or the error.
std::string Launch(LoadedProgram& program, int device, CUstream stream, void* const* buffers, const int64_t* bytes,
                   int count);

}  // namespace jaxkern
