"""Attention with a softmax of your own: a soft cap, a sliding window, documents and learnt slopes in one Python function.

    python examples/custom_softmax.py
    python examples/custom_softmax.py --tokens 4096 --heads 16 --dtype bfloat16     on a GPU

`score` is called with one score and its indices (batch, head, query, key), and with elements of operands that broadcast. It is
compiled into the softmax kernel: no array of masks or biases exists, and the slopes get a gradient. The same attention written
with `jax.nn.softmax` needs one array of scores after the other.

What to look at: value and gradients, which agree, and the milliseconds of a step, which are of interest on a GPU. The picture shows
the attention weights of one head: a band as wide as the window, cut where a document ends. The exit status is 1 if the results
disagree.

Needs the `examples` extra: matplotlib. Takes seconds on 2 cores.
"""

import argparse
import sys
import time

import display
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

import jaxkern

CAP, WINDOW = 30.0, 32


def score(s, batch, head, query, key, slope, of_query, of_key):
    s = CAP * jnp.tanh(s / CAP) - slope * (query - key)
    seen = (query >= key) & (query - key < WINDOW) & (of_query == of_key)
    return jnp.where(seen, s, -jnp.inf)


def attention_weights(params, q, k, document):
    operands = [params["slopes"][:, None, None], document[:, None, :, None], document[:, None, None, :]]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return jaxkern.softmax(scores, score=score, score_args=operands)


def attention(params, q, k, v, document):
    return attention_weights(params, q, k, document) @ v


def plain_attention(params, q, k, v, document):
    s = (q @ k.mT * q.shape[-1] ** -0.5).astype(jnp.float32)
    query, key = jnp.arange(q.shape[2])[:, None], jnp.arange(k.shape[2])
    s = CAP * jnp.tanh(s / CAP) - params["slopes"][:, None, None] * (query - key)
    seen = (query >= key) & (query - key < WINDOW) & (document[:, None, :, None] == document[:, None, None, :])
    return jax.nn.softmax(jnp.where(seen, s, -jnp.inf)).astype(v.dtype) @ v


def draw(out, weights, setting):
    figure = Figure(figsize=(7, 6.2), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(weights, cmap="cividis", vmin=0, vmax=float(jnp.quantile(weights[weights > 0], 0.99)))
    figure.colorbar(image, label="attention weight (the weights of a query sum to 1)", extend="max")
    display.style(axes, "key, position in the sequence", "query, position in the sequence")
    axes.grid(False)
    display.save(figure, out, "Attention weights of one head, by a score function in the softmax kernel", setting)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="length of the sequences")
    parser.add_argument("--heads", type=int, default=4, help="number of attention heads")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of queries, keys and values"
    )
    parser.add_argument("--steps", type=int, default=20, help="number of steps to time")
    display.add_out(parser, __file__)
    args = parser.parse_args()
    if min(args.tokens, args.heads, args.steps) < 1:
        parser.error("--tokens, --heads and --steps start at 1")
    display.check_out(parser, args.out)

    keys = jax.random.split(jax.random.key(0), 4)
    shape = 2, args.heads, args.tokens, 32
    q, k, v = (jax.random.normal(key, shape, args.dtype) for key in keys[:3])
    document = jnp.sort(jax.random.randint(keys[3], (2, args.tokens), 0, 4))  # packed: four documents in a row
    params = {"slopes": 2.0 ** -jnp.arange(1.0, args.heads + 1)}

    found = {}
    for name, f in {"jaxkern": attention, "jax.nn": plain_attention}.items():
        objective = lambda p, q, k, v, f=f: jnp.square(f(p, q, k, v, document).astype(jnp.float32)).mean()
        step = jax.jit(jax.value_and_grad(objective, argnums=(0, 1)))
        value, (by_params, by_q) = jax.block_until_ready(step(params, q, k, v))
        start = time.perf_counter()
        for _ in range(args.steps):
            out = step(params, q, k, v)
        jax.block_until_ready(out)
        ms = 1e3 * (time.perf_counter() - start) / args.steps
        found[name] = value, by_params["slopes"], by_q.astype(jnp.float32)
        print(f"{name:10} value {float(value):.6f}   {ms:8.2f} ms per step", flush=True)

    allowed = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}[args.dtype]
    errors = [float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(*found.values())]
    agree = all(e <= allowed for e in errors)
    print("relative difference: value {:.1e}, gradient of slopes {:.1e}, gradient of q {:.1e}".format(*errors))
    head = args.heads - 1  # the one with the smallest slope
    weights = attention_weights(params, q, k, document)[0, head].astype(jnp.float32)
    setting = f"head {head + 1} of {args.heads}: window of {WINDOW}, {args.tokens} tokens, {args.dtype}"
    draw(args.out, weights, setting)
    numbers = {
        "value": "the same number in both rows",
        "ms per step": "of both ways, one after the other on the same machine",
    }
    picture = "the attention weights of one head: a band as wide as the window, cut where a document ends"
    return display.conclude("results", agree, args.out, picture, numbers)


if __name__ == "__main__":
    sys.exit(main())
