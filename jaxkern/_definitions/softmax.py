"""softmax and log_softmax of rows, with a scale, a bias, a mask, a causal limit and dropout in one kernel.

    s = scale * x + bias
    y = dropout(exp(s - max(s)) / sum(exp(s - max(s))))    or    y = s - max(s) - log(sum(exp(s - max(s))))

Elements that are masked, or beyond the causal limit, take no part: there the result is 0 (of log_softmax -inf), and the gradient
is 0 whatever the cotangent is. In a row without participants, or of -inf alone, all elements count as masked.

Arrays: x, then as many of bias, scale, mask and the two words of the key, key0 and key1, as `names` lists, in this order. All have
the rank of x and broadcast to it. axis: the dimension of a row, counted from the last. causal: the last two dimensions are queries
and keys. threshold: draws of 16 bits below it are dropped.

The residual of softmax is its result: the gradient needs neither bias nor mask nor exponentials, and the caller usually keeps the
result anyway. With dropout it is the operands, and the gradient draws the same bits again: the result lacks what was dropped. The residual
of log_softmax is x, because the gradient would magnify the rounding error of y by |y|. In 16 bits, without scale and bias, it is y, whose
rounding hides that error.
"""

import functools

import jax
import jax.numpy as jnp

from jaxkern._core.rows import computed, lowest_for_infinity, mask_shape, row_sum
from jaxkern._definitions import dropout
from jaxkern._definitions import softmax_on_cpu as on_cpu
from jaxkern._definitions.traced import row_function, runner
from jaxkern._engines.rows.primitive import apply, define
from jaxkern._ops.softmax import by_hand

EXTRAS = ("bias", "scale", "mask", "key0", "key1")

define("softmax", by_hand)
define("log_softmax", by_hand)


def softmax(x, bias, mask, *, name, axis, numbers, algorithm, dtype, causal=False, threshold=0, replaces=False):
    """The operation `name`. bias, mask: arrays of the rank of x, or None. numbers: scalars by name, the others of EXTRAS, or None.

    algorithm, replaces: as for a RowFunction.
    """
    known = all(isinstance(n, int) for n in x.shape)  # a symbolic size has no kernel
    spread = lambda a: jnp.broadcast_to(a, mask_shape(x.shape, a.shape, axis)) if a is not None and known else a
    given = {k: a if a is None else a.reshape((1,) * x.ndim) for k, a in numbers.items()}
    given |= {"bias": spread(bias), "mask": spread(mask)}
    names = tuple(k for k in EXTRAS if given[k] is not None)
    arrays = [x, *(given[k] for k in names)]
    more = {"causal": causal, "threshold": threshold, "replaces": replaces, "dtype": dtype}
    (y,) = apply(_function(name, arrays, names, axis - x.ndim, algorithm, **more), arrays)
    return y


def _function(name, arrays, names, axis, algorithm, dtype, causal=False, threshold=0, replaces=False):
    static = {"log": name == "log_softmax", "names": names, "axis": axis, "causal": causal, "threshold": threshold}
    static["rank"] = arrays[0].ndim if threshold else 0  # for by_hand.py
    # The gradient from a result of 16 bits has 16 bits, too.
    how = {"row": axis, "tangent": _tangent, "tangent_dtype": None if threshold else dtype, "replaces": replaces}
    roles = ("x", *names), ("y",)
    return row_function(name, _value, arrays, algorithm, **how, roles=roles, dtype=dtype, **static)


def gradient(name, y, g, given=None, *, axis, algorithm="auto", causal=False):
    """The gradient of the operation without dropout from what it keeps: x of a log_softmax in 32 bits or more, else the result."""
    given = {} if given is None else given
    names = tuple(k for k in EXTRAS if k in given)
    arrays = [y, *(given[k] for k in names)]
    function = _function(name, arrays, names, axis % y.ndim - y.ndim, algorithm, y.dtype, causal)
    (dx,) = apply(function.tangent((0,)).transpose((1 + len(arrays),)), [y, *arrays, g])
    return dx


def _value(x, *arrays, names, axis, log, causal, threshold, dtype, rank):
    del rank
    given = dict(zip(names, arrays))
    exact = functools.partial(_exact, x, given, axis, log, causal, threshold, dtype)
    if runner() != "cpu" or causal or given.keys() - {"mask"} or dtype != x.dtype:
        return [exact()]
    f = on_cpu.log_softmax if log else on_cpu.softmax
    return [f(x, *arrays, axis=axis)]


def _exact(x, given, axis, log, causal, threshold, dtype):
    part = _participants(x, given, causal)
    below, e, total, empty = _exponentials(x, given, part, axis)
    if log:
        y = jnp.where(empty, -jnp.inf, below - jnp.log(total))
        return lowest_for_infinity(y if part is None else jnp.where(part, y, -jnp.inf), dtype)
    y = e / jnp.where(empty, 1, total)
    return _dropped(y if part is None else jnp.where(part, y, 0), given, axis, threshold).astype(dtype)


def _exponentials(x, given, part, axis):
    """(s - max(s), its exponential, their sum, whether nothing takes part), of the elements in `part`.

    The maximum counts as a constant: no derivative of what is computed from these depends on it. `empty` depends on it, and not on the
    sum: what a comparison depends on is computed in full precision.
    """
    s = _scores(x, given, part)
    s = s if part is None else jnp.where(part, s, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(s, axis, keepdims=True, initial=-jnp.inf))
    empty = largest == -jnp.inf
    below = _unmoved(empty, s) - jnp.where(empty, 0, largest)
    e = jnp.exp(below)
    return below, e, row_sum(e, axis), empty


@jax.custom_jvp
def _unmoved(empty, s):
    """s. Its tangent in empty rows is 0: in third derivatives, a NaN there would meet the zeros that the rows have otherwise."""
    del empty
    return s


@_unmoved.defjvp
def _(primals, tangents):
    empty, s = primals
    return s, jnp.where(empty, 0, tangents[1])


def _participants(x, given, causal):
    """Which elements take part, in a shape that broadcasts to the shape of x; None: all."""
    part = given.get("mask")
    if not causal:
        return part
    query, key = (jax.lax.broadcasted_iota(jnp.int32, x.shape[-2:], d) for d in (0, 1))
    seen = key <= query + (x.shape[-1] - x.shape[-2])
    return seen if part is None else part & seen


def _scores(x, given, part):
    # Zero where nothing takes part, so that no derivative depends on what lies there.
    s = computed(x) if part is None else jnp.where(part, computed(x), 0)
    s = s * given["scale"] if "scale" in given else s
    return s + given["bias"].astype(s.dtype) if "bias" in given else s


def _dropped(y, given, axis, threshold):
    if not threshold:
        return y
    draw = dropout.kept if runner() == "kernels" else dropout.kept_by_blocks
    kept = draw(y.shape, axis % y.ndim, (given["key0"], given["key1"]), threshold)
    return jnp.where(kept, y * (65536 / (65536 - threshold)), 0)


# ---- derivatives


def _tangent(y, x, *arrays, wrt, names, axis, log, causal, threshold, dtype, rank):
    """The tangent of the result. Derivatives of any order are derived from it; its transpose is the gradient."""
    operands, count = ("x", *names), len(names)
    given, tangents = dict(zip(names, arrays)), dict(zip([operands[k] for k in wrt], arrays[count:]))
    plain = not given.keys() - {"mask"}
    kept_is_y = not threshold and (not log or (plain and x.dtype.itemsize <= 2))
    if runner() == "cpu" and not threshold:
        if not log:
            t = _tangent_of_scores(x, y != 0, given, tangents)
            wide = y.dtype if tangents.keys() == {"x"} and "scale" not in given else t.dtype
            return [on_cpu.tangent("softmax", y.astype(wide), t.astype(wide), axis=axis).astype(y.dtype)]
        if plain:
            return [on_cpu.tangent("log_softmax", y if kept_is_y else x, tangents["x"], *arrays[:count], axis=axis)]
    part = _participants(x, given, causal)
    if kept_is_y and not log:
        seen = _participants(x, {}, causal)  # beyond the limit nothing needs to be read
        p = computed(y) if seen is None else jnp.where(seen, computed(y), 0)
        part = p != 0 if seen is None else seen & (p != 0)
        alive = part
    else:
        if kept_is_y:
            kept = computed(y) if part is None else jnp.where(part, computed(y), -jnp.inf)
            p, empty = jnp.exp(kept), jnp.max(kept, axis, keepdims=True, initial=-jnp.inf) == -jnp.inf
        else:
            _, e, total, empty = _exponentials(x, given, part, axis)
            p = jnp.where(empty, 0, e / jnp.where(empty, 1, total))
        alive = jnp.broadcast_to(~empty if part is None else ~empty & part, x.shape)
    # Whether rows are empty decides on the tangent of x alone, so that the transpose needs no maximum before its sums.
    t = jnp.where(alive, _tangent_of_scores(x, alive, given, tangents), 0)
    dot = row_sum(p * t, axis)
    t = t - dot if log else _dropped(p * (t - dot), given, axis, threshold)
    return [(t if part is None else jnp.where(part, t, 0)).astype(y.dtype)]


def _tangent_of_scores(x, alive, given, tangents):
    """The tangent of scale * x + bias."""
    terms = []
    if "x" in tangents:
        t = computed(tangents["x"])
        terms.append(t * given["scale"] if "scale" in given else t)
    if "scale" in tangents:
        terms.append(tangents["scale"] * jnp.where(alive, computed(x), 0))
    if "bias" in tangents:
        terms.append(computed(tangents["bias"]))
    return jnp.broadcast_to(sum(terms[1:], terms[0]), x.shape)
