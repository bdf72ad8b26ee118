"""Complex numbers as pairs of real ones: kernels hold them in memory, and compute with real and imaginary parts.

g = expanded(f, dtypes)     f, whose only operations on complex scalars are real, imag and complex
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh

from jaxkern._core.jaxprs import CALLS, CUSTOM, IDENTITIES, called_jaxpr, evaluate_equation

_MOST_POWER = 8


def is_complex(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def real_of(dtype) -> np.dtype:
    """The dtype of the parts of a complex number."""
    return np.zeros((), dtype).real.dtype


def real_types(dtypes) -> list:
    """The dtypes of `split` numbers of these dtypes."""
    return [p for d in dtypes for p in ((real_of(d),) * 2 if is_complex(d) else (np.dtype(d),))]


def split(numbers) -> list:
    """Numbers, with the parts of complex ones in their place."""
    return [p for x in numbers for p in ((lax.real(x), lax.imag(x)) if is_complex(x.dtype) else (x,))]


def joined(parts, dtypes) -> list:
    """The numbers of these dtypes, from `split`."""
    parts = iter(parts)
    return [lax.complex(next(parts), next(parts)) if is_complex(d) else next(parts) for d in dtypes]


def _product(a, b):
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def _quotient(a, b):
    """Smith, "Algorithm 116: Complex Division", 1962: without squares, which could overflow.

    As XLA's, it is 0 if an infinite number divides a finite one, and infinite if 0 does.
    """
    far = [jnp.isinf(p) for p in b]
    is_far, divisor = far[0] | far[1], b[0]
    unit = lambda p, of: jnp.where(is_far, jnp.where(of, jnp.sign(p), jnp.zeros_like(p)), p)
    b = unit(b[0], far[0]), unit(b[1], far[1])
    swapped = abs(b[0]) < abs(b[1])
    large, small = jnp.where(swapped, b[1], b[0]), jnp.where(swapped, b[0], b[1])
    ratio = small / large
    scale = large + small * ratio
    x, y = jnp.where(swapped, a[1], a[0]), jnp.where(swapped, a[0], a[1])
    is_zero, imag = (b[0] == 0) & (b[1] == 0), (y - x * ratio) / scale
    real = jnp.where(is_zero, a[0] / divisor, (x + y * ratio) / scale)
    imag = jnp.where(is_zero, a[1] / divisor, jnp.where(swapped, -imag, imag))
    return jnp.where(is_far, 0 * real, real), jnp.where(is_far, 0 * imag, imag)


def _modulus(a):
    large, small = jnp.maximum(abs(a[0]), abs(a[1])), jnp.minimum(abs(a[0]), abs(a[1]))
    ratio = jnp.where(large == 0, small, small / large)
    is_far = jnp.isinf(a[0]) | jnp.isinf(a[1])  # also where the other part is NaN
    return jnp.where(is_far, np.array(np.inf, large.dtype), large * lax.sqrt(1 + ratio * ratio))


def _power(a, n):
    y = base = a
    for bit in bin(abs(n))[3:]:
        y = _product(y, y)
        y = _product(y, base) if bit == "1" else y
    return y if n > 0 else _quotient((jnp.ones_like(a[0]), jnp.zeros_like(a[0])), y)


def _exp(a):
    size = lax.exp(a[0])
    return size * lax.cos(a[1]), jnp.where(a[1] == 0, a[1], size * lax.sin(a[1]))  # size may be infinite


def _apart(f):
    return lambda a, b: (f(a[0], b[0]), f(a[1], b[1]))


# Results of equations on pairs, a pair or one number.
_RULES = {
    "real": lambda a: a[0],
    "imag": lambda a: a[1],
    "complex": lambda x, y: (x, y),
    "conj": lambda a: (a[0], -a[1]) if isinstance(a, tuple) else (a, jnp.zeros_like(a)),
    "neg": lambda a: (-a[0], -a[1]),
    "add": _apart(lax.add),
    "add_any": _apart(lax.add),
    "sub": _apart(lax.sub),
    "mul": _product,
    "div": _quotient,
    "square": lambda a: _product(a, a),
    "abs": _modulus,
    "exp": _exp,
    "log": lambda a: (lax.log(_modulus(a)), lax.atan2(a[1], a[0])),
    "eq": lambda a, b: (a[0] == b[0]) & (a[1] == b[1]),
    "ne": lambda a, b: (a[0] != b[0]) | (a[1] != b[1]),
}
_OTHERS = ("integer_pow", "select_n", "convert_element_type", "select", "stop_gradient", *IDENTITIES)


def known(equation) -> bool:
    """Whether an equation has no complex operands and results, or one that `expanded` replaces."""
    name, dtypes = equation.primitive.name, [v.aval.dtype for v in (*equation.invars, *equation.outvars)]
    if name == "integer_pow" and abs(equation.params["y"]) > _MOST_POWER:
        return not any(map(is_complex, dtypes))
    return name in (*_RULES, *_OTHERS, "reduce_sum") or not any(map(is_complex, dtypes))


def expanded(f, dtypes):
    """See the module. dtypes: the types of the arguments of f, which returns a list of scalars."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        closed = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct((), d) for d in dtypes))

    def g(*xs):
        pair = lambda x: (lax.real(x), lax.imag(x)) if is_complex(x.dtype) else x
        ys = _evaluate(closed.jaxpr, closed.consts, list(map(pair, xs)))
        return [lax.complex(*y) if isinstance(y, tuple) else y for y in ys]

    return g


def apart(closed):
    """A closed jaxpr of scalars as one of real scalars: the parts of complex numbers in their place."""
    given = [v.aval.dtype for v in closed.jaxpr.invars]

    def f(*xs):
        parts = iter(xs)
        args = [(next(parts), next(parts)) if is_complex(d) else next(parts) for d in given]
        ys = _evaluate(closed.jaxpr, closed.consts, args)
        return [p for y in ys for p in (y if isinstance(y, tuple) else (y,))]

    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct((), d) for d in real_types(given)))


def _evaluate(jaxpr, consts, args) -> list:
    number = lambda x: (np.real(x), np.imag(x)) if is_complex(np.result_type(x)) else x
    env = dict(zip(jaxpr.constvars, map(number, consts))) | dict(zip(jaxpr.invars, args))
    read = lambda v: number(np.asarray(v.val, v.aval.dtype)[()]) if isinstance(v, Literal) else env[v]
    for e in jaxpr.eqns:
        env.update(zip(e.outvars, _equation(e, list(map(read, e.invars)))))
    return list(map(read, jaxpr.outvars))


def _equation(e, xs) -> list:
    name, out = e.primitive.name, e.outvars[0].aval.dtype
    if name in (*CALLS, *CUSTOM) and any(is_complex(v.aval.dtype) for v in (*e.invars, *e.outvars)):
        return _evaluate(*called_jaxpr(e), xs)
    if not any(is_complex(v.aval.dtype) for v in (*e.invars, *e.outvars)):
        return evaluate_equation(e, xs)
    if name == "integer_pow":
        return [_power(xs[0], e.params["y"])]
    if name == "select_n":
        which, *cases = xs
        return [tuple(lax.select_n(which, *map(jnp.asarray, parts)) for parts in zip(*cases))]
    if name == "convert_element_type":
        to, x = real_of(out), xs[0]
        return [tuple(lax.convert_element_type(p, to) for p in (x if isinstance(x, tuple) else (x, 0)))]
    if name in _RULES:
        return [_RULES[name](*xs)]
    return xs[-1:]
