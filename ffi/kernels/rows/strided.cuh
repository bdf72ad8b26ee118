// Row functions of rows that are not contiguous: the row is not the last dimension of its arrays.
//
//     StridedRowsKernel<F, N, kLanes, kPacks, kThreads, kMinBlocks, kBlocks, kStage, kStreams, kSame, kShifted>
//     JoinPartsKernel<F, kStage, kLanes, kThreads>    (parts.cuh)
//
// F and its stages are as in rows.cuh. Rows that are adjacent in memory are computed together: a thread reads the same element of N
// rows at once, and kLanes threads side by side read kLanes * N rows, the tile of a block. The kThreads / kLanes groups of
// such threads share the elements of a tile: group g has elements g, g + groups, and so on. Groups join what they have reduced through
// shuffles and shared memory, always in the same order.
//
// kStage = -1: a block, or a cluster of kBlocks blocks (sm_90 and newer), computes a tile in one launch. A thread holds all of its
// elements, kPacks of each row, in registers. With kStreams it has more of them, and each stage reads them again, kPacks at a time.
//
// kStage >= 0, with kStreams: `parts` blocks share the elements of a tile. The launch with kStage = s < F::kStages reduces stage s of each
// part and leaves the result in scratch, where JoinPartsKernel<F, s> joins all parts of a row in order. The launch with
// kStage = F::kStages, if F has results that are rows, or sums over rows, computes those. Numbers are stored where the last
// stage is joined.
//
// Memory traffic: each row is read once, with kStreams once for each stage and for the results; each result is written once.
//
// Sums over rows: each block writes the sums of its own rows, one for each element of a row. SumOverBlocks adds
// them in order.
// Bit k of kSame: array k of rows is the same in rows that are adjacent.
// On entry: rows start on N elements in all other arrays, and the number of adjacent rows is a multiple of N.
//
// kShifted: any number of adjacent rows. The elements of a row start at different places of a pack then, but the elements of one group
// all start at the same place, because the number of groups times the number of adjacent rows is a multiple of N. So each group
// reads aligned packs, which start up to N - 1 rows before the tile, and a thread has the same rows in all of them. Rows
// before and behind the tile are not stored. All groups have kLanes * N - N + 1 rows. Those are a tile, and packs at its ends are stored
// element by element; of 32 lanes, a tile is the packs that start in the first kLanes * N - 2 * N of these rows, so that packs
// are stored as a whole. Arrays that are not in kSame have the same shape.
#pragma once

#include "parts.cuh"

namespace jaxkern {

template <class F, int N, int kLanes, int kPacks, int kThreads, int kBlocks, int kStage, bool kStreams, uint32_t kSame,
          bool kShifted>
struct StridedRows {
  using Engine = RowEngine<F>;
  using Stages = typename Engine::Stages;
  using Numbers = typename Engine::Numbers;
  using Packs = typename Engine::template RowPacks<N>;
  template <int p> using Value = typename Stages::template Value<p>;
  template <int p> using Reduced = typename Engine::template Reduced<p>;
  template <int s> using Partial = typename Engine::template Partial<s>;
  static constexpr int kRows = Engine::kRows, kResults = Engine::kResults;
  static constexpr int kGroups = kThreads / kLanes, kTile = kGroups * kPacks;  // elements of all groups at a time
  static constexpr bool kAlone = kStage < 0;                                   // the block computes all of its rows
  // Whether absent elements are skipped by a branch, where the compiler also reduces them, so that one load is in flight. With packs of
  // 16 bits that are held, or shifted, threads are enough to hide that, and registers few.
  static constexpr bool kBranches = kShifted || (!kStreams && N > 4), kBeside = kStreams && !kShifted;
  static constexpr bool kPacked = kLanes == kWarp;  // with kShifted: tiles are packs
  static constexpr int kTileRows = kPacked ? (kLanes - 2) * N : kLanes * N - N + 1;

  const StridedRowArgs<F>& a;
  GroupRoom<F, N, kLanes, kThreads, kBlocks, kShifted>& room;
  int64_t at[kRows + 1], to[kResults + 1], row, tile;
  int begin, end;  // elements of this block
  bool live;
  int shift, low, high;  // with kShifted: rows [low, high) of the N of this thread are in the tile, or none
  bool over;             // the last pack of this thread ends beyond the arrays
  ReadPolicy policy;
  Numbers n[N];
  typename Engine::template Held<N, 1> held[kPacks];
  typename Engine::template ColumnPacks<1> beside[kBeside ? kPacks : 1];  // columns of these elements, read with them

  // Whether row i of the N of this thread is in the tile.
  __device__ __forceinline__ bool Has(int i) const { return kShifted ? i >= low && i < high : live; }
  // Its index; of another row if it is not in the tile.
  __device__ __forceinline__ int64_t RowOf(int i) const {
    return kShifted ? min(max(row + i, int64_t{0}), a.rows.rows - 1) : row + i;
  }

  // Calls f(k, element) for the elements of this thread among the kTile from `first` on that are less than `bound`.
  template <class Do> __device__ __forceinline__ void Each(int first, int bound, Do f) {
    const int own = first + static_cast<int>(threadIdx.x) / kLanes;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (own + k * kGroups < bound) f(k, own + k * kGroups);
    }
  }
  template <class Do> __device__ __forceinline__ void Each(int first, Do f) { Each(first, end, f); }
  // Calls f(first) for all elements of this block, which are in registers then. What stage `kAt - 1` has read last may still be in L2:
  // every other stage begins at the end.
  template <int kAt, class Do> __device__ __forceinline__ void EachTile(Do f) {
    if constexpr (kStreams) {
      const int tiles = (end - begin + kTile - 1) / kTile;
      for (int t = 0; t < tiles; ++t) {
        const int first = begin + (kAt % 2 ? tiles - 1 - t : t) * kTile;
        LoadAll(first, typename Engine::RowIndex());
        f(first);
      }
    } else {
      f(begin);
    }
  }

  template <bool same, class R> __device__ __forceinline__ Pack<R, N> LoadOne(bool has, const R* from) {
    if constexpr (!kBranches && !same && N > 1 && N * sizeof(R) <= 16) return LoadVectorIf<R, N>(has, from, policy);
    if (!has) return ZeroPack<R, N>();
    if constexpr (same) return Filled<R, N>(Element(LoadRowElement<R>(from, policy), 0));
    else return LoadRowPack<R, N>(from, policy);
  }
  // Element k of this thread, whose first one lies at `from`.
  template <class... R, size_t... I> __device__ __forceinline__ void Load(bool has, Packs& pack, int k,
                                                                          const int64_t (&from)[kRows + 1], Types<R...>,
                                                                          std::index_sequence<I...>) {
    ((At<I>(pack) = LoadOne<(kSame >> I & 1) != 0>(
          has, static_cast<const R*>(a.rows.row[I]) + from[I] + k * (kGroups * a.row_stride[I]))),
     ...);
  }
  // The same for rows of the tile alone.
  template <bool same, class R> __device__ __forceinline__ Pack<R, N> LoadPart(const R* from) {
    if constexpr (same) return LoadOne<same>(live, from);
    Pack<R, N> pack = ZeroPack<R, N>();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (Has(i)) SetElement(pack, i, from[i]);
    }
    return pack;
  }
  template <class... R, size_t... I>
  __device__ __forceinline__ void LoadPartOf(Packs& pack, int k, const int64_t (&from)[kRows + 1], Types<R...>,
                                             std::index_sequence<I...>) {
    ((At<I>(pack) = LoadPart<(kSame >> I & 1) != 0>(static_cast<const R*>(a.rows.row[I]) + from[I] +
                                                    k * (kGroups * a.row_stride[I]))),
     ...);
  }
  template <class... C, size_t... J>
  __device__ __forceinline__ void LoadColumns(int k, int element, Types<C...>, std::index_sequence<J...>) {
    ((At<J>(beside[k]) = LoadColumnElement(static_cast<const C*>(a.rows.column[J]) + element)), ...);
  }
  template <size_t J, class C> __device__ __forceinline__ auto Column(int k, int element) {
    if constexpr (kBeside) return Wide<C>(Element(At<J>(beside[k]), 0));
    else return Wide<C>(static_cast<const C*>(a.rows.column[J])[element]);
  }
  template <size_t... I> __device__ __forceinline__ void LoadAll(int first, std::index_sequence<I...> all) {
    const int own = first + static_cast<int>(threadIdx.x) / kLanes, bound = kShifted && over ? end - 1 : end;
    const int64_t from[kRows + 1] = {at[I] + own * a.row_stride[I]..., 0};
    if constexpr (kBranches) {
      Each(first, bound, [&](int k, int) { Load(live, held[k].x[0], k, from, typename F::Rows(), all); });
    } else {
#pragma unroll
      for (int k = 0; k < kPacks; ++k)
        Load(live && own + k * kGroups < bound, held[k].x[0], k, from, typename F::Rows(), all);
    }
    if constexpr (kBeside) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k)
        LoadColumns(k, min(own + k * kGroups, end - 1), typename F::Columns(), typename Engine::ColumnIndex());
    }
    if (kShifted && over) {
      Each(first, [&](int k, int element) {
        if (element == end - 1) LoadPartOf(held[k].x[0], k, from, typename F::Rows(), all);
      });
    }
  }

  template <int p, class... C, size_t... I, size_t... J>
  __device__ __forceinline__ Value<p> ValueOf(int k, int element, int i, const Numbers& numbers, Types<C...>,
                                              std::index_sequence<I...>, std::index_sequence<J...>) {
    Value<p> value;
    F::Reduce(Pass<p>(), numbers, element, element, held[k].kept[0][i], value, WideElement(At<I>(held[k].x[0]), i)...,
              Column<J, C>(k, element)...);
    if constexpr (p == 0 && Stages::kPicks > 0) {  // other rows of the thread pick other elements
      F::Pick(numbers, element, element, value, WideElement(At<I>(held[k].x[0]), i)..., Column<J, C>(k, element)...);
    }
    return value;
  }

  // Reduces the elements from `first` on in a pass. into(i): what row i has reduced so far.
  template <int p, class Into>
  __device__ __forceinline__ void ReduceAll(int first, const Numbers (&numbers)[N], Into into) {
    constexpr bool kWide = !std::is_same_v<Reduced<p>, Value<p>>;
    Value<p> own[N];  // of these elements, where they are added up in a wider type
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < N; ++i) own[i] = F::Neutral(Pass<p>());
    }
    Each(first, [&](int k, int element) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const Value<p> value = ValueOf<p>(k, element, i, numbers[i], typename F::Columns(), typename Engine::RowIndex(),
                                          typename Engine::ColumnIndex());
        if constexpr (kWide) own[i] = F::Combine(Pass<p>(), own[i], value);
        else into(i) = F::Combine(Pass<p>(), into(i), value);
      }
    });
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < N; ++i) Stages::template Add<p>(into(i), own[i]);
    }
  }

  // The same in a stage. Exponents are relative to the largest element of this thread so far.
  template <int s> __device__ __forceinline__ void ReduceStage(int first, Partial<s> (&sum)[N]) {
    constexpr int kFirst = F::FirstPass(s), kLast = F::LastPass(s);
    if constexpr (F::Pivots(s)) {
      float before[N];
      Numbers near[N];
#pragma unroll
      for (int i = 0; i < N; ++i) before[i] = sum[i].most.v0;
      ReduceAll<kFirst>(first, n, [&](int i) -> auto& { return sum[i].most; });
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float pivot = PivotOf(sum[i].most.v0);
        if constexpr (kStreams) F::Rescale(Pass<s>(), sum[i].sum, Stages::Factor(before[i] - pivot));
        near[i] = n[i];
        F::Pivot(Pass<s>(), near[i]) = pivot;
      }
      ReduceAll<kLast>(first, near, [&](int i) -> auto& { return sum[i].sum; });
    } else {
      ReduceAll<kFirst>(first, n, [&](int i) -> auto& { return sum[i]; });
    }
  }

  template <int s> __device__ __forceinline__ void Reduce(Partial<s> (&sum)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] = Stages::template Identity<s>(n[i]);
    EachTile<s>([&](int first) { ReduceStage<s>(first, sum); });
  }

  template <int s> __device__ __forceinline__ void RunStages() {
    if constexpr (s < F::kStages) {
      Partial<s> sum[N];
      Reduce<s>(sum);
      float most[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (F::Pivots(s)) most[i] = sum[i].most.v0;
      }
      JoinGroups<F, s, kShifted>(sum, room, shift);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        Stages::template After<s>(n[i], sum[i]);
        if constexpr (F::Pivots(s) && !kStreams) {
          Stages::template RescaleKept<s>(most[i], n[i], [&](auto f) {
#pragma unroll
            for (int k = 0; k < kPacks; ++k) f(held[k].kept[0][i]);
          });
        }
      }
      RunStages<s + 1>();
    }
  }

  // Stores the results of element k of this thread, and the sums of each element over the rows of this block. All threads of a warp take
  // part; `has`: whether there is such an element.
  template <class... R, class... C, class... Y, class... S, size_t... I, size_t... J, size_t... K, size_t... L>
  __device__ __forceinline__ void Store(bool has, int k, int element, const int64_t (&into)[kResults + 1], Types<R...>,
                                        Types<C...>, Types<Y...>, Types<S...>, std::index_sequence<I...>,
                                        std::index_sequence<J...>, std::index_sequence<K...>,
                                        std::index_sequence<L...>) {
    Slots<std::index_sequence<L...>, S...> sum;
    ((At<L>(sum) = 0), ...);
    if (has) {
      Slots<std::index_sequence<K...>, Pack<Y, N>...> y;
      ((At<K>(y) = ZeroPack<Y, N>()), ...);
      Slots<std::index_sequence<K...>, Own<Y>[N]...> value;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        Slots<std::index_sequence<L...>, S...> term;
        F::Result(n[i], element, element, held[k].kept[0][i], WideElement(At<I>(held[k].x[0]), i)...,
                  Column<J, C>(k, element)..., At<K>(value)[i]..., At<L>(term)...);
        (StoreElement(At<K>(y), i, At<K>(value)), ...);
        ((At<L>(sum) += Has(i) ? At<L>(term) : S(0)), ...);
      }
      const int64_t at[kResults + 1] = {into[K] + k * (kGroups * a.result_stride[K])..., 0};
      if (kShifted ? low == 0 && high == N : live) {
        (StoreRowPack(static_cast<Y*>(a.rows.result[K]) + at[K], At<K>(y)), ...);
      } else if (kShifted && low < high) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (Has(i)) ((static_cast<Y*>(a.rows.result[K])[at[K] + i] = Element(At<K>(y), i)), ...);
        }
      }
    }
    ((At<L>(sum) = ReduceLanes<kLanes>(At<L>(sum), [](S p, S q) { return p + q; })), ...);
    if (has && threadIdx.x % kLanes == 0)
      ((static_cast<S*>(a.rows.sum[L])[tile * a.rows.width + element] = At<L>(sum)), ...);
  }

  template <size_t... K> __device__ __forceinline__ void StoreAll(std::index_sequence<K...>) {
    EachTile<F::kStages>([&](int first) {
      const int own = first + static_cast<int>(threadIdx.x) / kLanes;
      const int64_t into[kResults + 1] = {to[K] + own * a.result_stride[K]..., 0};
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const bool has = own + k * kGroups < end;
        if (Engine::kColumnSums == 0 && !has) continue;
        if constexpr (!kStreams && F::kStages > 0 && Engine::template kForgets<N, kPacks>)
          Engine::ForgetAll(held[k].x[0], typename Engine::RowIndex());
        Store(has, k, own + k * kGroups, into, typename F::Rows(), typename F::Columns(), typename F::Results(),
              typename F::ColumnSums(), typename Engine::RowIndex(), typename Engine::ColumnIndex(),
              typename Engine::ResultIndex(), typename Engine::ColumnSumIndex());
      }
    });
  }

  // Stores the numbers of the rows of this block, and their totals.
  template <class... T, size_t... I>
  __device__ __forceinline__ void StoreNumbers(Types<T...>, std::index_sequence<I...>) {
    Slots<std::index_sequence<I...>, T...> totals;
    ((At<I>(totals) = 0), ...);
    if (live && threadIdx.x < kLanes) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (kShifted && !Has(i)) continue;
        if constexpr (Engine::kNumberResults > 0)
          Engine::StoreNumbers(a.rows, row + i, n[i], typename Engine::NumberResultIndex());
        if constexpr (Engine::kTotals > 0) Engine::AddTotals(n[i], totals, typename Engine::TotalIndex());
      }
    }
    (Engine::template WriteTotal<I, kThreads>(a.rows, At<I>(totals), tile), ...);
  }

  template <size_t... I, size_t... K>
  __device__ __forceinline__ void Run(std::index_sequence<I...>, std::index_sequence<K...>) {
    // As in EachTile.
    const int64_t block = kStage > 0 && kStage % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int64_t part = kBlocks > 1 ? block % kBlocks : block / a.tiles;
    tile = kBlocks > 1 ? block / kBlocks : block % a.tiles;
    begin = static_cast<int>(min(part * a.each, a.rows.width)),
    end = static_cast<int>(min(begin + a.each, a.rows.width));
    policy = MakeReadPolicy(a.rows.exceeds_l2);
    if constexpr (F::kStages > 0) ArriveOpened<kBlocks>();
    if constexpr (kShifted) {
      const int64_t side = (a.adjacent + kTileRows - 1) / kTileRows, outer = tile / side,
                    first = tile % side * kTileRows;
      const int64_t offset = outer * a.adjacent * a.rows.width + first;
      shift = static_cast<int>((offset + (begin + threadIdx.x / kLanes) * a.adjacent) % N);
      const int own = static_cast<int>(threadIdx.x % kLanes) * N - shift;  // of the first row, in the tile
      const int rest = static_cast<int>(min(a.adjacent - first, int64_t{kLanes} * N));
      const bool starts = (own >= 0 || first == 0) && own < kTileRows;
      low = max(0, -own), high = kPacked ? (starts ? min(N, rest - own) : 0) : min(N, min(kTileRows, rest) - own);
      live = own < rest;
      row = outer * a.adjacent + first + own;
      over = live && offset + own + (end - 1) * a.adjacent + N > a.rows.rows * a.rows.width;
      ((at[I] = kSame >> I & 1 ? MapRow<F::RowRank(I)>(a.rows.row_map[I], outer * a.adjacent) : offset + own), ...);
      ((to[K] = offset + own), ...);
    } else {
      const int64_t own = (tile * kLanes + threadIdx.x % kLanes) * N;
      live = own < a.rows.rows;
      row = live ? own : 0;
      ((at[I] = MapRow<F::RowRank(I)>(a.rows.row_map[I], row)), ...);
      ((to[K] = MapRow<F::ResultRank(K)>(a.rows.result_map[K], row)), ...);
    }
    if constexpr (!kStreams) LoadAll(begin, typename Engine::RowIndex());
#pragma unroll
    for (int i = 0; i < N; ++i) {
      n[i] = Engine::Begin(a.rows, RowOf(i), typename Engine::NumberIndex(), std::make_index_sequence<F::kIndices>());
      JoinedNumbers<F, 0, kStage>(a, RowOf(i), n[i]);
    }
    if constexpr (kStage >= 0 && kStage < F::kStages) {
      Partial<kStage> sum[N];
      Reduce<kStage>(sum);
      JoinGroups<F, kStage, kShifted>(sum, room, shift);
      auto* const out = static_cast<Partial<kStage>*>(a.partial[kStage]) + part * a.rows.rows + row;
      if (live && threadIdx.x < kLanes) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (!kShifted || Has(i)) out[i] = sum[i];
        }
      }
    } else {
      if constexpr (kAlone) RunStages<0>();
      if constexpr (kResults + Engine::kColumnSums > 0) StoreAll(typename Engine::ResultIndex());
      if constexpr (kAlone || F::kStages == 0) {
        if (part == 0) StoreNumbers(typename F::Totals(), typename Engine::TotalIndex());
      }
    }
  }
};

template <class F, int N, int kLanes, int kPacks, int kThreads, int kMinBlocks, int kBlocks, int kStage, bool kStreams,
          uint32_t kSame, bool kShifted = false>
__global__ void __launch_bounds__(kThreads, kMinBlocks) StridedRowsKernel(const __grid_constant__ StridedRowArgs<F> a) {
  using Room = GroupRoom<F, N, kLanes, kThreads, kBlocks, kShifted>;
  JAXKERN_SHARED(Room, room);
  StridedRows<F, N, kLanes, kPacks, kThreads, kBlocks, kStage, kStreams, kSame, kShifted> rows{a, room};
  rows.Run(typename RowEngine<F>::RowIndex(), typename RowEngine<F>::ResultIndex());
}

}  // namespace jaxkern
