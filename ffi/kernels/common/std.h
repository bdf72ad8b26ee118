// The parts of the C++ standard library that kernels use. NVRTC has no standard library, so these names are declared here
// for it; other compilers include the library.
#pragma once

#if !defined(__CUDACC_RTC__)

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#else

using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;

#define INFINITY (__int_as_float(0x7f800000))
#define NAN (__int_as_float(0x7fffffff))

#define INT8_MIN (-128)
#define INT8_MAX 127
#define UINT8_MAX 255
#define INT16_MIN (-32768)
#define INT16_MAX 32767
#define UINT16_MAX 65535
#define INT32_MIN (-2147483647 - 1)
#define INT32_MAX 2147483647
#define UINT32_MAX 4294967295u
#define INT64_MIN (-9223372036854775807ll - 1)
#define INT64_MAX 9223372036854775807ll
#define UINT64_MAX 18446744073709551615ull

namespace std {

using size_t = decltype(sizeof(0));

template <class T, T v> struct integral_constant {
  static constexpr T value = v;
  constexpr operator T() const { return v; }
};
template <bool b> using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <class A, class B> constexpr bool is_same_v = false;
template <class A> constexpr bool is_same_v<A, A> = true;

template <bool b, class A, class B> struct conditional {
  using type = A;
};
template <class A, class B> struct conditional<false, A, B> {
  using type = B;
};
template <bool b, class A, class B> using conditional_t = typename conditional<b, A, B>::type;

template <class...> using void_t = void;
template <class T> T&& declval() noexcept;

template <class T> constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, double>;
template <class T> constexpr bool is_integral_v =
    is_same_v<T, bool> || is_same_v<T, char> || is_same_v<T, int8_t> || is_same_v<T, uint8_t> ||
    is_same_v<T, int16_t> || is_same_v<T, uint16_t> || is_same_v<T, int32_t> || is_same_v<T, uint32_t> ||
    is_same_v<T, long> || is_same_v<T, unsigned long> || is_same_v<T, int64_t> || is_same_v<T, uint64_t>;
template <class T> constexpr bool is_signed_v = (is_integral_v<T> || is_floating_point_v<T>) && T(-1) < T(0);

template <class T> using make_unsigned_t =
    conditional_t<sizeof(T) == 1, uint8_t,
                  conditional_t<sizeof(T) == 2, uint16_t, conditional_t<sizeof(T) == 4, uint32_t, uint64_t> > >;

template <class T, T... v> struct integer_sequence {};
template <size_t... i> using index_sequence = integer_sequence<size_t, i...>;
namespace detail {
template <size_t n, size_t... i> struct Indices : Indices<n - 1, n - 1, i...> {};
template <size_t... i> struct Indices<0, i...> {
  using type = index_sequence<i...>;
};
}  // namespace detail
template <size_t n> using make_index_sequence = typename detail::Indices<n>::type;

template <class T> constexpr const T& min(const T& a, const T& b) { return b < a ? b : a; }
template <class T> constexpr const T& max(const T& a, const T& b) { return a < b ? b : a; }

}  // namespace std

using std::size_t;

#endif
