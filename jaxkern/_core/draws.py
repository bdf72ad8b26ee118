"""Random bits in jnp and in kernels: the same bits as ffi/kernels/common/philox.h.

Philox4x32-7 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011, keyed with 64 bits:
the variant with the fewest rounds that passes their tests (BigCrush). The 16 bits of an element depend on the key, the
number of its row and its place in the row: block (place / 8, row) of the key's sequence holds the words of eight neighbours.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

ROUNDS = 7


def _product(constant: int, x):
    """The high and the low word of the 64-bit product constant * x."""
    low, high = jnp.uint32(constant & 0xFFFF), jnp.uint32(constant >> 16)
    x_low, x_high = x & 0xFFFF, x >> 16
    middle = high * x_low + (low * x_low >> 16)
    other = low * x_high + (middle & 0xFFFF)
    return high * x_high + (middle >> 16) + (other >> 16), jnp.uint32(constant) * x


def philox(counter, key):
    """Four random words from four words of counter and two of key, each an array of uint32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = _product(0xD2511F53, c0), _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(0x9E3779B9), k1 + jnp.uint32(0xBB67AE85)
    return c0, c1, c2, c3


def words(block, row, key):
    """The four words of blocks of eight elements, by their numbers in the row and the number of the row."""
    zero = jnp.zeros((), jnp.uint32)
    return philox((block, row, zero, zero), key)


def _draw(place, row, key0, key1):
    a, b, c, d = words(place >> 3, row, (key0, key1))
    word = jnp.where(place & 4 != 0, jnp.where(place & 2 != 0, d, c), jnp.where(place & 2 != 0, b, a))
    return jnp.where(place & 1 != 0, word >> 16, word & 0xFFFF)


# The 16 bits, as uint32, of elements at these places of these rows; operands of uint32 of one rank, which broadcast. Each
# element computes its block, which elements of a pack share in kernels.
draw_p = Primitive("draw")
# The same for an element of a pack: (place, place of the first element of the pack, row, key0, key1).
draw_in_pack_p = Primitive("draw_in_pack")
for _prim in (draw_p, draw_in_pack_p):
    _prim.def_abstract_eval(
        lambda *xs: jax.core.ShapedArray(jax.lax.broadcast_shapes(*(x.shape for x in xs)), jnp.dtype(jnp.uint32))
    )


@functools.partial(batching.primitive_batchers.__setitem__, draw_p)
def _batch(operands, dims):
    return draw_p.bind(*(x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims))), 0


draw_p.def_impl(jax.jit(_draw))
mlir.register_lowering(draw_p, mlir.lower_fun(_draw, multiple_results=False))
