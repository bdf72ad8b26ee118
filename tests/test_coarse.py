"""Arithmetic of 16-bit numbers, and angles in float32, on the host: each instruction of the GPU's is a call of the C library."""

import ctypes
import platform
import re
import subprocess

import numpy as np
import pytest
from scipy import special

from jaxkern._core import runtime

SHIM = """
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
using namespace std;
#define __device__
#define __forceinline__ inline
#define __noinline__
inline float rcp(float x) { return 1 / x; }
inline float ex2(float x) { return exp2f(x); }
inline float lg2(float x) { return log2f(x); }
inline float div_(float a, float b) { return a / b; }
inline float sqrt_(float x) { return sqrtf(x); }
inline float max_(float a, float b) { return a != a ? a : b != b ? b : fmaxf(a, b); }
inline float min_(float a, float b) { return a != a ? a : b != b ? b : fminf(a, b); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline double normcdf(double x) { return erfc(-x / sqrt(2.0)) / 2; }
inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
"""
CALLS = {"div": "div_", "sqrt": "sqrt_", "max": "max_", "min": "min_"}
FUNCTIONS = {
    "Exp": np.exp,
    "Expm1": np.expm1,
    "Log": np.log,
    "Log1p": np.log1p,
    "Logistic": special.expit,
    "Tanh": np.tanh,
    "Erf": special.erf,
    "Erfc": special.erfc,
    "NormalCdf": special.ndtr,
    "Sqrt": np.sqrt,
    "Sin": np.sin,
    "Cos": np.cos,
}


ANGLES = {"Sin": np.sin, "Cos": np.cos, "Tan": np.tan}  # of float32


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    headers = [
        (runtime.kernels_folder() / name).read_text() for name in ("common/extremes.h", "elementwise/arithmetic.h")
    ]
    text = re.sub(r'#include ".*"', "", "".join(headers))

    def call(found):
        name, out, given = found.groups()
        operands = ", ".join(re.findall(r'"f"\((\w+)\)', given))
        return f"{out} = {CALLS.get(name, name)}({operands});"

    text, count = re.subn(r'asm\("(\w+)[^"]*" : "=f"\((\w+)\) : (.*?)\);', call, text)
    assert count > 5
    loops = "".join(
        f'extern "C" void {prefix}{name}(const float* x, float* y, long n) '
        f"{{ for (long i = 0; i < n; ++i) y[i] = jaxkern::{kind}::{name}(x[i]); }}\n"
        for prefix, kind, names in (("", "Coarse", FUNCTIONS), ("Single", "Single", ANGLES))
        for name in names
    )
    folder = tmp_path_factory.mktemp("coarse")
    (folder / "all.cc").write_text(SHIM + text + loops)
    fused = ["-ffp-contract=fast", *(["-mfma"] if platform.machine() == "x86_64" else [])]  # as for GPUs
    command = ["g++", "-std=c++20", "-O2", "-w", *fused, "-shared", "-fPIC"]
    subprocess.run([*command, "-o", folder / "all.so", folder / "all.cc"], check=True)
    return ctypes.CDLL(folder / "all.so")


def computed(library, name, x):
    x = np.ascontiguousarray(x, np.float32)
    y, pointer = np.empty_like(x), lambda a: a.ctypes.data_as(ctypes.c_void_p)
    getattr(library, name)(pointer(x), pointer(y), ctypes.c_long(x.size))
    return y


def every(dtype):
    """Every number of 16 bits, as float32."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    return (
        (bits << 16).view(np.float32) if dtype == "bfloat16" else bits.astype(np.uint16).view(np.float16).astype("f4")
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_relative_errors(library, name, dtype):
    x = every(dtype)
    with np.errstate(all="ignore"):
        y, wanted = computed(library, name, x), FUNCTIONS[name](x.astype(np.float64))
        as_single = wanted.astype(np.float32)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(wanted))
        np.testing.assert_array_equal(y[np.isinf(as_single)], as_single[np.isinf(as_single)])
        close = np.abs(y - wanted) <= 2.0**-13 * np.abs(wanted) + 2.0**-125
    finite = np.isfinite(as_single)
    assert close[finite].all(), (x[finite & ~close][:5], y[finite & ~close][:5])


def test_what_is_exact(library):
    """Differences from these are 0 where rounding to 16 bits makes them so, and roots of 1 - y y exist."""
    near = np.random.default_rng().uniform(-1e-2, 1e-2, 10_000)
    angles = np.concatenate([near, *(np.pi / 2 * k + near for k in range(-9, 10)), [0, 1e-30]])
    for name in ("Sin", "Cos"):
        assert np.abs(computed(library, name, angles)).max() <= 1, name
    for name, wanted in {"Cos": 1, "Erfc": 1, "NormalCdf": 0.5, "Exp": 1, "Logistic": 0.5}.items():
        np.testing.assert_array_equal(computed(library, name, [0.0, -0.0, 1e-30]), np.float32(wanted), name)
    for name in ("Sin", "Tanh", "Log1p"):
        np.testing.assert_array_equal(computed(library, name, [0, 1e-30]), np.float32([0, 1e-30]), name)
    for name in ("Sin", "Tanh", "Log1p", "Expm1", "Erf", "Sqrt"):
        assert list(np.signbit(computed(library, name, [0.0, -0.0]))) == [False, True], name
    for name in ("Erf", "Tanh"):
        for sign in (1, -1):
            y = computed(library, name, sign * np.float32([11, 90, 1e4, 3e38, np.inf]))
            np.testing.assert_array_equal(y, sign, name)


@pytest.mark.parametrize("name", ANGLES)
def test_angles_in_float32(library, name):
    rng = np.random.default_rng()
    bits = rng.integers(0, 0x7F800000, 300_000, np.uint32).view(np.float32)
    quarters = np.pi / 2 * rng.integers(0, 70_000, 200_000) + rng.normal(size=200_000) * 10.0 ** rng.uniform(
        -9, 0, 200_000
    )
    x = np.concatenate([bits, quarters.astype(np.float32), rng.uniform(0, 105_615, 200_000).astype(np.float32)])
    x = np.concatenate([x, -x])
    wanted = ANGLES[name](x.astype(np.float64))
    y = computed(library, f"Single{name}", x)
    last = np.spacing(np.maximum(np.abs(wanted).astype(np.float32), np.float32(2.0**-126))).astype(np.float64)
    errors = np.abs(y - wanted) / last
    assert errors.max() <= (4 if name == "Tan" else 2), (x[errors.argmax()], errors.max())
    if name != "Tan":
        assert np.abs(y).max() <= 1
    assert np.isnan(computed(library, f"Single{name}", [np.inf, -np.inf, np.nan])).all()
    zeros = computed(library, f"Single{name}", [0.0, -0.0])
    np.testing.assert_array_equal(
        zeros.view(np.uint32), np.float32([1, 1] if name == "Cos" else [0.0, -0.0]).view(np.uint32)
    )
