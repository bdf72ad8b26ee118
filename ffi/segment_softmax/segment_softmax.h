// The softmax over each segment of rows, and its gradient. A call is an IndexArgs (ffi/index_add/index_add.h), with
//
//     source, x, out   [batch, outer, count, inner]     index   [batch, count]     rows: how many segments there are
//
// and, for every b, o and column c, over the positions k whose index[b, k] is one segment (0 <= index < rows, after
// clipping where that is asked for)
//
//     segment_softmax        out[k] = exp(source[k] - max) / sum of exp(source[k] - max)
//     segment_softmax_grad   out[k] = y[k] * (g[k] - sum of y[k] * g[k])         source is y, x is g
//
// A position of no segment gets 0, and so does a segment of nothing but -inf. In the gradient, an element with y == 0
// takes no part whatever its g is. Arithmetic is that of float, or double for double; one rounding at the end.
//
// CPU kernels: segment_softmax_cpu.cc. CUDA kernels: ffi/kernels/segment_softmax.
#pragma once

#include "../index_add/index_add.h"
