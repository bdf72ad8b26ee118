"""The fused softmax on several devices: what each computes.

    split along            what a device does with its part
    none of those below    the kernel
    the row                two messages of a few numbers a row, and XLA's operations, which read x twice; of a gradient
                           from the result one
    the queries, causal    XLA's operations, without a message; of a gradient from the result the kernel

An element is dropped, or beyond the causal limit, by its place in the whole array: the same ones on any number of
devices. A row that does not divide evenly is gathered, and so are the queries of a causal one.
"""

from jax import lax

from jaxkern import _fused_jnp

EXACT = {"row", "queries"}


def dims(rank: int, axis: int, causal: bool, arrays: int, extras):
    """Names for the dimensions of each operand and of the result, for partition.lower."""
    full = [f"d{d}" for d in range(rank)]
    full[axis] = "row"
    if causal:
        full[axis - 1] = "queries"
    return [*[full] * arrays, *([*full, "words"] if name == "key" else full for name in extras), full]


def shard(prim, over, *operands, **params):
    row, queries = over["row"], over.get("queries", ())
    if not row and not queries:
        return prim.bind(*operands, **params)
    x, axis = operands[0], params["axis"]
    if prim.name.endswith("_output_grad"):  # 0 beyond the limit, wherever that is
        return (_fused_jnp.output_gradient(*operands, over=row, **params) if row
                else prim.bind(*operands, **(params | {"causal": False})))

    def along(axes, size):
        return (lax.axis_index(axes) * size, lax.psum(1, axes) * size) if axes else (0, size)

    at = _fused_jnp.Place(*along(queries, x.shape[axis - 1] if axis else None), *along(row, x.shape[axis]))
    part = _fused_jnp.part_gradient if prim.name.endswith("_grad") else _fused_jnp.part_forward
    return part(at, row, *operands, **params)
