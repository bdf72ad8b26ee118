#include "runtime/nvrtc.h"

#include <dlfcn.h>

#include <algorithm>
#include <fstream>

#include "runtime/hash.h"

namespace jaxkern {
namespace {

// Whether a kernel may convert 16-bit floats: it names one of their types, or a function that rounds to them.
bool HasHalves(const KernelName& kernel) {
  for (const std::string* text : {&kernel.name, &kernel.source}) {
    if (text->find("float16") != std::string::npos || text->find("half") != std::string::npos) return true;
  }
  return false;
}

// The using-directive is for template arguments: a name expression is looked up from the global namespace.
std::string SourceOf(const KernelName& kernel) {
  return std::string(HasHalves(kernel) ? "" : "#define JAXKERN_NO_16_BITS\n") + "#include \"" + kernel.header +
         "\"\nnamespace jaxkern {\n" + kernel.source + "\n}\nusing namespace jaxkern;\n";
}

}  // namespace

Nvrtc::Nvrtc(const CompilerConfig& config) : config_(config) {
  // libnvrtc looks for its builtins by name and has no search path of its own.
  if (!config.builtins.empty()) dlopen(config.builtins.c_str(), RTLD_NOW | RTLD_GLOBAL);
  void* library = dlopen(config.nvrtc.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    error_ = dlerror();
    return;
  }
  const auto resolve = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (!function && error_.empty()) error_ = config.nvrtc + " has no " + name;
  };
  resolve(create_, "nvrtcCreateProgram");
  resolve(destroy_, "nvrtcDestroyProgram");
  resolve(add_name_, "nvrtcAddNameExpression");
  resolve(compile_, "nvrtcCompileProgram");
  resolve(log_size_, "nvrtcGetProgramLogSize");
  resolve(log_, "nvrtcGetProgramLog");
  resolve(lowered_, "nvrtcGetLoweredName");
  resolve(cubin_size_, "nvrtcGetCUBINSize");
  resolve(cubin_, "nvrtcGetCUBIN");
  resolve(version_number_, "nvrtcVersion");
  resolve(arch_count_, "nvrtcGetNumSupportedArchs");
  resolve(archs_, "nvrtcGetSupportedArchs");
  resolve(error_string_, "nvrtcGetErrorString");
  if (!error_.empty()) return;
  int minor = 0, count = 0;
  version_number_(&major_, &minor);
  version_ = std::to_string(major_) + "." + std::to_string(minor);
  arch_count_(&count);
  supported_.resize(count);
  archs_(supported_.data());
}

bool Nvrtc::Supports(int capability) const {
  return std::find(supported_.begin(), supported_.end(), capability) != supported_.end();
}

std::vector<std::string> Nvrtc::Options(int capability) const {
  std::vector<std::string> options = {"--gpu-architecture=sm_" + std::to_string(capability), "--std=c++17",
                                      "--device-as-default-execution-space"};
  // Without textures and functions of CUDA's runtime, whose declarations take 5 ms. Versions before 13 are not tested with it.
  if (major_ >= 13) options.push_back("--minimal");
  return options;
}

std::string Nvrtc::Key(const KernelName& kernel, int capability) const {
  std::string key = "nvrtc " + version_ + "\nheaders " + config_.headers_hash + "\n";
  for (const std::string& option : Options(capability)) key += option + "\n";
  return key + kernel.header + "\n" + kernel.name + "\n" + kernel.source;
}

std::string Nvrtc::Compile(const KernelName& kernel, int capability, Cubin* cubin) const {
  const std::string source = SourceOf(kernel), expression = "jaxkern::" + kernel.name;
  Program program = nullptr;
  if (const int r = create_(&program, source.c_str(), "jaxkern.cu", 0, nullptr, nullptr)) return error_string_(r);
  struct Destroyed {
    const Nvrtc& nvrtc;
    Program* program;
    ~Destroyed() { nvrtc.destroy_(program); }
  } destroyed{*this, &program};

  std::vector<std::string> options = Options(capability);
  for (const std::string& folder : config_.includes) options.push_back("--include-path=" + folder);
  if (!config_.dump.empty()) options.push_back("--ptxas-options=-v");  // registers and spills, in the log
  std::vector<const char*> arguments;
  for (const std::string& option : options) arguments.push_back(option.c_str());
  int result = add_name_(program, expression.c_str());
  if (result == 0) result = compile_(program, static_cast<int>(arguments.size()), arguments.data());

  size_t size = 0;
  std::string log;
  if (log_size_(program, &size) == 0 && size > 1) {
    log.resize(size);
    log_(program, log.data());
    log.resize(size - 1);
  }
  const auto dump = [&](const char* suffix, const std::string& text) {
    if (config_.dump.empty()) return;
    const std::string file = config_.dump + "/" + HexHash(Key(kernel, capability)) + suffix;
    std::ofstream(file, std::ios::binary) << text;
  };
  dump(".cu", source + "// " + expression + "\n// sm_" + std::to_string(capability) + "\n");
  dump(".log", log);
  if (result != 0) return expression + " of " + kernel.header + ": " + error_string_(result) + "\n" + log;

  const char* symbol = nullptr;
  if (const int r = lowered_(program, expression.c_str(), &symbol)) return error_string_(r);
  cubin->symbol = symbol;
  if (const int r = cubin_size_(program, &size)) return error_string_(r);
  cubin->image.resize(size);
  if (const int r = cubin_(program, cubin->image.data())) return error_string_(r);
  dump(".cubin", cubin->image);
  return "";
}

}  // namespace jaxkern
