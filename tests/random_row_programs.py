"""Random programs of rows, products and transposes, for tests of `accelerate(only="rows")`.

    python tests/random_row_programs.py --seed 7             runs them on the CPU, plain and with each region on its reference
    python tests/random_row_programs.py --seed 7 --kernels   compiles the kernels of all regions, without a GPU

A program keeps a pool of arrays. Each step applies an operation to arrays of the pool and adds the result. Sizes are such that rows
of different arrays have equal shapes, and that a dimension is a row of one array and none of another.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from jaxkern._core import compat

SIZES = ((4, 6, 8), (5, 5, 5), (3, 8, 1), (2, 7, 3))  # batch, rows, width
UNARY = (jnp.tanh, jnp.sin, jax.nn.sigmoid, jax.nn.relu, jnp.square, jnp.abs, jax.nn.silu, jnp.negative, jnp.arctan)
BINARY = (jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum)
REDUCTIONS = (jnp.sum, jnp.mean, jnp.max, jnp.min, jnp.var)
TRANSFORMS = ("none", "gradient", "gradient", "vmap", "remat", "scan", "vmap of the gradient")


class Program:
    """The program of this seed and number: `f(*args)`, which returns a number and arrays."""

    def __init__(self, seed, number, dtype="float64"):
        self.key, self.dtype = (seed, number), dtype
        rng = np.random.default_rng((*self.key, 0))
        self.transform = TRANSFORMS[rng.integers(len(TRANSFORMS))]
        self.sizes = SIZES[rng.integers(len(SIZES))]
        self.steps = int(rng.integers(4, 16))
        batch, rows, width = self.sizes
        lead = (3,) if "vmap" in self.transform else ()
        normal = lambda *shape: np.asarray(rng.normal(size=shape), dtype)
        self.args = [normal(*lead, batch, rows, width), normal(*lead, batch, rows, width), normal(*lead, width)]
        self.matrix, self.labels = normal(width, width), rng.integers(0, width, (batch, rows)).astype(np.int32)

    def __str__(self):
        return f"seed {self.key[0]}, program {self.key[1]} ({self.transform})"

    def _run(self, x, y, w):
        rng = np.random.default_rng((*self.key, 1))
        pool, any_of = [x, y, x * w], lambda choices: choices[rng.integers(len(choices))]
        width, rows = x.shape[-1], x.shape[-2]
        at, places = jnp.arange(rows), jnp.maximum(2 * jnp.arange(width) - 3, 0) // 2
        for _ in range(self.steps):
            a, b = any_of(pool), any_of(pool)
            kind = rng.integers(15)
            if kind < 2:
                new = any_of(UNARY)(a)
            elif kind < 4:
                new = any_of(BINARY)(a, b)
            elif kind == 4:
                new = any_of(BINARY)(a, any_of(REDUCTIONS)(b, axis=-1, keepdims=True))
            elif kind == 5:
                new = a * jax.lax.rsqrt(jnp.mean(a * a, -1, keepdims=True) + 1e-3) * any_of((w, 1.0, 1 + w))
            elif kind == 6:
                new = jax.nn.softmax(jnp.where(places <= (places if width == rows else at)[:, None], a, -1e9), axis=-1)
            elif kind == 7:
                new = a @ self.matrix
            elif kind == 8:
                new = any_of(BINARY)(a, any_of(REDUCTIONS)(b, axis=any_of((0, 1)), keepdims=True))
            elif kind == 9:
                new = a - jnp.take_along_axis(jax.nn.log_softmax(b), self.labels[..., None], -1)
            elif kind == 10:
                new = jnp.sum(a * b, -1)[..., None] * any_of((w, a))
            elif kind == 11:
                new = jnp.tanh(a.swapaxes(0, 1).sum(0))[:, None] + b
            elif kind == 12:
                new = a * jax.nn.one_hot(self.labels, width)
            else:  # rows of a slice
                first = any_of((0, 1))
                cut = lambda v, first=first: v[:, first : rows - 1 + first]
                scores = any_of((cut(a), cut(a) * cut(b), cut(a) * jnp.sum(a[:, 1:], -1, keepdims=True)))
                kept = any_of(
                    (jax.nn.softmax(scores), scores * jax.lax.rsqrt(jnp.mean(scores**2, -1, keepdims=True) + 1e-3) * w)
                )
                new = jnp.pad(kept, ((0, 0), (first, 1 - first), (0, 0)))
            pool.append(new)
        return jnp.sum(jnp.sin(pool[-1])) + jnp.mean(pool[len(pool) // 2]), pool[-1], pool[-2].sum((0, 1))

    def f(self, x, y, w):
        run, total = self._run, lambda *args: self._run(*args)[0]
        if self.transform == "gradient":
            return jax.value_and_grad(total, (0, 1, 2))(x, y, w)
        if self.transform == "vmap":
            return jax.vmap(run)(x, y, w)
        if self.transform == "vmap of the gradient":
            return jax.vmap(jax.grad(total, (0, 2)))(x, y, w)
        if self.transform == "remat":
            return jax.grad(jax.checkpoint(total), (0, 2))(x, y, w)
        if self.transform == "scan":
            return jax.lax.scan(lambda c, _: (run(c, y, w)[1], run(c, y, w)[0]), x, length=2)
        return run(x, y, w)


def check(program) -> int:
    """Compares a program with itself under forced regions, and returns how many there are."""
    with compat.enable_x64(program.dtype == "float64"):
        plain = jax.jit(program.f)(*program.args)
        with jaxkern.accelerate(only="rows", force=True):
            own = jax.jit(program.f)(*program.args)
            found = jaxkern.explain(program.f, "cpu")(*program.args)
    eps = float(jnp.finfo(program.dtype).eps)
    # A gradient that is zero in exact arithmetic consists of rounding errors of terms that cancel, which are about 1 or larger. A fault
    # as small as these errors in float32 shows in float64, where they are 1e-16 of the terms.
    largest = max(1.0, *(float(np.max(np.abs(a))) for a in jax.tree.leaves(plain)))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(own), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        scale = float(np.max(np.abs(a)))
        np.testing.assert_allclose(
            b, a, rtol=800 * eps, atol=800 * eps * scale + 0.8 * eps * largest, err_msg=str(program)
        )
    return len(found.taken)


def compiled(program) -> int:
    """Compiles the kernels of a program's regions, and returns how many there are."""
    with jaxkern.accelerate(only="rows", force=True):
        return len(jaxkern.source(program.f)(*program.args))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--programs", type=int)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    taken, run = 0, compiled if arguments.kernels else check
    for done, k in enumerate(itertools.islice(itertools.count(arguments.first), arguments.programs), 1):
        taken += run(Program(arguments.seed, k, arguments.dtype))
        if done % 20 == 0:
            print(f"{done} programs, {taken} regions", flush=True)
            jax.clear_caches()


if __name__ == "__main__":
    main()
