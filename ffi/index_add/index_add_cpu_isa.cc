// The CPU kernels of the index_add family for one instruction set: JAXKERN_ISA, see common/simd.h.
//
// A cell is one register of elements being reduced, with what they are reduced in: sums of float and of
// the 16-bit types run in double, so that rounding happens once, at the store; sums of double and of
// integers, and maxima, in their own type. A run of positions that go to the same row is reduced a tile
// of cells at a time, in registers.
#include "index_add/index_add_cpu_isa.h"

#include "common/simd.h"

namespace jaxkern {
namespace JAXKERN_ISA {
namespace {

constexpr int kTile = kRegisterBytes == 64 ? 8 : 4;  // cells
constexpr int kAhead = 12;                           // positions from a row's prefetch to its use
constexpr int kLine = 64;

JAXKERN_INLINE int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }

// --- Elements: what they are loaded as -----------------------------------------------------------

template <class T>
struct LoadedOf {
  using type = Compute<T>;
};
template <>
struct LoadedOf<int32_t> {
  using type = int32_t;
};
template <>
struct LoadedOf<int64_t> {
  using type = int64_t;
};
template <>
struct LoadedOf<uint32_t> {
  using type = uint32_t;
};
template <class T>
using Loaded = typename LoadedOf<T>::type;
template <class T>
constexpr bool kIsInteger = Loaded<T>(1) / 2 == 0;

template <class T>
JAXKERN_INLINE Vec<Loaded<T>> LoadFull(const T* p) {
  if constexpr (kIsInteger<T>) {
    Vec<T> v;
    std::memcpy(&v, p, sizeof v);
    return v;
  } else {
    return Load(p);
  }
}
template <class T>
JAXKERN_INLINE void StoreFull(T* p, Vec<Loaded<T>> v) {
  if constexpr (kIsInteger<T>) {
    std::memcpy(p, &v, sizeof v);
  } else {
    Store(p, v);
  }
}
template <class T>
JAXKERN_INLINE Vec<Loaded<T>> LoadFirst(const T* p, int n) {
  if constexpr (kIsInteger<T>) {
    Vec<T> v{};
    std::memcpy(&v, p, n * sizeof(T));
    return v;
  } else {
    return LoadPart(p, n, Vec<Loaded<T>>{});
  }
}
template <class T>
JAXKERN_INLINE void StoreFirst(T* p, int n, Vec<Loaded<T>> v) {
  if constexpr (kIsInteger<T>) {
    std::memcpy(p, &v, n * sizeof(T));
  } else {
    StorePart(p, n, v);
  }
}

// --- Cells ---------------------------------------------------------------------------------------

// A: the accumulator's type in memory. The scalar forms are those of narrow rows.
template <class T>
struct SumCell {  // of integers and of double
  using A = Loaded<T>;
  Vec<A> v{};

  JAXKERN_INLINE void Add(Vec<A> x) { v += x; }
  JAXKERN_INLINE void Merge(const SumCell& other) { v += other.v; }
  JAXKERN_INLINE Vec<A> Result() const { return v; }
  JAXKERN_INLINE Vec<A> AddTo(Vec<A> x, A alpha) const { return x + v * alpha; }

  static JAXKERN_INLINE A Start() { return A(0); }
  static JAXKERN_INLINE A Join(A a, A x) { return a + x; }
};

template <>
struct SumCell<float> {  // and of the 16-bit types, which are loaded as float
  using A = double;
  struct Halves {
    HalfVec low, high;
  };
  Vec<double> low{}, high{};

  JAXKERN_INLINE void Add(Vec<float> x) {
    const Halves h = BitCast<Halves>(x);
    low += Widen(h.low), high += Widen(h.high);
  }
  JAXKERN_INLINE void Merge(const SumCell& other) { low += other.low, high += other.high; }
  JAXKERN_INLINE Vec<float> Result() const { return Narrow(low, high); }
  JAXKERN_INLINE Vec<float> AddTo(Vec<float> x, double alpha) const {
    const Halves h = BitCast<Halves>(x);
    return Narrow(Widen(h.low) + low * alpha, Widen(h.high) + high * alpha);
  }

  static JAXKERN_INLINE Vec<float> Narrow(Vec<double> low, Vec<double> high) {
    const Halves h{__builtin_convertvector(low, HalfVec), __builtin_convertvector(high, HalfVec)};
    return BitCast<Vec<float>>(h);
  }
  static JAXKERN_INLINE A Start() { return 0; }
  static JAXKERN_INLINE A Join(A a, A x) { return a + x; }
};

// NaN wins.
template <class L, bool kMax>
struct ExtremeCell {
  using A = L;
  Vec<A> v = Splat(Start());

  static JAXKERN_INLINE A Start() {
    if constexpr (!kIsInteger<L>) {
      return kMax ? A(-__builtin_inf()) : A(__builtin_inf());
    } else if constexpr (A(-1) > A(0)) {
      return kMax ? A(0) : A(-1);
    } else {
      constexpr A half = A(1) << (8 * sizeof(A) - 2);
      return kMax ? A(-half - half) : A(half - 1 + half);
    }
  }
  JAXKERN_INLINE void Add(Vec<A> x) {
    if constexpr (kMax) {
      v = (x > v) | (x != x) ? x : v;
    } else {
      v = (x < v) | (x != x) ? x : v;
    }
  }
  JAXKERN_INLINE void Merge(const ExtremeCell& other) { Add(other.v); }
  JAXKERN_INLINE Vec<A> Result() const { return v; }
  static JAXKERN_INLINE A Join(A a, A x) { return (kMax ? x > a : x < a) || x != x ? x : a; }
};

template <class A>
JAXKERN_INLINE void LoadCell(SumCell<A>* cell, const A* p) {
  std::memcpy(&cell->v, p, sizeof cell->v);
}
JAXKERN_INLINE void LoadCell(SumCell<float>* cell, const double* p) {
  std::memcpy(&cell->low, p, sizeof cell->low);
  std::memcpy(&cell->high, p + kLanes<double>, sizeof cell->high);
}
template <class L, bool kMax>
JAXKERN_INLINE void LoadCell(ExtremeCell<L, kMax>* cell, const L* p) {
  std::memcpy(&cell->v, p, sizeof cell->v);
}
template <class A>
JAXKERN_INLINE void StoreCell(A* p, const SumCell<A>& cell) {
  std::memcpy(p, &cell.v, sizeof cell.v);
}
JAXKERN_INLINE void StoreCell(double* p, const SumCell<float>& cell) {
  std::memcpy(p, &cell.low, sizeof cell.low);
  std::memcpy(p + kLanes<double>, &cell.high, sizeof cell.high);
}
template <class L, bool kMax>
JAXKERN_INLINE void StoreCell(L* p, const ExtremeCell<L, kMax>& cell) {
  std::memcpy(p, &cell.v, sizeof cell.v);
}

template <class T, IndexOp op>
struct CellOf {
  using type = SumCell<Loaded<T>>;
};
template <class T>
struct CellOf<T, IndexOp::kSegmentMax> {
  using type = ExtremeCell<Loaded<T>, true>;
};
template <class T>
struct CellOf<T, IndexOp::kSegmentMin> {
  using type = ExtremeCell<Loaded<T>, false>;
};

template <class T, IndexOp op>
struct Kernel {
  using Cell = typename CellOf<T, op>::type;
  using A = typename Cell::A;
  using L = Loaded<T>;
  static constexpr int W = kLanes<L>;
  static constexpr bool kAdds = op == IndexOp::kAdd;

  // alpha is held in float for the 16-bit types and float, where it is widened exactly.
  static JAXKERN_INLINE A Alpha(const IndexArgs& a) { return a.alpha ? A(*static_cast<const L*>(a.alpha)) : A(1); }

  // --- Runs ---
  // Columns [c, c + n) of a row from `cell`; n < W only if kPart.
  template <bool kPart>
  static JAXKERN_INLINE void Finish(const Cell& cell, A alpha, T* out, int n) {
    Vec<L> v;
    if constexpr (kAdds) {
      v = cell.AddTo(kPart ? LoadFirst(out, n) : LoadFull(out), alpha);
    } else {
      v = cell.Result();
    }
    if constexpr (kPart) {
      StoreFirst(out, n, v);
    } else {
      StoreFull(out, v);
    }
  }

  // K whole registers from column c, or the last n < W elements of a row: positions [e, end) to `out`, or,
  // where the run is cut, to `partial`.
  template <int K, bool kPart>
  static JAXKERN_INLINE void ReduceTile(const T* source, int64_t inner, const IndexEntry* e, const IndexEntry* end,
                                        const IndexEntry* last, A alpha, T* out, A* partial, int n) {
    Cell cells[K];
    for (; e != end; ++e) {
      // Beyond this run too: the next one comes at once.
      const IndexEntry* next = e + kAhead < last ? e + kAhead : e;
      const char* ahead = reinterpret_cast<const char*>(source + next->position * inner);
      for (int line = 0; line < K * W * int(sizeof(T)); line += kLine) __builtin_prefetch(ahead + line);
      const T* p = source + e->position * inner;
      for (int k = 0; k < K; ++k) cells[k].Add(kPart ? LoadFirst(p, n) : LoadFull(p + k * W));
    }
    if (partial) {
      A buffer[W];
      for (int k = 0; k < K; ++k) {
        if constexpr (kPart) {
          StoreCell(buffer, cells[k]);
          std::memcpy(partial, buffer, n * sizeof(A));
        } else {
          StoreCell(partial + k * W, cells[k]);
        }
      }
    } else {
      for (int k = 0; k < K; ++k) Finish<kPart>(cells[k], alpha, out + k * W, n);
    }
  }

  static JAXKERN_INLINE void ReduceRun(const IndexArgs& a, const IndexSlice& s, const IndexEntry* e,
                                       const IndexEntry* end, A* partial) {
    const int64_t inner = a.inner;
    const T* source = static_cast<const T*>(s.source);
    const IndexEntry* last = s.entries + s.size;
    T* out = static_cast<T*>(s.out) + e->row * inner;
    const A alpha = Alpha(a);
    int64_t c = s.first;
    const auto tile = [&](auto cells) __attribute__((always_inline)) {
      constexpr int K = decltype(cells)::value;
      for (; c + K * W <= s.last; c += K * W) {
        ReduceTile<K, false>(source + c, inner, e, end, last, alpha, out + c, partial ? partial + c : nullptr, W);
      }
    };
    tile(Number<kTile>()), tile(Number<2>()), tile(Number<1>());
    if (c < s.last) {
      ReduceTile<1, true>(source + c, inner, e, end, last, alpha, out + c, partial ? partial + c : nullptr,
                          int(s.last - c));
    }
  }
  template <int n>
  struct Number {
    static constexpr int value = n;
  };

  static JAXKERN_INLINE A* Partial(const IndexArgs& a, const IndexSlice& s, int64_t chunk, int which) {
    return static_cast<A*>(s.partials) + (2 * chunk + which) * a.inner;
  }
  // Whether the run at the end of a chunk goes on in the next one.
  static JAXKERN_INLINE bool GoesOn(const IndexSlice& s, int64_t chunk) {
    const int64_t next = (chunk + 1) * s.chunk;
    return next < s.size && s.entries[next].row == s.entries[next - 1].row;
  }

  static void Reduce(const IndexArgs& a, const IndexSlice& s, int64_t chunk) {
    const IndexEntry *begin = s.entries + chunk * s.chunk, *end = s.entries + Min(s.size, (chunk + 1) * s.chunk);
    const bool comes = chunk > 0 && GoesOn(s, chunk - 1), goes = GoesOn(s, chunk);
    for (const IndexEntry *e = begin, *run; e != end; e = run) {
      for (run = e + 1; run != end && run->row == e->row; ++run) {
      }
      const bool head = e == begin && comes, tail = run == end && goes;
      ReduceRun(a, s, e, run, head ? Partial(a, s, chunk, 0) : tail ? Partial(a, s, chunk, 1) : nullptr);
    }
  }

  static void Join(const IndexArgs& a, const IndexSlice& s) {
    const int64_t chunks = (s.size + s.chunk - 1) / s.chunk;
    const A alpha = Alpha(a);
    for (int64_t chunk = 0, next; chunk < chunks; chunk = next) {
      next = chunk + 1;
      if (!GoesOn(s, chunk)) continue;
      const uint32_t row = s.entries[next * s.chunk].row;
      // The last chunk of this run: the first that it does not fill to the end, or after which it stops.
      int64_t end = next;
      while (GoesOn(s, end) && s.entries[(end + 1) * s.chunk].row == row) ++end;
      // A run that starts here has its first part in the tail.
      A* first = Partial(a, s, chunk, 1);
      T* out = static_cast<T*>(s.out) + row * a.inner;
      for (int64_t c = s.first; c < s.last; c += W) {
        const int n = int(Min(W, s.last - c));
        Cell total = Read(first + c, n);
        for (int64_t d = next; d <= end; ++d) total.Merge(Read(Partial(a, s, d, 0) + c, n));
        if (n == W) {
          Finish<false>(total, alpha, out + c, n);
        } else {
          Finish<true>(total, alpha, out + c, n);
        }
      }
      next = end;  // whose own tail may go on
    }
  }
  static JAXKERN_INLINE Cell Read(const A* p, int n) {
    Cell cell;
    if (n == W) {
      LoadCell(&cell, p);
    } else {
      A buffer[W] = {};
      std::memcpy(buffer, p, n * sizeof(A));
      LoadCell(&cell, buffer);
    }
    return cell;
  }

  // --- An accumulator an element ---
  static JAXKERN_INLINE A Scalar(const T* p) {
    if constexpr (sizeof(T) == 2) {
      return A(Widened(*p));
    } else {
      return A(*p);
    }
  }
  static JAXKERN_INLINE float Widened(BFloat x) { return BitCast<float>(uint32_t(x.bits) << 16); }
  static JAXKERN_INLINE float Widened(Half x) {
    T copy[W] = {x};
    return Load(copy)[0];
  }
  template <class U>
  static JAXKERN_INLINE float Widened(U x) { return float(x); }

  static void Start(void* accumulators, int64_t size) {
    A* p = static_cast<A*>(accumulators);
    for (int64_t i = 0; i < size; ++i) p[i] = Cell::Start();
  }

  template <int N, class RowOf>
  static JAXKERN_INLINE void AccumulateRows(const T* source, int64_t inner, int64_t size, A* acc, RowOf at) {
    const int64_t n = N ? N : inner;
    for (int64_t k = 0; k < size; ++k) {
      const auto [row, position] = at(k);
      const T* p = source + position * n;
      A* to = acc + int64_t(row) * n;
      for (int64_t i = 0; i < n; ++i) to[i] = Cell::Join(to[i], Scalar(p + i));
    }
  }
  template <class RowOf>
  static JAXKERN_INLINE void AccumulateAny(const T* source, int64_t inner, int64_t size, A* acc, RowOf at) {
    switch (inner) {
      case 1: return AccumulateRows<1>(source, inner, size, acc, at);
      case 2: return AccumulateRows<2>(source, inner, size, acc, at);
      case 4: return AccumulateRows<4>(source, inner, size, acc, at);
      case 8: return AccumulateRows<8>(source, inner, size, acc, at);
      default: return AccumulateRows<0>(source, inner, size, acc, at);
    }
  }
  static void Accumulate(const IndexArgs& a, const void* source, const uint32_t* row, int64_t size, void* acc) {
    if constexpr (sizeof(T) == 2) {
      // Widened in blocks: a conversion of one element costs more than its addition.
      constexpr int kBlock = 256;
      float wide[kBlock * kIndexNarrow];
      const T* p = static_cast<const T*>(source);
      for (int64_t done = 0; done < size; done += kBlock) {
        const int64_t count = Min(kBlock, size - done), n = count * a.inner;
        int64_t i = 0;
        for (; i + W <= n; i += W) Store(wide + i, Load(p + done * a.inner + i));
        if (i < n) Store(wide + i, LoadFirst(p + done * a.inner + i, int(n - i)));
        Kernel<float, op>::Accumulate(a, wide, row + done, count, acc);
      }
    } else {
      AccumulateAny(static_cast<const T*>(source), a.inner, size, static_cast<A*>(acc),
                    [row](int64_t k) __attribute__((always_inline)) { return Pair{row[k], k}; });
    }
  }
  static void AccumulateAt(const IndexArgs& a, const void* source, const IndexEntry* e, int64_t size, int64_t first_row,
                           void* acc) {
    AccumulateAny(static_cast<const T*>(source), a.inner, size, static_cast<A*>(acc),
                  [e, first_row](int64_t k) __attribute__((always_inline)) {
                    return Pair{uint32_t(e[k].row - first_row), int64_t(e[k].position)};
                  });
  }
  struct Pair {
    uint32_t row;
    int64_t position;
  };

  static void Merge(void* into, const void* from, int64_t size) {
    A* a = static_cast<A*>(into);
    const A* b = static_cast<const A*>(from);
    for (int64_t i = 0; i < size; ++i) a[i] = Cell::Join(a[i], b[i]);
  }

  static void FinishAll(const IndexArgs& a, const void* accumulators, void* out, int64_t size) {
    const A* p = static_cast<const A*>(accumulators);
    T* to = static_cast<T*>(out);
    const A alpha = Alpha(a);
    int64_t c = 0;
    for (; c + W <= size; c += W) Finish<false>(Read(p + c, W), alpha, to + c, W);
    if (c < size) Finish<true>(Read(p + c, int(size - c)), alpha, to + c, int(size - c));
  }

  static void Fill(void* out, int64_t size) {
    T* to = static_cast<T*>(out);
    const Vec<L> v = Cell().Result();
    int64_t c = 0;
    for (; c + W <= size; c += W) StoreFull(to + c, v);
    if (c < size) StoreFirst(to + c, int(size - c), v);
  }
};

// --- Selection: bytes ------------------------------------------------------------------------------

template <int N>
void SelectFixed(const char* x, const uint32_t* row, int64_t size, uint32_t rows, const char* fill, char* to) {
  for (int64_t k = 0; k < size; ++k) {
    if (N >= 32) __builtin_prefetch(x + int64_t(row[Min(k + kAhead, size - 1)]) * N);
    char buffer[N];
    std::memcpy(buffer, row[k] < rows ? x + int64_t(row[k]) * N : fill, N);
    std::memcpy(to + k * N, buffer, N);
  }
}

void Select(const void* x_void, int64_t row_bytes, const uint32_t* row, int64_t size, uint32_t rows, int64_t first,
            int64_t last, const void* fill_void, void* to_void) {
  using Bytes = VecN<uint8_t, kRegisterBytes>;
  const char *x = static_cast<const char*>(x_void), *fill = static_cast<const char*>(fill_void);
  char* to = static_cast<char*>(to_void);
  switch (row_bytes) {
    case 2: return SelectFixed<2>(x, row, size, rows, fill, to);
    case 4: return SelectFixed<4>(x, row, size, rows, fill, to);
    case 8: return SelectFixed<8>(x, row, size, rows, fill, to);
    case 16: return SelectFixed<16>(x, row, size, rows, fill, to);
    case 32: return SelectFixed<32>(x, row, size, rows, fill, to);
    default: break;
  }
  const int64_t n = last - first;
  for (int64_t k = 0; k < size; ++k) {
    const uint32_t next = row[Min(k + kAhead, size - 1)];
    const char* ahead = x + int64_t(next < rows ? next : 0) * row_bytes + first;
    for (int64_t line = 0; line < Min(n, 8 * kLine); line += kLine) __builtin_prefetch(ahead + line);
    const char* from = row[k] < rows ? x + int64_t(row[k]) * row_bytes + first : fill + first;
    char* p = to + k * row_bytes + first;
    if (n < kRegisterBytes) {
      std::memcpy(p, from, n);
      continue;
    }
    Bytes v;
    for (int64_t i = 0; i + kRegisterBytes < n; i += kRegisterBytes) {
      std::memcpy(&v, from + i, sizeof v);
      std::memcpy(p + i, &v, sizeof v);
    }
    std::memcpy(&v, from + n - kRegisterBytes, sizeof v);  // overlaps what is there already
    std::memcpy(p + n - kRegisterBytes, &v, sizeof v);
  }
}

template <class T, IndexOp op>
IndexCpuKernels Kernels() {
  using K = Kernel<T, op>;
  IndexCpuKernels k;
  k.accumulator_bytes = sizeof(typename K::A);
  k.reduce = K::Reduce, k.join = K::Join;
  k.start = K::Start, k.accumulate = K::Accumulate, k.accumulate_at = K::AccumulateAt;
  k.merge = K::Merge, k.finish = K::FinishAll, k.fill = K::Fill;
  return k;
}

template <class T>
IndexCpuKernels KernelsOf(IndexOp op) {
  switch (op) {
    case IndexOp::kAdd: return Kernels<T, IndexOp::kAdd>();
    case IndexOp::kSegmentMax: return Kernels<T, IndexOp::kSegmentMax>();
    case IndexOp::kSegmentMin: return Kernels<T, IndexOp::kSegmentMin>();
    default: return Kernels<T, IndexOp::kSegmentSum>();
  }
}

}  // namespace

IndexCpuKernels ChooseIndexKernels(const IndexArgs& args) {
  if (args.op == IndexOp::kSelect) {
    IndexCpuKernels k;
    k.select = Select;
    return k;
  }
  switch (args.type) {
    case ElementType::kF16: return KernelsOf<Half>(args.op);
    case ElementType::kBF16: return KernelsOf<BFloat>(args.op);
    case ElementType::kF64: return KernelsOf<double>(args.op);
    case ElementType::kS32: return KernelsOf<int32_t>(args.op);
    case ElementType::kS64: return KernelsOf<int64_t>(args.op);
    case ElementType::kU32: return KernelsOf<uint32_t>(args.op);
    default: return KernelsOf<float>(args.op);
  }
}

}  // namespace JAXKERN_ISA
}  // namespace jaxkern
