// RMSNorm and LayerNorm of rows of any width, at any address (N = 1), and their gradients.
//
//     NormStream<Norm<...>, N, epilogue>   forward: `blocks` blocks walk over the rows; a block reads a row twice
//     NormRowStats<Norm<...>, N>     backward, first: the numbers of each row that dx depends on; a block reads a row twice
//     NormColumns<Norm<...>, N>      backward, second: dx, and sums over the rows of a part; a thread owns N columns
//
// Means and variances are merged pairwise (Chan, Golub and LeVeque, 1983).
#pragma once

#include "norm.cuh"

namespace jaxkern {

constexpr int kNormStreamThreads = 512, kNormColumnThreads = 128;

// Mean and sum of squared deviations, divided by the width, of `count` elements.
template <class C> struct Moments {
  C count, mean, square;

  template <int N> __device__ __forceinline__ void Add(const C (&v)[N], C each) {
    const C part = Fold(v, SumOf()) / C(N);
    C squares[N];
#pragma unroll
    for (int j = 0; j < N; ++j) squares[j] = (v[j] - part) * each * (v[j] - part);
    const C total = count + C(N), delta = part - mean, share = C(N) / total;
    mean += delta * share;
    square += Fold(squares, SumOf()) + delta * each * delta * (count * share);
    count = total;
  }
};

// Calls f(column, v) for the packs of the row at `first` that are this thread's, in order.
template <class T, int N, class F> __device__ __forceinline__ void EachPack(const NormParams& p, const F& f) {
#pragma unroll 4
  for (int64_t c = int64_t{threadIdx.x} * N; c < p.width; c += kNormStreamThreads * N) f(c);
}

// Mean and rstd of a row; load(column, v) reads a pack of it. The whole block takes part.
template <class Op, int N, class Load> __device__ __forceinline__ void RowStats(const NormParams& p, const Load& load,
                                                                                typename Op::C* mean,
                                                                                typename Op::C* rstd) {
  using C = typename Op::C;
  constexpr int kWarps = kNormStreamThreads / kWarp;
  __shared__ C room[2][kWarps][1];
  const C each = C(1) / static_cast<C>(p.width);
  C square[1] = {0};
  *mean = 0;
  if constexpr (Op::kCentre) {
    Moments<C> own = {0, 0, 0};
    EachPack<typename Op::T, N>(p, [&](int64_t column) {
      C v[N];
      load(column, v);
      own.Add(v, each);
    });
    C total[1] = {own.mean * (own.count * each)};
    RowSums<0, kNormStreamThreads>(total, room[0]);
    *mean = total[0];
    square[0] = own.square + (own.mean - *mean) * each * (own.mean - *mean) * own.count;
  } else {
    EachPack<typename Op::T, N>(p, [&](int64_t column) {
      C v[N];
      load(column, v);
#pragma unroll
      for (int j = 0; j < N; ++j) square[0] += v[j] * each * v[j];
    });
  }
  __syncthreads();  // every thread has read the rooms of the row before
  RowSums<0, kNormStreamThreads>(square, room[1]);
  *rstd = InverseRoot(square[0] + static_cast<C>(p.eps));
}

// A row that a block reads twice: for its statistics, and normalised.
template <class Op, int N, class E> struct StreamedRow {
  using T = typename Op::T;
  using P = typename Op::P;
  using C = typename Op::C;
  const typename E::Params& p;
  int64_t row, first;
  C mean, rstd;

  // The whole block takes part. Its barriers make the sums with the residual, which all threads write, visible to all.
  __device__ __forceinline__ StreamedRow(const typename E::Params& params, int64_t number, ReadPolicy policy)
      : p(params), row(number), first(number * params.width) {
    const auto load = [&](int64_t column, C(&v)[N]) {
      auto x = LoadPack<T, N>(p.x, first + column, policy);
      if constexpr (Op::kResidual) {
        x = Added(x, LoadPack<T, N>(p.residual, first + column, policy));
        StorePack(p.sum, first + column, x);
      }
      Unpack(x, v);
    };
    RowStats<Op, N>(p, load, &mean, &rstd);
  }

  __device__ __forceinline__ void Normalise(int64_t column, C (&v)[N]) const {
    C scale[N], bias[N];
    Unpack(LoadVector<T, N>(static_cast<const T*>(Op::kResidual ? p.sum : p.x) + first + column), v);
    if constexpr (Op::kScale) LoadParameters<P, N>(p.scale, column, scale);
    if constexpr (Op::kBias) LoadParameters<P, N>(p.bias, column, bias);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      v[j] = (v[j] - mean) * rstd;
      if constexpr (Op::kScale) v[j] *= scale[j];
      if constexpr (Op::kBias) v[j] += bias[j];
    }
    E::Apply(p, row, column, v);
  }
};

template <class Op, int N, class E = NoEpilogue> __global__ void __launch_bounds__(kNormStreamThreads)
    NormStream(const __grid_constant__ typename E::Params p) {
  using T = typename Op::T;
  using C = typename Op::C;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  for (int64_t row = blockIdx.x; row < p.rows; row += p.blocks) {
    const StreamedRow<Op, N, E> of(p, row, policy);
    EachPack<T, N>(p, [&](int64_t column) {
      C v[N];
      of.Normalise(column, v);
      StorePack(p.y, row * p.width + column, Repack<typename Op::O, N>(v));
    });
  }
}

// What dx depends on, for each row, in scratch.
template <class C> struct RowGradient {
  C mean, rstd, shift, slope;  // mean(h), mean(h * z)
};

template <class Op, int N> __global__ void __launch_bounds__(kNormStreamThreads)
    NormRowStats(const __grid_constant__ NormParams p) {
  using T = typename Op::T;
  using O = typename Op::O;
  using P = typename Op::P;
  using C = typename Op::C;
  __shared__ C room[kNormStreamThreads / kWarp][2];
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  const C each = C(1) / static_cast<C>(p.width);
  for (int64_t row = blockIdx.x; row < p.rows; row += p.blocks) {
    const int64_t first = row * p.width;
    C mean, rstd;
    const auto load = [&](int64_t column, C(&v)[N]) { Unpack(LoadPack<T, N>(p.x, first + column, policy), v); };
    RowStats<Op, N>(p, load, &mean, &rstd);
    C sums[2] = {0, 0};
    EachPack<T, N>(p, [&](int64_t column) {
      C z[N], h[N], scale[N];
      load(column, z);
      Unpack(LoadPack<O, N>(p.g, first + column, policy), h);
      if constexpr (Op::kScale) LoadParameters<P, N>(p.scale, column, scale);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if constexpr (Op::kScale) h[j] = Rounded(h[j], scale[j]);
        sums[0] += h[j];
        sums[1] += h[j] * ((z[j] - mean) * rstd);
      }
    });
    RowSums<0, kNormStreamThreads>(sums, room);
    if (threadIdx.x == 0) {
      static_cast<RowGradient<C>*>(p.sum)[row] = {mean, rstd, Op::kCentre ? sums[0] * each : C(0), sums[1] * each};
    }
  }
}

// Block (x, y): columns of tile x, rows of part y of `blocks`.
template <class Op, int N> __global__ void __launch_bounds__(kNormColumnThreads)
    NormColumns(const __grid_constant__ NormParams p) {
  using T = typename Op::T;
  using O = typename Op::O;
  using P = typename Op::P;
  using C = typename Op::C;
  const int64_t column = (int64_t{blockIdx.x} * kNormColumnThreads + threadIdx.x) * N;
  if (column >= p.width) return;
  const ReadPolicy policy = MakeReadPolicy(p.exceeds_l2);
  C scale[N], dscale[N] = {}, dbias[N] = {};
  if constexpr (Op::kScale) LoadParameters<P, N>(p.scale, column, scale);
#pragma unroll 4
  for (int64_t row = blockIdx.y; row < p.rows; row += p.blocks) {
    const int64_t at = row * p.width + column;
    const RowGradient<C> r = static_cast<const RowGradient<C>*>(p.sum)[row];
    C z[N], g[N], more[N];
    Unpack(LoadPack<T, N>(p.x, at, policy), z);
    Unpack(LoadPack<O, N>(p.g, at, policy), g);
    if constexpr (Op::kResidual) Unpack(LoadPack<T, N>(p.residual, at, policy), more);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      z[j] = (z[j] - r.mean) * r.rstd;
      dscale[j] += g[j] * z[j];
      dbias[j] += g[j];
      if constexpr (Op::kScale) g[j] = Rounded(g[j], scale[j]);
      g[j] = r.rstd * (g[j] - r.shift - z[j] * r.slope);
      if constexpr (Op::kResidual) g[j] += more[j];
    }
    StorePack(p.y, at, Repack<T, N>(g));
  }
  C* const partial = static_cast<C*>(p.partial) + blockIdx.y * p.width + column;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if constexpr (Op::kScaleSum) partial[j] = dscale[j];
    if constexpr (Op::kBias) partial[(Op::kScaleSum ? p.blocks * p.width : 0) + j] = dbias[j];
  }
}

}  // namespace jaxkern
