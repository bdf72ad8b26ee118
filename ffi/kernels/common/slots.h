// Lists of types, and tuples of one value for each type of a list.
#pragma once

#include "std.h"

namespace jaxkern {

template <class... T> struct Types {};

template <int i, class T, class... Rest> struct TypeAt : TypeAt<i - 1, Rest...> {};
template <class T, class... Rest> struct TypeAt<0, T, Rest...> {
  using type = T;
};

template <size_t i, class T> struct Slot {
  T value;
};
// One value of each type; At<i> returns value i.
template <class Index, class... T> struct Slots;
template <size_t... i, class... T> struct Slots<std::index_sequence<i...>, T...> : Slot<i, T>... {};
template <size_t i, class T> __device__ __forceinline__ T& At(Slot<i, T>& slot) { return slot.value; }
template <size_t i, class T> __device__ __forceinline__ const T& At(const Slot<i, T>& slot) { return slot.value; }

}  // namespace jaxkern
