"""Launch lists: the kernels that a plan runs, and the text that carries them through XLA.

A plan is a pure function of a problem and a device that returns a `Plan`: the name of the algorithm, the kernels to
launch in order, and the bytes of scratch that they share. `lower` puts it into the program as one custom call, and the
runtime (ffi/runtime) compiles the kernels before the first execution and launches them.

    Launch("reduction/rows.cuh", "RowSum<float, 4>", grid=132, block=256,
           args=[operand(0), result(0), i64(rows), struct(u32(3), i64(5))])

names a kernel template in a header of ffi/kernels, and all its arguments. Arguments are pointers to buffers (`operand`,
`result`, `scratch`), scalars, or structs of these, laid out as C++ lays out a struct without base classes; params.py makes
structs from the names of their members. Template arguments are constants that change the code. Sizes, strides and seeds are
arguments of the kernel, so that one compiled kernel serves many shapes.
"""

import dataclasses
import hashlib
import itertools
import re
import typing

import jax
import numpy as np

from jaxkern._core import registry, runtime, stablehlo
from jaxkern._core.package import __version__


class Buffer(typing.NamedTuple):
    """A pointer to an operand, a result or the scratch of the call, plus an offset in bytes."""

    kind: str
    index: int
    offset: int = 0


class Scalar(typing.NamedTuple):
    """A number of a C type, by value."""

    type: str
    value: int | float


class Struct(typing.NamedTuple):
    """A struct by value; members are buffers, scalars and structs. `align` is its alignas, if it has one."""

    members: tuple
    align: int = 1


def operand(index: int, offset: int = 0) -> Buffer:
    return Buffer("operand", index, offset)


def operands(types):
    """The buffers of the operands in a NamedTuple, `null` for None."""
    numbers = itertools.count()
    return type(types)(*(null if a is None else operand(next(numbers)) for a in types))


def result(index: int, offset: int = 0) -> Buffer:
    return Buffer("result", index, offset)


def scratch(offset: int = 0) -> Buffer:
    return Buffer("scratch", 0, offset)


def _scalar(type, lowest, highest):
    def make(value) -> Scalar:
        value = int(value)
        if not lowest <= value <= highest:
            raise OverflowError(f"{value} does not fit a {type}")
        return Scalar(type, value)

    return make


i32 = _scalar("i32", -(2**31), 2**31 - 1)
u32 = _scalar("u32", 0, 2**32 - 1)
i64 = _scalar("i64", -(2**63), 2**63 - 1)
u64 = _scalar("u64", 0, 2**64 - 1)
_bool = _scalar("u8", 0, 1)
null = Scalar("u64", 0)  # a null pointer


def boolean(value) -> Scalar:
    return _bool(bool(value))


def f32(value) -> Scalar:
    return Scalar("f32", float(np.float32(value)))


def f64(value) -> Scalar:
    return Scalar("f64", float(value))


def struct(*members, align: int = 1) -> Struct:
    return Struct(members, align)


def array(members, size: int, fill: Scalar) -> tuple:
    """The elements of a C array of `size` elements: `members`, then `fill`. Unpack the result in `struct`."""
    members = tuple(members)
    return members + (fill,) * (size - len(members))


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel with its arguments.

    header: relative to ffi/kernels. name: the kernel in namespace jaxkern, with its template arguments.
    grid: blocks, one number or up to three. block: threads, likewise. cluster: blocks of a cluster along x.
    shared: bytes of dynamic shared memory.
    waves: if not 0, the grid has at most this many times the blocks that the GPU runs at once.
    source: definitions in namespace jaxkern that template arguments name, such as the functor of a user's function.
    """

    header: str
    name: str
    args: typing.Sequence
    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    cluster: int = 1
    shared: int = 0
    waves: int = 0
    source: str = ""

    def grid3(self) -> tuple[int, int, int]:
        return _three(self.grid)

    def block3(self) -> tuple[int, int, int]:
        return _three(self.block)


@dataclasses.dataclass(frozen=True)
class Memset:
    """Sets `bytes` bytes of a buffer to a value."""

    buffer: Buffer
    bytes: int
    value: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernels that solve a problem, in order, and the bytes of scratch that they need.

    `launches` require buffers that are aligned to 16 bytes, as XLA's are. If one is not (a slice in the middle of another
    array), the runtime runs `unaligned` instead, which serves any address; their kernels are compiled when they are first needed.
    None: `launches` serve any address.
    """

    algorithm: str
    launches: tuple
    scratch: int = 0
    unaligned: tuple | None = None

    @property
    def shared(self) -> int:
        """The most dynamic shared memory that a block of any launch has, in bytes."""
        steps = (*self.launches, *(self.unaligned or ()))
        return max((step.shared for step in steps if isinstance(step, Launch)), default=0)


ALIGNMENT = 16  # bytes
MOST_BLOCKS, MOST_BLOCKS_Y = 2**31 - 1, 2**16 - 1  # of a grid: along x, and along y or z


def planned(algorithm: str, launches, scratch: int = 0, unaligned=None) -> Plan | None:
    """The plan of these launches; None if one of them has more blocks along x than a grid may have."""
    if any(step.grid3()[0] > MOST_BLOCKS for step in (*launches, *(unaligned or ())) if isinstance(step, Launch)):
        return None
    return Plan(algorithm, tuple(launches), scratch, None if unaligned is None else tuple(unaligned))


def _three(size) -> tuple[int, int, int]:
    size = (size,) if isinstance(size, (int, np.integer)) else tuple(size)
    return (*map(int, size), *(1,) * (3 - len(size)))


# ---- the text


def _argument(arg, place) -> str:
    if isinstance(arg, Buffer):
        return f"p{place(arg)}+{arg.offset}"
    if isinstance(arg, Struct):
        return f"{{{arg.align} {' '.join(_argument(a, place) for a in arg.members)} }}"
    value = float.hex(arg.value) if arg.type[0] == "f" and np.isfinite(arg.value) else arg.value
    return f"{arg.type}:{value}"


def lines(launches, place):
    """The lines of a launch list. place(buffer): what stands for a buffer after its `p`."""
    for step in launches:
        if isinstance(step, Memset):
            yield f"memset p{place(step.buffer)}+{step.buffer.offset} {step.value} {step.bytes}"
            continue
        grid, block = (",".join(map(str, _three(size))) for size in (step.grid, step.block))
        yield f"launch grid={grid} block={block} cluster={step.cluster} shared={step.shared} waves={step.waves}"
        yield f"header {step.header}"
        if step.source:
            yield "source " + step.source.replace("\n", "\\n")
        yield f"kernel {step.name}"
        yield f"args {' '.join(_argument(a, place) for a in step.args)}"


def text(operation: str, plan: Plan, operands, results) -> str:
    """The launch list as text, for operands and results of these types; ffi/runtime/program.cc parses it.

    The text is the same in every process, so that compilation caches find the program again.
    """
    buffers = [*operands, *results]

    def place(buffer):
        if buffer.kind == "scratch":
            return len(buffers)
        if not 0 <= buffer.index < (len(operands) if buffer.kind == "operand" else len(results)):
            raise IndexError(f"{operation}: there is no {buffer.kind} {buffer.index}")
        return buffer.index + (buffer.kind == "result") * len(operands)

    describe = lambda avals: ", ".join(f"{a.dtype.name}[{','.join(map(str, a.shape))}]" for a in avals)
    sizes = [a.size * a.dtype.itemsize for a in buffers] + [plan.scratch] * (plan.scratch > 0)
    head = [
        f"jaxkern {__version__}",
        f"operation {operation}({describe(operands)}) -> ({describe(results)}), {plan.algorithm}",
        f"bytes {' '.join(map(str, sizes))}",
    ]
    body = [] if plan.unaligned is None else ["alignment 16", *lines(plan.launches, place)]
    body += ["alignment 1", *lines(plan.launches if plan.unaligned is None else plan.unaligned, place)]
    return "\n".join(head + body) + "\n"


def _key(program: str) -> np.int64:
    return np.frombuffer(hashlib.sha256(program.encode()).digest()[:8], np.int64)[0]


# ---- lowering


def lower(ctx, operation: str, plan: Plan, operands, *, whole: bool = False, **options):
    """Emits `plan` as a custom call of the target `operation`; returns the results.

    whole: an operand that is a contiguous slice is read inside of the array that it is a slice of. This array is then the operand of
        the call, and XLA does not copy the slice.
    options: passed to `jax.ffi.ffi_lowering`, such as operand_output_aliases.

    XLA for GPUs fuses slices of operands, and dynamic-update-slices of results, with a custom call: it passes pointers into
    the larger arrays (DynamicSliceFusionRewriterV2, on by default since jaxlib 0.11). It updates in place, even where
    the call reads the same array, so that kernels would write what others still read. And where a slice is an operand
    that a result overwrites, it passes another array as the result. Barriers keep it from both. Other operands may be slices.
    XLA copies slices whose bytes are not a multiple of 256.
    """
    results, overwritten = list(ctx.avals_out), options.get("operand_output_aliases") or ()
    if whole:
        ctx, plan, operands = _with_whole_arrays(ctx, plan, operands, overwritten)
    program = text(operation, plan, ctx.avals_in, results)
    registry.prefetch(program)
    if runtime.dump_folder() and not registry.gpu_present():  # without a GPU, nothing else compiles them
        for kernel in kernels(program):
            registry.dump(*kernel)
    if plan.scratch:
        results.append(jax.core.ShapedArray((plan.scratch,), np.dtype(np.uint8)))
    operands = [stablehlo.apart(x) if k in overwritten else x for k, x in enumerate(operands)]
    rule = jax.ffi.ffi_lowering(operation, **options)
    found = rule(ctx.replace(avals_out=results), *operands, program=program, key=_key(program))
    return [stablehlo.apart(x) for x in found[: len(ctx.avals_out)]]


def _with_whole_arrays(ctx, plan: Plan, operands, overwritten) -> tuple:
    """(ctx, plan, operands) with the arrays that operands are slices of in place of these."""
    avals, values, begins = list(ctx.avals_in), list(operands), {}
    for k, (aval, x) in enumerate(zip(avals, values)):
        found = None if k in overwritten else stablehlo.whole_of(x)
        if found is None:
            continue
        value, first = found
        begin = first * aval.dtype.itemsize
        if plan.unaligned is None or begin % ALIGNMENT == 0:  # the runtime looks at where arrays begin
            shape = tuple(stablehlo.ir.RankedTensorType(value.type).shape)
            avals[k], values[k], begins[k] = jax.core.ShapedArray(shape, aval.dtype), value, begin
    return ctx.replace(avals_in=avals), _moved(plan, begins), values


def _moved(plan: Plan, begins) -> Plan:
    """The plan with each operand `begins[operand]` bytes further."""

    def argument(arg):
        if isinstance(arg, Struct):
            return Struct(tuple(map(argument, arg.members)), arg.align)
        is_operand = isinstance(arg, Buffer) and arg.kind == "operand"
        return arg._replace(offset=arg.offset + begins.get(arg.index, 0)) if is_operand else arg

    def steps(launches):
        for step in launches:
            if isinstance(step, Memset):
                yield dataclasses.replace(step, buffer=argument(step.buffer))
            else:
                yield dataclasses.replace(step, args=[*map(argument, step.args)])

    if not begins:
        return plan
    unaligned = None if plan.unaligned is None else tuple(steps(plan.unaligned))
    return dataclasses.replace(plan, launches=tuple(steps(plan.launches)), unaligned=unaligned)


# ---- reading launch lists back


def programs(lowered: str) -> list[str]:
    """The launch lists in the text of a lowered program (`jax.jit(f).lower(...).as_text()`), in order.

    `jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))` lowers without a GPU.
    """
    unescape = lambda text: re.sub(r"\\(\\|[0-9A-F]{2})", lambda m: "\\" if m[1] == "\\" else chr(int(m[1], 16)), text)
    return [unescape(found) for found in re.findall(r'\bprogram = "(jaxkern [^"]*)"', lowered)]


class Kernel(typing.NamedTuple):
    """The kernel of a launch: arguments of `jaxkern._runtime.compile`."""

    header: str
    name: str
    source: str


_LAUNCH = re.compile(
    r"^launch grid=(\S+) block=(\S+) cluster=(\d+) shared=(\d+) waves=(\d+)\n"
    r"header (.*)\n(?:source (.*)\n)?kernel (.*)$",
    re.MULTILINE,
)


def variants(program: str) -> list[list[Launch]]:
    """The launches of a launch list, without their arguments: those for aligned buffers first, then those for any buffers."""
    found = []
    for text in re.split(r"^alignment ", program, flags=re.MULTILINE)[1:]:
        steps = []
        for grid, block, cluster, shared, waves, header, source, name in _LAUNCH.findall(text):
            sizes = (tuple(map(int, size.split(","))) for size in (grid, block))
            source = source.replace("\\n", "\n")
            steps.append(Launch(header, name, (), *sizes, int(cluster), int(shared), int(waves), source))
        found.append(steps)
    return found


def kernels(program: str, unaligned: bool = True) -> list[Kernel]:
    """The kernel of each launch of a launch list. unaligned: also of the launches for buffers that are not aligned."""
    lists = variants(program) if unaligned else variants(program)[:1]
    return [Kernel(step.header, step.name, step.source) for steps in lists for step in steps]


def title(program: str) -> tuple[str, str]:
    """(The operation with the types of its operands and results, the algorithm) of a launch list."""
    line = re.search(r"^operation (?:jaxkern_)?(.*\)), (.*)$", program, re.MULTILINE)
    assert line is not None
    return line[1], line[2]
