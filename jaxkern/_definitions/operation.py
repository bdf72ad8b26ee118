"""`operation` makes a public operation of rows from its definition, a function in jnp.

    @operation(columns=("scale",))
    def scale_norm(x, scale=1.0, *, axis=-1, eps=1e-5):
        return scale * x * lax.rsqrt(jnp.maximum(jnp.sum(x * x, -1, keepdims=True), eps * eps))

The public function has the signature and the docstring of the definition. It checks and converts its arguments; the definition
is called with them while a row function is traced:

    x                   the first argument, an array of rows: the axes `axis` are its last dimension
    columns             arrays that broadcast to a row, of any floating-point type, or None
    masks               boolean arrays that broadcast to x, or None
    other arguments     Python numbers that are not negative

All floating-point arrays come in the computing type of x, and the result, an array of the shape of x, is rounded once. On a CPU
XLA runs the definition, elsewhere the engine of rows makes kernels of it and of its derivatives: see _engines/rows.

These arguments of the signature are not used by the definition. `operation` applies them for any definition that names them:

    axis                       an int, a tuple of ints, or None for all axes
    dtype                      of the result
    epsilon                    another name of eps
    residual                   an array like x that is added to x first; the rounded sum is the second result
    epilogue, epilogue_args    a function of scalars that is applied to each element of the result
    quantize                   a Quantization of the result, which is then not rounded before
"""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxkern._core import cpp, functor, validate
from jaxkern._core.algorithms import forced
from jaxkern._core.dtypes import computing
from jaxkern._core.rows import mask_shape
from jaxkern._definitions import quantized
from jaxkern._definitions.quantization import checked_quantization
from jaxkern._definitions.traced import of_rows
from jaxkern._engines.rows.primitive import define

OPTIONS = ("axis", "dtype", "epsilon", "residual", "epilogue", "epilogue_args", "quantize")


def operation(*, columns=(), masks=(), by_hand=None):
    """A decorator; see the module. by_hand: as for `define` of row functions."""

    def make(definition):
        own = Operation(definition, columns, masks, by_hand)

        @functools.wraps(definition)
        def call(*args, **named):
            y = _run(operation=own, **own.arguments(args, named))
            return y[0] if len(y) == 1 else tuple(y)

        call.operation = own
        return call

    return make


class Operation:
    """A definition, and which of its arguments are what. Two are never equal."""

    def __init__(self, definition, columns, masks, by_hand=None):
        self.name, self.definition, self.columns, self.masks = definition.__name__, definition, columns, masks
        self.signature = inspect.signature(definition)
        names = list(self.signature.parameters)
        self.numbers = {
            k: self.signature.parameters[k].default for k in names[1:] if k not in (*columns, *masks, *OPTIONS)
        }
        define(self.name, by_hand)
        self.quantized = quantized.primitive(self) if "quantize" in names else None

    def arguments(self, args, named) -> dict:
        """The arguments of a call, checked, as `_run` takes them."""
        try:
            bound = self.signature.bind(*args, **named)
        except TypeError as error:
            raise TypeError(f"{self.name}() {error}") from None
        own = dict.fromkeys(OPTIONS) | {"axis": -1, "epilogue_args": ()}
        bound.apply_defaults()
        own |= bound.arguments
        axis, dtype, epsilon, residual, epilogue, args, quantize = (own[k] for k in OPTIONS)
        name, x = self.name, own["x"]
        columns, masks = ({k: own[k] for k in names if own[k] is not None} for names in (self.columns, self.masks))
        validate.check_array(name, "x", "an array or a number", x)
        for argument, value in {**columns, "residual": residual}.items():
            if value is not None:
                validate.check_array(name, argument, "an array", value)
        numbers = {}
        for argument, default in self.numbers.items():
            other = epsilon if argument == "eps" else None
            numbers[argument] = not_negative(name, argument, own[argument], default, epsilon=other)
        dtype = None if dtype is None else validate.floating_dtype(name, "dtype", dtype)
        for argument, value in masks.items():
            validate.check_array(name, argument, "a boolean array", value)
        to, block, given = None, None, None
        if quantize is not None:
            to, block, given = checked_quantization(name, quantize, x, axis, dtype)
        function = None
        if epilogue is not None or not isinstance(args, (tuple, list)) or args:
            x = validate.floating(name, jnp.asarray(x))
            function, args = traced_epilogue(name, epilogue, x, args)
        return dict(
            x=x,
            columns=columns,
            masks=masks,
            residual=residual,
            args=list(args),
            given=given,
            axis=validate.static_axis(name, axis),
            numbers=tuple(numbers.items()),
            dtype=dtype,
            algorithm=forced(name),
            function=function,
            to=to,
            block=block,
        )


def not_negative(name, argument, value, default, epsilon=None) -> float:
    """A Python number; `epsilon`, if it is not None, is given in its place."""
    number = validate.number(name, argument, value)
    if epsilon is not None:
        if number != default:
            raise TypeError(f"jaxkern.{name}: eps and epsilon are names of one argument, and both are given")
        argument, value, number = "epsilon", epsilon, validate.number(name, "epsilon", epsilon)
    if number < 0:
        raise ValueError(f"jaxkern.{name}: {argument} must not be negative, got {value}")
    return number


def traced_epilogue(name, epilogue, x, args):
    """(the Function of an element of the result and of `args` and captured scalars; all of these, of the rank of x)."""
    if epilogue is None:
        raise TypeError(f"jaxkern.{name}: epilogue_args are the arguments of an epilogue, and epilogue is None")
    validate.function(name, "epilogue", epilogue, "a function of scalars")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"jaxkern.{name}: epilogue_args must be a list or a tuple of arrays, got {type(args).__name__}")
    for k, a in enumerate(args):
        validate.check_array(name, f"epilogue_args[{k}]", "an array or a number", a)
        cpp.check_dtype(f"jaxkern.{name}: epilogue_args[{k}]", jnp.result_type(a))
    ranked = (validate.full_rank(name, f"epilogue_args[{k}]", x, jnp.asarray(a)) for k, a in enumerate(args))
    args = [a for a in ranked if a is not None]  # all are ranked
    scalars = f"a normalised element and an element of each of {len(args)} epilogue_args"
    validate.check_call(name, "epilogue", epilogue, 1 + len(args), scalars)
    wide = computing(x.dtype)

    def converted(*scalars):
        y = jnp.asarray(epilogue(*scalars))
        real = jnp.issubdtype(y.dtype, jnp.floating) or jnp.issubdtype(y.dtype, jnp.integer)
        return y.astype(wide) if real else y

    label = getattr(epilogue, "__name__", None) or type(epilogue).__name__
    label = "epilogue" if label == "<lambda>" else f"epilogue {label}"
    dtypes, weak = [wide, *(a.dtype for a in args)], [False, *(a.weak_type for a in args)]
    function, captured = functor.trace(converted, dtypes, name=name, weak=weak, results=1, label=label)
    if function.out_dtypes[0] != wide:
        raise TypeError(f"{function.label} must return a real number, and returns {function.out_dtypes[0]}")
    return function, [*args, *(jnp.asarray(c).reshape((1,) * x.ndim) for c in captured)]


# ---- arguments as operands: rows along the last dimension


# Inlined, so that a jaxpr holds the primitive alone. Jitted, so that an eager call costs no more than a jnp function.
@functools.partial(
    jax.jit,
    static_argnames=("operation", "axis", "numbers", "dtype", "algorithm", "function", "to", "block"),
    inline=True,
)
def _run(x, columns, masks, residual, args, given, *, operation, axis, numbers, dtype, algorithm, function, to, block):
    """[the result], or with a residual [the result, x + residual].

    to: quantize to this type, with a scale for `block` neighbours, for a row, or `given`; the result is a tuple then.
    """
    name, x = operation.name, validate.floating(operation.name, x)
    axes = validate.sorted_axes(name, axis, x.shape)
    if not axes:
        raise ValueError(f"jaxkern.{name}: axis {axis} names no dimension of x of shape {x.shape}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        kind = ValueError if residual.shape != x.shape else TypeError
        raise kind(
            f"jaxkern.{name}: residual must have the shape and dtype of x, {x.dtype}{list(x.shape)}, got "
            f"{residual.dtype}{list(residual.shape)}"
        )
    row = tuple(x.shape[a] for a in axes)
    masks = {k: validate.full_rank_mask(name, x, mask) for k, mask in masks.items()}
    columns = {k: column(name, k, x, row, value) for k, value in columns.items()}
    order, count = [a for a in range(x.ndim) if a not in axes] + axes, len(axes)
    operands = {"x": flat(x, order, count)}
    if residual is not None:
        operands["residual"] = flat(residual, order, count)
    operands |= {k: value.reshape(math.prod(value.shape)) for k, value in columns.items()}
    operands |= {k: _part(mask, x, order, count) for k, mask in masks.items()}
    args = [_part(a, x, order, count) for a in args]
    more = {"numbers": numbers, "algorithm": algorithm, "function": function}
    if to is not None:
        return quantized.run(operation, operands, args, given, to=to, block=block, **more)
    ys = of_rows(operation, operands, args, dtype=x.dtype if dtype is None else dtype, **more)
    return [restored(y, x, order, count) for y in ys]


def column(name, argument, x, row, value):
    """A column in the shape of the normalised dimensions `row` of x, or with one element."""
    value = validate.floating(name, value, argument)
    try:
        fits = jnp.broadcast_shapes(value.shape, row) == row
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"jaxkern.{name}: {argument} of shape {value.shape} does not broadcast to the normalised dimensions "
            f"{row} of x of shape {x.shape}"
        )
    return value if value.shape == row or value.size == 1 else jnp.broadcast_to(value, row)


def flat(x, order, count):
    """x with its normalised axes, the last `count` of `order`, as one last axis."""
    x = x if order == list(range(x.ndim)) else x.transpose(order)
    first = x.ndim - count
    if count == 1:
        return x
    return validate.mergeable(x, count, first).reshape(*x.shape[:first], math.prod(x.shape[first:]))


def _part(a, x, order, count):
    """An array that broadcasts to x, in the layout of `flat`; it is broadcast only if kernels could not read it in place."""
    rows, row = order[:-count], order[-count:]
    if any(a.shape[d] != 1 for d in row):
        a = jnp.broadcast_to(a, [n if d in row else a.shape[d] for d, n in enumerate(x.shape)])
    a = flat(a, order, count)
    full = (*(x.shape[d] for d in rows), math.prod(x.shape[d] for d in row))
    wanted = mask_shape(full, a.shape, len(rows))
    return a if wanted == a.shape else jnp.broadcast_to(a, wanted)


def restored(y, x, order, count):
    """y, flat, in the shape of x."""
    if count > 1:
        y = y.reshape([x.shape[a] for a in order])
        spec = validate.explicit_spec(x)
        if any(spec[a] for a in order[-count:]):
            y = jax.sharding.reshard(y, P(*(spec[a] for a in order)))
    return y if order == list(range(x.ndim)) else y.transpose([order.index(a) for a in range(x.ndim)])
