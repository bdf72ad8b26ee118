// How the kernels of the softmax family read and write a row.
//
//     Row           a row as aligned packs. A partial pack at either end is read and written by parts, so that nothing outside of
//                   the row is accessed.
//     SoftmaxRow    a row whose packs are the inputs of an Op; registers.cuh and stream.cuh use it
#pragma once

#include "common/broadcast.h"
#include "softmax/gradients.cuh"

namespace jaxkern {

// Stores the first `bytes` bytes of a 16-byte vector (0 < bytes < 16) in stores of 8, 4 and 2 bytes.
template <class T, int N> __device__ __forceinline__ void StoreFront(T* p, const Pack<T, N>& pack, int bytes) {
  char* at = reinterpret_cast<char*>(p);
  const uint32_t* w = pack.word;
  const bool eight = bytes & 8, four = bytes & 4;
  if (eight) *reinterpret_cast<uint2*>(at) = make_uint2(w[0], w[1]);
  if constexpr (sizeof(T) <= 4) {
    if (four) *reinterpret_cast<uint32_t*>(at + (bytes & 8)) = eight ? w[2] : w[0];
  }
  if constexpr (sizeof(T) == 2) {
    const uint32_t word = eight ? (four ? w[3] : w[2]) : (four ? w[1] : w[0]);
    if (bytes & 2) *reinterpret_cast<uint16_t*>(at + (bytes & 12)) = static_cast<uint16_t>(word);
  }
}

// Stores the last `bytes` bytes of the vector at p.
template <class T, int N> __device__ __forceinline__ void StoreBack(T* p, const Pack<T, N>& pack, int bytes) {
  char* end = reinterpret_cast<char*>(p) + 16;
  const uint32_t* w = pack.word;
  const bool eight = bytes & 8, four = bytes & 4;
  if (eight) *reinterpret_cast<uint2*>(end - 8) = make_uint2(w[2], w[3]);
  if constexpr (sizeof(T) <= 4) {
    if (four) *reinterpret_cast<uint32_t*>(end - (bytes & 8) - 4) = eight ? w[1] : w[3];
  }
  if constexpr (sizeof(T) == 2) {
    const uint32_t word = eight ? (four ? w[0] : w[1]) : (four ? w[2] : w[3]);
    if (bytes & 2) *reinterpret_cast<uint16_t*>(end - (bytes & 12) - 2) = static_cast<uint16_t>(word >> 16);
  }
}

// A row of `width` elements as aligned packs: pack p holds columns [p * N - shift, ... + N), where shift is the distance
// of the row's first element from the preceding boundary of `grain` elements. The grain is 16 bytes or more: a warp whose
// vectors start on 32 bytes writes whole sectors. All arrays of a call share the shift (else the plan uses N = 1).
// `misalignment`: elements from the preceding boundary of `grain` to the start of the arrays.
//
// Packs [head, Count()) hold elements of the row. The first and the last may be partial: only some of their elements belong
// to the row. kRagged = false promises that no pack is partial, which makes the code shorter.
template <class T, int N, class Index, bool kRagged = true> struct Row {
  int64_t base;  // element offset of pack 0, `shift` elements before the row
  Index width;
  int shift;
  Index head;
  Index whole_begin;  // packs [whole_begin, whole_end) lie entirely in the row
  Index whole_end;

  __device__ __forceinline__ Row(int64_t first, int64_t row_width, int misalignment, int grain)
      : width(static_cast<Index>(row_width)) {
    shift = kRagged ? static_cast<int>(first + misalignment) & (grain - 1) : 0;
    base = first - shift;
    head = shift / N;
    whole_begin = (shift + N - 1) / N;
    whole_end = (width + shift) / N;
  }
  __device__ __forceinline__ Index Count() const { return (width + shift + N - 1) / N; }
  // Whether some pack of the row is partial.
  __device__ __forceinline__ bool Ragged() const { return kRagged && ((shift | width) & (N - 1)) != 0; }
  __device__ __forceinline__ bool Whole(Index p) const { return (!kRagged || p >= whole_begin) && p < whole_end; }
  __device__ __forceinline__ Index Column(Index p) const { return p * N - shift; }
  __device__ __forceinline__ bool Has(Index column) const { return column >= 0 && column < width; }
  __device__ __forceinline__ int64_t At(Index p) const { return base + static_cast<int64_t>(p) * N; }

  // Whether a partial pack lies entirely inside the array, so that it can be read as a vector.
  __device__ __forceinline__ bool Inside(Index p, int64_t array_size) const {
    return At(p) >= 0 && At(p) + N <= array_size;
  }

  // Replaces the elements of a partial pack that do not belong to the row by `otherwise`.
  __device__ __forceinline__ void Trim(Pack<T, N>& pack, Index p, T otherwise) const {
    const Pack<T, N> fill = Filled<T, N>(otherwise);
    // Bytes [from, to) of the pack belong to the row.
    const int from = max(-static_cast<int>(max(Column(p), Index(-N))), 0) * static_cast<int>(sizeof(T));
    const int to = static_cast<int>(min(width - Column(p), Index(N))) * static_cast<int>(sizeof(T));
#pragma unroll
    for (int w = 0; w < Pack<T, N>::kWords; ++w) {
      const int low = max(from - 4 * w, 0), high = max(4 * w + 4 - to, 0);
      const uint32_t keep = (low < 4 ? ~0u << (8 * low) : 0u) & (high < 4 ? ~0u >> (8 * high) : 0u);
      pack.word[w] = (pack.word[w] & keep) | (fill.word[w] & ~keep);
    }
  }

  // Reads any pack; the elements of a partial one are read one by one.
  __device__ __forceinline__ Pack<T, N> LoadElements(const T* array, Index p, T otherwise) const {
    Pack<T, N> pack = Filled<T, N>(otherwise);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (Has(Column(p) + i)) SetElement(pack, i, array[At(p) + i]);
    }
    return pack;
  }

  __device__ __forceinline__ Pack<T, N> Load(const T* array, Index p, T otherwise, ReadPolicy policy) const {
    if (Whole(p)) return LoadVector<T, N>(array + At(p), policy);
    return LoadElements(array, p, otherwise);
  }

  __device__ __forceinline__ void Store(T* array, Index p, const Pack<T, N>& pack) const {
    if (Whole(p)) {
      StoreVector<T, N>(array + At(p), pack);
    } else if (Ragged()) {
      StoreRagged(array, p, pack);
    }
  }

  // Writes a partial pack; elements outside the row keep their value.
  __device__ __forceinline__ void StoreRagged(T* array, Index p, const Pack<T, N>& pack) const {
    T* const at = array + At(p);
    const Index column = Column(p);
    if (N * sizeof(T) != 16 || (column < 0 && column + N > width)) {  // cut at both ends
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (Has(column + i)) at[i] = Element(pack, i);
      }
    } else if constexpr (N * sizeof(T) == 16) {
      if (column < 0 && column > -N) StoreBack(at, pack, static_cast<int>(column + N) * static_cast<int>(sizeof(T)));
      else if (column >= 0 && column < width)
        StoreFront(at, pack, static_cast<int>(width - column) * static_cast<int>(sizeof(T)));
    }
  }
};

// Arguments of the kernels. The arrays are aligned to 16 bytes, unless the kernel has packs of one element and the
// grain is 1. The members that every kernel reads come first, so that they share cache lines.
struct SoftmaxParams {
  const void* input[2];
  void* out;
  int64_t rows;  // size of the dimension before the axis
  int64_t width;
  int grain;        // see Row
  bool exceeds_l2;  // the arrays together exceed L2; see ReadPolicy
  int64_t inner;
  const uint8_t* mask;
  BroadcastView mask_view;
};
static_assert(sizeof(SoftmaxParams) == 248, "plan.py lays it out");

// Says of every pack that it is loaded.
struct Never {
  __device__ __forceinline__ bool operator()(int) const { return false; }
};

// One row: loads packs as inputs of an Op, and stores packs of results.
//
//     Op       operation; see ops.cuh
//     N        elements of a pack
//     Index    integer type of pack numbers and columns
//     kRagged  rows may begin or end within a pack
template <class Op, int N, class Index, bool kRagged = true> struct SoftmaxRow {
  using T = typename Op::T;
  using O = typename ResultOf<Op>::Type;
  using C = typename Op::C;
  using Params = SoftmaxParams;
  static constexpr int kPack = N;
  static constexpr bool kManyRegisters = false;  // needs more registers than two blocks of 512 threads leave
  static constexpr bool kSkips = false;  // some packs have no element that takes part; see Skips in fused_row.cuh
  static constexpr Index kNoStop = sizeof(Index) == 4 ? Index(INT32_MAX) : Index(INT64_MAX);
  static constexpr int kStreamUnroll = 4;  // streaming: packs in flight per thread and input
  static constexpr int kStreamBlocks = 2;  // streaming: blocks per multiprocessor
  // Minimum number of blocks per multiprocessor, for blocks whose warps have rows of their own.
  static constexpr int GroupBlocks(int) { return 1; }
  Row<T, N, Index, kRagged> span;
  const T* input[Op::kInputs];
  int64_t array_size;
  ReadPolicy policy;

  struct Raw {
    Pack<T, N> data[Op::kInputs];
  };

  // A row at or beyond the end has no elements; every load returns neutral elements.
  __device__ __forceinline__ SoftmaxRow(const SoftmaxParams& p, int64_t row)
      : span(row * p.width, row < p.rows ? p.width : 0, 0, p.grain),
        array_size(p.rows * p.width),
        policy(MakeReadPolicy(p.exceeds_l2)) {
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) input[k] = static_cast<const T*>(p.input[k]);
  }

  static __device__ __forceinline__ T Otherwise(int k) { return FromCompute<T>(Op::Neutral(k)); }

  __device__ __forceinline__ Raw Load(Index p) const {
    Raw raw;
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) raw.data[k] = span.Load(input[k], p, Otherwise(k), policy);
    return raw;
  }

  // The addresses of packs first + ahead. Kernels of one input keep one pointer for several packs; kernels of two
  // inputs lack the registers for it.
  template <class Element, int kPacks> struct Places {
    static constexpr bool kKept = kPacks > 1 && Op::kInputs == 1;
    const SoftmaxRow& row;
    Element* base;
    __device__ __forceinline__ Places(const SoftmaxRow& of, Element* array, Index first)
        : row(of), base(kKept ? Pinned(array + of.span.At(first)) : array) {}
    __device__ __forceinline__ Element* operator()(Index first, Index ahead) const {
      return kKept ? base + static_cast<int64_t>(ahead) * N : base + row.span.At(first + ahead);
    }
  };

  // Loads packs first, first + step, ... with all loads in flight at once. Ragged packs are loaded as vectors too, and
  // trimmed when they have arrived; only at the ends of the array are elements loaded one by one. `step` is at least
  // the grain in packs, so only the thread's pack 0 can be a ragged head. Whole packs from `stop` on, and the i-th if
  // skips(i), are not loaded.
  template <class AnyRaw, int kPacks, class Skips = Never>
  __device__ __forceinline__ void LoadAll(AnyRaw (&raw)[kPacks], Index first, Index step, Index stop = kNoStop,
                                          Skips skips = {}) const {
    const Index last = span.Count() - 1;
    const Index begin = !kRagged ? 0 : span.head + (span.shift % N != 0 && !span.Inside(span.head, array_size));
    const Index end =
        min(stop, !kRagged ? span.whole_end : last + 1 - (last >= span.whole_end && !span.Inside(last, array_size)));
    const Places<const T, kPacks> first_input(*this, input[0], first), last_input(*this, input[Op::kInputs - 1], first);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const Index p = first + i * step;
#pragma unroll
      for (int k = 0; k < Op::kInputs; ++k) {
        raw[i].data[k] = Filled<T, N>(Otherwise(k));
        if ((!kRagged || p >= begin) && p < end && !skips(i)) {
          raw[i].data[k] = LoadVector<T, N>((k == 0 ? first_input : last_input)(first, i * step), policy);
        }
      }
    }
    if (!span.Ragged()) return;
    const int tail = last >= first ? static_cast<int>((last - first) / step) : -1;
    const bool has_tail = !span.Whole(last) && first + tail * step == last;
    const bool has_head = first == span.head && !span.Whole(first) && first != last;
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) {
      if (has_head) {
        if (first >= begin) span.Trim(raw[0].data[k], first, Otherwise(k));
        else raw[0].data[k] = span.LoadElements(input[k], first, Otherwise(k));
      }
      if (has_tail) {
        Pack<T, N> pack = raw[0].data[k];
#pragma unroll
        for (int i = 1; i < kPacks; ++i) {
          if (i == tail) pack = raw[i].data[k];
        }
        if (last >= begin && last < end) span.Trim(pack, last, Otherwise(k));
        else pack = span.LoadElements(input[k], last, Otherwise(k));
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          if (i == tail) raw[i].data[k] = pack;
        }
      }
    }
  }

  static __device__ __forceinline__ void Values(const Raw& raw, C (&v)[Op::kInputs][N], Index = 0) {
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) {
      Unpack(raw.data[k], v[k]);
    }
  }

  static __device__ __forceinline__ void Scale(typename Op::Final&) {}
  // Hooks for derived rows. Begin: the packs have arrived. Settle: the row's Stat is known, results are not yet
  // computed. Close: the results are stored.
  template <class AnyRaw> static __device__ __forceinline__ void Begin(const AnyRaw&, int, int) {}
  template <class AnyRaw> static __device__ __forceinline__ void Settle(const AnyRaw&, const typename Op::Stat&) {}
  template <int kLanes, class AnyRaw>
  static __device__ __forceinline__ void Close(const AnyRaw&, const typename Op::Stat&, int) {}

  static __device__ __forceinline__ Pack<O, N> Result(C (&v)[N], const typename Op::Final& final, const Raw& raw,
                                                      Index = 0) {
    return Repack<O, N>(v);
  }
  __device__ __forceinline__ void Store(O* out, Index p, C (&v)[N], const typename Op::Final& final,
                                        const Raw& raw) const {
    Put(out, p, Result(v, final, raw, p));
  }
  __device__ __forceinline__ void Put(O* out, Index p, const Pack<O, N>& pack) const {
    if constexpr (std::is_same_v<O, T>) {
      span.Store(out, p, pack);
    } else if (span.Whole(p)) {
      StoreVector<O, N>(out + span.At(p), pack);
    } else if (span.Ragged()) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (span.Has(span.Column(p) + j)) out[span.At(p) + j] = Element(pack, j);
      }
    }
  }
  // Stores the packs that LoadAll loads, the whole packs first.
  template <int kPacks>
  __device__ __forceinline__ void StoreAll(O* out, const Pack<O, N> (&pack)[kPacks], Index first, Index step) const {
    if constexpr (!std::is_same_v<O, T>) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) Put(out, first + i * step, pack[i]);
    } else {
      StoreAllAsRead(out, pack, first, step);
    }
  }
  template <int kPacks> __device__ __forceinline__ void StoreAllAsRead(T* out, const Pack<T, N> (&pack)[kPacks],
                                                                       Index first, Index step) const {
    const Places<T, kPacks> at(*this, out, first);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (span.Whole(first + i * step)) StoreVector<T, N>(at(first, i * step), pack[i]);
    }
    if (!span.Ragged()) return;
    const Index last = span.Count() - 1;
    if (first == span.head && !span.Whole(first)) span.StoreRagged(out, first, pack[0]);
    if (last > span.head && last >= first && !span.Whole(last) && (last - first) % step == 0) {
      Pack<T, N> tail = pack[0];
#pragma unroll
      for (int i = 1; i < kPacks; ++i) {
        if (first + i * step == last) tail = pack[i];
      }
      span.StoreRagged(out, last, tail);
    }
  }
};

}  // namespace jaxkern
