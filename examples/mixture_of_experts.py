"""A mixture of experts with a capacity: tokens go to the slots of their experts and back, by two kernels.

    python examples/mixture_of_experts.py
    python examples/mixture_of_experts.py --tokens 16384 --width 1024 --experts 64     on a GPU

A router gives each token to its 2 best experts of 8, as long as there is room. `moe_dispatch` copies tokens to slots, each expert
is a matrix product over its slots, and `moe_combine` computes the weighted sums for the tokens. It stores no array of the size
tokens x experts x capacity, unlike the einsum of one-hot masks that the example compares with. The layer is trained to imitate a
function.

Every step computes the loss and its gradient in both ways, from the same parameters and slots, and follows the gradient of jaxkern.
Two trainings side by side would not stay together: the choice of experts jumps. A rounding error moves a token between two experts
that it likes almost equally, its error changes, and from there the two trainings see different gradients.

What to look at: the losses, which agree in every step and fall. The picture shows both loss curves, their difference, and how many
tokens chose each expert before and after training, beside the capacity: tokens above it are dropped. The exit status is 1 if
losses or gradients disagree in any step.

Needs the `examples` extra: optax, tqdm and matplotlib. Takes seconds on 2 cores.
"""

import argparse
import functools
import sys

import display
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import jaxkern

CHOSEN = 2  # experts of a token
BOUNDS = {"losses": 1e-5, "gradients": 1e-3}  # relative differences


def route(params, x, experts, capacity):
    """(experts, slots), both [tokens, CHOSEN]. A slot is expert * capacity + position, or -1 where the expert is full."""
    _, chosen = jax.lax.top_k(x @ params["router"], CHOSEN)
    flat = chosen.reshape(-1)
    position = jnp.cumsum(jax.nn.one_hot(flat, experts, dtype=jnp.int32), 0)[jnp.arange(flat.size), flat] - 1
    return chosen, jnp.where(position < capacity, flat * capacity + position, -1).reshape(chosen.shape)


def weigh(params, x, chosen):
    """Weights of [tokens, CHOSEN]: the softmax over the experts that a token has chosen."""
    return jax.nn.softmax(jnp.take_along_axis(x @ params["router"], chosen, 1))


def run_experts(params, inside):  # [experts * capacity, width]
    inside = inside.reshape(len(params["up"]), -1, inside.shape[-1])
    return (jax.nn.gelu(inside @ params["up"]) @ params["down"]).reshape(-1, inside.shape[-1])


def layer(params, x, chosen, slot, slots):
    outside = run_experts(params, jaxkern.moe_dispatch(x, slot, slots))
    return jaxkern.moe_combine(outside, slot, weigh(params, x, chosen))


def layer_of_masks(params, x, chosen, slot, slots):
    mask = jax.nn.one_hot(slot, slots)  # [tokens, CHOSEN, slots]; all zeros where the slot is -1
    outside = run_experts(params, jnp.einsum("tks,td->sd", mask, x))
    return jnp.einsum("tks,tk,sd->td", mask, weigh(params, x, chosen), outside)


def distance(a, b):
    """|a - b| / |b| of the parameter that differs most."""
    norm = jnp.linalg.norm
    return jnp.stack([norm(a[name] - b[name]) / norm(b[name]) for name in b]).max()


def train(layers, params, x, wanted, capacity, steps):
    """Trains with the gradients of the first layer. Returns both losses, the largest difference of gradients, and parameters."""
    experts, optimizer = len(params["up"]), optax.adam(3e-3)

    def loss(layer, params, x, wanted, *routes):
        return jnp.square(layer(params, x, *routes, experts * capacity) - wanted).mean()

    @jax.jit
    def update(params, moments, gradient):
        updates, moments = optimizer.update(gradient, moments)
        return optax.apply_updates(params, updates), moments

    routes = jax.jit(lambda params, x: route(params, x, experts, capacity))
    ways = {name: jax.jit(jax.value_and_grad(functools.partial(loss, layer))) for name, layer in layers.items()}
    moments, losses, worst = optimizer.init(params), {name: [] for name in layers}, 0.0
    for _ in display.Progress(range(steps), "both layers"):
        chosen, slot = routes(params, x)
        values, (ours, theirs) = zip(*(way(params, x, wanted, chosen, slot) for way in ways.values()))
        for name, value in zip(layers, values):
            losses[name].append(float(value))
        worst = np.maximum(worst, distance(ours, theirs))  # NaN stays
        params, moments = update(params, moments, ours)
    return {name: np.array(curve) for name, curve in losses.items()}, float(worst), params


def chosen_by(params, x, experts):
    """How many tokens choose each expert, full or not."""
    _, chosen = jax.lax.top_k(x @ params["router"], CHOSEN)
    return np.bincount(np.asarray(chosen).ravel(), minlength=experts)


def draw(out, losses, loads, capacity, setting):
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    panels = figure.subplot_mosaic([["loss", "load"], ["difference", "load"]], height_ratios=(3, 1))
    display.draw_curves(panels["loss"], panels["difference"], losses, "squared error")
    for k, ((name, load), colour) in enumerate(zip(loads.items(), ("#b0b8c0", display.JAXKERN))):
        panels["load"].bar(np.arange(len(load)) + 0.4 * k - 0.2, load, 0.4, color=colour, label=name)
    panels["load"].axhline(capacity, color=display.DIFFERENCE, ls="--", label="capacity of an expert")
    panels["load"].set_ylim(0, 1.25 * max(capacity, *(load.max() for load in loads.values())))
    panels["load"].legend(frameon=False, loc="upper left")
    display.style(panels["load"], "expert", "tokens that choose the expert")
    title = "One layer of experts, with moe_dispatch and moe_combine, and with one-hot masks"
    display.save(figure, out, title, setting)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per step")
    parser.add_argument("--width", type=int, default=32, help="features of a token")
    parser.add_argument("--experts", type=int, default=8, help="number of experts, 2 at least")
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    display.add_out(parser, __file__)
    args = parser.parse_args()
    if min(args.tokens, args.width, args.steps) < 1 or args.experts < CHOSEN:
        parser.error(f"--tokens, --width and --steps start at 1, --experts at {CHOSEN}")
    display.check_out(parser, args.out)
    jax.config.update("jax_default_matmul_precision", "float32")  # the products with masks would round tokens to TF32
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

    found, gradients, trained = train(
        {"jaxkern": layer, "masks": layer_of_masks}, params, x, wanted, capacity, args.steps
    )
    _, slot = route(params, x, args.experts, capacity)
    print(f"\n{args.experts} experts of {capacity} slots, {float((slot < 0).mean()):.1%} of choices dropped at first")
    for name, losses in found.items():
        print(f"{name:10} loss {losses[0]:.4f} to {losses[-1]:.4f}")
    losses = float(np.max(np.abs(found["jaxkern"] - found["masks"]) / found["masks"]))
    differences = {"losses": losses, "gradients": gradients}
    for what, difference in differences.items():
        print(f"{what}, relative difference in any step: {difference:.1e}, allowed {BOUNDS[what]:g}")
    agree = all(differences[what] <= bound for what, bound in BOUNDS.items())  # False for NaN too
    loads = {
        "before training": chosen_by(params, x, args.experts),
        "after training": chosen_by(trained, x, args.experts),
    }
    setting = f"{args.tokens} tokens of {args.width} features, {CHOSEN} of {args.experts} experts each, "
    draw(args.out, found, loads, capacity, setting + jax.devices()[0].device_kind)
    picture = "both loss curves, which lie on each other, and the tokens of each expert beside its capacity"
    numbers = {"loss": "the second is below the first, and equal for both but for rounding"}
    return display.conclude("losses", agree, args.out, picture, numbers)


if __name__ == "__main__":
    sys.exit(main())
