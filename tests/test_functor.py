"""User functions as C++ functors: every primitive, compiled for the host and for GPUs, against jnp."""

import ctypes
import functools
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkern
from jaxkern._core import compat, cpp, functor, launch, registry, runtime
from jaxkern._core.dtypes import computing
from jaxkern._core.lowest import where_lowest

FLOATS = ("float32", "float64", "float16", "bfloat16")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTEGERS = SIGNED + UNSIGNED
QUICK = {"xla_backend_optimization_level": 0}
ALL = (*FLOATS, *INTEGERS, "bool")
HALVES = ("float16", "bfloat16")


class Case:
    """A function over one primitive.

    ulps: how far its result may be from XLA's, of the result, or of `scale` if that is larger; None: not at all, in the
        sign of 0 neither.
    domain: the largest operand.
    bits: the bits of the 16-bit operand, computed from the result; for a NaN the bits of any NaN are right.
    """

    def __init__(self, name, f, arity, dtypes, ulps=None, domain=None, scale=0, bits=None):
        self.scale, self.bits = scale, bits
        self.name, self.f, self.arity, self.dtypes, self.ulps, self.domain = name, f, arity, dtypes, ulps, domain


def _unary(names, dtypes, ulps=None, domain=None, scale=0):
    return [Case(name, getattr(lax, name), 1, dtypes, ulps, domain, scale) for name in names.split()]


def _binary(names, dtypes, ulps=None):
    return [Case(name, getattr(lax, name), 2, dtypes, ulps) for name in names.split()]


def _convert(x, to):
    return lax.convert_element_type(x, to)


CASES = [
    *_unary("neg sign square", (*FLOATS, *INTEGERS)),
    *_unary("abs", (*FLOATS, *SIGNED)),
    *_unary("floor ceil is_finite sqrt", FLOATS),
    *_unary("exp expm1 log log1p tanh logistic rsqrt cbrt tan atan asinh sinh cosh erf erfc", FLOATS, 64),
    *_unary("exp2", FLOATS, 512),
    *_unary("sin cos", FLOATS, 64, 1e4),
    *_unary("asin acos atanh", FLOATS, 64),
    *_unary("erf_inv", FLOATS, 2**12),
    *_unary("acosh", FLOATS, 256),
    *_unary("lgamma", FLOATS, 2**12, 1e4, 2**-10),
    # At 0, versions of JAX differ.
    Case("digamma", lambda x: lax.digamma(jnp.where(x == 0, 1, x)), 1, FLOATS, 2**12, 1e4, 2**-10),
    *_unary("bessel_i0e bessel_i1e", FLOATS, 2**8),
    *_unary("population_count clz", INTEGERS),
    *_unary("bitwise_not", (*INTEGERS, "bool")),
    *_binary("add sub mul", (*FLOATS, *INTEGERS)),
    *_binary("div", (*FLOATS, *INTEGERS)),
    *_binary("rem", INTEGERS),
    *_binary("rem", FLOATS, 64),
    *_binary("max min eq ne lt le gt ge", ALL),
    *_binary("atan2", FLOATS, 64),
    *_binary("pow", FLOATS, 256),
    *_binary("nextafter", FLOATS),
    *_binary("bitwise_and bitwise_or bitwise_xor", (*INTEGERS, "bool")),
    *_binary("shift_left shift_right_logical shift_right_arithmetic", INTEGERS),
    *[
        Case(f"integer_pow_{y}", functools.partial(lambda x, y: lax.integer_pow(x, y), y=y), 1, dtypes, ulps)
        for y, dtypes, ulps in ((2, (*FLOATS, *INTEGERS), None), (5, FLOATS, 8), (-3, FLOATS, 8), (7, INTEGERS, None))
    ],
    Case("round", lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO), 1, FLOATS),
    Case("round_to_even", lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), 1, FLOATS),
    Case("pow_integer", lambda x: lax.pow(x.astype(jnp.float32), jnp.int32(-3)) + lax.pow(2.0, x), 1, ("int32",), 256),
    Case("log2", jnp.log2, 1, FLOATS, 64),
    *([Case("one_minus_square", lax.one_minus_square, 1, FLOATS, 8)] if hasattr(lax, "one_minus_square") else []),
    Case("clamp", lax.clamp, 3, ("float32", "float64", "int8", "uint32")),
    Case("select", lambda x, y: lax.select(x > y, x, y), 2, ALL[:-1]),
    Case("select_3", lambda x: lax.select_n(jnp.clip(x, 0, 2), x, x * 2, x * 3), 1, ("int32",)),
    Case("cond", lambda x, y: lax.cond(x > y, lambda: x - y, lambda: jnp.sin(x) * 0 + y), 2, ("float32",)),
    Case("switch", lambda x: lax.switch(x, [lambda y: y, lambda y: -y, lambda y: y * y], x), 1, ("int32",)),
    Case("reduce_precision", lambda x: lax.reduce_precision(x, 5, 7), 1, ("float32", "float64")),
    Case("constants", lambda x: x + jnp.where(x > 0, -jnp.inf, 0.1) + jnp.where(x < -1, jnp.nan, 3), 1, FLOATS[:2]),
    Case("integers", lambda x: x ^ jnp.iinfo(x.dtype).min, 1, SIGNED),
    Case("silu", jax.nn.silu, 1, FLOATS, 64),
    Case("logaddexp", jnp.logaddexp, 2, FLOATS[:2], 64),
    Case("dot", lambda x, y: jnp.dot(x, y), 2, ("float32", "int32")),
    Case("reductions", lambda x: jnp.where(jnp.all(x > 0) | jnp.any(x < -1), jnp.prod(x), jnp.sum(x) * 2), 1, FLOATS),
    Case("remat", jax.checkpoint(lambda x: jnp.where(x > 1, x * x, x)), 1, FLOATS),
    Case("rounded", lambda x: x.astype(jnp.bfloat16) * jnp.bfloat16(1.1), 1, ("float32", "bfloat16")),
    Case("half", lambda x: x.astype(jnp.float16) + jnp.float16(0.1), 1, ("float32", "float16")),
    Case("bits", lambda x: lax.bitcast_convert_type(x, jnp.int32) ^ 5, 1, ("float32",)),
    Case("bits_16", lambda x: lax.bitcast_convert_type(x, jnp.uint16) ^ 5, 1, HALVES, bits=lambda y: y ^ 5),
    Case("bits_64", lambda x: lax.bitcast_convert_type(x, jnp.uint64) + 3, 1, ("float64",)),
    Case("from_bits", lambda x: lax.bitcast_convert_type(x & 0x7F7F, jnp.bfloat16), 1, ("uint16",)),
    Case("to_bits", lambda x: lax.bitcast_convert_type(x.astype(jnp.float16), jnp.int16), 1, ("int8",)),
    *[Case(f"to_{to}", functools.partial(_convert, to=to), 1, ALL, 1 if to == "float16" else None) for to in ALL],
]
FUNCTIONS = [(case, dtype) for case in CASES for dtype in case.dtypes]


def values(dtype, domain=None):
    """Special values of a dtype, extremes, and some between."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return np.array([False, True])
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        near = [v for v in (*range(-4, 6), 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100) if v >= info.min]
        return np.array([info.min, info.min + 1, info.max // 3, info.max - 1, info.max, *near], dtype)
    info = jnp.finfo(dtype)
    x = [0.0, 0.1, 0.5, 0.9, 1.0, 1.5, 2.0, 2.5, 3.0, 6.1, 7.0, 9.3, 20.5, 88.0, 127.5, 300.0, 1000.0, 65504.0]
    x += [3e9, 2.0**31, 2.0**63, 1e30, float(info.max), float(info.tiny), 1e-5, 1e-3]
    x = [v for v in x if v <= float(info.max) and (domain is None or v <= domain)]
    inf = [] if domain else [np.inf]
    return np.array([*x, *(-v for v in x), np.nan, *inf, *(-v for v in inf)], dtype)


def operands(case, dtype):
    v = values(dtype, case.domain)
    return [g.ravel() for g in np.meshgrid(*[v[:: max(1, case.arity - 1)]] * case.arity, indexing="ij")]


@functools.cache
def traced(k):
    case, dtype = FUNCTIONS[k]
    with compat.enable_x64():
        return functor.trace(case.f, [jnp.dtype(dtype)] * case.arity, name="test")[0]


def loop(k):
    """A C function that applies function k to arrays of computing types."""
    f = traced(k)
    types = [cpp.cpp_type(computing(d)) for d in (*f.in_dtypes, *f.out_dtypes)]
    n = len(f.in_dtypes)
    arguments = [f"static_cast<{'const ' * (i < n)}{t}*>(p[{i}])[i]" for i, t in enumerate(types)]
    return (
        f'extern "C" void run{k}(void** p, long n) {{ for (long i = 0; i < n; ++i) '
        f"jaxkern::Function{k}()({', '.join(arguments)}); }}\n"
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functor")
    structs = "".join(traced(k).source(f"Function{k}") for k in range(len(FUNCTIONS)))
    loops = "".join(map(loop, range(len(FUNCTIONS))))
    (folder / "all.cc").write_text(f'#include "{cpp.HEADER}"\nnamespace jaxkern {{\n{structs}}}\n{loops}')
    command = ["g++", "-std=c++17", "-O0", "-ffp-contract=off", "-shared", "-fPIC", f"-I{runtime.kernels_folder()}"]
    subprocess.run([*command, "-o", folder / "all.so", folder / "all.cc"], check=True)
    return ctypes.CDLL(folder / "all.so")


@functools.cache
def expected():
    """The results of all cases in jnp, from one program."""

    def run(arrays):
        return [traced(k)(*xs)[0] for k, xs in enumerate(arrays)]

    arrays = [operands(*case) for case in FUNCTIONS]
    with compat.enable_x64(), jax.default_device(jax.devices("cpu")[0]):
        return [np.asarray(y) for y in jax.jit(run, compiler_options=QUICK)(arrays)]


@pytest.mark.parametrize("k", range(len(FUNCTIONS)), ids=lambda k: f"{FUNCTIONS[k][0].name}-{FUNCTIONS[k][1]}")
def test_primitives_on_the_host(library, k):
    case, dtype = FUNCTIONS[k]
    f, xs, wanted = traced(k), operands(case, dtype), expected()[k]
    out = f.out_dtypes[0]
    wide = [np.ascontiguousarray(x.astype(computing(x.dtype))) for x in xs]
    y = np.zeros(wanted.shape, computing(out))
    pointers = (ctypes.c_void_p * (len(xs) + 1))(*(a.ctypes.data for a in (*wide, y)))
    getattr(library, f"run{k}")(pointers, ctypes.c_long(y.size))
    with np.errstate(all="ignore"):
        y = y.astype(out)
    assert wanted.dtype == out
    check(case, xs, y, wanted)


def check(case, xs, y, wanted):
    if not jnp.issubdtype(y.dtype, jnp.floating):
        wrong = y != wanted
        if case.bits is not None:
            wrong &= ~(np.isnan(xs[0]) & np.isnan(case.bits(y).view(xs[0].dtype)))
    else:
        a, b, info = y.astype(np.float64), wanted.astype(np.float64), jnp.finfo(y.dtype)
        ulps, eps, tiny = case.ulps or 0, float(info.eps), float(info.tiny)
        with np.errstate(all="ignore"):
            # XLA:CPU flushes subnormal numbers to 0, between operations too.
            near = np.abs(a - b) <= tiny * (256 if ulps else 1) + ulps * eps * np.maximum(np.abs(b), case.scale)
        same = (a == b) & ((np.signbit(a) == np.signbit(b)) | (case.ulps is not None))
        wrong = ~(same | (np.isnan(a) & np.isnan(b)) | (near & (a != b)))
    show = [(*(x[i] for x in xs), y[i], wanted[i]) for i in np.flatnonzero(wrong)[:8]]
    assert not wrong.any(), f"{case.name}, {wrong.sum()} of {wrong.size}; operands, result, jnp: {show}"


def test_primitives_compile_for_gpus():
    if registry.kernels.module is None:
        pytest.skip(registry.kernels.reason)
    structs, calls = [], []
    for k, (_, dtype) in enumerate(FUNCTIONS):
        if dtype in ("float32", "bfloat16", "int32", "uint8", "bool"):  # others take long, and differ in types alone
            types = [cpp.cpp_type(computing(d)) for d in (*traced(k).in_dtypes, *traced(k).out_dtypes)]
            arguments = ", ".join(f"*static_cast<{t}*>(p[{i}])" for i, t in enumerate(types))
            structs.append(traced(k).source(f"Function{k}"))
            calls.append(f"if (n == {k}) Function{k}()({arguments});")
    kernel = f"template <int> __global__ void All(void** p, int n) {{ {' '.join(calls)} }}"
    assert registry.kernels.module.compile(cpp.HEADER, "All<0>", 90, "".join(structs) + kernel)


def trace(f, *dtypes, **options):
    return functor.trace(f, [jnp.dtype(d) for d in dtypes], name="test", **options)


def test_equal_functions_are_equal():
    f = lambda: trace(lambda x, y: (jax.nn.silu(x) * y, x > y), "bfloat16", "float32")[0]
    assert f() == f() and hash(f()) == hash(f()) and repr(f()) == repr(f())
    assert f().vjp((0, 1)) == f().vjp((0, 1)) and f().source("F") == f().source("F")
    assert f().vjp((0,)) != f().vjp((1,))


@pytest.mark.parametrize(
    "f, g",
    [
        (lambda x: x + 1.0, lambda x: x + 1.0000001),
        (lambda x: x * x, lambda x: x * lax.stop_gradient(x)),
        (jax.nn.relu, lambda x: jnp.maximum(x, 0)),
    ],
)
def test_functions_with_other_values_or_derivatives_differ(f, g):
    assert trace(f, "float32")[0] != trace(g, "float32")[0]


def test_rules_that_call_themselves():
    def make(factor):
        @jax.custom_jvp
        def e(x):
            return jnp.exp(x)

        e.defjvp(lambda p, t: (e(p[0]), factor * e(p[0]) * t[0]))
        return trace(e, "float32")[0]

    assert make(1) == make(1) and make(1) != make(2)
    np.testing.assert_allclose(make(2).vjp((0,)).vjp((0,))(0.5, 1.0, 1.0)[0], 4 * np.exp(0.5), rtol=1e-6)


def test_dtypes_of_results():
    assert trace(lambda x, y: (x * y, x.astype(jnp.int8), x == y), "bfloat16", "float16")[0].out_dtypes == tuple(
        jnp.dtype(d) for d in ("float32", "int8", "bool")
    )
    assert trace(lambda x, y: x * y, "bfloat16", "float32", weak=(False, True))[0].out_dtypes == (jnp.bfloat16,)
    y = trace(lambda x: x * x - 1, "bfloat16")[0](jnp.bfloat16(1.0078125))[0]  # rounded once, at the end
    assert y == jnp.bfloat16(1.0078125**2 - 1)


def test_rules_that_close_over_traced_scalars():
    def derivative(s):
        @jax.custom_jvp
        def f(x):
            return x * s

        f.defjvp(lambda primals, tangents: (f(primals[0]), s * tangents[0]))
        return trace(lambda x: f(x), "float32")[0].vjp((0,))

    with pytest.raises(TypeError, match=r"test: f: a custom_jvp or custom_vjp rule closes over a traced scalar"):
        jax.jit(derivative)(2.0)


def test_captured_scalars():
    def g(s, x):
        f, captured = trace(lambda x: x * s + np.float32(2) * 3, "float32")
        assert len(captured) == f.captured == 1
        return f(x, *captured)[0].sum()

    x = jnp.arange(4.0)
    for transformed in (jax.grad(g), jax.jit(jax.grad(g)), lambda s, x: jax.jvp(g, (s, x), (1.0, x * 0))[1]):
        assert transformed(2.0, x) == 6
    np.testing.assert_array_equal(jax.vmap(g, (0, None))(jnp.arange(3.0), x), [24, 30, 36])


@pytest.mark.parametrize("second", (False, True))
def test_derivatives_are_those_of_jax(second):
    f = lambda x, y: (jnp.where(x > 0, x * y, jax.nn.gelu(x) * jnp.sin(y)), jax.nn.softplus(x - y))
    function = trace(f, "float32", "float32")[0]
    x, y, g, h = np.random.default_rng().normal(size=(4, 3, 5)).astype(np.float32)
    expected = lambda x, y: jax.vjp(f, x, y)[1]((g, h))
    ours = lambda x, y: tuple(function.vjp((0, 1))(x, y, g, h))
    if second:
        expected, ours = (lambda x, y, f=f: jax.jvp(f, (x, y), (g, h))[1] for f in (expected, ours))
        symbolic = function.vjp((0, 1)).jvp((0, 1))(x, y, g, h, g, h)
        np.testing.assert_allclose(symbolic, expected(x, y), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours(x, y), expected(x, y), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        function.jvp((1,))(x, y, g), jax.jvp(lambda y: f(x, y), (y,), (g,))[1], rtol=1e-4, atol=1e-5
    )


def test_operands_broadcast():
    function = trace(lambda x, y, z: x * y + z, "float32", "float32", "float32")[0]
    x, y, z = (np.random.default_rng().normal(size=s).astype(np.float32) for s in ((3, 1, 4), (5, 1), ()))
    (out,) = function(x, y, z)
    assert out.shape == (3, 5, 4)
    np.testing.assert_allclose(out, x * y + z, rtol=1e-6)
    assert function(np.zeros((0, 3), np.float32), y[0], 1.0)[0].shape == (0, 3)
    assert function(np.ones((1, 1), np.float32), 1.0, 1.0)[0].shape == (1, 1)


def test_results_of_branches_that_are_not_used():
    """A derivative of a derivative is linear in its tangents, in branches as well."""
    f = trace(lambda x, s: lax.cond(x > 0, lambda: x * s, lambda: x + s), "float32", "float32")[0]
    pullback = f.jvp((0, 1)).vjp((2, 3))
    assert not {2, 3} & set(pullback.used)
    assert pullback(1.0, 3.0, 0.0, 0.0, 1.0) == [3, 1] and pullback(-1.0, 3.0, 0.0, 0.0, 1.0) == [1, 1]
    kernel = jaxkern.elementwise_kernel(lambda x, s: lax.cond(x > 0, lambda: x * s, lambda: x + s))
    assert jax.grad(lambda x: kernel(x, 3.0))(2.0) == 3


def test_arguments_that_are_not_used():
    f = trace(lambda x, y, z: x + z, "float32", "float32", "float32")[0]
    assert f.used == (0, 2) and f.vjp((0,)).used == (3,)
    assert f.select((0, 2))(1.0, 2.0) == [3.0]
    with pytest.raises(ValueError, match="used"):
        f.select((0,))


OURS = {
    "gelu": (lambda x, w: jaxkern.gelu(x) * w, lambda x, w: jax.nn.gelu(x) * w),
    "erf": (lambda x, w: jaxkern.gelu(x * w, approximate=False), lambda x, w: jax.nn.gelu(x * w, approximate=False)),
    "elu": (lambda x, w: jaxkern.elu(x, alpha=w), jax.nn.elu),
    "swiglu": (lambda x, w: jaxkern.swiglu(x, gate=w), lambda x, w: x * jax.nn.silu(w)),
    "where": (
        lambda x, w: jaxkern.where(jaxkern.isfinite(x), jaxkern.cast(x, jnp.float16) * w, w),
        lambda x, w: jnp.where(jnp.isfinite(x), x.astype(jnp.float16) * w, w),
    ),
}


@pytest.mark.parametrize("name", OURS)
def test_functions_of_this_library(name):
    """Results and derivatives; the translation contains no primitive of this library."""
    ours, theirs = (trace(f, "float32", "float32")[0] for f in OURS[name])
    x, w = (jnp.asarray(np.random.default_rng(k).normal(size=20), "float32") for k in range(2))
    for ours, theirs in ((ours, theirs), (ours.vjp((0, 1)), theirs.vjp((0, 1)))):
        operands = (x, w, x + 1)[: len(ours.in_dtypes)]
        for a, b in zip(ours(*operands), theirs(*operands), strict=True):
            np.testing.assert_allclose(a, b, 2e-5, 2e-6)
        assert "jaxkern_" not in str(ours.closed)
    nested = lambda x: jax.checkpoint(lambda x: lax.cond(x > 0, jaxkern.silu, jaxkern.relu, x))(x)
    assert "lax::" in trace(nested, "float32")[0].source("F")


def _by_size(x):
    return x * 2 if x.dtype.itemsize == 2 else x * 3


@jax.custom_jvp
def _clipped(x):
    """An identity with a rule that asks for limits of its type."""
    return jnp.clip(x, -jnp.finfo(x.dtype).max, jnp.finfo(x.dtype).max)


@_clipped.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return _clipped(x), t * jnp.asarray(x.dtype.itemsize + (float(jnp.finfo(x.dtype).max) > 1e5), x.dtype)


@jax.custom_vjp
def _halved(x):
    return x


_halved.defvjp(lambda x: (x, x), lambda x, g: ((g / x.dtype.itemsize).astype(x.dtype),))


SIXTEEN_BITS = {
    "fraction of a limit": lambda x: jnp.maximum(x, np.asarray(-0.7 * float(jnp.finfo(x.dtype).max), x.dtype)),
    "fraction of a limit, in Python": lambda x: jnp.maximum(x, -0.7 * jnp.finfo(x.dtype).max),
    "several eps": lambda x: jnp.maximum(x, 10 * jnp.finfo(x.dtype).eps),
    "size of the type": _by_size,
    "size of the type, in jit": lambda x: jax.jit(_by_size)(x) + x,
    "size of the type, in cond": lambda x: lax.cond(x > 1, _by_size, lambda x: x - jnp.finfo(x.dtype).eps, x),
    "size of the type, under remat": jax.checkpoint(lambda x: _by_size(x) - 1),
    "rule for tangents": _clipped,
    "rule for tangents, in jit": lambda x: jax.jit(_clipped)(x) * 2,
    "rule for cotangents": lambda x: _halved(x) * 2,
    "nan_to_num": lambda x: jnp.nan_to_num(x),
    "nextafter": lambda x: lax.nextafter(x, jnp.full_like(x, 9)),
    "bits": lambda x: lax.bitcast_convert_type(x, jnp.uint16) >> 3,
    "sign bit": lambda x: jnp.signbit(x),
    "from bits": lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int16) & 0x7F00, x.dtype) + x,
    "other type's bits": lambda x: lax.bitcast_convert_type(
        x, jnp.float16 if x.dtype == jnp.bfloat16 else jnp.bfloat16
    ),
    "to integers": lambda x: jnp.nan_to_num(x / 2, posinf=9).astype(jnp.int8),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 2),
    "rounded": lambda x: (x.astype(jnp.float32) * np.float32(1 + 2**-9)).astype(x.dtype).astype(jnp.float32) * 3,
    "not rounded": lambda x: x.astype(jnp.float32) * np.float32(1 + 2**-20),
    "other type": lambda x: x.astype(jnp.float16).astype(jnp.float32) + x.astype(jnp.bfloat16).astype(jnp.float32),
    "Python number that is rounded": lambda x: jnp.where(x == 0.1, 2.0, x),
    "number of its type": lambda x: x * x.dtype.type(0.1),
    "library": lambda x: jaxkern.relu(x) + jaxkern.cast(x, jnp.float32),
    "kernel in a kernel": lambda x: jaxkern.elementwise_kernel(_by_size)(x) + x,
    "sum": lambda x: jnp.sum(x, dtype=x.dtype) + jnp.dot(x, x, preferred_element_type=x.dtype),
}


def _is_result_of_a_nan(f, dtype, y) -> bool:
    """Whether f returns y for a positive quiet NaN: kernels do not keep which one it was, and GPUs make one of their own."""
    first = int(np.array(np.nan, dtype).view(np.uint16))
    nans = np.arange(first, 1 << 15, dtype=np.uint16).view(dtype)
    results = np.asarray(jax.vmap(f)(jnp.asarray(nans)), np.float32)
    return bool(((results == np.float32(y)) | (np.isnan(results) & np.isnan(np.float32(y)))).any())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_what_a_function_of_16_bits_sees(name, dtype):
    """f is traced with the dtypes of its operands. The operands are such that rounding each operation changes nothing."""
    f = SIXTEEN_BITS[name]
    x = jnp.array([1.0, -2.0, 1.5, 0.0, 0.1, jnp.inf, -jnp.inf, jnp.nan], dtype)
    function = trace(f, dtype)[0]
    with jax.disable_jit():
        wanted, (found,) = jax.vmap(f)(x), function(x)
        assert found.dtype == wanted.dtype
        finite = 5 if name == "sum" else 7  # in sums of one element of infinities
        np.testing.assert_array_equal(found[:finite].astype("float32"), wanted[:finite].astype("float32"))
        assert name == "sum" or _is_result_of_a_nan(f, dtype, found[-1])
        if function.inexact_results and name != "nextafter":  # JAX before 0.11 has no derivative of it
            g = jnp.ones_like(wanted)
            (derivative,), (wanted,) = function.vjp((0,))(x, g), jax.vjp(jax.vmap(f), x)[1](g)
            np.testing.assert_array_equal(derivative[:4].astype("float32"), wanted[:4].astype("float32"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_limits_of_16_bit_arguments(dtype):
    """What f asks of the type of an argument is answered for that type, and constants stay what they are."""
    least, info = float(jnp.finfo(jnp.float32).min), jnp.finfo(dtype)
    x = jnp.array([1.0, jnp.nan, jnp.inf, -jnp.inf], dtype)
    clean = trace(jnp.nan_to_num, dtype)[0]
    np.testing.assert_array_equal(np.asarray(clean(x)[0], "float64"), [1, 0, float(info.max), float(info.min)])
    masked = trace(lambda x, w: jnp.where(x > 2, x, jnp.finfo(x.dtype).min) * w, dtype, "float32")[0]
    assert masked(x[:1], 1.0)[0].item() == float(info.min)
    single = trace(lambda x: jnp.maximum(x.astype(jnp.float32), least), dtype)[0]
    assert single(x[3:])[0].item() == least
    small = trace(lambda x: x + jnp.finfo(x.dtype).eps, dtype)[0]
    assert small(x[:1])[0].item() == 1 + float(info.eps)


@pytest.mark.parametrize(
    "f, error, says",
    [
        (lambda x: lax.fori_loop(0, 3, lambda i, y: y * x, x), TypeError, r"scan at .*test_functor.py:\d+.*, a loop"),
        (lambda x: jnp.stack([x, x]).sum(), TypeError, r"test_functor.py:\d+.*float32\[.*Compute it outside"),
        (lambda x: jax.scipy.special.gammainc(x, 2.0), TypeError, r"igamma at .*test_functor.py:\d+.*no counterpart"),
        (lambda x: x * ARRAY, TypeError, r"closes over an array, float32\[3\] at .*pass the array as an operand"),
        (lambda x: lax.full((3,), x), ValueError, r"result 0 is float32\[3\]"),
        (lambda x: x + 1j, TypeError, "complex64"),
        (lambda x: [jax.debug.print("{}", x), x][1], TypeError, r"side effects, in debug.* at .*test_functor.py"),
        (lambda x: (), ValueError, "at least one scalar, and returns 0"),
    ],
)
def test_what_cannot_be_translated(f, error, says):
    with pytest.raises(error, match=says) as raised:
        trace(f, "float32")
    assert "jaxkern.test: f" in str(raised.value)


ARRAY = jnp.arange(3.0, dtype=jnp.float32)


@jax.custom_jvp
def _with_a_wide_rule(x):
    return jnp.exp(x)


@_with_a_wide_rule.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    wide = x.astype(jnp.float32)
    return jnp.exp(x), ((wide - jnp.sin(wide)) * t).astype(x.dtype)


_wide_exp = jaxkern.elementwise_kernel(lambda x, y: jnp.exp(x.astype(jnp.float32)).astype(x.dtype))
_expm = lambda x: (jnp.exp(x.astype(jnp.float32)) - 1 - x).astype(x.dtype)


@pytest.mark.parametrize(
    "coarse, functions",
    [
        (
            True,
            [
                lambda x, y: jax.nn.softplus(x) * jax.nn.gelu(y),
                lambda x, y: jnp.logaddexp(x, y) + jax.nn.silu(jnp.where(x > 0, x, y)),
                lambda x, y: jnp.floor(x) * jnp.exp(y),
                lambda x, y: jnp.clip(x / y, 0, 1),
                lambda x, y: jnp.where(jnp.isnan(x / y), 0, y),
                lambda x, y: lax.cond(x > y, jnp.exp, jnp.sin, x),
            ],
        ),
        (
            False,
            [
                lambda x, y: x * np.float32(0.3),
                lambda x, y: lax.cond(x > y, _expm, lambda x: x, x),
                lambda x, y: _with_a_wide_rule(x),
                lambda x, y: _wide_exp(x, y) * y,
                lambda x, y: jnp.floor(x / y),
                lambda x, y: (x / y).astype(jnp.int8),
                lambda x, y: jax.jit(jnp.divide)(x, y) >= 1,
                lambda x, y: jnp.where(lax.cond(x > 0, lambda: jnp.sqrt(x), lambda: x) == y, x, y),
            ],
        ),
    ],
)
def test_where_coarse_arithmetic_is_enough(coarse, functions):
    """All in 16 bits, rules for derivatives too, and nothing jumps where rounding would have made a number whole."""
    for k, f in enumerate(functions):
        function, _ = functor.trace(f, [jnp.bfloat16, jnp.bfloat16], name="elementwise_kernel")
        assert function.coarse == coarse, k


LOWEST = -np.inf


@pytest.mark.parametrize(
    "f, expected",
    [
        (lambda s, q, k: jnp.where(k <= q, s, LOWEST), lambda q, k: k > q),
        (lambda s, q, k: jnp.where(k > q, LOWEST, jax.nn.silu(s)), lambda q, k: k > q),
        (lambda s, q, k: jnp.where((k <= q) & (s > 0), s, LOWEST), lambda q, k: k > q),
        (lambda s, q, k: jnp.where((k > q) | (s > 0), LOWEST, s), lambda q, k: k > q),
        (lambda s, q, k: jnp.where(~((k > q) | (s > 0)), s, LOWEST), lambda q, k: k > q),
        (
            lambda s, q, k: jnp.where(q == 3, LOWEST, jnp.where(abs(q - k) < 2, s, LOWEST)),
            lambda q, k: (q == 3) | (abs(q - k) >= 2),
        ),
        (lambda s, q, k: jnp.where(s > 0, LOWEST, jnp.where(k <= q, s, LOWEST)), lambda q, k: k > q),
        (lambda s, q, k: jnp.where(k <= q, s, jnp.log(q * 0.0)), lambda q, k: k > q),
        (lambda s, q, k: jnp.where(k <= q, s.astype("float32"), LOWEST).astype(s.dtype), lambda q, k: k > q),
        (lambda s, q, k: jax.jit(lambda s, own: jnp.where(own, s, LOWEST))(s, k <= q), lambda q, k: k > q),
        (lambda s, q, k: jnp.full_like(s, LOWEST), lambda q, k: q == q),
        (lambda s, q, k: jnp.where((k <= q) & True, s, LOWEST), lambda q, k: k > q),
        (lambda s, q, k: jnp.where((s > 0) | (k <= q) | False, s, LOWEST), None),
        (lambda s, q, k: jnp.where(True, LOWEST, s), lambda q, k: q == q),
        (lambda s, q, k: jax.jit(lambda s, own: jnp.where(own, s, LOWEST))(s, np.True_), None),
        (lambda s, q, k: lax.select(jnp.bool_(True), jnp.full_like(s, LOWEST), s), lambda q, k: q == q),
        (lambda s, q, k: s + jnp.where(k <= q, 0, LOWEST), None),  # NaN + -inf is NaN
        (lambda s, q, k: jnp.where(k <= q, s, -1e30), None),
        (lambda s, q, k: jnp.where(k <= q, s, jnp.inf), None),
        (lambda s, q, k: jnp.where(s > 0, s, LOWEST), None),
        (lambda s, q, k: jnp.minimum(jnp.where(k <= q, 0, LOWEST), s), None),
        (lambda s, q, k: s * 2, None),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_where_a_result_is_lowest_whatever_an_argument_is(f, expected, dtype):
    found = where_lowest(trace(f, dtype, "int32", "int32")[0], frozenset((1, 2)))
    if expected is None:
        assert found is None
        return
    q, k = jnp.arange(7)[:, None], jnp.arange(7)
    assert 0 not in found.used
    (lowest,) = found(0.0, q, k)
    np.testing.assert_array_equal(np.broadcast_to(lowest, (7, 7)), np.broadcast_to(expected(q, k), (7, 7)))


def test_wrong_number_of_results():
    with pytest.raises(ValueError, match="must return 1 scalar, and returns 2"):
        trace(lambda x: (x, x), "float32", results=1)
    with pytest.raises(TypeError, match="digamma uses polygamma"):
        trace(jax.scipy.special.digamma, "float32")[0].vjp((0,))


def _long(x, y, steps, f):
    for k in range(steps):
        x = f(x * y + np.float32(k))
    return x


def test_size_of_functions():
    """The size counts what a kernel computes, and sines more than exponentials."""
    size = lambda f: trace(f, "float32", "float32")[0].size
    assert size(lambda x, y: _long(x, y, 20, jnp.exp)) == 60
    assert size(lambda x, y: lax.cond(x > y, lambda: _long(x, y, 20, jnp.exp), lambda: x)) == 63
    assert size(lambda x, y: (_long(x, y, 20, jnp.exp), x)[1]) == 0
    assert size(lambda x, y: _long(x, y, 20, jnp.sin)) > 500


GRAPH = jaxkern.Graph(np.arange(8), np.arange(8), num_nodes=8)
WITH_FUNCTIONS = {
    "elementwise_kernel": lambda f, x: jaxkern.elementwise_kernel(f)(x),
    "edge_sum": lambda f, x: jaxkern.edge_sum(f, GRAPH, senders=x),
    "edge_map": lambda f, x: jaxkern.edge_map(f, GRAPH, edges=x),
    "softmax": lambda f, x: jaxkern.softmax(x, score=lambda x, *_: f(x)),
    "softmax's gradient": lambda f, x: jax.grad(lambda x: jaxkern.softmax(x, score=lambda x, *_: f(x))[0].sum())(x),
    "rms_norm": lambda f, x: jaxkern.rms_norm(x, epilogue=f),
    "group_norm": lambda f, x: jaxkern.group_norm(jnp.broadcast_to(x, (32, 64, 8, 64)), 4, epilogue=f),
}


@pytest.mark.parametrize("name", WITH_FUNCTIONS)
def test_functions_that_take_long_to_compile_are_left_to_xla(name, monkeypatch):
    if not registry.kernels_run():
        pytest.skip(registry.kernels.reason)
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    f = lambda x: _long(x, x, 8, jnp.exp)
    lower = lambda: jax.jit(lambda x: WITH_FUNCTIONS[name](f, x)).trace(x).lower(lowering_platforms=("cuda",))
    has_function = lambda lowered: any("source struct" in p for p in launch.programs(lowered.as_text()))
    assert has_function(lower())
    monkeypatch.setattr(functor, "MOST", 20)
    compat.warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"has a size of \d+ statements, above the limit of 20: XLA runs it"):
        assert not has_function(lower())


def test_time_for_large_functions():
    """It is linear in the statements; rules that call two others, which call two others, share them."""

    def nested(depth):
        if depth == 0:
            return jnp.sin
        inner = nested(depth - 1)

        @jax.custom_jvp
        def f(x):
            return inner(x) * 1.5

        f.defjvp(lambda primals, tangents: (f(primals[0]), (inner(primals[0]) + inner(primals[0] * 2)) * tangents[0]))
        return f

    def seconds(f, arity, dtype="float32"):
        start = time.process_time()
        trace(f, *[dtype] * arity)[0].vjp((0,))
        return time.process_time() - start

    straight = lambda steps: seconds(lambda x, y: _long(x, y, steps, jnp.exp), 2)
    straight(10)
    assert straight(600) < 10 * straight(100) + 1
    for dtype in ("float32", "bfloat16"):
        assert seconds(nested(12), 1, dtype) < 10


@pytest.mark.parametrize("dtype, nans", [("float16", (0x7E00, 0xFE01, 0x7FFF)), ("bfloat16", (0x7FC0, 0x7FFF, 0xFFC1))])
def test_bits_of_a_nan_are_those_of_any_nan(dtype, nans):
    """What `check` accepts for the bits of a NaN, and that it accepts nothing else."""
    (case,) = (c for c in CASES if c.name == "bits_16")
    xs = [np.array([np.nan, 1.0], dtype)]
    wanted = xs[0].view(np.uint16) ^ 5
    one = wanted[1]
    for bits in nans:
        check(case, xs, np.array([bits ^ 5, one], np.uint16), wanted)
    infinity = np.array(np.inf, dtype).view(np.uint16) ^ 5
    for y in ([infinity, one], [wanted[0], one ^ 1], [wanted[0], nans[0] ^ 5]):
        with pytest.raises(AssertionError, match="bits_16, 1 of 2"):
            check(case, xs, np.array(y, np.uint16), wanted)
    f, largest = SIXTEEN_BITS["bits"], np.array([0x7FFF, infinity ^ 5], np.uint16).view(dtype)
    of_nan, of_infinity = np.asarray(jax.vmap(f)(jnp.asarray(largest)))
    assert _is_result_of_a_nan(f, dtype, of_nan) and not _is_result_of_a_nan(f, dtype, of_infinity)
