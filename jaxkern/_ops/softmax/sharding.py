"""The fused softmax on several devices.

    split along            what each device does with its part
    anything else          the kernel
    the row                XLA's operations, which read x twice, and a message of a few numbers per row; also one for
                           the gradient from the result
    the queries, causal    XLA's operations, without a message; the kernel for the gradient from the result

Dropout and the causal limit depend on the position in the whole array, so that the result is the same on any number of
devices. Rows, and queries of a causal softmax, that do not divide evenly are gathered.
"""

from jax import lax

from jaxkern._ops.softmax import reference

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
    params = {k: v for k, v in params.items() if k != "replaced"}
    if prim.name.endswith("_output_grad"):  # 0 beyond the limit, wherever that is
        return (
            reference.fused_output_grad(*operands, over=row, **params)
            if row
            else prim.bind(*operands, **(params | {"causal": False}))
        )

    def along(axes, size):
        return (lax.axis_index(axes) * size, lax.psum(1, axes) * size) if axes else (0, size)

    at = reference.Place(*along(queries, x.shape[axis - 1] if axis else None), *along(row, x.shape[axis]))
    part = reference.part_of_fused_grad if prim.name.endswith("_grad") else reference.part_of_fused
    return part(at, row, *operands, **params)
