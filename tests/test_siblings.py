"""Arrays for products that take one kernel (jaxkern/_accelerate/siblings.py), and results over operands (last.py)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from benchmarks import compiled
from jaxkern._accelerate import last, regions, siblings
from jaxkern._accelerate.equations import is_variable
from jaxkern._core import registry

needs_kernels = pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
forced = jaxkern.accelerate(only="rows", force=True)


def gated(act, remat=False):
    """The gradients of a gated unit: act(x a) * (x b) @ c."""

    def unit(x, a, b, c):
        return (act(x @ a) * (x @ b)) @ c

    unit = jax.checkpoint(unit) if remat else unit
    return jax.grad(lambda *args: jnp.sum(jnp.sin(unit(*args).astype(jnp.float32))), (0, 1, 2, 3))


def shapes(rows, width, hidden, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct(s, dtype) for s in ((rows, width), (width, hidden), (width, hidden), (hidden, width))]


ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid}


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gradients_of_a_gated_unit(act, remat):
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s.shape), jnp.float32) for s in shapes(12, 8, 20)]
    f = gated(ACTIVATIONS[act], remat)
    with forced:
        found = jax.jit(f)(*args)
    for y, want in zip(found, jax.jit(f)(*args)):
        np.testing.assert_allclose(y, want, rtol=2e-5, atol=2e-5 * float(jnp.abs(want).max()))


def taken(f, *args):
    with jaxkern.accelerate(only="rows"):
        return [d for d in jaxkern.explain(f, "cuda")(*args) if d.taken and d.operation == "rows"]


@needs_kernels
@pytest.mark.parametrize(
    "remat, arrays", [(False, 5), (True, 6)]
)  # a program that is recomputed makes the unit's result there, too
def test_a_gated_unit_takes_one_kernel(remat, arrays):
    args = shapes(8192, 1024, 4096)
    (decision,) = taken(gated(jax.nn.silu, remat), *args)
    assert decision.bytes == arrays * 8192 * 4096 * 2
    with jaxkern.accelerate(only="rows"):
        text = jax.jit(gated(jax.nn.silu, remat)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in text.splitlines() if "jaxkern_row_kernel" in line and "custom_call" in line]
    assert len(re.findall("output_operand_alias<", line)) == arrays - 3


@pytest.mark.skipif(bool(compiled.missing()), reason=compiled.missing())
@needs_kernels
@pytest.mark.parametrize("remat", [False, True])
def test_it_needs_no_more_memory(remat, measured_jaxlib):
    found = compiled.compare(gated(jax.nn.silu, remat), *shapes(8192, 1024, 4096))
    plain, own = found["plain"], found["accelerated"]
    assert own.peak <= 1.02 * plain.peak and own.moved < 0.95 * plain.moved and own.copied <= plain.copied


@needs_kernels
def test_arrays_that_do_not_meet_are_left():
    """The second array depends on a product that reads the first, so no kernel can write both."""

    def f(x, w):
        y = jnp.sin(x @ w)
        z = jnp.cos(x @ w) * (y @ w)
        return z @ w

    assert not taken(f, *[jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 2)


def found_in(f, *args):
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    return jaxpr.eqns, jaxpr.outvars, siblings.find(jaxpr.eqns, jaxpr.outvars, [], 2)


def test_groups():
    x, w = jnp.ones((8, 4)), jnp.ones((4, 4))

    def f(x, w):
        a, b = x @ w, w @ x.T
        return (jnp.sin(a) * x) @ w, (jnp.cos(a) + x) @ w, jnp.sin(b) @ x

    equations, results, (region,) = found_in(f, x, w)
    assert region.shape == (8, 4) and region.axis == 1 and not region.reductions
    assert {str(e.primitive) for e in region.equations} == {"sin", "cos", "mul", "add"}
    assert region.named is region.equations[-1]
    assert siblings._cyclic(equations, [region]) is False
    product = next(e for e in equations if e.outvars[0] is results[0])
    made = {region.equations[-1].outvars[0], product.outvars[0]}
    other = regions.Region((8, 4), 1, [region.equations[-1], product], made)
    first = regions.Region((8, 4), 1, region.equations[:-1], {e.outvars[0] for e in region.equations[:-1]})
    assert not siblings._cyclic(equations, [first, other])


def test_regions_that_depend_on_each_other():
    def f(x):
        a = jnp.sin(x)
        b = a @ x
        return jnp.cos(b) + jnp.tanh(x @ b)

    equations = jax.make_jaxpr(f)(jnp.ones((4, 4))).jaxpr.eqns
    named = {e.primitive.name: e for e in equations}
    ends = [named["sin"], named["cos"]]  # what is between them belongs to neither
    region = regions.Region((4, 4), 1, ends, {e.outvars[0] for e in ends})
    assert siblings._cyclic(equations, [region])


READS = {  # whether sin(y) * 2 is the last to read y = x @ x
    "nothing else": (lambda x, y: jnp.sin(y) @ x, True),
    "before, and needed": (lambda x, y: (lambda z: jnp.sin(y + z @ x) @ x)(jnp.cos(y)), True),
    "before, under another shape": (lambda x, y: jnp.sin(y + y.reshape(64) @ x.reshape(64, 1)) @ x, True),
    "a product that is not needed": (lambda x, y: (jnp.sin(y) @ x, jnp.cos(y) @ x), False),
    "a product of it": (lambda x, y: (jnp.sin(y) @ x, y @ x), False),
    "a result": (lambda x, y: (jnp.sin(y) @ x, y), False),
    "a result of another shape": (lambda x, y: (jnp.sin(y) @ x, y.reshape(64)), False),
    "arithmetic that is a result": (lambda x, y: (jnp.sin(y) @ x, y + 1), False),
}


@pytest.mark.parametrize("name", READS)
def test_what_reads_an_array_last(name):
    f, expected = READS[name]
    jaxpr = jax.make_jaxpr(lambda x: f(x, x @ x))(jnp.ones((8, 8))).jaxpr
    (y,) = jaxpr.eqns[0].outvars
    sine = next(e for e in jaxpr.eqns if e.primitive.name == "sin")
    own = [e for e in jaxpr.eqns if e.primitive.name in ("sin", "add") and e.outvars[0].aval.shape == (8, 8)]
    own = own if sine.invars[0] is not y else [sine]
    region = regions.Region((8, 8), 1, own, {v for e in own for v in e.outvars})
    made = {v for e in own for v in e.outvars}
    region.operands = [v for e in own for v in e.invars if is_variable(v) and v not in made]
    region.results = [sine.outvars[0]]
    assert last.LastReads(jaxpr.eqns, jaxpr.outvars, [region]).reads(y, region) == expected
    (x,) = jaxpr.invars
    assert not last.LastReads(jaxpr.eqns, jaxpr.outvars, [region]).reads(x, region)  # whoever called keeps it
