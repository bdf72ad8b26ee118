"""The plans of operations at indices: what is chosen, and that each is right and reproducible where it is forced."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from indexed import (
    COMPOSED,
    FLOATS,
    INTEGERS,
    MEANS,
    REDUCTIONS,
    assert_reduced,
    assert_selected,
    indices,
    run,
    values,
)

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat


def test_plans_are_forced_on_what_they_are_for():
    x, index = jnp.ones((3, 4)), jnp.zeros(2, jnp.int32)
    gradient = jax.grad(lambda x: jaxkern.index_select(x, 0, index).sum())
    other = str(jax.make_jaxpr(jaxkern.logsumexp)(x))
    with algorithms.force(segment_sum="sort"):
        text = str(jax.make_jaxpr(gradient)(x))
        assert "plan='sort'" in text and "plan='auto'" in text  # the gather's own
        assert str(jax.make_jaxpr(jaxkern.logsumexp)(x)) == other and "algorithm=auto" in other
    with algorithms.force(index_select="gather"):
        assert "plan='gather'" in str(jax.make_jaxpr(gradient)(x)).split("segment_sum")[0]
    assert "plan='sort'" not in str(jax.make_jaxpr(gradient)(x))
    with (
        pytest.raises(ValueError, match="index_add has no algorithm 'sorts', there are unique"),
        algorithms.force(index_add="sorts"),
    ):
        pass


def test_plan_query_needs_no_gpu():
    for device, dtype, rows, count, inner in itertools.product(
        (algorithms.H200, algorithms.A100), FLOATS + INTEGERS, (1, 1000, 1 << 20), (1, 1000, 1 << 20), (1, 7, 128)
    ):
        for op in ("index_add", "segment_sum", "segment_max", "segment_min", "segment_prod", "index_select"):
            problem = dict(rows=rows, count=count, inner=inner, dtype=dtype, device=device)
            plan = algorithms.choose(op, **problem)
            assert plan in algorithms.names(op) and algorithms.fits(op, plan, **problem)
            assert (plan == "gather") == (op == "index_select") and plan != "atomic"
    # Fewer than four updates per row, and few enough for each block to look through all of them; or not.
    assert [algorithms.choose("index_add", 2000, 3000, batch=b, dtype="float32") for b in (1, 4, 5)] == [
        "narrow",
        "narrow",
        "sort",
    ]
    for words, call in {
        "complex64": lambda: algorithms.choose("index_add", 1, 1, dtype="complex64"),
        "float32": lambda: algorithms.choose("index_add", 1, 1, index_dtype="float32"),
        "positive": lambda: algorithms.choose("index_add", 0, 1),
        "no algorithm 'sorts'": lambda: algorithms.fits("index_add", "sorts", 1, 1),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()


# Rows, indices and elements of a row around the edges of each plan; few enough that each may be compiled.
PROBLEMS = [
    (1, 1, 1),
    (1, 5000, 1000),
    (31, 33, 3),
    (31, 1024, 128),
    (31, 20000, 1),
    (31, 70001, 33),
    (1000, 1024, 1),
    (1000, 5000, 7),
    (1000, 5000, 129),
    (1000, 33, 1000),
    (1000, 70001, 8),
    (70000, 33, 129),
    (70000, 1024, 3),
    (70000, 5000, 15),
    (70000, 70001, 1),
    (70000, 70001, 3),
    (5000, 9000, 1),
    (1000, 20000, 1),
    (2000, 70001, 1),
]


@pytest.mark.gpu
@pytest.mark.parametrize("plan", (*algorithms.names("index_add"), "gather"))
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("operation", [*REDUCTIONS, "index_select"])
def test_every_plan(plan, dtype, operation):
    """Each plan where it fits, at sizes around its edges, right and the same every time."""
    if operation in MEANS and dtype in INTEGERS:
        pytest.skip("the mean of integers is another type")
    hints = dict(indices_are_sorted=plan == "sorted", unique_indices=plan == "unique", deterministic=plan != "atomic")
    if operation != "index_add":
        hints.pop("deterministic")
    asked = COMPOSED.get(operation, operation)
    if plan not in algorithms.names(asked):
        pytest.skip("of other operations")
    problem = dict(sorted=plan == "sorted", unique=plan == "unique", deterministic=plan != "atomic")
    for rows, count, inner in PROBLEMS:
        if plan == "unique" and count > rows:
            continue
        if not algorithms.fits(
            asked, plan, rows, count, inner, dtype, **(problem if operation != "index_select" else {})
        ):
            continue
        with compat.enable_x64("64" in dtype), algorithms.force(**{asked: plan}):
            x, source = values((rows, inner), dtype), values((count, inner), dtype, 2)
            index = indices(rows, count, kind="sorted" if plan == "sorted" else "wild")
            if plan == "unique":
                index = np.random.default_rng(0).permutation(rows)[:count].astype(np.int32)
            if operation == "index_select":
                assert_selected(jaxkern.index_select(x, 0, index), x, index, 0)
                continue
            runs = [run(operation, x, index, source, **hints) for _ in range(2)]
            assert_reduced(operation, runs[0], x, index, source)
            assert plan == "atomic" or np.asarray(runs[0]).tobytes() == np.asarray(runs[1]).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "plan, rows, count, batch",
    [
        ("sort", 300_000, 600_001, None),
        ("narrow", 2**22, 600_001, None),
        ("sort", 300_000, 4_200_001, None),
        ("narrow", 300_000, 4_200_001, None),
        ("narrow", 9_000, 9_001, 70),
    ],
)
def test_plans_of_many_updates(plan, rows, count, batch):
    """Half a million, and four: the sort's larger tiles and two passes of elements, and bins of whole slices; integers
    show every one of them. Many go nowhere, for which powers of two have no key below the next bit."""
    shape = (count,) if batch is None else (batch, count)
    index = np.random.default_rng(0).integers(-rows // 10, rows + rows // 10, shape).astype(np.int32)
    total = functools.partial(jaxkern.segment_sum, num_segments=rows)
    for dtype in ("int32", "float32", "bfloat16"):
        source = values(shape, dtype)
        with algorithms.force(segment_sum=plan):
            found = [np.asarray(jax.jit(total if batch is None else jax.vmap(total))(source, index)) for _ in range(2)]
        assert found[0].tobytes() == found[1].tobytes()
        for f, s, i in zip(*(np.asarray(a).reshape(-1, a.shape[-1]) for a in (found[0], source, index)), strict=True):
            assert_reduced("segment_sum", f, np.zeros(rows), i, s)


@pytest.mark.parametrize("count", [5000, 5001])
def test_windows_of_several_slices(count):
    """Whose indices are whole vectors, or begin anywhere."""
    index = np.random.default_rng(0).integers(-2, 302, (6, count)).astype(np.int32)
    source = values((6, count), "int32")
    found = jax.vmap(lambda s, i: jaxkern.segment_sum(s, i, 300))(source, index)
    for f, s, i in zip(found, source, index, strict=True):
        assert_reduced("segment_sum", f, np.zeros(300), i, s)


@pytest.mark.gpu
def test_a_plan_that_does_not_fit_is_an_error():
    with algorithms.force(segment_sum="sorted"), pytest.raises(Exception, match="jaxkern.segment_sum.*sorted"):
        jax.block_until_ready(jaxkern.segment_sum(jnp.ones(5), jnp.zeros(5, int), 3))
