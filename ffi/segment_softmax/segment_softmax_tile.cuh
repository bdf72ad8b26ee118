// A tile of the segment softmax: where a block works, its rows between memory and shared memory, and the places where
// runs of equal keys end.
#pragma once

#include "../index_add/index_add.cuh"
#include "segment_softmax.h"

namespace jaxkern {

constexpr int kSegmentWarps = kSegmentThreads / kWarp;

struct SegmentShape {
  uint32_t places = 0, room = 0;  // of a tile
  uint32_t reach = 0;             // room - places: how far beyond its end a tile can go
  uint32_t tiles = 0;
  int columns = 1, slabs = 1, stretches = 1;
  int held = 0;             // elements of an input in shared memory
  bool contiguous = false;  // the rows of a tile are one stretch of memory
  bool vectors = false;     // else: a slab's part of a row is whole aligned vectors
  // Inputs are run.source and this one; all arrays have as many rows.
  const void* cotangent = nullptr;
  Divider by_slabs, by_tiles;
  FastDivmod by_columns, by_vectors, by_stretches;
};

// Where a block works.
struct SegmentBlock {
  int64_t o;
  uint32_t tile, begin;  // the first position of the tile
  int column, width;     // of the slab

  __device__ __forceinline__ SegmentBlock(const IndexRun& run, const SegmentShape& s, int64_t number) {
    const int64_t item = s.by_slabs.Div(number);
    column = static_cast<int>(number - item * s.slabs) * s.columns;
    o = s.by_tiles.Div(item);
    tile = static_cast<uint32_t>(item - o * s.tiles);
    begin = tile * s.places;
    width = static_cast<int>(min(int64_t{s.columns}, run.inner - column));
  }
};

// An array's rows in shared memory: place p and column c of the tile at values[p * columns + c]. Rows that are one
// stretch of memory are read and written as vectors wherever it begins; they lie in shared memory as far from a
// boundary of 16 bytes as they do in the array.
template <class T> struct Staged {
  using C = Compute<T>;
  static constexpr int kN = kVector<T>, kBatch = 8, kRowBatch = 4;  // vectors that a thread has under way
  C* image;
  C* values;
  int ahead;  // elements from a boundary to the tile's first

  __device__ __forceinline__ Staged(const SegmentShape& s, const SegmentBlock& b, C* room, const T* array) : image(room) {
    ahead = s.contiguous ? Ahead(s, b, array) : 0;
    values = image + ahead;
  }
  static __device__ __forceinline__ int Ahead(const SegmentShape& s, const SegmentBlock& b, const T* array) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(array + int64_t{b.begin} * s.columns) % 16 / sizeof(T));
  }

  // `array`: of this o. Places [first, last).
  __device__ __forceinline__ void Read(const IndexRun& run, const SegmentShape& s, const SegmentBlock& b,
                                       const T* array, int first, int last) {
    if (s.contiguous) {
      const T* const from = array + int64_t{b.begin} * s.columns - ahead;
      const int low = ahead + first * s.columns, high = ahead + last * s.columns, stop = high / kN;
      const int ragged = Ragged(low, high);
      if (ragged >= 0) image[ragged] = ToCompute(from[ragged]);
      for (int base = (low + kN - 1) / kN + threadIdx.x; base < stop; base += kBatch * kSegmentThreads) {
        Pack<T, kN> part[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const int v = base + u * kSegmentThreads;
          if (v < stop) part[u] = LoadVector<T, kN>(from + v * kN);
        }
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const int v = base + u * kSegmentThreads;
          if (v < stop) Put(v * kN, part[u]);
        }
      }
    } else if (s.vectors) {
      ReadRows<kN>(run, s, b, array, first, last, s.by_vectors);
    } else {
      ReadRows<1>(run, s, b, array, first, last, s.by_columns);
    }
  }

  __device__ __forceinline__ void Write(const IndexRun& run, const SegmentShape& s, const SegmentBlock& b, T* array,
                                        int first, int last) const {
    if (s.contiguous) {
      const int out = Ahead(s, b, array);
      T* const to = array + int64_t{b.begin} * s.columns - out;
      const C* const from = values - out;
      const int low = out + first * s.columns, high = out + last * s.columns;
      const int ragged = Ragged(low, high);
      if (ragged >= 0) to[ragged] = FromCompute<T>(from[ragged]);
      for (int v = (low + kN - 1) / kN + threadIdx.x; v < high / kN; v += kSegmentThreads) {
        StoreVector<T, kN>(to + v * kN, Get(from + v * kN, out == ahead));
      }
    } else if (s.vectors) {
      WriteRows<kN>(run, s, b, array, first, last, s.by_vectors);
    } else {
      WriteRows<1>(run, s, b, array, first, last, s.by_columns);
    }
  }

 private:
  // The element of [low, high) that is this thread's, of those at either end that make no whole vector; or -1.
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

  // N elements at a time, of which `by` divides by how many a place has.
  template <int N>
  __device__ __forceinline__ void ReadRows(const IndexRun& run, const SegmentShape& s, const SegmentBlock& b,
                                           const T* array, int first, int last, const FastDivmod& by) {
    const int each = static_cast<int>(by.divisor), items = (last - first) * each;
    for (int base = threadIdx.x; base < items; base += kRowBatch * kSegmentThreads) {
      Pack<T, N> part[kRowBatch];
      int64_t row[kRowBatch];
      int place[kRowBatch], offset[kRowBatch];
#pragma unroll
      for (int u = 0; u < kRowBatch; ++u) {
        const int e = base + u * kSegmentThreads, p = by.Div(e);
        place[u] = first + p;
        offset[u] = e < items ? (e - p * each) * N : b.width;
        if (offset[u] < b.width) row[u] = Row(run, b.begin + place[u]);
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
  template <int N>
  __device__ __forceinline__ void WriteRows(const IndexRun& run, const SegmentShape& s, const SegmentBlock& b,
                                            T* array, int first, int last, const FastDivmod& by) const {
    const int each = static_cast<int>(by.divisor), items = (last - first) * each;
#pragma unroll 4
    for (int e = threadIdx.x; e < items; e += kSegmentThreads) {
      const int p = by.Div(e), offset = (e - p * each) * N;
      if (offset >= b.width) continue;
      T* const to = array + Row(run, b.begin + first + p) * run.inner + b.column + offset;
      const C* const from = image + (first + p) * s.columns + offset;
      if constexpr (N == kN) StorePart<T, N>(to, Get(from, true));
      else *to = FromCompute<T>(*from);
    }
  }
  static __device__ __forceinline__ int64_t Row(const IndexRun& run, uint32_t position) {
    return run.order ? int64_t{__ldg(run.order + position)} : run.SourceRow(position);
  }
};

template <class T> __device__ __forceinline__ const T* InputOf(const IndexRun& run, const SegmentShape& s, int k, int64_t o) {
  return static_cast<const T*>(k == 0 ? run.source : s.cotangent) + o * run.source_stride * run.inner;
}

// The places [low, high) of all inputs, behind one another in shared memory; the first one's, which the result is put in
// the place of.
template <class T, int kInputs>
__device__ __forceinline__ Staged<T> StageInputs(const IndexRun& run, const SegmentShape& s, const SegmentBlock& b,
                                                 Compute<T>* images, int low, int high, Compute<T>* (&values)[kInputs]) {
  Staged<T> staged(s, b, images, InputOf<T>(run, s, 0, b.o));
  staged.Read(run, s, b, InputOf<T>(run, s, 0, b.o), low, high);
  values[0] = staged.values;
  if constexpr (kInputs == 2) {
    Staged<T> other(s, b, images + s.held, InputOf<T>(run, s, 1, b.o));
    other.Read(run, s, b, InputOf<T>(run, s, 1, b.o), low, high);
    values[1] = other.values;
  }
  return staged;
}
template <class T> __device__ __forceinline__ T* OutputOf(const IndexRun& run, int64_t o) {
  return static_cast<T*>(run.out) + o * run.source_stride * run.inner;
}

template <class Stat>
__device__ __forceinline__ Stat* SegmentSlot(const IndexRun& run, const SegmentShape& s, int64_t o, uint32_t tile, int tail) {
  return static_cast<Stat*>(run.partials) + ((o * s.tiles + tile) * 2 + tail) * run.inner;
}

// In shared memory, which places of a tile end a run.
template <int kQ> struct SegmentEnds {
  uint32_t ends[kSegmentThreads];  // of each stretch
  uint32_t drops[kSegmentThreads]; // places of no segment, each of which is a run
  uint32_t some[kSegmentWarps];    // stretches in which something ends

  // Finds them from the keys of the tile and of the place behind it.
  __device__ __forceinline__ void Find(const uint32_t* keys, int stretches, uint32_t dropped) {
    const int t = threadIdx.x;
    uint32_t end = 0, drop = 0;
    if (t < stretches) {
      uint32_t key = keys[t * kQ];
#pragma unroll
      for (int i = 0; i < kQ; ++i) {
        const uint32_t next = keys[t * kQ + i + 1];
        if (key >= dropped) drop |= 1u << i;
        if (key >= dropped || next != key) end |= 1u << i;
        key = next;
      }
    }
    ends[t] = end;
    drops[t] = drop;
    const uint32_t bits = __ballot_sync(~0u, end != 0);
    if (t % kWarp == 0) some[t / kWarp] = bits;
  }
  // The first end in stretches from `stretch` on, or `none`.
  __device__ __forceinline__ int From(int stretch, int none) const {
    for (int w = stretch / kWarp; w < kSegmentWarps; ++w) {
      const uint32_t bits = w == stretch / kWarp ? some[w] >> (stretch % kWarp) << (stretch % kWarp) : some[w];
      if (bits) {
        const int k = w * kWarp + __ffs(bits) - 1;
        return k * kQ + __ffs(ends[k]) - 1;
      }
    }
    return none;
  }
  // The last end in stretches before `stretch`, or -1.
  __device__ __forceinline__ int Before(int stretch) const {
    for (int w = (stretch - 1) / kWarp; w >= 0; --w) {
      const uint32_t bits = some[w] & (stretch - w * kWarp < kWarp ? (1u << (stretch - w * kWarp)) - 1 : ~0u);
      if (bits) {
        const int k = w * kWarp + 31 - __clz(bits);
        return k * kQ + 31 - __clz(ends[k]);
      }
    }
    return -1;
  }
};

}  // namespace jaxkern
