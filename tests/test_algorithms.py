"""jaxkern.algorithms: every operation has algorithms, which can be queried and forced, and a misfit is an error."""

import functools

import jax
import jax.numpy as jnp
import pytest
from plans import needs_runtime

import jaxkern
from jaxkern import algorithms
from jaxkern._core import launch
from jaxkern._engines.loops.associative import associative_scan
from jaxkern._engines.rows import layout as rows

X, IDS = jax.ShapeDtypeStruct((600, 40), "float32"), jax.ShapeDtypeStruct((600,), "int32")
# Operations that do not take an array alone; two elementwise ones, whose operands are and are not of one shape.
CALLS = {
    "softmax_cross_entropy": [(jaxkern.softmax_cross_entropy, X, IDS)],
    "index_add": [(lambda x, ids: jaxkern.index_add(x, 0, ids, x), X, IDS)],
    "index_select": [(lambda x, ids: jaxkern.index_select(x, 0, ids), X, IDS)],
    "sort_indices": [(lambda ids: jaxkern.sort_indices(ids, 90), IDS)],
    "bincount": [(lambda ids: jaxkern.bincount(ids, 90), IDS)],
    "top_k": [(lambda x: jaxkern.top_k(x, 5), X)],
    "elementwise": [(jaxkern.gelu, X), (jaxkern.swiglu, X), (lambda x: jaxkern.multiply(x, x[:1]), X)],
}
CALLS["associative_scan"] = [
    (lambda x, axis=axis: associative_scan(lambda a, b: [a[0] + b[0]], [x], axis=axis)[0], X) for axis in (0, 1)
]
CALLS["row_kernel"] = [(jaxkern.row_kernel(lambda x: x / jnp.sum(x, -1, keepdims=True)), X)]
CALLS["scan"] = [(lambda x: jaxkern.linear_recurrence(0.5, x), X)]
CALLS["scan"] += [(lambda x: jaxkern.linear_recurrence(0.5, x), jax.ShapeDtypeStruct((600,), "float32"))]
CALLS["scan"] += [
    (
        lambda x: jaxkern.scan(lambda h, x: (h / jnp.sum(h, -1, keepdims=True) + x, None), x, jnp.zeros((9, 600, 40)))[
            0
        ],
        X,
    )
]
IMAGES = jnp.zeros((4, 32, 32, 128))
CALLS |= {"group_norm": [(lambda x: jaxkern.group_norm(x, 8), IMAGES)], "batch_norm": [(jaxkern.batch_norm, IMAGES)]}
CALLS |= {
    name: [(lambda x, ids, name=name: getattr(jaxkern, name)(x, ids, 90), X, IDS)]
    for name in algorithms.operations()
    if name.startswith("segment_")
}
CALLS |= {
    name: [(functools.partial(getattr(jaxkern, name), axis=-1), X)]
    for name in algorithms.operations()
    if name == "logsumexp" or name.startswith("reduce_")
}


def launched(f, *arguments, operation):
    """The algorithms in the launch lists of the operation's custom calls."""
    text = jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    heads = [program.splitlines()[1] for program in launch.programs(text)]
    names = {"elementwise": "", "softmax_cross_entropy": "cross_entropy", "bincount": "count"}
    name = "operation jaxkern_" + names.get(operation, operation)
    return [head.rsplit(", ", 1)[1] for head in heads if head.startswith(name)]


# Its algorithms are programs of other operations' calls: see test_linear_cross_entropy.py.
COMPOSED = ("linear_softmax_cross_entropy",)


@needs_runtime
@pytest.mark.parametrize("operation", [name for name in algorithms.operations() if name not in COMPOSED])
def test_every_algorithm_is_forced_or_refused(operation):
    forced, refused = set(), set()
    for f, *arguments in CALLS.get(operation, [(getattr(jaxkern, operation, None), X)]):
        for algorithm in algorithms.names(operation):
            try:
                with algorithms.force(**{operation: algorithm}):
                    found = launched(f, *arguments, operation=operation)
                # The launch list of segment_softmax names its kernel: the order comes from a sort or from a promise. That of a
                # generated kernel names the algorithm of the engine.
                if algorithm == "generated":
                    found = ["generated" for name in found if name in rows.ALGORITHMS]
                if algorithm == "by_hand":  # the launch list names the kernel
                    found = ["by_hand" for _ in found]
                assert found == ["tiles" if operation == "segment_softmax" else algorithm]
                forced.add(algorithm)
            except ValueError as error:
                words = str(error)
                assert f"jaxkern.{operation}: the algorithm '{algorithm}' cannot run" in words
                fitting = words.rsplit("; ", 1)[1].removesuffix(" can").split(", ")
                assert fitting and algorithm not in fitting and set(fitting) <= set(algorithms.names(operation))
                refused.add(algorithm)
        default = launched(f, *arguments, operation=operation)
        known = {*forced, *(rows.ALGORITHMS if "generated" in forced else ())}
        assert default and (operation == "segment_softmax" or default[0] in known)
    assert forced and forced | refused == set(algorithms.names(operation))


@needs_runtime
def test_force_inside_jit_outlives_the_block():
    @jax.jit
    def f(x):
        with algorithms.force(elementwise="strided"):
            return jaxkern.silu(x)

    assert launched(f, X, operation="elementwise") == ["strided"]
    gradient = jax.grad(lambda x: f(x).sum())
    assert set(launched(gradient, X, operation="elementwise")) == {"strided"}


@pytest.mark.parametrize("operation", algorithms.operations())
def test_the_choice_fits(operation):
    sizes = dict.fromkeys(("sort_indices", "sort", "bincount"), (90, 600)) | {"elementwise": [((3, 5), (1, 5))]}
    sizes = sizes.get(operation, (90, 600, 8))
    for device in (algorithms.H200, algorithms.A100):
        algorithm = algorithms.choose(operation, *sizes, device=device)
        assert algorithm in algorithms.names(operation)
        assert algorithms.fits(operation, algorithm, *sizes, device=device)
    assert algorithms.choose("row_kernel", 90, 600, kept=0) == algorithms.choose("row_kernel", 90, 600)


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda: algorithms.choose("softmix", 1, 1), ValueError, "choose: no operation 'softmix', there are"),
        (lambda: algorithms.names("softmix"), ValueError, "names: no operation 'softmix', there are"),
        (lambda: algorithms.choose("softmax", 1), TypeError, "choose: softmax needs width"),
        (lambda: algorithms.choose("softmax", 1, 1, rows=1), TypeError, "choose: softmax takes rows, width"),
        (lambda: algorithms.choose("softmax", 1, 1, log=True), TypeError, "choose: softmax takes rows, width"),
        (
            lambda: algorithms.choose("top_k", 8, 8, 9),
            ValueError,
            "choose: no algorithm of top_k can run Problem",
        ),
        (lambda: algorithms.choose("row_kernel", 8, 8, kept=-1), ValueError, "choose: kept must be positive"),
        (lambda: algorithms.fits("sort_indices", "radix", 1, 1, 1, 1), TypeError, "fits: sort_indices takes rows"),
    ],
)
def test_bad_questions(call, kind, words):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value).startswith(f"jaxkern.algorithms.{words}")


def test_force_changes_no_result():
    """Forcing changes the launches only; on the CPU nothing."""
    x = jnp.linspace(-2, 2, 12).reshape(3, 4)
    plain = jax.value_and_grad(lambda x: jaxkern.silu(x).sum())(x)
    with algorithms.force(elementwise="strided"):
        forced = jax.value_and_grad(lambda x: jaxkern.silu(x).sum())(x)
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.array_equal(a, b), plain, forced))


def test_the_former_name():
    former = jaxkern.tiers
    assert former.algorithms is algorithms.names
    assert all(getattr(former, name) is getattr(algorithms, name) for name in set(algorithms.__all__) - {"names"})
