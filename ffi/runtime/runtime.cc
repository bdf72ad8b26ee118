#include "runtime/runtime.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>

namespace jaxkern {
namespace {

RuntimeConfig& Config() {
  static RuntimeConfig* const config = new RuntimeConfig;
  return *config;
}

// A kernel for one compute capability. The first thread that needs it compiles it and loads it, for every device and
// context. A failure is reported and not kept: the memory that is short now may be there at the next call.
class LoadedKernel {
 public:
  LoadedKernel(KernelName name, int capability) : name_(std::move(name)), capability_(capability) {}

  // Compiles the kernel unless it is compiled or another thread is compiling it.
  void CompileAhead() {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) Compile();
  }
  // Returns an empty string, or the error.
  std::string Load() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (handle_) return "";
    if (std::string error = Compile(); !error.empty()) return error;
    const Driver& driver = Driver::Get();
    CUresult r = kCudaSuccess;
    if (!library_)
      r = driver.cuLibraryLoadData(&library_, cubin_.image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (r == kCudaSuccess) r = driver.cuLibraryGetKernel(&handle_, library_, cubin_.symbol.c_str());
    if (r != kCudaSuccess) return "a compiled kernel does not load: " + driver.Describe(r);
    cubin_.image = std::string();  // the driver has its own copy
    return "";
  }
  // Lets launches on the device have this much dynamic shared memory. The driver's own limit, 48 KB, counts static
  // shared memory too. Programs share a kernel: the largest of their sizes holds.
  CUresult AllowShared(int bytes, CUdevice device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int& most = allowed_[device];
    if (bytes <= most) return kCudaSuccess;
    const CUresult r = Driver::Get().cuKernelSetAttribute(kMaxDynamicSharedSizeBytes, bytes, handle_, device);
    if (r == kCudaSuccess) most = bytes;
    return r;
  }
  CUkernel handle() const { return handle_; }  // once it is loaded

 private:
  std::string Compile() { return cubin_.symbol.empty() ? CompileKernel(name_, capability_, &cubin_) : ""; }

  const KernelName name_;
  const int capability_;
  std::mutex mutex_;
  Cubin cubin_;
  CUlibrary library_ = nullptr;
  CUkernel handle_ = nullptr;
  std::unordered_map<CUdevice, int> allowed_;
};

// Never destroyed: a stream may still launch when the process ends.
LoadedKernel& KernelOf(const KernelName& name, int capability) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const kernels = new std::unordered_map<std::string, std::unique_ptr<LoadedKernel>>;
  const std::string key = std::to_string(capability) + "\n" + name.header + "\n" + name.name + "\n" + name.source;
  const std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<LoadedKernel>& kernel = (*kernels)[key];
  if (!kernel) kernel = std::make_unique<LoadedKernel>(name, capability);
  return *kernel;
}

// Threads that compile kernels before they are needed. A thread that needs a kernel compiles it itself unless one of these
// has begun to. Programs therefore also run without such threads: where the process cannot create threads, and in a forked
// child, which does not inherit its parent's threads.
class CompilePool {
 public:
  void Add(LoadedKernel* kernel) {
    if (getpid() != process_) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) return;
    tasks_.push_back(kernel);
    if (tasks_.size() > idle_ && threads_.size() < std::clamp(std::thread::hardware_concurrency(), 1u, 16u)) {
      try {
        threads_.emplace_back([this] { Work(); });
      } catch (const std::system_error&) {  // no thread can be created now
        if (threads_.empty()) tasks_.clear();
      }
    }
    added_.notify_one();
  }

  void Stop() {
    if (getpid() != process_) return;
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
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      added_.wait(lock, [this] { return stopped_ || !tasks_.empty(); });
      --idle_;
      if (stopped_) return;
      LoadedKernel* const kernel = tasks_.front();
      tasks_.pop_front();
      lock.unlock();
      kernel->CompileAhead();
      lock.lock();
    }
  }

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<LoadedKernel*> tasks_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool stopped_ = false;
};

CompilePool& Pool() {
  static CompilePool* const pool = new CompilePool;
  return *pool;
}

// Starts to compile the kernels of a variant, those first that are likely to take longest: the ones with the most text.
// NVRTC reads the sources of a process one after another and generates code side by side, so the last one should be short.
void CompileAhead(const Variant& variant, int capability) {
  std::vector<const KernelName*> kernels;
  for (const Step& step : variant.steps) {
    if (step.memset_bytes < 0) kernels.push_back(&step.kernel);
  }
  const auto size = [](const KernelName* kernel) { return kernel->name.size() + kernel->source.size(); };
  std::stable_sort(kernels.begin(), kernels.end(),
                   [&](const KernelName* a, const KernelName* b) { return size(a) > size(b); });
  for (const KernelName* kernel : kernels) Pool().Add(&KernelOf(*kernel, capability));
}

// While it exists, this thread may load kernels though a stream is being captured in a CUDA graph.
class LoadsUnderCapture {
 public:
  LoadsUnderCapture() { Driver::Get().cuThreadExchangeStreamCaptureMode(&mode_); }
  ~LoadsUnderCapture() { Driver::Get().cuThreadExchangeStreamCaptureMode(&mode_); }
  LoadsUnderCapture(const LoadsUnderCapture&) = delete;
  LoadsUnderCapture& operator=(const LoadsUnderCapture&) = delete;

 private:
  CUstreamCaptureMode mode_ = kCaptureRelaxed;  // outside, the thread's own
};

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
  if (std::string error = kernel.Load(); !error.empty()) return error;
  loaded->function = reinterpret_cast<CUfunction>(kernel.handle());
  loaded->grid_x = step.grid[0];
  CUresult r = kCudaSuccess;
  if (step.shared_bytes > 0) r = kernel.AllowShared(static_cast<int>(step.shared_bytes), device);
  if (r == kCudaSuccess && step.cluster > 8) {
    r = driver.cuKernelSetAttribute(kNonPortableClusterSizeAllowed, 1, kernel.handle(), device);
  }
  if (r == kCudaSuccess && step.waves > 0) {
    unsigned resident = 0;
    r = ResidentBlocks(step, loaded->function, device, &resident);
    if (r == kCudaSuccess && resident == 0) return step.kernel.name + " does not fit this GPU";
    loaded->grid_x = static_cast<unsigned>(std::min<uint64_t>(loaded->grid_x, uint64_t{resident} * step.waves));
  }
  return r == kCudaSuccess ? "" : step.kernel.name + ": " + driver.Describe(r);
}

std::string LoadVariant(const Program& program, const Variant& variant, int ordinal, LoadedVariant* loaded) {
  const Driver& driver = Driver::Get();
  if (!driver.error.empty()) return driver.error;
  CUdevice device = 0;
  int major = 0, minor = 0;
  CUresult r = driver.cuDeviceGet(&device, ordinal);
  if (r == kCudaSuccess) r = driver.cuDeviceGetAttribute(&major, kComputeCapabilityMajor, device);
  if (r == kCudaSuccess) r = driver.cuDeviceGetAttribute(&minor, kComputeCapabilityMinor, device);
  if (r != kCudaSuccess) return driver.Describe(r);
  CompileAhead(variant, 10 * major + minor);
  const LoadsUnderCapture relaxed;
  loaded->resize(variant.steps.size());
  for (size_t i = 0; i < loaded->size(); ++i) {
    const std::string error = LoadStep(variant.steps[i], device, 10 * major + minor, &(*loaded)[i]);
    if (!error.empty()) return program.operation + ": " + error;
  }
  return "";
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

const LoadedVariant* LoadedProgram::Load(int device, size_t v, std::string* error) {
  if (device < 0 || device >= kMaxDevices) {
    *error = "more than " + std::to_string(kMaxDevices) + " devices in a process";
    return nullptr;
  }
  std::atomic<const LoadedVariant*>& place = loaded_[device][v];
  const LoadedVariant* loaded = place.load(std::memory_order_acquire);
  if (loaded) return loaded;
  auto fresh = std::make_unique<LoadedVariant>();
  *error = LoadVariant(program, program.variants[v], device, fresh.get());
  if (!error->empty()) return nullptr;
  // Another thread may have been faster; both have the same kernels.
  if (place.compare_exchange_strong(loaded, fresh.get(), std::memory_order_acq_rel)) return fresh.release();
  return loaded;
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
  if (ParseProgram(text, &program).empty()) CompileAhead(program.variants[0], capability);
}

void StopPrefetching() { Pool().Stop(); }

std::string Launch(LoadedProgram& loaded, int device, CUstream stream, void* const* buffers, const int64_t* bytes,
                   int count) {
  const Program& program = loaded.program;
  if (static_cast<size_t>(count) != program.buffer_bytes.size() ||
      !std::equal(bytes, bytes + count, program.buffer_bytes.begin())) {
    return program.operation + ": called with arrays of other sizes";
  }
  uintptr_t addresses = kMostAlignment;
  for (int i = 0; i < count; ++i) addresses |= reinterpret_cast<uintptr_t>(buffers[i]);
  size_t v = 0;  // the first whose alignment all addresses have; the last one's is 1
  while (addresses % program.variants[v].alignment != 0) ++v;
  std::string error;
  const LoadedVariant* const variant = loaded.Load(device, v, &error);
  if (!variant) return error;
  const Driver& driver = Driver::Get();
  const auto address = [&](const BufferRef& ref) { return static_cast<char*>(buffers[ref.buffer]) + ref.offset; };
  for (const LoadedStep& ready : *variant) {
    const Step& step = *ready.step;
    CUresult r;
    if (step.memset_bytes >= 0) {
      r = driver.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(address(step.target)), step.memset_value,
                                 step.memset_bytes, stream);
    } else {
      alignas(256) unsigned char values[kMostArgumentBytes];
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
