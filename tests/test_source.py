"""source and benchmark: the kernels of a function, and its times."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern._core import algorithms, cubin, launch, registry, runtime, timing
from jaxkern.benchmark import Benchmark

MODULE = registry.kernels.module
needs_kernels = pytest.mark.skipif(MODULE is None, reason=registry.kernels.reason)
needs_compiler = pytest.mark.skipif(MODULE is None or bool(MODULE.compiler()[1]), reason="NVRTC is not installed")
X = jax.ShapeDtypeStruct((8, 512), jnp.float32)
GRAPH = jaxkern.Graph(jnp.array([0, 1, 2]), jnp.array([1, 1, 0]), num_nodes=3)

# A function, and its operation. The generated source of each computes a hyperbolic tangent.
FUNCTIONS = {
    "elementwise_kernel": (lambda x: jaxkern.elementwise_kernel(lambda x: jnp.tanh(x) * 2)(x), "elementwise_kernel"),
    "row_kernel": (lambda x: jaxkern.row_kernel(lambda x: jnp.tanh(x) / x.sum(-1, keepdims=True))(x), "row_kernel"),
    "messages": (lambda x: jaxkern.edge_sum(jnp.tanh, GRAPH, senders=x[:3]), "edge_reduce"),
    "scan": (lambda x: jaxkern.scan(lambda c, x: (c + jnp.tanh(x), c), jnp.zeros(512), x), "scan"),
    "while_loop": (lambda x: jaxkern.while_loop(lambda x: x < 1, lambda x: x + jnp.tanh(x), x), "while_loop"),
    "score": (lambda x: jaxkern.softmax(x, score=lambda s, q, k: jnp.tanh(s)), "softmax"),
}


@needs_kernels
@pytest.mark.parametrize("name", FUNCTIONS)
def test_generated_source(name, monkeypatch):
    """The records are the launches of the lowered program, and the source is the source that is compiled."""
    monkeypatch.setattr(runtime, "problem", lambda *_: "no compiler")
    f, operation = FUNCTIONS[name]
    found = jaxkern.source(f)(X)
    text = jax.jit(f).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    wanted = {s.name: s for p in launch.programs(text) for s in launch.variants(p)[0]}
    assert [k.kernel for k in found] == list(wanted) and len(found) > 0
    for kernel in found:
        step = wanted[kernel.kernel]
        assert (kernel.header, kernel.source) == (step.header, step.source)
        assert (kernel.grid, kernel.block, kernel.shared) == (step.grid3(), step.block3(), step.shared)
        assert kernel.registers is None and "not compiled: no compiler" in str(kernel)
    assert any(k.operation.startswith(operation) and "lax::tanh" in k.source for k in found)
    assert "lax::tanh" in str(found) and found[0].kernel in str(found)


@needs_kernels
def test_equal_kernels_are_one_record(monkeypatch):
    monkeypatch.setattr(runtime, "problem", lambda *_: "no compiler")
    square = jaxkern.elementwise_kernel(lambda x: x * x)
    found = jaxkern.source(lambda tree: [square(tree["x"]), square(tree["x"] + tree["n"]), square(tree["x"][:4])])(
        {"x": X, "n": 3}
    )
    assert [k.operation.count("[8,512]") for k in found] == [2, 0]
    assert found[0].source == found[1].source and str(found).count("struct Function") == 1


def test_nothing_of_jaxkern():
    found = jaxkern.source(jnp.sin)(X)
    assert len(found) == 0 and "no kernels of jaxkern: " in str(found)


@needs_kernels
def test_reason_without_kernels(monkeypatch):
    monkeypatch.setenv("JAXKERN_BACKEND", "xla")
    assert str(jaxkern.source(jaxkern.softmax)(X)) == "no kernels of jaxkern: JAXKERN_BACKEND=xla"


@needs_compiler
@pytest.mark.parametrize("width, dtype", [(512, jnp.float32), (333, jnp.bfloat16)])
def test_usage_is_what_the_compiler_says(width, dtype):
    """Nothing is in local memory, also where rows of 16 bits begin anywhere in the vectors of their columns of 32 bits."""
    f = jaxkern.row_kernel(lambda x, w: (x * w / jnp.sum(x.astype(w.dtype), -1, keepdims=True)).astype(x.dtype))
    (kernel,) = jaxkern.source(f)(jax.ShapeDtypeStruct((64, width), dtype), jax.ShapeDtypeStruct((width,), jnp.float32))
    assert 8 <= kernel.registers <= 255 and kernel.stack == kernel.spills == 0 and not kernel.problem
    assert f"registers {kernel.registers}, stack 0 bytes, spills 0" in str(kernel)


# Kernels, with bounds of their shared memory and stack in bytes.
PLAIN = "p[n] = 1;"
SHARED = "__shared__ float s[100]; s[threadIdx.x] = p[threadIdx.x]; __syncthreads(); p[n] = s[n];"
LOCAL = "float a[80]; for (int i = 0; i < 80; ++i) a[(i * 7 + n) % 80] = p[i]; p[0] = a[n];"


@needs_compiler
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("body", "shared", "stack"), [(PLAIN, 0, 0), (SHARED, 400, 0), (LOCAL, 0, 320)])
def test_usage(body, shared, stack, capability):
    code = f"__global__ void K(float* p, int n) {{ {body} }}"
    image, _, _ = MODULE.compile("common/pack.cuh", "K", capability, code)
    used = cubin.usage(image, capability)
    assert (used.shared, used.stack, used.local > 0) == (shared, stack, stack > 0) and used.registers > 0


@needs_compiler
def test_a_kernel_that_does_not_compile_is_shown(monkeypatch):
    """The generated source helps then most."""
    f = jaxkern.elementwise_kernel(lambda x: x * 3)
    compile = MODULE.compile
    broken = types.SimpleNamespace(compile=lambda h, n, c, s: compile(h, n, c, s + "?"), prefetch=lambda *_: None)
    monkeypatch.setattr(runtime, "problem", lambda *_: "")
    monkeypatch.setattr(registry, "kernels", registry.Module(broken))
    (kernel,) = jaxkern.source(f)(X)
    assert "error" in kernel.problem and kernel.registers is None and "struct Function" in str(kernel)


# ---- benchmark


def test_benchmark():
    """Trees, random operands of every kind, arguments that are no arrays, and donated operands."""
    kinds = ("float32", "bfloat16", "float8_e4m3fn", "int8", "uint8", "int32", "bool", "complex64")
    tree = {kind: jax.ShapeDtypeStruct((16,), kind) for kind in kinds} | {"key": jax.random.key(0)}
    seen = []

    def f(tree, x, name):
        seen.append((algorithms.xla_forced(), name, x.shape))
        return tree, tree["float32"] * 2 + x

    x = np.ones(16, np.float32)
    found = jaxkern.benchmark(jax.jit(f, static_argnums=2, donate_argnums=0), tree, x, "name", repeats=2)
    assert seen == [(False, "name", (16,)), (True, "name", (16,))]
    assert found.bytes == 2 * 16 * (4 + 2 + 1 + 1 + 1 + 4 + 1 + 8) + 2 * 8 + 2 * 16 * 4
    assert min(found.us, found.xla_us, found.copy_us, found.enqueue_us) > 0
    assert found.of_copy == found.copy_us / found.us and found.over_xla == found.xla_us / found.us
    assert re.match(r"[\d.e+]+ us, [\d.e+]+ times as fast as XLA .* of a copy of .* MB ", str(found))


def test_readings_wait_for_results():
    class Result:
        ready = False

        def block_until_ready(self):
            self.ready = True
            return self

    results = []
    timing.Candidate(lambda: results.append(Result()) or results[-1], [()]).read()
    assert results[-1].ready and sum(r.ready for r in results) == 3  # two readings before, and no wait between calls


def test_benchmark_says_where_the_host_is_the_limit():
    at = lambda us: str(Benchmark(us, 20.0, 10.0, 1000, 10.0, "NVIDIA H200"))
    assert "bounds the times" in at(11.0) and "bounds the times" not in at(40.0)


@pytest.mark.parametrize("repeats", [0, -1])
def test_benchmark_of_no_readings(repeats):
    with pytest.raises(ValueError, match=r"jaxkern\.benchmark: repeats must be positive"):
        jaxkern.benchmark(jnp.sin, X, repeats=repeats)


def test_benchmark_while_tracing():
    with pytest.raises(TypeError, match=r"jaxkern\.benchmark: args must be arrays, got traced ones"):
        jax.jit(lambda x: jaxkern.benchmark(jnp.sin, x).us)(1.0 + jnp.zeros(3))
