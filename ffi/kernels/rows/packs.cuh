// Packs of rows and columns: N adjacent elements, which a thread reads, computes and writes together.
//
// Packs of a row are aligned to their size in memory, so that they are read in vectors of 16 bytes. If the width of the rows is a
// multiple of N, they start where rows do. If it is not (kRagged), the first and the last pack of a row may be partial: they hold
// elements of the rows before and after it as well. Such a pack is read as whole vectors, because the vectors that hold an element
// of an array lie in its memory; a partial pack is written element by element.
#pragma once

#include "../common/broadcast.h"
#include "../common/pack.cuh"

namespace jaxkern {

// The offset of a row. kRank: the number of groups of dimensions of the map.
template <int kRank> __device__ __forceinline__ int64_t MapRow(const IndexMap& map, int64_t row) {
  if constexpr (kRank == 0) return 0;
  else if constexpr (kRank == 1) return row * map.stride[0];
  else return map(row);
}

// kWhole: the packs of all threads fill a row exactly. kPart: some packs are absent. kRagged: see above.
enum RowEnds { kWhole, kPart, kRagged };

template <class T> constexpr int kPieces = 16 / static_cast<int>(sizeof(T));

// Bit i says whether element i of the pack at `column` is one of the row. Columns before the row are negative.
template <int N> __device__ __forceinline__ uint32_t OfRow(int column, int width) {
  const int before = column < 0 ? -column : 0, after = column + N > width ? column + N - width : 0;
  constexpr uint32_t kAll = (1u << N) - 1;
  return (kAll << before) & (kAll >> after);
}

// The elements of the row alone, one by one; the others are 0.
template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadElements(const T* row, int column, int width) {
  Pack<T, N> pack = ZeroPack<T, N>();
  const uint32_t own = OfRow<N>(column, width);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (own >> i & 1) SetElement(pack, i, row[column + i]);
  }
  return pack;
}

// A pack that has an element of the row. Elements outside the row are arbitrary.
template <class T, int N, int kEnds>
__device__ __forceinline__ Pack<T, N> LoadRowPack(const T* row, int column, int width, ReadPolicy policy) {
  if constexpr (N * sizeof(T) > 16) {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; i += kPieces<T>) {
      Pack<T, kPieces<T>> piece = ZeroPack<T, kPieces<T>>();
      if (kEnds != kRagged || column + i < width) piece = LoadVector<T, kPieces<T>>(row + column + i, policy);
#pragma unroll
      for (int w = 0; w < 4; ++w) pack.word[i / kPieces<T> * 4 + w] = piece.word[w];
    }
    return pack;
  } else if constexpr (kEnds == kRagged && N * sizeof(T) < 8) {  // no vector
    return LoadElements<T, N>(row, column, width);
  } else {
    return LoadVector<T, N>(row + column, policy);
  }
}

// Elements [column, column + N) of an array of columns, at any alignment, through the aligned vectors that hold them: reading them
// one by one would take as many instructions as elements. Those outside the row are arbitrary.
template <class T, int N> __device__ __forceinline__ Pack<T, N> LoadShifted(const T* columns, int column, int width) {
  constexpr int kEach = kPieces<T>, kVectors = (N + kEach - 1) / kEach + 1, kPerWord = 4 / static_cast<int>(sizeof(T));
  const int first = column >= 0 ? column / kEach * kEach : -((kEach - 1 - column) / kEach * kEach),
            shift = column - first;
  uint32_t word[4 * kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = first + v * kEach;
    Pack<T, kEach> piece = ZeroPack<T, kEach>();
    if (at >= 0 && at < width) piece = LoadVector<T, kEach>(columns + at);
#pragma unroll
    for (int w = 0; w < 4; ++w) word[4 * v + w] = piece.word[w];
  }
  // By words, half of the distance at a time, then by bytes.
  const int words = shift / kPerWord, bits = shift % kPerWord * (8 * sizeof(T));
#pragma unroll
  for (int step = 2; step > 0; step /= 2) {
#pragma unroll
    for (int w = 0; w + step < 4 * kVectors; ++w) word[w] = words & step ? word[w + step] : word[w];
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
  if constexpr (kEnds == kRagged && sizeof(T) <= 4 && N > 4) {  // elsewhere instructions are no limit
    return LoadShifted<T, N>(columns, column, width);
  } else if constexpr (kEnds == kRagged) {
    return LoadElements<T, N>(columns, column, width);
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

// partial: the pack may be partial.
template <class T, int N>
__device__ __forceinline__ void StoreRowPack(T* row, int column, int width, bool partial, const Pack<T, N>& pack) {
  if (partial && !(column >= 0 && column + N <= width)) {
    const uint32_t own = OfRow<N>(column, width);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (own >> i & 1) row[column + i] = Element(pack, i);
    }
  } else if constexpr (N * sizeof(T) > 16) {
#pragma unroll
    for (int i = 0; i < N; i += kPieces<T>) {
      Pack<T, kPieces<T>> piece;
#pragma unroll
      for (int w = 0; w < 4; ++w) piece.word[w] = pack.word[i / kPieces<T> * 4 + w];
      StoreVector<T, kPieces<T>>(row + column + i, piece);
    }
  } else {
    StoreVector<T, N>(row + column, pack);
  }
}

}  // namespace jaxkern
