"""The one-read rule: one call that reads the logits once computes loss and gradient of `value_and_grad`.

A program made by `value_and_grad` computes the loss, then the gradient. If the cotangents of the loss do not depend on
its value (a mean or a weighted sum), they can be computed first. When the gradient is lowered, this rule moves the
operations that compute the cotangents before the call of the loss, and replaces both calls by one call of
`cross_entropy_both_p`.

The environment variable JAXKERN_ONE_READ=0, read whenever a gradient is lowered, turns the rule off.
"""

import re

from jax.extend.mlir import ir

from jaxkern._core import environment, partition, stablehlo

MOST_OPERATIONS = 200  # between the logits and a loss that are looked at


def maker(value):
    """The operation that `value` is a result of; None for an argument."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def gradient(loss_p, both_p, ctx, operands, params, lower):
    """Replaces the call of the loss by a call for loss and gradient; returns the gradient, or None if the rule does not apply.

    loss_p, both_p: the primitives of the loss, and of loss and gradient.
    operands, params: the operands and parameters of `cross_entropy_grad_p`, which is being lowered in `ctx`.
    lower(prim, ctx, operands, params): lowers a primitive at the insertion point and returns its results.
    """
    logits, labels, largest, _, weight, *rest = operands
    params = {name: value for name, value in params.items() if name != "given"} | ({"given": "mask"} if rest else {})
    forward = maker(stablehlo.behind(largest))
    if environment.read("JAXKERN_ONE_READ") == "0":
        return None
    if (
        forward is None
        or not _is_loss(loss_p, forward, params)
        or list(forward.operands) != [logits, labels, *rest[1:]]
    ):
        return None
    moved = _before(weight, forward)
    if moved is None:
        return None
    for operation in moved:
        operation.move_before(forward)
    rows = [ctx.avals_in[2]] * (3 + bool(rest))
    both = ctx.replace(
        avals_in=[ctx.avals_in[0], ctx.avals_in[1], ctx.avals_in[4], *ctx.avals_in[6:]],
        avals_out=[*rows, ctx.avals_out[0]],
    )
    with ir.InsertionPoint(forward), forward.location:
        *found, dx = lower(both_p, both, [logits, labels, weight, *rest[1:]], params)
    for old, new in zip(forward.results, found):
        old.replace_all_uses_with(new)  # leaves the call of the loss without uses
    return [dx]


def _is_loss(loss_p, operation, params):
    """Whether `operation` calls the kernel of the loss, or its partitioned function, with these parameters."""
    if operation.name == "stablehlo.custom_call":
        return ir.StringAttr(operation.attributes["call_target_name"]).value == loss_p.name
    if operation.name != "func.call":
        return False
    callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
    return re.fullmatch(partition.function_name(loss_p, params) + r"(_\d+)?", callee) is not None


def _before(value, barrier):
    """The operations that must move before `barrier`, in order, so that `value` is available there.

    None if one of them depends on `barrier`, is not plain arithmetic, or is in another block.
    """
    found = []

    def visit(value):
        operation = maker(value)
        if operation is None or operation in found:
            return True
        if operation.block != barrier.block:
            return False
        if operation != barrier and operation.is_before_in_block(barrier):
            return True
        # Control flow may use values that are not operands; a custom call may have an effect.
        unknown = ("stablehlo.custom_call", "stablehlo.while", "stablehlo.case", "stablehlo.if")
        plain = operation.name == "func.call" or (
            operation.name.startswith("stablehlo.") and operation.name not in unknown
        )
        if operation == barrier or not plain or len(found) > MOST_OPERATIONS or not all(map(visit, operation.operands)):
            return False
        found.append(operation)
        return True

    return found if visit(value) else None
