"""Train a recurrent language model on Python's own sources, with jaxkern.scan and with jax.lax.scan, and compare them.

    python examples/recurrent_model.py
    python examples/recurrent_model.py --width 1024 --batch 64 --context 1024     on a GPU

Bytes go through layers of a simple recurrent unit (Lei et al., EMNLP 2018): products of matrices make the values and gates of all
steps at once, and the loop over time is elementwise, with a weight and a bias for each feature. So the loop is one kernel, and its
gradient another, those by the weights included. Both models are trained from one seed on the same batches, step by step in
turns.

What to look at: the picture shows both loss curves, which lie on each other, and their difference below. The table has the bits per
byte on held-out files, which agree in the first digits, and the median time of a step, which is of interest on a GPU. The exit
status is 1 if the curves disagree.

The text is every .py file of the standard library, or of --text DIR. Needs the `examples` extra: optax, tqdm and matplotlib. Takes
a minute on 2 cores and reaches 2.8 bits per byte (8 is no model at all).
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
import optax

import jaxkern

SCANS = {"jaxkern": jaxkern.scan, "jax.lax": jax.lax.scan}
BOUND = 1e-3  # mean difference of the curves, in bits per byte


# ---- the model


def initial_params(key, width, layers):
    keys = iter(jax.random.split(key, 2 + layers))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * shape[0] ** -0.5
    layer = lambda: {"in": normal(width, 3 * width), "weights": jnp.zeros((2, width)), "biases": jnp.ones((2, width))}
    return {
        "embedding": normal(256, width) * 16,
        "layers": [layer() for _ in range(layers)],
        "head": normal(width, 256) * 0.1,
    }


def recurrent_unit(scan, params, x):
    """x: [steps, batch, width]."""
    value, forget, reset = jnp.split(x @ params["in"], 3, axis=-1)
    (by_forget, by_reset), (bias_forget, bias_reset) = params["weights"], params["biases"]

    def step(c, inputs):
        value, forget, reset, x = inputs
        forget = jax.nn.sigmoid(forget + by_forget * c + bias_forget)
        reset = jax.nn.sigmoid(reset + by_reset * c + bias_reset)
        c = forget * c + (1 - forget) * value
        return c, reset * c + (1 - reset) * x

    return scan(step, jnp.zeros(x.shape[1:]), (value, forget, reset, x))[1]


def loss(scan, params, windows):
    """Mean nats of a byte; windows: [batch, steps + 1]."""
    x = params["embedding"][windows[:, :-1].T]
    for layer in params["layers"]:
        x = recurrent_unit(scan, layer, x)
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], windows[:, 1:].T).mean()


class Training:
    """The training with one of the loops: its weights, and what was measured on the way."""

    def __init__(self, scan, params, steps):
        schedule = optax.cosine_decay_schedule(4e-3, steps)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

        @jax.jit
        def step(state, windows):
            params, moments = state
            value, gradient = jax.value_and_grad(lambda p: loss(scan, p, windows))(params)
            updates, moments = optimizer.update(gradient, moments)
            return (optax.apply_updates(params, updates), moments), value

        self.state, self._step = (params, optimizer.init(params)), step
        self._loss = jax.jit(lambda params, windows: loss(scan, params, windows))
        self.bits, self.seconds = [], []

    def step(self, windows):
        start = time.perf_counter()
        self.state, nats = jax.block_until_ready(self._step(self.state, windows))
        self.seconds.append(time.perf_counter() - start)
        self.bits.append(float(nats) / math.log(2))

    def heldout(self, batches):
        return float(np.mean([self._loss(self.state[0], windows) for windows in batches])) / math.log(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=96, help="features of a layer")
    parser.add_argument("--layers", type=int, default=2, help="recurrent layers")
    parser.add_argument("--context", type=int, default=128, help="bytes per window")
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches")
    parser.add_argument("--text", default=sysconfig.get_path("stdlib"), help="folder of .py files")
    display.add_out(parser, __file__)
    args = parser.parse_args()
    if min(args.width, args.layers, args.context, args.batch, args.steps) < 1:
        parser.error("--width, --layers, --context, --batch and --steps start at 1")
    display.check_out(parser, args.out)
    # A GPU's default is fewer bits, and both curves would wander.
    jax.config.update("jax_default_matmul_precision", "float32")

    texts = corpus.read_text(args.text)
    if min(sum(map(len, t)) for t in texts) < 16 * args.context:
        parser.error(f"--text: too few .py files under {args.text} to train on")
    training, heldout, _ = corpus.tokenize(*texts, 256)
    params = initial_params(jax.random.key(args.seed), args.width, args.layers)
    runs = {name: Training(scan, params, args.steps) for name, scan in SCANS.items()}
    size = sum(w.size for w in jax.tree.leaves(params))
    setting = f"{size / 1e6:.2f} M parameters, {args.layers} layers, batch {args.batch} × {args.context}, "
    setting += jax.devices()[0].device_kind
    print(setting)
    print(f"training: {len(training) / 1e6:.1f} MB, held out: {len(heldout) / 1e6:.1f} MB", flush=True)

    rng = np.random.default_rng(args.seed)
    progress = display.Progress(range(args.steps), "training")
    for step in progress:
        starts = rng.integers(len(training) - args.context, size=args.batch)
        windows = corpus.cut_windows(training, starts, args.context)
        order = list(runs.values())
        for run in order if step % 2 else reversed(order):  # neither always goes first
            run.step(windows)
        progress.note(**{name: f"{run.bits[-1]:.3f}" for name, run in runs.items()})

    batches = corpus.even_windows(heldout, args.context, args.batch, 256)
    bits = {name: run.heldout(batches) for name, run in runs.items()}
    print(f"\n{'':10}{'held out, bits/byte':>22}{'ms per step':>14}{'first step, s':>16}")
    for name, run in runs.items():
        ms = 1e3 * float(np.median(run.seconds[min(5, len(run.seconds) // 2) :]))
        print(f"{name:10}{bits[name]:>22.4f}{ms:>14.1f}{run.seconds[0]:>16.1f}")

    curves = {name: np.array(run.bits) for name, run in runs.items()}
    difference = float(np.abs(curves["jaxkern"] - curves["jax.lax"]).mean())
    print(f"\ncurves, mean |difference|, bits/byte: {difference:.1e}, allowed {BOUND:g}")
    title = "One recurrent network, its loop with jaxkern.scan and with jax.lax.scan"
    legends = {name: f"{name}.scan ({bits[name]:.4f} on held-out files)" for name in runs}
    display.save_curves(args.out, curves, "bits per byte", title, setting, legends)
    agree = difference <= BOUND and abs(bits["jaxkern"] - bits["jax.lax"]) <= BOUND  # False for NaN too
    numbers = {
        "held out, bits/byte": "equal but for rounding; 8 is no model at all",
        "ms per step": "of both loops, in the same seconds on the same machine",
    }
    picture = "both loss curves, which lie on each other, and their difference below"
    return display.conclude("curves", agree, args.out, picture, numbers)


if __name__ == "__main__":
    sys.exit(main())
