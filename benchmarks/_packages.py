"""Programs for `benchmarks/programs.py` that are written with packages for the sciences, as their manuals write them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


def molecular_dynamics(dtype: str, small: bool) -> tuple[Any, ...]:
    """(init, step, data): atoms at constant energy with jax-md, by Lennard-Jones' potential and a list of neighbours."""
    from jax_md import energy, partition, simulate, space

    side, distance = (6 if small else 40), 1.1
    displacement, shift = space.periodic(side * distance)
    neighbours, potential = energy.lennard_jones_neighbor_list(
        displacement, side * distance, r_cutoff=2.5, dr_threshold=0.3, format=partition.OrderedSparse
    )
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3) * distance
    noise = 0.05 * np.random.default_rng(0).normal(size=grid.shape)
    places = ((grid + noise) % (side * distance)).astype(dtype)
    found = neighbours.allocate(jnp.asarray(places))
    apply = simulate.nve(potential, shift, 1e-3)[1]

    def init():
        still = jnp.zeros(places.shape, dtype)
        return simulate.NVEState(jnp.asarray(places), still, still, jnp.ones((len(places), 1), dtype))

    def step(state, index):
        state = apply(state, neighbor=dataclasses.replace(found, idx=index))
        return state, jnp.square(state.momentum).mean()

    return init, step, (np.asarray(found.idx),)


def hierarchical_model(dtype: str, small: bool) -> tuple[Any, ...]:
    """(loss, parameters of a key, data): a logistic regression with NumPyro whose groups have coefficients of their own."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import log_density

    examples, groups = (2000, 50) if small else (2_000_000, 20_000)

    def model(group, x, y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("groups", groups):
            intercept = numpyro.sample("intercept", dist.Normal(mean, 1))
            slope = numpyro.sample("slope", dist.Normal(0, 1).expand([4]).to_event(1))
        logits = intercept[group] + (slope[group] * x).sum(-1)
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    def loss(params, group, x, y):
        return -log_density(model, (group, x, y), {}, params)[0] / examples

    def params(key):
        return {
            "mean": jnp.zeros((), dtype),
            "intercept": jnp.zeros(groups, dtype),
            "slope": jnp.zeros((groups, 4), dtype),
        }

    rng = np.random.default_rng(0)
    sizes = np.cumsum(np.arange(1, groups + 1, dtype=np.float64) ** -1.3)
    group = np.searchsorted(sizes, rng.random(examples) * sizes[-1]).clip(0, groups - 1)
    group = rng.permutation(groups)[group].astype(np.int32)  # their numbers are in no order
    x, y = rng.normal(size=(examples, 4)).astype(dtype), rng.integers(0, 2, examples).astype(np.int32)
    return loss, params, (group, x, y)
