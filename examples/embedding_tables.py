"""A click model over many embedding tables, with one kernel for all of them.

    python examples/embedding_tables.py
    python examples/embedding_tables.py --rows 1000000 --batch 65536     on a GPU

Each impression has 8 features, and each feature a bag of up to 5 ids in a table of its own. The tables are stacked into one,
with an offset for each, so that one `embedding_bag` gathers and sums all bags and its gradient writes each row once. A small
network turns the bags into a probability of a click. The same model with `jnp.take` and a sum, which stores bags x ids x
features, is trained from the same seed.

What to look at: the losses, which agree and fall, and the milliseconds of a step, which are of interest on a GPU. The picture shows
both loss curves and their difference. The exit status is 1 if the losses disagree.

Needs the `examples` extra: optax, tqdm and matplotlib. Takes half a minute on 2 cores.
"""

import argparse
import sys
import time

import display
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxkern

TABLES, IDS, WIDTH = 8, 5, 16
BATCHES = 8  # which follow each other again and again
BOUND = 1e-3  # mean difference of the losses, in nats


def bags_of_jaxkern(table, ids):
    """Sums of rows of `table` for each bag; ids are [bags, IDS], and -1 pads."""
    return jaxkern.embedding_bag(table, ids)


def bags_of_jax(table, ids):
    rows = jnp.take(table, jnp.maximum(ids, 0), axis=0)
    return jnp.where(ids[..., None] >= 0, rows, 0).sum(1)


def clicks(rows, batch, seed):
    """Ids of [batch, TABLES, IDS], most of them few and popular, and clicks that depend on them."""
    rng = np.random.default_rng(seed)
    ids = (rng.zipf(1.3, (batch, TABLES, IDS)) - 1) % rows
    taste = np.sin(np.arange(rows))[ids]
    ids = np.where(rng.random(ids.shape) < 0.3, -1, ids)  # bags of different sizes
    score = np.where(ids >= 0, taste, 0).sum((1, 2))
    offsets = rows * np.arange(TABLES)[:, None]
    stacked = np.where(ids >= 0, ids + offsets, -1).astype(np.int32)
    return jnp.asarray(stacked.reshape(-1, IDS)), jnp.asarray(score > np.median(score), jnp.float32)


def loss(bags, params, ids, clicked):
    x = bags(params["table"], ids).reshape(-1, TABLES * WIDTH)
    logits = jax.nn.relu(x @ params["hidden"]) @ params["out"]
    return optax.sigmoid_binary_cross_entropy(logits[:, 0], clicked).mean()


def train(bags, params, batches, steps, name):
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(state, ids, clicked):
        params, moments = state
        value, gradient = jax.value_and_grad(lambda p: loss(bags, p, ids, clicked))(params)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, updates), moments), value

    state, losses, seconds = (params, optimizer.init(params)), [], []
    for k in display.Progress(range(steps), name):
        start = time.perf_counter()
        state, value = jax.block_until_ready(step(state, *batches[k % BATCHES]))
        seconds.append(time.perf_counter() - start)
        losses.append(float(value))
    return np.array(losses), 1e3 * float(np.median(seconds))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5000, help="rows of each table")
    parser.add_argument("--batch", type=int, default=2048, help="impressions per step")
    parser.add_argument("--steps", type=int, default=50, help="training steps of each model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the data")
    display.add_out(parser, __file__)
    args = parser.parse_args()
    if min(args.rows, args.batch, args.steps) < 1:
        parser.error("--rows, --batch and --steps start at 1")
    display.check_out(parser, args.out)

    batches = [clicks(args.rows, args.batch, args.seed + k) for k in range(BATCHES)]
    keys = jax.random.split(jax.random.key(args.seed), 3)
    shapes = {"table": (TABLES * args.rows, WIDTH), "hidden": (TABLES * WIDTH, 64), "out": (64, 1)}
    params = {name: 0.1 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items())}
    runs = {"jaxkern": bags_of_jaxkern, "jax.numpy": bags_of_jax}
    found = {name: train(bags, params, batches, args.steps, name) for name, bags in runs.items()}

    print(f"\n{'':12}{'first loss':>12}{'last loss':>12}{'ms per step':>12}")
    for name, (losses, ms) in found.items():
        print(f"{name:12}{losses[0]:>12.4f}{losses[-1]:>12.4f}{ms:>12.2f}")
    difference = float(np.abs(found["jaxkern"][0] - found["jax.numpy"][0]).mean())
    agree = difference <= BOUND  # False for NaN too
    print(f"losses, mean |difference|: {difference:.1e}, allowed {BOUND:g}")
    setting = f"{TABLES} tables of {args.rows} rows, {BATCHES} batches of {args.batch} impressions, {jax.devices()[0].device_kind}"
    title = "One click model: its embedding tables with jaxkern.embedding_bag and with jnp.take"
    curves = {name: losses for name, (losses, _) in found.items()}
    display.save_curves(args.out, curves, "nats", title, setting)
    numbers = {
        "last loss": "equal but for rounding, and below the first, 0.69, which is guessing",
        "ms per step": "of both ways, one after the other on the same machine",
    }
    picture = "both loss curves, which lie on each other, and their difference below"
    return display.conclude("losses", agree, args.out, picture, numbers)


if __name__ == "__main__":
    sys.exit(main())
