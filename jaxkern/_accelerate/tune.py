"""Regions of rows that are timed, for `accelerate(tune=True)`: as XLA runs them, and as one kernel.

A region is timed alone, on random arrays, when a program that contains it is first lowered. Its times then replace the estimates of
cost.py. The cache folder keeps them in one small file for each region, and they are reused while the GPU and the versions of jaxlib and
jaxkern stay the same.
"""

import concurrent.futures
import contextlib
import dataclasses
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
COMPILING = 8  # regions that are compiled side by side
TOGETHER = 4  # calls in one program, at most, so that the host keeps ahead of short ones
HOST = 1.25  # a call that takes less than this many times its enqueueing is bounded by the host


class Times(typing.NamedTuple):
    """Seconds of a region in XLA and as one kernel. 0: no time can be known, so that the estimate decides."""

    xla: float
    kernel: float


UNKNOWN = Times(0.0, 0.0)
_turn = threading.Lock()  # one region at a time


class _Compiled(typing.NamedTuple):
    """A region in XLA and as one kernel, as functions of several sets of operands.

    types: of the operands of a set. calls: how many sets a function takes. copies: how many sets there are, at least.
    """

    forms: list
    types: list
    calls: int
    copies: int


def device_kind() -> str:
    """The GPU that regions are timed on; "" if none is, or if processes that run one program might decide apart."""
    if not registry.gpu_present() or not registry.kernels_run() or jax.process_count() > 1:
        return ""
    return jax.local_devices(backend="cuda")[0].device_kind


def prepare(functions) -> None:
    """Times the regions, `RowFunction`s, without kept times on the first GPU. All are compiled before, side by side."""
    kind = device_kind()
    wide = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
    new = [f for f in dict.fromkeys(functions) if kind and (f, kind, wide) not in _known]
    new = [f for f in new if _keep(f, kind, wide, _kept(f, kind, wide)) is None]
    if not new:
        return
    with _turn:
        for function, times in zip(new, timed(new, wide)):
            if isinstance(times, Exception):
                compat.warn_once(f"jaxkern.accelerate(tune=True): a region is not timed, and estimates decide: {times}")
                _known[function, kind, wide] = UNKNOWN
            else:
                _keep(function, kind, wide, times)
                with contextlib.suppress(OSError):
                    _write(*_place(function, kind, wide), times)


def timed(functions, wide) -> list:
    """The times of each region, or the error that it ended in.

    Other threads take them: contexts of this thread, such as a mesh, are the program's, which is being lowered.
    """
    device = jax.local_devices(backend="cuda")[0]

    def tried(f, *args):
        try:
            return f(*args)
        except jax.errors.JaxRuntimeError as error:  # such as no memory left
            return error

    with concurrent.futures.ThreadPoolExecutor(COMPILING) as pool:
        compiled = list(pool.map(lambda f: tried(_compiled, f, wide, device), functions))
        read = lambda c: c if isinstance(c, Exception) else tried(_timed, c, wide, device)
        return [pool.submit(read, c).result() for c in compiled]


@contextlib.contextmanager
def _plain(wide, device):
    """The contexts in which regions are compiled and called. wide: whether 64-bit types are on."""
    with switch.using(None), compat.enable_x64(wide), jax.default_device(device):
        yield


def _compiled(function, wide, device) -> _Compiled:
    with _plain(wide, device):
        place = jax.sharding.SingleDeviceSharding(device)
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in function.avals]
        copies = timing.copies_of(sum(a.size * a.dtype.itemsize for a in (*function.avals, *function.results)))
        calls = min(TOGETHER, copies)
        forms = (lambda operands: function(*operands), lambda operands: apply(function, operands))
        steps = [jax.jit(lambda several, f=f: list(map(f, several))) for f in forms]
        return _Compiled([step.lower([types] * calls).compile() for step in steps], types, calls, copies)


def _timed(compiled, wide, device) -> Times:
    with _plain(wide, device):
        draw = lambda: [timing.random_array(t, k) for k, t in enumerate(compiled.types)]
        sets = [([draw() for _ in range(compiled.calls)],) for _ in range(compiled.copies // compiled.calls)]
        found = [timing.Candidate(form, sets) for form in compiled.forms]
        for _ in range(REPEATS):
            for candidate in found:
                candidate.read()
    # The shortest of each: enqueueing takes longer where the host is busy with something else.
    bounded = lambda c: min(c.readings) < HOST * min(c.enqueueing)
    if all(map(bounded, found)):
        return UNKNOWN
    return Times(*(1e-6 * statistics.median(c.readings) / compiled.calls for c in found))


def measured(function, estimate):
    """The estimate with the times that `prepare` took, or as it is where there are none."""
    wide = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
    times = _known.get((function, device_kind(), wide), UNKNOWN)
    if times == UNKNOWN:
        return estimate
    return dataclasses.replace(estimate, xla=times.xla, kernel=times.kernel, measured=True)


_known: dict = {}  # {(region, GPU, whether 64-bit types are on): its times}


def _keep(function, kind, wide, times):
    """The times, which this process keeps from now on unless they are None."""
    if times is not None:
        _known[function, kind, wide] = times
    return times


def _place(function, kind, wide) -> tuple[str, str]:
    """The file of a region's times, "" if there is no cache folder, and what tells it from others."""
    key = "\n".join((repr(function), kind, str(wide), ".".join(map(str, compat.jaxlib())), package.__version__))
    folder = runtime.cache_folder()
    return os.path.join(folder, f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.times") if folder else "", key


def _kept(function, kind, wide) -> Times | None:
    """The times that an earlier process took."""
    path, key = _place(function, kind, wide)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(pathlib.Path(path).read_text())
        if kept["key"] == key:
            return Times(float(kept["xla"]), float(kept["kernel"]))
    return None


def _write(path, key, times) -> None:
    """Writes a file that other processes see whole or not at all."""
    if not path:
        return
    text = json.dumps({"key": key, **times._asdict()})
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=os.path.dirname(path))
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(draft, path)
