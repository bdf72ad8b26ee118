"""row_kernel: values, derivatives, transformations, special cases, bad input.

Kernels compute 16-bit types in float32, so the reference is the function itself on float64.
"""

import contextlib
import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ON_GPU
from row_functions import FUNCTIONS, operands, pairs, rms_norm

import jaxkern
from jaxkern import algorithms
from jaxkern._core import device
from jaxkern._engines.rows import generate, in_place, plan
from jaxkern._engines.rows.function import trace
from jaxkern._engines.rows.primitive import PRIMITIVES

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
SHAPES = [(3, 4, 40)] + [(5, 2, 777), (2, 2, 5000), (2, 2, 70001)] * ON_GPU


def close(ours, wanted, dtype):
    for y, want in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        y, want = np.asarray(y, np.float64), np.asarray(want, np.float64)
        assert y.shape == want.shape
        np.testing.assert_allclose(
            y, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * max(1, np.abs(want).max(initial=0))
        )


def real(args):
    return [k for k, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]


def wide(args):
    return [x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]


def gradients(f, args):
    """(results, gradients by all floating-point operands), for cotangents that 16 bits hold exactly."""
    at = real(args)

    def of_real(*xs):
        return f(*(xs[at.index(k)] if k in at else x for k, x in enumerate(args)))

    ys, pull = jax.vjp(of_real, *(args[k] for k in at))
    cotangent = lambda y: ((jnp.arange(y.size) % 7 - 3) / 4).reshape(y.shape).astype(y.dtype)
    return ys, pull(jax.tree.map(cotangent, ys))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sweep(3)
def test_against_the_function_in_float64(name, dtype, x64):
    f, kinds, differentiable = FUNCTIONS[name]
    for seed, shape in enumerate(SHAPES[: 1 if name == "causal" else None]):
        args = list(map(jnp.asarray, operands(kinds, shape, dtype, seed)))
        run = gradients if differentiable else lambda f, args: f(*args)
        ours = jax.jit(lambda *a: run(jaxkern.row_kernel(f), a))(*args)
        close(ours, jax.jit(lambda *a: run(f, a))(*wide(args)), dtype)
        types = [y.dtype for y in jax.tree.leaves(ours)]
        assert types == [y.dtype for y in jax.tree.leaves(jax.eval_shape(lambda *a: run(f, a), *args))]


@pytest.fixture
def x64():
    from jaxkern._core import compat

    with compat.enable_x64():
        yield


@pytest.mark.parametrize("name", ["rms_norm", "residual", "loss", "masked", "entropy", "rules", "totals"])
def test_transformations(name, x64):
    """Forward mode, second derivatives, vmap over each operand and over all, scan and remat."""
    f, kinds, _ = FUNCTIONS[name]
    args = list(map(jnp.asarray, operands(kinds, (3, 2, 24), "float64")))
    kernel = jaxkern.row_kernel(f)
    at = real(args)
    fix = lambda g: lambda *xs: g(*(xs[at.index(k)] if k in at else x for k, x in enumerate(args)))
    given = [args[k] for k in at]
    scalar = lambda g: lambda *xs: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fix(g)(*xs)))
    second = lambda g: jax.grad(
        lambda *xs: sum(jnp.vdot(d, d) for d in jax.grad(scalar(g), range(len(at)))(*xs)), range(len(at))
    )
    again = lambda g: jax.grad(jax.checkpoint(scalar(g)), range(len(at)))
    loop = lambda g: lambda *xs: jax.lax.scan(lambda s, _: (s + scalar(g)(*xs), None), 0.0, length=2)[0]
    many = [np.stack([x, x[..., ::-1] if x.ndim else x + 1]) for x in map(np.asarray, args)]
    last = [np.moveaxis(m, 0, -1) for m in many]

    def everything(g, given, args, many, last):
        if name != "rules":  # jax.custom_vjp has no forward mode in plain JAX
            yield jax.jvp(fix(g), given, [jnp.sin(x) for x in given])
        yield [h(g)(*given) for h in (second, again, loop)]
        for axes in ([0] * len(args), *([0 if j == k else None for j in range(len(args))] for k in range(len(args)))):
            yield jax.vmap(g, axes)(*(m if a == 0 else x for m, x, a in zip(many, args, axes)))
        yield jax.vmap(g, -1)(*last)

    ours, wanted = (jax.jit(lambda *xs, g=g: list(everything(g, *xs)))(given, args, many, last) for g in (kernel, f))
    close(ours, wanted, "float64")


PICKS = {
    "iota and labels": (lambda x, k: jnp.sin(x)[jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1]), k], "xl"),
    "labels under vmap": (lambda x, k: jax.vmap(jax.vmap(lambda row, at: row[at]))(jnp.sin(x), k), "xl"),
    "first": (lambda x: x - x[..., :1] + x[..., -1:], "x"),
    "one for all": (lambda x: x * jax.lax.dynamic_slice_in_dim(x, jnp.int32(3), 1, 2), "x"),
    "filled": (lambda x, k: x.at[jnp.arange(3)[:, None], jnp.arange(4), k * 2].get(mode="fill", fill_value=7), "xl"),
    "integer labels": (lambda x, k: optax.softmax_cross_entropy_with_integer_labels(x, k).mean(), "xl"),
    "einsum": (lambda x, c: jnp.einsum("...d,d->...", x, c) + jnp.vecdot(x, x), "xc"),
    "matrix times vector": (lambda x, c: jnp.tanh(x) @ c, "xc"),
    "cosine": (lambda x, y: optax.cosine_similarity(x, y, epsilon=1e-6), "xx"),
    "select": (lambda x: jnp.select([x < 0, x < 1], [x, x**2], 0.5) * jnp.argmax(jnp.stack([x, -x]), 0), "x"),
    "norm": (lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True) + jax.nn.standardize(x), "x"),
    "unused operand": (lambda x, y: jax.nn.softmax(y), "xx"),
    "rows that do not meet": (lambda x, y: (x * jnp.sum(y, -1, keepdims=True), jnp.sum(y)), "xx"),
    "constant results": (lambda x: (jax.nn.softmax(x), jnp.zeros_like(x), jnp.arange(x.shape[-1]) * 1.0), "x"),
    "an operand as result": (lambda x, c: (c, x, x, jnp.sum(x, -1)), "xc"),
    "transposed": (lambda x, y: x * jnp.swapaxes(y, 0, 1), "xx"),
    "indices of other dimensions": (
        lambda x: (
            x * jax.lax.broadcasted_iota(x.dtype, x.shape, 0),
            jax.lax.broadcasted_iota(x.dtype, x.shape, 1).sum(-1),
        ),
        "x",
    ),
}


@pytest.mark.parametrize("name", PICKS)
def test_picks_products_and_operands_that_do_not_meet(name):
    """Functions as users write them have kernels, and so have their gradients."""
    f, kinds = PICKS[name]
    args = list(map(jnp.asarray, operands(kinds, (3, 4, 40), "float32")))
    if name == "transposed":
        args[1] = args[1].reshape(4, 3, 40)
    close(*(jax.jit(functools.partial(gradients, g))(args) for g in (jaxkern.row_kernel(f), f)), "float32")
    function, _, _ = trace(lambda *xs: f(*xs), args, -1, "f")
    for made in (function, function.vjp(real(args))):
        made = made.select(made.used())
        results = [jax.ShapeDtypeStruct(*o) for o in plan.outputs(made)]
        assert plan.plan(device.H200, made.avals, results, function=made) is not None


def test_a_pick_keeps_every_bit():
    x = jnp.array([[-0.0, 1.0], [jnp.inf, -jnp.inf], [jnp.nan, -0.0]])
    ours = jaxkern.row_kernel(lambda x, k: (x[..., 1], jnp.take_along_axis(x, k, 1)))(x, jnp.array([[0], [1], [1]]))
    assert np.array_equal(np.signbit(ours[0]), [False, True, True]) and np.isneginf(ours[0][1])
    assert np.array_equal(np.signbit(ours[1]), [[True], [True], [True]])


def test_a_reduction_of_one_element():
    x = jnp.arange(5.0)[None]
    add = lambda x: jax.lax.reduce(x, np.float32(0), lambda a, b: jnp.hypot(a, b), (0,))
    f = lambda x: (x * jnp.sum(x, -1, keepdims=True), jnp.argmax(x, 0), add(x))
    close(jaxkern.row_kernel(f)(x), f(x), "float32")
    function, _, _ = trace(f, [x], -1, "f")
    results = [jax.ShapeDtypeStruct(*o) for o in plan.outputs(function)]
    assert plan.plan(device.H200, function.avals, results, function=function) is not None


def test_traces_are_kept_as_jit_keeps_them_and_not_without_end(monkeypatch):
    """A global that changes after the first call is not seen; the oldest traces are dropped."""
    monkeypatch.setattr(sys.modules["jaxkern.row_kernel"], "KEPT", 2)
    scale, traced = 2.0, []

    @jaxkern.row_kernel
    def f(x):
        traced.append(x.shape)
        return x * scale

    assert f(jnp.ones((2, 3))).max() == 2
    scale = 3.0
    assert f(jnp.ones((2, 3))).max() == 2 and len(traced) == 1
    for width in (4, 5, 3):
        f(jnp.ones((2, width)))
    assert traced == [(2, 3), (2, 4), (2, 5), (2, 3)]


def test_symbolic_shapes():
    rows, width = jax.export.symbolic_shape("rows, width")
    f = lambda x, c, k: (FUNCTIONS["rms_norm"][0](x, c), jax.nn.log_softmax(x)[jnp.arange(x.shape[0]), k])
    args = list(map(jnp.asarray, operands("xcl", (6, 40), "float32")))
    for shape in ((rows, 40), (rows, width)):
        types = [jax.ShapeDtypeStruct(n, x.dtype) for n, x in zip((shape, shape[1:], shape[:1]), args)]
        for run in (lambda f: f, lambda f: jax.grad(lambda *a: sum(map(jnp.sum, f(*a))), (0, 1))):
            exported = jax.export.export(jax.jit(run(jaxkern.row_kernel(f))))(*types)
            close(exported.call(*args), run(f)(*args), "float32")


def test_captured_arrays_are_operands(x64):
    """Arrays that the function closes over, traced ones too, are differentiated and batched."""
    x, w = jnp.arange(12.0).reshape(3, 4) + 1, jnp.arange(1.0, 5.0)

    def loss(norm, w):
        return jnp.sum(jnp.sin(norm(lambda x: rms_norm(x, w))(x)))

    ours, plain = jaxkern.row_kernel, lambda f: f
    close(jax.jit(jax.grad(functools.partial(loss, ours)))(w), jax.grad(functools.partial(loss, plain))(w), "float64")
    ws = jnp.stack([w, w * 2])
    close(jax.vmap(functools.partial(loss, ours))(ws), jax.vmap(functools.partial(loss, plain))(ws), "float64")


def test_structures_numbers_and_names():
    @jaxkern.row_kernel(name="share")
    def f(tree, scale):
        return {"y": tree["x"] * scale / jnp.sum(tree["x"], -1, keepdims=True)}

    y = f({"x": jnp.array([[1.0, 3.0]])}, 2)["y"]
    assert y.dtype == jnp.float32 and y.tolist() == [[0.5, 1.5]]
    assert jaxkern.row_kernel(lambda x: jnp.sum(x, -1))(jnp.bfloat16([[1, 2]])).dtype == jnp.bfloat16


def test_results_that_are_not_used_are_dropped():
    """With the operands that they alone depend on. XLA:CPU ended in a crash where it found a reduction of pairs that nothing uses."""
    f = jaxkern.row_kernel(lambda x, w: (x * 2, *pairs(x * w)))
    x, w = np.float32([[3, 1, 2], [1, 2, 1]]), np.float32([1, 0, 4])
    lowered = jax.jit(lambda x, w: f(x, w)[0]).lower(x, w)
    assert "%arg0" in lowered.as_text() and "%arg1" not in lowered.as_text()
    assert lowered.compile()(x, w).tolist() == (x * 2).tolist()
    assert jax.jit(lambda x, w: f(x, w)[2])(x, w).tolist() == [2, 2]


@pytest.mark.parametrize("axis, shape", [(0, (6, 7, 8)), (1, (6, 7, 8)), (0, (300, 3, 101)), (-2, (4, 70, 101))])
def test_other_axes(axis, shape):
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    f = lambda x: jax.nn.softmax(x, axis) * jnp.max(x, axis, keepdims=True)
    close(gradients(jaxkern.row_kernel(f, axis=axis), [x]), gradients(f, [x]), "float32")


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (3, 1), (1, 1), (1,), (5,)])
def test_empty_and_short_rows(shape):
    x = jnp.ones(shape)
    f = lambda x: (x * jnp.sum(x, -1, keepdims=True), jnp.sum(x, -1))
    close(gradients(jaxkern.row_kernel(f), [x]), gradients(f, [x]), "float32")


def test_sums_of_16_bit_numbers_are_not_rounded_in_between():
    """4097 ones: bfloat16 would stop at 256."""
    x = jnp.ones((2, 4097), jnp.bfloat16)
    y, dw = gradients(jaxkern.row_kernel(lambda x, w: jnp.sum(x * w, -1) / 4097), [x, jnp.ones((), jnp.bfloat16)])
    assert y.tolist() == [1.0, 1.0] and dw[1].dtype == jnp.bfloat16


@pytest.mark.parametrize("algorithm", in_place.IN_PLACE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [7, 64, 777, 4096] + [6200, 70001] * ON_GPU)
def test_results_over_operands(width, dtype, algorithm):
    """A kernel that writes over what it reads has the bits of one that does not."""

    def f(x, w):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))
        return y * w, jnp.sum(y, -1), x + w

    x, w = (jnp.asarray(a) for a in operands("xx", (600, width), dtype))
    function, _, _ = trace(f, [jax.ShapeDtypeStruct(x.shape, dtype)] * 2, -1, "f")
    problem_fits = ON_GPU and algorithm in algorithms_that_fit(function, x)
    call = lambda own: jax.jit(lambda x, w: PRIMITIVES["row_kernel"].whole.bind(x * 2, w * 2, function=own))
    with algorithms.force(row_kernel=algorithm if problem_fits else "auto"):
        apart = call(function)(x, w)
        over = call(function.overwriting([(1, 0), (0, 2)])).lower(x, w).compile()
        for _ in range(3):
            assert all(map(np.array_equal, over(x, w), apart))
    if problem_fits:
        assert "output_to_operand_aliasing" in over.as_text()


def algorithms_that_fit(function, x) -> list:
    results = [jax.ShapeDtypeStruct(*o) for o in plan.outputs(function)]
    found = []
    for algorithm in in_place.IN_PLACE:
        with contextlib.suppress(ValueError), algorithms.force(row_kernel=algorithm):
            if plan.plan(device.this_device(), function.avals, results, function=function) is not None:
                found.append(algorithm)
    return found


@pytest.mark.parametrize("width", [64, 1000, 5000])
def test_sums_of_exponentials_beside_rows_of_16_bits(width):
    """They are stored in float32, and as right as that."""
    x = jnp.asarray(8 * np.random.default_rng(width).normal(size=(300, width)), jnp.bfloat16)

    def f(x):
        wide = x.astype(jnp.float32)
        e = jnp.exp(wide - jnp.max(wide, -1, keepdims=True))
        z = jnp.sum(e, -1, keepdims=True)
        return (e / z).astype(x.dtype), z

    y, z = jax.jit(jaxkern.row_kernel(f))(x)
    exact = np.exp(np.asarray(x, np.float64) - np.asarray(x, np.float64).max(-1, keepdims=True))
    np.testing.assert_allclose(z, exact.sum(-1, keepdims=True), rtol=6e-7)
    wanted = exact / exact.sum(-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(y, np.float64), wanted, rtol=2**-8 + 2**-14, atol=1e-30)


@pytest.mark.parametrize(
    "pivot, near", [(lambda q: q, True), (lambda q: q - 91, False), (lambda q: jnp.maximum(q, 0), False)]
)
def test_which_exponentials_are_relative_to_the_largest(pivot, near):
    def f(x):
        wide = x.astype(jnp.float32)
        e = jnp.exp(wide - pivot(jnp.max(wide, -1, keepdims=True)))
        z = jnp.sum(e, -1, keepdims=True)
        return (e / z).astype(x.dtype), z

    function, _, _ = trace(f, [jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)], -1, "f")
    assert bool(function.core.relative) == near and bool(function.core.scales) != near


@pytest.mark.parametrize(
    "offsets, within", [([3], True), ([2**30 - 1], True), ([2**30 - 1] * 2, False), ([2**30], False)]
)
def test_places_far_from_each_other_are_compared_as_they_are(offsets, within):
    """Their difference may be none of 32 bits."""

    def f(x):
        row, column = (jax.lax.broadcasted_iota(jnp.int32, x.shape, d) for d in (0, 1))
        for offset in offsets:
            row = row - np.int32(offset)
        return jnp.where(row <= column, x, 0)

    function, _, _ = trace(f, [jax.ShapeDtypeStruct((4, 1024), jnp.float32)], -1, "f")
    (call,) = re.findall(r"FResult\(\)\((.*?)\)", generate.source(function.core, "F").text)
    assert ("first" in call) == within


def test_the_same_bits_in_every_run():
    args = list(map(jnp.asarray, operands("xcc", (64, 5, 640), "float32")))
    run = jax.jit(lambda *a: gradients(jaxkern.row_kernel(FUNCTIONS["layer_norm"][0]), a))
    first = run(*args)
    for _ in range(10):
        assert all(map(np.array_equal, jax.tree.leaves(run(*args)), jax.tree.leaves(first)))


@pytest.mark.parametrize(
    "f, words",
    [
        (lambda x: jnp.cumsum(x, -1), "cumsum"),
        (lambda x: jnp.sort(x, -1), "sort"),
        (lambda x: x @ jnp.ones((4, 4)), "dot_general"),
        (lambda x: x * 2 + jnp.sum(x, 0), "along the axis of the row alone, with keepdims=True"),
        (lambda x: (x - x.mean()) / x.std(), "reduce along the axis of the row alone"),
        (lambda x: x[:, :2], "slice"),
        (lambda x: x + x.T, "transpose"),
        (lambda x: x.sum(0) + x.sum(1), "whose operand has two dimensions"),
        (lambda x: x.reshape(-1), "reshape"),
        (
            lambda x: jax.lax.fori_loop(0, 9, lambda _, y: y / y.sum(), x),
            "write a Python loop over a fixed number of steps",
        ),
        (
            lambda x: jax.lax.reduce(x, 0.0, lambda a, b: jnp.sort(jnp.stack([a, b]))[1], (1,)),
            "see one element at a time",
        ),
        (lambda x: jax.lax.reduce(x, 0.0, jax.lax.igamma, (1,)), "uses igamma, which has no counterpart"),
    ],
)
def test_what_is_no_row_function(f, words):
    with pytest.raises(TypeError, match=r"jaxkern.row_kernel: mine.*(test_row_kernel.py)") as error:
        jaxkern.row_kernel(f, name="mine")(jnp.ones((4, 4)))
    assert words in str(error.value)
    said = [str(error.value), *getattr(error.value, "__notes__", ())]
    assert "".join(said).count("pass the result as an operand") == ("keepdims" not in words)


@pytest.mark.parametrize("maker", [jaxkern.row_kernel, jaxkern.elementwise_kernel])
def test_a_branch_in_python(maker):
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        maker(lambda x: x if x.max() > 0 else -x)(jnp.ones((4, 4)))
    assert "Write jnp.where in place of `if`" in "".join(error.value.__notes__)


def test_an_operation_has_the_name_that_jax_prints():
    search = lambda x: jnp.searchsorted(jnp.arange(4.0), x)
    jaxpr = str(jax.make_jaxpr(search)(jnp.ones((4, 4))))
    with pytest.raises(jaxkern.Unsupported) as error:
        jaxkern.row_kernel(search, name="mine")(jnp.ones((4, 4)))
    name = re.search(r"mine uses (\S+) ", str(error.value))[1]
    assert f" {name}[" in jaxpr


def test_gradients_of_a_number_and_its_place():
    """JAX has no derivative of lax.reduce with integers; the error says what to write, and that has one."""

    def larger(a, b):
        return jnp.maximum(a[0], b[0]), jnp.where(b[0] > a[0], b[1], a[1])

    def largest(x):
        at = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jax.lax.reduce((x, at), (-jnp.float32(jnp.inf), jnp.int32(0)), larger, (1,))

    def picked(x):
        return jnp.take_along_axis(x, largest(jax.lax.stop_gradient(x))[1][:, None], 1)[:, 0]

    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)), jnp.float32)
    with pytest.raises(TypeError) as error:
        jax.grad(lambda x: jaxkern.row_kernel(largest)(x)[0].sum())(x)
    assert "pick the element at the index" in "".join(error.value.__notes__)
    gradient = jax.grad(lambda x: jaxkern.row_kernel(picked)(x).sum())(x)
    np.testing.assert_array_equal(gradient, jax.nn.one_hot(jnp.argmax(x, 1), 5))


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda: jaxkern.row_kernel(3), TypeError, "f must be a function of arrays, got 3"),
        (lambda: jaxkern.row_kernel(jnp.sin, axis=(0, 1)), TypeError, "axis must be an int"),
        (
            lambda: jaxkern.row_kernel(jnp.sin, axis=2)(jnp.ones((2, 2))),
            ValueError,
            r"axis 2 is out of bounds for shape \(2, 2\)",
        ),
        (lambda: jaxkern.row_kernel(jnp.sin)(), TypeError, "at least one operand"),
        (lambda: jaxkern.row_kernel(lambda x: None)(jnp.ones(2)), ValueError, "must return at least one array"),
        (lambda: jaxkern.row_kernel(jnp.sin)("abc"), TypeError, "operand 0 must be an array or a number"),
        (lambda: jaxkern.row_kernel(jnp.sin)(jnp.ones((2, 2), jnp.complex64)), TypeError, "complex64"),
    ],
)
def test_bad_arguments(call, kind, words):
    with pytest.raises(kind, match=f"jaxkern.row_kernel.*{words}"):
        call()
