"""StableHLO operations that make the updates of a scatter, read as nodes; chains.py makes a message of them.

`Walk.visit` follows a value to the operations that make it. An elementwise operation is a node with a function of its
operands; a gather of whole rows, or a value that none of the operations listed below makes, is a leaf. Functions under jit
are looked into: their operations are copied in front of the scatter. `Walk.key` says which values are equal.
"""

import functools
import math
import re
import typing

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as dialect

from jaxkern._core import compat, stablehlo
from jaxkern._core.functor import computing

MOST_NODES = 64  # operations of a message
SINK_BYTES = 16  # that arithmetic below a gather may read more for each edge than its result has
SINKS = frozenset("add subtract multiply negate maximum minimum convert select".split())  # below a gather
ROWS = -1  # stands for the dimension that an index names

# ---- elementwise operations


def _square(x):
    return lax.mul(x, x)


# Of floating-point numbers.
FLOAT = {
    "add": lax.add,
    "subtract": lax.sub,
    "multiply": lax.mul,
    "divide": lax.div,
    "power": lax.pow,
    "remainder": lax.rem,
    "atan2": lax.atan2,
    "maximum": lax.max,
    "minimum": lax.min,
    "negate": lax.neg,
    "abs": lax.abs,
    "exponential": lax.exp,
    "exponential_minus_one": lax.expm1,
    "log": lax.log,
    "log_plus_one": lax.log1p,
    "logistic": lax.logistic,
    "tanh": lax.tanh,
    "sqrt": lax.sqrt,
    "rsqrt": lax.rsqrt,
    "cbrt": lax.cbrt,
    "sine": lax.sin,
    "cosine": lax.cos,
    "tan": lax.tan,
    "floor": lax.floor,
    "ceil": lax.ceil,
    "sign": lax.sign,
    "clamp": lax.clamp,
    "is_finite": lax.is_finite,
    "round_nearest_even": functools.partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN),
    "round_nearest_afz": functools.partial(lax.round, rounding_method=lax.RoundingMethod.AWAY_FROM_ZERO),
    "chlo.erf": lax.erf,
    "chlo.square": _square,
}
INTEGER = {name: FLOAT[name] for name in ("add", "subtract", "multiply", "maximum", "minimum", "clamp")}
BOOL = {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor, "not": lax.bitwise_not}
COMPARE = {"EQ": lax.eq, "NE": lax.ne, "LT": lax.lt, "LE": lax.le, "GT": lax.gt, "GE": lax.ge}
# Their results are exact where their operands are.
EXACT = frozenset("maximum minimum negate abs clamp select compare is_finite and or xor not sign".split())

_DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i1": "bool",
    **{f"i{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"ui{n}": f"uint{n}" for n in (8, 16, 32, 64)},
}


def type_of(value):
    """(shape, dtype) of a value; None where they are not static, or the dtype is none of kernels'."""
    try:
        ranked = ir.RankedTensorType(value.type)
    except (TypeError, ValueError):
        return None
    dtype = _DTYPES.get(str(ranked.element_type))
    if dtype is None or not ranked.has_static_shape:
        return None
    return tuple(ranked.shape), jnp.dtype(dtype)


def _maker(value):
    return stablehlo.maker(stablehlo.unconstrained(value))


def _result_number(value, operation) -> int:
    return next(k for k, result in enumerate(operation.results) if result == value)


def _short(operation) -> str:
    return operation.name.removeprefix("stablehlo.")


# ---- nodes


class Node(typing.NamedTuple):
    """A value of the message. f: of the values of `operands`. exact: computed without rounding from what memory holds."""

    name: str
    dtype: np.dtype
    operands: tuple = ()
    f: typing.Callable | None = None
    exact: bool = True
    leaf: typing.Any = None  # of a "leaf", Leaf; of "rows", Rows; of a "constant", its number


class Leaf(typing.NamedTuple):
    """An array of the program. dims: for each of its dimensions that of the updates, or None where its size is 1."""

    value: typing.Any
    dims: tuple


class Rows(typing.NamedTuple):
    """A gather of rows x[index], which is `result`. dims: of x, but for the first one.

    result: None for part of the arithmetic below a gather, which the program computes before it.
    filled: it is read only where its indices are in range.
    """

    x: typing.Any
    index: typing.Any
    dims: tuple
    result: Leaf | None
    filled: bool = False


class Ends(Exception):
    """The chain cannot be one message."""


class Walk:
    """Looks at the operations that make a value of shape `full`."""

    def __init__(self, ctx, full, counts, sinks=True):
        self.ctx, self.full, self.counts, self.sinks = ctx, full, counts, sinks
        self.all = frozenset(d for d, n in enumerate(full) if n != 1)
        self.nodes: list[Node] = []
        self._visited: dict = {}
        self._keys: dict = {}
        self._numbers: dict = {}
        self._inlined: dict = {}
        self._copies: list = []
        self._depth = 0  # of recursion

    def discard(self):
        """Erases the copies of operations that nothing uses."""
        for operation in reversed(self._copies):
            operation.erase()
        self._copies.clear()

    def is_copied(self, value) -> bool:
        """Whether a copy of an operation made it, which `discard` erases."""
        operation = _maker(value)
        return operation is not None and operation in self._copies

    # ---- functions under jit

    def inline(self, call):
        """The results of a call, computed by copies of the function's operations; None where that is impossible."""
        if call not in self._inlined:
            self._inlined[call] = self._inline(call) if self._is_pure(call, []) else None
        return self._inlined[call]

    def _is_pure(self, call, outer) -> bool:
        function = compat.callee(self.ctx, call)
        if function is None or len(outer) > 4:
            return False
        blocks = function.operation.regions[0].blocks
        if len(blocks) != 1 or len(blocks[0].operations) > MOST_NODES:
            return False
        for operation in list(blocks[0].operations)[:-1]:
            operation = operation.operation
            if operation.name == "func.call":
                if not self._is_pure(operation, [*outer, call]):
                    return False
            elif not stablehlo.is_pure(operation):
                return False
        return blocks[0].operations[len(blocks[0].operations) - 1].operation.name in ("func.return", "return")

    def _inline(self, call):
        block = compat.callee(self.ctx, call).operation.regions[0].blocks[0]
        values = dict(zip(block.arguments, call.operands))
        *operations, returned = block.operations
        for operation in operations:
            operation = operation.operation
            copy = operation.clone(ir.InsertionPoint.current).operation
            self._copies.append(copy)
            for k, operand in enumerate(operation.operands):
                copy.operands[k] = values[operand]
            results = list(copy.results)
            if copy.name == "func.call":
                results = self._inlined[copy] = self._inline(copy)
            values.update(zip(operation.results, results))
        return [values[v] for v in returned.operands]

    # ---- which values are equal

    def key(self, value) -> int:
        """A number that equal values share: results of the same operations on the same values."""
        value = stablehlo.unconstrained(value)
        if value not in self._keys:
            self._depth += 1
            self._keys[value] = self._key(value)
            self._depth -= 1
        return self._keys[value]

    def _key(self, value):
        operation = _maker(value)
        if self._depth > MOST_NODES:
            operation = None
        if operation is not None and operation.name == "func.call" and (results := self.inline(operation)):
            return self.key(results[_result_number(value, operation)])
        same = ("value", value)
        if operation is not None and len(self._keys) < 4 * stablehlo.MOST and stablehlo.is_pure(operation):
            if operation.name != "stablehlo.constant" or stablehlo.splat(operation) is not None:
                if not len(operation.regions):
                    attributes = tuple((name, str(a)) for name, a in compat.attributes(operation))
                    place = _result_number(value, operation)
                    operands = tuple(map(self.key, operation.operands))
                    same = (operation.name, str(value.type), place, attributes, operands)
        return self._numbers.setdefault(same, len(self._numbers))

    def index_key(self, value) -> int:
        """The key of indices, whatever dimensions of size 1 they have."""
        return self.key(self._base(value))

    def _base(self, value):
        operation = _maker(value)
        while operation is not None and operation.name in ("stablehlo.broadcast_in_dim", "stablehlo.reshape"):
            source = operation.operands[0]
            of, to = type_of(source), type_of(value)
            if of is None or to is None or [n for n in of[0] if n != 1] != [n for n in to[0] if n != 1]:
                break
            if operation.name == "stablehlo.broadcast_in_dim":
                places = [int(d) for d in ir.DenseI64ArrayAttr(operation.attributes["broadcast_dimensions"])]
                if any(of[0][k] != to[0][d] for k, d in enumerate(places)) or not _ascends(places):
                    break
            value, operation = source, _maker(source)
        return value

    def unwrapped_key(self, value) -> int | None:
        """The key of i, if this is select(i < 0, i + n, i), i for whatever is not negative."""
        found = self._unwrapped(value)
        return None if found is None else self.index_key(found)

    def _unwrapped(self, value):
        operation = _maker(self._base(value))
        if operation is not None and operation.name == "func.call" and len(operation.results) == 1:
            results = self.inline(operation)
            operation = _maker(results[0]) if results else None
        if operation is None or operation.name != "stablehlo.select":
            return None
        which, plus, index = operation.operands
        compare, add = _maker(which), _maker(plus)
        if compare is None or compare.name != "stablehlo.compare" or _direction(compare) != "LT":
            return None
        if stablehlo.constant(compare.operands[1]) != 0 or self.key(compare.operands[0]) != self.key(index):
            return None
        if add is None or add.name != "stablehlo.add" or self.key(add.operands[0]) != self.key(index):
            return None
        return index

    def in_range_key(self, mask, dims, rows) -> int | None:
        """The key of i, if this tells for each edge that 0 <= i < rows, or that i is in a smaller range.

        dims: for each dimension of the mask that of the updates.
        """
        operation = _maker(mask)
        while operation is not None:
            inner = self._moved(operation, _short(operation), type_of(mask)[0], dims)
            if inner is None:
                break
            mask, dims = operation.operands[0], inner
            operation = _maker(mask)
        if [d for d in dims if d is not None] != [d for d in range(self.counts) if d in self.all]:
            return None
        if operation is not None and operation.name == "stablehlo.reduce":
            body = [o.operation.name for o in operation.regions[0].blocks[0].operations]
            of, to = type_of(operation.operands[0]), type_of(operation.results[0])
            if body != ["stablehlo.and", "stablehlo.return"] or math.prod(of[0]) != math.prod(to[0]):
                return None
            if len(operation.operands) != 2 or stablehlo.constant(operation.operands[1]) not in (True, 1, -1):
                return None
            operation = _maker(operation.operands[0])
        if operation is None or operation.name != "stablehlo.and":
            return None
        least, most = map(_maker, operation.operands)
        if any(o is None or o.name != "stablehlo.compare" for o in (least, most)):
            return None
        if (_direction(least), _direction(most)) != ("GE", "LE") or stablehlo.constant(least.operands[1]) != 0:
            return None
        last, key = stablehlo.constant(most.operands[1]), self.index_key(least.operands[0])
        if last is None or not 0 <= last < rows or key != self.index_key(most.operands[0]):
            return None
        return key

    # ---- the walk

    def visit(self, value, dims) -> int:
        """The number of the node for `value`, whose dimensions are `dims` of the updates."""
        value = stablehlo.unconstrained(value)
        if (value, dims) not in self._visited:
            self._depth += 1
            node = self.numbered(self._node(value, dims))
            self._depth -= 1
            self._visited[value, dims] = node
        return self._visited[value, dims]

    def leaf(self, value, dims):
        if type_of(value) is None:
            raise Ends
        return Node("leaf", type_of(value)[1], leaf=Leaf(value, dims))

    def _node(self, value, dims) -> Node | int:
        if (own := type_of(value)) is None:
            raise Ends
        shape, dtype = own
        operation = _maker(value)
        if operation is None or self._depth > MOST_NODES or len(self.nodes) >= MOST_NODES:
            return self.leaf(value, dims)
        name = _short(operation)
        if name == "constant":
            number = stablehlo.splat(operation)
            if number is None:
                return self.leaf(value, dims)
            return Node("constant", dtype, leaf=np.asarray(number).astype(dtype))
        if name == "convert" and stablehlo.constant(value) is not None and jnp.issubdtype(dtype, jnp.floating):
            of = self.nodes[self.visit(operation.operands[0], dims)]
            if of.name == "constant":
                return Node("constant", dtype, leaf=of.leaf.astype(dtype))
        if name == "gather" and (rows := self._rows(operation, value, dims)):
            return self._gathered(rows, dtype)
        inner = self._moved(operation, name, shape, dims)
        if inner is not None:
            return self.visit(operation.operands[0], inner)
        # Values that lack features are computed once for an edge, outside.
        if frozenset(d for d in dims if d is not None) != self.all:
            return self.leaf(value, dims)
        if name == "func.call":
            results = self.inline(operation)
            return self.visit(results[_result_number(value, operation)], dims) if results else self.leaf(value, dims)
        return self._arithmetic(operation, name, dtype, dims) or self.leaf(value, dims)

    def _moved(self, operation, name, shape, dims):
        """The dimensions of the operand of an operation that repeats or rearranges it; None for other operations."""
        if name not in ("broadcast_in_dim", "reshape", "transpose"):
            return None
        if (source := type_of(operation.operands[0])) is None:
            return None
        source = source[0]
        if name == "broadcast_in_dim":
            places = [int(d) for d in ir.DenseI64ArrayAttr(operation.attributes["broadcast_dimensions"])]
            return tuple(None if n == 1 else dims[d] for n, d in zip(source, places))
        if name == "transpose":
            places = [int(d) for d in ir.DenseI64ArrayAttr(operation.attributes["permutation"])]
            found = {s: dims[d] for d, s in enumerate(places)}
            return tuple(found[d] for d in range(len(source)))
        large = [d for d, n in zip(dims, shape) if n != 1]
        if [n for n in source if n != 1] != [n for n in shape if n != 1]:
            return None
        return tuple(None if n == 1 else large.pop(0) for n in source)

    def _rows(self, operation, value, dims) -> Rows | None:
        """A gather of whole rows by one index for each edge."""
        numbers = dialect.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
        slices = [int(n) for n in ir.DenseI64ArrayAttr(operation.attributes["slice_sizes"])]
        x, index = operation.operands[0], operation.operands[1]
        if (of_x := type_of(x)) is None or (of_index := type_of(index)) is None or of_index[1].kind not in "iu":
            return None
        if list(numbers.operand_batching_dims) or list(numbers.start_indices_batching_dims):
            return None
        if list(numbers.collapsed_slice_dims) != [0] or list(numbers.start_index_map) != [0]:
            return None
        if slices != [1, *of_x[0][1:]] or 0 in of_x[0]:
            return None
        vector = numbers.index_vector_dim
        if vector not in (len(of_index[0]), len(of_index[0]) - 1) or math.prod(of_index[0]) != self.edges:
            return None
        offset = [int(d) for d in numbers.offset_dims]
        features = tuple(dims[d] for d in offset)
        edges = [dims[d] for d in range(len(dims)) if d not in offset and dims[d] is not None]
        if edges != [d for d in range(self.counts) if d in self.all]:
            return None
        if any(d is not None and d < self.counts for d in features):
            return None
        return Rows(x, index, features, Leaf(value, dims))

    def _gathered(self, rows, dtype) -> Node | int:
        """A gather, or the arithmetic that makes what it reads, where that reads no more, and all of it from memory."""
        if self.sinks and self._sinks(rows.x):
            before = len(self.nodes)
            node = self.numbered(self._below(rows.x, (ROWS, *rows.dims), rows._replace(result=None)))
            read = [self.nodes[k].leaf.x for k in reached(self.nodes, node) if self.nodes[k].name == "rows"]
            fused = any(row_bytes(x) > SINK_BYTES and stablehlo.is_fused(x) for x in read)
            few = len(self.nodes) < MOST_NODES
            if few and not fused and sum(map(row_bytes, read)) <= row_bytes(rows.x) + SINK_BYTES:
                return node
            self._forget(before)
        return Node("rows", dtype, leaf=rows)

    def _sinks(self, value) -> bool:
        operation = _maker(value)
        return operation is not None and _short(operation) in SINKS and len(list(value.uses)) == 1

    def _below(self, value, dims, rows) -> Node | int:
        """The node for the rows of `value` that the gather `rows` reads; ROWS stands for the rows among its `dims`."""
        value = stablehlo.unconstrained(value)
        if (own := type_of(value)) is None:
            raise Ends
        if ROWS not in dims:
            return self.visit(value, dims)
        operation = _maker(value)
        if operation is not None and max(self._depth, len(self.nodes)) < MOST_NODES:
            name = _short(operation)
            self._depth += 1
            node, inner = None, self._moved(operation, name, own[0], dims)
            if inner is not None:
                node = self._below(operation.operands[0], inner, rows)
            elif has_features(self, dims) and self._sinks(value):
                below = lambda v, dims: self.numbered(self._below(v, dims, rows))
                node = self._arithmetic(operation, name, own[1], dims, below)
            self._depth -= 1
            if node is not None:
                return node
        if dims[0] != ROWS:
            raise Ends
        return Node("rows", own[1], leaf=rows._replace(x=value, dims=dims[1:]))

    def numbered(self, node) -> int:
        if not isinstance(node, int):
            self.nodes.append(node)
            node = len(self.nodes) - 1
        return node

    @property
    def edges(self) -> int:
        return math.prod(self.full[: self.counts])

    def _arithmetic(self, operation, name, dtype, dims, visit=None) -> Node | None:
        """The node for an elementwise operation. visit: in place of `self.visit` for its operands."""
        types = [type_of(v) for v in operation.operands]
        if not types or None in types or len(operation.results) != 1:  # an iota has no operands
            return None
        types = [dtype for _, dtype in types]
        accuracy = dict(compat.attributes(operation)).get("result_accuracy")
        if accuracy is not None and "mode" in str(accuracy) and "DEFAULT" not in str(accuracy):
            return None
        floats = jnp.issubdtype(types[-1], jnp.floating)
        if name == "select":
            f = lambda which, a, b: lax.select(which, a, b)
        elif name == "compare":
            if not (f := _comparison(operation)):
                return None
        elif name == "convert":
            of, to = types[0], dtype
            if jnp.issubdtype(of, jnp.floating) and not jnp.issubdtype(to, jnp.floating):
                return None
            if to == jnp.bool_:
                return None
            f = lambda x: lax.convert_element_type(x, computing(to))
        else:
            f = (FLOAT if floats else BOOL if types[-1] == jnp.bool_ else INTEGER).get(name)
            if f is None:
                return None
        before = len(self.nodes)
        if name == "select" and visit is None and (filled := self._filled(operation, dims)) is not None:
            which, _, other = operation.operands
            operands = (self.visit(which, dims), filled, self.visit(other, dims))
        else:
            visit = visit or self.visit
            operands = tuple(visit(v, dims if len(type_of(v)[0]) == len(dims) else ()) for v in operation.operands)
        exact = all(self.nodes[k].exact for k in operands)
        equality = name == "compare" and floats and _direction(operation) in ("EQ", "NE")
        if equality and not exact and operands[0] != operands[1]:  # x != x finds NaN
            # What is computed anew may be rounded otherwise than the values with which it is to be equal.
            self._forget(before)
            return None
        exact &= name in EXACT or (name == "convert" and _is_wider(types[0], dtype)) or not floats and name != "convert"
        return Node(name, dtype, operands, f, exact)

    def _filled(self, select, dims) -> int | None:
        """The number of the node for a gather that is read where its indices are in range, and replaced elsewhere."""
        which, value, _ = select.operands
        gather = _maker(value)
        if gather is None or gather.name != "stablehlo.gather" or len(type_of(which)[0]) != len(dims):
            return None
        rows = self._rows(gather, value, dims)
        if rows is None or self.in_range_key(which, dims, type_of(rows.x)[0][0]) != self.index_key(rows.index):
            return None
        if (value, dims, "filled") not in self._visited:
            node = self._gathered(rows._replace(filled=True), type_of(value)[1])
            self._visited[value, dims, "filled"] = self.numbered(node)
        return self._visited[value, dims, "filled"]

    def _forget(self, count):
        del self.nodes[count:]
        self._visited = {k: node for k, node in self._visited.items() if node < count}


def _ascends(dims) -> bool:
    own = [d for d in dims if d is not None]
    return own == sorted(own)


def _direction(operation) -> str:
    found = re.search(r"\b(EQ|NE|LT|LE|GT|GE)\b", str(operation.attributes["comparison_direction"]))
    return found[1] if found else ""


def _comparison(operation):
    kind = dict(compat.attributes(operation)).get("compare_type")
    return None if kind is not None and "TOTALORDER" in str(kind) else COMPARE.get(_direction(operation))


def _is_wider(of, to) -> bool:
    return np.dtype(jnp.promote_types(of, to)) == np.dtype(to)


def has_features(walk, dims) -> bool:
    features = [n for n in walk.full[walk.counts :] if n != 1]
    return not features or any(d is not None and d >= walk.counts for d in dims)


def reached(nodes, root):
    seen, pending = set(), [root]
    while pending:
        k = pending.pop()
        if k not in seen:
            seen.add(k)
            pending += nodes[k].operands
    return sorted(seen)


def row_bytes(x) -> int:
    """Bytes of a row of an array of the program."""
    shape, dtype = type_of(x)
    return math.prod(shape[1:]) * dtype.itemsize


def root(ctx, indices) -> tuple:
    """The value that these indices are made of, in whichever shape they come, and how often it is wrapped around zero."""
    walk = Walk(ctx, (), 0)
    value, wraps = walk._base(indices), 0
    while (found := walk._unwrapped(value)) is not None and not walk.is_copied(found := walk._base(found)):
        value, wraps = found, wraps + 1
    walk.discard()
    return value, wraps
