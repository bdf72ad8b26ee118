"""Arguments of the reductions as in jnp, bad input, algorithms."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import normal, random_mask
from reductions import (
    INTEGERS,
    JAX,
    OPERATIONS,
    OURS,
    call,
    check,
    check_statistics,
    every_operation,
    integers,
)
from reference import DTYPES

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat, registry

# ---- the arguments of jnp


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float32", "uint8", "bool"])
@every_operation
def test_arguments_as_in_jnp(operation, x_dtype, x64):
    """Every combination gives the value, shape and dtype of the counterpart; without an axis, of the whole array."""
    if operation == "logsumexp" and x_dtype == "bool":
        pytest.skip("logsumexp of booleans is refused")
    x = jnp.asarray(np.random.default_rng(0).normal(0, 3, (3, 4, 5))).astype(x_dtype)
    axes = ({}, {"axis": (0, 2)}, {"axis": -1, "keepdims": True})
    others = [{}]
    if operation in ("reduce_sum", "reduce_mean"):
        types = ("float16", "float32", "float64", *(("int8", "uint8", "int32") if operation == "reduce_sum" else ()))
        others += [{"dtype": dtype} for dtype in types]
    if operation == "reduce_sum":
        others += [
            {"promote_integers": False},
            {"initial": 1.5, "promote_integers": False},
            {"initial": 2, "dtype": "int8"},
        ]
    if operation not in ("reduce_mean", "logsumexp"):
        others += [{"initial": 2}, {"initial": jnp.float32(1.5)}, {"initial": -1, "where": x > 0}]
    cases = [axis | other for axis, other in itertools.product(axes, others)]
    for ours, theirs, case in zip(
        *(jax.jit(lambda x, f=f: [f(x, **case) for case in cases])(x) for f in (OURS[operation], JAX[operation])), cases
    ):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), case
        near = 2.0**-6 if "16" in f"{x_dtype}{ours.dtype}" else 1e-5
        np.testing.assert_allclose(*(np.asarray(y, np.float64) for y in (ours, theirs)), near, near, err_msg=str(case))


@pytest.mark.parametrize("initial", [0.5, 3.0])
@pytest.mark.parametrize("operation", ["reduce_sum", "reduce_max", "reduce_min"])
def test_gradient_with_an_initial_value(operation, initial, x64):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 6))).at[0].set(initial)
    ours, theirs = (
        jax.grad(lambda x, a: jnp.sin(f[operation](x, 1, initial=a)).sum(), (0, 1))(x, initial) for f in (OURS, JAX)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), ours, theirs)


FACTORS = {
    "number": lambda: 2.0,
    "column": lambda: jnp.array([[1.0], [-2.0], [0.0]]),
    "wider than x": lambda: jnp.asarray(np.random.default_rng(2).normal(size=(2, 3, 7))).at[:, :, 2].set(0),
    "integers": lambda: jnp.arange(-3, 4),
    "booleans": lambda: jnp.arange(7) > 2,
}


@pytest.mark.parametrize("b", FACTORS)
@pytest.mark.parametrize(
    "given, return_sign", [({}, False), ({"axis": -1, "keepdims": True}, True), ({"axis": (0, -1)}, True)]
)
def test_logsumexp_with_factors(b, given, return_sign, x64):
    """Values, signs and gradients of jax.nn.logsumexp, huge and masked elements included."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7))).at[0, 5].set(700.0).at[1, 3].set(-jnp.inf)
    b = FACTORS[b]()
    given = given | {"return_sign": return_sign, "where": jnp.arange(7) != 1}
    real = jnp.issubdtype(jnp.asarray(b).dtype, jnp.floating)

    def both(f):
        y, pull, sign = jax.vjp(lambda *a: split(f(*a)), *((x, b) if real else (x,)), has_aux=True)
        return y, sign, pull(jnp.where(jnp.isfinite(y), jnp.cos(y), 0))

    def split(found):
        return found if return_sign else (found, jnp.zeros(()))

    ours = both(lambda x, *factor: OURS["logsumexp"](x, b=factor[0] if factor else b, **given))
    theirs = both(lambda x, *factor: JAX["logsumexp"](x, b=factor[0] if factor else b, **given))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-12)
    np.testing.assert_array_equal(ours[1], theirs[1])
    for a, c in zip(ours[2], theirs[2]):  # JAX has NaN where a sum vanishes, ours has no gradient there
        np.testing.assert_allclose(a, jnp.where(jnp.isnan(c), 0, c), rtol=1e-10, atol=1e-14)


def test_logsumexp_with_a_sign():
    x = jnp.array([[0.0, 1.0], [-jnp.inf, -jnp.inf], [jnp.inf, 0.0], [jnp.nan, 0.0]])
    for found, wanted in zip(*(f["logsumexp"](x, 1, return_sign=True) for f in (OURS, JAX))):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert found.dtype == wanted.dtype


# ---- bad input


@every_operation
@pytest.mark.parametrize(
    "args, kind, words",
    [
        (lambda: (jnp.ones((2, 3)), 2), ValueError, ["axis 2", "(2, 3)"]),
        (lambda: (jnp.ones((2, 3)), (1, -1)), ValueError, ["duplicate", "(1, -1)", "(2, 3)"]),
        (lambda: (jnp.ones((2, 3)), 1.0), TypeError, ["axis", "1.0"]),
        (lambda: (jnp.ones((2, 3)), True), TypeError, ["axis must be", "True"]),
        (lambda: (1.0, -1), ValueError, ["axis -1", "()"]),
        (lambda: (jnp.ones((2, 3), jnp.complex64), -1), TypeError, ["x must be real", "complex64[2, 3]"]),
        (lambda: (jax.random.key(0), None), TypeError, ["x must be an array or a number", "key<fry>[]"]),
        (lambda: ([1.0, 2.0], -1), TypeError, ["x must be an array", "list"]),
        (lambda: (None,), TypeError, ["x must be an array", "NoneType"]),
        (lambda: (jnp.ones((2, 3)), -1, 1), TypeError, ["where must be boolean", "int32[]"]),
        (lambda: (jnp.ones((2, 3)), -1, jnp.ones((2,), bool)), ValueError, ["where", "(2,)", "(2, 3)"]),
        (lambda: (jnp.ones((2, 3)), -1, jnp.ones((4, 2, 3), bool)), ValueError, ["where", "(4, 2, 3)", "(2, 3)"]),
        (lambda: (jnp.ones((2, 3)), -1, None, 1), TypeError, ["keepdims must be True or False", "1"]),
    ],
)
def test_bad_input(operation, args, kind, words):
    x, axis, where, keepdims = (*args(), *(-1, None, False)[len(args()) - 1 :])
    with pytest.raises(kind) as error:
        call(operation, x, axis, where, keepdims)
    message = str(error.value)
    assert message.startswith(f"jaxkern.{operation}: ") and all(word in message for word in words), message


@pytest.mark.parametrize(
    "operation, given, kind, words",
    [
        ("reduce_sum", {"dtype": "complex64"}, TypeError, "dtype must be floating-point or integer, got complex64"),
        ("reduce_sum", {"dtype": bool}, TypeError, "dtype must be floating-point or integer, got bool"),
        ("reduce_mean", {"dtype": int}, TypeError, "dtype must be floating-point, got int32"),
        ("reduce_sum", {"initial": jnp.ones(2)}, ValueError, r"initial must be a scalar, got shape \(2,\)"),
        ("reduce_max", {"initial": 1j}, TypeError, "initial must be real, got complex64"),
        ("reduce_min", {"initial": "1"}, TypeError, "initial must be a number, got str"),
        ("reduce_sum", {"promote_integers": 0}, TypeError, "promote_integers must be True or False, got 0"),
        ("logsumexp", {"return_sign": 1}, TypeError, "return_sign must be True or False, got 1"),
        ("logsumexp", {"b": "b"}, TypeError, "b must be an array or a number, got str"),
        ("logsumexp", {"b": jnp.ones(3, "complex64")}, TypeError, "b must be real"),
        ("logsumexp", {"b": jnp.ones(2)}, ValueError, r"x of shape \(2, 3\) and b of shape \(2,\) do not broadcast"),
        ("logsumexp", {"x": jnp.ones(3, bool)}, TypeError, "x must be real"),
        ("logsumexp", {"x": jnp.ones(3, bool), "b": 1.0}, TypeError, "x must be real"),
    ],
)
def test_bad_arguments(operation, given, kind, words):
    with pytest.raises(kind, match=f"jaxkern.{operation}: {words}"):
        OURS[operation](**({"x": jnp.ones((2, 3))} | given))


# ---- algorithms


def test_force():
    with algorithms.force(logsumexp="split"):
        assert "algorithm=split" in str(jax.make_jaxpr(jaxkern.logsumexp)(jnp.ones(3)))
    with algorithms.force(softmax="split"):
        assert "algorithm=auto" in str(jax.make_jaxpr(jaxkern.logsumexp)(jnp.ones(3)))


def test_algorithm_query_needs_no_gpu():
    for device, width, inner, dtype, rows in itertools.product(
        (algorithms.H200, algorithms.A100),
        (1, 64, 1000, 4096, 50257, 1 << 20),
        (1, 7),
        ("bfloat16", "float64", "uint8"),
        (1, 49152),
    ):
        problem = dict(rows=rows, width=width, inner=inner, dtype=dtype, device=device)
        algorithm = algorithms.choose("reduce_sum", **problem)
        assert algorithm in algorithms.names("reduce_sum") and algorithms.fits("reduce_sum", algorithm, **problem)
        assert inner == 1 or algorithm in ("strided", "split")
    wanted = {
        (49152, 32): "lanes",
        (49152, 1024): "warp",
        (16384, 4096): "block",
        (8192, 32768): "block",
        (64, 1 << 20): "split",
        (1, 1 << 26): "split",
    }
    assert {shape: algorithms.choose("reduce_sum", *shape, device=algorithms.H200) for shape in wanted} == wanted
    assert not algorithms.fits("reduce_sum", "lanes", 8, 4096)


@pytest.mark.parametrize(
    "problem, kind, words",
    [
        (dict(dtype="complex64"), ValueError, "no kernel for dtype complex64, there are bfloat16, bool, float16"),
        (dict(width=0), ValueError, "width must be positive, got 0"),
        (dict(inner=2.0), TypeError, "inner must be an int, got 2.0"),
        (dict(narrow=1), TypeError, "narrow must be True or False, got 1"),
        (dict(device="H200"), TypeError, "device must be a jaxkern.algorithms.Device or None, got str"),
    ],
)
def test_bad_algorithm_query(problem, kind, words):
    problem = {"rows": 8, "width": 64, **problem}
    for name, ask in (
        ("choose", lambda **p: algorithms.choose("reduce_max", **p)),
        ("fits", lambda **p: algorithms.fits("reduce_max", "warp", **p)),
    ):
        with pytest.raises(kind) as error:
            ask(**problem)
        assert str(error.value).startswith(f"jaxkern.algorithms.{name}: {words}")
    with pytest.raises(ValueError, match="reduce_max has no algorithm 'pipeline', there are thread, lanes"):
        algorithms.fits("reduce_max", "pipeline", 8, 64)


WIDTHS = (64, 257, 1003, 4096, 70001, 600_001)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES + ("int8", "uint64"))
@pytest.mark.parametrize("algorithm", algorithms.names("reduce_sum"))
def test_every_algorithm(algorithm, dtype):
    """Each kernel at two widths where it fits, at one of them with a mask too, and logsumexp with what its gradient needs."""
    inner = (24,) if algorithm == "strided" else ()
    fits = [n for n in WIDTHS if algorithms.fits("reduce_sum", algorithm, 3, n, *inner, dtype=dtype)][:2]
    shapes = [(37 if width < 5000 else 3, width, *inner) for width in fits]
    shapes += [(1, 40001, 24)] if algorithm == "split" else []
    for shape, operation in itertools.product(shapes, OPERATIONS):
        masks = [None, random_mask((1, *shape[1:]))] if shape == shapes[0] else [None]
        for mask in masks:
            with compat.enable_x64(jnp.dtype(dtype).itemsize == 8), algorithms.force(**{operation: algorithm}):
                if dtype not in INTEGERS:
                    check(operation, normal(shape, dtype), 1, mask)
                    if operation == "logsumexp":
                        check_statistics(normal(shape, dtype), 1, mask)
                elif operation not in ("reduce_mean", "logsumexp"):
                    x, info = integers(shape, dtype), np.iinfo(dtype)
                    y = call(operation, x, 1, mask)
                    kept = np.broadcast_to(True if mask is None else mask, shape)
                    method, ends = {
                        "reduce_sum": (np.sum, {"dtype": y.dtype}),
                        "reduce_max": (np.max, {"initial": info.min}),
                        "reduce_min": (np.min, {"initial": info.max}),
                    }[operation]
                    np.testing.assert_array_equal(y, method(np.asarray(x), 1, where=kept, **ends))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("width", [8, 264, 512])
def test_masked_logsumexp_by_hand(width, dtype):
    """Rows that do not fill the last warps, masks that lack dimensions, empty rows, infinities and NaN."""
    x, mask = np.array(normal((5, 7, width), dtype), np.float32), np.array(random_mask((5, 1, width), 0.5))
    x[0, 0, 1], x[1, 1], x[2, 2, 3], x[3, 3, 1:], mask[4], mask[:, :, 0] = np.inf, -np.inf, np.nan, -600, False, True
    mask[4] = False
    with algorithms.force(logsumexp="by_hand"):
        for scale in (1, 100):
            given = jnp.asarray(x * scale, dtype), 2, jnp.asarray(mask)
            check("logsumexp", *given)
            check_statistics(*given)


def test_an_algorithm_that_does_not_fit_is_an_error():
    if registry.kernels.module is None:
        pytest.skip(registry.kernels.reason)
    with algorithms.force(logsumexp="lanes"), pytest.raises(ValueError, match="jaxkern.logsumexp.*lanes"):
        jax.jit(jaxkern.logsumexp).trace(jnp.ones((2, 100_003))).lower(lowering_platforms=("cuda",))


def test_backend_is_the_one_under_test():
    """On CUDA no operation silently runs through XLA."""
    if registry.kernels.module is None:
        pytest.skip(registry.kernels.reason)
    for operation, dtype in itertools.product(OPERATIONS, ("float16", "bfloat16", "float32", "int8", "uint32")):
        if dtype in DTYPES or operation not in ("reduce_mean", "logsumexp"):
            traced = jax.jit(OURS[operation]).trace(jnp.ones((3, 5), dtype))
            assert f"@jaxkern_{operation}(" in traced.lower(lowering_platforms=("cuda",)).as_text()
