// A message for every edge: out[e, :] = f(operands of e), or sums of it over some features.
//
//     EdgeMap<F, N, U, Types<results...>, operands...>              out [edges, width]
//     EdgeDot<F, N, kLanes, U, Types<results...>, operands...>      out [edges, kept]: sums over the inner features
//
// Edges are handled in the order of their rows, so that neighbouring threads read the same rows of operands from the
// cache; a thread has U of them in flight. In EdgeMap it owns a vector of N features. In EdgeDot a group of kLanes
// threads owns all features that belong to one sum, kLanes vectors at a time, and adds up by shuffles. An edge that
// belongs to no row gets 0. Each element of out is written once; sums are in the computing type of the result.
#pragma once

#include "operands.cuh"

namespace jaxkern {

template <int kOperands, int kResults> struct MapArgs {
  EdgeArgs edges;
  OperandArgs operand[kOperands];
  void* out[kResults];
  FeatureArgs features;
  uint32_t kept, summed;  // sums of an edge, and the features of each; EdgeMap: vectors of an edge, and N
  Divider by_kept;
};
static_assert(sizeof(MapArgs<1, 1>) == 40 + 24 + 8 + 40 + 24);

// What a thread has of one edge: whether there is one at the position, whether it belongs to a row, and its places.
struct EdgeAt {
  bool exists, valid;
  Places at;
};

__device__ __forceinline__ EdgeAt FindEdge(const EdgeArgs& a, int64_t position, bool reads_other) {
  EdgeAt e = {position < a.edges, false, {0, 0, 0}};
  if (!e.exists) return e;
  e.at.row = __ldg(a.keys + position);
  e.at.edge = min(__ldg(a.order + position), a.edges - 1);
  if (reads_other) e.at.other = __ldg(a.other + position);
  e.valid = e.at.row < a.rows;
  return e;
}

template <class F, int N, int kLanes, int U, class Results, class... Operands> struct EdgeMapper;
template <class F, int N, int kLanes, int U, class... T, class... Operands>
struct EdgeMapper<F, N, kLanes, U, Types<T...>, Operands...> {
  using Args = MapArgs<sizeof...(Operands), sizeof...(T)>;
  using V = Vectors<N, Operands...>;

  template <size_t... r> static __device__ __forceinline__ void Map(const Args& a, std::index_sequence<r...>) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kMessageThreads + threadIdx.x;
    const int64_t item = a.by_kept.Div(thread);
    const uint32_t column = static_cast<uint32_t>(thread - item * a.kept) * N;
    const char* from[V::kOperands];
    V::Find(a.operand, a.features, column, from);
    EdgeAt e[U];
    V edge[U];
#pragma unroll
    for (int u = 0; u < U; ++u) e[u] = FindEdge(a.edges, item * U + u, V::kReadsOther);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (e[u].valid) edge[u].Load(a.operand, from, e[u].at, Always());
    }
    const F f;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!e[u].exists) continue;
      Tuple<Elements<T, N>...> y;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        Tuple<Value<T>...> v;
        ((Get<r>(v) = Value<T>(0)), ...);
        if (e[u].valid) edge[u].Apply(f, edge[u], n, Get<r>(v)...);
        (Get<r>(y).Set(n, Get<r>(v)), ...);
      }
      const int64_t to = static_cast<int64_t>(e[u].at.edge) * a.features.width + column;
      (Get<r>(y).Store(static_cast<T*>(a.out[r]) + to), ...);
    }
  }

  template <size_t... r> static __device__ __forceinline__ void Dot(const Args& a, std::index_sequence<r...>) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kMessageThreads + threadIdx.x;
    const uint32_t lane = threadIdx.x % kLanes;
    const int64_t unit = thread / kLanes, item = a.by_kept.Div(unit);
    const uint32_t kept = static_cast<uint32_t>(unit - item * a.kept);
    EdgeAt e[U];
    Tuple<Value<T>...> total[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      e[u] = FindEdge(a.edges, item * U + u, V::kReadsOther);
      ((Get<r>(total[u]) = Value<T>(0)), ...);
    }
    const F f;
    for (uint32_t i = lane * N; i < a.summed; i += kLanes * N) {
      const char* from[V::kOperands];
      V::Find(a.operand, a.features, kept * a.summed + i, from);
      V edge[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (e[u].valid) edge[u].Load(a.operand, from, e[u].at, Always());
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (!e[u].valid) continue;
#pragma unroll
        for (int n = 0; n < N; ++n) {
          Tuple<Value<T>...> y;
          edge[u].Apply(f, edge[u], n, Get<r>(y)...);
          ((Get<r>(total[u]) += Get<r>(y)), ...);
        }
      }
    }
    const auto add = [](auto x, auto y) { return x + y; };
#pragma unroll
    for (int u = 0; u < U; ++u) ((Get<r>(total[u]) = ReduceLanes<kLanes>(Get<r>(total[u]), add)), ...);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (lane == u % kLanes && e[u].exists) (Write<T>(a.out[r], a, e[u].at.edge, kept, Get<r>(total[u])), ...);
    }
  }

  template <class R>
  static __device__ __forceinline__ void Write(void* out, const Args& a, uint32_t edge, uint32_t kept, Value<R> x) {
    Elements<R, 1> y;
    y.Set(0, x);
    y.Store(static_cast<R*>(out) + static_cast<int64_t>(edge) * a.kept + kept);
  }
};

template <class F, int N, int U, class Results, class... Operands> __global__ void __launch_bounds__(kMessageThreads)
    EdgeMap(const __grid_constant__ MapArgs<sizeof...(Operands), Results::kCount> a) {
  EdgeMapper<F, N, 1, U, Results, Operands...>::Map(a, std::make_index_sequence<Results::kCount>());
}

template <class F, int N, int kLanes, int U, class Results, class... Operands>
__global__ void __launch_bounds__(kMessageThreads)
    EdgeDot(const __grid_constant__ MapArgs<sizeof...(Operands), Results::kCount> a) {
  EdgeMapper<F, N, kLanes, U, Results, Operands...>::Dot(a, std::make_index_sequence<Results::kCount>());
}

}  // namespace jaxkern
