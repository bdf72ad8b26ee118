"""linear_softmax_cross_entropy: numbers, chunks, reductions, derivatives, batches, memory, plans, bad input."""

import functools
import itertools
import math
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from losses import exact
from plans import needs_runtime
from reference import DTYPES, computing

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat, launch
from jaxkern._ops.linear_cross_entropy import plan

# On a GPU the products of float32 would be of fewer bits.
pytestmark = pytest.mark.usefixtures("highest_precision")
ALGORITHMS = plan.ALGORITHMS
NAMES = {"label_smoothing": "smoothing", "z_loss": "z_loss", "ignore_index": "ignore"}


def problem(rows=37, width=24, vocabulary=149, dtype="float32", weight_dtype=None, seed=0):
    """Activations, a weight, labels, a bias and weights of rows."""
    rng = np.random.default_rng(seed)
    with compat.enable_x64(dtype == "float64"):
        h = jnp.asarray(rng.normal(size=(rows, width)), dtype)
        weight = jnp.asarray(rng.normal(size=(width, vocabulary)) * 0.4, weight_dtype or dtype)
        bias = jnp.asarray(rng.normal(size=vocabulary), weight_dtype or dtype)
        weights = jnp.asarray(rng.random(rows) + 0.1, computing(dtype))
    return h, weight, jnp.asarray(rng.integers(0, vocabulary, rows), jnp.int32), bias, weights


def small_budget(algorithm, rows, width, vocabulary, **facts):
    """A budget in which an algorithm takes several chunks."""
    memory = plan.least(plan.Problem(rows, width, vocabulary, **facts))
    while True:
        asked = plan.Problem(rows, width, vocabulary, memory=memory, **facts)
        found = plan._found(algorithm, asked)
        if found and found.rows >= min(5, rows) and (algorithm == "rows" or found.columns >= min(9, vocabulary)):
            return memory
        memory = memory * 9 // 8


def wanted(h, weight, labels, bias, g, cap=0.0, **options):
    """Loss per row, and the gradients of sum(g * loss) by h, weight and bias: NumPy, float64 or wider."""
    h, weight = (np.asarray(a, np.float64) for a in (h, weight))
    z = h @ weight + (0 if bias is None else np.asarray(bias, np.float64))
    logits = cap * np.tanh(z / cap) if cap else z
    (value, _), (dz, _) = exact(logits, labels, g, **{NAMES[k]: v for k, v in options.items()})
    dz = dz * (1 - np.tanh(z / cap) ** 2) if cap else dz
    return [np.asarray(a, np.float64) for a in (value, dz @ weight.T, h.T @ dz, dz.sum(0))]


def plain(h, weight, labels, bias, g, cap=0.0, **options):
    """The same with all logits at once, in the types of the operands."""

    def losses(h, weight, bias):
        z = h @ weight.astype(h.dtype)
        z = z if bias is None else z + bias.astype(h.dtype)
        if h.dtype.itemsize == 2:  # XLA:CPU drops the rounding of what is converted to float32 next
            z = jax.lax.reduce_precision(z, jnp.finfo(h.dtype).nexp, jnp.finfo(h.dtype).nmant)
        logits = (cap * jnp.tanh(z.astype(computing(h.dtype)) / cap)).astype(h.dtype) if cap else z
        return jaxkern.softmax_cross_entropy(logits, labels, **options)

    value, pull = jax.vjp(losses, h, weight, bias)
    return [value, *pull(g)]


def distance(found, exact):
    """The root mean square of the error, divided by the root mean square of the values."""
    found = np.asarray(found, np.float64)
    assert found.shape == exact.shape
    return np.sqrt(np.mean((found - exact) ** 2)) / (np.sqrt(np.mean(exact**2)) or 1)


def assert_no_worse(found, theirs, exact, dtype):
    for a, b, c in zip(found, theirs, exact, strict=True):
        allowed = 1.1 * distance(b, c) + 4 * float(jnp.finfo(computing(dtype)).eps)
        assert distance(a, c) <= allowed, f"{distance(a, c):.3g}, allowed {allowed:.3g}"


def check(
    algorithm,
    reduction,
    dtype,
    options,
    *,
    transposed=False,
    with_bias=True,
    weight_dtype=None,
    rows=37,
    vocabulary=149,
):
    h, weight, labels, bias, weights = problem(rows, 24, vocabulary, dtype, weight_dtype)
    bias = bias if with_bias else None
    ignore = options.get("ignore_index")
    if ignore is not None:
        labels = labels.at[::3].set(ignore)
    cap = options.get("soft_cap", 0.0)
    facts = {"dtype": dtype, "weight_dtype": weight_dtype or dtype, "cap": bool(cap)}
    memory = None if algorithm == "whole" else small_budget(algorithm, rows, 24, vocabulary, **facts)

    def ours(h, weight, bias, weights):
        given = {
            "weights": weights,
            "reduction": reduction,
            "memory": memory,
            "transpose_weight": transposed,
            **options,
        }
        with algorithms.force(linear_softmax_cross_entropy=algorithm):
            return jaxkern.linear_softmax_cross_entropy(h, weight.T if transposed else weight, labels, bias, **given)

    with compat.enable_x64(dtype == "float64"):
        value, pull = jax.jit(functools.partial(jax.vjp, ours))(h, weight, bias, weights)
        assert value.dtype == computing(dtype) and value.shape == (labels.shape if reduction == "none" else ())
        g = jnp.cos(jnp.arange(rows, dtype=value.dtype)) if reduction == "none" else jnp.asarray(2.0, value.dtype)
        *gradients, by_weights = jax.jit(lambda pull, g: pull(g))(pull, g)
        # The factor of each row's loss in the scalar that is differentiated.
        kept = np.ones(rows) if ignore is None else np.asarray(labels != ignore)
        total = (np.asarray(weights, np.float64) * kept).sum()
        factor = np.asarray(weights, np.float64) * np.asarray(g, np.float64) / (total if reduction == "mean" else 1)
        factor = jnp.asarray(factor * kept, computing(dtype))
        rest = {k: v for k, v in options.items() if k != "soft_cap"}
        by_float64 = wanted(h, weight, labels, bias, factor, cap, **rest)
        by_plain = jax.jit(functools.partial(plain, cap=cap, **rest))(h, weight, labels, bias, factor)
    gradients = [a for a in gradients if a is not None]
    for a, b in zip(gradients, (h, weight, bias)):
        assert a.dtype == b.dtype
    losses = np.asarray(weights, np.float64) * by_float64[0]
    reduced = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / total}[reduction]
    size = float(jnp.finfo(dtype).eps) * 8
    np.testing.assert_allclose(np.asarray(value, np.float64), reduced, rtol=size, atol=size)
    slope = by_float64[0] - (reduced if reduction == "mean" else 0)
    slope = slope * np.asarray(g, np.float64) * kept / (total if reduction == "mean" else 1)
    np.testing.assert_allclose(
        np.asarray(by_weights, np.float64), slope, rtol=size, atol=size * np.abs(by_float64[0]).max()
    )
    assert_no_worse(gradients, by_plain[1:][: len(gradients)], by_float64[1:][: len(gradients)], dtype)


OPTIONS = [
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "ignore_index": -1},
    {"soft_cap": 2.0, "ignore_index": 4},  # a class
    {"label_smoothing": 1.0, "soft_cap": 3.0, "z_loss": -1e-3, "ignore_index": 1000},
]

CASES = [
    (algorithm, reduction, dtype, options, {"transposed": k % 2 == 1, "with_bias": k % 3 != 2})
    for k, (algorithm, reduction, dtype, options) in enumerate(
        itertools.product(ALGORITHMS, ("mean", "none", "sum"), DTYPES, range(len(OPTIONS)))
    )
]


@pytest.mark.sweep(13)
@pytest.mark.parametrize("algorithm, reduction, dtype, options, given", CASES)
def test_loss_and_gradients(algorithm, reduction, dtype, options, given):
    check(algorithm, reduction, dtype, OPTIONS[options], **given)


@pytest.mark.parametrize("algorithm", ["rows", "vocabulary"])
@pytest.mark.parametrize(
    "vocabulary", [152, 3]
)  # of a width that kernels take as it is; and fewer columns than a vector
def test_gradient_of_a_float32_weight(algorithm, vocabulary):
    check(algorithm, "mean", "bfloat16", {}, weight_dtype="float32", vocabulary=vocabulary)


def test_a_float32_weight_has_a_gradient_that_is_not_rounded():
    h, weight, labels, *_ = problem(64, 24, 152, "bfloat16", "float32")
    dw = jax.jit(jax.grad(lambda w: jaxkern.linear_softmax_cross_entropy(h, w, labels)))(weight)
    assert (dw != dw.astype(jnp.bfloat16).astype(jnp.float32)).mean() > 0.9


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_logits_may_be_float32(algorithm):
    """float32 logits lose no accuracy; logits in the type of the activations would."""
    h, weight, labels, *_ = problem(64, 24, 152, "bfloat16")
    memory = None if algorithm == "whole" else small_budget(algorithm, 64, 24, 152, logits_dtype="float32")
    with algorithms.force(linear_softmax_cross_entropy=algorithm):
        f = jax.jit(
            lambda h, dtype: jaxkern.linear_softmax_cross_entropy(
                h, weight, labels, reduction="none", logits_dtype=dtype, memory=memory
            ),
            static_argnums=1,
        )
        narrow, wide = f(h, None), f(h, jnp.float32)
    value = wanted(h, weight, labels, None, np.ones(64))[0]
    assert distance(wide, value) < 1e-6 < 1e-4 < distance(narrow, value)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("reduction, dtype", [("mean", "bfloat16"), ("none", "float32"), ("none", "bfloat16")])
def test_rows_without_a_label(algorithm, reduction, dtype):
    """Ignored rows are 0 with gradient 0, even if there are no others; a label that is no class makes NaN."""
    h, weight, labels, *_ = problem(21, 8, 45, dtype)
    memory = None if algorithm == "whole" else small_budget(algorithm, 21, 8, 45, dtype=dtype)

    def f(h, weight, labels):
        loss = jaxkern.linear_softmax_cross_entropy(
            h, weight, labels, ignore_index=-1, reduction=reduction, memory=memory
        )
        return loss.sum(), loss

    with algorithms.force(linear_softmax_cross_entropy=algorithm):
        f = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))
        found = f(h, weight, jnp.full_like(labels, -1))
        bad = f(h, weight, labels.at[3].set(46).at[4].set(45).at[5].set(-2).at[6].set(-1))
    assert all((a == 0).all() for a in jax.tree.leaves(found))
    (_, value), (dh, _) = bad
    rows = np.isnan(np.asarray(dh, np.float32)).all(1)
    assert rows[3:6].all() and not rows[6:].any() and not rows[:3].any()
    assert not np.asarray(dh)[6].any()
    if reduction == "none":
        np.testing.assert_array_equal(np.isnan(value), rows)
        assert value[6] == 0
    else:
        assert np.isnan(value)


def test_small_weights_do_not_vanish_in_float16():
    """A loss that is scaled after its mean has gradients as if it were scaled before."""
    h, weight, labels, *_ = problem(256, 16, 64, "float16")

    def f(h, scale):
        return scale * jaxkern.linear_softmax_cross_entropy(
            h, weight, labels, weights=jnp.full(256, 1e-9), reduction="sum"
        )

    found = jax.jit(jax.grad(f))(h, 1e9)
    _, dh, *_ = wanted(h, weight, labels, None, np.ones(256))
    assert distance(found, dh) < 2e-3


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("rows", "width"), [(0, 4), (3, 0), (0, 0)])
def test_without_rows_or_width(rows, width, reduction):
    """The gradient by a weight that no row reads is 0, and the logits of no width are the bias."""
    h, weight, labels, bias, _ = problem(rows, width, 5)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    ours = lambda h, weight, bias: jaxkern.linear_softmax_cross_entropy(h, weight, labels, bias, **options).sum()
    losses = lambda h, weight, bias: jaxkern.softmax_cross_entropy(h @ weight + bias, labels, label_smoothing=0.1)
    theirs = lambda *args: losses(*args).sum() / (max(rows, 1) if reduction == "mean" else 1)
    both = lambda f: jax.jit(lambda *args: (jax.value_and_grad(f, (0, 1, 2))(*args), jax.jvp(f, args, args)[1]))
    (found, tangent), (expected, wanted_tangent) = (both(f)(h, weight, bias) for f in (ours, theirs))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), found, expected)
    np.testing.assert_allclose(tangent, wanted_tangent, rtol=1e-5)
    batch = jax.jit(jax.vmap(jax.grad(ours, (1, 2))))(*(np.asarray(a)[None] for a in (h, weight, bias)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-6, atol=1e-7), batch, expected[1][1:])
    jax.jit(jax.grad(ours, (0, 1, 2))).trace(h, weight, bias).lower(lowering_platforms=("cuda",))


# ---- transformations; test_matrix.py has more


def test_operands_that_are_not_differentiated():
    """Nothing is computed for them: a frozen weight has neither a gradient nor an accumulator."""
    h, weight, labels, bias, _ = problem(64, 32, 256)
    f = lambda h, weight, bias: jaxkern.linear_softmax_cross_entropy(h, weight, labels, bias)
    all_of = jax.grad(f, (0, 1, 2))(h, weight, bias)
    for k, products in ((0, 2), (1, 2), (2, 1)):
        program = jax.jit(jax.grad(f, k)).lower(h, weight, bias).compile()
        np.testing.assert_allclose(program(h, weight, bias), all_of[k], rtol=1e-5, atol=1e-7)
        if not ON_GPU:
            assert len(re.findall(r" dot\(", program.as_text())) == products


def test_batches():
    """Rows of a batch are rows; a batch of weights is a loop. Per-example gradients too."""
    h, weight, labels, _, _ = problem(24, 8, 40)
    h, labels = h.reshape(4, 6, 8), labels.reshape(4, 6)
    loss = lambda h, weight, labels: jaxkern.linear_softmax_cross_entropy(h, weight, labels, z_loss=0.1)
    apart = [loss(h[k], weight, labels[k]) for k in range(4)]
    together = jax.vmap(loss, (0, None, 0))
    np.testing.assert_allclose(together(h, weight, labels), apart, rtol=1e-6)
    assert "while" not in str(jax.make_jaxpr(together)(h, weight, labels))
    both = jax.grad(loss, (0, 1))
    found = jax.jit(jax.vmap(both, (0, None, 0)))(h, weight, labels)
    for k in range(4):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            [a[k] for a in found],
            list(both(h[k], weight, labels[k])),
        )
    several = jnp.stack([weight, -weight])
    found = jax.jit(jax.vmap(loss, (None, 0, None)))(h[0], several, labels[0])
    np.testing.assert_allclose(found, [loss(h[0], w, labels[0]) for w in several], rtol=1e-6)
    found = jax.jit(jax.grad(lambda w: jax.vmap(loss, (0, None, 0))(h, w, labels).sum()))(weight)
    np.testing.assert_allclose(found, 4 * jax.grad(loss, 1)(h, weight, labels), rtol=1e-4, atol=1e-6)


def test_microbatches_in_a_scan():
    h, weight, labels, *_ = problem(24, 8, 40)
    loss = lambda w, h, y: jaxkern.linear_softmax_cross_entropy(h, w, y)

    def step(total, batch):
        return total + jax.checkpoint(jax.grad(loss))(weight, *batch) / 4, None

    batches = h.reshape(4, 6, 8), labels.reshape(4, 6)
    found, _ = jax.jit(lambda: jax.lax.scan(step, jnp.zeros_like(weight), batches))()
    np.testing.assert_allclose(found, jax.grad(loss)(weight, h, labels), rtol=1e-4, atol=1e-6)


def test_a_differentiated_mean_has_three_products():
    """A loss per row, whose logits are computed again, has four."""
    h, weight, labels, *_ = problem(64, 32, 256)
    for reduction, products in (("mean", 3), ("none", 4)):
        f = lambda h, weight: jaxkern.linear_softmax_cross_entropy(h, weight, labels, reduction=reduction).mean()
        text = jax.jit(jax.value_and_grad(f, (0, 1))).lower(h, weight).as_text()
        assert len(re.findall(r"stablehlo.dot_general", text)) == products


def test_precision_of_the_caller():
    """What a context manager asks for when the function is called, or the argument."""
    h, weight, labels, *_ = problem(8, 8, 8)
    f = lambda h, **given: jaxkern.linear_softmax_cross_entropy(h, weight, labels, **given)
    with jax.default_matmul_precision("float32"):
        first = jax.make_jaxpr(jax.grad(f))(h)
    texts = [jax.jit(jax.extend.core.jaxpr_as_fun(first)).lower(h).as_text()]
    texts.append(jax.jit(jax.grad(functools.partial(f, precision="highest"))).lower(h).as_text())
    for text in texts:
        assert text.count("precision = [HIGHEST, HIGHEST]") == text.count("dot_general") > 0


# ---- memory


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("algorithm, memory", [("rows", 4_000_000), ("vocabulary", 5_000_000)])
def test_memory(algorithm, memory, reduction):
    """The formula holds, with a second copy of each chunk where XLA computes it; nothing has the size of all logits."""
    rows, width, vocabulary = 1024, 64, 8192
    asked = plan.Problem(rows, width, vocabulary, "float32", memory=memory)
    found = plan.chunks(asked, algorithm)
    assert found.bytes <= memory and found.rows < rows

    def f(h, weight, labels):
        loss = jaxkern.linear_softmax_cross_entropy(h, weight, labels, reduction=reduction, memory=memory)
        return loss.mean()

    types = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((rows, width), "float32"), ((width, vocabulary), "float32"), ((rows,), "int32"))
    ]
    with algorithms.force(linear_softmax_cross_entropy=algorithm):
        compiled = jax.jit(jax.value_and_grad(f, (0, 1))).lower(*types).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    shapes = re.findall(r"\w\d+\[([\d,]+)\]", compiled.as_text())
    if ON_GPU:
        # What XLA gives to its products to work in, and the parts of those that it splits along their sum.
        products = re.findall(r"= \((\w+)\[([\d,]+)\][^()]*, s8\[(\d+)\][^()]*\) custom-call", compiled.as_text())
        room = [int(work) + 4 * math.prod(map(int, parts.split(","))) for _, parts, work in products]
        assert temporary <= 1.02 * memory + max(room, default=0)
        shapes = [s for s in shapes if s not in {work for *_, work in products}]
    else:
        assert temporary <= 2.6 * memory < 4 * rows * vocabulary
    assert max(math.prod(map(int, s.split(","))) for s in shapes) < rows * vocabulary // 4


# ---- plans

LLAMA = functools.partial(plan.Problem, 8192, 4096, 128256)


@pytest.mark.parametrize(
    "asked, algorithm",
    [
        (LLAMA(memory=2_800_000_000), "whole"),
        (LLAMA(memory=700_000_000), "vocabulary"),
        (LLAMA(which="loss", memory=700_000_000), "rows"),
        (LLAMA(which="h", memory=700_000_000), "rows"),
        (LLAMA(weight_dtype="float32", memory=1_700_000_000), "rows"),
        (plan.Problem(65536, 4096, 128256), "rows"),
        (plan.Problem(32768, 768, 50257, weight_dtype="float32"), "rows"),
        (plan.Problem(128, 64, 1000), "whole"),
    ],
)
def test_choice(asked, algorithm):
    assert plan.choose(asked) == algorithm
    assert (
        algorithms.choose("linear_softmax_cross_entropy", **{k: v for k, v in asked._asdict().items() if v})
        == algorithm
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (37, 24, 149), (4096, 512, 32000), (8192, 4096, 128256), (3, 5, 100_003)])
@pytest.mark.parametrize(
    "dtype, weight_dtype", [("bfloat16", ""), ("float32", ""), ("bfloat16", "float32"), ("float64", "")]
)
@pytest.mark.parametrize("which", ["loss", "h", "weight", "both"])
def test_chunks_stay_within_the_budget(sizes, dtype, weight_dtype, which):
    asked = plan.Problem(*sizes, dtype, weight_dtype, "", which, 0, False)
    least = plan.least(asked)
    for memory in sorted({least, least * 5 // 4, least * 3, least * 50, plan.budget(asked)}):
        for cap in (False, True):
            given = asked._replace(memory=memory, cap=cap)
            if memory < plan.least(given):
                continue
            chosen = plan.choose(given)
            for algorithm in plan.ALGORITHMS:
                if not plan.fits(algorithm, given):
                    assert algorithm != chosen
                    continue
                found = plan.chunks(given, algorithm)
                v = plan.padded(sizes[2], dtype if dtype != "bfloat16" else "float16")
                assert 1 <= found.rows <= sizes[0] and found.bytes <= memory
                if algorithm == "vocabulary":
                    assert 0 <= found.kept <= v and (found.columns > 0) == (found.kept < v)
    with pytest.raises(ValueError, match="too little"):
        plan.choose(asked._replace(memory=max(1, least // 40)))


def test_large_chunks_are_multiples_of_tiles():
    for memory in (1, 2, 3):
        found = plan.chunks(LLAMA(memory=memory * 700_000_000), "vocabulary")
        assert found.rows == 1024 and found.columns % 128 == found.kept % 128 == 0
    assert plan.chunks(plan.Problem(32768, 768, 50257, weight_dtype="float32")).rows == 4096


def test_algorithms_are_forced_on_every_platform():
    """The chunks show in the program: one, a loop over rows, or one over rows and one over columns."""
    rows, width, vocabulary = 600, 40, 2000
    f = lambda h, w, y: jaxkern.linear_softmax_cross_entropy(h, w, y, memory=1_000_000)
    types = [jax.ShapeDtypeStruct(s, d) for s, d in (((rows, width), "float32"), ((width, vocabulary), "float32"))]
    asked = plan.Problem(rows, width, vocabulary, "float32", memory=1_000_000)
    for algorithm, loops in (("rows", 1), ("vocabulary", 2), ("auto", 2 if plan.choose(asked) == "vocabulary" else 1)):
        with algorithms.force(linear_softmax_cross_entropy=algorithm):
            text = jax.jit(jax.grad(f, (0, 1))).lower(*types, jax.ShapeDtypeStruct((rows,), "int32")).as_text()
        assert text.count("stablehlo.while") == loops
    with (
        algorithms.force(linear_softmax_cross_entropy="whole"),
        pytest.raises(ValueError, match="'whole' cannot run .*; rows, voc"),
    ):
        jax.jit(jax.grad(f, (0, 1))).lower(*types, jax.ShapeDtypeStruct((rows,), "int32"))


@needs_runtime
@pytest.mark.parametrize("vocabulary", [128256, 50257])
@pytest.mark.parametrize("memory", [2_800_000_000, 700_000_000, 1_600_000_000])
def test_kernels_of_chunks_read_logits_once_and_overwrite_them(memory, vocabulary):
    """The programs are for a GPU; a vocabulary may be padded."""
    f = lambda h, w, y: jaxkern.linear_softmax_cross_entropy(h, w, y, memory=memory)
    shapes = ((8192, 4096), "bfloat16"), ((4096, vocabulary), "bfloat16"), ((8192,), "int32")
    traced = jax.jit(jax.value_and_grad(f, (0, 1))).trace(*(jax.ShapeDtypeStruct(*s) for s in shapes))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"stablehlo.custom_call @(jaxkern\w+)\(.*", text)
    assert calls and set(calls) == {"jaxkern_cross_entropy_both"}
    assert len(re.findall("output_operand_alias<", text)) == len(calls)
    assert all("kernel BothPipeline<__nv_bfloat16, 2>" in program for program in launch.programs(text))


# ---- bad input


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"h": np.zeros((4, 3))}, ValueError, r"h of shape \(4, 3\) and weight of shape \(2, 5\)"),
        ({"h": np.zeros(()), "labels": 0}, ValueError, "h of shape"),
        ({"transpose_weight": True}, ValueError, r"\[vocabulary, d\]"),
        ({"transpose_weight": 1}, TypeError, "transpose_weight"),
        ({"weight": np.zeros((2, 5, 1))}, ValueError, "weight of shape"),
        ({"weight": np.zeros((2, 0))}, ValueError, "no classes"),
        ({"weight": None}, TypeError, "weight must be an array"),
        ({"weight": np.zeros((2, 5), complex)}, TypeError, "weight must be real"),
        ({"labels": np.zeros(3, int)}, ValueError, r"labels of shape \(3,\)"),
        ({"labels": np.zeros(4)}, TypeError, "integer"),
        ({"bias": np.zeros(4)}, ValueError, r"bias of shape \(4,\) for 5 classes"),
        ({"bias": "b"}, TypeError, "bias must be an array"),
        ({"weights": np.zeros(3)}, ValueError, "weights of shape"),
        ({"weights": np.zeros(4, bool)}, TypeError, "weights must be real"),
        ({"reduction": "max"}, ValueError, "reduction"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing"),
        ({"z_loss": "1"}, TypeError, "z_loss"),
        ({"soft_cap": 0}, ValueError, "soft_cap must be positive"),
        ({"soft_cap": True}, TypeError, "soft_cap"),
        ({"logits_dtype": "bfloat16"}, ValueError, "logits_dtype must be float32"),
        ({"memory": 1}, ValueError, "too little"),
        ({"memory": 0}, ValueError, "memory must be positive"),
        ({"memory": 1e9}, TypeError, "memory must be an int"),
    ],
)
def test_errors(given, error, message):
    arguments = {"h": np.zeros((4, 2)), "weight": np.zeros((2, 5)), "labels": np.zeros(4, int)} | given
    arguments = {
        k: np.asarray(v, np.float32) if getattr(v, "dtype", None) == np.float64 else v for k, v in arguments.items()
    }
    if "labels" in given and isinstance(given["labels"], np.ndarray) and given["labels"].dtype == np.float64:
        arguments["labels"] = given["labels"]
    with pytest.raises(error, match=f"jaxkern.linear_softmax_cross_entropy: .*{message}"):
        jaxkern.linear_softmax_cross_entropy(**arguments)
    traced = {k: v for k, v in arguments.items() if isinstance(v, np.ndarray)}
    rest = {k: v for k, v in arguments.items() if k not in traced}
    with pytest.raises(error, match=f"jaxkern.linear_softmax_cross_entropy: .*{message}"):
        jax.jit(lambda traced: jaxkern.linear_softmax_cross_entropy(**traced, **rest))(traced)


def test_no_rows_and_symbolic_rows():
    weight = jnp.ones((3, 5))
    found = jax.value_and_grad(lambda h: jaxkern.linear_softmax_cross_entropy(h, weight, jnp.zeros(0, int)))(
        jnp.ones((0, 3))
    )
    assert found[0] == 0 and found[1].shape == (0, 3)
    from jax import export

    (n,) = export.symbolic_shape("n")
    f = jax.jit(jax.value_and_grad(lambda h, y: jaxkern.linear_softmax_cross_entropy(h, weight, y)))
    types = jax.ShapeDtypeStruct((n, 3), "float32"), jax.ShapeDtypeStruct((n,), "int32")
    program = export.export(f, disabled_checks=jaxkern.export_checks())(*types)
    h = jnp.arange(12.0).reshape(4, 3)
    for a, b in zip(program.call(h, jnp.arange(4)), f(h, jnp.arange(4))):
        np.testing.assert_allclose(a, b, rtol=1e-6)
