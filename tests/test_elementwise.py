"""Every row of the table of elementwise operations: values, derivatives, transformations, bad input.

What is expected is the row's own expression in JAX, evaluated in float64 on the CPU and rounded once.
"""

import functools
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern import elementwise
from jaxkern._core import compat, registry, runtime
from jaxkern._ops.elementwise import reference, table
from jaxkern._ops.elementwise.table import ROWS

ROOT = pathlib.Path(__file__).parent.parent
ON_GPU = jax.default_backend() == "gpu"
FLOATS = ("float16", "bfloat16", "float32", "float64")
DIFFERENTIABLE = [row for row in ROWS if row.types in ("float", "number", "select") and not row.name == "where"]
by_name = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
# In units in the last place of the result. In float64 exponents, up to 90 of them, are rounded on both sides.
ALLOWED = {"float16": 1, "bfloat16": 1, "float32": 4, "float64": 128}
# Those whose arithmetic in float32 is the longest: polynomials, a quotient and an exponential.
LONGEST = {"gelu_erf", "geglu_erf", "gelu_tanh", "geglu_tanh", "quick_gelu", "mish"}
# Sums and differences: an error of one operand, which the result may be small beside.
CANCELS = {"lerp", "add3", "fma", "celu", "soft_shrink"}
PARAMETERS = {"threshold": 0.25, "value": -1.5, "alpha": 1.5, "negative_slope": 0.01, "lambd": 0.5}


def in_float64(f, *operands):
    """f by XLA on the CPU in float64, as numpy arrays."""
    with compat.enable_x64(), jax.default_device(jax.devices("cpu")[0]):
        wide = lambda a: np.asarray(a) if np.asarray(a).dtype == bool else np.asarray(a).astype(np.float64)
        return jax.tree.map(np.asarray, f(*map(wide, operands)))


def of_each(f, counterpart, cases):
    """(f of the operands of each case, and without a GPU what the counterpart is, else None), as one program."""

    def both(cases):
        return tuple(g and {key: g(*operands) for key, operands in cases.items()} for g in functions)

    functions = (f, None if ON_GPU else counterpart)
    return jax.jit(both)(cases)


def spacing(values, dtype):
    info = jnp.finfo(dtype)
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.abs(values), float(info.smallest_normal))))
    return float(info.eps) * 2.0**exponent


def assert_close(found, exact, dtype, allowed, slack=0.0):
    """`found` is within `allowed` units in the last place of `exact`, or within `slack` of it."""
    found = np.asarray(found)
    assert found.dtype == jnp.dtype(dtype) and found.shape == exact.shape
    with np.errstate(all="ignore"):
        rounded = exact.astype(jnp.dtype(dtype)).astype(np.float64)
    special = ~np.isfinite(rounded)
    np.testing.assert_array_equal(found.astype(np.float64)[special], rounded[special])
    found, exact = found.astype(np.float64)[~special], exact[~special]
    slack = np.broadcast_to(slack, special.shape)[~special]
    assert np.isfinite(found).all(), "infinite or NaN where the result is not"
    # Below the smallest normal number of the arithmetic results may be flushed to 0.
    computing = jnp.float64 if dtype == "float64" else jnp.float32
    bound = allowed * spacing(exact, dtype) + slack + float(jnp.finfo(computing).smallest_normal)
    ratio = np.abs(found - exact) / bound
    assert (ratio <= 1).all(), f"{ratio.max():.2f} times the bound, {found[ratio.argmax()]} for {exact[ratio.argmax()]}"


def numbers(row, shape, dtype, seed=0):
    """Operands of a row: its arrays, then its parameters."""
    rng = np.random.default_rng(seed)
    arrays = [rng.uniform(*row.domain, shape).astype(np.float32) for _ in row.arrays]
    if row.types == "select":
        arrays[0] = arrays[0] > 0
    if row.types == "logical":
        return [jnp.asarray(a > 0) for a in arrays]
    arrays = [jnp.asarray(a if a.dtype == bool else a.astype(jnp.dtype(dtype))) for a in arrays]
    return arrays + [PARAMETERS[name] for name, _ in row.parameters]


def special(row, dtype):
    """Every combination of the numbers that are special to some operation."""
    info = jnp.finfo(dtype)
    values = [
        0.0,
        -0.0,
        0.25,
        0.5,
        -0.5,
        1.0,
        -1.0,
        3.0,
        -3.0,
        6.0,
        -9.0,
        40.0,
        np.inf,
        -np.inf,
        np.nan,
        8 * float(info.tiny),
        -8 * float(info.tiny),
        float(info.max),
        float(info.min),
        2.0**-12,
        -(2.0**-12),
    ]
    if dtype == "float16":  # subnormal numbers of the computing type are 0 in XLA's threads
        values += [float(info.smallest_subnormal), -float(info.smallest_subnormal)]
    if len(row.arrays) == 3:
        values = values[1:3] + values[5:8] + values[13:17]
    columns = np.array(list(itertools.product(values, repeat=len(row.arrays)))).T
    arrays = [jnp.asarray(c.astype(jnp.dtype(dtype))) for c in columns]
    if row.types == "select":
        arrays[0] = arrays[0] > 0
    return arrays + [PARAMETERS[name] for name, _ in row.parameters]


def function(row):
    """The primitive's operation as a function of the operands of `numbers`."""
    if row.part_of == "gelu":
        return functools.partial(jaxkern.gelu, approximate=row.name == "gelu_tanh")
    if row.part_of == "geglu":
        return lambda x, gate: jaxkern.geglu(x, gate=gate, approximate=row.name == "geglu_tanh")
    if row.gated:
        return lambda x, gate: getattr(jaxkern, row.name)(x, gate=gate)
    return getattr(jaxkern, row.name)


def on_cuda(f, *arguments):
    """The program for CUDA, as text; needs no GPU."""
    if registry.kernels.module is None:
        pytest.skip(registry.kernels.reason)
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def dtypes(row):
    """Without a GPU, where all rows are expressions of XLA's, a type of 16 bits and another one, in turn."""
    if row.types == "logical":
        return ("bool",)
    number = ROWS.index(row)
    return FLOATS if ON_GPU else (FLOATS[number % 2], FLOATS[2 + number // 2 % 2])


# ---- values


@by_name
@pytest.mark.optimized
def test_values(row, x64):
    shapes = ((4099,), (5, 1, 33)) if ON_GPU else ((4099,),)
    check_values(row, {f"{dtype} {shape}": numbers(row, shape, dtype) for dtype in dtypes(row) for shape in shapes})


@pytest.mark.parametrize("row", [row for row in ROWS if row.name in LONGEST], ids=lambda row: row.name)
@pytest.mark.optimized
def test_many_values(row, x64):
    check_values(row, {"float32": numbers(row, (100_000,), "float32")})


def arrays_of(row, dtype, operands):
    """The operands as the primitive has them."""
    computing = reference.computing(jnp.dtype(dtype))
    return [*operands[: len(row.arrays)], *(jnp.asarray(p, computing) for p in operands[len(row.arrays) :])]


def counterpart_error(theirs, key, exact):
    """The error of the counterpart; on the CPU, where XLA runs everything, the error of the row's expression."""
    if theirs is None:
        return 0.0
    with np.errstate(all="ignore"):
        error = np.abs(np.asarray(theirs[key]).astype(np.float64) - exact)
    return 2 * np.where(np.isfinite(error), error, 0.0)


def widened(x):
    """An operand in the type that kernels and the reference compute in."""
    return x if x.dtype == bool else x.astype(reference.computing(x.dtype))


def values(row, cases):
    """(ours, and on the CPU XLA's results for the operands of each case)"""

    def counterpart(*operands):
        dtype = operands[-1 - len(row.parameters)].dtype
        y = reference.meaning(row)(*map(widened, arrays_of(row, dtype, operands)))
        return y if y.dtype == bool else y.astype(dtype)

    return of_each(function(row), counterpart, cases)


def check_values(row, cases):
    """cases: operands by dtype, which may be followed by more words."""
    (found, theirs), meaning = values(row, cases), jax.jit(reference.meaning(row))
    for key, operands in cases.items():
        dtype = key.split()[0]
        exact = in_float64(meaning, *operands)
        if exact.dtype == bool:
            np.testing.assert_array_equal(found[key], exact)
            continue
        scale = sum(np.abs(np.asarray(x).astype(np.float64)) for x in operands) if row.name in CANCELS else 0.0
        if row.name == "fma":
            scale = np.abs(np.asarray(operands[0], np.float64) * np.asarray(operands[1], np.float64)) + scale
        with np.errstate(all="ignore"):
            slack = 2 * float(jnp.finfo(reference.computing(jnp.dtype(dtype))).eps) * scale
        slack = np.where(np.isfinite(slack), slack, 0.0) + counterpart_error(theirs, key, exact)
        assert_close(found[key], exact, dtype, ALLOWED[dtype], slack)


@pytest.mark.parametrize("row", [row for row in ROWS if row.types != "logical"], ids=lambda row: row.name)
@pytest.mark.optimized
def test_special_values(row, x64):
    cases = {dtype: arrays_of(row, dtype, special(row, dtype)) for dtype in dtypes(row)}
    (results, theirs), meaning = values(row, cases), jax.jit(reference.meaning(row))
    for dtype, operands in cases.items():
        found = np.asarray(results[dtype])
        exact = in_float64(meaning, *operands)
        if exact.dtype == bool:
            np.testing.assert_array_equal(found, exact)
            continue
        with np.errstate(all="ignore"):
            exact = exact.astype(found.dtype).astype(np.float64)
        found = found.astype(np.float64)
        # Where float64 and the arithmetic overflow at different places, or sum in another order, either may be.
        np.testing.assert_array_equal(np.isnan(found), np.isnan(exact))
        kept = ~np.isnan(exact) & (np.abs(exact) < 0.9 * float(jnp.finfo(dtype).max))
        rtol = (256 if dtype == "float64" else 8) * float(jnp.finfo(dtype).eps)
        bound = rtol * np.abs(exact) + float(jnp.finfo(dtype).tiny) + counterpart_error(theirs, dtype, exact)
        assert (np.abs(found - exact) <= bound)[kept].all()


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r.types in ("number", "compare", "select")], ids=lambda row: row.name
)
def test_integers(row):
    for dtype in ("int32", "int8", "uint32"):
        rng = np.random.default_rng(1)
        arrays = [
            jnp.asarray(rng.integers(0 if dtype[0] == "u" else -9, 9, (7, 130)).astype(dtype)) for _ in row.arrays
        ]
        if row.types == "select":
            arrays[0] = arrays[0] > 3
        np.testing.assert_array_equal(function(row)(*arrays), reference.meaning(row)(*arrays))


def test_integers_wrap():
    least = jnp.array([-(2**31), 2**31 - 1], jnp.int32)
    assert jaxkern.add(least, least[::-1]).tolist() == [-1, -1]
    assert jaxkern.abs(least).tolist() == [-(2**31), 2**31 - 1]
    assert jaxkern.multiply(least, jnp.int32(2)).tolist() == [0, -2]


def test_sizes():
    """Sizes around packs and blocks, odd ranks, and empty arrays."""
    sizes = (0, 1, 2, 3, 7, 8, 9, 255, 1023, 1024, 1025, 40001, 140000)
    for n in sizes:
        x = jnp.asarray(np.random.default_rng(n).normal(size=n).astype(np.float32))
        for dtype in ("float32", "bfloat16"):
            x = np.asarray(x).astype(jnp.dtype(dtype))
            np.testing.assert_array_equal(jaxkern.relu(x), np.maximum(x, np.zeros((), x.dtype)))
    for shape in ((), (1,), (1, 1, 1), (0, 4), (2, 3, 1, 5, 1, 2, 3)):
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        np.testing.assert_array_equal(jaxkern.add(x, x), x + x)


def test_misaligned():
    """Slices begin anywhere: together, and each elsewhere than the others."""

    def f(x, y, i, j, n):
        x, y = x[i : i + n], y[j : j + n]
        return jaxkern.add(x, y), jaxkern.square_relu(x), jaxkern.less(x, y)

    for dtype in ("float16", "float32"):
        rng = np.random.default_rng(0)
        x, y = (jnp.asarray(rng.integers(-99, 99, 3000).astype(dtype)) for _ in range(2))
        for i, j, n in ((0, 1, 2900), (1, 1, 2901), (3, 0, 2048), (2, 5, 17), (7, 6, 5)):
            total, square, less = jax.jit(lambda x, y, at=(i, j, n): f(x, y, *at))(x, y)
            a, b = np.asarray(x)[i : i + n], np.asarray(y)[j : j + n]
            np.testing.assert_array_equal(total, a + b)
            np.testing.assert_array_equal(square, np.square(np.maximum(a, 0)))
            np.testing.assert_array_equal(less, a < b)


def narrowed(x, dtype):
    """float64 `x` rounded once to a 16-bit type, as float64."""
    with np.errstate(all="ignore"):
        y = x.astype(np.float32)
        # Round to odd: float32 then keeps enough of x that rounding it gives what rounding x gives.
        toward_zero = np.where(np.abs(y.astype(np.float64)) > np.abs(x), np.nextafter(y, np.float32(0)), y)
        inexact = np.isfinite(x) & (toward_zero.astype(np.float64) != x)
        return (toward_zero.view(np.int32) | inexact).view(np.float32).astype(jnp.dtype(dtype)).astype(np.float64)


def assert_narrowed(x, dtype, found, of_xla):
    """A jaxkern kernel rounds once. XLA may round twice, by way of float32: it must then give exactly that."""
    text = jax.jit(lambda x: jaxkern.cast(x, dtype)).lower(x).as_text()
    np.testing.assert_array_equal(found, narrowed(x, dtype) if "custom_call @jaxkern" in text else of_xla)
    with np.errstate(all="ignore"):
        twice = x.astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float64)
    once = narrowed(x, dtype)
    assert np.all((found == once) | (found == twice) | np.isnan(found) & np.isnan(x))


@pytest.mark.optimized
def test_casts(x64):
    values = [
        0.0,
        -0.0,
        0.5,
        -0.5,
        1.0,
        -1.7,
        254.6,
        300.0,
        -129.0,
        65519.0,
        65520.0,
        1e-8,
        1 + 2.0**-11 + 2.0**-40,
        3e9,
        -3e9,
        1e38,
        np.inf,
        -np.inf,
        np.nan,
        2.0**24 + 1,
        16777217.0,
        2147483647.0,
        1 + 2.0**-8 + 2.0**-30,
    ]
    types = (*FLOATS, "int8", "uint8", "int32", "bool", "int64", "uint16")
    for a in types:
        with np.errstate(all="ignore"):
            x = jnp.asarray(np.array(values)).astype(a)
        casts = jax.jit(lambda x: [jaxkern.cast(x, b) for b in types])
        xla = jax.jit(lambda x: [x.astype(b) for b in types])(x)
        for b, found, of_xla in zip(types, casts(x), xla):
            assert found.dtype == jnp.dtype(b)
            found, of_xla = np.asarray(found).astype(np.float64), np.asarray(of_xla).astype(np.float64)
            if a == "float64" and b in ("float16", "bfloat16"):
                assert_narrowed(np.asarray(x), b, found, of_xla)
            else:
                np.testing.assert_array_equal(found, of_xla)
    halfway = jnp.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 1 + 3 * 2.0**-8 - 2.0**-40], jnp.float64)
    found = np.asarray(jaxkern.cast(halfway, jnp.bfloat16)).astype(np.float64)
    assert_narrowed(np.asarray(halfway), "bfloat16", found, np.asarray(halfway.astype(jnp.bfloat16)).astype(np.float64))
    g = jax.grad(lambda x: jaxkern.cast(x, jnp.bfloat16).astype(jnp.float32).sum())(jnp.ones(3, jnp.float32))
    assert g.tolist() == [1, 1, 1] and g.dtype == jnp.float32


# ---- broadcasting

SHAPES = {
    "bias": ((6, 7, 16), (16,)),
    "bias, odd": ((6, 35), (35,)),
    "row scale": ((12, 24), (12, 1)),
    "scalar": ((9, 33), ()),
    "in the middle": ((4, 5, 8), (4, 1, 8)),
    "outer": ((5, 1), (1, 48)),
    "outer, three": ((3, 1, 8), (1, 4, 1)),
    "many groups": ((2, 3, 2, 3, 2), (2, 1, 2, 1, 2)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_broadcast(shapes):
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float16"):
        x, y = (jnp.asarray(rng.normal(size=s).astype(dtype)) for s in shapes)
        c = jnp.asarray(rng.random(shapes[1]) < 0.5)

        @jax.jit
        def f(x, y, c):
            return (
                jaxkern.add(x, y),
                jaxkern.multiply(y, x),
                jaxkern.where(c, x, y),
                jaxkern.fma(x, y, y),
                jaxkern.less(x, y),
                jaxkern.swiglu(x, gate=y),
            )

        @jax.jit
        def plain(x, y, c):
            a, b = x.astype(jnp.float32), y.astype(jnp.float32)
            return x + y, x * y, jnp.where(c, x, y), a * b + b, x < y, a * jax.nn.silu(b)

        for a, b in zip(f(x, y, c), plain(x, y, c), strict=True):
            assert a.shape == b.shape
            tolerance = 1e-6 if dtype == "float32" else 2e-3
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), tolerance, tolerance)


def test_nothing_is_materialised():
    """A bias reaches the kernel as it is."""
    x, bias = jnp.zeros((64, 128)), jnp.zeros(128)
    text = on_cuda(jaxkern.add, x, bias)
    assert "broadcast_in_dim" not in text and "tensor<1x128xf32>" in text


def test_more_than_32_bits_count_is_left_to_xla():
    """XLA runs operands that broadcast if one of their dimensions is too long for the kernels' indices."""
    kernel = []
    for rows in (1 << 20, 1 << 32):
        shapes = (jax.ShapeDtypeStruct(shape, jnp.float16) for shape in ((rows, 2, 2), (1, 2, 1)))
        kernel.append("@jaxkern_multiply" in on_cuda(jaxkern.multiply, *shapes))
    assert kernel == [True, False]


# ---- derivatives


@pytest.mark.parametrize("row", DIFFERENTIABLE, ids=lambda row: row.name)
@pytest.mark.optimized
def test_gradient(row, x64):
    """Gradients by arrays and parameters match JAX's gradients of the row's expression in float64."""
    cases = {}
    for dtype in dtypes(row):
        g = jnp.asarray(np.random.default_rng(3).normal(size=515).astype(jnp.dtype(dtype)))
        cases[dtype] = [g, *arrays_of(row, dtype, numbers(row, (515,), dtype, seed=2))]
    results, theirs = of_each(
        lambda g, *operands: jax.vjp(function(row), *operands)[1](g),
        lambda g, *operands: [
            d if d.dtype == jax.dtypes.float0 else d.astype(x.dtype)
            for x, d in zip(operands, jax.vjp(reference.meaning(row), *map(widened, operands))[1](widened(g)))
        ],
        cases,
    )
    exact_gradient = jax.jit(lambda g, *xs: jax.vjp(reference.meaning(row), *xs)[1](g))
    for dtype, (g, *operands) in cases.items():
        found = results[dtype]
        exact = in_float64(exact_gradient, g, *operands)
        for k, (a, b) in enumerate(zip(found, exact)):
            # A derivative is a sum of terms, and its largest term may be this much larger than the sum.
            largest = np.abs(np.asarray(g, np.float64)) * np.maximum(1, np.abs(np.asarray(operands[0], np.float64)))
            eps = float(jnp.finfo(reference.computing(jnp.dtype(dtype))).eps)
            if dtype in ("float16", "bfloat16"):
                eps = max(eps, 2.0**-15)  # the GPU's arithmetic for 16-bit results
            slack = eps * (64 * largest.sum() if k >= len(row.arrays) else 16 * (largest + np.abs(b) * 8))
            assert_close(a, b, a.dtype.name, 1, slack + counterpart_error(theirs and theirs[dtype], k, b))


@by_name
def test_forward_and_second_derivatives(row):
    """jvp equals vjp, and grad of grad equals the second derivative of the row's expression; under vmap and scan too."""
    if row.types in ("test", "compare", "logical"):
        x = tuple(numbers(row, (6,), "float32"))
        tangents = tuple(np.zeros(6, jax.dtypes.float0) if a.dtype == bool else jnp.ones(6) for a in x)
        y, t = jax.jvp(function(row), x, tangents)
        assert t.dtype == jax.dtypes.float0 and y.dtype == bool
        return
    operands = numbers(row, (6,), "float32", seed=5)
    first = 1 if row.types == "select" else 0
    xs, fixed = operands[first:], operands[:first]
    xs = [jnp.asarray(x, jnp.float32) for x in xs]

    def programs(f):
        def loss(*xs):
            return jnp.sum(jnp.sin(f(*fixed, *xs)))

        def once(*xs):
            tangents = tuple(jnp.full_like(x, 0.5 + k) for k, x in enumerate(xs))
            y, t = jax.jvp(lambda *xs: f(*fixed, *xs), xs, tangents)
            hvp = jax.grad(
                lambda *xs: sum(jnp.vdot(g, v) for g, v in zip(jax.grad(loss, range(len(xs)))(*xs), tangents)),
                range(len(xs)),
            )(*xs)
            forward_over_reverse = jax.jvp(jax.grad(loss, range(len(xs))), xs, tangents)[1]
            return y, t, hvp, forward_over_reverse

        return once

    both = programs(function(row)), programs(reference.meaning(row))
    found, expected = jax.jit(lambda *xs: [program(*xs) for program in both])(*xs)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, 2e-4, 2e-4)


def test_corners():
    """At a corner of a function, the derivative is jax.nn's."""
    corners = jnp.array([-6.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0])
    of_nn = ("relu", "hard_tanh", "hard_sigmoid", "hard_swish", "elu", "celu", "leaky_relu", "selu")
    of_jnp = ("abs", "square", "sign", "floor", "maximum", "minimum")

    @jax.jit
    def gradients(x):
        def gradient(f, name):
            return jax.grad(lambda x: (f(x, jnp.flip(x)) if name in ("maximum", "minimum") else f(x)).sum())(x)

        return {
            name: [gradient(getattr(module, name), name) for module in (jaxkern, theirs)]
            for theirs, names in ((jax.nn, of_nn), (jnp, of_jnp))
            for name in names
        }

    for name, (ours, theirs) in gradients(corners).items():
        np.testing.assert_allclose(ours, theirs, 1e-6, 1e-6, err_msg=name)


def test_gradient_is_one_kernel():
    x = jnp.ones((8, 128))
    calls = lambda f, *a: on_cuda(f, *a).count("custom_call @jaxkern_")
    assert calls(jax.grad(lambda x: jaxkern.swiglu(x).sum()), x) == 1  # y is not needed
    assert calls(lambda x, g, t: jax.vjp(lambda *a: jaxkern.swiglu(a[0], gate=a[1]), x, g)[1](t), x, x, x) == 1
    assert calls(jax.value_and_grad(lambda x: jaxkern.gelu(x).sum()), x) == 2
    # A gradient that nobody wants is not written.
    assert calls(jax.grad(lambda x, y: jaxkern.multiply(x, y).sum()), x, x) == 0


@pytest.mark.parametrize("name", ["glu", "swiglu", "geglu"])
def test_halves(name):
    """Both halves of one array, along any axis."""
    rng = np.random.default_rng(0)
    f = getattr(jaxkern, name)
    for shape, axis in (((6, 32), -1), ((5, 6), 1), ((4, 10, 3), 1), ((2,), 0), ((3, 2, 1), 1), ((0, 4), 1)):
        dtype = "float32" if shape != (6, 32) else "bfloat16"

        @jax.jit
        def both(x, g, axis=axis):
            a, b = jnp.split(x, 2, axis)
            y, pull = jax.vjp(lambda x: f(x, axis), x)
            z, pull_halves = jax.vjp(lambda a, b: f(a, gate=b), a, b)
            return y, z, pull(g)[0], jnp.concatenate(pull_halves(g), axis)

        x = rng.normal(size=shape).astype(jnp.dtype(dtype))
        y, z, dx, dz = both(x, np.split(x, 2, axis)[1])
        np.testing.assert_array_equal(y, z)
        np.testing.assert_array_equal(dx, dz)
    x = jnp.asarray(rng.normal(size=(4, 6, 8)).astype(np.float32))
    for axes in (0, 1, 2):
        np.testing.assert_array_equal(jax.jit(jax.vmap(f, axes))(x), f(jnp.moveaxis(x, axes, 0)))
    if name == "glu":
        np.testing.assert_allclose(jaxkern.glu(x, 1), jax.nn.glu(x, 1), 1e-6)


# ---- transformations


def test_vmap():
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(4, 6, 8)).astype(np.float32)) for _ in range(2))
    bias = y[0, 0]
    for axis in (0, 1, 2):
        np.testing.assert_array_equal(jax.vmap(jaxkern.relu, axis)(x), jnp.moveaxis(jax.nn.relu(x), axis, 0))
    np.testing.assert_array_equal(jax.vmap(jaxkern.add, (0, None))(x, bias), x + bias)
    np.testing.assert_array_equal(jax.vmap(jaxkern.add, (None, 0))(x, y[:, 0, 0]), x + y[:, 0, 0][:, None, None, None])
    np.testing.assert_array_equal(
        jax.vmap(jax.vmap(jaxkern.multiply, (0, None)), (0, 1))(x, y[:, :4]),
        jax.vmap(jax.vmap(jnp.multiply, (0, None)), (0, 1))(x, y[:, :4]),
    )
    slopes = jnp.array([0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(
        jax.vmap(jaxkern.leaky_relu)(x, slopes), jnp.where(x >= 0, x, slopes[:, None, None] * x), 1e-6
    )
    per_example = jax.vmap(jax.grad(lambda x, a: jaxkern.elu(x, a).sum(), (0, 1)))
    expected = jax.vmap(jax.grad(lambda x, a: jnp.where(x > 0, x, a * jnp.expm1(x)).sum(), (0, 1)))
    for a, b in zip(per_example(x, slopes), expected(x, slopes)):
        np.testing.assert_allclose(a, b, 1e-5, 1e-5)


def test_control_flow():
    x = jnp.linspace(-2, 2, 12)

    def step(carry, alpha):
        return jaxkern.lerp(carry, jaxkern.elu(carry, alpha), 0.5), jaxkern.softplus(carry)

    def run(x, alphas):
        carry, ys = jax.lax.scan(jax.checkpoint(step), x, alphas)
        return jaxkern.where(carry.sum() > 0, carry, -carry).sum() + ys.sum()

    alphas = jnp.array([0.5, 1.0, 1.5])
    gradient = jax.jit(jax.grad(run, (0, 1)))(x, alphas)
    step_size = 1e-3
    numeric = (run(x + step_size, alphas) - run(x - step_size, alphas)) / (2 * step_size)
    np.testing.assert_allclose(gradient[0].sum(), numeric, 2e-3)


def test_traced_parameter():
    """A parameter is data: another value needs no other program."""
    f = jax.jit(lambda x, a: jaxkern.scale(x, a))  # a function of its own: others have called that one
    x = jnp.arange(4.0)
    assert f(x, 2.0).tolist() == [0, 2, 4, 6] and f(x, jnp.float32(0.5)).tolist() == [0, 0.5, 1, 1.5]
    assert f._cache_size() <= 2  # a Python number and an array
    assert jax.grad(lambda a: jaxkern.scale(x, a).sum())(3.0) == 6.0


def test_promotion():
    half, single, whole = jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.float32), jnp.ones(3, jnp.int32)
    dtype = lambda f, *a: jax.eval_shape(lambda: f(*a)).dtype
    for a, b in itertools.product((half, single, whole, 1, 2.0), repeat=2):
        assert dtype(jaxkern.add, a, b) == dtype(jnp.add, a, b)
        assert dtype(jaxkern.maximum, a, b) == dtype(jnp.maximum, a, b)
    assert dtype(jaxkern.gelu, whole) == jnp.float32 and dtype(jaxkern.relu, whole) == jnp.int32
    assert dtype(jaxkern.leaky_relu, half) == jnp.bfloat16 and dtype(jaxkern.where, True, half, 1.0) == jnp.bfloat16
    assert dtype(jaxkern.clamp, whole, 0, 1) == jnp.int32
    assert dtype(jaxkern.logical_and, single, whole) == jnp.bool_


def test_eager_dispatch_compiles_once():
    x = jnp.ones((3, 5))
    jaxkern.silu(x)
    before = elementwise._jitted._cache_size()
    jaxkern.silu(x + 1)
    assert elementwise._jitted._cache_size() == before


def test_program_is_one_call():
    x = jnp.ones(3)
    assert re.findall(r"= stablehlo\.(\w+)", on_cuda(jaxkern.silu, x)) == ["custom_call", "optimization_barrier"]
    assert str(jax.make_jaxpr(jaxkern.silu)(x)).count("jaxkern_silu") == 1


# ---- bad input


def test_bad_input():
    x = jnp.ones((2, 3))
    for call, error, words in (
        (lambda: jaxkern.gelu(x > 0), TypeError, "jaxkern.gelu.*bool"),
        (lambda: jaxkern.add(x > 0, x > 0), TypeError, "jaxkern.add.*bool"),
        (lambda: jaxkern.silu(x * 1j), TypeError, "jaxkern.silu.*complex"),
        (lambda: jaxkern.where(True, x * 1j, x), TypeError, "jaxkern.where.*complex"),
        (lambda: jaxkern.add(x, jnp.ones(2)), ValueError, r"jaxkern.add: x of shape \(2, 3\), y of shape \(2,\)"),
        (lambda: jaxkern.swiglu(x), ValueError, r"jaxkern.swiglu: x of shape \(2, 3\) has no halves along axis -1"),
        (lambda: jaxkern.glu(x, 2), ValueError, "axis 2"),
        (lambda: jaxkern.glu(x, "0"), TypeError, "axis"),
        (lambda: jaxkern.elu(x, jnp.ones(2)), TypeError, "jaxkern.elu: alpha must be a real scalar"),
        (lambda: jaxkern.scale(x, 1j), TypeError, "jaxkern.scale: alpha"),
        (lambda: jaxkern.exp("x"), TypeError, "jaxkern.exp: x must be"),
        (lambda: jaxkern.exp([1.0]), TypeError, "jaxkern.exp: x must be"),
        (lambda: jaxkern.cast(x, "no"), TypeError, "jaxkern.cast"),
        (lambda: jaxkern.cast(x, jnp.complex64), TypeError, "jaxkern.cast"),
    ):
        with pytest.raises(error, match=words):
            call()


# ---- the table


def test_table_and_functors_agree():
    """Every row has its functors, and every functor its row."""
    text = "".join((ROOT / "ffi/kernels/elementwise" / name).read_text() for name in ("activations.h", "functors.h"))
    functors = set(re.findall(r"^(?:template <class M> )?struct (\w+) \{", text, re.M)) - {"Values", "Logistic"}
    wanted = {"Cast"} | {row.functor for row in ROWS} | {f"{row.functor}Grad" for row in ROWS if row.gradient}
    assert functors == wanted
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_documentation_lists_every_operation():
    """docs/api/elementwise.md shows these groups."""
    assert sorted(name for names in table.groups().values() for name in names) == sorted(elementwise.NAMES)
    assert set(elementwise.NAMES) <= set(dir(jaxkern))


# ---- CONTRIBUTING.md adds an operation: its text, compiled and run


def test_contributing_example(tmp_path):
    """The functor and the row that CONTRIBUTING.md shows compile to kernels, and are differentiated."""
    blocks = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    functor = next(text for language, text in blocks if language == "cpp")
    row = next(text for language, text in blocks if language == "python")
    row = eval(row, vars(table))
    assert [k.name for k in table.kernels_of(row)][:2] == [row.name, f"{row.name}_grad"]
    if registry.kernels.module is None or registry.kernels.module.compiler()[1]:
        pytest.skip("NVRTC is not installed")
    # The functor where it would be written, among the others.
    shutil.copytree(runtime.kernels_folder(), tmp_path / "kernels")
    header = tmp_path / "kernels/elementwise/functors.h"
    header.write_text(header.read_text().replace("// --- One operand", functor + "\n// --- One operand", 1))
    name = f"Elementwise<{row.functor}<Single>, 0, Types<float>, Types<float>>"
    gradient = f"Elementwise<{row.functor}Grad<Coarse>, 0, Types<__half>, Types<__half, __half>>"
    program = f"""
import pathlib
from jaxkern._core import registry, runtime
runtime.kernels_folder = lambda: pathlib.Path({str(tmp_path / "kernels")!r})
runtime.configure(registry.kernels.module)
for name in ({name!r}, {gradient!r}):
    registry.kernels.module.compile("elementwise/elementwise.cuh", f"FlatKernel<{{name}}, 0, true>", 90)
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "JAXKERN_CACHE_DIR": ""})
