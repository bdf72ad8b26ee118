"""GroupNorm and BatchNorm on CUDA: their plans, the kernels that they name, and what these do, run on the CPU."""

import functools
import itertools
import math
import re

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import DEVICES, check_limits, compile_kernels, kernels, layout, needs_nvrtc

from jaxkern._core import compat, device, functor, registry
from jaxkern._ops.group_norm import plan, primitive, reference, tuning

# [samples, rows, groups, channels of a group, inner]
SHAPES = [
    (64, 4096, 32, 8, 1),
    (1, 262144, 256, 1, 1),
    (64, 1, 32, 8, 4096),
    (1, 64, 256, 1, 4096),
    (2, 4096, 32, 10, 1),
    (2, 1024, 32, 60, 1),
    (3, 100, 1, 7, 1),
    (3, 1, 5, 7, 11),
    (1, 1, 1, 1, 1),
    (4096, 16, 32, 2, 1),
    (1, 1 << 24, 3, 1, 1),
    (1, 64, 2048, 1, 1),
    (8, 65536, 32, 4, 1),
    (128, 1, 1, 512, 196),
    (1, 1, 100000, 1, 1),
]


def found(
    operation,
    shape,
    dtype,
    extras="scale bias",
    on=device.H200,
    out=None,
    parameters="float32",
    algorithm="auto",
    keep=0,
    sums=True,
):
    """{primitive: (plan, types of its operands, types of its results, parameters)}."""
    of = lambda shape, dtype: jax.core.ShapedArray(shape, jnp.dtype(dtype))
    x, y, vector = of(shape, dtype), of(shape, out or dtype), of((*shape[:keep], *shape[2:4]), parameters)
    stat = of((shape[0], shape[2]), reference.computing(x.dtype))
    at = {"operation": operation, "batch": 1, "channel": 2, "algorithm": algorithm}
    scale, bias = (vector if name in extras else None for name in ("scale", "bias"))
    wanted = tuple(vector.dtype if sums and name in extras else None for name in ("scale", "bias"))
    more = {"keep": keep, "eps": 1e-5}
    channels = of((shape[0], *shape[2:4]), stat.dtype)
    calls = {
        "norm": (primitive.NORM.named(x, scale, bias), [y, stat, stat], more | {"dtype": y.dtype}),
        "norm_grad": (
            primitive.GRAD.named(x, stat, stat, scale, y, stat, stat),
            [x, *(vector for d in wanted if d is not None)],
            more | {"sums": wanted},
        ),
        "moments": (primitive.MOMENTS.named(x), [stat, stat], {}),
        "sums": (primitive.SUMS.named(x, stat, stat, y), [channels, channels], {"eps": 1e-5}),
    }
    return {
        name: (getattr(plan, name)(on, operands, results, **at, **params), operands, results, at | params)
        for name, (operands, results, params) in calls.items()
    }


def fits_one_pass(shape, dtype, on):
    p = plan.Problem(shape[0], shape[1], shape[2] * shape[3], shape[2], shape[4], dtype, dtype, backward=True)
    return plan.fits("one_pass", p, on)


def operation_of(shape):
    return "batch_norm" if shape[0] == 1 and shape[3] == 1 else "group_norm"


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("dtype", plan.DTYPES)
def test_every_problem_has_a_plan(dtype, on):
    with compat.enable_x64():
        for shape, extras, algorithm in itertools.product(SHAPES, ("", "scale bias"), ("auto", *plan.ALGORITHMS)):
            samples, rows, groups, within, inner = shape
            p = plan.Problem(samples, rows, groups * within, groups, inner, dtype, dtype)
            if algorithm != "auto" and not all(plan.fits(algorithm, p._replace(backward=b), on) for b in (False, True)):
                continue
            for name, (chosen, *_) in found(operation_of(shape), shape, dtype, extras, on, algorithm=algorithm).items():
                if chosen is None:
                    assert algorithm == "auto" and plan.left_to_xla(p)
                    continue
                assert not (algorithm == "auto" and plan.left_to_xla(p))
                assert chosen.algorithm == algorithm or algorithm == "auto" or name in ("moments", "sums")
                check_limits(chosen, on)
                check_coverage(chosen, p._replace(backward=name in ("norm_grad", "sums")))


def members(step):
    """The numbers of GroupParams: the integers after the pointers."""
    ((arg,), names) = (
        step.args,
        "samples rows inner each eps channels per_group steps length parts across tiles per_step",
    )
    assert layout(arg) == (216, 8)
    return dict(zip(names.split(), (a.value for a in arg.members[14:27])))


def check_coverage(chosen, p):
    """Parts and tiles hold all elements, threads few enough of them, and scratch what kernels write."""
    pair = 16 if p.dtype == "float64" else 8
    for step in (*chosen.launches, *chosen.unaligned):
        m = members(step)
        assert (m["channels"], m["per_group"]) == (p.channels, p.channels // p.groups)
        assert m["parts"] * m["length"] >= m["steps"] > (m["parts"] - 1) * m["length"]
        assert chosen.scratch >= p.samples * p.channels * m["parts"] * pair
        one = re.match(r"Group(Norm|Gradient)OnePass<.*>, (.*)>$", step.name)
        if one:
            *kinds, blocks, whole = one[2].split(", ")
            held, shared = int(kinds[-1 if p.backward else -2]), int(kinds[-1])
            across, parts = m["across"], m["parts"]
            assert across * p.pack % m["per_group"] == 0 or m["tiles"] == 1
            most, down = held if p.backward else held + shared, 256 // across
            assert most * down * parts >= p.rows == m["steps"] and held <= 16 >= shared
            assert step.shared == shared * 256 * p.pack * p.itemsizes[p.backward]
            all_whole = most * down * parts == p.rows and 256 % across == 0 == p.channels // p.pack % across
            assert whole == str(all_whole).lower()
            assert m["tiles"] * across * p.pack >= p.channels and across <= 64
            assert step.cluster == parts == int(blocks) <= 8
            assert step.grid3()[0] == p.samples * m["tiles"] * parts
            continue
        found = re.match(
            r"Group(Moments|Apply|Sums|Gradient)<jaxkern::Group<.*, (\d+), (\d+), (\d+), (\d+)>>", step.name
        )
        if found is None:
            continue
        pack, lanes, within, across = map(int, found.groups()[1:])
        assert (within, across) == (m["per_group"], m["across"])
        assert (lanes > 0) == (p.inner > 1) and pack * max(p.itemsizes) <= 16
        assert step.grid3()[0] == p.samples * m["parts"] * m["tiles"]
        if lanes:
            assert p.inner % pack == 0 and m["steps"] * pack == p.rows * p.inner
            assert m["tiles"] * (256 // lanes) >= p.channels > (m["tiles"] - 1) * (256 // lanes)
        else:
            assert p.channels % pack == 0 and m["steps"] == p.rows and m["across"] <= 256
            assert m["tiles"] * m["across"] * pack >= p.channels > (m["tiles"] - 1) * m["across"] * pack
        down = lanes or 256 // m["across"]
        assert m["length"] <= tuning.THREAD_STEPS * down


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((3, 37, 2, 4, 1), "bfloat16", {"out": "float32"}),
        ((1, 1536, 4, 8, 1), "bfloat16", {}),
        ((1, 2500, 24, 1, 1), "float32", {"parameters": "bfloat16"}),
        ((2, 600, 3, 5, 1), "float16", {}),
        ((2, 1, 3, 4, 40), "bfloat16", {"keep": 1}),
        ((1, 5, 6, 1, 1240), "float32", {"extras": ""}),
        ((1, 9, 3, 1, 8192), "bfloat16", {}),
        ((1, 40, 300, 1, 1), "float64", {"parameters": "float64", "extras": "scale"}),
        ((3, 9, 2, 40, 1), "float32", {"out": "bfloat16", "extras": "bias"}),
    ],
)
def test_kernels(shape, dtype, options):
    """The device has two multiprocessors; one of the kernels runs at any address, too."""
    on, rng = device.A100._replace(sm_count=2), np.random.default_rng(0)  # without clusters
    with compat.enable_x64(dtype == "float64"):
        calls = {
            (name, algorithm): call
            for algorithm in (plan.ALGORITHMS if fits_one_pass(shape, dtype, on) else ("two_pass",))
            for name, call in found(operation_of(shape), shape, dtype, on=on, algorithm=algorithm, **options).items()
            # Moments and sums are the first launches of others.
            if name not in ("moments", "sums") or (shape[1] in (37, 1) and algorithm == "two_pass")
        }
        emulated.prepare(*(chosen for chosen, *_ in calls.values()))
        for (name, algorithm), (chosen, operands, results, params) in calls.items():
            given = jax.tree.map(lambda a: jnp.asarray(rng.normal(3, 1, a.shape), a.dtype), operands)
            if name in ("norm_grad", "sums"):
                mean, variance = jax.jit(functools.partial(reference.moments, batch=1, channel=2))(given.x)
                given = given._replace(mean=mean, variance=variance)
            wanted = jax.jit(functools.partial(getattr(reference, name), **params))(*given)
            for unaligned in (False, True)[: 1 + (shape[1] == 37 and algorithm == "two_pass")]:
                arrays = list(map(np.asarray, jax.tree.leaves(given)))
                ours = emulated.run(chosen, arrays, [(a.shape, a.dtype) for a in results], unaligned)
                for a, b in zip(ours, wanted, strict=True):
                    assert a.dtype == b.dtype
                    kind = a.dtype
                    a, b = a.astype(np.float64), np.asarray(b, np.float64)
                    rounding = float(jnp.finfo(kind).eps)
                    atol = 2e-6 * math.sqrt(shape[1] * shape[4]) * (1 + np.abs(b).max())
                    np.testing.assert_allclose(a, b, rounding, atol, err_msg=f"{name} {algorithm}")


def with_epilogue(shape, on, algorithm):
    """The plan of a norm with a function before the store, and what its reference is called with."""
    function, _ = functor.trace(lambda v: jax.nn.silu(v) + 0.5, ["float32"], name="group_norm", results=1)
    _, operands, results, params = found("group_norm", shape, "bfloat16", on=on, algorithm=algorithm)["norm"]
    params |= {"function": function}
    return plan.norm(on, operands, results, **params), operands, results, params


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("algorithm", plan.ALGORITHMS)
def test_kernels_with_a_function(algorithm):
    chosen, operands, results, params = with_epilogue((2, 37, 2, 12, 1), device.A100._replace(sm_count=2), algorithm)
    given = jax.tree.map(lambda a: jnp.asarray(np.random.default_rng(0).normal(0, 2, a.shape), a.dtype), operands)
    ys = emulated.run(chosen, list(map(np.asarray, jax.tree.leaves(given))), [(a.shape, a.dtype) for a in results])
    for y, wanted in zip(ys, reference.norm(*given, **params), strict=True):
        np.testing.assert_allclose(y.astype(np.float64), np.asarray(wanted, np.float64), 2**-7, 1e-4)


@needs_nvrtc
@pytest.mark.parametrize("algorithm", plan.ALGORITHMS)
def test_kernels_with_a_function_compile(algorithm):
    chosen, *_ = with_epilogue((64, 4096, 32, 8, 1), device.H200, algorithm)
    step = chosen.launches[-1]
    assert step.header == "norm/group_epilogue.cuh"
    assert registry.kernels.module.compile(step.header, step.name, 90, step.source)


def test_one_pass_where_a_block_or_a_cluster_holds_the_groups():
    large = plan.Problem(64, 4096, 256, 32, dtype="bfloat16")
    choices = [
        (p, d)
        for p in (large, large._replace(rows=64), large._replace(rows=1 << 16))
        for d in (device.H200, device.A100)
    ]
    assert [plan.choose(p, d) for p, d in choices] == ["one_pass", "two_pass", *["one_pass"] * 2, *["two_pass"] * 2]


@needs_nvrtc
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_kernels_compile(capability):
    """One of each kind for each capability."""
    shape, dtype = {
        80: ((64, 256, 32, 8, 1), "bfloat16"),
        90: ((64, 4096, 32, 8, 1), "bfloat16"),
        100: ((64, 1, 32, 8, 4096), "float32"),
        120: ((1, 65536, 64, 1, 1), "float64"),
    }[capability]
    on = device.H200._replace(compute_capability=capability)
    which = "one_pass" if capability <= 90 else "two_pass"
    with compat.enable_x64():
        for name, (chosen, *_) in found(operation_of(shape), shape, dtype, on=on, algorithm=which).items():
            if name in ("norm", "norm_grad"):
                assert chosen.algorithm == which
                compile_kernels(kernels(chosen, unaligned=capability == 100), capability)
