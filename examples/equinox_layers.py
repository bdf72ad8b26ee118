"""Train an ensemble of equinox models to sort, with the layers of jaxkern.equinox and with those of equinox, and compare them.

    python examples/equinox_layers.py
    python examples/equinox_layers.py --width 256 --length 256 --models 8 --batch 512     on a GPU

A model reads a row of digits, and predicts the digit at each position of the sorted row. It is written for one row;
jax.vmap makes a batch of it, and eqx.filter_vmap an ensemble, so each kernel computes all models and all rows at once. The model takes its
embedding, norms and attention from the module that it is given: `jaxkern.equinox` or `equinox.nn`. Both ensembles start from the same
parameters and read the same rows. At the end, eqx.tree_serialise_leaves writes the jaxkern ensemble to a file, which is read into the other one.

What to look at: the share of positions with the right digit, which agrees, also after the other ensemble has read the file. The picture
shows both mean loss curves and their difference, and the right answers by position: one line for each model of the ensemble, and one for
the vote of all. The exit status is 1 if the curves disagree.

Needs the `layers` and `examples` extras: equinox, optax, tqdm and matplotlib. Takes half a minute on 2 cores.
"""

import argparse
import io
import sys
import time

import display
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

try:
    import equinox as eqx
    import optax
except ModuleNotFoundError as error:
    sys.exit(f"{__doc__}\n{error}: pip install '.[layers,examples]'")

import jaxkern.equinox

LIBRARIES = {"jaxkern": jaxkern.equinox, "equinox": eqx.nn}
BOUND = 1e-3  # relative difference of the losses, mean of all steps
DIGITS = 10


class Model(eqx.Module):
    """[length] digits to the logits of the sorted digits, [length, DIGITS]."""

    embed: eqx.nn.Embedding
    place: eqx.nn.Embedding
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    out: eqx.nn.Linear

    def __init__(self, library, width, length, key):
        embed, place, attention, mlp, out = jax.random.split(key, 5)
        self.embed = library.Embedding(DIGITS, width, key=embed)
        self.place = library.Embedding(length, width, key=place)
        self.norms = [library.LayerNorm(width), library.LayerNorm(width), library.LayerNorm(width)]
        self.attention = library.MultiheadAttention(4, width, key=attention)
        self.mlp = eqx.nn.MLP(width, width, 2 * width, 1, jax.nn.gelu, key=mlp)
        self.out = eqx.nn.Linear(width, DIGITS, key=out)

    def __call__(self, row):
        first, second, last = self.norms
        x = jax.vmap(self.embed)(row) + jax.vmap(self.place)(jnp.arange(len(row)))
        y = jax.vmap(first)(x)
        x = x + self.attention(y, y, y)
        x = x + jax.vmap(lambda x: self.mlp(second(x)))(x)
        return jax.vmap(lambda x: self.out(last(x)))(x)


@eqx.filter_jit
def logits(models, rows):
    """[models, rows, length, DIGITS]."""
    return eqx.filter_vmap(lambda model: jax.vmap(model)(rows))(models)


class Training:
    """The training of an ensemble with one of the libraries, and what was measured on the way."""

    def __init__(self, library, args):
        optimizer = optax.adam(args.rate)

        @eqx.filter_jit
        def step(models, moments, rows):
            def loss(models):
                return optax.softmax_cross_entropy_with_integer_labels(
                    logits(models, rows), jnp.broadcast_to(jnp.sort(rows), (args.models, *rows.shape))
                ).mean()

            value, gradient = eqx.filter_value_and_grad(loss)(models)
            updates, moments = optimizer.update(gradient, moments)
            return eqx.apply_updates(models, updates), moments, value

        keys = jax.random.split(jax.random.key(args.seed), args.models)
        make = eqx.filter_vmap(lambda key: Model(library, args.width, args.length, key))
        self.models = eqx.filter_jit(make)(keys)
        self.moments = optimizer.init(eqx.filter(self.models, eqx.is_inexact_array))
        self.losses, self.seconds, self._step = [], [], step

    def step(self, rows):
        start = time.perf_counter()
        self.models, self.moments, value = self._step(self.models, self.moments, rows)
        self.losses.append(float(value))
        self.seconds.append(time.perf_counter() - start)


def right(models, rows):
    """Shares of rows with the right digit at each position: [models, length] of each model, [length] of their mean."""
    scores = jax.nn.log_softmax(logits(models, rows))
    wanted = np.sort(rows)
    return np.mean(scores.argmax(-1) == wanted, 1), np.mean(scores.mean(0).argmax(-1) == wanted, 0)


def draw(out, losses, each, vote, setting):
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    panels = figure.subplot_mosaic([["loss", "right"], ["difference", "right"]], height_ratios=(3, 1))
    display.draw_curves(panels["loss"], panels["difference"], losses, "training loss (lower is better)")
    for k, shares in enumerate(each):
        panels["right"].plot(100 * shares, color="#b0b8c0", lw=1, label="" if k else "one model")
    panels["right"].plot(100 * vote, color=display.JAXKERN, lw=2, label="all models together")
    panels["right"].legend(frameon=False, loc="lower center")
    display.style(panels["right"], "position in the sorted row", "right digits, % (higher is better)")
    display.save(figure, out, "An ensemble that sorts, with the layers of jaxkern.equinox and of equinox", setting)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=32, help="features of a digit, a multiple of 4")
    parser.add_argument("--length", type=int, default=16, help="digits in a row")
    parser.add_argument("--models", type=int, default=4, help="models in the ensemble")
    parser.add_argument("--batch", type=int, default=64, help="rows per step")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each ensemble")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the rows")
    display.add_out(parser, __file__)
    args = parser.parse_args()
    if min(args.width, args.length, args.models, args.batch, args.steps) < 1 or args.width % 4:
        parser.error("--width, --length, --models, --batch and --steps start at 1, and --width is a multiple of 4")
    display.check_out(parser, args.out)
    # A GPU's default is fewer bits, and both curves would wander.
    jax.config.update("jax_default_matmul_precision", "float32")

    runs = {name: Training(library, args) for name, library in LIBRARIES.items()}
    size = sum(w.size for w in jax.tree.leaves(eqx.filter(runs["jaxkern"].models, eqx.is_array))) // args.models
    setting = f"{args.models} models of {size} parameters, {args.batch} rows of {args.length} digits a step, "
    setting += jax.devices()[0].device_kind
    print(setting, flush=True)
    rng = np.random.default_rng(args.seed)
    progress = display.Progress(range(args.steps), "training")
    for step in progress:
        rows = rng.integers(DIGITS, size=(args.batch, args.length), dtype=np.int32)
        order = list(runs.values())
        for run in order if step % 2 else reversed(order):  # neither always goes first
            run.step(rows)
        progress.note(**{name: f"{run.losses[-1]:.3f}" for name, run in runs.items()})

    rows = rng.integers(DIGITS, size=(512, args.length), dtype=np.int32)
    found = {name: right(run.models, rows) for name, run in runs.items()}
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, runs["jaxkern"].models)
    file.seek(0)
    found["moved"] = right(eqx.tree_deserialise_leaves(file, runs["equinox"].models), rows)
    print(f"\n{'':10}{'right digits: one model':>26}{'all together':>15}{'ms per step':>14}{'first step, s':>16}")
    for name, (each, vote) in found.items():
        print(f"{name:10}{each.mean():>26.2%}{vote.mean():>15.2%}", end="")
        if name in runs:
            seconds = runs[name].seconds
            print(f"{1e3 * np.median(seconds[min(5, len(seconds) // 2) :]):>14.1f}{seconds[0]:>16.1f}")
    print("     the file of jaxkern's ensemble, read into equinox's")

    losses = {name: np.array(run.losses) for name, run in runs.items()}
    difference = float(np.abs(losses["jaxkern"] / losses["equinox"] - 1).mean())
    print(f"\nlosses, mean relative difference: {difference:.1e}, allowed {BOUND:g}")
    draw(args.out, losses, *found["jaxkern"], setting)
    moved = float(np.abs(found["jaxkern"][0] - found["moved"][0]).max())
    agree = difference <= BOUND and moved <= 0.01  # False for NaN too
    numbers = {
        "right digits": "equal for both but for rounding, and on both sides of the file; 10 % is guessing",
        "all together": "the vote of the ensemble, at least as good as one model",
        "ms per step": "of both ensembles, in the same seconds on the same machine",
    }
    picture = "both loss curves, which lie on each other, and the right digits by position in the sorted row"
    return display.conclude("curves", agree, args.out, picture, numbers)


if __name__ == "__main__":
    sys.exit(main())
