"""Bodies that act on small states by matrices, as single kernels, and under `jaxkern.accelerate`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_scan import close, lowered

import jaxkern

LANES, STEPS = 6, 5


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(0).uniform(-1, 1, shape), jnp.float32)


def backward(scan, n):
    """The backward algorithm of a hidden Markov model."""

    def run(transitions, emissions):
        body = lambda b, e: (jax.nn.logsumexp(transitions + (b + e)[:, None, :], -1),) * 2
        return scan(body, jnp.zeros((LANES, n)), emissions, reverse=True)

    return run, [numbers(n, n), numbers(STEPS, LANES, n)]


def sinkhorn(scan, n):
    """Potentials of transport between two distributions."""

    def run(cost):
        def body(carry, _):
            _, g = carry
            f = -jax.nn.logsumexp(g[:, None, :] - cost, 2)
            return (f, -jax.nn.logsumexp(f[:, :, None] - cost, 1)), None

        return scan(body, (jnp.zeros((LANES, n)),) * 2, None, length=STEPS)[0]

    return run, [numbers(LANES, n, n)]


def kalman(scan, n):
    """A filter of states of n numbers of which the first is observed."""

    def run(transition, observed):
        product = lambda a, b: jnp.sum(a[..., :, :, None] * b[..., None, :, :], -2)

        def body(carry, y):
            x, p = carry
            x = jnp.sum(transition * x[:, None, :], -1)
            p = product(product(transition[None], p), transition.T[None]) + 0.1 * jnp.eye(n)
            gain = p[:, :, 0] / (p[:, :1, 0] + 1)
            x = x + gain * (y[:, None] - x[:, :1])
            return (x, p - gain[:, :, None] * p[:, :1, :]), x

        return scan(body, (jnp.zeros((LANES, n)), jnp.broadcast_to(jnp.eye(n), (LANES, n, n))), observed)

    return run, [jnp.eye(n) + 0.1 * numbers(n, n), numbers(STEPS, LANES)]


@pytest.mark.parametrize("make, n", [(backward, 4), (sinkhorn, 3), (kalman, 2)])
def test_small_states(make, n):
    (f, operands), (g, _) = (make(scan, n) for scan in (jaxkern.scan, lax.scan))
    loss = lambda f: lambda *xs: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*xs)))
    every = tuple(range(len(operands)))
    both = [jax.jit(lambda *xs, f=f: (f(*xs), jax.grad(loss(f), every)(*xs)))(*operands) for f in (f, g)]
    close(*both, "float32")
    for run in (f, g):
        with jaxkern.accelerate(force=True):
            assert lowered(run, *operands)[1] == 0
            found, loops = lowered(jax.grad(loss(run), every), *operands)
            assert len(found) == 2 and not loops


def test_a_call_has_at_most_64_arrays():
    """The gradient of a matrix of so many numbers is left to XLA; the forward loop is a kernel."""
    f, operands = backward(jaxkern.scan, 5)
    found, loops = lowered(f, *operands)
    assert len(found) == 1 and not loops
    found, loops = lowered(jax.grad(lambda *xs: jnp.sum(f(*xs)[0])), *operands)
    assert loops == 1
    for text in found:
        takes, gives = (part.count("[") for part in text.split("\n")[1].split(" -> "))
        assert takes + gives <= 64
