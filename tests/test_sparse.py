"""embedding_bag, spmm, graph_attention, moe_combine and moe_dispatch against plain JAX in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse

import jaxkern
from jaxkern._core import launch
from jaxkern.sparse import SHORT_BAG

TOLERANCE = {"float64": 1e-12, "float32": 4e-6, "bfloat16": 1e-2}


def normal(shape, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def to64(tree):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), tree)


def close(found, wanted, dtype, scale=1.0):
    def check(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=scale * TOLERANCE[dtype] * max(1, np.abs(b).max(initial=0)))

    jax.tree.map(check, found, wanted)


def check(ours, theirs, operands, dtype):
    """Values and gradients by all operands."""

    def both(f, operands, g):
        y, pull = jax.vjp(f, *operands)
        return y, pull(g)

    g = normal(jax.eval_shape(ours, *operands).shape, dtype, 7)
    y, slopes = jax.jit(functools.partial(both, ours))(operands, g)
    wanted, wanted_slopes = jax.jit(functools.partial(both, theirs))(*to64((operands, g)))
    assert y.dtype == dtype and y.shape == wanted.shape
    close(y, wanted, dtype)
    close(slopes, wanted_slopes, dtype, scale=4)


# ---- embedding_bag

ROWS, BAGS = 11, 9


def bags(kind, seed=0):
    """(arguments after table, the bag of each id, ids flat); some ids pad, some bags are empty."""
    rng = np.random.default_rng(seed)
    if kind == "rectangle":
        ids = rng.integers(-1, ROWS + 1, (BAGS, 5)).astype(np.int32)
        return dict(ids=ids), np.repeat(np.arange(BAGS), 5), ids.ravel()
    ids = rng.integers(-1, ROWS + 1, 40).astype(np.int32)
    if kind == "offsets":
        offsets = np.sort(rng.integers(2, 40, BAGS)).astype(np.int32)
        offsets[3:5] = offsets[3]
        return dict(ids=ids, offsets=offsets), np.searchsorted(offsets, np.arange(40), side="right") - 1, ids
    at = rng.integers(-1, BAGS + 1, 40).astype(np.int32)
    at[at == 4] = 5
    at = np.sort(at) if kind == "sorted" else at
    more = dict(indices_are_sorted=True) if kind == "sorted" else {}
    return dict(ids=ids, segment_ids=at, num_bags=BAGS, **more), at, ids


def plain_bag(at, ids, mode, table, *weights):
    on = (ids >= 0) & (ids < ROWS) & (at >= 0) & (at < BAGS)
    x = table[np.where(on, ids, 0)]
    x = x * weights[0].reshape(-1, 1) if weights else x
    at = np.where(on, at, BAGS)
    count = np.bincount(at, minlength=BAGS + 1)[:BAGS, None]
    if mode == "max":
        return jnp.where(count > 0, jax.ops.segment_max(x, at, BAGS), 0)
    total = jax.ops.segment_sum(x, at, BAGS)
    return total / np.maximum(count, 1) if mode == "mean" else total


@pytest.mark.parametrize("kind", ["rectangle", "offsets", "sorted", "unsorted"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(kind, mode, x64):
    arguments, at, ids = bags(kind)
    table = normal((ROWS, 6), "float32")
    ours = lambda table: jaxkern.embedding_bag(table, **arguments, mode=mode)
    check(ours, functools.partial(plain_bag, at, ids, mode), [table], "float32")


@pytest.mark.parametrize("kind", ["rectangle", "offsets", "sorted", "unsorted"])
def test_embedding_bag_with_weights(kind, x64):
    arguments, at, ids = bags(kind)
    operands = normal((ROWS, 3), "float32"), normal(arguments["ids"].shape, "float32", 1)
    ours = lambda table, w: jaxkern.embedding_bag(table, weights=w, **arguments)
    check(ours, lambda table, w: plain_bag(at, ids, "sum", table, w.ravel()), operands, "float32")


def test_embedding_bag_in_16_bits_and_of_nothing(x64):
    arguments, at, ids = bags("rectangle")
    table = normal((ROWS, 4), "bfloat16")
    bag = jax.jit(jaxkern.embedding_bag, static_argnames="mode")
    close(bag(table, **arguments), plain_bag(at, ids, "sum", to64(table)), "bfloat16")
    for mode in ("sum", "mean", "max"):
        assert bag(table, np.zeros((3, 0), int), mode=mode).tolist() == [[0.0] * 4] * 3
        assert bag(table, np.full((2, 2), -1), mode=mode).tolist() == [[0.0] * 4] * 2


def test_embedding_bag_keeps_its_type_without_ids():
    for shape in (0, 2), (2, 0):
        assert jaxkern.embedding_bag(jnp.ones((3, 4), int), jnp.zeros(shape, int), mode="mean").dtype == jnp.float32


def test_ids_that_pad_have_no_part_in_gradients():
    """Neither a NaN in the row that is read in their place nor a NaN weight reaches a gradient."""
    table, ids = jnp.ones((3, 2)).at[0].set(jnp.nan), jnp.array([[1, -1], [2, 3]])
    weights = jnp.array([[2.0, jnp.nan], [3.0, jnp.inf]])
    y, pull = jax.vjp(jax.jit(lambda t, w: jaxkern.embedding_bag(t, ids, weights=w)), table, weights)
    d_table, d_weights = pull(jnp.ones((2, 2)))
    np.testing.assert_array_equal(y, [[2, 2], [3, 3]])
    np.testing.assert_array_equal(d_table, [[0, 0], [2, 2], [3, 3]])
    np.testing.assert_array_equal(d_weights, [[2, 0], [2, 0]])


@pytest.mark.parametrize("length", [5, SHORT_BAG + 1])
@pytest.mark.parametrize("weighted", [False, True])
def test_embedding_bag_sorts_for_its_gradient_alone(length, weighted):
    """XLA adds up short bags. Each gradient is one kernel, and the gathered rows are never stored."""
    table, ids = jax.ShapeDtypeStruct((500, 8), jnp.float32), jnp.zeros((40, length), int)
    w = jax.ShapeDtypeStruct((40, length), jnp.float32)

    bag = lambda table, w: jaxkern.embedding_bag(table, ids, weights=w if weighted else None)
    lower = lambda f, *operands: jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    edges = lambda text: [p for p in map(_operation, launch.programs(text)) if p.startswith("edge")]
    assert edges(lower(bag, table, w)) == ["edge_reduce"] * (length > SHORT_BAG)

    text = lower(lambda table, w, g: jax.vjp(bag, table, w)[1](g), table, w, jax.ShapeDtypeStruct((40, 8), jnp.float32))
    assert sorted(edges(text)) == ["edge_map"] * weighted + ["edge_reduce"]
    assert len([p for p in launch.programs(text) if _operation(p) == "sort_indices"]) == 1
    assert f"40x{length}x8" not in text


def _operation(program):
    return program.splitlines()[1].removeprefix("operation jaxkern_").split("(")[0]


@pytest.mark.parametrize("length", [2, SHORT_BAG + 1])
def test_embedding_bag_of_weak_types(length):
    """Short and long bags agree: a weak type promotes like any other, and dtypes without kernels are refused."""
    ids, weights = jnp.zeros((4, length), int), jnp.full((4, length), 0.5)
    assert weights.weak_type
    table = jnp.ones((3, 2), jnp.bfloat16)
    y, pull = jax.vjp(jax.jit(lambda table: jaxkern.moe_combine(table, ids, weights)), table)
    assert y.dtype == jnp.float32 and pull(y)[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, 0.5 * length)
    with pytest.raises(TypeError, match="complex64"):
        jaxkern.embedding_bag(jnp.ones((3, 2), jnp.complex64), ids)


# ---- spmm


@pytest.mark.parametrize("kind", ["BCOO", "BCOO sorted", "BCSR"])
def test_spmm(kind, x64):
    dense = np.random.default_rng(0).normal(size=(7, 9)) * (np.random.default_rng(1).random((7, 9)) < 0.4)
    from_dense = lambda nse: jax.jit(lambda x: sparse.BCOO.fromdense(x, nse=nse))(jnp.asarray(dense, jnp.float32))
    a = from_dense(40)  # more than there are: some pad
    if kind == "BCOO":
        order = np.random.default_rng(2).permutation(40)
        a = sparse.BCOO((a.data[order], a.indices[order]), shape=a.shape)
    if kind == "BCSR":
        a = sparse.BCSR.from_bcoo(from_dense(np.count_nonzero(dense)))
    with_data = lambda d: type(a)((d, *((a.indices,) if kind[3] == "O" else (a.indices, a.indptr))), shape=a.shape)
    graph = jaxkern.spmm_graph(a)
    b = normal((9, 5), "float32", 3)
    theirs = lambda d, b: (with_data(d).todense()) @ b
    check(lambda d, b: jaxkern.spmm(with_data(d), b, graph=graph), theirs, [a.data, b], "float32")
    close(jax.jit(jaxkern.spmm)(a, b), dense.astype(np.float32) @ to64(b), "float32")


# ---- graph_attention


@pytest.mark.parametrize("heads", [(), (3,)])
def test_graph_attention(heads, x64):
    rng, n, count = np.random.default_rng(0), 13, 90
    s, r = (rng.integers(-1, n + 1, count).astype(np.int32) for _ in range(2))
    graph = jaxkern.Graph(s, r, num_nodes=n)
    valid = (s >= 0) & (s < n) & (r >= 0) & (r < n)
    operands = normal((n, *heads), "float32"), normal((n, *heads), "float32", 1), normal((n, *heads, 4), "float32", 2)
    score = lambda a, b: jax.nn.leaky_relu(a + b, 0.2)

    def theirs(a, b, v):
        scores = score(a[s * valid], b[r * valid])
        scores = jnp.where(valid.reshape(-1, *[1] * len(heads)), scores, -jnp.inf)
        at = np.where(valid, r, n)
        largest = jax.lax.stop_gradient(jax.ops.segment_max(scores, at, n))[r * valid]
        e = jnp.where(valid.reshape(-1, *[1] * len(heads)), jnp.exp(scores - largest), 0)
        total = jax.ops.segment_sum(e, at, n)
        sums = jax.ops.segment_sum(e[..., None] * v[s * valid], at, n)
        return sums / jnp.where(total == 0, 1, total)[..., None]

    ours = lambda a, b, v: jaxkern.graph_attention(score, graph, v, senders=a, receivers=b)
    check(ours, theirs, operands, "float32")


def test_attention_by_dot_products(x64):
    """A node with one edge gets the value of that edge."""
    graph = jaxkern.Graph(np.array([1]), np.array([0]), num_nodes=2)
    q = normal((2, 3, 4), "float32")
    y = jaxkern.graph_attention(lambda k, q: k * q, graph, q, senders=q, receivers=q, reduce_features=-1)
    close(y, jnp.stack([q[1], jnp.zeros_like(q[0])]), "float32")


# ---- mixtures of experts


def test_experts(x64):
    rng, tokens, k, slots = np.random.default_rng(0), 12, 2, 30
    indices = np.where(rng.random((tokens, k)) < 0.2, -1, rng.permutation(slots)[: tokens * k].reshape(tokens, k))
    x, w, y = normal((tokens, 5), "float32"), normal((tokens, k), "float32", 1), normal((slots, 5), "float32", 2)
    on = indices >= 0
    theirs = lambda y, w: jnp.einsum("tk,tkf->tf", w * on, y[indices * on])
    check(lambda y, w: jaxkern.moe_combine(y, indices, w), theirs, [y, w], "float32")
    check(lambda y: jaxkern.moe_combine(y, indices), lambda y: theirs(y, jnp.ones((tokens, k))), [y], "float32")
    token = np.repeat(np.arange(tokens), k)
    scatter = lambda x: jnp.zeros((slots, 5)).at[np.where(on, indices, slots).ravel()].add(x[token])
    check(lambda x: jaxkern.moe_dispatch(x, indices, slots), scatter, [x], "float32")


def test_bad_arguments():
    table, ids, graph = jnp.zeros((3, 4)), jnp.zeros(5, int), jaxkern.Graph(np.array([0]), np.array([1]), num_nodes=2)
    bag = functools.partial(jaxkern.embedding_bag, table)
    for error, match, f in [
        (ValueError, "neither", lambda: bag(ids)),
        (ValueError, "mode must be", lambda: bag(ids[None], mode="prod")),
        (ValueError, "weights are for", lambda: bag(ids[None], weights=jnp.ones((1, 5)), mode="max")),
        (ValueError, "differ", lambda: bag(ids, jnp.zeros(4, int), num_bags=2)),
        (ValueError, "differ", lambda: bag(ids[None], weights=jnp.ones(5))),
        (TypeError, "integer type", lambda: bag(jnp.zeros((2, 2)))),
        (TypeError, "embedding_bag: num_bags must be given", lambda: jax.jit(lambda at: bag(ids, at))(ids)),
        (TypeError, "moe_dispatch: num_slots must be an int", lambda: jaxkern.moe_dispatch(table, ids[:3, None], None)),
        (TypeError, "BCOO", lambda: jaxkern.spmm(table, table)),
        (ValueError, "do not match", lambda: jaxkern.spmm(sparse.BCOO.fromdense(table), table)),
        (ValueError, "do not fit", lambda: jaxkern.graph_attention(lambda x: x, graph, table, senders=jnp.zeros(2))),
        (ValueError, "must have shape", lambda: jaxkern.moe_combine(table, ids)),
        (ValueError, "do not match", lambda: jaxkern.moe_dispatch(table, jnp.zeros((5, 2), int), 7)),
    ]:
        with pytest.raises(error, match=match):
            f()


def test_a_matrix_of_another_type_is_refused_with_its_conversion():
    """The error names a call that makes a matrix which `spmm` takes."""
    dense = np.array([[0.0, 2.0, 0.0], [3.0, 0.0, 1.0]], np.float32)
    b = np.arange(6, dtype=np.float32).reshape(3, 2)
    for a in (dense, sparse.COO.fromdense(dense), sparse.CSR.fromdense(dense), scipy.sparse.csr_matrix(dense)):
        with pytest.raises(TypeError, match=r"jaxkern\.spmm: a must be a BCOO or a BCSR") as caught:
            jaxkern.spmm(a, b)
        call = str(caught.value).partition("; ")[2].removesuffix(" makes one")
        made = eval(call, {"BCOO": sparse.BCOO, "BCSR": sparse.BCSR, "jnp": jnp, "a": a})
        np.testing.assert_allclose(jaxkern.spmm(made, b), dense @ b)
