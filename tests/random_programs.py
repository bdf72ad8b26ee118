"""Random programs of gathers, arithmetic and scatters, for tests of `jaxkern.accelerate`.

    python tests/random_programs.py --seed 7 --programs 2000    lowers them for CUDA, forced and at default settings
    python tests/random_programs.py --seed 7 --values            runs them on the CPU and compares with the plain programs

A program is determined by its seed and number, so that one that fails is found again with `--first`. Without `--programs`
there is no end. A program keeps a pool of arrays. Each step applies an operation to arrays of the pool and adds the result.
"""

import argparse
import collections
import itertools
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkern
from jaxkern._core import compat, decisions

SIZES = ((6, 9, 4), (5, 5, 5), (7, 7, 2), (9, 4, 1), (1, 6, 3), (6, 1, 3), (4, 12, 4))  # nodes, edges, features
LARGE = ((20_000, 200_000, 16), (3000, 150_000, 4), (200_000, 200_000, 8), (1 << 17, 1 << 18, 1))
EMPTY = ((5, 0, 3), (0, 4, 2), (5, 7, 0))
FLOATS = (jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16)
INDEX_DTYPES = (jnp.int32, jnp.int32, jnp.int32, jnp.int8, jnp.uint8, jnp.int16, jnp.uint32)
MODES = (None, "drop", "clip", "fill", "promise_in_bounds")
UNARY = (jnp.negative, jnp.abs, jnp.square, jnp.sign, jax.nn.relu, jnp.floor, jnp.round, jnp.isfinite, jnp.positive)
SMOOTH = (jnp.tanh, jnp.exp, jax.nn.silu, jax.nn.gelu, jax.nn.sigmoid, jnp.sqrt, jnp.log1p, jax.nn.elu, jax.lax.erf)
BINARY = (jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum)
COMPARED = (jnp.less, jnp.greater_equal, jnp.equal, jnp.not_equal)
ROUNDED = (jnp.divide, jnp.power, jnp.arctan2, jnp.logaddexp, jnp.remainder)
SEGMENTS = (jax.ops.segment_sum, jax.ops.segment_max, jax.ops.segment_min, jax.ops.segment_prod)
TRANSFORMS = ("none", "none", "none", "gradient", "gradient", "vmap", "vmap of the gradient", "jvp", "scan", "remat")
MOST = 1 << 24  # elements of an array that is made


def is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


class Program:
    """The program of this seed and number: `f(*args)`, and `args`, arrays or, for `large`, their types.

    exact: its operations are exact on small integers, and no scatter depends on the order of its updates, which a GPU does
        not fix. So all ways to compute its values are equal; derivatives are rounded in 16 bits.
    backwards: the updates of its scatters come in the opposite order.
    """

    def __init__(self, seed, number, exact=False, large=False, wide=False, backwards=False):
        self.key, self.exact, self.large, self.wide = (seed, number), exact, large, wide
        self.backwards = backwards
        self.transform = self.any(TRANSFORMS, np.random.default_rng((*self.key, 1)))
        self.args = self._arguments(np.random.default_rng((*self.key, 0)))

    def __str__(self):
        return f"seed {self.key[0]}, program {self.key[1]} ({self.transform})"

    @staticmethod
    def any(options, rng):
        return options[rng.integers(len(options))]

    def _arguments(self, rng) -> tuple:
        sizes = LARGE if self.large else SIZES if self.exact or rng.integers(8) else EMPTY
        n, e, width = self.any(sizes, rng)
        self.sizes = n, e, width
        dtype = self.any((*FLOATS, jnp.float64) if self.wide else FLOATS, rng)
        dtypes = INDEX_DTYPES[:3] if self.large else INDEX_DTYPES  # JAX itself refuses narrow ones for many rows
        dtypes = (*dtypes, jnp.int64, jnp.uint64) if self.wide else dtypes
        shapes = [(n, width), (n, width), (e,), (e, width), (n,), (width,), (), (3, e), (n, 2, width)]
        arrays = [self._array(rng, shape, dtype, None) for shape in shapes]
        index_shapes = [(e,), (e,), (e,), (3, e), (n,), ()]
        return (*arrays, *(self._array(rng, shape, self.any(dtypes, rng), n) for shape in index_shapes))

    def _array(self, rng, shape, dtype, rows):
        if self.large:
            return jax.ShapeDtypeStruct(shape, dtype)
        if rows is None:
            return jnp.asarray(rng.integers(-3, 4, shape), dtype)
        low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -rows - 2
        return jnp.asarray(rng.integers(low, rows + 3, shape), dtype)

    # ---- the function

    def f(self, *args):
        many = range(9)  # the arguments that are not indices
        if self.transform == "none":
            return self._run(*args)
        if self.transform == "remat":
            return jax.grad(lambda *args: self._sum(jax.checkpoint(self._run)(*args)), tuple(many))(*args)
        if self.transform == "gradient":
            return jax.grad(lambda *args: self._sum(self._run(*args)), tuple(many))(*args)
        if self.transform == "jvp":
            ones = tuple(jnp.ones_like(x) for x in args[:9])
            return jax.jvp(lambda *xs: self._run(*xs, *args[9:]), args[:9], ones)
        if self.transform == "scan":
            step = lambda x, _: (jnp.clip(self._as(self._run(x, *args[1:])[-1], x), -4, 4), None)
            return lax.scan(step, args[0], None, length=2)[0]
        f = self._run
        if self.transform == "vmap of the gradient":
            f = jax.grad(lambda *args: self._sum(self._run(*args)), tuple(many))
        rng = np.random.default_rng((*self.key, 2))
        mapped = rng.random(len(args)) < 0.5
        mapped[rng.integers(9)] = True
        args = [jnp.stack([x, x]) if m else x for x, m in zip(args, mapped)]
        return jax.vmap(f, [0 if m else None for m in mapped])(*args)

    def _as(self, y, x):
        """An array like x that depends on y."""
        return (x + jnp.sum(y).astype(x.dtype)).astype(x.dtype)

    def _sum(self, results):
        return sum(jnp.sum(jnp.clip(y.astype(jnp.float32), -64, 64)) for y in results)

    def _run(self, *args):
        """The results of the scatters."""
        rng = np.random.default_rng((*self.key, 3))
        self.pool, self.indices, results = list(args[:9]), list(args[9:]), []
        for _ in range(int(rng.integers(1, 4))):
            for _ in range(int(rng.integers(1, 6))):
                self._add(self._step(rng))
            result = self._scatter(rng)
            if result is not None:
                results.append(result)
                self._add(result)
        return results or [self.pool[-1]]

    def _add(self, x):
        if x is not None and x.size <= MOST:
            self.pool.append(self._bounded(x))

    def _bounded(self, x):
        """Keeps values small, so that arithmetic on them is exact in 16 bits."""
        if not self.exact or x.dtype == jnp.bool_:
            return x
        return jnp.clip(x, 0 if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else -4, 4)

    def _pick(self, rng):
        # The last arrays are more likely, so that chains become long.
        return self.pool[-1 - min(int(rng.exponential(4)), len(self.pool) - 1)]

    def _index(self, rng, rows):
        i = self.any(self.indices, rng)
        kind = rng.integers(8)
        if kind == 0:
            i = jnp.arange(max(i.size, 1), dtype=jnp.int32)[: i.size].reshape(i.shape)
        elif kind == 1 and i.ndim:
            i = lax.broadcasted_iota(jnp.int32, i.shape, i.ndim - 1)
        elif kind == 2 and i.ndim:
            i = jnp.where(jnp.arange(i.shape[-1]) < i.shape[-1] // 2, i, jnp.zeros_like(i))
        elif kind == 3:
            i = jnp.where(i < 0, i + jnp.asarray(rows % (int(jnp.iinfo(i.dtype).max) + 1), i.dtype), i)
        elif kind == 4 and i.ndim:
            i = jnp.sort(i, -1)
        elif kind == 5:
            i = i.astype(self.any((jnp.int32, jnp.uint32), rng))
        return i

    def _in_bounds(self, i, rows):
        return i % jnp.asarray(max(min(rows, jnp.iinfo(i.dtype).max), 1), i.dtype)

    def _step(self, rng):
        kind = rng.integers(16)
        x = self._pick(rng)
        if kind == 15:
            return self._selected(rng, x)
        if kind > 11:  # a message
            x = self._gather(rng, self.any(self.pool[:2], rng))
            return None if x is None else self._binary(rng, self._bounded(x))
        if kind < 3:
            return self._gather(rng, x)
        if kind < 6:
            return self._binary(rng, x)
        if kind < 8:
            return self._unary(rng, x)
        return (self._mask, self._moved, self._where, self._moved)[kind - 8](rng, x)

    def _gather(self, rng, x):
        if x.ndim == 0 or x.shape[0] == 0:
            return None
        axis = int(rng.integers(x.ndim)) if rng.integers(3) == 0 and 0 not in x.shape else 0
        i, mode, kind = self._index(rng, x.shape[axis]), self.any(MODES, rng), rng.integers(8)
        if mode == "promise_in_bounds":
            i = self._in_bounds(i, x.shape[axis])
        if i.size * x.size // x.shape[axis] > MOST:
            return None
        at = (slice(None),) * axis
        if kind == 0:
            return x[(*at, i)]
        if kind == 1:
            return jnp.take(
                x, i, axis=axis - x.ndim if rng.integers(2) else axis, mode=mode if mode in ("clip", "fill") else None
            )
        if kind == 2:
            return x[(*at, int(rng.integers(-x.shape[axis], x.shape[axis])))]
        if kind == 3:
            return lax.dynamic_index_in_dim(x, i.reshape(-1)[0] if i.size else 0, axis, keepdims=bool(rng.integers(2)))
        if kind == 4:
            return jnp.take(x, i, axis=axis, mode="fill", fill_value=1)
        if kind == 5 and x.ndim > 1 and axis == 0:
            return x[i, :, None] if rng.integers(2) else x[i, jnp.arange(x.shape[1])[:, None] if i.ndim == 1 else 0]
        return x.at[(*at, i)].get(mode=mode)

    def _fits(self, rng, x):
        """An array of the pool that broadcasts with x, perhaps after dimensions of size 1 were inserted."""
        for _ in range(6):
            y = self._pick(rng)
            for _ in range(3):
                try:
                    if np.prod(np.broadcast_shapes(x.shape, y.shape)) <= MOST:
                        return y
                except ValueError:
                    pass
                y = jnp.expand_dims(y, int(rng.integers(-y.ndim - 1, y.ndim + 1)))
        return jnp.asarray(2, x.dtype) if rng.integers(2) else jnp.full(x.shape, 1, x.dtype)

    def _numbers(self, x, dtype):
        return x.astype(dtype) if x.dtype == jnp.bool_ else x

    def _binary(self, rng, x):
        y = self._fits(rng, x)
        if not self.exact and rng.integers(5) == 0 and is_float(x):
            return self.any(ROUNDED, rng)(x, self._numbers(y, x.dtype).astype(x.dtype))
        f = self.any(COMPARED, rng) if rng.integers(6) == 0 else self.any(BINARY, rng)
        if x.dtype == y.dtype == jnp.bool_:
            return (x & y, x | y, x ^ y, ~x)[rng.integers(4)]
        other = y.dtype if x.dtype == jnp.bool_ else x.dtype
        return f(self._numbers(x, other), self._numbers(y, other))

    def _unary(self, rng, x):
        if x.dtype == jnp.bool_:
            return ~x if rng.integers(2) else x.astype(self.any((jnp.float32, jnp.bfloat16, jnp.int32), rng))
        if rng.integers(4) == 0:
            to = self.any((jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.int8, jnp.bool_), rng)
            return x.astype(to)
        if is_float(x) and not self.exact and rng.integers(2):
            f = self.any(SMOOTH, rng)
            return jax.jit(lambda y: f(y) + 1)(x) if rng.integers(4) == 0 else f(x)
        f = self.any(UNARY, rng)
        return jax.jit(lambda y: f(f(y)))(x) if rng.integers(4) == 0 else f(x)

    def _mask(self, rng, x):
        """An array that is not computed from x, of its shape."""
        kind = rng.integers(9)
        if kind == 0 and x.ndim:
            return lax.broadcasted_iota(self.any((jnp.int32, jnp.float32, jnp.bfloat16), rng), x.shape, x.ndim - 1)
        if kind == 1 and x.ndim >= 2:
            return jnp.tril(jnp.ones(x.shape, bool), int(rng.integers(-1, 2)))
        if kind == 2 and x.ndim >= 2:
            return jnp.where(jnp.tri(*x.shape[-2:], dtype=bool), x, jnp.zeros((), x.dtype))
        if kind == 3 and x.size:
            return jnp.arange(x.size, dtype=self.any((jnp.int32, jnp.float32), rng)).reshape(x.shape)
        if kind == 4 and x.size < 1000:
            return jnp.asarray(rng.integers(0, 3, x.shape), self.any(FLOATS, rng))
        if kind == 5 and x.ndim >= 2:
            return jnp.eye(*x.shape[-2:], dtype=self.any(FLOATS, rng))
        if kind == 6 and x.ndim:
            return jnp.broadcast_to(jnp.arange(x.shape[0]).reshape(-1, *[1] * (x.ndim - 1)), x.shape)
        if kind == 7 and x.ndim:
            narrow = self.exact and is_float(x) and x.dtype.itemsize < 4
            dtype = jnp.int32 if x.dtype == jnp.bool_ else jnp.float32 if narrow else x.dtype
            return jnp.cumsum(x, int(rng.integers(x.ndim)), dtype=dtype)
        return jnp.full(x.shape, int(rng.integers(0, 3)), self.any((jnp.float32, jnp.bfloat16, jnp.int32), rng))

    def _moved(self, rng, x):
        kind = rng.integers(10)
        if kind == 0:
            return x.T
        if kind == 1:
            return x.reshape(-1)
        if kind == 2:
            return jnp.expand_dims(x, int(rng.integers(-x.ndim - 1, x.ndim + 1)))
        if kind == 3 and x.ndim >= 2:
            return x.transpose(rng.permutation(x.ndim))
        if kind == 4 and x.ndim and x.shape[-1] % 2 == 0 and x.size:
            return x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
        if kind == 5 and x.size <= MOST // 8:
            return jnp.broadcast_to(x, (int(rng.integers(1, 4)), *x.shape))
        if kind == 6 and x.ndim >= 2 and x.size:
            return x.reshape(-1, *x.shape[2:])
        if kind == 7 and x.ndim:
            return (jnp.flip(x, 0), jnp.roll(x, 1, 0), x[::2], jnp.concatenate([x, x]))[rng.integers(4)]
        if kind == 8 and x.ndim:
            return x.sum(-1).astype(x.dtype) if x.dtype != jnp.bool_ else x.any(-1)
        return x.squeeze()

    def _selected(self, rng, x):
        """Sorted or counted elements, or where they were; of some sorts few elements."""
        if x.ndim == 0 or 0 in x.shape:
            return None
        axis, kind = int(rng.integers(x.ndim)), rng.integers(7)
        k = int(rng.integers(1, x.shape[axis] + 1))
        first = lambda y: lax.slice_in_dim(y, 0, k, axis=axis)
        last = lambda y: lax.slice_in_dim(y, y.shape[axis] - k, None, axis=axis)
        if kind == 0:
            return jnp.moveaxis(lax.top_k(jnp.moveaxis(x, axis, -1), k)[rng.integers(2)], -1, axis)
        if kind < 3:
            y = jnp.sort(x, axis) if rng.integers(2) else jnp.argsort(x, axis, descending=bool(rng.integers(2)))
            return self.any((lambda y: y, first, last, lambda y: first(jnp.flip(y, axis)), lambda y: last(-y)), rng)(
                y * 1
            )
        if kind == 3:
            return self.any(lax.sort([x, lax.rev(x, (axis,))], dimension=axis, num_keys=1), rng)
        if kind == 4:
            return jnp.searchsorted(jnp.sort(x.reshape(-1)), x, side=self.any(("left", "right"), rng))
        i = self._index(rng, self.sizes[0] or 3)
        zeros = jnp.zeros(self.sizes[0] or 3, self.any((jnp.int32, jnp.float32, jnp.uint8), rng))
        return zeros.at[i].add(int(rng.integers(1, 3)), mode=self.any((None, "drop", "clip"), rng))

    def _where(self, rng, x):
        y = self._fits(rng, x)
        which = self._fits(rng, x)
        which = which if which.dtype == jnp.bool_ else which > 0
        try:
            return jnp.where(which, x, y.astype(x.dtype))
        except ValueError:
            return None

    def _rounds(self, updates, k):
        """Whether sums of all updates, each at most 4, may be rounded in their type."""
        return 4 * (np.prod(updates.shape[:k]) + 1) > 2 / jnp.finfo(updates.dtype).eps

    def _scatter(self, rng):
        updates = next((u for u in (self._pick(rng) for _ in range(5)) if u.ndim), None)
        if updates is None:
            return None
        n, kind = self.sizes[0], rng.integers(6)
        counts = [k for i in self.indices for k in [i.ndim] if i.shape == updates.shape[:k]]
        if counts and rng.integers(6):
            k = self.any(counts, rng)
            i = self.any([i for i in self.indices if i.shape == updates.shape[:k] and i.ndim == k], rng)
        else:
            k = int(rng.integers(1, updates.ndim + 1))
            i = lax.broadcasted_iota(jnp.int32, updates.shape[:k], k - 1)
        if rng.integers(8) == 0:
            i = jnp.where(i < 0, i + jnp.asarray(n % (int(jnp.iinfo(i.dtype).max) + 1), i.dtype), i)
        trail = updates.shape[k:]
        if updates.dtype == jnp.bool_ or self.exact and is_float(updates) and self._rounds(updates, k):
            updates = updates.astype(jnp.float32)
        if self.backwards and k:
            i, updates = jnp.flip(i, 0), jnp.flip(updates, 0)
        place = (-int(self.backwards), *[0] * k)[:k]  # of the same update in both orders
        empty = 0 in updates.shape[:k]
        if kind < 2 and k == 1:
            rows = None if n == 0 else n
            mode = self.any((None, "drop", "clip"), rng)
            f = self.any(SEGMENTS if self.transform in ("none", "vmap", "scan") else SEGMENTS[:-1], rng)
            if self.exact and f is jax.ops.segment_prod:
                updates = jnp.sign(updates)
            return f(updates, i, rows or 3, mode=mode, indices_are_sorted=False)
        targets = [x for x in self.pool if x.ndim and x.shape[1:] == trail and x.dtype == updates.dtype]
        zeros = jnp.zeros((n, *trail), updates.dtype)
        x = self.any(targets, rng) if targets and rng.integers(2) else zeros
        methods = ("add", "add", "add", "max", "min", "set", "subtract", "multiply")
        if self.transform not in ("none", "vmap", "scan"):
            methods = methods[:-1]  # JAX has no derivative of products
        mode, method = self.any(MODES, rng), self.any(methods, rng)
        if mode == "promise_in_bounds":
            i = self._in_bounds(i, x.shape[0])
        if method == "max" and rng.integers(2) and is_float(x):
            x = jnp.full_like(x, -jnp.inf)
        if self.exact and method == "multiply":
            updates = jnp.sign(updates)
        if self.exact and method == "set" and not empty:
            updates = jnp.broadcast_to(updates[place], updates.shape)
        if rng.integers(8) == 0 and x.ndim >= 2:  # rows along the second dimension
            x, updates = jnp.swapaxes(x, 0, 1), jnp.moveaxis(updates, k, 0)
            return getattr(x.at[:, i], method)(updates, mode=mode)
        if rng.integers(8) == 0:  # one update for all
            updates = jnp.asarray(1, x.dtype) if empty else updates[place]
        return getattr(x.at[i], method)(updates, mode=mode)


# ---- what is done with a program


def forced():
    selections = ("top_k", "sort", "searchsorted", "bincount")
    return jaxkern.accelerate(only=("scatter_add", "scatter_max", "scatter_min", *selections), force=True)


class Refused(Exception):
    """JAX itself refuses a program."""


def lower(seed, number, wide=False) -> list:
    """Lowers a program for CUDA, forced and, for large arrays, at default settings; returns what was decided."""
    found = []
    for large, context in ((False, forced()), (True, jaxkern.accelerate())):
        program = Program(seed, number, large=large, wide=wide)
        lowered = lambda: (
            jax.jit(lambda *args: program.f(*args)).trace(*program.args).lower(lowering_platforms=("cuda",))
        )
        try:
            with context, decisions.recorded() as more:
                lowered()
        except Exception:
            try:
                with jaxkern.accelerate(only=()):
                    lowered()
            except Exception as error:
                raise Refused(str(program)) from error
            raise
        found += more
    return found


def run(seed, number, wide=False) -> list:
    """Runs a program plainly and on jaxkern, compares the results, and returns what was decided."""
    program = Program(seed, number, exact=True, wide=wide)
    plain = run_plainly(program)
    with forced(), decisions.recorded() as found:
        own = jax.jit(lambda *args: program.f(*args))(*program.args)
    compare(program, plain, own)
    return found


def run_backwards(seed, number, wide=False) -> list:
    """Runs a program plainly, with the updates of its scatters in both orders, and compares the results."""
    programs = [Program(seed, number, exact=True, wide=wide, backwards=b) for b in (False, True)]
    compare(programs[0], *map(run_plainly, programs))
    return []


def run_plainly(program):
    try:
        return jax.jit(lambda *args: program.f(*args))(*program.args)
    except Exception as error:
        raise Refused(str(program)) from error


def compare(program, plain, own):
    """Raises an error that shows the numbers and the program unless the results are equal."""
    # Cotangents and tangents are not bounded as values are, and so not exact in 16 bits.
    rtol = 1e-5 if program.transform in ("none", "vmap", "scan") else 4e-2
    for k, (a, b) in enumerate(zip(jax.tree.leaves(plain), jax.tree.leaves(own), strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
        if a.dtype == jax.dtypes.float0:
            continue
        dtype, a, b = a.dtype, np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
        scale = np.max(np.abs(a), where=np.isfinite(a), initial=1)
        try:
            np.testing.assert_allclose(b, a, rtol=rtol, atol=rtol * scale)
        except AssertionError as error:
            with np.printoptions(threshold=200, linewidth=150):
                numbers = f"plain\n{a}\nown\n{b}"
            traced = jax.make_jaxpr(program.f)(*program.args)
            raise AssertionError(f"{program}, result {k}, {dtype}: {error}\n{numbers}\n{traced}") from None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--programs", type=int, help="how many; without end by default")
    parser.add_argument("--values", action="store_true", help="runs the programs on the CPU instead of lowering them")
    parser.add_argument("--x64", action="store_true", help="with 64-bit types")
    parser.add_argument("--raise", dest="stop", action="store_true", help="stops at the first failure")
    options = parser.parse_args()
    numbers = itertools.count(options.first)
    numbers = numbers if options.programs is None else itertools.islice(numbers, options.programs)
    counts, failures, begin = collections.Counter(), collections.Counter(), time.time()
    what = run if options.values else lower
    with compat.enable_x64(options.x64):
        for number in numbers:
            try:
                found = what(options.seed, number, options.x64)
            except Refused as error:
                counts[f"refused by JAX: {str(error.__cause__)[:80]}"] += 1
                continue
            except Exception as error:
                print(
                    f"{Program(options.seed, number)}: {type(error).__name__}: {str(error).strip()[:300]}", flush=True
                )
                if options.stop:
                    raise
                frame = traceback.extract_tb(error.__traceback__)[-1]
                failures[f"{type(error).__name__} {frame.name}:{frame.lineno} {str(error).strip()[:120]}"] += 1
                continue
            counts.update("taken" if d.taken else d.reason for d in found)
            counts.update("chain" for d in found if d.taken and "kernel" in d.reason)
            if number % 100 == 99:
                print(f"{number + 1} programs, {failures.total()} failures, {time.time() - begin:.0f} s", flush=True)
                jax.clear_caches()
    for text, count in (*counts.most_common(12), *failures.most_common()):
        print(f"{count:6} {text}")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
