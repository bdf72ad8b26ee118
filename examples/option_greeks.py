"""Monte Carlo of options under Heston's model, with all sensitivities from one backward loop.

    python examples/option_greeks.py
    python examples/option_greeks.py --paths 1000000 --steps 252     on a GPU

Prices of calls with several strikes on one stock, whose variance is a random process of its own (Heston, 1993): Euler steps with
full truncation (Lord, Koekkoek and Van Dijk, 2010). The keys of the random numbers are split in the loop's body, so no noise is
stored. `jaxkern.scan` makes one kernel of the loop, and another of its derivative: `jax.grad` of the value of all calls gives
their sensitivities to the stock (delta), its variance (vega), the interest rate (rho) and the model, and to each strike, which
is the distribution of the price at maturity.

Each batch of paths is run with `jaxkern.scan` and with `jax.lax.scan` from the same keys.

What to look at: the table has values and sensitivities, their standard errors, and the results of Heston's formula, which are a few
errors away at most. The picture shows prices and the distribution by strike, simulated and exact. The times of both loops are of
interest on a GPU. The exit status is 1 if the loops disagree, or if the simulation is too far from the formula.

Needs the `examples` extra: tqdm and matplotlib. Takes half a minute on 2 cores.
"""

import argparse
import functools
import sys
import time

import display
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import jaxkern

SCANS = {"jaxkern": jaxkern.scan, "jax.lax": jax.lax.scan}
# Of the stock, of its variance, and of the interest rate. `mixing` is the correlation of both noises.
MODEL = {
    "spot": 100.0,
    "variance": 0.04,
    "reversion": 2.0,
    "mean": 0.05,
    "volatility": 0.3,
    "mixing": -0.6,
    "rate": 0.03,
}
STRIKES = np.linspace(80, 125, 10)
MATURITY = 1.0
SAME = 0.05  # difference of both loops, which round differently, in standard deviations of a batch
ERRORS, BIAS = 4.5, 0.02  # standard errors, and the relative error of Euler steps, that are allowed


# ---- the simulation


def log_return(scan, model, key, steps, paths):
    """log(S(T) / S(0)) of each path."""
    dt = MATURITY / steps

    def step(carry, _):
        key, x, v = carry
        key, of_price, of_variance = jax.random.split(key, 3)
        z, own = jax.random.normal(of_price, x.shape), jax.random.normal(of_variance, x.shape)
        w = model["mixing"] * z + jnp.sqrt(1 - model["mixing"] ** 2) * own
        positive = jnp.maximum(v, 0)
        deviation = jnp.sqrt(positive * dt + 1e-8)
        x = x + (model["rate"] - positive / 2) * dt + deviation * z
        v = v + model["reversion"] * (model["mean"] - positive) * dt + model["volatility"] * deviation * w
        return (key, x, v), None

    start = key, jnp.zeros(paths), jnp.full(paths, model["variance"])
    return scan(step, start, length=steps)[0][1]


def prices(scan, model, strikes, key, steps, paths):
    """Prices of calls, one for each strike."""
    stock = model["spot"] * jnp.exp(log_return(scan, model, key, steps, paths))
    payoff = jnp.maximum(stock - strikes[:, None], 0)
    return jnp.exp(-model["rate"] * MATURITY) * payoff.mean(1)


def make_batch(scan, steps, paths):
    """A jitted function of a key: prices, sensitivities of their sum to the model, and of each to its strike."""

    def value(model, strikes, key):
        found = prices(scan, model, strikes, key, steps, paths)
        return found.sum(), found

    model, strikes = {k: jnp.float32(v) for k, v in MODEL.items()}, jnp.asarray(STRIKES, jnp.float32)
    gradient = jax.value_and_grad(value, (0, 1), has_aux=True)
    return functools.partial(jax.jit(gradient), model, strikes)


# ---- Heston's formula


def exact_prices(model, strikes):
    """Prices by the characteristic function of log S(T), in the form of Albrecher et al., "The little Heston trap", 2007."""
    s0, v0, kappa, theta, xi, rho, rate = model.values()
    u = (np.arange(4000) + 0.5) * 0.05

    def characteristic(u):
        b = kappa - rho * xi * 1j * u
        d = np.sqrt(b**2 + xi**2 * (1j * u + u**2))
        g, decay = (b - d) / (b + d), np.exp(-d * MATURITY)
        c = kappa * theta / xi**2 * ((b - d) * MATURITY - 2 * np.log((1 - g * decay) / (1 - g)))
        return np.exp(
            c + v0 * (b - d) / xi**2 * (1 - decay) / (1 - g * decay) + 1j * u * (np.log(s0) + rate * MATURITY)
        )

    ahead, own = characteristic(u - 1j), characteristic(u)
    found = []
    for k in strikes:
        integral = np.sum(((ahead - k * own) * np.exp(-1j * u * np.log(k)) / (1j * u)).real) * 0.05 / np.pi
        found.append((s0 - k * np.exp(-rate * MATURITY)) / 2 + np.exp(-rate * MATURITY) * integral)
    return np.array(found)


def slope(f, x):
    h = 1e-4 * max(1.0, abs(x))
    return (f(x + h) - f(x - h)) / (2 * h)


def exact():
    """What a batch returns."""
    of = lambda name: lambda x: exact_prices({**MODEL, name: x}, STRIKES).sum()
    by_model = {name: slope(of(name), x) for name, x in MODEL.items()}
    by_strike = np.array([slope(lambda x: exact_prices(MODEL, [x])[0], k) for k in STRIKES])
    return exact_prices(MODEL, STRIKES), by_model, by_strike


# ---- both


def draw(out, found, errors, wanted, setting):
    figure = Figure(figsize=(10, 6), layout="constrained")
    columns = figure.subplots(2, 2, sharex=True, height_ratios=(3, 1)).T
    names = ("price of the call, in units of money", "probability that the stock ends above the strike")
    growth = -np.exp(MODEL["rate"] * MATURITY)
    for (axes, below), name, k, scale in zip(columns, names, (0, 2), (1.0, growth)):
        look = {"fmt": "o", "ms": 4, "color": display.JAXKERN}
        axes.plot(STRIKES, scale * wanted[k], color="#222222", lw=0.9, label="Heston's formula")
        axes.errorbar(STRIKES, scale * found[k], **look, label="jaxkern.scan")
        display.style(axes, "", name)
        below.axhline(0, color="#222222", lw=0.9)
        below.errorbar(STRIKES, scale * (found[k] - wanted[k]), 2 * abs(scale) * errors[k], **look)
        display.style(below, "strike, in units of money", "simulated − exact,\ntwo standard errors")
    columns[0, 0].legend(frameon=False)
    title = "Prices of calls, and their derivative by the strike: simulated with jaxkern.scan, and exact"
    display.save(figure, out, title, setting)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", type=int, default=20_000, help="paths per batch")
    parser.add_argument("--steps", type=int, default=100, help="steps per path")
    parser.add_argument(
        "--batches", type=int, default=16, help="number of batches, from which standard errors are computed"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers")
    display.add_out(parser, __file__)
    args = parser.parse_args()
    if min(args.paths, args.steps) < 1 or args.batches < 2:
        parser.error("--paths and --steps start at 1, --batches at 2")
    display.check_out(parser, args.out)

    runs = {name: make_batch(scan, args.steps, args.paths) for name, scan in SCANS.items()}
    found, seconds = {name: [] for name in runs}, {name: [] for name in runs}
    keys = jax.random.split(jax.random.key(args.seed), args.batches)
    progress = display.Progress(keys, "simulating", "batch")
    for key in progress:
        for name, run in runs.items():
            start = time.perf_counter()
            (_, by_strike), gradients = jax.block_until_ready(run(key))
            seconds[name].append(time.perf_counter() - start)
            found[name].append(jax.tree.map(np.asarray, (by_strike, *gradients)))
        progress.note(**{name: f"{float(np.sum(batches[-1][0])):.4f}" for name, batches in found.items()})

    stack = lambda batches: jax.tree.map(lambda *xs: np.stack(xs).astype(np.float64), *batches)
    ours, theirs = map(stack, found.values())
    means = jax.tree.map(lambda x: x.mean(0), ours)
    errors = jax.tree.map(lambda x: x.std(0, ddof=1) / len(x) ** 0.5, ours)
    wanted = exact()

    print(f"\n{'all calls':14}{'simulated':>12}{'error':>10}{'formula':>12}")
    total = np.std(ours[0].sum(1), ddof=1) / args.batches**0.5
    print(f"{'value':14}{means[0].sum():>12.4f}{total:>10.4f}{wanted[0].sum():>12.4f}")
    names = {"spot": "delta", "variance": "vega", "rate": "rho"}
    for k in MODEL:
        print(f"{names.get(k, 'by ' + k):14}{means[1][k]:>12.4f}{errors[1][k]:>10.4f}{wanted[1][k]:>12.4f}")
    print()
    for name, times in seconds.items():
        print(f"{name:10}{1e3 * float(np.median(times[1:])):>10.2f} ms for values and sensitivities of a batch")

    leaves = lambda tree, dims=0: np.concatenate(
        [x.reshape(*x.shape[:dims], -1) for x in map(np.asarray, jax.tree.leaves(tree))], -1
    )
    spread = np.std(leaves(theirs, 1), 0, ddof=1) + 1e-4 * np.abs(leaves(theirs, 1)).max(0)
    difference = float(np.max(np.abs(leaves(ours, 1) - leaves(theirs, 1)) / spread))
    allowed = ERRORS * leaves(errors) + BIAS * np.abs(leaves(wanted)) + 1e-3
    outside = int(np.sum(~(np.abs(leaves(means) - leaves(wanted)) <= allowed)))  # NaN is outside, too
    print(f"largest difference of the loops, in standard deviations of a batch: {difference:.1e}, allowed {SAME:g}")
    print(f"numbers too far from the formula: {outside} of {len(allowed)}")
    draw(args.out, means, errors, wanted, f"Heston's model, {args.batches} × {args.paths} paths of {args.steps} steps")
    numbers = {
        "simulated, error, formula": "simulated is within a few errors of the formula, but for the bias of the steps",
        "ms of a batch": "of both loops, in the same seconds on the same machine",
    }
    agree = difference <= SAME and not outside
    picture = "simulated points on the curve of the formula; below, what separates them, with error bars"
    return display.conclude("results", agree, args.out, picture, numbers)


if __name__ == "__main__":
    sys.exit(main())
