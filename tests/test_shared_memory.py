"""Memory that XLA may share between operands and results of a custom call: calls on slices, whose results are put back.

XLA for GPUs fuses slices and updates of slices with a custom call, and updates an array in place even if the call reads it.
The values are compared on GPUs. Elsewhere the lowered program is read: a barrier must stand where XLA would fuse.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from jax import lax

import jaxkern
from jaxkern._core import compat_lowering, registry, stablehlo

pytestmark = pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")

X = 2048, 4096  # more blocks than a GPU runs at once, and rows of whole sectors


def filtered(x):
    """An infinite impulse response whose first outputs are its inputs."""

    def body(i, y):
        return y.at[i].set(0.2 * x[i] + 0.3 * x[i - 1] + 0.2 * x[i - 2] + 0.5 * y[i - 1] - 0.2 * y[i - 2])

    return lax.fori_loop(2, len(x), body, x)


def added(x, i, source):
    return x.at[i].add(source, mode="drop")


def loss(x, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1).sum()


INDEX = np.arange(256) * 7 % 2040
# name: (on jaxkern, the same in jnp)
PROGRAMS = {
    "a loop": (lambda x: filtered(x), filtered),
    "rows moved down": (
        lambda x: x.at[1:].set(jaxkern.softmax(x[:-1])),
        lambda x: x.at[1:].set(jax.nn.softmax(x[:-1])),
    ),
    "rows in a loop": (
        lambda x: lax.fori_loop(0, 4, lambda i, x: x.at[:-1].set(jaxkern.softmax(x[1:])), x),
        lambda x: lax.fori_loop(0, 4, lambda i, x: x.at[:-1].set(jax.nn.softmax(x[1:])), x),
    ),
    "sums into a row": (lambda x: x.at[0].set(jaxkern.reduce_sum(x, 0)), lambda x: x.at[0].set(x.sum(0))),
    "onto a slice": (lambda x: jaxkern.index_add(x[8:], 0, INDEX, x[:256]), lambda x: added(x[8:], INDEX, x[:256])),
    "onto itself": (
        lambda x: jaxkern.index_add(jnp.sin(x), 0, INDEX, jnp.sin(x)[:256]),
        lambda x: added(jnp.sin(x), INDEX, jnp.sin(x)[:256]),
    ),
    "a loss of a slice": (
        jax.grad(lambda x: jaxkern.softmax_cross_entropy(jnp.sin(x)[:256], INDEX).sum()),
        jax.grad(lambda x: loss(jnp.sin(x)[:256], INDEX)),
    ),
}


def fused(call):
    """The operands and results of a custom call that XLA could fuse with slices, although kernels write them."""
    named = {name: str(value) for name, value in compat_lowering.attributes(call)}
    overwritten = map(int, re.findall(r"operand_index = (\d+)", named.get("output_operand_aliases", "")))
    found = [("operand", k) for k in overwritten if stablehlo.behind(call.operands[k]) == call.operands[k]]
    return found + [
        ("result", k) for k, x in enumerate(call.results) if {use.owner.name for use in x.uses} - {stablehlo.BARRIER}
    ]


def calls(block):
    """The custom calls of kernels in a block, and in the blocks in it."""
    for operation in (x.operation for x in block.operations):
        if operation.name == "stablehlo.custom_call" and "jaxkern_" in str(operation.attributes["call_target_name"]):
            yield operation
        for region in operation.regions:
            for inner in region.blocks:
                yield from calls(inner)


@pytest.mark.parametrize("what", PROGRAMS)
def test_results_are_not_written_where_operands_are_read(what):
    ours, plain = PROGRAMS[what]
    x = jax.ShapeDtypeStruct(X, jnp.float32)
    with jaxkern.accelerate(only=("scan",)):
        run = jax.jit(ours)
        module = run.trace(x).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    found = list(calls(module.body))
    assert found and not any(map(fused, found)), list(map(fused, found))
    if ON_GPU:
        x = jnp.asarray(np.random.default_rng(0).normal(size=X), jnp.float32)
        want = jax.jit(plain)(x)
        with jaxkern.accelerate(only=("scan",)):
            ys = [run(x) for _ in range(6)]
        np.testing.assert_allclose(ys[0], want, rtol=2e-5, atol=2e-5 * float(jnp.abs(want).max()))
        assert all(bool((y == ys[0]).all()) for y in ys)


CUTS = {  # name: (a slice of an array of shape (4, 6, 5), whether it is contiguous there)
    "rows": (lambda x: x[1:3], True),
    "a row": (lambda x: x[2], True),
    "part of a row": (lambda x: x[2, 1:4], True),
    "a row of a row": (lambda x: x[3, 2], True),
    "part of that": (lambda x: x[3, 2, 1:3], True),
    "one element": (lambda x: x[3, 2, 4], True),
    "a slice of a slice": (lambda x: x[1:][1].reshape(3, 10)[1:, :], True),
    "one of every second": (lambda x: lax.slice(x, (1, 0, 0), (2, 6, 5), (2, 1, 1)), True),
    "columns": (lambda x: x[:, 1:], False),
    "part of each row of a part": (lambda x: x[1, 1:3, :4], False),
    "every second": (lambda x: lax.slice(x, (0, 0, 0), (4, 6, 5), (2, 1, 1)), False),
    "backwards": (lambda x: x[::-1], False),
    "all": (lambda x: x.reshape(120), False),
}


@pytest.mark.parametrize("name", CUTS)
def test_contiguous_slices(name):
    """Where a slice begins in the array that it is a slice of."""
    cut, contiguous = CUTS[name]
    module = jax.jit(cut).trace(jax.ShapeDtypeStruct((4, 6, 5), jnp.float32)).lower().compiler_ir("stablehlo")
    (program,) = (f for f in module.body.operations if str(f.attributes["sym_name"]) == '"main"')
    *_, last = program.regions[0].blocks[0].operations
    found = stablehlo.whole_of(last.operands[0])
    assert (found is not None) == contiguous
    if found is not None:
        x = np.arange(120)
        want = np.asarray(cut(jnp.asarray(x.reshape(4, 6, 5)))).reshape(-1)
        np.testing.assert_array_equal(x[found[1] :][: want.size], want)
        assert found[0] == program.regions[0].blocks[0].arguments[0]
