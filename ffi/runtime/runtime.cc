#include "runtime/runtime.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace jaxkern {
namespace {

RuntimeConfig& Config() {
  static RuntimeConfig* const config = new RuntimeConfig;
  return *config;
}

// A kernel for one compute capability, with its handle once it is loaded. A library is good for every device and
// context.
struct LoadedKernel {
  std::once_flag compiled, loaded;
  std::string error;
  Cubin cubin;
  CUkernel handle = nullptr;

  void Compile(const KernelName& name, int capability) {
    std::call_once(compiled, [&] { error = CompileKernel(name, capability, &cubin); });
  }
  void Load() {
    std::call_once(loaded, [&] {
      if (!error.empty()) return;
      const Driver& driver = Driver::Get();
      CUlibrary library = nullptr;
      CUresult r = driver.cuLibraryLoadData(&library, cubin.image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
      if (r == kCudaSuccess) r = driver.cuLibraryGetKernel(&handle, library, cubin.symbol.c_str());
      if (r != kCudaSuccess) error = "a compiled kernel does not load: " + driver.Describe(r);
      cubin.image = std::string();  // the driver has its own copy
    });
  }
  // Lets launches on the device have this much dynamic shared memory. The driver's own limit, 48 KB, counts static
  // shared memory too. Programs share a kernel: the largest of their sizes holds.
  CUresult AllowShared(int bytes, CUdevice device) {
    const std::lock_guard<std::mutex> lock(mutex);
    int& most = allowed[device];
    if (bytes <= most) return kCudaSuccess;
    const CUresult r = Driver::Get().cuKernelSetAttribute(kMaxDynamicSharedSizeBytes, bytes, handle, device);
    if (r == kCudaSuccess) most = bytes;
    return r;
  }

 private:
  std::mutex mutex;
  std::unordered_map<CUdevice, int> allowed;
};

// Never destroyed: a stream may still launch when the process ends.
LoadedKernel& KernelOf(const KernelName& name, int capability) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const kernels = new std::unordered_map<std::string, std::unique_ptr<LoadedKernel>>;
  const std::string key = std::to_string(capability) + "\n" + name.header + "\n" + name.name + "\n" + name.source;
  const std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<LoadedKernel>& kernel = (*kernels)[key];
  if (!kernel) kernel = std::make_unique<LoadedKernel>();
  return *kernel;
}

// Compiles what is not compiled yet, side by side.
void CompileAll(const std::vector<Step>& steps, int capability) {
  std::set<std::tuple<std::string, std::string, std::string>> names;
  for (const Step& step : steps) {
    if (step.memset_bytes < 0) names.insert({step.kernel.header, step.kernel.name, step.kernel.source});
  }
  std::vector<std::thread> threads;
  for (const auto& [header, name, source] : names) {
    const KernelName kernel = {header, name, source};
    if (threads.size() + 1 == names.size()) {
      KernelOf(kernel, capability).Compile(kernel, capability);
    } else {
      threads.emplace_back([kernel, capability] { KernelOf(kernel, capability).Compile(kernel, capability); });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

// Threads that compile what will be needed.
class Prefetcher {
 public:
  void Add(const KernelName& kernel, int capability) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) return;
    tasks_.push_back({kernel, capability});
    const size_t most = std::max(1u, std::min(16u, std::thread::hardware_concurrency()));
    if (idle_ == 0 && threads_.size() < most) threads_.emplace_back([this] { Work(); });
    added_.notify_one();
  }

  void Stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
      tasks_.clear();
      added_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  struct Task {
    KernelName kernel;
    int capability;
  };

  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      added_.wait(lock, [this] { return stopped_ || !tasks_.empty(); });
      --idle_;
      if (stopped_) return;
      const Task task = tasks_.front();
      tasks_.pop_front();
      lock.unlock();
      KernelOf(task.kernel, task.capability).Compile(task.kernel, task.capability);
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<Task> tasks_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool stopped_ = false;
};

Prefetcher& PrefetcherOf() {
  static Prefetcher* const prefetcher = new Prefetcher;
  return *prefetcher;
}

CUlaunchConfig ConfigOf(const Step& step, CUlaunchAttribute* attribute) {
  CUlaunchConfig config = {};
  for (int d = 0; d < 3; ++d) config.grid[d] = step.grid[d], config.block[d] = step.block[d];
  config.shared_bytes = step.shared_bytes;
  if (step.cluster > 1) {
    *attribute = {};
    attribute->id = kClusterDimension;
    attribute->value.cluster.x = step.cluster;
    attribute->value.cluster.y = attribute->value.cluster.z = 1;
    config.attributes = attribute;
    config.attribute_count = 1;
  }
  return config;
}

// How many blocks of this launch a device runs at once.
CUresult ResidentBlocks(const Step& step, CUfunction function, CUdevice device, unsigned* blocks) {
  const Driver& driver = Driver::Get();
  CUcontext context = nullptr;
  CUresult r = driver.cuDevicePrimaryCtxRetain(&context, device);
  if (r != kCudaSuccess) return r;
  r = driver.cuCtxPushCurrent(context);
  if (r == kCudaSuccess) {
    int count = 0, multiprocessors = 0;
    if (step.cluster > 1) {
      CUlaunchAttribute attribute;
      CUlaunchConfig config = ConfigOf(step, &attribute);
      config.grid[0] = step.cluster, config.grid[1] = config.grid[2] = 1;
      r = driver.cuOccupancyMaxActiveClusters(&count, function, &config);
      *blocks = count * step.cluster;
    } else {
      r = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
          &count, function, step.block[0] * step.block[1] * step.block[2], step.shared_bytes);
      if (r == kCudaSuccess) r = driver.cuDeviceGetAttribute(&multiprocessors, kMultiprocessorCount, device);
      *blocks = count * multiprocessors;
    }
    driver.cuCtxPopCurrent(&context);
  }
  driver.cuDevicePrimaryCtxRelease(device);
  return r;
}

std::string LoadStep(const Step& step, CUdevice device, int capability, LoadedStep* loaded) {
  loaded->step = &step;
  if (step.memset_bytes >= 0) return "";
  const Driver& driver = Driver::Get();
  LoadedKernel& kernel = KernelOf(step.kernel, capability);
  kernel.Compile(step.kernel, capability);
  kernel.Load();
  if (!kernel.error.empty()) return kernel.error;
  loaded->function = reinterpret_cast<CUfunction>(kernel.handle);
  loaded->grid_x = step.grid[0];
  CUresult r = kCudaSuccess;
  if (step.shared_bytes > 0) r = kernel.AllowShared(static_cast<int>(step.shared_bytes), device);
  if (r == kCudaSuccess && step.cluster > 8) {
    r = driver.cuKernelSetAttribute(kNonPortableClusterSizeAllowed, 1, kernel.handle, device);
  }
  if (r == kCudaSuccess && step.waves > 0) {
    unsigned resident = 0;
    r = ResidentBlocks(step, loaded->function, device, &resident);
    if (r == kCudaSuccess && resident == 0) return step.kernel.name + " does not fit this GPU";
    loaded->grid_x = std::min(loaded->grid_x, resident * step.waves);
  }
  return r == kCudaSuccess ? "" : step.kernel.name + ": " + driver.Describe(r);
}

LoadedVariant LoadVariant(const Program& program, const Variant& variant, int ordinal) {
  LoadedVariant loaded;
  const Driver& driver = Driver::Get();
  if (!driver.error.empty()) {
    loaded.error = driver.error;
    return loaded;
  }
  CUdevice device = 0;
  int major = 0, minor = 0;
  CUresult r = driver.cuDeviceGet(&device, ordinal);
  if (r == kCudaSuccess) r = driver.cuDeviceGetAttribute(&major, kComputeCapabilityMajor, device);
  if (r == kCudaSuccess) r = driver.cuDeviceGetAttribute(&minor, kComputeCapabilityMinor, device);
  if (r != kCudaSuccess) {
    loaded.error = driver.Describe(r);
    return loaded;
  }
  CompileAll(variant.steps, 10 * major + minor);
  loaded.steps.resize(variant.steps.size());
  for (size_t i = 0; i < variant.steps.size() && loaded.error.empty(); ++i) {
    loaded.error = LoadStep(variant.steps[i], device, 10 * major + minor, &loaded.steps[i]);
  }
  if (!loaded.error.empty()) loaded.error = program.operation + ": " + loaded.error;
  return loaded;
}

// Programs by key. Readers take no lock: nodes are added at the heads of the lists and never removed.
struct Node {
  int64_t key;
  LoadedProgram program;
  Node* next;
};
constexpr size_t kBuckets = 4096;
std::atomic<Node*> buckets[kBuckets];

std::atomic<Node*>& BucketOf(int64_t key) { return buckets[static_cast<uint64_t>(key) % kBuckets]; }

}  // namespace

void Configure(RuntimeConfig config) { Config() = std::move(config); }

const Nvrtc& Compiler() {
  static const Nvrtc* const compiler = new Nvrtc(Config().compiler);
  return *compiler;
}

std::string CompileKernel(const KernelName& kernel, int capability, Cubin* cubin, bool* cached) {
  const Nvrtc& compiler = Compiler();
  if (!compiler.error().empty()) return "NVRTC cannot be used: " + compiler.error();
  const DiskCache cache(Config().cache_folder, Config().cache_bytes);
  const std::string key = compiler.Key(kernel, capability);
  const bool found = Config().compiler.dump.empty() && cache.Read(key, cubin);
  if (cached) *cached = found;
  if (found) return "";
  const std::string error = compiler.Compile(kernel, capability, cubin);
  if (error.empty()) cache.Write(key, *cubin);
  return error;
}

const LoadedVariant& LoadedProgram::Load(uintptr_t alignment, int device) {
  static const LoadedVariant* const too_many = new LoadedVariant{"more than 64 devices in a process", {}};
  if (device < 0 || device >= kMaxDevices) return *too_many;
  size_t v = 0;
  while (v + 1 < program.variants.size() && alignment % program.variants[v].alignment != 0) ++v;
  std::atomic<const LoadedVariant*>& slot = loaded_[device][v];
  const LoadedVariant* loaded = slot.load(std::memory_order_acquire);
  if (loaded) return *loaded;
  auto* const fresh = new LoadedVariant(LoadVariant(program, program.variants[v], device));
  // Another thread may have come first; both have the same kernels.
  if (slot.compare_exchange_strong(loaded, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *loaded;
}

LoadedProgram* FindProgram(int64_t key) {
  Node* node = BucketOf(key).load(std::memory_order_acquire);
  while (node && node->key != key) node = node->next;
  return node ? &node->program : nullptr;
}

LoadedProgram* AddProgram(int64_t key, std::string_view text, std::string* error) {
  LoadedProgram* found = FindProgram(key);
  if (!found) {
    static std::mutex* const mutex = new std::mutex;
    const std::lock_guard<std::mutex> lock(*mutex);
    found = FindProgram(key);
    if (!found) {
      Program program;
      *error = ParseProgram(text, &program);
      if (error->empty() && program.version != Config().version) {
        *error = program.operation + " is of a program made by jaxkern " + program.version +
                 ", whose kernels this version, " + Config().version +
                 ", does not have: install that version, or export the program again";
      }
      if (!error->empty()) return nullptr;
      std::atomic<Node*>& bucket = BucketOf(key);
      bucket.store(new Node{key, LoadedProgram(std::move(program)), bucket.load(std::memory_order_relaxed)},
                   std::memory_order_release);
      found = FindProgram(key);
    }
  }
  if (found->program.text != text) {
    *error = "two launch lists have the key " + std::to_string(key);
    return nullptr;
  }
  return found;
}

void Prefetch(std::string_view text, int capability) {
  Program program;
  if (!ParseProgram(text, &program).empty()) return;
  for (const Step& step : program.variants.front().steps) {
    if (step.memset_bytes < 0) PrefetcherOf().Add(step.kernel, capability);
  }
}

void StopPrefetching() { PrefetcherOf().Stop(); }

std::string Launch(LoadedProgram& loaded, int device, CUstream stream, void* const* buffers, const int64_t* bytes,
                   int count) {
  const Program& program = loaded.program;
  if (static_cast<size_t>(count) != program.buffer_bytes.size() ||
      !std::equal(bytes, bytes + count, program.buffer_bytes.begin())) {
    return program.operation + ": called with arrays of other sizes";
  }
  uintptr_t addresses = 16;
  for (int i = 0; i < count; ++i) addresses |= reinterpret_cast<uintptr_t>(buffers[i]);
  const LoadedVariant& variant = loaded.Load(addresses & -addresses, device);
  if (!variant.error.empty()) return variant.error;
  const Driver& driver = Driver::Get();
  const auto address = [&](const BufferRef& ref) { return static_cast<char*>(buffers[ref.buffer]) + ref.offset; };
  for (const LoadedStep& ready : variant.steps) {
    const Step& step = *ready.step;
    CUresult r;
    if (step.memset_bytes >= 0) {
      r = driver.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(address(step.target)), step.memset_value,
                                 step.memset_bytes, stream);
    } else {
      constexpr size_t kMostBytes = 4096, kMostArguments = 64;  // the bytes are CUDA's own limit
      if (step.arguments.size() > kMostBytes || step.argument_offsets.size() > kMostArguments) {
        return program.operation + ": too many arguments for " + step.kernel.name;
      }
      alignas(256) unsigned char values[kMostBytes];
      void* arguments[kMostArguments];
      memcpy(values, step.arguments.data(), step.arguments.size());
      for (const Step::Pointer& pointer : step.pointers) {
        const void* const p = address(pointer.ref);
        memcpy(values + pointer.at, &p, sizeof p);
      }
      for (size_t i = 0; i < step.argument_offsets.size(); ++i) arguments[i] = values + step.argument_offsets[i];
      CUlaunchAttribute attribute;
      CUlaunchConfig config = ConfigOf(step, &attribute);
      config.grid[0] = ready.grid_x;
      config.stream = stream;
      r = driver.cuLaunchKernelEx(&config, ready.function, arguments, nullptr);
    }
    if (r != kCudaSuccess)
      return program.operation + ": " + step.kernel.name + " does not launch: " + driver.Describe(r);
  }
  return "";
}

}  // namespace jaxkern
