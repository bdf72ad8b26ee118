"""The launch list of a loop with rows: how many threads share a lane, and how many lanes a block has.

A team of threads runs a lane: part of a warp for rows of up to 32 elements, a warp for longer ones, a block for long ones and for
matrices: a thread or a few threads reduce one row or column of them at a time.
"""

import math

from jaxkern._core import define, launch
from jaxkern._core.define import ceil_div
from jaxkern._core.launch import Launch, Plan, i64, struct
from jaxkern._engines.loops import tuning
from jaxkern._engines.loops.plan import TooLarge, check_limits
from jaxkern._engines.loops.row_pieces import Layout

HEADER = "loops/row_loops.cuh"
NAME = "Body"


def plan(device, core, length, reverse, always=False):
    """The launches of a loop of at least one step and one lane. Sets core.blocks. always: also where XLA is estimated to be faster.

    Raises: TooLarge, which says what is beyond the limits of a kernel, or that XLA is faster.
    """
    program = core.program
    lanes = math.prod(d.size for d in program.dims)
    arrays = len(core.consts) + len(program.inits) + len(core.xs) + len(program.results)
    check_limits(program, arrays, lanes, core.size)
    layout = layout_of(device, core, lanes)
    if layout is None:
        raise TooLarge(f"{program.label} sums matrices of fewer than 32 elements along a row over some of the lanes")
    writer = core.writer(layout, device.shared_memory)
    while writer.bytes > device.shared_memory and layout.teams > 1 and layout.threads > 32:
        fewer = max(32, layout.teams // 2 * layout.team)
        layout = layout._replace(threads=fewer)
        writer = core.writer(layout, device.shared_memory)
    if writer.bytes > device.shared_memory:
        kilobytes = (
            f"{writer.bytes / 1024:.0f} KB of shared memory, above the limit of {device.shared_memory // 1024} KB"
        )
        raise TooLarge(f"{program.label} has rows and matrices that take {kilobytes}")
    if any(len(groups) > define.MAP_RANK for groups in writer.maps):
        raise TooLarge(f"{program.label}: an array lacks every other one of {program.rank} dimensions")
    core.blocks = ceil_div(lanes, layout.teams)
    if not always and not is_worth_it(device, core, layout, lanes, writer.unstaged):
        raise TooLarge(f"{program.label} has steps so long that XLA's kernels, with the whole GPU for each, are faster")
    ahead = steps_ahead(core, layout, length)
    args = struct(
        *(launch.operand(k) for k in range(arrays - len(program.results))),
        launch.null,
        *(launch.result(k) for k in range(len(program.results))),
        launch.null,
        *map(define.index_map, writer.maps),
        define.index_map([]),
        i64(lanes),
        i64(length),
    )
    name = f"RowLoopKernel<{NAME}, {layout.threads}, {ahead}, {length % ahead}, {str(reverse).lower()}>"
    made = Launch(HEADER, name, [args], core.blocks, layout.threads, shared=writer.bytes, source=writer.text(NAME))
    return Plan("teams", (made,))


def layout_of(device, core, lanes) -> Layout | None:
    """How threads are shared out; None if there is no way."""
    most = max(core.rows(), default=1)
    serial = max((math.prod(serial_of(nest)) for nest in core.every_nest), default=1)
    if most <= 32:
        width = 1 << (most - 1).bit_length()
    elif serial == 1 and most <= tuning.WARP_ROW:
        width = 32
    else:
        width = min(1024, ceil_div(most if serial > 1 else ceil_div(most, 4), 32) * 32)
    # Where there are few lanes, more threads share what is reduced for an element.
    split, enough = 1, tuning.ROW_THREADS * device.sm_count
    while split < 8 and 2 * split * width <= 1024 and serial >= 16 * split and 2 * split * width * lanes <= enough:
        split *= 2
    # The teams of a block share matrices, and sums of matrices.
    team = width * split
    if core.alone:
        return Layout(width, split, team) if team >= 32 else None
    matrices = any(len(core.program.axes(core.program.operands[k])) > 1 for k in core.consts)
    teams = max(1, (1024 if team > 32 and (matrices or core.per_block) else 256) // team)
    while teams > 1 and teams // 2 * team >= 32 and 10 * lanes < 9 * teams * device.sm_count:
        teams //= 2
    return Layout(width, split, max(32, teams * team))


def serial_of(nest) -> tuple:
    """The rows that a thread reduces, rather than a team."""
    return nest.over[1:] if nest.over and not nest.out else nest.over


def is_worth_it(device, core, layout, lanes, unstaged) -> bool:
    """Whether XLA's kernels, which spread a step over the whole GPU, take longer with their launches.

    unstaged: bytes of the matrices that a team reads from memory in every step.
    """
    own = work(core, layout)
    of_block = own * ceil_div(core.blocks, device.sm_count) * ceil_div(layout.threads, tuning.ISSUED)
    needed = sum((nest.function.size + 4) * math.prod((*nest.out, *nest.over)) for nest in core.every_nest)
    of_gpu = needed * lanes / (device.sm_count * tuning.ISSUED)
    read = unstaged <= tuning.UNSTAGED_OF_LANE and unstaged * lanes <= tuning.UNSTAGED
    return read and of_block <= tuning.ROW_WASTE * of_gpu + tuning.ROW_STEP


def steps_ahead(core, layout, length) -> int:
    """The steps that a thread loads ahead: fewer, the longer a step takes."""
    arrays = [core.operand(k) for k in core.xs]
    words = sum(ceil_div(a.sizes[a.rows[0]] if a.rows else 1, layout.width) for a in arrays if len(a.rows) < 2)
    wanted = ceil_div(tuning.ROW_LATENCY, work(core, layout))
    most = max(1, min(length, wanted, tuning.ROW_AHEAD, tuning.ROW_WORDS // max(1, words)))
    return min(range(ceil_div(3 * most, 4), most + 1), key=lambda n: (length % n, -n))


def work(core, layout) -> int:
    """Statements that a thread runs in a step, about."""

    def loops(nest):
        own = nest.out or nest.over[:1]
        threads = layout.width if len(nest.out) < 2 else layout.team
        return ceil_div(math.prod(own), threads) * ceil_div(
            math.prod(serial_of(nest)), layout.split if len(nest.out) < 2 else 1
        )

    return sum((nest.function.size + 4) * loops(nest) + 16 for nest in core.every_nest)
