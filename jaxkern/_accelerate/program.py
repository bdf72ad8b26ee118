"""The program around an operation that is being lowered, read backwards: values and the operations that make them.

    program = Program.of(ctx)
    value = program.value(operand)
    value.op.name, value.op.operands, value.type
    value.key == other.key         whether both are results of the same operations on the same values
    program.materialize(value)     the MLIR value, for use where operations are inserted

Functions under jit are looked into: the result of a call of a pure function is the value that the function returns, with
the operands of the call in place of its arguments. Nothing is copied until such a value is materialized. Constraints on how
a value is split are not seen. JAX only appends operations to a module, so what was read stays true, and each operation is
read once for all scatters of a module.
"""

import math
import re

import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir

from jaxkern._core import compat_lowering, stablehlo

MOST_OPERATIONS = 64  # of a function that is looked into
MOST_CALLS = 4  # of functions in each other
UPDATING = "scatter", "dynamic_update_slice", "optimization_barrier", "custom_call"  # of their first operand

_DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i1": "bool",
    **{f"i{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"ui{n}": f"uint{n}" for n in (8, 16, 32, 64)},
}
_UNREAD = object()


class Scope:
    """A call whose function is looked into. outer: the scope of the call, None for the program itself."""

    __slots__ = ("call", "outer", "root", "returned")

    def __init__(self, call, outer, returned):
        self.call, self.outer, self.returned = call, outer, returned
        self.root = self if outer is None else outer.root


class Op:
    """An operation. ir: the MLIR operation."""

    __slots__ = ("ir", "name", "scope", "read", "_operands", "_program")

    def __init__(self, program, operation, scope):
        self.ir, self.scope, self._program, self._operands = operation, scope, program, None
        self.name = operation.name.removeprefix("stablehlo.")
        self.read: dict = {}  # what `once` returned

    @property
    def operands(self) -> tuple:
        if self._operands is None:
            self._operands = tuple(self._program.value(v, self.scope) for v in self.ir.operands)
        return self._operands

    def once(self, f):
        """f(self), which is computed once: reading attributes takes longer than what is done with them."""
        if f not in self.read:
            self.read[f] = f(self)
        return self.read[f]

    @property
    def places(self) -> list[int]:
        """For a broadcast: for each dimension of the operand the dimension of the result. For a transpose: the permutation."""
        return self.once(_places)

    @property
    def direction(self) -> str:
        """The kind of a comparison: EQ, NE, LT, LE, GT or GE."""
        return self.once(_direction)

    @property
    def splat(self):
        """The number that all elements of a constant are; None if they differ, or it cannot be read."""
        return self.once(_splat)


def _places(op) -> list[int]:
    name = "permutation" if op.name == "transpose" else "broadcast_dimensions"
    return [int(d) for d in ir.DenseI64ArrayAttr(op.ir.attributes[name])]


def _direction(op) -> str:
    found = re.search(r"\b(EQ|NE|LT|LE|GT|GE)\b", str(op.ir.attributes["comparison_direction"]))
    return found[1] if found else ""


def _keeps_order(op):
    return stablehlo.keeps_order(op.ir)


def _begin(op):
    return stablehlo.begin_of_slice(op.ir)


def _splat(op):
    return stablehlo.splat(op.ir)


class Value:
    """A value of the program. ir: the MLIR value, inside a function if there is a scope."""

    __slots__ = ("ir", "scope", "outside", "_program", "_op", "_type", "_key", "_base", "_unwrapped")

    def __init__(self, program, value, scope):
        self.ir, self.scope, self._program = value, scope, program
        self.outside = None  # the result of a call that this value is
        self._op = self._type = self._key = self._base = self._unwrapped = _UNREAD

    @property
    def op(self) -> Op | None:
        """The operation that makes it; None for an argument."""
        if self._op is _UNREAD:
            made = stablehlo.maker(self.ir)
            self._op = None if made is None else self._program.op(made, self.scope)
        return self._op

    @property
    def type(self):
        """(shape, dtype); None if they are not static, or kernels do not support the dtype."""
        if self._type is _UNREAD:
            self._type = self._program.type(self.ir.type)
        return self._type

    @property
    def key(self) -> int:
        """A number that equal values share: results of the same operations on the same values."""
        if self._key is _UNREAD:
            self._program.number(self)
        return self._key

    @property
    def uses(self) -> int:
        return len(list((self.outside or self.ir).uses))

    @property
    def constant(self):
        """The number that all elements are, or None if that is not known."""
        value, types = self, []
        while value.op is not None and value.op.name in ("broadcast_in_dim", "reshape", "convert"):
            if value.op.name == "convert":
                types.append(value.type)
            value = value.op.operands[0]
        if value.op is None or value.op.name != "constant":
            return None
        number = value.op.splat
        for type in reversed([*types, value.type] if types else ()):
            number = _converted(number, type)
        return number

    @property
    def base(self):
        """The value that this one is, except for dimensions of size 1."""
        if self._base is _UNREAD:
            value = self
            while (source := _without_ones(value)) is not None:
                value = source
            self._base = value
        return self._base

    @property
    def whole(self):
        """(the argument of the program that this is a contiguous slice of, the position of its first element there); or None.

        The slice has fixed bounds; it may have another shape, and be a slice of a slice.
        """
        value, first, cut = self, 0, False
        while value.op is not None:
            if value.op.name == "slice":
                begin, cut = value.op.once(_begin), True
                if begin is None:
                    return None
                first += begin
            elif not value.op.once(_keeps_order):
                return None
            value = value.op.operands[0]
        is_array = cut and value.scope is None and value.type is not None and stablehlo.is_argument(value.ir)
        return (value, first) if is_array else None

    def updates(self, argument) -> bool:
        """Whether this value is an argument of the program after updates of parts of it, which XLA may make in the same memory."""
        value = self
        while value.op is not None and (value.op.name in UPDATING or value.op.once(_keeps_order)):
            value = value.op.operands[0]
        return value.ir == argument.ir and value.scope is argument.scope

    @property
    def unwrapped(self):
        """i, if this is select(i < 0, i + n, i), i for whatever is not negative; or None."""
        if self._unwrapped is _UNREAD:
            self._unwrapped = self._find_unwrapped()
        return self._unwrapped

    def _find_unwrapped(self):
        op = self.base.op
        if op is None or op.name != "select":
            return None
        which, plus, index = op.operands
        compare, add = which.op, plus.op
        if compare is None or compare.name != "compare" or compare.direction != "LT":
            return None
        if compare.operands[1].constant != 0 or compare.operands[0].key != index.key:
            return None
        return index if add is not None and add.name == "add" and add.operands[0].key == index.key else None

    def before_wrapping(self, n: int):
        """i, if this is select(i < 0, i + n, i) of 32 or 64 bits; or None."""
        found = self.unwrapped
        if found is None or found.type is None or found.type[1].itemsize < 4:
            return None
        return found if self.base.op.operands[1].op.operands[1].constant == n else None

    @property
    def is_fused(self) -> bool:
        """Whether it is arithmetic, which XLA computes in one pass over memory with what consumes it."""
        return self.op is not None and self.op.ir.name in stablehlo.ELEMENTWISE | stablehlo.MOVES

    @property
    def is_computed_again(self) -> bool:
        """Whether it is cheap arithmetic, which XLA computes in each kernel that reads it, and does not store."""
        seen, pending, computes = set(), [self], False
        while pending:
            value = pending.pop()
            op = value.op
            if value in seen or op is None or op.name in ("constant", "iota"):
                continue
            seen.add(value)
            if op.name in ("broadcast_in_dim", "reshape", "transpose", "slice"):
                own = op.operands[0]
                repeats = own.type is None or value.type is None or math.prod(own.type[0]) < math.prod(value.type[0])
                pending += () if repeats else op.operands
                continue
            if op.ir.name not in stablehlo.ELEMENTWISE or op.name in stablehlo.DEAR or len(seen) > MOST_OPERATIONS:
                return False
            computes = True
            pending += op.operands
        return computes


def _converted(number, type):
    """A number in the dtype of a type (shape, dtype), or None if that is not known."""
    if number is None or type is None:
        return None
    dtype = type[1]
    if isinstance(number, float) and jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        if not limits.min <= number <= limits.max:  # also NaN
            return None
    return np.asarray(number).astype(dtype).item()


def _without_ones(value):
    """The operand of a reshape or a broadcast that adds or removes dimensions of size 1 alone; or None."""
    op = value.op
    if op is None or op.name not in ("broadcast_in_dim", "reshape"):
        return None
    source = op.operands[0]
    if source.type is None or value.type is None:
        return None
    of, to = source.type[0], value.type[0]
    if [n for n in of if n != 1] != [n for n in to if n != 1]:
        return None
    if op.name == "broadcast_in_dim":
        if any(of[k] != to[d] for k, d in enumerate(op.places)) or op.places != sorted(op.places):
            return None
    return source


class Program:
    """What is known of a module while it is lowered."""

    def __init__(self, symbols):
        self._symbols = symbols
        self._values, self._ops, self._scopes, self._types = {}, {}, {}, {}
        self._functions: dict = {}
        self._numbers: dict = {}
        self.plans: dict = {}  # whether a message has a plan

    @staticmethod
    def of(ctx) -> "Program":
        known = compat_lowering.of_module(ctx.module_context)
        if "program" not in known:
            known["program"] = Program(ctx.module_context.symbol_table)
        return known["program"]

    def value(self, value, scope=None) -> Value:
        """The value that an MLIR value is."""
        found = self._values.get((value, scope))
        if found is None:
            found = self._values[value, scope] = self._value(value, scope)
        return found

    def _value(self, value, scope):
        owner = value.owner
        if isinstance(owner, ir.Block):
            if scope is None:
                return Value(self, value, None)
            return self.value(scope.call.operands[ir.BlockArgument(value).arg_number], scope.outer)
        operation = owner.operation
        if operation.name == stablehlo.CONSTRAINT:
            return self.value(operation.operands[0], scope)
        if operation.name != "func.call" or not self._is_pure(operation, MOST_CALLS):
            return Value(self, value, scope)
        inner = self.scope(operation, scope)
        found = self.value(inner.returned[ir.OpResult(value).result_number], inner)
        if scope is None and found.scope is not None and found.scope.root is inner:
            found.outside = value
        return found

    def scope(self, call, outer) -> Scope | None:
        """The inside of a call; None where its function is not found."""
        if (call, outer) not in self._scopes:
            function = compat_lowering.callee(self._symbols, call)
            block = None if function is None else function.operation.regions[0].blocks[0]
            returned = None if block is None else list(block.operations[len(block.operations) - 1].operands)
            self._scopes[call, outer] = None if returned is None else Scope(call, outer, returned)
        return self._scopes[call, outer]

    def _is_pure(self, call, depth) -> bool:
        """Whether the function of a call consists of few pure operations, and of calls of such functions."""
        name = str(call.attributes["callee"])
        if (name, depth) not in self._functions:
            self._functions[name, depth] = self._consists_of_pure(compat_lowering.callee(self._symbols, call), depth)
        return self._functions[name, depth]

    def _consists_of_pure(self, function, depth) -> bool:
        blocks = () if function is None else function.operation.regions[0].blocks
        if len(blocks) != 1 or len(blocks[0].operations) > MOST_OPERATIONS:
            return False
        *operations, last = (o.operation for o in blocks[0].operations)
        pure = lambda o: self._is_pure(o, depth - 1) if o.name == "func.call" and depth else stablehlo.is_pure(o)
        return last.name in ("func.return", "return") and all(map(pure, operations))

    def op(self, operation, scope) -> Op:
        if (operation, scope) not in self._ops:
            self._ops[operation, scope] = Op(self, operation, scope)
        return self._ops[operation, scope]

    def type(self, mlir_type):
        if mlir_type not in self._types:
            self._types[mlir_type] = type_of(mlir_type)
        return self._types[mlir_type]

    def number(self, value) -> None:
        """Gives keys to a value and to those that it is made of."""
        pending = [value]
        while pending:
            value = pending[-1]
            if value._key is _UNREAD:
                operands = value.op.operands if _is_comparable(value.op) else None
                more = [v for v in operands or () if v._key is _UNREAD]
                if more:
                    pending += more
                    continue
                same = value if operands is None else _identity(value, operands)
                value._key = self._numbers.setdefault(same, len(self._numbers))
            pending.pop()

    def gathers(self, value) -> bool:
        """Whether a value is arithmetic on a gather, which XLA fuses with what consumes it."""
        seen, pending = set(), [value]
        while pending and len(seen) < stablehlo.MOST:
            value = pending.pop()
            op = value.op
            if value in seen or op is None:
                continue
            seen.add(value)
            if op.name == "gather":
                return True
            if op.name == "func.call":
                inner = self.scope(op.ir, value.scope)
                if inner is not None:
                    pending.append(self.value(inner.returned[ir.OpResult(value.ir).result_number], inner))
            elif op.ir.name in stablehlo.ELEMENTWISE or op.ir.name in stablehlo.MOVES:
                pending += op.operands
        return False

    def materialize(self, value, made=None):
        """The MLIR value. Where it is inside a function, copies of the operations that make it are inserted here.

        made: what was inserted in the same place already.
        """
        if value.scope is None or value.outside is not None:
            return value.outside or value.ir
        made = {} if made is None else made
        op = value.op
        if op not in made:
            operands = [self.materialize(v, made) for v in op.operands]
            copy = op.ir.clone(ir.InsertionPoint.current).operation
            for k, operand in enumerate(operands):
                copy.operands[k] = operand
            made[op] = list(copy.results)
        return made[op][ir.OpResult(value.ir).result_number]


def type_of(mlir_type):
    """(shape, dtype); None if they are not static, or kernels do not support the dtype."""
    try:
        ranked = ir.RankedTensorType(mlir_type)
    except (TypeError, ValueError):
        return None
    dtype = _DTYPES.get(str(ranked.element_type))
    if dtype is None or not ranked.has_static_shape:
        return None
    return tuple(ranked.shape), jnp.dtype(dtype)


def _is_comparable(op) -> bool:
    """Whether results of equal operations on equal operands are equal, and the operations can be compared."""
    if op is None or not stablehlo.is_pure(op.ir) or len(op.ir.regions):
        return False
    return op.name != "constant" or op.splat is not None


def _identity(value, operands):
    attributes = tuple(compat_lowering.attributes(value.op.ir))
    place = ir.OpResult(value.ir).result_number
    return (value.op.name, value.ir.type, place, attributes, tuple(v.key for v in operands))


def row_bytes(x: Value) -> int:
    """Bytes of a row of an array of the program."""
    shape, dtype = x.type
    return math.prod(shape[1:]) * dtype.itemsize


def root(value: Value) -> tuple:
    """The value that these indices are made of, in whichever shape they come, and how often it is wrapped around zero."""
    value, wraps = value.base, 0
    while (found := value.unwrapped) is not None:
        value, wraps = found.base, wraps + 1
    return value, wraps
