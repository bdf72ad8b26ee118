// The rows of a tile of segment softmax in shared memory: the work of a block, and how its rows are read and written (tiles.cuh).
#pragma once

#include "run.cuh"

namespace jaxkern {

constexpr int kTileThreads = 256, kTileWarps = kTileThreads / kWarp, kTileColumns = 16;

// Layout of the rows of a tile in memory: contiguous (no order, a single column tile, rows of a slice adjacent); whole aligned
// vectors; or arbitrary.
enum class Rows { kContiguous, kVectors, kElements };

struct TileShape {
  int columns, column_tiles, spans;  // columns of a column tile; spans of a tile
  int held;                          // elements of an input in shared memory
  Divider by_column_tiles, by_tiles;
  FastDivmod by_columns, by_spans;
  FastDivmod by_parts;  // vectors (or elements) of a row within the column tile
};
static_assert(sizeof(TileShape) == 104);

// The work of a block: a tile of a slice `o`, and a tile of columns.
struct TileBlock {
  int64_t o;
  uint32_t tile, begin;  // begin: first place of the tile
  int column, width;     // of the column tile

  __device__ __forceinline__ TileBlock(const SegmentRun& run, const TileShape& s, int64_t number) {
    const int64_t item = s.by_column_tiles.Div(number);
    column = static_cast<int>(number - item * s.column_tiles) * s.columns;
    o = s.by_tiles.Div(item);
    tile = static_cast<uint32_t>(item - o * run.tiles);
    begin = tile * run.places;
    width = static_cast<int>(min(int64_t{s.columns}, run.inner - column));
  }
};

// Rows of an array in shared memory, in the computing type: place p and column c of the tile are values[p * columns +
// c]. Contiguous rows are read and written as vectors wherever they begin; their offset from a 16-byte boundary is the
// same in shared memory as in the array. T: element type. kRows: layout of the rows.
template <class T, Rows kRows> struct Staged {
  using C = Compute<T>;
  static constexpr int kN = kVector<T>, kBatch = 8, kRowBatch = 4;  // vectors (or rows) in flight per thread
  C* image;
  C* values;
  int ahead;  // elements between the boundary and the tile's first one

  __device__ __forceinline__ Staged(const TileShape& s, const TileBlock& b, C* room, const T* array) : image(room) {
    ahead = kRows == Rows::kContiguous ? Ahead(s, b, array) : 0;
    values = image + ahead;
  }
  static __device__ __forceinline__ int Ahead(const TileShape& s, const TileBlock& b, const T* array) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(array + int64_t{b.begin} * s.columns) % 16 / sizeof(T));
  }

  // Reads places [first, last). `array`: input of this slice o.
  __device__ __forceinline__ void Read(const SegmentRun& run, const TileShape& s, const TileBlock& b, const T* array,
                                       int first, int last) {
    if constexpr (kRows == Rows::kContiguous) {
      const T* const from = array + int64_t{b.begin} * s.columns - ahead;
      const int low = ahead + first * s.columns, high = ahead + last * s.columns, stop = high / kN;
      const int ragged = Ragged(low, high);
      if (ragged >= 0) image[ragged] = ToCompute(from[ragged]);
      for (int base = (low + kN - 1) / kN + threadIdx.x; base < stop; base += kBatch * kTileThreads) {
        Pack<T, kN> part[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const int v = base + u * kTileThreads;
          if (v < stop) part[u] = LoadVector<T, kN>(from + v * kN);
        }
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const int v = base + u * kTileThreads;
          if (v < stop) Put(v * kN, part[u]);
        }
      }
    } else {
      ReadRows<kRows == Rows::kVectors ? kN : 1>(run, s, b, array, first, last);
    }
  }

  __device__ __forceinline__ void Write(const SegmentRun& run, const TileShape& s, const TileBlock& b, T* array,
                                        int first, int last) const {
    if constexpr (kRows == Rows::kContiguous) {
      const int out = Ahead(s, b, array);
      T* const to = array + int64_t{b.begin} * s.columns - out;
      const C* const from = values - out;
      const int low = out + first * s.columns, high = out + last * s.columns;
      const int ragged = Ragged(low, high);
      if (ragged >= 0) to[ragged] = FromCompute<T>(from[ragged]);
      for (int v = (low + kN - 1) / kN + threadIdx.x; v < high / kN; v += kTileThreads) {
        StoreVector<T, kN>(to + v * kN, Get(from + v * kN, out == ahead));
      }
    } else {
      WriteRows<kRows == Rows::kVectors ? kN : 1>(run, s, b, array, first, last);
    }
  }

 private:
  // Returns the element of [low, high) that this thread copies, among those at either end that do not fill a vector; or
  // -1.
  static __device__ __forceinline__ int Ragged(int low, int high) {
    const int t = threadIdx.x, head = min((low + kN - 1) / kN * kN, high), tail = max(high / kN * kN, head);
    const int e = t < kN ? low + t : tail + t - kN;
    return t < kN ? (e < head ? e : -1) : t < 2 * kN && e < high ? e : -1;
  }
  __device__ __forceinline__ void Put(int at, const Pack<T, kN>& pack) {
    alignas(16) C c[kN];
    Unpack(pack, c);
#pragma unroll
    for (int i = 0; i < kN; i += 16 / sizeof(C)) {
      *reinterpret_cast<uint4*>(image + at + i) = *reinterpret_cast<const uint4*>(c + i);
    }
  }
  static __device__ __forceinline__ Pack<T, kN> Get(const C* from, bool aligned) {
    alignas(16) C c[kN];
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kN; i += 16 / sizeof(C)) {
        *reinterpret_cast<uint4*>(c + i) = *reinterpret_cast<const uint4*>(from + i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kN; ++i) c[i] = from[i];
    }
    return Repack<T, kN>(c);
  }

  // Reads the rows N elements at a time.
  template <int N> __device__ __forceinline__ void ReadRows(const SegmentRun& run, const TileShape& s,
                                                            const TileBlock& b, const T* array, int first, int last) {
    const FastDivmod& by = s.by_parts;
    const int each = static_cast<int>(by.divisor), items = (last - first) * each;
    for (int base = threadIdx.x; base < items; base += kRowBatch * kTileThreads) {
      Pack<T, N> part[kRowBatch];
      int64_t row[kRowBatch];
      int place[kRowBatch], offset[kRowBatch];
#pragma unroll
      for (int u = 0; u < kRowBatch; ++u) {
        const int e = base + u * kTileThreads, p = by.Div(e);
        place[u] = first + p;
        offset[u] = e < items ? (e - p * each) * N : b.width;
        if (offset[u] < b.width) row[u] = run.RowAt(b.begin + place[u]);
      }
#pragma unroll
      for (int u = 0; u < kRowBatch; ++u) {
        if (offset[u] < b.width) part[u] = LoadPart<T, N>(array + row[u] * run.inner + b.column + offset[u]);
      }
#pragma unroll
      for (int u = 0; u < kRowBatch; ++u) {
        if (offset[u] >= b.width) continue;
        const int at = place[u] * s.columns + offset[u];
        if constexpr (N == kN) Put(at, part[u]);
        else image[at] = ToCompute(Element(part[u], 0));
      }
    }
  }
  template <int N> __device__ __forceinline__ void WriteRows(const SegmentRun& run, const TileShape& s,
                                                             const TileBlock& b, T* array, int first, int last) const {
    const FastDivmod& by = s.by_parts;
    const int each = static_cast<int>(by.divisor), items = (last - first) * each;
#pragma unroll 4
    for (int e = threadIdx.x; e < items; e += kTileThreads) {
      const int p = by.Div(e), offset = (e - p * each) * N;
      if (offset >= b.width) continue;
      T* const to = array + run.RowAt(b.begin + first + p) * run.inner + b.column + offset;
      const C* const from = image + (first + p) * s.columns + offset;
      if constexpr (N == kN) StorePart<T, N>(to, Get(from, true));
      else *to = FromCompute<T>(*from);
    }
  }
};

// Reads places [low, high) of all inputs, which are consecutive in shared memory. Returns the rows of the first one,
// which the result replaces.
template <class T, Rows kRows, int kInputs>
__device__ __forceinline__ Staged<T, kRows> StageInputs(const SegmentRun& run, const TileShape& s, const TileBlock& b,
                                                        Compute<T>* images, int low, int high,
                                                        Compute<T>* (&values)[kInputs]) {
  Staged<T, kRows> staged(s, b, images, run.Input<T>(0, b.o));
  staged.Read(run, s, b, run.Input<T>(0, b.o), low, high);
  values[0] = staged.values;
  if constexpr (kInputs == 2) {
    Staged<T, kRows> other(s, b, images + s.held, run.Input<T>(1, b.o));
    other.Read(run, s, b, run.Input<T>(1, b.o), low, high);
    values[1] = other.values;
  }
  return staged;
}

}  // namespace jaxkern
