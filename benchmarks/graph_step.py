"""A training step of a graph convolution network with `jaxkern.edge_sum`, plain JAX, and PyTorch Geometric.

    python -m benchmarks.graph_step [--zipf] [--small]

Three layers 128, 256, 256, 40 wide on a graph of ogbn-arxiv's size, 169 343 nodes, 1.17 million edges and each node's edge
to itself, in the symmetric normalisation of Kipf and Welling; Adam. 16-bit steps have master weights in float32. In all of them
the arrays that do not change come from outside the step: the sorted graph, the norms of the edges, PyTorch Geometric's caches.
Steps are enqueued one after the other and timed by the host's clock; the figure is the median of readings.

PyTorch Geometric runs GCNConv, as it is and compiled, and a sparse product of an EdgeIndex (benchmarks/_geometric.py); the
fastest of them counts. `python -m benchmarks messages` runs this on a GPU, and the figures are among its
checks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _geometric, _timing, _torch

WIDTHS = (128, 256, 256, 40)
MOST_MS = {"float32": 2.9, "bfloat16": 1.7}  # on an H200
PEERS, SKEW = 2.5, 1.3  # PyTorch Geometric's time over ours, at least; ours on a Zipf graph over uniform, at most
READINGS = 5


def graph(zipf: bool, small: bool) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """(nodes, senders, receivers, norms of edges); edges are in the order of receivers."""
    rng = np.random.default_rng(0)
    nodes, edges = (300, 2000) if small else (169_343, 1_166_243)
    senders = rng.integers(0, nodes, edges)
    receivers = (rng.zipf(1.5, edges) - 1) % nodes if zipf else rng.integers(0, nodes, edges)
    senders, receivers = (np.concatenate([a, np.arange(nodes)]).astype(np.int32) for a in (senders, receivers))
    order = np.argsort(receivers, kind="stable")
    senders, receivers = senders[order], receivers[order]
    inverse = 1 / np.sqrt(np.maximum(np.bincount(receivers, minlength=nodes), 1))
    return nodes, senders, receivers, (inverse[senders] * inverse[receivers]).astype(np.float32)


def _step(aggregate: Callable[..., Any], dtype: str) -> tuple[Any, Any]:
    """(optimizer, step); aggregate(graph, norms, x) sums the rows of x over edges."""
    import optax

    optimizer = optax.adam(1e-3)

    def loss(params, graph, norms, x, labels):
        x, norms = x.astype(dtype), norms.astype(dtype)
        for k, w in enumerate(params):
            x = aggregate(graph, norms, (jax.nn.relu(x) if k else x) @ w.astype(dtype))
        return optax.softmax_cross_entropy_with_integer_labels(x.astype(jnp.float32), labels).mean()

    def step(state, *data):
        params, moments = state
        value, gradient = jax.value_and_grad(loss)(params, *data)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return optimizer, step


def _jax(dtype: str, zipf: bool, small: bool, ours: bool) -> float:
    """Milliseconds of a step."""
    import jaxkern

    nodes, senders, receivers, norms = graph(zipf, small)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(nodes, WIDTHS[0])), jnp.float32)
    labels = jnp.asarray(rng.integers(0, WIDTHS[-1], nodes))
    if ours:
        edges = jaxkern.Graph(senders, receivers, num_nodes=nodes)
        aggregate = lambda graph, w, x: jaxkern.edge_sum(lambda x, w: x * w, graph, senders=x, edges=w)
    else:
        edges = jnp.asarray(senders), jnp.asarray(receivers)
        aggregate = lambda graph, w, x: jax.ops.segment_sum(
            x[graph[0]] * w[:, None], graph[1], nodes, indices_are_sorted=True
        )
    optimizer, step = _step(aggregate, dtype)
    keys = jax.random.split(jax.random.key(0), len(WIDTHS) - 1)
    params = [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, zip(WIDTHS, WIDTHS[1:]))]
    state, step = (params, optimizer.init(params)), jax.jit(step, donate_argnums=0)
    data = edges, jnp.asarray(norms), x, labels

    def run():
        nonlocal state
        state, value = step(state, *data)
        return value

    return _milliseconds(run, lambda: jax.block_until_ready(state))


def _milliseconds(run: Callable[[], Any], wait: Callable[[], Any]) -> float:
    for _ in range(3):
        run()
    wait()
    return statistics.median(_timing.steps(run, wait, READINGS)) / 1e3


def _pyg(kind: str, dtype: str, zipf: bool, small: bool) -> float:
    """Milliseconds of a step of PyTorch Geometric's network, in one of the kinds of benchmarks/_geometric.py."""
    nodes, senders, receivers, norms = graph(zipf, small)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(nodes, WIDTHS[0])).astype(np.float32)
    labels = rng.integers(0, WIDTHS[-1], nodes)
    matrices = [rng.normal(size=s).astype(np.float32) / s[0] ** 0.5 for s in zip(WIDTHS, WIDTHS[1:])]
    edges = _geometric.ends(kind, senders, receivers, nodes)
    with _geometric.like_jax():
        inputs = edges.sorted(norms), _geometric.tensor(x), _geometric.tensor(labels)
        model = _geometric.convolution(kind, matrices, edges, *inputs)
        return _milliseconds(_geometric.step(model, dtype, kind == "compiled"), _torch.sync)


def times(dtype: str, zipf: bool = False, small: bool = False) -> dict[str, float | str]:
    """{name: milliseconds of a step, or the reason why it has no time}."""
    runs: dict[str, Callable[[], float]] = {
        "jaxkern": lambda: _jax(dtype, zipf, small, True),
        "xla": lambda: _jax(dtype, zipf, small, False),
    }
    if _torch.geometric():
        for kind in ("edge list", "compiled", "product"):
            runs[f"pyg {kind}"] = lambda kind=kind: _pyg(kind, dtype, zipf, small)
    found: dict[str, float | str] = {}
    for name, run in runs.items():
        try:
            found[name] = round(run(), 3)
        except Exception as error:  # a peer that fails must not end the run
            if name == "jaxkern":
                raise
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
        print(f"{dtype}, {'zipf' if zipf else 'uniform'}, {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def checks(small: bool = False) -> list[dict[str, Any]]:
    """The figures that the step has to show, on the machine that they are for."""
    found = []
    for dtype, most in MOST_MS.items():
        uniform, zipf = times(dtype, small=small), {"jaxkern": _jax(dtype, True, small, True)}
        ours = float(uniform["jaxkern"])
        peers = [t for name, t in uniform.items() if name.startswith("pyg") and isinstance(t, float)]
        facts = {"handlers": [], "moves": [], "times_ms": uniform, "zipf_ms": zipf}
        name = f"graph convolution step, {dtype}"
        found.append({"check": f"{name}: at most {most} ms: {uniform}", "met": ours <= most, **facts})
        slower = f"{name}: PyTorch Geometric takes at least {PEERS} x as long"
        if peers:
            found.append({"check": slower, "met": min(peers) >= PEERS * ours, **facts})
        skew = f"{name}: a Zipf graph takes at most {SKEW} x as long: {zipf['jaxkern']:.3f} ms"
        found.append({"check": skew, "met": zipf["jaxkern"] <= SKEW * ours, **facts})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--zipf", action="store_true", help="a graph of very uneven degrees")
    parser.add_argument("--small", action="store_true", help="300 nodes, to see that it runs")
    arguments = parser.parse_args()
    for dtype in MOST_MS:
        found = times(dtype, arguments.zipf, arguments.small)
        print(dtype, *(f"{k} {v if isinstance(v, str) else f'{v:.3f} ms'}" for k, v in found.items()), sep="\n  ")


if __name__ == "__main__":
    main()
