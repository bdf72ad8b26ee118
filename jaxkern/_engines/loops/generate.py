"""From the body of a scan to C++: the struct `F` that ffi/kernels/loops/loops.cuh takes.

    core = Core(program)            what the kernel reads and writes
    core.source("Body", lanes=4)    the struct, for threads of 4 lanes, and its index maps

The body is one functor, which _core/cpp.py writes from scalar operations: constants, carries, elements of xs and indices
in; new carries and elements of ys out.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jaxkern._core import functor
from jaxkern._core.cpp import cpp_type
from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import REDUCTIONS, Constant, compute, merged, widened
from jaxkern._engines.loops import pairs
from jaxkern._engines.loops.program import MOVES

INDEX = np.dtype(np.int32)
SAME, PACK, EACH = range(3)  # how the lanes of a thread lie in an array: LaneKind of loops.cuh
_WHOLE, _NONE = -1, -2  # the map of an array with all lanes in order, and of one without lanes


@dataclasses.dataclass(eq=False)
class Array:
    """An array in memory. dims: for one step, its dimensions of the lanes; None for a dimension that it lacks or has with size 1.

    order: the dimensions in memory of an array of all steps, slowest first: 0 is the dimension of steps, k is dims[k - 1]. Empty
        if they are in order. A dimension that it leaves out is not in memory: all elements along it are one.
    length: the number of steps; needed for another order.
    summed: {dimension: how many adjacent elements along it a block adds up: they are one in memory}. inner: the distance of two lanes
        that it adds up.
    """

    dims: tuple
    dtype: np.dtype
    order: tuple = ()
    length: int = 1
    summed: dict = dataclasses.field(default_factory=dict)
    inner: int = 1

    def size(self, d) -> int:
        """The number of elements in memory along a dimension; None stands for one of size 1."""
        return 1 if d is None else d.size // self.summed.get(d, 1)

    def strides(self) -> tuple:
        """({dimension: distance of two elements along it}, distance of two steps)."""
        found, stride, of_steps = {}, 1, 0
        for axis in reversed(self.order or range(len(self.dims) + 1)):
            if axis == 0:
                of_steps, stride = stride, stride * self.length
            elif (d := self.dims[axis - 1]) is not None:
                found[d], stride = stride, stride * self.size(d)
        return found, of_steps

    @property
    def step(self) -> int:
        """The distance of two steps."""
        return self.strides()[1]

    @property
    def reach(self) -> int:
        """The distance of the first and the last lane of a step."""
        return sum((self.size(d) - 1) * stride for d, stride in self.strides()[0].items())


class Core:
    """What the kernel reads and writes.

    consts, xs: positions of the operands that it reads. carries, ys: the arrays that it writes, the carries first.

    orders: {position of an operand or, after them, of a result: how its dimensions lie in memory, see Array}, of xs and ys.
    length: the number of steps; needed for orders. zeros: carries whose first value is 0, beside those that the program starts with 0.
    """

    def __init__(self, program, orders=None, length=1, zeros=()):
        self.program, self.orders, self.length = program, orders or {}, length
        self.zeros = sorted({*program.zeros, *zeros})
        first_x = program.num_consts + program.num_carry
        self.consts = [k for k in program.used if k < program.num_consts]
        self.xs = [k for k in program.used if k >= first_x]
        self.indices = []
        for step in program.steps:
            if step.name == "iota":
                dim = step.result.dims[step.params["dimension"]]
                if dim is not None and dim not in self.indices:
                    self.indices.append(dim)
        accumulated = lambda dims: tuple(d for d in program.dims if d in dims)
        self.carries = []  # in memory; an accumulator has a lane for each of its terms
        for k, v in enumerate(program.carries):
            if k in program.accumulators:
                self.carries.append(Array(accumulated(program.accumulators[k]), computing(v.dtype)))
            else:
                self.carries.append(Array(v.dims, v.dtype))
        first_y = len(program.operands) + program.num_carry
        order = lambda k: (self.orders.get(first_y + k, ()), length)
        ys = program.results[program.num_carry :]
        self.ys = [Array(v.dims, np.dtype(v.aval.dtype), *order(k)) for k, v in enumerate(ys)]
        for k, dims in program.sums.items():
            own = program.results[k].dtype
            self.ys[k - program.num_carry] = Array(accumulated(dims), computing(own))
        self.function = self._function(program.results)

    def sum_in_blocks(self, lanes) -> int:
        """Has blocks of so many lanes, a power of two, add up elements of ys that are sums over lanes, as far as they can.

        Returns how many elements of such a sum become one, at least; 1 if a sum stays with the program after the loop.
        """
        least = lanes
        for k, terms in self.program.sums.items():
            own = self.program.results[k].set()
            y = self.ys[k - self.program.num_carry]
            is_wide = y.dtype in (np.float32, np.float64)
            y.inner, y.summed = self._adjacent(terms - own, lanes) if is_wide else (1, {})
            is_whole = all(y.size(d) == 1 for d in terms - own)
            least = least if is_whole else min(least, math.prod(y.summed.values()))
        return least

    def _adjacent(self, dims, most) -> tuple:
        """(inner, {dimension: count}) of the lanes of a block that differ in these dimensions alone; see Array.summed."""
        found, inner, left = {}, 1, most
        for d in reversed(self.program.dims):
            if d in dims:
                count = min(left, d.size & -d.size)
                found |= {d: count} if count > 1 else {}
                left //= count
                if count < d.size:
                    break
            elif found:
                break
            else:
                if d.size & (d.size - 1):
                    break
                inner, left = inner * d.size, left // d.size
                if left < 2:
                    break
        return (inner, found) if found else (1, {})

    def operand(self, k) -> Array:
        v = self.program.operands[k]
        return Array(v.dims, v.dtype, self.orders.get(k, ()), self.length)

    @property
    def inits(self) -> list:
        """Positions, among the operands, of the first carries that the kernel reads."""
        return [self.program.num_consts + k for k in range(self.program.num_carry) if k not in self.zeros]

    @property
    def results(self) -> list:
        """(shape of a step, dtype) of each array that the kernel writes: the carries, then ys."""
        shape = lambda a: tuple(map(a.size, a.dims))
        return [(shape(a), a.dtype) for a in (*self.carries, *self.ys)]

    def shapes(self, length) -> list:
        """(shape, dtype) of each array that the kernel writes."""
        found = []
        for a, (shape, dtype) in zip((*self.carries, *self.ys), self.results):
            if len(found) >= len(self.carries):
                shape = (length, *shape)
                shape = tuple(shape[axis] for axis in a.order) or shape
            found.append((shape, dtype))
        return found

    def first(self, k, x):
        """What the kernel reads as first value of a carry in `linear`, which is x: the first of the lanes has it."""
        a, own = self.carries[k], [d for d in self.program.carries[k].dims if d is not None]
        x = jnp.transpose(x.reshape([d.size for d in own]), [own.index(d) for d in a.dims if d in own])
        x = jnp.expand_dims(x.astype(a.dtype), [at for at, d in enumerate(a.dims) if d not in own])
        return jnp.pad(x, [(0, 0 if d in own else d.size - 1) for d in a.dims])

    def after(self, arrays, inits, avals) -> list:
        """The results of the scan, of these types, from what the kernel wrote: sums over lanes are taken.

        inits: {position: initial carry} of the carries that start with 0.
        """
        program, results = self.program, []
        for k, (y, a, aval) in enumerate(zip(arrays, (*self.carries, *self.ys), avals, strict=True)):
            if a.order:
                y = jnp.transpose(y, np.argsort(a.order))
            if k in program.accumulators or k in program.sums:
                step = int(k >= program.num_carry)  # ys have the dimension of steps in front
                own = [d for d in program.results[k].dims if d is not None]
                lanes = (self.ys[k - program.num_carry] if step else self.carries[k]).dims
                total = jnp.sum(y, [step + at for at, d in enumerate(lanes) if d not in own])
                order = [d for d in lanes if d in own]
                total = jnp.transpose(total, [*range(step), *(step + order.index(d) for d in own)])
                y = inits[k] + total.reshape(aval.shape) if k in program.zeros else total
            results.append(y.reshape(aval.shape).astype(aval.dtype))
        return results

    def _function(self, results):
        """The functor of these values of the program: its arguments are the operands that it reads, and indices."""
        program = self.program
        operands = [*(program.operands[k] for k in self.consts), *program.carries]
        operands += [program.operands[k] for k in self.xs]

        def f(*xs):
            env = dict(zip(operands, xs))
            places = dict(zip(self.indices, xs[len(operands) :]))
            read = lambda v: widened(v)[()] if isinstance(v, Constant) else env[v]
            for step in program.steps:
                if step.name in MOVES or (step.name in REDUCTIONS and step.name not in ("argmax", "argmin", "reduce")):
                    env[step.result] = read(step.operands[0])
                elif step.name == "iota":
                    at = places.get(step.result.dims[step.params["dimension"]], np.int32(0))
                    env[step.result] = jax.lax.convert_element_type(at, computing(step.result.dtype))
                else:
                    env.update(zip(step.results, compute(step, [read(x) for x in step.operands])))
            return [jnp.asarray(read(v)) for v in results]

        takes = [*(computing(v.dtype) for v in operands), *[INDEX] * len(self.indices)]
        gives = [computing(np.dtype(v.aval.dtype)) for v in results]
        self.body = None  # the closed jaxpr of f, if it has complex numbers
        if any(pairs.is_complex(v.aval.dtype) for s in program.steps for v in (*s.operands, *s.results)):
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                self.body = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct((), d) for d in takes))
            f = pairs.expanded(f, takes)
        return functor.of_scalars(f, takes, gives, program.label, False)

    # ---- how lanes lie in arrays

    def _groups(self, array) -> list:
        strides, _ = array.strides()
        return merged(pair for d in reversed(self.program.dims) for pair in _pairs(d, strides.get(d, 0), array))

    def kind(self, array, lanes) -> int:
        """How `lanes` adjacent lanes lie in an array."""
        groups = self._groups(array)
        if not groups:
            return SAME
        size, stride = groups[0]
        if len(groups) > 1 and size % lanes:
            return EACH
        return PACK if stride == 1 else SAME if stride == 0 else EACH

    def source(self, name, lanes):
        """(the struct as definitions for namespace jaxkern, the groups of each of its index maps)."""
        maps, program = [], self.program

        def number(groups):
            if not groups:
                return _NONE
            if len(groups) == 1 and groups[0][1] == 1:
                return _WHOLE
            if groups not in maps:
                maps.append(groups)
            return maps.index(groups)

        def missing(array):
            """The place of a lane along the dimensions that an array lacks, or along which it has sums of a block."""
            own, pairs, stride = {d for d in array.dims if d is not None}, [], 1
            for d in reversed(program.dims):
                count = array.summed.get(d, 1) if d in own else d.size
                pairs += [(count, stride)] if d not in own or count > 1 else []
                pairs += [(d.size // count, 0)] if d in own and (count == 1 or count < d.size) else []
                stride *= count
            return merged(pairs)

        consts, xs = list(map(self.operand, self.consts)), list(map(self.operand, self.xs))
        types = {"Consts": consts, "Carries": self.carries, "Xs": xs, "Ys": self.ys}
        text = [f"  using {k} = Types<{', '.join(cpp_type(a.dtype) for a in v)}>;" for k, v in types.items()]

        def table(function, values, otherwise, type_="int"):
            picks = "".join(f"k == {k} ? {v} : " for k, v in enumerate(values))
            text.append(f"  static constexpr {type_} {function}(int k) {{ return {picks}{otherwise}; }}")

        for kind, arrays in types.items():
            table(f"{kind}Kind", (self.kind(a, lanes) for a in arrays), SAME)
            table(f"{kind}Map", (number(self._groups(a)) for a in arrays), _NONE)
        for kind in ("Xs", "Ys"):
            table(f"{kind}Step", (a.step for a in types[kind]), 0, "int64_t")
        table("CarriesOwner", (number(missing(a)) for a in self.carries), _NONE)
        table("YsOwner", (number(missing(a)) for a in self.ys), _NONE)
        if any(a.summed for a in self.ys):
            text.append("  using YsSums = Types<>;")
            table("YsInner", (a.inner for a in self.ys), 1)
            table("YsGroup", (math.prod(a.summed.values()) for a in self.ys), 1)
        table("FromZero", (int(k in self.zeros) for k in range(len(self.carries))), 0)
        place = lambda dim: merged((d.size, int(d is dim)) for d in reversed(program.dims))
        table("PlaceMap", (number(place(d)) for d in self.indices), _NONE)
        far = max((a.reach for v in types.values() for a in v), default=0) >= 1 << 31
        text.append(f"  static constexpr bool kFar = {str(far).lower()};")
        text.append(f"  static constexpr int kIndices = {len(self.indices)}, kMaps = {len(maps)};")
        text.append(f"  using Step = {name}Step;")
        return self.function.source(f"{name}Step") + "\n".join([f"struct {name} {{", *text, "};"]) + "\n", maps


def _pairs(d, stride, array) -> list:
    """(size, stride) of the parts of a dimension of the lanes, innermost first."""
    count = array.summed.get(d, 1)
    parts = [(count, 0)] if count > 1 else []
    return parts if count == d.size > 1 else [*parts, (d.size // count, stride)]
