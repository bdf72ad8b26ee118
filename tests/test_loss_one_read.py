"""The one-read rule: loss and gradient of `value_and_grad` out of one call."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses import needs_kernels, needs_runtime, problem
from test_loss_programs import (
    ROWS,
    SHAPE,
    compiled,
    masked_mean,
    mean_loss,
    plain,
    squared_mean,
)

import jaxkern


@needs_kernels
@pytest.mark.parametrize("f", [mean_loss, masked_mean])
@pytest.mark.parametrize("donate", [(), (0,)])
def test_value_and_grad_reads_the_logits_once(f, donate):
    x, labels, _ = problem(SHAPE, "float32")
    program, calls, moves = compiled(jax.value_and_grad(f), x, labels, donate=donate)
    assert calls == ["cross_entropy_both"] and not moves
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes <= ROWS
    assert (memory.alias_size_in_bytes >= x.nbytes) == bool(donate)  # the gradient in the logits' memory
    value, dx = program(x + 0, labels)
    wanted, wanted_dx = jax.value_and_grad(
        lambda x: {
            mean_loss: lambda v: v.mean(),
            masked_mean: lambda v: jnp.sum(v * (labels > 3)) / (labels > 3).sum(),
        }[f](plain(x, labels, None, 0, 0))
    )(x)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(dx, wanted_dx, atol=1e-7)


@needs_kernels
@pytest.mark.parametrize("donate", [(), (0,)])
def test_a_cotangent_that_depends_on_the_loss(donate):
    x, labels, _ = problem(SHAPE, "float32")
    program, calls, moves = compiled(jax.value_and_grad(squared_mean), x, labels, donate=donate)
    assert sorted(calls) == ["cross_entropy", "cross_entropy_grad"] and not moves
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes <= ROWS
    assert (memory.alias_size_in_bytes >= x.nbytes) == bool(donate)
    np.testing.assert_allclose(
        program(x + 0, labels)[1], jax.grad(lambda x: plain(x, labels, None, 0, 0).mean() ** 2)(x), atol=1e-6
    )


@needs_kernels
def test_without_the_rule(monkeypatch):
    x, labels, _ = problem(SHAPE, "float32")
    wanted = jax.jit(jax.value_and_grad(mean_loss))(x, labels)
    monkeypatch.setenv("JAXKERN_ONE_READ", "0")
    program, calls, _ = compiled(jax.value_and_grad(lambda x, labels: mean_loss(x, labels)), x, labels)
    assert sorted(calls) == ["cross_entropy", "cross_entropy_grad"]
    for found, value in zip(program(x, labels), wanted):
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-9)


def test_a_loss_that_is_used_again_after_the_gradient():
    """The later use may cost a read, and must see the same loss."""
    x, labels, _ = problem(SHAPE, "float32")

    def step(x):
        losses, pull = jax.vjp(lambda x: jaxkern.softmax_cross_entropy(x, labels), x)
        (dx,) = pull(jnp.full(SHAPE[:1], 0.5, losses.dtype))
        return dx, jnp.sin(losses)

    dx, sines = jax.jit(step)(x)
    np.testing.assert_allclose(sines, jnp.sin(plain(x, labels, None, 0, 0)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx, jax.grad(lambda x: 0.5 * plain(x, labels, None, 0, 0).sum())(x), atol=1e-6)


BOTH, ONE_BY_ONE = {"cross_entropy", "cross_entropy_both"}, {"cross_entropy", "cross_entropy_grad"}


@needs_runtime
@pytest.mark.parametrize(
    "f, setting, calls",
    [
        (mean_loss, "1", BOTH),
        (masked_mean, "1", BOTH),
        (squared_mean, "1", ONE_BY_ONE),
        (mean_loss, "0", ONE_BY_ONE),
    ],
)
def test_programs_for_cuda(f, setting, calls, monkeypatch):
    """The call of the loss is left without uses, for XLA to remove."""
    monkeypatch.setenv("JAXKERN_ONE_READ", setting)
    x, labels, _ = problem(SHAPE, "float32")
    traced = jax.jit(jax.value_and_grad(lambda x: f(x, labels))).trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    names = ("cross_entropy", "cross_entropy_grad", "cross_entropy_both")
    assert {name for name in names if f"@jaxkern_{name}(" in text} == calls
    (first,) = re.findall(r"(%\d+):3 = stablehlo.custom_call @jaxkern_cross_entropy\(", text)
    assert (f"{first}#" in text) == (calls == ONE_BY_ONE)
