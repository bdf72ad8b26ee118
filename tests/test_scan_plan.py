"""Plans of loops: what the kernels compute (run on the CPU), that they compile for GPUs, and how they are laid out."""

import functools
import warnings

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
import scan_reference
from scan_functions import FUNCTIONS

import jaxkern
from jaxkern._core import algorithms, compat, device, launch, registry
from jaxkern._engines.loops import ahead, pairs, plan, row_nests, tuning
from jaxkern._engines.loops.generate import Core
from jaxkern._engines.loops.program import Program

FEW = device.Device(1, 90, 227 * 1024, 60 << 20)  # threads take several lanes early


def scans(jaxpr) -> list:
    """The equations of all scans in a jaxpr."""
    found = []
    for e in jaxpr.eqns:
        params = jax.tree.leaves(list(e.params.values()), is_leaf=lambda p: hasattr(p, "eqns"))
        inner = [getattr(p, "jaxpr", p) for p in params]
        found += [e] if e.primitive.name == "scan" else [s for j in inner if hasattr(j, "eqns") for s in scans(j)]
    return found


def traced(name, shape, length, dtype, gradient):
    """The scans of an entry of FUNCTIONS, or of its gradients by all operands."""
    run, operands = FUNCTIONS[name][0](shape, length, dtype)
    f = lambda *xs: run(jax.lax.scan, *xs)
    if not gradient:
        return scans(jax.make_jaxpr(f)(*operands).jaxpr)
    at = [k for k, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def loss(*ws):
        given = dict(zip(at, ws))
        ys = jax.tree.leaves(f(*(given.get(k, x) for k, x in enumerate(operands))))
        return sum(
            jnp.sum(jnp.sin(jnp.real(y).astype(jnp.float32))) for y in ys if jnp.issubdtype(y.dtype, jnp.inexact)
        )

    return scans(jax.make_jaxpr(jax.grad(loss, range(len(at))))(*(operands[k] for k in at)).jaxpr)


def planned(equation, on=device.H200):
    """(plan, core) of a scan."""
    closed, (num_consts, num_carry) = equation.params["jaxpr"], compat.counts_of_scan(equation.params)
    core = Core(Program(closed.jaxpr, closed.consts, num_consts, num_carry, "test"))
    return plan.plan(on, core, equation.params["length"], equation.params["reverse"]), core


def random(aval, rng):
    if is_key(aval):
        return jax.random.wrap_key_data(rng.integers(0, 1 << 32, (*aval.shape, 2), np.uint32))
    if aval.dtype == np.bool_:
        return rng.random(aval.shape) < 0.5
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return rng.integers(0, 9, aval.shape).astype(aval.dtype)
    x = rng.uniform(0.1, 0.9, aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return np.asarray(x * np.exp(6j * rng.random(aval.shape)), aval.dtype)
    return np.asarray(x, aval.dtype)


def is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def numbers(x):
    return jax.random.key_data(x) if is_key(x) else x


CASES = [
    ("recurrence", (40,), 7, "float32", True, "lanes"),
    ("recurrence", (37,), 100, "float32", False, "lane"),
    ("recurrence", (3, 5), 1, "float64", True, "lane"),
    ("advantages", (1024,), 7, "float32", True, "lanes"),
    ("gated", (12, 128), 9, "bfloat16", True, "lanes"),
    ("gated", (3, 7), 64, "float16", True, "lane"),
    ("heston", (1536,), 5, "float32", True, "lanes"),
    ("neurons", (33,), 130, "float32", True, "lane"),
    ("average", (4096,), 64, "bfloat16", False, "lanes"),
    ("shapes", (48, 32), 6, "float32", False, "lanes"),
    ("shapes", (5, 7), 3, "bfloat16", False, "lane"),
    ("plain", (40,), 5, "float32", False, "lanes"),
    ("scalars", (), 9, "float32", True, "lane"),
    ("counters", (2, 2048), 7, "float32", False, "lanes"),
    ("walk", (1024,), 3, "float32", True, "lanes"),
    ("orbit", (5,), 6, "float32", True, "lane"),
    ("modes", (3, 4), 5, "float32", True, "lane"),
    ("hidden", (5,), 4, "float32", True, "lane"),
    ("recurrence", (1,), 9000, "float32", False, "rows"),
    ("advantages", (3,), 700, "float32", False, "columns"),
    ("oscillators", (40,), 600, "float32", True, "columns"),
    ("spreading", (20, 40), 6, "float32", True, "lanes"),
    ("pieces", (3, 20), 4, "float32", True, "lanes"),
    ("indexed", (3, 7), 5, "float32", True, "lane"),
    ("indexed", (5,), 4, "float64", False, "lane"),
    ("indexed", (5,), 4, "bfloat16", False, "lane"),
]


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@plans.needs_runtime
@pytest.mark.parametrize("name, shape, length, dtype, gradient, algorithm", CASES)
def test_kernels_on_the_cpu(name, shape, length, dtype, gradient, algorithm, monkeypatch):
    """Every element is written, nothing is read or written out of bounds, at any alignment, and results are right."""
    for threads in ("VECTOR_THREADS", "BUSY_THREADS"):
        monkeypatch.setattr(tuning, threads, 8)
    with compat.enable_x64(dtype == "float64"):
        found = traced(name, shape, length, dtype, gradient)
        assert len(found) == 1 + gradient
        forced = "lanes" if algorithm in ("lane", "lanes") else algorithm
        with algorithms.force({"scan": forced}):
            made = [planned(e, FEW) for e in found]
        for e, (launches, core) in zip(found, made):
            assert launches.algorithm == forced
            run_on_the_cpu(e, launches, core, dtype)
        vectors = any(launches.unaligned is not None for launches, _ in made)
        assert forced != "lanes" or vectors == (algorithm == "lanes")


def run_on_the_cpu(e, made, core, dtype):
    program, given, avals, wanted = evaluated(e, core.program, dtype)
    overwritten = tuple(plan.in_place(core, made.algorithm).items())
    for unaligned, aliases in ((False, ()), (True, ()), *([(False, overwritten)] if overwritten else [])):
        agree(program.join(run(made, core, given, avals, e.params["length"], unaligned, aliases)), wanted, dtype)


def evaluated(e, program, dtype):
    """(program, its operands, the types of its results, the results of the scan) for random numbers."""
    rng = np.random.default_rng(0)
    args = [random(v.aval, rng) for v in e.invars]
    plain = scan_reference.scan if dtype in ("float16", "bfloat16") else compat.bind_equation
    wanted = list(map(numbers, plain(e, *(x if is_key(x) else jnp.asarray(x) for x in args))))
    captured = [c for _, c in program.captured.values()]
    given = list(map(np.asarray, program.split([*captured, *map(numbers, args)])))
    return program, given, program.parts_of([compat.physical(v.aval) for v in e.outvars]), wanted


def run(made, core, given, avals, length, unaligned, aliases=()) -> list:
    """The results of a program by its kernel. aliases: pairs of an operand and the result that has its memory."""
    plans.check_limits(made, FEW)
    program, first = core.program, core.program.num_consts
    starts = {first + k: np.asarray(core.first(k, given[first + k])) for k in program.linear}
    reads = [starts.get(k, given[k]) for k in (*core.consts, *program.inits, *core.xs)]
    arrays = emulated.run(made, reads, core.shapes(length), unaligned, aliases=aliases)
    return core.after(list(map(jnp.asarray, arrays)), {k: given[first + k] for k in program.zeros}, avals)


def agree(ours, wanted, dtype):
    for y, want in zip(ours, wanted, strict=True):
        assert y.dtype == want.dtype
        y, want = (np.asarray(v, np.complex128 if np.iscomplexobj(v) else np.float64) for v in (y, want))
        tolerance = {"float64": 1e-13, "float32": 3e-5, "float16": 3e-3, "bfloat16": 2e-2}[dtype]
        np.testing.assert_allclose(y, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@plans.needs_runtime
def test_gradients_of_parts_of_a_constant():
    """The gradient of each row of w is padded with zeros and added to the others; all are sums over lanes."""

    def loss(w, x):
        body = lambda h, x: ((1 - w[0]) * h + w[1] * jnp.tanh(w[2] * h + x), h)
        return jnp.sum(jnp.sin(jax.lax.scan(body, jnp.zeros(x.shape[1:]), x)[1]))

    array = lambda *s: jax.ShapeDtypeStruct(s, "float32")
    again = jax.make_jaxpr(jax.grad(jax.checkpoint(loss), (0, 1)))(array(3, 4), array(5, 40, 4)).jaxpr
    made, core = planned(scans(again)[-1], FEW)
    assert len(core.program.accumulators) == 3
    run_on_the_cpu(scans(again)[-1], made, core, "float32")


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@plans.needs_runtime
@pytest.mark.parametrize("low, high", [(-10, 10), (5, -5)])
def test_a_padding_that_shifts_elements(low, high):
    """It moves data along a long dimension that its operand and its result share, which is cut into pieces too."""
    body = lambda h, x: (0.5 * h + jax.lax.pad(h, jnp.float32(2), [(low, high, 0)]) * x, h)
    f = lambda h, x: jax.lax.scan(body, h, x)
    array = lambda *s: jax.ShapeDtypeStruct(s, "float32")
    (e,) = scans(jax.make_jaxpr(f)(array(20), array(3, 20)).jaxpr)
    run_on_the_cpu(e, *planned(e, FEW), "float32")


def walks(shape, length):
    """A scan of walks with a key for each row, whose noise depends on the time, too."""

    def body(carry, dt):
        keys, count, x = carry
        keys, subs = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        noise = jax.vmap(lambda key: jax.random.normal(key, shape[1:]))(subs)
        x = x + noise * jnp.sqrt(dt) * (count % 3)
        return (keys, count + 1, x), (jax.random.key_data(keys)[:, 0] % 7, 2 * x, dt)

    keys = jax.random.split(jax.random.key(0), shape[0])
    f = lambda keys, x, dt: jax.lax.scan(body, (keys, 0, x), dt)
    return scans(jax.make_jaxpr(f)(keys, jnp.zeros(shape), jnp.ones(length)).jaxpr)


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@plans.needs_runtime
@pytest.mark.parametrize("name", ["walk", "walks"])
def test_what_is_the_same_in_many_lanes_runs_ahead(name):
    """Two kernels: one of keys, in one lane or in a lane for each key, and one of all lanes, which splits no key."""
    (e,) = walks((3, 128), 5) if name == "walks" else traced("walk", (512,), 3, "float32", False)
    closed, counts = e.params["jaxpr"], compat.counts_of_scan(e.params)
    program = Program(closed.jaxpr, closed.consts, *counts, "test")
    parts, length = ahead.split(program, FEW.sm_count), e.params["length"]
    assert [len(part.program.dims) for part in parts] == [len(program.dims) - 1, len(program.dims)]
    steps = [len(part.program.steps) for part in parts]
    assert sum(steps) < 1.1 * len(program.steps) and steps[0] > 100
    _, pool, avals, wanted = evaluated(e, program, "float32")
    ours = {}
    for part in parts:
        core = Core(part.program, length=length)
        made = plan.plan(FEW, core, length, e.params["reverse"])
        ys = run(made, core, [pool[k] for k in part.given], ahead.types(part, avals, length), length, False)
        pool += list(map(np.asarray, ys))
        ours.update(zip(part.results, ys))
    agree(program.join([ours[k] for k in range(len(ours))]), wanted, "float32")


def test_what_does_not_run_ahead():
    """Cheap steps, few lanes, and what depends on all lanes or has as many."""
    for name, shape in (("counters", (64, 64)), ("heston", (4096,)), ("gated", (4, 1024)), ("walk", (128,))):
        (e,) = traced(name, shape, 3, "float32", False)
        closed, counts = e.params["jaxpr"], compat.counts_of_scan(e.params)
        assert ahead.split(Program(closed.jaxpr, closed.consts, *counts, "test"), FEW.sm_count) is None


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@plans.needs_runtime
@pytest.mark.parametrize(
    "name, shape, length, order, algorithm",
    [
        ("gated", (4, 512), 7, (1, 0, 2), "lanes"),
        ("gated", (8, 3), 7, (2, 0, 1), "lanes"),
        ("gated", (2, 5), 7, (1, 2, 0), "lanes"),
        ("recurrence", (50,), 150, (1, 0), "rows over warps"),
        ("recurrence", (3,), 2000, (1, 0), "rows over blocks"),
        ("recurrence", (3,), 9001, (1, 0), "rows over tiles"),
        ("advantages", (2, 3), 200, (1, 2, 0), "rows over warps"),
        ("gated", (2, 16), 7, None, "lanes"),
        ("recurrence", (3, 32), 2000, None, "columns over tiles"),
    ],
)
def test_steps_along_any_axis(name, shape, length, order, algorithm, monkeypatch):
    """xs and ys whose dimensions lie in memory in another order, steps among them; order None: the first xs is the same in all steps
    and along the first dimension, and lies in memory once."""
    for threads in ("VECTOR_THREADS", "BUSY_THREADS"):
        monkeypatch.setattr(tuning, threads, 8)
    rng = np.random.default_rng(0)
    for e in traced(name, shape, length, "float32", True):
        closed, (num_consts, num_carry) = e.params["jaxpr"], compat.counts_of_scan(e.params)
        program = Program(closed.jaxpr, closed.consts, num_consts, num_carry, "test")
        both = {k: v for k, v in enumerate((*program.operands, *program.results)) if len(v.set()) == len(program.dims)}
        is_ys = lambda k: k - len(program.operands) >= num_carry
        is_xs = lambda k: num_consts + num_carry <= k < len(program.operands)
        orders = {k: order or (2,) for k in both if is_xs(k) or (order and is_ys(k))}
        orders = orders if order else dict([*orders.items()][:1])
        core = Core(program, orders, length)
        with algorithms.force({"scan": algorithm.split()[0]} if order is None else {}):
            made = plan.plan(FEW, core, length, e.params["reverse"])
        assert made.algorithm == algorithm.split()[0]
        assert made.algorithm == "lanes" or f"kOver{algorithm.split()[-1][:-1].title()}" in made.launches[-1].name
        args = [random(v.aval, rng) for v in e.invars]
        for k in orders if order is None else ():
            args[k] = np.broadcast_to(args[k][0, 0], args[k].shape)
        wanted = compat.bind_equation(e, *map(jnp.asarray, args))
        turned = lambda x, own: np.ascontiguousarray(x.transpose(own) if order else x[0, 0])
        sums, lies = program.zeros, lambda k: turned(args[k], orders.get(k))
        reads = [*core.consts, *program.inits, *core.xs]
        arrays = emulated.run(made, [lies(k) if k in orders else args[k] for k in reads], core.shapes(length), False)
        inits = {k: args[num_consts + k] for k in sums}
        ours = core.after(list(map(jnp.asarray, arrays)), inits, [v.aval for v in e.outvars])
        for y, want in zip(ours, wanted, strict=True):
            np.testing.assert_allclose(y, want, rtol=3e-5, atol=3e-5 * np.abs(want).max())


@plans.needs_nvrtc
@pytest.mark.parametrize("capability", (80, 90, 120))
def test_kernels_compile(capability):
    name, shape, dtype = {
        80: ("gated", (64, 128), "bfloat16"),
        90: ("oscillators", (64,), "float32"),
        120: ("shapes", (512, 1024), "float32"),
    }[capability]
    for e in traced(name, shape, 600 if name == "oscillators" else 64, dtype, name != "shapes"):
        made, _ = planned(e)
        for step in made.launches[-1:] + (made.unaligned or ())[-1:]:
            assert registry.kernels.module.compile(step.header, step.name, capability, step.source)


@pytest.mark.parametrize("name", ["log", "pow", "lgamma"])
def test_no_step_is_loaded_further_ahead_than_a_load_takes(name):
    """Unrolled beyond it, 64 steps of lgamma took 2.4 s to compile, and 93 of a logarithm half a second."""
    f = (lambda c: jnp.abs(c) ** 1.3) if name == "pow" else getattr(jax.lax, name)
    cheap, dear = (lambda c, x: (jnp.maximum(0.5 * c, x), c)), (lambda c, x: (f(c) + x, c))
    lengths = []
    for step in (cheap, dear):
        (e,) = scans(
            jax.make_jaxpr(lambda xs: jax.lax.scan(step, xs[0], xs))(jax.ShapeDtypeStruct((512, 8192), "f4")).jaxpr
        )
        made, core = planned(e)
        ahead, rest = map(int, made.launches[0].name.split(", ")[2:4])
        assert (ahead + rest) * core.function.code <= 1.5 * tuning.LATENCY
        lengths.append(ahead)
    assert lengths[0] > lengths[1] >= tuning.LEAST_AHEAD


def test_the_emulator_returns_scalars():
    made = launch.Plan("zero", (launch.Memset(launch.result(0), 4),))
    (y,) = emulated.run(made, [], [((), np.float32)])
    assert y.shape == () and y == 0


@pytest.mark.parametrize(
    "f", [jnp.exp, jnp.abs, jnp.conj, lambda z: z * (2 - 1j), lambda z: z + z, lambda z: (2 + 1j) / z]
)
def test_complex_numbers_that_are_not_finite(f):
    """Parts of these are NaN where XLA's are: exp(100) is infinite, and its imaginary part 0. The size of an infinite number was NaN
    in XLA before jaxlib 0.11 if its other part is NaN; here, and in NumPy, it is infinite."""
    parts = np.float32([0, 1, -2, 100, 1e30, np.inf, -np.inf, np.nan])
    z = np.zeros(parts.size**2, np.complex64)
    z.real, z.imag = np.repeat(parts, parts.size), np.tile(parts, parts.size)
    of_parts = pairs.expanded(lambda x: [f(x)], [z.dtype])
    agree = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    found, wanted = jax.jit(lambda z: (jax.vmap(lambda x: of_parts(x)[0])(z), f(z)))(z)
    wanted = np.abs(z) if f is jnp.abs else wanted
    agree(np.real(found), np.real(wanted))
    agree(np.imag(found), np.imag(wanted))


@plans.needs_nvrtc
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_large_angles_are_reduced_in_one_place(name):
    """Inlined in each of 64 steps, the reduction of large angles took two thirds of a second to compile."""

    def compiled(steps):
        f = lambda xs: jaxkern.scan(lambda c, x: (getattr(jnp, name)(c) + x, c), xs[0], xs)
        (kernel,) = jaxkern.source(f)(jax.ShapeDtypeStruct((steps, 4096), jnp.float32))
        assert not kernel.problem
        return kernel

    few, many = compiled(4), compiled(256)
    assert few.kernel != many.kernel  # which unrolls more steps
    assert 0 < many.spills == few.spills  # the digits of such an angle are the only array in local memory


def test_cotangents_of_carries_that_broadcast_are_sums_of_lanes():
    """Of a scalar, and of numbers for each feature that it enters; of few lanes and many."""
    for shape in ((20, 40), (3, 4)):
        program = planned(traced("spreading", shape, 2, "float32", True)[-1])[1].program
        assert {program.carries[k].aval.shape for k in program.linear} == {(), shape[1:]}
        assert program.rank == 2 and not program.has_rows


@pytest.mark.parametrize(
    "shapes", [[(3,), (3, 8, 4)], [(3, 4), (3, 8, 4)], [(8, 3), (3, 8)], [(4, 3), (3, 8, 4)]], ids=str
)
def test_carries_that_no_operation_relates(shapes):
    """Under vmap, a number for each example lacks the last lanes of other carries. Any lanes of its size will do."""
    f = lambda h: jax.lax.scan(lambda h, _: ([c * 0.5 for c in h], None), h, length=5)[0]
    (e,) = scans(jax.make_jaxpr(f)([jax.ShapeDtypeStruct(s, "float32") for s in shapes]).jaxpr)
    made, core = planned(e)
    assert core.program.rank == len(shapes[1])
    if shapes[0] == (4, 3):  # lies across the other carry
        run_on_the_cpu(e, made, core, "float32")


def test_lanes_of_a_thread_far_apart():
    """Where steps lie along another axis, distances of lanes need 64 bits from 2^31 elements on."""
    for steps, far in ((1 << 20, "false"), (1 << 30, "true")):
        (e,) = traced_shape((3, 3), 1, "bfloat16")
        closed, counts = e.params["jaxpr"], compat.counts_of_scan(e.params)
        program = Program(closed.jaxpr, closed.consts, *counts, "test")
        core = Core(program, {sum(counts): (1, 0, 2)}, steps)
        assert f"kFar = {far}" in core.source("Body", 2)[0]


def test_maps_of_mixed_numbers_fit_shared_memory():
    """Doubles among floats are aligned to 8 bytes: nine words take twelve."""
    with compat.enable_x64():
        body = lambda hs, x: (tuple((x * h).astype(h.dtype) for h in hs), hs[0])
        f = lambda x: jax.lax.scan(body, tuple(jnp.ones(64, d) for d in ("float32", "float64") * 3), x)
        (e,) = scans(jax.make_jaxpr(f)(jax.ShapeDtypeStruct((4096, 64), "float32")).jaxpr)
        made, core = planned(e)
        assert made.algorithm == "columns"
        _, lanes, parts, *_ = (int(n) for n in made.launches[-1].name.split(", ")[1:5])
        radix = tuning.COLUMN_RADIX
        assert lanes * (2 * parts + 2 * radix + 1) * 3 * 16 <= 48 * 1024


@pytest.mark.parametrize("on", plans.DEVICES)
def test_any_shape_has_a_plan_within_the_limits_of_the_device(on):
    for length in (1, 2, 1000):
        for lanes in (1, 3, 1 << 14, 1 << 20, 99_999):
            for e in traced_shape((lanes,), length, "bfloat16"):
                plans.check_limits(planned(e, on)[0], on)


def traced_shape(shape, length, dtype):
    array = lambda *s: jax.ShapeDtypeStruct(s, dtype)
    f = lambda h, a, x: jax.lax.scan(lambda h, ax: (ax[0] * h + ax[1],) * 2, h, (a, x))
    return scans(jax.make_jaxpr(f)(array(*shape), array(length, *shape), array(length, *shape)).jaxpr)


@pytest.mark.parametrize(
    "name, shape, length, algorithm",
    [
        ("recurrence", (2048,), 2048, "columns"),
        ("recurrence", (1,), 100_000, "rows"),
        ("recurrence", (16384,), 4096, "lanes"),
        ("recurrence", (2048,), 128, "lanes"),
        ("average", (1024,), 4096, "columns"),
        ("oscillators", (16, 64), 2048, "columns"),
        ("counters", (64,), 2048, "lanes"),
        ("gated", (64,), 2048, "lanes"),
    ],
)
def test_which_loops_are_cut(name, shape, length, algorithm):
    """Affine bodies with few lanes and many steps; their gradients too, with gradients of constants among them."""
    run, operands = FUNCTIONS[name][0](shape, 2, "float32")
    steps = [
        jax.ShapeDtypeStruct((length, *x.shape[1:]) if x.shape[:1] == (2,) else x.shape, x.dtype) for x in operands
    ]
    f = lambda *xs: run(jax.lax.scan, *xs)
    at = [k for k, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]
    loss = lambda *xs: sum(jnp.sum(jnp.real(y)) for y in jax.tree.leaves(f(*xs)))
    jaxpr = jax.make_jaxpr(f if name == "counters" else jax.grad(loss, at))(*steps).jaxpr
    found = [planned(e)[0].algorithm for e in scans(jaxpr)]
    # The derivative of `gated` is affine.
    assert found == (["lanes", "columns"] if name == "gated" else [algorithm] * (1 + (name != "counters")))


def test_steps_of_arrays_without_lanes_do_not_lie_side_by_side():
    """Many lanes that read the same numbers, or none, are not cut."""
    array = lambda *s: jax.ShapeDtypeStruct(s, "float32")
    for xs in (None, array(1024)):
        f = lambda h, xs: jax.lax.scan(lambda h, x: (0.5 * h + (1 if x is None else x), None), h, xs, 1024)
        for lanes, algorithm in ((1 << 20, "lanes"), (1024, "columns")):
            (e,) = scans(jax.make_jaxpr(f)(array(lanes), xs).jaxpr)
            assert planned(e)[0].algorithm == algorithm


@pytest.mark.parametrize("length", [1, 3, 100, 1000, 1009, 4096, 1 << 20])
def test_few_steps_fill_no_round(length):
    """These run before the others have begun to load, so that they cost the latency of memory once more."""
    made = planned(traced_shape((16384,), length, "float32")[0])[0]
    ahead, rest = map(int, made.launches[0].name.split(", ")[2:4])
    assert length % ahead == rest <= min(2, length - 1)
    assert ahead >= min(length, 24)


@pytest.mark.parametrize("loop", ["scan", "while_loop"])
def test_a_loop_beyond_the_limits_of_a_kernel(loop):
    """An error while it is traced, on any machine, that says what is too large."""

    def run(body, init):
        if loop == "scan":
            return jaxkern.scan(lambda c, _: (body(c), None), init, length=9)
        return jaxkern.while_loop(lambda c: c[0] < 1, body, init)

    def long(c):
        for _ in range(50):
            c = [jnp.sin(c[0])]
        return c

    spec = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    half = lambda c: [x * 0.5 for x in c]
    for body, given, message in (
        (half, [spec(5)] * 40, "writes 80 arrays, above the limit of 63"),
        (half, [spec(1 << 16, 1 << 15)], "lanes, above the limit of 2"),
        (half, [spec(2, 3, 2, 3, 2, 3), spec(2, 1, 2, 1, 2, 1)], "an array lacks every other one of 6 dimensions"),
        (
            long,
            [spec(5)],
            "a size of (at least )?[0-9]+ statements, above the limit of 2000; most of them are at .*test_scan_plan.py",
        ),
        (lambda c: [c[0] @ c[0]], [spec(300, 300)], "KB of shared memory, above the limit of 227 KB"),
    ):
        if loop == "while_loop" and ("shared" in message or "other one" in message):
            continue  # its carries have all lanes, and it has no rows
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(functools.partial(run, body), given)


def test_loops_of_16_bits_are_cut_up_to_more_lanes():
    choose = functools.partial(jaxkern.algorithms.choose, "scan", 16384, 4096, device=device.H200)
    assert [choose(itemsize=n) for n in (1, 2, 4, 8)] == ["columns", "columns", "lanes", "lanes"]


@pytest.mark.skipif(registry.kernels.module is None, reason="no runtime")
def test_a_derivative_beyond_the_limits_of_a_kernel_warns():
    """The loop itself is one kernel. XLA runs its derivative, and not in silence; its result is JAX's."""

    def loss(c, scan=jaxkern.scan):
        def body(c, _):
            for k in range(25):
                c = jnp.sin(c) * (0.9 + k / 100)
            return c, None

        return jnp.sum(scan(body, c, length=9)[0])

    around = lambda c: jax.lax.scan(lambda s, _: (s + loss(c), None), 0.0, length=2)[0]  # which needs no warning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(around).trace(jnp.ones(5)).lower(lowering_platforms=("cuda",))
    with pytest.warns(UserWarning, match="above the limit of 2000.*XLA runs this loop, which may be a derivative"):
        text = jax.jit(jax.grad(loss)).trace(jnp.ones(5)).lower(lowering_platforms=("cuda",)).as_text()
    assert "jaxkern_scan" in text and text.count("stablehlo.while") == 1
    c = jnp.linspace(0.1, 1, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a GPU, the same warning
        np.testing.assert_allclose(
            jax.grad(loss)(c), jax.grad(functools.partial(loss, scan=jax.lax.scan))(c), rtol=1e-4
        )


def test_bodies_that_are_too_large_are_not_traced_to_the_end(monkeypatch):
    """The answer took seconds for bodies with hundreds of reductions: all of them were traced before their statements were counted."""

    def step(h, _):
        for _ in range(100):
            h = h / jnp.sum(jnp.sin(jnp.tanh(h)) * jnp.cos(jnp.exp(h)), -1, keepdims=True)
        return h, None

    traced, plain = [], row_nests.Body.finish
    monkeypatch.setattr(row_nests.Body, "finish", lambda self, nest: traced.append(nest) or plain(self, nest))
    with pytest.raises(TypeError, match="a size of .*[0-9]+ statements, above the limit of 2000"):
        jax.eval_shape(lambda x: jaxkern.scan(step, x, length=9)[0], jax.ShapeDtypeStruct((4, 100), "float32"))
    assert len(traced) < 60
