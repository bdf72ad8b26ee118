// What a call of the index_add family is made of: the one struct that the handlers fill and the CPU
// and CUDA kernels read. Arrays are seen as
//
//     x, out   [batch, outer, rows, inner]      source, selected   [batch, outer, count, inner]
//     index    [batch, count]                   every slice of `outer` uses the same indices
//
// and, for every b, o, k with 0 <= index[b, k] < rows after wrapping or clipping,
//
//     index_add      out = x;  out[b, o, index[b, k], :] += alpha * source[b, o, k, :]
//     segment_sum    the same onto zeros, each row of out written exactly once
//     segment_max    the largest source[b, o, k, :] of each row; -inf (the dtype's least) where there is none
//     segment_min    likewise the smallest
//     index_select   selected[b, o, k, :] = x[b, o, index[b, k], :], and `fill` where the index is out of range
//     segment_softmax, segment_softmax_grad          see ffi/segment_softmax/segment_softmax.h
//
// Sums are taken in float (double for double, modulo 2^n for integers) and rounded once; NaN wins in
// max and min, as in jax.ops.
#pragma once

#include <cstddef>
#include <cstdint>

#include "index_add/index_add_plan.h"

namespace jaxkern {

struct IndexArgs {
  IndexOp op = IndexOp::kAdd;
  ElementType type = ElementType::kF32;
  IndexType index_type = IndexType::kS32;
  int64_t batch = 1, outer = 1, rows = 0, count = 0, inner = 1;
  bool source_batched = true;  // false: source is [1, outer, count, inner], read for every b (index_add, segment_*)
  bool wrap = false;           // negative indices count from the end
  bool clip = false;           // out of range: the nearest row, else dropped (select: filled)
  bool sorted = false;         // index[b, :] ascends (a promise; memory is safe without it)
  bool unique = false;         // no row twice within index[b, :] (likewise)
  bool deterministic = true;   // false: float atomics are allowed
  bool fill_nan = false;       // index_select: fill with NaN (integers: least value; unsigned: largest), else 0
  IndexPlan plan = IndexPlan::kAuto;

  const void* x = nullptr;       // index_select only: index_add is in place, out already holds x. segment_softmax_grad: g
  const void* index = nullptr;
  const void* source = nullptr;  // not for index_select
  const void* alpha = nullptr;   // one element of the computing type; null: 1
  void* out = nullptr;
  void* scratch = nullptr;       // CUDA: IndexScratchBytes() of them
  size_t scratch_bytes = 0;
};

}  // namespace jaxkern
