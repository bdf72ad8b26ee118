"""A program that knows nothing of jaxkern, run as it is and under `jaxkern.accelerate()`.

    pip install ".[examples]"
    python examples/accelerate.py                     a graph of 20 000 nodes
    python examples/accelerate.py --preset arxiv      as large as ogbn-arxiv; for a GPU

The program is a graph network of three layers that classifies nodes: written with jraph where that is installed, with
jax.ops.segment_sum otherwise, and trained with optax. A few nodes have most of the edges, as in citations. The example
trains the same steps both ways.

What to look at: first the table of `jaxkern.explain`, which lists the operations of a training step that a GPU would run on
kernels, and why others stay with XLA; it needs no GPU. Then the losses, which agree, and the milliseconds of a step. The picture
shows both loss curves and their difference. Without a GPU both ways are the same program, except for `--force`, which runs
jaxkern's references on the CPU. The exit status is 1 if the losses disagree.

Needs the `examples` extra: optax, tqdm and matplotlib. Takes half a minute on 2 cores.
"""

import argparse
import importlib.util
import sys
import time

import display
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxkern

PRESETS = {"small": (20_000, 100_000), "arxiv": (169_343, 1_166_243)}
FEATURES, CLASSES = 128, 40
BOUND = 0.02  # mean difference of the losses, in nats; the sums of the plain program are rounded to 16 bits each


# ---- the program: plain JAX


def layer(x, weight, senders, receivers):
    """Mean of the neighbours' features, transformed."""
    if importlib.util.find_spec("jraph"):
        import jraph

        count = lambda n: jnp.array([n])
        graph = jraph.GraphsTuple(x, None, receivers, senders, None, count(len(x)), count(len(senders)))
        return jraph.GraphConvolution(lambda h: h @ weight, add_self_edges=False)(graph).nodes
    degree = jax.ops.segment_sum(jnp.ones(senders.shape, x.dtype), receivers, len(x))
    sums = jax.ops.segment_sum((x @ weight)[senders], receivers, len(x))
    return sums / jnp.maximum(degree, 1)[:, None]


def loss(params, x, labels, senders, receivers, dtype):
    x = x.astype(dtype)
    for k, weight in enumerate(params):
        x = layer(jax.nn.relu(x) if k else x, weight.astype(dtype), senders, receivers)
    return optax.softmax_cross_entropy_with_integer_labels(x.astype(jnp.float32), labels).mean()


def make_step(optimizer, dtype):
    def step(state, *data):
        params, moments = state
        value, gradient = jax.value_and_grad(loss)(params, *data, dtype)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return jax.jit(step)


# ---- both ways


def citations(nodes, edges, seed):
    """Features, classes, senders and receivers; a node's features tell its class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, nodes)
    x = rng.normal(size=(nodes, FEATURES)) + 2 * np.eye(CLASSES, FEATURES)[labels]
    senders, own = rng.integers(0, nodes, edges), np.arange(nodes)
    receivers = (rng.zipf(1.5, edges) - 1) % nodes
    ids = [np.concatenate([a, own]).astype(np.int32) for a in (senders, receivers)]
    return jnp.asarray(x, jnp.float32), jnp.asarray(labels, jnp.int32), *map(jnp.asarray, ids)


def train(step, state, data, steps, name):
    """Losses, seconds of the first step, and milliseconds of the others' median."""
    losses, seconds = [], []
    for _ in display.Progress(range(steps), name):
        start = time.perf_counter()
        state, value = jax.block_until_ready(step(state, *data))
        seconds.append(time.perf_counter() - start)
        losses.append(float(value))
    return np.array(losses), seconds[0], 1e3 * float(np.median(seconds[1:] or seconds))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small", help="size of the graph")
    parser.add_argument("--steps", type=int, default=20, help="training steps with and without accelerate")
    parser.add_argument("--width", type=int, default=64, help="width of the hidden layers")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="dtype of the layers"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the graph")
    parser.add_argument("--force", action="store_true", help="take every operation, on the CPU as well; for tests")
    display.add_out(parser, __file__)
    args = parser.parse_args()
    if min(args.steps, args.width) < 1:
        parser.error("--steps and --width start at 1")
    display.check_out(parser, args.out)

    data = citations(*PRESETS[args.preset], args.seed)
    keys = jax.random.split(jax.random.key(args.seed), 3)
    widths = (FEATURES, args.width, args.width, CLASSES)
    params = [jax.random.normal(k, s) * (2 / sum(s)) ** 0.5 for k, s in zip(keys, zip(widths, widths[1:]))]
    optimizer = optax.adam(1e-2)
    state = params, optimizer.init(params)
    step = make_step(optimizer, jnp.dtype(args.dtype))

    accelerated = jaxkern.accelerate(force=args.force)
    with accelerated:
        print(f"What a GPU would run on jaxkern:\n{jaxkern.explain(step)(state, *data)}\n", flush=True)
        own = train(step, state, data, args.steps, "accelerated")
    plain = train(step, state, data, args.steps, "plain")

    print(f"\n{'':12}{'first step, s':>15}{'ms per step':>12}{'last loss':>12}")
    for name, (losses, first, ms) in {"accelerated": own, "plain": plain}.items():
        print(f"{name:12}{first:>15.2f}{ms:>12.2f}{losses[-1]:>12.4f}")
    difference = float(np.abs(own[0] - plain[0]).mean())
    agree = difference <= BOUND  # False for NaN too
    print(f"\nlosses, mean |difference|, nats: {difference:.2e}, allowed {BOUND:g}")
    nodes, edges = PRESETS[args.preset]
    setting = f"{nodes} nodes, {edges} edges, {args.dtype}, {jax.devices()[0].device_kind}"
    title = "An unchanged graph network, plain and under jaxkern.accelerate()"
    curves = {"accelerated": own[0], "plain": plain[0]}
    display.save_curves(args.out, curves, "nats", title, setting)
    numbers = {
        "last loss": "equal but for rounding",
        "ms per step": "on a GPU, what the kernels in the table above gain",
    }
    picture = "both loss curves, which lie on each other, and their difference below"
    return display.conclude("losses", agree, args.out, picture, numbers)


if __name__ == "__main__":
    sys.exit(main())
