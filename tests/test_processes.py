"""Resources that several processes share: the compiler's cache, and the devices of one program."""

import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CPU = {"JAX_PLATFORMS": "cpu"}


def start(program, devices, *arguments, **environment):
    """A process that runs `program`, a string, with arguments, on so many CPU devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    paths = os.pathsep.join([*sys.path, str(ROOT / "examples")])  # of this process, whatever its library is
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **CPU, "XLA_FLAGS": flags, "PYTHONPATH": paths, **environment},
    )


def finish(*processes):
    """What each printed."""
    try:
        done = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, errors) in zip(processes, done):
        assert process.returncode == 0, out + errors
    return [out for out, _ in done]


# ---- kernels in place of references, without a GPU


EMULATED = """
import kernels_on_cpu
import emulated, jax, jaxkern, numpy as np

x = np.random.default_rng(0).standard_normal((5, 33)).astype(np.float32)
found = jax.jit(lambda x: (jaxkern.cumsum(x, axis=0), jaxkern.row_kernel(lambda x: x - x.max(-1, keepdims=True))(x)))(x)
np.testing.assert_allclose(found[0], x.astype(np.float64).cumsum(0), rtol=1e-5, atol=1e-5)
np.testing.assert_array_equal(found[1], x - x.max(-1, keepdims=True))
print(*sorted({header for (header, _, _), _ in emulated._ENTRIES}), kernels_on_cpu.REFUSED)
"""


@pytest.mark.process
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_kernels_run_by_emulation():
    (out,) = finish(start(EMULATED, 1))
    assert out.split() == ["loops/column_scan.cuh", "rows/rows.cuh", "rows/thread.cuh", "set()"]


# ---- the compiler's cache


CACHED = """
import jax, jax.numpy as jnp, jaxkern, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
mesh = jax.make_mesh((2,), ("r",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.device_put(jnp.arange(64.0).reshape(8, 8) / 9, NamedSharding(mesh, P("r")))
i = jnp.arange(8) % 3
for f in (jaxkern.softmax, jaxkern.log_softmax, lambda x: jaxkern.softmax(x, 0), lambda x: jaxkern.segment_max(x, i, 4),
          lambda x: jaxkern.segment_min(x, i, 4), lambda x: jaxkern.index_add(x, 0, i, x), lambda x: jaxkern.softmax(x, scale=0.5),
          lambda x: jaxkern.softmax_cross_entropy(x, i), lambda x: jaxkern.softmax_cross_entropy(x, i, z_loss=0.5)):
    g = lambda x: f(x)  # all have one name, so that only the operation distinguishes the programs
    hits.clear()
    compiled = jax.jit(g).lower(x).compile()
    print(len(hits), float(np.clip(compiled(x), -9, 9).ravel() @ np.arange(compiled(x).size)))
"""


def test_second_run_finds_every_program_in_the_cache(tmp_path):
    """It finds no program of another operation: addresses of callbacks are not unique between processes."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "1",
    }
    (first,), (second,) = (finish(start(CACHED, 2, **environment)) for _ in range(2))
    first, second = ([line.split() for line in out.splitlines()] for out in (first, second))
    assert len(first) == len(second) == 9
    assert [hits for hits, _ in first] == ["0"] * 9 and [hits for hits, _ in second] == ["1"] * 9
    assert [value for _, value in first] == [value for _, value in second]
    assert len({value for _, value in first}) == 9


# ---- what JAX refuses to operations that partition themselves


ABSTRACT = """
import jax, jax.numpy as jnp, jaxkern
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

abstract = AbstractMesh((4, 2), ("r", "c"), axis_types=(AxisType.Auto,) * 2)
x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=NamedSharding(abstract, P("r")))
f = jax.jit(lambda x: jaxkern.index_add(jaxkern.softmax(x), 0, jnp.arange(16), x))
for platform in ("cpu", "cuda"):
    exported = jax.export.export(f, platforms=[platform], disabled_checks=jaxkern.export_checks())(x)
    print(exported.nr_devices, "custom_call @jaxkern_softmax(" in exported.mlir_module(), platform)

meshes = [jax.make_mesh(*m, axis_types=(AxisType.Auto,) * len(m[0])) for m in (((2,), ("a",)), ((1, 2), ("b", "c")))]
x = jnp.arange(64.0).reshape(8, 8) / 9
two = jax.jit(lambda x: jaxkern.softmax(jax.lax.with_sharding_constraint(x, NamedSharding(meshes[1], P("c")))))
print(abs(two(jax.device_put(x, NamedSharding(meshes[0], P("a")))) - jax.nn.softmax(x)).max() < 1e-6)
"""


def test_batch_dimensions_alone_by_request():
    """Abstract meshes, and two meshes in one program."""
    (out,) = finish(start(ABSTRACT, 2, JAXKERN_PARTITION="batch"))
    on_cpu, on_cuda, two = out.splitlines()
    assert on_cpu == "8 False cpu"
    assert on_cuda == "8 False cuda"  # a launch list is for the arrays of one device
    assert two == "True"


# ---- one program on the devices of two processes


TRAINED = """
import re, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

address, rank, processes, *splits = sys.argv[1:]
if int(processes) > 1:
    jax.distributed.initialize(address, int(processes), int(rank))
import language_model as example

assert jax.device_count() == int(processes)
mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
put = lambda a, spec: jax.device_put(np.asarray(a), NamedSharding(mesh, spec))
p = example.PRESETS["tiny"]
for split in splits:
    def spread(path, a):
        vocabulary = any(getattr(k, "key", None) == "embedding" for k in path)
        return put(a, P("d") if vocabulary and split == "vocabulary" else P())

    run = example.Training(example.LIBRARIES["jaxkern"], p, seed=0)
    run.params, run.state = jax.tree_util.tree_map_with_path(spread, (run.params, run.state))
    rng = np.random.default_rng(0)
    for k in range(p.steps):  # each window counts to eight, over and over
        windows = (rng.integers(8, size=(p.batch, 1)) + np.arange(p.context + 1)) % 8 * 32
        windows = put(windows.astype(np.int32), P("d") if split == "data" else P())
        if k == 0:
            run._step = run._step.lower(run.params, run.state, windows).compile()
            kinds = r" ((?:all|collective|reduce)-(?:gather|reduce|to-all|permute|scatter))(?:-start)?\\("
            print("sent", *sorted(set(re.findall(kinds, run._step.as_text()))))
        run.step(windows)
    print("losses", *run.nats)
"""


def losses(out):
    return [list(map(float, line.split()[1:])) for line in out.splitlines() if line.startswith("losses")]


@pytest.mark.process
def test_two_processes_train_as_one():
    """The example, its batch or its vocabulary split over the processes: the same losses, by rounding. Sums and numbers of rows
    are sent, and neither logits nor the table are gathered."""
    for module in ("matplotlib", "tqdm"):
        pytest.importorskip(module, reason="the example needs the `examples` extra")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    gloo = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    both = [start(TRAINED, 1, address, rank, 2, "data", "vocabulary", **gloo) for rank in range(2)]
    printed = finish(start(TRAINED, 1, "", 0, 1, "data"), *both)
    (alone,), *split = map(losses, printed)
    assert alone[-1] < alone[0] - 0.5  # it learns
    assert split[0] == split[1] and len(split[0]) == 2
    for run in split[0]:
        assert run == pytest.approx(alone, rel=1e-5)
    for out in printed[1:]:
        sent = [line for line in out.splitlines() if line.startswith("sent")]
        assert sent == [
            "sent all-reduce",
            "sent all-gather all-reduce",
        ]  # numbers of rows, where the vocabulary is split
