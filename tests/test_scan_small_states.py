"""Bodies that reduce along rows or act on small states by matrices, as single kernels, and under `jaxkern.accelerate`."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
import test_scan_plan
from conftest import ON_GPU
from jax import lax
from test_scan import close, lowered
from test_scan_plan import FEW, agree, evaluated, scans

import jaxkern
from jaxkern._core import compat, device, registry
from jaxkern._engines.loops import plan_rows
from jaxkern._engines.loops.generate_rows import RowCore
from jaxkern._engines.loops.row_program import RowProgram

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
    """A filter of states of n numbers; the first number is observed."""

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


def filtered(scan, n):
    """The forward algorithm with probabilities, and the logarithm of the likelihood."""

    def run(transitions, emissions):
        def body(carry, e):
            p, total = carry
            p = (p @ jnp.square(transitions)) * jnp.square(e)
            sums = jnp.sum(p, -1, keepdims=True)
            return (p / sums, total + jnp.log(sums[:, 0])), p

        first = jnp.full((LANES, n), 1 / n, emissions.dtype), jnp.zeros(LANES, emissions.dtype)
        return scan(body, first, emissions)

    return run, [numbers(n, n) + 2, numbers(STEPS, LANES, n) + 2]


def viterbi(scan, n):
    """The most likely states before each state."""

    def run(transitions, emissions):
        def body(score, e):
            scores = score[:, :, None] + transitions
            return jnp.max(scores, 1) + e, jnp.argmax(scores, 1)

        return scan(body, jnp.zeros((LANES, n), emissions.dtype), emissions)

    return run, [numbers(n, n), numbers(STEPS, LANES, n)]


def normalised(scan, n):
    """A row that is centred in each step, a counter, a parameter for each element and one for all."""

    def run(w, b, x):
        def body(carry, x):
            h, count = carry
            h = jnp.tanh(h * w + x)
            h = h - jnp.mean(h, -1, keepdims=True) + b * count.astype(x.dtype)
            largest = jnp.max(lax.stop_gradient(jnp.abs(h)), -1, keepdims=True)
            return (h, count + 1), (h / (1 + largest), jnp.any(h > 1, -1))

        return scan(body, (jnp.zeros(x.shape[1:], x.dtype), jnp.int32(0)), x)

    return run, [numbers(n), numbers()[()], numbers(STEPS, LANES, n)]


def covariances(scan, n):
    """A matrix for each lane that is multiplied and transposed, lanes in the middle."""

    def run(a, y):
        def body(p, y):
            p = jnp.einsum("ij,jbk->ibk", a, p)
            p = p / (1 + jnp.sum(p * p, (0, 2), keepdims=True)) + y[:, None]
            return jnp.swapaxes(p, 0, 2), jnp.sum(p, 2)

        return scan(body, jnp.broadcast_to(jnp.eye(n, dtype=y.dtype)[:, None], (n, LANES, n)), y)

    return run, [numbers(n, n), numbers(STEPS, LANES)]


def shifted(scan, n):
    """Slices, concatenations and padding along a row."""

    def run(w, x):
        def body(h, x):
            h = jnp.roll(h, 1, -1) * w + x
            h = h / (1 + jnp.sum(h * h, -1, keepdims=True))
            return jnp.concatenate([h[:, 1:], 2 * h[:, :1]], -1), (h[:, ::-1], h[:, 0], jnp.pad(h, ((0, 0), (1, 2))))

        return scan(body, jnp.zeros(x.shape[1:], x.dtype), x)

    return run, [numbers(n), numbers(STEPS, LANES, n)]


def moved(scan, n):
    """Padding that moves a row and keeps its length, and that makes a row of one element."""

    def run(x):
        def body(h, x):
            mean = jnp.mean(h, -1, keepdims=True)
            h = 0.3 * h + x * lax.pad(h, jnp.asarray(-1, h.dtype), [(0, 0, 0), (1, -1, 0)])
            return h + jnp.pad(mean, ((0, 0), (2, n - 3))), h

        return scan(body, jnp.zeros(x.shape[1:], x.dtype), x)

    return run, [numbers(STEPS, LANES, n)]


def constant(scan, n):
    """A carried matrix that no step changes, and that another one needs."""

    def run(noise, x):
        def body(carry, x):
            h, p, noise = carry
            p = jnp.sum(p[..., :, :, None] * p[..., None, :, :], -2) / n + noise
            same = noise.mT.mT  # jax.lax.scan would see that an element of the carry is returned
            return (jnp.tanh(jnp.sum(p * h[:, None, :], -1) + x), p, same), h

        noise = jnp.broadcast_to(noise, (LANES, n, n)) * (1 + x[0, :, :1, None])
        return scan(body, (jnp.zeros_like(x[0]), 0.1 * noise, noise), x)

    return run, [0.3 * numbers(n, n), numbers(STEPS, LANES, n)]


def ragged(scan, n):
    """A matrix for all lanes to which each adds by its index."""

    def run(x):
        def body(carry, x):
            w, h = carry
            of_lane = lax.broadcasted_iota(x.dtype, (LANES, n, n), 0)
            w = w + jnp.sum(h[:, :, None] * x[:, None, :] * of_lane, 0)
            return (w, jnp.tanh(h + jnp.mean(h, -1, keepdims=True) + x)), None

        return scan(body, (jnp.zeros((n, n), x.dtype), x[0]), x)

    return run, [numbers(STEPS, LANES, n)]


def common(scan, n):
    """A matrix that all lanes have in common, and that each step changes in place."""

    def run(w, x):
        def body(carry, x):
            w, h = carry
            return (0.5 * w + 0.1, jnp.tanh(h + jnp.sum(w) + x)), h

        return scan(body, (w, x[0]), x)

    return run, [numbers(n, n), numbers(STEPS, LANES)]


def gates(scan, n):
    """A recurrent unit whose gates are the halves of one row."""
    tile = getattr(lax, "tile", lambda x, reps: jnp.concatenate([x, x], -1))  # jax >= 0.9

    def run(w, x):
        def body(h, x):
            forget, reset = jnp.split(jax.nn.sigmoid(h @ w + tile(x, (1, 2))), 2, -1)
            h = forget * h + (1 - forget) * jnp.tanh(reset * h + x)
            return h, h

        return scan(body, x[0], x)

    return run, [numbers(n, 2 * n), numbers(STEPS, LANES, n)]


def observed(scan, n):
    """A product of a row and a matrix that is only the result of a step."""

    def run(w, x):
        return scan(lambda h, x: (jnp.tanh(0.5 * h + x), h @ w), x[0], x)

    return run, [numbers(n, 5), numbers(STEPS, LANES, n)]


def lagged(scan, n):
    """A filter with a delay line, whose gradient has products of rows and numbers, and reduces no row."""

    def run(w, x):
        def body(h, x):
            h = jnp.concatenate([x[:, None], h[:, :-1]], -1)
            return h, h @ w

        return scan(body, jnp.zeros((LANES, n), x.dtype), x)

    return run, [numbers(n), numbers(STEPS, LANES)]


def picked(scan, n):
    """An element of a row, at the index of the largest element of another one. The sign of a 0 that is chosen stays; other sums of -0.0 are
    0, as XLA's on a CPU: on a GPU, XLA's are -0.0."""

    def run(x):
        def body(h, x):
            best = jnp.argmax(h, -1, keepdims=True)
            value = jnp.take_along_axis(x, best, 1)
            value = jnp.where(1 / jnp.take_along_axis(-jnp.zeros_like(x), best, 1) < 0, value, 0)
            if not ON_GPU:
                value = jnp.where(1 / jnp.sum(-jnp.abs(h) * 0, 1, keepdims=True) > 0, value, 0)
            return jnp.tanh(0.9 * h + x * value), (best[:, 0], value)

        return scan(body, x[0], x)

    return run, [numbers(STEPS, LANES, n)]


def one_row(scan, n):
    """No lanes."""

    def run(w, x):
        body = lambda h, x: (jax.nn.softmax(w @ h + x),) * 2
        return scan(body, jnp.zeros(n, x.dtype), x)

    return run, [numbers(n, n), numbers(STEPS, n)]


SMALL = [(backward, 4), (sinkhorn, 3), (kalman, 2)]  # a thread can hold them
ROWS = [(backward, 6), (filtered, 17), (viterbi, 6), (sinkhorn, 17), (normalised, 100), (normalised, 513)]
ROWS += [(covariances, 6), (one_row, 32), (filtered, 1), (kalman, 6), (shifted, 20), (picked, 40), (lagged, 4)]
MORE = [(backward, 2), (backward, 32), (backward, 100), (filtered, 32), (filtered, 100), (viterbi, 100), (sinkhorn, 64)]
MORE += [(normalised, 2), (normalised, 4000), (covariances, 17), (one_row, 100), (kalman, 17), (shifted, 300)]


def real_loss(f):
    real = lambda y: jnp.issubdtype(y.dtype, jnp.floating)
    return lambda *xs: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*xs)) if real(y))


@pytest.mark.parametrize(
    "make, n, algorithm",
    [(*case, "lanes") for case in SMALL] + [(*case, "teams") for case in SMALL * ON_GPU + ROWS + MORE * ON_GPU],
)
def test_small_states(make, n, algorithm):
    (f, operands), (g, _) = (make(scan, n) for scan in (jaxkern.scan, lax.scan))
    every = tuple(range(len(operands)))
    with jaxkern.algorithms.force(scan=algorithm):
        # Kernels multiply in float32; XLA's products on a GPU are in TF32 by default.
        with jax.default_matmul_precision("highest"):
            compared(f, g, operands, every)
        for own in (f, g):
            with jaxkern.accelerate(force=True):
                found, loops = lowered(own, *operands)
                more, further = lowered(jax.grad(real_loss(own), every), *operands)
                assert len(found) == 1 and len(more) == 2 and not loops + further
                assert all(("RowLoopKernel" in text) == (algorithm == "teams") for text in (*found, *more))


def compared(f, g, operands, every):
    both = [jax.jit(lambda *xs, f=f: (f(*xs), jax.grad(real_loss(f), every)(*xs)))(*operands) for f in (f, g)]
    close(*both, "float32")


def test_a_call_has_at_most_64_arrays():
    """Where a thread holds a state, the gradient of a matrix of so many numbers has no kernel; teams of threads take it."""
    f, operands = backward(jaxkern.scan, 5)
    gradient = jax.grad(lambda *xs: jnp.sum(f(*xs)[0]))
    with jaxkern.algorithms.force(scan="lanes"):
        (text,), loops = lowered(f, *operands)
        takes, gives = (part.count("[") for part in text.split("\n")[1].split(" -> "))
        assert takes + gives <= 64 and not loops
        with pytest.raises(ValueError, match="the algorithm 'lanes' cannot run .*; teams can"):
            lowered(gradient, *operands)
    found, loops = lowered(gradient, *operands)
    assert len(found) == 2 and not loops and all("RowLoopKernel" in text for text in found)


def planned(e, on=FEW, order=()):
    """(plan, core) of a scan by teams of threads. order: in which the dimensions of xs and ys with three lie in memory."""
    closed, counts = e.params["jaxpr"], compat.counts_of_scan(e.params)
    program = RowProgram(closed.jaxpr, closed.consts, *counts, "test")
    of_steps = [*range(sum(counts), len(program.operands))]
    of_steps += [len(program.operands) + k for k in range(counts[1], len(program.results))]
    values = (*program.operands, *program.results)
    core = RowCore(program, {k: order for k in of_steps if order and len(values[k].dims) == 2}, e.params["length"])
    return plan_rows.plan(on, core, e.params["length"], e.params["reverse"]), core


def traced(make, n, dtype, again):
    """The scans of a function and of its gradient. again: the gradient computes values of a step again, rather than keep them."""
    f, operands = make(lax.scan, n)
    operands = [x.astype(dtype) for x in operands]
    loss = real_loss(
        make(lambda body, *more, **given: lax.scan(jax.checkpoint(body), *more, **given), n)[0] if again else f
    )
    at = tuple(range(len(operands)))
    return scans(jax.make_jaxpr(lambda *xs: (f(*xs), jax.grad(loss, at)(*xs)))(*operands).jaxpr)


ON_THE_CPU = [
    (backward, 6, "float32", True),
    (backward, 32, "bfloat16", False),
    (filtered, 17, "float64", True),
    (viterbi, 6, "float16", False),
    (sinkhorn, 17, "float32", False),
    (normalised, 513, "float32", True),
    (covariances, 6, "float32", True),
    (one_row, 100, "float32", True),
    (filtered, 1, "float32", True),
    (kalman, 5, "float64", True),
    (shifted, 40, "float32", True),
    (picked, 40, "float32", True),
    (lagged, 4, "float32", True),
    (moved, 20, "float32", False),
    (constant, 17, "float32", False),
    (ragged, 20, "float32", False),
    (common, 6, "float32", False),
    (gates, 20, "float32", False),
    (observed, 20, "float32", False),
]


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@plans.needs_runtime
@pytest.mark.parametrize("make, n, dtype, again", ON_THE_CPU)
def test_kernels_on_the_cpu(make, n, dtype, again, highest_precision):
    """Every element is written, nothing is read or written out of bounds, and results are right."""
    forward = make in (viterbi, moved, constant, ragged, common, gates, observed)
    with compat.enable_x64(dtype == "float64"):
        e = traced(make, n, dtype, again)[0 if forward else -1]
        made, core = planned(e)
        assert made.algorithm == "teams"
        program, given, avals, wanted = evaluated(e, core.program, dtype)
        agree(program.join(test_scan_plan.run(made, core, given, avals, e.params["length"], False)), wanted, dtype)


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@plans.needs_runtime
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0)])
def test_steps_along_any_axis(order):
    e = traced(normalised, 20, "float32", True)[-1]
    made, core = planned(e, order=order)
    program, given, avals, wanted = evaluated(e, core.program, "float32")
    given = [x.transpose(core.orders[k]) if k in core.orders else x for k, x in enumerate(given)]
    assert len(core.orders) > 2
    agree(program.join(test_scan_plan.run(made, core, given, avals, e.params["length"], False)), wanted, "float32")


@plans.needs_nvrtc
@pytest.mark.parametrize(
    "make, n, dtype, on", [(backward, 32, "float32", device.A100), (filtered, 100, "float64", device.H200)]
)
def test_kernels_compile(make, n, dtype, on):
    with compat.enable_x64(dtype == "float64"):
        made, _ = planned(traced(make, n, dtype, True)[-1], on)
    (step,) = made.launches
    assert registry.kernels.module.compile(step.header, step.name, on.compute_capability, step.source)


def test_any_shape_has_a_plan_within_the_limits_of_the_device():
    for make, n in ROWS + MORE[-4:]:
        for e in traced(make, n, "float32", True)[-1:]:
            for on in plans.DEVICES:
                if (made := planned(e, on)[0]) is not None:
                    plans.check_limits(made, on)
