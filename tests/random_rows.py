"""Random row functions, for tests of `jaxkern.row_kernel`.

    python tests/random_rows.py --seed 7            values and derivatives on the CPU, against plain jnp, in float64
    python tests/random_rows.py --seed 7 --kernels  generated kernels, run on the CPU, against the definition

A function is determined by its seed and number: `--first` finds again the one that failed. Without `--count` there is no end.
A function keeps a pool of arrays of equal rank. Each step applies an operation to arrays of the pool and adds the result.
"""

import argparse
import contextlib
import itertools
import sys
import time
import traceback

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import plans
from jax import lax

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat, device
from jaxkern._core.cpp import Unsupported
from jaxkern._engines.rows import plan
from jaxkern._engines.rows.function import trace

WIDTHS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 33, 40, 64, 65, 100, 130, 257)
LONG = (300, 512, 777, 1024, 2049)
OTHERS = ((), (1,), (2,), (7,), (3, 2), (1, 5), (4, 1), (2, 3, 2), (2, 1, 3), (1, 1), (33,), (5, 5))
EMPTY = ((0,), (2, 0), (0, 3))
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool")
ALGORITHMS = ("auto", "thread", "lanes", "warp", "block", "streaming", "strided", "split")


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, jnp.sign(x)), lambda s, g: (jnp.clip(g, -0.5, 0.5) + 0 * s,))


@jax.custom_jvp
def bent(x):
    return jnp.tanh(x)


@bent.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return jnp.tanh(x), t * (1 - jnp.tanh(x)) * 2


class RandomRows:
    """The row function of this seed and number: `f(*args)`; its operands `args`; `axis`, its row.

    kernels: whether generated kernels run; they do not for empty arrays.
    """

    def __init__(self, seed, number, dtype="float64", kernels=False):
        self.key = (seed, number)
        rng = np.random.default_rng((*self.key, 0))
        others = self.any(EMPTY if not kernels and rng.integers(25) == 0 else OTHERS, rng)
        width = int(self.any(WIDTHS if rng.integers(4) else LONG, rng))
        if not kernels and rng.integers(60) == 0:
            width = 0
        at = len(others) if rng.integers(4) else int(rng.integers(len(others) + 1))
        self.shape, self.axis = (*others[:at], width, *others[at:]), at - len(others) - 1
        self.rank, self.dtype, self.vjp = len(self.shape), dtype, False
        self.real = ("bfloat16", "float16", "float32") if dtype in ("bfloat16", "float16") else (dtype,)
        self.args = self._arguments(rng)

    def __str__(self):
        return (
            f"seed {self.key[0]}, function {self.key[1]}: {[f'{x.dtype}{x.shape}' for x in self.args]} axis {self.axis}"
        )

    @staticmethod
    def any(options, rng):
        return options[int(rng.integers(len(options)))]

    def _arguments(self, rng):
        row = self.axis % self.rank
        lacks = lambda keep: tuple(n if keep(k) else 1 for k, n in enumerate(self.shape))
        shapes = [self.shape, self.shape, lacks(lambda k: k == row), lacks(lambda k: k != row)]
        chosen = rng.random(self.rank) < 0.6
        shapes += [lacks(lambda k: chosen[k] or k == row), lacks(lambda k: chosen[k] and k != row), ()]
        made = [np.asarray(rng.normal(size=s), self.any(self.real, rng)) for s in shapes]
        for k in rng.choice(len(shapes), 2, replace=False):
            dtype = self.any(INTEGERS, rng)
            low = 0 if dtype[0] == "u" else -3
            made.append(
                (rng.integers(low, 4, shapes[k]) > 0)
                if dtype == "bool"
                else rng.integers(low, 4, shapes[k]).astype(dtype)
            )
        width = self.shape[row]
        made.append(rng.integers(-1 if rng.integers(2) else 0, width + 1, lacks(lambda k: k != row)).astype(np.int32))
        return made

    # ---- the function

    def f(self, *args):
        rng = np.random.default_rng((*self.key, 1))
        full = lambda x: x if jnp.ndim(x) == self.rank else jnp.reshape(x, (1,) * self.rank)
        # Values that are the same bits in every evaluation: what jumps is applied to these alone.
        self.exact, self.pool, self.labels = set(), [], args[-1]
        for x in args:
            self._add(full(x), True)
        for _ in range(int(rng.integers(2, 12))):
            self._add(*self._step(rng))
        return self._results(rng)

    def _add(self, x, exact=False):
        assert x.ndim == self.rank, x.shape
        self.pool.append((x, exact))

    def _pick(self, rng):
        return self.pool[-1 - min(int(rng.exponential(4)), len(self.pool) - 1)]

    def _float(self, rng):
        x, exact = self._pick(rng)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(self.any(self.real, rng))
        return x, exact

    def _exact(self, rng):
        return self.any([x for x, exact in self.pool if exact], rng)

    def _step(self, rng):
        kind = int(rng.integers(23))
        x, exact = self._float(rng)
        axis = self.any((self.axis, self.axis % self.rank), rng)
        if kind == 20 and x.shape[axis]:  # one element of each row
            k = int(rng.integers(x.shape[axis]))
            y = self.any(
                (
                    lambda: lax.slice_in_dim(x, k, k + 1, axis=axis),
                    lambda: jnp.expand_dims(jnp.take(x, k, axis), axis),
                    lambda: jnp.expand_dims(lax.dynamic_index_in_dim(x, k, axis, False), axis),
                ),
                rng,
            )()
            return y, exact
        if kind == 21 and 0 not in x.shape and x.shape[axis] == self.shape[axis]:
            places = [
                jnp.arange(n).reshape([-1 if j == k else 1 for j in range(self.rank)]) for k, n in enumerate(x.shape)
            ]
            labels = self.labels
            if all(a in (1, n) for k, (a, n) in enumerate(zip(labels.shape, x.shape)) if k != axis % self.rank):
                places[axis % self.rank] = labels
                y = x[tuple(places)]
                return jnp.where(jnp.isnan(y), 0.5, y), exact
        if kind == 22:
            y, _ = self._float(rng)
            y = y.astype(x.dtype)
            a, b = jnp.broadcast_arrays(x, y)
            names = "abcdef"[: self.rank]
            out = names.replace(names[axis], "")
            y = (
                jnp.einsum(f"{names},{names}->{out}", a / 4, b / 4)
                if rng.integers(2)
                else jnp.vecdot(a / 4, b / 4, axis=axis)
            )
            return jnp.expand_dims(self._bounded(y), axis), False
        if kind < 3:
            f = self.any(
                (
                    jnp.tanh,
                    jnp.sin,
                    jnp.square,
                    jnp.abs,
                    jax.nn.sigmoid,
                    jax.nn.silu,
                    jax.nn.gelu,
                    bent,
                    jnp.negative,
                    lambda x: jnp.exp(-jnp.abs(x)),
                    lambda x: jnp.log1p(jnp.abs(x)),
                    lambda x: jnp.sqrt(1 + x * x),
                    lambda x: x**3,
                    lambda x: jax.lax.stop_gradient(x) * x,
                    jax.jit(lambda x: x + 1),
                    jax.checkpoint(lambda x: jnp.sin(x) * x),
                    jax.nn.relu,
                    lambda x: jax.lax.rsqrt(1 + x * x),
                ),
                rng,
            )
            return self._bounded(f(x)), False
        if kind < 7:
            y, also = self._pick(rng)
            y = y.astype(x.dtype) if y.dtype == jnp.bool_ else y
            f = self.any(
                (
                    jnp.add,
                    jnp.subtract,
                    jnp.multiply,
                    lambda a, b: a / (1.5 + jnp.abs(b)),
                    jnp.maximum,
                    jnp.minimum,
                    lambda a, b: a / (jnp.abs(b).astype(a.dtype) + 1),
                ),
                rng,
            )
            return self._bounded(f(x, y.astype(x.dtype) if rng.integers(2) else y)), False
        if kind < 12:
            return self._reduction(rng, x, exact, axis)
        if kind == 12:
            a, b = self._exact(rng), self._exact(rng)
            if a.dtype == b.dtype == jnp.bool_:
                return self.any((jnp.logical_and, jnp.logical_or, jnp.logical_xor), rng)(a, b), True
            a, b = (v.astype(jnp.int32) if v.dtype == jnp.bool_ else v for v in (a, b))
            return self.any((jnp.less, jnp.greater_equal, jnp.not_equal), rng)(a, b), True
        if kind == 13:
            m = self._exact(rng)
            y, also = self._float(rng)
            return jnp.where(m > 0, x, self.any((y.astype(x.dtype), 0, 1.5), rng)), False
        if kind == 14:
            k = int(rng.integers(self.rank))
            place = lax.broadcasted_iota(self.any((jnp.int32, jnp.float32, jnp.uint8), rng), self.shape, k)
            if rng.integers(2):
                place = jnp.arange(self.shape[k]).reshape([-1 if j == k else 1 for j in range(self.rank)])
            return place, True
        if kind == 15:
            labels = self.labels
            if x.shape[self.axis] != self.shape[self.axis] or x.shape[self.axis] == 0:
                return x, exact
            wide = (
                jnp.broadcast_to(labels, tuple(1 if k == self.axis % self.rank else n for k, n in enumerate(x.shape)))
                if all(a in (1, b) for k, (a, b) in enumerate(zip(labels.shape, x.shape)) if k != self.axis % self.rank)
                else None
            )
            if wide is None:
                return x, exact
            mode = self.any((None, "clip", "fill"), rng)
            y = jnp.take_along_axis(x, wide, axis, mode=mode)
            return jnp.where(jnp.isnan(y), 0.5, y), exact
        if kind == 16:
            self.vjp = True
            return clipped(x), exact
        if kind == 17:
            s = self.any([v for v, e in self.pool if e and v.size == 1] or [jnp.ones((1,) * self.rank)], rng)
            return lax.cond((s > 0).reshape(()), lambda x: jnp.sin(x), lambda x: x * 2, x), False
        if kind == 18:
            to = self.any((*self.real, *self.real, "int32", "int8", "bool"), rng)
            if to in ("int32", "int8", "bool"):
                m = self._exact(rng)
                return m.astype(to), True
            return x.astype(to), False
        y = jnp.squeeze(x, tuple(k for k, n in enumerate(x.shape) if n == 1))
        return self._bounded(jnp.sin(y)).reshape(x.shape), False

    def _bounded(self, x):
        return jnp.clip(x, -4, 4) if x.dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64) else x

    def _reduction(self, rng, x, exact, axis):
        if x.shape[axis] == 0 or 0 in x.shape:
            return jnp.sum(x, axis, keepdims=True), False
        kind = int(rng.integers(16))
        if kind < 6:
            f = self.any((jnp.sum, jnp.mean, jnp.max, jnp.min, jnp.var, jax.nn.logsumexp), rng)
            if f is jnp.sum:
                x = x / 8
            return f(x, axis, keepdims=True), False
        if kind == 6:
            return jnp.prod(jnp.cos(x / 4), axis, keepdims=True), False
        if kind == 7:
            return self._bounded(jax.nn.softmax(x, axis) * 3), False
        e = self._exact(rng)
        if kind == 8:
            return jnp.any(e > 0, axis, keepdims=True), True
        if kind == 9:
            return jnp.all(e > 0, axis, keepdims=True), True
        if kind == 10:
            return self.any((jnp.argmax, jnp.argmin), rng)(e, axis, keepdims=True), True
        if kind == 11:
            e = e.astype(self.any(("int32", "int8", "uint8", "int16", "int64", "uint64"), rng))
            return jnp.sum(e, axis, keepdims=True, dtype=e.dtype), True
        if kind == 12:
            return self.any((jnp.max, jnp.min), rng)(e, axis, keepdims=True), True
        if kind == 13:
            y = lax.reduce(
                lax.stop_gradient(x), np.zeros((), x.dtype), lambda a, b: jnp.sqrt(a * a + b * b), (axis % self.rank,)
            )
            return jnp.expand_dims(y / 8, axis % self.rank), False
        if kind == 14:
            e = e.astype(self.any(("int32", "int8", "uint8"), rng))
            f = self.any((lax.reduce_and_p, lax.reduce_or_p, lax.reduce_xor_p), rng)
            return jnp.expand_dims(f.bind(e, axes=(axis % self.rank,)), axis % self.rank), True
        place = lax.broadcasted_iota(jnp.int32, e.shape, axis % self.rank)

        def larger(a, b):
            takes = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
            return jnp.where(takes, b[0], a[0]), jnp.where(takes, b[1], a[1])

        if e.dtype == jnp.bool_:
            return e, True
        e = lax.stop_gradient(e)
        low = np.asarray(-100 if not jnp.issubdtype(e.dtype, jnp.unsignedinteger) else 0, e.dtype)
        ys = lax.reduce((e, place), (low, np.int32(2**31 - 1)), larger, (axis % self.rank,))
        return jnp.expand_dims(ys[int(rng.integers(2))], axis % self.rank), True

    def _results(self, rng):
        found = []
        for k in range(int(rng.integers(1, 5))):
            x, _ = self._pick(rng)
            if k == 0 and rng.integers(8):
                y = self.pool[int(rng.integers(2))][0]
                x = y * self._float(rng)[0].astype(y.dtype)
            kind = int(rng.integers(10))
            if kind == 0:
                x = x.reshape([n for n in x.shape if n != 1])
            elif kind == 1:
                x = jnp.broadcast_to(x, self.shape)
            elif kind in (2, 3, 4):
                axes = tuple(k for k in range(self.rank) if k != self.axis % self.rank)
                if kind == 4:
                    axes = tuple(k for k in axes if rng.integers(2))
                if kind == 3:
                    axes = None
                if x.dtype != jnp.bool_ and jnp.issubdtype(x.dtype, jnp.floating):
                    x = jnp.sum(x / 8, axes)
                    x = jnp.sin(x) if rng.integers(3) == 0 else x
            elif kind == 5 and found:
                x = found[0]
            elif kind == 6 and rng.integers(4) == 0:
                x = jnp.zeros(self.shape, x.dtype)
            elif kind == 7:
                x = jnp.transpose(x, rng.permutation(self.rank))
            found.append(x)
        return found


def is_real(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def gradients(f, args):
    at = [k for k, x in enumerate(args) if is_real(x)]

    def of_real(*xs):
        return list(f(*(xs[at.index(k)] if k in at else x for k, x in enumerate(args))))

    ys, pull = jax.vjp(of_real, *(args[k] for k in at))
    cotangent = lambda y: jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype)
    zero = lambda y: np.zeros(y.shape, jax.dtypes.float0)
    return ys, pull([cotangent(y) if is_real(y) else zero(y) for y in ys])


def second(f, args):
    return gradients(lambda *xs: list(gradients(f, xs)[1]), args)


def batch(f, args, seed):
    rng = np.random.default_rng(seed)
    axes = [None if rng.integers(2) else int(rng.integers(-1, x.ndim + 1)) for x in args]
    if all(a is None for a in axes):
        axes[0] = 0
    flip = lambda x: x[::-1] if x.ndim else x
    many = [x if a is None else jnp.stack([x, flip(x), x], a) for x, a in zip(args, axes)]
    return jax.vmap(lambda *xs: f(*xs), axes)(*many)


def forward(f, args):
    at = [k for k, x in enumerate(args) if is_real(x)]
    of_real = lambda *xs: [y for y in f(*(xs[at.index(k)] if k in at else x for k, x in enumerate(args))) if is_real(y)]
    return jax.jvp(of_real, [args[k] for k in at], [jnp.sin(args[k]) for k in at])


def compare(ours, wanted, tolerance):
    ours, wanted = jax.tree.leaves(ours), jax.tree.leaves(wanted)
    assert len(ours) == len(wanted)
    for k, (y, want) in enumerate(zip(ours, wanted)):
        assert y.shape == want.shape and y.dtype == want.dtype, (k, y.shape, y.dtype, want.shape, want.dtype)
        if y.dtype == jax.dtypes.float0:
            continue
        y, want = np.asarray(y, np.float64), np.asarray(want, np.float64)
        scale = np.abs(want[np.isfinite(want)]).max(initial=1)
        np.testing.assert_allclose(y, want, rtol=tolerance, atol=tolerance * scale, err_msg=f"result {k}")


def check_values(seed, number):
    """Values, derivatives and batches of function `number` against plain jnp."""
    with compat.enable_x64():
        made = RandomRows(seed, number)
        args = list(map(jnp.asarray, made.args))
        kernel = jaxkern.row_kernel(made.f, axis=made.axis)
        wanted = made.f(*args)
        compare(kernel(*args), wanted, 1e-10)
        runs = [gradients, lambda f, args: batch(f, args, number)]
        runs += [] if made.vjp else [forward]
        runs += (
            [second, lambda f, args: batch(lambda *xs: gradients(f, xs)[1], args, number)] if number % 3 == 0 else []
        )
        for run in runs:
            compare(jax.jit(lambda *a: run(kernel, a))(*args), jax.jit(lambda *a: run(made.f, a))(*args), 1e-9)


TOLERANCES = {"float64": 1e-10, "float32": 2e-4, "float16": 4e-3, "bfloat16": 3e-2}


def check_kernels(seed, number, counts=None):
    """The kernel of function `number`, or of its gradient, by a forced algorithm, aligned and not, against the definition."""
    rng = np.random.default_rng((seed, number, 2))
    dtype = RandomRows.any(("float64", "float32", "bfloat16", "float16"), rng)
    with compat.enable_x64():
        made = RandomRows(seed, number, dtype, kernels=True)
        args = list(made.args)
        avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
        function, captured, _ = trace(lambda *xs: made.f(*xs), avals, made.axis, "f")
        args += captured
        if rng.integers(2):
            wrt = [k for k, a in enumerate(args) if is_real(a)]
            given = [
                np.asarray(rng.normal(size=function.results[k].shape), function.results[k].dtype)
                for k in function.inexact_results
            ]
            if given:
                function, args = function.vjp(wrt), args + given
        used = function.used()
        if not used:
            return "constant"
        function, args = function.select(used), [args[k] for k in used]
        try:
            function.core  # noqa: B018
        except Unsupported as e:
            return f"unsupported: {e}"[:70]
        algorithm = RandomRows.any(ALGORITHMS, rng)
        results = [jax.ShapeDtypeStruct(*o) for o in plan.outputs(function)]
        try:
            with algorithms.force(row_kernel=algorithm):
                found = plan.plan(device.H200, function.avals, results, function=function)
        except ValueError:
            return f"not {algorithm}"
        if found is None:
            return "no plan"
        plans.check_limits(found, device.H200)
        wanted = function.wide(*map(jnp.asarray, args))
        emulated.prepare(found)
        for unaligned in (False, True):
            outputs = emulated.run(found, args, plan.outputs(function), unaligned)
            outputs = [jnp.reshape(y, r.shape) for y, r in zip(outputs, results)]  # emulated arrays have a dimension
            ours = function.after_core(list(map(jnp.asarray, args)), outputs)
            compare(ours, wanted, TOLERANCES[dtype])
        return found.algorithm


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--stop", action="store_true", help="at the first failure")
    options = parser.parse_args()
    numbers = (
        itertools.count(options.first) if options.count is None else range(options.first, options.first + options.count)
    )
    failed, counts, start = 0, {}, time.monotonic()
    for number in numbers:
        if time.monotonic() - start > options.seconds:
            break
        try:
            kind = (check_kernels if options.kernels else check_values)(options.seed, number)
            counts[kind] = counts.get(kind, 0) + 1
        except Exception:
            failed += 1
            with contextlib.suppress(Exception):
                print(RandomRows(options.seed, number, kernels=options.kernels))
            print(f"--seed {options.seed} --first {number}")
            print("\n".join(traceback.format_exc().splitlines()[-7:]), flush=True)
            if options.stop:
                break
        if number % 50 == 49:
            jax.clear_caches()
    print(f"{failed} failed of {number - options.first + 1}", counts)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
