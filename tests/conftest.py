"""What every test shares: the devices are found once, and the types stay 32 bits wide unless asked."""

import collections
import functools
import gc
import itertools
import os
import pathlib
import sys
import zlib

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several test processes share a GPU
# Without a GPU, XLA's compiler for CUDA needs none of CUDA's libraries, whose versions JAX would check.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# Workers of pytest-xdist share out the GPUs of this list, one for each worker.
if "PYTEST_XDIST_WORKER" in os.environ and "TEST_GPUS" in os.environ:
    gpus = os.environ["TEST_GPUS"].split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(os.environ["PYTEST_XDIST_WORKER"][2:]) % len(gpus)]
import jaxlib.version

# XLA then compiles for the CPU in half the time: older emitters, and one object file per program, where 32 compiled in
# parallel would take more work. Before jaxlib 0.10.2 the older emitters convert float32 to 8-bit floats with two roundings,
# through float16. With XLA_FLAGS= in the environment XLA generates a user's code.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_parallel_codegen_split_count=1"
    + " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    * (jaxlib.version.__version_info__ >= (0, 10, 2)),
)

import jax
import pytest
from jax._src.interpreters import mlir

EMULATED = os.environ.get("EMULATED") == "1"
if EMULATED:  # before anything imports the library
    import kernels_on_cpu

from golden import Golden, recorded  # noqa: E402

from jaxkern._core import compat  # noqa: E402

# For tests of the benchmarks; last, so that the package under test stays the installed one.
sys.path.append(str(pathlib.Path(__file__).parent.parent))

ON_GPU = jax.default_backend() == "gpu"

if not ON_GPU:  # XLA does not make its own code for the CPU fast, nor do the programs that tests start
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)
    # JAX computes a program's key in the compilation cache even where there is no cache.
    jax.config.update("jax_enable_compilation_cache", False)
    # JAX keeps what it has traced and compiled, and every full collection walks through all of it.
    gc.set_threshold(20_000, 20, 50)
    # JAX makes an MLIR context with all its dialects for every program that it lowers, a fifth of the time of a small program.
    # Here 256 programs share one. It is not kept for ever, because a context keeps its programs' constants and locations.
    make_context, programs = mlir.make_ir_context, itertools.count()
    shared_context = functools.lru_cache(1)(lambda _: make_context())
    mlir.make_ir_context = lambda: shared_context(next(programs) // 256)


def pytest_addoption(parser):
    parser.addoption("--programs", type=int, default=5, help="how many programs each test of random programs makes")
    parser.addoption(
        "--every",
        type=int,
        default=1 if ON_GPU or EMULATED else 3,
        metavar="N",
        help="of the cases of each test, the first and one in N of the others; N is 1 by default with a GPU, and else 3",
    )
    parser.addoption("--seed", type=int, default=0, help="of random programs")
    parser.addoption("--golden", default="compare", help="write launch lists to tests/golden/ (write) or to a folder")


def pytest_configure(config):
    config.golden = Golden(config.getoption("--golden"))
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line(
        "markers",
        "sweep(n): many cases that differ in the kernel; without a GPU, where all run the same code, every nth",
    )
    config.addinivalue_line(
        "markers",
        "optimized: the result depends on the code that XLA makes for the CPU, and so all of XLA's optimizations are on",
    )
    config.addinivalue_line("markers", "process: runs a program for many seconds, and so begins before the others")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: "process" not in item.keywords)
    seen = collections.Counter()
    left_out = {item for item in items if not _is_chosen(item, config.getoption("every"), seen)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    if not ON_GPU:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Compares the launch lists that a test of plans makes with the golden ones; plans depend on the GPU, if there is one."""
    module = pyfuncitem.path.stem
    if ON_GPU or not module.endswith("_plan"):
        return (yield)
    with recorded() as plans:
        result = yield
    pyfuncitem.config.golden.check(module, pyfuncitem.name, plans)
    return result


def pytest_report_header(config):
    every = config.getoption("every")
    return f"of the cases of each test, one in {every} (--every 1: all)" if every > 1 else None


def pytest_terminal_summary(terminalreporter):
    if EMULATED and kernels_on_cpu.REFUSED:
        terminalreporter.section("kernels that the host does not compile: their references ran")
        terminalreporter.write_line("\n".join(sorted(kernels_on_cpu.REFUSED)))


def pytest_sessionfinish(session):
    session.config.golden.finish(
        keep=bool(session.config.getoption("keyword") or session.config.getoption("every") > 1)
    )
    gc.freeze()  # pytest collects garbage five times at its end, which would walk through all that JAX has kept


def _is_chosen(item, every, seen) -> bool:
    """Whether a case of a test runs. seen: how many cases of each test were asked for; it grows.

    All launch lists are made, and tests that start processes all run. A sweep takes every nth case, since its cases run the same code
    without a GPU. Of other tests the first case runs, and one in `every` by a checksum of its name: every nth case could miss a value of a
    parameter altogether.
    """
    function = getattr(item, "function", None)
    number, seen[function] = seen[function], seen[function] + 1
    sweep = item.get_closest_marker("sweep")
    if sweep and not ON_GPU:
        return number % max(every, sweep.args[0]) == 0
    if number == 0 or function is None or "process" in item.keywords or item.path.stem.endswith("_plan"):
        return True
    return zlib.crc32(item.name.encode()) % every == 0


@pytest.fixture(autouse=not ON_GPU)
def optimized(request):
    """Compiles tests marked `optimized` as a user's program is compiled."""
    marked = request.node.get_closest_marker("optimized") is not None
    if marked:
        jax.config.update("jax_disable_most_optimizations", False)
    yield
    if marked:
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def highest_precision():
    """Products of float32 with all its bits, which GPUs do not give unless asked."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def x64():
    """float64 arrays inside the test; its other arrays must name their dtype."""
    with compat.enable_x64():
        yield


@pytest.fixture
def measured_jaxlib(monkeypatch):
    """What is taken does not depend on the jaxlib of this process."""
    from jaxkern._accelerate import gate

    monkeypatch.setattr(compat, "jaxlib", lambda: tuple(map(int, gate.JAXLIB.split("."))))
