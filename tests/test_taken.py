"""Each row of the table of what `jaxkern.accelerate` takes, in a process that has imported what the row needs and no more.

A process starts once for all rows: it imports JAX and jaxkern and forks for each import, so that no import sees another's.
"""

import json
import re
import subprocess
import sys

import pytest
from conftest import ON_GPU

from jaxkern._core import registry, switch

# {import: {what it is, as the table names it: (operation, code that makes f and its arguments)}}
SHAPES = """
big, rows, half = spec((8192, 4096)), spec((4096, 1024)), spec((8192, 1024), jnp.bfloat16)
table, ids, updates = spec((50000, 128), jnp.bfloat16), spec((60000,), jnp.int32), spec((60000, 128), jnp.bfloat16)
many = spec((1 << 22,), jnp.int32)
square = lambda f: jax.grad(lambda *a: jnp.square(f(*a)).sum().astype(jnp.float32))
"""

SELECTIONS = ("top_k", "approx_max_k", "approx_min_k")
ROWS = {
    "pass": {
        "jax.nn.logsumexp": ("logsumexp", "f, arguments = lambda x: jax.nn.logsumexp(x, 1), (big,)"),
        "x.at[ids].add": ("scatter_add", "f, arguments = lambda t, i, u: t.at[i].add(u), (table, ids, updates)"),
        "jax.ops.segment_sum": (
            "scatter_add",
            "f, arguments = lambda u, i: jax.ops.segment_sum(u, i, 50000), (updates, ids)",
        ),
        "x[ids]": ("scatter_add", "f, arguments = square(lambda t, i: t[i]), (table, ids)"),
        "jnp.take": ("scatter_add", "f, arguments = square(lambda t, i: jnp.take(t, i, axis=0)), (table, ids)"),
        "x.at[ids].max": ("scatter_max", "f, arguments = lambda t, i, u: t.at[i].max(u), (table, ids, updates)"),
        "jax.ops.segment_max": (
            "scatter_max",
            "f, arguments = lambda u, i: jax.ops.segment_max(u, i, 50000), (updates, ids)",
        ),
        "x.at[ids].min": ("scatter_min", "f, arguments = lambda t, i, u: t.at[i].min(u), (table, ids, updates)"),
        "jax.ops.segment_min": (
            "scatter_min",
            "f, arguments = lambda u, i: jax.ops.segment_min(u, i, 50000), (updates, ids)",
        ),
        "jax.lax.scan": (
            "scan",
            "f, arguments = square(lambda x: jax.lax.scan(lambda h, x: (0.9 * h + x,) * 2, x[0], x)[1]), (big,)",
        ),
        "jax.lax.fori_loop": (
            "scan",
            "f, arguments = lambda x: jax.lax.fori_loop(0, 100, lambda i, x: x - 0.1 * jnp.sin(x), x), (big,)",
        ),
        "jax.lax.map": ("scan", "f, arguments = lambda x: jax.lax.map(jnp.sin, x), (big,)"),
        "jnp.mean": (
            "rows",
            "norm = lambda x: x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)\n"
            "f, arguments = (lambda x, s: (norm(x + s), x + s)), (big, big)",
        ),
        "jnp.sum": (
            "rows",
            "f = lambda x, y: jax.vjp(lambda x, s: s * x / jnp.sum(x, -1, keepdims=True), x, x[0])[1](y)\n"
            "arguments = (big, big)",
        ),
        "jnp.max": (
            "rows",
            "f, arguments = lambda x, y: (jnp.exp(x + y - jnp.max(x + y, -1, keepdims=True)), x + y), (big, big)",
        ),
        "jax.vmap": (
            "while_loop",
            "root = lambda a: jax.lax.while_loop(lambda x: x * x - a > 1e-3, lambda x: (x + a / x) / 2, a)\n"
            "f, arguments = jax.vmap(jax.vmap(root)), (big,)",
        ),
        "jnp.any": (
            "while_loop",
            "body = lambda x: jnp.where(x > 1, x / 2, x)\n"
            "f, arguments = lambda x: jax.lax.while_loop(lambda x: jnp.any(x > 1), body, x), (big,)",
        ),
        "jax.lax.while_loop": (
            "scan",
            "body = lambda s: (s[0] + 1, jnp.cos(s[1]))\n"
            "f, arguments = lambda x: jax.lax.while_loop(lambda s: s[0] < 100, body, (0, x))[1], (big,)",
        ),
        "jax.lax.associative_scan": (
            "associative_scan",
            "join = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])\n"
            "f, arguments = lambda x: jax.lax.associative_scan(join, (x, x))[1], (big,)",
        ),
        "jnp.cumsum": ("cumsum", "f, arguments = lambda x: jnp.cumsum(x, 1), (big,)"),
        "jnp.cumprod": ("cumprod", "f, arguments = lambda x: jnp.cumprod(x, 1), (big,)"),
        **{
            f"jax.lax.{name}": (name, f"f, arguments = lambda x: jax.lax.{name}(x, 1, reverse=True), (big,)")
            for name in switch.CUMULATIVE
        },
        **{f"jax.lax.{n}": ("top_k", f"f, arguments = lambda x: jax.lax.{n}(x, 8), (big,)") for n in SELECTIONS},
        **{
            f"jnp.{n}": ("sort", f"f, arguments = lambda x: jnp.{n}(x, axis=1), (rows,)")
            for n in ("sort", "argsort", "median")
        },
        "jnp.percentile": ("sort", "f, arguments = lambda x: jnp.percentile(x, 98, axis=1), (big,)"),
        "jax.lax.sort": ("sort", "f, arguments = lambda x: jax.lax.sort([x, x * x], num_keys=1), (rows,)"),
        "jnp.searchsorted": ("searchsorted", "f, arguments = lambda x: jnp.searchsorted(x[0], x), (big,)"),
        "jnp.digitize": ("searchsorted", "f, arguments = lambda x: jnp.digitize(x, x[0]), (big,)"),
        "jnp.bincount": ("bincount", "f, arguments = lambda i: jnp.bincount(i, length=64), (many,)"),
        "jnp.histogram": ("bincount", "f, arguments = lambda x: jnp.histogram(x, 64), (rows,)"),
        "jax.lax.ragged_dot": (
            "ragged_dot",
            "f, arguments = square(jax.lax.ragged_dot), (half, spec((8, 1024, 512), jnp.bfloat16), spec((8,), jnp.int32))",
        ),
        "jax.nn.softmax": (
            "softmax",
            "f, arguments = jax.grad(lambda x, v: jnp.square(jax.nn.softmax(x) @ v).sum()), (rows, spec((1024, 64)))",
        ),
        "jax.nn.log_softmax": (
            "log_softmax",
            "f = lambda x, g: jax.vjp(jax.nn.log_softmax, x)[1](g)\narguments = (half, half)",
        ),
        "jax.nn.dot_product_attention": (
            "dot_product_attention",
            "f, arguments = jax.nn.dot_product_attention, (spec((4, 1024, 8, 64), jnp.bfloat16),) * 3",
        ),
    },
    "import jax.scipy.special": {
        "jax.scipy.special.logsumexp": (
            "logsumexp",
            "f, arguments = lambda x: jax.scipy.special.logsumexp(x, 1), (big,)",
        )
    },
    "import optax": {
        "optax.softmax_cross_entropy_with_integer_labels": (
            "softmax_cross_entropy",
            "f, arguments = optax.softmax_cross_entropy_with_integer_labels, (big, spec((8192,), jnp.int32))",
        )
    },
    "import flax.linen as linen": {
        "flax.linen.Embed": (
            "scatter_add",
            "module = linen.Embed(50000, 128, param_dtype=jnp.bfloat16)\n"
            "f = square(lambda t, i: module.apply({'params': {'embedding': t}}, i))\narguments = (table, ids)",
        ),
    },
    "import jraph": {
        "jraph": (
            "scatter_add",
            "graph = lambda x, i: jraph.GraphsTuple(x, None, i, i, None, jnp.array([50000]), jnp.array([60000]))\n"
            "f = lambda x, i: jraph.GraphConvolution(lambda x: x)(graph(x, i)).nodes\narguments = (table, ids)",
        )
    },
}

CHILD = """
import importlib.util, json, os, sys, traceback
import jax, jax.numpy as jnp, jaxkern
from jaxkern._accelerate import gate
from jaxkern._core import compat
compat.jaxlib = lambda: tuple(map(int, gate.JAXLIB.split(".")))  # what is taken does not depend on this process's
spec = lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
shapes, imports = json.load(sys.stdin)
exec(shapes)

def taken(operation, code):
    scope = dict(globals())
    exec(code, scope)
    # Rows take what functions by name are part of.
    with jaxkern.accelerate(only=jaxkern.installed(), without=() if operation == "rows" else "rows"):
        found = jaxkern.explain(scope["f"])(*scope["arguments"])
    return [d.taken for d in found if d.operation == operation]

def outcome(imported, of_import):
    package = imported.split()[1].split(".")[0] if imported != "pass" else "jax"
    if importlib.util.find_spec(package) is None:
        return {what: "absent" for what in of_import}
    found = {}
    jaxkern.install(only={operation for operation, _ in of_import.values()})
    exec(imported, globals())  # after install
    for what, (operation, code) in of_import.items():
        found[what] = [taken(operation, code)]
    if imported == "pass":
        found["imported"] = "jax.scipy.special" in sys.modules
        return found
    jaxkern.uninstall()
    jaxkern.install(only={operation for operation, _ in of_import.values()})  # after the import
    for what, (operation, code) in of_import.items():
        found[what].append(taken(operation, code))
    return found

for imported, of_import in imports.items():
    pipe, write = os.pipe()
    if os.fork() == 0:
        try:
            result = outcome(imported, of_import)
        except BaseException:
            result = {what: traceback.format_exc() for what in of_import}
        os.write(write, json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(pipe) as file:
        print(file.read(), flush=True)
    os.wait()
"""


@pytest.fixture(scope="module")
def found():
    """{what: [decisions if imported after install, decisions if imported before]}; without an import one list of decisions"""
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps([SHAPES, ROWS]), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    return found


@pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
@pytest.mark.skipif(ON_GPU, reason="forks")
@pytest.mark.parametrize("what", [what for rows in ROWS.values() for what in rows])
def test_a_row_is_taken(what, found):
    if found[what] == "absent":
        pytest.skip("its package is not installed")
    for decisions in found[what]:
        assert any(decisions), found[what]
    assert not found["imported"]  # jax.nn.logsumexp, without the other module


def test_every_row_is_tested():
    """All that the table names in code."""
    tested = {what: operation for rows in ROWS.values() for what, (operation, _) in rows.items()}
    for operation, text in switch.TAKEN.items():
        for name in re.findall("`([^`]+)`", text):
            assert tested[name] == operation
    assert set(tested.values()) == set(switch.OPERATIONS)
