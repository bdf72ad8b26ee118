"""The switches: environment variables, forcing XLA, and the command that lists and clears the cache of kernels."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxkern
from jaxkern._core import cache, environment, registry

PACKAGE = pathlib.Path(jaxkern.__file__).parent


def python(*arguments, **variables):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
    )


# ---- environment variables


def test_one_module_reads_the_environment():
    """Every variable that the package names is in the table, and environment.py alone reads them."""
    named = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        named |= set(re.findall(r"JAXKERN_[A-Z_]+", text))
        if path.name != "environment.py":
            assert not re.search(r"os\.environ\S*JAXKERN_|getenv\S*JAXKERN_", text), path
    assert named - {"JAXKERN_FN"} == set(environment.VARIABLES)  # a macro of the kernels


def test_unknown_variable():
    with pytest.raises(KeyError):
        environment.read("JAXKERN_NO_SUCH")


# ---- forcing XLA

needs_runtime = pytest.mark.skipif(registry.kernels.module is None, reason="the runtime is not built")


def program(name):
    """(function, argument), one for each way in which operations are lowered."""
    x, ids = jnp.ones((64, 1024)), jnp.arange(64) % 7
    if name == "softmax":
        return jax.grad(lambda x: jaxkern.softmax(x)[0, 0]), x
    if name == "cross_entropy":
        return jax.value_and_grad(lambda x: jaxkern.softmax_cross_entropy(x, ids).mean()), x
    if name == "segment_sum":
        return lambda x: jaxkern.segment_sum(x, ids, 8), x
    if name == "edge_sum":
        graph = jaxkern.Graph(ids, ids, num_nodes=64)
        return jax.grad(lambda x: jaxkern.edge_sum(lambda s: s * s, graph, senders=x).sum()), x
    return jaxkern.elementwise_kernel(lambda x: x * x), x


def lowered(f, x):
    return jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()


@needs_runtime
@pytest.mark.parametrize("name", ["softmax", "cross_entropy", "segment_sum", "edge_sum", "elementwise_kernel"])
def test_force_xla(name):
    f, x = program(name)
    assert "@jaxkern_" in lowered(f, x)
    with jaxkern.tiers.force_xla():
        assert "@jaxkern_" not in lowered(f, x)
        again = jax.jit(f)(x)
    assert "@jaxkern_" in lowered(f, x)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(jax.jit(f)(x))):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-6)


BACKEND = """
import jax, jax.numpy as jnp, jaxkern
step = jax.jit(jax.grad(lambda x: jaxkern.softmax(x)[0, 0]))
print("@jaxkern_" in step.trace(jnp.ones((64, 1024))).lower(lowering_platforms=("cuda",)).as_text())
table, ids = jnp.zeros((1000, 64), jnp.bfloat16), jnp.zeros(4096, jnp.int32)
print([d.taken for d in jaxkern.explain(jax.grad(lambda t, i: t[i].sum()))(table, ids)])
"""


@needs_runtime
@pytest.mark.parametrize("value, lines", [("", ["True", "[True]"]), ("xla", ["False", "[False]"])])
def test_backend_of_a_process(value, lines):
    done = python("-c", BACKEND, JAXKERN_BACKEND=value)
    assert done.stdout.split("\n")[:2] == lines, done.stderr


def test_backend_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("JAXKERN_BACKEND", "fast")
    with pytest.raises(ValueError, match="JAXKERN_BACKEND is 'fast'"):
        environment.xla_only()


# ---- the cache of kernels

KERNEL = "Fill<256, 4>"


def field(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def kernel_file(folder, name="0" * 32, kernel="Kernel<float>") -> pathlib.Path:
    """A file as ffi/runtime/cache.cc writes it; the checksum is not read here."""
    key = (
        f"nvrtc 13.0\nheaders {'a' * 64}\n--gpu-architecture=sm_90\n--std=c++17\nfamily/kernel.cuh\n{kernel}\nsource\n"
    )
    body = field(key.encode()) + field(b"_ZN6Kernel") + field(b"\x7fELF")
    path = folder / f"{name}.jaxkern"
    path.write_bytes(cache.MAGIC + field(b"0" * 32) + field(body))
    return path


def test_cache_lists_kernels(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXKERN_CACHE_DIR", str(tmp_path))
    old, new = kernel_file(tmp_path, "0" * 32, "Old<1>"), kernel_file(tmp_path, "1" * 32, "New<2>")
    os.utime(old, (1e9, 1e9))
    damaged = tmp_path / f"{'2' * 32}.jaxkern"
    damaged.write_bytes(new.read_bytes()[:40])
    os.utime(damaged, (5e8, 5e8))
    assert cache.main(["--list"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}: 3 kernels")
    assert [line.split()[-1] for line in lines] == ["New<2>", "Old<1>", "readable"] and "sm_90" in lines[0]


def test_cache_clears_its_own_files_only(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXKERN_CACHE_DIR", str(tmp_path))
    own = kernel_file(tmp_path)
    draft = own.with_name(own.name + ".q8Zv1B")
    draft.write_bytes(b"jaxkern")
    others = [tmp_path / name for name in ("notes.txt", "x.jaxkern", f"{'3' * 32}.jaxkern.bak", f"{'4' * 32}.jaxkern")]
    for path in others[:-1]:
        path.write_text("kept")
    target = tmp_path / "elsewhere"
    target.write_text("kept")
    others[-1].symlink_to(target)
    (tmp_path / f"{'5' * 32}.jaxkern").mkdir()
    assert cache.main(["--clear"]) == 0
    assert "removed 2 kernels" in capsys.readouterr().out
    assert not own.exists() and not draft.exists()
    assert all(path.exists() for path in (*others, target, tmp_path / f"{'5' * 32}.jaxkern"))


@needs_runtime
def test_cache_reads_what_the_runtime_writes(tmp_path):
    """A kernel that NVRTC compiles in another process, listed and cleared by the command."""
    if registry.kernels.module.compiler()[1]:
        pytest.skip("NVRTC is not installed")
    compile_one = (
        "from jaxkern._core import registry\n"
        "registry.kernels.module.compile('indexing/fill.cuh', NAME, 90, '')".replace("NAME", repr(KERNEL))
    )
    done = python("-c", compile_one, JAXKERN_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    listed = python("-m", "jaxkern", "cache", JAXKERN_CACHE_DIR=str(tmp_path))
    assert "1 kernels" in listed.stdout and f"sm_90 {KERNEL}" in listed.stdout, listed.stderr
    assert python("-m", "jaxkern", "cache", "--clear", JAXKERN_CACHE_DIR=str(tmp_path)).returncode == 0
    assert not list(tmp_path.iterdir())


def test_cache_that_is_off(monkeypatch, capsys):
    monkeypatch.setenv("JAXKERN_CACHE_DIR", "")
    assert cache.main([]) == 0 and "the cache is off" in capsys.readouterr().out
