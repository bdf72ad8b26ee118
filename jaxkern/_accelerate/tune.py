"""Regions of rows that are timed, for `accelerate(tune=True)`: as XLA runs them, and as one kernel.

A region is timed alone, on random arrays, when a program that contains it is first lowered. Its times then replace the estimates of
cost.py. The cache folder keeps them in one small file for each region, and they are reused while the GPU and the versions of jaxlib and
jaxkern stay the same.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import statistics
import tempfile
import threading
import typing

import jax

from jaxkern._core import compat, package, registry, runtime, switch, timing
from jaxkern._engines.rows.primitive import apply

REPEATS = 5  # readings of each time
HOST = 1.25  # a call that takes less than this many times its enqueueing is bounded by the host


class Times(typing.NamedTuple):
    """Seconds of a region in XLA and as one kernel. 0: no time can be known, so that the estimate decides."""

    xla: float
    kernel: float


UNKNOWN = Times(0.0, 0.0)
_turn = threading.Lock()  # one region at a time


def device_kind() -> str:
    """The GPU that regions are timed on; "" if none is, or if processes that run one program might decide apart."""
    if not registry.gpu_present() or not registry.kernels_run() or jax.process_count() > 1:
        return ""
    return jax.local_devices(backend="cuda")[0].device_kind


def timed(function) -> Times:
    """The times of a `RowFunction` on the first GPU.

    Another thread takes them: contexts of this thread, such as a mesh, are the program's, which is being lowered.
    """
    wide = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    with _turn, concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(_timed, function, wide, jax.local_devices(backend="cuda")[0]).result()


def _timed(function, wide, device) -> Times:
    with switch.using(None), compat.enable_x64(wide), jax.default_device(device):
        place = jax.sharding.SingleDeviceSharding(device)
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in function.avals]
        moved = sum(a.size * a.dtype.itemsize for a in (*function.avals, *function.results))
        sets = [[timing.random_array(t, k) for k, t in enumerate(types)] for _ in range(timing.copies_of(moved))]
        forms = (lambda *operands: function(*operands), lambda *operands: apply(function, operands))
        found = [timing.Candidate(jax.jit(f).lower(*sets[0]).compile(), sets) for f in forms]
        for _ in range(REPEATS):
            for candidate in found:
                candidate.read()
    bounded = lambda c: statistics.median(c.readings) < HOST * statistics.median(c.enqueueing)
    if all(map(bounded, found)):
        return UNKNOWN
    return Times(*(1e-6 * statistics.median(c.readings) for c in found))


def measured(function, estimate):
    """The estimate with the times that were measured, or as it is where there are none."""
    kind = device_kind()
    times = _times(function, kind, bool(jax.config.jax_enable_x64)) if kind else UNKNOWN
    if times == UNKNOWN:
        return estimate
    return dataclasses.replace(estimate, xla=times.xla, kernel=times.kernel, measured=True)


@functools.lru_cache(maxsize=4096)
def _times(function, kind, wide) -> Times:
    """Times of this process or of earlier ones, or new ones. wide: whether 64-bit types are on."""
    key = "\n".join((repr(function), kind, str(wide), ".".join(map(str, compat.jaxlib())), package.__version__))
    folder = runtime.cache_folder()
    path = os.path.join(folder, f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.times") if folder else ""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(pathlib.Path(path).read_text())
        if kept["key"] == key:
            return Times(float(kept["xla"]), float(kept["kernel"]))
    try:
        times = timed(function)
    except jax.errors.JaxRuntimeError as error:  # such as no memory left
        compat.warn_once(f"jaxkern.accelerate(tune=True): a region is not timed, and estimates decide: {error}")
        return UNKNOWN
    with contextlib.suppress(OSError):
        _write(path, json.dumps({"key": key, **times._asdict()}))
    return times


def _write(path, text) -> None:
    """Writes a file that other processes see whole or not at all."""
    if not path:
        return
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=os.path.dirname(path))
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(draft, path)
