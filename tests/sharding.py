"""Shared by the tests of arrays spread over several devices: meshes, and the messages of a compiled program."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxkern._core import registry

DEVICES = jax.devices()[:8]
SHAPES = {2: [(2, 1), (1, 2)], 4: [(2, 2)], 8: [(4, 2)]}.get(len(DEVICES), [])  # of the mesh ("r", "c")
several = pytest.mark.skipif(not SHAPES, reason="needs 2, 4 or 8 devices; run by test_eight_cpu_devices")
every_mesh = pytest.mark.parametrize("shape_of_mesh", SHAPES or [None])
KERNELS = jax.default_backend() == "gpu" and registry.kernels.module is not None


def mesh(kind="Auto", shape=None, names=("r", "c")):
    shape = shape or (SHAPES[0] if len(names) == 2 else (len(DEVICES),))
    return jax.make_mesh(shape, names, axis_types=(getattr(jax.sharding.AxisType, kind),) * len(shape), devices=DEVICES)


def put(m, arrays, specs):
    # From NumPy: JAX would compile a program that cuts an array of a device, for every shape and spec.
    return [None if a is None else jax.device_put(np.asarray(a), NamedSharding(m, s)) for a, s in zip(arrays, specs)]


# XLA on the CPU adds float32 numbers in float32, in an order that depends on how they are split.
TOLERANCE = 2e-6 if KERNELS else 1e-5


def same(found, wanted, tolerance=TOLERANCE):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), found, wanted)


# ---- what is sent


def messages(text):
    """What a compiled program sends: kind of message -> the elements of each."""
    sent = collections.defaultdict(list)
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    # Of many arrays that are sent together, every fifth has its number in a comment.
    for shapes, kind in re.findall(rf"= (\(?[\w\[\],{{}}:() /*=]*?\)?) ({kinds})(?:-start)?\(", text):
        # The start of a message that is sent beside other work names its operand, then its result.
        sizes = [math.prod(map(int, dims.split(","))) if dims else 1 for dims in re.findall(r"\w\[([\d,]*)\]", shapes)]
        sent[kind].append(max(sizes))
    return sent


def check(text, listed, kernel=True, most=None):
    """Fails if the program sends more than `listed`: {kind: the largest number}.

    A reduce-scatter may replace an all-reduce if each device keeps only a part of the result.
    """
    sent = messages(text)
    count = collections.Counter({kind: len(sizes) for kind, sizes in sent.items()})
    surplus = count - collections.Counter(listed)
    spared = max(0, listed.get("all-reduce", 0) - count["all-reduce"])
    surplus -= collections.Counter({"reduce-scatter": spared})
    assert not surplus, f"{dict(sent)}, but {listed} were listed"
    if most is not None:  # elements a message; XLA may combine several into one
        assert sum(n for sizes in sent.values() for n in sizes) <= most * sum(listed.values()), dict(sent)
    if kernel and KERNELS:
        assert "jaxkern_" in text


def numbers_of_rows(text, rows) -> bool:
    """Whether a compiled program sends nothing but sums, and up to three numbers of each of its rows."""
    sent = messages(text)
    return set(sent) <= {"all-reduce", "all-gather"} and max([0, *sent["all-gather"]]) <= 3 * rows * len(DEVICES)


def split_by(m, specs, axes):
    """Whether one of the axes splits anything."""
    return any(a in str(s) and m.shape[a] > 1 for s in specs for a in axes)


def arrays(shape, mask_shape=None):
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    return x, g, None if mask_shape is None else jnp.asarray(rng.random(mask_shape) < 0.7)
