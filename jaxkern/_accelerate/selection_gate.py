"""Which selections, sorts, searches and counts run on jaxkern: the ones that it runs faster; see gate.py.

Each function returns (taken, reason). force: whatever kernels can run is taken. Numbers in brackets are XLA's time over ours by the
profiler, on an H100 with jaxlib 0.11.2; `python -m benchmarks selected` measures them.
"""

import jax.numpy as jnp

from jaxkern._accelerate import gate
from jaxkern._ops.select import count as counting
from jaxkern._ops.select import sort_rows
from jaxkern._ops.select import top_k as selection

# A selection in place of a sort takes three kernels: columns for each element, and elements [8 of 128x1024 1.6, 1 of 64x256 1.9, 16 of
# 1024x512 3.0, 128 of 1024x256 0.6].
PART_WIDTH, PART_ELEMENTS = 16, 1 << 13
# Elements of sorts: by a network [1024x64 1.5, 1024x256 2.3, 128x128 0.8 with an older kernel], and by a block for each row [8x1024 2.3,
# 128x1024 2.0, 64x4096 3.7; 1x4096 in bfloat16 1.2].
NETWORK_ELEMENTS, BLOCK_ELEMENTS = 1 << 16, 1 << 12
# Keys of 8 bytes: a block sorts rows from this width on [float64: 32768x512 1.5, 65536x256 0.6].
WIDE_BLOCK = 512
# XLA calls CUB for few rows, which ties or wins only for keys of 8 bytes alone, and for short ones with indices [one row: int32 2^20 1.4, 2^24
# 1.01, with indices 1.08; float32 2^20 1.6, 2^26 1.5; bfloat16 2^26 1.07; int64 2^24 0.97, with indices 13]; and where XLA gathers values
# [2^24 float32 0.95; carried 1.5].
FEW_ROWS, LONG = 8, 1 << 22
# Elements of an array that lie in shared memory. Where XLA compares all or has unrolled the steps, we win for these alone [unrolled: 16384
# in 65536 0.7, 1024 in 256 1.6; all compared: 1 in 2^20 0.5, 1024 in 256 1.6]; in a loop XLA takes 40 kernels and more [1 in 2^20 9].
SEARCHED = 1 << 12
# XLA adds atomically, as fast as memory while numbers are few [16384 into 64 1.4, 4096 into 64 0.7; by atomics of ours 0.95].
COUNT_ELEMENTS = 1 << 14


def top_k(dtype, rows: int, columns: int, k: int, force=False) -> tuple[bool, str]:
    """lax.top_k. XLA sorts all but few rows [k 8 of 128x1024 2.4, 128 1.8; 8 to 128 of 4096x256 3 to 8; 512 of 4096x1024 3.0]."""
    algorithm = _chosen(selection, rows, columns, k, dtype=dtype)
    if algorithm is None and k > selection.MOST:  # the first of a sort [32000 of 8x32000 2.9]
        return sort(jnp.dtype(f"int{8 * dtype.itemsize}"), rows, columns, 2, force=force)
    if not algorithm:
        return False, f"no kernel for the {k} largest of {columns} elements of {dtype}"
    if not force and dtype.itemsize == 1:
        return False, f"no {dtype} was measured"
    if not force and k == 1 and dtype.itemsize >= 4:
        return False, "XLA reduces for the largest one"
    return True, "rows are sorted in one kernel" if algorithm in selection.SORTS else "a selection"


def part(dtype, rows: int, columns: int, count: int, force=False) -> tuple[bool, str]:
    """A sort; the program uses `count` elements at one end of each row."""
    algorithm = _chosen(selection, rows, columns, count, dtype=dtype)
    if count > selection.MOST or not algorithm:
        return False, f"no kernel for {count} of {columns} elements of {dtype}"
    if algorithm in selection.SORTS and not force:
        return False, "rows are sorted whole"
    enough = columns >= PART_WIDTH * count and rows * columns >= PART_ELEMENTS
    taken = force or (enough and dtype.itemsize > 1)
    return taken, f"a selection in place of a sort: {count} of {columns} elements are used"


def sort(dtype, rows: int, columns: int, operands: int, gathered: int = 0, force=False) -> tuple[bool, str]:
    """lax.sort of one key. operands: with the key. gathered: those that XLA gathers in the order of the keys."""
    algorithm = _chosen(sort_rows, rows, columns, dtype=dtype)
    if not algorithm:
        return False, f"no kernel for rows of {columns} keys of {dtype}"
    if force:
        return True, "by our kernels"
    if operands > 3 or dtype.itemsize == 1:
        return False, f"no sort of {operands} arrays by {dtype} was measured"
    elements, wide = rows * columns, dtype.itemsize == 8
    if algorithm == "tiles":
        if rows < FEW_ROWS and (gathered or (wide and (operands == 1 or elements < LONG))):
            return False, f"XLA sorts {rows} rows of {dtype} as fast"
        return True, "digit by digit, rows in tiles"
    if algorithm == "block":
        if wide and columns < WIDE_BLOCK:
            return False, f"XLA sorts rows of {columns} keys of {dtype} as fast"
        least = BLOCK_ELEMENTS
    else:
        least = NETWORK_ELEMENTS
    enough = elements >= least
    return enough, "rows in one kernel" if enough else gate.few(elements, "elements", least)


def search(dtype, size: int, queries: int, by_steps: bool, force=False) -> tuple[bool, str]:
    """jnp.searchsorted of so many queries in an array of this size. by_steps: XLA starts kernels for each step, or sorts."""
    if dtype.itemsize > 4 or not 0 < size < 2**31 or not queries or jnp.issubdtype(dtype, jnp.complexfloating):
        return False, f"no kernel that searches {size} elements of {dtype}"
    taken = force or by_steps or size <= SEARCHED
    return taken, "all steps in one kernel" if taken else f"XLA has one kernel, too, and {size} elements are many"


def count(dtype, elements: int, bins: int, force=False) -> tuple[bool, str]:
    """A scatter that adds one number at each of so many indices, of this type."""
    algorithm = _chosen(counting, bins, elements, dtype=dtype)
    if not algorithm:
        return False, f"no kernel that counts {dtype}"
    if algorithm == "global" and not force:  # by atomics, as in XLA
        return False, f"{bins} bins are many"
    enough = force or elements >= COUNT_ELEMENTS
    return enough, "counts in shared memory" if enough else gate.few(elements, "indices", COUNT_ELEMENTS)


def _chosen(family, *sizes, dtype) -> str | None:
    """The algorithm of a family of kernels for a problem; None if there is none."""
    return family.choose(family.Problem(*sizes, dtype.name)) if all(sizes) else None
