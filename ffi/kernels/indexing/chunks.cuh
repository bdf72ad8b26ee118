// Segmented reduction over sorted keys (algorithms `sort` and `sorted`).
//
//     Describe        fills run.chunks (and writes keys and order of ascending indices, where needed)
//     ReduceChunks    reduces the updates; reads run.keys, run.order, run.chunks and source; writes out and
//                     run.partials
//
// The ordered updates are cut into chunks of equal length. Each thread walks one chunk for one vector of the row: it
// loads kRows vectors of source at a time, accumulates them in the computing type, and at the end of each run of equal
// keys writes the row of out. The loop is short and holds few registers per vector, so that many warps are resident. If
// rows are not whole vectors, each thread handles kParts elements (or words) of a row at a fixed stride instead: the
// work per place stays comparable and loads stay coalesced. A run is
//
//     short    if it ends at most ChunkLookahead places after the chunk that it begins in: that chunk reduces all of it,
//              and the next chunk begins after it
//     long     otherwise: each chunk writes the partial sum of its part to a slot, which ReduceFixup (reduce.cuh) adds
//              up
//
// Each row is written once, and a run of up to a chunk costs no extra work. Memory traffic: source is read once, each
// touched row of base is read (with reads_out) and written once, and keys and order are read once per vector of a row,
// mostly from L2. Unless out is base, further blocks of the same launch fill the rows without updates (gaps.cuh).
//
// On entry run.chunks describes the chunks (Describe). run.keys and run.order are aligned to 16 bytes unless kAligned
// is false.
#pragma once

#include "indexing/reduce.cuh"

namespace jaxkern {

// Minimum number of blocks per multiprocessor. 16-bit elements are summed in twice the registers of a vector, rows that
// are not whole vectors are loaded in smaller pieces, and the 4 or 8 places in flight take registers as well.
constexpr int kReduceThreads = 128;
constexpr int ReduceBlocks(bool whole_vectors, int element_bytes, int rows) {
  return !whole_vectors ? 4 : element_bytes > 2 ? 8 : rows == 4 ? 7 : 5;
}
// How many places after its chunk a run may end for the chunk to reduce it alone. A longer lookahead would make the work
// of chunks too unequal.
constexpr uint32_t ChunkLookahead(uint32_t chunk) { return chunk / 4; }

constexpr int kDescribeThreads = 128, kKeysWritten = 16;  // kKeysWritten: keys that a thread writes

// Fills run.chunks, one thread per chunk, with all of its loads in flight together.
//
//     kKeyed  take keys from run.keys. If false, the first `describing` blocks (may be 0) take keys from plain indices
//             of one slice, and further blocks write the keys of ascending indices and, with run.order_out, their order
template <bool kKeyed> __global__ void __launch_bounds__(kDescribeThreads, 8)
    Describe(const __grid_constant__ IndexRun run, uint32_t chunk, uint32_t chunks, uint32_t describing) {
  if (!kKeyed && blockIdx.x >= describing) {
    const uint32_t first = FirstOfLane<kDescribeThreads, kKeysWritten>(blockIdx.x - describing);
    uint32_t key[kKeysWritten];
    LoadKeys<kKeysWritten, true>(run, nullptr, first, key);
#pragma unroll
    for (int i = 0; i < kKeysWritten; ++i) {
      const uint32_t at = first + i * kWarp;
      if (at >= run.positions) continue;
      run.keys_out[at] = key[i];
      if (run.order_out) run.order_out[at] = static_cast<uint32_t>(run.SourceRow(at));
    }
    return;
  }
  constexpr Keys kKeys = kKeyed ? Keys::kListed : Keys::kPlain;
  const uint32_t thread = blockIdx.x * kDescribeThreads + threadIdx.x;
  if (thread >= chunks) return;
  const uint32_t begin = thread * chunk, end = min(begin + chunk, run.positions), lookahead = ChunkLookahead(chunk);
  const uint32_t head = KeyAt<kKeys>(run, begin), last = KeyAt<kKeys>(run, end - 1);
  const uint32_t before = KeyAt<kKeys>(run, begin - (begin > 0));
  const uint32_t next = KeyAt<kKeys>(run, min(begin + chunk, run.positions - 1));
  const uint32_t behind_lookahead = KeyAt<kKeys>(run, min(begin + lookahead, run.positions - 1));
  const uint32_t earlier = KeyAt<kKeys>(run, begin - min(begin, chunk + 1));
  const bool cut = IsCut<kKeys>(run, chunk, thread, lookahead);
  const bool comes_in = begin > 0 && head < run.dropped && before == head;
  const bool goes_on = end < run.positions && last < run.dropped && next == last;
  // The head run is long if it ends beyond the lookahead of the chunk before, or if it also began before that chunk.
  const bool reaches = begin + lookahead < run.positions && behind_lookahead == head;
  const bool long_head = comes_in && (reaches || (begin > chunk && earlier == head));
  // search[0]: end of the run that comes in. search[1]: end of the run of the last place, searched among chunks if it
  // is cut, else among places.
  EndSearch search[2] = {{begin, begin, head, 1}, {end, end, last, 1}};
  if (comes_in && !long_head) search[0].high = min(begin + lookahead, end);
  if (cut) search[1] = {thread + 2, chunks, last, chunk};
  else if (goes_on && !(long_head && head == last)) search[1].high = min(end + lookahead, run.positions);
  FindEnds<kKeys>(run, search);
  ChunkInfo info = {search[0].low, long_head, end, 0, last};
  if (cut) info.parts = search[1].low - thread;
  else if (info.start < end) info.stop = search[1].low;
  run.chunks[thread] = info;
}

// Loads places [i, i + kRows) of an array of keys or positions, which is aligned to 16 bytes and extends at least that
// far.
template <int kRows>
__device__ __forceinline__ void LoadPlaces(const uint32_t* array, uint32_t i, uint32_t (&v)[kRows]) {
#pragma unroll
  for (int u = 0; u < kRows; u += 4) {
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(array + i + u));
    v[u] = four.x, v[u + 1] = four.y, v[u + 2] = four.z, v[u + 3] = four.w;
  }
}

// One thread per chunk and vector (or kParts parts) of a row.
//
//     kOp       the reduction
//     T, N      element type, elements of a part
//     kParts    parts per thread: 1 for rows of whole vectors
//     kRows     places in flight per thread: 4 or 8
//     kAligned  run.keys and run.order are aligned to 16 bytes
template <Reduction kOp, class T, int N, int kParts, int kRows, bool kAligned>
__global__ void __launch_bounds__(kReduceThreads, ReduceBlocks(kParts == 1, sizeof(T), kRows))
    ReduceChunks(const __grid_constant__ IndexRun run, const __grid_constant__ ReduceShape s) {
  using C = Compute<T>;
  struct Slice {
    Pack<T, N> part[kParts];
  };
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (blockIdx.x >= s.blocks) {
    const int64_t warp = thread / kWarp - s.blocks * (kReduceThreads / kWarp);
    if (warp < s.ranges.warps) FillGaps<kOp, T, N, kOp == Reduction::kSum, true>(run, s.ranges, warp);
    return;
  }
  if (thread >= s.threads) return;
  const int64_t item = s.by_vectors.Div(thread), o = s.by_chunks.Div(item);
  const int64_t vector = thread - item * s.vectors, column = vector * N;
  const uint32_t chunk = static_cast<uint32_t>(item - o * s.chunks);
  const ChunkInfo info = run.chunks[chunk];
  if (info.start >= info.stop) return;
  const char* source =
      reinterpret_cast<const char*>(static_cast<const T*>(run.source) + o * run.source_stride * run.inner + column);
  char* out = reinterpret_cast<char*>(static_cast<T*>(run.out) + o * run.out_stride * run.inner + column);
  // Pinned: two registers each cost less than recomputing the addresses for every row, as the compiler would.
  asm volatile("" : "+l"(source), "+l"(out));
  const uint64_t row_bytes = run.inner * sizeof(T);
  // Offsets of the thread's parts. A part beyond the end of the row rereads the first part and is not written.
  const uint32_t step = static_cast<uint32_t>(s.vectors) * N;
  uint32_t apart[kParts];
  bool has[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    has[p] = p == 0 || column + p * int64_t{step} < run.inner;
    apart[p] = has[p] ? p * step : 0;
  }
  const auto load = [&](const char* row) {
    Slice slice;
#pragma unroll
    for (int p = 0; p < kParts; ++p) slice.part[p] = LoadPart<T, N>(reinterpret_cast<const T*>(row) + apart[p]);
    return slice;
  };
  const auto in_source = [&](uint32_t row) { return source + row * row_bytes; };
  const auto in_out = [&](uint32_t key) { return out + run.OutRow(key) * row_bytes; };
  const C alpha = Alpha<C>(run);
  const bool reads_out = run.reads_out, ordered = run.order != nullptr;

  bool at_head = info.long_head;  // the current run began in an earlier chunk
  uint32_t current = run.dropped;
  C total[kParts][N];
  Slice x = {};  // old value of the current row of out, once it has been read
  bool x_read = true;
  const auto clear = [&] {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < N; ++i) total[p][i] = Identity<kOp, C>();
    }
  };
  clear();
  const auto put = [&](int tail) {
    C* const slot = Slot<C>(run, s, o, chunk, tail) + column;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (has[p]) slot[apart[p] + i] = total[p][i];
      }
    }
  };
  const auto flush = [&] {
    if (current >= run.dropped) return;
    if (at_head) {
      put(0);
      at_head = false;
    } else {
      char* const to = in_out(current);
      if (!x_read) x = load(run.Old(to));
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const Pack<T, N> finished = FinishedPack<kOp, T, N>(total[p], alpha, reads_out, x.part[p]);
        if (has[p]) StorePart<T, N>(reinterpret_cast<T*>(to) + apart[p], finished);
      }
    }
  };

  for (uint32_t i = info.start / kRows * kRows; i < info.stop; i += kRows) {
    // Not prefetched: these places are mostly in the same line as the previous ones.
    uint32_t key[kRows], row[kRows];
    if (kAligned && i + kRows <= run.positions) {
      LoadPlaces<kRows>(run.keys, i, key);
      if (ordered) LoadPlaces<kRows>(run.order, i, row);
    } else {
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        key[u] = i + u < run.positions ? __ldg(run.keys + i + u) : run.dropped;
        if (ordered && i + u < run.positions) row[u] = __ldg(run.order + i + u);
      }
    }
    if (!ordered) {
#pragma unroll
      for (int u = 0; u < kRows; ++u) row[u] = i + u;
    }
    if (i < info.start || i + kRows > info.stop) {  // treat places outside of the chunk as dropped
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (i + u < info.start || i + u >= info.stop) key[u] = run.dropped;
      }
    }
    Slice slice[kRows], x_next = {};
    uint32_t newest = current;
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (key[u] < run.dropped) {
        slice[u] = load(in_source(row[u]));
        // A run that begins and ends among these places reads its row when it ends, so the row is prefetched. With 8
        // places in flight such runs are few, or registers are exhausted.
        if (kRows == 4 && reads_out && key[u] != newest && newest != current) Prefetch(run.Old(in_out(newest)));
        newest = key[u];
      }
    }
    // Load the row of the run that is open at the end of these places.
    const bool reads = reads_out && newest != current;
    if (reads) x_next = load(run.Old(in_out(newest)));
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (key[u] >= run.dropped) continue;
      if (key[u] != current) {
        flush();
        current = key[u];
        x_read = !reads_out;
        clear();
      }
#pragma unroll
      for (int p = 0; p < kParts; ++p) Accumulate<kOp>(total[p], slice[u].part[p]);
    }
    if (reads) {
      x = x_next;
      x_read = true;
    }
  }
  if (info.parts > 0) put(1);
  else flush();
}

}  // namespace jaxkern
