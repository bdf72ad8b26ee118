"""Messages summed in no fixed order (jaxkern/_ops/messages/scatter.py): what the kernels do, on the CPU and on a GPU.

The sums are of small integers, which are exact in any order.
"""

import functools
import re

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import PLATFORM
from plans import check_limits

import jaxkern
from jaxkern._core import device, functor, launch, registry
from jaxkern._ops.messages import scatter, scatter_plan
from jaxkern._ops.messages.edges import EDGE, OTHER, ROW, SHARED
from jaxkern._ops.messages.scatter_plan import Other

ENDS = (ROW, OTHER, EDGE, SHARED)
KINDS = ("uniform", "zipf", "runs", "same", "outside")


def index_of(kind, edges, rows, dtype="int32", seed=0):
    """Rows of edges, some of them negative and out of range."""
    rng = np.random.default_rng(seed)
    info = np.iinfo(dtype)
    found = rng.integers(max(-3, info.min), min(rows + 3, info.max), edges)
    if kind == "zipf":
        weights = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -1.3)
        found = rng.permutation(rows)[np.searchsorted(weights, rng.random(edges) * weights[-1]).clip(0, rows - 1)]
    elif kind == "runs":
        found = np.repeat(found, 12)[:edges]
    elif kind == "same":
        found[rng.random(edges) < 0.9] = rows - 1
    elif kind == "outside":
        found[:] = info.max
    return found.astype(dtype)


class Problem:
    """w + (x[row] - y[other]) * z, of features that broadcast."""

    def __init__(
        self,
        kind="uniform",
        edges=1500,
        rows=300,
        shape=(3,),
        dtype="float32",
        index="int32",
        other=None,
        onto=False,
        **params,
    ):
        rng = np.random.default_rng(1)
        nodes = 70 if other is None else other.nodes
        self.other = other or Other(nodes, wrap=True)
        ones = (1,) * len(shape)
        arrays = [((rows, *shape)), ((nodes, *shape)), ((edges, *shape)), ((1, *ones))]
        self.arrays = [rng.integers(-4, 5, s).astype(dtype) for s in arrays]
        f = lambda x, y, z, w: w + (x - y) * z
        function = functor.trace(f, (np.dtype(dtype),) * 4, name="edge_sum")[0]
        self.index = index_of(kind, edges, rows, index)
        self.other_index = index_of("uniform", edges, nodes, index, seed=2) if self.other.stride == 0 else None
        self.x = rng.integers(-9, 10, arrays[0]).astype(dtype) if onto else None
        self.named = [self.x, self.index, self.other_index, *self.arrays]
        self.operands = [a for a in self.named if a is not None]
        self.params = dict(wrap=False, clip=False) | params
        self.params |= dict(function=function, ends=ENDS, rows=rows, other=self.other, dtype=np.dtype(dtype))

    def exact(self):
        """By NumPy."""
        x, y, z, w = (a.astype(np.float64) for a in self.arrays)
        at = lambda index, n: np.where((index < 0) & np.array(n[1]), index + n[0], index).astype(np.int64)
        index, other_index = self.index, self.other_index
        row = at(index.astype(np.int64), (len(x), self.params["wrap"]))
        row = row.clip(0, len(x) - 1) if self.params["clip"] else row
        if self.other.stride:
            other = np.arange(len(index)) // self.other.stride % self.other.nodes
        else:
            other = at(other_index.astype(np.int64), (len(y), self.other.wrap)).clip(0, len(y) - 1)
        kept = (row >= 0) & (row < len(x))
        out = np.zeros(x.shape) if self.x is None else self.x.astype(np.float64)
        np.add.at(out, row[kept], (w + (x[row[kept]] - y[other[kept]]) * z[kept]))
        return out

    def plan(self, layout=None):
        avals = [None if x is None else jax.typeof(jnp.asarray(x)) for x in self.named]
        x = self.arrays[0]
        found = scatter_plan.scatter_plan(
            device.H200, avals, [jax.core.ShapedArray(x.shape, x.dtype)], layout=layout, **self.params
        )
        check_limits(found, device.H200)
        return found

    def check(self, y):
        np.testing.assert_array_equal(np.asarray(y).astype(np.float64), self.exact())


CASES = {
    "uniform": dict(),
    "few rows, which every block sums": dict(rows=9, edges=1500),
    "hot rows": dict(kind="zipf", edges=4000),
    "runs of equal rows": dict(kind="runs"),
    "one row for most": dict(kind="same"),
    "no row": dict(kind="outside"),
    "one number": dict(shape=(), kind="zipf"),
    "two": dict(shape=(2,), kind="runs"),
    "four": dict(shape=(4,)),
    "five": dict(shape=(5,), kind="same"),
    "eight": dict(shape=(2, 4), kind="zipf"),
    "fifteen": dict(shape=(15,)),
    "few edges": dict(edges=5),
    "edges of one block, and one more": dict(edges=1025),
    "negative rows count from the end": dict(wrap=True, kind="zipf"),
    "rows are clipped": dict(clip=True),
    "bytes": dict(index="int8", rows=100, wrap=True),
    "unsigned": dict(index="uint16"),
    "long": dict(index="int64", wrap=True),
    "repeated nodes": dict(other=Other(20, 15)),
    "onto an array": dict(onto=True, kind="zipf"),
    "float64": dict(dtype="float64", shape=(3,), kind="zipf"),
}


@pytest.mark.parametrize("case", CASES)
def test_sums(case):
    """By the primitive: the kernels on a GPU, the reference elsewhere."""
    with jax.enable_x64("64" in str(CASES[case].values()) or "long" in case):
        p = Problem(**CASES[case])
        p.check(jax.jit(functools.partial(scatter.edge_scatter, **p.params))(p.x, p.index, p.other_index, p.arrays))


# Each takes a second of a C++ compiler.
EMULATED = (
    "few rows, which every block sums",
    "hot rows",
    "runs of equal rows",
    "one row for most",
    "four",
    "eight",
    "edges of one block, and one more",
    "negative rows count from the end",
    "repeated nodes",
)


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("case", EMULATED)
def test_kernels(case):
    """The kernels on the CPU. Where rows are vectors, also for addresses that are not aligned."""
    p = Problem(**CASES[case])
    found = p.plan()
    results = [(p.arrays[0].shape, p.params["dtype"])]
    p.check(emulated.run(found, p.operands, results)[0])
    if found.unaligned is not None:
        p.check(emulated.run(found, p.operands, results, unaligned=True)[0])


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "case", ["few rows, which every block sums", "hot rows", "runs of equal rows", "onto an array"]
)
def test_special_values(case):
    """NaN and infinities reach the rows of their edges alone, in whatever place rows are summed; other rows keep -0.0."""
    p = Problem(**CASES[case])
    results, aliases = [(p.arrays[0].shape, p.params["dtype"])], [(0, 0)] if p.x is not None else []
    of_edges, rng = p.arrays[2], np.random.default_rng(3)
    for value in (np.nan, np.inf, -np.inf):
        of_edges[rng.integers(len(of_edges), size=8)] = value
    if p.x is not None:
        p.x[rng.random(len(p.x)) < 0.2] = rng.choice([-0.0, np.nan, -np.inf], p.x.shape[1:])
    found = p.plan()
    with np.errstate(invalid="ignore"):
        exact = p.exact()
    for unaligned in (False, True):
        (y,) = emulated.run(found, p.operands, results, unaligned, aliases=aliases)
        np.testing.assert_array_equal(y.astype(np.float64), exact)
        alone = np.setdiff1d(np.arange(len(y)), p.operands[int(p.x is not None)])
        assert p.x is None or np.array_equal(np.signbit(y[alone]), np.signbit(p.x[alone]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("broadcast", [False, True])
def test_rows_without_updates_stay(broadcast, deterministic, dtype):
    """The sign of a zero and what is not finite, also where the messages have fewer features than the rows."""
    x = jnp.asarray([[-0.0, jnp.nan], [-jnp.inf, -0.0], [1, -0.0], [0, -0.0]], dtype)
    index, u = jnp.array([2, -9, 9, 2]), jnp.ones((4, 2), dtype)

    @jax.jit
    def f(x, index, u):
        u = jnp.tanh(u[index % 4])
        return x.at[index].add(jnp.broadcast_to(u[:, :1], u.shape) if broadcast else u)

    plain = f(x, index, u)
    with jaxkern.accelerate(force=True, deterministic=deterministic):
        own = f(x, index, u)
        (taken,) = jaxkern.explain(f, PLATFORM)(x, index, u).taken
    assert ("in no fixed order" in taken.reason) != deterministic
    np.testing.assert_allclose(own, plain, rtol=1e-6 if dtype == "float32" else 2**-7)
    np.testing.assert_array_equal(np.signbit(own), np.signbit(plain))


@pytest.mark.skipif(registry.kernels.module is None, reason="no runtime")
def test_rows_that_are_read_are_not_updated_in_place():
    """x.at[r].add(x[s] * w): x is an operand twice, and shares the memory of the result once. XLA copies x, then."""
    types = [jax.ShapeDtypeStruct(s, t) for s, t in (((9, 3), "float32"), ((40,), "int32"), ((40, 3), "float32"))]
    f = lambda x, i, w: jnp.sin(x).at[i].add(jnp.sin(x)[i[::-1]] * w)
    with jaxkern.accelerate(force=True):
        text = jax.jit(f, donate_argnums=0).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "custom_call @jaxkern_edge_scatter" in line]
    assert len(re.findall(r"operand_index = (\d+)", call)) == 1 and "operand_index = 0" in call
    name = "jaxkern_test_of_aliases"
    jax.ffi.register_ffi_target(name, registry.kernels.module.cpu_handler(), platform="cpu")

    def again(x, i, w):
        y = jnp.sin(x)
        return jax.ffi.ffi_call(name, types[0], input_output_aliases={0: 0})(y, i, i, y, w)

    with jax.default_device(jax.devices("cpu")[0]):
        text = jax.jit(again, donate_argnums=0).lower(types[0], types[1], types[2]).compile().as_text()
    (operands,) = re.findall(r"custom-call\((.*?)\), custom_call_target", text)
    operands = operands.split(", ")
    assert operands[0] != operands[3] and "output_to_operand_aliasing={{}: (0, {})}" in text


def pulled(springs, strength, places):
    """Forces of springs on their ends, by the rows of an array [2, springs]."""
    s, r = springs
    return jnp.zeros_like(places).at[r].add((places[s] - places[r]) * strength[1, :, None])


def in_loop(springs, strength, places):
    return jax.lax.fori_loop(0, 3, lambda _, x: pulled(springs, strength, x), places)


@pytest.mark.skipif(registry.kernels.module is None, reason="no runtime")
@pytest.mark.parametrize("f", [pulled, jax.jit(pulled), in_loop])
def test_slices_are_read_where_they_are(f, monkeypatch):
    """XLA copies slices for a custom call, unless their bytes are a multiple of 256. Kernels get the whole arrays."""
    rng, n, rows = np.random.default_rng(0), 1501, 300
    springs = rng.integers(-3, rows + 3, (2, n)).astype(np.int32)
    strength, places = (rng.integers(-4, 5, s).astype(np.float32) for s in ((2, n), (rows, 3)))
    args, lists = (springs, strength, places), []
    text = launch.text
    monkeypatch.setattr(launch, "text", lambda *given: lists.append(given) or text(*given))
    with jaxkern.accelerate(force=True):
        module = jax.jit(lambda *args: f(*args)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in module.splitlines() if "custom_call @jaxkern_edge_scatter" in line]
    types = re.findall(r"tensor<(\w+)>", call.rsplit(" : (", 1)[1].split(") -> ")[0])
    assert types.count(f"2x{n}xi32") == 2 and types.count(f"2x{n}xf32") == 1 and f"{n}xi32" not in types
    ((_, plan, operands, results),) = lists
    assert registry.kernels.module.check(text(*lists[0])) == ""
    if emulated.COMPILER is not None:
        named = {a.shape + (a.dtype.name,): a for a in args}
        given = [named[a.shape + (a.dtype.name,)] for a in operands]
        (y,) = emulated.run(plan, given, [(a.shape, a.dtype) for a in results])
        np.testing.assert_array_equal(y, pulled(jnp.asarray(springs), strength, jnp.asarray(places)))


def test_what_is_computed_is_cut_before():
    """A slice of an array that the program computes may be all of it that XLA computes."""
    types = [
        jax.ShapeDtypeStruct(s, t) for s, t in (((2, 1501), "int32"), ((2, 1501), "float32"), ((300, 3), "float32"))
    ]
    with jaxkern.accelerate(force=True):
        f = jax.jit(lambda i, w, x: pulled(i % 7, w, x))
        module = f.trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in module.splitlines() if "custom_call @jaxkern_edge_scatter" in line]
    assert "tensor<2x1501xi32>" not in call
