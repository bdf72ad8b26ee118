"""docs/counterparts.py against both libraries: signatures, calls with the same arguments, and every difference named there."""

import inspect

import counterparts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counterparts import COUNTERPARTS, DIFFERENCES, ELEMENTWISE_WITHOUT, NEWER

import jaxkern

each = pytest.mark.parametrize("c", COUNTERPARTS, ids=lambda c: c.ours)
ELEMENTWISE = counterparts.elementwise()
CONVERTS_INTEGERS = {"floor", "ceil", "round", "fmod", "power", "hard_tanh"}


@each
def test_signature(c):
    """Each of their arguments is ours, by the same or the listed name and with the same default, or is explained."""
    ours, theirs = c.parameters()
    assert set(theirs) - set(c.without) <= set(ours), (
        f"{c.theirs} has arguments that {c.ours} lacks"
    )
    missing = set(c.without) - NEWER
    assert not set(c.without) & set(ours) and missing <= set(theirs), (
        "an argument that is not missing"
    )
    common = {name: (ours[name], p) for name, p in theirs.items() if name in ours}
    differ = {name for name, (a, b) in common.items() if a.default != b.default}
    assert differ == set(c.defaults)
    if c.order:
        names = [
            n
            for n, (a, b) in common.items()
            if a.kind == b.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        assert names == [n for n in ours if n in names]


@each
def test_results(c):
    renamed = lambda given: {c.same.get(k, k): v for k, v in given.items()}
    for args, given in c.calls():
        if c.ours == "index_add":
            ours = jaxkern.index_add(args[0], 0, *args[1:], **given)
        else:
            ours = getattr(jaxkern, c.ours)(*args, **renamed(given))
        theirs = (c.run or c.function)(*args, **given)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), (args, given)
            near = (
                4 * float(jnp.finfo(a.dtype).eps)
                if jnp.issubdtype(a.dtype, jnp.floating)
                else 0
            )
            np.testing.assert_allclose(
                *(np.asarray(y, np.float64) for y in (a, b)), near * 4, near, err_msg=f"{given}"
            )


@pytest.mark.parametrize("d", DIFFERENCES, ids=lambda d: f"{d.of}: {d.here}")
def test_difference(d):
    assert d.check()


def _operands(name, dtype):
    arrays = [
        (jnp.array([0.5, 2, 3, 0.25]) * (k + 1)).astype(dtype) for k in range(_arity(name))
    ]
    return [arrays[0] > 1, *arrays[1:]] if name == "where" else arrays


def _arity(name):
    parameters = inspect.signature(getattr(jaxkern, name)).parameters.values()
    return sum(p.default is p.empty for p in parameters)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name):
    """Values and types, of integers too where the counterpart takes them."""
    f, (_, g) = getattr(jaxkern, name), ELEMENTWISE[name]
    order = (lambda x, low, high: g(low, x, high)) if name == "clamp" else g
    kinds = ("bool",) if name.startswith("logical") else ("float32", "bfloat16", "int32")
    for dtype in kinds:
        operands = _operands(name, dtype)
        ours = f(*operands)
        try:
            theirs = order(*operands)
        except TypeError:  # of some functions JAX takes no integers
            assert dtype == "int32"
            continue
        assert (ours.dtype == theirs.dtype) == (
            dtype != "int32" or name not in CONVERTS_INTEGERS
        ), dtype
        near = 4 * float(
            jnp.finfo(
                theirs.dtype if "float" in dtype and theirs.dtype != bool else "float32"
            ).eps
        )
        finite = np.isfinite(np.asarray(ours, np.float64))  # integers have no remainder by 0
        np.testing.assert_allclose(
            *(np.asarray(y, np.float64)[finite] for y in (ours, theirs)), rtol=near
        )


def test_elementwise_signatures():
    """Parameters and their defaults; the names of operands may differ."""
    without = set()
    for name, (_, g) in ELEMENTWISE.items():
        ours = inspect.signature(getattr(jaxkern, name)).parameters
        theirs = inspect.signature(g).parameters
        named = {
            k: p.default
            for k, p in theirs.items()
            if p.default is not p.empty and k not in ("x", "y")
        }
        if "args" in theirs:  # a ufunc, whose signature also has `where`
            named.pop("where")
        without |= set(named) - set(ours)
        assert {k: ours[k].default for k in named if k in ours} == {
            k: v for k, v in named.items() if k in ours
        }, name
    assert without == set(ELEMENTWISE_WITHOUT)


def test_page_names_every_counterpart():
    """A function by the name of a function in jax.nn, jax.ops, jax.lax or jnp is on the page."""
    listed = {c.ours for c in COUNTERPARTS} | set(ELEMENTWISE)
    shared = {
        n
        for n in jaxkern.__all__
        if any(callable(getattr(m, n, None)) for m in (jax.nn, jax.ops, jax.lax, jnp))
    }
    assert shared <= listed
