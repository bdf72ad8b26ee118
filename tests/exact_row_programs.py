"""Random programs of rows of small integers, NaN and infinities in several types, for tests of `accelerate(only="rows")`.

    python tests/exact_row_programs.py --seed 7 --programs 500

Their results are exact in whatever way they are computed, so plain and taken ones are equal: comparisons, masks, indices and casts
are compared without a tolerance.
"""

import argparse
import contextlib

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern

SIZES = ((4, 6, 8), (5, 5, 5), (3, 8, 1), (2, 7, 3), (6, 6))
DTYPES = (jnp.float32, jnp.float32, jnp.bfloat16, jnp.int32)
BOUND = 4  # of finite numbers, so that arithmetic on them is exact


def _number(x, dtype=jnp.float32):
    return x.astype(dtype) if x.dtype == jnp.bool_ else x


def _bounded(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x % (BOUND + 1) if x.dtype != jnp.bool_ else x
    return jnp.where(jnp.abs(x) <= BOUND, x, jnp.where(jnp.isfinite(x), jnp.ones((), x.dtype), x))


class Program:
    """A program of small integers, infinities and NaN in several types, whose results are exact in whatever way they are computed."""

    def __init__(self, seed, number):
        self.key = seed, number
        rng = np.random.default_rng((*self.key, 2))
        shape, dtype = SIZES[rng.integers(len(SIZES))], DTYPES[rng.integers(len(DTYPES))]

        def array(shape, dtype):
            x = rng.integers(-3, 4, shape).astype(np.float32)
            special = rng.random(shape) < 0.05
            if dtype != jnp.int32:
                x = np.where(special, rng.choice([np.nan, np.inf, -np.inf, -0.0], shape), x)
            return jnp.asarray(x, dtype)

        self.args = [array(shape, dtype), array(shape, jnp.float32), array(shape[-1:], jnp.float32)]
        self.args += [array((*shape[:-1], 1), dtype), jnp.asarray(rng.integers(0, 2, shape), bool)]

    def __str__(self):
        return f"seed {self.key[0]}, program {self.key[1]}"

    def f(self, *args):
        rng = np.random.default_rng((*self.key, 3))
        pool, any_of = list(args), lambda choices: choices[rng.integers(len(choices))]
        for _ in range(int(rng.integers(6, 22))):
            x = pool[-1 - min(int(rng.exponential(3)), len(pool) - 1)]
            new = _bounded(self._step(int(rng.integers(17)), x, self._fit(x, pool, rng), rng, any_of))
            pool += [new] if new.size <= 4096 else []
        return pool[-1], pool[-2], pool[len(pool) // 2]

    @staticmethod
    def _fit(x, pool, rng):
        """An array of the pool that broadcasts with x."""
        for k in rng.permutation(len(pool)):
            with contextlib.suppress(ValueError):
                np.broadcast_shapes(x.shape, pool[k].shape)
                return pool[k]
        return x

    @staticmethod
    def _step(kind, x, y, rng, any_of):
        n = _number(x)
        axis = any_of((-1, -1, -1, 0)) if x.ndim else None
        keep = dict(axis=axis, keepdims=bool(rng.integers(2)))
        if kind < 3:
            # False times an infinity is NaN, and XLA may compile it as a select.
            return any_of((jnp.add, jnp.subtract, jnp.maximum, jnp.minimum))(n, _number(y).astype(n.dtype))
        if kind < 5:
            return any_of((jnp.less, jnp.greater_equal, jnp.equal, jnp.not_equal))(n, _number(y).astype(n.dtype))
        if kind < 8:
            return any_of((jnp.sum, jnp.max, jnp.min))(n, **keep)
        if kind == 8 and x.ndim:
            return any_of((jnp.argmax, jnp.argmin))(n, **keep).astype(any_of((jnp.int32, jnp.float32)))
        if kind == 9:
            return any_of((jnp.any, jnp.all))(n > 0, **keep)
        if kind == 10:
            finite = jnp.where(jnp.isfinite(n), n, 0) if jnp.issubdtype(n.dtype, jnp.floating) else n
            return any_of((n.astype(jnp.float32), n.astype(jnp.bfloat16), finite.astype(jnp.int32)))
        if kind == 11:
            fill = any_of((0.0, -jnp.inf, 1)) if jnp.issubdtype(n.dtype, jnp.floating) else 1
            return jnp.where(y if y.dtype == jnp.bool_ else y > 0, n, fill)
        if kind == 12:
            return any_of((jnp.abs, jnp.negative, jnp.sign, jnp.square))(n)
        if kind == 13 and x.ndim > 1:
            return any_of((x.swapaxes(-1, -2), jnp.flip(x, -1), x.reshape(-1, x.shape[-1])))
        if kind == 14 and x.ndim:
            return n * 2 + jax.lax.broadcasted_iota(n.dtype, x.shape, x.ndim - 1) % 3
        if kind == 15:
            return jax.jit(lambda n: n * 3 - jnp.max(n, **(keep | {"keepdims": True})))(n)
        return jax.lax.cond(
            jnp.any(n > 1), lambda n: n - jnp.min(n, -1 if x.ndim else None, keepdims=True), lambda n: n + n, n
        )

    def check(self):
        """Compares the program with itself under forced regions."""
        plain = jax.jit(self.f)(*self.args)
        with jaxkern.accelerate(only="rows", force=True):
            own = jax.jit(self.f)(*self.args)
        for a, b in zip(plain, own, strict=True):
            assert a.dtype == b.dtype and a.weak_type == b.weak_type, str(self)
            np.testing.assert_array_equal(np.asarray(b, np.float64), np.asarray(a, np.float64), err_msg=str(self))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=1000)
    arguments = parser.parse_args()
    for k in range(arguments.programs):
        Program(arguments.seed, k).check()
        if k % 40 == 39:
            print(f"{k + 1} programs", flush=True)
            jax.clear_caches()


if __name__ == "__main__":
    main()
