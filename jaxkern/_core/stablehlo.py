"""What the StableHLO around an operation says while the operation is lowered: constants, gathers and fused producers."""

import contextlib

from jax.extend.mlir import ir

from jaxkern._core import compat

# Operations that move no more than one element for each element of their result, so that XLA fuses them.
ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        "abs add and atan2 cbrt ceil clamp compare convert cosine divide exponential exponential_minus_one floor "
        "is_finite log log_plus_one logistic maximum minimum multiply negate not or power remainder "
        "round_nearest_afz round_nearest_even rsqrt select sign sine sqrt subtract tan tanh xor"
    ).split()
)
# Operations that only rearrange, repeat or restrict their operand.
MOVES = frozenset(
    f"stablehlo.{name}" for name in "broadcast_in_dim reshape transpose slice reverse pad concatenate".split()
)
CONSTRAINT = "sdy.sharding_constraint"  # its result is its operand
_PURE = frozenset(f"stablehlo.{name}" for name in "constant iota gather reduce".split()) | {CONSTRAINT}
MOST = 200  # operations that are looked at


def maker(value):
    """The operation that `value` is a result of; None for an argument."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def unconstrained(value):
    """The same value without constraints on how it is split."""
    while (operation := maker(value)) is not None and operation.name == CONSTRAINT:
        value = operation.operands[0]
    return value


def constant(value):
    """The number that all elements of `value` are, or None if that is not known."""
    operation = maker(value)
    for _ in range(MOST):
        if operation is None or operation.name not in (
            "stablehlo.broadcast_in_dim",
            "stablehlo.reshape",
            "stablehlo.convert",
            CONSTRAINT,
        ):
            break
        operation = maker(operation.operands[0])
    if operation is None or operation.name != "stablehlo.constant":
        return None
    return splat(operation)


def splat(operation):
    """The number that all elements of a stablehlo.constant are; None if they differ, or it cannot be read."""
    with contextlib.suppress(TypeError, ValueError):  # complex numbers, of 8 bits
        elements = ir.DenseElementsAttr(operation.attributes["value"])
        element = elements.get_splat_value() if elements.is_splat else None
        for kind in (None, ir.FloatAttr, ir.IntegerAttr, ir.BoolAttr):
            with contextlib.suppress(TypeError, ValueError, AttributeError):
                return (element if kind is None else kind(element)).value
    return None


def is_pure(operation) -> bool:
    """Whether an operation is known to have no effect but its results, and to be cheap to compute again."""
    name = operation.name
    return name in ELEMENTWISE or name in MOVES or name in _PURE or name.startswith("chlo.")


def is_fused(value) -> bool:
    """Whether `value` is arithmetic, which XLA computes in one pass over memory with what consumes it."""
    operation = maker(unconstrained(value))
    return operation is not None and operation.name in ELEMENTWISE | MOVES


def gathers(ctx, value) -> bool:
    """Whether `value` is arithmetic on a gather, which XLA fuses with what consumes it."""
    seen, pending = 0, [value]
    while pending and seen < MOST:
        operation = maker(pending.pop())
        seen += 1
        if operation is None:
            continue
        if operation.name == "stablehlo.gather":
            return True
        if operation.name == "func.call":
            pending += _returned(ctx, operation)
            pending += operation.operands
        elif operation.name in ELEMENTWISE or operation.name in MOVES:
            pending += operation.operands
    return False


def is_arithmetic(ctx, value) -> bool:
    """Whether `value` is arithmetic or a slice, which XLA fuses with a reduction that consumes it, but no kernel of ours.

    A matrix product with a bias is none: the addition is part of the product.
    """
    operation = maker(value)
    while operation is not None and operation.name in ("stablehlo.reshape", "func.call"):
        values = _returned(ctx, operation) if operation.name == "func.call" else [operation.operands[0]]
        if len(values) != 1:
            return False
        operation = maker(values[0])
    if operation is not None and operation.name == "stablehlo.slice":
        return True
    if operation is None or operation.name not in ELEMENTWISE:
        return False
    makers = [maker(v) for v in operation.operands]
    product = any(m is not None and m.name == "stablehlo.dot_general" for m in makers)
    bias = any(m is not None and m.name == "stablehlo.broadcast_in_dim" for m in makers)
    return not (operation.name == "stablehlo.add" and product and bias)


def before_widening(value):
    """Returns the bfloat16 value that `value` is the float32 conversion of, or None.

    Reshapes, transposes and slices after the conversion are repeated on the bfloat16 value; later calls return the same
    operations. float16 values are not looked for: a float32 gradient may be out of the range of float16.
    """
    moves = []
    operation = maker(value)
    while operation is not None and operation.name in ("stablehlo.reshape", "stablehlo.transpose", "stablehlo.slice"):
        moves.append(operation)
        operation = maker(operation.operands[0])
    if operation is None or operation.name != "stablehlo.convert":
        return None
    narrow = operation.operands[0]
    if (_element(narrow), _element(operation.results[0])) != ("bf16", "f32"):
        return None
    for move in reversed(moves):
        narrow = _repeated(move, narrow)
    return narrow


def _element(value) -> str:
    return str(ir.RankedTensorType(value.type).element_type)


def _repeated(move, operand):
    """Applies `move`, a reshape, transpose or slice, to `operand`, at the place of `move` in the program."""
    kind = ir.RankedTensorType.get(
        ir.RankedTensorType(move.results[0].type).shape, ir.RankedTensorType(operand.type).element_type
    )
    attributes = dict(compat.attributes(move))
    for operation in (use.owner.operation for use in operand.uses):
        same = operation.name == move.name and operation.results[0].type == kind and operation.block == move.block
        if same and dict(compat.attributes(operation)) == attributes:
            return operation.results[0]  # made by an earlier call, in the same place
    with ir.InsertionPoint(move), move.location:
        return ir.Operation.create(move.name, [kind], [operand], attributes).results[0]


def _returned(ctx, call):
    """What the function of a call returns, values inside that function."""
    function = compat.callee(ctx, call)
    if function is None:
        return []
    block = function.operation.regions[0].blocks[0]
    return list(block.operations[len(block.operations) - 1].operands)


def size(aval) -> int:
    """Bytes of an array."""
    return aval.size * aval.dtype.itemsize
