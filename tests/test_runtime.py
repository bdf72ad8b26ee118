"""The runtime of CUDA kernels, without a GPU: launch lists, compilation, the cache on disk, the handler's plumbing.

Each test runs its own program in a new process, on a stand-in for the driver (runtime/fake_cuda.cc). Most of these processes are
forked from one that has imported JAX and done nothing else.
"""

import concurrent.futures
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import textwrap

import pytest

from jaxkern._core import launch, registry
from jaxkern._core.launch import Launch, Memset, Plan, f32, i64, operand, result, struct, u32

HERE = pathlib.Path(__file__).parent / "runtime"
MODULE = registry.kernels.module

pytestmark = [
    pytest.mark.skipif(MODULE is None or MODULE.compiler()[1] != "", reason="NVRTC is not installed"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="the stand-in for the driver needs g++"),
]


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    library = tmp_path_factory.mktemp("fake") / "libcuda.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "fake_cuda.cc")], check=True)
    return library


@pytest.fixture(scope="module")
def server(fake):
    """Forks a child for each program (runtime/setup.py)."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(HERE / "setup.py"), str(fake)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run(server, tmp_path):
    """run(statements, **environment): the lines that a program prints."""
    outputs = {name: tmp_path / name for name in ("stdout", "stderr")}

    def run(statements, **environment):
        environment = {"JAXKERN_CACHE_DIR": str(tmp_path / "cache"), **environment}
        request = {"statements": textwrap.dedent(statements), "environment": environment}
        print(json.dumps(request | {k: str(v) for k, v in outputs.items()}), file=server.stdin, flush=True)
        status = server.stdout.readline().strip()
        stdout, stderr = (path.read_text() for path in outputs.values())
        assert status == "0", status + stdout + stderr
        return stdout.splitlines()

    return run


@pytest.fixture
def run_alone(fake, tmp_path):
    """The same in a process that starts with this environment and may run beside others; returns nothing."""

    def run(statements, **environment):
        environment = {"JAXKERN_CACHE_DIR": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu", **environment}
        subprocess.run(
            [sys.executable, str(HERE / "setup.py"), str(fake), textwrap.dedent(statements)],
            env={**os.environ, **environment},
            check=True,
            timeout=120,
        )

    return run


@pytest.fixture
def run_on_gpu(tmp_path):
    """The same on the GPU."""

    def run(statements, **environment):
        environment = {
            "JAXKERN_CACHE_DIR": str(tmp_path / "cache"),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **environment,
        }
        done = subprocess.run(
            [sys.executable, str(HERE / "setup.py"), "cuda", textwrap.dedent(statements)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run


def files(folder):
    return sorted(p for p in folder.iterdir() if p.is_file())


def test_arguments_reach_the_kernel(run):
    lines = run("np.testing.assert_array_equal(jax.jit(lambda x: call(plan(), x))(x), expected)")
    assert [line.split(" ")[0] for line in lines] == ["load", "launch"]
    assert lines[1].startswith("launch 2,1,1 of 32,1,1 cluster 1 shared 0 _ZN7jaxkern5ProbeIfLb1EEE")


def test_what_is_loaded_is_loaded_once(run):
    lines = run("""
        import threading
        f = jax.jit(lambda x: call(plan(), x))
        threads = [threading.Thread(target=lambda: f(x).block_until_ready()) for _ in range(8)]
        [t.start() for t in threads], [t.join() for t in threads]
        np.testing.assert_array_equal(f(x), expected)
    """)
    assert lines.count("load") == 1 and len(lines) == 1 + 9


def test_kernels_are_compiled_ahead(run, tmp_path):
    run("""
        import time
        folder = pathlib.Path(runtime.cache_folder())
        for n, text in enumerate((program(plan(probe(True))), program(plan(probe(False)))), 1):
            module.prefetch(text, 90)
            for _ in range(300):
                time.sleep(0.1)
                if folder.is_dir() and len(list(folder.glob("*.jaxkern"))) == n:
                    break
            else:
                raise SystemExit("nothing was compiled")
    """)
    run("""
        for i in range(50):  # more than can be done before the process ends
            module.prefetch(program(plan(probe(True, kernel=f"Probe<float, {i} == 0>"))), 90)
    """)
    assert len(files(tmp_path / "cache")) < 50


def test_a_burst_of_kernels_is_compiled_by_several_threads(run):
    lines = run("""
        import time
        threads = lambda: len(os.listdir("/proc/self/task"))
        one = lambda i: program(Plan("probe", (probe(True, kernel=f"Probe<float, {i} == 0>"),)))
        module.prefetch(one(0), 90)
        folder = pathlib.Path(runtime.cache_folder())
        for _ in range(300):
            time.sleep(0.1)
            if folder.is_dir() and list(folder.glob("*.jaxkern")):
                break
        time.sleep(0.2)  # now one thread waits for more
        before = threads()
        for i in range(1, 20):
            module.prefetch(one(i), 90)
        print(threads() - before)
    """)
    assert int(lines[-1]) == min(len(os.sched_getaffinity(0)), 16) - 1


def test_without_threads_kernels_are_compiled_where_they_are_needed(run):
    lines = run("""
        import ctypes
        libc, attributes = ctypes.CDLL(None), (ctypes.c_char * 64)()
        libc.pthread_attr_init(attributes)
        assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 47)) == 0  # more than there are addresses
        assert libc.pthread_setattr_default_np(attributes) == 0
        two = program(plan(probe(True), probe(True, kernel="Probe<float, 1 == 1>")))
        module.prefetch(two, 90)
        error, y = launched(two)
        assert error == "", error
        np.testing.assert_array_equal(y, expected)
    """)
    assert [line.split(" ")[0] for line in lines] == ["load"] * 2 + ["launch"] * 2


FORKED = """
import os, signal, sys, threading, time
from jaxkern._core import registry

for n in range(8):
    registry.kernels.module.prefetch(sys.argv[1].replace("VECTOR", str(n)), 90)
child = os.fork()
if child == 0:
    signal.alarm(60)
    registry.kernels.module.prefetch(sys.argv[1], 90)
    for _ in range(8):  # they take the memory that the parent's threads had
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_exits(tmp_path):
    """It does not touch the parent's threads. JAX itself has no arrays here: its CPU client does not survive a fork."""
    text = launch.text("jaxkern_f", Plan("rows", (Launch("indexing/fill.cuh", "Fill<256, VECTOR>", [], 1, 1),)), [], [])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, text],
        env={**os.environ, "JAXKERN_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_of_the_driver_is_not_kept(run):
    lines = run("""
        os.environ["FAKE_OUT_OF_MEMORY"] = "1"
        print(launched(program(plan()))[0])
        del os.environ["FAKE_OUT_OF_MEMORY"]
        error, y = launched(program(plan()))
        assert error == "", error
        np.testing.assert_array_equal(y, expected)
    """)
    assert "a compiled kernel does not load: CUDA_ERROR_FAKE" in " ".join(lines)


def test_unaligned_buffers_get_launches_of_their_own(run):
    """They are loaded when they are first needed, even if a stream is being captured in a CUDA graph then."""
    lines = run("""
        for offset in (0, 4, 4):
            error, y = launched(program(plan()), offset)
            assert error == "", error
            np.testing.assert_array_equal(y, expected)
            os.environ["FAKE_CAPTURE"] = "1"
    """)
    assert [line.split(" ")[0] for line in lines] == ["load", "launch", "load", "launch", "launch"]
    assert "Lb1E" in lines[1] and all("Lb0E" in line for line in lines[3:])


def test_launch_options(run):
    lines = run("""
        big = probe(True, shared=100_000, cluster=16, grid=(64, 2), waves=1)
        few = probe(True, grid=1000, waves=3)
        call(plan(Memset(result(0), 32, 7), big, few), x)
    """)
    assert [line.split(" _ZN")[0] for line in lines] == [
        "load",
        "attribute 8 = 100000 on device 0",
        "attribute 14 = 1 on device 0",
        "memset 7, 32 bytes",
        "launch 48,2,1 of 32,1,1 cluster 16 shared 100000",  # 3 clusters of 16 fit the stand-in
        "launch 6,1,1 of 32,1,1 cluster 1 shared 0",  # 2 blocks of one multiprocessor, 3 waves
    ]


def test_shared_memory_is_never_taken_back(run):
    lines = run("""
        call(plan(probe(True, shared=100_000)), x)
        call(plan(probe(True, shared=49_152)), x)
        call(plan(probe(True, shared=120_000)), x)
    """)
    assert [line for line in lines if line.startswith("attribute")] == [
        "attribute 8 = 100000 on device 0",
        "attribute 8 = 120000 on device 0",
    ]


def test_shared_memory_beside_static_shared_memory(run):
    lines = run("call(plan(probe(True, shared=49_152)), x)")
    assert "attribute 8 = 49152 on device 0" in lines  # 48 KB is all that a block has without asking


def test_scratch_is_the_last_buffer(run):
    run("""
        text = program(plan(Memset(scratch(16), 4, 1), scratch=64))
        assert "bytes 32 32 64" in text and "memset p2+16 1 4" in text
    """)


def test_errors_name_the_operation_and_its_types(run):
    lines = run("""
        def fails(p, text=None):
            try:
                call(p, x, text).block_until_ready()
            except Exception as error:
                print(type(error).__name__, "|", " ".join(str(error).split()))
        fails(plan(probe(True, kernel="Probe<float, 2, 3>")))
        fails(plan(probe(True, block=2000)))
        fails(None, program(plan()).replace(f"jaxkern {jaxkern.__version__}", "jaxkern 99.0"))
        fails(None, program(plan(), (16,)))
        fails(None, "nonsense")
    """)
    lines = [line for line in lines if "|" in line]
    where = "jaxkern_probe(float32[8]) -> (float32[8]), probe"
    assert all(line.startswith("JaxRuntimeError") or line.startswith("XlaRuntimeError") for line in lines)
    assert where in lines[0] and "error:" in lines[0] and "Probe<float, 2, 3> of probe.cuh" in lines[0]
    assert where in lines[1] and "CUDA_ERROR_FAKE: a fake error" in lines[1]
    assert "made by jaxkern 99.0" in lines[2]
    assert "arrays of other sizes" in lines[3]
    assert "line 1 of a launch list cannot be read: nonsense" in lines[4]


def test_kernels_are_kept_on_disk(run, tmp_path):
    cached = 'print(module.compile("probe.cuh", "Probe<float, true>", 90)[2])'
    assert run(cached) == ["False"]
    assert run(cached) == ["True"]
    folder = tmp_path / "cache"
    (file,) = files(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(file.stat().st_mode) == 0o600

    assert (
        run(f"""
        import pathlib
        file = pathlib.Path({str(file)!r})
        whole = file.read_bytes()
        for damaged in (whole[:-1], whole[:100], b"", whole[:-5] + b"?" + whole[-4:], whole + b"?"):
            file.write_bytes(damaged)
            {cached}
            print(file.read_bytes() == whole)
    """)
        == ["False", "True"] * 5
    )


def test_other_compilers_gpus_and_headers_have_their_own(run, tmp_path):
    assert run("""
        for capability in (90, 80, 90):
            print(module.compile("probe.cuh", "Probe<float, true>", capability)[2])
        configure(headers_hash="other")
    """) == ["False", "False", "True"]
    assert run("""
        configure(headers_hash="other")
        print(module.compile("probe.cuh", "Probe<float, true>", 90)[2])
    """) == ["False"]
    assert len(files(tmp_path / "cache")) == 3


def test_a_cache_that_others_could_write_is_not_used(run, tmp_path):
    cached = 'print(module.compile("probe.cuh", "Probe<float, true>", 90)[2])'
    run(cached)
    folder = tmp_path / "cache"
    (file,) = files(folder)
    file.chmod(0o622)
    assert run(cached) == ["False"]  # and the file is written again
    assert run(cached) == ["True"]
    folder.chmod(0o777)
    assert run(cached) == ["False"]
    folder.chmod(0o755)
    assert run(cached) == ["True"]
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        assert run(cached) == ["False"]


def test_without_a_usable_folder_everything_works(run, tmp_path):
    (tmp_path / "file").write_text("")
    cached = 'print(module.compile("probe.cuh", "Probe<float, true>", 90)[2])'
    for folder in (str(tmp_path / "file" / "cache"), "", "/proc/jaxkern"):
        assert run(cached, JAXKERN_CACHE_DIR=folder) == ["False"]


def test_the_cache_is_bounded(run, tmp_path):
    folder = tmp_path / "cache"
    run("""
        module.compile("probe.cuh", "Probe<float, true>", 90)
        size = sum(p.stat().st_size for p in pathlib.Path(runtime.cache_folder()).iterdir())
        print(size)
    """)
    (first,) = files(folder)
    bound = 4 * first.stat().st_size
    os.utime(first, (1, 1))  # not used for long
    run(f"""
        configure(cache_bytes={bound})
        for capability in (80, 86, 89, 100):
            module.compile("probe.cuh", "Probe<float, true>", capability)
    """)
    assert not first.exists()
    assert sum(p.stat().st_size for p in files(folder)) <= bound


COMPILE = """
folder = pathlib.Path(runtime.cache_folder())
def compiled(*capabilities):
    for capability in capabilities:
        module.compile("probe.cuh", "Probe<float, true>", capability)
    return set(folder.iterdir())
"""


def test_only_the_caches_own_files_are_removed(run):
    run(
        COMPILE
        + textwrap.dedent("""
            (own,) = compiled(90)
            draft = own.with_name(own.name + ".q8Zv1B")
            names = ("notes.jaxkern.txt", own.name + ".bak", "x.jaxkern", own.name + ".q8Zv1B2", own.name.upper())
            others = {folder / name for name in names}
            for path in (draft, *others):
                path.write_bytes(b"jaxkern")
            for path in (own, draft, *others):
                os.utime(path, (1, 1))
            configure(cache_bytes=1)
            assert compiled(80) == others
        """)
    )


def test_what_stands_in_the_place_of_an_entry(run):
    """A FIFO does not block, and drafts of an earlier process with the same number do not stop a later one."""
    run(
        COMPILE
        + textwrap.dedent("""
            (entry,) = compiled(90)
            entry.unlink()
            os.mkfifo(entry)
            for n in range(9):
                entry.with_name(f"{entry.name}.{os.getpid()}.{n}").touch()
            compiled(90)
            assert entry.is_file() and entry.read_bytes()
        """)
    )


def test_entries_dated_in_the_future_are_removed_first(run):
    run(
        COMPILE
        + textwrap.dedent("""
            old = compiled(80, 86, 89)
            for path in old:
                os.utime(path, (4e9, 4e9))
            configure(cache_bytes=sum(path.stat().st_size for path in old) + 100)
            assert compiled(90) - old
        """)
    )


def test_many_processes_share_a_cache(run_alone, tmp_path):
    statement = """
        for flag in ("true", "false"):
            assert module.compile("probe.cuh", f"Probe<float, {flag}>", 90)[1]
    """
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: run_alone(statement), range(4)))
    assert len(files(tmp_path / "cache")) == 2


def test_dump(run_alone, tmp_path):
    run_alone('module.compile("probe.cuh", "Probe<float, true>", 90)', JAXKERN_DUMP=str(tmp_path / "dump"))
    found = {p.suffix: p for p in files(tmp_path / "dump")}
    assert set(found) == {".cu", ".log", ".cubin"}
    assert "Probe<float, true>" in found[".cu"].read_text() and "registers" in found[".log"].read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["", "--xla_gpu_enable_command_buffer= ", "--xla_gpu_graph_min_graph_size=1"])
def test_on_a_gpu(run_on_gpu, flags):
    run_on_gpu(
        """
        step = lambda x: call(plan(), x)
        for f in (step, jax.jit(step)):
            np.testing.assert_array_equal(f(x), expected)
        both = Memset(result(0), 32, 0xff), probe(True, grid=4096, waves=1, shared=100_000)
        np.testing.assert_array_equal(jax.jit(lambda x: call(plan(*both), x))(x), expected)

        @jax.jit
        def many(x):  # enough of them for a CUDA graph
            for _ in range(8):
                x = call(plan(), x) / 3 - 0.5 / 3
            return jax.lax.scan(lambda c, _: (call(plan(), c) / 3 - 0.5 / 3, None), x, length=5)[0]

        for k in range(5):
            np.testing.assert_allclose(many(x + k), x + k, rtol=1e-4, atol=1e-4)

        import threading
        found = [None] * 8
        def work(k):
            found[k] = jax.jit(lambda x: call(plan(), x + k))(x)
        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        [t.start() for t in threads], [t.join() for t in threads]
        for k in range(8):
            np.testing.assert_array_equal(found[k], 3 * (np.arange(8) + k) + 0.5)

        for device in jax.devices():
            np.testing.assert_array_equal(jax.jit(step)(jax.device_put(x, device)), expected)
        try:
            jax.block_until_ready(jax.jit(lambda x: call(plan(probe(True, kernel="Probe<float, 2, 3>")), x))(x))
            raise SystemExit("no error")
        except jax.errors.JaxRuntimeError as error:
            assert "jaxkern_probe(float32[8]) -> (float32[8]), probe" in str(error), error
    """,
        XLA_FLAGS=flags,
    )


@pytest.mark.gpu
def test_kernels_for_unaligned_buffers_are_loaded_under_capture(run_on_gpu):
    run_on_gpu("""
        import ctypes
        driver = ctypes.CDLL("libcuda.so.1")
        def cuda(name, *arguments):
            status = getattr(driver, name)(*arguments)
            assert status == 0, (name, status)
        many = jnp.arange(-1, 8, dtype=jnp.float32)  # x from the second element on
        y = jnp.zeros(8).block_until_ready()
        context, stream, graph, runs = (ctypes.c_void_p() for _ in range(4))
        cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        cuda("cuCtxSetCurrent", context)
        cuda("cuStreamCreate", ctypes.byref(stream), 1)
        for mode in (0, 1):  # global, of this thread
            text = program(Plan("probe", (probe(True),), unaligned=(probe(False, kernel=f"Probe<float, {mode} == 2>", waves=1),)))
            cuda("cuStreamBeginCapture_v2", stream, mode)
            addresses = [many.unsafe_buffer_pointer() + 4, y.unsafe_buffer_pointer()]
            error = module.launch(int(launch._key(text)), text, 0, addresses, [32, 32], stream.value)
            assert error == "", error
            cuda("cuStreamEndCapture", stream, ctypes.byref(graph))
            assert not np.asarray(jnp.copy(y)).any()
            cuda("cuGraphInstantiateWithFlags", ctypes.byref(runs), graph, ctypes.c_ulonglong(0))
            cuda("cuGraphLaunch", runs, stream)
            cuda("cuStreamSynchronize", stream)
            np.testing.assert_array_equal(jnp.copy(y), expected)
            cuda("cuMemsetD8_v2", ctypes.c_ulonglong(y.unsafe_buffer_pointer()), 0, ctypes.c_size_t(32))
    """)


@pytest.mark.gpu
def test_calls_leak_nothing(run_on_gpu):
    lines = run_on_gpu("""
        import resource, time
        f = jax.jit(lambda x: call(plan(), x))
        def calls(n):
            begin = time.perf_counter()
            for _ in range(n):
                y = f(x)
            y.block_until_ready()
            return (time.perf_counter() - begin) / n
        calls(2000)
        memory = lambda: (jax.devices()[0].memory_stats()["bytes_in_use"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        before, seconds, after = memory(), calls(10_000), memory()
        assert after[0] == before[0] and after[1] - before[1] < 4096, (before, after)
        plain = jax.jit(lambda x: x + 1)
        plain(x)
        begin = time.perf_counter()
        for _ in range(10_000):
            y = plain(x)
        y.block_until_ready()
        print(f"{1e6 * seconds:.1f} us per call, x + 1: {1e2 * (time.perf_counter() - begin):.1f}")
    """)
    print(lines[-1])


def test_text_of_a_launch_list():
    import jax
    import numpy as np

    x = jax.ShapeDtypeStruct((4, 8), np.float32)
    step = Launch(
        "a.cuh", "F<float>", [operand(0), struct(result(0, 16), u32(7), f32(0.1)), i64(-1)], grid=(3, 2), block=64
    )
    text = launch.text("jaxkern_f", Plan("rows", (step,)), [x], [x])
    assert text.splitlines()[1:] == [
        "operation jaxkern_f(float32[4,8]) -> (float32[4,8]), rows",
        "bytes 128 128",
        "alignment 1",
        "launch grid=3,2,1 block=64,1,1 cluster=1 shared=0 waves=0",
        "header a.cuh",
        "kernel F<float>",
        "args p0+0 {1 p1+16 u32:7 f32:0x1.99999a0000000p-4 } i64:-1",
    ]
    assert MODULE.check(text) == ""
    with pytest.raises(IndexError):
        launch.text("jaxkern_f", Plan("rows", (Launch("a.cuh", "F", [operand(1)], 1, 1),)), [x], [x])
    with pytest.raises(OverflowError):
        u32(-1)


def valid_text():
    import jax
    import numpy as np

    x = jax.ShapeDtypeStruct((4, 8), np.float32)
    arguments = [operand(0), struct(result(0, 16), u32(7), f32(0.1)), i64(-1)]
    step = Launch("a.cuh", "F<float>", arguments, grid=(3, 2), block=64)
    return launch.text("jaxkern_f", Plan("rows", (step, Memset(result(0, 64), 64, 255)), unaligned=(step,)), [x], [x])


@pytest.mark.parametrize(
    "old, new, reason",
    [
        *(
            ("u32:7", new, "is not an argument")
            for new in ("u32:7x", "u32:-1", "u32:4294967296", "u32:", "u33:7", "u32")
        ),
        *(("f32:0x1.99999a0000000p-4", f"f32:{v}", "is not an argument") for v in ("", "x", "1.0.0", "1,5", "1e39")),
        ("i64:-1", "i64:9223372036854775808", "is not an argument"),
        *(("grid=3,2,1", f"grid={v}", "is not an option") for v in ("3,2", "3,2,1,1", "3,2,x", "-1,1,1", "")),
        *(("cluster=1", v, "is not an option") for v in ("cluster=1.5", "cluster", "clusters=1")),
        ("shared=0", "shared=4294967296", "is not an option"),
        *(("bytes 128 128", f"bytes 128 {v}", "is not a number of bytes") for v in ("x", "-1", "9223372036854775808")),
        *(
            ("p1+16", v, "is not inside a buffer")
            for v in ("p2+0", "p1+129", "p1+-1", "p1+1x", "p1", "p+1", "p-1+0", "p99999999999+0")
        ),
        ("memset p1+64 255 64", "memset p1+64 255 65", "the memset ends beyond its buffer"),
        ("memset p1+64 255 64", "memset p1+64 255 9223372036854775807", "the memset ends beyond its buffer"),
        ("memset p1+64 255 64", "memset p1+64 256 64", "is not a byte"),
        *(("memset p1+64 255 64", f"memset p1+64 255 {v}", "is not a number of bytes") for v in ("-1", "64 1", "")),
        ("{1 p1+16", "{1 " * 9999 + "p1+16" + " }" * 9999, "nested more than"),
        ("f32:0x1.99999a0000000p-4 }", "f32:0x1.99999a0000000p-4", "a struct does not end"),
        *(("{1 p1", f"{{{v} p1", "is not an alignment") for v in ("0", "3", "512", "x", "")),
        ("i64:-1", "i64:-1 " * 64, "at most 64 arguments"),
        ("i64:-1", "{1 " + "i64:-1 " * 512 + "}", "of 4096 bytes together"),
        ("alignment 16", "alignment 16\nalignment 8", "at most 2 alignments"),
        *(
            ("alignment 16", f"alignment {v}", "must be a power of two up to 16")
            for v in ("0", "12", "32", "x", "", "8 8")
        ),
        ("alignment 1\n", "alignment 8\n", "without launches for unaligned buffers"),
        ("header a.cuh\nkernel F<float>\n", "", "a launch without a kernel"),
        ("operation", "operations", "no such line"),
    ],
)
def test_malformed_launch_lists_are_refused(old, new, reason):
    text = valid_text()
    assert MODULE.check(text) == "" and old in text
    assert reason in MODULE.check(text.replace(old, new, 1))
