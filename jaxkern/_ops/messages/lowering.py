"""What runs messages: launch lists on CUDA, the reference elsewhere."""

from jax.interpreters import mlir

from jaxkern._core import compat
from jaxkern._core.define import lower_to_kernels
from jaxkern._ops.messages import plan, reference, sharding
from jaxkern._ops.messages.primitive import WIDTH, edge_map_p, edge_reduce_p, ordered_map_p, ordered_reduce_p


def _register(prim, ordered, in_jnp, ordered_plan, dims):
    mlir.register_lowering(ordered, mlir.lower_fun(in_jnp, multiple_results=True))
    compat.taylor_rule(prim, lambda *operands, **params: in_jnp(*operands[:WIDTH], *operands[2 * WIDTH :], **params))
    lower_to_kernels(ordered, ordered_plan, in_jnp, sharding.partitioned(ordered, dims))


_register(edge_reduce_p, ordered_reduce_p, reference.reduce_messages, plan.reduce_plan, sharding.of_reduce)
_register(edge_map_p, ordered_map_p, reference.map_messages, plan.map_plan, sharding.of_map)
