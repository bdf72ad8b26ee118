"""What more devices are worth: the time of a call on one, and on several.

    python -m benchmarks sharding                 on 1, 2, 4, ... of the devices that there are
    python -m benchmarks sharding --devices 1,4 --cases softmax

    rows       weak scaling: each device has as many bytes as one had alone, in rows or lanes that are independent
    step       the same of a training step of examples/language_model.py: each device with the batch that one had alone
    shared     strong scaling: the rows of one array are split
    classes    strong scaling: one array is split along the axis that is reduced, selected or scanned

Perfect scaling is 1: rows and the step take as long as on one device, the split array a part of it. XLA's own
partitioning of the functions of jax.nn, jnp and lax is timed beside it. Calls are enqueued one after the other and timed by
the host's clock, so that what is sent between devices and the start of every one's work are in it. Programs are compiled
beside each other, before anything is timed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from benchmarks import _goals, _report, _run, _timing

OPERATION = "sharding"
EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
COMPILERS = 8  # programs that are compiled at a time
SAMPLE = 0.05  # seconds of work, at least, that one reading of the clock is about


@dataclasses.dataclass(frozen=True)
class Array:
    """An argument: its shape where one device works alone, the dimension that is split, and how it is drawn."""

    shape: tuple[int, ...]
    split: int | None
    dtype: str
    below: int = 0  # of integers: up to this, or up to what a split of it grows to if negative


@dataclasses.dataclass(frozen=True)
class Case:
    """ours and theirs take the arrays; `grows`: the split dimensions get longer with the number of devices."""

    name: str
    group: str
    arrays: tuple[Array, ...]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    result: tuple[int | None, ...]  # the dimension of each result that is split
    required: float
    grows: bool = True


def _plain_loss(x, labels):
    x = x.astype(jnp.float32)
    return jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, labels[:, None], -1)[:, 0]


def _plain_loss_and_grad(x, labels):
    losses, pull = jax.vjp(lambda x: _plain_loss(x, labels), x)
    return losses, pull(jnp.ones_like(losses))[0]


def _gated(x, scale):
    """A row function that nobody named: a norm, a gate, and the largest element of the row."""
    x = x.astype(jnp.float32)
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
    return (jax.nn.silu(y) / (1 + jnp.max(jnp.abs(y), -1, keepdims=True))).astype(jnp.bfloat16)


def _recurrence(a, b):
    return jaxkern.linear_recurrence(a, b, axis=0)


def _plain_recurrence(a, b):
    """h[t] = a[t] * h[t - 1] + b[t], as programs in JAX compute it."""
    join = lambda first, then: (first[0] * then[0], then[0] * first[1] + then[1])
    return jax.lax.associative_scan(join, (a, b), axis=0)[1]


_SOFTMAX = jaxkern.softmax, jax.nn.softmax
TOP = 64


def _add(x, index, source):
    return jaxkern.index_add(x, 0, index, source)


def _plain_add(x, index, source):
    return x.at[index].add(source)


def cases(small: bool) -> list[Case]:
    """A gigabyte a device, and logits of a large vocabulary; `small`: what a few CPU cores can do."""
    rows, width = (64, 512) if small else (131072, 4096)
    tokens, classes = (64, 1024) if small else (4096, 131072)
    height, inner, count = (512, 64, 256) if small else (262144, 1024, 65536)
    few, vocabulary = (64, 1024) if small else (4096, 128256)
    steps, lanes = (64, 512) if small else (4096, 65536)
    labels = lambda n, split, m: Array((n,), split, "int32", m)
    logits = Array((few, vocabulary), 1, "bfloat16")
    add = lambda split: (
        Array((height, inner), split, "float32"),
        labels(count, None, -height),
        Array((count, inner), None, "float32"),
    )
    two = lambda split: (Array((steps, lanes), split, "float32"),) * 2
    found = lambda n, m: Array((n, m), 0, "float32")
    function = lambda split: (Array((rows, width), split, "bfloat16"), Array((width,), 0 if split else None, "float32"))
    top, plain_top = (lambda x, f=f: tuple(f(x, TOP)) for f in (jaxkern.top_k, jax.lax.top_k))
    return [
        Case("softmax rows", "rows", (Array((rows, width), 0, "bfloat16"),), *_SOFTMAX, (0,), 0.95),
        Case(
            "cross_entropy rows",
            "rows",
            (Array((tokens, classes), 0, "bfloat16"), labels(tokens, 0, classes)),
            jaxkern.softmax_cross_entropy_and_grad,
            _plain_loss_and_grad,
            (0, 0),
            0.95,
        ),
        Case("index_add rows", "rows", add(0), _add, _plain_add, (0,), 0.95),
        Case("row function rows", "rows", function(0), jaxkern.row_kernel(_gated), _gated, (0,), 0.95),
        Case("recurrence lanes", "rows", two(1), _recurrence, _plain_recurrence, (1,), 0.95),
        Case("top_k rows", "rows", (found(tokens, classes // 4),), top, plain_top, (0, 0), 0.95),
        *(
            dataclasses.replace(case, name=f"{case.name} of one array", group="shared", grows=False)
            for case in (
                Case("softmax rows", "", (Array((rows, width), 0, "bfloat16"),), *_SOFTMAX, (0,), 0.95),
                Case("index_add rows", "", add(0), _add, _plain_add, (0,), 0.95),
            )
        ),
        Case("softmax classes", "classes", (logits,), *_SOFTMAX, (1,), 0.85, grows=False),
        Case(
            "loss classes",
            "classes",
            (logits, labels(few, None, vocabulary)),
            jaxkern.softmax_cross_entropy,
            _plain_loss,
            (None,),
            0.85,
            grows=False,
        ),
        Case(
            "cross_entropy classes",
            "classes",
            (logits, labels(few, None, vocabulary)),
            jaxkern.softmax_cross_entropy_and_grad,
            _plain_loss_and_grad,
            (None, 1),
            0.85,
            grows=False,
        ),
        Case(
            "row function columns",
            "classes",
            function(1),
            jaxkern.row_kernel(_gated),
            _gated,
            (1,),
            0.95,
            grows=False,
        ),
        Case("recurrence steps", "classes", two(0), _recurrence, _plain_recurrence, (0,), 0.95, grows=False),
        Case(
            "top_k columns",
            "classes",
            (dataclasses.replace(found(tokens, classes // 4), split=1),),
            top,
            plain_top,
            (None, None),
            0.95,
            grows=False,
        ),
    ]


STEP, STEP_REQUIRED = "training step", 0.9


# --- what runs -----------------------------------------------------------------------------------


def _spec(split: int | None) -> P:
    return P() if split is None else P(*[None] * split, "d")


def _shape(array: Array, n: int) -> tuple[int, ...]:
    return tuple(s * n if d == array.split else s for d, s in enumerate(array.shape))


def _drawn(array: Array, mesh: Mesh, n: int, key: int) -> jax.Array:
    shape = _shape(array, n)

    def draw(key):
        if array.dtype == "int32":
            below = -array.below * n if array.below < 0 else array.below
            return jax.random.randint(key, shape, 0, below, jnp.int32)
        # Between 0 and 1, as the decay of a recurrence is.
        return jax.random.uniform(key, shape, array.dtype)

    return jax.jit(draw, out_shardings=NamedSharding(mesh, _spec(array.split)))(jax.random.key(key))


def _mesh(n: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), ("d",))


def _compiled(case: Case | None, n: int, small: bool, ours: bool):
    """The program of n devices; without a case, of the training step."""
    if case is None:
        return _step_compiled(n, small, ours)
    mesh = _mesh(n)
    types = [
        jax.ShapeDtypeStruct(_shape(a, n if case.grows else 1), a.dtype, sharding=NamedSharding(mesh, _spec(a.split)))
        for a in case.arrays
    ]
    found = tuple(NamedSharding(mesh, _spec(split)) for split in case.result)
    f = jax.jit(case.ours if ours else case.theirs, out_shardings=found if len(found) > 1 else found[0])
    return f.lower(*types).compile()


def _calls(case: Case, n: int, programs) -> dict[str, tuple[Callable[[], Any], str]]:
    """Name -> what runs one call, and the compiled program. programs: the futures of these, by number of devices and name."""
    arrays = [_drawn(a, _mesh(n), n if case.grows else 1, k) for k, a in enumerate(case.arrays)]
    compiled = {name: programs[n, name].result() for name in (_goals.OURS, "xla")}
    return {name: ((lambda run=run: run(*arrays)), run.as_text()) for name, run in compiled.items()}


def _training(small: bool, ours: bool) -> tuple[Any, Any]:
    """The training of examples/language_model.py, and its sizes."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    import language_model as example

    preset = example.PRESETS["tiny" if small else "gpt2"]
    return example.Training(example.LIBRARIES["jaxkern" if ours else "jax.nn"], preset, seed=0), preset


def _step_compiled(n: int, small: bool, ours: bool):
    """The program of a training step on n devices."""
    training, preset = _training(small, ours)
    place = lambda spec: NamedSharding(_mesh(n), spec)
    kept = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place(P()))
    state = jax.tree.map(kept, (training.params, training.state))
    windows = jax.ShapeDtypeStruct((n * preset.batch, preset.context + 1), jnp.int32, sharding=place(P("d")))
    return training._step.lower(*state, windows).compile()


def _step_calls(n: int, small: bool, programs) -> dict[str, tuple[Callable[[], Any], str]]:
    put = lambda a, spec: jax.device_put(a, NamedSharding(_mesh(n), spec))
    calls = {}
    for name in (_goals.OURS, "xla"):
        training, preset = _training(small, name == _goals.OURS)
        shape = n * preset.batch, preset.context + 1
        windows = put(np.random.default_rng(0).integers(256, size=shape).astype(np.int32), P("d"))
        state = [put(training.params, P()), put(training.state, P())]
        compiled = programs[n, name].result()

        def call(compiled=compiled, state=state, windows=windows):
            state[0], state[1], nats, _ = compiled(*state, windows)
            return nats

        calls[name] = call, compiled.as_text()
        del training
    return calls


def _timing_of(call: Callable[[], Any], repeats: int) -> _timing.Timing:
    """Microseconds a call, of calls in a row; one by one on CPU devices, whose programs may wait for each other for ever."""
    waits = jax.default_backend() == "cpu"

    def seconds(count):
        kept = collections.deque(maxlen=2)
        start = time.perf_counter()
        for _ in range(count):
            kept.append(jax.block_until_ready(call()) if waits else call())
        jax.block_until_ready(list(kept))
        return time.perf_counter() - start

    seconds(2)
    count = max(2, round(SAMPLE / max(seconds(2) / 2, 1e-6)))
    seconds(count)
    return _timing.Timing([seconds(count) / count * 1e6 for _ in range(repeats)], "host")


def _sent(text: str) -> dict[str, int]:
    """Kind of message -> how many a compiled program sends."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return dict(collections.Counter(re.findall(rf" ({kinds})(?:-start)?\(", text)))


def run(arguments: Any) -> dict[str, Any]:
    """Measures; what goes to the result file."""
    gpu = _run.backend() == "gpu"
    small, repeats = not gpu or arguments.quick, arguments.repeats or (9 if gpu else 3)
    counts = sorted(set(arguments.devices or [n for n in (1, 2, 4, 8) if n <= jax.device_count()]) | {1})
    if counts[-1] > jax.device_count():
        raise SystemExit(f"benchmarks: {counts[-1]} devices were asked for, and there are {jax.device_count()}")
    everything: dict[str, Case | None] = {case.name: case for case in cases(small)} | {STEP: None}
    chosen = {name: found for name, found in everything.items() if re.search(arguments.cases, name)}
    if not chosen:
        raise SystemExit(f"benchmarks: no case matches {arguments.cases!r}; there are: {', '.join(everything)}")
    rows: list[dict[str, Any]] = []
    pool = concurrent.futures.ThreadPoolExecutor(COMPILERS)
    programs = {
        name: {
            (n, who): pool.submit(_compiled, case, n, small, who == _goals.OURS)
            for n in counts
            for who in (_goals.OURS, "xla")
        }
        for name, case in chosen.items()
    }
    concurrent.futures.wait([future for futures in programs.values() for future in futures.values()])
    data = {
        "format": 1,
        "operation": OPERATION,
        "environment": _run.environment() | {"clock": "host", "devices": counts},
        "options": {"quick": small, "cases": arguments.cases, "repeats": repeats},
        "results": rows,
        "checks": [],
    }
    try:
        for name, case in _timing.progress(list(chosen.items()), len(chosen), "measure sharding"):
            alone: dict[str, float] = {}
            for n in counts:
                times, sent, handlers = {}, {}, []
                calls = _calls(case, n, programs[name]) if case else _step_calls(n, small, programs[name])
                for who, (call, text) in calls.items():
                    handlers += re.findall(r'custom_call_target="(jaxkern\w*)"', text)
                    times[who] = _timing_of(call, repeats)
                    sent[who] = _sent(text)
                rows.append(_row(name, case, n, times, sent, alone, gpu) | {"handlers": sorted(set(handlers))})
            if arguments.out is not None:
                _report.save(data, arguments.out)  # XLA compiles the training step for a minute and is not interrupted
    except KeyboardInterrupt:
        if not rows:
            raise
        print(f"benchmarks: interrupted; {len(rows)} results are kept", file=sys.stderr)
    return data


def _row(name, case, n, times, sent, alone, gpu) -> dict[str, Any]:
    medians = {who: timing.median for who, timing in times.items()}
    if n == 1:
        alone.update(medians)
    grows = case is None or case.grows
    scaling = {who: alone[who] / us / (1 if grows else n) for who, us in medians.items()}
    required = case.required if case else STEP_REQUIRED
    goals = (
        [
            {
                "goal": "scaling",
                "required": required,
                "value": round(scaling[_goals.OURS], 4),
                "met": scaling[_goals.OURS] >= required,
            }
        ]
        if gpu and n > 1
        else []
    )
    first = case.arrays[0] if case else None
    return {
        "case": f"{name}, {n}",
        "of": name,
        "group": case.group if case else "step",
        "devices": n,
        "shape": list(first.shape) if first else [],
        "dtype": first.dtype if first else "-",
        "op": name.split()[0],
        "direction": "forward",
        "times": {who: t.to_json() for who, t in times.items()},
        "copy_ratio": {},
        "scaling": {who: round(v, 4) for who, v in scaling.items()},
        "sent": sent,
        "goals": goals,
    }


def table(data: dict[str, Any]) -> str:
    lines = [["case", "shape alone", "dtype", "devices", "jaxkern", "xla", "scaling", "of xla", "sent", "verdict"]]
    for row in data["results"]:
        times = _report.medians(row)
        sent = " ".join(f"{count} {kind}" for kind, count in row["sent"][_goals.OURS].items())
        verdict = "-" if not row["goals"] else "met" if all(g["met"] for g in row["goals"]) else "missed: scaling"
        lines.append(
            [
                row["of"],
                "x".join(map(str, row["shape"])) or "-",
                row["dtype"],
                str(row["devices"]),
                *(_report.time_text(times.get(who)) for who in (_goals.OURS, "xla")),
                *(f"{row['scaling'][who]:.3f}" for who in (_goals.OURS, "xla")),
                sent or "-",
                verdict,
            ]
        )
    return _report.align(lines)
