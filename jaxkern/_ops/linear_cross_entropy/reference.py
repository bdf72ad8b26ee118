"""Linear cross-entropy in chunks: XLA's matrix products, and the kernels of cross-entropy between them.

Every function takes h [*rows, d], a weight, labels [*rows] and perhaps a bias [vocabulary], or None, and works on the part of one
device. `Split` names the mesh axes that other parts lie along: sums over rows or classes then take a message.
"""

import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern._core.arrays import of_some
from jaxkern._core.define import size_of
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._ops.cross_entropy import reference as classes
from jaxkern._ops.cross_entropy import sharding as split_classes
from jaxkern._ops.cross_entropy.primitive import cross_entropy_both_p, cross_entropy_grad_p, cross_entropy_p
from jaxkern._ops.cross_entropy.reference import Options
from jaxkern._ops.linear_cross_entropy import plan


class Spec(typing.NamedTuple):
    """The constants of a linear cross-entropy.

    cap: the soft cap of the logits, 0 for none. transposed: the weight is [vocabulary, d]. precision: precision of the products.
    logits_dtype: the name of the type that logits are rounded to. memory: the budget in bytes, 0 for the default.
    algorithm: one of `plan.ALGORITHMS`, or "auto".
    """

    loss: Options
    cap: float
    transposed: bool
    precision: typing.Any
    logits_dtype: str
    memory: int
    algorithm: str


class Split(typing.NamedTuple):
    """The mesh axes that rows and classes are split over."""

    rows: tuple = ()
    classes: tuple = ()


WHOLE = Split()


def accumulating(dtype):
    """The type that products of operands of this type are added in."""
    return computing(dtype)


# ---- products


def _product(a, b, along_a, along_b, dtype, spec):
    """The product of two matrices, summed along a dimension of each."""
    dims = (((along_a,), (along_b,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=spec.precision, preferred_element_type=jnp.dtype(dtype))


def linear(h, weight, bias, spec):
    """The logits before the cap; h is of any rank."""
    z = _product(h, weight, h.ndim - 1, 1 if spec.transposed else 0, spec.logits_dtype, spec)
    return z if bias is None else z + bias.astype(z.dtype)


def _by_h(dz, weight, dtype, spec):
    return _product(dz, weight, dz.ndim - 1, 0 if spec.transposed else 1, dtype, spec)


def _by_weight(h, dz, dtype, spec):
    return _product(dz, h, 0, 0, dtype, spec) if spec.transposed else _product(h, dz, 0, 0, dtype, spec)


def _capped(z, spec):
    if not spec.cap:
        return z
    return (spec.cap * jnp.tanh(z.astype(computing(z.dtype)) / spec.cap)).astype(z.dtype)


def _uncapped(dlogits, z, spec):
    """The gradient by z from the gradient by the capped logits.

    The derivative of tanh is computed from z in another way than the logits, which the gradient overwrites: one that uses
    their values would keep a second copy of them.
    """
    if not spec.cap:
        return dlogits
    x = z.astype(computing(z.dtype)) / spec.cap
    return (dlogits.astype(x.dtype) / jnp.cosh(x) ** 2).astype(dlogits.dtype)


# ---- the operands of a call


class _Head:
    """A weight and what comes with it, as the products take it: in the type of h and of a padded width."""

    def __init__(self, h, weight, bias, spec, split):
        self.spec, self.split = spec, split
        self.weight_dtype, self.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        # The type that a product for the weight's gradient is rounded to.
        wide = accumulating(h.dtype)
        self.rounded = weight.dtype if weight.dtype in (h.dtype, wide) else wide
        self.vocabulary = weight.shape[0 if spec.transposed else 1]
        self.width = plan.padded(self.vocabulary, h.dtype) if isinstance(self.vocabulary, int) else self.vocabulary
        if split.classes:  # labels find their device by the true width
            self.width = self.vocabulary
        self.weight, self.bias = weight.astype(h.dtype), bias
        self.mask = None
        if self.width != self.vocabulary:
            more = (0, self.width - self.vocabulary)
            self.weight = jnp.pad(self.weight, (more, (0, 0)) if spec.transposed else ((0, 0), more))
            self.bias = None if bias is None else jnp.pad(bias, (more,))
            self.valid = jnp.arange(self.width)[None] < self.vocabulary
            # The mean over classes of label smoothing needs the mask. Without it the padding is -inf, and the kernels that
            # read logits once take them.
            self.mask = self.valid if spec.loss.smoothing else None

    def labels(self, labels):
        """Labels that name a column of the padding name none."""
        if self.width == self.vocabulary:
            return labels
        labels = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels
        info, ignored = jnp.iinfo(labels.dtype), self.spec.loss.ignore
        known = labels < jnp.asarray(self.vocabulary, labels.dtype)
        if ignored is not None and int(info.min) <= ignored <= int(info.max):
            known |= labels == jnp.asarray(ignored, labels.dtype)
        none = next(n for n in (int(info.max), int(info.max) - 1) if n != ignored)
        return jnp.where(known, labels, jnp.asarray(none, labels.dtype))

    def filled(self, logits):
        """The logits with -inf in the padding; XLA writes that in place."""
        if self.width == self.vocabulary or self.mask is not None:
            return logits
        padding = jnp.full((logits.shape[0], self.width - self.vocabulary), -jnp.inf, logits.dtype)
        return _put(logits, padding, self.vocabulary, 1)

    def columns(self, start, size):
        """(weight, bias) of some columns."""
        axis = 0 if self.spec.transposed else 1
        take = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        return take(self.weight, axis=axis), None if self.bias is None else take(self.bias)

    def loss(self, logits, labels):
        """(loss, largest, total, ...) per row."""
        params = {"axis": 1, "algorithm": "auto", "options": self.spec.loss}
        if self.split.classes:
            return split_classes.loss(cross_entropy_p, self.split.classes, logits, labels, **params)
        return bind(cross_entropy_p, self.filled(logits), labels, self.mask, **params)

    def both(self, logits, labels, c):
        """(loss, largest, total, gradient by the logits)."""
        params = {"axis": 1, "algorithm": "auto", "options": self.spec.loss}
        if self.split.classes:
            found = split_classes.both(
                cross_entropy_p, cross_entropy_grad_p, self.split.classes, logits, labels, c, **params
            )
        else:
            found = bind(cross_entropy_both_p, self.filled(logits), labels, c, self.mask, **params)
        return *found[:3], found[-1]

    def slopes(self, logits, labels, largest, total, first=0, weights=None):
        """The gradient of sum(weights * loss) by the logits of columns beginning at `first`, 0 where it vanishes by definition."""
        count = self.vocabulary
        if self.split.classes:
            first, count = first + lax.axis_index(self.split.classes) * count, lax.psum(1, self.split.classes) * count
        per_row = (a[:, None] for a in (largest, total))
        weights = None if weights is None else weights[:, None]
        slope, live = classes.slopes(logits, labels, *per_row, count, None, 1, self.spec.loss, first, count, weights)
        return jnp.where(live, slope, 0)

    def sum_classes(self, x):
        return lax.psum(x, self.split.classes) if self.split.classes else x

    def sum_rows(self, x):
        return lax.psum(x, self.split.rows) if self.split.rows else x

    def results(self, h, dh, dw, db):
        """The gradients that there are, of the types of the operands."""
        if dw is not None:
            dw = lax.slice_in_dim(dw, 0, self.vocabulary, axis=0 if self.spec.transposed else 1)
        if db is not None:
            db = db[: self.vocabulary].astype(self.bias_dtype)
        dh = None if dh is None else dh.reshape(h.shape)
        return [a for a in (dh, None if dw is None else dw.astype(self.weight_dtype), db) if a is not None]


def problem(h, weight, spec, which) -> plan.Problem | None:
    """The problem that `plan` cuts into chunks; None for symbolic or empty shapes."""
    sizes = (*h.shape, *weight.shape)
    if not all(isinstance(n, int) and n for n in sizes):
        return None
    vocabulary = weight.shape[0 if spec.transposed else 1]
    return plan.Problem(
        size_of(h.shape[:-1]),
        h.shape[-1],
        vocabulary,
        h.dtype.name,
        weight.dtype.name,
        spec.logits_dtype,
        which,
        spec.memory,
        bool(spec.cap),
    )


def which_of(wanted) -> str:
    """The field `which` of a problem. wanted: whether the gradients of h, weight and bias are."""
    if not any(wanted):
        return "loss"
    return "both" if wanted[0] and wanted[1] else "weight" if wanted[1] else "h"


def _chunks(h, weight, spec, wanted) -> plan.Chunks:
    asked = problem(h, weight, spec, which_of(wanted))
    if asked is None:
        return plan.Chunks("whole", size_of(h.shape[:-1]))
    algorithm = spec.algorithm
    if algorithm == "vocabulary" and not wanted[1]:
        algorithm = "rows"
    return plan.chunks(asked, algorithm)


def _in_chunks(body, carry, whole, size, start=0):
    """Applies body(start, size, carry) to chunks of `size` of the range from start to whole; the first one may be smaller.

    An empty range is one empty chunk, so that the body makes zeros of what it sums.
    """
    if not isinstance(whole, int) or whole - start <= size:
        return body(start, whole - start, carry)
    count = -(-(whole - start) // size) - 1
    first = whole - start - count * size
    carry = body(start, first, carry)
    return lax.fori_loop(0, count, lambda i, carry: body(start + first + i * size, size, carry), carry)


def _rows_of(h):
    """h with one dimension of rows. Their number is given, since a reshape to -1 fails where the width is 0."""
    return h.reshape(size_of(h.shape[:-1]), h.shape[-1])


def _put(whole, part, start, axis=0):
    return lax.dynamic_update_slice_in_dim(whole, part, start, axis)


# ---- the loss


def loss(h, weight, labels, bias=None, *, spec, split=WHOLE):
    """The loss per row."""
    head = _Head(h, weight, bias, spec, split)
    r = _chunks(h, weight, spec, (False,) * 3).rows
    flat, at = _rows_of(h), head.labels(labels).reshape(-1)

    def body(start, size, value):
        rows, of_rows = (lax.dynamic_slice_in_dim(a, start, size) for a in (flat, at))
        found = head.loss(_capped(linear(rows, head.weight, head.bias, spec), spec), of_rows)[0]
        return _put(value, found, start)

    value = jnp.zeros(at.shape, computing(jnp.dtype(spec.logits_dtype)))
    return _in_chunks(body, value, flat.shape[0], r).reshape(labels.shape)


def tangent(h, weight, labels, bias=None, th=None, tw=None, tb=None, *, spec, split=WHOLE):
    """The derivative of the loss per row, along tangents of h, weight and bias."""
    head = _Head(h, weight, bias, spec, split)
    if tw is not None or tb is not None:
        towards = _Head(h, jnp.zeros_like(weight) if tw is None else tw, tb, spec, split)
    r = max(1, _chunks(h, weight, spec, (False,) * 3).rows // 2) if isinstance(h.size, int) else h.shape[0]
    flat, at = _rows_of(h), head.labels(labels).reshape(-1)
    th = None if th is None else th.reshape(flat.shape)

    def body(start, size, value):
        take = lambda a: lax.dynamic_slice_in_dim(a, start, size)
        rows, of_rows = take(flat), take(at)
        z = linear(rows, head.weight, head.bias, spec)
        logits = _capped(z, spec)
        _, largest, total, *_ = head.loss(logits, of_rows)
        tz = 0 if th is None else linear(take(th), head.weight, None, spec).astype(total.dtype)
        if tw is not None:
            tz = tz + linear(rows, towards.weight, towards.bias, spec).astype(total.dtype)
        elif tb is not None:
            tz = tz + towards.bias.astype(total.dtype)
        slope = _uncapped(head.slopes(logits, of_rows, largest, total), z, spec)
        if head.width != head.vocabulary:
            slope = jnp.where(head.valid, slope, 0)
        return _put(value, head.sum_classes(jnp.sum(slope * tz, 1)), start)

    value = jnp.zeros(at.shape, computing(jnp.dtype(spec.logits_dtype)))
    return _in_chunks(body, value, flat.shape[0], r).reshape(labels.shape)


# ---- loss and gradients


def both(h, weight, labels, c, bias=None, *, spec, wanted, split=WHOLE):
    """The loss per row, and the gradients of sum(c * loss) by the arrays in `wanted`, of h, weight and bias."""
    chunks = _chunks(h, weight, spec, wanted)
    run = _by_columns if chunks.algorithm == "vocabulary" else _by_rows
    head = _Head(h, weight, bias, spec, split)
    flat = _rows_of(h)
    value, *gradients = run(head, flat, head.labels(labels).reshape(-1), c.reshape(-1), wanted, chunks)
    return [value.reshape(labels.shape), *head.results(h, *gradients)]


def gradient(*operands, **params):
    return both(*operands, **params)[1:]


def _gradient_of_rows(head, dz, dtype):
    """The gradient of h from the gradients of the logits, summed over devices that have other classes."""
    if not head.split.classes:
        return _by_h(dz, head.weight, dtype, head.spec)
    return head.sum_classes(_by_h(dz, head.weight, accumulating(dtype), head.spec)).astype(dtype)


def _by_rows(head, h, labels, c, wanted, chunks):
    """The algorithms `rows` and `whole`."""
    spec, wide = head.spec, accumulating(h.dtype)
    several = isinstance(h.shape[0], int) and chunks.rows < h.shape[0]
    # A sum over chunks or devices is rounded once, at its end.
    dtype = wide if several or head.split.rows else head.rounded

    def body(start, size, carry):
        value, dh, dw, db = carry
        rows, at, weights = (lax.dynamic_slice_in_dim(a, start, size) for a in (h, labels, c))
        z = linear(rows, head.weight, head.bias, spec)
        found, _, _, dlogits = head.both(_capped(z, spec), at, weights)
        dz = _uncapped(dlogits, z, spec)
        value = _put(value, found, start)
        if wanted[2]:
            db = _plus(db, jnp.sum(dz, 0, dtype=wide))
        dz = dz.astype(h.dtype)
        if wanted[0]:
            dh = _put(dh, _gradient_of_rows(head, dz, h.dtype), start)
        if wanted[1]:
            dw = _plus(dw, _by_weight(rows, dz, dtype, spec))
        return value, dh, dw, db

    carry = (jnp.zeros(labels.shape, c.dtype), jnp.zeros_like(h) if wanted[0] else None, None, None)
    value, dh, dw, db = _in_chunks(body, carry, h.shape[0], chunks.rows)
    return value, dh, *(None if a is None else head.sum_rows(a) for a in (dw, db))


def _plus(total, part):
    return part if total is None else total + part


def _by_columns(head, h, labels, c, wanted, chunks):
    """The algorithm `vocabulary`."""
    spec, wide, kept = head.spec, accumulating(h.dtype), chunks.kept

    def by_rows(start, size, carry):
        value, largest, total, dh, stored = carry
        rows, at, weights = (lax.dynamic_slice_in_dim(a, start, size) for a in (h, labels, c))
        z = linear(rows, head.weight, head.bias, spec)
        *found, dlogits = head.both(_capped(z, spec), at, weights)
        value, largest, total = (_put(a, b, start) for a, b in zip((value, largest, total), found))
        dz = _uncapped(dlogits, z, spec).astype(h.dtype)
        if wanted[0]:
            dh = _put(dh, _gradient_of_rows(head, dz, h.dtype), start)
        return value, largest, total, dh, _put(stored, dz[:, :kept], start)

    per_row = [jnp.zeros(labels.shape, c.dtype)] * 3
    carry = (*per_row, jnp.zeros_like(h) if wanted[0] else None, jnp.zeros((h.shape[0], kept), h.dtype))
    value, largest, total, dh, stored = _in_chunks(by_rows, carry, h.shape[0], chunks.rows)

    def of_weight(dz):
        if not head.split.rows:
            return _by_weight(h, dz, head.rounded, spec)
        return head.sum_rows(_by_weight(h, dz, wide, spec)).astype(head.rounded)

    def by_columns(start, size, carry):
        dw, db = carry
        weight, bias = head.columns(start, size)
        z = linear(h, weight, bias, spec)
        slope = head.slopes(_capped(z, spec), labels, largest, total, start, c)
        dz = _uncapped(slope.astype(z.dtype), z, spec).astype(h.dtype)
        if wanted[2]:
            db = _put(db, head.sum_rows(jnp.sum(dz, 0, dtype=wide)), start)
        return _put(dw, of_weight(dz), start, 0 if spec.transposed else 1), db

    dw, db = of_weight(stored), head.sum_rows(jnp.sum(stored, 0, dtype=wide)) if wanted[2] else None
    if kept < head.width:
        # The stored columns are done with before the others begin, so that these take their memory.
        more = (0, head.width - kept)
        dw = jnp.pad(dw, (more, (0, 0)) if spec.transposed else ((0, 0), more))
        db = None if db is None else jnp.pad(db, (more,))
        dw, db = _in_chunks(by_columns, (dw, db), head.width, chunks.columns, kept)
    return value, dh, dw, db


# ---- the composition, for derivatives of higher order


def plain(h, weight, labels, bias=None, *, spec):
    """The loss per row from all logits at once; differentiable to any order."""
    z = linear(h, weight.astype(h.dtype), bias, spec)
    params = {"axis": z.ndim - 1, "algorithm": "auto", "options": spec.loss}
    return bind(cross_entropy_p, _capped(z, spec), labels, **params)[0]


def plain_gradient(h, weight, labels, c, bias=None, *, spec, wanted):
    """The gradients of sum(c * plain)."""
    operands = (h, weight, labels, bias)
    at = [k for k, w in zip((0, 1, 3), wanted) if w]
    f = of_some(functools.partial(plain, spec=spec), operands, at)
    return list(jax.vjp(f, *(operands[k] for k in at))[1](c))
