"""The switches: environment variables, forcing XLA, and the command that lists and clears the cache of kernels."""

import inspect
import os
import pathlib
import re
import stat
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxkern
from jaxkern._core import cache, environment, registry, runtime

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


@pytest.fixture
def set_variable(monkeypatch):
    """set_variable(name, value), after which the next read warns as in a new process."""
    environment._warn.cache_clear()
    return monkeypatch.setenv


@pytest.mark.parametrize("value", ["", "inf", "nan", "abc", "-1", "1e30", "512MB"])
def test_cache_size_that_is_no_number(value, set_variable):
    set_variable("JAXKERN_CACHE_MB", value)
    with pytest.warns(UserWarning, match=f"^JAXKERN_CACHE_MB is '{value}': .* default, 512, is used"):
        assert runtime.cache_bytes() == 512 << 20


def test_cache_size(set_variable):
    set_variable("JAXKERN_CACHE_MB", "0.5")
    assert runtime.cache_bytes() == 1 << 19


@pytest.mark.parametrize("name, use", [("JAXKERN_CACHE_DIR", "_usable_cache"), ("JAXKERN_DUMP", "dump_folder")])
@pytest.mark.parametrize(
    "folder, problem", [(b"not-\xff-utf8", "not UTF-8"), (b"file", "File exists"), (b"file/below", "Not a directory")]
)
def test_folder_that_cannot_be_used(folder, problem, name, use, set_variable, tmp_path):
    (tmp_path / "file").touch()
    set_variable(name, os.fsdecode(os.fsencode(tmp_path) + b"/" + folder))
    with pytest.warns(UserWarning, match=f"^{name} is .*: .*{problem}; kernels are not"):
        inspect.unwrap(getattr(runtime, use))().encode()  # which is UTF-8


def test_cache_that_others_may_write_to(set_variable, tmp_path):
    set_variable("JAXKERN_CACHE_DIR", str(tmp_path / "new"))
    assert runtime._usable_cache() == str(tmp_path / "new")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    (tmp_path / "new").chmod(0o777)
    with pytest.warns(UserWarning, match="others may write to it; kernels are not kept there"):
        runtime._usable_cache()


@pytest.mark.parametrize("name", [v.name for v in environment.VARIABLES.values() if v.values])
def test_value_that_a_variable_cannot_have(name, set_variable):
    set_variable(name, "perhaps")
    with pytest.warns(UserWarning, match=f"^{name} is 'perhaps': it must be '"):
        assert environment.read(name) is None
    for value in ("", *environment.VARIABLES[name].values):
        set_variable(name, value)
        assert environment.read(name) == value


MALFORMED = """
import jax, jax.numpy as jnp, jaxkern
print("jaxkern_softmax" in jax.jit(jaxkern.softmax).trace(jnp.ones((8, 512))).lower(lowering_platforms=("cuda",)).as_text())
"""


@pytest.mark.skipif(registry.kernels.module is None, reason="the runtime is not built")
def test_kernels_run_whatever_the_settings_are():
    names = {"JAXKERN_CACHE_MB": "abc", "JAXKERN_CACHE_DIR": "/\udcff", "JAXKERN_DUMP": "/dev/null/x"}
    done = python("-c", MALFORMED, **names, JAXKERN_PARTITION="rows", JAXKERN_ONE_READ="no")
    assert done.stdout == "True\n", done.stderr
    assert all(f"{name} is " in done.stderr for name in (*names, "JAXKERN_PARTITION"))


DUMPED = """
import jax, jax.numpy as jnp, jaxkern
f = jaxkern.elementwise_kernel(lambda x: jnp.tanh(x) * 0.4375)
for _ in range(2):
    jax.jit(lambda x: f(jaxkern.softmax(x))).trace(jnp.ones((8, 512))).lower(lowering_platforms=("cuda",))
"""


@pytest.mark.skipif(registry.gpu_present(), reason="kernels are compiled in the background where there is a GPU")
@pytest.mark.skipif(
    registry.kernels.module is None or bool(registry.kernels.module.compiler()[1]), reason="NVRTC is not installed"
)
def test_dump_of_a_program_without_a_gpu(tmp_path):
    """Lowering for CUDA compiles every kernel of the program, and the function is in the source."""
    done = python("-c", DUMPED, JAXKERN_DUMP=str(tmp_path), JAXKERN_CACHE_DIR="")
    assert done.returncode == 0, done.stderr
    sources = [path.read_text() for path in tmp_path.glob("*.cu")]
    kernels = (
        [text for text in sources if "RowsKernel<" in text],
        [text for text in sources if "lax::tanh(x0)" in text],
    )
    assert all(kernels) and all("sm_90" in text for text in sources)
    for suffix in (".log", ".cubin"):
        assert len(list(tmp_path.glob(f"*{suffix}"))) == len(sources)


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
    with jaxkern.algorithms.force_xla():
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


@pytest.mark.parametrize("folder", ["", "/\udcff"])
@pytest.mark.filterwarnings("ignore:JAXKERN_CACHE_DIR")
def test_cache_that_is_off(folder, monkeypatch, capsys):
    monkeypatch.setenv("JAXKERN_CACHE_DIR", folder)
    assert cache.main([]) == 0 and "the cache is off" in capsys.readouterr().out


def test_settings_can_be_printed(monkeypatch):
    monkeypatch.setenv("JAXKERN_DUMP", "/\udcff")
    assert environment.given()["JAXKERN_DUMP"].encode() == rb"/\udcff"


def test_settings_in_a_folder_that_is_gone(monkeypatch, tmp_path):
    """Names that are relative to it are used as they are."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("JAXKERN_CACHE_DIR", "cache")
    assert runtime.cache_folder() == "cache"
