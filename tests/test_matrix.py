"""Every operation under every transformation of JAX, against plain jnp under the same one, in float64.

Each operation is listed in CASES; the last test checks that every public function is.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from jax import export, lax
from jax.experimental import sparse
from jax.sharding import PartitionSpec as P
from test_index_transforms import ALPHA, INDEX
from test_transforms import MASKS, SHAPE, assert_same, functions, inputs, loss, mask_of

import jaxkern

# ---- the operations


ROWS = SHAPE[1]
IDS = INDEX % ROWS


def SOURCE():  # in the types of the test that asks
    return jnp.asarray(np.random.default_rng(3).normal(size=SHAPE))


def at(x):
    return x.at[:, INDEX]


def segments(module, name, s):
    """Along the axis, by vmap."""
    reduced = jax.vmap(lambda s: getattr(module, name)(s, IDS, ROWS))(s)
    return jnp.where(jnp.isfinite(reduced), reduced, 0)


def mean(s):
    count = jax.ops.segment_sum(jnp.ones(ROWS), IDS, ROWS)[:, None]
    return segments(jax.ops, "segment_sum", s) / jnp.maximum(count, 1)


def softmax_of_segments(s):
    """Along the axis, in jnp."""
    e = jnp.exp(s)
    return e / jnp.einsum("ij,bj...->bi...", (IDS[:, None] == IDS).astype(s.dtype), e)


def product_of_segments(s):
    return jnp.where((IDS == jnp.arange(ROWS)[:, None])[None, ..., None], s[:, None], 1).prod(2)


def ties(s):
    """Rows that are equal: 0 and 2 go to the same."""
    return s.at[:, 2].set(s[:, 0])


def filled(x):
    return x.at[:, INDEX + 2].get(mode="fill", fill_value=0)


LABELS = INDEX[:3, None] % SHAPE[2] * jnp.ones(SHAPE[1], INDEX.dtype)


def graph():
    return jaxkern.Graph(IDS, (IDS * 3 + 1) % (ROWS + 1), num_nodes=ROWS)


def messages(name, s):
    """Messages between rows of the middle dimension; at some rows no edge ends."""
    f = lambda x, y: x * jnp.cos(y)
    y = jax.vmap(lambda s: getattr(jaxkern, name)(f, graph(), senders=s, receivers=s))(s)
    return jnp.where(jnp.isfinite(y), y, 0)


def plain_messages(name, s):
    receivers = (IDS * 3 + 1) % (ROWS + 1)
    m = s[:, IDS] * jnp.cos(s[:, receivers % ROWS])
    if name == "edge_map":
        return jnp.where((receivers < ROWS)[:, None], m, 0)
    reduced = jax.vmap(
        lambda m: getattr(jax.ops, name.replace("edge_", "segment_").replace("mean", "sum"))(m, receivers, ROWS)
    )(m)
    count = jnp.maximum(jax.ops.segment_sum(jnp.ones(ROWS), receivers, ROWS), 1)[:, None]
    return jnp.where(jnp.isfinite(reduced), reduced, 0) / (count if name == "edge_mean" else 1)


SLOTS = np.stack([IDS, (IDS + 1) % (ROWS + 1)], 1)


def bags(f):
    """Bags of tables along the middle dimension, by vmap."""
    return lambda x: jax.vmap(f)(x)


def plain_bag(x):
    return jnp.where((SLOTS < ROWS)[..., None], x[SLOTS % ROWS], 0).sum(1)


def plain_dispatch(x):
    return jnp.zeros_like(x).at[SLOTS].add(x[:, None], mode="drop")


def attend(x):
    score = lambda x, y: jnp.sin(x + y)
    return jaxkern.graph_attention(score, graph(), x[..., None], senders=x, receivers=x)[..., 0]


def plain_attend(x):
    receivers = (IDS * 3 + 1) % (ROWS + 1)
    on = ((np.arange(ROWS)[:, None] == receivers) & (receivers < ROWS))[..., None]
    e = jnp.where(on, jnp.exp(jnp.sin(x[IDS] + x[receivers % ROWS])), 0)
    total = e.sum(1)
    return (e * x[IDS]).sum(1) / jnp.where(total == 0, 1, total)


def multiply(x):
    a = sparse.BCOO((jnp.cos(x[:, 0]), SLOTS % ROWS), shape=(ROWS, ROWS))
    return jaxkern.spmm(a, x)


def plain_multiply(x):
    at = SLOTS % ROWS
    return jnp.zeros_like(x).at[at[:, 0]].add(jnp.cos(x[:, :1]) * x[at[:, 1]])


def spread(f, x, where=None):
    """A reduction along the middle, in the shape of what is reduced, and small enough to have a root."""
    return jnp.broadcast_to(jnp.sin(f(x, axis=1, keepdims=True, where=where)), x.shape)


def with_initial(f, initial):
    return lambda x, where, **axis: f(x, where=where, initial=initial, **axis)


REDUCTIONS = {
    "reduce_sum": jnp.sum,
    "reduce_mean": jnp.mean,
    "reduce_max": with_initial(jnp.max, -1e30),
    "reduce_min": with_initial(jnp.min, 1e30),
    "logsumexp": jax.nn.logsumexp,
}


def masked_ties(operation):
    mask = mask_of((1, *SHAPE[1:]))
    return tuple(lambda x, f=f: spread(f, ties(x), mask) for f in (getattr(jaxkern, operation), REDUCTIONS[operation]))


def cross_entropy(x):
    return jnp.cos(x) * jnp.sin(jaxkern.softmax_cross_entropy(x, LABELS, label_smoothing=0.1)[..., None])


def plain_cross_entropy(x):
    logs = jax.nn.log_softmax(x)
    picked = jnp.take_along_axis(logs, LABELS[..., None], -1)
    return jnp.cos(x) * jnp.sin(-0.9 * picked - 0.1 * logs.mean(-1, keepdims=True))


EPS = 0.1  # small ones make derivatives of a high order large


def normalised(x):
    y, s = jaxkern.layer_norm(x, jnp.cos(x[0, 0]), x[1, 0], residual=jnp.cos(x), axis=(1, 2), eps=EPS)
    return y + 0.1 * s


def plain_normalised(x):
    s = x + jnp.cos(x)
    d = s - s.mean((1, 2), keepdims=True)
    return d * lax.rsqrt((d * d).mean((1, 2), keepdims=True) + EPS) * jnp.cos(x[0, 0]) + x[1, 0] + 0.1 * s


def grouped(groups, x):
    y = jaxkern.group_norm(x, groups, jnp.cos(x[0, :, 0]), x[1, :, 0], channel_axis=1, eps=EPS)
    return y + 0.1 * x


def plain_grouped(groups, x):
    wide = x.reshape(SHAPE[0], groups, -1)
    d = wide - wide.mean(-1, keepdims=True)
    y = (d * lax.rsqrt((d * d).mean(-1, keepdims=True) + EPS)).reshape(SHAPE)
    return y * jnp.cos(x[0, :, :1]) + x[1, :, :1] + 0.1 * x


def batch_normalised(x):
    y, mean, var = jaxkern.batch_norm(x, jnp.cos(x[0, 0]), x[1, 0], eps=EPS)
    return y + jnp.sin(mean) * var


def plain_batch_normalised(x):
    mean, var = x.mean((0, 1)), x.var((0, 1))
    return (x - mean) * lax.rsqrt(var + EPS) * jnp.cos(x[0, 0]) + x[1, 0] + jnp.sin(mean) * var


def linear_cross_entropy(ours, reduction, algorithm, x):
    """The loss of activations, a weight, a bias and weights of rows that all depend on x."""
    flat, weights = x.reshape(-1, SHAPE[2]), 1 + x[..., 0] ** 2
    weight, bias = jnp.cos(flat), jnp.sin(flat[:, 0])
    if ours:
        given = {"reduction": reduction, "transpose_weight": True, "soft_cap": 3.0, "memory": 1200}
        with jaxkern.algorithms.force(linear_softmax_cross_entropy=algorithm):
            found = jaxkern.linear_softmax_cross_entropy(x, weight, LABELS, bias, weights=weights, **given)
    else:
        logs = jax.nn.log_softmax(3 * jnp.tanh((x @ weight.T + bias) / 3))
        found = -weights * jnp.take_along_axis(logs, LABELS[..., None], -1)[..., 0]
        found = found if reduction == "none" else found.sum() / weights.sum()
    return jnp.cos(x) * jnp.sin(found[..., None] if reduction == "none" else found)


def scored(s, b, i, k, bias):
    return jnp.tanh(s + bias) - 0.1 * (i - k)


def scored_cross_entropy(x):
    loss = jaxkern.softmax_cross_entropy(x, LABELS, score=scored, score_args=[jnp.cos(x[:1])], z_loss=0.1)
    return jnp.cos(x) * jnp.sin(loss[..., None])


def plain_scored_cross_entropy(x):
    i, k = (jax.lax.broadcasted_iota(jnp.int32, SHAPE, d) for d in (1, 2))
    s = scored(x, 0, i, k, jnp.cos(x[:1]))
    lse = jax.nn.logsumexp(s, -1, keepdims=True)
    return jnp.cos(x) * jnp.sin(lse - jnp.take_along_axis(s, LABELS[..., None], -1) + 0.1 * lse**2)


def spread_median(f, x):
    return x * f(x, -1, keepdims=True)


def bins_of(f, x):
    return x * f(np.arange(x.size).reshape(x.shape) % 3, SHAPE[2], 0.1 * jnp.sin(x))


def plain_bincount(at, length, weights):
    return jnp.zeros(length, weights.dtype).at[at].add(weights)


def zeroed(x):
    return jnp.where(jnp.isfinite(x), x, 0)


def plain_top_p(x, p):
    at = jnp.argsort(-x)
    mass = jnp.take_along_axis(jax.nn.softmax(x), at, -1)
    least = jnp.min(jnp.where(jnp.cumsum(mass, -1) - mass < p, jnp.take_along_axis(x, at, -1), jnp.inf), -1)
    return jnp.where(x >= least[..., None], x, -jnp.inf)


def attention(x):
    scores = jnp.where(jnp.tril(jnp.ones(SHAPE[1:], bool), SHAPE[2] - SHAPE[1]), 0.7 * x + jnp.cos(x[:1]), -jnp.inf)
    return jax.nn.softmax(scores)


def curved(f):
    """A nonlinear function of the results of f, so that no derivative is zero."""
    return lambda x: f(jnp.sin(x) + 0.3 * x * x)


def masked(operation, kind):
    return functions(operation, mask_of(MASKS[kind]))


# Name (a public function, perhaps a comma and what is special) -> ours and theirs, functions of one array of
# SHAPE to one like it. A reduction is broadcast to it again. A case runs the first transformation of every column
# below, and all of them if it is in THOROUGH, which has one case of each kind of rule. In place of a pair stands a
# function that makes it, where it holds arrays.
CASES = {
    **{f"softmax, mask {kind}": functools.partial(masked, "softmax", kind) for kind in MASKS},
    "log_softmax, mask broadcast": functools.partial(masked, "log_softmax", "broadcast"),
    "softmax, fused": (lambda x: jaxkern.softmax(x, scale=0.7, bias=jnp.cos(x[:1]), causal=True), attention),
    **{f"{name}, masked ties": functools.partial(masked_ties, name) for name in REDUCTIONS},
    **{
        name: (functools.partial(spread, getattr(jaxkern, name)), functools.partial(spread, theirs))
        for name, theirs in REDUCTIONS.items()
        if name in ("reduce_max", "logsumexp")
    },
    "rms_norm": (
        lambda x: jaxkern.rms_norm(x, jnp.cos(x[0, 0]), eps=EPS),
        lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS) * jnp.cos(x[0, 0]),
    ),
    "rms_norm, epilogue": (
        lambda x: jaxkern.rms_norm(x, eps=EPS, epilogue=lambda v, a: jnp.sin(v) * a, epilogue_args=[jnp.cos(x[:1])]),
        lambda x: jnp.sin(x * lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS)) * jnp.cos(x[:1]),
    ),
    "scale_norm": (
        lambda x: jaxkern.scale_norm(x, x[0, 0]),
        lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True) * x[0, 0],
    ),
    "layer_norm, residual": (normalised, plain_normalised),
    "group_norm": tuple(functools.partial(f, 2) for f in (grouped, plain_grouped)),
    "batch_norm": (batch_normalised, plain_batch_normalised),
    "softmax_cross_entropy": (cross_entropy, plain_cross_entropy),
    "softmax_cross_entropy, score": (scored_cross_entropy, plain_scored_cross_entropy),
    "softmax_cross_entropy_and_grad": (
        lambda x: jaxkern.softmax_cross_entropy_and_grad(x, LABELS)[1],
        lambda x: jax.nn.softmax(x) - jax.nn.one_hot(LABELS, SHAPE[2]),
    ),
    **{
        f"linear_softmax_cross_entropy, {reduction}": tuple(
            functools.partial(linear_cross_entropy, ours, reduction, algorithm) for ours in (True, False)
        )
        for reduction, algorithm in (("mean", "vocabulary"), ("none", "rows"))
    },
    # With tanh: JAX 0.12 cannot differentiate erf inside shard_map.
    "gelu": (jaxkern.gelu, jax.nn.gelu),
    "swiglu": (lambda x: jaxkern.swiglu(x, gate=jnp.cos(x)), lambda x: x * jax.nn.silu(jnp.cos(x))),
    "index_add, x": (
        lambda x: jaxkern.index_add(x, 1, INDEX, SOURCE(), alpha=ALPHA),
        lambda x: at(x).add(ALPHA * SOURCE()),
    ),
    "index_add, source": (lambda s: jaxkern.index_add(SOURCE(), 1, INDEX, s), lambda s: at(SOURCE()).add(s)),
    "index_add, all": (
        lambda s: jaxkern.index_add(s, 1, INDEX, jnp.cos(s), alpha=s.mean()),
        lambda s: at(s).add(jnp.cos(s) * s.mean()),
    ),
    "index_select": (lambda x: jaxkern.index_select(x, 1, INDEX), lambda x: x[:, INDEX]),
    "index_select, filled": (lambda x: jnp.nan_to_num(jaxkern.index_select(x, 1, INDEX + 2)), filled),
    "embedding_lookup": (lambda x: jaxkern.embedding_lookup(x, IDS[:3]), lambda x: x[IDS[:3]]),
    "segment_sum": (lambda s: segments(jaxkern, "segment_sum", s), lambda s: segments(jax.ops, "segment_sum", s)),
    "segment_mean": (lambda s: segments(jaxkern, "segment_mean", s), mean),
    "segment_max, ties": (
        lambda s: segments(jaxkern, "segment_max", ties(s)),
        lambda s: segments(jax.ops, "segment_max", ties(s)),
    ),
    "segment_min": (lambda s: segments(jaxkern, "segment_min", s), lambda s: segments(jax.ops, "segment_min", s)),
    "segment_prod": (lambda s: segments(jaxkern, "segment_prod", s), product_of_segments),
    "segment_softmax": (lambda s: segments(jaxkern, "segment_softmax", s), softmax_of_segments),
    **{
        name: (functools.partial(messages, name), functools.partial(plain_messages, name))
        for name in ("edge_sum", "edge_mean", "edge_max", "edge_min", "edge_map")
    },
    "embedding_bag": (bags(lambda x: jaxkern.embedding_bag(x, SLOTS)), bags(plain_bag)),
    "moe_combine": (bags(lambda x: jaxkern.moe_combine(x, SLOTS)), bags(plain_bag)),
    "moe_dispatch": (bags(lambda x: jaxkern.moe_dispatch(x, SLOTS, ROWS)), bags(plain_dispatch)),
    "graph_attention": (bags(attend), bags(plain_attend)),
    "spmm": (bags(multiply), bags(plain_multiply)),
    "top_k": (lambda x: jaxkern.top_k(x, SHAPE[1], 1)[0], lambda x: -jnp.sort(-x, 1)),
    "top_p": (lambda x: zeroed(jaxkern.top_p(x, 0.7)), lambda x: zeroed(plain_top_p(x, 0.7))),
    "sort": (
        lambda x: jaxkern.sort(x, 1, descending=True) * jaxkern.sort(jnp.cos(x)),
        lambda x: -jnp.sort(-x, 1) * jnp.sort(jnp.cos(x)),
    ),
    "sort_pairs": (
        lambda x: jaxkern.sort_pairs(jnp.cos(x), x)[1],
        lambda x: jnp.take_along_axis(x, jnp.argsort(jnp.cos(x)), -1),
    ),
    "unique": (
        lambda x: x * jaxkern.unique(jnp.stack([x, x]), SHAPE[2]),
        lambda x: x * jnp.sort(x.reshape(-1))[: SHAPE[2]],
    ),
    "median": (functools.partial(spread_median, jaxkern.median), functools.partial(spread_median, jnp.median)),
    "quantile": (lambda x: x * jaxkern.quantile(x, 0.3, 1)[:, None], lambda x: x * jnp.quantile(x, 0.3, 1)[:, None]),
    "bincount": (lambda x: bins_of(jaxkern.bincount, x), lambda x: bins_of(plain_bincount, x)),
    "histogram": (
        lambda x: x * jaxkern.histogram(jnp.sin(x), 5, (-1, 1), 0.1 * jnp.cos(x))[0],
        lambda x: x * jnp.histogram(jnp.sin(x), 5, (-1, 1), 0.1 * jnp.cos(x))[0],
    ),
    "min_p": (
        lambda x: zeroed(jaxkern.min_p(x, 0.3)),
        lambda x: jnp.where(x >= x.max(-1, keepdims=True) + np.log(0.3), x, 0),
    ),
}
THOROUGH = ("softmax, mask broadcast", "index_add, all", "segment_max, ties", "edge_sum")


def case(name):
    pair = CASES[name]
    return tuple(map(curved, pair() if callable(pair) else pair))


# ---- the transformations


def _while(f):
    def body(state):
        k, x = state
        return k + 1, f(x) + 0.1 * x

    return lambda x: lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]


def _root(f):
    """y with y = x + f(y) / 10, nearly, differentiated as the root that it is."""

    def solve(g, y):
        return lax.fori_loop(0, 6, lambda _, y: y - g(y), y)

    def tangent_solve(g, b):  # without a loop, which JAX before 0.10 cannot transpose here
        z = b
        for _ in range(3):
            z = z + b - g(z)
        return z

    def root(x):
        return lax.custom_root(lambda y: y - 0.1 * f(y) - x, x, solve, tangent_solve)

    return root


def _mapped(f):
    """Over one device; which axes a value varies over is checked all the same."""
    mesh = jax.make_mesh((1,), ("r",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    return jax.shard_map(f, mesh=mesh, in_specs=P("r"), out_specs=P("r"))


def _exported(f):
    return export.export(jax.jit(f), disabled_checks=jaxkern.export_checks())


def three(x, t):
    return jnp.stack([x, t, -x])


def _remat(policy):
    return lambda f, x, t: jax.grad(loss(jax.checkpoint(lambda x: f(jnp.cos(f(x))), policy=policy), t))(x)


# Column of the table -> name -> a function of (f, x, t), with f from an array to one of its shape.
TRANSFORMATIONS = {
    "jit": {
        "jit": lambda f, x, t: jax.jit(f)(x),
        "eager": lambda f, x, t: f(x),
    },
    "grad": {
        "grad": lambda f, x, t: jax.grad(loss(f, t))(x),
        "vjp": lambda f, x, t: jax.vjp(f, x)[1](t),
        "grad, eager": lambda f, x, t: jax.grad(loss(f, t))(x),
        "jit of grad": lambda f, x, t: jax.jit(jax.grad(loss(f, t)))(x),
        "grad of jit": lambda f, x, t: jax.grad(loss(jax.jit(f), t))(x),
        "nested": lambda f, x, t: jax.grad(lambda x: jnp.sum(f(jnp.tanh(f(x))) * t))(x),
        "gradient in the cotangent": lambda f, x, t: jax.grad(lambda g: jnp.sum(jnp.sin(jax.vjp(f, x)[1](g)[0])))(t),
    },
    "jvp": {
        "jvp": lambda f, x, t: jax.jvp(f, (x,), (t,)),
        "jvp, eager": lambda f, x, t: jax.jvp(f, (x,), (t,)),
        "symbolic zero": lambda f, x, t: jax.jvp(lambda x, s: f(x) * s, (x, 2.0), (jnp.zeros_like(x), 1.0))[1],
        "has no tangent": lambda f, x, t: jax.jvp(lambda s: f(x) * s, (2.0,), (1.0,)),
        "gradient in the tangent": lambda f, x, t: jax.grad(lambda d: jnp.sum(jnp.sin(jax.jvp(f, (x,), (d,))[1])))(t),
        "third order, forward": lambda f, x, t: jax.jvp(
            lambda x: jax.jvp(lambda x: jax.jvp(f, (x,), (t,))[1], (x,), (t,))[1], (x,), (t,)
        )[1],
    },
    "linearize": {"linearize": lambda f, x, t: jax.linearize(f, x)[1](t)},
    "linear_transpose": {
        "of vjp": lambda f, x, t: jax.linear_transpose(lambda g: jax.vjp(f, x)[1](g)[0], x)(t),
        "of jvp": lambda f, x, t: jax.linear_transpose(lambda d: jax.jvp(f, (x,), (d,))[1], x)(t),
    },
    "jacfwd": {
        "jacfwd": lambda f, x, t: jax.jacfwd(f)(x),
        "jacfwd of jacfwd": lambda f, x, t: jax.jacfwd(jax.jacfwd(loss(f, t)))(x),
    },
    "jacrev": {
        "jacrev": lambda f, x, t: jax.jacrev(f)(x),
        "jacrev of jacrev": lambda f, x, t: jax.jacrev(jax.jacrev(loss(f, t)))(x),
        "jacrev of jacfwd": lambda f, x, t: jax.jacrev(jax.jacfwd(loss(f, t)))(x),
    },
    "hessian": {
        "hessian": lambda f, x, t: jax.hessian(loss(f, t))(x),
        "product, forward over reverse": lambda f, x, t: jax.jvp(jax.grad(loss(f, t)), (x,), (t,))[1],
        "product, reverse over forward": lambda f, x, t: jax.grad(lambda x: jax.jvp(loss(f, t), (x,), (t,))[1])(x),
        "product, reverse over reverse": lambda f, x, t: jax.grad(lambda x: jnp.sum(jax.grad(loss(f, t))(x) * t))(x),
        "third order": lambda f, x, t: jax.grad(
            lambda x: jax.jvp(lambda x: jnp.sum(jax.grad(loss(f, t))(x) * t), (x,), (t,))[1]
        )(x),
    },
    "vmap": {
        "every in_axes": lambda f, x, t: [jax.vmap(f, k, (k + 1) % 4)(jnp.stack([x, t], k)) for k in range(4)],
        "nested": lambda f, x, t: jax.vmap(jax.vmap(f, 1, 2), 3, 0)(
            jnp.stack([three(x, t), three(t, x)], 3).swapaxes(0, 1)
        ),
        "of jvp": lambda f, x, t: jax.vmap(lambda d: jax.jvp(f, (x,), (d,))[1])(three(x, t)),
        "of vjp": lambda f, x, t: jax.vmap(jax.vjp(f, x)[1])(three(x, t)),
        "of Hessian product": lambda f, x, t: jax.vmap(lambda d: jax.jvp(jax.grad(loss(f, t)), (x,), (d,))[1])(
            jnp.stack([x, t])
        ),
    },
    "vmap∘grad": {
        "vmap of grad": lambda f, x, t: jax.vmap(lambda x, t: jax.grad(loss(f, t))(x))(three(x, t), three(t, x))
    },
    "grad∘vmap": {
        "grad of vmap": lambda f, x, t: jax.grad(lambda xs: jnp.sum(jnp.sin(jax.vmap(f)(xs)) * t))(three(x, t))
    },
    "remat": {
        "nothing saved": _remat(jax.checkpoint_policies.nothing_saveable),
        "no policy": _remat(None),
        "everything saved": _remat(jax.checkpoint_policies.everything_saveable),
        "products saved": _remat(jax.checkpoint_policies.dots_saveable),
    },
    "scan": {
        "grad of scan": lambda f, x, t: jax.grad(
            lambda x: jnp.sum(lax.scan(lambda c, d: (f(c + d), f(c)), x, jnp.stack([t, -t]))[1] * t)
        )(x),
        "scan": lambda f, x, t: lax.scan(lambda c, d: (f(c + d), f(c - d).sum()), x, three(t, x)),
    },
    "while": {
        "jvp of while": lambda f, x, t: jax.jvp(_while(f), (x,), (t,)),
        "while": lambda f, x, t: _while(f)(x),
    },
    "cond": {
        "grad of cond": lambda f, x, t: jax.grad(lambda x: jnp.sum(lax.cond(x[0, 0, 0] > 0, f, jnp.sin, x) * t))(x),
        "either branch": lambda f, x, t: [
            lax.cond(p, f, lambda x: 2 * f(-x), x) for p in (x.sum() > t.sum(), x.sum() <= t.sum())
        ],
    },
    "custom_root": {"grad of custom_root": lambda f, x, t: jax.value_and_grad(loss(_root(f), t))(x)},
    "shard_map": {"grad of shard_map": lambda f, x, t: jax.value_and_grad(loss(_mapped(f), t))(x)},
    "donation": {"donation": lambda f, x, t: jax.jit(f, donate_argnums=0)(x + 0)},
    "export": {
        "export": lambda f, x, t: _exported(f)(x).call(x),
        "export of vjp": lambda f, x, t: _exported(lambda x, t: jax.vjp(f, x)[1](t))(x, t).call(x, t),
    },
}
# These are about what happens outside of a program; all others of a test are one program. The reference needs no other but an export.
EXPORTS = ("export", "export of vjp")
OUTSIDE_JIT = ("jit", "eager", "grad, eager", "jvp, eager", "donation", *EXPORTS)


def check(f, g, transformations):
    x, t = inputs()
    results = []
    for h, outside in ((f, OUTSIDE_JIT), (g, EXPORTS)):
        inside = {k: v for k, v in transformations.items() if k.split(": ")[1] not in outside}
        program = jax.jit(lambda x, t, h=h, inside=inside: {name: run(h, x, t) for name, run in inside.items()})
        results.append(
            program(x, t) | {name: run(h, x, t) for name, run in transformations.items() if name not in inside}
        )
    ours, theirs = results
    assert ours.keys() == theirs.keys() == transformations.keys()
    for name in transformations:
        largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(theirs[name]))
        assert largest > 1e-3, f"{name}: nothing is compared"
        try:
            assert_same(ours[name], theirs[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("column", TRANSFORMATIONS)
@pytest.mark.parametrize("name", THOROUGH)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_every_transformation(name, column, x64):
    check(*case(name), {f"{column}: {k}": run for k, run in TRANSFORMATIONS[column].items()})


@pytest.mark.parametrize("name", [name for name in CASES if name not in THOROUGH])
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_first_transformation_of_every_column(name, x64):
    """Without a GPU, each case runs every sixth column, and the next case the next ones."""
    first, step = (0, 1) if ON_GPU else (list(CASES).index(name) % 6, 6)
    columns = list(TRANSFORMATIONS.items())[first::step]
    check(*case(name), {f"{column}: {next(iter(runs))}": next(iter(runs.values())) for column, runs in columns})


# ---- every public function is among the cases


def test_every_public_function_is_listed():
    listed = {name.split(",")[0] for name in CASES}
    # Elementwise operations share their rules; tests/test_elementwise.py tests all of them. tests/test_elementwise_kernel.py,
    # test_row_kernel.py, test_scan.py, test_while_loop.py and test_cumulative.py test user functions. An order has no derivative.
    others = {
        "elementwise_kernel",
        "row_kernel",
        "scan",
        "while_loop",
        "linear_recurrence",
        "associative_scan",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "cumlogsumexp",
        "exponential_moving_average",
        "discounted_returns",
        "advantages",
        "algorithms",
        "export_checks",
        # Without a derivative, or with the derivative of x: tested in tests/test_quantize.py and test_quantize_fused.py.
        "DelayedScale",
        "Quantization",
        "quantize_rows",
        "quantize_blocks",
        "quantize_tensor",
        "dequantize",
        "fake_quantize",
        "sort_indices",
        "Routing",  # tests/test_select.py tests the two functions that follow
        "moe_route",
        "sample",
        "argsort",
        "searchsorted",
        "Order",
        "spmm_graph",
        "Graph",
        *jaxkern.elementwise.NAMES,
    }
    others |= {"accelerate", "explain", "install", "installed", "uninstall", "CheckError"}  # which run programs
    others |= {"source", "benchmark"}  # which show and time programs
    public = set(jaxkern.__all__) - others
    assert listed - set(jaxkern.elementwise.NAMES) == public and len(listed) > len(public)
