// The kernels of a process: compiled once per compute capability, loaded once, and looked up by program and device.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

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

struct LoadedVariant {
  std::string error;
  std::vector<LoadedStep> steps;
};

class LoadedProgram {
 public:
  explicit LoadedProgram(Program program) : program(std::move(program)) {}
  const Program program;

  // The launches for buffers aligned to `alignment` bytes on a device; compiles and loads them at first use.
  const LoadedVariant& Load(uintptr_t alignment, int device);

 private:
  static constexpr int kMaxDevices = 64, kMaxVariants = 2;
  std::atomic<const LoadedVariant*> loaded_[kMaxDevices][kMaxVariants] = {};
};

// The program with this key, or null. Lock-free.
LoadedProgram* FindProgram(int64_t key);

// Finds the program or parses it from its text; null with an error.
LoadedProgram* AddProgram(int64_t key, std::string_view text, std::string* error);

// Starts to compile the kernels that a program launches on aligned buffers in background threads, so that programs with
// many operations compile in parallel. Load reports the errors.
void Prefetch(std::string_view text, int capability);

// Stops these threads; kernels that they have not started are compiled when needed. Called before the process exits.
void StopPrefetching();

// Enqueues the launches of a program on a stream. Returns an empty string, or the error.
std::string Launch(LoadedProgram& program, int device, CUstream stream, void* const* buffers, const int64_t* bytes,
                   int count);

}  // namespace jaxkern
