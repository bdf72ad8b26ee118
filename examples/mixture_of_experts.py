"""A mixture of experts with a capacity: tokens go to the slots of their experts and back, by two kernels.

    python examples/mixture_of_experts.py
    python examples/mixture_of_experts.py --tokens 16384 --width 1024 --experts 64     on a GPU

A router gives each token to its 2 best experts of 8, as long as there is room. `moe_dispatch` copies tokens to slots, each expert
is a matrix product over its slots, and `moe_combine` makes the weighted sums for the tokens. Nothing of the size
tokens x experts x capacity is made, as it is in the einsum of one-hot masks that the example compares with. The layer is trained to
imitate a function; the exit status is 1 if the two ways disagree.

Needs the `examples` extra: optax and tqdm. Takes seconds on 2 cores.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import jaxkern

CHOSEN = 2  # experts of a token
BOUND = 1e-3  # relative difference of the losses


def route(params, x, experts, capacity):
    """(weights, slots) of [tokens, CHOSEN]. A slot is expert * capacity + position, or -1 where the expert is full."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), CHOSEN)
    flat = chosen.reshape(-1)
    position = jnp.cumsum(jax.nn.one_hot(flat, experts, dtype=jnp.int32), 0)[jnp.arange(flat.size), flat] - 1
    slot = jnp.where(position < capacity, flat * capacity + position, -1)
    return weights / weights.sum(-1, keepdims=True), slot.reshape(chosen.shape)


def run_experts(params, inside):  # [experts, capacity, width]
    return jax.nn.gelu(inside @ params["up"]) @ params["down"]


def layer(params, x, experts, capacity):
    weights, slot = route(params, x, experts, capacity)
    inside = jaxkern.moe_dispatch(x, slot, experts * capacity).reshape(experts, capacity, -1)
    outside = run_experts(params, inside).reshape(experts * capacity, -1)
    return jaxkern.moe_combine(outside, slot, weights)


def layer_of_masks(params, x, experts, capacity):
    weights, slot = route(params, x, experts, capacity)
    mask = jax.nn.one_hot(slot, experts * capacity)  # [tokens, CHOSEN, slots]; -1 is a row of zeros
    inside = jnp.einsum("tks,td->sd", mask, x).reshape(experts, capacity, -1)
    outside = run_experts(params, inside).reshape(experts * capacity, -1)
    return jnp.einsum("tks,tk,sd->td", mask, weights, outside)


def train(layer, params, x, wanted, experts, capacity, steps, name):
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(state):
        params, moments = state
        objective = lambda p: jnp.square(layer(p, x, experts, capacity) - wanted).mean()
        value, gradient = jax.value_and_grad(objective)(params)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, updates), moments), value

    state, losses = (params, optimizer.init(params)), []
    for _ in tqdm(range(steps), desc=name, unit="step", mininterval=0.5):
        state, value = step(state)
        losses.append(float(value))
    return np.array(losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    capacity = -(-args.tokens * CHOSEN * 5 // (4 * args.experts))  # a quarter more than an even share

    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {
        "router": (args.width, args.experts),
        "up": (args.experts, args.width, 2 * args.width),
        "down": (args.experts, 2 * args.width, args.width),
    }
    params = {n: jax.random.normal(k, s) * s[-2] ** -0.5 for k, (n, s) in zip(keys, shapes.items())}
    x = jax.random.normal(keys[3], (args.tokens, args.width))
    wanted = jnp.sin(x @ jax.random.normal(keys[4], (args.width, args.width)) * args.width**-0.5)

    layers = {"jaxkern": layer, "masks": layer_of_masks}
    found = {n: train(f, params, x, wanted, args.experts, capacity, args.steps, n) for n, f in layers.items()}
    _, slot = route(params, x, args.experts, capacity)
    print(f"\n{args.experts} experts of {capacity} slots, {float((slot < 0).mean()):.1%} of choices dropped at first")
    for name, losses in found.items():
        print(f"{name:10} loss {losses[0]:.4f} to {losses[-1]:.4f}")
    difference = float(np.max(np.abs(found["jaxkern"] - found["masks"]) / found["masks"]))
    agree = difference <= BOUND  # False for NaN too
    print(f"relative difference: {difference:.1e}, allowed {BOUND:g}")
    print("the losses agree" if agree else "THE LOSSES DISAGREE")
    return not agree


if __name__ == "__main__":
    sys.exit(main())
