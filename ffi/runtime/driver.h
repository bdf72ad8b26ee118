// The CUDA driver, loaded at run time: the package builds and imports without one.
//
// Declares the types and enumerators of cuda.h that the runtime uses; the driver's ABI is fixed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace jaxkern {

using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;
using CUdeviceptr = unsigned long long;

constexpr CUresult kCudaSuccess = 0;

enum CUdeviceAttribute : int {
  kMultiprocessorCount = 16,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
};

enum CUfunctionAttribute : int {
  kMaxDynamicSharedSizeBytes = 8,
  kNonPortableClusterSizeAllowed = 14,
};

struct CUlaunchAttribute {
  int id;  // kClusterDimension
  char pad[4];
  union {
    struct {
      unsigned x, y, z;
    } cluster;
    char bytes[64];
  } value;
};
constexpr int kClusterDimension = 4;

enum CUstreamCaptureMode : int { kCaptureRelaxed = 2 };

struct CUlaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
  CUresult (*cuInit)(unsigned) = nullptr;
  CUresult (*cuGetErrorName)(CUresult, const char**) = nullptr;
  CUresult (*cuGetErrorString)(CUresult, const char**) = nullptr;
  CUresult (*cuDeviceGet)(CUdevice*, int) = nullptr;
  CUresult (*cuDeviceGetAttribute)(int*, CUdeviceAttribute, CUdevice) = nullptr;
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, CUdevice) = nullptr;
  CUresult (*cuDevicePrimaryCtxRelease)(CUdevice) = nullptr;
  CUresult (*cuCtxPushCurrent)(CUcontext) = nullptr;
  CUresult (*cuCtxPopCurrent)(CUcontext*) = nullptr;
  CUresult (*cuLibraryLoadData)(CUlibrary*, const void*, void*, void**, unsigned, void*, void**, unsigned) = nullptr;
  CUresult (*cuLibraryGetKernel)(CUkernel*, CUlibrary, const char*) = nullptr;
  CUresult (*cuKernelSetAttribute)(CUfunctionAttribute, int, CUkernel, CUdevice) = nullptr;
  CUresult (*cuOccupancyMaxActiveBlocksPerMultiprocessor)(int*, CUfunction, int, size_t) = nullptr;
  CUresult (*cuOccupancyMaxActiveClusters)(int*, CUfunction, const CUlaunchConfig*) = nullptr;
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig*, CUfunction, void**, void**) = nullptr;
  CUresult (*cuMemsetD8Async)(CUdeviceptr, unsigned char, size_t, CUstream) = nullptr;
  CUresult (*cuThreadExchangeStreamCaptureMode)(CUstreamCaptureMode*) = nullptr;

  std::string error;  // why there is no driver; empty if there is one

  // The driver; the first call loads and initialises it. `path`, in the first call: a library other than the system's.
  static const Driver& Get(const char* path = nullptr);

  // "CUDA_ERROR_INVALID_VALUE: invalid argument"
  std::string Describe(CUresult result) const;
};

}  // namespace jaxkern
