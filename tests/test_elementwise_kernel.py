"""elementwise_kernel: values, derivatives, transformations, plans, bad input.

What is expected is the function itself in JAX, on whole arrays.
"""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
import test_functor
from jax import lax
from jax.experimental import jet

import jaxkern
from jaxkern._core import compat, functor, launch, registry, runtime
from jaxkern._ops.function import plan

MODULE = registry.kernels.module
FLOATS = ("float16", "bfloat16", "float32", "float64")
EPS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2e-6, "float64": 2e-14}


def five(x, y, b):
    return jnp.tanh(x * y + b) * jax.nn.sigmoid(x)


def two(x, y, b):
    return {"sum": jnp.where(x > y, x * b, jax.nn.gelu(y)), "difference": jax.nn.relu(x - y) * b}


FUNCTIONS = {"five": five, "two": two}
# Of x, y and b: flat, scalars, leading, trailing, both, and more dimensions than the fused sums take.
SHAPES = {
    "flat": [(1030,), (1030,), (1030,)],
    "scalar": [(6, 172), (6, 172), ()],
    "scalars": [(), (), ()],
    "leading": [(37, 64), (37, 64), (64,)],
    "leading_ragged": [(37, 61), (37, 61), (1, 61)],
    "trailing": [(37, 64), (37, 64), (37, 1)],
    "outer": [(37, 1), (1, 129), ()],
    "two_bias": [(5, 7, 16), (16,), (16,)],
    "middle": [(4, 6, 16), (4, 1, 16), (1, 6, 1)],
    "matrices": [(4, 6, 16), (4, 1, 16), (1, 6, 16)],
    "channels": [(3, 5, 9, 7), (5, 1, 1), (3, 1, 1, 1)],
    "empty": [(0, 4), (0, 4), (4,)],
    "one": [(1, 1), (1, 1), (1, 1)],
    "narrow": [(300, 3), (300, 3), (3,)],
}


def random(shapes, dtype, seed=None):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def in_float64(f, arrays):
    """f on the CPU in float64."""
    with compat.enable_x64(), jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, jax.jit(f)(*(np.asarray(a, np.float64) for a in arrays)))


def assert_close(found, wanted, dtype, terms=1):
    """Allows one rounding of the dtype, and for sums the error of float32."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape and a.dtype == jnp.dtype(dtype)
        atol = max(EPS[dtype], 2e-6 if dtype != "float64" else 0) * math.sqrt(terms) * 4
        np.testing.assert_allclose(np.asarray(a, np.float64), b, 4 * EPS[dtype], atol)


def both(f):
    """The results and the gradients by all operands."""

    def run(*arrays):
        out, pull = jax.vjp(f, *arrays)
        # Made by NumPy: the GPU's cosine in float32 is not the CPU's.
        return out, pull(jax.tree.map(lambda y: jnp.asarray(np.cos(np.arange(y.size)).reshape(y.shape), y.dtype), out))

    return run


# ---- values and derivatives


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name, dtype", [("five", d) for d in FLOATS] + [("two", "float32"), ("two", "bfloat16")])
@pytest.mark.sweep(5)
def test_values_and_gradients(name, dtype, shapes, x64):
    arrays = random(SHAPES[shapes], dtype)
    f = FUNCTIONS[name]
    found = jax.jit(both(jaxkern.elementwise_kernel(f)))(*arrays)
    terms = math.prod(np.broadcast_shapes(*SHAPES[shapes]))
    wanted = in_float64(both(f), arrays)
    assert_close(found[0], wanted[0], dtype)
    assert_close(found[1], wanted[1], dtype, terms)


@pytest.mark.parametrize("shapes", ("scalar", "leading", "trailing", "middle"))
def test_derivatives_of_derivatives(shapes):
    arrays = random(SHAPES[shapes], "float32")
    kernel = jaxkern.elementwise_kernel(five)

    def square(f):
        return lambda *a: (f(*a) ** 2).mean()

    def second(f):
        return lambda *a: sum((d * d).sum() for d in jax.grad(square(f), (0, 1, 2))(*a))

    for transform in (
        lambda f, a: jax.jvp(f, a, a)[1],
        lambda f, a: jax.jvp(jax.grad(square(f), (0, 2)), a, a)[1],
        lambda f, a: jax.grad(lambda *a: jax.jvp(square(f), a, a)[1], (0, 1, 2))(*a),
        lambda f, a: jax.grad(second(f), (0, 2))(*a),
    ):
        found, wanted = jax.jit(lambda arrays: [transform(f, arrays) for f in (kernel, five)])(arrays)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-4), found, wanted)


def test_derivatives_of_rules():
    """A custom_jvp has the derivative of its rule, and a custom_vjp has derivatives in both modes."""

    @jax.custom_vjp
    def f(x):
        return x * x

    f.defvjp(lambda x: (x * x, x), lambda x, g: (5 * g * x,))
    (x,) = random([(33,)], "float32")
    kernel = jaxkern.elementwise_kernel(lambda x: f(x) + jax.nn.relu(x - x))
    np.testing.assert_allclose(jax.grad(lambda x: kernel(x).sum())(x), 5 * x, 1e-6)
    np.testing.assert_allclose(jax.jvp(kernel, (x,), (x,))[1], 5 * x * x, 1e-6)


@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, None), (1, None, 0), (None, None, 0)])
def test_vmap(axes):
    shapes = [(4, 8), (4, 8), (8,)]
    shapes = [s if a is None else (*s[:a], 3, *s[a:]) for s, a in zip(shapes, axes)]
    arrays = random(shapes, "float32")
    ours, wanted = (jax.vmap(both(f), axes)(*arrays) for f in (jaxkern.elementwise_kernel(five), five))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, wanted)
    grad = lambda f: jax.grad(lambda *a: jax.vmap(f, axes)(*a).sum(), (0, 1, 2))(*arrays)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        grad(jaxkern.elementwise_kernel(five)),
        grad(five),
    )


def test_scan_and_remat():
    (x,) = random([(4, 16)], "float32")
    kernel = jaxkern.elementwise_kernel(lambda c, x: jnp.sin(c) + x)
    f = lambda g: jax.grad(lambda x: lax.scan(lambda c, x: (g(c, x), c), x[0], x)[0].sum())(x)
    np.testing.assert_allclose(f(jax.checkpoint(kernel)), f(lambda c, x: jnp.sin(c) + x), 1e-5, 1e-6)


# ---- closures, dtypes


def test_captured_scalars_have_gradients():
    (x,) = random([(5, 33)], "float32")

    def ours(s, t):
        return jaxkern.elementwise_kernel(lambda x: x * s + jnp.sin(t) * 2.5)(x).sum()

    wanted = lambda s, t: (x * s + jnp.sin(t) * 2.5).sum()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2.0**-23 * np.abs(x).sum())  # x.sum() cancels
    for f in (lambda g: jax.grad(g, (0, 1))(2.0, 3.0), lambda g: jax.jit(jax.grad(g, (0, 1)))(2.0, 3.0)):
        close(f(ours), f(wanted))
    over = lambda g: jax.vmap(jax.grad(g), (0, None))(jnp.arange(3.0), 1.0)
    close(over(ours), over(wanted))


def test_integers_bits_and_several_dtypes(x64):
    rng = np.random.default_rng()
    types = ("int8", "uint16", "int32", "uint64", "bool", "float16", "float32")
    arrays = [jnp.asarray(rng.integers(0, 2 if t == "bool" else 100, (7, 40)), t) for t in types]

    def f(a, b, c, d, e, x, y):
        return (a * a, b // (b + jnp.uint16(1)), jnp.where(e, c, -c) >> 1, d ^ 5, e & (a > 3), x + 1, y * c, ~e)

    found, wanted = jaxkern.elementwise_kernel(f)(*arrays), f(*arrays)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    d = jax.grad(lambda x: jaxkern.elementwise_kernel(f)(*arrays[:5], x, arrays[6])[5].astype(jnp.float32).sum())(
        arrays[5]
    )
    assert d.dtype == jnp.float16 and (d == 1).all()


def test_numbers_are_weakly_typed():
    (x,) = random([(8,)], "bfloat16")
    y = jaxkern.elementwise_kernel(lambda x, s: x * s + 1)(x, 2.0)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, (x.astype(jnp.float32) * 2 + 1).astype(jnp.bfloat16))


def test_decorator_with_a_name():
    @jaxkern.elementwise_kernel(name="gate")
    def f(x):
        """Doubles."""
        return (x, (x * 2,))

    assert f.__doc__ == "Doubles." and jax.tree.map(float, f(3.0)) == (3.0, (6.0,))
    with pytest.raises(
        TypeError, match=r"jaxkern.elementwise_kernel: gate uses igamma at .*test_elementwise_kernel.py"
    ):
        jaxkern.elementwise_kernel(lambda x: jax.scipy.special.gammainc(x, 2.0), name="gate")(1.0)


def test_a_new_lambda_compiles_nothing():
    from jaxkern._core import primitive

    x = jnp.ones(7)
    run = lambda: jaxkern.elementwise_kernel(lambda x: jnp.sin(x) * 3.25)(x)
    run()
    before = primitive._compiled._cache_size()
    run()
    assert primitive._compiled._cache_size() == before


def test_taylor_series():
    f = lambda x, y: jnp.sin(x) * y
    operands = random([(3, 4), (4,)], "float32", 0)
    series = [[x, x * x] for x in operands]
    found, wanted = (jet.jet(g, operands, series) for g in (jaxkern.elementwise_kernel(f), f))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_numbers_under_remat():
    """A program that is evaluated again gives numbers to primitives in the place of arrays."""
    kernel = jaxkern.elementwise_kernel(lambda x, y: x * x * y)
    assert jax.grad(jax.checkpoint(lambda x: kernel(x, 3.0)))(2.0) == 12
    assert jax.grad(jax.checkpoint(lambda y: kernel(3.0, y)))(2.0) == 9


@pytest.mark.parametrize("dtype", FLOATS)
def test_kernels_in_kernels(dtype, x64):
    """A function made by elementwise_kernel may be a part of another, and is rounded where the other's values are."""
    x, y = random([(5, 4), (4,)], dtype, 0)
    inner = lambda x, y: jnp.tanh(x) * y
    whole = lambda inner, x, y: inner(x, inner(y, 2.0)) + x
    ours = jaxkern.elementwise_kernel(functools.partial(whole, jaxkern.elementwise_kernel(inner)))
    wide = functools.partial(whole, inner)
    loss = lambda f: lambda x, y: jnp.sum(jnp.sin(f(x, y).astype(jnp.float64)))
    wanted = wide(x.astype(jnp.float64), y.astype(jnp.float64))
    np.testing.assert_allclose(ours(x, y).astype(jnp.float64), wanted, rtol=EPS[dtype], atol=EPS[dtype])
    found = jax.grad(loss(ours), (0, 1))(x, y)
    for a, b in zip(found, jax.grad(loss(wide), (0, 1))(x.astype(jnp.float64), y.astype(jnp.float64))):
        np.testing.assert_allclose(a.astype(jnp.float64), b, rtol=8 * EPS[dtype], atol=8 * EPS[dtype])


def test_bad_input():
    kernel = jaxkern.elementwise_kernel(five)
    with pytest.raises(ValueError, match=r"elementwise_kernel: five: operands of shapes \(3,\), \(4,\), \(\) do not"):
        kernel(jnp.ones(3), jnp.ones(4), 1.0)
    with pytest.raises(TypeError, match="operand 1 must be an array or a number, got str"):
        kernel(jnp.ones(3), "x", 1.0)
    with pytest.raises(TypeError, match="do not compute in complex64"):
        kernel(jnp.ones(3), jnp.ones(3, jnp.complex64), 1.0)
    with pytest.raises(TypeError, match="f must be a function of scalars, got int"):
        jaxkern.elementwise_kernel(3)
    with pytest.raises(TypeError, match="at least one operand"):
        kernel()


# ---- on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", test_functor.ALL)
def test_every_primitive_on_the_gpu(dtype, x64):
    """The cases of test_functor.py, eight to a kernel."""
    cases = [k for k, (_, d) in enumerate(test_functor.FUNCTIONS) if d == dtype]
    like = lambda k: (test_functor.FUNCTIONS[k][0].arity, test_functor.FUNCTIONS[k][0].domain or 0)
    for _, same in itertools.groupby(sorted(cases, key=like), like):
        same = list(same)
        for ks in (same[k : k + 8] for k in range(0, len(same), 8)):
            xs = test_functor.operands(test_functor.FUNCTIONS[ks[0]][0], dtype)
            ys = jaxkern.elementwise_kernel(lambda *x, ks=ks: [test_functor.FUNCTIONS[k][0].f(*x) for k in ks])(*xs)
            for k, y in zip(ks, ys, strict=True):
                test_functor.check(test_functor.FUNCTIONS[k][0], xs, np.asarray(y), test_functor.expected()[k])


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", ("flat", "leading", "trailing", "outer"))
def test_any_address_on_the_gpu(shapes):
    """Operands that do not begin on 16 bytes, and the same bits twice."""
    wide = [(s[0], *s[1:-1], s[-1] + 1) if s and s[-1] > 1 else s for s in SHAPES[shapes]]
    arrays = random(wide, "float32")
    f = both(jaxkern.elementwise_kernel(five))

    def shifted(*arrays):
        flat = [
            a.ravel()[1 : 1 + math.prod(s)].reshape(s) if a.size > math.prod(s) else a
            for a, s in zip(arrays, SHAPES[shapes])
        ]
        return f(*flat)

    first, again = jax.jit(shifted)(*arrays), jax.jit(shifted)(*arrays)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    wanted = in_float64(
        both(five),
        [
            np.asarray(a).ravel()[1 : 1 + math.prod(s)].reshape(s) if a.size > math.prod(s) else a
            for a, s in zip(arrays, SHAPES[shapes])
        ],
    )
    assert_close(first[0], wanted[0], "float32")
    assert_close(first[1], wanted[1], "float32", math.prod(np.broadcast_shapes(*SHAPES[shapes])))


# ---- plans


def planned(f, shapes, dtype="float32", device=plans.DEVICES[0], gradient=True):
    """The plan of the gradients of f by all operands; or of f."""
    arrays = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    full = np.broadcast_shapes(*shapes)
    rank = len(full)
    shapes = [(1,) * (rank - len(s)) + s for s in shapes]
    with compat.enable_x64():
        function, _ = functor.trace(f, [jnp.dtype(dtype)] * len(arrays), name="test")
    sums = ((),) * len(function.out_dtypes)
    outs = [full] * len(sums)
    if gradient:
        shapes += [full] * len(sums)
        with compat.enable_x64():
            function = function.vjp(range(len(arrays)))
        sums = tuple(tuple(d for d in range(rank) if s[d] != full[d]) for s in shapes[: len(arrays)])
        outs = shapes[: len(arrays)]
    avals = lambda shapes: [jax.core.ShapedArray(s, jnp.dtype(dtype)) for s in shapes]
    return plan.plan(device, avals(shapes), avals(outs), function=function, sums=sums), avals(shapes), avals(outs)


@pytest.mark.parametrize(
    "shapes, algorithm",
    [
        ([(1 << 20,)] * 3, "flat"),
        ([(8, 64), (8, 64), ()], "summed"),
        ([(8, 64), (8, 64), (64,)], "summed"),
        ([(8, 64), (8, 64), (8, 1)], "summed"),
        ([(8, 1), (1, 64), ()], "summed"),
        ([(4, 6, 16), (4, 1, 16), (1, 6, 1)], "summed"),
        ([(4, 6, 16), (4, 1, 16), (1, 6, 16)], None),
        ([(4, 3, 6, 16), (4, 1, 6, 1), ()], None),
    ],
)
def test_algorithms(shapes, algorithm):
    p, _, _ = planned(five, shapes)
    assert (p and p.algorithm) == algorithm
    p, _, _ = planned(five, shapes, gradient=False)
    assert p is None if len(shapes[0]) > 3 else p.algorithm in ("flat", "strided")


class Memory:
    """Arrays in NumPy that launches of SummedKernel and SumPartials read and write; each number is written once."""

    def __init__(self, operands, results, scratch):
        self.arrays = {("operand", k): a.ravel() for k, a in enumerate(operands)}
        self.arrays |= {("result", k): np.full(math.prod(s), np.nan) for k, s in enumerate(results)}
        self.scratch = np.full(scratch // 4, np.nan)

    def at(self, buffer):
        if buffer.kind == "scratch":
            assert buffer.offset % 16 == 0
            return self.scratch[buffer.offset // 4 :]
        assert buffer.offset == 0
        return self.arrays[buffer.kind, buffer.index]

    def put(self, array, index, value):
        index = np.asarray(index).ravel()
        assert np.isnan(array[index]).all() and len(set(index)) == index.size, "written twice"
        array[index] = np.asarray(value).ravel()


def run_summed(step, memory, function):
    """SummedKernel in NumPy, block by block. It follows function.cuh; packs differ only in their size."""
    outs, ins, packs, lanes, kinds, splat, shared = re.search(
        r"Types<(.*?)>, Types<(.*?)>, (true|false), (\d+), (\d+), (\d+), (\d+)>>$", step.name
    ).groups()
    kin, kout = len(ins.split(", ")), len(outs.split(", "))
    members = step.args[0].members
    x, y = ([memory.at(b) for b in group] for group in (members[:kin], members[kin : kin + kout]))
    strides = np.array([m.value for m in members[kin + kout : 3 * kin + kout]]).reshape(2, kin)
    rows, columns, last, chunk, _ = (m.value for m in members[3 * kin + kout :])
    n, lanes, kinds, splat, shared = 4 if packs == "true" else 1, *map(int, (lanes, kinds, splat, shared))
    assert columns % n == 0 and last % n == 0 and chunk % (256 // lanes) == 0
    tiles, chunks, matrices = step.grid3()
    parts = {plan.COLUMNS: chunks, plan.ROWS: tiles, plan.SCALAR: chunks * tiles}
    numbers = {plan.COLUMNS: columns, plan.ROWS: rows, plan.SCALAR: 1}
    for tile, part, matrix in itertools.product(range(tiles), range(chunks), range(matrices)):
        row = np.arange(part * chunk, min(part * chunk + chunk, rows))[:, None]
        column = np.arange(tile * lanes * n, min(tile * lanes * n + lanes * n, columns))
        here = column[None] < np.where(row + 1 == rows, last, columns)
        values = []
        for k in range(kin):
            at = (0 if shared >> k & 1 else row * strides[0, k]) + (0 if splat >> k & 1 else column[None])
            at = np.where(here, at + matrix * strides[1, k], 0)
            assert at.max() < x[k].size
            values.append(x[k][at])
        for k, v in enumerate(function(*values)):
            v = np.where(here, np.asarray(v, np.float64), 0)
            code = kinds >> 4 * k
            kind, partial, per_matrix = code & 3, code >> 2 & 1, code >> 3 & 1
            if kind == plan.WHOLE:
                memory.put(y[k], ((matrix * rows + row) * columns + column)[here], v[here])
                continue
            own = {plan.COLUMNS: part, plan.ROWS: tile, plan.SCALAR: part * tiles + tile}[kind]
            count = numbers[kind] * (matrices if per_matrix else 1)
            first = matrix * numbers[kind] if per_matrix else 0
            own += 0 if per_matrix else matrix * parts[kind]
            total = {plan.COLUMNS: v.sum(0), plan.ROWS: v.sum(1), plan.SCALAR: v.sum()}[kind]
            index = {plan.COLUMNS: column, plan.ROWS: row.ravel(), plan.SCALAR: 0}[kind]
            assert partial or own == 0
            memory.put(y[k], partial * own * count + first + index, total)


def run_partials(step, memory):
    side = int(re.search(r", (\d+)>$", step.name)[1])
    partial, out = map(memory.at, step.args[:2])
    parts, count = (a.value for a in step.args[2:])
    assert step.grid3()[0] * side >= count
    memory.put(out, np.arange(count), partial[: parts * count].reshape(parts, count).sum(0))


@pytest.mark.parametrize(
    "shapes",
    [
        [(8, 64), (8, 64), ()],
        [(1000, 64), (1000, 64), (64,)],
        [(1000, 61), (1000, 61), (61,)],
        [(700, 200), (700, 1), (200,)],
        [(700, 3), (700, 1), ()],
        [(37, 1), (1, 129), ()],
        [(5, 7, 16), (16,), (5, 7, 1)],
        [(40001,), (40001,), ()],
        [(40004,), (1,), ()],
        [(3,), (1,), ()],
        [(70000, 1), (70000, 2), (2,)],
        [(4, 60, 16), (4, 1, 16), (1, 60, 1)],
        [(3, 700, 40), (3, 700, 1), (3, 1, 40)],
        [(3, 5, 700), (1, 5, 1), ()],
        [(3, 5, 7), (3, 1, 1), (1, 1, 7)],
    ],
)
def test_summed_launches_in_numpy(shapes):
    p, ins, outs = planned(five, shapes)
    assert p.algorithm == "summed"
    rng = np.random.default_rng()
    arrays = [rng.normal(size=a.shape) for a in ins]
    full = np.broadcast_shapes(*(a.shape for a in ins))

    def derivative(x, y, b, g):
        t, s = np.tanh(x * y + b), 1 / (1 + np.exp(-x))
        d = g * (1 - t * t) * s
        return d * y + g * t * s * (1 - s), d * x, d

    whole = derivative(*(np.broadcast_to(a, full) for a in arrays))
    for launches in (p.launches, p.unaligned or ()):
        if not launches:
            continue
        memory = Memory(arrays, [a.shape for a in outs], p.scratch)
        first, *rest = launches
        run_summed(first, memory, derivative)
        for step in rest:
            run_partials(step, memory)
        for k, (a, d) in enumerate(zip(outs, whole)):
            dims = tuple(i for i in range(len(full)) if a.shape[i] != full[i])
            np.testing.assert_allclose(memory.at(launch.result(k)), d.sum(dims).ravel(), 1e-9, 1e-9)


@pytest.mark.parametrize("device", plans.DEVICES, ids=lambda d: str(d.sm_count))
def test_launches_are_within_limits(device):
    for shapes in (
        [(1 << 28,), (1 << 28,), ()],
        [(1 << 22, 8), (1 << 22, 8), (8,)],
        [(4, 1 << 26), (4, 1), (1 << 26,)],
    ):
        for dtype in FLOATS:
            p, _, _ = planned(five, shapes, dtype, device)
            plans.check_limits(p, device)


def test_struct_is_laid_out_as_in_the_kernel():
    """The size that function.cuh asserts."""
    p, ins, outs = planned(five, [(8, 64), (8, 64), ()])
    size = lambda ins, outs: 8 * (3 * ins + outs + 5)
    assert plans.layout(p.launches[0].args[0])[0] == size(len(ins), len(outs))
    assert f"sizeof(SummedArgs<2, 1>) == {size(2, 1)}" in (runtime.kernels_folder() / plan.HEADER).read_text()


@plans.needs_nvrtc
@pytest.mark.parametrize("capability", (80, 90, 120))
def test_kernels_compile(capability):
    shapes, dtype = {
        80: ([(64, 128), (64, 1), (128,)], "bfloat16"),
        90: ([(1 << 20,), (1 << 20,), ()], "float32"),
        120: ([(64, 3), (64, 1), (3,)], "float64"),
    }[capability]
    p, _, _ = planned(five, shapes, dtype)
    forward, _, _ = planned(five, shapes, dtype, gradient=False)
    for step in {step.name: step for step in (*p.launches, *forward.launches)}.values():
        assert MODULE.compile(step.header, step.name, capability, step.source)


@pytest.mark.skipif(MODULE is None, reason="the runtime is not built")
def test_lowering():
    x, b = jnp.ones((64, 128), jnp.bfloat16), jnp.ones((128,), jnp.bfloat16)
    f = both(jaxkern.elementwise_kernel(five))
    text = jax.jit(f).trace(x, x, b).lower(lowering_platforms=("cuda",)).as_text()
    forward, backward = launch.programs(text)
    assert MODULE.check(forward) == "" and MODULE.check(backward) == ""
    assert re.search(r"^operation jaxkern_elementwise_kernel\(bfloat16\[64,128\], .*, strided$", forward, re.M)
    assert re.search(r"^operation jaxkern_elementwise_kernel\(.*, summed$", backward, re.M)
    assert text == jax.jit(f).trace(x, x, b).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_product_can_be_rounded_before_a_sum(dtype):
    """The compiler makes one fma of the product and the sum, unless the product is rounded to the type that it has."""
    with compat.enable_x64(dtype == "float64"):
        x, y = np.random.default_rng(0).normal(size=(2, 4096)).astype(dtype)
        info = jnp.finfo(dtype)
        error = jaxkern.elementwise_kernel(lambda x, y, z: lax.reduce_precision(x * y, info.nexp, info.nmant) - z)
        assert not np.any(error(x, y, x * y))
        assert np.any(jaxkern.elementwise_kernel(lambda x, y, z: x * y - z)(x, y, x * y))
