"""Attention with a softmax of your own: a soft cap, a sliding window, documents and learnt slopes in one Python function.

    python examples/custom_softmax.py
    python examples/custom_softmax.py --tokens 4096 --heads 16 --dtype bfloat16     on a GPU

`score` is called with one score and its indices (batch, head, query, key), and with elements of operands that broadcast. It is
compiled into the softmax kernel: no array of masks or biases exists, and the slopes get a gradient. The same attention written
with `jax.nn.softmax` needs one array of scores after the other. The example compares results and gradients, and times both.

Takes seconds on 2 cores.
"""

import argparse
import sys
import time

import jax
import jax.numpy as jnp

import jaxkern

CAP, WINDOW = 30.0, 64


def score(s, batch, head, query, key, slope, of_query, of_key):
    s = CAP * jnp.tanh(s / CAP) - slope * (query - key)
    seen = (query >= key) & (query - key < WINDOW) & (of_query == of_key)
    return jnp.where(seen, s, -jnp.inf)


def attention(params, q, k, v, document):
    operands = [params["slopes"][:, None, None], document[:, None, :, None], document[:, None, None, :]]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return jaxkern.softmax(scores, score=score, score_args=operands) @ v


def plain_attention(params, q, k, v, document):
    s = (q @ k.mT * q.shape[-1] ** -0.5).astype(jnp.float32)
    query, key = jnp.arange(q.shape[2])[:, None], jnp.arange(k.shape[2])
    s = CAP * jnp.tanh(s / CAP) - params["slopes"][:, None, None] * (query - key)
    seen = (query >= key) & (query - key < WINDOW) & (document[:, None, :, None] == document[:, None, None, :])
    return jax.nn.softmax(jnp.where(seen, s, -jnp.inf)).astype(v.dtype) @ v


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--steps", type=int, default=20, help="number of steps to time")
    args = parser.parse_args()

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
        ms = 1e3 * (time.perf_counter() - start) / max(args.steps, 1)
        found[name] = value, by_params["slopes"], by_q.astype(jnp.float32)
        print(f"{name:10} value {float(value):.6f}   {ms:8.2f} ms per step", flush=True)

    allowed = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}[args.dtype]
    errors = [float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(*found.values())]
    agree = all(e <= allowed for e in errors)
    print("relative difference: value {:.1e}, gradient of slopes {:.1e}, gradient of q {:.1e}".format(*errors))
    print("the results agree" if agree else "THE RESULTS DISAGREE")
    return not agree


if __name__ == "__main__":
    sys.exit(main())
