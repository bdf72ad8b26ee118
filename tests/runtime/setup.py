"""The first lines of the programs of test_runtime.py: the runtime on the stand-in for the driver, and launch lists.

python setup.py FAKE_LIBRARY STATEMENTS      on host memory
python setup.py cuda STATEMENTS              on the GPU
python setup.py FAKE_LIBRARY                 for each line of standard input, in a child that need not import JAX again
"""

import gc
import json
import os
import pathlib
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from jaxkern._core import launch, registry, runtime
from jaxkern._core.launch import Launch, Memset, Plan, boolean, f32, f64, i32, operand, result, scratch, struct  # noqa: F401

HERE = pathlib.Path(__file__).parent
module = registry.kernels.module


def configure(**changes):
    nvrtc, builtins, includes = runtime.find_nvrtc()
    folders = [str(HERE / "kernels"), str(runtime.kernels_folder()), *includes]
    settings = {
        "version": jaxkern.__version__,
        "nvrtc": nvrtc,
        "builtins": builtins,
        "includes": folders,
        "headers_hash": "probe",
        "dump": os.environ.get("JAXKERN_DUMP", ""),
        "cache_folder": runtime.cache_folder(),
        "cache_bytes": 1 << 20,
    }
    module.configure(**{**settings, **changes})


def probe(vectors, count=8, kernel=None, **options):
    name = kernel or f"Probe<float, {'true' if vectors else 'false'}>"
    args = [struct(operand(0), i32(count), struct(boolean(True), f64(0.5)), boolean(False), result(0)), f32(3.0)]
    return Launch("probe.cuh", name, args, **{"grid": 2, "block": 32, **options})


def plan(*launches, **options):
    return Plan("probe", launches or (probe(True),), unaligned=(probe(False),), **options)


def program(p, shape=(8,)):
    aval = jax.ShapeDtypeStruct(shape, jnp.float32)
    return launch.text("jaxkern_probe", p, [aval], [aval])


def call(p, x, text=None):
    """Runs a plan through XLA, as a custom call."""
    text = text or program(p, x.shape)
    return jax.ffi.ffi_call("jaxkern_probe", jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x, program=text, key=launch._key(text)
    )


def launched(text, offset=0):
    """(error, result) of a launch list on `x` without XLA, at an address `offset` bytes beyond a multiple of 16."""
    a, b = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    skip, out = -a.ctypes.data % 16 + offset, -b.ctypes.data % 16
    a[skip : skip + 32].view(np.float32)[:] = x
    addresses = [a.ctypes.data + skip, b.ctypes.data + out]
    error = module.launch(int(launch._key(text)), text, 0, addresses, [32, 32])
    return error, b[out : out + 32].view(np.float32)


def next_program():
    """The statements of the next line of standard input, in a child; the parent prints the exit status of each child.

    A line is a JSON object: statements, environment, stdout and stderr (the names of files). The parent has no threads and no arrays.
    """
    gc.freeze()  # children do not walk through what they share
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            os.environ.update(request["environment"])
            for fd, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
            return request["statements"]
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


if __name__ == "__main__":
    statements = sys.argv[2] if len(sys.argv) > 2 else next_program()
    configure()
    if sys.argv[1] == "cuda":
        jax.ffi.register_ffi_target("jaxkern_probe", module.stages(), platform="CUDA")
    else:
        jax.ffi.register_ffi_target("jaxkern_probe", module.cpu_handler(), platform="cpu")
        assert module.load_driver(sys.argv[1]) == ""
    x = jnp.arange(8, dtype=jnp.float32)
    expected = 3 * np.arange(8, dtype=np.float32) + 0.5
    exec(statements)
