"""Operations of loop bodies that stand for others: random bits and keys of jax.random, loops of fixed count in the body.

A key is the array of numbers that it holds: key<fry>[lanes] is uint32[lanes, 2]. Its random bits are made by Threefry, which is
arithmetic on counters. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import functools
import itertools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

# Operations that arrays of keys have too.
_OF_WORDS = (
    "select_n",
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "expand_dims",
    "transpose",
    "slice",
    "concatenate",
    "rev",
)
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@jax.jit
def threefry2x32(k0, k1, x0, x1):
    """Threefry-2x32 with 20 rounds: two words of bits for a key (k0, k1) and counters (x0, x1)."""
    shape = np.broadcast_shapes(*(x.shape for x in (k0, k1, x0, x1)))
    k0, k1, x0, x1 = (jnp.broadcast_to(x, shape) for x in (k0, k1, x0, x1))
    number = lambda n: lax.full_like(k0, np.uint32(n))
    schedule = (k0, k1, lax.bitwise_xor(lax.bitwise_xor(k0, k1), number(0x1BD11BDA)))
    x0, x1 = lax.add(x0, k0), lax.add(x1, k1)
    for four in range(5):
        for by in _ROTATIONS[four % 2]:
            x0 = lax.add(x0, x1)
            left, right = lax.shift_left(x1, number(by)), lax.shift_right_logical(x1, number(32 - by))
            x1 = lax.bitwise_xor(lax.bitwise_or(left, right), x0)
        x0 = lax.add(x0, schedule[(four + 1) % 3])
        x1 = lax.add(x1, lax.add(schedule[(four + 2) % 3], number(four + 1)))
    return x0, x1


def _counters(shape):
    """The places in an array of fewer than 2^32 elements as two words, the high one first."""
    strides = itertools.accumulate(shape[:0:-1], int.__mul__, initial=1)
    places = [
        lax.broadcasted_iota(np.uint32, shape, d) * np.uint32(n) for d, n in zip(reversed(range(len(shape))), strides)
    ]
    return [jnp.zeros(shape, np.uint32), functools.reduce(lax.add, places)]


def _tiled(x, reps):
    for axis, n in enumerate(reps):
        if x.shape[axis] == 1:
            x = lax.broadcast_in_dim(x, (*x.shape[:axis], n, *x.shape[axis + 1 :]), range(x.ndim))
        elif n != 1:
            x = lax.concatenate([x] * n, axis)
    return x


def _each(f, batch, given=1):
    """f on every key of an array of keys; the first `given` operands have these batch dimensions in front."""
    for _ in range(batch):
        f = jax.vmap(f, (0,) * given)
    return f


def is_key(v) -> bool:
    return jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)


def rewritten(e):
    """The function in jnp that stands for an equation, of arrays in place of keys; None if the equation stays as it is."""
    name, params = e.primitive.name, e.params
    if name == "threefry2x32":
        return threefry2x32
    if name == "iota_2x32_shape" and math.prod(params["shape"]) < 1 << 32:
        return lambda: _counters(params["shape"])
    if name == "unstack":
        axis = params["axis"]
        return lambda x: [lax.index_in_dim(x, k, axis, False) for k in range(x.shape[axis])]
    if name == "stack":
        return lambda *xs: lax.concatenate([lax.expand_dims(x, (params["axis"],)) for x in xs], params["axis"])
    if name == "tile":
        return lambda x: _tiled(x, params["reps"])
    if name == "split":
        axis, ends = params["axis"], list(itertools.accumulate(map(int, params["sizes"])))
        return lambda x: [lax.slice_in_dim(x, end - int(n), end, axis=axis) for n, end in zip(params["sizes"], ends)]
    if name in ("random_wrap", "random_unwrap", "random_clone"):
        return lambda x: x
    keys = [v for v in (*e.invars, *e.outvars) if is_key(v)]
    if not keys:
        return None
    impl = keys[0].aval.dtype._impl
    if name == "random_bits":
        return _each(lambda k: impl.random_bits(k, params["bit_width"], params["shape"]), e.invars[0].aval.ndim)
    if name == "random_split":
        return _each(lambda k: impl.split(k, params["shape"]), e.invars[0].aval.ndim)
    if name == "random_seed":
        return _each(impl.seed, e.invars[0].aval.ndim)
    if name == "random_fold_in":
        shape = e.outvars[0].aval.shape
        spread = lambda k, n: (jnp.broadcast_to(k, (*shape, *impl.key_shape)), jnp.broadcast_to(n, shape))
        return lambda k, n: _each(impl.fold_in, len(shape), 2)(*spread(k, n))
    if name in _OF_WORDS:
        # Its parameters name dimensions of the array of keys, which the array of each word of them has.
        (count,) = impl.key_shape

        def of_words(*xs):
            word = lambda k: [x[..., k] if is_key(v) else x for x, v in zip(xs, e.invars)]
            return jnp.stack([e.primitive.bind(*word(k), **params) for k in range(count)], -1)

        return of_words
    return None


def fixed_count(params, known) -> int | None:
    """How often the body of a while loop runs, if it counts from a known number to a known number.

    params: the parameters of `lax.while_p`. known: a function of the positions of operands that returns their values, or None where they are
    not known.
    """
    cond, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name not in ("lt", "gt", "le", "ge", "ne"):
        return None
    (test,) = cond.eqns
    if test.outvars[0] is not cond.outvars[0] or test.invars[0].aval.shape:
        return None

    def value(v, jaxpr, own, first):
        """The value of an operand in a jaxpr whose first `own` operands are operands of the loop from `first`, or None."""
        if isinstance(v, Literal):
            return v.val
        at = next((k for k, w in enumerate(jaxpr.invars) if w is v), None)
        if at is None:
            return None
        if at < own:
            return known(first + at)
        carried = at - own
        if body.outvars[carried] is body.invars[num_body + carried]:  # it stays what it is
            return known(num_cond + num_body + carried)
        return None

    sides = [value(v, cond, num_cond, 0) for v in test.invars]
    counters = [
        next((k - num_cond for k, w in enumerate(cond.invars) if w is v and k >= num_cond), None) for v in test.invars
    ]
    for side in (0, 1):
        counter, bound = counters[side], sides[1 - side]
        if counter is None or bound is None or sides[side] is not None:
            continue
        name = test.primitive.name
        if side == 1:
            name = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "ne": "ne"}[name]
        first = known(num_cond + num_body + counter)
        by = increment(body, num_body + counter, counter)
        if first is None or not by or not jnp.issubdtype(test.invars[side].aval.dtype, jnp.integer):
            return None
        first, bound = int(first), int(bound)
        if not getattr(operator, name)(first, bound):
            return 0
        up, info = by > 0, jnp.iinfo(test.invars[side].aval.dtype)
        if name == "ne":
            if (bound - first) % by or (bound - first) // by < 0:
                return None
            return (bound - first) // by
        if up != (name in ("lt", "le")):
            return None
        last = bound + {"lt": 0, "gt": 0, "le": 1, "ge": -1}[name]
        count = -((first - last) // by) if up else -((last - first) // -by)
        return count if info.min <= first + count * by <= info.max else None
    return None


def increment(body, at, out) -> int | None:
    """What a body adds to one of its integers in every step."""
    made = next((e for e in body.eqns if any(v is body.outvars[out] for v in e.outvars)), None)
    if made is None or made.primitive.name not in ("add", "sub"):
        return None
    a, b = made.invars
    if made.primitive.name == "add" and b is body.invars[at]:
        a, b = b, a
    if a is not body.invars[at] or not isinstance(b, Literal):
        return None
    return int(b.val) * (1 if made.primitive.name == "add" else -1)
