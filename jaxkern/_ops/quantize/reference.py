"""Quantisation of the tiles of a matrix and its transpose in jnp: what the kernel computes. mark: see _definitions/quantize.py."""

import jax.numpy as jnp

from jaxkern._definitions.quantize import given_factor, largest_of, rounded, scale_of, scaled


def quantize_tiles(x, given=None, *, dtype, mark=None):
    """(q, q_t, scale, scale_t) of x [..., M, 128, N, 128], matrices of M by N tiles.

    q like x, q_t [..., N, 128, M, 128], its transpose; scale [..., M, 128, N], one for 128 neighbours of a row, and scale_t
    [..., N, 128, M]. given: a scale for all, float32 []; then (q, q_t, max|x| of each tile [..., M, N]).
    """
    wide = x.astype(jnp.float32)
    turned = lambda a: jnp.moveaxis(a, (-4, -3), (-2, -1))
    if given is not None:
        q = rounded(wide * given_factor(given), dtype, mark)
        return [q, turned(q), largest_of(wide, (-3, -1), mark=mark)[..., 0, :, 0]]
    of_rows, of_columns = (largest_of(wide, axis, mark=mark) for axis in (-1, -3))
    q, turned_q = (scaled(wide, most, dtype, mark) for most in (of_rows, of_columns))
    scale_t = turned(scale_of(of_columns, dtype))
    return [q, turned(turned_q), scale_of(of_rows, dtype)[..., 0], scale_t[..., 0]]
