"""PyTorch Geometric as a peer: training steps of the same graph networks as in benchmarks/programs.py and graph_step.py.

A model starts from the parameters of the JAX program and takes its data, so the first losses agree. Parameters and the
state of Adam are float32, and each step converts the parameters to the dtype of the program. Products of float32 matrices
may use TF32, as in JAX. Graphs are prepared outside the step: the norms of edges, and sorted graphs with their caches.

Kinds of a model:

    edge list    a tensor of ids, in the program's order; messages are added with atomics
    EdgeIndex    edges sorted by receivers, with cached offsets; messages are added in segments
    product      an EdgeIndex whose matmul is a sparse product (graph convolution only)
    compiled     torch.compile of the edge list
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import _timing, _torch

LIMIT = 10.0  # seconds for all kinds of a model together


class Model(NamedTuple):
    """loss(call): the loss of a step; call(*arguments) runs the module, parameters and arguments in the step's dtype."""

    module: Any
    loss: Callable[[Callable[..., Any]], Any]
    rate: float = 1e-3


def device() -> str:
    return "cuda" if jax.default_backend() == "gpu" else "cpu"


def step(model: Model, dtype: str, compiled: bool = False) -> Callable[[], Any]:
    """A function that runs one step of Adam and returns the loss before it."""
    torch = _torch.torch()
    module = model.module.to(device())
    parameters, number = list(module.parameters()), getattr(torch, dtype)
    optimizer = torch.optim.Adam(parameters, lr=model.rate, fused=device() == "cuda")

    def call(*arguments: Any) -> Any:
        values = {name: value.to(number) for name, value in module.named_parameters()}
        return torch.func.functional_call(module, values, tuple(a.to(number) for a in arguments))

    loss = lambda: model.loss(call)
    loss = torch.compile(loss, dynamic=False) if compiled else loss

    def run() -> Any:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward(inputs=parameters)
        optimizer.step()
        return value

    return run


def tensor(array: Any) -> Any:
    """A copy of an array on the device that JAX runs on; ids become int64, which scatters ask for."""
    torch = _torch.torch()
    found = torch.tensor(np.asarray(array), device=device())
    return found if found.is_floating_point() else found.long()


def _classes(module: Any, labels: Any, *arguments: Any) -> Model:
    """Cross-entropy of a module's logits."""
    loss = _torch.torch().nn.functional.cross_entropy
    return Model(module, lambda call: loss(call(*arguments).float(), labels))


@contextlib.contextmanager
def like_jax() -> Iterator[None]:
    """Products of float32 matrices may use TF32, as they do in JAX. What is compiled in the body is forgotten after it.

    torch.compile keeps few versions of one function, and runs all others uncompiled.
    """
    torch = _torch.torch()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        gc.collect()
        _torch.release()


class Ends(NamedTuple):
    """ids: (senders, receivers), or an EdgeIndex. order: the edges of the program, in the order of `ids`."""

    ids: Any
    order: np.ndarray

    def sorted(self, edges: np.ndarray) -> Any:
        return tensor(edges[self.order])


def ends(kind: str, senders: np.ndarray, receivers: np.ndarray, nodes: int) -> Ends:
    from torch_geometric import EdgeIndex  # pyright: ignore[reportMissingImports]

    if kind in ("edge list", "compiled"):
        return Ends(tensor(np.stack([senders, receivers])), np.arange(senders.size))
    order = np.argsort(receivers, kind="stable")
    senders, receivers = senders[order], receivers[order]
    # A product has a row for each receiver.
    ids, by = ([receivers, senders], "row") if kind == "product" else ([senders, receivers], "col")
    found = EdgeIndex(tensor(np.stack(ids)), sparse_size=(nodes, nodes), sort_order=by)
    return Ends(found.fill_cache_(), order)


# --- models --------------------------------------------------------------------------------------


def convolution(kind: str, matrices: Sequence[Any], edges: Ends, norms: Any, x: Any, labels: Any) -> Model:
    """Layers of GCNConv, whose norms of edges are known, as with its `cached=True`."""
    torch = _torch.torch()
    from torch_geometric.nn import GCNConv  # pyright: ignore[reportMissingImports]

    class Product(torch.nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(inputs, outputs, bias=False)

        def forward(self, x: Any, ids: Any, norms: Any) -> Any:
            return ids.matmul(self.lin(x), input_value=norms)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = Product if kind == "product" else functools.partial(GCNConv, normalize=False, bias=False)
            self.layers = torch.nn.ModuleList(layer(*w.shape) for w in matrices)
            for made, w in zip(self.layers, matrices):
                _set(made.lin.weight, w.T)

        def forward(self, x: Any, norms: Any) -> Any:
            for k, layer in enumerate(self.layers):
                x = layer(torch.relu(x) if k else x, edges.ids, norms)
            return x

    return _classes(Network(), labels, x, norms)


def _convolution(kind: str, params: Any, data: Sequence[np.ndarray]) -> Model:
    x, labels, senders, receivers = data
    nodes = x.shape[0]
    norm = lambda ids: 1 / np.sqrt(np.maximum(np.bincount(ids, minlength=nodes), 1))[ids]
    edges = ends(kind, senders, receivers, nodes)
    norms = edges.sorted((norm(senders) * norm(receivers)).astype(np.float32))
    return convolution(kind, params, edges, norms, tensor(x), tensor(labels))


def _attention(kind: str, params: Any, data: Sequence[np.ndarray], activation: bool = False) -> Model:
    """GATConv scores an edge by leaky_relu of a product with both ends, as the program does; jraph's has an activation."""
    torch = _torch.torch()
    from torch_geometric.nn import GATConv  # pyright: ignore[reportMissingImports]

    features, labels, senders, receivers = data
    edges = ends(kind, senders, receivers, features.shape[0])

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList()
            for w, a in zip(params[::2], params[1::2]):
                layer = GATConv(*w.shape, add_self_loops=False, bias=False)
                _set(layer.lin.weight, w.T)
                _set(layer.att_src, a[: w.shape[1]].reshape(1, 1, -1))
                _set(layer.att_dst, a[w.shape[1] :].reshape(1, 1, -1))
                self.layers.append(layer)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x, edges.ids)
                x = torch.nn.functional.leaky_relu(x) if activation else x
            return x

    return _classes(Network(), tensor(labels), tensor(features))


@functools.cache
def _round() -> Any:
    """A round of messages: a network on edges, sums at receivers, a network on nodes."""
    torch = _torch.torch()
    from torch_geometric.nn import MessagePassing  # pyright: ignore[reportMissingImports]

    class Round(MessagePassing):
        def __init__(self, edge: Any, node: Any, residual: bool = False) -> None:
            super().__init__(aggr="sum")
            self.edge, self.node, self.residual = edge, node, residual

        def forward(self, x: Any, e: Any, ids: Any) -> tuple[Any, Any]:
            new = self.edge_updater(ids, x=x, e=e)
            e = e + new if self.residual else new
            sums = self.propagate(ids, e=e, size=(x.shape[0], x.shape[0]))
            new = self.node(torch.cat([x, sums], -1))
            return x + new if self.residual else new, e

        def edge_update(self, x_i: Any, x_j: Any, e: Any) -> Any:
            return self.edge(torch.cat([e, x_j, x_i], -1))

        def message(self, e: Any) -> Any:
            return e

    return Round


def _interaction(kind: str, params: Any, data: Sequence[np.ndarray]) -> Model:
    torch = _torch.torch()
    features, labels, senders, receivers, edge_features = data
    edges = ends(kind, senders, receivers, features.shape[0])
    network = lambda a, b: torch.nn.Sequential(_linear(a), torch.nn.ReLU(), _linear(b))
    *matrices, last = params

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            four = [matrices[k : k + 4] for k in range(0, len(matrices), 4)]
            self.rounds = torch.nn.ModuleList(_round()(network(a, b), network(c, f)) for a, b, c, f in four)
            self.out = _linear(last)

        def forward(self, x: Any, e: Any) -> Any:
            for layer in self.rounds:
                x, e = layer(x, e, edges.ids)
            return self.out(x)

    return _classes(Network(), tensor(labels), tensor(features), edges.sorted(edge_features))


def _mesh(kind: str, params: Any, data: Sequence[np.ndarray]) -> Model:
    torch = _torch.torch()
    node_features, edge_features, senders, receivers, wanted = data
    edges = ends(kind, senders, receivers, node_features.shape[0])
    layers = params["params"]
    count = sum(name.startswith("LayerNorm") for name in layers)
    dense = lambda k: _linear(layers[f"Dense_{k}"]["kernel"], layers[f"Dense_{k}"]["bias"])

    def network(k: int) -> Any:
        given = layers[f"LayerNorm_{k}"]
        norm = torch.nn.LayerNorm(given["scale"].shape[0], eps=1e-6)
        _set(norm.weight, given["scale"])
        _set(norm.bias, given["bias"])
        relu = torch.nn.ReLU()
        return torch.nn.Sequential(dense(3 * k), relu, dense(3 * k + 1), relu, dense(3 * k + 2), norm)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.node, self.edge = network(0), network(1)
            self.rounds = torch.nn.ModuleList(_round()(network(k), network(k + 1), True) for k in range(2, count, 2))
            # flax numbers the outer one of two nested calls first.
            self.out = torch.nn.Sequential(dense(3 * count + 1), torch.nn.ReLU(), dense(3 * count))

        def forward(self, x: Any, e: Any) -> Any:
            x, e = self.node(x), self.edge(e)
            for layer in self.rounds:
                x, e = layer(x, e, edges.ids)
            return self.out(x)

    x, e, target = tensor(node_features), edges.sorted(edge_features), tensor(wanted)
    loss = lambda call: (call(x, e).float() - target).square().mean()
    return Model(Network(), loss, 1e-4)


def _potential(kind: str, params: Any, data: Sequence[np.ndarray]) -> Model:
    """Its loss holds a gradient, which the sums of an EdgeIndex and torch.compile do not differentiate again."""
    torch = _torch.torch()
    from torch_geometric.nn import MessagePassing, global_add_pool  # pyright: ignore[reportMissingImports]

    silu, cutoff = torch.nn.functional.silu, 5.0
    table, *matrices, out1, out2 = params
    at, kinds_of, senders, receivers, molecule_of, energies, forces = data
    edges = ends(kind, senders, receivers, at.shape[0])
    kinds, molecule, wanted, pulls = tensor(kinds_of), tensor(molecule_of), tensor(energies), tensor(forces)
    places, molecules = tensor(at).requires_grad_(), energies.shape[0]
    centres = tensor(np.linspace(0, cutoff, matrices[0].shape[0], dtype=np.float32))

    class Filter(MessagePassing):
        def __init__(self, a: Any, b: Any, c: Any, f: Any) -> None:
            super().__init__(aggr="sum")
            self.weights = torch.nn.Sequential(_linear(a), torch.nn.SiLU(), _linear(b))
            self.before, self.after = _linear(c), _linear(f)

        def forward(self, x: Any, ids: Any, basis: Any, window: Any) -> Any:
            sums = self.propagate(ids, x=self.before(x), weights=self.weights(basis) * window)
            return x + self.after(silu(sums))

        def message(self, x_j: Any, weights: Any) -> Any:
            return x_j * weights

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(*table.shape)
            _set(self.table.weight, table)
            four = [matrices[k : k + 4] for k in range(0, len(matrices), 4)]
            self.rounds = torch.nn.ModuleList(Filter(*layer) for layer in four)
            self.out = torch.nn.Sequential(_linear(out1), torch.nn.SiLU(), _linear(out2))

        def forward(self) -> Any:
            x = self.table(kinds)
            across = places[edges.ids[0]] - places[edges.ids[1]]
            distance = (across.square().sum(-1) + 1e-6).sqrt()
            window = 0.5 * (torch.cos(torch.pi * distance.clamp(max=cutoff) / cutoff) + 1)
            basis = torch.exp(-10 * (distance[:, None] - centres).square()).to(x.dtype)
            for layer in self.rounds:
                x = layer(x, edges.ids, basis, window[:, None].to(x.dtype))
            atomic = self.out(x)[:, 0].float()
            return global_add_pool(atomic, molecule, size=molecules)

    def loss(call: Callable[..., Any]) -> Any:
        found = call()  # places stay float32
        (gradient,) = torch.autograd.grad(found.sum(), places, create_graph=True)
        return (found - wanted).square().mean() + (gradient + pulls).square().mean()

    return Model(Network(), loss)


def _linear(kernel: Any, bias: Any = None) -> Any:
    layer = _torch.torch().nn.Linear(*kernel.shape, bias=bias is not None)
    _set(layer.weight, kernel.T)
    if bias is not None:
        _set(layer.bias, bias)
    return layer


def _set(parameter: Any, value: Any) -> None:
    torch = _torch.torch()
    with torch.no_grad():
        parameter.copy_(torch.tensor(np.asarray(value)))


SORTED = ("EdgeIndex", "edge list", "compiled")
# {name: (function that makes the model, kinds)}
MODELS: dict[str, tuple[Callable[..., Model], tuple[str, ...]]] = {
    "convolution": (_convolution, ("product", "edge list", "compiled")),
    "attention": (_attention, SORTED),
    "attention, jraph": (functools.partial(_attention, activation=True), SORTED),
    "interaction": (_interaction, SORTED),
    "mesh": (_mesh, SORTED),
    "potential": (_potential, ("edge list",)),
}


# --- what runs -----------------------------------------------------------------------------------


class Measured(NamedTuple):
    """The figures of the fastest kind. The note of `time` names it and lists the other kinds."""

    time: _timing.Timing  # of a step
    first: float  # seconds of the first one
    loss: float  # before it


def measure(name: str, params: Any, data: Sequence[np.ndarray], dtype: str, limit: float, label: str) -> Any:
    """Times each kind of a model within `limit` seconds, and prints its figure; returns Measured, or a Failure."""
    until = time.perf_counter() + limit
    make, kinds = MODELS[name]
    params = jax.tree.map(np.asarray, params)
    found: dict[str, Measured] = {}
    notes = {}
    for kind in kinds:
        try:
            with _quiet(), like_jax(), _within(until - time.perf_counter()):
                found[kind] = _measured(step(make(kind, params, data), dtype, kind == "compiled"), until)
            notes[kind] = f"{found[kind].time.median / 1e3:.3g} ms"
        except Exception as error:  # a peer that fails must not end the run
            late = time.perf_counter() >= until
            notes[kind] = f"not within {limit:g} s" if late else _timing.one_line(error)[:120]
        print(f"{label}, pyg, {kind}: {notes[kind]}", file=sys.stderr, flush=True)
    if not found:
        return _timing.Failure("; ".join(f"{kind}: {note}" for kind, note in notes.items()))
    best = min(found, key=lambda kind: found[kind].time.median)
    rest = [f"{kind}: {note}" for kind, note in notes.items() if kind != best]
    found[best].time.note = "; ".join([best, *rest])
    return found[best]


def _measured(run: Callable[[], Any], until: float) -> Measured:
    begin = time.perf_counter()
    loss = float(run().detach())
    _torch.sync()
    first = time.perf_counter() - begin
    return Measured(_timing.Timing(_timing.steps(run, _torch.sync, 3, until=until), "host"), first, loss)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses warnings, and the log of errors of torch.compile, which are in the notes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in its body after so many seconds, where Python runs: not in a call of CUDA.

    Raises it again every two seconds, because torch.compile goes on after some errors.
    """
    if seconds <= 0:
        raise TimeoutError("no time was left")
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def end(*_: Any) -> None:
        raise TimeoutError("it took too long")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, 2.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
