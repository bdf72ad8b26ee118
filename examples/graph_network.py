"""Train a graph convolution network with jaxkern and with jax.ops, and compare them.

    python examples/graph_network.py

The graph is the import graph of the Python that runs this: a node is a module of the standard library or
of an installed package, and an edge joins two modules if one imports the other. The label of a module is the
package that it belongs to; the eight packages with the most modules are learnt. The features of a module are
hashed words of its source code, without package names.

The network is due to Kipf and Welling (2017): twice `relu(A X W)`, where A averages over neighbours and is
never built. jaxkern's `edge_mean` gathers rows along edges and averages them in one kernel, on a `Graph` that is
sorted once, outside the step; with jax.ops rows are gathered, added up by `segment_sum` and divided. It is trained
twice from one seed; the two trainings share all their code but the functions in LIBRARIES, and take turns
step by step, so each step is timed beside its twin.

What to look at: the picture shows both loss curves, which lie on each other, and their difference below. The
table has the accuracy on modules held out, which is the same for both and far above guessing, and the median
milliseconds of a step, which are of interest on a GPU. The exit status is 1 if the curves disagree.

Needs the `examples` extra: tqdm and matplotlib. Takes a minute on 2 cores.
"""

import argparse
import ast
import collections
import functools
import keyword
import pathlib
import re
import sys
import sysconfig
import time
import typing
import zlib

import display
import jax
import jax.numpy as jnp
import numpy as np

import jaxkern

WORDS = 1024  # hashed features of a module's source
CLASSES = 8
MODULES = 6000  # at most: reading more takes longer than learning from them
CURVE_BOUND = 1e-3  # mean difference allowed between the curves, nats


class Functions(typing.NamedTuple):
    """What the network takes from a library; everything else is the same code for both."""

    graph: typing.Callable  # of senders, receivers and the number of nodes: made once
    neighbours: typing.Callable  # of that graph and rows: each node's mean over its neighbours


def plain_graph(senders, receivers, nodes):
    degree = jax.ops.segment_sum(jnp.ones(senders.shape), receivers, nodes)
    return senders, receivers, degree[:, None]


def plain_neighbours(graph, x):
    senders, receivers, degree = graph
    return jax.ops.segment_sum(x[senders], receivers, x.shape[0]) / degree


LIBRARIES = {
    "jaxkern": Functions(
        lambda senders, receivers, nodes: jaxkern.Graph(senders, receivers, num_nodes=nodes),
        lambda graph, x: jaxkern.edge_mean(lambda x: x, graph, senders=x),
    ),
    "jax.ops": Functions(plain_graph, plain_neighbours),
}


# ---- the graph


def find_modules(limit):
    """{dotted name: path} of the modules of the standard library and of the installed packages."""
    found = {}
    for key in ("stdlib", "purelib"):
        root = pathlib.Path(sysconfig.get_path(key))
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if not {"site-packages", "dist-packages", "test", "tests"} & set(parts) and all(
                p.isidentifier() for p in parts
            ):
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    by_package = collections.Counter(name.partition(".")[0] for name in found)
    common = [package for package, _ in by_package.most_common(4 * CLASSES)]
    chosen = [name for name in found if name.partition(".")[0] in common]
    step = max(1, len(chosen) / limit)
    return {chosen[int(k * step)]: found[chosen[int(k * step)]] for k in range(int(len(chosen) / step))}


def imports(tree, name, is_package):
    """Dotted names that a module imports, relative ones resolved."""
    here = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def read_graph(limit):
    """Features, labels (-1 for other packages), senders and receivers of the import graph."""
    modules = find_modules(limit)
    number = {name: k for k, name in enumerate(modules)}
    packages = {name.partition(".")[0].lower() for name in modules}
    names = re.compile("|".join(p for p in packages if len(p) > 2))

    @functools.cache
    def telling(word):
        return not keyword.iskeyword(word) and not names.search(word)

    features = np.zeros((len(modules), WORDS), np.float32)
    edges = set()
    for name, path in display.Progress(modules.items(), "reading modules", "file", compiles=False):
        try:
            text = path.read_text()
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError, ValueError, OSError):
            continue
        k = number[name]
        for word in set(re.findall(r"[a-z]{3,}", text.lower())):
            if telling(word):
                features[k, zlib.crc32(word.encode()) % WORDS] = 1
        for target in imports(tree, name, path.name == "__init__.py"):
            j = number.get(target)
            if j is not None and j != k:
                edges |= {(k, j), (j, k)}
    features /= np.maximum(1, np.linalg.norm(features, axis=1, keepdims=True))
    counts = collections.Counter(name.partition(".")[0] for name in modules)
    classes = [package for package, _ in counts.most_common(CLASSES)]
    labels = np.array([classes.index(p) if (p := name.partition(".")[0]) in classes else -1 for name in modules])
    edges |= {(k, k) for k in range(len(modules))}  # a module is its own neighbour
    senders, receivers = np.array(sorted(edges), np.int32).T
    return features, labels, senders, receivers, classes


# ---- the network


def initial_params(key, widths):
    keys = jax.random.split(key, len(widths) - 1)
    return [jax.random.normal(k, shape) * (2 / sum(shape)) ** 0.5 for k, shape in zip(keys, zip(widths, widths[1:]))]


def logits_of(functions, params, features, graph):
    x = features
    for layer, weight in enumerate(params):
        x = functions.neighbours(graph, (jax.nn.relu(x) if layer else x) @ weight)
    return x


class Training:
    """One library's training: its weights and optimizer, and what was measured on the way."""

    def __init__(self, functions, graph, train, args, initial_params=initial_params, logits_of=logits_of):
        features, labels, senders, receivers = map(jnp.asarray, graph)
        graph = functions.graph(senders, receivers, features.shape[0])

        def loss(params, graph):
            log_probability = jax.nn.log_softmax(logits_of(functions, params, features, graph))
            nats = -jnp.take_along_axis(log_probability, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
            decay = 5e-4 * sum(jnp.sum(w * w) for w in params)
            return jnp.sum(jnp.where(train, nats, 0)) / jnp.sum(train) + decay

        # Donated: what a step returns lies where its arguments did, so that XLA launches one CUDA graph again and again.
        @functools.partial(jax.jit, donate_argnums=(1, 2, 3))
        def step(graph, params, mean, square, count):  # Adam
            value, grads = jax.value_and_grad(loss)(params, graph)
            mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
            square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, grads)
            move = lambda w, m, s: w - args.rate * m / (1 - 0.9**count) / (jnp.sqrt(s / (1 - 0.999**count)) + 1e-8)
            return value, jax.tree.map(move, params, mean, square), mean, square

        self._step = functools.partial(step, graph)
        self._logits = functools.partial(
            jax.jit(logits_of, static_argnums=0), functions, features=features, graph=graph
        )
        self.params = initial_params(jax.random.key(args.seed), (features.shape[1], args.width, CLASSES))
        self.mean, self.square = (jax.tree.map(jnp.zeros_like, self.params) for _ in range(2))
        self.nats, self.seconds = [], []

    def step(self):
        start = time.perf_counter()
        out = jax.block_until_ready(self._step(self.params, self.mean, self.square, len(self.nats) + 1.0))
        self.seconds.append(time.perf_counter() - start)
        value, self.params, self.mean, self.square = out
        self.nats.append(float(value))

    def accuracy(self, labels, which):
        guesses = np.asarray(self._logits(self.params)).argmax(1)
        return float((guesses == labels)[which].mean())

    def milliseconds(self):
        """Median of a step, without the first ones, which compile and warm the caches."""
        return 1e3 * float(np.median(self.seconds[min(5, len(self.seconds) // 2) :]))


def take_turns(runs, steps):
    progress = display.Progress(range(steps), "training")
    for step in progress:
        order = list(runs.values())
        for run in order if step % 2 else reversed(order):  # neither always goes first
            run.step()
        progress.note(**{name: f"{run.nats[-1]:.3f}" for name, run in runs.items()})


def report(runs, labels, held_out, title, setting, out):
    """Prints the table, draws the curves and returns the exit status."""
    accuracy = {name: run.accuracy(labels, held_out) for name, run in runs.items()}
    most = np.bincount(labels[held_out]).max() / held_out.sum()
    print(f"\n{'':10}{'held out, accuracy':>20}{'ms per step':>12}")
    for name, run in runs.items():
        print(f"{name:10}{accuracy[name]:>20.4f}{run.milliseconds():>12.2f}")
    print(f"{'guessing':10}{most:>20.4f}")
    difference = float(np.abs(np.subtract(*(run.nats for run in runs.values()))).mean())
    print(f"\ncurves, mean |difference|, nats: {difference:.2e}, allowed {CURVE_BOUND:g}")
    curves = {name: np.array(run.nats) for name, run in runs.items()}
    legends = {name: f"{name} ({accuracy[name]:.1%} of held-out modules are right)" for name in runs}
    display.save_curves(out, curves, "nats", title, setting, legends)
    numbers = {
        "held out, accuracy": "equal but for rounding, and far above guessing the largest package",
        "ms per step": "of both ways, in the same seconds on the same machine",
    }
    picture = "both loss curves, which lie on each other, and their difference below"
    return display.conclude("curves", difference <= CURVE_BOUND, out, picture, numbers)


def arguments(parser, program):
    parser.add_argument("--steps", type=int, default=200, help="training steps of each network")
    parser.add_argument("--width", type=int, default=64, help="width of the hidden layer")
    parser.add_argument("--rate", type=float, default=1e-2, help="learning rate")
    parser.add_argument("--modules", type=int, default=MODULES, help="largest number of nodes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the choice of held-out nodes")
    display.add_out(parser, program)
    args = parser.parse_args()
    if min(args.steps, args.width) < 1 or args.modules < 100:
        parser.error("--steps and --width start at 1, --modules at 100")
    display.check_out(parser, args.out)
    return args


def main():
    raw = argparse.RawDescriptionHelpFormatter  # keeps the lines of the docstring
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    args = arguments(parser, __file__)
    jax.config.update("jax_default_matmul_precision", "float32")

    *graph, classes = read_graph(args.modules)
    labels = graph[1]
    held_out = (np.random.default_rng(args.seed).random(len(labels)) < 0.5) & (labels >= 0)
    train = (labels >= 0) & ~held_out
    title = "A graph convolution network on Python's import graph, with jaxkern and with jax.ops"
    setting = f"{len(labels)} modules, {len(graph[2])} edges, {jax.devices()[0].device_kind}"
    print(f"{setting}\nlearnt: {', '.join(classes)}", flush=True)

    runs = {name: Training(functions, graph, jnp.asarray(train), args) for name, functions in LIBRARIES.items()}
    take_turns(runs, args.steps)
    return report(runs, labels, held_out, title, setting, args.out)


if __name__ == "__main__":
    sys.exit(main())
