"""Train a language model on Python's own sources, with jaxkern and with jax.nn, and compare them.

    python examples/language_model.py                  # bytes, 0.4 M parameters, two CPU cores
    python examples/language_model.py --preset gpt2    # 124 M parameters, bfloat16, a large GPU

One transformer is trained twice from one seed on the same batches. The two trainings share all their
code but the functions in LIBRARIES: tokens go through an `embedding_lookup`, attention is a causal,
scaled softmax, with jaxkern in one kernel, the feed-forward block a `swiglu`, each sum into the
residual stream one kernel with the `rms_norm` that follows, under jit, grad and a vmap over the
examples; head and loss are one `linear_softmax_cross_entropy` of the whole batch, which never has all
of its logits. The trainings take turns step by step, so each step is timed beside its twin on the same
machine in the same second.

What to look at: the picture shows both loss curves, which lie on each other, and their difference below.
The table has the bits per byte on held-out files, which agree in the first digits, and the median
milliseconds of a step, which are of interest on a GPU. The exit status is 1 if the curves disagree by more
than the preset's bounds.

  --preset small   one token a byte. Takes a minute on 2 cores and reaches about 3.4 bits per
                   byte (8 is no model at all). The curves part by rounding only: some
                   millionths of a bit on a CPU, more on a GPU, where kernels round otherwise.
                   A softmax gradient wrong by 5 % breaks the bounds.
  --preset gpt2    a vocabulary of 50257 (256 bytes and 50001 merges, trained first; corpus.py says
                   how), 12 layers, 768 wide, context 1024: the sizes of GPT-2, in bfloat16 with
                   float32 weights. Batch 32 is meant for 80 GB of GPU memory or more.
  --preset tiny    seconds; for the tests. Its bounds, too, are for its own number of steps:
                   rounding grows with training, and thousands of steps outgrow any bound.

With --dropout RATE both drop attention weights, from the same keys but each by its library's generator. The
curves then belong to two different trainings, and are compared loosely.

The text is every .py file of the standard library, or of --text DIR. Held-out text is cut into
windows of the context's length, each read from nothing; the bits of all predicted tokens are
divided by the bytes those tokens stand for, so that tokenizers can be compared.

Needs the `examples` extra: tqdm and matplotlib.
"""

import argparse
import dataclasses
import functools
import math
import sys
import sysconfig
import time
import typing

import corpus
import display
import jax
import jax.numpy as jnp
import numpy as np

import jaxkern


class Functions(typing.NamedTuple):
    """What the model takes from a library; everything else is the same code for both."""

    attention_weights: typing.Callable  # of scores, their scale, a rate of dropout and a key
    head_loss: typing.Callable  # mean loss of activations, a table of embeddings as head, and labels
    rms_norm: typing.Callable  # of x and its gain; or of x + residual, which it returns as well
    embedding_lookup: typing.Callable
    swiglu: typing.Callable  # of both halves in one array


def plain_swiglu(x):
    x, gate = jnp.split(x, 2, axis=-1)
    return x * jax.nn.silu(gate)


def plain_loss(h, table, labels):
    """The loss as in optax: the whole table of log-probabilities, and one of each row."""
    logs = jax.nn.log_softmax((h @ table.astype(h.dtype).T).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], axis=-1))


def fused_loss(h, table, labels):
    return jaxkern.linear_softmax_cross_entropy(h, table, labels, transpose_weight=True)


def plain_rms_norm(x, gain, residual=None):
    """RMSNorm in float32, whatever the type of x."""
    x = x if residual is None else x + residual
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    y = (wide * scale * gain).astype(x.dtype)
    return y if residual is None else (y, x)


def fused_weights(scores, scale, rate, key):
    return jaxkern.softmax(scores, scale=scale, causal=True, dropout_rate=rate, dropout_key=key)


def composed_weights(scores, scale, rate, key):
    causal_mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    wide = jnp.where(causal_mask, scores.astype(jnp.float32) * scale, -jnp.inf)
    weights = jax.nn.softmax(wide).astype(scores.dtype)
    if rate:
        weights = jnp.where(jax.random.bernoulli(key, 1 - rate, weights.shape), weights / (1 - rate), 0)
    return weights


LIBRARIES = {
    "jaxkern": Functions(fused_weights, fused_loss, jaxkern.rms_norm, jaxkern.embedding_lookup, jaxkern.swiglu),
    "jax.nn": Functions(composed_weights, plain_loss, plain_rms_norm, lambda table, ids: table[ids], plain_swiglu),
}


@dataclasses.dataclass(frozen=True)
class Preset:
    vocabulary: int
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    rate: float  # the peak learning rate
    dtype: typing.Any  # of the arithmetic; weights and optimizer are float32 always
    heldout: int  # windows of held-out text
    curve_bound: float  # mean difference allowed between the curves, bits per byte
    norm_bound: float  # relative difference allowed between the first step's gradient norms
    dropout: float = 0.0  # of attention weights


PRESETS = {
    "tiny": Preset(256, 2, 32, 2, 32, 4, 10, 4e-3, jnp.float32, 16, 1e-3, 1e-5),
    "small": Preset(256, 3, 96, 3, 128, 16, 120, 2e-3, jnp.float32, 256, 1e-3, 1e-5),
    "gpt2": Preset(50257, 12, 768, 12, 1024, 32, 300, 6e-4, jnp.bfloat16, 256, 3e-2, 3e-2),
}


def initial_params(key, p):
    keys = iter(jax.random.split(key, 1 + 4 * p.layers))

    def normal(*shape, std=0.02):
        return std * jax.random.normal(next(keys), shape, jnp.float32)

    hidden = 8 * p.width // 3  # a gated block has three matrices: so many weights as two of four times the width
    into_residual = 0.02 / math.sqrt(2 * p.layers)  # so that depth does not widen the residual stream
    return {
        "embedding": normal(p.vocabulary, p.width),
        "last_gain": jnp.ones(p.width),
        "layers": [
            {
                "attention_gain": jnp.ones(p.width),
                "query_key_value": normal(p.width, 3, p.heads, p.width // p.heads),
                "attention_out": normal(p.heads, p.width // p.heads, p.width, std=into_residual),
                "mlp_gain": jnp.ones(p.width),
                "mlp_in": normal(p.width, 2 * hidden),
                "mlp_out": normal(hidden, p.width, std=into_residual),
            }
            for _ in range(p.layers)
        ],
    }


def rotate(x):
    """Rotary positions: pairs of features of x (time, heads, features) turn with time."""
    time_steps, _, features = x.shape
    speed = 10000.0 ** (-jnp.arange(features // 2) / (features // 2))
    angle = jnp.arange(time_steps)[:, None, None] * speed
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def activations(functions, p, dropout, params, inputs, key):
    """What the head reads, for one window of as many tokens as the context has; the batch is a vmap outside."""
    x = functions.embedding_lookup(params["embedding"].astype(p.dtype), inputs)
    gains = [*(layer["attention_gain"] for layer in params["layers"]), params["last_gain"]]
    h = functions.rms_norm(x, gains[0])
    for layer, next_gain, layer_key in zip(params["layers"], gains[1:], jax.random.split(key, p.layers)):
        w = {name: weight.astype(p.dtype) for name, weight in layer.items()}

        queries, keys, values = jnp.einsum("td,dchf->cthf", h, w["query_key_value"])
        scores = jnp.einsum("qhf,khf->hqk", rotate(queries), rotate(keys))
        attention = functions.attention_weights(scores, queries.shape[-1] ** -0.5, dropout, layer_key)
        h = jnp.einsum("hqk,khf->qhf", attention, values)
        h, x = functions.rms_norm(jnp.einsum("qhf,hfd->qd", h, w["attention_out"]), layer["mlp_gain"], residual=x)
        h, x = functions.rms_norm(functions.swiglu(h @ w["mlp_in"]) @ w["mlp_out"], next_gain, residual=x)

    return h


def adamw(params, grads, state, rate, decay=0.1, beta1=0.9, beta2=0.95, clip=1.0):
    """One step of AdamW on clipped gradients: (params, state, norm of the gradients)."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / norm), grads)
    count = state["count"] + 1
    mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state["mean"], grads)
    square = jax.tree.map(lambda s, g: beta2 * s + (1 - beta2) * g * g, state["square"], grads)

    def update(w, m, s):
        step = m / (1 - beta1**count) / (jnp.sqrt(s / (1 - beta2**count)) + 1e-8)
        return w - rate * (step + (decay * w if w.ndim > 1 else 0.0))  # gains do not decay

    params = jax.tree.map(update, params, mean, square)
    return params, {"mean": mean, "square": square, "count": count}, norm


class Training:
    """One library's training: its weights and optimizer, and what was measured on the way."""

    def __init__(self, functions, p, seed):
        warmup = max(1, p.steps // 10)

        @functools.partial(jax.jit, static_argnames="dropout")
        def loss(params, windows, key, dropout=0.0):
            """Mean nats a token of windows of context + 1 tokens."""
            inputs, targets = windows[:, :-1], windows[:, 1:]
            examples = jax.vmap(functools.partial(activations, functions, p, dropout), in_axes=(None, 0, 0))
            h = examples(params, inputs, jax.random.split(key, len(windows)))
            return functions.head_loss(h, params["embedding"], targets)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, windows):
            key = jax.random.fold_in(jax.random.key(seed), state["count"])
            value, grads = jax.value_and_grad(loss)(params, windows, key, p.dropout)
            cosine = 0.55 + 0.45 * jnp.cos(jnp.pi * state["count"] / p.steps)  # from 1 to a tenth
            rate = p.rate * jnp.minimum((state["count"] + 1) / warmup, cosine)
            params, state, norm = adamw(params, grads, state, rate)
            return params, state, value, norm

        self._step, self._loss = step, loss
        self.params = initial_params(jax.random.key(seed), p)
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        self.state = {"mean": zeros(self.params), "square": zeros(self.params), "count": jnp.int32(0)}
        self.nats, self.norms, self.seconds = [], [], []

    def step(self, windows):
        start = time.perf_counter()
        out = jax.block_until_ready(self._step(self.params, self.state, windows))
        self.seconds.append(time.perf_counter() - start)
        self.params, self.state, nats, norm = out
        self.nats.append(float(nats))
        self.norms.append(float(norm))

    def heldout_nats(self, batches):
        return float(np.mean([self._loss(self.params, windows, jax.random.key(0)) for windows in batches]))

    def milliseconds(self):
        """Median of a step, without the first ones, which compile and warm the caches."""
        return 1e3 * float(np.median(self.seconds[min(5, len(self.seconds) // 2) :]))


def main():
    raw = argparse.RawDescriptionHelpFormatter  # keeps the lines of the docstring
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--preset", choices=PRESETS, default="small", help="sizes of model and batch; see above")
    parser.add_argument("--steps", type=int, help="training steps of each model")
    parser.add_argument("--batch", type=int, help="windows per step")
    parser.add_argument("--dropout", type=float, help="rate at which attention weights are dropped; 0 by default")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches")
    parser.add_argument("--text", default=sysconfig.get_path("stdlib"), help="folder of .py files")
    display.add_out(parser, __file__)
    args = parser.parse_args()
    given = {k: v for k in ("steps", "batch", "dropout") if (v := getattr(args, k)) is not None}
    p = dataclasses.replace(PRESETS[args.preset], **given)
    if min(p.steps, p.batch) < 1:
        parser.error("--steps and --batch start at 1")
    if not 0 <= p.dropout < 1:
        parser.error("--dropout is at least 0 and below 1")
    if p.dropout:  # different elements are dropped: two trainings, whose curves agree roughly
        p = dataclasses.replace(p, curve_bound=0.3, norm_bound=0.3)
    display.check_out(parser, args.out)

    if p.dtype == jnp.float32:  # a GPU's default is fewer bits, and both curves would wander
        jax.config.update("jax_default_matmul_precision", "float32")

    training_text, heldout_text = corpus.read_text(args.text)
    if min(sum(map(len, texts)) for texts in (training_text, heldout_text)) < 16 * p.context:
        parser.error(f"--text: too few .py files under {args.text} to train on")
    training, heldout, bytes_of = corpus.tokenize(training_text, heldout_text, p.vocabulary)
    runs = {name: Training(functions, p, args.seed) for name, functions in LIBRARIES.items()}
    size = sum(w.size for w in jax.tree.leaves(runs["jaxkern"].params))
    setting = f"{args.preset}: {size / 1e6:.1f} M parameters, {p.dtype.__name__}, "
    setting += f"batch {p.batch} × {p.context}, {jax.devices()[0].device_kind}"
    print(setting)
    for what, texts, ids in ("training", training_text, training), ("held out", heldout_text, heldout):
        print(f"{what}: {len(texts)} files, {len(ids) / 1e6:.1f} M tokens", flush=True)

    rng, scales = np.random.default_rng(args.seed), []
    progress = display.Progress(range(p.steps), "training")
    for step in progress:
        starts = rng.integers(len(training) - p.context, size=p.batch)
        windows = corpus.cut_windows(training, starts, p.context)
        scales.append(corpus.bits_per_byte(windows, bytes_of))
        order = list(runs.values())
        for run in order if step % 2 else reversed(order):  # neither always goes first
            run.step(windows)
        progress.note(**{name: f"{run.nats[-1] * scales[-1]:.3f}" for name, run in runs.items()})

    curves = {name: np.array(run.nats) * scales for name, run in runs.items()}
    batches = corpus.even_windows(heldout, p.context, p.batch, p.heldout)
    scale = corpus.bits_per_byte(batches, bytes_of)
    bits = {name: run.heldout_nats(batches) * scale for name, run in runs.items()}
    print(f"\n{'':10}{'held out, bits/byte':>22}{'ms per step':>14}{'first step, s':>16}")
    for name, run in runs.items():
        print(f"{name:10}{bits[name]:>22.4f}{run.milliseconds():>14.1f}{run.seconds[0]:>16.1f}")

    difference = curves["jaxkern"] - curves["jax.nn"]
    norms = [run.norms[0] for run in runs.values()]
    checks = {
        "curves, mean |difference|, bits/byte": (np.abs(difference).mean(), p.curve_bound),
        "held out, |difference|, bits/byte": (abs(bits["jaxkern"] - bits["jax.nn"]), p.curve_bound),
        "first gradient's norm, relative": (abs(norms[0] / norms[1] - 1), p.norm_bound),
    }
    print()
    for what, (value, bound) in checks.items():
        print(f"{what:38}{value:>10.2e}   allowed {bound:g}")
    title = "One transformer, trained with jaxkern and with jax.nn: the curves lie on each other"
    legends = {name: f"{name} ({bits[name]:.4f} on held-out files)" for name in runs}
    display.save_curves(args.out, curves, "bits per byte", title, setting, legends)
    numbers = {
        "held out, bits/byte": "equal but for rounding; 8 is no model at all",
        "ms per step": "of both ways, in the same seconds on the same machine",
    }
    agree = all(value <= bound for value, bound in checks.values())  # False for NaN too
    picture = "both loss curves, which lie on each other, and their difference below"
    return display.conclude("curves", agree, args.out, picture, numbers)


if __name__ == "__main__":
    sys.exit(main())
