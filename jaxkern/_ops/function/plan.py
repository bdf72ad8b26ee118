"""Which kernel of ffi/kernels/elementwise runs a user function, and over which blocks.

flat, strided    without sums: the kernels of elementwise operations (elementwise.cuh)
summed           with sums, over matrices: SummedKernel and SumPartials (function.cuh)
"""

import math

from jaxkern._core import launch
from jaxkern._core.cpp import cpp_type
from jaxkern._core.define import CUDA_TYPES, ceil_div, cpp_bool
from jaxkern._core.dtypes import computing
from jaxkern._core.launch import Launch, Plan, i64
from jaxkern._core.params import Params
from jaxkern._ops.elementwise import tuning
from jaxkern._ops.elementwise.plan import GROUPS, View, collapse, elementwise

HEADER = "elementwise/function.cuh"
SUMMED_ARGS = Params(HEADER, "SummedArgs")
FUNCTOR = "Function"
MOST_ARRAYS = 16  # operands and results of a kernel
WHOLE, COLUMNS, ROWS, SCALAR, PARTIAL, PER_MATRIX = 0, 1, 2, 3, 4, 8  # Kind in function.cuh


def plan(device, operands, results, *, function, sums):
    """The launches of `function`, or None where there is no kernel."""
    if len(operands) + len(results) > MOST_ARRAYS or not function.fits():
        return None
    shape = tuple(map(max, zip(*(a.shape for a in operands))))
    arrays = [View.of(launch.operand(k), a, -1, 0) for k, a in enumerate(operands)]
    outs = [View.of(launch.result(k), a, -1, 0) for k, a in enumerate(results)]
    if any(v.dtype.name not in CUDA_TYPES for v in (*arrays, *outs)):
        return None
    source = function.source(FUNCTOR)
    if not any(sums):
        sizes, strides = collapse([*arrays, *outs])
        if len(sizes) > GROUPS:
            return None
        return elementwise(device, FUNCTOR, arrays, outs, [], sizes, strides, HEADER, source)
    return _summed(device, arrays, outs, shape, function, source)


def _summed(device, arrays, outs, shape, function, source):
    full = View(None, None, shape, [math.prod(shape[d + 1 :]) for d in range(len(shape))])
    sizes, strides = collapse([*arrays, *outs, full])
    if len(sizes) > 3:
        return None
    pad = 3 - len(sizes)
    (matrices, rows, columns), strides = [1] * pad + sizes, [[0] * pad + s for s in strides]
    ins, results = strides[: len(arrays)], strides[len(arrays) : -1]
    pack = 16 // max(v.bytes for v in (*arrays, *outs))
    last = columns
    if len(sizes) == 1:  # one dimension: cut into rows
        kinds = [SCALAR if s[2] == 0 else WHOLE for s in results]
        ins = [[0, 32 * pack * s[2], s[2]] for s in ins]
        rows, columns, last = ceil_div(columns, 32 * pack), 32 * pack, (columns - 1) % (32 * pack) + 1
    else:
        kinds = [(COLUMNS if s[2] else SCALAR) if s[1] == 0 else (WHOLE if s[2] else ROWS) for s in results]
    per_matrix = [matrices > 1 and s[0] != 0 for s in results]
    if any(kind == WHOLE and matrices > 1 and not own for kind, own in zip(kinds, per_matrix)):
        return None  # a sum over matrices alone
    if columns >= 1 << 31 or matrices >= 1 << 16 or any(s[2] > 1 for s in (*ins, *results)):
        return None
    # Rows of every operand begin on whole packs.
    packs = all(n % pack == 0 for n in (columns, last))

    def launches(packs):
        n = pack if packs else 1
        lanes = min(32, 1 << (ceil_div(columns, n) - 1).bit_length())
        groups, tiles = tuning.THREADS // lanes, ceil_div(columns, lanes * n)
        chunks = max(
            1,
            min(
                ceil_div(tuning.SUM_WAVES * tuning.SUM_RESIDENT * device.sm_count, tiles * matrices),
                ceil_div(rows, 2 * groups),
                65535,
            ),
        )
        chunk = ceil_div(ceil_div(rows, chunks), groups) * groups
        chunks = ceil_div(rows, chunk)
        parts = {WHOLE: 1, COLUMNS: chunks, ROWS: tiles, SCALAR: chunks * tiles}
        numbers = {COLUMNS: columns, ROWS: rows, SCALAR: 1}
        scratch, code, pointers, after = 0, 0, [], []
        for k, (v, kind, own, dtype) in enumerate(zip(outs, kinds, per_matrix, function.out_dtypes)):
            count = numbers[kind] * (matrices if own else 1) if kind != WHOLE else 0
            several = parts[kind] * (1 if own else matrices)
            partial = kind != WHOLE and several > 1
            code |= (kind | PARTIAL * partial | PER_MATRIX * own) << 4 * k
            pointers.append(launch.scratch(scratch) if partial else v.buffer)
            if partial:
                side = min(32, 1 << (count - 1).bit_length())
                args = [launch.scratch(scratch), v.buffer, i64(several), i64(count)]
                name = f"SumPartials<{cpp_type(computing(dtype))}, {v.cuda_type}, {side}>"
                after.append(Launch(HEADER, name, args, ceil_div(count, side), tuning.THREADS))
                scratch += ceil_div(several * count * computing(dtype).itemsize, 128) * 128
        splat, shared = (sum((s[d] == 0) << k for k, s in enumerate(ins)) for d in (2, 1))
        moved = sum(v.bytes * math.prod(v.shape) for v in arrays)
        args = SUMMED_ARGS(
            **{"in": [v.buffer for v in arrays]},
            out=pointers,
            in_stride=[s[1] for s in ins],
            in_matrix=[s[0] for s in ins],
            rows=rows,
            columns=columns,
            last_columns=last,
            chunk=chunk,
            exceeds_l2=moved > device.l2_bytes,
        )
        types = [", ".join(v.cuda_type for v in vs) for vs in (outs, arrays)]
        name = (
            f"SummedKernel<Summed<{FUNCTOR}, Types<{types[0]}>, Types<{types[1]}>, {cpp_bool(packs)}, "
            f"{lanes}, {code}, {splat}, {shared}>>"
        )
        first = Launch(HEADER, name, [args], (tiles, chunks, matrices), tuning.THREADS, source=source)
        return (first, *after), scratch

    aligned, scratch = launches(packs)
    if not packs:
        return Plan("summed", aligned, scratch)
    unaligned, more = launches(False)
    return Plan("summed", aligned, max(scratch, more), unaligned)
