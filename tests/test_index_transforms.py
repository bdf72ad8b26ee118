"""Transformations that test_matrix.py leaves open: the index_add family under vmap of each operand, and in programs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import jet
from test_transforms import SHAPE, assert_same, compiled, equations, inputs

import jaxkern
from jaxkern._core import registry

INDEX = jnp.array([2, 0, 2, -3], jnp.int8)  # as many as rows, so that every operation keeps the shape; none of row 3
ALPHA = 0.7


# ---- vmap


@pytest.mark.parametrize(
    "x_at, index_at, source_at, alpha_at",
    [
        (0, 0, 0, None),
        (2, 1, 1, None),
        (None, 0, 0, None),
        (0, None, 0, None),
        (3, None, 1, None),
        (0, 0, None, None),
        (0, None, None, None),
        (None, 0, None, None),
        (None, None, 2, None),
        (None, None, None, 0),
        (1, 0, 2, 0),
        (3, 1, 0, None),
    ],
)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.sweep(5)
def test_vmap_of_every_operand(x_at, index_at, source_at, alpha_at, axis, x64):
    """Against a loop, gradients too: the batch may lie anywhere, in any of the operands."""
    rng, size, count = np.random.default_rng(0), 2, 6
    stack = lambda shape, at, draw: jnp.asarray(draw(shape if at is None else (*shape[:at], size, *shape[at:])))
    shape = (3, 4, 5)
    x = stack(shape, x_at, lambda s: rng.normal(size=s))
    index = stack((count,), index_at, lambda s: rng.integers(-6, 7, s))
    source = stack((*shape[:axis], count, *shape[axis + 1 :]), source_at, lambda s: rng.normal(size=s))
    alpha = stack((), alpha_at, lambda s: rng.normal(size=s))

    def everything(x, index, source, alpha):
        add = lambda x, source, alpha: jnp.sin(jaxkern.index_add(x, axis, index, source, alpha=alpha))
        y, pull = jax.vjp(add, x, source, alpha)
        plain = jnp.sin(jaxkern.index_add(x, axis, index, source))
        z, pull_select = jax.vjp(lambda x: jaxkern.index_select(x, axis, index, mode="clip"), x)
        return y, pull(jnp.cos(y)), plain, z, pull_select(jnp.cos(z))

    check_batched(everything, (x_at, index_at, source_at, alpha_at), x, index, source, alpha)


@pytest.mark.parametrize("source_at, index_at", [(0, 0), (1, 0), (2, 1), (None, 0), (0, None), (1, None), (2, None)])
@pytest.mark.parametrize("name", ["segment_sum", "segment_mean", "segment_max", "segment_min"])
@pytest.mark.sweep(3)
def test_vmap_of_segments(source_at, index_at, name, x64):
    rng, size = np.random.default_rng(0), 3
    stack = lambda shape, at, draw: jnp.asarray(draw(shape if at is None else (*shape[:at], size, *shape[at:])))
    source = stack((6, 5), source_at, lambda s: rng.normal(size=s))
    index = stack((6,), index_at, lambda s: rng.integers(-1, 5, s))

    def both(source, index):
        y, pull = jax.vjp(lambda s: getattr(jaxkern, name)(s, index, 4), source)
        y = jnp.where(jnp.isfinite(y), y, 0)
        return y, pull(jnp.cos(y))

    check_batched(both, (source_at, index_at), source, index)


def check_batched(f, in_axes, *operands):
    batched, single = jax.jit(jax.vmap(f, in_axes))(*operands), jax.jit(f)
    take = lambda a, at, k: a if at is None else jnp.take(a, k, at)
    size = next(a.shape[at] for a, at in zip(operands, in_axes) if at is not None)
    for k in range(size):
        alone = single(*(take(a, at, k) for a, at in zip(operands, in_axes)))
        assert_same(jax.tree.map(lambda b: b[k], batched), alone)


AXES = [(0, 0, 0), (None, 0, None), (0, None, 0), (1, 1, 1), (None, 0, 0)]


@pytest.mark.parametrize("outer", AXES)
@pytest.mark.parametrize("inner", AXES)
@pytest.mark.sweep(3)
def test_nested_vmap(inner, outer, x64):
    """Batches of indices over shared ones over batches of them, against a loop in a loop."""
    rng, sizes = np.random.default_rng(0), (2, 3)

    def stacked(shape, i, o):
        for at, size in ((i, sizes[0]), (o, sizes[1])):
            shape = shape if at is None else (*shape[:at], size, *shape[at:])
        return shape

    shapes = [stacked(s, i, o) for s, i, o in zip(((4, 3), (5,), (5, 3)), inner, outer)]
    x, source = jnp.asarray(rng.normal(size=shapes[0])), jnp.asarray(rng.normal(size=shapes[2]))
    index = jnp.asarray(rng.integers(-5, 6, shapes[1]))

    def f(x, index, source):
        y = jaxkern.index_add(x, 0, index, source)
        back = jax.vjp(lambda s: jaxkern.segment_sum(s, index, 4), source)[1](x)
        return y, jaxkern.index_select(x, 0, index, mode="clip"), jaxkern.segment_sum(source, index, 4), back

    batched = jax.jit(jax.vmap(jax.vmap(f, inner), outer))(x, index, source)
    single, take = jax.jit(f), lambda a, at, k: a if at is None else jnp.take(a, k, at)
    for o, i in np.ndindex(sizes[1], sizes[0]):
        operands = [take(take(a, ao, o), ai, i) for a, ai, ao in zip((x, index, source), inner, outer)]
        assert_same(jax.tree.map(lambda b: b[o, i], batched), single(*operands))


def test_vmap_moves_and_repeats_nothing():
    """Shared indices stay one index, whatever the batch; a source shared by a batch of indices stays one source."""
    x, source = jnp.ones((4, 7, 5)), jnp.ones((4, 6, 5))
    index, ids = jnp.zeros(6, jnp.int32), jnp.zeros((4, 6), jnp.int32)
    jaxpr = str(jax.make_jaxpr(jax.vmap(lambda x, i, s: jaxkern.index_add(x, 0, i, s), (0, None, 0)))(x, index, source))
    assert "transpose" not in jaxpr and "broadcast" not in jaxpr and "i32[4,6]" not in jaxpr
    jaxpr = str(jax.make_jaxpr(jax.vmap(lambda s, i: jaxkern.segment_sum(s, i, 7), (None, 0)))(source[0], ids))
    assert "f32[4,6,5]" not in jaxpr and "f32[4,7,5]" in jaxpr
    jaxpr = str(jax.make_jaxpr(jax.vmap(jaxkern.embedding_lookup, (None, 0)))(x[0], ids))
    assert "f32[4,7,5]" not in jaxpr and "f32[24,5]" in jaxpr and jaxpr.count("jaxkern_index_select") == 1


# ---- what becomes of it


@pytest.mark.parametrize(
    "f, names",
    [
        (lambda x: jaxkern.index_add(x, 1, INDEX, x), ["jaxkern_index_add"]),
        (lambda x: jaxkern.index_select(x, -1, INDEX), ["jaxkern_index_select"]),
        (lambda x: jaxkern.segment_sum(x, np.arange(3), 7), ["jaxkern_segment_sum"]),
        (lambda x: jaxkern.segment_max(x, np.arange(3), 7), ["jaxkern_segment_max"]),
    ],
)
def test_jaxpr_is_one_primitive(f, names):
    assert [e.primitive.name for e in equations(jax.make_jaxpr(f)(jnp.ones(SHAPE)).jaxpr)] == names


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_training_step_moves_nothing(dtype, axis):
    """A lookup and its gradient along any axis: one kernel each, without a transpose or a copy of the array."""
    if not (jax.default_backend() == "gpu" and registry.kernels.module):
        pytest.skip("kernels run on a GPU")
    x, index = jnp.ones((40, 50, 60), dtype), jnp.zeros(33, jnp.int32)
    loss = lambda x, w: (jaxkern.index_select(x, axis, index) * w).sum()
    text = compiled(jax.value_and_grad(loss), x, jaxkern.index_select(x, axis, index))
    assert text.count('custom_call_target="jaxkern_') == 2
    # A copy of a scalar is the loss on its way out.
    assert not [line for line in re.findall(r"= (\S+) (?:transpose|copy)\(", text) if re.search(r"\[\d", line)]


def test_types_survive():
    x, index = jnp.ones((4, 3), jnp.bfloat16), jnp.array([1, 1, 2])
    for f in (
        lambda x: jaxkern.index_add(x, 0, index, x[:3], alpha=x[0, 0]),
        lambda x: jaxkern.index_select(x, 0, index),
        lambda x: jaxkern.segment_mean(x[:3], index, 4),
        lambda x: jaxkern.segment_max(x[:3], index, 4),
    ):
        everything = lambda x: [
            f(x),
            jax.jvp(f, (x,), (x,)),
            jax.vjp(f, x)[1](f(x)),
            jax.hessian(lambda x: f(x).sum())(x),
        ]
        leaves = jax.tree.leaves(jax.eval_shape(everything, x))
        assert {leaf.dtype for leaf in leaves} == {x.dtype}
    assert not jax.eval_shape(lambda s: jaxkern.index_add(s[None], 0, index[:1], s[None]), 1.0).weak_type


def test_integers_have_no_derivative():
    x = jnp.arange(4)
    f = lambda w: (jaxkern.segment_sum(x, x, 4) * w).sum() + (jaxkern.index_add(x, 0, x, x) * w).sum()
    assert jax.grad(f)(2.0) == 18
    gradient = jax.grad(lambda x, i: jaxkern.index_select(x, 0, i).sum(), (0, 1), allow_int=True)(jnp.ones(4), x)
    assert gradient[1].dtype == jax.dtypes.float0 and (gradient[0] == 1).all()


def test_linear_transpose(x64):
    x, t = inputs((4, 3))
    for f in (
        lambda s: jaxkern.index_add(x, 0, INDEX, s, alpha=ALPHA) - x,
        lambda x: jaxkern.index_select(x, 0, INDEX),
        lambda s: jaxkern.segment_sum(s, INDEX, 4),
        lambda s: jaxkern.index_add(s, 0, INDEX, s),
    ):
        (transposed,) = jax.linear_transpose(f, x)(t) if f(0 * x).any() == 0 else (None,)
        np.testing.assert_allclose(jnp.vdot(f(x), t), jnp.vdot(x, transposed))
    (of_alpha,) = jax.linear_transpose(lambda a: jaxkern.index_add(0 * x, 0, INDEX, x, alpha=a), 1.0)(t)
    np.testing.assert_allclose(of_alpha, jnp.vdot(x, t[INDEX]))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jaxkern.index_add(jnp.cos(x), 0, INDEX, jnp.sin(x), alpha=jnp.tanh(x[0, 0])),
        lambda x: jaxkern.index_select(jnp.sin(x), 0, INDEX),
        lambda x: jaxkern.segment_sum(jnp.sin(x), INDEX, 4),
        lambda x: jaxkern.segment_softmax(jnp.sin(x), INDEX, 4),
        lambda x: jaxkern.segment_mean(jnp.sin(x), INDEX, 4),
    ],
    ids=["index_add", "index_select", "segment_sum", "softmax", "mean"],
)
def test_taylor_series(f, x64):
    """jax.experimental.jet, to the second order, against nested forward mode."""
    x, t = inputs((4, 3))
    first = lambda x: jax.jvp(f, (x,), (t,))[1]
    y, terms = jet.jet(f, (x,), ([t, jnp.zeros_like(t)],))
    assert_same([y, *terms], [f(x), *jax.jvp(first, (x,), (t,))])


def test_nans_are_found_in_debug_mode():
    with jax.debug_nans(True):
        assert jaxkern.index_select(jnp.ones(3), 0, jnp.array([1])) == 1
        with pytest.raises(FloatingPointError):
            jaxkern.index_select(jnp.ones(3), 0, jnp.array([5]))


def test_symbolic_shapes_export_and_run():
    """One exported program for every number of rows and indices, and for a platform that has no kernel."""
    rows, count = export.symbolic_shape("rows, count")
    names = ("index_add", "segment_sum", "segment_max", "index_select")
    here = {"cpu": "cpu", "gpu": "cuda"}[jax.default_backend()]

    def f(x, i):
        y = jaxkern.index_select(x, 0, i)
        rows = x.shape[0]
        return jaxkern.index_add(x, 0, i, y) + jaxkern.segment_sum(y, i, rows) + jaxkern.segment_max(y, i, rows)

    f = jax.jit(f)
    exported = export.export(
        f,
        platforms=[here, "tpu"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call(f"jaxkern_{n}") for n in names],
    )(jax.ShapeDtypeStruct((rows, 7), jnp.float32), jax.ShapeDtypeStruct((count,), jnp.int32))
    for n, c in ((1, 5), (4, 2)):
        x, i = jax.random.normal(jax.random.key(n), (n, 7)), jnp.arange(c) % n
        np.testing.assert_array_equal(exported.call(x, i), f(x, i))


GRAPHED = {  # one after the other in a program, each under scan
    "index_add": lambda x, i: jaxkern.index_add(x, 0, i % 64, jnp.sin(x)[i % 37]) * 0.5,
    "index_select": lambda x, i: jaxkern.index_select(x, 0, i[:64] % 64),
    "gradient": lambda x, i: jax.grad(lambda x: (jaxkern.index_select(x, 0, i % 64) ** 2).sum())(x) * 0.01,
    **{
        name: lambda x, i, name=name: getattr(jaxkern, name)(jnp.cos(x)[i % 37], i % 64, 64)
        for name in ("segment_sum", "segment_mean", "segment_max", "segment_min")
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GRAPHED)
def test_command_buffers_and_scan(name):
    """CUDA graphs run several calls in one program, and some under scan, three times, with other data each time."""
    f, index = GRAPHED[name], jnp.arange(5000) * 7

    def program(x):
        for k in range(4):
            x = f(x, index + k)
        return jax.lax.scan(lambda x, k: (f(x, index + k), x.sum()), x, jnp.arange(5))

    x = jax.random.normal(jax.random.key(0), (64, 16))
    compiled = jax.jit(program).lower(x).compile(compiler_options={"xla_gpu_graph_min_graph_size": 1})
    assert compiled.as_text().count('custom_call_target="jaxkern_') >= 5
    for scale in (1.0, 2.0, 0.5):
        with jax.disable_jit():
            want = program(x * scale)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), compiled(x * scale), want)
