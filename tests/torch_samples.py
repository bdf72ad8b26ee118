"""PyTorch's own sample inputs of sorts, selections, cumulative operations and counts, through jaxkern.

    python tests/torch_samples.py [--only topk,sort] [--dtypes float32,int64] [--part 0/4]

PyTorch tests its operations on samples that `torch.testing` makes for each type (its OpInfo database): sizes, axes, options, arrays
without elements and of no dimension. Each sample runs in PyTorch on the CPU, in jaxkern, and in plain JAX under
`accelerate(force=True)`, on JAX's device. Values must be equal, sums within the rounding of their type, and indices must belong to
their values: of equal elements, PyTorch promises no order unless a sort is stable. NaN, infinities and both zeros are put into the
samples of floats in a second round, and for float64 the gradient of a random sum of the results is compared, too.

Prints for each operation how many samples ran and which differ; exits with 1 if one does. `left`: samples without a counterpart, such
as `unique` along a dimension and `searchsorted` in rows or with a sorter, and a second round whose numbers would not be defined. Needs
torch. Not a test of pytest: it compiles thousands of programs. Twelve processes, each with its `--part`, take 90 s on one GPU.
"""

import argparse
import collections
import sys
import time
import traceback
import types
import unittest
import warnings
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import jaxkern

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, np.nan)


def torch_and_samples():
    """(torch, the database of samples). Its module imports expecttest, which it does not need for samples."""
    import torch  # pyright: ignore[reportMissingImports]

    try:
        import expecttest  # noqa: F401
    except ImportError:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase, stand_in.assert_expected_inline = unittest.TestCase, None
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db  # pyright: ignore[reportMissingImports]

    return torch, op_db


def numpy_of(t):
    """The numbers of a tensor as a NumPy array."""
    t = t.detach().contiguous()
    if str(t.dtype) == "torch.bfloat16":
        import torch  # pyright: ignore[reportMissingImports]

        return t.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return t.numpy()


# ---- what jaxkern calls the operations; the same names of plain JAX

OURS = types.SimpleNamespace(
    top_k=jaxkern.top_k,
    sort=jaxkern.sort,
    argsort=jaxkern.argsort,
    sort_pairs=jaxkern.sort_pairs,
    cumsum=jaxkern.cumsum,
    cumprod=jaxkern.cumprod,
    cummax=lambda x, axis: jaxkern.cummax(x, axis),
    cummin=lambda x, axis: jaxkern.cummin(x, axis),
    cumlogsumexp=lambda x, axis: jaxkern.cumlogsumexp(x, axis),
    bincount=jaxkern.bincount,
    histogram=jaxkern.histogram,
    searchsorted=jaxkern.searchsorted,
    unique=lambda x, size: jaxkern.unique(x, size, 0, return_inverse=True, return_counts=True),
    quantile=lambda x, q, axis, method: jaxkern.quantile(x, q, axis, method=method),
)


def _plain_top_k(x, k, axis):
    return [jnp.moveaxis(a, -1, axis) for a in lax.top_k(jnp.moveaxis(x, axis, -1), k)]


def _plain_pairs(keys, values, axis, descending):
    order = jnp.argsort(keys, axis, stable=True, descending=descending)
    return jnp.take_along_axis(keys, order, axis), jnp.take_along_axis(values, order, axis)


PLAIN = types.SimpleNamespace(
    top_k=_plain_top_k,
    sort=lambda x, axis, descending: jnp.sort(x, axis, stable=True, descending=descending),
    argsort=lambda x, axis, descending: jnp.argsort(x, axis, stable=True, descending=descending),
    sort_pairs=_plain_pairs,
    cumsum=lambda x, axis, dtype: jnp.cumsum(x, axis, dtype),
    cumprod=lambda x, axis, dtype: jnp.cumprod(x, axis, dtype),
    cummax=lax.cummax,
    cummin=lax.cummin,
    cumlogsumexp=lax.cumlogsumexp,
    bincount=lambda x, length, weights=None: jnp.bincount(x, weights, length=length),
    histogram=lambda x, bins, limits: jnp.histogram(x, bins, limits),
    searchsorted=jnp.searchsorted,
    unique=lambda x, size: jnp.unique(x, size=size, fill_value=0, return_inverse=True, return_counts=True),
    quantile=lambda x, q, axis, method: jnp.quantile(x, q, axis, method=method),
)


# ---- samples


class Check:
    """A sample: what to call, and the judgement of its results.

    function: of a namespace and arrays. exact: PyTorch's results. index: (axis, whether indices are known) of a pair
    (values, indices) along `axis`; the second result of others is compared as the first is.
    """

    def __init__(self, function, arrays, exact, axis=None, stable=False, gradient=False, tolerance=0.0):
        self.function, self.arrays, self.exact = function, arrays, exact
        self.axis, self.stable, self.gradient, self.tolerance = axis, stable, gradient, tolerance

    def run(self, names):
        """The results in each of these namespaces."""

        def call(*arrays):
            return [jax.tree.leaves(self.function(of, *arrays)) for of in names]

        with jaxkern.accelerate(force=True):
            return [[np.asarray(a) for a in found] for found in shared(call, self.function, len(names))(*self.arrays)]

    def judge(self, found):
        """Raises AssertionError where results differ."""
        exact = [numpy_of(t) for t in self.exact]
        assert len(found) == len(exact), f"{len(found)} results for {len(exact)}"
        for n, (a, b) in enumerate(zip(found, exact)):
            assert a.shape == b.shape, f"result {n}: shape {a.shape} for {b.shape}"
            if self.axis is None or n == 0 or self.stable:
                _close(a, b, self.tolerance, n)
            else:
                of_indices = np.take_along_axis(self.arrays[0], a, self.axis)
                _close(of_indices, exact[0], 0.0, "elements at the indices")
                ordered = np.sort(a, self.axis)
                assert (np.diff(ordered, axis=self.axis) > 0).all(), "an index occurs twice"


PROGRAMS = {}


def shared(f, *key):
    """f under jit. Functions with equal keys share it, so that samples of equal shapes and options are compiled once."""
    return PROGRAMS.setdefault(tuple(map(_key, key)), jax.jit(f))


def _key(a):
    """What tells functions apart that are defined in this file: their code, and what it refers to."""
    if isinstance(a, types.FunctionType):
        return a.__code__, *(_key(cell.cell_contents) for cell in a.__closure__ or ())
    return (a.shape, a.dtype.name, a.tobytes()) if isinstance(a, np.ndarray) else repr(a)


def _close(a, b, tolerance, what):
    wide = lambda a: a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a
    a, b = wide(a), wide(b)
    if tolerance:
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=f"result {what}")
    else:
        np.testing.assert_array_equal(a, b, err_msg=f"result {what}")


class Adapter:
    """How samples of the operations of PyTorch are called in JAX. Methods have PyTorch's names; None: jaxkern has no such call."""

    def __init__(self, torch):
        self.torch = torch

    def topk(self, x, k, dim=-1, largest=True, sorted=True):
        del sorted  # what is in any order may be sorted
        axis, exact = dim % max(x.ndim, 1), self.torch.topk(x, k, dim, largest, True)
        if largest:
            call = lambda names, x: names.top_k(x, k, axis)
        else:

            def call(names, x):
                values, order = names.sort(x, axis, descending=False), names.argsort(x, axis, descending=False)
                return [lax.slice_in_dim(a, 0, k, axis=axis) for a in (values, order)]

        return self._one(x, call, exact, axis=axis, gradient=True)

    def sort(self, x, dim=-1, descending=False, *, stable=False):
        axis = dim % max(x.ndim, 1)
        exact = self.torch.sort(x, dim=dim, descending=descending, stable=True)
        both = lambda names, x: [f(x, axis, descending=descending) for f in (names.sort, names.argsort)]
        return self._one(x, both, exact, axis=axis, stable=True, gradient=True)

    def argsort(self, x, dim=-1, descending=False, *, stable=False):
        axis = dim % max(x.ndim, 1)
        exact = [self.torch.sort(x, dim=dim, descending=descending, stable=True)[1]]
        return self._one(x, lambda names, x: names.argsort(x, axis, descending=descending), exact)

    def msort(self, x):
        exact = [self.torch.sort(x, dim=0, stable=True)[0]]
        return self._one(x, lambda names, x: names.sort(x, 0, descending=False), exact, gradient=True)

    def kthvalue(self, x, k, dim=-1, keepdim=False):
        axis, exact = dim % max(x.ndim, 1), [self.torch.kthvalue(x, k, dim, True)[0]]
        call = lambda names, x: lax.slice_in_dim(names.sort(x, axis, descending=False), k - 1, k, axis=axis)
        return self._one(x, call, exact)

    def _cumulative(self, name, x, dim, dtype):
        plain = getattr(self.torch, name)
        exact, axis = [plain(x, dim, dtype=dtype)], dim % max(x.ndim, 1)
        name = {"cumsum": "cumsum", "cumprod": "cumprod"}[name]
        result = str(exact[0].dtype).split(".")[1]

        def call(names, x):
            return getattr(names, name)(x.astype(result), axis, dtype=result)

        return self._one(x, call, exact, gradient=True, tolerance=_tolerance(result))

    def cumsum(self, x, dim, *, dtype=None):
        return self._cumulative("cumsum", x, dim, dtype)

    def cumprod(self, x, dim, *, dtype=None):
        return self._cumulative("cumprod", x, dim, dtype)

    def logcumsumexp(self, x, dim):
        axis, exact = dim % max(x.ndim, 1), [self.torch.logcumsumexp(x, dim)]
        call = lambda names, x: names.cumlogsumexp(x, axis)
        return self._one(x, call, exact, gradient=True, tolerance=_tolerance(str(x.dtype).split(".")[1]))

    def cummax(self, x, dim):
        if x.dtype == self.torch.bool:
            return None
        axis = dim % max(x.ndim, 1)
        return self._one(x, lambda names, x: names.cummax(x, axis), [self.torch.cummax(x, dim)[0]])

    def cummin(self, x, dim):
        if x.dtype == self.torch.bool:
            return None
        axis = dim % max(x.ndim, 1)
        return self._one(x, lambda names, x: names.cummin(x, axis), [self.torch.cummin(x, dim)[0]])

    def bincount(self, x, weights=None, minlength=0):
        exact = [self.torch.bincount(x, weights, minlength)]
        length, own = exact[0].shape[0], () if weights is None else (numpy_of(weights),)
        call = lambda names, x, *w: names.bincount(x, length, weights=w[0] if w else None)
        return self._one(x, call, exact, *own, tolerance=1e-5 if own else 0)

    def histc(self, x, bins=100, min=0, max=0):
        exact = [self.torch.histc(x.double(), bins, min, max)]
        if (min, max) == (0, 0):
            min, max = (float(a) for a in (x.min(), x.max())) if x.numel() else (0, 1)
        if not max > min or not np.isfinite([min, max]).all():
            return None  # other edges than NumPy's
        call = lambda names, x: names.histogram(x.astype(jnp.float64), bins, (float(min), float(max)))[0]
        return self._one(x, call, exact, keep=False)

    def searchsorted(self, sequence, x, *, out_int32=False, right=False, side=None, sorter=None):
        if sorter is not None or sequence.ndim != 1 or not self.torch.is_tensor(x):
            return None
        right = right if side is None else side == "right"
        exact = [self.torch.searchsorted(sequence, x, right=right)]
        call = lambda names, a, x: names.searchsorted(a, x, "right" if right else "left")
        return Check(call, [numpy_of(sequence), numpy_of(x)], exact)

    def bucketize(self, x, boundaries, *, out_int32=False, right=False):
        if not self.torch.is_tensor(x):
            return None
        exact = [self.torch.bucketize(x, boundaries, right=right)]
        call = lambda names, x, a: names.searchsorted(a, x, "right" if right else "left")
        return Check(call, [numpy_of(x), numpy_of(boundaries)], exact)

    def unique(self, x, sorted=True, return_inverse=False, return_counts=False, dim=None):
        if dim is not None or x.numel() == 0 or self.torch.isnan(x.double()).any():
            return None  # each NaN is an element of its own in PyTorch
        values, inverse, counts = self.torch.unique(x, True, True, True)
        size, padded = x.numel(), lambda a: self.torch.cat([a, a.new_zeros(x.numel() - a.numel())])
        exact = [padded(values), inverse, padded(counts)]
        return self._one(x, lambda names, x: names.unique(x, size), exact, keep=False)

    def median(self, x, dim=None, keepdim=False):
        if x.numel() == 0 or not x.dtype.is_floating_point:
            return None
        exact = [self.torch.median(x) if dim is None else self.torch.median(x, dim, keepdim)[0]]
        axis = None if dim is None or not x.ndim else dim % x.ndim

        def call(names, x):
            y = names.quantile(x, 0.5, axis, "lower")
            return jnp.expand_dims(y, axis) if keepdim and axis is not None else y

        return self._one(x, call, exact, keep=False)

    def quantile(self, x, q, dim=None, keepdim=False, interpolation="linear"):
        exact = [self.torch.quantile(x, q, dim, False, interpolation=interpolation)]
        axis = None if dim is None or not x.ndim else dim % x.ndim
        q = numpy_of(q) if self.torch.is_tensor(q) else q
        call = lambda names, x: names.quantile(x, q, axis, interpolation)
        return self._one(x, call, exact, keep=False, tolerance=_tolerance(str(x.dtype).split(".")[1]))

    def _one(self, x, call, exact, *more, keep=True, **given):
        """A check of a call of x. jaxkern wants a dimension where PyTorch takes a number."""
        array = numpy_of(x)
        if array.ndim or not keep:
            return Check(call, [array, *more], exact, **given)

        def of_one(names, x, *more):
            return [a[0] if a.ndim else a for a in jax.tree.leaves(call(names, x, *more))]

        given["axis"] = None
        exact = [exact[0]] if len(exact) == 2 and given.get("stable") is not True else exact
        if len(exact) == 1:
            return Check(lambda names, x, *m: of_one(names, x, *m)[:1], [array[None], *more], exact, **given)
        return Check(of_one, [array[None], *more], exact, **given)


def _tolerance(dtype):
    """Of sums and products, which PyTorch rounds in another order; 0 of integers, which wrap."""
    return {"float64": 1e-10, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}.get(dtype, 0.0)


NAMES = [name for name in vars(Adapter) if not name.startswith("_")]


def gradient(check):
    """(the gradient of a random sum of jaxkern's first result, the weights of the sum)."""
    weights = np.random.default_rng(0).normal(size=check.exact[0].shape)

    def loss(x, weights, *more):
        return jnp.sum(jax.tree.leaves(check.function(OURS, x, *more))[0] * weights)

    return shared(jax.grad(loss), "gradient", check.function)(check.arrays[0], weights, *check.arrays[1:]), weights


def samples(torch, database, only, dtypes, most):
    """(operation, type, sample, whether NaN and other special numbers are put into it), in a random order that is always the same."""
    found, rng = [], np.random.default_rng(0)
    for op in database:
        if op.name not in only or op.variant_test_name not in ("", "reduction_with_dim", "reduction_no_dim"):
            continue
        for dtype in dtypes:
            kind = getattr(torch, dtype)
            if kind in op.supported_dtypes("cpu"):
                rounds = (False, True) if kind.is_floating_point else (False,)
                given = list(op.sample_inputs("cpu", kind, requires_grad=False))
                given = [given[n] for n in rng.permutation(len(given))[:most]]
                found += [(op.name, dtype, sample, special) for sample in given for special in rounds]
    return [found[n] for n in rng.permutation(len(found))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NAMES), help="operations, by PyTorch's names")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument(
        "--most", type=int, default=1 << 60, help="samples of each operation and type, with NaN and without"
    )
    parser.add_argument("--part", default="0/1", metavar="I/N", help="the I-th share of the samples, for N processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to stop")
    parser.add_argument("--verbose", action="store_true", help="print whole messages")
    arguments = parser.parse_args()
    (part, parts), start = map(int, arguments.part.split("/")), time.monotonic()
    warnings.simplefilter("ignore")
    jax.config.update("jax_enable_x64", True)
    torch, database = torch_and_samples()
    torch.manual_seed(0)
    only, numbers = arguments.only.split(","), collections.Counter()
    chosen = samples(torch, database, only, arguments.dtypes.split(","), arguments.most)
    share = lambda name, dtype, sample, _: zlib.crc32(repr((name, dtype, sample.input.shape)).encode()) % parts
    chosen = [one for one in chosen if share(*one) == part]
    for name, dtype, sample, special in chosen:
        if time.monotonic() - start > arguments.seconds:
            outcome = "not run"
        else:
            outcome, message = tried(torch, Adapter(torch), name, sample, special)
            if outcome == "differs":
                given = f"{name} {dtype} {tuple(sample.input.shape)} {str(sample.args)[:80]} {str(sample.kwargs)[:80]}"
                print(f"{given}{' special' * special}: {message if arguments.verbose else message[-400:]}", flush=True)
        numbers[name, outcome] += 1
    for name in only:
        print(f"{name}: { {o: n for (op, o), n in sorted(numbers.items()) if op == name} }", flush=True)
    return 1 if any(outcome == "differs" for _, outcome in numbers) else 0


def tried(torch, adapter, name, sample, special):
    """(outcome, message) of a sample."""
    x = sample.input.detach().clone()
    if special and not x.numel():
        return "no numbers for NaN", ""
    if special and name not in ("histc", "searchsorted", "bucketize", "cumprod", "quantile"):
        flat, rng = x.view(-1), np.random.default_rng(x.numel())
        for at in rng.permutation(x.numel())[: max(1, x.numel() // 6)]:
            flat[int(at)] = SPECIAL[int(rng.integers(len(SPECIAL)))]
    elif special:
        return "left", ""
    try:
        check = getattr(adapter, name)(x, *sample.args, **sample.kwargs)
    except (TypeError, RuntimeError) as error:  # what PyTorch refuses
        return "refused by torch", str(error)
    if check is None:
        return "left", ""
    try:
        # JAX adds NaN and infinities in another order.
        ordered = special and name in ("cumsum", "cumprod", "logcumsumexp")
        for found in check.run((OURS,) if ordered else (OURS, PLAIN)):
            check.judge(found)
        if check.gradient and x.dtype == torch.float64 and not special and x.numel():
            found, weights = gradient(check)
            given = x.requires_grad_()
            result = getattr(torch, name)(given, *sample.args, **sample.kwargs)
            result = result if torch.is_tensor(result) else result[0]
            (result * torch.as_tensor(weights)).sum().backward()
            np.testing.assert_allclose(np.reshape(found, given.shape), given.grad.numpy(), rtol=1e-7, atol=1e-9)
    except Exception as error:
        short = f"{type(error).__name__}: {error}"
        return "differs", short if isinstance(error, AssertionError) else traceback.format_exc()
    return "same", ""


if __name__ == "__main__":
    sys.exit(main())
