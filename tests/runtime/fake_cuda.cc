// A stand-in for libcuda.so.1: runs the kernels of kernels/probe.cuh on host memory and writes each call to standard
// output, so that the runtime can be tested without a GPU. One multiprocessor, compute capability 9.0. While the
// environment variable FAKE_OUT_OF_MEMORY is set, nothing can be loaded. While FAKE_CAPTURE is set, a stream is being
// captured, and only threads in relaxed mode can load.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

namespace {

struct Inner {
  uint8_t flag;
  double shift;
};

struct ProbeArgs {
  const float* x;
  int32_t count;
  Inner inner;
  uint8_t last;
  float* y;
};

struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  struct Attribute {
    int id;
    char pad[4];
    unsigned value[16];
  }* attributes;
  unsigned count;
};

struct Kernel {
  std::string name;
};

thread_local int capture_mode = 0;

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }
int cuGetErrorName(int, const char** s) { return *s = "CUDA_ERROR_FAKE", 0; }
int cuGetErrorString(int, const char** s) { return *s = "a fake error", 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  return *value = attribute == 16 ? 1 : attribute == 75 ? 9 : 0, 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = nullptr, 0; }
int cuDevicePrimaryCtxRelease(int) { return 0; }
int cuCtxPushCurrent(void*) { return 0; }
int cuCtxPopCurrent(void**) { return 0; }
int cuLibraryLoadData(void** library, const void* image, void*, void**, unsigned, void*, void**, unsigned) {
  if (memcmp(image, "\177ELF", 4)) return 200;
  if (std::getenv("FAKE_OUT_OF_MEMORY")) return 2;
  if (std::getenv("FAKE_CAPTURE") && capture_mode != 2) return 900;
  *library = reinterpret_cast<void*>(1);
  std::printf("load\n");
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) { return std::swap(*mode, capture_mode), 0; }
int cuLibraryGetKernel(Kernel** kernel, void*, const char* name) { return *kernel = new Kernel{name}, 0; }
int cuKernelSetAttribute(int attribute, int value, Kernel*, int device) {
  std::printf("attribute %d = %d on device %d\n", attribute, value, device);
  return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, size_t) { return *blocks = 2, 0; }
int cuOccupancyMaxActiveClusters(int* clusters, Kernel*, const Config*) { return *clusters = 3, 0; }
int cuMemsetD8Async(unsigned long long at, unsigned char value, size_t bytes, void*) {
  std::printf("memset %d, %zu bytes\n", value, bytes);
  memset(reinterpret_cast<void*>(at), value, bytes);
  return 0;
}
int cuLaunchKernelEx(const Config* c, Kernel* kernel, void** arguments, void**) {
  const unsigned cluster = c->count ? c->attributes[0].value[0] : 1;
  std::printf("launch %u,%u,%u of %u,%u,%u cluster %u shared %u %s\n", c->grid[0], c->grid[1], c->grid[2], c->block[0],
              c->block[1], c->block[2], cluster, c->shared, kernel->name.c_str());
  if (c->block[0] > 1024) return 1;
  const ProbeArgs& a = *static_cast<ProbeArgs*>(arguments[0]);
  const float scale = *static_cast<float*>(arguments[1]);
  for (int i = 0; i < a.count && a.inner.flag; ++i) a.y[i] = scale * a.x[i] + static_cast<float>(a.inner.shift);
  return 0;
}
}
