"""StableHLO operations that make the updates of a scatter, read as nodes; chains.py makes a message of them.

`Walk.visit` follows a value to the operations that make it. An elementwise operation is a node with a function of its
operands; a gather of whole rows, or a value that none of the operations listed below makes, is a leaf.
"""

import functools
import math
import typing

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as dialect

from jaxkern._accelerate.program import Program, row_bytes, type_of
from jaxkern._core import compat_lowering
from jaxkern._core.dtypes import computing

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


def _select(which, a, b):
    return lax.select(which, a, b)


@functools.cache
def is_floating(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


@functools.cache
def _converts(dtype):
    return lambda x: lax.convert_element_type(x, dtype)


# ---- nodes


class Node(typing.NamedTuple):
    """A value of the message. exact: it is computed without rounding from what memory holds.

    f: a function of the values of `operands`; the same object for the same function.
    """

    name: str
    dtype: np.dtype
    operands: tuple = ()
    f: typing.Callable | None = None
    exact: bool = True
    leaf: typing.Any = None  # of a "leaf", Leaf; of "rows", Rows; of a "constant", its number


class Leaf(typing.NamedTuple):
    """An array of the program. dims: for each of its dimensions the dimension of the updates, or None where its size is 1."""

    value: typing.Any
    dims: tuple


class Rows(typing.NamedTuple):
    """A gather of rows x[index], which is `result`. dims: the dimensions of x, except for the first one.

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

    def __init__(self, program: Program, full, counts, sinks=True):
        self.program, self.full, self.counts, self.sinks = program, full, counts, sinks
        self.all = frozenset(d for d, n in enumerate(full) if n != 1)
        self.edges = math.prod(full[:counts])
        self.nodes: list[Node] = []
        self._visited: dict = {}
        self.has_sunk = False  # arithmetic below a gather is part of the message, or was tried to be
        self._depth = 0  # of recursion

    def in_range_key(self, mask, dims, rows) -> int | None:
        """The key of i, if this mask implies for each edge that 0 <= i < rows, or that i is in a smaller range.

        dims: for each dimension of the mask the dimension of the updates.
        """
        op = mask.op
        while op is not None and (inner := self._moved(op, mask.type[0], dims)) is not None:
            mask, dims = op.operands[0], inner
            op = mask.op
        if [d for d in dims if d is not None] != [d for d in range(self.counts) if d in self.all]:
            return None
        if op is not None and op.name == "reduce":
            body = [o.operation.name for o in op.ir.regions[0].blocks[0].operations]
            of, to = op.operands[0].type, mask.type
            if body != ["stablehlo.and", "stablehlo.return"] or of is None or math.prod(of[0]) != math.prod(to[0]):
                return None
            if len(op.operands) != 2 or op.operands[1].constant not in (True, 1, -1):
                return None
            op = op.operands[0].op
        if op is None or op.name != "and":
            return None
        least, most = (v.op for v in op.operands)
        if any(o is None or o.name != "compare" for o in (least, most)):
            return None
        if (least.direction, most.direction) != ("GE", "LE"):
            return None
        last, key = most.operands[1].constant, index_key(least.operands[0])
        if least.operands[1].constant != 0 or last is None or not 0 <= last < rows:
            return None
        return key if key == index_key(most.operands[0]) else None

    # ---- the walk

    def visit(self, value, dims) -> int:
        """The number of the node for `value`, whose dimensions are `dims` of the updates."""
        if (value, dims) not in self._visited:
            self._depth += 1
            node = self.numbered(self._node(value, dims))
            self._depth -= 1
            self._visited[value, dims] = node
        return self._visited[value, dims]

    def leaf(self, value, dims):
        if value.type is None:
            raise Ends
        return Node("leaf", value.type[1], leaf=Leaf(value, dims))

    def _node(self, value, dims) -> Node | int:
        if value.type is None:
            raise Ends
        (shape, dtype), op = value.type, value.op
        if op is None or self._depth > MOST_NODES or len(self.nodes) >= MOST_NODES:
            return self.leaf(value, dims)
        if op.name == "constant":
            if op.splat is None:
                return self.leaf(value, dims)
            return Node("constant", dtype, leaf=np.asarray(op.splat).astype(dtype))
        if op.name == "convert" and value.constant is not None and is_floating(dtype):
            of = self.nodes[self.visit(op.operands[0], dims)]
            if of.name == "constant":
                return Node("constant", dtype, leaf=of.leaf.astype(dtype))
        if op.name == "gather" and (rows := self._rows(op, value, dims)):
            return self._gathered(rows, dtype)
        inner = self._moved(op, shape, dims)
        if inner is not None:
            return self.visit(op.operands[0], inner)
        # Values that lack features are computed once for an edge, outside.
        if frozenset(d for d in dims if d is not None) != self.all:
            return self.leaf(value, dims)
        return self._arithmetic(op, dtype, dims) or self.leaf(value, dims)

    def _moved(self, op, shape, dims):
        """The dimensions of the operand of an operation that repeats or rearranges it; None for other operations."""
        if op.name not in ("broadcast_in_dim", "reshape", "transpose") or op.operands[0].type is None:
            return None
        source = op.operands[0].type[0]
        if op.name == "broadcast_in_dim":
            return tuple(None if n == 1 else dims[d] for n, d in zip(source, op.places))
        if op.name == "transpose":
            found = {s: dims[d] for d, s in enumerate(op.places)}
            return tuple(found[d] for d in range(len(source)))
        large = [d for d, n in zip(dims, shape) if n != 1]
        if [n for n in source if n != 1] != [n for n in shape if n != 1]:
            return None
        return tuple(None if n == 1 else large.pop(0) for n in source)

    def _rows(self, op, value, dims) -> Rows | None:
        """A gather of whole rows by one index for each edge."""
        offset = op.once(_offsets_of_rows)
        if offset is None or math.prod(op.operands[1].type[0]) != self.edges:
            return None
        features = tuple(dims[d] for d in offset)
        edges = [dims[d] for d in range(len(dims)) if d not in offset and dims[d] is not None]
        if edges != [d for d in range(self.counts) if d in self.all]:
            return None
        if any(d is not None and d < self.counts for d in features):
            return None
        return Rows(*op.operands, features, Leaf(value, dims))

    def _gathered(self, rows, dtype) -> Node | int:
        """The node for what a gather reads.

        Cheap arithmetic that makes what is gathered from is done for each edge, if that reads no more bytes than the gather
        of its result does, except for `SINK_BYTES`, and reads them from memory.
        """
        if self.sinks and _sinks(rows.x):
            before, self.has_sunk = len(self.nodes), True
            node = self.numbered(self._below(rows.x, (ROWS, *rows.dims), rows._replace(result=None)))
            read = [self.nodes[k].leaf.x for k in reached(self.nodes, node) if self.nodes[k].name == "rows"]
            fused = any(row_bytes(x) > SINK_BYTES and x.is_fused for x in read)
            few = len(self.nodes) < MOST_NODES
            if few and not fused and sum(map(row_bytes, read)) <= row_bytes(rows.x) + SINK_BYTES:
                return node
            self._forget(before)
        return Node("rows", dtype, leaf=rows)

    def _below(self, value, dims, rows) -> Node | int:
        """The node for the rows of `value` that the gather `rows` reads; ROWS stands for the rows among its `dims`."""
        if value.type is None:
            raise Ends
        if ROWS not in dims:
            return self.visit(value, dims)
        (shape, dtype), op = value.type, value.op
        if op is not None and max(self._depth, len(self.nodes)) < MOST_NODES:
            self._depth += 1
            node, inner = None, self._moved(op, shape, dims)
            if inner is not None:
                node = self._below(op.operands[0], inner, rows)
            elif has_features(self, dims) and _sinks(value):
                below = lambda v, dims: self.numbered(self._below(v, dims, rows))
                node = self._arithmetic(op, dtype, dims, below)
            self._depth -= 1
            if node is not None:
                return node
        if dims[0] != ROWS:
            raise Ends
        return Node("rows", dtype, leaf=rows._replace(x=value, dims=dims[1:]))

    def numbered(self, node) -> int:
        if not isinstance(node, int):
            self.nodes.append(node)
            node = len(self.nodes) - 1
        return node

    def _arithmetic(self, op, dtype, dims, visit=None) -> Node | None:
        """The node for an elementwise operation. visit: in place of `self.visit` for its operands."""
        name, f, types = op.name, op.once(_elementwise), [v.type[1] for v in op.operands if v.type is not None]
        if f is None:
            return None
        floats = is_floating(types[-1])
        before = len(self.nodes)
        if name == "select" and visit is None and (filled := self._filled(op, dims)) is not None:
            which, _, other = op.operands
            operands = (self.visit(which, dims), filled, self.visit(other, dims))
        else:
            visit = visit or self.visit
            operands = tuple(visit(v, dims if len(v.type[0]) == len(dims) else ()) for v in op.operands)
        exact = all(self.nodes[k].exact for k in operands)
        equality = name == "compare" and floats and f in (lax.eq, lax.ne)
        computed = {k for k in operands if self.nodes[k].name != "constant"}
        if equality and not exact and len(computed) > 1:  # x != x finds NaN, and x != 0 the remainder of a division
            # Values that are computed again may be rounded differently than the values that they should equal.
            self._forget(before)
            return None
        exact &= name in EXACT or (name == "convert" and _is_wider(types[0], dtype)) or not floats and name != "convert"
        return Node(name, dtype, operands, f, exact)

    def _filled(self, select, dims) -> int | None:
        """The number of the node for a gather that is read where its indices are in range, and replaced elsewhere."""
        which, value, _ = select.operands
        gather = value.op
        if gather is None or gather.name != "gather" or len(which.type[0]) != len(dims):
            return None
        rows = self._rows(gather, value, dims)
        if rows is None or self.in_range_key(which, dims, rows.x.type[0][0]) != index_key(rows.index):
            return None
        if (value, dims, "filled") not in self._visited:
            node = self._gathered(rows._replace(filled=True), value.type[1])
            self._visited[value, dims, "filled"] = self.numbered(node)
        return self._visited[value, dims, "filled"]

    def _forget(self, count):
        del self.nodes[count:]
        self._visited = {k: node for k, node in self._visited.items() if node < count}


def _elementwise(op):
    """The function of an elementwise operation; None for others, and where a kernel would not compute the same."""
    name, types = op.name, [v.type for v in op.operands]
    if not types or None in types or len(op.ir.results) != 1:  # an iota has no operands
        return None
    attributes, (_, first), (_, last) = dict(compat_lowering.attributes(op.ir)), types[0], types[-1]
    accuracy = str(attributes.get("result_accuracy", ""))
    if "mode" in accuracy and "DEFAULT" not in accuracy:
        return None
    if name == "select":
        return _select
    if name == "compare":
        return None if "TOTALORDER" in str(attributes.get("compare_type", "")) else COMPARE.get(op.direction)
    if name == "convert":
        result = type_of(op.ir.results[0].type)
        if result is None or result[1] == jnp.bool_:
            return None
        to_integer = is_floating(first) and not is_floating(result[1])
        return None if to_integer else _converts(computing(result[1]))
    return (FLOAT if is_floating(last) else BOOL if last == jnp.bool_ else INTEGER).get(name)


def _offsets_of_rows(gather):
    """The dimensions of the result that are of a row, if whole rows of an array are gathered by one index each; or None."""
    x, index = gather.operands
    if x.type is None or index.type is None or index.type[1].kind not in "iu" or 0 in x.type[0]:
        return None
    attributes = gather.ir.attributes
    numbers = dialect.GatherDimensionNumbers(attributes["dimension_numbers"])
    if list(numbers.operand_batching_dims) or list(numbers.start_indices_batching_dims):
        return None
    if list(numbers.collapsed_slice_dims) != [0] or list(numbers.start_index_map) != [0]:
        return None
    if [int(d) for d in ir.DenseI64ArrayAttr(attributes["slice_sizes"])] != [1, *x.type[0][1:]]:
        return None
    rank = len(index.type[0])
    return [int(d) for d in numbers.offset_dims] if numbers.index_vector_dim in (rank, rank - 1) else None


def index_key(value) -> int:
    """The key of indices, whatever dimensions of size 1 they have."""
    return value.base.key


def unwrapped_key(value) -> int | None:
    """The key of i, if this is select(i < 0, i + n, i), i for whatever is not negative."""
    found = value.unwrapped
    return None if found is None else index_key(found)


def _sinks(value) -> bool:
    return value.op is not None and value.op.name in SINKS and value.uses == 1


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
