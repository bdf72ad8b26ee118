"""Train a transformer of flax.nnx on Python's own sources, with the layers of jaxkern.nnx and with those of flax, and compare them.

    python examples/flax_layers.py
    python examples/flax_layers.py --width 512 --heads 8 --layers 8 --context 512 --batch 64     on a GPU

The model is one class, which takes its norms, embedding and attention from the module it is given: `jaxkern.nnx` or `flax.nnx`. Its
blocks are made by nnx.vmap, and run by nnx.scan. Both models are trained from one seed on the same batches of bytes, step
by step in turns. At the end the checkpoint of the jaxkern model is read into the flax model.

What to look at: the bits per byte on held-out files, which agree, also after the flax model has read the checkpoint, and the time of a step. The
picture shows both loss curves, which lie on each other, and their difference. The exit status is 1 if the curves disagree.

The text is every .py file of the standard library, or of --text DIR. Needs the `layers` and `examples` extras: flax, optax, tqdm and
matplotlib. Takes a minute on 2 cores and reaches about 3.7 bits per byte (8 is no model at all).
"""

import argparse
import math
import sys
import sysconfig
import time

import corpus
import display
import jax
import jax.numpy as jnp
import numpy as np

try:
    import optax
    from flax import nnx
except ModuleNotFoundError as error:
    sys.exit(f"{__doc__}\n{error}: pip install '.[layers,examples]'")

import jaxkern.nnx

LIBRARIES = {"jaxkern": jaxkern.nnx, "flax": nnx}
BOUND = 1e-3  # mean difference of the curves, in bits per byte


class Block(nnx.Module):
    def __init__(self, library, width, heads, rngs):
        self.norm1, self.norm2 = library.RMSNorm(width, rngs=rngs), library.RMSNorm(width, rngs=rngs)
        self.attention = library.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Model(nnx.Module):
    """[batch, context] bytes to the logits of the bytes that follow."""

    def __init__(self, library, args, rngs):
        self.embed = library.Embed(256, args.width, rngs=rngs)
        self.places = library.Embed(args.context, args.width, rngs=rngs)
        block = lambda rngs: Block(library, args.width, args.heads, rngs)
        self.blocks = nnx.split_rngs(splits=args.layers)(nnx.vmap(block, in_axes=0, out_axes=0))(rngs)
        self.norm = library.LayerNorm(args.width, rngs=rngs)

    def __call__(self, ids):
        mask = nnx.make_causal_mask(ids[:1], dtype=bool)
        blocks = nnx.scan(lambda x, block: block(x, mask), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = blocks(self.embed(ids) + self.places(jnp.arange(ids.shape[1])), self.blocks)
        return self.embed.attend(self.norm(x))


def loss(model, windows):
    """Mean nats of a byte; windows: [batch, context + 1]."""
    return optax.softmax_cross_entropy_with_integer_labels(model(windows[:, :-1]), windows[:, 1:]).mean()


@nnx.jit
def train(model, optimizer, windows):
    value, gradient = nnx.value_and_grad(loss)(model, windows)
    optimizer.update(model, gradient)
    return value


class Training:
    """The training with one of the libraries, and what was measured on the way."""

    def __init__(self, library, args):
        self.model = nnx.jit(lambda rngs: Model(library, args, rngs))(nnx.Rngs(args.seed))
        schedule = optax.cosine_decay_schedule(2e-3, args.steps)
        self.optimizer = nnx.Optimizer(self.model, optax.adam(schedule), wrt=nnx.Param)
        self.bits, self.seconds = [], []

    def step(self, windows):
        start = time.perf_counter()
        nats = float(train(self.model, self.optimizer, windows))
        self.seconds.append(time.perf_counter() - start)
        self.bits.append(nats / math.log(2))


measure = nnx.jit(loss)


def heldout(model, batches):
    return float(np.mean([measure(model, windows) for windows in batches])) / math.log(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64, help="features of a byte")
    parser.add_argument("--heads", type=int, default=4, help="attention heads; they divide the width")
    parser.add_argument("--layers", type=int, default=2, help="blocks of the model")
    parser.add_argument("--context", type=int, default=64, help="bytes per window")
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches")
    parser.add_argument("--text", default=sysconfig.get_path("stdlib"), help="folder of .py files")
    display.add_out(parser, __file__)
    args = parser.parse_args()
    if min(args.width, args.heads, args.layers, args.context, args.batch, args.steps) < 1 or args.width % args.heads:
        parser.error(
            "--width, --heads, --layers, --context, --batch and --steps start at 1, and --heads divides --width"
        )
    display.check_out(parser, args.out)
    # A GPU's default is fewer bits, and both curves would wander.
    jax.config.update("jax_default_matmul_precision", "float32")

    texts = corpus.read_text(args.text)
    if min(sum(map(len, t)) for t in texts) < 16 * args.context:
        parser.error(f"--text: too few .py files under {args.text} to train on")
    training, held, _ = corpus.tokenize(*texts, 256)
    runs = {name: Training(library, args) for name, library in LIBRARIES.items()}
    size = sum(w.size for w in jax.tree.leaves(nnx.state(runs["flax"].model, nnx.Param)))
    setting = f"{size / 1e6:.2f} M parameters, {args.layers} blocks, batch {args.batch} × {args.context}, "
    setting += jax.devices()[0].device_kind
    print(setting, flush=True)

    rng = np.random.default_rng(args.seed)
    progress = display.Progress(range(args.steps), "training")
    for step in progress:
        starts = rng.integers(len(training) - args.context, size=args.batch)
        windows = corpus.cut_windows(training, starts, args.context)
        order = list(runs.values())
        for run in order if step % 2 else reversed(order):  # neither always goes first
            run.step(windows)
        progress.note(**{name: f"{run.bits[-1]:.3f}" for name, run in runs.items()})

    batches = corpus.even_windows(held, args.context, args.batch, 256)
    bits = {name: heldout(run.model, batches) for name, run in runs.items()}
    nnx.update(runs["flax"].model, nnx.state(runs["jaxkern"].model))  # a checkpoint of one model in the other
    moved = heldout(runs["flax"].model, batches)
    print(f"\n{'':10}{'held out, bits/byte':>22}{'ms per step':>14}{'first step, s':>16}")
    for name, run in runs.items():
        ms = 1e3 * float(np.median(run.seconds[min(5, len(run.seconds) // 2) :]))
        print(f"{name:10}{bits[name]:>22.4f}{ms:>14.1f}{run.seconds[0]:>16.1f}")
    print(f"{'moved':10}{moved:>22.4f}     the checkpoint of jaxkern's model, read into flax's")

    curves = {name: np.array(run.bits) for name, run in runs.items()}
    difference = float(np.abs(curves["jaxkern"] - curves["flax"]).mean())
    print(f"\ncurves, mean |difference|, bits/byte: {difference:.1e}, allowed {BOUND:g}")
    title = "One transformer, with the layers of jaxkern.nnx and of flax.nnx"
    legends = {name: f"{library.__name__} ({bits[name]:.4f} on held-out files)" for name, library in LIBRARIES.items()}
    display.save_curves(args.out, curves, "training loss, bits per byte (lower is better)", title, setting, legends)
    apart = max(abs(bits["jaxkern"] - bits["flax"]), abs(bits["jaxkern"] - moved))
    agree = difference <= BOUND and apart <= BOUND  # False for NaN too
    numbers = {
        "held out, bits/byte": "equal but for rounding, on both sides of the checkpoint; 8 is no model at all",
        "ms per step": "of both models, in the same seconds on the same machine",
    }
    picture = "both loss curves, which lie on each other, and their difference below"
    return display.conclude("curves", agree, args.out, picture, numbers)


if __name__ == "__main__":
    sys.exit(main())
