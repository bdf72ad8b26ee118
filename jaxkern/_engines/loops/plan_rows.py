"""The launch list of a loop with rows: how many threads share a lane, and how many lanes a block has.

A team of threads runs a lane: part of a warp for rows of up to 32 elements, a warp for longer ones, a block for long ones and for
matrices, of which a thread reduces a row or a column at a time.
"""

import math

from jaxkern._core import define, functor, launch
from jaxkern._core.define import ceil_div
from jaxkern._core.launch import Launch, Plan, i64, struct
from jaxkern._engines.loops import tuning

HEADER = "loops/row_loops.cuh"
NAME = "Body"


def plan(device, core, length, reverse):
    """The launches of a loop of at least one step and one lane, or None where there is no kernel. Sets core.blocks."""
    program = core.program
    lanes = math.prod(d.size for d in program.dims)
    inits = program.num_carry - len(program.accumulators)
    arrays = len(core.consts) + inits + len(core.xs) + len(program.results)
    if arrays > tuning.MOST_ARRAYS or lanes >= 1 << 31 or core.size > functor.MOST:
        return None
    team = team_of(core)
    threads = threads_of(device, core, team, lanes)
    if threads is None:
        return None
    writer = core.writer(team, threads, device.shared_memory)
    while writer.bytes > device.shared_memory and threads // 2 >= max(team, 32):
        threads //= 2
        writer = core.writer(team, threads, device.shared_memory)
    if writer.bytes > device.shared_memory or any(len(groups) > define.MAP_RANK for groups in writer.maps):
        return None
    core.blocks = ceil_div(lanes, threads // team)
    if not is_worth_it(device, core, team, threads, lanes, writer.unstaged):
        return None
    ahead = steps_ahead(core, team, length)
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
    name = f"RowLoopKernel<{NAME}, {threads}, {ahead}, {length % ahead}, {str(reverse).lower()}>"
    made = Launch(HEADER, name, [args], core.blocks, threads, shared=writer.bytes, source=writer.text(NAME))
    return Plan("teams", (made,))


def team_of(core) -> int:
    """The threads that share a lane."""
    most = max(core.rows(), default=1)
    if most <= 32:
        return 1 << (most - 1).bit_length()
    has_matrices = any(len(nest.out) + len(nest.over) > 1 for nest in core.every_nest)
    if not has_matrices and most <= tuning.WARP_ROW:
        return 32
    return min(1024, ceil_div(most if has_matrices else ceil_div(most, 4), 32) * 32)


def threads_of(device, core, team, lanes) -> int | None:
    """The threads of a block: the teams of a block share matrices, and sums of matrices."""
    if core.alone:
        return team if team >= 32 else None
    matrices = any(len(core.program.axes(core.program.operands[k])) > 1 for k in core.consts)
    most = max(team, 1024 if team > 32 and (matrices or core.per_block) else 256)
    threads = most // team * team
    least = max(32, team)
    while threads // 2 >= least and threads // 2 % team == 0 and 10 * lanes * team < 9 * threads * device.sm_count:
        threads //= 2
    return ceil_div(threads, 32) * 32


def is_worth_it(device, core, team, threads, lanes, unstaged) -> bool:
    """Whether XLA's kernels, which spread a step over the whole GPU, take longer with their launches.

    unstaged: bytes of the matrices that a team reads from memory in every step.
    """
    own = work(core, team)
    of_block = own * ceil_div(core.blocks, device.sm_count) * ceil_div(threads, tuning.ISSUED)
    of_gpu = own * lanes * team / (device.sm_count * tuning.ISSUED)
    return of_block <= 2 * of_gpu + tuning.ROW_STEP and unstaged * lanes <= tuning.UNSTAGED


def steps_ahead(core, team, length) -> int:
    """The steps that a thread loads ahead: fewer, the longer a step takes."""
    arrays = [core.operand(k) for k in core.xs]
    words = sum(ceil_div(a.sizes[a.rows[0]] if a.rows else 1, team) for a in arrays if len(a.rows) < 2)
    wanted = ceil_div(tuning.ROW_LATENCY, work(core, team))
    most = max(1, min(length, wanted, tuning.ROW_AHEAD, tuning.ROW_WORDS // max(1, words)))
    return min(range(ceil_div(3 * most, 4), most + 1), key=lambda n: (length % n, -n))


def work(core, team) -> int:
    """Statements that a thread runs in a step, about."""
    loops = lambda nest: (
        ceil_div(math.prod(nest.out), team) * math.prod(nest.over) if nest.out else ceil_div(math.prod(nest.over), team)
    )
    return sum((nest.function.size + 4) * loops(nest) + 16 for nest in core.every_nest)
