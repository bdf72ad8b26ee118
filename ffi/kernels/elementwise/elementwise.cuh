// Elementwise operations with any number of operands and results, of any types, in one kernel.
//
//     FlatKernel<Elementwise<Functor, parameters, Types<results...>, Types<operands...>>, scalars, tiles>
//     StridedKernel<Elementwise<...>, packs, columns, shared>
//
// Both read `in` and write `out`. Memory traffic: each element is read once and written once. No operand may overlap a
// result.
//
// A functor is any type with a member type C, in which it computes, and an operator() on values of C, one per operand,
// that returns C, bool, or Values<C, number of results> (functors.h, activations.h). Its members are the scalar
// parameters, in order. Functors generated from Python functions (function.cuh) have no C: they take each operand in
// its own computing type and return their results by reference. A thread processes packs of N elements, where N
// elements of the widest type are 16 bytes: it loads the packs of all operands, applies the functor to each element (or
// to pairs of 16-bit elements, if it has a form for pairs), and stores.
//
//     Flat       All arrays are contiguous or scalars (bits of `scalars`), which each thread reads once. With `tiles`,
//                a block takes kUnroll packs per thread and loads all of them before it computes the first result.
//                Elements after the last whole pack are processed one by one. With zero packs the kernel supports any
//                alignment.
//     Strided    Three dimensions. Operands may lack some of them (a bias, a scale per row), and rows of operands and
//                results may have gaps (the halves of a gated operation). Bits of `columns` are set for operands that
//                are constant along a row, bits of `shared` for operands that all rows of the middle dimension share.
//                With `packs`, rows are whole packs that begin on 16 bytes, and a thread takes the same pack of kRows
//                adjacent rows; without, it takes single elements at any alignment.
//
// Blocks stride over the array by the grid, which has one block per tile up to many waves, and fewer than 2^32 threads.
// If the call exceeds L2, inputs are read with evict-last and results written with evict-first (see benchmarks/NOTES.md
// for the reason).
#pragma once

#include "../common/broadcast.h"
#include "../common/half.h"
#include "../common/pack.cuh"
#include "../common/slots.h"
#include "../common/std.h"
#include "functors.h"

namespace jaxkern {

enum class Pred : uint8_t {};  // a bool in memory

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 6;  // leaves 42 registers per thread

// --- Elements --------------------------------------------------------------------------------------

template <class C, class T> JAXKERN_FN C Widen(T x) {
  if constexpr (std::is_same_v<T, __half>) return C(__half2float(x));
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return C(__bfloat162float(x));
  else return static_cast<C>(x);
}

template <class T, class R> JAXKERN_FN T Narrow(R x) {
  if constexpr (std::is_same_v<T, Pred>) return T(x != R(0));
  else if constexpr (std::is_same_v<T, __half>) {
    if constexpr (std::is_same_v<R, double>) return __double2half(x);
    else return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if constexpr (std::is_same_v<R, double>) return __double2bfloat16(x);
    else return __float2bfloat16_rn(x);
  } else if constexpr (std::is_integral_v<T> && std::is_floating_point_v<R>) {
    // Rounds towards 0 and saturates; NaN becomes 0. XLA does the same.
    const int nearest = std::is_same_v<R, double> ? (x == x ? __double2int_rz(x) : 0) : __float2int_rz(x);
    if constexpr (sizeof(T) == 4) return nearest;
    else return static_cast<T>(min(max(nearest, std::is_signed_v<T> ? -128 : 0), std::is_signed_v<T> ? 127 : 255));
  } else return static_cast<T>(x);
}

// N elements as loaded, in 32-bit words (see common/pack.cuh).
struct Words {
  uint32_t w[4];
};

// Element i of a pack; i is a constant once loops are unrolled.
template <class T> JAXKERN_FN T Get(const Words& words, int i) {
  if constexpr (sizeof(T) == 8) {
    return BitsAs<T>(uint64_t{words.w[2 * i + 1]} << 32 | words.w[2 * i]);
  } else if constexpr (sizeof(T) == 4) {
    return BitsAs<T>(words.w[i]);
  } else if constexpr (sizeof(T) == 2) {
    return BitsAs<T>(static_cast<uint16_t>(words.w[i / 2] >> (i % 2 * 16)));
  } else {
    return static_cast<T>(words.w[i / 4] >> (i % 4 * 8) & 0xff);
  }
}

// Sets element i. Elements are set in order from 0: the first of a word clears the rest of it.
template <class T> JAXKERN_FN void Put(Words& words, int i, T x) {
  if constexpr (sizeof(T) == 8) {
    const uint64_t bits = BitsAs<uint64_t>(x);
    words.w[2 * i] = static_cast<uint32_t>(bits), words.w[2 * i + 1] = static_cast<uint32_t>(bits >> 32);
  } else if constexpr (sizeof(T) == 4) {
    words.w[i] = BitsAs<uint32_t>(x);
  } else {
    constexpr int kPerWord = 4 / sizeof(T);
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>;
    const uint32_t bits = uint32_t{BitsAs<Bits>(x)} << (i % kPerWord * 8 * sizeof(T));
    words.w[i / kPerWord] = i % kPerWord ? words.w[i / kPerWord] | bits : bits;
  }
}

// Loads a pack that is used once.
template <int kBytes> JAXKERN_FN void Load(Words& words, const void* p, ReadPolicy policy) {
  if constexpr (kBytes == 16) {
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(words.w[0]), "=r"(words.w[1]), "=r"(words.w[2]), "=r"(words.w[3])
                 : "l"(p), "l"(policy.bits));
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(words.w[0]), "=r"(words.w[1])
                 : "l"(p), "l"(policy.bits));
  } else if constexpr (kBytes == 4) {
    words.w[0] = *static_cast<const uint32_t*>(p);
  } else if constexpr (kBytes == 2) {
    words.w[0] = *static_cast<const uint16_t*>(p);
  } else {
    words.w[0] = *static_cast<const uint8_t*>(p);
  }
}

// Loads a pack through L1.
template <int kBytes> JAXKERN_FN void LoadCached(Words& words, const void* p) {
  constexpr int kVector = kBytes < 4 ? 4 : kBytes;
  if constexpr (kVector == 16) {
    const uint4 v = *static_cast<const uint4*>(p);
    words.w[0] = v.x, words.w[1] = v.y, words.w[2] = v.z, words.w[3] = v.w;
  } else if constexpr (kVector == 8) {
    const uint2 v = *static_cast<const uint2*>(p);
    words.w[0] = v.x, words.w[1] = v.y;
  } else {
    Load<kBytes>(words, p, ReadPolicy());
  }
}

template <int kBytes> JAXKERN_FN void Store(void* p, const Words& words) {
  if constexpr (kBytes == 16)
    __stcs(static_cast<uint4*>(p), make_uint4(words.w[0], words.w[1], words.w[2], words.w[3]));
  else if constexpr (kBytes == 8) __stcs(static_cast<uint2*>(p), make_uint2(words.w[0], words.w[1]));
  else if constexpr (kBytes == 4) __stcs(static_cast<uint32_t*>(p), words.w[0]);
  else if constexpr (kBytes == 2) *static_cast<uint16_t*>(p) = static_cast<uint16_t>(words.w[0]);
  else *static_cast<uint8_t*>(p) = static_cast<uint8_t>(words.w[0]);
}

// The shorter form of a functor, for packs without far angles (see Coarse::IsFar), or void. The kernels test once per
// pack, because a branch per element takes longer than it saves.
template <class Functor> struct NearForm {
  using type = void;
};
template <> struct NearForm<Sin<Coarse>> {
  using type = Sin<CoarseNear>;
};
template <> struct NearForm<Cos<Coarse>> {
  using type = Cos<CoarseNear>;
};
template <> struct NearForm<SinGrad<Coarse>> {
  using type = SinGrad<CoarseNear>;
};
template <> struct NearForm<CosGrad<Coarse>> {
  using type = CosGrad<CoarseNear>;
};

// --- The kernels

// kIn, kOut, kParameters: number of operands, results and scalar parameters.
template <int kIn, int kOut, int kParameters> struct FlatArgs {
  const void* in[kIn];
  void* out[kOut];
  const void* parameter[kParameters ? kParameters : 1];
  int64_t count, packs;  // packs: number in whole tiles, if the kernel takes tiles
  bool exceeds_l2;
};

// Strides are in elements, of the outer and of the middle dimension. The inner stride is 1, or 0 (see `columns`).
template <int kIn, int kOut, int kParameters> struct StridedArgs {
  const void* in[kIn];
  void* out[kOut];
  const void* parameter[kParameters ? kParameters : 1];
  int64_t in_stride[kIn][2], out_stride[kOut][2];
  int64_t count;             // outer size * middle.divisor * inner.divisor
  FastDivmod inner, middle;  // divide by the packs (or elements) of a row, and by the groups of kRows rows (or rows)
  uint32_t middle_size;      // number of rows
  bool exceeds_l2;
};

template <> struct OwnOf<Pred> {
  using type = bool;
};

// The C of a functor; for a functor without one, an unused type.
template <class Functor, class = void> struct ComputingOf {
  using type = float;
  static constexpr bool kOwn = true;
};
template <class Functor> struct ComputingOf<Functor, std::void_t<typename Functor::C>> {
  using type = typename Functor::C;
  static constexpr bool kOwn = false;
};

// Functor: the operation. kParameters: number of its scalar parameters. Outs, Ins: Types of the results and operands.
template <class Functor, int kParameters, class Outs, class Ins> struct Elementwise;

template <class Functor, int kParameters, class... Out, class... In>
struct Elementwise<Functor, kParameters, Types<Out...>, Types<In...>> {
  using C = typename ComputingOf<Functor>::type;
  static constexpr bool kOwn = ComputingOf<Functor>::kOwn;
  static constexpr int kIn = sizeof...(In), kOut = sizeof...(Out);
  static constexpr int kWidest = [] {
    int widest = 0;
    for (int s : {int(sizeof(In))..., int(sizeof(Out))...}) widest = s > widest ? s : widest;
    return widest;
  }();
  static constexpr int N = 16 / kWidest;
  static constexpr int kUnroll = kWidest == 8 || kIn > 2 ? 1 : 2;
  static constexpr int kRows = kUnroll;  // rows of a thread in a strided call
  // 42 registers per thread; 64 or 128 for functors of Python functions with more arrays.
  static constexpr int kMinBlocks = !kOwn || kIn + kOut <= 4 ? kBlocksPerSm : kIn + kOut <= 8 ? 4 : 2;
  using InIndex = std::make_index_sequence<kIn>;
  using OutIndex = std::make_index_sequence<kOut>;
  using Flat = FlatArgs<kIn, kOut, kParameters>;
  using Strided = StridedArgs<kIn, kOut, kParameters>;

  // Whether all types are one of 16 bits and the functor computes two elements at a time.
  using T = typename TypeAt<0, Out...>::type;
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  template <class> using AsPair = Pair;
  template <class F, class = void> struct HasPair : std::false_type {};
  template <class F> struct HasPair<F, std::void_t<decltype(F::Pair(std::declval<AsPair<In>>()...))>> : std::true_type {
  };
  static constexpr bool kPairs = [] {
    if constexpr (!kOwn && (std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>) &&
                  (std::is_same_v<T, In> && ...)) {
      return HasPair<Functor>::value;
    }
    return false;
  }();

  static JAXKERN_FN Functor Make(const void* const* parameter) {
    if constexpr (kParameters == 0) return Functor{};
    else if constexpr (kParameters == 1) return Functor{*static_cast<const C*>(parameter[0])};
    else return Functor{*static_cast<const C*>(parameter[0]), *static_cast<const C*>(parameter[1])};
  }

  // Computes one element, from operands at the offsets `at` to results at the offsets `to`.
  template <size_t... I, size_t... J>
  static JAXKERN_FN void Element(const Functor& f, const void* const* in, void* const* out, const int64_t* at,
                                 const int64_t* to, std::index_sequence<I...>, std::index_sequence<J...>) {
    if constexpr (kOwn) {
      Slots<OutIndex, Own<Out>...> y;
      f(Widen<Own<In>>(static_cast<const In*>(in[I])[at[I]])..., At<J>(y)...);
      ((static_cast<Out*>(out[J])[to[J]] = Narrow<Out>(At<J>(y))), ...);
      return;
    } else {
      const auto result = f(Widen<C>(static_cast<const In*>(in[I])[at[I]])...);
      if constexpr (kOut == 1) ((static_cast<Out*>(out[J])[to[J]] = Narrow<Out>(result)), ...);
      else ((static_cast<Out*>(out[J])[to[J]] = Narrow<Out>(result.v[J])), ...);
    }
  }

  template <size_t... I, size_t... J> static JAXKERN_FN void Compute(const Functor& f, const Words (&x)[kIn],
                                                                     Words (&y)[kOut], std::index_sequence<I...>,
                                                                     std::index_sequence<J...>) {
    if constexpr (kOwn) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        Slots<OutIndex, Own<Out>...> result;
        f(Widen<Own<In>>(Get<In>(x[I], i))..., At<J>(result)...);
        (Put(y[J], i, Narrow<Out>(At<J>(result))), ...);
      }
    } else if constexpr (kPairs) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) y[0].w[i] = BitsAs<uint32_t>(Functor::Pair(BitsAs<AsPair<In>>(x[I].w[i])...));
    } else {
      const auto all = [&](const auto& functor) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const auto result = functor(Widen<C>(Get<In>(x[I], i))...);
          if constexpr (kOut == 1) (Put(y[J], i, Narrow<Out>(result)), ...);
          else (Put(y[J], i, Narrow<Out>(result.v[J])), ...);
        }
      };
      using Near = typename NearForm<Functor>::type;
      if constexpr (std::is_same_v<Near, void>) {
        all(f);
      } else {
        bool far = false;
#pragma unroll
        for (int i = 0; i < N; ++i) far |= Coarse::IsFar(Widen<C>(Get<typename TypeAt<0, In...>::type>(x[0], i)));
        if (__builtin_expect(far, 0)) all(f);
        else all(Near());
      }
    }
  }

  template <class T> static JAXKERN_FN void Splat(Words& words, const void* p) {
    const T x = *static_cast<const T*>(p);
#pragma unroll
    for (int i = 0; i < N; ++i) Put(words, i, x);
  }

  template <uint32_t kScalars, bool kTiles, size_t... I, size_t... J>
  static JAXKERN_FN void RunFlat(const Flat& a, std::index_sequence<I...>, std::index_sequence<J...>) {
    const Functor f = Make(a.parameter);
    Words constant[kIn];
    ((kScalars >> I & 1 ? Splat<In>(constant[I], a.in[I]) : void()), ...);
    const uint32_t step = gridDim.x * blockDim.x, thread = blockIdx.x * blockDim.x + threadIdx.x;
    if constexpr (kTiles) {  // issue all loads before the first result
      const ReadPolicy policy = MakeReadPolicy(a.exceeds_l2);
      constexpr int kTile = kUnroll * kThreads;
      const int64_t tiles = a.packs / kTile;
      for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t first = (tile * kTile + threadIdx.x) * N;
        Words x[kUnroll][kIn];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          ((kScalars >> I & 1
                ? void(x[u][I] = constant[I])
                : Load<N * sizeof(In)>(x[u][I], static_cast<const In*>(a.in[I]) + first + u * (kThreads * N), policy)),
           ...);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          Words y[kOut];
          Compute(f, x[u], y, InIndex(), OutIndex());
          ((Store<N * sizeof(Out)>(static_cast<Out*>(a.out[J]) + first + u * (kThreads * N), y[J])), ...);
        }
      }
    } else {
      for (uint32_t p = thread; p < static_cast<uint32_t>(a.packs); p += step) {  // fewer packs than a tile
        const int64_t first = int64_t{p} * N;
        Words x[kIn], y[kOut];
        ((kScalars >> I & 1 ? void(x[I] = constant[I])
                            : LoadCached<N * sizeof(In)>(x[I], static_cast<const In*>(a.in[I]) + first)),
         ...);
        Compute(f, x, y, InIndex(), OutIndex());
        ((Store<N * sizeof(Out)>(static_cast<Out*>(a.out[J]) + first, y[J])), ...);
      }
    }
    // Read the indices again: holding them through the loop above would make some 16-bit kernels spill.
    uint32_t block, index;
    asm volatile("mov.u32 %0, %%ctaid.x; mov.u32 %1, %%tid.x;" : "=r"(block), "=r"(index));
    for (int64_t i = a.packs * N + block * blockDim.x + index; i < a.count; i += step) {
      const int64_t at[kIn] = {(kScalars >> I & 1 ? 0 : i)...}, to[kOut] = {(void(J), i)...};
      Element(f, a.in, a.out, at, to, InIndex(), OutIndex());
    }
  }

  // Operands that all rows share are cached in L1, for the next blocks on the multiprocessor.
  template <bool kColumn, bool kShared, class T>
  static JAXKERN_FN void LoadRow(Words& words, const T* p, ReadPolicy policy) {
    if constexpr (kColumn) Splat<T>(words, p);
    else if constexpr (kShared) LoadCached<N * sizeof(T)>(words, p);
    else Load<N * sizeof(T)>(words, p, policy);
  }

  template <bool kPacks, uint32_t kColumns, uint32_t kShared, size_t... I, size_t... J>
  static JAXKERN_FN void RunStrided(const Strided& a, std::index_sequence<I...>, std::index_sequence<J...>) {
    const Functor f = Make(a.parameter);
    const ReadPolicy policy = MakeReadPolicy(a.exceeds_l2);
    const int64_t step = int64_t{gridDim.x} * blockDim.x;
    for (int64_t p = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; p < a.count; p += step) {
      // Indices are 32-bit: products with strides take half the instructions of 64-bit ones.
      uint32_t outer, middle, inner;
      if (p >> 32) {
        const int64_t run = p / a.inner.divisor;
        outer = static_cast<uint32_t>(run / a.middle.divisor), middle = static_cast<uint32_t>(run % a.middle.divisor);
        inner = static_cast<uint32_t>(p - run * a.inner.divisor);
      } else {
        const uint32_t run = a.inner.Div(static_cast<uint32_t>(p));
        outer = a.middle.Div(run), middle = run - outer * a.middle.divisor;
        inner = static_cast<uint32_t>(p) - run * a.inner.divisor;
      }
      if constexpr (kPacks) middle *= kRows;
      const int64_t column = static_cast<int64_t>(inner) * (kPacks ? N : 1);
      const int64_t at[kIn] = {(outer * a.in_stride[I][0] + (kShared >> I & 1 ? 0 : middle * a.in_stride[I][1]) +
                                (kColumns >> I & 1 ? 0 : column))...};
      const int64_t to[kOut] = {(outer * a.out_stride[J][0] + middle * a.out_stride[J][1] + column)...};
      if constexpr (kPacks) {
        // The same columns of kRows rows. If the last row is missing, the first one is read again and not stored.
        Words x[kRows][kIn];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int64_t row = middle + r < a.middle_size ? r : 0;
          ((r > 0 && (kShared >> I & 1)
                ? void(x[r][I] = x[0][I])
                : LoadRow<(kColumns >> I & 1), (kShared >> I & 1)>(
                      x[r][I],
                      static_cast<const In*>(a.in[I]) + at[I] + (kShared >> I & 1 ? 0 : row * a.in_stride[I][1]),
                      policy)),
           ...);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (r > 0 && middle + r >= a.middle_size) break;
          Words y[kOut];
          Compute(f, x[r], y, InIndex(), OutIndex());
          ((Store<N * sizeof(Out)>(static_cast<Out*>(a.out[J]) + to[J] + r * a.out_stride[J][1], y[J])), ...);
        }
      } else {
        Element(f, a.in, a.out, at, to, InIndex(), OutIndex());
      }
    }
  }
};

// E: an Elementwise. kScalars: bits of operands that are scalars. kTiles: whole tiles, as above.
template <class E, uint32_t kScalars, bool kTiles> __global__ void __launch_bounds__(kThreads, E::kMinBlocks)
    FlatKernel(const __grid_constant__ typename E::Flat a) {
  E::template RunFlat<kScalars, kTiles>(a, typename E::InIndex(), typename E::OutIndex());
}
// E: an Elementwise. kPacks: rows are whole packs. kColumns, kShared: bits of operands, as above.
template <class E, bool kPacks, uint32_t kColumns, uint32_t kShared>
__global__ void __launch_bounds__(kThreads, E::kMinBlocks)
    StridedKernel(const __grid_constant__ typename E::Strided a) {
  E::template RunStrided<kPacks, kColumns, kShared>(a, typename E::InIndex(), typename E::OutIndex());
}

// jaxkern/_ops/elementwise/plan.py writes this layout.
static_assert(sizeof(FlatArgs<2, 1, 0>) == 56 && sizeof(StridedArgs<2, 1, 1>) == 120);

}  // namespace jaxkern
