"""Plans of scans by an associative operation: what the kernels compute (run on the CPU), and that they compile for GPUs."""

import itertools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from test_associative_scan import OPERATIONS

from jaxkern._core import algorithms, compat, device, registry
from jaxkern._engines.loops import plan_associative, tuning
from jaxkern._engines.loops.associative import associative_scan

MANY = {"four sums": 4, "nine sums": 9}  # arrays
TOLERANCE = {"float64": 1e-13, "float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3, "int16": 0}


def logsumexp(a, b):
    largest = jnp.maximum(a[0], b[0])
    return [largest, a[1] * jnp.exp(a[0] - largest) + b[1] * jnp.exp(b[0] - largest)]


def scan(name, axis, reverse, exclusive):
    """The scan as a function of a list of arrays."""
    options = {"axis": axis, "reverse": reverse}
    if name == "logsumexp":
        options["element"] = lambda x: [x[0], jnp.ones_like(x[0])]
        options["finish"] = lambda s, _: [s[0] + jnp.log(s[1])]
        return lambda *xs: associative_scan(logsumexp, xs, **options)
    if name in MANY:
        return lambda *xs: associative_scan(lambda a, b: [p + q for p, q in zip(a, b)], xs, **options)
    combine, _, first = OPERATIONS[name]
    return lambda *xs: associative_scan(combine, xs, exclusive=first if exclusive else None, **options)


def planned(name, shape, axis, dtype, algorithm="auto", reverse=False, exclusive=False, on=device.H200):
    """(plan, operands, function). "of a vector", "of a number" in the name: the first operand is the same in all steps."""
    name, _, repeated = name.partition(" of a ")
    rng = np.random.default_rng(0)
    count = OPERATIONS[name][1] if name in OPERATIONS else MANY.get(name, 1)
    draw = lambda: rng.integers(-9, 9, shape) if "int" in dtype else rng.uniform(0.5, 1.5, shape)
    xs = [jnp.asarray(draw(), dtype) for _ in range(count)]
    f, avals = scan(name, axis, reverse, exclusive), list(map(jax.typeof, xs))
    (e,) = (e for e in jax.make_jaxpr(f)(*xs).eqns if e.primitive.name == "jaxkern_associative_scan")
    dims = [None] * count
    if repeated:
        dims[0] = (len(shape) - 1,) if repeated == "vector" else ()
        xs[0] = 0.6 * xs[0][(0,) * (len(shape) - len(dims[0]))]
        avals[0], whole = jax.typeof(xs[0]), f
        f = lambda x, *xs: whole(jnp.broadcast_to(x, shape), *xs)
    with algorithms.force({"associative_scan": algorithm}):
        made = plan_associative.plan(on, avals, [v.aval for v in e.outvars], **e.params, dims=tuple(dims))
    return made, list(map(np.asarray, xs)), f


# Rows of several tiles, groups and supergroups; vectors, parts of them, and single elements; lanes that fill no block.
CASES = [
    ("warp", "affine", (3, 68), 1, "bfloat16", False),
    ("warp", "sum", (700, 6), 1, "float32", True),
    ("block", "affine", (3, 1204), 1, "float32", False),
    ("block", "logsumexp", (2, 777), 1, "float16", True),
    ("tiles", "sum", (8700,), 0, "float32", False),
    ("tiles", "affine", (12_345,), 0, "float32", True),
    ("tiles", "logsumexp", (9000,), 0, "bfloat16", False),
    ("tiles", "sum", (2, 5000), 1, "float32", True),
    ("tiles", "affine", (2, 3000), 1, "float64", True),
    ("lanes", "affine", (33, 6), 0, "float32", True),
    ("columns", "affine", (3, 150, 68), 1, "float32", False),
    ("column_tiles", "affine", (1000, 36), 0, "float32", True),
    ("column_tiles", "sum", (2, 900, 5), 1, "int16", False),
    ("column_tiles", "logsumexp", (700, 264), 0, "bfloat16", True),
    ("warp", "four sums", (5, 60), 1, "float32", False),
    ("tiles", "four sums", (2, 2100), 1, "float16", False),
    ("column_tiles", "nine sums", (300, 6), 0, "float32", False),
    ("lanes", "affine of a number", (3, 33, 6), 1, "float32", False),
    ("columns", "affine of a vector", (3, 150, 2, 34), 1, "bfloat16", True),
    ("column_tiles", "affine of a vector", (2, 300, 36), 1, "float32", False),
]


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@plans.needs_runtime
@pytest.mark.parametrize("algorithm, name, shape, axis, dtype, reverse", CASES)
def test_kernels_on_the_cpu(algorithm, name, shape, axis, dtype, reverse, monkeypatch):
    """Every element is written, nothing is read or written out of bounds, at any alignment, and results are right."""
    smaller = {"SCAN_THREADS": 64, "ROW_BYTES": 16, "STAGED_BYTES": 2048, "ROW_RADIX": 4, "COLUMN_RADIX": 4}
    smaller |= {"RING_THREADS": 64, "RING_BYTES": 2048, "RING_TURNS": 0, "RING_WORDS": 8}
    for constant, value in smaller.items():
        monkeypatch.setattr(tuning, constant, value)
    with compat.enable_x64(dtype == "float64"):
        exclusive = reverse and name in OPERATIONS
        made, xs, f = planned(name, shape, axis, dtype, algorithm, reverse, exclusive)
        assert made.algorithm == algorithm
        plans.check_limits(made, device.H200)
        wanted = f(*map(jnp.asarray, xs))
        emulated.prepare(made)
        for unaligned in (False, True):
            ours = emulated.run(made, xs, [(y.shape, y.dtype) for y in wanted], unaligned)
            for y, want in zip(ours, wanted, strict=True):
                y, want = np.asarray(y, np.float64), np.asarray(want, np.float64)
                np.testing.assert_allclose(y, want, TOLERANCE[dtype], TOLERANCE[dtype] * np.abs(want).max())


def test_layouts_of_many_arrays():
    """A thread's elements are whole vectors, lanes of a warp a power of two, and states of a block fit shared memory."""
    for itemsize, arrays, length in itertools.product((1, 2, 4, 8), range(1, 20), (3, 32, 100, 1000, 1 << 20)):
        for algorithm, vectors, reverse in itertools.product(plan_associative.ROWS, (True, False), (True, False)):
            problem = plan_associative.Problem(3, length, 1, itemsize, arrays, arrays)
            cut = plan_associative.layout(algorithm, problem, vectors, reverse)
            assert cut.items % cut.pack == 0 and 32 % cut.lanes == 0
    for words, inner in itertools.product(range(1, plan_associative.MOST_WORDS + 1), (2, 6, 64, 1000)):
        for algorithm in plan_associative.COLUMNS[1:]:
            cut = plan_associative.layout(algorithm, plan_associative.Problem(1, 4096, inner, 4, 1, words))
            states = cut.pack * cut.lanes * (2 * cut.parts + 2 * tuning.COLUMN_RADIX + 1)
            assert cut.pack > 0 and 4 * words * states <= plan_associative.SHARED


@plans.needs_nvrtc
@pytest.mark.parametrize("capability", (80, 120))
def test_kernels_compile(capability, monkeypatch):
    monkeypatch.setattr(tuning, "RING_TURNS", 1)  # as for longer rows
    cases = {
        80: ("sum", (1 << 20,), 0, "bfloat16"),
        120: ("sum", (65536, 1536), 0, "bfloat16"),
    }
    made, *_ = planned(*cases[capability])
    kernels = [s for s in (*made.launches, *(made.unaligned or ())) if hasattr(s, "header")]
    for step in kernels:
        assert registry.kernels.module.compile(step.header, step.name, capability, step.source)


@pytest.mark.parametrize(
    "shape, axis, algorithm",
    [
        ((1 << 27,), 0, "tiles"),
        ((4096, 32768), 1, "block"),
        ((100, 1 << 20), 1, "tiles"),
        ((1 << 20, 16), 1, "warp"),
        ((32768, 4096), 0, "column_tiles"),
        ((4, 1 << 20), 0, "lanes"),
    ],
)
@pytest.mark.parametrize("on", plans.DEVICES)
def test_the_choice(shape, axis, algorithm, on):
    outer, length, inner = np.prod(shape[:axis], dtype=int), shape[axis], np.prod(shape[axis + 1 :], dtype=int)
    problem = plan_associative.Problem(int(outer), length, int(inner))
    assert plan_associative.choose(problem, on) == algorithm
