"""The launch list of a loop: whether it is cut in time, the lanes per thread, and the steps that are loaded ahead.

lanes      a thread runs all steps of its lanes
columns    threads and blocks share the steps of a lane, for few lanes whose body is affine in the carry
tiles      the same for one lane
teams      a team of threads shares a lane, where the body reduces along rows; see plan_rows.py
"""

import collections
import math
import sys
import typing

from jaxkern._core import algorithms, define, functor, launch
from jaxkern._core.cpp import Unsupported
from jaxkern._core.define import ceil_div
from jaxkern._core.launch import Launch, Plan, i64, struct
from jaxkern._engines.loops import cut, tuning
from jaxkern._engines.loops.generate import PACK

HEADER = "loops/loops.cuh"
NAME = "Body"
MOST_ARRAYS = 63  # of a call, beside scratch: kMostBuffers of ffi/runtime/handler.cc
MOST_BYTES = 4000  # of the arguments of a kernel
ALGORITHMS = ("lanes", "columns", "rows", "teams")
DTYPES = tuple(define.CUDA_TYPES)


class TooLarge(Unsupported):
    """A body that kernels can run as far as its operations go, but beyond a limit of theirs."""


class Problem(typing.NamedTuple):
    """numbers: of the map of a step, in words of 32 bits. affine: whether the body is affine in its carries. adjacent: whether
    the steps of each lane lie side by side in memory, in arrays with all lanes. row: elements of the longest row along which the
    body reduces. itemsize: bytes of the largest element of xs and ys."""

    lanes: int
    steps: int
    numbers: int = 2
    affine: bool = True
    adjacent: bool = False
    row: int = 0
    itemsize: int = 4


def fits(algorithm, problem, device=None) -> bool:
    if problem.row or algorithm == "teams":
        return problem.row > 0 and algorithm == "teams"
    if algorithm == "lanes":
        return True
    rows = problem.lanes == 1 or problem.adjacent
    return problem.affine and problem.steps < 1 << 31 and (rows if algorithm == "rows" else problem.lanes > 1)


def choose(problem, device=None) -> str:
    if problem.row:
        return "teams"
    sms = device.sm_count if device is not None else 132
    is_small = problem.itemsize <= 2 and problem.numbers < tuning.MANY_NUMBERS
    most = tuning.CUT_LANES * sms * (tuning.CUT_SMALL if is_small else 1)
    few = problem.steps >= tuning.CUT_STEPS and problem.lanes < most
    if problem.adjacent and problem.lanes > 1:  # another algorithm would need transposed arrays
        few = problem.steps >= tuning.CUT_ROW_STEPS
    cuts = "rows" if problem.lanes == 1 or problem.adjacent else "columns"
    return cuts if few and fits(cuts, problem, device) else "lanes"


def plan(device, core, length, reverse):
    """The launches of a loop of at least one step and one lane.

    Raises: TooLarge, which says what is beyond the limits of a kernel.

    Operands are those that `core` reads: constants, initial carries, xs. Results are `core.results`.
    """
    program = core.program
    lanes = math.prod(d.size for d in program.dims)
    check(core, core.function.size)

    def launches(each, block=None):
        source, maps = core.source(NAME, each)
        xs = list(map(core.operand, core.xs))
        words = sum(ceil_div(a.dtype.itemsize * (each if core.kind(a, each) == PACK else 1), 4) for a in xs)
        threads = lanes // each
        ahead = steps_ahead(words, ceil_div(threads, device.sm_count), length, core.function, each)
        if block is None:
            block = tuning.THREADS if threads >= tuning.THREADS * 2 * device.sm_count else tuning.FEW_THREADS
        grid = ceil_div(threads, block)
        registers = tuning.OWN_REGISTERS + ahead * words + each * values_of_a_lane(core)
        resident = max(1, min(ceil_div(grid, device.sm_count), 65536 // (block * registers)))
        args = arguments(core, maps, lanes, length)
        name = f"LoopKernel<{NAME}, {each}, {ahead}, {length % ahead}, {block}, {resident}, {str(reverse).lower()}>"
        return (Launch(HEADER, name, [args], grid, block, source=source),)

    maps = cut.Maps(core)
    affine = bool(maps.numbers) and maps.size <= functor.MOST
    of_steps = [*map(core.operand, core.xs), *core.ys]
    every_lane = any(set(program.dims).issubset(a.dims) for a in of_steps)
    adjacent = every_lane and all(a.step == 1 for a in of_steps)
    itemsize = max((a.dtype.itemsize for a in of_steps if any(a.dims)), default=4)
    problem = Problem(lanes, length, max(1, maps.words), affine, adjacent, itemsize=itemsize)
    algorithm = algorithms.pick("scan", algorithms.forced("scan"), problem, device)
    if algorithm != "lanes":
        args = lambda groups: arguments(core, groups, lanes, length)
        found = cut.plan(device, maps, algorithm, lanes, length, reverse, NAME, args)
        if found is not None:
            return found
    each = lanes_of_a_thread(device, core, lanes)
    block = threads_that_sum(device, core, lanes, length, each)
    if each == 1:
        return Plan("lanes", launches(1, block))
    return Plan("lanes", launches(each, block), 0, launches(1, block and block * each))


def threads_that_sum(device, core, lanes, length, each) -> int | None:
    """The threads of a block that adds up elements of ys that are sums over lanes; None if no block does.

    each: lanes of a thread. Tells `core` so. Otherwise the terms are in memory, and are added up after the loop.
    """
    sums = [core.ys[k - core.program.num_carry] for k in core.program.sums]
    terms = sum(length * a.dtype.itemsize * math.prod(map(a.size, a.dims)) for a in sums)
    if lanes < tuning.SUM_LANES * device.sm_count or terms < tuning.SUM_TERMS:
        return None
    found, least = None, 1
    for block in (tuning.THREADS << k for k in range(3)):
        grid = lanes // (block * each)
        waves = ceil_div(grid, device.sm_count) * device.sm_count
        if lanes % (block * each) or block * each > 1024 or waves > tuning.SUM_WAVES * grid:
            continue
        if least < tuning.SUM_COUNT and (more := core.sum_in_blocks(block * each)) > least:
            found, least = block, more
    core.sum_in_blocks(found * each if found else 1)
    return found


def in_place(core, algorithm) -> dict[int, int]:
    """{operand: result} of the carries whose last value may overwrite the first one, of scans and of while loops.

    One thread runs all steps of a lane: it reads the first carries of the lane before it writes the last ones, and no other thread
    reads them, unless several lanes share a carry.
    """
    if algorithm not in ("lanes", "lane"):
        return {}
    program, inits = core.program, core.inits
    own = lambda k: None not in core.carries[k].dims and len(core.carries[k].dims) == program.rank
    found = {k: program.num_consts + k for k in range(len(core.carries)) if k not in program.linear and own(k)}
    return {len(core.consts) + inits.index(at): k for k, at in found.items() if at in inits}


def check(core, size) -> None:
    """Raises TooLarge, which says what of a body or its arrays is beyond the limits of a kernel. size: of the body.

    No limit depends on the GPU.
    """
    program = core.program
    lanes = math.prod(d.size for d in program.dims)
    check_limits(program, len(core.consts) + len(core.inits) + len(core.xs) + len(core.results), lanes, size)
    _, maps = core.source(NAME, 1)
    if any(len(groups) > define.MAP_RANK for groups in maps):
        raise TooLarge(f"{program.label}: an array lacks every other one of {program.rank} dimensions")
    arrays = [*core.consts, *core.carries, *core.xs, *core.carries, *core.ys]
    if (len(arrays) + 8) * 8 + 88 * len(maps) > MOST_BYTES:  # an upper bound of the size of `LoopEngine::Args`
        raise TooLarge(f"{program.label}: {len(maps)} arrays lack different dimensions, more than a kernel takes")


def check_limits(program, arrays, lanes, size) -> None:
    """Raises TooLarge if the arrays, lanes or statements of a body are too many."""
    if arrays > MOST_ARRAYS:
        raise TooLarge(
            f"{program.label} reads and writes {arrays} arrays, above the limit of {MOST_ARRAYS}: constants, first carries, xs, "
            "last carries and ys, each of the elements of small arrays that the body takes apart"
        )
    if lanes >= 1 << 31:
        raise TooLarge(f"{program.label} has {lanes} lanes, above the limit of 2^31 - 1")
    check_size(program, size)


def check_size(program, size, at_least="") -> None:
    """Raises TooLarge if the statements of a body are too many. at_least: "at least " if `size` does not count all of them."""
    if size > functor.MOST:
        lines = collections.Counter(filter(None, map(program.line, program.steps)))
        place = f"; most of them are at {max(lines, key=lines.__getitem__)}" if lines else ""
        raise TooLarge(
            f"{program.label} has a body with a size of {at_least}{size} statements, above the limit of {functor.MOST}{place}"
        )


def arguments(core, maps, lanes, length):
    """`LoopEngine::Args` of loops.cuh. maps: the groups of each index map of the source."""
    reads, zeros = len(core.consts), core.zeros
    inits, at = [], reads
    for k in range(len(core.carries)):
        inits.append(launch.null if k in zeros else launch.operand(at))
        at += k not in zeros
    return struct(
        *(launch.operand(k) for k in range(reads)),
        launch.null,
        *inits,
        launch.null,
        *(launch.operand(at + k) for k in range(len(core.xs))),
        launch.null,
        *(launch.result(k) for k in range(len(core.carries))),
        launch.null,
        *(launch.result(len(core.carries) + k) for k in range(len(core.ys))),
        launch.null,
        *map(define.index_map, maps),
        define.index_map([]),
        i64(lanes),
        i64(length),
    )


def lanes_of_a_thread(device, core, lanes) -> int:
    """Lanes that a thread loads as one vector, if enough threads remain, and enough registers for each."""
    itemsizes = lambda positions: [core.program.operands[k].dtype.itemsize for k in positions]
    stored = [a.dtype.itemsize for a in (*core.carries, *core.ys)]
    each = tuning.VECTOR_BYTES // max([2, *stored, *itemsizes(core.xs), *itemsizes(core.consts)])
    registers = values_of_a_lane(core) + tuning.LEAST_AHEAD * sum(itemsizes(core.xs)) / 4
    threads = tuning.BUSY_THREADS if core.function.size >= tuning.BUSY_BODY else tuning.VECTOR_THREADS
    few = lambda each: lanes // each < threads * device.sm_count
    long = lambda each: each * core.function.size * tuning.LEAST_AHEAD > tuning.BODY
    while each > 1 and (lanes % each or few(each) or each * registers > tuning.VECTOR_REGISTERS or long(each)):
        each //= 2
    return each


def values_of_a_lane(core) -> int:
    """Registers of a lane beside what is loaded ahead, about."""
    return len(core.xs) + 2 * len(core.carries) + len(core.consts) + len(core.ys)


def steps_ahead(words, threads, length, function, each) -> int:
    """The steps that a thread loads ahead. words: its words per step. threads: threads per multiprocessor. each: its lanes."""
    most = max(1, min(length, tuning.MOST_AHEAD, tuning.BODY // max(1, function.size * each)))
    most = min(most, max(tuning.LEAST_AHEAD, tuning.LATENCY // max(1, function.code * each)))
    wanted = tuning.LEAST_AHEAD
    if words:
        most = max(1, min(most, tuning.AHEAD_WORDS // words))
        in_flight = tuning.IN_FLIGHT if threads >= tuning.VECTOR_THREADS else tuning.IN_FLIGHT_OF_FEW
        wanted = max(wanted, ceil_div(in_flight, 4 * words * min(threads, 1024)))
    wanted = min(wanted, most)
    # The fewest steps that fill no round, of about as many steps ahead.
    return min(range(ceil_div(3 * wanted, 4), wanted + 1), key=lambda n: (length % n, -n))


algorithms.register(sys.modules[__name__], "scan")
