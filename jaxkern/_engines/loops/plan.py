"""The launch list of a loop: how many lanes a thread takes, and how many steps it loads ahead."""

import math

from jaxkern._core import define, functor, launch
from jaxkern._core.define import ceil_div
from jaxkern._core.launch import Launch, Plan, i64, struct
from jaxkern._engines.loops import tuning
from jaxkern._engines.loops.generate import PACK

HEADER = "loops/loops.cuh"
NAME = "Body"
MOST_ARRAYS = 40
MOST_BYTES = 4000  # of the arguments of a kernel


def plan(device, core, length, reverse):
    """The launches of a loop of at least one step and one lane, or None where there is no kernel.

    Operands are those that `core` reads: constants, initial carries but for accumulators, xs. Results are `core.results`.
    """
    program = core.program
    lanes = math.prod(d.size for d in program.dims)
    arrays = [*core.consts, *core.carries, *core.xs, *core.carries, *core.ys]
    if len(arrays) > MOST_ARRAYS or lanes >= 1 << 31:
        return None
    if core.function.size > functor.MOST:
        functor.warn_of_size(program.label, core.function.size)
        return None

    def launches(each):
        source, maps = core.source(NAME, each)
        if any(len(groups) > define.MAP_RANK for groups in maps):
            return None
        xs = [core._array(program.operands[k]) for k in core.xs]
        words = sum(ceil_div(a.dtype.itemsize * (each if core.kind(a, each) == PACK else 1), 4) for a in xs)
        threads = lanes // each
        ahead = steps_ahead(words, ceil_div(threads, device.sm_count), length, core.function.size * each)
        block = tuning.THREADS if threads >= tuning.THREADS * 2 * device.sm_count else tuning.FEW_THREADS
        grid = ceil_div(threads, block)
        registers = tuning.OWN_REGISTERS + ahead * words + each * values_of_a_lane(core)
        resident = max(1, min(ceil_div(grid, device.sm_count), 65536 // (block * registers)))
        args = arguments(core, maps, lanes, length)
        flags = ", ".join(str(f).lower() for f in (length % ahead == 0, reverse))
        name = f"LoopKernel<{NAME}, {each}, {ahead}, {block}, {resident}, {flags}>"
        return (Launch(HEADER, name, [args], grid, block, source=source),)

    if bytes_of_arguments(core) > MOST_BYTES:
        return None
    each = lanes_of_a_thread(device, core, lanes)
    single = launches(1)
    if single is None or each == 1:
        return single and Plan("lane", single)
    several = launches(each)
    return Plan("lanes", several, 0, single) if several is not None else Plan("lane", single)


def bytes_of_arguments(core) -> int:
    """An upper bound of the size of `LoopEngine::Args`."""
    arrays = [*core.consts, *core.carries, *core.xs, *core.carries, *core.ys]
    return (len(arrays) + 8) * 8 + 88 * len(core.source(NAME, 1)[1])


def arguments(core, maps, lanes, length):
    """`LoopEngine::Args` of loops.cuh. maps: the groups of each index map of the source."""
    program = core.program
    xs = [core._array(program.operands[k]) for k in core.xs]
    reads = len(core.consts)
    inits, at = [], reads
    for k in range(len(core.carries)):
        inits.append(launch.null if k in program.accumulators else launch.operand(at))
        at += k not in program.accumulators
    sizes = lambda arrays: [*(i64(a.size) for a in arrays), i64(0)]
    return struct(
        *(launch.operand(k) for k in range(reads)),
        launch.null,
        *inits,
        launch.null,
        *(launch.operand(at + k) for k in range(len(xs))),
        launch.null,
        *(launch.result(k) for k in range(len(core.carries))),
        launch.null,
        *(launch.result(len(core.carries) + k) for k in range(len(core.ys))),
        launch.null,
        *map(define._index_map, maps),
        define._index_map([]),
        *sizes(xs),
        *sizes(core.ys),
        i64(lanes),
        i64(length),
    )


def lanes_of_a_thread(device, core, lanes) -> int:
    """Lanes that a thread loads as one vector, if enough threads remain, and enough registers for each."""
    itemsizes = lambda positions: [core.program.operands[k].dtype.itemsize for k in positions]
    stored = [a.dtype.itemsize for a in (*core.carries, *core.ys)]
    each = tuning.VECTOR_BYTES // max([2, *stored, *itemsizes(core.xs), *itemsizes(core.consts)])
    registers = values_of_a_lane(core) + tuning.AHEAD[-1] * sum(itemsizes(core.xs)) / 4
    few = lambda each: lanes // each < tuning.VECTOR_THREADS * device.sm_count
    while each > 1 and (lanes % each or few(each) or each * registers > tuning.VECTOR_REGISTERS):
        each //= 2
    return each


def values_of_a_lane(core) -> int:
    """Registers of a lane beside what is loaded ahead, about."""
    return len(core.xs) + 2 * len(core.carries) + len(core.consts) + len(core.ys)


def steps_ahead(words, threads, length, statements) -> int:
    """Steps that a thread loads ahead. words: that it loads in a step. threads: of a multiprocessor."""
    if not words:
        return tuning.AHEAD[-1]
    resident = min(threads, 1024)
    needed = ceil_div(tuning.IN_FLIGHT, 4 * words * resident)
    fits = [n for n in tuning.AHEAD if n * words <= tuning.AHEAD_WORDS and n * statements <= tuning.BODY]
    enough = [n for n in fits if n >= needed]
    ahead = enough[-1] if enough else fits[0] if fits else tuning.AHEAD[-1] // 2
    while ahead > 1 and ahead >= 2 * length:
        ahead //= 2
    return ahead
