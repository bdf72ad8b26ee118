"""Functions that compute the same and have other derivatives are never taken for each other.

Caches are not cleared between programs: each random program is followed by one that differs from it in derivatives alone.
`pytest tests/test_random_functions.py --programs 2000 --seed 7` tries more of them, and others.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkern
from jaxkern._core import compat, functor
from jaxkern._core.jaxprs import computing

# ---- identities with derivatives of their own


def jvp_identity(factor):
    @jax.custom_jvp
    def identity(x):
        return x

    identity.defjvp(lambda primals, tangents: (primals[0], factor * tangents[0]))
    return identity


def vjp_identity(factor):
    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (factor * g,))
    return identity


def nested_identity(factor, depth):
    """An identity whose rule contains another, and so on: the derivatives of order `depth` alone know the factor."""
    if depth == 1:
        return jvp_identity(factor)
    inner = nested_identity(factor, depth - 1)

    @jax.custom_jvp
    def identity(x):
        return x

    identity.defjvp(lambda primals, tangents: (primals[0], inner(primals[0]) * tangents[0]))
    return identity


def vjp_by_name(name, x):
    """An identity; the rule gets the name as a static argument."""
    return _vjp_by_name(name, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _vjp_by_name(name, x):
    return x


_vjp_by_name.defvjp(lambda name, x: (x, None), lambda name, _, g: (g * {"half": 0.5, "twice": 2.0}[name],))


def factor_in_class(factor):
    class Factor:
        value = factor

    return Factor


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def jvp_by_class(of, x):
    return x


jvp_by_class.defjvp(lambda of, primals, tangents: (primals[0], tangents[0] * of.value))
stop = lax.stop_gradient

# Pairs of functions of x and s that compute the same.
PAIRS = {
    "stop_gradient": (lambda x, s: x * s + stop(x), lambda x, s: stop(x) * s + x),
    "stop_gradient or not": (lambda x, s: x * s, lambda x, s: x * stop(s)),
    "stop_gradient in cond": (
        lambda x, s: lax.cond(x > 0, lambda: x * s, lambda: stop(x) + s),
        lambda x, s: lax.cond(x > 0, lambda: x * s, lambda: x + s),
    ),
    "custom_jvp": (lambda x, s: jvp_identity(2.0)(x) * s, lambda x, s: jvp_identity(3.0)(x) * s),
    "custom_jvp of what": (
        lambda x, s: jvp_identity(2.0)(x) + s * x,
        lambda x, s: x + s * jvp_identity(2.0)(x),
    ),
    "custom_vjp": (lambda x, s: vjp_identity(2.0)(x) * s, lambda x, s: vjp_identity(3.0)(x) * s),
    "custom_vjp with names": (lambda x, s: vjp_by_name("half", x) * s, lambda x, s: vjp_by_name("twice", x) * s),
    "custom_jvp with two classes": (
        lambda x, s: jvp_by_class(factor_in_class(2.0), x) + jvp_by_class(factor_in_class(3.0), s),
        lambda x, s: jvp_by_class(factor_in_class(2.0), x) + jvp_by_class(factor_in_class(2.0), s),
    ),
    "custom_vjp or not": (lambda x, s: vjp_identity(2.0)(x) * s, lambda x, s: x * s),
    "custom_vjp in jit": (
        lambda x, s: jax.jit(lambda y: vjp_identity(2.0)(y) * s)(x),
        lambda x, s: jax.jit(lambda y: y * vjp_identity(2.0)(s))(x),
    ),
    "relu": (lambda x, s: jax.nn.relu(x) * s, lambda x, s: jnp.maximum(x, 0) * s),
}


def elementwise(f, x, s):
    return jaxkern.elementwise_kernel(lambda x, s: f(x, s))(x, s)


def sums_of_messages(f, x, s):
    graph = jaxkern.Graph(np.arange(len(x)), np.arange(len(x)), num_nodes=len(x))
    return jaxkern.edge_sum(lambda x, s: f(x, s), graph, senders=x, edges=jnp.broadcast_to(s, x.shape))


def messages(f, x, s):
    graph = jaxkern.Graph(np.arange(len(x)), np.arange(len(x)), num_nodes=len(x))
    return jaxkern.edge_map(lambda x, s: f(x, s), graph, receivers=x, edges=jnp.broadcast_to(s, x.shape))


def softmax(f, x, s):
    return jaxkern.softmax(x, score=lambda x, _, s: f(x, s), score_args=[s])


# The function of this library, and what it means.
CALLS = {
    "elementwise_kernel": (elementwise, lambda f, x, s: jax.vmap(f)(x, s)),
    "edge_sum": (sums_of_messages, lambda f, x, s: jax.vmap(f)(x, s)),
    "edge_map": (messages, lambda f, x, s: jax.vmap(f)(x, s)),
    "softmax": (softmax, lambda f, x, s: jax.nn.softmax(jax.vmap(f)(x, s))),
}


@pytest.mark.parametrize("jitted", (False, True))
@pytest.mark.parametrize("call", CALLS)
def test_functions_with_other_derivatives(call, jitted):
    ours, plain = CALLS[call]
    x, s, g = jnp.array([0.5, -1.5, 2.0, 1.0]), jnp.array([3.0, 0.25, -2.0, 1.5]), jnp.array([1.0, -2.0, 3.0, 0.5])
    wrap = jax.jit if jitted else lambda f: f
    gradients = lambda call, f: jax.grad(lambda x, s: (call(f, x, s) * g).sum(), (0, 1))
    for name in PAIRS if call == "elementwise_kernel" else ("stop_gradient", "custom_jvp", "custom_vjp"):
        for f in PAIRS[name]:
            found = wrap(gradients(ours, f))(x, s)
            with jax.disable_jit():
                wanted = gradients(plain, f)(x, s)
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=name)


def trace(f, *dtypes, **options):
    return functor.trace(f, list(map(jnp.dtype, dtypes)), name="test", **options)[0]


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("name", PAIRS)
def test_equality(name, dtype):
    a, b = PAIRS[name]
    assert trace(a, dtype, dtype) == trace(lambda x, s: a(x, s), dtype, dtype)
    assert trace(a, dtype, dtype) != trace(b, dtype, dtype)


@pytest.mark.parametrize("depth", (1, 2, 5))
def test_rules_in_rules(depth):
    make = lambda factor: trace(nested_identity(factor, depth), "float32")
    assert make(2.0) == make(2.0) and make(2.0) != make(3.0)
    f = make(2.0)
    for _ in range(depth):
        f = f.jvp((0,))
    g = nested_identity(2.0, depth)
    wanted = lambda order: g if order == 0 else lambda *xs: _pushed(wanted(order - 1), xs)
    operands = np.linspace(0.5, 1.5, len(f.in_dtypes), dtype=np.float32)
    np.testing.assert_allclose(f(*operands)[0], wanted(depth)(*operands), 1e-5)


def _pushed(f, xs):
    """The derivative of f by its first argument, times the last of `xs`."""
    *xs, t = xs
    return jax.jvp(lambda x: f(x, *xs[1:]), xs[:1], [t])[1]


class Scale:
    """A rule that is an object with a state."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, primals, tangents):
        return primals[0], self.factor * tangents[0]

    def method(self, primals, tangents):
        return self(primals, tangents)


def in_exec(factor):
    space = {}
    exec("def make(factor):\n    return lambda primals, tangents: (primals[0], factor * tangents[0])", space)
    return space["make"](factor)


RULES = {
    "object": Scale,
    "method": lambda factor: Scale(factor).method,
    "partial": lambda factor: functools.partial(lambda k, p, t: (p[0], k * t[0]), factor),
    "jit": lambda factor: jax.jit(lambda p, t: (p[0], factor * t[0])),
    "without a module": in_exec,
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_any_kind(name):
    def make(factor):
        f = jax.custom_jvp(lambda x: x)
        f.defjvp(RULES[name](factor))
        return trace(lambda x: f(x) * 2, "float32")

    assert make(2.0) == make(2.0) and make(2.0) != make(3.0)


def test_rules_without_end():
    """JAX's rules and the user's may call new rules for ever. Such functions are equal to themselves alone."""

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def power(k, x):
        return x * k

    power.defjvp(lambda k, primals, tangents: (power(k, primals[0]), power(k + 1, primals[0]) * tangents[0]))
    f = trace(lambda x: power(1, x), "float32")
    assert f == f and f != trace(lambda x: power(1, x), "float32")
    assert f.vjp((0,))(2.0, 1.0) == [4.0]


def test_other_arithmetic():
    f = lambda coarse: trace(lambda x: jnp.exp(x), "bfloat16", coarse=coarse)
    assert f(True) == f(True) and f(True) != f(False)


def names() -> list:
    return [repr(trace(f, "bfloat16", "float32")) for pair in PAIRS.values() for f in pair]


@pytest.mark.process
def test_names_are_the_same_in_every_process():
    """They are a part of the keys of compilation caches."""
    code = "import test_random_functions as t; print(*t.names())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.split() == " ".join(names()).split()


# ---- random programs

BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "maximum": jnp.maximum,
    "where": lambda a, b: jnp.where(a > b, a, b * 2),
    "below": lambda a, b: jnp.where(a <= 0, b, a),
    "cond": lambda a, b: lax.cond(a >= b, lambda: a - b, lambda: a * b),
    "switch": lambda a, b: lax.switch((a > b).astype(jnp.int32), [lambda: a, lambda: b - a]),
    "jit": lambda a, b: jax.jit(lambda a, b: a * b + a)(a, b),
    "remat": lambda a, b: jax.checkpoint(lambda a: a * b)(a),
}
EXACT = {"neg": lambda a: -a, "relu": jax.nn.relu, "square": jnp.square, "half": lambda a: a * 0.5}
SMOOTH = {"sin": jnp.sin, "tanh": jnp.tanh, "softplus": jax.nn.softplus, "atan": jnp.arctan, "silu": jax.nn.silu}
# By a factor, a power of two that 16-bit types hold.
MARKED = {
    "plain": lambda factor: lambda x: x,
    "stop_gradient": lambda factor: stop,
    "custom_jvp": jvp_identity,
    "custom_vjp": vjp_identity,
    "nested": lambda factor: nested_identity(factor, 2),
}


class Program:
    """A random function of `arity` scalars: each step (name, operands, mark, factor) makes a value."""

    def __init__(self, rng, exact):
        self.arity = int(rng.integers(1, 4))
        unary = [*EXACT, *([] if exact else SMOOTH)]
        self.steps = []
        for k in range(int(rng.integers(2, 4 if exact else 7))):
            name = str(rng.choice([*BINARY, *unary]))
            operands = [int(n) for n in rng.integers(0, self.arity + k, 2)]
            self.steps.append((name, operands, self._mark(rng), 2.0 ** int(rng.integers(-1, 2))))

    def _mark(self, rng):
        return str(rng.choice(list(MARKED), p=[0.5, 0.15, 0.15, 0.15, 0.05]))

    def changed(self, rng):
        """The same computation with other derivatives."""
        other = object.__new__(Program)
        other.arity, other.steps = self.arity, list(self.steps)
        at = int(rng.integers(len(self.steps)))
        name, operands, _, factor = self.steps[at]
        other.steps[at] = (name, operands, self._mark(rng), factor)
        return other

    def function(self):
        def f(*xs):
            values = list(xs)
            for name, (a, b), mark, factor in self.steps:
                a, b = MARKED[mark](factor)(values[a]), values[b]
                values.append(BINARY[name](a, b) if name in BINARY else {**EXACT, **SMOOTH}[name](a))
            return values[-1] + values[-2], values[-1]

        return f


def check(program, dtype, shapes, operands, cotangents):
    """Results and derivatives, which an equal function may have made before, against jnp. Nothing is compiled.

    16-bit results are compared with float32 results rounded once; the programs are exact in float32.
    """
    f, wrt = program.function(), range(program.arity)
    function = trace(f, *[dtype] * program.arity)
    assert function == trace(program.function(), *[dtype] * program.arity), program.steps
    shape = np.broadcast_shapes(*shapes)
    wide = computing(jnp.dtype(dtype))
    flat, given = ([jnp.broadcast_to(x, shape).ravel().astype(wide) for x in xs] for xs in (operands, cotangents))
    has_jvp = "custom_vjp" not in {mark for _, _, mark, _ in program.steps}
    pullback, pushforward = function.vjp(wrt), function.jvp(wrt) if has_jvp else None
    with jax.disable_jit():
        wanted, pull = jax.vjp(jax.vmap(f), *flat)
        wanted = [*wanted, *pull(tuple(given))]
        found = [*function(*operands), *pullback(*operands, *cotangents)]
        if has_jvp:
            wanted += jax.jvp(jax.vmap(f), flat, flat)[1]
            found += pushforward(*operands, *operands)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        b = b.reshape(shape).astype(dtype)
        a, b = (np.asarray(jnp.broadcast_to(y, shape), np.float64) for y in (a, b))
        np.testing.assert_allclose(a, b, 1e-5, 1e-5, err_msg=f"{dtype} {program.steps}")


SHAPES = [[(2, 3)] * 3, [(2, 3), (3,), ()], [(2, 1), (2, 3), (1, 3)]]


@pytest.mark.parametrize("dtype", ("float32", "float64", "bfloat16", "float16"))
def test_random_programs(dtype, request):
    """Programs in 16 bits are of operations that are exact on the numbers given, so that nothing is rounded."""
    count, seed = request.config.getoption("programs"), request.config.getoption("seed")
    rng = np.random.default_rng([seed, jnp.dtype(dtype).itemsize, dtype == "bfloat16"])
    exact = jnp.dtype(dtype).itemsize == 2
    with compat.enable_x64(dtype == "float64"), jax.default_device(jax.devices("cpu")[0]):
        for _ in range(count):
            program = Program(rng, exact)
            shapes = SHAPES[rng.integers(len(SHAPES))][: program.arity]
            shape = np.broadcast_shapes(*shapes)
            number = lambda s: jnp.asarray(rng.integers(-2, 3, s) if exact else rng.normal(size=s), dtype)
            operands, cotangents = list(map(number, shapes)), [number(shape) for _ in range(2)]
            for p in (program, program.changed(rng), program):
                check(p, dtype, shapes, operands, cotangents)
