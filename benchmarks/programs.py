"""Whole programs that do not name jaxkern: a training step plain, and under `jaxkern.accelerate()`.

    python -m benchmarks programs                              every program
    python -m benchmarks programs --cases 'graph.*uniform'     those whose name matches
    python -m benchmarks programs --explain                    what would be taken on a GPU, without one
    python -m benchmarks programs --only default,log_softmax --only scatter_add
                                                               beside the default, also under accelerate(only=...)
    python -m benchmarks programs --tune                       beside the default, also under accelerate(tune=True)
    python -m benchmarks programs --deterministic              also under accelerate(deterministic=True), in 100 runs
    python -m benchmarks programs --pyg 30                     PyTorch Geometric for 30 s per model; 0 leaves it out

Graph convolution and attention, an interaction network, a potential with forces, an embedding with a dense layer, a
click model with bags of ids, a classifier over a large vocabulary, and programs of loops (a recurrent layer, state
space layers, advantages, random walks, oscillators, an adaptive integrator) are written in plain JAX and optax. Where
their libraries are installed, there are also the same with jraph and flax.linen, a mesh simulator of flax.linen,
transformers of flax.nnx, equinox and haiku, optimal transport with ott-jax, molecular dynamics with jax-md, and a
hierarchical model with NumPyro. Steps are enqueued one after the other and timed by the host's clock; the time of the
device and the memory of the step are beside it. Where PyTorch Geometric is installed, the graph networks run in it,
too. Indices are arguments of the step: XLA folds scatters of constants for half a minute.

Runs that are started side by side compile together, and measure one after the other when all have compiled. Regions are
timed for `tune` while nothing else runs.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from benchmarks import _by_hand, _geometric, _goals, _loops, _packages, _report, _run, _timing, _torch
from jaxkern._core import switch

OPERATION = "programs"
SAMPLE = 0.2  # seconds of work, at least, that one reading of the clock is about
LATER = 5.0  # seconds that the first accelerated step may take longer
LARGER = 1.02  # memory of the accelerated step over the plain one's, at most
RUNS, SLOWER = 100, 1.2  # equal runs with sums in a fixed order, and their time over the plain program's, at most
TRACED, KERNELS = 3, 16  # steps whose kernels are traced, and how many kinds of kernels are kept


@dataclasses.dataclass(frozen=True)
class Training:
    """init(): parameters and state of the optimizer; step(state, *data): the next state, and the loss.

    params(key): parameters, None if there are none; begin(params): what `init` returns, from these.
    """

    init: Callable[[], Any]
    step: Callable[..., Any]
    data: tuple[np.ndarray, ...]
    params: Callable[[Any], Any] | None = None
    begin: Callable[[Any], Any] = lambda params: params

    def specs(self) -> tuple[Any, ...]:
        dtype = lambda a: jax.dtypes.canonicalize_dtype(a.dtype, allow_extended_dtype=True)
        of = lambda tree: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype(a)), tree)
        return of(jax.eval_shape(self.init)), *of(self.data)


@dataclasses.dataclass(frozen=True)
class Program:
    """required: plain time over accelerated. endless: how the plain program did not end, where it is not run on a GPU."""

    name: str
    dtype: str
    make: Callable[[str, bool], Training]
    required: float = 0.97
    endless: str = ""
    package: str = ""  # that it is written with
    pyg: str = ""  # the same model in benchmarks/_geometric.py


def _optimized(optimizer, loss, make_params, data) -> Training:
    begin = lambda params: (params, optimizer.init(params))
    init = lambda: begin(make_params(jax.random.key(0)))

    def step(state, *data):
        import optax

        params, moments = state
        value, gradient = jax.value_and_grad(loss)(params, *data)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return Training(init, step, data, make_params, begin)


def _zipf(rng, exponent, shape, below):
    return ((rng.zipf(exponent, shape) - 1) % below).astype(np.int32)


def _matrices(key, shapes):
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, shapes)]


def _loss_of(apply, dtype):
    """Cross-entropy of `apply(params, x, ...)`, in `dtype`, with master weights in float32."""
    import optax

    def loss(params, x, labels, *rest):
        params = jax.tree.map(lambda a: a.astype(dtype), params)
        logits = apply(params, x.astype(dtype), *rest).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


# --- graphs --------------------------------------------------------------------------------------


def _graph(small, zipf, features=128, classes=40):
    """ogbn-arxiv's size: 169 343 nodes and 1.17 million edges, and each node's edge to itself."""
    rng = np.random.default_rng(0)
    nodes, edges = (300, 2000) if small else (169_343, 1_166_243)
    senders = rng.integers(0, nodes, edges)
    receivers = _zipf(rng, 1.5, edges, nodes) if zipf else rng.integers(0, nodes, edges)
    own = np.arange(nodes)
    x = rng.normal(size=(nodes, features)).astype(np.float32)
    labels = rng.integers(0, classes, nodes).astype(np.int32)
    with_own = lambda a: np.concatenate([a, own]).astype(np.int32)
    return x, labels, with_own(senders), with_own(receivers)


def _convolution(layer, dtype, small, zipf) -> Training:
    import optax

    data = _graph(small, zipf)
    sizes = [128, 16, 40] if small else [128, 256, 256, 40]

    def apply(params, x, senders, receivers):
        for k, w in enumerate(params):
            x = layer(x if k == 0 else jax.nn.relu(x), w, senders, receivers)
        return x

    shapes = list(zip(sizes, sizes[1:]))
    return _optimized(optax.adam(1e-3), _loss_of(apply, dtype), lambda key: _matrices(key, shapes), data)


def _plain_layer(x, w, senders, receivers):
    nodes = x.shape[0]
    degree = lambda ids: jax.ops.segment_sum(jnp.ones(ids.shape, x.dtype), ids, nodes)
    norm = lambda ids: jax.lax.rsqrt(jnp.maximum(degree(ids), 1))[:, None]
    sums = jax.ops.segment_sum(((x @ w) * norm(senders))[senders], receivers, nodes)
    return sums * norm(receivers)


def _jraph_graph(x, senders, receivers, edges=None):
    import jraph

    count = lambda n: jnp.array([n])
    return jraph.GraphsTuple(x, edges, receivers, senders, None, count(x.shape[0]), count(senders.shape[0]))


def _jraph_layer(x, w, senders, receivers):
    import jraph

    layer = jraph.GraphConvolution(update_node_fn=lambda h: h @ w, add_self_edges=False)
    return layer(_jraph_graph(x, senders, receivers)).nodes


def _attention_layer(x, w, a, senders, receivers):
    nodes = x.shape[0]
    h = x @ w
    score = jax.nn.leaky_relu(jnp.concatenate([h[senders], h[receivers]], 1) @ a, 0.2)
    e = jnp.exp(score - jax.ops.segment_max(score, receivers, nodes)[receivers])
    weights = e / jax.ops.segment_sum(e, receivers, nodes)[receivers]
    return jax.ops.segment_sum(h[senders] * weights, receivers, nodes)


def _jraph_attention_layer(x, w, a, senders, receivers):
    import jraph

    score = lambda s, r, edges: jax.nn.leaky_relu(jnp.concatenate([s, r], 1) @ a, 0.2)
    return jraph.GAT(lambda h: h @ w, score)(_jraph_graph(x, senders, receivers)).nodes


def _attention(layer, dtype, small) -> Training:
    import optax

    d = 8 if small else 64

    def apply(params, x, senders, receivers):
        w1, a1, w2, a2 = params
        return layer(layer(x, w1, a1, senders, receivers), w2, a2, senders, receivers)

    shapes = [(128, d), (2 * d, 1), (d, 40), (80, 1)]
    data = _graph(small, zipf=True)
    return _optimized(optax.adam(1e-3), _loss_of(apply, dtype), lambda key: _matrices(key, shapes), data)


def _interaction(dtype, small) -> Training:
    """A network as in mesh simulators: an edge's network, sums at receivers, a node's network, five rounds."""
    import optax

    rng = np.random.default_rng(0)
    n, e, d = (200, 1000, 16) if small else (100_000, 600_000, 128)
    ids = lambda: rng.integers(0, n, e).astype(np.int32)
    x, edges = (rng.normal(size=(k, d)).astype(np.float32) for k in (n, e))
    labels = rng.integers(0, 16, n).astype(np.int32)

    def apply(params, x, senders, receivers, edges):
        *rounds, out = params
        edges = edges.astype(x.dtype)
        for k in range(0, len(rounds), 4):
            a, b, c, f = rounds[k : k + 4]
            edges = jax.nn.relu(jnp.concatenate([edges, x[senders], x[receivers]], -1) @ a) @ b
            sums = jax.ops.segment_sum(edges, receivers, x.shape[0])
            x = jax.nn.relu(jnp.concatenate([x, sums], -1) @ c) @ f
        return x @ out

    shapes = [(3 * d, d), (d, d), (2 * d, d), (d, d)] * (2 if small else 5) + [(d, 16)]
    data = (x, labels, ids(), ids(), edges)
    return _optimized(optax.adam(1e-3), _loss_of(apply, dtype), lambda key: _matrices(key, shapes), data)


def _linen_mesh(dtype, small) -> Training:
    """A mesh simulator (MeshGraphNets, Pfaff et al. 2021): networks with LayerNorm on edges and nodes of a grid of triangles."""
    import flax.linen as nn
    import optax

    side, d, rounds = (12, 16, 1) if small else (200, 128, 15)
    types = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.float32}
    network = lambda: nn.Sequential(
        [nn.Dense(d, **types), nn.relu, nn.Dense(d, **types), nn.relu, nn.Dense(d, **types), nn.LayerNorm(**types)]
    )

    class Simulator(nn.Module):
        @nn.compact
        def __call__(self, nodes, edges, senders, receivers):
            x, e = network()(nodes), network()(edges)
            for _ in range(rounds):
                e = e + network()(jnp.concatenate([e, x[senders], x[receivers]], -1))
                sums = jax.ops.segment_sum(e, receivers, x.shape[0])
                x = x + network()(jnp.concatenate([x, sums], -1))
            return nn.Dense(2, **types)(nn.relu(nn.Dense(d, **types)(x)))

    rng = np.random.default_rng(0)
    at = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), -1).reshape(-1, 2)
    steps = np.array([(0, 1), (1, 0), (1, 1)])
    to = at[:, None] + steps
    one, step = np.nonzero((to < side).all(-1))
    other = to[one, step] @ np.array([side, 1])
    ends = rng.permutation(side * side).astype(np.int32)[np.stack([one, other])]  # a mesher's numbers have no order
    senders, receivers = np.concatenate([ends, ends[::-1]], 1)
    nodes = rng.normal(size=(side * side, 11)).astype(np.float32)
    edges = rng.normal(size=(senders.size, 7)).astype(np.float32)
    wanted = rng.normal(size=(side * side, 2)).astype(np.float32)
    model = Simulator()

    def init(key):
        few = (jnp.zeros((2, 11)), jnp.zeros((3, 7)), jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32))
        return model.init(key, *few)

    def loss(params, nodes, edges, senders, receivers, wanted):
        return jnp.square(model.apply(params, nodes, edges, senders, receivers).astype(jnp.float32) - wanted).mean()

    return _optimized(optax.adam(1e-4), loss, init, (nodes, edges, senders, receivers, wanted))


def _potential(dtype, small) -> Training:
    """Energies and forces of molecules by continuous filters (SchNet, Schuett et al. 2017); forces are a gradient."""
    import optax

    molecules, atoms, neighbours, d, radial, rounds = (3, 8, 4, 16, 6, 1) if small else (256, 80, 30, 128, 50, 3)
    rng = np.random.default_rng(0)
    n, cutoff = molecules * atoms, 5.0
    kinds = rng.integers(0, 10, n).astype(np.int32)
    places = rng.uniform(0, 8, (n, 3)).astype(np.float32)
    own = np.repeat(np.arange(n), neighbours)
    senders = (own // atoms * atoms + (own + rng.integers(1, atoms, own.size)) % atoms).astype(np.int32)
    molecule = (np.arange(n) // atoms).astype(np.int32)
    energies, forces = (rng.normal(size=s).astype(np.float32) for s in (molecules, (n, 3)))
    centres = np.linspace(0, cutoff, radial, dtype=np.float32)

    def energy(params, places, kinds, senders, receivers, molecule):
        table, *layers, out1, out2 = params
        across = places[senders] - places[receivers]
        distance = jnp.sqrt(jnp.square(across).sum(-1) + 1e-6)
        window = 0.5 * (jnp.cos(jnp.pi * jnp.minimum(distance, cutoff) / cutoff) + 1)
        basis = jnp.exp(-10 * jnp.square(distance[:, None] - centres)).astype(dtype)
        x = table[kinds]
        for k in range(0, len(layers), 4):
            a, b, c, f = layers[k : k + 4]
            weights = (jax.nn.silu(basis @ a) @ b) * window[:, None].astype(dtype)
            sums = jax.ops.segment_sum((x @ c)[senders] * weights, receivers, x.shape[0])
            x = x + jax.nn.silu(sums) @ f
        atomic = (jax.nn.silu(x @ out1) @ out2)[:, 0].astype(jnp.float32)
        return jax.ops.segment_sum(atomic, molecule, molecules)

    def loss(params, places, kinds, senders, receivers, molecule, energies, forces):
        params = jax.tree.map(lambda a: a.astype(dtype), params)
        rest = kinds, senders, receivers, molecule
        found, pull = jax.vjp(lambda p: energy(params, p, *rest), places)
        (gradient,) = pull(jnp.ones_like(found))
        return jnp.square(found - energies).mean() + jnp.square(gradient + forces).mean()

    shapes = [(10, d), *[(radial, d), (d, d), (d, d), (d, d)] * rounds, (d, d), (d, 1)]
    data = (places, kinds, senders, own.astype(np.int32), molecule, energies, forces)
    return _optimized(optax.adam(1e-3), loss, lambda key: _matrices(key, shapes), data)


# --- embeddings and classes ----------------------------------------------------------------------


def _tokens(small):
    rng = np.random.default_rng(0)
    rows, shape = (500, (4, 32)) if small else (128_256, (16, 1024))
    return rows, _zipf(rng, 1.3, shape, rows), rng.integers(0, 64, shape).astype(np.int32)


def _embedding(dtype, small) -> Training:
    import optax

    rows, ids, labels = _tokens(small)
    d = 32 if small else 2048

    def params(key):
        table, dense, out = _matrices(key, [(rows, d), (d, d), (d, 64)])
        return jax.tree.map(lambda a: a.astype(dtype), {"table": table, "dense": dense, "out": out})

    def loss(p, ids, labels):
        logits = jax.nn.relu(p["table"][ids] @ p["dense"]) @ p["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

    return _optimized(optax.sgd(1e-2), loss, params, (ids, labels))


def _linen_embedding(dtype, small) -> Training:
    import flax.linen as nn
    import optax

    rows, ids, labels = _tokens(small)
    d = 32 if small else 2048
    types = {"dtype": dtype, "param_dtype": dtype}
    model = nn.Sequential([nn.Embed(rows, d, **types), nn.Dense(d, **types), nn.relu, nn.Dense(64, **types)])

    def loss(p, ids, labels):
        logits = model.apply(p, ids).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return _optimized(optax.sgd(1e-2), loss, lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32)), (ids, labels))


def _clicks(dtype, small) -> Training:
    """Eight bags of twenty ids for each example."""
    import optax

    rng = np.random.default_rng(0)
    tables, rows, d, examples, bag = (2, 300, 16, 64, 5) if small else (8, 500_000, 64, 32_768, 20)
    ids = _zipf(rng, 1.2, (tables, examples, bag), rows)
    clicked = rng.integers(0, 2, examples).astype(np.float32)

    def params(key):
        keys = jax.random.split(key, tables + 1)
        table = lambda k: (jax.random.normal(k, (rows, d)) * 0.01).astype(dtype)
        return {"tables": [table(k) for k in keys[1:]], "w": jax.random.normal(keys[0], (tables * d, 1)) * 0.05}

    def loss(p, ids, clicked):
        bags = [t[i].sum(1).astype(jnp.float32) for t, i in zip(p["tables"], ids)]
        logits = (jax.nn.relu(jnp.concatenate(bags, -1)) @ p["w"])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, clicked).mean()

    return _optimized(optax.adagrad(1e-2), loss, params, (ids, clicked))


def _classifier(dtype, small) -> Training:
    """The head of a language model: a matrix product and the loss over its vocabulary."""
    import optax

    rng = np.random.default_rng(0)
    tokens, d, classes = (64, 16, 500) if small else (8192, 768, 50_257)
    x = rng.normal(size=(tokens, d)).astype(np.float32)
    labels = rng.integers(0, classes, tokens).astype(np.int32)

    def loss(p, x, labels):
        logits = x.astype(dtype) @ p.astype(dtype)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).astype(jnp.float32).mean()

    return _optimized(optax.sgd(1e-2), loss, lambda key: _matrices(key, [(d, classes)])[0], (x, labels))


# --- optimal transport ---------------------------------------------------------------------------


def _sinkhorn(dtype, small) -> Training:
    """Points that move towards others, by the gradient of the cost of regularised optimal transport (Cuturi 2013)."""
    import optax
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    points, d, iterations = (48, 4, 3) if small else (8192, 64, 20)
    solve = sinkhorn.Sinkhorn(min_iterations=iterations, max_iterations=iterations, inner_iterations=iterations)
    wanted = np.random.default_rng(0).uniform(size=(points, d)).astype(dtype)

    def loss(x, wanted):
        # The regularisation is a number: by default it is a fraction of the mean cost.
        geometry = pointcloud.PointCloud(x, wanted, epsilon=0.1)
        return solve(linear_problem.LinearProblem(geometry)).reg_ot_cost

    make = lambda key: jax.random.uniform(key, (points, d), dtype)
    return _optimized(optax.sgd(1.0), loss, make, (wanted,))


# --- transformers --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """A decoder of GPT-2's sizes, by default, and its batch."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50_257
    batch: int = 8
    length: int = 1024


def _causal_attention(qkv, heads):
    """Causal attention of one example, or of several: (..., length, 3 * width)."""
    q, k, v = (a.reshape(*a.shape[:-1], heads, -1) for a in jnp.split(qkv, 3, -1))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(*mixed.shape[:-2], -1)


def _transformer(make, dtype, small) -> Training:
    """make(sizes, dtype): a function that makes parameters in float32 from a key, and one of (parameters, ids): logits.

    Parameters are converted to `dtype` in each step.
    """
    import optax

    s = _Sizes(1, 32, 2, 500, 2, 16) if small else _Sizes()
    rng = np.random.default_rng(0)
    tokens = _zipf(rng, 1.3, (s.batch, s.length + 1), s.vocabulary)
    make_params, apply = make(s, jnp.dtype(dtype))

    def loss(params, ids, labels):
        logits = apply(jax.tree.map(lambda a: a.astype(dtype), params), ids).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return _optimized(optax.adam(1e-4), loss, make_params, (tokens[:, :-1].copy(), tokens[:, 1:].copy()))


def _nnx_transformer(s, dtype):
    from flax import nnx

    types = {"dtype": dtype, "param_dtype": jnp.float32}

    class Block(nnx.Module):
        def __init__(self, rngs):
            norm = lambda: nnx.LayerNorm(s.width, rngs=rngs, **types)
            dense = lambda a, b: nnx.Linear(a, b, rngs=rngs, **types)
            self.norm1, self.qkv, self.out = norm(), dense(s.width, 3 * s.width), dense(s.width, s.width)
            self.norm2, self.up, self.down = norm(), dense(s.width, 4 * s.width), dense(4 * s.width, s.width)

        def __call__(self, x):
            x = x + self.out(_causal_attention(self.qkv(self.norm1(x)), s.heads))
            return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.tokens = nnx.Embed(s.vocabulary, s.width, rngs=rngs, **types)
            self.places = nnx.Embed(s.length, s.width, rngs=rngs, **types)
            for k in range(s.layers):
                setattr(self, f"block{k}", Block(rngs))
            self.norm = nnx.LayerNorm(s.width, rngs=rngs, **types)

        def __call__(self, ids):
            x = self.tokens(ids) + self.places(jnp.arange(s.length))
            for k in range(s.layers):
                x = getattr(self, f"block{k}")(x)
            return self.tokens.attend(self.norm(x))

    definition = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))[0]
    return lambda key: nnx.state(Model(nnx.Rngs(key))), lambda params, ids: nnx.merge(definition, params)(ids)


def _equinox_transformer(s, dtype):
    """A function of one example, under vmap."""
    import equinox as eqx

    del dtype  # layers compute in the type of their parameters

    class Block(eqx.Module):
        norm1: eqx.nn.LayerNorm
        qkv: eqx.nn.Linear
        out: eqx.nn.Linear
        norm2: eqx.nn.LayerNorm
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 4)
            self.norm1, self.norm2 = eqx.nn.LayerNorm(s.width), eqx.nn.LayerNorm(s.width)
            self.qkv = eqx.nn.Linear(s.width, 3 * s.width, key=keys[0])
            self.out = eqx.nn.Linear(s.width, s.width, key=keys[1])
            self.up = eqx.nn.Linear(s.width, 4 * s.width, key=keys[2])
            self.down = eqx.nn.Linear(4 * s.width, s.width, key=keys[3])

        def __call__(self, x):
            x = x + jax.vmap(self.out)(_causal_attention(jax.vmap(lambda a: self.qkv(self.norm1(a)))(x), s.heads))
            return x + jax.vmap(lambda a: self.down(jax.nn.gelu(self.up(self.norm2(a)))))(x)

    class Model(eqx.Module):
        tokens: jax.Array
        places: jax.Array
        blocks: list
        norm: eqx.nn.LayerNorm

        def __init__(self, key):
            keys = jax.random.split(key, s.layers + 2)
            self.tokens = 0.02 * jax.random.normal(keys[0], (s.vocabulary, s.width))
            self.places = 0.02 * jax.random.normal(keys[1], (s.length, s.width))
            self.blocks = [Block(k) for k in keys[2:]]
            self.norm = eqx.nn.LayerNorm(s.width)

        def __call__(self, ids):
            x = self.tokens[ids] + self.places
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.norm)(x) @ self.tokens.T

    rest = eqx.partition(eqx.filter_eval_shape(Model, jax.random.key(0)), eqx.is_array_like)[1]
    return (
        lambda key: eqx.filter(Model(key), eqx.is_array),
        lambda params, ids: jax.vmap(eqx.combine(params, rest))(ids),
    )


def _haiku_transformer(s, dtype):
    """Activations are of the type of the parameters."""
    import haiku as hk

    del dtype

    def model(ids):
        norm = lambda: hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)
        embed = hk.Embed(s.vocabulary, s.width, name="tokens")
        x = embed(ids) + hk.Embed(s.length, s.width, name="places")(jnp.arange(s.length))
        for _ in range(s.layers):
            mixed = _causal_attention(hk.Linear(3 * s.width)(norm()(x)), s.heads)
            x = x + hk.Linear(s.width)(mixed)
            x = x + hk.Linear(s.width)(jax.nn.gelu(hk.Linear(4 * s.width)(norm()(x))))
        return norm()(x) @ embed.embeddings.T

    transformed = hk.without_apply_rng(hk.transform(model))
    return lambda key: transformed.init(key, jnp.zeros((1, s.length), jnp.int32)), transformed.apply


def programs() -> list[Program]:
    """Required are goals for one H200; `endless` was seen on it, with jax 0.11.2."""
    both = ("bfloat16", "float32")
    endless = "four steps did not end in 230 s"
    found = []
    for package, layer in (("", _plain_layer), ("jraph", _jraph_layer)):
        name = "graph convolution" + (f", {package}" if package else "")
        for dtype in both:
            for zipf in (True, False):
                make = functools.partial(_convolution, layer)
                required = (700 if zipf else 6) if dtype == "bfloat16" else (4 if zipf else 2)
                found.append(
                    Program(
                        f"{name}, {'zipf' if zipf else 'uniform'}",
                        dtype,
                        lambda t, small, make=make, zipf=zipf: make(t, small, zipf),
                        required,
                        package=package,
                        pyg="convolution",
                    )
                )
    for package, layer in (("", _attention_layer), ("jraph", _jraph_attention_layer)):
        name = "graph attention" + (f", {package}" if package else "")
        make = functools.partial(_attention, layer)
        pyg = "attention" + (f", {package}" if package else "")
        found += [Program(f"{name}, zipf", t, make, endless=endless, package=package, pyg=pyg) for t in both]
    required = {"bfloat16": 1.6, "float32": 1.05}
    found += [Program("interaction network", t, _interaction, required[t], pyg="interaction") for t in both]
    found += [Program("mesh simulator, flax.linen", t, _linen_mesh, package="flax", pyg="mesh") for t in both]
    found += [Program("potential with forces", t, _potential, pyg="potential") for t in both]
    found += [Program("embedding", t, _embedding, 25 if t == "bfloat16" else 0.97) for t in both]
    found += [
        Program("embedding, flax.linen", t, _linen_embedding, 25 if t == "bfloat16" else 0.97, package="flax")
        for t in both
    ]
    found += [
        Program("click model", "bfloat16", _clicks, endless="four steps did not end in 40 s"),
        Program("click model", "float32", _clicks, 3),
    ]
    found += [Program("vocabulary head", t, _classifier, 1.1) for t in both]
    for name, package, model in (
        ("flax.nnx", "flax", _nnx_transformer),
        ("equinox", "equinox", _equinox_transformer),
        ("haiku", "haiku", _haiku_transformer),
    ):
        make = functools.partial(_transformer, model)
        found.append(Program(f"transformer, {name}", "bfloat16", make, 1.1, package=package))
    found += [Program("griffin layer", t, functools.partial(_trained, _loops.griffin), 2) for t in both]
    found.append(Program("state space layers", "float32", functools.partial(_trained, _loops.state_space), 0.97))
    for name, make, required in (
        ("advantages", _loops.advantages, 10),
        ("random walks", _loops.walk, 20),
        ("oscillators", _loops.oscillators, 20),
        ("adaptive integrator", _loops.integrator, 20),
    ):
        found.append(Program(name, "float32", lambda t, small, make=make: Training(*make(t, small)), required))
    for name, make in _by_hand.PROGRAMS.items():
        make = functools.partial(_trained, make)
        found.append(Program(f"{name}, by hand", "bfloat16", make, 0.98))
    found.append(
        Program("sampling of tokens", "float32", lambda t, small: Training(*_by_hand.sampling(t, small)), 0.98)
    )
    found.append(Program("sinkhorn, ott-jax", "float32", _sinkhorn, 1.0, package="ott"))
    molecules = lambda t, small: Training(*_packages.molecular_dynamics(t, small))
    found.append(Program("molecular dynamics, jax-md", "float32", molecules, 6, package="jax_md"))
    model = functools.partial(_trained, _packages.hierarchical_model)
    found.append(Program("hierarchical model, numpyro", "float32", model, 5, package="numpyro"))
    return [p for p in found if not p.package or importlib.util.find_spec(p.package)]


def _trained(make, dtype, small) -> Training:
    import optax

    return _optimized(optax.sgd(1e-2), *make(dtype, small))


# --- what runs -----------------------------------------------------------------------------------


class _Compiled(NamedTuple):
    init: Any
    step: Any
    seconds: float  # of tracing and compilation of the step
    memory: int  # bytes of its operands, results and temporary arrays


class _Measured(NamedTuple):
    time: _timing.Timing  # of a step
    first: float  # seconds of the first one, compilation included
    loss: float  # after it
    memory: int = 0
    device: dict[str, float] = {}  # {kernel: microseconds of a step}, on a GPU


def _compiled(training: Training, init: Any) -> _Compiled:
    """init: the compiled function of this name."""
    begin = time.perf_counter()
    step = jax.jit(training.step, donate_argnums=0).lower(*training.specs()).compile()
    seconds, sizes = time.perf_counter() - begin, step.memory_analysis()
    own = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    memory = sum(getattr(sizes, name, 0) for name in own) - getattr(sizes, "alias_size_in_bytes", 0)
    return _Compiled(init, step, seconds, memory)


def _measured(training: Training, compiled: _Compiled, repeats: int) -> _Measured:
    step = compiled.step
    data = [jax.device_put(a) for a in training.data]
    state = jax.block_until_ready(compiled.init())
    begin = time.perf_counter()
    state, loss = jax.block_until_ready(step(state, *data))
    first = compiled.seconds + time.perf_counter() - begin

    def run():
        nonlocal state, value
        state, value = step(state, *data)

    value = loss
    samples = _timing.steps(run, lambda: jax.block_until_ready((state, value)), repeats, SAMPLE)
    spent: collections.Counter[str] = collections.Counter()
    if _run.backend() == "gpu" and samples[0] < 1e6:
        with _timing.trace() as events:
            for _ in range(TRACED):
                run()
            jax.block_until_ready((state, value))
        for e in events:
            spent[_timing.short_name(e.name)] += e.duration_ns / TRACED / 1e3
    return _Measured(_timing.Timing(samples, "host"), first, float(loss), compiled.memory, dict(spent))


def _equal_runs(training: Training, compiled: _Compiled) -> int:
    """How many of `RUNS` runs of the step have the same bits as the first."""
    data = [jax.device_put(a) for a in training.data]
    begin, step = compiled.init, compiled.step

    def bits(a):
        a = jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a
        inexact = jnp.issubdtype(a.dtype, jnp.inexact)
        return jax.lax.bitcast_convert_type(a, jnp.dtype(f"uint{8 * a.dtype.itemsize}")) if inexact else a

    same = jax.jit(
        lambda a, b: jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.all(bits(x) == bits(y)), a, b))))
    )
    first = step(begin(), *data)
    return 1 + sum(bool(same(first, step(begin(), *data))) for _ in range(RUNS - 1))


def _compile_plainly(training: Training) -> None:
    """Compiles the plain step, and drops it: XLA then knows the fastest algorithms of its matrix products.

    XLA measures them once in a process, while it compiles the first program that has these products. Otherwise the step that
    is measured first, which is ours, would have this time in its first step, and the plain one would not.
    """
    jax.jit(training.step, donate_argnums=0).lower(*training.specs()).compile()
    jax.clear_caches()  # so that the plain step is traced and compiled again where its first step is measured


def _peer(program: Program, training: Training, limit: float, known: dict[Any, Any]) -> Any:
    """PyTorch Geometric's figures, a Failure, or None if there is no such model; programs of one model share them."""
    if not (program.pyg and limit and _torch.geometric()):
        return None
    key = program.pyg, program.dtype, program.name.rsplit(", ", 1)[-1]
    if key not in known:
        params = jax.device_get(jax.jit(training.init)())[0]
        label = f"{program.name}, {program.dtype}"
        known[key] = _geometric.measure(program.pyg, params, training.data, program.dtype, limit, label)
    return known[key]


def _sets(arguments: Any) -> dict[str, dict[str, Any]]:
    """Arguments of `accelerate` to measure with, by what is said of them in the name of a case."""
    default = list(switch.DEFAULT)
    found: dict[str, dict[str, Any]] = {"": {}}
    for text in getattr(arguments, "only", None) or ():
        names = [n for part in text.split(",") for n in (default if part == "default" else [part])]
        found[f" [only {text}]"] = {"only": names}
    for text in getattr(arguments, "without", None) or ():
        found[f" [without {text}]"] = {"without": text.split(",")}
    if getattr(arguments, "tune", False):
        found[" [tuned]"] = {"tune": True}
    if getattr(arguments, "deterministic", False):
        found[" [deterministic]"] = {"deterministic": True}
    if getattr(arguments, "force", False):
        found = {(f"{label} [forced]" if label or len(found) == 1 else label): o for label, o in found.items()}
        found = {label: o | {"force": label.endswith("[forced]")} for label, o in found.items()}
    for options in found.values():
        jaxkern.accelerate(**options)  # raises an error if there is no such operation
    return found


def run(arguments: Any) -> dict[str, Any]:
    """Measures; what goes to the result file."""
    sets = _sets(arguments)
    gpu = _run.backend() == "gpu"
    small, repeats = not gpu or arguments.quick, arguments.repeats or (5 if gpu else 2)
    chosen = [p for p in programs() if re.search(arguments.cases, f"{p.name} {p.dtype}")]
    if not chosen:
        raise SystemExit(f"benchmarks: no program matches {arguments.cases!r}")
    rows: list[dict[str, Any]] = []
    data = {
        "format": 1,
        "operation": OPERATION,
        "environment": _run.environment() | {"clock": "host"},
        "options": {"quick": small, "cases": arguments.cases, "repeats": repeats},
        "results": rows,
        "checks": [],
    }
    limit, peers, out = getattr(arguments, "pyg", _geometric.LIMIT), {}, getattr(arguments, "out", None)
    try:
        for program in _timing.progress(chosen, len(chosen), "measure programs"):
            rows += _rows(program, sets, small, repeats, limit, peers)
            if out is not None:
                _report.save(data, out)  # a program may take minutes, and XLA's compilation cannot be interrupted
    except KeyboardInterrupt:
        if not rows:
            raise
        print(f"benchmarks: interrupted; {len(rows)} results are kept", file=sys.stderr)
    return data


def _rows(program, sets, small, repeats, limit, peers) -> list[dict[str, Any]]:
    """peers: what PyTorch Geometric took for the programs before."""
    training, required = program.make(program.dtype, small), _run.backend() == "gpu" and not small
    runs_plainly = not (program.endless and required)

    def compiled(options):
        with jaxkern.accelerate(**options):
            return _compiled(training, init), jaxkern.explain(training.step)(*training.specs())

    with _run.turn(alone=False), concurrent.futures.ThreadPoolExecutor() as pool:
        starting = pool.submit(lambda: jax.jit(training.init).lower().compile())
        if required and runs_plainly:
            _compile_plainly(training)
        init = starting.result()
        ready = {label: compiled(o) for label, o in sets.items() if not o.get("tune")}
        plain = _compiled(training, init) if runs_plainly else None
    own, runs = {}, {}
    with _run.turn(alone=True):
        for label, options in sets.items():
            if label in ready:
                step, explanation = ready.pop(label)
                own[label] = explanation, _measured(training, step, repeats)
                if options.get("deterministic"):
                    runs[label] = _equal_runs(training, step)
        plain = None if plain is None else _measured(training, plain, repeats)
        pyg = _peer(program, training, limit, peers)
    try:
        for label in (n for n in sets if n not in own):
            with _run.turn(alone=True):
                step, explanation = compiled(sets[label])
                own[label] = explanation, _measured(training, step, repeats)
    except KeyboardInterrupt:
        print(f"benchmarks: interrupted; {program.name} has no {label.strip()}", file=sys.stderr)
    return [
        _row(program, label, measured, plain, pyg, explanation, required, runs.get(label))
        for label, (explanation, measured) in own.items()
    ]


def _portable(source: str) -> str:
    """A place in the source without the folder of this machine that its package is installed in."""
    folders = sorted((f for f in sys.path if f), key=len, reverse=True)
    return next((source.removeprefix(f + os.sep) for f in folders if source.startswith(f + os.sep)), source)


def _row(program, label, own, plain, pyg, explanation, required, runs=None) -> dict[str, Any]:
    """plain: None if the plain program does not end; pyg: None if there is no such peer. runs: how many were equal."""
    of_jax = {_goals.OURS: own} | ({} if plain is None else {"xla": plain})
    measured = dict(of_jax)
    times = {who: m.time.to_json() for who, m in measured.items()}
    if plain is None:
        times["xla"] = _timing.Failure(program.endless).to_json()
    if isinstance(pyg, _timing.Failure):
        times["pyg"] = pyg.to_json()
    elif pyg is not None:
        times["pyg"] = pyg.time.to_json()
        measured["pyg"] = pyg
    goals = []
    if required and plain is not None:
        ratio = plain.time.median / own.time.median
        least = program.required if runs is None else 1 / SLOWER
        goals.append({"goal": "plain", "required": least, "value": ratio, "met": ratio >= least})
        later = LATER / max(own.first - plain.first, 1e-3)
        goals.append({"goal": "first step", "required": 1.0, "value": later, "met": later >= 1})
        room = LARGER * plain.memory / max(own.memory, 1)
        goals.append({"goal": "memory", "required": 1.0, "value": room, "met": room >= 1})
    if runs is not None:
        goals.append({"goal": "equal runs", "required": RUNS, "value": runs, "met": runs >= RUNS})
    return {
        "case": program.name + label,
        "group": "programs",
        "shape": [],
        "dtype": program.dtype,
        "op": OPERATION,
        "direction": "step",
        "times": times,
        "first_s": {who: round(m.first, 3) for who, m in measured.items()},
        "loss": {who: m.loss for who, m in measured.items()},
        "memory": {who: m.memory for who, m in of_jax.items()},
        "device_us": {who: round(sum(m.device.values()), 1) for who, m in of_jax.items() if m.device},
        "kernels_us": {who: _longest(m.device) for who, m in of_jax.items() if m.device},
        "decisions": [dataclasses.asdict(d) | {"source": _portable(d.source)} for d in explanation],
        "handlers": sorted({d.operation for d in explanation.taken}),
        "copy_ratio": {},
        "goals": goals,
    }


def _longest(kernels: dict[str, float]) -> dict[str, float]:
    return {k: round(us, 1) for k, us in sorted(kernels.items(), key=lambda item: -item[1])[:KERNELS]}


def table(data: dict[str, Any]) -> str:
    peer = ["pyg", "pyg / jaxkern"] if any("pyg" in row["times"] for row in data["results"]) else []
    lines = [["case", "dtype", "jaxkern", "xla", "xla / jaxkern", *peer, "taken", "first step, s", "verdict"]]
    for row in data["results"]:
        times = _report.medians(row)
        ours, plain, pyg = times.get(_goals.OURS), times.get("xla"), times.get("pyg")
        over = lambda other, ours=ours: f"{other / ours:.2f}" if other and ours else "-"
        missed = [g["goal"] for g in row["goals"] if not g["met"]]
        taken = sum(d["taken"] for d in row["decisions"])
        first = row["first_s"]
        lines.append(
            [
                row["case"],
                row["dtype"],
                _report.time_text(ours),
                _report.time_text(plain),
                over(plain),
                *([_report.time_text(pyg), over(pyg)] if peer else []),
                f"{taken} of {len(row['decisions'])}",
                " / ".join(f"{first[who]:.1f}" for who in (_goals.OURS, "xla") if who in first),
                "-" if not row["goals"] else f"missed: {', '.join(missed)}" if missed else "met",
            ]
        )
    return _report.align(lines)


def explain(arguments: Any) -> int:
    """Prints what would be taken of each program on a GPU."""
    for program in programs():
        if re.search(arguments.cases, f"{program.name} {program.dtype}"):
            training = program.make(program.dtype, arguments.quick)
            for label, options in _sets(arguments).items():
                with jaxkern.accelerate(**options):
                    explanation = jaxkern.explain(training.step)(*training.specs())
                print(f"{program.name}, {program.dtype}{label}\n{explanation}\n", flush=True)
    return 0
