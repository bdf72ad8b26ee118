"""Bad arguments of every public function: the error names the function and the argument, while the call is traced."""

import inspect
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import jaxkern

X = np.ones((4, 6), np.float32)
IDS = np.array([0, 1, 1, 2])
GRAPH = jaxkern.Graph(jnp.array([0, 1, 2]), jnp.array([1, 1, 0]), num_nodes=3)
NODES = np.ones((3, 2), np.float32)
MATRIX = sparse.BCOO.fromdense(jnp.eye(3))

# A call of each public function that is right. Elementwise functions are called with X for each operand.
SEGMENT = {"data": X, "segment_ids": IDS, "num_segments": 3}
MESSAGE = {"f": lambda *xs: xs[0], "graph": GRAPH, "senders": NODES}
CALLS = {
    "Graph": {"senders": IDS, "receivers": IDS},
    "Quantization": {},
    "DelayedScale.create": {},
    "DelayedScale.update": {"self": jaxkern.DelayedScale.create(), "amax": 1.0},
    "accelerate": {},
    "advantages": {"rewards": X, "values": np.ones((5, 6), np.float32), "discounts": 0.9, "lambda_": 0.9},
    "associative_scan": {"fn": lambda a, b: a + b, "elems": X},
    "batch_norm": {"x": X},
    "argsort": {"x": X},
    "bincount": {"x": IDS, "length": 4},
    "benchmark": {"f": lambda: 1.0, "repeats": 1},
    "cast": {"x": X, "dtype": "float16"},
    **{name: {"x": X, "axis": 0} for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")},
    "dequantize": {"q": X, "scale": 1.0},
    "discounted_returns": {"rewards": X, "discounts": 0.9},
    "edge_map": MESSAGE,
    "edge_max": MESSAGE,
    "edge_mean": MESSAGE,
    "edge_min": MESSAGE,
    "edge_sum": MESSAGE,
    "elementwise_kernel": {"f": lambda x: x},
    "embedding_bag": {"table": X, "ids": IDS, "segment_ids": IDS},
    "embedding_lookup": {"table": X, "ids": IDS},
    "explain": {"f": lambda x: x},
    "exponential_moving_average": {"x": X, "decay": 0.9},
    "export_checks": {},
    "fake_quantize": {"x": X},
    "geglu": {"x": X},
    "gelu": {"x": X},
    "glu": {"x": X},
    "graph_attention": {"score": lambda *xs: xs[0], "graph": GRAPH, "values": NODES, "senders": NODES},
    "group_norm": {"x": X, "groups": 2},
    "histogram": {"x": X},
    "index_add": {"x": X, "axis": 0, "index": IDS, "source": X},
    "index_select": {"x": X, "axis": 0, "index": IDS},
    "install": {},
    "layer_norm": {"x": X},
    "linear_softmax_cross_entropy": {"h": X, "weight": np.ones((6, 5), np.float32), "labels": IDS},
    "log_softmax": {"x": X},
    "linear_recurrence": {"a": X, "b": X},
    "logsumexp": {"x": X},
    "moe_combine": {"x": X, "indices": IDS[:, None]},
    "median": {"x": X},
    "min_p": {"logits": X, "p": 0.5},
    "moe_dispatch": {"x": X, "indices": IDS[:, None], "num_slots": 5},
    "moe_route": {"logits": X, "k": 2},
    "quantile": {"x": X, "q": 0.5},
    "quantize_blocks": {"x": X, "block": 3},
    "quantize_rows": {"x": X},
    "quantize_tensor": {"x": X},
    "reduce_max": {"x": X},
    "reduce_mean": {"x": X},
    "reduce_min": {"x": X},
    "reduce_sum": {"x": X},
    "rms_norm": {"x": X},
    "row_kernel": {"f": lambda x: x},
    "sample": {"logits": X, "key": jax.random.key(0)},
    "scale_norm": {"x": X},
    "scan": {"f": lambda carry, x: (carry, x), "init": X, "xs": X},
    "while_loop": {"cond_fun": lambda x: jnp.zeros(x.shape, bool), "body_fun": lambda x: x, "init_val": X},
    "searchsorted": {"array": X[0], "x": X},
    "segment_max": SEGMENT,
    "segment_mean": SEGMENT,
    "segment_min": SEGMENT,
    "segment_prod": SEGMENT,
    "segment_softmax": SEGMENT,
    "segment_sum": SEGMENT,
    "softmax": {"x": X},
    "softmax_cross_entropy": {"logits": X, "labels": IDS},
    "softmax_cross_entropy_and_grad": {"logits": X, "labels": IDS},
    "sort_indices": {"ids": IDS, "num_segments": 3},
    "sort": {"x": X},
    "sort_pairs": {"keys": X, "values": X},
    "source": {"f": lambda x: x},
    "spmm": {"a": MATRIX, "b": NODES},
    "spmm_graph": {"a": MATRIX},
    "swiglu": {"x": X},
    "top_k": {"x": X, "k": 2},
    "top_p": {"logits": X, "p": 0.5},
    "uninstall": {},
    "unique": {"x": X, "size": 2},
}


# Other arguments that an argument needs, to be looked at: by its name, or by the name of the function and its own.
BESIDE = {
    "score_args": {"score": lambda x, row, column, a: x + a},
    "epilogue_args": {"epilogue": lambda x, a: x + a},
    "dropout_key": {"dropout_rate": 0.5},
    "advantages.bootstrap": {"values": X},
}


class Traced:
    """Stands for a tracer."""


# What is wrong for each kind of argument.
OBJECTS = {
    "None": None,
    "string": "abc",
    "object": object(),
    "function": len,
    "list": [1.0, 2.0],
    "key": jax.random.key(0),
    "keys": jax.random.split(jax.random.key(0), 4),
}
NOT_ARRAYS = OBJECTS | {
    "strings": np.array(["a", "b"]),
    "float0": np.zeros((4, 6), jax.dtypes.float0),
    "type": jax.ShapeDtypeStruct((4, 6), jnp.float32),
}
COMPLEX = {"complex": np.ones((4, 6), np.complex64)}
TRACED = {"traced": Traced}
NOT_INTS = OBJECTS | TRACED | {"bool": True, "float": 2.0, "array": np.ones(2, np.int32), "float32": np.float32(2)}
NOT_NUMBERS = OBJECTS | TRACED | {"bool": True, "complex": 1j, "array": np.ones(2, np.float32), "NaN": float("nan")}
OUT_OF_BOUNDS = {"large": 9, "small": -9, "huge": 1 << 70}


def without(kind, name):
    return {k: v for k, v in kind.items() if k != name}


KINDS = {
    "array": NOT_ARRAYS,
    "real": NOT_ARRAYS | COMPLEX,
    "numbers": NOT_ARRAYS,
    "scalar": NOT_ARRAYS | COMPLEX | {"array": np.ones(2, np.float32)},
    "mask": NOT_ARRAYS | COMPLEX | {"numbers": X, "shape": np.ones(7, bool)},
    "index": NOT_ARRAYS | COMPLEX | {"float32": np.ones(4, np.float32), "bool": np.ones(4, bool)},
    "key": without(NOT_ARRAYS, "key") | {"float": 1.5, "shape": np.zeros(3, np.uint32)},
    "int": NOT_INTS,
    "size": NOT_INTS | {"negative": -1},
    "count": NOT_INTS | {"negative": -1, "huge": 1 << 70},
    "axis": NOT_INTS | OUT_OF_BOUNDS | {"names": {"a": 0}.keys()},
    "axes": without(NOT_INTS, "array") | OUT_OF_BOUNDS | {"twice": (0, 0), "bools": (True,), "names": {"a": 0}.keys()},
    "bool": OBJECTS | TRACED | {"int": 2, "float": 0.5, "array": np.ones(2, bool)},
    "number": NOT_NUMBERS,
    "positive": NOT_NUMBERS | {"negative": -1.0},
    "dtype": OBJECTS | TRACED | {"unknown": "flaot32", "array": X, "number": 3.5, "complex": "complex64"},
    "choice": OBJECTS | TRACED | {"array": X, "int": 3},
    "function": without(OBJECTS, "function") | {"array": X, "int": 3},
    "args": {"array": X, "string": "abc", "int": 3, "shape": [np.ones(7, np.float32)]}
    | {f"[{k}]": [v] for k, v in (NOT_ARRAYS | COMPLEX).items()},
    "tree": without(NOT_ARRAYS, "list") | COMPLEX | {"rows": X, "scalar": 1.0, "in a list": ["abc"]},
    "leaves": without(without(NOT_ARRAYS, "list"), "None") | {"in a list": ["abc"]},
    "object": OBJECTS | {"array": X, "int": 3},
    "pair": without(OBJECTS, "None") | {"three": (1, 2, 3), "strings": ("a", "b"), "int": 3},
    "names": {"unknown": "softmux", "int": 3, "ints": [3], "function": len, "array": X},
    "axis names": without(OBJECTS, "string") | {"float": 3.5, "array": X},
    "text": {"int": 3, "array": X, "bytes": b"abc"},
}
# The kind of an argument, by its name; or by the name of the function and its own.
ARGUMENTS = {
    "array": "table values condition",
    "real": "b x y z min max data source logits h weight weights bias residual mean var scale q straight_through gate amax "
    "rewards discounts lambda_ bootstrap decay p q temperature top_p min_p",
    "scalar": "alpha initial lambd negative_slope threshold value fill_value",
    "mask": "where done",
    "index": "index ids segment_ids labels indices offsets",
    "key": "dropout_key key",
    "int": "ignore_index margin unroll checkpoint_every",
    "size": "size bucket_size memory groups num_groups block k top_k",
    "count": "repeats num_segments num_bags num_slots num_nodes num_senders num_receivers length capacity",
    "axis": "channel_axis",
    "axes": "axis batch_axes reduce_features",
    "bool": "keepdims indices_are_sorted unique_indices deterministic tune wrap causal transposed transpose_weight approximate "
    "reverse force export most_recent return_sign promote_integers exclusive renormalize descending density "
    "return_index return_inverse return_counts",
    "number": "z_loss",
    "positive": "eps epsilon soft_cap label_smoothing dropout_rate",
    "dtype": "dtype logits_dtype",
    "choice": "mode reduction precision platform side method",
    "function": "f fn function score epilogue cond_fun body_fun",
    "args": "score_args epilogue_args",
    "tree": "senders receivers edges",
    "leaves": "init xs elems init_val",
    "object": "graph order a quantize out_sharding",
    "names": "only without",
    "axis names": "axis_name",
    "text": "name",
}
OF = {argument: kind for kind, names in ARGUMENTS.items() for argument in names.split()}
OF |= {
    "Graph.senders": "index",
    "Graph.receivers": "index",
    "accelerate.check": "positive",
    "index_add.x": "array",
    **{f"linear_recurrence.{name}": "numbers" for name in ("a", "b", "initial")},
    "linear_recurrence.axis": "axis",
    "exponential_moving_average.initial": "real",
    "advantages.values": "real",
    **{f"{name}.axis": "axis" for name in ("advantages", "discounted_returns", "exponential_moving_average")},
    **{
        f"{name}.axis": "axis" for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "associative_scan")
    },
    "index_select.x": "array",
    "top_k.x": "real",
    "bincount.x": "index",
    "bincount.weights": "array",
    "histogram.weights": "array",
    "histogram.bins": "int",
    "histogram.range": "pair",
    "searchsorted.array": "real",
    **dict.fromkeys(("sort.x", "argsort.x", "unique.x", "sort_pairs.keys", "sort_pairs.values"), "array"),
    **{f"{name}.axis": "axis" for name in ("sort", "argsort", "sort_pairs")},
    "top_k.k": "count",
    **{f"{name}.axis": "axis" for name in ("top_k", "top_p", "min_p", "sample")},
    "threshold.threshold": "scalar",
    **{f"{name}.axis": "axis" for name in ("glu", "swiglu", "geglu", "index_add", "index_select")},
    **{f"{name}.axis": "axis" for name in ("softmax_cross_entropy", "softmax_cross_entropy_and_grad")},
    **{
        f"{name}.data": "array"
        for name in ("segment_sum", "segment_mean", "segment_max", "segment_min", "segment_prod")
    },
    **{f"logical_{name}.{x}": "array" for name in ("and", "or", "xor", "not") for x in "xy"},
}
# What is right for an argument although it is wrong for others of its kind. A default of None is right, too.
RIGHT = {
    "accelerate.check": {"bool"},
    "group_norm.batch_axes": {"None"},
    "scan.unroll": {"bool"},
    "scan.init": {"key", "keys"},
    "scan.xs": {"key", "keys"},
    **{f"{name}.axis": {"None"} for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")},
    "while_loop.init_val": {"key", "keys"},
    "histogram.bins": {"array", "list"},
    "histogram.range": {"list"},
    "bincount.x": {"bool"},
    "bincount.weights": {"None"},
    **{f"{name}.axis": {"None"} for name in ("sort", "argsort", "sort_pairs")},
    "row_kernel.axis": set(OUT_OF_BOUNDS),  # until there are operands: see test_row_kernel.py
    **{f"{name}.axis": {"None"} for name in ("softmax", "log_softmax", "layer_norm", "rms_norm", "scale_norm")},
}


def public():
    """The public functions by name; classes by their constructors."""
    for name in jaxkern.__all__:
        f = getattr(jaxkern, name)
        if not isinstance(f, types.ModuleType) and f not in (jaxkern.DelayedScale, jaxkern.CheckError, jaxkern.Routing):
            yield name, f
    yield "DelayedScale.create", jaxkern.DelayedScale.create
    yield "DelayedScale.update", jaxkern.DelayedScale.update


def right_call(name, parameters):
    if name in CALLS:
        return CALLS[name]
    return {p.name: X if OF[p.name] != "scalar" else 1.0 for p in parameters if p.default is p.empty}


@pytest.fixture
def uninstalled():
    yield
    jaxkern.uninstall()


@pytest.mark.parametrize(("name", "function"), [pytest.param(*f, id=f[0]) for f in public()])
def test_bad_arguments(name, function, uninstalled):
    parameters = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    others = right_call(name, parameters)
    jax.eval_shape(lambda: (function(**others), None)[1])  # nothing is wrong with it
    wrong = []
    for p in parameters:
        own = f"{name}.{p.name}"
        given = others | BESIDE.get(own, BESIDE.get(p.name, {}))
        call = lambda value: function(**{**given, p.name: value})  # noqa: B023
        assert own in OF or p.name in OF, f"what kind of values does {own} take? list it in ARGUMENTS or OF"
        for what, value in KINDS[OF.get(own) or OF[p.name]].items():
            if what in RIGHT.get(own, ()) or (what == "None" and p.default is None):
                continue
            try:
                jax.eval_shape(call, jnp.zeros((), jnp.int32)) if value is Traced else call(value)
            except (TypeError, ValueError) as error:
                if not re.match(rf"jaxkern\.{re.escape(name)}: .*\b{p.name}\b", str(error), re.DOTALL):
                    wrong.append(f"{p.name}, {what}: {type(error).__name__}: {error}")
            else:
                wrong.append(f"{p.name}, {what}: no error")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("maker", ["elementwise_kernel", "row_kernel"])
@pytest.mark.parametrize("value", NOT_ARRAYS.values(), ids=NOT_ARRAYS.keys())
def test_bad_operands_of_a_kernel_function(value, maker):
    """They have positions, and no names. Operands of a row function may be trees of arrays, and so None and lists."""
    if maker == "row_kernel" and (value is None or isinstance(value, list)):
        assert jax.tree.structure(value) != jax.tree.structure(X)
        return
    f = getattr(jaxkern, maker)(lambda x, y: x + y)
    with pytest.raises(TypeError, match=rf"jaxkern\.{maker}: operand 1 must be an array or a number, got "):
        f(X, value)


CALLED = {
    "edge_sum": (lambda f: jaxkern.edge_sum(f, GRAPH, senders=NODES), "f is called with an element of senders"),
    "elementwise_kernel": (lambda f: jaxkern.elementwise_kernel(f)(X), "f is called with elements of 1 operands"),
    "graph_attention": (
        lambda f: jaxkern.graph_attention(f, GRAPH, NODES, edges=NODES),
        "score is called with an element of edges",
    ),
    "rms_norm": (lambda f: jaxkern.rms_norm(X, epilogue=f), "epilogue is called with a normalised element"),
    "softmax": (lambda f: jaxkern.softmax(X, score=f), "score is called with an element of x, 2 indices"),
}


@pytest.mark.parametrize("name", CALLED)
def test_functions_of_other_arguments(name):
    call, message = CALLED[name]
    with pytest.raises(TypeError, match=rf"jaxkern\.{name}: {message}.*: .*argument"):
        call(lambda x, y: x + y)


@pytest.mark.parametrize("maker", ["elementwise_kernel", "row_kernel"])
def test_named_operands_of_a_kernel_function(maker):
    f = getattr(jaxkern, maker)(lambda x, y: x + y)
    with pytest.raises(TypeError, match=rf"jaxkern\.{maker}: operands are given by position, got y by name"):
        f(X, y=X)


@pytest.mark.parametrize("name", ["swiglu", "geglu", "glu"])
def test_gates_by_position(name):
    with pytest.raises(TypeError, match=rf"jaxkern\.{name}: axis must be an int; .* by name, {name}\(x, gate=\.\.\.\)"):
        getattr(jaxkern, name)(X, X)
