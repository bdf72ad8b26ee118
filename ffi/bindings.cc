// The extension module jaxkern._runtime: compiles kernels and launches them. It knows no operation.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "runtime/handler.h"
#include "runtime/runtime.h"

namespace nb = nanobind;

NB_MODULE(_runtime, m) {
  using namespace jaxkern;
  m.doc() = "Run-time compilation and launching of jaxkern's CUDA kernels.";
  m.attr("api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  const auto capsule = [](XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); };
  m.def(
      "stages",
      [=] {
        nb::dict stages;
        stages["initialize"] = capsule(&JaxkernInitialize);
        stages["execute"] = capsule(&JaxkernExecute);
        return stages;
      },
      "The handler of every CUDA operation, by stage.");
  m.def(
      "cpu_handler", [=] { return capsule(&JaxkernExecuteOnCpu); },
      "The same for arrays in host memory, for tests with a stand-in for the driver.");
  m.def(
      "load_driver", [](const std::string& path) { return Driver::Get(path.empty() ? nullptr : path.c_str()).error; },
      nb::arg("path") = "",
      "Loads the CUDA driver, or a stand-in, unless one is loaded; returns what is wrong with it.");
  m.def(
      "configure",
      [](const std::string& version, const std::string& nvrtc, const std::string& builtins,
         const std::vector<std::string>& includes, const std::string& headers_hash, const std::string& dump,
         const std::string& cache_folder, int64_t cache_bytes) {
        Configure({{nvrtc, builtins, includes, headers_hash, dump}, version, cache_folder, cache_bytes});
      },
      nb::arg("version"), nb::arg("nvrtc"), nb::arg("builtins"), nb::arg("includes"), nb::arg("headers_hash"),
      nb::arg("dump"), nb::arg("cache_folder"), nb::arg("cache_bytes"));
  m.def(
      "compiler", [] { return nb::make_tuple(Compiler().version(), Compiler().error()); },
      "(NVRTC's version, why it cannot be used)");
  m.def("supports", [](int capability) { return Compiler().Supports(capability); }, nb::arg("capability"));
  m.def(
      "compile",
      [](const std::string& header, const std::string& name, int capability, const std::string& source) {
        Cubin cubin;
        bool cached = false;
        std::string error;
        {
          nb::gil_scoped_release release;
          error = CompileKernel({header, name, source}, capability, &cubin, &cached);
        }
        if (!error.empty()) throw nb::value_error(error.c_str());
        return nb::make_tuple(nb::bytes(cubin.image.data(), cubin.image.size()), cubin.symbol, cached);
      },
      nb::arg("header"), nb::arg("name"), nb::arg("capability"), nb::arg("source") = "",
      "(cubin, symbol, whether it came from the cache); needs no GPU");
  m.def(
      "prefetch", [](const std::string& text, int capability) { Prefetch(text, capability); }, nb::arg("text"),
      nb::arg("capability"), "Begins to compile the kernels of a launch list for aligned buffers, in other threads.");
  m.def("stop_prefetching", [] {
    nb::gil_scoped_release release;
    StopPrefetching();
  });
  m.def(
      "launch",
      [](int64_t key, const std::string& text, int device, const std::vector<uint64_t>& addresses,
         const std::vector<int64_t>& bytes, uint64_t stream) {
        std::string error;
        LoadedProgram* const program = AddProgram(key, text, &error);
        if (!program) return error;
        std::vector<void*> buffers;
        for (const uint64_t address : addresses) buffers.push_back(reinterpret_cast<void*>(address));
        return Launch(*program, device, reinterpret_cast<CUstream>(stream), buffers.data(), bytes.data(),
                      static_cast<int>(bytes.size()));
      },
      nb::arg("key"), nb::arg("text"), nb::arg("device"), nb::arg("addresses"), nb::arg("bytes"), nb::arg("stream") = 0,
      "Runs a launch list on buffers at these addresses, on this CUstream; returns what went wrong.");
  m.def(
      "check",
      [](const std::string& text) {
        Program program;
        return ParseProgram(text, &program);
      },
      nb::arg("text"), "What is wrong with a launch list; empty if nothing.");
}
