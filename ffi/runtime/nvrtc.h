// Loads NVRTC at run time and compiles kernels with it.
#pragma once

#include <string>
#include <vector>

namespace jaxkern {

// Locations, found by Python (jaxkern/_core/runtime.py).
struct CompilerConfig {
  std::string nvrtc;                  // libnvrtc.so.*, by path or name
  std::string builtins;               // the matching libnvrtc-builtins, loaded first; may be empty
  std::vector<std::string> includes;  // folders of jaxkern's kernels and of CUDA's headers
  std::string headers_hash;           // hash of the contents of jaxkern's kernel headers
  std::string dump;                   // folder for source, log and cubin of every compilation; may be empty
};

// A kernel of a launch list: a header of ffi/kernels, definitions that follow it (functors that the template arguments
// name; may be empty), and a template with its arguments.
struct KernelName {
  std::string header, name, source;
};

// A compiled kernel and its mangled name.
struct Cubin {
  std::string symbol, image;
};

class Nvrtc {
 public:
  explicit Nvrtc(const CompilerConfig& config);

  // Why NVRTC cannot be used; empty if it can.
  const std::string& error() const { return error_; }
  const std::string& version() const { return version_; }
  // Whether this NVRTC compiles for a compute capability (10 * major + minor).
  bool Supports(int capability) const;

  // Returns an empty string, or the error with NVRTC's log.
  std::string Compile(const KernelName& kernel, int capability, Cubin* cubin) const;
  // Everything that the result of Compile depends on.
  std::string Key(const KernelName& kernel, int capability) const;

 private:
  std::vector<std::string> Options(int capability) const;

  using Program = struct NvrtcProgram*;
  int (*create_)(Program*, const char*, const char*, int, const char* const*, const char* const*) = nullptr;
  int (*destroy_)(Program*) = nullptr;
  int (*add_name_)(Program, const char*) = nullptr;
  int (*compile_)(Program, int, const char* const*) = nullptr;
  int (*log_size_)(Program, size_t*) = nullptr;
  int (*log_)(Program, char*) = nullptr;
  int (*lowered_)(Program, const char*, const char**) = nullptr;
  int (*cubin_size_)(Program, size_t*) = nullptr;
  int (*cubin_)(Program, char*) = nullptr;
  int (*version_number_)(int*, int*) = nullptr;
  int (*arch_count_)(int*) = nullptr;
  int (*archs_)(int*) = nullptr;
  const char* (*error_string_)(int) = nullptr;

  CompilerConfig config_;
  std::string error_, version_;
  int major_ = 0;
  std::vector<int> supported_;
};

}  // namespace jaxkern
