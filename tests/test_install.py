"""The package as it is installed: modules that load or say why not, the doctor, the examples in docs."""

import importlib
import inspect
import os
import runpy
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

import jaxkern
from jaxkern import __main__ as doctor
from jaxkern import elementwise
from jaxkern._core import compat, package, registry, rows
from jaxkern._doctor import checks


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Writes a module `jaxkern._fake` with the given source, and forgets it afterwards."""
    monkeypatch.setattr(jaxkern, "__path__", [*jaxkern.__path__, str(tmp_path)])

    def write(source):
        (tmp_path / "_fake.py").write_text(source)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("jaxkern._fake", None)


def python(code, **environment):
    """Runs `code` in a fresh process, by the package under test."""
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )


# ---- the public names


def test_public_names():
    assert set(jaxkern.__all__) == {
        "CheckError",
        "DelayedScale",
        "Graph",
        "Quantization",
        "Routing",
        "batch_norm",
        "benchmark",
        "dequantize",
        "edge_map",
        "edge_max",
        "edge_mean",
        "edge_min",
        "edge_sum",
        "advantages",
        "associative_scan",
        "cumlogsumexp",
        "cummax",
        "cummin",
        "cumprod",
        "cumsum",
        "discounted_returns",
        "exponential_moving_average",
        "elementwise_kernel",
        "accelerate",
        "embedding_bag",
        "embedding_lookup",
        "explain",
        "export_checks",
        "fake_quantize",
        "graph_attention",
        "group_norm",
        "index_add",
        "index_select",
        "install",
        "installed",
        "layer_norm",
        "linear_recurrence",
        "linear_softmax_cross_entropy",
        "log_softmax",
        "logsumexp",
        "median",
        "min_p",
        "moe_combine",
        "moe_dispatch",
        "moe_route",
        "quantile",
        "quantize_blocks",
        "quantize_rows",
        "quantize_tensor",
        "reduce_max",
        "reduce_mean",
        "reduce_min",
        "reduce_sum",
        "rms_norm",
        "row_kernel",
        "sample",
        "scale_norm",
        "scan",
        "segment_max",
        "segment_mean",
        "segment_min",
        "segment_prod",
        "segment_softmax",
        "segment_sum",
        "sort_indices",
        "source",
        "spmm",
        "spmm_graph",
        "softmax",
        "softmax_cross_entropy",
        "softmax_cross_entropy_and_grad",
        "algorithms",
        "argsort",
        "bincount",
        "histogram",
        "searchsorted",
        "sort",
        "sort_pairs",
        "top_k",
        "top_p",
        "uninstall",
        "unique",
        "while_loop",
        *elementwise.NAMES,
    }
    assert jaxkern.__version__.count(".") == 2
    assert isinstance(jaxkern.algorithms, types.ModuleType) and callable(jaxkern.softmax)


def test_installed_version_is_that_of_the_source():
    from importlib import metadata

    try:
        installed = metadata.version(package.DISTRIBUTION)
    except metadata.PackageNotFoundError:
        pytest.skip("runs from the source folder")
    assert installed == jaxkern.__version__


@pytest.mark.parametrize("found", ["jaxkern-0.1.0.dist-info", "jaxkern_cuda-0.2.0.dist-info"])
def test_another_package_over_the_same_files(found, tmp_path, monkeypatch):
    (tmp_path / found).mkdir()
    monkeypatch.setattr(package, "folders", lambda: [str(tmp_path / "jaxkern")])
    assert ("pip uninstall -y jaxkern jaxkern-cuda" in package.namesake()) == ("_cuda" not in found)


def test_public_functions_are_annotated():
    for module in (jaxkern, jaxkern.algorithms):
        for name in module.__all__:
            if inspect.isfunction(function := getattr(module, name)):
                assert {*inspect.signature(function).parameters, "return"} == set(function.__annotations__), name


def test_private_jax_is_imported_nowhere():
    folder = os.path.dirname(jaxkern.__file__)
    for name in os.listdir(folder):
        if name.endswith(".py") and not name.startswith("compat"):
            with open(os.path.join(folder, name)) as file:
                assert "jax._src" not in file.read(), name


def test_importing_starts_no_backend_and_warns_of_nothing():
    done = python(
        "import sys, warnings; warnings.simplefilter('error'); import jaxkern\n"
        "assert not {'flax', 'equinox', 'optax'} & set(sys.modules)\n"
        "from jax._src import xla_bridge; print(len(xla_bridge._backends))"
    )
    assert done.stdout.strip() == "0", done.stderr


# ---- the extension modules


def test_runtime_version_is_known():
    assert compat.ffi_api_version() >= (0, 1)  # of jaxlib 0.8.0


def test_absent_module():
    status = registry.load("_never_built")
    assert status.module is None and status.reason == "jaxkern._never_built was not built"


def test_module_that_does_not_load(fake):
    fake("raise ImportError('undefined symbol: cudaLaunchKernelExC')")
    status = registry.load("_fake")
    assert (
        status.module is None and "jaxkern._fake does not load: undefined symbol: cudaLaunchKernelExC" == status.reason
    )


def test_module_newer_than_the_runtime(fake):
    fake("api_version = (0, 7)")
    status = registry.load("_fake", api_version=(0, 3))
    assert status.module is None
    for word in (
        "jaxkern._fake",
        "XLA FFI 0.7",
        "up to 0.3",
        f"jaxlib {importlib.import_module('jaxlib').__version__}",
    ):
        assert word in status.reason
    assert "\n" not in status.reason


def test_module_that_cannot_be_set_up(fake, monkeypatch):
    fake("api_version = (0, 1)")
    status = registry.load("_fake")
    assert status.module is None and status.reason.startswith("jaxkern._fake cannot be set up: ")


def test_warnings():
    """A module that is absent causes a warning only if there is a GPU; a module that loaded never does."""

    def warned(module, gpu):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            registry.warn(module, gpu)
        return [str(w.message) for w in caught]

    absent = registry.Module(reason="jaxkern._runtime was not built")
    assert warned(absent, gpu=False) == [] and warned(registry.Module(types), gpu=True) == []
    assert warned(absent, gpu=True) == ["jaxkern runs through XLA on CUDA: jaxkern._runtime was not built"]


WITHOUT_MODULES = """
import importlib.util, warnings
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "jaxkern._runtime" else find(name, *a)
"""


def test_without_modules_everything_runs_through_xla():
    done = python(
        WITHOUT_MODULES
        + """
import jax, jax.numpy as jnp, numpy as np, jaxkern
x = jnp.arange(12.0).reshape(3, 4)
text = jax.jit(jaxkern.softmax).lower(x).as_text()
assert "jaxkern_softmax" not in text and "exponential" in text, text
np.testing.assert_allclose(jaxkern.softmax(x), jax.nn.softmax(x), rtol=1e-6)
g = [jax.grad(lambda x: m.log_softmax(x, 0)[1, 2])(x) for m in (jaxkern, jax.nn)]
np.testing.assert_allclose(*g, rtol=1e-5, atol=1e-7)
print("fine")
""",
        JAX_PLATFORMS="cpu",
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_gpu_without_module_warns_once_at_import():
    done = python(
        WITHOUT_MODULES
        + """
import os
exists = os.path.exists
os.path.exists = lambda p: str(p).startswith("/proc/driver/nvidia") or exists(p)
patched = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: object() if name == "jax_cuda13_plugin" else patched(name, *a)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import jaxkern, jaxkern.softmax
print([str(w.message) for w in caught if "jaxkern" in str(w.message)])
""",
        JAX_PLATFORMS="cpu",
    )
    assert done.stdout.strip() == "['jaxkern runs through XLA on CUDA: jaxkern._runtime was not built']", done.stderr


# ---- python -m jaxkern


@pytest.mark.process
@pytest.mark.optimized
def test_doctor():
    as_installed = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}  # it measures errors
    done = subprocess.run(
        [sys.executable, "-m", "jaxkern"], env=as_installed, capture_output=True, text=True, timeout=900
    )  # only of a hang
    for word in (
        jaxkern.__version__,
        jax.__version__,
        "NVIDIA driver",
        "devices",
        "CUDA runtime",
        "NVRTC",
        "kernel cache",
        "float64",
        "milliseconds",
        "XLA",
    ):
        assert word in done.stdout, done.stdout + done.stderr
    well = registry.kernels.module is not None or not registry.gpu_present()
    assert done.returncode == (0 if well else 1), done.stdout
    assert done.stdout.strip().endswith("all is well" if well else "something is wrong: see above")
    assert "!" not in done.stdout
    assert ("no CUDA kernel runs" in done.stdout) == (jax.default_backend() != "gpu")
    assert ("copy" in done.stdout) == ("no CUDA kernel runs" not in done.stdout)
    assert "\r" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "printed"),
    [
        (["--version"], 0, jaxkern.__version__),
        (["--help"], 0, "usage: python -m jaxkern"),
        (["--help"], 0, "no CUDA kernel runs"),
        (["cache", "--help"], 0, "usage: python -m jaxkern cache"),
        (["--quick"], 2, "unrecognized arguments: --quick"),
    ],
)
def test_arguments_of_the_doctor(arguments, status, printed, monkeypatch, capsys):
    """They are read before a backend of JAX starts, which takes memory on a GPU."""
    monkeypatch.setattr(sys, "argv", ["jaxkern", *arguments])
    for name in ("devices", "default_backend"):
        monkeypatch.setattr(jax, name, lambda *_: pytest.fail("a backend was asked for"))
    with pytest.warns(RuntimeWarning, match="found in sys.modules"), pytest.raises(SystemExit) as end:
        runpy.run_module("jaxkern", run_name="__main__", alter_sys=True)
    out = capsys.readouterr()
    assert end.value.code == status and printed in out.out + out.err


def test_doctor_finds_a_wrong_result(monkeypatch, capsys):
    right = jaxkern.softmax
    monkeypatch.setattr(checks, "INDEXED", ())
    monkeypatch.setattr(checks, "REDUCTIONS", ())
    monkeypatch.setattr(checks, "SELECTIONS", ())
    for name in [name for name in vars(checks) if name.startswith("check_")]:  # test_doctor runs them
        monkeypatch.setattr(checks, name, lambda dtype: 0.0)
    monkeypatch.setattr(checks, "tolerances", lambda: {"float32": 32.0})
    assert checks.show_checks()
    monkeypatch.setattr(jaxkern, "softmax", lambda x, axis=-1, where=None: right(x, axis, where) * 1.01)
    assert not checks.show_checks() and "WRONG" in capsys.readouterr().out
    monkeypatch.setattr(
        jaxkern, "softmax", lambda x, axis=-1, where=None: right(x, axis, where).at[..., 0].set(jnp.nan)
    )
    assert not checks.show_checks()


def test_doctor_without_a_device(monkeypatch, capsys):
    def devices():
        raise RuntimeError("Unable to initialize\nbackend 'cuda'")

    monkeypatch.setattr(jax, "devices", devices)
    assert doctor.main() == 1
    assert "devices        none, JAX does not start: Unable to initialize backend 'cuda'" in capsys.readouterr().out


def test_doctor_finds_a_missing_module(monkeypatch, capsys):
    monkeypatch.setattr(registry, "gpu_present", lambda: True)
    monkeypatch.setattr(registry, "kernels", registry.Module(reason="jaxkern._runtime was not built"))
    assert (
        not doctor.show_runtime()
        and "CUDA runtime   not loaded: jaxkern._runtime was not built" in capsys.readouterr().out
    )


# ---- small parts that nothing else shows


@pytest.mark.parametrize(
    "full, part, axis, shape",
    [
        ((4, 8, 5), (4, 1, 5), 2, (4, 1, 5)),
        ((4, 8, 5), (1, 1, 1), 0, (1, 1, 1)),
        ((2,) * 9, (2, 1) * 4 + (2,), 8, (2,) * 9),  # eight groups before the axis
        ((2,) * 9, (2, 1, 1, 2, 1, 1, 2, 2, 1), 8, (2,) * 9),  # five
        ((2,) * 9, (2, 1, 1, 2, 1, 1, 1, 1, 2), 8, (2, 1, 1, 2, 1, 1, 1, 1, 2)),  # four
        ((2, 1) * 4 + (3,), (2, 1) * 4 + (3,), 8, (2, 1) * 4 + (3,)),  # one: size 1 is no group
    ],
)
def test_mask_shape(full, part, axis, shape):
    assert rows.mask_shape(full, part, axis) == shape


def test_an_array_is_transposed_only_where_axes_are_apart():
    x = jnp.ones((2, 3, 1, 5))
    jaxpr = lambda axis: str(jax.make_jaxpr(lambda x: jaxkern.softmax(x, axis))(x))
    for axis in (0, 1, 2, 3, (0, 1), (1, 3), (1, 2, 3), None, (2,), ()):
        assert "transpose" not in jaxpr(axis)
    assert "transpose" in jaxpr((0, 3))
