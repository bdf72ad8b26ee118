"""The counterparts of jaxkern's functions. docs/from_jax.md is generated from them; docs/test_counterparts.py checks them.

The tables on the page come from the signatures of both sides. What they cannot say is here: why an argument is missing,
and where results differ. The test calls both sides with the same arguments, and runs the check of every difference.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxkern

NO_OUT = "JAX accepts None alone"
NEWER = {"is_stable", "out_sharding"}  # arguments that some supported versions of JAX lack


@dataclasses.dataclass(frozen=True)
class Counterpart:
    ours: str
    theirs: str  # as the page names it
    function: Callable  # whose signature is compared
    calls: Callable[
        [], list[tuple[tuple, dict]]
    ]  # arguments that give the same results, by their names
    same: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # their argument: our name of it
    without: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # their argument, which we lack: what to do
    defaults: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # our argument with another default: why
    order: bool = True  # whether positional arguments come in the same order
    run: Callable | None = None  # calls it, if `function` is only its signature

    def parameters(self) -> tuple[dict, dict]:
        """(parameters of our function, parameters of theirs), theirs under our names."""
        ours = dict(inspect.signature(getattr(jaxkern, self.ours)).parameters)
        theirs = inspect.signature(self.function).parameters
        return ours, {self.same.get(name, name): p for name, p in theirs.items()}


def _array(*shape, dtype="float32"):
    return jax.random.normal(jax.random.key(0), shape, dtype)


def _softmax_calls():
    x, mask = _array(3, 4, 5), jnp.arange(5) < 3
    return [
        *(((x.astype(dtype),), {}) for dtype in ("float32", "bfloat16", "float16", "int32")),
        ((x, 0), {}),
        ((x, (0, 2), mask), {}),
        ((x,), {"axis": None, "where": mask}),
    ]


def _reduction_calls(*more):
    x = _array(3, 4, 5)
    return lambda: [
        *(((x.astype(dtype),), {}) for dtype in ("float32", "int8", "uint8")),
        ((x, 1), {}),
        ((x, (0, 2)), {"keepdims": True}),
        ((x, None), {}),
        *(((x,), given) for given in more),
    ]


def _segment_calls():
    data, ids = _array(6, 2), jnp.array([2, 0, 2, -1, 4, 1])
    return [
        ((data, ids, 4), {}),
        ((data, jnp.sort(ids), 5, True), {}),
        ((data[:3], jnp.array([3, 1, 0]), 4, False, True), {}),
        ((data.astype("int32"), ids), {"num_segments": 3}),
        ((data, jnp.abs(ids)), {}),
    ]


def _loss_calls():
    logits, labels = _array(3, 7), jnp.array([0, 6, 2])
    return [
        ((logits, labels), {}),
        ((logits.T, labels), {"axis": 0}),
        ((logits, labels), {"where": jnp.broadcast_to(jnp.arange(7) != 3, (3, 7))}),
    ]


def _at_add(x, index, source, *, indices_are_sorted=False, unique_indices=False, mode=None):
    how = {
        "indices_are_sorted": indices_are_sorted,
        "unique_indices": unique_indices,
        "mode": mode,
    }
    return x.at[index].add(source, **how)


def _add_calls():
    x, index = _array(4, 3), jnp.array([3, -1, 0, 9])
    return [
        ((x, index, _array(4, 3)), {}),
        ((x, index, 2.0), {}),
        ((x, index, _array(3)), {"mode": "drop"}),
        (
            (x, jnp.array([0, 2]), _array(2, 1)),
            {"indices_are_sorted": True, "unique_indices": True},
        ),
        ((x.astype("int32"), index, 1), {}),
    ]


def _take_calls():
    x, index = _array(4, 3), jnp.array([3, -1, 0, 9])
    return [
        ((x,), {"indices": index, "axis": 0}),
        ((x,), {"indices": index, "axis": 1, "fill_value": 7.0}),
        ((x,), {"indices": jnp.array([9, 1]), "axis": -1, "mode": "clip"}),
        ((x.astype("int32"),), {"indices": index, "axis": 0, "mode": "fill"}),
    ]


def _lookup(a, indices, fill_value=None):
    return jnp.take(a, indices, axis=0, fill_value=fill_value)


def _layer(layer):
    """Calls a layer of flax on arrays, with its fields as keyword arguments."""

    def run(x, scale=None, bias=None, **fields):
        given = {"scale": scale, "bias": bias}
        fields |= {
            f"use_{k}": v is not None
            for k, v in given.items()
            if f"use_{k}" in layer.__dataclass_fields__
        }
        params = {k: v for k, v in given.items() if v is not None}
        return layer(**fields).apply({"params": params}, x)

    return run


def _norm_calls(bias=True):
    x, scale = _array(3, 8), jnp.linspace(1, 2, 8)
    more = {"bias": jnp.linspace(-1, 1, 8)} if bias else {}
    return lambda: [
        ((x,), {"scale": scale, **more}),
        ((x,), {"scale": scale, **more, "epsilon": 0.1}),
        ((x.astype("bfloat16"),), {"dtype": jnp.bfloat16}),
    ]


def _cumulative_calls(*more):
    x = _array(3, 4)
    return lambda: [
        *(((x.astype(dtype), 0), {}) for dtype in ("float32", "int8", "uint16")),
        ((x,), {"axis": 1}),
        *(((x, *given[:-1]), given[-1]) for given in more),
    ]


def _affine(f, g):
    return f[0] * g[0], f[1] * g[0] + g[1]


def _step(carry, x):
    return 0.5 * carry + x, jnp.tanh(carry)


_LAYER = {
    "param_dtype": "`scale` and `bias` have a dtype of their own",
    "use_scale": "`scale=None`",
    "use_bias": "`bias=None`",
    "scale_init": "the caller makes `scale`",
    "bias_init": "the caller makes `bias`",
    "feature_axes": "`scale` and `bias` have the dimensions of `axis`",
    "axis_name": "under `jit`, statistics are of the whole array",
    "axis_index_groups": "as `axis_name`",
    "use_fast_variance": "the variance is always computed from deviations",
    "force_float32_reductions": "always",
    "parent": "a field of flax's modules",
    "name": "a field of flax's modules",
}


def _fields(layer, *without) -> dict:
    return {k: v for k, v in _LAYER.items() if k in inspect.signature(layer).parameters} | dict(
        without
    )


ONE_KIND = "JAX accepts None alone; the sort is stable"
SORTED = jnp.array([[3.0, -1.0, jnp.nan, 3.0, 0.0], [2.0, 2.0, -jnp.inf, 7.0, 1.0]])
UNIQUE = ("return_index", "return_inverse", "return_counts")
SAMPLES = jnp.array([0.5, 2.0, 2.5, 9.0, -1.0])


def _sorting_calls():
    return [((x,), {}) for x in (SORTED, SORTED.astype("bfloat16"), jnp.array([3, 1, 2]))] + [
        ((SORTED, 0), {}),
        ((SORTED,), {"axis": None, "descending": True}),
    ]


def _quantile_calls(*fractions):
    x = _array(3, 4, 5)
    given = ({}, {"axis": 1}, {"axis": (0, 2), "keepdims": True})
    return lambda: [((x, *fractions), dict(g)) for g in given]


SELECTION = (
    Counterpart(
        "top_k",
        "jax.lax.top_k",
        jax.lax.top_k,
        lambda: [((SORTED, 2), {}), ((SORTED.astype("bfloat16"), 5), {"axis": -1})],
        same={"operand": "x"},
        without={"is_stable": "the order of equal elements is kept"},
    ),
    *(
        Counterpart(
            name,
            f"jnp.{name}",
            getattr(jnp, name),
            _sorting_calls,
            same={"a": "x"},
            without={
                "kind": ONE_KIND,
                "order": ONE_KIND,
                "stable": "the sort is stable",
                **more,
            },
        )
        for name, more in (("sort", {}), ("argsort", {"dtype": "`astype` of the result"}))
    ),
    *(
        Counterpart(
            name,
            f"jnp.{name}",
            getattr(jnp, name),
            _quantile_calls(*fractions),
            same={"a": "x"},
            without={"out": NO_OUT, "overwrite_input": "JAX accepts False alone", **more},
        )
        for name, fractions, more in (
            ("median", (), {}),
            ("quantile", (0.3,), {"weights": "`jnp.quantile`"}),
        )
    ),
    Counterpart(
        "searchsorted",
        "jnp.searchsorted",
        jnp.searchsorted,
        lambda: [
            ((jnp.sort(SAMPLES), SAMPLES), {}),
            ((jnp.sort(SAMPLES), SAMPLES, "right"), {}),
        ],
        same={"a": "array", "v": "x"},
        without={"sorter": "`array[sorter]`", "method": "all methods have one result"},
    ),
    Counterpart(
        "unique",
        "jnp.unique",
        jnp.unique,
        lambda: [
            ((SORTED,), {"size": 5}),
            ((SORTED,), {"size": 12, "fill_value": -1, **dict.fromkeys(UNIQUE, True)}),
        ],
        same={"ar": "x"},
        without={
            "axis": "`jnp.unique`",
            "equal_nan": "NaN is one element",
            "sorted": "elements ascend",
        },
        defaults={"size": "is needed, as under `jax.jit`"},
        order=False,
    ),
    Counterpart(
        "bincount",
        "jnp.bincount",
        jnp.bincount,
        lambda: [
            ((jnp.array([0, 3, 3, 1]),), {"length": 5}),
            ((jnp.array([0, 3, 3, 1]),), {"length": 3, "weights": SAMPLES[:4]}),
        ],
        without={"minlength": "`length`", "out_sharding": "the sharding of `x`"},
        defaults={"length": "is needed, as under `jax.jit`"},
    ),
    Counterpart(
        "histogram",
        "jnp.histogram",
        jnp.histogram,
        lambda: [((SAMPLES, 4), {}), ((SAMPLES, 5, (0.0, 10.0)), {"density": True})],
        same={"a": "x"},
        without={"out_sharding": "the sharding of `x`"},
        defaults={"density": "False here, None there: counts"},
    ),
)

COUNTERPARTS = (
    *SELECTION,
    *(
        Counterpart(name, f"jax.nn.{name}", getattr(jax.nn, name), _softmax_calls)
        for name in ("softmax", "log_softmax")
    ),
    Counterpart(
        "reduce_sum",
        "jnp.sum",
        jnp.sum,
        _reduction_calls(
            {"dtype": "int32"},
            {"initial": 2.0, "axis": 1},
            {"where": jnp.arange(5) < 2, "axis": (1, 2)},
        ),
        same={"a": "x"},
        without={"out": NO_OUT},
    ),
    Counterpart(
        "reduce_mean",
        "jnp.mean",
        jnp.mean,
        _reduction_calls({"dtype": "float16"}, {"where": jnp.arange(5) < 2, "axis": (1, 2)}),
        same={"a": "x"},
        without={"out": NO_OUT},
    ),
    *(
        Counterpart(
            f"reduce_{name}",
            f"jnp.{name}",
            getattr(jnp, name),
            _reduction_calls(
                {"initial": 0.5, "axis": 1},
                {"where": jnp.arange(5) < 2, "initial": 0.0, "axis": 2},
            ),
            same={"a": "x"},
            without={"out": NO_OUT},
        )
        for name in ("max", "min")
    ),
    Counterpart(
        "logsumexp",
        "jax.nn.logsumexp",
        jax.nn.logsumexp,
        _reduction_calls(
            {"b": 2.0},
            {"b": jnp.arange(-2.0, 3), "return_sign": True},
            {"where": jnp.arange(5) < 2},
        ),
        same={"a": "x"},
    ),
    Counterpart(
        "softmax_cross_entropy",
        "optax.softmax_cross_entropy_with_integer_labels",
        optax.softmax_cross_entropy_with_integer_labels,
        _loss_calls,
    ),
    *(
        Counterpart(name, f"jax.ops.{name}", getattr(jax.ops, name), _segment_calls)
        for name in ("segment_sum", "segment_max", "segment_min", "segment_prod")
    ),
    *(
        Counterpart(
            name,
            f"jnp.{name}",
            getattr(jnp, name),
            _cumulative_calls(({},), (1, "float16", {}), ({"axis": -1, "dtype": "int32"},)),
            same={"a": "x"},
            without={"out": NO_OUT},
        )
        for name in ("cumsum", "cumprod")
    ),
    *(
        Counterpart(
            name,
            f"jax.lax.{name}",
            getattr(jax.lax, name),
            _cumulative_calls(({},), (1, True, {})),
            same={"operand": "x"},
        )
        for name in ("cummax", "cummin")
    ),
    Counterpart(
        "cumlogsumexp",
        "jax.lax.cumlogsumexp",
        jax.lax.cumlogsumexp,
        lambda: [
            ((_array(3, 4),), {}),
            ((_array(3, 4), 1, True), {}),
            ((_array(3, 4).astype("float16"),), {"axis": 1}),
        ],
        same={"operand": "x"},
    ),
    Counterpart(
        "associative_scan",
        "jax.lax.associative_scan",
        jax.lax.associative_scan,
        lambda: [
            ((_affine, (_array(5, 3), _array(5, 3))), given)
            for given in ({}, {"axis": 1, "reverse": True})
        ],
    ),
    Counterpart(
        "scan",
        "jax.lax.scan",
        jax.lax.scan,
        lambda: [
            ((_step, _array(3), _array(5, 3)), given)
            for given in ({}, {"reverse": True, "unroll": 2})
        ],
        without={"_split_transpose": "for XLA's loops alone"},
    ),
    Counterpart(
        "while_loop",
        "jax.lax.while_loop",
        jax.lax.while_loop,
        lambda: [
            (
                (
                    lambda c: c[1] < 9,
                    lambda c: (c[0] * 0.5, c[1] + 2),
                    (jnp.float32(1), jnp.int32(0)),
                ),
                {},
            )
        ],
    ),
    Counterpart("index_add", "x.at[index].add", _at_add, _add_calls, order=False),
    Counterpart(
        "index_select",
        "jnp.take",
        jnp.take,
        _take_calls,
        same={"a": "x", "indices": "index"},
        without={
            "out": NO_OUT,
            "unique_indices": "`order` saves the gradient's sort",
            "indices_are_sorted": "`order` saves the gradient's sort",
        },
        defaults={"axis": "has no default"},
        order=False,
    ),
    Counterpart(
        "embedding_lookup",
        "jnp.take(axis=0)",
        _lookup,
        lambda: [
            ((_array(4, 3), jnp.array([[3, -1], [0, 9]])), {}),
            ((_array(4, 3), jnp.array([7])), {"fill_value": 1}),
        ],
        same={"a": "table", "indices": "ids"},
    ),
    Counterpart(
        "rms_norm",
        "flax.linen.RMSNorm",
        nn.RMSNorm,
        _norm_calls(bias=False),
        same={"reduction_axes": "axis"},
        without=_fields(nn.RMSNorm),
        defaults={"epsilon": "`eps` has flax's"},
        order=False,
        run=_layer(nn.RMSNorm),
    ),
    Counterpart(
        "layer_norm",
        "flax.linen.LayerNorm",
        nn.LayerNorm,
        _norm_calls(),
        same={"reduction_axes": "axis"},
        without=_fields(nn.LayerNorm),
        defaults={"epsilon": "`eps` has flax's"},
        order=False,
        run=_layer(nn.LayerNorm),
    ),
    Counterpart(
        "group_norm",
        "flax.linen.GroupNorm",
        nn.GroupNorm,
        lambda: [
            (
                (_array(2, 5, 8),),
                {"num_groups": 4, "scale": jnp.arange(8.0), "bias": jnp.ones(8)},
            ),
            ((_array(2, 5, 8),), {"num_groups": 2, "epsilon": 0.1}),
        ],
        without=_fields(
            nn.GroupNorm,
            ("group_size", "channels / size as `num_groups`"),
            ("reduction_axes", "`batch_axes` has the others"),
        ),
        defaults={"epsilon": "`eps` has flax's", "num_groups": "has no default"},
        order=False,
        run=_layer(nn.GroupNorm),
    ),
)


# ---- elementwise

# Arguments of counterparts that elementwise operations lack.
ELEMENTWISE_WITHOUT = ("accuracy", "decimals", "fill_value", "out", "size")


def elementwise() -> dict[str, tuple[str, Callable]]:
    """{name: (its counterpart's name, its counterpart)} of elementwise operations that JAX has by the same name."""
    found = {}
    for name in jaxkern.elementwise.__all__:
        for label, module in (("jax.nn", jax.nn), ("jnp", jnp), ("jax.lax", jax.lax)):
            if hasattr(module, name):
                found[name] = f"{label}.{name}", getattr(module, name)
                break
    return found


# ---- where results differ


class Difference(typing.NamedTuple):
    of: str
    here: str
    there: str
    why: str
    check: Callable[[], bool]  # whether both sides do what this row says


def _raises(f, *kinds) -> bool:
    try:
        f()
    except kinds:
        return True
    return False


def _all_nan(x) -> bool:
    return bool(jnp.isnan(x).all())


_EMPTY = jnp.full((1, 3), -jnp.inf)
_ONES, _NONE = jnp.ones((1, 3)), jnp.zeros((1, 3), bool)
_LABEL, _ROWS, _CLASSES = (
    jnp.array([1]),
    jnp.array([False, True]),
    jnp.array([[True, False, True]]),
)
_optax = optax.softmax_cross_entropy_with_integer_labels
_flax = {"params": {"scale": jnp.ones(4), "bias": jnp.zeros(4)}}


def _gradient(f, x):
    return jax.grad(lambda x: f(x).sum())(x)


DIFFERENCES = (
    Difference(
        "`softmax`, `log_softmax`",
        "a row with only -inf gives 0 (-inf), with zero gradients",
        "NaN",
        "rows of padding do not spoil a batch",
        lambda: (
            not jaxkern.softmax(_EMPTY).any()
            and bool((jaxkern.log_softmax(_EMPTY) == -jnp.inf).all())
            and not _gradient(jaxkern.softmax, _EMPTY).any()
            and all(_all_nan(f(_EMPTY)) for f in (jax.nn.softmax, jax.nn.log_softmax))
        ),
    ),
    Difference(
        "`logsumexp`",
        "a row with only -inf, or whose terms cancel, has zero gradients",
        "NaN",
        "the same",
        lambda: (
            not _gradient(jaxkern.logsumexp, _EMPTY).any()
            and _all_nan(_gradient(jax.nn.logsumexp, _EMPTY))
        ),
    ),
    Difference(
        "`softmax`, `log_softmax`",
        "`where` broadcasts to `x`",
        "`x` broadcasts to `where`, too",
        "the result has the shape of `x`",
        lambda: (
            _raises(
                lambda: jaxkern.softmax(jnp.ones(3), where=jnp.ones((2, 3), bool)), ValueError
            )
            and jax.nn.softmax(jnp.ones(3), where=jnp.ones((2, 3), bool)).shape == (2, 3)
        ),
    ),
    Difference(
        "all except operations at indices",
        "complex numbers raise an error",
        "they are accepted",
        "no kernel computes them",
        lambda: all(
            _raises(lambda f=f: f(jnp.ones(3, "complex64")), TypeError)
            and jnp.iscomplexobj(g(jnp.ones(3, "complex64")))
            for f, g in ((jaxkern.softmax, jax.nn.softmax), (jaxkern.reduce_sum, jnp.sum))
        ),
    ),
    Difference(
        "`reduce_*`, `softmax_cross_entropy`",
        "`keepdims`, `initial` and `where` are keyword arguments; so is the `axis` of the loss",
        "they may be positional, after `out`",
        "there is no `out`",
        lambda: (
            _raises(lambda: jaxkern.reduce_max(_ONES, 1, None, True), TypeError)
            and _raises(lambda: jaxkern.softmax_cross_entropy(_ONES, _LABEL, 1), TypeError)
        ),
    ),
    Difference(
        "`reduce_max`, `reduce_min`",
        "`where` without `initial`: a row that is entirely masked is -inf (inf), or the limit of the integer type",
        "ValueError",
        "the identity of each type is known",
        lambda: (
            bool((jaxkern.reduce_max(_ONES, 1, where=_NONE) == -jnp.inf).all())
            and jaxkern.reduce_min(jnp.ones(3, int), where=_NONE[0])
            == jnp.iinfo(jnp.ones(3, int).dtype).max
            and _raises(lambda: jnp.max(_ONES, where=_NONE), ValueError)
        ),
    ),
    Difference(
        "`reduce_sum`, `reduce_mean`",
        "sums with a 16-bit `dtype` are computed in float32 or wider and rounded once",
        "every addition is rounded, unless XLA fuses them",
        "as sums without a `dtype`",
        lambda: jaxkern.reduce_sum(jnp.ones(4096, "bfloat16"), dtype="bfloat16") == 4096,
    ),
    Difference(
        "`reduce_mean`",
        "an integer `dtype` raises an error",
        "it divides integers",
        "the mean of integers is no integer",
        lambda: (
            _raises(lambda: jaxkern.reduce_mean(_ONES, dtype="int32"), TypeError)
            and jnp.mean(_ONES, dtype="int32").dtype == jnp.int32
        ),
    ),
    Difference(
        "`scan`, `associative_scan`",
        "the function must be elementwise over lanes, or, for `scan`, reduce along rows; any other raises an error",
        "any function is allowed",
        "a kernel runs all steps of a lane in one thread, or in the threads of one block",
        lambda: (
            _raises(
                lambda: jaxkern.associative_scan(jnp.matmul, jnp.ones((4, 2, 2))), TypeError
            )
            and _raises(
                lambda: jaxkern.scan(
                    lambda c, x: (jnp.sort(c + x), None), jnp.ones((2, 2)), jnp.ones((4, 2, 2))
                ),
                TypeError,
            )
            and jax.lax.associative_scan(jnp.matmul, jnp.ones((4, 2, 2))).shape == (4, 2, 2)
        ),
    ),
    Difference(
        "`while_loop`",
        "each lane stops on its own: the condition is an array",
        "the condition is a scalar, and a vmap over lanes makes it an array",
        "lanes do not wait for each other",
        lambda: (
            jaxkern.while_loop(lambda c: c < 5, lambda c: 2 * c, jnp.array([3, 9, 1])).tolist()
            == [6, 9, 8]
            and jax.vmap(lambda c: jax.lax.while_loop(lambda c: c < 5, lambda c: 2 * c, c))(
                jnp.array([3, 9, 1])
            ).tolist()
            == [6, 9, 8]
            and _raises(
                lambda: jax.lax.while_loop(lambda c: c < 5, lambda c: 2 * c, jnp.array([3, 9])),
                TypeError,
            )
        ),
    ),
    Difference(
        "`cumsum`, `cumprod`, `cumlogsumexp`",
        "float16 and bfloat16 are computed in float32, and each element is rounded once",
        "every step is rounded, unless XLA fuses them",
        "a sum of ones stops at 256 in bfloat16",
        lambda: jaxkern.cumsum(jnp.ones(4096, "bfloat16"))[-1] == 4096,
    ),
    Difference(
        "`cumsum`, `cumprod`",
        "`dtype` is not boolean, and `x` not complex",
        "both are allowed",
        "as sums",
        lambda: all(
            _raises(lambda f=f: f(jnp.ones(3), dtype=bool), TypeError)
            and _raises(lambda f=f: f(jnp.ones(3, "complex64")), TypeError)
            and g(jnp.ones(3), dtype=bool).dtype == bool
            and g(jnp.ones(3, "complex64")).dtype == jnp.complex64
            for f, g in ((jaxkern.cumsum, jnp.cumsum), (jaxkern.cumprod, jnp.cumprod))
        ),
    ),
    Difference(
        "`cummax`, `cummin`",
        "of three or more equal elements the last one has half of the gradient, the one before it a quarter, and so on",
        "their shares depend on the length of the array",
        "it is the gradient of the loop; two equal elements have half each in both",
        lambda: (
            _gradient(lambda x: jaxkern.cummax(x)[2], jnp.ones(4)).tolist()
            == [0.25, 0.25, 0.5, 0]
            and _gradient(lambda x: jaxkern.cummax(x)[3], jnp.ones(4)).tolist()
            == [0.125, 0.125, 0.25, 0.5]
            and _gradient(lambda x: jax.lax.cummax(x)[3], jnp.ones(4)).tolist() == [0.25] * 4
        ),
    ),
    Difference(
        "`cummax`, `cummin`, `cumlogsumexp`",
        "`axis` may be negative or None",
        "ValueError, TypeError",
        "as in `jnp`",
        lambda: all(
            jnp.array_equal(f(jnp.ones((2, 3)), -1), g(jnp.ones((2, 3)), 1))
            and f(jnp.ones((2, 3)), None).shape == (6,)
            and _raises(lambda g=g: g(jnp.ones((2, 3)), -1), ValueError)
            for f, g in (
                (getattr(jaxkern, n), getattr(jax.lax, n))
                for n in ("cummax", "cummin", "cumlogsumexp")
            )
        ),
    ),
    Difference(
        "`cumlogsumexp`",
        "gradients are finite for elements of -inf; integers become float32",
        "NaN where two such elements come first; integers raise an error",
        "-inf masks an element",
        lambda: (
            bool(
                jnp.isfinite(
                    _gradient(lambda x: jaxkern.cumlogsumexp(x)[2], _EMPTY[0].at[2].set(0))
                ).all()
            )
            and not jnp.isfinite(
                _gradient(lambda x: jax.lax.cumlogsumexp(x)[2], _EMPTY[0].at[2].set(0))
            ).all()
            and jaxkern.cumlogsumexp(_LABEL).dtype == jnp.float32
            and _raises(
                lambda: jax.lax.cumlogsumexp(_LABEL), OverflowError, TypeError, ValueError
            )
        ),
    ),
    Difference(
        "`softmax_cross_entropy`",
        "the loss is float32 for 16-bit logits",
        "it has the type of the logits",
        "the mean of many losses needs more than 8 bits",
        lambda: (
            jaxkern.softmax_cross_entropy(_ONES.astype("bfloat16"), _LABEL).dtype == jnp.float32
            and _optax(_ONES.astype("bfloat16"), _LABEL).dtype == jnp.bfloat16
        ),
    ),
    Difference(
        "`softmax_cross_entropy`",
        "a label of -1 is no class: NaN, or 0 with `ignore_index=-1`",
        "the last class",
        "-1 mostly means padding, and NaN shows a mistake",
        lambda: (
            _all_nan(jaxkern.softmax_cross_entropy(_ONES, -_LABEL))
            and not jaxkern.softmax_cross_entropy(_ONES, -_LABEL, ignore_index=-1).any()
            and bool(jnp.isfinite(_optax(_ONES, -_LABEL)).all())
        ),
    ),
    Difference(
        "`softmax_cross_entropy`",
        "a row with only -inf has loss 0; a row with +inf has NaN",
        "NaN; inf, or NaN if it is the label's",
        "as `softmax`",
        lambda: (
            not jaxkern.softmax_cross_entropy(_EMPTY, _LABEL).any()
            and _all_nan(_optax(_EMPTY, _LABEL))
            and _all_nan(jaxkern.softmax_cross_entropy(_ONES.at[0, 0].set(jnp.inf), _LABEL))
            and bool(jnp.isinf(_optax(_ONES.at[0, 0].set(jnp.inf), _LABEL)).all())
        ),
    ),
    Difference(
        "`softmax_cross_entropy`",
        "`where` broadcasts to the logits; a mask of rows is `where[:, None]`",
        "it has the shape of the labels or of the logits",
        "as in `softmax`",
        lambda: (
            jaxkern.softmax_cross_entropy(
                jnp.ones((2, 3)), jnp.array([1, 2]), where=_ROWS[:, None]
            )[0]
            == 0
            and _optax(jnp.ones((2, 3)), jnp.array([1, 2]), where=_ROWS)[0] == 0
            and _raises(
                lambda: jaxkern.softmax_cross_entropy(jnp.ones((2, 3)), _LABEL, where=_ROWS),
                ValueError,
            )
        ),
    ),
    Difference(
        "`softmax_cross_entropy`",
        "a label that `where` masks has loss inf",
        "finite: only its term is missing from the sum",
        "the class has probability 0",
        lambda: (
            bool(
                jnp.isposinf(jaxkern.softmax_cross_entropy(_ONES, _LABEL, where=_CLASSES)).all()
            )
            and bool(jnp.isfinite(_optax(_ONES, _LABEL, where=_CLASSES)).all())
        ),
    ),
    Difference(
        "`softmax_cross_entropy`",
        "`axis` is one int",
        "it may also be a tuple",
        "reshape the logits",
        lambda: _raises(
            lambda: jaxkern.softmax_cross_entropy(
                jnp.ones((2, 3, 4)), jnp.array([1, 2]), axis=(1, 2)
            ),
            TypeError,
        ),
    ),
    Difference(
        "`segment_sum`, `segment_prod`, `index_add`",
        "float16 and bfloat16 are reduced in float32 and rounded once",
        "every step is rounded",
        "a sum of ones stops at 256 in bfloat16",
        lambda: (
            jaxkern.segment_sum(jnp.ones(4096, "bfloat16"), jnp.zeros(4096, int), 1)[0] == 4096
            and jaxkern.index_add(
                jnp.zeros(1, "bfloat16"), 0, jnp.zeros(4096, int), jnp.ones(4096, "bfloat16")
            )[0]
            == 4096
        ),
    ),
    Difference(
        "`segment_sum`",
        "`bucket_size` has no effect",
        "sums in buckets are more accurate",
        "sums are accurate without it",
        lambda: bool(
            (
                jaxkern.segment_sum(_array(99), jnp.zeros(99, int), 1, bucket_size=4)
                == jaxkern.segment_sum(_array(99), jnp.zeros(99, int), 1)
            ).all()
        ),
    ),
    Difference(
        "`segment_prod`",
        "it has derivatives for all ids",
        "NotImplementedError unless `unique_indices`",
        "jaxkern differentiates a scan over the sorted rows, which works for zeros too",
        lambda: (
            _gradient(
                lambda x: jaxkern.segment_prod(x, jnp.array([0, 0]), 1), jnp.array([0.0, 3.0])
            ).tolist()
            == [3, 0]
            and _raises(
                lambda: _gradient(
                    lambda x: jax.ops.segment_prod(x, jnp.array([0, 0]), 1), jnp.ones(2)
                ),
                NotImplementedError,
            )
        ),
    ),
    Difference(
        "`index_add`",
        "floating-point updates of integers raise an error",
        "they are rounded, with a warning",
        "JAX announces that it will raise an error",
        lambda: _raises(
            lambda: jaxkern.index_add(jnp.zeros(3, int), 0, _LABEL, jnp.array([1.5])), TypeError
        ),
    ),
    Difference(
        "`index_select`",
        'negative indices count from the end with `mode="clip"`, too; `mode="wrap"` raises an error',
        "`jnp.take` clips negative indices to 0",
        "as `x.at[index].get`",
        lambda: (
            jaxkern.index_select(jnp.arange(4), 0, -_LABEL, mode="clip")[0] == 3
            and jnp.arange(4).at[-_LABEL].get(mode="clip")[0] == 3
            and jnp.take(jnp.arange(4), -_LABEL, mode="clip")[0] == 0
            and _raises(
                lambda: jaxkern.index_select(jnp.arange(4), 0, _LABEL, mode="wrap"), ValueError
            )
        ),
    ),
    Difference(
        "`rms_norm`, `layer_norm`, `group_norm`",
        "the result has the type of `x`",
        "it has the type to which `x`, scale and bias promote",
        "parameters stay in float32 beside 16-bit activations; `dtype` selects another type",
        lambda: (
            jaxkern.layer_norm(jnp.ones((2, 4), "bfloat16"), jnp.ones(4), jnp.zeros(4)).dtype
            == jnp.bfloat16
            and nn.LayerNorm().apply(_flax, jnp.ones((2, 4), "bfloat16")).dtype == jnp.float32
        ),
    ),
    Difference(
        "`batch_norm`",
        "it returns the statistics",
        "a layer keeps running averages",
        "a function has no state",
        lambda: len(jaxkern.batch_norm(jnp.ones((2, 4)))) == 3,
    ),
    Difference(
        "`clamp`",
        "`clamp(x, min, max)`",
        "`jax.lax.clamp(min, x, max)`",
        "as `jnp.clip` and torch",
        lambda: jaxkern.clamp(5.0, 1.0, 2.0) == 2 and jax.lax.clamp(1.0, 5.0, 2.0) == 2,
    ),
    Difference(
        "`floor`, `ceil`, `round`, `fmod`, `power`, `hard_tanh`",
        "integers become float32",
        "they stay integers",
        "kernels are for floating-point numbers",
        lambda: all(
            f(*[jnp.arange(1, 4)] * n).dtype == jnp.float32
            and g(*[jnp.arange(1, 4)] * n).dtype == jnp.int32
            for f, g, n in (
                (jaxkern.floor, jnp.floor, 1),
                (jaxkern.ceil, jnp.ceil, 1),
                (jaxkern.round, jnp.round, 1),
                (jaxkern.fmod, jnp.fmod, 2),
                (jaxkern.power, jnp.power, 2),
                (jaxkern.hard_tanh, jax.nn.hard_tanh, 1),
            )
        ),
    ),
    Difference(
        "elementwise arithmetic",
        "booleans raise an error",
        "many functions convert them",
        "this is mostly a mistake; `cast` converts them",
        lambda: all(
            _raises(lambda f=f: f(*[jnp.ones(2, bool)] * n), TypeError)
            for f, n in ((jaxkern.add, 2), (jaxkern.exp, 1), (jaxkern.abs, 1))
        ),
    ),
)
