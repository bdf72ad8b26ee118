// Elements as unsigned numbers in the same order, and candidates: an element and its column as one number.
#pragma once

#include "common/std.h"

namespace jaxkern {

// kTotal: of floats that SortKey orders as ToKey does.
enum class Order { kUnsigned, kSigned, kFloat, kTotal };

// The unsigned number that stands for an element of this size.
template <class Bits> using Key = std::conditional_t<sizeof(Bits) == 8, uint64_t, uint32_t>;

// The unsigned number of an element with these bits, and back. Floats are in the total order of IEEE 754: -0 is less than 0,
// NaN is greater than infinity, or less than -infinity if its sign is set.
template <class Bits, Order kOrder> __device__ __forceinline__ Key<Bits> ToKey(Bits bits) {
  constexpr Key<Bits> kSign = Key<Bits>{1} << (8 * sizeof(Bits) - 1), kAll = kSign | (kSign - 1);
  const Key<Bits> b = bits;
  if constexpr (kOrder == Order::kUnsigned) return b;
  else if constexpr (kOrder == Order::kSigned) return b ^ kSign;
  else if constexpr (sizeof(Bits) == 4) return b ^ (static_cast<uint32_t>(static_cast<int32_t>(b) >> 31) | kSign);
  else return b & kSign ? b ^ kAll : b | kSign;
}
template <class Bits, Order kOrder> __device__ __forceinline__ Bits FromKey(Key<Bits> key) {
  constexpr Key<Bits> kSign = Key<Bits>{1} << (8 * sizeof(Bits) - 1), kAll = kSign | (kSign - 1);
  if constexpr (kOrder == Order::kUnsigned) return static_cast<Bits>(key);
  else if constexpr (kOrder == Order::kSigned) return static_cast<Bits>(key ^ kSign);
  else return static_cast<Bits>(key & kSign ? key ^ kSign : key ^ kAll);
}

// The unsigned number of an element in the order of a sort: -0 equals 0, and NaN, whose magnitude is greater than `largest`, is the
// greatest number. FromKey does not invert it.
template <class Bits, Order kOrder> __device__ __forceinline__ Key<Bits> SortKey(Bits bits, Key<Bits> largest) {
  if constexpr (kOrder == Order::kFloat && sizeof(Bits) == 4) {
    // A sum with 0 has the bits that are wanted: -0 + 0 is 0, and every NaN becomes the one with all bits set but its sign.
    return ToKey<Bits, kOrder>(__float_as_uint(__fadd_rn(__uint_as_float(bits), 0.0f)));
  } else if constexpr (kOrder == Order::kFloat) {
    constexpr Key<Bits> kSign = Key<Bits>{1} << (8 * sizeof(Bits) - 1);
    const Key<Bits> magnitude = bits & (kSign - 1), minus = bits & kSign ? ~Key<Bits>{0} : 0;
    return magnitude > largest ? ~Key<Bits>{0} : (magnitude ^ minus) - minus + kSign;  // kSign +- magnitude
  } else {
    return ToKey<Bits, kOrder>(bits);
  }
}

// A greater element makes a greater candidate and, of equal elements, a lower column. Columns are less than 2^31, so that no
// candidate is 0.
__device__ __forceinline__ uint64_t Candidate(uint32_t key, uint32_t column) {
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~column);
}
__device__ __forceinline__ uint32_t KeyOf(uint64_t candidate) { return static_cast<uint32_t>(candidate >> 32); }
__device__ __forceinline__ uint32_t ColumnOf(uint64_t candidate) { return ~static_cast<uint32_t>(candidate); }

}  // namespace jaxkern
