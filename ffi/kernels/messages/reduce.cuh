// Messages reduced by row: out[r, :] = reduction of f(operands of e) over the edges e of row r.
//
//     EdgeReduce<F, Op, N, kParts, kSplit, U, Types<results...>, operands...>    rows, and chunks of long rows
//     FoldChunks<Op, T>                                                          long rows, of their chunks
//
// A group of `lanes` threads handles one row: each thread owns kParts vectors of N features, spread by `lanes` vectors,
// and walks the edges of the row with U edges in flight: it loads their indices, then their operands, and accumulates f
// in the computing type of the result. Operands that are the same for all edges of a row are read once. Narrow rows have
// kSplit times as many threads; each takes every kSplit-th edge, and a shuffle adds their sums.
//
// A row of more than `chunk` edges is long. The order of edges is cut into chunks of that many positions. Two groups of
// threads belong to each chunk: one reduces the chunk's part of a long row that its first position belongs to, one that
// of a long row that its last position belongs to, if that is another row. Each writes its partial to a slot of its own
// (2 * chunk, 2 * chunk + 1), and FoldChunks combines the slots of a row in order. A long row crosses the end of the
// chunk that it begins in, so each of its positions belongs to just one slot.
//
// Every row is written once, by EdgeReduce or by FoldChunks; nothing depends on timing. Memory traffic: per edge its
// indices and the rows of its operands, per row the result.
#pragma once

#include "operands.cuh"

namespace jaxkern {

struct ReducedArgs {
  void* out;        // [rows, width]
  void* partials;   // [2 * chunks, width], as messages are accumulated
  uint32_t* edges;  // [rows, width]: the first edge that attains out, where that is asked for
};

template <int kOperands, int kResults> struct ReduceArgs {
  EdgeArgs edges;
  OperandArgs operand[kOperands];
  ReducedArgs result[kResults];
  FeatureArgs features;
  uint32_t lanes;          // threads of a row, except for kSplit
  uint32_t items;          // rows that a block has
  uint32_t chunk, chunks;  // chunks: 0 where no row can be long
  FastDivmod by_lanes;     // the threads of a row that one block has
};
static_assert(sizeof(ReduceArgs<1, 1>) == 40 + 24 + 24 + 28 + 16 + 12);

// Positions of one row, and where what they are reduced to goes.
struct Span {
  uint32_t row, begin, end;
  bool whole, partial;  // all edges of the row, or a part of them; neither: there is nothing to do
};

__device__ __forceinline__ Span RowOf(const EdgeArgs& a, uint32_t row) {
  const uint32_t end = min(__ldg(a.offsets + row + 1), a.edges);
  return {row, min(__ldg(a.offsets + row), end), end, true, false};
}

// The part of chunk `slot / 2` that a long row has which its first (even slots) or last position belongs to.
__device__ __forceinline__ Span PartOf(const EdgeArgs& a, uint32_t slot, uint32_t chunk) {
  const uint32_t first = slot / 2 * chunk, last = min(first + chunk, a.edges) - 1;
  const uint32_t head = __ldg(a.keys + first), tail = __ldg(a.keys + last);
  const uint32_t row = slot % 2 ? tail : head;
  if (row >= a.rows || (slot % 2 && head == tail)) return {0, 0, 0, false, false};
  Span s = RowOf(a, row);
  s.whole = false;
  s.partial = s.end - s.begin > chunk;
  s.begin = max(s.begin, first);
  s.end = s.partial ? min(s.end, last + 1) : s.begin;
  return s;
}

template <class F, Reduce kOp, int N, int kParts, int kSplit, int U, class Results, class... Operands>
struct EdgeReducer;
template <class F, Reduce kOp, int N, int kParts, int kSplit, int U, class... T, class... Operands>
struct EdgeReducer<F, kOp, N, kParts, kSplit, U, Types<T...>, Operands...> {
  using Args = ReduceArgs<sizeof...(Operands), sizeof...(T)>;
  using V = Vectors<N, Operands...>;
  using Messages = Tuple<Value<T>...>;  // of one feature
  using Totals = Tuple<Total<kOp, Value<T>>...>;

  template <size_t... r> static __device__ __forceinline__ void Run(const Args& a, std::index_sequence<r...>) {
    const uint32_t split = threadIdx.x % kSplit, unit = threadIdx.x / kSplit, own_item = a.by_lanes.Div(unit);
    const uint32_t lane = blockIdx.y * a.by_lanes.divisor + unit - own_item * a.by_lanes.divisor;
    const uint32_t item = blockIdx.x * a.items + own_item, slots = 2 * a.chunks;
    Span s = {0, 0, 0, false, false};
    if (own_item < a.items && lane < a.lanes) {
      if (item < slots) {
        s = PartOf(a.edges, item, a.chunk);
      } else if (item - slots < a.edges.rows) {
        s = RowOf(a.edges, item - slots);
        if (a.chunks && s.end - s.begin > a.chunk) s = {0, 0, 0, false, false};
      }
    }
    const char* from[kParts][V::kOperands];
    uint32_t column[kParts];
    bool has[kParts];
    V own[kParts];
    Totals total[kParts][N];
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      column[p] = (lane + p * a.lanes) * N;
      has[p] = p == 0 || column[p] < a.features.width;
      if (!has[p]) column[p] = lane * N;  // reads what it has anyway, and is not written
      V::Find(a.operand, a.features, column[p], from[p]);
      if (s.begin < s.end) own[p].Load(a.operand, from[p], {s.row, 0, 0}, OfRows());
#pragma unroll
      for (int n = 0; n < N; ++n) ((Get<r>(total[p][n]) = Neutral<kOp, Value<T>>()), ...);
    }
    const F f;
    Places at[U];
    const auto find = [&](uint32_t first) {
      const uint32_t *const other = InRegisters(a.edges.other + first), *const order =
                                                                            InRegisters(a.edges.order + first);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        at[u].row = s.row;
        if (first + u * kSplit >= s.end) continue;
        if (V::kReadsOther) at[u].other = __ldg(other + u * kSplit);
        if (V::kReadsEdge) at[u].edge = __ldg(order + u * kSplit);
      }
    };
    uint32_t position = s.begin + split;
    find(position);
    while (position < s.end) {
      V edge[U][kParts];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (position + u * kSplit >= s.end) continue;
#pragma unroll
        for (int p = 0; p < kParts; ++p) edge[u][p].Load(a.operand, from[p], at[u], OfEdges());
      }
      find(position + U * kSplit);  // the next indices come while this group's operands do
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (position + u * kSplit >= s.end) continue;
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
#pragma unroll
          for (int n = 0; n < N; ++n) {
            Messages y;
            edge[u][p].Apply(f, own[p], n, Get<r>(y)...);
            ((Get<r>(total[p][n]) = Combine<kOp>(Get<r>(total[p][n]), AsTotal<kOp>(Get<r>(y), position + u * kSplit))),
             ...);
          }
        }
      }
      position += U * kSplit;
    }
    if constexpr (kSplit > 1) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          ((Get<r>(total[p][n]) = CombineLanes<kOp, kSplit>(Get<r>(total[p][n]))), ...);
        }
      }
      if (split) return;
    }
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      if (!has[p]) continue;  // s is empty, and nothing is written, in threads beyond the lanes of a row
      if (s.whole) (Write<r, T>(a, s, column[p], total[p]), ...);
      else if (s.partial) (Put<r, T>(a, item, column[p], total[p]), ...);
    }
  }

  template <int r, class R> static __device__ __forceinline__ void Write(const Args& a, const Span& s, uint32_t column,
                                                                         const Totals (&total)[N]) {
    Elements<R, N> y;
#pragma unroll
    for (int n = 0; n < N; ++n) y.Set(n, Finish<kOp>(Get<r>(total[n]), s.end - s.begin));
    const int64_t to = static_cast<int64_t>(s.row) * a.features.width + column;
    y.Store(static_cast<R*>(a.result[r].out) + to);
    if constexpr (HasPlace(kOp)) {
#pragma unroll
      for (int n = 0; n < N; ++n) a.result[r].edges[to + n] = EdgeOf(a.edges, Get<r>(total[n]));
    }
  }

  template <int r, class R>
  static __device__ __forceinline__ void Put(const Args& a, uint32_t slot, uint32_t column, const Totals (&total)[N]) {
    auto* const to = static_cast<Total<kOp, Value<R>>*>(a.result[r].partials) +
                     static_cast<int64_t>(slot) * a.features.width + column;
#pragma unroll
    for (int n = 0; n < N; ++n) to[n] = Get<r>(total[n]);
  }
};

// F's operator() takes an element of each operand, then a reference for each result, in computing types.
template <class F, Reduce kOp, int N, int kParts, int kSplit, int U, class Results, class... Operands>
__global__ void __launch_bounds__(kMessageThreads)
    EdgeReduce(const __grid_constant__ ReduceArgs<sizeof...(Operands), Results::kCount> a) {
  EdgeReducer<F, kOp, N, kParts, kSplit, U, Results, Operands...>::Run(a, std::make_index_sequence<Results::kCount>());
}

// --- Long rows -----------------------------------------------------------------------------------------

// A block looks at kFoldChunks chunks for long rows that begin there. If a row has few slots, one group of its threads
// combines them in order. If a row has many, all groups combine some of them, and a tree in shared memory combines the
// results of the groups.
constexpr int kFoldThreads = 512, kFoldChunks = kWarp, kFoldInFlight = 8, kFewSlots = 16;

struct FoldArgs {
  EdgeArgs edges;
  ReducedArgs result;
  uint32_t width, chunk, chunks;
};
static_assert(sizeof(FoldArgs) == 40 + 24 + 16);

template <Reduce kOp, class T, int kColumns> struct Folding {
  using C = Total<kOp, Value<T>>;
  const FoldArgs& a;
  uint32_t column;

  // Combines the slots of a row from position `begin` on, those at first + group, first + group + groups, ..., last.
  __device__ __forceinline__ C Combined(uint32_t begin, uint32_t first, uint32_t last, uint32_t group,
                                        uint32_t groups) const {
    const C* const partials = static_cast<const C*>(a.result.partials) + column;
    C total = Neutral<kOp, Value<T>>();
    for (uint32_t i = first + group; i <= last; i += groups * kFoldInFlight) {
      C part[kFoldInFlight];
#pragma unroll
      for (int u = 0; u < kFoldInFlight; ++u) {
        const uint32_t at = i + u * groups;
        const int64_t slot = 2 * static_cast<int64_t>(at) + (at == first && begin != first * a.chunk);
        part[u] = at <= last ? partials[slot * a.width] : Neutral<kOp, Value<T>>();
      }
#pragma unroll
      for (int u = 0; u < kFoldInFlight; ++u) total = Combine<kOp>(total, part[u]);
    }
    return total;
  }

  __device__ __forceinline__ void Write(uint32_t row, uint32_t count, C total) const {
    Elements<T, 1> y;
    y.Set(0, Finish<kOp>(total, count));
    const int64_t to = static_cast<int64_t>(row) * a.width + column;
    y.Store(static_cast<T*>(a.result.out) + to);
    if constexpr (HasPlace(kOp)) a.result.edges[to] = EdgeOf(a.edges, total);
  }
};

template <Reduce kOp, class T, int kColumns> __global__ void __launch_bounds__(kFoldThreads)
    FoldChunks(const __grid_constant__ FoldArgs a) {
  using C = Total<kOp, Value<T>>;
  constexpr uint32_t kGroups = kFoldThreads / kColumns;
  __shared__ C shared[kGroups][kColumns];
  const uint32_t column = blockIdx.y * kColumns + threadIdx.x % kColumns, group = threadIdx.x / kColumns;
  const uint32_t lane = threadIdx.x % kWarp;
  const Folding<kOp, T, kColumns> fold = {a, column};
  // Every warp of the block looks at the same chunks, a lane at each, and finds the same.
  const uint32_t own = blockIdx.x * kFoldChunks + lane, end = (own + 1) * a.chunk;
  Span found = {0, 0, 0, false, false};
  bool begins = false;
  if (own < a.chunks && end < a.edges.edges) {
    // A long row that crosses the end of a chunk is also at half a chunk before it, or at half a chunk after it.
    const uint32_t row = __ldg(a.edges.keys + end - 1), before = __ldg(a.edges.keys + end - a.chunk / 2),
                   behind = __ldg(a.edges.keys + min(end + a.chunk / 2, a.edges.edges - 1));
    if (row < a.edges.rows && (row == before || row == behind)) {
      found = RowOf(a.edges, row);
      begins = found.end - found.begin > a.chunk && found.begin / a.chunk == own;
    }
  }
  const uint32_t long_rows = __ballot_sync(~0u, begins);
  uint32_t many = 0, turn = 0;
  for (uint32_t left = long_rows; left; left &= left - 1, ++turn) {
    const int from = __ffs(left) - 1;
    const uint32_t row = __shfl_sync(~0u, found.row, from), begin = __shfl_sync(~0u, found.begin, from),
                   stop = __shfl_sync(~0u, found.end, from);
    const uint32_t first = blockIdx.x * kFoldChunks + from, last = (stop - 1) / a.chunk;
    if (last - first >= kFewSlots) many |= 1u << from;
    else if (turn % kGroups == group && column < a.width)
      fold.Write(row, stop - begin, fold.Combined(begin, first, last, 0, 1));
  }
  for (; many; many &= many - 1) {
    const int from = __ffs(many) - 1;
    const uint32_t row = __shfl_sync(~0u, found.row, from), begin = __shfl_sync(~0u, found.begin, from),
                   stop = __shfl_sync(~0u, found.end, from);
    const uint32_t first = blockIdx.x * kFoldChunks + from, last = (stop - 1) / a.chunk;
    shared[group][threadIdx.x % kColumns] =
        column < a.width ? fold.Combined(begin, first, last, group, kGroups) : Neutral<kOp, Value<T>>();
    __syncthreads();
    for (uint32_t step = kGroups / 2; step > 0; step /= 2) {
      if (group < step) {
        C& mine = shared[group][threadIdx.x % kColumns];
        mine = Combine<kOp>(mine, shared[group + step][threadIdx.x % kColumns]);
      }
      __syncthreads();
    }
    if (group == 0 && column < a.width) fold.Write(row, stop - begin, shared[0][threadIdx.x]);
    __syncthreads();  // before shared memory is written for the next row
  }
}

}  // namespace jaxkern
