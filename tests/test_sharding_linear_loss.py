"""linear_softmax_cross_entropy of rows and vocabularies spread over several devices: as in test_sharding.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import mesh, messages, put, same, several

import jaxkern
from jaxkern import algorithms

pytestmark = pytest.mark.usefixtures("highest_precision")

ROWS, WIDTH, VOCABULARY = 32, 8, 64
IGNORED = 5  # a class
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": IGNORED, "soft_cap": 3.0}


@functools.cache
def operands():
    rng = np.random.default_rng(0)
    h, weight, bias = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 8, WIDTH), (WIDTH, VOCABULARY), VOCABULARY)
    )
    labels = rng.integers(0, VOCABULARY, (4, 8))
    labels[0, :3] = IGNORED
    return h, weight, bias, jnp.asarray(labels, jnp.int32)


def step(reduction, algorithm, memory=None, **options):
    def f(h, weight, bias, labels):
        with algorithms.force(linear_softmax_cross_entropy=algorithm):
            loss = jaxkern.linear_softmax_cross_entropy(
                h, weight, labels, bias, reduction=reduction, memory=memory, **options
            )
        return (loss * jnp.cos(jnp.arange(loss.size, dtype=loss.dtype)).reshape(loss.shape)).sum()

    return jax.value_and_grad(f, (0, 1, 2))


@functools.cache
def on_one_device(reduction):
    return jax.jit(step(reduction, "whole", **OPTIONS))(*operands())


# The splits of h and weight.
SPLITS = [
    (P("r"), P()),
    (P("r", "c"), P()),
    (P(), P(None, "c")),
    (P("r"), P(None, "c")),
    (P(None, "r"), P("c", None)),
    (P(), P(None, ("r", "c"))),
]


@several
@pytest.mark.parametrize("algorithm, memory, reduction", [("rows", 2000, "none"), ("vocabulary", 3000, "mean")])
@pytest.mark.parametrize("of_h, of_weight", SPLITS)
def test_split_operands(of_h, of_weight, algorithm, memory, reduction):
    """Rows and vocabulary may be split, and nothing is gathered for that but numbers per row."""
    m = mesh()
    args = put(m, operands(), (of_h, of_weight, P(*of_weight[1:]), of_h))
    shardings = tuple(a.sharding for a in args[:3])
    f = jax.jit(step(reduction, algorithm, memory, **OPTIONS), out_shardings=(None, shardings)).lower(*args).compile()
    same(f(*args), on_one_device(reduction), 1e-5)
    sent = messages(f.as_text())
    gathered = max([0, *sent["all-gather"], *sent["all-to-all"], *sent["collective-permute"]])
    # Of a weight that is split along the sum, all of it is needed.
    parts = m.size if of_weight == P(None, ("r", "c")) else m.shape["c"]
    numbers = 5 * parts * ROWS if of_weight[1:] else 0
    assert gathered <= (WIDTH * VOCABULARY if of_weight == P("c", None) else numbers), dict(sent)
    # XLA may join the gradients of weight and bias, and the loss, in one message.
    assert max([0, *sent["all-reduce"]]) <= (WIDTH + 1) * VOCABULARY + 1
    if of_weight == P():  # rows alone: the gradients of weight and bias, and the loss
        assert len(sent["all-reduce"]) <= 3 + (algorithm == "vocabulary") * 6


@several
def test_rows_that_do_not_divide():
    m = mesh()
    h, weight, bias, labels = operands()
    h, labels = h[:, :5], labels[:, :5]
    f = step("mean", "rows", 2000)
    wanted = jax.jit(f)(h, weight, bias, labels)
    args = put(m, (h, weight, bias, labels), (P("c"), P(None, "r"), P("r"), P("c")))
    same(jax.jit(f)(*args), wanted, 1e-5)


@several
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shardings_are_kept(kind):
    m = mesh(kind)
    h, weight, bias, labels = operands()
    args = put(m, (h, weight, bias, labels), (P("r", None, None), P(None, "c"), P("c"), P("r", None)))
    per_row = jax.jit(lambda h, w, b, y: jaxkern.linear_softmax_cross_entropy(h, w, y, b, reduction="none"))(*args)
    assert per_row.sharding.is_equivalent_to(NamedSharding(m, P("r")), 2)
    mean = lambda h, w, b, y: jaxkern.linear_softmax_cross_entropy(h, w, y, b, ignore_index=IGNORED)
    value, found = jax.jit(jax.value_and_grad(mean, (0, 1, 2)))(*args)
    for a, b in zip(found, args):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    same((value, found), jax.value_and_grad(mean, (0, 1, 2))(h, weight, bias, labels), 1e-5)


@several
def test_other_derivatives():
    m = mesh()
    h, weight, bias, labels = operands()

    def f(h, weight, bias, labels):
        mean = lambda h, w, b: jaxkern.linear_softmax_cross_entropy(h, w, labels, b, soft_cap=3.0)
        rows = lambda h, w, b: jaxkern.linear_softmax_cross_entropy(h, w, labels, b, reduction="none", z_loss=0.1)
        primals = (h, weight, bias)
        tangents = tuple(map(jnp.sin, primals))
        return (
            jax.jvp(rows, primals, tangents),
            jax.jvp(mean, primals, tangents),
            jax.jvp(jax.grad(mean, (0, 1, 2)), primals, tangents),
        )

    args = put(m, (h, weight, bias, labels), (P("r"), P(None, "c"), P("c"), P("r")))
    same(jax.jit(f)(*args), jax.jit(f)(h, weight, bias, labels), 1e-5)


@several
def test_in_shard_map():
    """Rows on each device, a weight that is replicated: its gradient is the sum."""
    m = mesh()
    h, weight, bias, labels = operands()
    h, labels = h.reshape(ROWS, WIDTH), labels.reshape(ROWS)

    def f(h, weight, labels):
        mean = jaxkern.linear_softmax_cross_entropy(h, weight, labels, memory=1500)
        return jax.lax.pmean(mean, ("r", "c"))

    mapped = jax.shard_map(f, mesh=m, in_specs=(P(("r", "c")), P(), P(("r", "c"))), out_specs=P())
    found = jax.jit(jax.value_and_grad(mapped, (0, 1)))(h, weight, jnp.abs(labels))
    mean = lambda h, weight: jaxkern.linear_softmax_cross_entropy(h, weight, jnp.abs(labels))
    same(found, jax.value_and_grad(mean, (0, 1))(h, weight), 1e-5)
