// Packs of rows and columns: N adjacent elements, which a thread reads, computes and writes together.
//
// Packs of a row are aligned to their size in memory, so that they are read in vectors of 16 bytes. If the width of the rows is a
// multiple of N, they start where rows do. If it is not (kRagged), rows begin and end in the middle of a pack. The whole packs in
// between are the body of the row. Its edges, the elements before and after the body, are read and written one by one, at most one
// by each thread, or a few where few threads hold a row.
#pragma once

#include "../common/broadcast.h"
#include "../common/float8.cuh"
#include "../common/pack.cuh"
#include "../common/philox.h"

namespace jaxkern {

// The offset of a row. kRank: the number of groups of dimensions of the map.
template <int kRank> __device__ __forceinline__ int64_t MapRow(const IndexMap& map, int64_t row) {
  if constexpr (kRank == 0) {
    return 0;
  } else {
    int64_t offset = 0;
    if (kRank > 1 && row >> 32 == 0) {
      uint32_t i = static_cast<uint32_t>(row);
#pragma unroll
      for (int d = 0; d + 1 < kRank; ++d) {
        const uint32_t q = map.size[d].Div(i);
        offset += static_cast<int64_t>(i - q * map.size[d].divisor) * map.stride[d];
        i = q;
      }
      row = i;
    } else {
#pragma unroll 1
      for (int d = 0; d + 1 < kRank; ++d) {
        const int64_t q = row / map.size[d].divisor;
        offset += (row - q * map.size[d].divisor) * map.stride[d];
        row = q;
      }
    }
    return offset + row * map.stride[kRank - 1];
  }
}

// kWhole: the packs of all threads fill a row exactly. kPart: the last packs of some threads are absent. kRagged: see above. The last
// two are the same where rows begin in the middle of a sector of memory and threads have room for a sector more, see Body.
enum RowEnds { kWhole, kPart, kRagged, kPartOfSectors, kRaggedOfSectors };
constexpr bool IsRagged(int ends) { return ends == kRagged || ends == kRaggedOfSectors; }
constexpr bool OfSectors(int ends) { return ends == kPartOfSectors || ends == kRaggedOfSectors; }

// The elements of the edges of a row that each of kGroup threads holds, at most. A plan counts on it, see `edges` in layout.py.
template <int N, int kGroup, int kEnds> constexpr int kEdges = IsRagged(kEnds) ? (2 * N - 2 + kGroup - 1) / kGroup : 0;

// The packs of a row hold its columns [begin, end). The threads of a group count packs from `first`, which is less where the row
// begins in the middle of a sector of memory: then each of their accesses begins with a sector, and the first threads have a pack less.
struct Body {
  int begin, end, first;

  // The end of the tiles of a row. There is one, for the columns in no pack, though it may have no packs.
  __device__ __forceinline__ int TilesEnd() const { return max(end, first + 1); }
  // Column e of those in no pack; there is none if the result is not less than the width.
  __device__ __forceinline__ int Edge(int e) const { return e < begin ? e : e - begin + end; }
};

constexpr int kSectorBytes = 32;

// The body of a row. Threads hold at most `most` packs of it. kSector: packs of a sector, or 1 for rows that are counted from their
// begin; then there is room for all packs and the rest of a sector.
template <int N, int kEnds, int kSector>
__device__ __forceinline__ Body BodyOf(int64_t row, int64_t row_width, int most) {
  const int width = static_cast<int>(row_width);
  Body body = {0, width, 0};
  if constexpr (IsRagged(kEnds)) {
    body.begin = min(width, static_cast<int>((0 - static_cast<uint64_t>(row * row_width)) % N));
    body.end = body.begin + min((width - body.begin) / N, most) * N;
    body.first = body.begin;
  }
  if constexpr (kSector > 1) {
    const int before = static_cast<int>(static_cast<uint64_t>(row * row_width + body.begin) / N % kSector);
    body.first -= before * N;
  }
  return body;
}

template <class T> constexpr int kPieces = 16 / static_cast<int>(sizeof(T));

// One element. The compiler moves it below no other load of a row: it would wait for the element where it is needed, and for
// the others before.
template <class T> __device__ __forceinline__ Pack<T, 1> LoadRowElement(const T* at, ReadPolicy policy) {
  Pack<T, 1> pack = ZeroPack<T, 1>();
#ifndef JAXKERN_EMULATED
  if constexpr (sizeof(T) == 2) {
    uint16_t bits;
    asm volatile("ld.global.L2::cache_hint.u16 %0, [%1], %2;" : "=h"(bits) : "l"(at), "l"(policy.bits));
    pack.word[0] = bits;
    return pack;
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(pack.word[0]) : "l"(at), "l"(policy.bits));
    return pack;
  }
#endif
  SetElement(pack, 0, *at);
  return pack;
}

// An element of a column, through L1. As bits: CUDA reads no bool, 8-bit float or complex number as read-only memory.
template <class T> __device__ __forceinline__ Pack<T, 1> LoadColumnElement(const T* at) {
  Pack<T, 1> pack;
  if constexpr (sizeof(T) == 16) {
    *reinterpret_cast<uint4*>(pack.word) = __ldg(reinterpret_cast<const uint4*>(at));
  } else if constexpr (sizeof(T) == 8) {
    *reinterpret_cast<uint2*>(pack.word) = __ldg(reinterpret_cast<const uint2*>(at));
  } else {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>;
    pack.word[0] = __ldg(reinterpret_cast<const Bits*>(at));
  }
  return pack;
}

template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadRowPack(const T* at, ReadPolicy policy) {
  if constexpr (N * sizeof(T) > 16) {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; i += kPieces<T>) {
      const Pack<T, kPieces<T>> piece = LoadVector<T, kPieces<T>>(at + i, policy);
#pragma unroll
      for (int w = 0; w < 4; ++w) pack.word[i / kPieces<T> * 4 + w] = piece.word[w];
    }
    return pack;
  } else if constexpr (N == 1) {
    return LoadRowElement<T>(at, policy);
  } else {
    return LoadVector<T, N>(at, policy);
  }
}

// Elements [column, column + N) of an array of columns, at any alignment, through the aligned vectors that hold them: reading them
// one by one would take as many instructions as elements.
template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadShifted(const T* columns, int column, int width) {
  constexpr int kEach = kPieces<T>, kVectors = (N + kEach - 1) / kEach + 1, kPerWord = 4 / static_cast<int>(sizeof(T));
  const int shift = column % kEach, first = column - shift;
  uint32_t word[4 * kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = first + v * kEach;
    Pack<T, kEach> piece = ZeroPack<T, kEach>();
    if (at < width) piece = LoadVector<T, kEach>(columns + at);
#pragma unroll
    for (int w = 0; w < 4; ++w) word[4 * v + w] = piece.word[w];
  }
  // By words, half of the distance at a time, then by bytes. The inner loop has a constant length: the compiler leaves words in local
  // memory, or finds them by comparisons, if it depends on the outer one [scale norm, bfloat16 x 4097, scale in float32: 2712
  // instructions, 472 with a constant length].
  const int words = shift / kPerWord, bits = shift % kPerWord * (8 * sizeof(T));
#pragma unroll
  for (int step = 2; step > 0; step /= 2) {
#pragma unroll
    for (int w = 0; w < 4 * kVectors; ++w) {
      if (w + step < 4 * kVectors) word[w] = words & step ? word[w + step] : word[w];
    }
  }
  Pack<T, N> pack;
#pragma unroll
  for (int w = 0; w < Pack<T, N>::kWords; ++w)
    pack.word[w] = kPerWord == 1 ? word[w] : __funnelshift_r(word[w], word[w + 1], bits);
  return pack;
}

// Through L1, because other rows read it again.
template <class T, int N, int kEnds>
__device__ __forceinline__ Pack<T, N> LoadColumnPack(const T* columns, int column, int width) {
  if constexpr (IsRagged(kEnds) && sizeof(T) <= 4 && N > 4) {  // elsewhere instructions are no limit
    return LoadShifted<T, N>(columns, column, width);
  } else if constexpr (IsRagged(kEnds)) {
    Pack<T, N> pack = ZeroPack<T, N>();
#pragma unroll
    for (int i = 0; i < N; ++i) SetElement(pack, i, columns[column + i]);
    return pack;
  } else if constexpr (N * sizeof(T) > 16) {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; i += kPieces<T>) {
      const Pack<T, kPieces<T>> piece = LoadVector<T, kPieces<T>>(columns + column + i);
#pragma unroll
      for (int w = 0; w < 4; ++w) pack.word[i / kPieces<T> * 4 + w] = piece.word[w];
    }
    return pack;
  } else {
    return LoadVector<T, N>(columns + column);
  }
}

template <class T, int N> __device__ __forceinline__ void StoreRowPack(T* at, const Pack<T, N>& pack) {
  if constexpr (N * sizeof(T) > 16) {
#pragma unroll
    for (int i = 0; i < N; i += kPieces<T>) {
      Pack<T, kPieces<T>> piece;
#pragma unroll
      for (int w = 0; w < 4; ++w) piece.word[w] = pack.word[i / kPieces<T> * 4 + w];
      StoreVector<T, kPieces<T>>(at + i, piece);
    }
  } else {
    StoreVector<T, N>(at, pack);
  }
}

}  // namespace jaxkern
