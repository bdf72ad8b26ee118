"""The kernel of a while loop in which each lane stops on its own: what it reads and writes, its source, its launch."""

import math

from jaxkern._core.define import ceil_div
from jaxkern._core.launch import Launch, Plan
from jaxkern._engines.loops import tuning
from jaxkern._engines.loops.generate import Core
from jaxkern._engines.loops.plan import NAME, arguments, check

HEADER = "loops/while.cuh"


class WhileCore(Core):
    """What the kernel of a `WhileProgram` reads and writes. condition: the functor that says whether a lane goes on."""

    def __init__(self, program):
        super().__init__(program)
        self.condition = self._function([program.condition])

    @property
    def size(self) -> int:
        """Statements of a step."""
        return self.function.size + self.condition.size

    def source(self, name, lanes):
        text, maps = super().source(name, lanes)
        return text + self.condition.source(f"{name}Condition"), maps


def plan(device, core):
    """The launch of a loop of at least one lane.

    Raises: TooLarge, which says what is beyond the limits of a kernel.

    Operands are those that `core` reads: constants, initial carries. Results are `core.results`.
    """
    check(core, core.size)
    lanes = math.prod(d.size for d in core.program.dims)
    source, maps = core.source(NAME, 1)
    rounds = max(1, min(tuning.WHILE_ROUNDS, lanes // (tuning.WHILE_THREADS * device.sm_count)))
    threads = 32 * ceil_div(lanes, 32 * rounds)
    block = tuning.THREADS if threads >= tuning.THREADS * 2 * device.sm_count else tuning.FEW_THREADS
    name = f"WhileKernel<{NAME}, {NAME}Condition, {block}, {tuning.WHILE_IDLE}>"
    given = [arguments(core, maps, lanes, 32 * rounds)]
    return Plan("lane", (Launch(HEADER, name, given, ceil_div(threads, block), block, source=source),))
