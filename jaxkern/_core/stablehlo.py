"""What the StableHLO around an operation says while the operation is lowered: constants, gathers and fused producers."""

import contextlib
import math

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jaxkern._core import compat, compat_lowering

# Operations that move no more than one element for each element of their result, so that XLA fuses them.
ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        "abs add and atan2 cbrt ceil clamp compare convert cosine divide exponential exponential_minus_one floor "
        "is_finite log log_plus_one logistic maximum minimum multiply negate not or power reduce_precision remainder "
        "round_nearest_afz round_nearest_even rsqrt select sign sine sqrt subtract tan tanh xor"
    ).split()
)
# Elementwise operations that XLA would rather store than compute in several kernels.
DEAR = frozenset(
    "atan2 cbrt cosine divide exponential exponential_minus_one log log_plus_one logistic power rsqrt sine sqrt tan tanh".split()
)
# Operations that only rearrange, repeat or restrict their operand.
MOVES = frozenset(
    f"stablehlo.{name}" for name in "broadcast_in_dim reshape transpose slice reverse pad concatenate".split()
)
# What XLA fuses with a reduction that reads it. chlo's are elementwise, except for products and sorts.
_FUSED = (
    ELEMENTWISE
    | MOVES
    | frozenset(f"stablehlo.{name}" for name in "constant dynamic_slice gather iota".split())
    | frozenset(
        f"chlo.{name}"
        for name in (
            "acos acosh asin asinh atan atanh bessel_i1e conj cosh digamma erf erf_inv erfc is_inf is_neg_inf is_pos_inf "
            "lgamma next_after polygamma sinh square tan zeta"
        ).split()
    )
)
CONSTRAINT = "sdy.sharding_constraint"  # its result is its operand
BARRIER = "stablehlo.optimization_barrier"
_PURE = frozenset(f"stablehlo.{name}" for name in "constant iota gather reduce".split()) | {CONSTRAINT}
MOST = 200  # operations that are looked at


def maker(value):
    """The operation that `value` is a result of; None for an argument."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def apart(value):
    """`value`, which XLA does not fuse or simplify together with what makes it; it stays in the same memory."""
    return stablehlo.OptimizationBarrierOp([value]).results[0]


def all_apart(values) -> list:
    """The same of several values, all of which are there before one of the results is."""
    return list(stablehlo.OptimizationBarrierOp(list(values)).results)


def behind(value):
    """The value that `apart` was given, if it made `value`; else `value`."""
    operation = maker(value)
    return operation.operands[0] if operation is not None and operation.name == BARRIER else value


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


def is_arithmetic(ctx, value) -> bool:
    """Whether XLA would compute `value` in the kernel that reads it, whereas a jaxkern kernel would read it from memory.

    True for elementwise arithmetic, slices, gathers, broadcasts and the like, also through reshapes, calls and the functions
    that the operation stands in, and where it is not known what makes `value`. False for arguments of the program and of
    loops, for matrix products, with or without a bias, and for what other kernels write.
    """
    calls, moved = [], False
    for _ in range(MOST):
        operation = maker(value)
        if operation is None:
            function = value.owner.owner.operation
            if function.name != "func.func":
                return moved  # an argument of a loop is an array
            if calls:
                value = calls.pop().operands[ir.BlockArgument(value).arg_number]
                continue
            if _is_program(function):
                return moved
            value = compat_lowering.passed(value)
            if value is None:
                return True
        elif operation.name == "func.call":
            returned = _returned(ctx, operation)
            if not returned:
                return True
            calls.append(operation)
            value = returned[ir.OpResult(value).result_number]
        elif operation.name in ("stablehlo.reshape", CONSTRAINT) or _only_moves_ones(operation):
            value = operation.operands[0]
        elif operation.name == "stablehlo.transpose":
            moved, value = True, operation.operands[0]
        elif operation.name == "stablehlo.dot_general":
            return _is_outer(operation)  # XLA chooses the layout of other products
        else:
            return moved or (operation.name in _FUSED and not _adds_bias(operation))
    return True


def is_kept(value) -> bool:
    """Whether `value` is still there when the program has ended: an argument that is not donated, or a constant.

    Looks through reshapes and the functions and `shard_map`s that the operation stands in. False where that is not known.
    """
    for _ in range(MOST):
        operation = maker(value)
        if operation is None:
            function, number = value.owner.owner.operation, ir.BlockArgument(value).arg_number
            if function.name == "sdy.manual_computation":
                value = function.operands[number]
            elif function.name != "func.func":
                return False
            elif _is_program(function):
                return not _is_donated(function, number)
            else:
                value = compat_lowering.passed(value)
                if value is None:
                    return False
        elif operation.name in ("stablehlo.reshape", CONSTRAINT):
            value = operation.operands[0]
        else:
            return operation.name == "stablehlo.constant"
    return False


def is_argument(value) -> bool:
    """Whether `value` is an argument of the program or of a loop, and so an array in memory. False where that is not known."""
    for _ in range(MOST):
        if maker(value) is not None:
            return False
        function, number = value.owner.owner.operation, ir.BlockArgument(value).arg_number
        if function.name == "sdy.manual_computation":
            value = function.operands[number]
        elif function.name != "func.func" or _is_program(function):
            return True
        else:
            value = compat_lowering.passed(value)
            if value is None:
                return False
    return False


def whole_of(value):
    """(the array that `value` is a contiguous slice of, the position of its first element there), or None.

    The slice has fixed bounds; it may have another shape, and be a slice of a slice.
    """
    found, first = None, 0
    while (operation := maker(value)) is not None:
        if operation.name == "stablehlo.slice":
            begin = begin_of_slice(operation)
            if begin is None:
                break
            first += begin
            found = operation.operands[0], first
        elif not keeps_order(operation):
            break
        value = operation.operands[0]
        found = found and (value, first)
    return found


def keeps_order(operation) -> bool:
    """Whether an operation changes the shape of its operand alone: the elements stay in their order in memory."""
    return operation.name == "stablehlo.reshape" or _only_moves_ones(operation)


def begin_of_slice(operation) -> int | None:
    """The position in the operand, in elements, of the first element of a slice; None if its elements are not contiguous there."""
    shape = tuple(ir.RankedTensorType(operation.operands[0].type).shape)
    if any(n < 0 for n in shape):
        return None
    names = "start_indices", "limit_indices", "strides"
    starts, limits, strides = (tuple(ir.DenseI64ArrayAttr(operation.attributes[name])) for name in names)
    sizes = [limit - start for start, limit in zip(starts, limits)]
    if any(step != 1 and n > 1 for step, n in zip(strides, sizes)):
        return None
    # Dimensions of size 1, then perhaps a range of one dimension, then whole dimensions.
    cut = next((d for d, n in enumerate(sizes) if n != 1), len(sizes))
    if any(n != whole for n, whole in zip(sizes[cut + 1 :], shape[cut + 1 :])):
        return None
    return sum(start * math.prod(shape[d + 1 :]) for d, start in enumerate(starts))


def is_donated(value) -> bool:
    """Whether `value` is an argument of the program whose memory a result may take. Looks through reshapes."""
    argument = chain(value)[-1]
    return maker(argument) is None and _is_donated(
        argument.owner.owner.operation, ir.BlockArgument(argument).arg_number
    )


def chain(value) -> list:
    """`value`, and what it is a reshape of, a reshape of, and so on."""
    found = [value]
    while (operation := maker(found[-1])) is not None and operation.name in ("stablehlo.reshape", CONSTRAINT):
        found.append(operation.operands[0])
    return found


def results_over(argument) -> set[int]:
    """The results of the program, by their positions, that may have the memory of `argument`; empty if that is no donated argument."""
    if maker(argument) is not None:
        return set()
    function, number = argument.owner.owner.operation, ir.BlockArgument(argument).arg_number
    if not _is_donated(function, number):
        return set()
    attributes = [ir.DictAttr(a) for a in ir.ArrayAttr(function.attributes["arg_attrs"])]
    taken = [ir.IntegerAttr(a[_TAKEN_BY]).value if _TAKEN_BY in a else None for a in attributes]
    if taken[number] is not None:
        return {taken[number]}
    if sum("jax.buffer_donor" in a for a in attributes) > 1:  # XLA chooses
        return set()
    results = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value).results
    return set(range(len(results))).difference(taken)


_TAKEN_BY = "tf.aliasing_output"


def _is_donated(function, number) -> bool:
    if function.name != "func.func" or "arg_attrs" not in function.attributes:
        return False
    own = ir.DictAttr(ir.ArrayAttr(function.attributes["arg_attrs"])[number])
    return "jax.buffer_donor" in own or _TAKEN_BY in own


def _is_program(function) -> bool:
    """Whether a func.func is the program, and not a function that it calls."""
    attributes = function.attributes
    return "sym_visibility" in attributes and ir.StringAttr(attributes["sym_visibility"]).value == "public"


def _shape(value) -> tuple:
    return tuple(ir.RankedTensorType(value.type).shape)


def _only_moves_ones(operation) -> bool:
    """Whether a transpose or broadcast leaves the elements in their order in memory: it moves or adds dimensions of size 1."""
    if operation.name not in ("stablehlo.transpose", "stablehlo.broadcast_in_dim"):
        return False
    shape = _shape(operation.operands[0])
    if operation.name == "stablehlo.transpose":
        order = [d for d in ir.DenseI64ArrayAttr(operation.attributes["permutation"]) if shape[d] != 1]
    else:
        to, result = ir.DenseI64ArrayAttr(operation.attributes["broadcast_dimensions"]), _shape(operation.results[0])
        if math.prod(shape) != math.prod(result):
            return False
        order = [to[d] for d in range(len(shape)) if shape[d] != 1]
    return order == sorted(order)


def _is_outer(product) -> bool:
    """Whether a dot_general sums over one element alone, which makes it a multiplication."""
    numbers = stablehlo.DotDimensionNumbers(product.attributes["dot_dimension_numbers"])
    shape = _shape(product.operands[0])
    return math.prod(shape[d] for d in numbers.lhs_contracting_dimensions) == 1


def _adds_bias(operation) -> bool:
    """Whether this is a matrix product plus a vector along its last dimension: the addition is part of the product."""
    if operation.name != "stablehlo.add":
        return False
    product, bias = (_through_reshapes(v) for v in operation.operands)
    if product is None or product.name != "stablehlo.dot_general":
        product, bias = bias, product
    if product is None or bias is None or product.name != "stablehlo.dot_general" or _is_outer(product):
        return False
    return bias.name == "stablehlo.broadcast_in_dim" and _is_vector(bias)


def _is_vector(broadcast) -> bool:
    """Whether a broadcast_in_dim repeats a vector along all dimensions of its result but the last."""
    shape, result = _shape(broadcast.operands[0]), _shape(broadcast.results[0])
    to = list(ir.DenseI64ArrayAttr(broadcast.attributes["broadcast_dimensions"]))
    long = [d for d in range(len(shape)) if shape[d] != 1]
    return [to[d] for d in long] == [len(result) - 1]


def _through_reshapes(value):
    operation = maker(value)
    while operation is not None and operation.name == "stablehlo.reshape":
        operation = maker(operation.operands[0])
    return operation


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
    attributes = dict(compat_lowering.attributes(move))
    for operation in (use.owner.operation for use in operand.uses):
        same = operation.name == move.name and operation.results[0].type == kind and operation.block == move.block
        if same and dict(compat_lowering.attributes(operation)) == attributes:
            return operation.results[0]  # made by an earlier call, in the same place
    with ir.InsertionPoint(move), move.location:
        return ir.Operation.create(move.name, [kind], [operand], attributes).results[0]


def _returned(ctx, call):
    """What the function of a call returns, values inside that function."""
    function = compat_lowering.callee(ctx.module_context.symbol_table, call)
    if function is None:
        return []
    block = function.operation.regions[0].blocks[0]
    return list(block.operations[len(block.operations) - 1].operands)


def size(aval) -> int:
    """Bytes of an array."""
    return compat.size_in_bytes(aval)


def transposed(value):
    """(x, permutation) of a value that is a transpose of x; (None, None) of any other."""
    operation = getattr(value, "owner", None)
    if getattr(operation, "name", None) != "stablehlo.transpose":
        return None, None
    return operation.operands[0], tuple(dict(compat_lowering.attributes(operation))["permutation"])


def is_zero(value) -> bool:
    """Whether a value repeats the number 0, and is not -0."""
    constant = maker(repeated(value)[0] or value)
    number = splat(constant) if constant is not None and constant.name == "stablehlo.constant" else None
    return number == 0 and math.copysign(1, number) > 0


def repeated(value):
    """(x, dimensions) of a value that repeats the elements of x: which dimension of the value each one of x is; or (None, None).

    Looks through transposes. x has no dimension along which its only element is repeated.
    """
    moves, operation = [], getattr(value, "owner", None)
    while getattr(operation, "name", None) == "stablehlo.transpose":
        moves.append(tuple(dict(compat_lowering.attributes(operation))["permutation"]))
        operation = getattr(operation.operands[0], "owner", None)
    if getattr(operation, "name", None) != "stablehlo.broadcast_in_dim":
        return None, None
    x, shape = operation.operands[0], _shape(operation.results[0])
    dims = tuple(dict(compat_lowering.attributes(operation))["broadcast_dimensions"])
    if len(dims) == len(shape) or _shape(x) != tuple(shape[d] for d in dims):
        return None, None
    for permutation in reversed(moves):
        dims = tuple(permutation.index(d) for d in dims)
    return x, dims
