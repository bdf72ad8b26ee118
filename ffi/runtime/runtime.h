// The kernels of a process: compiled once per kind of GPU, loaded once, and found again by program and device.
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
  std::string version;  // of this package: programs of another are refused
  std::string cache_folder;
  int64_t cache_bytes = 0;
};

// Takes effect before the first use of a kernel.
void Configure(RuntimeConfig config);

// The compiler, made by the first call.
const Nvrtc& Compiler();

// From the disk cache or the compiler; empty, or the error. `cached`: it came from the cache.
std::string CompileKernel(const KernelName& kernel, int capability, Cubin* cubin, bool* cached = nullptr);

// A launch that is ready to go: of Step::kernel, or null for a memset.
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

  // The launches for buffers aligned to `alignment` bytes on a device; compiles and loads them if they are not there.
  const LoadedVariant& Load(uintptr_t alignment, int device);

 private:
  static constexpr int kMaxDevices = 64, kMaxVariants = 2;
  std::atomic<const LoadedVariant*> loaded_[kMaxDevices][kMaxVariants] = {};
};

// The program of this key, or null. Takes no lock.
LoadedProgram* FindProgram(int64_t key);

// Finds it or reads it from its text; null with an error.
LoadedProgram* AddProgram(int64_t key, std::string_view text, std::string* error);

// Begins to compile the kernels that a program of this text launches on aligned buffers, in threads of its own, so that
// programs of many operations do not wait for one kernel after the other. Errors are for Load to report.
void Prefetch(std::string_view text, int capability);

// Ends these threads; what they had not begun is compiled where it is needed. Called before the process exits.
void StopPrefetching();

// Puts the launches of a program on a stream. Empty, or the error.
std::string Launch(LoadedProgram& program, int device, CUstream stream, void* const* buffers, const int64_t* bytes,
                   int count);

}  // namespace jaxkern
