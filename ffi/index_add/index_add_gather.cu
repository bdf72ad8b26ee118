// index_select: a thread copies one vector of each of kGathered rows, their indices and then their vectors
// all under way at once. Threads are numbered over the vectors of the result, so that narrow rows
// fill warps and wide ones are read in whole lines.
#include "index_add_gather.h"

namespace jaxkern {
namespace {

constexpr int kThreads = 256, kGathered = 4;
constexpr int64_t kFewBytes = 8 << 20;

template <int kBytes> struct VectorOf;
template <> struct VectorOf<1> { using type = uint8_t; };
template <> struct VectorOf<2> { using type = uint16_t; };
template <> struct VectorOf<4> { using type = uint32_t; };
template <> struct VectorOf<8> { using type = uint2; };
template <> struct VectorOf<16> { using type = uint4; };

template <class V> __device__ __forceinline__ V FilledWith(uint64_t pattern) {
  const uint32_t low = static_cast<uint32_t>(pattern), high = static_cast<uint32_t>(pattern >> 32);
  if constexpr (sizeof(V) == 16) return make_uint4(low, high, low, high);
  else if constexpr (sizeof(V) == 8) return make_uint2(low, high);
  else return static_cast<V>(low);
}

struct GatherShape {
  int64_t vectors = 0, total = 0;  // of a row, of the result
  int64_t count = 0;
  Divider by_vectors, by_count, by_outer;
  uint64_t fill = 0;
  bool protects = false;  // the rows of x from what is written, in L2
};

// Index numbers the vectors of the result: with 32 bits where they do, for three divisions in 64 take most of a
// thread's registers.
template <class V, class Index>
__global__ void __launch_bounds__(kThreads, sizeof(Index) == 4 ? 8 : 5)
Gather(const __grid_constant__ IndexRun run, const __grid_constant__ GatherShape s) {
  const Index first = static_cast<Index>(blockIdx.x) * (kThreads * kGathered) + threadIdx.x;
  const Index total = static_cast<Index>(s.total), vectors = static_cast<Index>(s.vectors);
  const Index count = static_cast<Index>(s.count);
  RawIndex raw[kGathered];
  Index slice[kGathered], column[kGathered];
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    const Index at = first + u * kThreads;
    if (at >= total) continue;
    const Index row = s.by_vectors.Div(at);
    column[u] = at - row * vectors;
    slice[u] = s.by_count.Div(row);
    const Index b = s.by_outer.Div(slice[u]);
    raw[u] = LoadIndex(run, b * count + (row - slice[u] * count));
  }
  V v[kGathered];
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    v[u] = FilledWith<V>(s.fill);
    if (first + u * kThreads >= total) continue;
    const int64_t row = RowOf(run, raw[u]);
    if (row >= 0 && row < run.all_rows) {
      v[u] = __ldg(static_cast<const V*>(run.source) + (slice[u] * run.all_rows + row) * s.vectors + column[u]);
    }
  }
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    const Index at = first + u * kThreads;
    if (at >= total) continue;
    V* const to = static_cast<V*>(run.out) + at;
    if (s.protects) __stcs(to, v[u]);
    else *to = v[u];
  }
}

template <int kBytes>
cudaError_t LaunchGather(const IndexRun& run, int64_t rows, int64_t count, int64_t row_bytes, uint64_t fill,
                         cudaStream_t stream) {
  GatherShape s;
  s.count = count;
  s.vectors = row_bytes / kBytes;
  s.total = s.vectors * rows;
  s.by_vectors = Divider(s.vectors);
  s.by_count = Divider(count);
  s.by_outer = Divider(run.outer);
  s.fill = fill;
  // Few rows stay in the caches by themselves, and then what is written may stay in L2 as well, for whoever reads it.
  s.protects = rows / count * run.all_rows * row_bytes > kFewBytes;
  constexpr int kEach = kThreads * kGathered;
  using V = typename VectorOf<kBytes>::type;
  const auto kernel = s.total < INT32_MAX - kEach ? Gather<V, uint32_t> : Gather<V, int64_t>;
  return Launch(kernel, {(s.total + kEach - 1) / kEach, 1, kThreads}, stream, run, s);
}

__global__ void __launch_bounds__(kThreads) Fill(char* out, int64_t bytes, uint64_t pattern) {
  // Whole vectors of 16 bytes, and up to 15 bytes before and after them.
  const int64_t ahead = min((16 - reinterpret_cast<uintptr_t>(out) % 16) % 16, static_cast<uintptr_t>(bytes));
  const int64_t vectors = (bytes - ahead) / 16, tail = ahead + vectors * 16;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const auto byte = [&](int64_t at) { return static_cast<char>(pattern >> (at % 8 * 8)); };
  // The pattern as it lies from `ahead` on.
  uint64_t turned = pattern;
  if (ahead % 8) turned = pattern >> (ahead % 8 * 8) | pattern << (64 - ahead % 8 * 8);
#pragma unroll
  for (int u = 0; u < kGathered; ++u) {
    const int64_t v = static_cast<int64_t>(blockIdx.x) * (kThreads * kGathered) + threadIdx.x + u * kThreads;
    if (v < vectors) __stcs(reinterpret_cast<uint4*>(out + ahead) + v, FilledWith<uint4>(turned));
  }
  if (thread < ahead) out[thread] = byte(thread);
  if (thread < bytes - tail) out[tail + thread] = byte(tail + thread);
}

}  // namespace

cudaError_t GatherRows(const IndexRun& run, int64_t batch, int64_t count, int64_t element_bytes, uint64_t fill,
                       cudaStream_t stream) {
  const int64_t rows = batch * run.outer * count;
  const int64_t row_bytes = run.inner * element_bytes;
  const auto fits = [&](int64_t bytes) {
    return (row_bytes | reinterpret_cast<int64_t>(run.source) | reinterpret_cast<int64_t>(run.out)) % bytes == 0;
  };
  if (fits(16)) return LaunchGather<16>(run, rows, count, row_bytes, fill, stream);
  if (fits(8)) return LaunchGather<8>(run, rows, count, row_bytes, fill, stream);
  if (fits(4)) return LaunchGather<4>(run, rows, count, row_bytes, fill, stream);
  return LaunchGather<2>(run, rows, count, row_bytes, fill, stream);
}

cudaError_t FillPattern(void* out, int64_t bytes, uint64_t pattern, cudaStream_t stream) {
  constexpr int64_t kEach = kThreads * kGathered * 16;
  return Launch(Fill, {(bytes + kEach - 1) / kEach, 1, kThreads}, stream, static_cast<char*>(out), bytes, pattern);
}

}  // namespace jaxkern
