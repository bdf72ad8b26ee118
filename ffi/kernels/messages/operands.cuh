// What the message kernels share: the edges in an order, operands of a message, and vectors of features.
//
// A message is a function of scalars, called for every edge and every feature. Its operands are arrays of shape
// [count, features...]; features broadcast. The kernels see the features as three dimensions, [outer, middle, inner];
// an operand may lack any of them. Elements along `inner` are read as vectors of N.
//
// Edges are in the order of the rows that they belong to (jaxkern/_ops/messages/primitive.py):
//
//     keys[p]      row of the edge at position p of the order, ascending; `rows` or more for padding
//     order[p]     the edge at position p
//     other[p]     the node at the other end of that edge
//     offsets[r]   the first position of row r; offsets[rows] is the end of the last row
//
// Indices are limited to their arrays before anything is read at them, so that no content of these four arrays, however
// wrong, leads out of bounds.
#pragma once

#include "../common/divider.h"
#include "../common/extremes.h"
#include "../common/functions.h"
#include "../common/half.h"
#include "../common/pack.cuh"
#include "../common/reduce.cuh"
#include "../common/std.h"

namespace jaxkern {

constexpr int kMessageThreads = 128;

// A pointer that the compiler keeps in registers, instead of the sum that it was made by.
template <class T> __device__ __forceinline__ const T* InRegisters(const T* p) {
#if defined(__CUDA_ARCH__)
  asm("" : "+l"(p));
#endif
  return p;
}

// --- Elements ----------------------------------------------------------------------------------------

template <class T> using Value = Own<T>;

// N elements as they lie in memory, in words, so that a loaded vector stays whole until it is used.
template <class T, int N> struct Elements {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  static constexpr int kWords = (kBytes + 3) / 4;
  static_assert(kBytes <= 16 && (kBytes & (kBytes - 1)) == 0);
  uint32_t word[kWords];

  __device__ __forceinline__ void Load(const T* p) {
    if constexpr (kBytes == 16) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    } else if constexpr (kBytes == 8) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
      word[0] = v.x, word[1] = v.y;
    } else if constexpr (kBytes == 4) {
      word[0] = __ldg(reinterpret_cast<const uint32_t*>(p));
    } else if constexpr (kBytes == 2) {
      word[0] = __ldg(reinterpret_cast<const uint16_t*>(p));
    } else {
      word[0] = __ldg(reinterpret_cast<const uint8_t*>(p));
    }
  }

  __device__ __forceinline__ void Store(T* p) const {
    if constexpr (kBytes == 16) {
      __stcs(reinterpret_cast<uint4*>(p), make_uint4(word[0], word[1], word[2], word[3]));
    } else if constexpr (kBytes == 8) {
      __stcs(reinterpret_cast<uint2*>(p), make_uint2(word[0], word[1]));
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<uint32_t*>(p) = word[0];
    } else if constexpr (kBytes == 2) {
      *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(word[0]);
    } else {
      *reinterpret_cast<uint8_t*>(p) = static_cast<uint8_t>(word[0]);
    }
  }

  // Element i, which is a constant once loops are unrolled.
  __device__ __forceinline__ Value<T> operator[](int i) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // the upper half of a float
      return __uint_as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
    } else if constexpr (std::is_same_v<T, __half>) {
      const uint16_t bits = static_cast<uint16_t>(i % 2 ? word[i / 2] >> 16 : word[i / 2]);
      return __half2float(*reinterpret_cast<const __half*>(&bits));
    } else if constexpr (sizeof(T) == 8) {
      const uint64_t bits = static_cast<uint64_t>(word[2 * i + 1]) << 32 | word[2 * i];
      return *reinterpret_cast<const T*>(&bits);
    } else if constexpr (sizeof(T) == 4) {
      return *reinterpret_cast<const T*>(&word[i]);
    } else if constexpr (sizeof(T) == 2) {
      return static_cast<T>(static_cast<uint16_t>(i % 2 ? word[i / 2] >> 16 : word[i / 2]));
    } else {
      return static_cast<T>(static_cast<uint8_t>(word[i / 4] >> (i % 4 * 8)));
    }
  }

  __device__ __forceinline__ void Set(int i, Value<T> x) {
    if constexpr (sizeof(T) == 8) {
      const uint64_t bits = *reinterpret_cast<const uint64_t*>(&x);
      word[2 * i] = static_cast<uint32_t>(bits), word[2 * i + 1] = static_cast<uint32_t>(bits >> 32);
    } else if constexpr (sizeof(T) == 4) {
      word[i] = *reinterpret_cast<const uint32_t*>(&x);
    } else if constexpr (sizeof(T) == 2) {
      uint32_t bits;
      if constexpr (std::is_same_v<T, __half>) bits = __half_as_ushort(__float2half_rn(x));
      else if constexpr (std::is_same_v<T, __nv_bfloat16>) bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
      else bits = static_cast<uint16_t>(x);
      word[i / 2] = i % 2 ? word[i / 2] | bits << 16 : bits;  // elements are set in order
    } else {
      const uint32_t bits = static_cast<uint8_t>(x);
      word[i / 4] = i % 4 ? word[i / 4] | bits << (i % 4 * 8) : bits;
    }
  }
};

// --- Operands ----------------------------------------------------------------------------------------

// Which row of an operand an edge reads: the row of the edge's row in this order, of the node at its other end, of the
// edge itself, or the only row of the operand.
enum class End { kRow, kOther, kEdge, kShared };

// An operand of T. kVector: it has the inner features, whose elements lie side by side; else one for all of them.
template <class T, End kEndOf, bool kVectorOf> struct Operand {
  using type = T;
  static constexpr End kEnd = kEndOf;
  static constexpr bool kVector = kVectorOf;
};

struct OperandArgs {
  const char* data;
  uint32_t row;            // bytes from one of its rows to the next
  uint32_t last;           // its last row
  uint32_t outer, middle;  // elements from one outer and one middle feature to the next
};
static_assert(sizeof(OperandArgs) == 24);

// The sizes of features.
struct FeatureArgs {
  FastDivmod inner, middle;
  uint32_t width;  // of all
};
static_assert(sizeof(FeatureArgs) == 28);

struct EdgeArgs {
  const uint32_t *keys, *order, *other, *offsets;
  uint32_t edges, rows;
};
static_assert(sizeof(EdgeArgs) == 40);

// The offset of the feature `column` in a row of an operand, in elements.
__device__ __forceinline__ uint32_t FeatureOffset(const OperandArgs& a, const FeatureArgs& f, uint32_t column,
                                                  bool vector) {
  if (f.inner.divisor == f.width) return vector ? column : 0;  // operands have all features or none
  const uint32_t q = f.inner.Div(column), inner = column - q * f.inner.divisor;
  const uint32_t outer = f.middle.Div(q), middle = q - outer * f.middle.divisor;
  return outer * a.outer + middle * a.middle + (vector ? inner : 0);
}

// --- Lists of operands -------------------------------------------------------------------------------

// What is held for operand i of a list.
template <int i, class T> struct Held {
  T value;
};
template <class Sequence, class... T> struct TupleOf;
template <size_t... i, class... T> struct TupleOf<std::index_sequence<i...>, T...> : Held<i, T>... {};
template <class... T> using Tuple = TupleOf<std::make_index_sequence<sizeof...(T)>, T...>;
template <int i, class T> __device__ __forceinline__ T& Get(Held<i, T>& held) { return held.value; }
template <int i, class T> __device__ __forceinline__ const T& Get(const Held<i, T>& held) { return held.value; }

template <class... T> struct Types {
  static constexpr int kCount = sizeof...(T);
};

// Places of the rows that operands read, by End.
struct Places {
  uint32_t row, other, edge;
};

// The vectors of all operands of one message: N features of an edge.
template <int N, class Sequence, class... Operands> struct VectorsOf;
template <int N, size_t... i, class... Operands> struct VectorsOf<N, std::index_sequence<i...>, Operands...> {
  static constexpr int kOperands = sizeof...(Operands);
  static constexpr bool kReadsOther = ((Operands::kEnd == End::kOther) || ...);
  static constexpr bool kReadsEdge = ((Operands::kEnd == End::kEdge) || ...);
  // Whether an operand differs from one edge of a row to the next.
  static constexpr bool Varies(End end) { return end == End::kOther || end == End::kEdge; }

  Tuple<Elements<typename Operands::type, Operands::kVector ? N : 1>...> elements;

  // Reads the operands whose End `Which` admits, at `from[i]` in their first rows. Each address is one multiply-add.
  template <class Which>
  __device__ __forceinline__ void Load(const OperandArgs* args, const char* const* from, const Places& at, Which) {
    const auto load = [&](auto& to, auto operand, const OperandArgs& a, const char* first) {
      using Own = decltype(operand);
      if constexpr (Which()(Own::kEnd)) {
        const uint32_t place = Own::kEnd == End::kShared  ? 0
                               : Own::kEnd == End::kRow   ? at.row
                               : Own::kEnd == End::kOther ? at.other
                                                          : at.edge;
        const char* const p = first + static_cast<uint64_t>(min(place, a.last)) * a.row;
        to.Load(reinterpret_cast<const typename Own::type*>(p));
      }
    };
    (load(Get<i>(elements), Operands(), args[i], from[i]), ...);
  }

  // f of the operands' elements n and then of the results. Those that do not vary along a row come from `own`.
  template <class F, class... Results>
  __device__ __forceinline__ void Apply(const F& f, const VectorsOf& own, int n, Results&... y) const {
    f((Varies(Operands::kEnd) ? *this : own).template Element<i, Operands>(n)..., y...);
  }

  template <int k, class Own> __device__ __forceinline__ auto Element(int n) const {
    return Get<k>(elements)[Own::kVector ? n : 0];
  }

  // Where the feature `column` lies in the first row of each operand.
  static __device__ __forceinline__ void Find(const OperandArgs* args, const FeatureArgs& f, uint32_t column,
                                              const char** from) {
    ((from[i] = InRegisters(args[i].data + static_cast<uint64_t>(FeatureOffset(args[i], f, column, Operands::kVector)) *
                                               sizeof(typename Operands::type))),
     ...);
  }
};
template <int N, class... Operands> using Vectors =
    VectorsOf<N, std::make_index_sequence<sizeof...(Operands)>, Operands...>;

struct Always {
  constexpr bool operator()(End) const { return true; }
};
struct OfEdges {
  constexpr bool operator()(End end) const { return end == End::kOther || end == End::kEdge; }
};
struct OfRows {
  constexpr bool operator()(End end) const { return end == End::kRow || end == End::kShared; }
};

// --- Reductions --------------------------------------------------------------------------------------

// kMaxAt and kMinAt also find the first edge that attains a row's maximum or minimum.
enum class Reduce { kSum, kMean, kMax, kMin, kMaxAt, kMinAt };

constexpr bool IsSum(Reduce op) { return op == Reduce::kSum || op == Reduce::kMean; }
constexpr bool IsMax(Reduce op) { return op == Reduce::kMax || op == Reduce::kMaxAt; }
constexpr bool HasPlace(Reduce op) { return op == Reduce::kMaxAt || op == Reduce::kMinAt; }

// A message and its position in the order of edges; kNowhere for none.
constexpr uint32_t kNowhere = ~0u;
template <class C> struct Placed {
  C value;
  uint32_t position;
};
template <Reduce kOp, class C> using Total = std::conditional_t<HasPlace(kOp), Placed<C>, C>;

template <Reduce kOp, class C> __device__ __forceinline__ C NeutralValue() {
  if constexpr (IsSum(kOp)) return C(0);
  else if constexpr (std::is_same_v<C, float>) return __uint_as_float(IsMax(kOp) ? 0xff800000u : 0x7f800000u);
  else if constexpr (std::is_same_v<C, double>) return __hiloint2double(IsMax(kOp) ? 0xfff00000 : 0x7ff00000, 0);
  else if constexpr (std::is_same_v<C, uint32_t>) return IsMax(kOp) ? 0 : UINT32_MAX;
  else if constexpr (std::is_same_v<C, int32_t>) return IsMax(kOp) ? INT32_MIN : INT32_MAX;
  else return IsMax(kOp) ? INT64_MIN : INT64_MAX;
}

template <Reduce kOp, class C> __device__ __forceinline__ Total<kOp, C> Neutral() {
  if constexpr (HasPlace(kOp)) return {NeutralValue<kOp, C>(), kNowhere};
  else return NeutralValue<kOp, C>();
}

// The message at a position of the order, before it is combined with others.
template <Reduce kOp, class C> __device__ __forceinline__ Total<kOp, C> AsTotal(C value, uint32_t position) {
  if constexpr (HasPlace(kOp)) return {value, position};
  else return value;
}

// a and b combined. NaN wins over a largest and a smallest number; of equals, the one at the first position does.
template <Reduce kOp, class C> __device__ __forceinline__ C Combine(C a, C b) {
  if constexpr (IsSum(kOp)) return a + b;
  else return IsMax(kOp) ? LargerOrNan(a, b) : SmallerOrNan(a, b);
}
template <Reduce kOp, class C> __device__ __forceinline__ Placed<C> Combine(Placed<C> a, Placed<C> b) {
  const bool first = a.position < b.position, a_is_nan = a.value != a.value, b_is_nan = b.value != b.value;
  const bool better = IsMax(kOp) ? a.value > b.value : a.value < b.value;
  const bool takes_a =
      a_is_nan || b_is_nan ? a_is_nan && (first || !b_is_nan) : better || (a.value == b.value && first);
  return takes_a ? a : b;
}

// Combines over aligned groups of kLanes lanes; all 32 lanes take part.
template <Reduce kOp, int kLanes, class C> __device__ __forceinline__ C CombineLanes(C x) {
  return ReduceLanes<kLanes>(x, [](C a, C b) { return Combine<kOp>(a, b); });
}
template <Reduce kOp, int kLanes, class C> __device__ __forceinline__ Placed<C> CombineLanes(Placed<C> x) {
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) {
    const Placed<C> other = {__shfl_xor_sync(0xffffffffu, x.value, lane),
                             __shfl_xor_sync(0xffffffffu, x.position, lane)};
    x = Combine<kOp>(x, other);
  }
  return x;
}

// What a row's result is of the reduction of its `count` messages.
template <Reduce kOp, class C> __device__ __forceinline__ C Finish(C total, uint32_t count) {
  if constexpr (kOp == Reduce::kMean) return count ? total / static_cast<C>(count) : C(0);
  else return total;
}
template <Reduce kOp, class C> __device__ __forceinline__ C Finish(Placed<C> total, uint32_t) { return total.value; }

// The edge that attains it; kNowhere if there is none.
template <class C> __device__ __forceinline__ uint32_t EdgeOf(const EdgeArgs& a, Placed<C> total) {
  return total.position < a.edges ? __ldg(a.order + total.position) : kNowhere;
}

}  // namespace jaxkern
