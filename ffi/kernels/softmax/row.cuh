// How the kernels of the softmax family read and write a row: its packs as inputs of an Op.
// SoftmaxRow has no kernels of its own; registers.cuh and stream.cuh use it.
#pragma once

#include "common/broadcast.h"
#include "softmax/ops.cuh"

namespace jaxkern {

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
  static constexpr bool kSkips = false;          // some packs have no element that takes part; see Skips in fused.cuh
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
