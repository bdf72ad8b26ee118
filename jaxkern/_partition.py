"""Sharding of a row operation: what XLA is told so that sharded rows stay where they are.

A target registered as batch partitionable may be run on a slice of its leading dimensions. How many
of them are such batch dimensions stands in an attribute, and again in a Shardy rule.
"""

from jax.extend.mlir import ir

from jaxkern import _compat


def batch_dims(shapes, axis: int) -> int:
    """Leading dimensions before `axis` that every operand has in full, so that they may be split."""
    k = 0
    while k < axis and all(shape[k] == shapes[0][k] for shape in shapes):
        k += 1
    return k


def sharding_rule(inputs, outputs, batch: int) -> str:
    """Shardy's rule in its own syntax: the batch dimensions are shared, each other one is its own.

    >>> sharding_rule([(8, 16)], [(8, 16)], 1)
    '#sdy.op_sharding_rule<([i, j])->([i, k]) {i=8, j=16, k=16}, custom>'
    """
    sizes = []

    def factor(size):
        sizes.append(size)
        k = len(sizes) - 1
        return chr(ord("i") + k) if k < 18 else f"z_{k - 17}"

    shared = [factor(size) for size in inputs[0][:batch]]

    def dims(shapes):
        return ", ".join(f"[{', '.join(shared + [factor(s) for s in shape[batch:]])}]" for shape in shapes)

    left, right = dims(inputs), dims(outputs)
    names = [chr(ord("i") + k) if k < 18 else f"z_{k - 17}" for k in range(len(sizes))]
    table = ", ".join(f"{name}={size}" for name, size in zip(names, sizes))
    return f"#sdy.op_sharding_rule<({left})->({right}) {{{table}}}, custom>"


def attributes(inputs, outputs, axis: int):
    """Attributes of the custom call for operands and results of these shapes, or None."""
    batch = batch_dims(inputs, axis)
    if batch == 0 or not all(isinstance(d, int) for shape in (*inputs, *outputs) for d in shape):
        return None
    number = ir.DictAttr.get({"num_batch_dims": ir.StringAttr.get(str(batch))})
    extra = {"mhlo.frontend_attributes": number}
    if _compat.shardy():
        extra["sdy.sharding_rule"] = ir.Attribute.parse(sharding_rule(inputs, outputs, batch))
    return extra
