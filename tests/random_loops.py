"""Random programs of loops, for tests of `jaxkern.accelerate`.

    python tests/random_loops.py --seed 7 --programs 2000    lowers them for CUDA, forced and at default settings
    python tests/random_loops.py --seed 7 --values           runs the kernels of their loops on the CPU, and compares with JAX's scan

A program is determined by its seed and number, so that one that fails is found again with `--first`. Without `--programs` there
is no end. The body of its loop keeps a pool of arrays: carries, constants, elements of xs. Each step applies an operation to
arrays of the pool and adds the result.
"""

import argparse
import collections
import contextlib
import itertools
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkern
from jaxkern._core import compat, decisions, device
from jaxkern._core.cpp import Unsupported
from jaxkern._engines.loops import plan, plan_rows
from jaxkern._engines.loops.generate import Core
from jaxkern._engines.loops.generate_rows import RowCore
from jaxkern._engines.loops.program import Program as Body
from jaxkern._engines.loops.row_program import RowProgram

SMALL = device.Device(1, 90, 227 * 1024, 60 << 20)  # threads take several lanes early
FLOATS = (jnp.float32, jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16)
SHAPES = ((2, 8), (3, 5), (12, 4), (1, 6), (128, 16))
UNARY = (jnp.sin, jnp.tanh, jnp.exp, jax.nn.sigmoid, jnp.square, jnp.negative, jnp.abs, jax.nn.relu, jnp.floor, jnp.cos)
BINARY = (jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum)
KINDS = ("scan", "scan", "scan", "reverse", "fori_loop", "while_loop", "map")
TRANSFORMS = ("none", "none", "none", "gradient", "gradient", "vmap", "vmap of the gradient", "jvp", "remat", "inside")


def is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def words(x):
    return jax.random.key_data(x) if is_key(x) else x


class Program:
    """The program of this seed and number: `f(*args)`, and `args`. It is exact up to rounding: its values are bounded."""

    def __init__(self, seed, number):
        self.key = seed, number
        rng = np.random.default_rng((*self.key, 0))
        pick = lambda options: options[rng.integers(len(options))]
        self.kind, self.transform = pick(KINDS), pick(TRANSFORMS)
        self.length = int(pick((1, 2, 5, 8, 9, 17)))
        rows, columns = pick(SHAPES)
        shapes = [(rows, columns), (columns,), (rows, 1), ()]
        dtype = pick(FLOATS)
        array = lambda *s: jnp.asarray(rng.uniform(-1, 1, s), dtype)
        carries = [array(*pick(shapes[: 1 + 3 * (k > 0)])) for k in range(rng.integers(1, 4))]
        others = [
            jnp.asarray(rng.integers(-9, 9, pick(shapes)), pick((jnp.int32, jnp.uint32, jnp.int8))),
            jax.random.key(number),
        ]
        others += [jax.random.key_data(jax.random.key(number)), jnp.asarray(rng.random((rows, columns)) < 0.5)]
        others += [array(rows, 3), jnp.asarray(rng.uniform(-1, 1, (rows, columns)), jnp.float32)]
        carries += [others[k] for k in np.flatnonzero(rng.random(len(others)) < 0.3)]
        constants = [array(*pick(shapes)) for _ in range(rng.integers(0, 3))]
        xs = [array(self.length, *pick(shapes)) for _ in range(rng.integers(0, 3))]
        if rng.random() < 0.2 or self.kind == "map":
            xs.append(jnp.asarray(rng.integers(0, 9, (self.length,)), jnp.int32))
        self.sizes = len(carries), len(constants)
        self.held = rng.uniform(-1, 1, columns).astype(np.float32)  # an array that the body closes over
        self.args = (*carries, *constants, *xs)

    def __str__(self):
        return f"seed {self.key[0]}, program {self.key[1]} ({self.kind}, {self.transform})"

    # ---- the body

    def _body(self, carry, constants, x):
        rng = np.random.default_rng((*self.key, 1))
        pick = lambda options: options[rng.integers(len(options))]
        carry = list(carry)
        pool = [c for c in (*carry, *constants, *x) if not is_key(c)]
        if rng.random() < 0.2:
            pool.append(jnp.asarray(self.held))
        keys = {k: c for k, c in enumerate(carry) if is_key(c) or (c.shape == (2,) and c.dtype == jnp.uint32)}
        full = max((c.shape for c in pool), key=len, default=())
        for k, key in keys.items():
            carry[k], sub = jax.random.split(key) if rng.random() < 0.7 else (jax.random.fold_in(key, 7), key)
            draw = pick((jax.random.normal, jax.random.uniform, jax.random.bits, jax.random.bernoulli))
            pool.append(draw(sub, shape=pick((full, ()))))
        for _ in range(int(rng.integers(1, 7))):
            new = self._operation(rng, pick, pool)
            if new is not None:
                pool.append(new)
        recent = lambda: pool[-1 - min(int(rng.exponential(2)), len(pool) - 1)]
        for k, c in enumerate(carry):
            if k not in keys:
                carry[k] = self._like(recent(), c, rng)
        return carry, [recent() for _ in range(rng.integers(0, 3))]

    def _like(self, new, old, rng):
        """A new carry of the type of the old one, bounded."""
        if not _fits(new.shape, old.shape):
            new = old
        if old.dtype == jnp.bool_:
            return old ^ (new > 0)
        if not is_float(old):
            new = jnp.clip(new.astype(jnp.float32), -5, 5).astype(jnp.int32).astype(old.dtype)
            return old * 3 + new if rng.integers(2) else old ^ new
        return jnp.clip(0.75 * old + (0.5 * new.astype(jnp.float32)).astype(old.dtype), -4, 4).astype(old.dtype)

    def _operation(self, rng, pick, pool):
        x = pool[-1 - min(int(rng.exponential(3)), len(pool) - 1)]
        kind = rng.integers(10)
        if kind == 0 and is_float(x):
            return lax.cond(jnp.sum(x) * 0 + pick((1.0, -1.0)) > 0 if not x.ndim else True, jnp.sin, lambda x: x * 2, x)
        if kind == 1:
            return (
                lax.fori_loop(0, int(rng.integers(0, 4)), lambda i, y: y * 0.5 + i.astype(y.dtype), x)
                if is_float(x)
                else None
            )
        if kind == 2 and x.ndim and 2 <= x.shape[-1] <= 8:
            parts = [x[..., k] for k in range(x.shape[-1])]
            return jnp.stack([parts[-1], *parts[:-1]], -1)
        if kind == 3 and x.ndim and is_float(x):
            return x / (1 + jnp.sum(x * x, -1, keepdims=True))
        if kind == 3 and x.ndim and x.shape[-1] == 3:
            return jnp.concatenate([x[..., 1:], x[..., :1]], -1)
        if kind == 4:
            return x.astype(pick((jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_)))
        if kind < 7:
            y = pick(pool)
            if not (_fits(y.shape, x.shape) or _fits(x.shape, y.shape)):
                return None
            if kind == 5:
                return jnp.where(y > 0, x, jnp.zeros((), x.dtype))
            if bool in (x.dtype, y.dtype):
                return None
            return pick(BINARY)(x, y)
        return pick(UNARY)(x) if is_float(x) else None

    # ---- the program

    def _run(self, *args):
        n, m = self.sizes
        carry, constants, xs = list(args[:n]), args[n : n + m], list(args[n + m :])
        if self.kind == "fori_loop":
            return lax.fori_loop(0, self.length, lambda i, c: self._body(c, [*constants, i], [])[0], carry)
        if self.kind == "while_loop":
            step = lambda s: (s[0] + 2, self._body(s[1], constants, [])[0])
            return lax.while_loop(lambda s: s[0] < 2 * self.length, step, (0, carry))[1]
        if self.kind == "map":
            return lax.map(lambda x: self._body(carry, constants, x)[1], xs)
        return lax.scan(
            lambda c, x: self._body(c, constants, x), carry, xs, self.length, reverse=self.kind == "reverse"
        )

    def f(self, *args):
        floats = [k for k, x in enumerate(args) if is_float(x)]
        real = lambda results: sum(
            jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in jax.tree.leaves(results) if is_float(y)
        )
        differentiable = self.kind != "while_loop"
        transform = self.transform if differentiable else self.transform.split(" of ")[0].replace("gradient", "none")

        def gradient(run):
            def of(*args):
                given = lambda ws: run(*(dict(zip(floats, ws)).get(k, x) for k, x in enumerate(args)))
                return jax.grad(lambda *ws: jnp.asarray(real(given(ws)), jnp.float32), tuple(range(len(floats))))(
                    *(args[k] for k in floats)
                )

            return of

        if transform == "gradient":
            return gradient(self._run)(*args)
        if transform == "remat":
            return (gradient(jax.checkpoint(self._run)) if differentiable else self._run)(*args)
        if transform == "jvp" and differentiable:
            given = lambda *ws: self._run(*(dict(zip(floats, ws)).get(k, x) for k, x in enumerate(args)))
            real_only = lambda *ws: [y for y in jax.tree.leaves(given(*ws)) if is_float(y)]
            return jax.jvp(real_only, [args[k] for k in floats], [jnp.ones_like(args[k]) for k in floats])
        if transform.startswith("vmap"):
            rng = np.random.default_rng((*self.key, 2))
            mapped = rng.random(len(args)) < 0.5
            mapped[0] = True
            args = [jnp.stack([x, x]) if m else x for x, m in zip(args, mapped)]
            run = gradient(self._run) if transform != "vmap" else self._run
            return jax.vmap(run, [0 if m else None for m in mapped])(*args)
        if transform == "inside":

            def outer(c, _):
                results = jax.tree.leaves(self._run(*args))
                return c + 0.5 * c @ jnp.ones((4, 4)) + real(results), None

            return lax.scan(outer, jnp.ones((4, 4)), None, length=2)[0]
        return self._run(*args)


def _fits(shape, of) -> bool:
    try:
        return np.broadcast_shapes(shape, of) == of
    except ValueError:
        return False


# ---- what is done with a program


def lower(seed, number) -> list:
    """Lowers a program for CUDA, forced and at default settings; returns what was decided."""
    program, found = Program(seed, number), []
    for force in (True, False):
        with jaxkern.accelerate(only="scan", force=force), decisions.recorded() as more:
            jax.jit(lambda *args: program.f(*args)).trace(*program.args).lower(lowering_platforms=("cuda",))
        found += more
    return found


def scans(jaxpr) -> list:
    """The equations of all scans in a jaxpr, the ones in other scans too."""
    found = []
    for e in jaxpr.eqns:
        params = jax.tree.leaves(list(e.params.values()), is_leaf=lambda p: hasattr(p, "eqns"))
        inner = [getattr(p, "jaxpr", p) for p in params]
        found += [e] if e.primitive.name == "scan" else []
        found += [s for j in inner if hasattr(j, "eqns") for s in scans(j)]
    return found


def random(aval, rng):
    if is_key(aval):
        return jax.random.wrap_key_data(jnp.asarray(rng.integers(0, 1 << 32, (*aval.shape, 2), np.uint32)))
    if aval.dtype == np.bool_:
        return rng.random(aval.shape) < 0.5
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return rng.integers(0, 9, aval.shape).astype(aval.dtype)
    return np.asarray(rng.uniform(0.1, 0.9, aval.shape), aval.dtype)


def run(seed, number) -> list:
    """Runs the kernels of a program's scans on the CPU, and compares with JAX's scan; returns how many there were."""
    import emulated

    program, taken = Program(seed, number), []
    rng = np.random.default_rng(number)
    for e in scans(jax.make_jaxpr(program.f)(*program.args).jaxpr):
        closed, (num_consts, num_carry) = e.params["jaxpr"], compat.counts_of_scan(e.params)
        length = e.params["length"]
        if not length or not all(n for v in (*e.invars, *e.outvars) for n in v.aval.shape):
            continue
        made, core = planned(
            (closed.jaxpr, closed.consts, num_consts, num_carry, "the body"), length, e.params["reverse"]
        )
        if made is None:
            continue
        args = [random(v.aval, rng) for v in e.invars]
        wanted = [words(y) for y in compat.bind_equation(e, *(x if is_key(x) else jnp.asarray(x) for x in args))]
        given = [*(c for _, c in core.program.captured.values()), *map(words, args)]
        for y, want in zip(results(emulated, made, core, given, e, length), wanted, strict=True):
            compare(program, np.asarray(y), np.asarray(want), e)
        taken.append(made.algorithm)
    return [decisions.Decision("scan", True, f"{len(taken)} scans", "", "")] * bool(taken)


def planned(body, length, reverse):
    """(plan, core) of a body by threads of a lane or else by teams; (None, None) if there is none."""
    for program, core, engine in ((Body, Core, plan), (RowProgram, RowCore, plan_rows)):
        with contextlib.suppress(Unsupported):
            found = core(program(*body))
            if (made := engine.plan(SMALL, found, length, reverse)) is not None:
                return made, found
    return None, None


def results(emulated, made, core, given, e, length) -> list:
    """The results of a scan from its kernel. given: what the body holds, and the operands, keys as words."""
    program, sums = core.program, core.program.zeros
    given = list(map(np.asarray, program.split(given)))
    for k in program.linear:
        given[program.num_consts + k] = np.asarray(core.first(k, given[program.num_consts + k]))
    arrays = emulated.run(
        made, [given[k] for k in (*core.consts, *program.inits, *core.xs)], core.shapes(length), False
    )
    first = {k: given[program.num_consts + k] for k in sums}
    avals = program.parts_of([compat.physical(v.aval) for v in e.outvars])
    return program.join(core.after(list(map(jnp.asarray, arrays)), first, avals))


def compare(program, y, want, e=None):
    """Raises an error that shows the numbers and e, the equation of a scan, unless the arrays are close."""
    assert y.dtype == want.dtype and y.shape == want.shape
    tolerance = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-4}.get(want.dtype.name, 0)
    given = program.args if e is None else (v.aval for v in (*e.invars, *e.outvars))
    inside = "" if e is None else str(e.params["jaxpr"])  # XLA may leave out a cast to 16 bits and back
    narrow = any(x.dtype in (jnp.float16, jnp.bfloat16) for x in given) or "f16[" in inside
    tolerance = max(tolerance, 1e-1 * narrow)
    y, want = y.astype(np.float64), want.astype(np.float64)
    scale = np.max(np.abs(want), where=np.isfinite(want), initial=1)
    # Where rounding differs, comparisons, floor and conversions to integers may jump.
    wrong = ~np.isclose(y, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    assert wrong.mean() <= 0.02, f"{program}: {wrong.sum()} of {wrong.size} elements\n{want}\n{y}\n{e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--programs", type=int, help="how many; without end by default")
    parser.add_argument(
        "--values", action="store_true", help="runs the kernels on the CPU instead of lowering the programs"
    )
    parser.add_argument("--raise", dest="stop", action="store_true", help="stops at the first failure")
    options = parser.parse_args()
    numbers = itertools.count(options.first)
    numbers = numbers if options.programs is None else itertools.islice(numbers, options.programs)
    counts, failures, begin = collections.Counter(), collections.Counter(), time.time()
    for number in numbers:
        try:
            found = (run if options.values else lower)(options.seed, number)
        except Exception as error:
            print(f"{Program(options.seed, number)}: {type(error).__name__}: {str(error).strip()[:300]}", flush=True)
            if options.stop:
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            failures[f"{type(error).__name__} {frame.name}:{frame.lineno} {str(error).strip()[:120]}"] += 1
            continue
        counts.update("taken" if d.taken else d.reason for d in found)
        if number % 100 == 99:
            print(f"{number + 1} programs, {failures.total()} failures, {time.time() - begin:.0f} s", flush=True)
            jax.clear_caches()
    for text, count in (*counts.most_common(20), *failures.most_common()):
        print(f"{count:6} {text}")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
